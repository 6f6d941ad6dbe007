"""JSON that others wrote, read without trusting its shape."""

from typing import Any, cast

from operations.types import JSONObject


def object_of(value: object) -> JSONObject:
    """`value` if it is an object, else an empty one."""
    return cast("JSONObject", value) if isinstance(value, dict) else {}


def list_of(value: object) -> list[Any]:
    """`value` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]


def faults_of(details: object) -> list[JSONObject]:
    """The failures that the details of a `VALIDATION_ERROR` name."""
    return [object_of(fault) for fault in list_of(object_of(details).get("errors"))]
