"""Send the messages of a client: requests, aborts and credit, and replies to requests that the program serves.

Rule 1: a request that certainly was not delivered is sent again while workers may be reconnecting; after that it fails
        with `UNAVAILABLE`.
Rule 2: this module never sends a request again that may have been delivered.
Rule 3: the deadline of a call also limits the time for sending it.
Rule 4: when a reader stops, by `aclose`, `break`, cancellation or by dropping the last reference, all resources are
        freed.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from math import isnan
from time import time
from typing import Any, Self, cast

from msgspec.structs import replace

from operations._json import JSONValueError, as_json
from operations.access import Identity
from operations.authority.grants import Delegate
from operations.calls.events import (
    AbortPayload,
    CallAborted,
    CallCompleted,
    CallRequested,
    CompletePayload,
    RequestPayload,
    encode_error,
    encode_event,
    encode_item,
    encode_response,
    refusal_of,
)
from operations.calls.failure_detector import FailureDetector
from operations.calls.states import NEVER, PendingCall, StreamEntry
from operations.context import OperationContext, new_request_id
from operations.envelopes import ResponseEnvelope, lift_envelope
from operations.errors import (
    CallError,
    ErrorCode,
    NoReceiverError,
    NotSentError,
    QueueFullError,
    TooLargeError,
    TransportError,
)
from operations.pubsub.base import Delivery, EventTarget, start_task
from operations.schema.explain import ValidationIssue, misfit
from operations.types import JSONObject

logger = logging.getLogger("operations")

PATIENCE = 10.0
"""Seconds that a new call waits for a broker that cannot be reached."""

MAX_WAITING = 1000
MAX_WAITING_BYTES = 2 * 1024 * 1024
"""Limits on the number and size of calls that wait for a broker; further calls fail at once."""

MAX_ABORTS = 10_000
"""The largest number of unsent abort messages; the workers of further calls stop at the deadline."""

_FAILED_SECONDS = 1.0
"""Seconds for which a call that failed counts as open at its consumer; otherwise a worker whose calls fail at once
would get nearly all of them."""

RETRY = 0.1
"""Seconds between attempts while workers may be reconnecting."""


class CallSender(ABC):
    """The sending part of `PendingRequestMap`: requests, aborts, and replies to requests that the program serves.

    Attributes:
        target: Transports the events.
        group: The worker group.
        mailbox: The address for replies to the calls of this map.
        pending: The calls and subscriptions that have not ended, by request id.
    """

    _detector: FailureDetector

    def __init__(
        self,
        target: EventTarget,
        group: str,
        credential: str | None,
        delegate: Delegate | None,
        send_identity: bool | None,
    ) -> None:
        self.target = target
        self.group = group
        self.mailbox = target.mailbox()
        self.pending: dict[str, PendingCall] = {}
        self._workers_address = target.control(group)
        self._callers_topic = target.topic(f"{group}.callers")
        self._credential = credential
        self._delegate = delegate
        self._sends_identity = target.trusted if send_identity is None else send_identity
        self._waiting = 0
        self._waiting_bytes = 0
        self._aborts: deque[PendingCall] = deque(maxlen=MAX_ABORTS)
        self._is_aborting = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._served: dict[str, tuple[str, bool]] = {}
        """The reply addresses of served requests, and whether they are subscriptions."""

    def __len__(self) -> int:
        return len(self.pending)

    @property
    def pending_count(self) -> int:
        """The number of calls and subscriptions that have not ended."""
        return len(self.pending)

    @abstractmethod
    def receive(self, delivery: Delivery) -> None:
        """Process an event that arrived through the target."""

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine in the background."""
        return start_task(self._tasks, work)

    # ---------------------------------------------------------------------------------------- requests

    def _request(
        self,
        operation_id: str,
        input: Any,
        context: OperationContext | None,
        limit: float,
        identity: Identity | None,
        credential: str | None,
        metadata: JSONObject | None,
    ) -> RequestPayload:
        """Return the request of a new call that may take `limit` seconds.

        Raises:
            CallError: `VALIDATION_ERROR` if the input or the metadata is not JSON.
        """
        bounded = limit != NEVER
        parent = None
        if context is not None:
            parent = context.request_id
            identity = context.identity if identity is None else identity
            if context.metadata:
                metadata = {**context.metadata, **(metadata or {})}
        if credential is None:
            # An empty credential is sent and then rejected, so that no caller becomes anonymous by mistake.
            credential = self._credential
            # Not used for listings, and for calls on the authority of the operator or of an operation.
            if (
                self._delegate is not None
                and context is not None
                and not context.trusted
                and context.authority is None
            ):
                credential = self._delegate(operation_id, context)
        try:
            value = as_json(input)
            metadata = None if metadata is None else as_json(metadata)
        except (TypeError, ValueError, RecursionError) as error:
            raise not_json(operation_id, error) from error
        return RequestPayload(
            request_id=new_request_id(),
            operation_id=operation_id,
            input=value,
            parent_request_id=parent,
            deadline=(time() + limit) * 1000 if bounded else None,
            timeout_ms=limit * 1000 if bounded else None,
            # On other targets workers ignore it, and other clients may be able to read it.
            identity=identity if self._sends_identity else None,
            credential=credential,
            metadata=metadata,
            reply_to=self.mailbox or None,
        )

    async def _send(self, call: PendingCall) -> None:
        """Send a request to the group; return early if the call ends.

        Raises:
            CallError: `UNAVAILABLE`, `RESOURCE_EXHAUSTED` or `VALIDATION_ERROR`; the request was not delivered.
        """
        request, target = call.payload, self.target
        if call.sends:
            request = call.payload = replace(request, resends=call.sends)
        try:
            body = encode_event(CallRequested(payload=request))
        except (TypeError, ValueError, RecursionError) as error:
            raise not_json(request.operation_id, error) from error
        size = len(body)
        refused = refusal_of(body, target, "request")
        if refused is not None:
            try:
                raise refused
            finally:
                del refused  # it refers to this frame
        is_much = self._waiting > 0 and self._waiting_bytes + size > MAX_WAITING_BYTES
        if (is_much or self._waiting >= MAX_WAITING) and not target.is_connected:
            reason = "too many calls are waiting for the broker"
            raise CallError(ErrorCode.UNAVAILABLE, reason, begun=False)
        call.sends += 1
        detector = self._detector
        call.departures = detector.departures if detector.is_complete else -1
        restorations = detector.restorations
        # A broker drops a message whose key it has already received.
        key = request.request_id if call.sends == 1 else f"{request.request_id}-{call.sends}"
        self._waiting += 1
        self._waiting_bytes += size
        loop = asyncio.get_running_loop()
        task = call.sender = cast("asyncio.Task[Any]", asyncio.current_task(loop))
        cancellations = task.cancelling()
        try:
            try:
                receipt = await self._deliver(body, key, call.to, PATIENCE)
            except TransportError as error:
                receipt = await self._deliver_again(error, body, key, call.to)
            if target.names_consumer:
                # Only this worker can have the request.
                call.worker = receipt or call.to or None
                self._release(call)
                call.consumer = receipt or ""
                if request.request_id not in self.pending:
                    self._release(call)
            else:
                call.receipt = receipt or ""
        except asyncio.CancelledError:
            # Other code may have cancelled the task as well.
            if call.interrupted is not task or task.cancelling() > cancellations + 1:
                raise
        finally:
            if call.sender is task:
                call.sender = None
            if call.interrupted is task:
                call.interrupted = None
                task.uncancel()
            self._waiting -= 1
            self._waiting_bytes -= size
        if detector.restorations != restorations:
            # The request may have been sent over a new connection, with other workers present.
            call.departures = -1
        call.sent_at = call.seen_at = loop.time()

    # Not a coroutine: the caller awaits the returned awaitable, which saves one step per call.
    def _deliver(
        self, body: bytes, key: str, worker: str, wait: float
    ) -> Coroutine[Any, Any, str | None]:
        """Send a request to one worker or to the group; return its receipt, if there is one."""
        if worker:
            return self.target.send(worker, body)
        return self.target.enqueue(self.group, body, key=key, reply_to=self.mailbox, wait=wait)

    async def _deliver_again(
        self, error: TransportError, body: bytes, key: str, worker: str
    ) -> str | None:
        """Send a request that found no worker again, while workers may be reconnecting; return its receipt.

        Raises:
            CallError: If the request was not delivered for another reason.
        """
        while isinstance(error, NoReceiverError) and self._detector.expects_workers():
            await asyncio.sleep(RETRY)
            try:
                return await self._deliver(body, key, worker, RETRY)
            except TransportError as failure:
                error = failure
        if isinstance(error, TooLargeError):
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, str(error)) from error
        if isinstance(error, QueueFullError):
            code = ErrorCode.RESOURCE_EXHAUSTED
            raise CallError(code, str(error), retryable=True, begun=False) from error
        if isinstance(error, NotSentError):
            raise CallError(ErrorCode.UNAVAILABLE, str(error), begun=False) from error
        logger.debug("%s may not have been sent: %s", key, error)
        return None

    def _remove(self, request_id: str, *, has_failed: bool = False) -> PendingCall | None:
        """Remove a call that has ended; return None if it was already removed."""
        call = self.pending.pop(request_id, None)
        if call is not None and call.consumer:
            if has_failed:
                asyncio.get_running_loop().call_later(_FAILED_SECONDS, self._release, call)
            else:
                self._release(call)
        return call

    def _release(self, call: PendingCall) -> None:
        """Tell the target that its consumer has one request less."""
        if call.consumer:
            self.target.release(self.group, call.consumer)
            call.consumer = ""

    def _ask_to_stop(self, call: PendingCall) -> None:
        """Ask the worker that has the call, or all workers, to stop it. Runs in the background."""
        # One task sends all aborts, so that many cancelled calls do not start many tasks.
        self._aborts.append(call)
        if not self._is_aborting:
            self._is_aborting = True
            self._spawn(self._send_aborts())

    async def _send_aborts(self) -> None:
        try:
            while self._aborts:
                call = self._aborts.popleft()
                event = CallAborted(payload=AbortPayload(request_id=call.payload.request_id))
                await self._post(call.worker or self._workers_address, encode_event(event))
        finally:
            self._is_aborting = False

    def _grant(self, request_id: str) -> None:
        """Send credit after an item was read, if the worker needs it. Runs in the background."""
        call = self.pending.get(request_id)
        # A worker without an address does not support credit.
        if call is None or call.stream is None or call.worker is None:
            return
        credit = call.stream.grant()
        if credit is not None:
            self._spawn(self._post(call.worker, credit))

    async def _post(self, address: str, body: bytes) -> None:
        """Send a message and ignore failures: aborted calls have deadlines, and credit is sent again."""
        try:
            await self.target.send(address, body)
        except TransportError as error:
            logger.debug("a message could not be sent: %s", error)

    # ---------------------------------------------------------------------------------------- replies

    def serve(self, request: RequestPayload, reply_to: str) -> None:
        """Store the address for replies to a request. Needed on targets with queues (Redis, NATS)."""
        self._served[request.request_id] = reply_to, request.credit is not None

    def address_of(self, request_id: str) -> str:
        """Return the address for replies to a request.

        Raises:
            ValueError: If it is unknown and the target delivers replies only to the caller's own mailbox.
        """
        if request_id in self.pending:
            return self.mailbox
        address, _ = self._served.get(request_id, ("", False))
        if address:
            return address
        if self.target.broadcasts_replies:
            return self._callers_topic
        raise ValueError(
            f"no address is known for replies to request {request_id!r}: "
            "announce the request with serve(request, reply_to) first"
        )

    async def respond(self, request_id: str, envelope: Any, *, sequence: int | None = None) -> None:
        """Publish the reply to a request; with a `sequence`, as one item of a subscription.

        Raises:
            TypeError: If `output` is not an envelope.
            ValueError: If the target has queues and the request is unknown, so that the reply has no address.
            TransportError: If it cannot be sent.
        """
        lifted = lift_envelope(envelope)
        if lifted is None:
            raise TypeError("only a response envelope can be a reply: use local_envelope(...)")
        if sequence is None:
            _, is_stream = self._served.get(request_id, ("", False))
            await self._reply(request_id, encode_response(request_id, lifted), last=not is_stream)
        else:
            body = encode_item(request_id, lifted, sequence, self.mailbox)
            await self._reply(request_id, body, last=False)

    async def emit_error(
        self,
        request_id: str,
        code: str,
        message: str,
        details: Any = None,
        *,
        retryable: bool | None = None,
    ) -> None:
        """Publish an error as the reply to a request; by default only `UNAVAILABLE` is retryable.

        Raises:
            ValueError: As `respond`.
            TransportError: If it cannot be sent.
        """
        error = CallError(code, message, details, retryable=retryable)
        await self._reply(request_id, encode_error(request_id, error), last=True)

    async def complete(self, request_id: str, *, sequence: int | None = None) -> None:
        """Publish the end of a subscription.

        Raises:
            ValueError: As `respond`.
            TransportError: If it cannot be sent.
        """
        event = CallCompleted(payload=CompletePayload(request_id=request_id, sequence=sequence))
        await self._reply(request_id, encode_event(event), last=True)

    async def _reply(self, request_id: str, body: bytes, *, last: bool) -> None:
        address = self.address_of(request_id)
        is_own = request_id in self.pending
        if last:
            self._served.pop(request_id, None)
        if self.target.direct and is_own:
            # The target reaches only the peer, but the caller is in this process.
            self.receive(Delivery(body))
        await self.target.send(address, body)


class CallStream:
    """An async iterator of envelopes. Close it with `aclose` from any task, or by dropping the last reference."""

    def __init__(
        self,
        drop: Callable[[str], None],
        grant: Callable[[str], None],
        operation_id: str,
        start: Callable[[], Coroutine[Any, Any, StreamEntry]],
        idle_timeout: float | None,
    ) -> None:
        self._drop = drop
        self._grant = grant
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
        self._grant(entry.request_id)
        return envelope

    async def _open(self) -> StreamEntry:
        self._loop = asyncio.get_running_loop()
        try:
            entry = await self._start()
        except BaseException:
            self._closed = True
            raise
        if self._closed:
            # Closed by another task while it was being opened.
            self._drop(entry.request_id)
            raise StopAsyncIteration
        self._entry = entry
        return entry

    async def aclose(self) -> None:
        """Stop reading and ask the worker to stop. Closing twice, or from another task, is harmless."""
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


def not_json(operation_id: str, error: Exception) -> CallError:
    """Return the error for an input that is not JSON."""
    found = error if isinstance(error, JSONValueError) else JSONValueError(f"is not JSON: {error}")
    issue = ValidationIssue(path=found.path, message=found.reason, keyword="json")
    return misfit(ErrorCode.VALIDATION_ERROR, f"Invalid input of {operation_id}", [issue])


def remaining(context: OperationContext | None, limit: float) -> float:
    """Return the time limit of a call in seconds: `limit`, or the remaining time of its context."""
    if context is None or context.deadline is None:
        return limit
    return min(limit, context.deadline / 1000 - time())


def enforce_number(name: str, seconds: object) -> None:
    """Raise `VALIDATION_ERROR` if a timeout is not a number."""
    if not isinstance(seconds, (int, float)) or isnan(seconds):
        # With NaN, the call would never end, because comparisons with NaN are false.
        reason = f"{name} is not a number: give seconds, or None for the default"
        raise CallError(ErrorCode.VALIDATION_ERROR, reason)


def closed_error() -> CallError:
    """Return the error of calls on a closed map."""
    return CallError(ErrorCode.ABORTED, "the calls were closed", retryable=False)
