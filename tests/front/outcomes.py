"""The rules of the front and their outcomes, which are the same at every entry point."""

from typing import Any

from operations.base.json.values import MAX_REQUEST_VALUES
from operations.server import Limits

ACCESS: list[tuple[str, str | None, str]] = [
    ("test.open", None, "fine"),
    ("test.open", "ann", "fine"),
    ("test.advertised", "ann", "fine"),
    ("test.advertised", "bob", "ACCESS_DENIED"),
    ("test.advertised", None, "ACCESS_DENIED"),
    ("test.hidden", "ann", "OPERATION_NOT_FOUND"),
    ("test.hidden", None, "OPERATION_NOT_FOUND"),
    ("test.nothing", "ann", "OPERATION_NOT_FOUND"),
    ("test.broken", "ann", "EXECUTION_ERROR"),
    ("test.cancelled", "ann", "ABORTED"),
    ("test.cancelled_later", "ann", "ABORTED"),
    ("test.exit", "ann", "EXECUTION_ERROR"),
]
"""Operation, caller, outcome. `run` is an advertised scope, which `ann` has; `bob` has another one."""

VALUES: list[Any] = [[] for _ in range(MAX_REQUEST_VALUES)]
DEEP: list[Any] = []
for _ in range(100):
    DEEP = [DEEP]

SIZES: dict[str, tuple[Limits, Any, str]] = {
    "values": (Limits(), VALUES, "RESOURCE_EXHAUSTED"),
    "few values": (Limits(values=50), [1] * 60, "RESOURCE_EXHAUSTED"),
    "depth": (Limits(), DEEP, "VALIDATION_ERROR"),
    "bytes": (Limits(body_bytes=20_000), "x" * 30_000, "RESOURCE_EXHAUSTED"),
}
"""Limits, an input beyond one of them, outcome."""
