"""Requests that no worker has started: send them to another worker, or end their calls.

Rule 1: a request that its worker did not start is sent to another worker that may have the operation.
Rule 2: a request that certainly was not delivered is sent again while workers may be reconnecting; after that it fails
        with `UNAVAILABLE`.
"""

import logging

from operations.base.errors import CallError, ErrorCode
from operations.calls.protocol.events import ErrorPayload
from operations.calls.protocol.states import MAX_SENDS, KnownWorkers, PendingCall
from operations.calls.source.failure_detector import FailureDetector
from operations.calls.source.open_calls import OpenCalls
from operations.calls.source.sending import Outbox
from operations.pubsub.base import EventTarget

logger = logging.getLogger("operations")

_RETRY = 0.1
"""Seconds between attempts while workers may be reconnecting."""


class Redirects:
    """Sends the requests of one client that no worker has started elsewhere.

    Args:
        target: Transports the requests.
        group: The worker group.
        open_calls: The calls of the client.
        outbox: Sends the requests.
        workers: The workers that the client knows.
        detector: Decides whether workers may return.
    """

    def __init__(
        self,
        target: EventTarget,
        group: str,
        open_calls: OpenCalls,
        outbox: Outbox,
        workers: KnownWorkers,
        detector: FailureDetector,
    ) -> None:
        self._target = target
        self._group = group
        self._open = open_calls
        self._outbox = outbox
        self._workers = workers
        self._detector = detector

    def send_elsewhere(self, call: PendingCall, failure: ErrorPayload) -> bool:
        """Send a request that its worker did not start to another worker; return False if there is none."""
        if failure.leaving and failure.retryable and call.stream is None:
            return self._continue_elsewhere(call, failure)
        if failure.begun is not False or not failure.retryable or self._target.direct:
            return False
        if failure.resends <= call.rejected or failure.resends < call.payload.resends:
            # A repeated reply, or one about an earlier copy: the next copy may run.
            return True
        if not self._target.chooses_worker and self._detector.may_be_restored(call):
            # Another worker may have started it before the outage, so all workers are asked.
            return True
        if call.sends >= MAX_SENDS or not self._open.is_open(call):
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
        if not self._outbox.redirect(call):
            if self._workers.have_reported.is_set():
                return False
            # The workers that have the operation may not have reported to this new client yet.
            self._outbox.spawn(self._await_workers(call, failure))
            return True
        call.rejected = failure.resends
        self._outbox.spawn(self._outbox.resend(call, may_have_begun=False))
        return True

    def _continue_elsewhere(self, call: PendingCall, failure: ErrorPayload) -> bool:
        """Send a request whose worker stops to another worker; return False if that is not possible."""
        if failure.resends < call.payload.resends:
            # A repeated reply.
            return True
        if self._target.direct or call.is_pinned or call.sends >= MAX_SENDS:
            return False
        self._workers.skip(failure.worker or "")
        if not self._workers.first():
            return False
        logger.info("%s is sent again: its worker stops", call.payload.request_id)
        call.rejected = failure.resends
        self._outbox.spawn(self._outbox.resend(call, may_have_begun=False))
        return True

    async def _await_workers(self, call: PendingCall, failure: ErrorPayload) -> None:
        """Send a refused request to another worker as soon as the workers have reported; end it if there is none."""
        await self._workers.have_reported.wait()
        if not self.send_elsewhere(call, failure):
            self._open.end(call.payload.request_id, (call.unavailable or failure).to_error())

    def undelivered(self, key: str, worker: str = "", reason: str = "") -> None:
        """Handle a request for which the broker has no worker, with its reason."""
        if worker:
            self._detector.on_absent(worker)
        request_id, _, copy = key.partition("-")
        call = self._open.get(request_id)
        if call is None or str(call.sends) != (copy or "1"):
            # It has ended, or another copy was sent.
            return
        # Nothing was sent, so the next copy has the same number.
        call.sends -= 1
        call.sent_at = 0.0
        if worker:
            may_be_sent = not call.is_pinned and self._outbox.redirect(call)
            reason = f"the worker of {call.payload.operation_id} left, and no other may run it"
        else:
            if self._detector.awaits_return(call):
                return
            may_be_sent = self._detector.expects_workers()
            none = f"no worker serves the group {self._group!r}; start a worker, or check the group"
            reason = reason or none
        if may_be_sent:
            # Without another worker of its version, the one that left may be reconnecting.
            self._outbox.spawn(
                self._outbox.send_again(call, 0.0 if worker and not call.to else _RETRY)
            )
        else:
            self._open.end(request_id, CallError(ErrorCode.UNAVAILABLE, reason, begun=False))
