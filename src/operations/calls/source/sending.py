"""Send the messages of a client: requests, aborts and credit, and replies to requests that the program serves.

Rule 1: a request that certainly was not delivered is sent again while workers may be reconnecting; after that it fails
        with `UNAVAILABLE`. A request that its worker did not start is sent to another worker.
Rule 2: whether a request that may have started is sent again is decided by the failure detector.
Rule 3: the deadline of a call also limits the time for sending it.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine
from math import isnan
from time import time
from typing import Any, cast

from msgspec.structs import replace

from operations.authority.grants import Delegate
from operations.base.deadline import NEVER
from operations.base.errors import (
    CallError,
    ErrorCode,
    NoReceiverError,
    NotPermittedError,
    NotSentError,
    QueueFullError,
    TooLargeError,
    TransportError,
)
from operations.base.json.values import JSONValueError, as_json, reject_masked
from operations.base.tasks import start_task
from operations.base.types import JSONObject
from operations.calls.protocol.events import (
    AbortPayload,
    CallAborted,
    CallCompleted,
    CallRequested,
    CompletePayload,
    ErrorPayload,
    RequestPayload,
    encode_error,
    encode_event,
    encode_item,
    encode_response,
    enforce_limits,
    milliseconds,
)
from operations.calls.protocol.states import MAX_SENDS, KnownWorkers, PendingCall, StreamEntry
from operations.calls.serving.jobs import quietly
from operations.calls.source.failure_detector import FailureDetector
from operations.calls.suspects import SuspectCalls
from operations.contract.access import Identity
from operations.contract.context import OperationContext, new_request_id
from operations.contract.envelopes import lift_envelope
from operations.pubsub.base import Delivery, EventTarget
from operations.registry.remotes import checked_digest, checked_operation
from operations.schema.explain import invalid_json

logger = logging.getLogger("operations")

CONNECT_SECONDS = 10.0
"""Seconds that a new call waits for a broker that cannot be reached."""

MAX_WAITING = 1000
MAX_WAITING_BYTES = 2 * 1024 * 1024
"""Limits on the number and size of calls that wait for a broker; further calls fail at once."""

MAX_ABORTS = 10_000
"""The largest number of unsent abort messages; the workers of further calls stop at the deadline."""

_REFUSALS: dict[type[NotSentError], tuple[ErrorCode, bool]] = {
    TooLargeError: (ErrorCode.RESOURCE_EXHAUSTED, False),
    QueueFullError: (ErrorCode.RESOURCE_EXHAUSTED, True),
    NotPermittedError: (ErrorCode.UNAVAILABLE, False),
}
"""The codes of requests that were not sent, and whether they may be sent later; by default `UNAVAILABLE`, true."""

_RETRY = 0.1
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
        self._workers = KnownWorkers()
        self._workers_address = target.control(group)
        self._callers_topic = target.topic(f"{group}.callers")
        self._credential = credential
        self._delegate = delegate
        self._sends_identity = target.trusted if send_identity is None else send_identity
        self._waiting = 0
        self._waiting_bytes = 0
        self._suspects = SuspectCalls(
            lambda call: self._spawn(self._send_again(call)),
            lambda call: call.payload.request_id in self.pending,
        )
        self._aborts: deque[PendingCall] = deque(maxlen=MAX_ABORTS)
        self._is_aborting = False
        self._tasks: set[asyncio.Task[Any]] = set()

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
            # Not used for listings, for calls of the operator, and for calls that an operation makes for an unknown
            # caller.
            if (
                self._delegate is not None
                and context is not None
                and not context.trusted
                and (context.authority is None or context.identity is not None)
            ):
                credential = self._delegate(checked_operation(operation_id, input), context)
        try:
            value = as_json(input)
            if value is not input:
                reject_masked(value, input)
            metadata = None if metadata is None else as_json(metadata)
        except (TypeError, ValueError, RecursionError) as error:
            raise not_json(operation_id, error) from error
        return RequestPayload(
            request_id=new_request_id(),
            operation_id=operation_id,
            input=value,
            parent_request_id=parent,
            deadline=milliseconds(time() + limit) if bounded else None,
            timeout_ms=milliseconds(limit) if bounded else None,
            # On other targets workers ignore it, and other clients may be able to read it.
            identity=identity if self._sends_identity else None,
            credential=credential,
            metadata=metadata,
            reply_to=self.mailbox or None,
            checked=None if context is None else checked_digest(operation_id, input, context),
        )

    def _encoded(self, call: PendingCall) -> bytes:
        """Return the request of a call, if it can be sent now.

        Raises:
            CallError: `UNAVAILABLE`, `RESOURCE_EXHAUSTED` or `VALIDATION_ERROR`.
        """
        if call.sends:
            call.payload = replace(call.payload, resends=call.sends)
        try:
            body = encode_event(CallRequested(payload=call.payload))
        except (TypeError, ValueError, RecursionError) as error:
            raise not_json(call.payload.operation_id, error) from error
        enforce_limits(body, self.target, "request")
        if call.payload.attempt > 1:
            # It was accepted before its worker was lost.
            return body
        is_much = self._waiting > 0 and self._waiting_bytes + len(body) > MAX_WAITING_BYTES
        if (is_much or self._waiting >= MAX_WAITING) and not self.target.is_connected:
            reason = "too many calls are waiting for the broker"
            raise CallError(ErrorCode.UNAVAILABLE, reason, begun=False)
        return body

    async def _send(self, call: PendingCall) -> None:
        """Send a request to the group; return early if the call ends.

        Raises:
            CallError: `UNAVAILABLE`, `RESOURCE_EXHAUSTED` or `VALIDATION_ERROR`; the request was not delivered.
        """
        body, target = self._encoded(call), self.target
        size = len(body)
        call.sends += 1
        detector, workers, worker = self._detector, self._workers, call.to
        if call.payload.attempt > 1 and not target.direct:
            worker = worker or workers.first()
        if target.chooses_worker:
            worker = worker or workers.choose()
            workers.occupy(call, worker)
        call.departures = workers.departures if workers.is_complete else -1
        restorations = detector.restorations
        # A broker drops a message whose key it has already received.
        key = call.payload.request_id
        if call.sends > 1:
            key = f"{key}-{call.sends}"
        self._waiting += 1
        self._waiting_bytes += size
        loop = asyncio.get_running_loop()
        task = call.sender = cast("asyncio.Task[Any]", asyncio.current_task(loop))
        cancellations = task.cancelling()
        # A call that was lost waits for its deadline.
        patience = CONNECT_SECONDS
        if call.payload.attempt > 1:
            patience = max(0.0, call.expires_at - loop.time())
        try:
            try:
                call.receipt = await target.enqueue(
                    self.group,
                    body,
                    key=key,
                    reply_to=self.mailbox,
                    wait=patience,
                    worker=worker,
                )
            except NoReceiverError as error:
                self.undelivered(key, worker, str(error))
                return
            except NotSentError as error:
                code, retryable = _REFUSALS.get(type(error), (ErrorCode.UNAVAILABLE, True))
                raise CallError(code, str(error), retryable=retryable, begun=False) from error
            except TransportError as error:
                logger.debug("%s may not have been sent: %s", key, error)
            if worker or target.chooses_worker:
                # Only this worker can have the request.
                call.worker = worker or None
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

    # ---------------------------------------------------------------------------------------- resending

    async def _resend(self, call: PendingCall, *, may_have_begun: bool = True) -> None:
        """Send a call again, to any worker."""
        call.misses = call.probes = 0
        call.sent_at = 0.0
        call.worker = None
        call.is_claimed = False
        call.dropped_by = frozenset()
        attempt = call.payload.attempt + may_have_begun
        call.payload = replace(call.payload, attempt=attempt)
        if attempt > 1:
            self._suspects.add(call)
        else:
            await self._send_again(call)

    async def _send_again(self, call: PendingCall, pause: float = 0.0) -> None:
        await asyncio.sleep(pause)
        if call.payload.request_id in self.pending:
            limit = None
            if call.expires_at != NEVER:
                limit = milliseconds(call.expires_at - asyncio.get_running_loop().time())
            call.payload = replace(call.payload, timeout_ms=limit)
            try:
                await self._send(call)
            except CallError as error:
                self._end(call.payload.request_id, error)

    def _send_elsewhere(self, call: PendingCall, failure: ErrorPayload) -> bool:
        """Send a request that its worker did not start to another worker; return False if there is none."""
        if failure.leaving and failure.retryable and call.stream is None:
            return self._continue_elsewhere(call, failure)
        if failure.begun is not False or not failure.retryable or self.target.direct:
            return False
        if failure.resends <= call.rejected or failure.resends < call.payload.resends:
            # A repeated reply, or one about an earlier copy: the next copy may run.
            return True
        if not self.target.chooses_worker and self._detector.may_be_restored(call):
            # Another worker may have started it before the outage, so all workers are asked.
            return True
        if call.sends >= MAX_SENDS or call.payload.request_id not in self.pending:
            return False
        if call.is_pinned:
            return False
        is_unavailable = failure.code == ErrorCode.UNAVAILABLE
        if failure.code == ErrorCode.OPERATION_NOT_FOUND or (is_unavailable and failure.missing):
            call.refused += (self._workers.specs_of(failure.worker),)
            call.unavailable = failure if is_unavailable else call.unavailable
        elif is_unavailable:
            self._workers.skip(failure.worker or "")
        else:
            return False
        if not self._redirect(call):
            if self._workers.have_reported.is_set():
                return False
            # The workers that have the operation may not have reported to this new client yet.
            self._spawn(self._await_workers(call, failure))
            return True
        call.rejected = failure.resends
        self._spawn(self._resend(call, may_have_begun=False))
        return True

    def _continue_elsewhere(self, call: PendingCall, failure: ErrorPayload) -> bool:
        """Send a request whose worker stops to another worker; return False if that is not possible."""
        if failure.resends < call.payload.resends:
            # A repeated reply.
            return True
        if self.target.direct or call.is_pinned or call.sends >= MAX_SENDS:
            return False
        self._workers.skip(failure.worker or "")
        if not self._workers.first():
            return False
        logger.info("%s is sent again: its worker stops", call.payload.request_id)
        call.rejected = failure.resends
        self._spawn(self._resend(call, may_have_begun=False))
        return True

    async def _await_workers(self, call: PendingCall, failure: ErrorPayload) -> None:
        """Send a refused request to another worker as soon as the workers have reported; end it if there is none."""
        await self._workers.have_reported.wait()
        if not self._send_elsewhere(call, failure):
            self._end(call.payload.request_id, (call.unavailable or failure).to_error())

    def _redirect(self, call: PendingCall) -> bool:
        """Let a call be sent to another worker; return False if all other versions have refused it."""
        call.to = self._workers.find_other(call.refused) if call.refused else ""
        return bool(call.to) or not call.refused

    def undelivered(self, key: str, worker: str = "", reason: str = "") -> None:
        """Handle a request for which the broker has no worker, with its reason."""
        if worker:
            self._detector.on_absent(worker)
        request_id, _, copy = key.partition("-")
        call = self.pending.get(request_id)
        if call is None or str(call.sends) != (copy or "1"):
            # It has ended, or another copy was sent.
            return
        # Nothing was sent, so the next copy has the same number.
        call.sends -= 1
        call.sent_at = 0.0
        if worker:
            may_be_sent = not call.is_pinned and self._redirect(call)
            reason = f"the worker of {call.payload.operation_id} left, and no other may run it"
        else:
            if self._detector.awaits_return(call):
                return
            may_be_sent = self._detector.expects_workers()
            none = f"no worker serves the group {self.group!r}; start a worker, or check the group"
            reason = reason or none
        if may_be_sent:
            # Without another worker of its version, the one that left may be reconnecting.
            self._spawn(self._send_again(call, 0.0 if worker and not call.to else _RETRY))
        else:
            self._end(request_id, CallError(ErrorCode.UNAVAILABLE, reason, begun=False))

    # ---------------------------------------------------------------------------------------- ending

    def _end(self, request_id: str, error: CallError) -> None:
        """End a pending call with `error`; does nothing if it has ended."""
        call = self._remove(request_id, has_failed=True)
        if call is not None:
            call.fail(error)

    def _remove(self, request_id: str, *, has_failed: bool = False) -> PendingCall | None:
        """Remove a call that has ended, and stop sending it; return None if it was already removed."""
        call = self.pending.pop(request_id, None)
        if call is None:
            return None
        self._suspects.release(call)
        if call.occupies:
            self._workers.release(call, has_failed=has_failed)
        if call.sender is not None:
            call.interrupt()
        return call

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
                if call.receipt and not call.is_claimed:
                    await quietly(self.target.withdraw(self.group, call.receipt))
        finally:
            self._is_aborting = False

    def _grant(self, worker: str | None, stream: StreamEntry) -> None:
        """Send credit after an item was read, if the worker needs it. Runs in the background."""
        # A worker without an address does not support credit.
        if worker is not None and (credit := stream.grant()) is not None:
            self._spawn(self._post(worker, credit))

    async def _post(self, address: str, body: bytes) -> None:
        """Send a message and ignore failures: aborted calls have deadlines, and credit is sent again."""
        await quietly(self.target.send(address, body))

    # ---------------------------------------------------------------------------------------- replies

    def address_of(self, request_id: str, reply_to: str | None) -> str:
        """Return the address for replies to a request that names `reply_to`.

        Raises:
            ValueError: If there is none, and the target delivers replies only to the caller's own mailbox.
        """
        if reply_to:
            return reply_to
        if request_id in self.pending:
            return self.mailbox
        if self.target.broadcasts_replies:
            return self._callers_topic
        raise ValueError(f"replies to request {request_id!r} have no address: pass its reply_to")

    async def respond(
        self,
        request_id: str,
        envelope: Any,
        *,
        sequence: int | None = None,
        reply_to: str | None = None,
    ) -> None:
        """Publish the reply to a request; with a `sequence`, as one item of a subscription.

        Args:
            request_id: The id of the request.
            envelope: The result.
            sequence: The position of an item, counted from 0.
            reply_to: The `replyTo` of the request. Needed on targets with queues (Redis, NATS).

        Raises:
            TypeError: If `envelope` is not an envelope.
            ValueError: If the reply has no address.
            TransportError: If it cannot be sent.
        """
        lifted = lift_envelope(envelope)
        if lifted is None:
            raise TypeError("only a response envelope can be a reply: use local_envelope(...)")
        if sequence is None:
            body = encode_response(request_id, lifted)
        else:
            body = encode_item(request_id, lifted, sequence, self.mailbox)
        await self._reply(request_id, body, reply_to)

    async def emit_error(
        self,
        request_id: str,
        code: str,
        message: str,
        details: Any = None,
        *,
        retryable: bool | None = None,
        reply_to: str | None = None,
    ) -> None:
        """Publish an error as the reply to a request; by default only `UNAVAILABLE` is retryable.

        Raises:
            ValueError: As `respond`.
            TransportError: If it cannot be sent.
        """
        error = CallError(code, message, details, retryable=retryable)
        await self._reply(request_id, encode_error(request_id, error), reply_to)

    async def complete(
        self, request_id: str, *, sequence: int | None = None, reply_to: str | None = None
    ) -> None:
        """Publish the end of a subscription.

        Raises:
            ValueError: As `respond`.
            TransportError: If it cannot be sent.
        """
        event = CallCompleted(payload=CompletePayload(request_id=request_id, sequence=sequence))
        await self._reply(request_id, encode_event(event), reply_to)

    async def _reply(self, request_id: str, body: bytes, reply_to: str | None) -> None:
        address = self.address_of(request_id, reply_to)
        if self.target.direct and request_id in self.pending:
            # The target reaches only the peer, but the caller is in this process.
            self.receive(Delivery(body))
        await self.target.send(address, body)


def not_json(operation_id: str, error: Exception) -> CallError:
    """Return the error for an input that is not JSON."""
    found = error if isinstance(error, JSONValueError) else JSONValueError(f"is not JSON: {error}")
    return invalid_json(operation_id, found)


def remaining(context: OperationContext | None, limit: float) -> float:
    """Return the time limit of a call in seconds: `limit`, or the remaining time of its context."""
    return limit if context is None else min(limit, context.remaining)


def enforce_number(name: str, seconds: object) -> None:
    """Raise `VALIDATION_ERROR` if a timeout is not a number."""
    if not isinstance(seconds, (int, float)) or isnan(seconds):
        # With NaN, the call would never end, because comparisons with NaN are false.
        reason = f"{name} is not a number: give seconds, or None for the default"
        raise CallError(ErrorCode.VALIDATION_ERROR, reason)


def closed_error() -> CallError:
    """Return the error of calls on a closed map."""
    return CallError(ErrorCode.ABORTED, "the calls were closed", retryable=False)
