"""Decide how long to wait before an attempt is repeated; the only such rule in the package."""

from collections.abc import Callable
from secrets import SystemRandom
from time import monotonic

_random = SystemRandom()

_FIRST = 0.05
_SOON = 0.6
_LATE = 5.0


class Backoff:
    """The pauses of one client between attempts, with full jitter so that clients spread out.

    They are short at first, so that a server that restarts is found within a second. From the third second on they
    grow with the outage, so that hundreds of clients do not come back in one moment. The clock counts, not the number
    of attempts: clients must spread out most where attempts fail slowly.

    Args:
        first: Upper bound of the first pause, in seconds.
        last: Upper bound of any pause, in seconds.
        clock: The current time, in seconds.

    Attributes:
        attempt: The number of attempts since the last success.
    """

    def __init__(
        self,
        first: float = _FIRST,
        last: float = _LATE,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.attempt = 0
        self._first = first
        self._last = last
        self._clock = clock
        self._since: float | None = None

    def reset(self) -> None:
        """Start again after a success."""
        self.attempt = 0
        self._since = None

    def pause(self) -> float:
        """Return the seconds to wait before the next attempt."""
        now = self._clock()
        if self._since is None:
            self._since = now
        ceiling = min(self._last, max(_SOON, (now - self._since) / 2 - 1))
        # The exponent is bounded because a float is not.
        pause = _random.uniform(0, min(ceiling, self._first * 2 ** min(self.attempt, 10)))
        self.attempt += 1
        return pause
