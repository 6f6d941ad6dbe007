"""JSON Schema as data: check a value, explain its errors, cast it to match the schema."""

from operations.schema.casting import (
    NOT_NORMALISED,
    CastPolicy,
    Normalise,
    as_json_within,
    within_budget,
)
from operations.schema.casting.changes import MAX_MESSAGE, MAX_PATH, CastResult, Change, ChangeKind
from operations.schema.checking import SharedDefinitions
from operations.schema.document import (
    CompiledSchema,
    Schema,
    assert_is_schema,
    collect_errors,
    format_value_errors,
    from_schema,
    validate_or_raise,
)
from operations.schema.explain import ValidationIssue, invalid_json, mismatch_error
from operations.schema.python import converter_for, schema_for
from operations.schema.python.forms import CheckedForm, CheckedInput, Place, digest_of
from operations.schema.python.shapes import ConversionError
from operations.schema.python.signatures import Signature, signature_of

__all__ = [
    "MAX_MESSAGE",
    "MAX_PATH",
    "NOT_NORMALISED",
    "CastPolicy",
    "CastResult",
    "Change",
    "ChangeKind",
    "CheckedForm",
    "CheckedInput",
    "CompiledSchema",
    "ConversionError",
    "Normalise",
    "Place",
    "Schema",
    "SharedDefinitions",
    "Signature",
    "ValidationIssue",
    "as_json_within",
    "assert_is_schema",
    "collect_errors",
    "converter_for",
    "digest_of",
    "format_value_errors",
    "from_schema",
    "invalid_json",
    "mismatch_error",
    "schema_for",
    "signature_of",
    "validate_or_raise",
    "within_budget",
]
