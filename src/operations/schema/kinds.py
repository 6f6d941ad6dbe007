"""Asking what kind of JSON a value is, in words that type checkers follow."""

from typing import Any, TypeGuard

from operations.types import JSONObject


def is_object(value: object) -> TypeGuard[JSONObject]:
    """Whether `value` is a dict."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[Any]]:
    """Whether `value` is a list."""
    return isinstance(value, list)


def kind_of(value: object) -> str:
    """What JSON Schema calls the type of a JSON value: a float is a number, whatever it is worth."""
    return _NAMES.get(type(value), "object")


_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
