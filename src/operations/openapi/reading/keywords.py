"""Convert single keywords of older or incorrect schemas to JSON Schema 2020-12. All functions are pure.

Rule: unusable values become None, and their keywords are omitted.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from operations.base.json.values import (
    MAX_DEPTH,
    JSONValueError,
    is_list,
    is_object,
    kind_of,
    list_of,
    text_of,
    to_json,
)
from operations.base.types import JSONObject, JSONSchema
from operations.schema.values import conversions, has_type

_REGEX_LITERAL = re.compile(r"/(\^.*|.*(?<!\\)\$)/([a-z]*)")

BASE64: JSONObject = {"type": "string", "contentEncoding": "base64"}
"""The schema of bytes in JSON."""


def _file_schema(about: str, **others: JSONObject) -> JSONObject:
    """Return the schema of a file: base64, or an object with its content from one of several sources."""
    text = {"type": "string", "description": "Instead of content: text to send as UTF-8."}
    sources: JSONObject = {"content": BASE64, "text": text, **others}
    names = {"filename": {"type": "string"}, "contentType": {"type": "string"}}
    described = {
        "type": "object",
        "properties": {**sources, **names},
        "oneOf": [{"required": [source]} for source in sources],
        "additionalProperties": False,
    }
    return {"description": about, "anyOf": [BASE64, described]}


FILE_SCHEMA = _file_schema("A file: its bytes in base64, or an object that also has its name.")
"""The schema of a file in an operation's input."""

ROOTED_FILE_SCHEMA = _file_schema(
    "A file: its bytes in base64, or an object that also has its name or a path on the server.",
    path={
        "type": "string",
        "minLength": 1,
        "description": "Instead of content: the relative path of a file to send.",
    },
)
"""The same, if the caller may name files below a folder."""

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_MISSPELLED = {
    "any": None, "bool": "boolean", "date": "string", "date-time": "string", "datetime": "string",
    "dict": "object", "double": "number", "file": "string", "float": "number", "int": "integer",
    "int32": "integer", "int64": "integer", "list": "array", "long": "integer", "map": "object",
    "str": "string", "text": "string", "uuid": "string",
}  # fmt: skip


def is_file(schema: JSONObject) -> bool:
    """Return whether a schema in a request that is not JSON describes bytes rather than text."""
    kind = schema.get("type")
    if kind == "file":
        return True
    if kind not in (None, "string") and set(map(str, list_of(kind))) != {"string", "null"}:
        return False
    if schema.get("format") == "binary":
        return True
    # 3.1: a string with a media type but without an encoding is bytes, unless a schema describes it as text.
    media = schema.get("contentMediaType")
    return isinstance(media, str) and schema.keys().isdisjoint({"contentEncoding", "contentSchema"})


def base64_encoding(schema: JSONObject) -> str:
    """Return `base64` or `base64url` if a schema describes a body as text in that encoding; otherwise empty."""
    if schema.get("format") in ("byte", "base64"):
        return "base64"
    encoding = text_of(schema.get("contentEncoding")).lower()
    return encoding if encoding in {"base64", "base64url"} else ""


def as_object(schema: JSONSchema) -> JSONObject:
    """Return a schema as an object, also if it is true or false."""
    if isinstance(schema, dict):
        return schema
    return {} if schema else {"not": {}}


def put(out: JSONObject, key: str, value: Any) -> None:
    """Set a keyword, unless its value is None or empty."""
    if value is not None:
        out[key] = value


def with_null(schema: JSONObject) -> JSONObject:
    """Return `schema`, with null allowed as well."""
    kind = schema.get("type")
    is_composed = bool(schema.keys() & {"allOf", "anyOf", "oneOf", "const", "$ref"})
    if kind is None and not is_composed and not schema.keys() & {"enum", "not"}:
        return schema
    if kind is None or is_composed:
        noted: tuple[str, ...] = ("title", "description", "default")
        notes = {key: schema[key] for key in noted if key in schema}
        rest = {key: item for key, item in schema.items() if key not in notes}
        return {**notes, "anyOf": [rest, {"type": "null"}]}
    kinds = kind if is_list(kind) else [kind]
    result = {**schema, "type": kinds if "null" in kinds else [*kinds, "null"]}
    if "enum" in schema and None not in schema["enum"]:
        result["enum"] = [*schema["enum"], None]
    return result


def declared_types(value: Any) -> Any:
    """Return the known types of a `type` keyword; None if there are none."""
    if type(value) is str:
        if value in _TYPES:
            return value
        return _MISSPELLED.get(value.lower(), value.lower() if value.lower() in _TYPES else None)
    if is_list(value):
        kinds = [declared_types(item) for item in value if type(item) is str]
        return list(dict.fromkeys(kinds)) if kinds and all(kinds) else None
    return None


def names_of(value: Any, hidden: Iterable[str]) -> list[str] | None:
    """Return a list of property names without duplicates and hidden names."""
    if not is_list(value):
        return None
    return list(dict.fromkeys(name for name in value if type(name) is str and name not in hidden))


def dependent_names(value: Any) -> JSONObject | None:
    """Return lists of property names by property."""
    if not is_object(value):
        return None
    return {key: names for key, item in value.items() if (names := names_of(item, ())) is not None}


def data_of(value: Any) -> Any:
    """Return the value of a keyword as JSON; None if it is not JSON, such as a date from a YAML parser."""
    try:
        return to_json(value, MAX_DEPTH)
    except JSONValueError:
        return None


def discriminated(schema: JSONObject, description: str) -> str | None:
    """Return `description` with a sentence about the `discriminator`, which JSON Schema does not have."""
    node = schema.get("discriminator")
    names = node.get("mapping") if is_object(node) else None
    if not is_object(node) or not is_object(names) or not names:
        return description or None
    hint = f"The property {node.get('propertyName')!r} names the variant: {', '.join(map(str, names))}."
    return f"{description} {hint}".strip()


def number_of(value: Any) -> int | float | None:
    """Return a number, also from text."""
    if type(value) is str and len(value) < 40:
        with suppress(ValueError):
            value = int(value) if value.lstrip("-").isdigit() else float(value)
    if (type(value) is int or type(value) is float) and value - value == 0:
        return value
    return None


def count_of(value: Any) -> int | None:
    """Return a non-negative integer."""
    number = number_of(value)
    if number is None or number < 0 or number != int(number):
        return None
    return int(number)


def apply_exclusive(schema: JSONObject, out: JSONObject) -> None:
    """Apply a boolean `exclusiveMinimum`, which makes the `minimum` exclusive."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if schema.get(exclusive) is True and bound in out:
            out[exclusive] = out.pop(bound)


def repair_enum(out: JSONObject) -> None:
    """Reconcile an `enum` with its `type` if no value matches both.

    An `enum` of an array applies to its items. Values of another type are allowed both as written and converted to the
    declared type; values without an equivalent in that type count only as examples.
    """
    kind, values = out.get("type"), out["enum"]
    if kind is None:
        return
    kinds = kind if is_list(kind) else [kind]
    others = [
        value
        for value in values
        if value is not None and not any(has_type(value, each) for each in kinds)
    ]
    if not others:
        return
    if kinds == ["array"] and len(others) == len(values):
        del out["enum"]
        items = as_object(out.get("items", True))
        if "enum" not in items:
            out["items"] = items = {**items, "enum": values}
            repair_enum(items)
        return
    converted = [next(conversions(value, tuple(kinds)), None) for value in others]
    if len(others) == len(values) and None in converted:
        del out["enum"]
        out["examples"] = values
    else:
        out["enum"] = [*values, *(value for value in converted if value is not None)]
    out["type"] = list(dict.fromkeys([*kinds, *(kind_of(value) for value in others)]))


def repair_pattern(out: JSONObject) -> None:
    """Convert a pattern that is written as a literal of JavaScript, `/^a$/`, which would match no text.

    A literal with flags is omitted: `pattern` has no flags.
    """
    if literal := _REGEX_LITERAL.fullmatch(text_of(out.get("pattern"))):
        del out["pattern"]
        if not literal[2]:
            out["pattern"] = literal[1]


def closed_object(properties: JSONObject, required: list[str]) -> JSONObject:
    """Return the schema of an object without additional properties."""
    schema: JSONObject = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return {**schema, "required": required} if required else schema


def any_of(schemas: Iterable[JSONObject]) -> JSONObject:
    """Return a schema that matches any of `schemas`."""
    distinct: list[JSONObject] = []
    for schema in schemas:
        if schema not in distinct:
            distinct.append(schema)
    return distinct[0] if len(distinct) == 1 else {"anyOf": distinct}
