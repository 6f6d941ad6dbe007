"""Compile a schema with jsonschema-rs: formats are annotations, nothing is fetched, patterns are bounded."""

from collections.abc import Callable
from typing import Any

import jsonschema_rs
from msgspec import to_builtins

from operations._json import JSONValueError, as_json, count_values, pointer
from operations.errors import SchemaError
from operations.schema.reading.dialects import Dialect
from operations.schema.reading.patterns import FANCY, LINEAR
from operations.types import JSONSchema

MAX_SCHEMA_DEPTH = 128
"""How deep the document itself may nest."""

MAX_SCHEMA_VALUES = 100_000
"""How many JSON values the document may hold."""

_MAX_MESSAGE = 300


def compile_schema(
    schema: JSONSchema,
    dialect: Dialect,
    *,
    fancy: bool,
    registry: jsonschema_rs.Registry | None = None,
    keywords: dict[str, type[Any]] | None = None,
) -> Callable[[Any], bool]:
    """Return the test whether a JSON value is valid.

    Args:
        schema: The schema, its patterns bounded.
        dialect: The dialect to read it in.
        fancy: Whether some pattern needs the back-tracking engine.
        registry: Other documents that it refers to.
        keywords: Further keywords.

    Raises:
        SchemaError: Naming the place, if it is no JSON Schema.
    """
    try:
        return dialect.validator(
            schema,
            pattern_options=FANCY if fancy else LINEAR,
            registry=registry,
            keywords=keywords,
            validate_formats=False,
            offline=True,
        ).is_valid
    except jsonschema_rs.ValidationError as error:
        inner = _innermost(error)
        place = "".join(map(pointer, inner.instance_path)) or "the schema"
        raise SchemaError(f"{place}: {_shortened(inner.message)}") from None
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise SchemaError(f"the schema cannot be compiled: {_shortened(str(error))}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        # The validator gave up in a way that no `except Exception` sees.
        raise SchemaError("the schema cannot be compiled") from None


def _innermost(error: jsonschema_rs.ValidationError) -> jsonschema_rs.ValidationError:
    """Of what a meta-schema says about alternatives, the failure deepest in the document."""
    alternatives: list[list[jsonschema_rs.ValidationError]] = getattr(error.kind, "context", [])
    inner = [each for alternative in alternatives for each in alternative]
    deepest = max(inner, key=lambda each: len(each.instance_path), default=error)
    if len(deepest.instance_path) <= len(error.instance_path):
        return error
    return _innermost(deepest)


def _shortened(message: str) -> str:
    """Return a message that may repeat what was wrong, however long that was."""
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 3] + "..."


def measured(document: Any) -> JSONSchema:
    """Return a copy of a document that is JSON and not too large.

    Raises:
        SchemaError: Naming the place.
    """
    if not isinstance(document, (dict, bool)):
        raise SchemaError("a schema is an object, true or false")
    if count_values(document, MAX_SCHEMA_VALUES) > MAX_SCHEMA_VALUES:
        raise SchemaError(f"the schema holds more than {MAX_SCHEMA_VALUES:,} values")
    try:
        copy: JSONSchema = to_builtins(as_json(document, MAX_SCHEMA_DEPTH))
    except JSONValueError as error:
        raise SchemaError(f"{error.path or 'the schema'} {error.reason}") from None
    return copy
