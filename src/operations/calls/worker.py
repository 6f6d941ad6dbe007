"""A worker: consumes the requests of its group from a target and runs them on a registry.

Rule 1: `serve_calls` returns once requests arrive; closing it accepts no new ones and finishes those it has.
Rule 2: a request runs once, however often it is delivered; a second delivery gets the first one's reply.
Rule 3: a handler stops when its caller aborts, disconnects or has no time left; a handler that does not stop does not
        keep its caller waiting.
Rule 4: a request that waited longer than a heartbeat, or that was queued before the worker connected, may have run
        already: unless its operation is replayable, it begins only if its caller confirms it. So does every request
        on a target with signed messages, where others may repeat it.
Rule 5: no message can stop the worker: a malformed one is counted, and rejected if it names a reply address.
Rule 6: a client refers only to its own requests, and gets replies only at its own mailboxes.
Rule 7: a call handler, for requests that the program itself received, is a worker that takes none from the target.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from operator import is_not
from secrets import token_hex
from typing import Any, TypeAlias, cast

from operations._signals import shutdown_event
from operations._text import printable
from operations.calls.client import PendingRequestMap
from operations.calls.config import WorkerConfig
from operations.calls.events import (
    AbortPayload,
    CallAborted,
    CallConfirmed,
    CallCredited,
    CallProbed,
    CallRequested,
    MalformedEvent,
    RequestPayload,
    UnknownEvent,
    check_request,
    read_event,
)
from operations.calls.execution import JobExecutor, Replies
from operations.calls.failure_detector import SETTLING
from operations.calls.jobs import (
    Job,
    RefusedError,
    WorkerCounters,
    abandoned_jobs,
    aged,
    exhausted,
    job_for,
    may_have_run,
    set_after,
    watch_loop_lag,
)
from operations.calls.services import SERVICES, digest_of, serves_itself, service_operations
from operations.calls.states import NEVER, Deadlines
from operations.errors import CallError, ErrorCode, TransportError
from operations.front.front import CredentialResolver
from operations.front.limits import AdmissionQueue
from operations.pubsub.base import PUT_TYPE, Delivery, EventTarget, Subscription, usable
from operations.pubsub.signing import SignedTarget
from operations.registry import OperationRegistry
from operations.types import options_of

logger = logging.getLogger("operations")

_CLOSING = 1.0
"""Seconds for cancelled handlers and last replies when a worker stops."""


class CallServer:
    """A running worker. `serve_calls` makes one.

    Attributes:
        jobs: The requests without a last reply, by their keys.
        malformed: Messages that are not events.
        ignored: Events of unknown types.
        counters: What the calls came to.
        is_serving: Whether it accepts requests.
        reason_to_stop: The error of calls that end with it, instead of `UNAVAILABLE`.
        duplicates: Requests that had been seen before.
    """

    def __init__(
        self, registry: OperationRegistry, target: EventTarget, config: WorkerConfig
    ) -> None:
        limits, front = config.limits, config.front
        self.registry = registry
        self.target = target
        self.group = config.group
        self.name = token_hex(16)
        self.mailbox = target.control(self.name)
        self.jobs: dict[str, Job] = {}
        self._restored_at = self._connected_at = 0.0
        self.malformed = self.ignored = self.duplicates = 0
        self._services = OperationRegistry(service_operations(registry, target))
        self._shared = front
        self.backlog: int | None = limits.calls + limits.queue
        self._grace = config.grace
        self._heartbeat = config.heartbeat
        self._patience = config.patience
        exposes = config.expose_errors
        self._admission: AdmissionQueue[Job] = AdmissionQueue(limits, self._start)
        self.counters = WorkerCounters(config, self._admission)
        self._deadlines: Deadlines[Job] = Deadlines(self.jobs, self._expire)
        self._replies = Replies(
            target,
            self.group,
            self.mailbox,
            self.jobs,
            front=front,
            expose_errors=target.trusted if exposes is None else exposes,
            deadlines=self._deadlines,
            counters=self.counters,
            spawn=self._spawn,
        )
        self._executor = JobExecutor(registry, config, self._admission, self._replies)
        self._running: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._watching: list[asyncio.Task[Any]] = []
        self._consuming: Subscription | None = None
        self._listening: Subscription | None = None
        self._advertised: Subscription | None = None
        self.is_serving = False
        self.reason_to_stop: CallError | None = None
        self._loop = asyncio.get_running_loop()
        # Handlers do not see the context variables of the code that delivers a request.
        self._context = copy_context()

    # ---------------------------------------------------------------------------------------- lifetime

    @property
    def active(self) -> int:
        """The number of calls that run now."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a slot."""
        return self._admission.waiting

    async def start(self) -> None:
        """Listen, and consume requests from the target.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        await self.listen()
        self._consuming = await self.target.consume(self.group, self)
        if self.target.admin is not None:
            self._advertised = await self.target.admin.advertise(self.group, self.counters.stats)

    def capacity(self) -> int:
        """Return how many more requests can begin now."""
        return self._admission.free

    async def listen(self) -> None:
        """Listen for aborts, credit and probes, and announce this worker to the callers.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        workers = self.target.control(self.group)
        self._listening = await self.target.listen((self.mailbox, workers), self)
        self._connected_at = self._loop.time()
        # Callers must know a worker before it can have their calls: otherwise they cannot detect that it is lost.
        self._replies.is_leaving = False
        self._replies.specs = digest_of(self.registry)
        if not self.target.direct:
            await self._replies.announce(arrived=True)
        self.is_serving = True
        self._watching = [self._spawn(watch_loop_lag(self.jobs)), self._spawn(self._watch_specs())]
        if not self.target.direct:
            self._watching.append(self._spawn(self._watch_callers()))

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, or until the peer disconnects that this worker is for; then drain.

        A second signal ends the process at once.
        """
        with shutdown_event() as shutdown:
            ends = [self._spawn(shutdown.wait())]
            # Only the serving end of a WebSocket has it: its connection does not come back.
            wait_closed = getattr(self.target, "wait_closed", None)
            if wait_closed is not None:
                ends.append(self._spawn(wait_closed()))
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in ends:
                    task.cancel()
            await self.aclose()

    async def aclose(self) -> None:
        """Stop accepting requests, give running calls `grace` seconds, end the rest with `UNAVAILABLE`.

        The error is retryable except for mutations that have begun. Behind a broker, requests that wait for a slot are
        rejected at once, because their callers send them to other workers.
        """
        was_serving, self.is_serving = self.is_serving, False
        offers = (self._consuming, self._advertised)
        self._consuming = self._advertised = None
        for subscription in offers:
            if subscription is not None:
                with suppress(TransportError):
                    await subscription.aclose()
        self._replies.is_leaving = True
        if was_serving and not self.target.direct:
            await self._replies.announce()
            self._admission.empty()
            for job in [job for job in self.jobs.values() if not job.begun]:
                self._give_up(job, "the worker stops")
        if self.jobs:
            self._replies.idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace):
                    await self._replies.idle.wait()
        self._admission.empty()
        for job in tuple(self.jobs.values()):
            self._give_up(job, "the worker stops")
        for task in self._watching:
            task.cancel()
        last = (*self._running, *self._background)
        if last:
            await asyncio.wait(last, timeout=_CLOSING)
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._deadlines.clear()
        # A closed worker that is still referenced does not keep its replies.
        self._replies.clear()
        listening, self._listening = self._listening, None
        if listening is not None:
            with suppress(TransportError):
                await listening.aclose()
        await self._services.aclose()

    def _give_up(self, job: Job, reason: str) -> None:
        """Cancel a job that will not be finished here."""
        if job.claim is not None:
            # Another worker takes it from the queue.
            self._replies.drop(job)
        error = CallError(ErrorCode.UNAVAILABLE, reason, retryable=job.is_safe_to_retry)
        self._replies.stop(job, self.reason_to_stop or error)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # ---------------------------------------------------------------------------------------- receiving

    def receive(self, delivery: Delivery) -> None:
        """Process an event that arrived through the target."""
        event = read_event(delivery.body, self.target.max_values)
        if type(event) is CallRequested:
            request = event.payload
            address = delivery.reply_to or request.reply_to or ""
            if self._replies.is_allowed(address, delivery.sender):
                self._admit(request, address, delivery)
                return
        sender, claim = delivery.sender, delivery.claim
        if claim is not None:
            claim.remove()
        if type(event) is CallConfirmed:
            self._confirm(event.payload.request_id, sender)
        elif type(event) is CallAborted:
            self._replies.abort(event.payload, sender)
        elif type(event) is CallCredited:
            job = self._replies.find(event.payload.request_id, sender)
            if job is not None and job.pace is not None:
                job.pace.grant(event.payload.credit)
        elif type(event) is CallProbed:
            self._replies.account(event.payload, sender)
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
            self._replies.abort(AbortPayload(request_id=request.request_id), "")
            raise

    def _admit(
        self,
        request: RequestPayload,
        reply_to: str,
        delivery: Delivery,
        replied: asyncio.Event | None = None,
    ) -> None:
        request_id, age = request.request_id, delivery.age
        claim, sender = delivery.claim, delivery.sender
        key = sender + request_id
        if age:
            request = aged(request, age)
        problem = check_request(request)
        if problem is not None:
            if claim is not None:
                claim.remove()
            malformed = MalformedEvent(problem, PUT_TYPE, request_id)
            set_after(self._reject(malformed, reply_to, sender), replied)
            return
        if not self._replies.is_new(key, request.resends):
            self.duplicates += 1
            known = self.jobs.get(key)
            # A job that has not begun removes the request itself.
            if claim is not None and (known is None or known.claim is None):
                claim.remove()
            set_after(self._replies.repeat(key, reply_to), replied)
            return
        registry = self._registry_of(request.operation_id)
        now = self._loop.time()
        size = len(delivery.body)
        job = job_for(registry, self.target, request, reply_to, key, size, now, self._shared)
        job.replied, job.claim, job.queued_at = replied, claim, now - age
        if self._replies.is_leaving:
            # The queue is closed already; this request arrived in another way.
            self._refuse(job, CallError(ErrorCode.UNAVAILABLE, "the worker stops", retryable=True))
            return
        self.jobs[key] = job
        if job.expires_at < self._deadlines.next:
            self._deadlines.schedule(job.expires_at)
        if not job.replayable:
            if request.attempt > 1 and self._shared is None:
                self._refuse(job, may_have_run(job))
                return
            job.is_stale = replied is None and self._is_stale(age)
        elif claim is not None and claim.is_fresh and request.attempt == 1:
            claim.remove()
            job.claim = None
        reason = self._admission.offer(job)
        if reason is not None:
            self._refuse(job, exhausted(reason))

    def _is_stale(self, age: float) -> bool:
        """Return whether a request that waited for `age` seconds may be one that has run already."""
        # Clients that can write to the broker could send it to one worker after the other.
        is_signed = isinstance(self.target, SignedTarget)
        return is_signed or age > self._heartbeat or self._loop.time() - age < self._connected_at

    def _confirm(self, request_id: str, sender: str) -> None:
        """Let a request begin that waited for its caller."""
        job = self._replies.find(request_id, sender)
        if job is not None and job.confirmed is not None and not job.confirmed.done():
            job.confirmed.set_result(None)

    def _refuse(self, job: Job, error: CallError) -> None:
        """Reply to a job that does not run."""
        if not job.answered:
            job.code = error.code
            self.counters.refuse(job)
            set_after(self._replies.refuse(job, error), job.replied)

    def _reject(
        self, event: MalformedEvent, reply_to: str, sender: str
    ) -> "asyncio.Task[Any] | None":
        """Reply to a malformed request in the background; None if it has no id or no reply address of its client."""
        self.malformed += 1
        address = reply_to or event.reply_to
        has_reader = bool(address) or self.target.broadcasts_replies
        is_readable = event.type == PUT_TYPE and event.request_id and has_reader
        if not is_readable or not self._replies.is_allowed(address, sender):
            return None
        error = CallError(event.code, f"the request is malformed: {event.reason}")
        return self._replies.reject(event.request_id, address, error)

    def undelivered(self, key: str, misdirected: bool = False) -> None:
        """Workers enqueue nothing."""

    def lost(self, reason: str) -> None:
        """The connection is lost; if it was the caller itself, stop its calls."""
        # Until it is restored, no request counts as new.
        self._connected_at = NEVER
        if self.target.direct:
            for job in tuple(self.jobs.values()):
                self._replies.stop(job, CallError(ErrorCode.ABORTED, reason))

    def restored(self) -> None:
        """The connection is back: announce this worker again."""
        self._restored_at = self._connected_at = self._loop.time()
        if not self.target.direct:
            self._spawn(self._replies.announce(arrived=True))

    # ---------------------------------------------------------------------------------------- running

    def _start(self, job: Job) -> bool:
        """Run a job in its own task; return False if it has ended already."""
        if job.expires_at <= self._loop.time():
            self._expire(job)
        if job.answered:
            return False
        self.counters.begin(job)
        task = job.task = self._loop.create_task(self._run(job), context=self._context.copy())
        self._running.add(task)
        return True

    async def _run(self, job: Job) -> None:
        job.is_started = True
        try:
            if job.claim is not None or job.is_stale:
                await self._prepare(job)
            if not job.answered:
                try:
                    await self._executor.attend(job)
                except RefusedError as refused:
                    self._refuse(job, refused.error)
        except GeneratorExit:
            # The loop is closed: nothing else can start.
            raise
        except asyncio.CancelledError:
            self._end(job, CallError(ErrorCode.ABORTED, "the call was cancelled"))
            raise
        except BaseException as failure:
            operation_id = job.request.operation_id
            logger.exception("%s could not be answered", printable(operation_id))
            self._end(job, CallError(ErrorCode.EXECUTION_ERROR, f"{operation_id} failed"))
            if isinstance(failure, (KeyboardInterrupt, SystemExit)):
                raise
        else:
            # In this step: a caller that has its reply finds the slot free.
            self._end(job)

    def _end(self, job: Job, error: CallError | None = None) -> None:
        """Give the slot of a job whose task ends to the next one."""
        if job.task is not None:
            self._running.discard(job.task)
            job.task = None
        self._admission.done(job)
        if error is not None:
            self._replies.stop(job, error)

    async def _prepare(self, job: Job) -> None:
        """Remove a request from its queue, and ask its caller if that took long: another worker may have it, too."""
        if job.claim is not None:
            is_ours = await job.claim.take(alone=not job.replayable or job.request.attempt > 1)
            job.claim = None
            if not is_ours and not job.answered:
                self._replies.drop(job)
            waited = self._loop.time() - job.arrived_at
            job.is_stale |= not job.replayable and self._is_stale(waited)
        if job.is_stale and not job.answered:
            job.confirmed = self._loop.create_future()
            await self._replies.offer(job)
            await job.confirmed

    def _registry_of(self, operation_id: str) -> OperationRegistry:
        """Return the registry that has an operation: those about the worker itself are in another one."""
        if operation_id in SERVICES and not serves_itself(self.registry, operation_id):
            return self._services
        return self.registry

    def _expire(self, job: Job) -> None:
        self._replies.stop(job, job.timeout_error())

    # ---------------------------------------------------------------------------------------- watching

    async def _watch_callers(self) -> None:
        """Cancel the calls of callers that have left."""
        async for job in abandoned_jobs(self.target, self.jobs):
            # A mutation must not be left half done by a short outage.
            patience = self._patience if job.begun and job.is_mutation else 0.0
            now = self._loop.time()
            is_settling = now - self._restored_at < SETTLING
            if now - job.absent_since >= patience and not is_settling:
                # A caller that was only disconnected receives the error when it is back.
                self._give_up(job, "the caller was gone")

    async def _watch_specs(self) -> None:
        """Announce operations that were registered, replaced or removed."""
        known = self.registry.specs()
        while True:
            await asyncio.sleep(self._heartbeat)
            specs = self.registry.specs()
            if len(specs) != len(known) or any(map(is_not, specs, known)):
                known = specs
                self._replies.specs = digest_of(self.registry)
                await self._replies.announce()


@options_of(WorkerConfig)
@asynccontextmanager
async def serve_calls(
    config: WorkerConfig, registry: OperationRegistry, target: EventTarget
) -> AsyncGenerator[CallServer]:
    """Serve a registry's operations to callers of a group for the length of an `async with` block.

    Requests arrive when the block starts. When it ends, the worker stops accepting requests and finishes those that
    run. `services.list`, `services.describe` and `services.schema` are served too. Call it as
    `serve_calls(registry, target, **options)`, with the fields of `WorkerConfig`.

    Raises:
        TransportError: If the broker cannot be reached.
    """
    if not isinstance(cast("object", registry), OperationRegistry):
        raise TypeError(f"serve_calls takes an OperationRegistry, not {registry!r}")
    server = CallServer(registry, usable(target), config)
    try:
        await server.start()
        yield server
    finally:
        await server.aclose()


CallHandler: TypeAlias = Callable[[CallRequested], Coroutine[Any, Any, None]]


def build_call_handler(
    registry: OperationRegistry,
    call_map: PendingRequestMap,
    *,
    resolve: CredentialResolver | None = None,
    expose_errors: bool | None = None,
) -> CallHandler:
    """Return the coroutine function that serves one `call.requested` event.

    The coroutine returns when the last reply was sent. It raises `ValueError` if the event has no `replyTo` on a target
    that needs one, `TransportError` if the target cannot be reached, and `CallError` if `call_map` is closed. Aborts,
    credit and probes for its requests arrive through the target. Closing `call_map` gives running requests 10 seconds
    and ends the rest with `UNAVAILABLE`.

    Args:
        registry: The operations to serve.
        call_map: Its target carries the replies; the target also decides whether `identity` in events is trusted.
        resolve: Return the identity that a `credential` belongs to.
        expose_errors: Show callers the text of unexpected exceptions; by default only on trusted targets.
    """
    target = call_map.target
    opening = asyncio.Lock()
    server: CallServer | None = None

    async def open_server() -> CallServer:
        nonlocal server
        async with opening:
            if server is None:
                # Replies without an address go to all callers of the group, of which the map is one.
                await call_map.open()
                opened = CallServer(
                    registry,
                    target,
                    WorkerConfig(
                        group=call_map.group, resolve=resolve, expose_errors=expose_errors
                    ),
                )
                await opened.listen()
                await call_map.close_with(opened.aclose)
                server = opened
        return server

    async def handle(event: CallRequested) -> None:
        request = event.payload
        reply_to = request.reply_to or call_map.address_of(request.request_id)
        worker = server or await open_server()
        await worker.serve(request, reply_to)

    return handle
