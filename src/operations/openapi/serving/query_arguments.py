"""Convert query parameters to the input of an operation.

The server uses this table to read requests, and the export documents it, so that both agree.

Rule 1: a text becomes a number or a boolean only if the schema allows that type and the text is its exact JSON form;
        otherwise it stays text, and validation reports the error. An absent parameter stands for null.
Rule 2: an input that is not a plain object of properties is sent in one parameter, `input`, as JSON.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast
from urllib.parse import parse_qsl

import msgspec

from operations.base.errors import CallError, SchemaError, invalid_argument
from operations.base.json.decoding import decode_json
from operations.base.json.references import followed
from operations.base.json.values import (
    MAX_REQUEST_VALUES,
    JSONValueError,
    is_list,
    is_object,
    pointer,
)
from operations.base.types import JSONObject, JSONSchema
from operations.schema import Schema
from operations.schema.references import ALL_TYPES, possible_types

WHOLE = "input"
"""The parameter that contains the whole input as JSON."""

MAX_PARAMETERS = 1000

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS = {"true": True, "false": False}
_SCALARS = ALL_TYPES - {"array", "object"}
_PLAIN = frozenset({
    "$comment", "$defs", "$ref", "$schema", "additionalProperties", "default", "definitions", "deprecated",
    "description", "example", "examples", "properties", "required", "title", "type",
})  # fmt: skip
"""The keywords that an object's schema may have if its properties become parameters."""


class ParameterForm(Enum):
    """The form of a parameter."""

    SCALAR = "scalar"
    """One parameter, as plain text."""

    LIST = "list"
    """One parameter for each item, as plain text."""

    JSON = "json"
    """One parameter, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryParameter:
    """One parameter."""

    name: str
    shape: ParameterForm
    required: bool

    schema: JSONSchema
    """The schema of the parameter; references are relative to the root of the input schema."""

    convert: Callable[[str], Any]
    """Converts a text to a value."""

    is_null_if_absent: bool = False
    """Whether the property is required and may be null, which no text of the parameter can express."""


class QueryArguments:
    """The parameters of one input schema."""

    def __init__(self, schema: Schema) -> None:
        document = schema.document
        self._root = document if isinstance(document, dict) else {}
        self.is_whole = not _is_plain(document)
        self.parameters = self._whole(schema) if self.is_whole else self._properties()
        self._by_name = {parameter.name: parameter for parameter in self.parameters}
        self._nulls = {each.name: None for each in self.parameters if each.is_null_if_absent}

    def read(self, query: bytes) -> Any:
        """Return the input for a query string.

        Raises:
            CallError: `VALIDATION_ERROR` if a parameter is repeated that is not a list.
            ValueError: If the query is not UTF-8, or has too many parameters.
        """
        values: JSONObject = {}
        for name, text in parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_PARAMETERS,
        ):
            parameter = self._by_name.get(name)
            value = text if parameter is None else parameter.convert(text)
            if parameter is not None and parameter.shape is ParameterForm.LIST:
                values.setdefault(name, []).append(value)
            elif name in values:
                raise _refused(name, "is given more than once")
            else:
                values[name] = value
        if not self.is_whole:
            return {**self._nulls, **values} if self._nulls else values
        for name in values:
            if name != WHOLE:
                raise _refused(name, f"is not a parameter here: there is only {WHOLE!r}")
        return values.get(WHOLE)

    def _whole(self, schema: Schema) -> tuple[QueryParameter, ...]:
        return (
            QueryParameter(
                name=WHOLE,
                shape=ParameterForm.JSON,
                required=not may_be_empty(schema),
                schema=self._root,
                convert=_json,
            ),
        )

    def _properties(self) -> tuple[QueryParameter, ...]:
        plain = _followed(self._root, self._root)
        required = plain.get("required", ())
        properties: JSONObject = plain.get("properties", {})
        return tuple(
            self._parameter(name, schema, name in required) for name, schema in properties.items()
        )

    def _parameter(self, name: str, schema: JSONSchema, required: bool) -> QueryParameter:
        types = possible_types(schema, self._root)
        shape, convert = ParameterForm.JSON, cast("Callable[[str], Any]", _json)
        if types <= _SCALARS:
            shape, convert = ParameterForm.SCALAR, self._scalar(schema, types)
        elif types <= {"array", "null"}:
            items = _items(schema, self._root)
            item_types = possible_types(items, self._root)
            if item_types <= _SCALARS:
                shape, convert = ParameterForm.LIST, self._scalar(items, item_types)
        is_null = required and shape is not ParameterForm.JSON and "null" in types
        return QueryParameter(
            name=name,
            shape=shape,
            required=required and not is_null,
            schema=schema,
            convert=convert,
            is_null_if_absent=is_null,
        )

    def _scalar(self, schema: JSONSchema, types: frozenset[str]) -> Callable[[str], Any]:
        if "string" not in types:
            return _literal
        if types <= {"string", "null"}:
            return str
        # Of several types, the first that matches. Conversions of scalars do not depend on the surrounding schema.
        held: JSONObject = {
            key: self._root[key]
            for key in ("$defs", "definitions", "properties")
            if key in self._root
        }
        validator = Schema({"allOf": [schema], **held}, lenient=True)

        def choose(text: str) -> Any:
            value = _literal(text)
            return value if value is not text and validator.check(value) else text

        return choose


def may_be_empty(schema: Schema) -> bool:
    """Return whether a call without input can be valid."""
    document = schema.document
    if _is_plain(document):
        # Compiling the definitions of a large API takes long.
        return not _followed(document, document).get("required")
    try:
        return schema.check(None) or schema.check({})
    except SchemaError:
        # The schema is unusable, so that every call fails and the description does not matter.
        return False


def _literal(text: str) -> Any:
    if text in _LITERALS:
        return _LITERALS[text]
    if _NUMBER.fullmatch(text):
        # One number needs no limits before it is decoded.
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(text)
    return text


def _json(text: str) -> Any:
    try:
        return decode_json(text, max_values=MAX_REQUEST_VALUES)
    except JSONValueError:
        return text


def _is_plain(document: JSONSchema) -> bool:
    """Return whether an input schema is a simple object with properties."""
    if isinstance(document, bool):
        return document
    schema = _followed(document, document)
    kind, properties = schema.get("type", "object"), schema.get("properties", {})
    return (
        all(key in _PLAIN or key.startswith("x-") for key in (*document, *schema))
        and (kind == "object" or (isinstance(kind, list) and "object" in kind))
        and is_object(properties)
        and all(isinstance(each, (dict, bool)) for each in properties.values())
        and is_list(schema.get("required", []))
    )


def _followed(schema: JSONSchema, root: JSONSchema) -> JSONObject:
    """Return the target of a chain of references; empty if it cannot be resolved."""
    found, _ = followed(schema, root)
    return {} if "$ref" in found else found


def _items(schema: JSONSchema, root: JSONObject) -> JSONSchema:
    """Return the schema of the items of a list, or of the only alternative to null; true if there is none."""
    resolved = _followed(schema, root)
    for keyword in ("anyOf", "oneOf"):
        members = [
            each for each in resolved.get(keyword, ()) if possible_types(each, root) - {"null"}
        ]
        if len(members) == 1 and "items" not in resolved:
            return _items(members[0], root)
    items: JSONSchema = resolved.get("items", True)
    return items


def _refused(name: str, message: str) -> CallError:
    path = pointer(name)
    return invalid_argument(path, message, "query", subject=f"Invalid query: {path}")
