"""One call or subscription on the side of its caller.

Rule 1: the reader of a subscription sets the pace. Credit is granted as items are read, so a slow reader slows the
        worker.
Rule 2: items received before an error are delivered before the error.
Rule 3: a reader that leaves frees everything, whether by `aclose`, `break`, cancellation or by dropping the last
        reference.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from math import isnan
from time import time
from typing import Any, Self, cast

import msgspec

from operations.calls.events import (
    CallAborted,
    CallCredited,
    CallEvent,
    CallFailed,
    CallResponded,
    CreditPayload,
    RequestPayload,
    ResponsePayload,
    encode_event,
    read_output,
)
from operations.calls.states import Expects, SequenceError, Sequencer
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, TransportError, timeout_error

logger = logging.getLogger("operations")

MAX_BUFFERED_ITEMS = 1000
MAX_BUFFERED_BYTES = 8 * 1024 * 1024
"""What one subscription may hold of a worker that ignores the room it was granted."""

GRANT_BYTES = 1024 * 1024
"""After reading this much the worker is told, because it counts bytes as well as items."""


class StreamEntry:
    """What has arrived for one subscription and was not read yet.

    Attributes:
        must_stop: Whether the worker has to be told that this ended.
    """

    def __init__(self, request_id: str, window: int) -> None:
        self.request_id = request_id
        self.must_stop = False
        self.worker: str | None = None
        self._window = window
        self._granted = window
        self._read = 0
        self._bytes_since_grant = 0
        self._items: deque[tuple[ResponseEnvelope[Any], int]] = deque()
        self._bytes = 0
        self._sequencer = Sequencer()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: CallError | None = None
        self._stuck_since: float | None = None

    def push(self, event: CallEvent, size: int, worker: str | None) -> bool:
        """Take an event of `size` bytes, as its worker counts them; True if the subscription is over."""
        self.worker = worker
        try:
            for ready in self._sequencer.push(event, size):
                self._accept(*ready)
        except SequenceError as error:
            self._break(ErrorCode.UNAVAILABLE, f"items of the subscription were lost: {error}")
        except ValueError as error:
            self._break(ErrorCode.UNKNOWN_ERROR, f"an item was no envelope: {error}")
        if not self._sequencer.is_waiting:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = asyncio.get_running_loop().time()
        return self._ended

    def _accept(self, event: CallEvent, size: int) -> None:
        if self._ended:
            return
        if isinstance(event, CallResponded):
            self._items.append((_numbered(event.payload), size))
            self._bytes += size
            if len(self._items) > max(MAX_BUFFERED_ITEMS, self._window) or (
                self._bytes > MAX_BUFFERED_BYTES and len(self._items) > 1
            ):
                self._break(
                    ErrorCode.RESOURCE_EXHAUSTED,
                    "the worker sent more items than there was room for",
                )
            self._wake()
        elif isinstance(event, CallFailed):
            self.end(event.payload.to_error())
        elif isinstance(event, CallAborted):
            self.end(CallError(ErrorCode.ABORTED, "the subscription was aborted by its worker"))
        else:
            self.end(None)

    def _break(self, code: str, message: str) -> None:
        self.must_stop = True
        self.end(CallError(code, message))

    def _expire(self, idle_timeout: float) -> None:
        self.must_stop = True
        self.end(timeout_error(f"no item came for {idle_timeout:g} seconds"))

    def end(self, error: CallError | None) -> None:
        """Nothing more will come; what is here can still be read."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        self._wake()

    def stuck_for(self, now: float) -> float:
        """Seconds for which something has been here that waits for an item that is not."""
        return 0.0 if self._ended or self._stuck_since is None else now - self._stuck_since

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self, idle_timeout: float | None) -> ResponseEnvelope[Any]:
        """The next item.

        Raises:
            StopAsyncIteration: At the end.
            CallError: As the worker gave it, or `TIMEOUT` after `idle_timeout` seconds without an item.
        """
        while not self._items:
            if self._ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                raise StopAsyncIteration
            await self._wait(idle_timeout)
        envelope, size = self._items.popleft()
        self._bytes -= size
        self._read += 1
        self._bytes_since_grant += size
        return envelope

    async def _wait(self, idle_timeout: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None
        if idle_timeout is not None:
            timer = loop.call_later(idle_timeout, self._expire, idle_timeout)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def grant(self) -> bytes | None:
        """What to tell the worker now that items were read; None while there is room enough."""
        if self._ended or (
            self._granted - self._read > self._window // 2 and self._bytes_since_grant < GRANT_BYTES
        ):
            return None
        self._granted = self._read + self._window
        self._bytes_since_grant = 0
        return self.credit()

    def credit(self) -> bytes:
        """The event that says how many items may have been sent in all."""
        payload = CreditPayload(request_id=self.request_id, credit=self._granted)
        return encode_event(CallCredited(payload=payload))


def _numbered(payload: ResponsePayload) -> ResponseEnvelope[Any]:
    """Return the envelope of an item with its position, unless its source gave it one."""
    envelope = read_output(payload.output)
    if payload.sequence is None or envelope.meta.sequence is not None:
        return envelope
    meta = msgspec.structs.replace(envelope.meta, sequence=payload.sequence)
    return ResponseEnvelope(envelope.data, meta)


class CallStream:
    """An async iterator of envelopes. `aclose` works from any task; dropping it closes it."""

    def __init__(
        self,
        send: Callable[[str, bytes], Awaitable[None]],
        drop: Callable[[str], None],
        operation_id: str,
        start: Callable[[], Coroutine[Any, Any, StreamEntry]],
        idle_timeout: float | None,
    ) -> None:
        self._send_to = send
        self._drop = drop
        self._operation_id = operation_id
        self._start = start
        self._idle_timeout = idle_timeout
        self._entry: StreamEntry | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._is_reading = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ResponseEnvelope[Any]:
        if self._closed:
            raise StopAsyncIteration
        if self._is_reading:
            raise RuntimeError(f"{self!r} is being read by another task already")
        self._is_reading = True
        try:
            return await self._next()
        finally:
            self._is_reading = False

    async def _next(self) -> ResponseEnvelope[Any]:
        entry = self._entry
        if entry is None:
            entry = await self._open()
        try:
            envelope = await entry.read(self._idle_timeout)
        except BaseException:
            await self.aclose()
            raise
        credit = entry.grant()
        if credit is not None:
            await self._send(entry, credit)
        return envelope

    async def _open(self) -> StreamEntry:
        self._loop = asyncio.get_running_loop()
        try:
            entry = await self._start()
        except BaseException:
            self._closed = True
            raise
        if self._closed:
            # By another task, while it was being opened.
            self._drop(entry.request_id)
            raise StopAsyncIteration
        self._entry = entry
        return entry

    async def _send(self, entry: StreamEntry, body: bytes) -> None:
        if entry.worker is None:
            # A worker that never said where it is does not count what it may send.
            return
        try:
            await self._send_to(entry.worker, body)
        except TransportError as error:
            # Said again when the worker is probed.
            logger.debug("%s: room could not be granted: %s", entry.request_id, error)

    async def aclose(self) -> None:
        """Stop reading; the worker is told to stop. Closing twice, or from another task, is harmless."""
        self._closed = True
        entry = self._entry
        if entry is not None:
            self._entry = None
            entry.end(None)
            self._drop(entry.request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        entry, loop = self._entry, self._loop
        if entry is not None and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._drop, entry.request_id)

    def __repr__(self) -> str:
        return f"<CallStream of {self._operation_id}>"


class Sending:
    """While a request is handed over: a call that ends meanwhile takes its sender away from that.

    The sender then finds the call ended; what was under way may or may not have been delivered.
    """

    __slots__ = ("_before", "_is_interrupted", "_task")

    def __init__(self) -> None:
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._task: asyncio.Task[Any] | None = task
        self._before = task.cancelling()
        self._is_interrupted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        task, self._task = self._task, None
        if not self._is_interrupted or task is None:
            return False
        # Whoever else cancelled the task is heard.
        is_ours = task.uncancel() <= self._before
        return kind is not None and issubclass(kind, asyncio.CancelledError) and is_ours

    def interrupt(self) -> None:
        """The call has ended. In the next turn, for it may have been the sender itself who ended it."""
        asyncio.get_running_loop().call_soon(self._interrupt)

    def _interrupt(self) -> None:
        if self._task is not None and not self._is_interrupted:
            self._is_interrupted = True
            self._task.cancel()


class PendingCall(msgspec.Struct, eq=False):
    """One call that waits for its end."""

    payload: RequestPayload

    replayable: bool | None
    """Whether it may run again after a loss; None where the workers have to be asked."""

    expires_at: float
    """By the loop's clock."""

    limit: float
    """Seconds it has."""

    expects: Expects = Expects.ONE
    future: "asyncio.Future[ResponseEnvelope[Any]] | None" = None
    stream: StreamEntry | None = None

    attempt: int = 1
    """Possible executions."""

    sends: int = 0
    """How often it was sent."""

    to: str = ""
    """The mailbox of the worker to which it is sent; empty if any worker may take it."""

    refused: tuple[str, ...] = ()
    """The digests of the specs of workers that do not have the operation."""

    misses: int = 0
    """How often in a row nobody had it."""

    worker: str | None = None
    """The mailbox of the worker that has it, once known."""

    sending: Sending | None = None
    """While it is handed over."""

    receipt: str = ""
    """Identifies the request at a broker that keeps it until a worker begins it."""

    sent_at: float = 0.0

    seen_at: float = 0.0
    """When it was last heard of, by the loop's clock."""

    def succeed(self, envelope: ResponseEnvelope[Any]) -> None:
        """End the call with its answer, unless it has ended."""
        if self.future is not None and not self.future.done():
            self.future.set_result(envelope)
        if self.sending is not None:
            self.sending.interrupt()

    def fail(self, error: CallError) -> None:
        """End the call with an error, unless it has ended."""
        if self.attempt > 1:
            # An earlier attempt may have run.
            error.begun = None
        if self.stream is not None:
            self.stream.end(error)
        elif self.future is not None and not self.future.done():
            self.future.set_exception(error)
        if self.sending is not None:
            self.sending.interrupt()


def remaining(context: OperationContext | None, limit: float) -> float:
    """Return the seconds that a call may take: `limit`, or the rest of its context's time."""
    if context is None or context.deadline is None:
        return limit
    return min(limit, context.deadline / 1000 - time())


def enforce_number(name: str, seconds: object) -> None:
    """Raise `VALIDATION_ERROR` if a timeout is not a number."""
    if not isinstance(seconds, (int, float)) or isnan(seconds):
        # NaN is neither before nor after any time: the call would never end.
        reason = f"{name} is not a number: give seconds, or None for the default"
        raise CallError(ErrorCode.VALIDATION_ERROR, reason)


def closed_error() -> CallError:
    """Return the error of calls on a map that is closed."""
    return CallError(ErrorCode.ABORTED, "the calls were closed", retryable=False)
