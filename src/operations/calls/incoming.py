"""What arrives at a caller, and what becomes of the calls it is about.

Rule 1: the state table decides (`states`). What is about no open call is counted, and changes nothing.
Rule 2: nothing that arrives can stop the caller: what cannot be read is counted.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from operations.calls.events import (
    CallAborted,
    CallAlive,
    CallCompleted,
    CallEvent,
    CallFailed,
    CallRequested,
    CallResponded,
    LocalAnswer,
    LocalItem,
    MalformedEvent,
    RequestPayload,
    encode_error,
    local_item,
    read_event,
    read_output,
)
from operations.calls.failure_detector import FailureDetector
from operations.calls.outgoing import RETRY, Outgoing
from operations.calls.pending_call import PendingCall
from operations.calls.states import Expects, Verdict, judge
from operations.errors import CallError, ErrorCode, TransportError
from operations.pubsub.base import EventTarget


class Calls(Protocol):
    """What is needed of the map whose calls these are."""

    target: EventTarget
    group: str
    pending: dict[str, PendingCall]

    def end(self, request_id: str, error: CallError) -> None:
        """End a call."""
        ...

    def stop(self, call: PendingCall) -> None:
        """Tell the worker to stop."""
        ...

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run something in the background."""
        ...


class Incoming:
    """The receiver of one map.

    Attributes:
        ignored: Events for calls that are not open, and events of unknown types.
        malformed: Messages that were no events.
    """

    def __init__(self, calls: Calls, watch: FailureDetector, outgoing: Outgoing) -> None:
        self.ignored = 0
        self.malformed = 0
        self._calls = calls
        self._pending = calls.pending
        self._watch = watch
        self._outgoing = outgoing

    def receive(self, body: Any, reply_to: str, age: float = 0.0) -> None:
        """Take an event from the target."""
        if type(body) is LocalAnswer:
            self._take(body)
            return
        if type(body) is LocalItem:
            self._respond(body.event, body.size)
            return
        event = read_event(body, self._calls.target.max_values)
        if isinstance(event, CallResponded):
            self._respond(event, len(body))
        elif isinstance(event, (CallCompleted, CallFailed, CallAborted)):
            self._apply(event, 0)
        elif isinstance(event, CallAlive):
            self._watch.heard(event.payload)
        elif isinstance(event, MalformedEvent):
            self.malformed += 1
        elif isinstance(event, CallRequested):
            self._refuse(event.payload, reply_to)
        else:
            self.ignored += 1

    def _take(self, answer: LocalAnswer) -> None:
        call = self._pending.get(answer.request_id)
        if call is None:
            self.ignored += 1
        elif call.future is None:
            item = local_item(answer.request_id, answer.envelope, None, "", 0)
            self._apply(item.event, item.size)
        else:
            del self._pending[answer.request_id]
            if not call.future.done():
                call.future.set_result(answer.envelope)

    def _respond(self, event: CallResponded, size: int) -> None:
        call = self._pending.get(event.payload.request_id)
        if call is not None and call.expects is Expects.ONE:
            self._resolve(call, event)
        else:
            self._apply(event, size)

    def _resolve(self, call: PendingCall, event: CallResponded) -> None:
        payload = event.payload
        if payload.sequence is not None:
            # One of many answers, where one was expected.
            reason = f"{call.payload.operation_id} is a subscription: subscribe to it, for its many results"
            self._calls.stop(call)
            self._calls.end(payload.request_id, CallError(ErrorCode.VALIDATION_ERROR, reason))
            return
        try:
            envelope = read_output(payload.output)
        except ValueError as error:
            reason = f"the answer was no envelope: {error}"
            self._calls.end(payload.request_id, CallError(ErrorCode.UNKNOWN_ERROR, reason))
            return
        del self._pending[payload.request_id]
        call.succeed(envelope)

    def _apply(
        self, event: CallResponded | CallCompleted | CallFailed | CallAborted, size: int
    ) -> None:
        request_id = event.payload.request_id
        call = self._pending.get(request_id)
        verdict = judge(call.expects if call is not None else None, event)
        if call is None or verdict is Verdict.IGNORE:
            self.ignored += 1
            return
        if call.stream is None:
            self._calls.end(request_id, _ending(event))
            return
        call.seen_at = asyncio.get_running_loop().time()
        if isinstance(event, CallResponded) and event.payload.reply_to is not None:
            call.worker = event.payload.reply_to
        if call.stream.push(event, size, call.worker):
            self._pending.pop(request_id, None)
            if call.stream.must_stop:
                self._calls.stop(call)

    def _refuse(self, request: RequestPayload, reply_to: str) -> None:
        """Answer a request that reached this end of a connection, where nobody serves."""
        error = CallError(ErrorCode.UNAVAILABLE, "nobody serves operations at this end")
        self._calls.spawn(
            self._send(reply_to or request.reply_to or "", encode_error(request.request_id, error))
        )

    async def _send(self, address: str, body: bytes) -> None:
        try:
            await self._calls.target.send(address, body)
        except TransportError:
            # Whoever asked is gone.
            return

    def undelivered(self, key: str) -> None:
        """The broker found nobody to take a request."""
        request_id = key.partition("-")[0]
        call = self._pending.get(request_id)
        if call is None:
            return
        if self._watch.is_settling:
            loop = asyncio.get_running_loop()
            loop.call_later(RETRY, lambda: self._calls.spawn(self._put_again(call)))
        else:
            group = self._calls.group
            error = CallError(ErrorCode.UNAVAILABLE, f"nobody serves the group {group!r}")
            self._calls.end(request_id, error)

    async def _put_again(self, call: PendingCall) -> None:
        if call.payload.request_id not in self._pending:
            return
        try:
            await self._outgoing.send(self._calls.group, call)
        except CallError as error:
            self._calls.end(call.payload.request_id, error)

    def lost(self, reason: str) -> None:
        """The connection is gone; where it was the peer itself, so is everything asked of it."""
        if self._calls.target.direct:
            for request_id, call in tuple(self._pending.items()):
                # It may have run: whoever retries without looking would run it twice.
                is_safe = call.stream is not None or call.replayable is True
                error = CallError(ErrorCode.UNAVAILABLE, reason, retryable=is_safe)
                self._calls.end(request_id, error)

    def restored(self) -> None:
        """The connection is back; workers may take a moment longer."""
        self._watch.restored()


def _ending(event: CallEvent) -> CallError:
    """The error with which `event` ends a call that expected one answer."""
    if isinstance(event, CallFailed):
        return event.payload.to_error()
    if isinstance(event, CallAborted):
        return CallError(ErrorCode.ABORTED, "the call was aborted by its worker")
    return CallError(ErrorCode.UNKNOWN_ERROR, "the call was completed without an answer")
