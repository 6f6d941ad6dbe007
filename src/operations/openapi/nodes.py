"""Reading parts of a document nobody checked: each is what it should be, or empty."""

from typing import Any, cast

from operations.types import JSONObject


def object_of(node: Any) -> JSONObject:
    """`node` if it is an object, else an empty one."""
    return cast("JSONObject", node) if type(node) is dict else {}


def list_of(node: Any) -> list[Any]:
    """`node` if it is a list, else an empty one."""
    return cast("list[Any]", node) if type(node) is list else []


def text_of(node: Any) -> str:
    """`node` if it is text, else none."""
    return node if type(node) is str else ""
