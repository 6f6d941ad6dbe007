"""A worker: consumes the requests of its group from a target and runs them on a registry.

Rule 1: `serve_calls` yields when the worker receives requests. At the end of its block, running requests are finished.
Rule 2: a request runs once, even if it is delivered several times; a repeated delivery gets the first reply.
Rule 3: a request that waited longer than a heartbeat, or that was queued before the worker connected, may already have
        run. Unless its operation is replayable, it starts only if its caller confirms it. The same applies to every
        request on a target with signed messages, where other clients may repeat messages.
Rule 4: no message can stop the worker: a malformed one is counted, and rejected if it names a reply address.
Rule 5: a client can refer only to its own requests, and receives replies only at its own mailboxes.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any, cast

import msgspec

from operations.base.deadline import NEVER
from operations.base.errors import CallError, ErrorCode, TransportError
from operations.base.logs import LogThrottle
from operations.base.tasks import cancel_tasks, shielded, shutdown_event
from operations.base.types import options_of
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
from operations.calls.protocol.services import Presence, served_by, service_operations
from operations.calls.protocol.states import Outages
from operations.calls.serving.execution import JobRunner
from operations.calls.serving.jobs import (
    Job,
    Pace,
    Served,
    WorkerConfig,
    may_have_run,
    set_after,
    time_limits,
    watch_callers,
    watch_loop_lag,
)
from operations.calls.serving.runs import run_verbs
from operations.pubsub.base import PUT_TYPE, Delivery, EventTarget, Receiver, WorkerStats, usable
from operations.pubsub.delivery import Recent
from operations.pubsub.signing import SignedTarget
from operations.registry.registry import OperationRegistry

logger = logging.getLogger("operations")

_CLOSING = 1.0
"""Seconds for cancelled handlers to end, and for last replies, when a worker stops."""

_REPLY_SECONDS = 20.0
"""Seconds before an outage was noticed in which replies may not have arrived: a silent connection is closed later."""


class CallServer(JobRunner, Receiver):
    """A running worker, created by `serve_calls`.

    Attributes:
        malformed: Messages that are not events.
        ignored: Events of unknown types.
        duplicates: Requests that had already been received.
        is_serving: Whether it accepts requests.
        grace: Seconds that running calls have to finish when the worker stops.
        reason_to_stop: The error for calls that end with the worker, instead of `UNAVAILABLE`.
    """

    def __init__(
        self, registry: OperationRegistry, target: EventTarget, config: WorkerConfig
    ) -> None:
        super().__init__(registry, target, config)
        self.backlog: int | None = config.concurrency + config.max_waiting
        self.malformed = self.ignored = self.duplicates = 0
        self.is_serving, self.grace = False, config.grace
        self.reason_to_stop: CallError | None = None
        self._services = OperationRegistry(
            [
                *service_operations(registry, target),
                *run_verbs(registry, expose=self._exposes_errors),
            ]
        )
        self._presence = Presence(registry, target, config, self.mailbox, lambda: self._is_leaving)
        self._served: dict[str, Served] = {}
        self._served_revision = registry.revision
        self._misdirections = LogThrottle()
        self._outages, self._connected_at = Outages(), 0.0
        self._watching: list[asyncio.Task[Any]] = []
        self._accepting, self._listening = AsyncExitStack(), AsyncExitStack()

    # ---------------------------------------------------------------------------------------- lifetime

    @property
    def active(self) -> int:
        """The number of calls that run now."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a slot."""
        return self._admission.waiting

    def stats(self) -> WorkerStats:
        """Return the counters as operators see them."""
        now = {"running": self.active, "waiting": self.waiting, "leaving": self._is_leaving}
        return msgspec.structs.replace(self.counters, **now)

    async def start(self) -> None:
        """Listen, and consume requests from the target.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        await self.listen()
        consuming = await self.target.consume(self.group, self)
        self._accepting.push_async_callback(consuming.aclose)
        self._presence.accepts = True
        if not self.target.direct:
            await self._presence.announce()
        advertised = await self.target.advertise(self.group, self.stats)
        if advertised is not None:
            self._accepting.push_async_callback(advertised.aclose)

    def capacity(self) -> int:
        """Return the number of requests that can start now."""
        return self._admission.free

    async def listen(self) -> None:
        """Subscribe to aborts, credit and probes, and announce this worker to the callers.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        addresses = (self.mailbox, self.target.control(self.group))
        listening = await self.target.listen(addresses, self)
        self._listening.push_async_callback(listening.aclose)
        self._connected_at = self._loop.time()
        # Callers must know a worker before it can receive their calls, to be able to detect that it is lost.
        self._is_leaving = False
        revision = self.registry.revision
        self._presence.note_specs()
        if not self.target.direct:
            await self._presence.announce(arrived=True)
        self.is_serving = True
        self._watching = [
            self._spawn(watch_loop_lag(self.jobs)),
            self._spawn(self._presence.watch_specs(revision)),
        ]
        if not self.target.direct:
            watching = watch_callers(
                self.target, self.jobs, self._outages, self._config.patience, self._give_up
            )
            self._watching.append(self._spawn(watching))

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, or until the peer of this worker disconnects; then drain.

        A second signal ends the process at once.
        """
        with shutdown_event() as shutdown:
            # Only the server side of a WebSocket has `wait_closed`, because its connection is not restored.
            wait_closed = getattr(self.target, "wait_closed", asyncio.Event().wait)
            ends = self._spawn(shutdown.wait()), self._spawn(wait_closed())
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_tasks(*ends)
            await self.aclose()

    @shielded
    async def aclose(self) -> None:
        """Stop accepting requests, wait `grace` seconds for running calls, and end the rest with `UNAVAILABLE`.

        The error is retryable except for mutations that have started. Waiting requests are rejected at once.
        """
        was_serving, self.is_serving = self.is_serving, False
        async with AsyncExitStack() as ending:
            # A step that is cancelled ends early, but all later steps follow.
            ending.push_async_callback(self._services.aclose)
            ending.push_async_callback(self._end_tasks)
            # Requests that arrive until then are rejected in the background.
            ending.push_async_callback(self._stop_listening)
            ending.callback(self._give_up_all)
            await self._drain(was_serving)

    async def _drain(self, was_serving: bool) -> None:
        with suppress(TransportError):
            await self._accepting.aclose()
        self._is_leaving, self._presence.accepts = True, False
        if was_serving and not self.target.direct:
            if self.target.is_connected:
                await self._presence.announce()
            for job in [job for job in self.jobs.values() if not (job.begun or job.is_acquiring)]:
                self._give_up(job, "the worker stops")
        with suppress(TimeoutError):
            async with asyncio.timeout(self.grace):
                if self.jobs:
                    self._idle.clear()
                    await self._idle.wait()
                had_calls = self._finished_at > self._outages.lost_at - _REPLY_SECONDS
                if was_serving and had_calls and not self.target.direct:
                    # Callers that reconnect ask for their replies, and which of their requests did not start here.
                    await self._outages.settle()

    def _give_up_all(self) -> None:
        self._is_leaving = True
        for job in tuple(self.jobs.values()):
            self._give_up(job, "the worker stops")
        for task in self._watching:
            task.cancel()

    async def _end_tasks(self) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING):
                    # The last step of a task may be to send a reply in the background.
                    while last := {*self._running, *self._background}:
                        await asyncio.wait(last)
        finally:
            for task in tuple(self._background):
                task.cancel()
            self._deadlines.clear()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _stop_listening(self) -> None:
        with suppress(TransportError):
            await self._listening.aclose()
        # Free the cached replies of a closed worker that is still referenced. Until here callers may ask for them.
        self._recent = Recent()

    def _give_up(self, job: Job, reason: str) -> None:
        """Cancel a job that will not be finished here."""
        if job.claim is not None:
            # Another worker will consume it from the queue.
            self._drop(job)
        error = CallError(ErrorCode.UNAVAILABLE, reason, retryable=job.is_safe_to_retry)
        self._stop(job, self.reason_to_stop or error)
        if not job.begun:  # the caller may ask this worker to drop the request
            self._recent.forget(job.key)

    # ---------------------------------------------------------------------------------------- receiving

    def receive(self, delivery: Delivery) -> None:
        """Process an event that arrived through the target."""
        event = read_event(delivery.body, self.target.max_values)
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
                self._spawn(self._account(event.payload, sender))
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
        if not self._recent.add(key, request.resends):
            self._repeat_reply(key, reply_to, delivery, replied)
            return
        job = self._job_of(request, reply_to, key, delivery)
        job.replied = replied
        if self._is_leaving:
            # The queue is already closed; this request arrived in another way.
            self._refuse(job, CallError(ErrorCode.UNAVAILABLE, "the worker stops"))
            return
        self.jobs[key] = job
        if job.expires_at < self._deadlines.next:
            self._deadlines.schedule(job.expires_at)
        if not job.replayable:
            if request.attempt > 1 and self._shared is None:
                self._refuse(job, may_have_run(job))
                return
            job.is_stale = replied is None and self._is_stale(delivery.age)
        elif claim is not None and claim.is_fresh and request.attempt == 1:
            claim.remove()
            job.claim = None
        if job.is_suspect and replied is None:
            # Otherwise the death of this worker would count as an attempt that the request did not have.
            job.is_stale = True
        try:
            self._admission.offer(job)
        except CallError as error:
            self._refuse(job, error)

    def _repeat_reply(
        self, key: str, reply_to: str, delivery: Delivery, replied: asyncio.Event | None
    ) -> None:
        """Remove a request that arrived before, and send its reply again if there is one."""
        self.duplicates += 1
        known = self.jobs.get(key)
        # A job that has not started removes the request itself.
        if delivery.claim is not None and (known is None or known.claim is None):
            delivery.claim.remove()
        reply = self._recent.last_reply(key, reply_to)
        sending = None if reply is None else self._spawn(self._send(reply_to, reply))
        set_after(sending, replied)

    async def _prepare(self, job: Job) -> None:
        """Remove a request from its queue.

        If it waited long, ask its caller, because another worker may have it too.
        """
        if job.claim is not None:
            is_ours = await job.claim.acquire(alone=not job.replayable or job.request.attempt > 1)
            job.claim = None
            if not is_ours and not job.answered:
                self._drop(job)
            elif self._is_leaving:
                # The caller sends it to another worker.
                self._refuse(job, CallError(ErrorCode.UNAVAILABLE, "the worker stops"))
            waited = self._loop.time() - job.arrived_at
            job.is_stale |= not job.replayable and self._is_stale(waited)
        if job.is_stale and not job.answered:
            job.confirmed = self._loop.create_future()
            await self._send(job.reply_to, job.offer(self.mailbox))
            await job.confirmed

    def _is_stale(self, age: float) -> bool:
        """Return whether a request that waited for `age` seconds may be one that has run already."""
        if isinstance(self.target, SignedTarget):
            # Clients that can write to the broker could send the request to several workers.
            return True
        if self.target.broadcasts_replies:
            # Such a target stores no requests, and callers of the original protocol cannot confirm one.
            return False
        # A negative age is not known.
        is_recent = 0 <= age <= self._config.heartbeat
        return not is_recent or self._loop.time() - age < self._connected_at

    def _job_of(self, request: RequestPayload, reply_to: str, key: str, delivery: Delivery) -> Job:
        """Return the job of a request that has just arrived."""
        served = self._served.get(request.operation_id)
        if served is None or self.registry.revision != self._served_revision:
            served = self._look_up(request.operation_id)
        target, credit, timeout = self.target, request.credit, request.timeout_ms
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
        if self.registry.revision != self._served_revision:
            self._served_revision = self.registry.revision
            self._served.clear()
        served = served_by(self.registry, self._services, operation_id)
        if served.spec is not None:
            self._served[operation_id] = served
        return served

    def _find(self, request_id: str, sender: str) -> Job | None:
        """Return the job of a request, if the event comes from its own client."""
        job = self.jobs.get(sender + request_id)
        if job is None:
            # The request arrived through a call handler, so that only its reply address identifies the caller.
            job = self.jobs.get(request_id)
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
            self._recent.add(sender + abort.request_id)
            return
        if job.is_offered:
            # Another worker may have the call, and its caller waits for that worker's reply.
            self._drop(job)
        self._stop(job, CallError(ErrorCode.ABORTED, "the call was aborted"))

    def _reject(
        self, event: MalformedEvent, reply_to: str, sender: str
    ) -> "asyncio.Task[Any] | None":
        """Reply to a malformed request in the background; None if it has no id or no reply address of its client."""
        self.malformed += 1
        address = reply_to or event.reply_to
        has_reader = bool(address) or self.target.broadcasts_replies
        is_readable = event.type == PUT_TYPE and event.request_id and has_reader
        if not is_readable or not self._is_allowed(address, sender):
            return None
        error = CallError(event.code, f"the request is malformed: {event.reason}")
        return self._spawn(self._send(address, encode_error(event.request_id, error)))

    def lost(self, reason: str) -> None:
        """Handle a lost connection. If the connection is the caller itself, stop its calls."""
        self._outages.lost()
        # Until the connection is restored, no request counts as new.
        self._connected_at = NEVER
        if self.target.direct:
            for job in tuple(self.jobs.values()):
                self._stop(job, CallError(ErrorCode.ABORTED, reason))

    def restored(self) -> None:
        """Handle a restored connection: announce this worker again."""
        self._outages.restored()
        self._connected_at = self._loop.time()
        if not self.target.direct:
            self._spawn(self._presence.announce(arrived=True))

    # ---------------------------------------------------------------------------------------- presence

    async def _account(self, probe: ProbePayload, sender: str) -> None:
        """Report which of a caller's calls this worker runs, and send the replies of finished ones again."""
        held: list[str] = []
        for request_id in dict.fromkeys(probe.request_ids):
            job = self._find(request_id, sender)
            reply = self._recent.last_reply(sender + request_id, probe.reply_to)
            reply = reply or self._recent.last_reply(request_id, probe.reply_to)
            # Reported only to the client that made the call.
            if job is not None and job.reply_to == probe.reply_to:
                job.heard_at = self._loop.time()
                if job.is_offered:
                    # Not reported as a claim, because another worker may have started the same request.
                    await self._send(job.reply_to, job.offer(self.mailbox))
                # Until the request is removed from its queue, another worker may consume it.
                elif job.claim is None:
                    held.append(request_id)
            elif reply is not None:
                await self._send(probe.reply_to, reply)
        if probe.holders and not held:
            return
        await self._presence.report(
            probe.reply_to,
            request_ids=held,
            fenced=[fence for fence in probe.fences if self._fence(fence, sender)],
            leaving=self._is_leaving and not held,
            stats=self.stats() if probe.stats else None,
            replayable=self._presence.replayable() if probe.replayable else None,
        )

    def _fence(self, fence: FencePayload, sender: str) -> bool:
        """Drop a copy of a request; return False if it has started, or may have started and is no longer stored."""
        request_id, age = fence.request_id, fence.age_ms / 1000
        key = sender + request_id
        job = self._find(request_id, sender)
        if job is None:
            if not all(self._recent.never_had(each, age) for each in (key, request_id)):
                return False
        elif job.is_started and job.claim is None and not job.is_offered:
            return False
        else:
            # The caller decides: it will not confirm this copy any more.
            job.is_stale = True
        self._recent.fence(key, fence.resends)
        return True


@options_of(WorkerConfig)
@asynccontextmanager
async def serve_calls(
    config: WorkerConfig, registry: OperationRegistry, target: EventTarget
) -> AsyncGenerator[CallServer]:
    """Serve the operations of a registry to callers of a group for the duration of an `async with` block.

    The worker receives requests when the block starts. At its end, it stops accepting requests and finishes running
    ones. `services.list`, `services.describe`, `services.schema` and `services.check` are served too. Call it as
    `serve_calls(registry, target, **options)`, with the fields of `WorkerConfig`.

    Raises:
        TransportError: If the broker cannot be reached.
    """
    if not isinstance(cast("object", registry), OperationRegistry):
        raise TypeError(f"serve_calls takes an OperationRegistry, not {registry!r}")
    async with aclosing(CallServer(registry, usable(target), config)) as server:
        await server.start()
        yield server
