"""JSON Schema as data: check a value, explain what is wrong with it, cast it so that it fits."""

from operations.schema.document import CompiledSchema, Schema, from_schema
from operations.schema.results import CastResult, Repair, ValueFault
from operations.schema.validation import (
    assert_is_schema,
    collect_errors,
    format_value_errors,
    validate_or_raise,
)

__all__ = [
    "CastResult",
    "CompiledSchema",
    "Repair",
    "Schema",
    "ValueFault",
    "assert_is_schema",
    "collect_errors",
    "format_value_errors",
    "from_schema",
    "validate_or_raise",
]
