"""What repeats, told once in a while."""

import logging
from collections.abc import Callable
from time import monotonic

_EVERY = 60.0
"""Seconds between two warnings of the same thing."""


class Seldom:
    """How loud to say something again: as a warning once a minute, in between for debugging only."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._told_at: float | None = None

    def level(self) -> int:
        """The level for saying it now."""
        now = self._clock()
        if self._told_at is not None and now - self._told_at < _EVERY:
            return logging.DEBUG
        self._told_at = now
        return logging.WARNING
