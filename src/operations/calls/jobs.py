"""One request in a worker, as data: its times, its caller and how far it may run ahead of its reader. No I/O."""

import asyncio
from collections import deque
from time import time
from typing import Any

import msgspec

from operations._json import JSONLimitError, enforce_bounds
from operations.access import Identity
from operations.calls.events import PROTOCOL_VERSION, RequestPayload
from operations.calls.states import NEVER
from operations.context import CLOSED, NOTHING, CallerChannel, OperationContext
from operations.errors import CallError, ErrorCode, timed_out, timeout_error
from operations.front.front import Front
from operations.pubsub.base import EventTarget
from operations.registry import OperationRegistry
from operations.specs import OperationType

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


class Job(msgspec.Struct, eq=False):
    """A request, and the way its answers go."""

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

    task: "asyncio.Task[None] | None" = None

    begun: bool = False
    """Whether the operation was started."""

    answered: bool = False
    """Whether its last reply was sent. What the handler still does has no effect on the caller."""

    replied: asyncio.Event | None = None
    """Set when its last reply was sent, for requests that the program itself received."""

    absent_since: float = NEVER
    """When the caller was first found to be gone, by the loop's clock."""

    caller: str = ""
    """The key by which the limits of a server count the caller, once it is known."""

    principal: str = ""
    """The caller, as far as it is known when the request arrives."""

    counted_as: tuple[str, ...] = ()
    """For admission."""

    queued_at: float = 0.0
    """When the broker received the request, by the loop's clock."""

    began_at: float = 0.0
    """When it got a slot, by the loop's clock; 0 if it did not."""

    code: str = ""
    """The code of the error with which it ended."""

    identity_id: str | None = None
    """The caller, once it is known."""


def job_for(
    registry: OperationRegistry,
    target: EventTarget,
    request: RequestPayload,
    reply_to: str,
    size: int,
    now: float,
    front: Front | None = None,
) -> Job:
    """Return the job of a request that has just arrived.

    Args:
        registry: The one that has its operation.
        target: The target that it came from.
        request: The request.
        reply_to: Where its replies go.
        size: Bytes of the request.
        now: The time of its arrival, by the loop's clock.
        front: Its time limits count if the request is from outside.
    """
    credit = request.credit
    limit = remaining_seconds(request)
    if limit is not None and front is not None:
        limit = min(limit, front.max_timeout)
    idle = NEVER
    if (limit is None or request.idle_timeout is not None) and is_stream(registry, request):
        limit = NEVER if limit is None else limit
        if request.idle_timeout is not None:
            idle = request.idle_timeout / 1000
        elif credit is None:
            # Whoever knows of credit and names no time wants none.
            idle = DEFAULT_TIMEOUT
    elif limit is None:
        spec = None if front is None else registry.get_spec(request.operation_id)
        limit = DEFAULT_TIMEOUT if front is None or spec is None else front.timeout_of(spec)
    return Job(
        request,
        reply_to,
        size,
        now,
        now + limit,
        idle,
        now + min(limit, idle),
        None if credit is None else Pace(credit),
        principal=_principal(request, reply_to, target),
    )


def _principal(request: RequestPayload, reply_to: str, target: EventTarget) -> str:
    if request.credential is not None:
        return f"by:{request.credential}"
    identity = claimed_identity(request, target)
    return f"at:{reply_to}" if identity is None else principal_of(identity)


def principal_of(identity: Identity) -> str:
    """By what a caller is counted that is known."""
    return f"id:{identity.key}"


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


def claimed_identity(request: RequestPayload, target: EventTarget) -> Identity | None:
    """Return the identity behind a request without a credential: the connection's, or its own on a trusted target."""
    if target.trusted and request.identity is not None:
        return request.identity
    return target.identity


class RefusedError(Exception):
    """A call that was not started; its id may come again."""

    def __init__(self, error: CallError) -> None:
        super().__init__(str(error))
        self.error = error


def enforce_version(request: RequestPayload) -> None:
    """Raise `VALIDATION_ERROR` if a request requires a newer version of the protocol."""
    if request.required_version is not None and request.required_version > PROTOCOL_VERSION:
        raise CallError(
            ErrorCode.VALIDATION_ERROR,
            f"version {request.required_version} is required; this is {PROTOCOL_VERSION}",
        )


def aged(request: RequestPayload, age: float) -> RequestPayload:
    """Return a request without the time that it waited at the broker."""
    spent = age * 1000
    left = None
    if request.timeout_ms is not None:
        left = request.timeout_ms - spent
    elif request.idle_timeout is not None and spent >= request.idle_timeout:
        left = 0.0
    return request if left is None else msgspec.structs.replace(request, timeout_ms=left)


def late(job: Job) -> CallError:
    """Return the error of a job whose time has run out."""
    if job.expires_at < job.ends_at:
        return timeout_error(f"no item came for {job.idle:g} seconds")
    request = job.request
    seconds = job.expires_at - job.arrived_at
    return timed_out(request.operation_id, seconds, deadline=request.deadline)


def set_after(sending: "asyncio.Task[Any] | None", replied: asyncio.Event | None) -> None:
    """Set `replied` when `sending` has ended; at once if there is nothing to send."""
    if replied is None:
        return
    if sending is None:
        replied.set()
    else:
        sending.add_done_callback(lambda _: replied.set())


def exhausted(reason: str) -> CallError:
    """Return the error of a request beyond the limits of a worker."""
    return CallError(ErrorCode.RESOURCE_EXHAUSTED, reason, retryable=True)
