"""Logs that a failing peer cannot flood."""

import logging
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Final

_EVERY = 60.0
"""Seconds between two warnings of the same kind."""


class LogThrottle:
    """Logs a repeated message as a warning at most once a minute, otherwise at debug level."""

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


class LogBudget:
    """Limits the lines that another program can add to the log."""

    LINES: Final = 100
    """The number of lines in one minute."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._began = -inf
        self._left = 0

    def spend(self) -> int:
        """Count one line; return how many more may follow in this minute, or -1 if this line must be dropped."""
        now = self._clock()
        if now - self._began >= _EVERY:
            self._began, self._left = now, self.LINES
        self._left = max(-1, self._left - 1)
        return self._left
