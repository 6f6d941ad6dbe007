"""The time limit of a call, which ends its task and can be extended while a person answers."""

from collections.abc import Generator
from contextlib import contextmanager
from math import inf
from time import monotonic, time
from typing import Final

# ------------------------------------------------------------ time limits

ANSWER_SECONDS: Final = 300.0
"""The default time for a person to answer all questions of one call."""

MAX_SECONDS: Final = 600.0
"""The default limit for a call that reports progress."""


_SHORTEST_CHECK = 0.05
"""The shortest time in seconds between two checks of a stopped timer."""


class TimeLimit:
    """The time limit of one call. The timer starts when the object is created, and again with `start`.

    Args:
        seconds: The time that the call may take without progress; None for no limit.
        answer_seconds: The longest time that the timer stops, for all questions of the call together. Not used with
            `outer`, which limits this time.
        max_seconds: The longest time that a call may take if it reports progress, not counting the time for answers;
            None for no limit.
        deadline: The caller's own deadline, in milliseconds since the epoch; None for no deadline.
        outer: Another limit of the same call, which also ends the call. It stops and restarts together with this one.
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
        # The other limit ends the time for answers.
        self._answer_seconds = answer_seconds if outer is None else inf
        self._own = inf if deadline is None else monotonic() + deadline / 1000 - time()
        self._outer = outer
        self._pauses = 0
        self._paused_at = 0.0
        self._started = self._over = 0.0
        self.is_kept = False
        """Whether the entry point itself ends the call, so that the registry need not."""
        self.start()

    def start(self) -> None:
        """Start the timer."""
        self._started = monotonic()
        self._over = self._started + self._seconds

    @property
    def remaining(self) -> float:
        """Seconds until the call ends, unless the limit is extended; infinite without a limit."""
        over = self._over if self._pauses == 0 else self._over + self._answer_seconds
        remaining = min(over, self._own) - monotonic()
        return remaining if self._outer is None else min(remaining, self._outer.remaining)

    @property
    def next_check(self) -> float:
        """Seconds after which `remaining` must be read again: while the timer is stopped, it may start at any time."""
        wait = self.remaining
        if self._pauses:
            # The call cannot end earlier, because this much time was left when the timer stopped.
            wait = min(wait, max(self._over - self._paused_at, _SHORTEST_CHECK))
        return wait if self._outer is None else min(wait, self._outer.next_check)

    @property
    def deadline(self) -> float | None:
        """The time at which the call ends, in milliseconds since the epoch; None without a limit."""
        remaining = self.remaining
        return None if remaining == inf else (time() + remaining) * 1000

    def restart(self) -> None:
        """Restart the timer because the call reported progress."""
        if self._outer is not None:
            self._outer.restart()
        if self._pauses == 0:
            self._over = min(monotonic() + self._seconds, self._started + self._max_seconds)
            self._on_change()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Stop the timer while a person answers, for at most `answer_seconds`."""
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
