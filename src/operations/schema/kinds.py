"""Asking what kind of JSON a value is, in words that type checkers follow."""

from typing import Any, TypeGuard

from operations.types import JSONObject


def is_object(value: object) -> TypeGuard[JSONObject]:
    """Whether `value` is a dict."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[Any]]:
    """Whether `value` is a list."""
    return isinstance(value, list)
