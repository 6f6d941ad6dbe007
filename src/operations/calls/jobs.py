"""One request on its way through a worker: from `call.requested` to the event that ends it.

Rule 1: handlers return values; only the code here and in `server` publishes.
Rule 2: whatever happens, a request is answered exactly once, unless its caller aborted it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from contextlib import suppress
from time import time
from typing import Any, Protocol

import msgspec

from operations._json import JSONLimitError, enforce_bounds
from operations._text import printable
from operations.access import Identity
from operations.calls.deadlines import NEVER
from operations.calls.events import (
    PROTOCOL_VERSION,
    CallCompleted,
    CompletePayload,
    LocalAnswer,
    RequestPayload,
    encode_error,
    encode_event,
    encode_item,
    encode_response,
    local_item,
)
from operations.calls.json_copy import size_of
from operations.context import CLOSED, NOTHING, CallerChannel, OperationContext
from operations.envelopes import LocalResponseMeta, ResponseEnvelope
from operations.errors import CallError, ErrorCode, TooLargeError, TransportError
from operations.front.limits import Slot
from operations.pubsub.base import EventTarget, Local
from operations.registry import OperationRegistry
from operations.specs import OperationType

logger = logging.getLogger("operations")

MAX_UNREAD_BYTES = 4 * 1024 * 1024
"""What may be under way to the reader of one subscription."""


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
    channel: CallerChannel = CLOSED,
) -> OperationContext:
    """The context in which a request runs; `deadline` is in milliseconds since the epoch, by our own clock."""
    return OperationContext(
        request_id=request.request_id,
        parent_request_id=request.parent_request_id,
        identity=identity,
        metadata=request.metadata or NOTHING,
        deadline=deadline,
        channel=channel,
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


DEFAULT_TIMEOUT = 30.0
"""Seconds for a request that does not say how long it may take; of a subscription, for each item."""


class Worker(Protocol):
    """What a job needs of the worker it runs in."""

    registry: OperationRegistry
    target: EventTarget
    mailbox: str

    def registry_of(self, operation_id: str) -> OperationRegistry:
        """Where an operation is."""
        ...

    def expect(self, job: "Job") -> None:
        """From now on the next item has its time."""
        ...

    def conclude(self, job: "Job", body: bytes) -> Awaitable[None]:
        """Send the event that ends the call."""
        ...

    def count_output(self, job: "Job", size: int) -> Slot | None:
        """Count a message until its caller has read it.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the caller has too many unread bytes.
        """
        ...

    def settle(self, job: "Job") -> None:
        """The call has had its end."""
        ...

    def presentable(self, error: CallError, request: RequestPayload) -> CallError:
        """The error as its caller may see it."""
        ...


class Job(msgspec.Struct, eq=False):
    """A request, and the way its answers go."""

    worker: Worker
    request: RequestPayload
    reply_to: str

    size: int
    """Bytes it holds while it waits."""

    arrived_at: float

    ends_at: float
    """When its time is over, by the loop's clock."""

    idle: float
    """Seconds for each item of a subscription."""

    expires_at: float
    """When either is over."""

    pace: Pace | None = None

    local: Local | None = None
    """The short way back, for a request that came that way."""

    task: "asyncio.Task[None] | None" = None

    answered: bool = False
    """Whether the call has had its end. What the handler still does is nobody's business."""

    replied: asyncio.Event | None = None
    """Set when its last reply was sent, for requests that the program itself received."""

    absent: int = 0
    """How often in a row the caller was not there when looked for."""

    caller: str = ""
    """The key by which the limits of a server count the caller, once it is known."""

    counted_as: tuple[str, ...] = ()
    """For admission."""

    @property
    def principal(self) -> str:
        """On whose behalf it runs, as far as that is known when it arrives."""
        if self.request.credential is not None:
            return f"by:{self.request.credential}"
        identity = claimed_identity(self.request, self.worker.target)
        return f"at:{self.reply_to}" if identity is None else principal_of(identity)

    # These three are no coroutines: what they give is awaited, and one step less is taken for every call.

    def respond(self, envelope: ResponseEnvelope[Any]) -> Awaitable[None] | None:
        """Send the one answer."""
        worker, request_id = self.worker, self.request.request_id
        local = self.local
        try:
            if local is None:
                return worker.conclude(self, encode_response(request_id, envelope))
            envelope, size = self._handed(envelope)
        except (TypeError, ValueError) as error:
            raise CallError(
                ErrorCode.EXECUTION_ERROR, f"the result cannot be written as JSON: {error}"
            ) from error
        if size > worker.target.max_bytes:
            raise too_large(size, worker.target.max_bytes)
        if not self.answered:
            worker.settle(self)
            local.publish_object(self.reply_to, LocalAnswer(request_id, envelope))
        return None

    def _handed(self, envelope: ResponseEnvelope[Any]) -> tuple[ResponseEnvelope[Any], int]:
        """`envelope` as it is handed over within this process, and its size.

        What an operation gives was copied into JSON when it ended. A middleware may keep what it gives, and so may
        whoever made the headers or contents in a `meta`: those are written and read.
        """
        registry = self.worker.registry
        if (
            type(envelope.meta) is LocalResponseMeta
            and not registry.middleware
            and not registry.stream_middleware
        ):
            try:
                target = self.worker.target
                return envelope, size_of(envelope.data, target.max_bytes, target.max_values)
            except TooLargeError as error:
                raise CallError(ErrorCode.RESOURCE_EXHAUSTED, f"the result {error}") from None
        body = envelope.encode()
        refusal = refusal_of(body, self.worker.target)
        if refusal is not None:
            raise refusal
        return ResponseEnvelope.decode(body), len(body)

    async def item(self, envelope: ResponseEnvelope[Any], sequence: int) -> None:
        """Send one of many answers, as soon as there is room for it."""
        pace = self.pace
        if pace is not None and pace.is_full:
            # The item is there: however long its reader takes, nothing is idle.
            self.expires_at = self.ends_at
            await pace.room()
        if self.idle != NEVER:
            self.worker.expect(self)
        size = await self._send(envelope, sequence)
        if pace is not None:
            pace.sent(size)
        if self.idle != NEVER:
            self.worker.expect(self)

    async def _send(self, envelope: ResponseEnvelope[Any], sequence: int) -> int:
        if self.answered:
            raise CallError(ErrorCode.ABORTED, "the subscription has ended")
        worker, request_id = self.worker, self.request.request_id
        target = worker.target
        body = b""
        if self.local is None:
            body = encode_item(request_id, envelope, sequence, worker.mailbox)
            size = len(body)
            refusal = refusal_of(body, target)
            if refusal is not None:
                raise refusal
        else:
            envelope, size = self._handed(envelope)
            if size > target.max_bytes:
                raise too_large(size, target.max_bytes)
        if self.local is not None:
            self.local.publish_object(
                self.reply_to, local_item(request_id, envelope, sequence, worker.mailbox, size)
            )
            return size
        unread = worker.count_output(self, size)
        try:
            await target.send(self.reply_to, body)
        except TransportError as error:
            raise CallError(ErrorCode.UNAVAILABLE, f"an item could not be sent: {error}") from error
        finally:
            if unread is not None:
                unread.release()
        return size

    def complete(self, sequence: int) -> Awaitable[None]:
        """Say that there are no more."""
        payload = CompletePayload(request_id=self.request.request_id, sequence=sequence)
        return self.worker.conclude(self, encode_event(CallCompleted(payload=payload)))

    def error(self, error: CallError, sequence: int | None) -> Awaitable[None]:
        """Say that the call failed."""
        error = self.worker.presentable(error, self.request)
        return self.worker.conclude(self, encode_error(self.request.request_id, error, sequence))


def job_for(
    worker: Worker,
    request: RequestPayload,
    reply_to: str,
    size: int,
    now: float,
    local: Local | None,
) -> Job:
    """The job of a request that has just arrived."""
    credit = request.credit
    limit = remaining_seconds(request)
    idle = NEVER
    if (limit is None or request.idle_timeout is not None) and is_stream(
        worker.registry_of(request.operation_id), request
    ):
        limit = NEVER if limit is None else limit
        if request.idle_timeout is not None:
            idle = request.idle_timeout / 1000
        elif credit is None:
            # Whoever knows of credit and names no time wants none.
            idle = DEFAULT_TIMEOUT
    elif limit is None:
        limit = DEFAULT_TIMEOUT
    return Job(
        worker,
        request,
        reply_to,
        size,
        now,
        now + limit,
        idle,
        now + min(limit, idle),
        None if credit is None else Pace(credit),
        local,
    )


def principal_of(identity: Identity) -> str:
    """By what a caller is counted that is known."""
    return f"id:{identity.id}"


def refusal_of(body: bytes, target: EventTarget) -> CallError | None:
    """Return the error to send instead of an event that its receiver would not decode."""
    if len(body) > target.max_bytes:
        return too_large(len(body), target.max_bytes)
    try:
        enforce_bounds(body, max_values=target.max_values)
    except JSONLimitError as error:
        return CallError(ErrorCode.RESOURCE_EXHAUSTED, f"the result {error.reason}")
    return None


def too_large(size: int, limit: int) -> CallError:
    """What is said instead of a result that cannot be carried."""
    return CallError(
        ErrorCode.RESOURCE_EXHAUSTED, f"the result is {size} bytes, more than the {limit} allowed"
    )


async def answer(
    registry: OperationRegistry,
    request: RequestPayload,
    context: OperationContext,
    replies: "Job",
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
        logger.debug("%s: the answer could not be sent: %s", printable(request.request_id), error)


def claimed_identity(request: RequestPayload, target: EventTarget) -> Identity | None:
    """Return the identity behind a request without a credential: the connection's, or its own on a trusted target."""
    if target.trusted and request.identity is not None:
        return request.identity
    return target.identity
