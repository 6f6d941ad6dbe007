"""Values that belong to a frozen struct in this process, but are not its fields.

They are never encoded, compared or printed, and are freed with the struct, which is declared with `dict=True`.

Rule: a value is attached to a copy. A struct that other code holds never changes.
"""

from copy import copy
from typing import Any, Generic, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")


class Attached(Generic[T]):
    """One kind of value that structs may have in addition to their fields.

    Args:
        name: Its name, which differs from those of all attributes of the structs.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def to(self, struct: S, value: T) -> S:
        """Return a copy of a struct with this value, with everything else that is attached to it or cached in it."""
        copied = copy(struct)
        held: dict[str, Any] = vars(copied)
        held.update(vars(struct))
        held[self._name] = value
        return copied

    def of(self, struct: msgspec.Struct) -> T | None:
        """Return the value that is attached to a struct; None if there is none."""
        found: T | None = vars(struct).get(self._name)
        return found
