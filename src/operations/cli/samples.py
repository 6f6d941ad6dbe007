"""A call to copy: an input that is valid, as one would type it.

Rule: what is shown works. A value that the schema refuses, or that would be read as another one, is not shown.
"""

import shlex
from collections.abc import Iterator
from typing import Any, cast

from operations._json import list_of
from operations.cli.inputs import read_input
from operations.cli.render import encoded
from operations.errors import CallError, SchemaError
from operations.front.limits import Limits
from operations.schema import Schema
from operations.schema.outline import Outline
from operations.specs import OperationSpec
from operations.types import JSONObject

_DEPTH = 6
_NULL = frozenset({"null"})
_FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "PT1H",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
    "email": "someone@example.com",
    "uri": "https://example.com",
    "url": "https://example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "byte": "aGVsbG8=",
    "base64": "aGVsbG8=",
}


def example(spec: OperationSpec, hints: str = "") -> str:
    """A call of an operation with what is required; with dots where no valid input is known.

    Args:
        spec: Of the operation.
        hints: Options that are needed to find it again, with a space before them.
    """
    outline, command = Outline.of(spec.input_schema), f"operations call{hints} {spec.id}"
    if _takes_nothing(spec.input_schema):
        return command
    value = _valid(spec.input_schema, outline)
    if value is None:
        return " ".join([command, *(f"{name}=..." for name in outline.required)])
    return f"{command} {as_typed(value, outline)}"


def as_typed(value: Any, outline: Outline) -> str:
    """An input as one would type it: pairs where they are read as it, else JSON."""
    if isinstance(value, dict):
        arguments = list(_pairs(cast("JSONObject", value), ""))
        if _reads_as(arguments, outline, cast("JSONObject", value)):
            return shlex.join(arguments)
    return shlex.quote(encoded(value))


def _takes_nothing(schema: Schema) -> bool:
    try:
        return schema.check({}) or schema.check(None)
    except SchemaError:
        return False


def _valid(schema: Schema, outline: Outline) -> Any:
    """An input with what is required; None where none is found."""
    value = sample(outline)
    try:
        if schema.check(value):
            return value
        created = schema.cast(value, "create").value
        return created if schema.check(created) else None
    except (SchemaError, ValueError):
        return None


def sample(outline: Outline, depth: int = _DEPTH) -> Any:
    """A value such as a schema wants, by its looks."""
    schema = outline.schema
    if "default" in schema and schema["default"] is not None:
        return schema["default"]
    if examples := list_of(schema.get("examples")):
        return examples[0]
    if outline.choices:
        return outline.choices[0]
    members = [member for member in outline.members if member.types != _NULL]
    if members and depth > 0:
        return sample(members[0], depth - 1)
    types = outline.types
    if outline.properties or "object" in types:
        return _object(outline, depth)
    if "array" in types:
        return _array(outline, depth)
    return _scalar(schema, types)


def _object(outline: Outline, depth: int) -> JSONObject:
    if depth <= 0:
        return {}
    properties = outline.properties
    return {name: sample(properties.get(name, Outline({})), depth - 1) for name in outline.required}


def _array(outline: Outline, depth: int) -> list[Any]:
    if depth <= 0:
        return []
    if first := list_of(outline.schema.get("prefixItems")):
        return [sample(outline.inner(each), depth - 1) for each in first]
    count = min(max(1, outline.schema.get("minItems", 1)), 3)
    return [sample(outline.items, depth - 1) for _ in range(count)]


def _scalar(schema: JSONObject, types: frozenset[str]) -> Any:
    if types & {"integer", "number"}:
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is None and "exclusiveMinimum" in schema:
            low = schema["exclusiveMinimum"] + 1
        found = low if low is not None and low > 1 else 1
        return high if high is not None and high < found else found
    if "boolean" in types:
        return True
    if types == _NULL:
        return None
    form: Any = schema.get("format")
    text = _FORMATS.get(form, "text")
    return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]


def _pairs(value: JSONObject, prefix: str) -> Iterator[str]:
    """`value` as `key=value`, objects by dots, lists by repetition."""
    for key, inner in value.items():
        name, items = f"{prefix}{key}", list_of(inner)
        if isinstance(inner, dict) and inner:
            yield from _pairs(cast("JSONObject", inner), f"{name}.")
        elif items and all(isinstance(each, str) for each in items):
            yield from (f"{name}={each}" for each in items)
        elif isinstance(inner, str):
            yield f"{name}={inner}"
        elif isinstance(inner, (bool, int, float)):
            yield f"{name}={encoded(inner)}"
        else:
            yield f"{name}:={encoded(inner)}"


def _reads_as(arguments: list[str], outline: Outline, value: JSONObject) -> bool:
    try:
        return bool(read_input(arguments, outline, Limits()) == value)
    except CallError:
        return False
