"""Typed calls of operations without await, through a registry or a hub elsewhere."""

from collections.abc import Iterator
from enum import Enum
from typing import Any

from operations import OperationRegistry


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"


UNSET = Unset.UNSET
"""The default of an optional argument."""


def given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments without those that are `UNSET`."""
    return {name: value for name, value in arguments.items() if value is not UNSET}


class Connection:
    """The calls that every namespace of a client shares."""

    def __init__(self, registry: OperationRegistry) -> None:
        self._calls = registry.sync

    def call(self, operation: str, input: Any) -> Any:
        """Return the data of one call.

        Raises:
            CallError: If the operation fails.
        """
        return self._calls.execute(operation, input).data

    def subscribe(self, operation: str, input: Any) -> Iterator[Any]:
        """Yield the items of a subscription.

        Raises:
            CallError: If the operation fails.
        """
        with self._calls.subscribe(operation, input) as items:
            for each in items:
                yield each.data
