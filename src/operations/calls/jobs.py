"""One request on its way through a worker."""

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

from operations.calls.events import (
    CallCompleted,
    CompletePayload,
    RequestPayload,
    encode_error,
    encode_event,
    encode_item,
    encode_response,
)
from operations.calls.handler import Pace, remaining_seconds
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, TransportError
from operations.pubsub.base import EventTarget

DEFAULT_TIMEOUT = 30.0
"""Seconds for a request that does not say how long it may take."""


class Worker(Protocol):
    """What a job needs of the worker it runs in."""

    target: EventTarget
    mailbox: str

    def conclude(self, job: "Job", body: bytes) -> Awaitable[None]:
        """Send the event that ends the call."""
        ...

    def presentable(self, error: CallError, request: RequestPayload) -> CallError:
        """The error as its caller may see it."""
        ...


class Job:
    """A request, and the way its answers go.

    Attributes:
        answered: Whether the call has had its end. What the handler still does is nobody's business.
        absent: How often in a row the caller was not there when looked for.
        slot: Where its deadline is kept.
    """

    __slots__ = (
        "absent",
        "answered",
        "arrived_at",
        "expires_at",
        "pace",
        "principal",
        "reply_to",
        "request",
        "size",
        "slot",
        "task",
        "worker",
    )

    def __init__(
        self, worker: Worker, request: RequestPayload, reply_to: str, size: int, now: float
    ) -> None:
        self.worker = worker
        self.request = request
        self.reply_to = reply_to
        self.size = size
        self.principal = request.credential or reply_to
        self.arrived_at = now
        limit = remaining_seconds(request)
        if limit is None and request.credit is None:
            limit = DEFAULT_TIMEOUT
        self.expires_at = None if limit is None else now + limit
        self.pace = None if request.credit is None else Pace(request.credit)
        self.task: asyncio.Task[None] | None = None
        self.answered = False
        self.absent = 0
        self.slot = 0

    # These three are no coroutines: what they give is awaited, and one step less is taken for every call.

    def respond(self, envelope: ResponseEnvelope[Any]) -> Awaitable[None]:
        """Send the one answer."""
        try:
            body = encode_response(self.request.request_id, envelope)
        except (TypeError, ValueError) as error:
            raise CallError(
                ErrorCode.EXECUTION_ERROR, f"the result cannot be written as JSON: {error}"
            ) from error
        return self.worker.conclude(self, body)

    async def item(self, envelope: ResponseEnvelope[Any], sequence: int) -> int:
        """Send one of many answers."""
        if self.answered:
            raise CallError(ErrorCode.ABORTED, "the subscription has ended")
        worker = self.worker
        body = encode_item(self.request.request_id, envelope, sequence, worker.mailbox)
        if len(body) > worker.target.max_bytes:
            raise too_large(len(body), worker.target.max_bytes)
        try:
            await worker.target.send(self.reply_to, body)
        except TransportError as error:
            raise CallError(ErrorCode.UNAVAILABLE, f"an item could not be sent: {error}") from error
        return len(body)

    def complete(self, sequence: int) -> Awaitable[None]:
        """Say that there are no more."""
        payload = CompletePayload(request_id=self.request.request_id, sequence=sequence)
        return self.worker.conclude(self, encode_event(CallCompleted(payload=payload)))

    def error(self, error: CallError, sequence: int | None) -> Awaitable[None]:
        """Say that the call failed."""
        error = self.worker.presentable(error, self.request)
        return self.worker.conclude(self, encode_error(self.request.request_id, error, sequence))


def too_large(size: int, limit: int) -> CallError:
    """What is said instead of a result that cannot be carried."""
    return CallError(
        ErrorCode.RESOURCE_EXHAUSTED, f"the result is {size} bytes, more than the {limit} allowed"
    )
