"""Asking a schema about a value: as a list, as an exception, as text."""

from collections.abc import Iterable
from typing import Any

from operations._text import printable
from operations.errors import ErrorCode
from operations.schema.document import Schema
from operations.schema.reading.checking import Checker
from operations.schema.results import ValidationIssue, misfit
from operations.types import JSONSchema


def collect_errors(schema: Schema | JSONSchema, value: Any) -> list[ValidationIssue]:
    """Every failure of `value`, with its place; empty when it is valid.

    Raises:
        SchemaError: If the schema cannot be compiled.
    """
    return _schema(schema).errors(value)


def validate_or_raise(schema: Schema | JSONSchema, value: Any, *, subject: str = "value") -> None:
    """Let a valid value through.

    Args:
        schema: What to hold the value against.
        value: Any Python value.
        subject: What the message calls the value.

    Raises:
        CallError: With code `VALIDATION_ERROR`; its details name every failing path.
        SchemaError: If the schema cannot be compiled.
    """
    faults = _schema(schema).errors(value)
    if not faults:
        return
    raise misfit(ErrorCode.VALIDATION_ERROR, f"Invalid {subject}", faults)


def format_value_errors(errors: Iterable[ValidationIssue], indent: str = "  ") -> str:
    """One line per failure, for logs. Control characters in names are escaped."""
    lines = (
        f"{indent}{printable(fault.path) or '(the value)'} {printable(fault.message)}"
        for fault in errors
    )
    return "\n".join(lines)


def assert_is_schema(document: Any) -> None:
    """Raise an error unless `document` is a `Schema`, or a JSON Schema that this package can use.

    Raises:
        SchemaError: Names the place.
    """
    Checker(document.document if isinstance(document, Schema) else document)


def _schema(schema: Schema | JSONSchema) -> Schema:
    return schema if isinstance(schema, Schema) else Schema(schema)
