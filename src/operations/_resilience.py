"""Backoff, retry budget, circuit breaker, bulkhead, time limit and log throttle for peers that fail or do not respond.

Rule 1: the pause before the next attempt is random, and grows with the outage. Retries are limited to a fraction of the
        calls.
Rule 2: at most `limit` calls to one source run concurrently. Further calls wait for a free slot, and fail if no call
        finishes for some seconds.
Rule 3: after several consecutive connection failures or timeouts, calls fail at once. From time to time one call is
        sent as a probe; if it gets any response, all calls are sent again.
Rule 4: the timer of a time limit stops while a person answers a question, and restarts with every progress report. Both
        extensions have a maximum. The caller's own deadline is never extended.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import ceil, inf
from secrets import SystemRandom
from time import monotonic, time
from typing import Any, Final

from operations._json import object_of
from operations.errors import CallError, ErrorCode

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


class Bulkhead:
    """Limits the concurrent calls to one source, separately for each event loop.

    Args:
        name: The name of the source, for messages.
        limit: The largest number of concurrent calls.
        patience: Seconds without a finished call after which a source without a free slot rejects calls.
    """

    def __init__(self, name: str, limit: int, *, patience: float = STALLED) -> None:
        self._name = name
        self._limit = limit
        self._patience = patience
        self._loops: dict[asyncio.AbstractEventLoop, _Slots] = {}

    @property
    def calls(self) -> int:
        """The number of running and waiting calls on all event loops."""
        return sum(each.taken + len(each.waiting) for each in self._loops.values())

    def try_enter(self) -> bool:
        """Take a slot if one is free, and return whether a slot was taken. Release it with `leave`."""
        slots = self._slots()
        if slots.taken >= self._limit:
            return False
        slots.taken += 1
        if slots.taken == self._limit:
            slots.moved_at = slots.loop.time()
        return True

    async def enter(self) -> None:
        """Wait for a free slot and take it. Release it with `leave`.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if no slot has become free for some time.
        """
        if not self.try_enter():
            await self._wait(self._slots())

    def leave(self) -> None:
        """Release the slot, or pass it to the call that has waited longest."""
        slots = self._slots()
        if slots.taken >= self._limit:
            slots.moved_at = slots.loop.time()
        slots.taken -= 1
        self._start_waiting(slots)

    def resize(self, limit: int) -> None:
        """Change the limit. Running calls continue, even if the new limit is lower."""
        self._limit = limit
        for slots in tuple(self._loops.values()):
            # Before, there may have been free slots, so the time without a finished call starts here.
            slots.moved_at = slots.loop.time()
        self._start_waiting(self._slots())

    def _start_waiting(self, slots: "_Slots") -> None:
        while slots.waiting and slots.taken < self._limit:
            waiter = slots.waiting.popleft()
            if not waiter.done():
                slots.taken += 1
                waiter.set_result(None)

    async def __aenter__(self) -> None:
        await self.enter()

    async def __aexit__(self, *exc_info: object) -> None:
        self.leave()

    async def _wait(self, slots: "_Slots") -> None:
        loop = slots.loop
        waiter: asyncio.Future[None] = loop.create_future()
        slots.waiting.append(waiter)
        try:
            while not waiter.done():
                left = slots.moved_at + self._patience - loop.time()
                if left <= 0:
                    raise CallError(
                        ErrorCode.RESOURCE_EXHAUSTED,
                        f"{self._limit} calls to {self._name} are running, and none has finished for"
                        f" {self._patience:g} s.",
                        retryable=True,
                        begun=False,
                    )
                await asyncio.wait({waiter}, timeout=left)
        except BaseException:
            if waiter.done() and not waiter.cancelled():
                # This call received a slot just before it was cancelled: pass the slot to the next call.
                self.leave()
            waiter.cancel()
            raise

    def _slots(self) -> "_Slots":
        loop = asyncio.get_running_loop()
        slots = self._loops.get(loop)
        if slots is None:
            for over in [each for each in self._loops if each.is_closed()]:
                del self._loops[over]
            slots = self._loops[loop] = _Slots(loop)
        return slots


class _Slots:
    """The slots of one event loop."""

    __slots__ = ("loop", "moved_at", "taken", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.taken = 0
        self.moved_at = 0.0
        self.waiting: deque[asyncio.Future[None]] = deque()


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


held_slot: ContextVar[Callable[[], AbstractContextManager[None]] | None] = ContextVar(
    "held_slot", default=None
)
"""Releases the slot that the current call holds at its entry point, for the duration of a `with` block."""


def lent_slot() -> AbstractContextManager[None]:
    """Release the slot of the current call while it waits for a person."""
    lend = held_slot.get()
    return nullcontext() if lend is None else lend()


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


def abort_connection(response: Any) -> None:
    """Close the connection of an unfinished aiohttp response at once.

    Otherwise asyncio waits up to 30 seconds for the other side to end TLS. Meanwhile a proxy such as nginx or HAProxy
    does not notice that the client has gone, and the server behind it continues its work.
    """
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


def fail_if_closed(response: Any, error: Exception) -> None:
    """Let the reader of an aiohttp response fail with `error` if the connection closes before the body is complete.

    aiohttp reports this itself, except after an invalid chunk size.
    """
    content, connection = response.content, response.connection
    if connection is None or connection.protocol is None:
        # The body is complete.
        return

    def fail(_closed: object) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(error)

    closed: asyncio.Future[None] | None = connection.protocol.closed
    if closed is None:
        fail(closed)
        return
    # Once per connection, which serves many requests; asyncio logs an error that is not retrieved.
    closed.remove_done_callback(_retrieve)
    closed.add_done_callback(_retrieve)
    closed.add_done_callback(fail)
    content.on_eof(lambda: closed.remove_done_callback(fail))


def _retrieve(closed: asyncio.Future[None]) -> None:
    if not closed.cancelled():
        closed.exception()
