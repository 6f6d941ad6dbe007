"""Repeating what may be repeated: pauses, a budget of retries, and a circuit breaker."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import ceil
from secrets import SystemRandom
from time import monotonic
from typing import Any, Final

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import object_of

IDLE_SECONDS: Final = 4.0
"""How long an HTTP client keeps an idle connection, in seconds. Many servers close theirs after 5 s, and a request that
is sent at that moment is lost."""

_random = SystemRandom()

_FIRST = 0.05
_SOON = 0.6
_LATE = 5.0


class Backoff:
    """The pauses of one client between attempts, with full jitter so that clients spread out.

    The first pauses are short, so that clients find a restarted server within a second. From the third second on, the
    pauses grow with the duration of the outage, so that hundreds of clients do not reconnect at the same moment. They
    depend on elapsed time and not on the number of attempts, because attempts may fail slowly.

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
        # The exponent is bounded, because a float would overflow.
        pause = _random.uniform(0, min(ceiling, self._first * 2 ** min(self.attempt, 10)))
        self.attempt += 1
        return pause


_MOST_RETRIES = 10.0
_RETRIES_PER_SECOND = 1.0


class RetryBudget:
    """Limits retries to a fraction of the calls, so that retries do not overload a failing service.

    Operations that are rarely called can still retry: ten retries at once, and one per second, are always allowed.

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
        """Use one retry; return False if none is left."""
        now = self._clock()
        refill = (now - self._filled_at) * _RETRIES_PER_SECOND
        self._left, self._filled_at = min(_MOST_RETRIES, self._left + refill), now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def retry_after(headers: Mapping[str, Any]) -> float:
    """Return the seconds that a Retry-After header asks for, as a number or a date; 0 if it asks for none.

    A date counts from the Date header of the same response, because the clock of the server may differ.
    """
    text = str(headers.get("retry-after", ""))
    if text.isascii() and text.isdigit():
        return float(text[:9])
    moment = _moment(text)
    if moment is None:
        return 0
    now = _moment(str(headers.get("date", ""))) or datetime.now(UTC)
    return max(0.0, (moment - now).total_seconds())


RETRY_AFTER: Final = "retryAfterMs"
"""The key in the details of an error for the milliseconds after which the same call may succeed."""

_MAX_WAIT: Final = 999_999_999_000
"""The longest accepted time, because numbers in the details may be infinite, or too large for a float."""


def wanted_pause(details: Any) -> float:
    """Return the seconds that the details of an error ask the caller to wait; 0 if they ask for none."""
    found = object_of(details)
    wait = found.get(RETRY_AFTER)
    if isinstance(wait, (int, float)):
        return max(0.0, min(wait, _MAX_WAIT) / 1000)
    return retry_after(object_of(found.get("headers")))


def _moment(text: str) -> datetime | None:
    """Return the time in an HTTP header; None if it is not valid."""
    try:
        moment = parsedate_to_datetime(text)
    except (OverflowError, ValueError):
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


FAILURES = 5
"""Connection failures or timeouts in a row that open a circuit breaker."""

STALLED = 5.0
"""Seconds without a finished call after which a source without a free slot rejects calls."""

_FIRST_PROBE = 0.5
_LONGEST_PAUSE = 30.0


class CircuitOpenError(CallError):
    """Raised instead of calling an upstream whose last calls failed."""

    def __init__(self, name: str, failures: int, seconds: float) -> None:
        super().__init__(
            ErrorCode.UNAVAILABLE,
            f"{name} is not available: the last {failures} attempts to reach it failed."
            f" The next attempt is made in {seconds:.1f} s.",
            {RETRY_AFTER: ceil(seconds * 1000)} if seconds else None,
            retryable=True,
            begun=False,
        )


class CircuitBreaker:
    """Decides whether an upstream is called.

    Args:
        name: The name of the upstream, for messages.
        clock: The current time, in seconds.
    """

    __slots__ = ("_backoff", "_clock", "_failures", "_is_probing", "_name", "_probe_at")

    def __init__(self, name: str, *, clock: Callable[[], float] = monotonic) -> None:
        self._name = name
        self._clock = clock
        self._failures = 0
        self._is_probing = False
        self._probe_at = 0.0
        self._backoff: Backoff | None = None

    def enter(self) -> bool:
        """Begin a call, which must end with `record`; return whether it is the probe.

        Raises:
            CircuitOpenError: If the upstream is not called now.
        """
        if self._failures < FAILURES:
            return False
        self.enforce_closed()
        self._is_probing = True
        return True

    def enforce_closed(self) -> None:
        """Raise an error if `enter` would raise one.

        Raises:
            CircuitOpenError: If the upstream is not called now.
        """
        if self._failures >= FAILURES:
            wait = self._probe_at - self._clock()
            if self._is_probing or wait > 0:
                raise CircuitOpenError(self._name, self._failures, max(wait, 0))

    def succeed(self) -> None:
        """Close the breaker: the upstream responded."""
        if self._failures:
            self._failures = 0
            self._backoff = None
            self._is_probing = False

    def record(self, responds: bool | None, *, is_probe: bool) -> None:
        """End a call, given whether the upstream responded.

        False if it could not be reached, lost the connection or did not respond in time; None if that is unknown.
        """
        if responds:
            self.succeed()
            return
        if is_probe:
            self._is_probing = False
        if responds is None:
            return
        self._failures += 1
        # Calls that began before the breaker opened do not delay the probe.
        if is_probe or self._failures == FAILURES:
            if self._backoff is None:
                self._backoff = Backoff(_FIRST_PROBE, _LONGEST_PAUSE, clock=self._clock)
            self._probe_at = self._clock() + self._backoff.pause()
