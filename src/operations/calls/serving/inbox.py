"""The events that a worker receives: requests become jobs, and most others concern a job.

Rule 1: a request runs once, even if it is delivered several times; a repeated delivery gets the first reply.
Rule 2: no message can stop the worker: a malformed one is counted, and rejected if it names a reply address.
Rule 3: a client can refer only to its own requests, and receives replies only at its own mailboxes.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from operations.base.deadline import NEVER
from operations.base.errors import CallError, ErrorCode
from operations.base.logs import LogThrottle
from operations.calls.protocol.events import (
    AbortPayload,
    CallAborted,
    CallConfirmed,
    CallCredited,
    CallEvent,
    CallProbed,
    CallRequested,
    FencePayload,
    MalformedEvent,
    ProbePayload,
    RequestPayload,
    UnknownEvent,
    check_request,
    encode_error,
    read_event,
)
from operations.calls.protocol.services import Presence, served_by
from operations.calls.serving.admission import AdmissionQueue
from operations.calls.serving.claims import Claims
from operations.calls.serving.jobs import (
    Job,
    Pace,
    Served,
    WorkerConfig,
    may_have_run,
    set_after,
    time_limits,
)
from operations.calls.serving.replies import Replies
from operations.pubsub.base import PUT_TYPE, Delivery, EventTarget, WorkerStats
from operations.registry.registry import OperationRegistry

logger = logging.getLogger("operations")


class WorkerInbox:
    """Processes the events that one worker receives.

    Args:
        registry: The operations that it serves.
        services: The operations that describe them.
        target: Transports the events.
        config: The settings of the worker.
        queue: The calls that wait for a slot.
        replies: Ends the jobs.
        claims: Decides whether a request may have run already.
        presence: Reports to callers.
        stats: Returns the counters of the worker.

    Attributes:
        malformed: Messages that are not events.
        ignored: Events of unknown types.
        duplicates: Requests that had already been received.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        services: OperationRegistry,
        target: EventTarget,
        config: WorkerConfig,
        queue: AdmissionQueue,
        replies: Replies,
        claims: Claims,
        presence: Presence,
        stats: Callable[[], WorkerStats],
    ) -> None:
        self.malformed = self.ignored = self.duplicates = 0
        self._registry, self._services = registry, services
        self._target = target
        self._shared = config.front
        self._queue = queue
        self._replies = replies
        self._claims = claims
        self._presence = presence
        self._stats = stats
        self._served: dict[str, Served] = {}
        self._served_revision = registry.revision
        self._misdirections = LogThrottle()
        self._loop = asyncio.get_running_loop()

    def receive(self, delivery: Delivery) -> None:
        """Process an event that arrived through the target."""
        event = read_event(delivery.body, self._target.max_values)
        if type(event) is CallRequested:
            request = event.payload
            address = delivery.reply_to or request.reply_to or ""
            if self._is_allowed(address, delivery.sender):
                self._admit(request, address, delivery)
                return
        if delivery.claim is not None:
            delivery.claim.remove()
        self._control(event, delivery)

    def _control(
        self, event: CallEvent | UnknownEvent | MalformedEvent, delivery: Delivery
    ) -> None:
        """Process an event that starts no call: most of them refer to a call that has arrived before."""
        sender = delivery.sender
        if type(event) is CallConfirmed:
            job = self._find(event.payload.request_id, sender)
            if job is not None and job.is_offered:
                cast("asyncio.Future[None]", job.confirmed).set_result(None)
        elif type(event) is CallAborted:
            self._abort(event.payload, sender)
        elif type(event) is CallCredited:
            job = self._find(event.payload.request_id, sender)
            if job is not None and job.pace is not None:
                job.pace.grant(event.payload.credit)
        elif type(event) is CallProbed:
            if self._is_allowed(event.payload.reply_to, sender):
                self._replies.spawn(self._account(event.payload, sender))
        elif type(event) is MalformedEvent:
            self._reject(event, delivery.reply_to, sender)
        elif type(event) is UnknownEvent:
            self.ignored += 1

    async def serve(self, request: RequestPayload, reply_to: str) -> None:
        """Run a request that did not arrive through the target; return when its last reply was sent.

        Cancelling this aborts the request.
        """
        replied = asyncio.Event()
        self._admit(request, reply_to, Delivery(b""), replied)
        try:
            await replied.wait()
        except asyncio.CancelledError:
            self._abort(AbortPayload(request_id=request.request_id), "")
            raise

    def _admit(
        self,
        request: RequestPayload,
        reply_to: str,
        delivery: Delivery,
        replied: asyncio.Event | None = None,
    ) -> None:
        """Queue a request, or reply to it if it is malformed, repeated or refused."""
        claim, key = delivery.claim, delivery.sender + request.request_id
        problem = check_request(request)
        if problem is not None:
            if claim is not None:
                claim.remove()
            malformed = MalformedEvent(problem, PUT_TYPE, request.request_id)
            set_after(self._reject(malformed, reply_to, delivery.sender), replied)
            return
        if not self._replies.recent.add(key, request.resends):
            self._repeat_reply(key, reply_to, delivery, replied)
            return
        job = self._job_of(request, reply_to, key, delivery)
        job.replied = replied
        if self._replies.is_leaving:
            # The queue is already closed; this request arrived in another way.
            self._replies.refuse(job, CallError(ErrorCode.UNAVAILABLE, "the worker stops"))
            return
        self._replies.add(job)
        if not job.replayable:
            if request.attempt > 1 and self._shared is None:
                self._replies.refuse(job, may_have_run(job))
                return
            job.is_stale = replied is None and self._claims.is_stale(delivery.age)
        elif claim is not None and claim.is_fresh and request.attempt == 1:
            claim.remove()
            job.claim = None
        if job.is_suspect and replied is None:
            # Otherwise the death of this worker would count as an attempt that the request did not have.
            job.is_stale = True
        try:
            self._queue.offer(job)
        except CallError as error:
            self._replies.refuse(job, error)

    def _repeat_reply(
        self, key: str, reply_to: str, delivery: Delivery, replied: asyncio.Event | None
    ) -> None:
        """Remove a request that arrived before, and send its reply again if there is one."""
        self.duplicates += 1
        known = self._replies.jobs.get(key)
        # A job that has not started removes the request itself.
        if delivery.claim is not None and (known is None or known.claim is None):
            delivery.claim.remove()
        reply = self._replies.recent.last_reply(key, reply_to)
        sending = (
            None if reply is None else self._replies.spawn(self._replies.send(reply_to, reply))
        )
        set_after(sending, replied)

    def _job_of(self, request: RequestPayload, reply_to: str, key: str, delivery: Delivery) -> Job:
        """Return the job of a request that has just arrived."""
        served = self._served.get(request.operation_id)
        if served is None or self._registry.revision != self._served_revision:
            served = self._look_up(request.operation_id)
        target, credit, timeout = self._target, request.credit, request.timeout_ms
        age = max(delivery.age, 0.0)
        is_stream, idle = served.is_stream or credit is not None, NEVER
        if timeout is not None and not is_stream and self._shared is None:
            # The usual request, from a client of this package.
            limit = timeout / 1000 - age
        else:
            limit, idle = time_limits(request, age, served, self._shared)
        now = self._loop.time()
        identity = None
        if request.credential is None:
            identity = request.identity if target.trusted else None
            identity = identity or target.identity
        return Job(
            request,
            reply_to,
            key,
            len(delivery.body),
            served.registry,
            served.spec,
            served.replayable,
            is_stream,
            now,
            now - age,
            now + limit,
            idle,
            now + min(limit, idle),
            identity,
            None if credit is None else Pace(credit),
            delivery.claim,
        )

    def _look_up(self, operation_id: str) -> Served:
        """Return the settings of an operation, cached until the registry changes."""
        if self._registry.revision != self._served_revision:
            self._served_revision = self._registry.revision
            self._served.clear()
        served = served_by(self._registry, self._services, operation_id)
        if served.spec is not None:
            self._served[operation_id] = served
        return served

    def _find(self, request_id: str, sender: str) -> Job | None:
        """Return the job of a request, if the event comes from its own client."""
        job = self._replies.jobs.get(sender + request_id)
        if job is None:
            # The request arrived through a call handler, so that only its reply address identifies the caller.
            job = self._replies.jobs.get(request_id)
            job = job if job is not None and job.reply_to.startswith(sender) else None
        return job

    def _is_allowed(self, address: str, sender: str) -> bool:
        """Return whether a client may use `address` for replies: one of its own mailboxes, or none."""
        if not address or address.startswith(sender):
            return True
        level = self._misdirections.level()
        logger.log(level, "a message was dropped: its reply address does not begin with %r", sender)
        return False

    def _abort(self, abort: AbortPayload, sender: str) -> None:
        """Stop a job at the request of its caller, or drop an offered one."""
        job = self._find(abort.request_id, sender)
        copy = abort.resends
        # An offer that was sent twice is also rejected twice.
        if copy is not None and (job is None or not job.is_offered or job.request.resends != copy):
            return
        if job is None:
            # The abort may have overtaken the request, which then counts as already received.
            self._replies.recent.add(sender + abort.request_id)
            return
        if job.is_offered:
            # Another worker may have the call, and its caller waits for that worker's reply.
            self._replies.drop(job)
        self._replies.stop(job, CallError(ErrorCode.ABORTED, "the call was aborted"))

    def _reject(
        self, event: MalformedEvent, reply_to: str, sender: str
    ) -> "asyncio.Task[Any] | None":
        """Reply to a malformed request in the background; None if it has no id or no reply address of its client."""
        self.malformed += 1
        address = reply_to or event.reply_to
        has_reader = bool(address) or self._target.broadcasts_replies
        is_readable = event.type == PUT_TYPE and event.request_id and has_reader
        if not is_readable or not self._is_allowed(address, sender):
            return None
        error = CallError(event.code, f"the request is malformed: {event.reason}")
        return self._replies.spawn(
            self._replies.send(address, encode_error(event.request_id, error))
        )

    async def _account(self, probe: ProbePayload, sender: str) -> None:
        """Report which of a caller's calls this worker runs, and send the replies of finished ones again."""
        held: list[str] = []
        for request_id in dict.fromkeys(probe.request_ids):
            job = self._find(request_id, sender)
            reply = self._replies.recent.last_reply(sender + request_id, probe.reply_to)
            reply = reply or self._replies.recent.last_reply(request_id, probe.reply_to)
            # Reported only to the client that made the call.
            if job is not None and job.reply_to == probe.reply_to:
                job.heard_at = self._loop.time()
                if job.is_offered:
                    # Not reported as a claim, because another worker may have started the same request.
                    await self._replies.send(job.reply_to, job.offer(self._replies.mailbox))
                # Until the request is removed from its queue, another worker may consume it.
                elif job.claim is None:
                    held.append(request_id)
            elif reply is not None:
                await self._replies.send(probe.reply_to, reply)
        if probe.holders and not held:
            return
        await self._presence.report(
            probe.reply_to,
            request_ids=held,
            fenced=[fence for fence in probe.fences if self._fence(fence, sender)],
            leaving=self._replies.is_leaving and not held,
            stats=self._stats() if probe.stats else None,
            replayable=self._presence.replayable() if probe.replayable else None,
        )

    def _fence(self, fence: FencePayload, sender: str) -> bool:
        """Drop a copy of a request; return False if it has started, or may have started and is no longer stored."""
        request_id, age = fence.request_id, fence.age_ms / 1000
        key = sender + request_id
        job = self._find(request_id, sender)
        if job is None:
            if not all(self._replies.recent.never_had(each, age) for each in (key, request_id)):
                return False
        elif job.is_started and job.claim is None and not job.is_offered:
            return False
        else:
            # The caller decides: it will not confirm this copy any more.
            job.is_stale = True
        self._replies.recent.fence(key, fence.resends)
        return True
