"""Decide how long to wait before an attempt is repeated, and how many repeats are too many."""

from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
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
        ceiling = min(self._last, max(_SOON, self._first, (now - self._since) / 2 - 1))
        # The exponent is bounded because a float is not.
        pause = _random.uniform(0, min(ceiling, self._first * 2 ** min(self.attempt, 10)))
        self.attempt += 1
        return pause


_MOST_RETRIES = 10.0
_RETRIES_PER_SECOND = 1.0


class RetryBudget:
    """Bounds retries to a part of the calls, so that retries do not overload a service that fails.

    A few retries are always left for operations that are seldom called: ten at once, and one per second.

    Args:
        ratio: Retries for each call.
        clock: The current time, in seconds.
    """

    def __init__(self, ratio: float, *, clock: Callable[[], float] = monotonic) -> None:
        self._ratio = ratio
        self._clock = clock
        self._left = _MOST_RETRIES
        self._filled_at = clock()

    def count_call(self) -> None:
        """Count a call that was made."""
        self._left = min(_MOST_RETRIES, self._left + self._ratio)

    def spend(self) -> bool:
        """Take one retry; return False if none is left."""
        now = self._clock()
        refill = (now - self._filled_at) * _RETRIES_PER_SECOND
        self._left, self._filled_at = min(_MOST_RETRIES, self._left + refill), now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def retry_after(text: str) -> float:
    """Return the seconds that a Retry-After header asks for, as a number or a date; 0 if it asks for none."""
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return 0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
