"""Bounded memory of a transport: names it has seen, and how often it logs the same problem."""

import logging
from collections.abc import Callable
from time import monotonic

_EVERY = 60.0
"""Seconds between two warnings of the same kind."""


class LogThrottle:
    """The level of a repeated message: a warning once a minute, in between for debugging only."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._logged_at: float | None = None

    def level(self) -> int:
        """Return the level for logging the message now."""
        now = self._clock()
        if self._logged_at is not None and now - self._logged_at < _EVERY:
            return logging.DEBUG
        self._logged_at = now
        return logging.WARNING


class BoundedSet:
    """A set of names that forgets: its older half is dropped when the newer half is full.

    Dropping one name at a time would cost more: a dict whose first keys were removed is searched for the next one.
    """

    __slots__ = ("_newer", "_older", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._newer: set[str] = set()
        self._older: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._newer or name in self._older

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def add(self, name: str) -> bool:
        """Remember `name`; return False if it was known."""
        newer = self._newer
        if name in newer or name in self._older:
            return False
        newer.add(name)
        if len(newer) >= self._size:
            self._older, self._newer = newer, set()
        return True

    def discard(self, name: str) -> None:
        """Forget `name`."""
        self._newer.discard(name)
        self._older.discard(name)
