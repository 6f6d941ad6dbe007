"""The size a document may have: it is JSON, neither too large nor too deep."""

from typing import Any

from msgspec import to_builtins

from operations._json import JSONValueError, as_json, count_values
from operations.errors import SchemaError
from operations.types import JSONSchema

MAX_SCHEMA_DEPTH = 128
"""How deep the document itself may nest."""

MAX_SCHEMA_VALUES = 100_000
"""How many JSON values the document may hold."""


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
