"""Reading parts of a document nobody checked: each is what it should be, or empty."""

from typing import Any, TypeGuard

from operations.types import JSONObject


def is_object(node: Any) -> TypeGuard[JSONObject]:
    """Whether `node` is an object."""
    return type(node) is dict


def is_list(node: Any) -> TypeGuard[list[Any]]:
    """Whether `node` is a list."""
    return type(node) is list


def object_of(node: Any) -> JSONObject:
    """`node` if it is an object, else an empty one."""
    return node if is_object(node) else {}


def list_of(node: Any) -> list[Any]:
    """`node` if it is a list, else an empty one."""
    return node if is_list(node) else []


def text_of(node: Any) -> str:
    """`node` if it is text, else none."""
    return node if type(node) is str else ""
