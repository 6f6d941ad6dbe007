"""How long a request may take, and whether its client still waits."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, cast

from operations.base.time_limit import TimeLimit

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
