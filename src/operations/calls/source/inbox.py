"""The events that a client receives, and the calls that they concern.

Rule 1: no message can stop the client: a malformed one is counted, and an event for a call that is not open is ignored.
"""

import asyncio
from typing import Any

from operations.base.errors import CallError, ErrorCode
from operations.calls.protocol.events import (
    AbortPayload,
    AlivePayload,
    CallAborted,
    CallAlive,
    CallCompleted,
    CallConfirmed,
    CallEvent,
    CallFailed,
    CallOffered,
    CallRequested,
    CallResponded,
    ConfirmPayload,
    MalformedEvent,
    OfferPayload,
    RequestPayload,
    ResponsePayload,
    encode_error,
    encode_event,
    read_event,
    read_output,
)
from operations.calls.protocol.states import KnownWorkers, PendingCall
from operations.calls.source.failure_detector import FailureDetector
from operations.calls.source.open_calls import OpenCalls
from operations.calls.source.redirects import Redirects
from operations.calls.source.sending import Outbox
from operations.contract.envelopes import ResponseEnvelope
from operations.pubsub.base import Delivery, EventTarget

_REPLIES = frozenset(
    kind.__struct_config__.tag for kind in (CallResponded, CallCompleted, CallFailed, CallAborted)
)


class ClientInbox:
    """Processes the events that one client receives.

    Args:
        target: Transports the events.
        open_calls: The calls of the client.
        outbox: Sends the responses to workers.
        workers: The workers that the client knows.
        detector: Processes the reports of workers.
        redirects: Sends requests that a worker did not start elsewhere.

    Attributes:
        ignored: Events for calls that are not open, and events of unknown types.
        malformed: Messages that are not events.
    """

    def __init__(
        self,
        target: EventTarget,
        open_calls: OpenCalls,
        outbox: Outbox,
        workers: KnownWorkers,
        detector: FailureDetector,
        redirects: Redirects,
    ) -> None:
        self.ignored = 0
        self.malformed = 0
        self._target = target
        self._open = open_calls
        self._outbox = outbox
        self._workers = workers
        self._detector = detector
        self._redirects = redirects

    def receive(self, delivery: Delivery) -> None:
        """Process an event that arrived through the target."""
        event = read_event(delivery.body, self._target.max_values)
        if type(event) is CallResponded:
            call = self._open.get(event.payload.request_id)
            if call is not None and call.future is not None:
                # The call expects one reply, so this is the last event.
                self._succeed(call, call.future, event.payload)
            else:
                self._apply(event, len(delivery.body))
        elif isinstance(event, (CallCompleted, CallFailed, CallAborted)):
            self._apply(event, len(delivery.body))
        elif isinstance(event, CallAlive):
            # Requests are sent to the address in it.
            if self._target.is_worker(event.payload.worker):
                self._receive_report(event.payload)
            else:
                self.malformed += 1
        elif isinstance(event, CallOffered):
            self._outbox.spawn(self._answer_offer(event.payload))
        elif isinstance(event, MalformedEvent):
            self.malformed += 1
            call = self._open.get(event.request_id)
            if call is not None and event.type in _REPLIES:
                self._outbox.abort(call, _unreadable(event))
        elif isinstance(event, CallRequested):
            self._reject(event.payload, delivery.reply_to)
        else:
            self.ignored += 1

    def _receive_report(self, alive: AlivePayload) -> None:
        """Process the report of a worker, and ask it which of its operations may run again if that is not known."""
        self._detector.on_alive(alive)
        if alive.replayable is not None:
            return
        if self._target.direct:
            # The peer serves other operations now.
            self._detector.asks_peer = True
        elif self._workers.needs_list(alive.specs, asyncio.get_running_loop().time()):
            self._outbox.spawn(self._detector.ask_for_list(alive.worker))

    def _apply(
        self, event: CallResponded | CallCompleted | CallFailed | CallAborted, size: int
    ) -> None:
        """Pass a reply to its call, or send the call to another worker if this one could not run it."""
        request_id = event.payload.request_id
        call = self._open.get(request_id)
        if call is None:
            self.ignored += 1
            return
        if isinstance(event, CallFailed):
            if self._redirects.send_elsewhere(call, event.payload):
                return
            if call.unavailable and event.payload.code == ErrorCode.OPERATION_NOT_FOUND:
                event = CallFailed(payload=call.unavailable)
        if call.stream is None:
            self._open.end(request_id, _failure_in(event))
            return
        call.seen_at = asyncio.get_running_loop().time()
        call.is_claimed = True
        if isinstance(event, CallResponded) and event.payload.reply_to is not None:
            call.worker = event.payload.reply_to
        if call.stream.push(event, size):
            self._open.remove(request_id)
            if call.stream.must_stop:
                self._outbox.ask_to_stop(call)

    def _succeed(
        self,
        call: PendingCall,
        future: "asyncio.Future[ResponseEnvelope[Any]]",
        payload: ResponsePayload,
    ) -> None:
        """End a call with its reply."""
        if payload.sequence is not None:
            reason = f"{call.payload.operation_id} is a subscription: use subscribe"
            self._outbox.abort(call, CallError(ErrorCode.VALIDATION_ERROR, reason))
            return
        try:
            envelope = read_output(payload.output)
        except ValueError as error:
            reason = f"the reply is not an envelope: {error}"
            self._open.end(payload.request_id, CallError(ErrorCode.UNKNOWN_ERROR, reason))
            return
        self._open.remove(payload.request_id)
        if not future.done():
            future.set_result(envelope)

    async def _answer_offer(self, offer: OfferPayload) -> None:
        """Allow a worker to start a request that waited, unless it may have started elsewhere or its call has ended."""
        refusal = AbortPayload(request_id=offer.request_id, resends=offer.resends)
        event: CallEvent = CallAborted(payload=refusal)
        if await self._detector.accepts(offer):
            event = CallConfirmed(payload=ConfirmPayload(request_id=offer.request_id))
        await self._outbox.post(offer.worker, encode_event(event))

    def _reject(self, request: RequestPayload, reply_to: str) -> None:
        """Reject a request, because this end of the connection serves no operations."""
        error = CallError(ErrorCode.UNAVAILABLE, "this end serves no operations")
        body = encode_error(request.request_id, error)
        self._outbox.spawn(self._outbox.post(reply_to or request.reply_to or "", body))

    def lost(self, reason: str) -> None:
        """Handle a lost connection. If the connection is the peer itself, its calls are lost as well."""
        self._detector.lost()
        if not self._target.direct:
            return
        for request_id, call in tuple(self._open.by_id.items()):
            if call.is_held:
                # It was not sent again yet.
                continue
            may_run_again = self._detector.may_run_again(call) is True
            if may_run_again and self._target.reconnects:
                # Sent again when the peer has returned.
                self._outbox.spawn(self._detector.replace(call))
            else:
                # A mutation may have run, and a retry could run it twice.
                is_safe = call.stream is not None or may_run_again
                error = CallError(ErrorCode.UNAVAILABLE, reason, retryable=is_safe)
                self._open.end(request_id, error)


def _unreadable(event: MalformedEvent) -> CallError:
    """Return the error of a call whose reply cannot be read."""
    if event.code == ErrorCode.RESOURCE_EXHAUSTED:
        return CallError(event.code, f"the result is too large: {event.reason}")
    return CallError(ErrorCode.UNKNOWN_ERROR, f"the reply is malformed: {event.reason}")


def _failure_in(event: CallEvent) -> CallError:
    """Return the error of a call that ends without a reply."""
    if isinstance(event, CallFailed):
        return event.payload.to_error()
    if isinstance(event, CallAborted):
        return CallError(ErrorCode.ABORTED, "the call was aborted by its worker")
    return CallError(ErrorCode.UNKNOWN_ERROR, "the call was completed without a reply")
