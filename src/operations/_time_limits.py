"""A time limit that an entry point, the table of tools or a source imposes on a call.

Rule 1: it stops while a person answers a question, and starts again with every progress report. Both have a maximum.
Rule 2: the caller's own deadline is never extended.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from math import inf
from time import monotonic, time
from typing import Final

ANSWER_SECONDS: Final = 300.0
"""The default for the time of a person to answer all questions of one call."""

MAX_SECONDS: Final = 600.0
"""The default for the time that a call may take with progress."""


class TimeLimit:
    """The limit of one call, which starts when it is made, or with `start`.

    Args:
        seconds: The time that the call may take without progress; None for no limit.
        answer_seconds: The longest time that the limit stops, for all questions of the call together.
        max_seconds: The longest time that the call may take with progress, without the time of answers; None for
            no limit.
        deadline: The caller's own deadline, in milliseconds since the epoch; None if it has none.
        outer: A limit of the same call, which ends the call as well, and stops and starts again with this one.
    """

    __slots__ = (
        "_answer_seconds", "_max_seconds", "_outer", "_over", "_own", "_paused_at", "_pauses", "_seconds", "_started",
        "is_kept",
    )  # fmt: skip

    def __init__(
        self,
        seconds: float | None,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        max_seconds: float | None = MAX_SECONDS,
        deadline: float | None = None,
        outer: "TimeLimit | None" = None,
    ) -> None:
        self._seconds = inf if seconds is None else seconds
        self._max_seconds = inf if max_seconds is None else max(max_seconds, self._seconds)
        self._answer_seconds = answer_seconds
        self._own = inf if deadline is None else monotonic() + deadline / 1000 - time()
        self._outer = outer
        self._pauses = 0
        self._paused_at = 0.0
        self._started = self._over = 0.0
        self.is_kept = False
        """Whether the entry point itself ends the call, so that the registry need not."""
        self.start()

    def start(self) -> None:
        """Let the time begin now."""
        self._started = monotonic()
        self._over = self._started + self._seconds

    @property
    def remaining(self) -> float:
        """Seconds until the call ends, unless the limit is extended; infinite without a limit."""
        over = self._over if self._pauses == 0 else self._over + self._answer_seconds
        remaining = min(over, self._own) - monotonic()
        return remaining if self._outer is None else min(remaining, self._outer.remaining)

    @property
    def deadline(self) -> float | None:
        """The same as a point in time, in milliseconds since the epoch; None without a limit."""
        remaining = self.remaining
        return None if remaining == inf else (time() + remaining) * 1000

    def restart(self) -> None:
        """Allow the whole time again, because the call reported progress."""
        if self._outer is not None:
            self._outer.restart()
        if self._pauses == 0:
            self._over = min(monotonic() + self._seconds, self._started + self._max_seconds)
            self._on_change()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Stop the limit while a person answers, up to the maximum."""
        if self._pauses == 0:
            self._paused_at = monotonic()
        self._pauses += 1
        self._on_change()
        try:
            if self._outer is None:
                yield
            else:
                with self._outer.paused():
                    yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                took = min(monotonic() - self._paused_at, self._answer_seconds)
                self._answer_seconds -= took
                self._started += took
                self._over += took
            self._on_change()

    def _on_change(self) -> None:
        """Update the timers when the remaining time has changed."""


held_slot: ContextVar[Callable[[], AbstractContextManager[None]] | None] = ContextVar(
    "held_slot", default=None
)
"""Gives back the capacity of the entry point that the current call holds, for the length of a `with` block."""


def lent_slot() -> AbstractContextManager[None]:
    """Give back the capacity that the current call holds while it waits for a person."""
    lend = held_slot.get()
    return nullcontext() if lend is None else lend()
