"""Limits of callers and of requests, shared by all entry points: how many, how large, and how long.

Rule 1: a limit is checked before the work, and excess requests are rejected at once. Only calls at a worker wait for a
        slot.
Rule 2: memory is bounded: the state of the caller that was idle longest is removed first.
Rule 3: a slot is released when the work has ended and its response has been sent, not when the caller disconnects.
Rule 4: the task that serves a request is cancelled when its time limit expires or its client disconnects, and reads the
        reason. If the work ignores the cancellation, the response is sent without waiting for it.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from math import ceil
from time import monotonic
from types import TracebackType
from typing import Annotated, Any, Final, Self, TypeAlias, cast

from msgspec import Meta

from operations._json import MAX_DEPTH, MAX_REQUEST_VALUES
from operations._resilience import ANSWER_SECONDS, RETRY_AFTER, TimeLimit, held_slot
from operations.access import Identity
from operations.errors import CallError, ErrorCode
from operations.specs import Operation
from operations.types import Count, Seconds

REMEMBERED: Final = 10_000
"""The largest number of callers, addresses or credentials with stored state."""

UNCOUNTED_OUTPUT: Final = 32 * 1024
"""Response bytes that a connection may buffer without being counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a server, for all its entry points together."""

    body_bytes: Count = 4 * 1024 * 1024
    """The largest request body or WebSocket message, in bytes."""

    body_seconds: Seconds = 15
    """Time for a whole request body to arrive, in seconds."""

    values: Count = MAX_REQUEST_VALUES
    """JSON values in one request: every object, array, string, number and literal."""

    depth: Count = MAX_DEPTH
    """Nesting of the data in one request."""

    answer_seconds: Seconds = ANSWER_SECONDS
    """Time for a person to answer all questions of one call, in seconds. The timers of the server stop meanwhile."""

    query_characters: Count = 1_000
    """Length of a search query."""

    calls: Count = 1000
    """Concurrent calls from all callers."""

    calls_per_caller: Count = 250
    """Concurrent calls. A caller without identity counts by its address."""

    streams: Count = 10_000
    """Open streams from all callers; the same number of WebSockets is allowed in addition."""

    streams_per_caller: Count = 2_000
    """Open streams of one caller; the same number of WebSockets is allowed in addition."""

    rate_per_caller: Annotated[float, Meta(gt=0)] | None = None
    """Requests per second, on average; None for no limit."""

    burst: Count = 100
    """Requests that a caller may send at once after a pause."""

    failed_attempts_per_second: Annotated[float, Meta(gt=0)] | None = 0.2
    """Distinct wrong credentials per second from one address, on average; None for no limit. Beyond the limit, every
    credential is still checked, but the response to a wrong one is delayed and becomes RESOURCE_EXHAUSTED."""

    failed_attempts: Annotated[int, Meta(ge=0)] = 20
    """Wrong credentials that an address may send at once."""

    output_bytes: Count = 256 * 1024 * 1024
    """Response bytes that clients have not read yet, for all callers."""

    output_bytes_per_caller: Count = 64 * 1024 * 1024
    """Response bytes that one caller has not read yet."""

    sessions: Count = 1_000
    """Open MCP sessions."""

    sessions_per_caller: Count = 100
    """Open MCP sessions of one caller. Its oldest idle session ends when it opens another."""


def caller_key(identity: Identity | None, address: str) -> str:
    """Return the key of a caller for limits: its identity, or else its address."""
    return f"id:{identity.limit_key}" if identity is not None else f"at:{address}"


def client_address(scope: Mapping[str, Any]) -> str:
    """Return the client address of an ASGI scope for limits; all addresses of an IPv6 /64 network count as one."""
    client = scope.get("client")
    host = str(client[0]) if client else ""
    return address_prefix(host) if ":" in host else host


@lru_cache(maxsize=1024)
def address_prefix(host: str) -> str:
    """Return the /64 network of an IPv6 address; other addresses unchanged."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Address(int(address) >> 64 << 64))


@lru_cache(maxsize=1024)
def site_prefix(host: str) -> str | None:
    """Return the /48 network of an IPv6 address, which one customer may have; None for other addresses."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if not isinstance(address, IPv6Address):
        return None
    return f"{IPv6Address(int(address) >> 80 << 80)}/48"


def call_seconds(operation: Operation | None, default: float) -> float:
    """Return the default time limit of a call in seconds.

    This is the operation's own limit, or else the longer of the server's default and the limit of the operation's
    source; and the time that a call may wait for an approval.
    """
    if operation is None:
        return default
    hold = 0 if operation.approve is None else operation.approve.hold
    if operation.timeout is not None:
        return operation.timeout + hold
    return max(default, operation.source_timeout or 0) + hold


class RateLimiter:
    """A token bucket for each caller.

    Args:
        per_second: Tokens that a bucket gains per second; None for no limit.
        burst: The capacity of a bucket.
        remembered: The largest number of buckets.
    """

    def __init__(
        self, per_second: float | None = None, burst: int = 0, *, remembered: int = REMEMBERED
    ) -> None:
        self._remembered = remembered
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self.rejected = 0
        """The number of rejected requests."""
        self.configure(per_second, burst)

    def configure(self, per_second: float | None, burst: int) -> None:
        """Change the rate."""
        self._per_second = per_second
        self._burst = float(burst)

    def spend(self, caller: str, amount: int = 1, *, paid: int = 0) -> None:
        """Take `amount` tokens, less the number that was already `paid`.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the caller has too few tokens; not retryable if `amount` exceeds the
                capacity.
        """
        if self._per_second is None:
            return
        if amount > self._burst:
            self.rejected += 1
            raise CallError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"This counts as {amount} requests, but at most {self._burst:.0f} are allowed at once: send fewer",
            )
        due = max(0, amount - paid)
        missing = due - self._tokens(caller)
        if missing > 0:
            self._take(caller, 0)
            self.rejected += 1
            raise CallError(
                ErrorCode.RESOURCE_EXHAUSTED,
                "Too many requests: slow down",
                {RETRY_AFTER: ceil(missing / self._per_second * 1000)},
                retryable=True,
            )
        self._take(caller, due)

    def charge(self, caller: str) -> bool:
        """Take one token, even if none is left; return whether one was left.

        The debt is limited to one burst, so that a caller recovers within a bounded time.
        """
        if self._per_second is None:
            return True
        had = self._tokens(caller) >= 1
        if self._tokens(caller) > -self._burst:
            self._take(caller, 1)
        return had

    def _tokens(self, caller: str) -> float:
        tokens, then = self._buckets.get(caller, (self._burst, 0.0))
        return min(self._burst, tokens + (monotonic() - then) * (self._per_second or 0))

    def _take(self, caller: str, amount: int) -> None:
        self._buckets[caller] = (self._tokens(caller) - amount, monotonic())
        self._buckets.move_to_end(caller)
        if len(self._buckets) > self._remembered:
            self._buckets.popitem(last=False)


class ConcurrencyLimiter:
    """Limits the slots in use, per caller and in total.

    Args:
        what: The noun for messages, in the plural.
        limit: The number of slots for all callers together.
        limit_per_caller: The number of slots for one caller.
    """

    def __init__(
        self, what: str = "concurrent calls", limit: int = 0, limit_per_caller: int = 0
    ) -> None:
        self._what = what
        self._by_caller: dict[str, int] = {}
        self.total = 0
        self.rejected = 0
        """The number of rejected requests."""
        self.configure(limit, limit_per_caller)

    def configure(self, limit: int, limit_per_caller: int) -> None:
        """Change the limits; slots in use stay in use."""
        self.limit = limit
        self._limit_per_caller = limit_per_caller

    def free(self, caller: str) -> int:
        """Return the number of slots that a caller can take now."""
        mine = self._by_caller.get(caller, 0)
        return max(0, min(self.limit - self.total, self._limit_per_caller - mine))

    def enter(self, caller: str, amount: int = 1) -> "Slot":
        """Return a slot. Release it with a `with` block or `release`.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if none is free.
        """
        mine = self._by_caller.get(caller, 0)
        if self.total + amount > self.limit:
            message = f"Too many {self._what}: try again later"
        elif mine + amount > self._limit_per_caller:
            message = f"Too many {self._what}: you have {mine} of {self._limit_per_caller}"
        else:
            self.add(caller, amount)
            return Slot(self, caller, amount)
        self.rejected += 1
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message, retryable=True)

    def hold(self, caller: str) -> "Slot":
        """Return a slot that the current call holds, and releases temporarily while it waits for a person.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if none is free.
        """
        slot = self.enter(caller)
        held_slot.set(slot.lent)
        return slot

    def add(self, caller: str, amount: int) -> None:
        """Add to the slots in use, even beyond the limit."""
        self._by_caller[caller] = self._by_caller.get(caller, 0) + amount
        self.total += amount

    def leave(self, caller: str, amount: int) -> None:
        """Release a slot."""
        self.total -= amount
        left = self._by_caller[caller] - amount
        if left:
            self._by_caller[caller] = left
        else:
            del self._by_caller[caller]


class Slot:
    """A slot of one caller."""

    __slots__ = ("_amount", "_caller", "_is_released", "_limiter")

    def __init__(self, limiter: ConcurrencyLimiter, caller: str, amount: int) -> None:
        self._limiter: ConcurrencyLimiter | None = limiter
        self._is_released = False
        self._caller = caller
        self._amount = amount

    def release(self) -> None:
        """Release the slot. Calling this again is harmless."""
        limiter, self._limiter = self._limiter, None
        self._is_released = True
        if limiter is not None:
            limiter.leave(self._caller, self._amount)

    @contextmanager
    def lent(self) -> Generator[None]:
        """Release the slot for the duration of a `with` block, then take it again, even beyond the limit."""
        limiter, self._limiter = self._limiter, None
        if limiter is None:
            yield
            return
        limiter.leave(self._caller, self._amount)
        try:
            yield
        finally:
            # It may have been released inside the block.
            if not self._is_released:
                limiter.add(self._caller, self._amount)
                self._limiter = limiter

    def __enter__(self) -> None:
        """Do nothing: the slot was taken when it was created."""

    def __exit__(self, *exc_info: object) -> None:
        self.release()


# ------------------------------------------------------------ time

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
"""The ASGI `receive`: returns the next message of the client, and finally its disconnect."""

Send: TypeAlias = Callable[[Message], Awaitable[None]]
Scope: TypeAlias = MutableMapping[str, Any]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

CLIENT_CHECK_SECONDS: Final = 0.05
"""Seconds after which the server begins to check whether the client has disconnected."""

GRACE: Final = 0.05
"""Seconds that work has to end after it was cancelled."""

_MAX_PEEKED: Final = 64 * 1024
"""Bytes of a body that are buffered until the caller is identified."""

_NEVER = float("inf")


class PeekableReceive:
    """Buffers messages of a client, because only reading shows whether the client has disconnected.

    Args:
        receive: The ASGI `receive` of the client.
    """

    __slots__ = ("_kept", "_wire")

    def __init__(self, receive: Receive) -> None:
        self._wire = receive
        self._kept: deque[Message] = deque()

    async def peek(self) -> Message:
        """Return the next message without consuming it. Waits forever if the buffer is full."""
        if sum(len(message.get("body", b"")) for message in self._kept) > _MAX_PEEKED:
            await asyncio.get_running_loop().create_future()
        message = await self._wire()
        if message["type"] != "http.disconnect":
            self._kept.append(message)
        return message

    async def receive(self) -> Message:
        """Return the next message."""
        return self._kept.popleft() if self._kept else await self._wire()


class RequestTimeout:
    """Cancels the task that created it when the time limit expires or the client disconnects.

    timeout.start(15)             # reading the body: only time counts
    timeout.start(30, receive)    # working: the client must stay connected as well
    timeout.stop()

    Args:
        on_overdue: Called if the work did not end after it was cancelled.
    """

    __slots__ = (
        "_due", "_fired", "_limit", "_loop", "_on_overdue", "_over", "_receive", "_task", "_timer", "_watcher",
        "disconnected", "is_reading", "timed_out",
    )  # fmt: skip

    def __init__(self, on_overdue: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = cast("asyncio.Task[Any]", asyncio.current_task(self._loop))
        self._on_overdue = on_overdue
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._receive: Receive | None = None
        self._limit: TimeLimit | None = None
        self._over = self._due = _NEVER
        self._fired = False
        self.timed_out = False
        """Whether the task was cancelled because its time limit expired."""
        self.disconnected = False
        """Whether the task was cancelled because its client disconnected."""
        self.is_reading = True
        """Whether the request is still being read: reading itself detects a disconnect."""

    def start(
        self,
        seconds: float | None,
        receive: Receive | None = None,
        limit: TimeLimit | None = None,
    ) -> None:
        """Start the time limit; with `receive`, also detect a disconnect of the client.

        `limit` may extend the time.
        """
        now = self._loop.time()
        self._limit = limit
        self._over = over = _NEVER if seconds is None else now + seconds
        self._receive = receive
        self.is_reading = receive is None
        # Soon, also while the body is read, so that most requests need only one timer.
        due = min(over, now + CLIENT_CHECK_SECONDS)
        if self._timer is None or due < self._due:
            self._set(due)

    def pause(self) -> None:
        """Suspend the time limit and the disconnect check until the next `start`."""
        self._over = _NEVER
        self.unwatch()

    def unwatch(self) -> None:
        """Stop the disconnect check, but keep the time limit."""
        self._receive = None
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    def stop(self) -> bool:
        """End all checks; return whether the task was also cancelled by other code."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._watcher is not None:
            self._watcher.cancel()
        # Break the reference cycle, so that the request is freed without a garbage collection.
        self._on_overdue = self._receive = self._limit = None
        if not self._fired:
            return False
        self._fired = False
        return self._task.uncancel() > 0

    def _set(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._check)

    def _check(self) -> None:
        """Cancel the request if its time limit has expired; otherwise check its client and set a timer."""
        self._timer = None
        now = self._loop.time()
        if now >= self._over and self._limit is not None:
            self._over = now + self._limit.next_check
        if now >= self._over:
            self.timed_out = self._fire()
            if self.timed_out and self._on_overdue is not None:
                self._due = _NEVER
                self._timer = self._loop.call_later(GRACE, self._on_overdue)
            return
        if self._receive is not None and self._watcher is None:
            self._watcher = asyncio.Task(self._watch_client(self._receive), loop=self._loop)
        if self._over != _NEVER:
            self._set(self._over)

    async def _watch_client(self, receive: Receive) -> None:
        await wait_for_disconnect(receive)
        self.disconnected = self._fire()

    def _fire(self) -> bool:
        """Cancel the task; return False if it was already cancelled."""
        if self._fired:
            return False
        self._fired = True
        self._task.cancel()
        return True


class CallTimeout(TimeLimit):
    """A time limit for a block, which ends the block as `asyncio.timeout` does and can be extended."""

    __slots__ = ("_scope",)

    def __init__(
        self, seconds: float | None, *, answer_seconds: float, max_seconds: float | None
    ) -> None:
        super().__init__(seconds, answer_seconds=answer_seconds, max_seconds=max_seconds)
        self._scope: asyncio.Timeout | None = None

    async def __aenter__(self) -> Self:
        self._scope = scope = asyncio.timeout(None)
        await scope.__aenter__()
        self.start()
        self._on_change()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            await scope.__aexit__(kind, error, traceback)

    def _on_change(self) -> None:
        if self._scope is not None and not self._scope.expired():
            remaining = self.remaining
            over = None if remaining == _NEVER else asyncio.get_running_loop().time() + remaining
            self._scope.reschedule(over)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected; ignore everything that it still sends."""
    while (await receive())["type"] != "http.disconnect":
        pass
