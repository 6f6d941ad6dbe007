"""How long to wait before connecting again."""

from collections.abc import Callable
from secrets import SystemRandom
from time import monotonic

_random = SystemRandom()

_FIRST = 0.05
_SOON = 0.6
_LATE = 5.0


class Backoff:
    """The pauses of one client between attempts to connect: random, so that clients spread out.

    Short at first, so that a broker that restarts is found within a second. From the third second on they grow with
    the outage, so that hundreds of clients do not come back in one moment. By the clock and not by attempts: where
    many of them fail slowly, that is when clients must spread out most.

    Attributes:
        attempt: How many attempts there were since the connection stood.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.attempt = 0
        self._clock = clock
        self._since: float | None = None

    def reset(self) -> None:
        """The connection stands."""
        self.attempt = 0
        self._since = None

    def pause(self) -> float:
        """Seconds to wait before the next attempt."""
        now = self._clock()
        if self._since is None:
            self._since = now
        ceiling = min(_LATE, max(_SOON, (now - self._since) / 2 - 1))
        # The exponent is bounded because a float is not.
        pause = _random.uniform(0, min(ceiling, _FIRST * 2 ** min(self.attempt, 10)))
        self.attempt += 1
        return pause
