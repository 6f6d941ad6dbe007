"""Serving one request: from `call.requested` to the event that ends it.

Rule 1: handlers return values; only the code here publishes.
Rule 2: whatever happens, a request is answered exactly once, unless its caller aborted it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from time import time
from typing import Any, Protocol, TypeAlias

from operations.access import Identity
from operations.calls.events import PROTOCOL_VERSION, CallRequested, RequestPayload
from operations.context import CLOSED, NOTHING, Door, OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, TransportError
from operations.registry import OperationRegistry
from operations.specs import OperationType

logger = logging.getLogger("operations")

MAX_UNREAD_BYTES = 4 * 1024 * 1024
"""What may be under way to the reader of one subscription."""


class Replies(Protocol):
    """Where the answers to one request go."""

    def respond(self, envelope: ResponseEnvelope[Any]) -> Awaitable[None] | None:
        """The one answer; None where there is nothing to wait for."""
        ...

    async def item(self, envelope: ResponseEnvelope[Any], sequence: int) -> None:
        """One of many answers; returns when there may be another."""
        ...

    def complete(self, sequence: int) -> Awaitable[None]:
        """There were `sequence` answers, and no more will come."""
        ...

    def error(self, error: CallError, sequence: int | None) -> Awaitable[None]:
        """The call failed, after `sequence` items if it was a subscription."""
        ...


class Pace:
    """How far a subscription may run ahead of its reader: so many items, and so many bytes."""

    def __init__(self, window: int | None) -> None:
        self._window = window or 0
        self._credit = window
        self._sent = 0
        self._unread: deque[int] = deque()
        self._unread_bytes = 0
        self._more: asyncio.Event = asyncio.Event()

    def grant(self, credit: int) -> None:
        """The reader says how many items may have been sent in all, and so which it has read."""
        if self._credit is None or credit <= self._credit:
            return
        self._credit = credit
        read = credit - self._window
        while self._unread and self._sent - len(self._unread) < read:
            self._unread_bytes -= self._unread.popleft()
        self._more.set()

    def sent(self, size: int) -> None:
        """An item went out."""
        self._sent += 1
        if self._credit is not None:
            self._unread.append(size)
            self._unread_bytes += size

    @property
    def is_full(self) -> bool:
        """Whether the reader has to read before one more item may go out."""
        return self._credit is not None and (
            self._sent >= self._credit
            or (self._unread_bytes >= MAX_UNREAD_BYTES and bool(self._unread))
        )

    async def room(self) -> None:
        """Wait until one more item may go out."""
        while self.is_full:
            self._more.clear()
            await self._more.wait()


def context_for(
    request: RequestPayload,
    identity: Identity | None,
    deadline: float | None,
    registry: OperationRegistry,
    door: Door = CLOSED,
) -> OperationContext:
    """The context in which a request runs; `deadline` is in milliseconds since the epoch, by our own clock."""
    return OperationContext(
        request_id=request.request_id,
        parent_request_id=request.parent_request_id,
        identity=identity,
        metadata=request.metadata or NOTHING,
        deadline=deadline,
        door=door,
        registry=registry,
    )


def remaining_seconds(request: RequestPayload) -> float | None:
    """How long the call may take from its arrival; None if it does not say."""
    if request.timeout_ms is not None:
        return request.timeout_ms / 1000
    if request.deadline is not None:
        return request.deadline / 1000 - time()
    return None


def is_stream(registry: OperationRegistry, request: RequestPayload) -> bool:
    """Whether a request has many answers: its caller says so, or the operation does."""
    if request.credit is not None:
        return True
    spec = registry.get_spec(request.operation_id)
    return spec is not None and spec.type is OperationType.SUBSCRIPTION


async def answer(
    registry: OperationRegistry,
    request: RequestPayload,
    context: OperationContext,
    replies: Replies,
) -> None:
    """Run one request and publish what comes of it."""
    sequence: int | None = None
    try:
        if request.required_version is not None and request.required_version > PROTOCOL_VERSION:
            raise CallError(
                ErrorCode.VALIDATION_ERROR,
                f"version {request.required_version} is required; this is {PROTOCOL_VERSION}",
            )
        if not is_stream(registry, request):
            envelope = await registry.execute(request.operation_id, request.input, context)
            sending = replies.respond(envelope)
            if sending is not None:
                await sending
            return
        sequence = 0
        stream = registry.subscribe(request.operation_id, request.input, context)
        try:
            async for envelope in stream:
                await replies.item(envelope, sequence)
                sequence += 1
        finally:
            await stream.aclose()
        await replies.complete(sequence)
    except CallError as error:
        with suppress(TransportError):
            await replies.error(error, sequence)
    except TransportError as error:
        # The caller will ask.
        logger.debug("%s: the answer could not be sent: %s", request.request_id, error)


class CallMap(Protocol):
    """What `build_call_handler` needs of a `PendingRequestMap`."""

    def serve(self, request: RequestPayload, reply_to: str) -> None:
        """Remember where answers go."""
        ...

    async def respond(self, request_id: str, envelope: Any, *, sequence: int | None = None) -> None:
        """Answer with an envelope."""
        ...

    async def emit_error(
        self, request_id: str, code: str, message: str, details: Any = None
    ) -> None:
        """Answer with an error."""
        ...

    async def complete(self, request_id: str, *, sequence: int | None = None) -> None:
        """End a subscription."""
        ...


class _MapReplies:
    """The answers to one request, by way of a call map."""

    def __init__(self, call_map: CallMap, request_id: str) -> None:
        self._map = call_map
        self._id = request_id

    async def respond(self, envelope: ResponseEnvelope[Any]) -> None:
        await self._map.respond(self._id, envelope)

    async def item(self, envelope: ResponseEnvelope[Any], sequence: int) -> None:
        await self._map.respond(self._id, envelope, sequence=sequence)

    async def complete(self, sequence: int) -> None:
        await self._map.complete(self._id, sequence=sequence)

    async def error(self, error: CallError, sequence: int | None) -> None:
        await self._map.emit_error(self._id, error.code, error.message, error.details)


CallHandler: TypeAlias = Callable[[CallRequested], Coroutine[Any, Any, None]]


def build_call_handler(
    registry: OperationRegistry, call_map: CallMap, *, trusted: bool = False
) -> CallHandler:
    """The coroutine function that serves one `call.requested` and publishes through `call_map`.

    `serve_calls` does this and more: bounds, aborts, duplicates and shutdown.

    Args:
        registry: Where the operations are.
        call_map: Publishes the answers.
        trusted: Whether the `identity` inside events may be believed.
    """

    async def handle(event: CallRequested) -> None:
        request = event.payload
        call_map.serve(request, request.reply_to or "")
        identity = request.identity if trusted else None
        remaining = remaining_seconds(request)
        deadline = None if remaining is None else (time() + remaining) * 1000
        context = context_for(request, identity, deadline, registry)
        await answer(registry, request, context, _MapReplies(call_map, request.request_id))

    return handle
