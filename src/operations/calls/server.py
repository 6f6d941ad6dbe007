"""A worker: takes requests of its group from a target and runs them on a registry.

Rule 1: reachable when started, silent when stopped: `serve_calls` returns once requests arrive, and closing it
        takes no new ones before it finishes those it has.
Rule 2: a request runs once, however often it is delivered; a second delivery gets the first one's answer.
Rule 3: a caller that aborts, or is gone, or has no time left, does not keep a handler running; and a handler that
        will not stop does not keep its caller waiting.
Rule 4: nothing that arrives can stop the worker: what cannot be read is counted, and answered where it says to whom.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from time import time
from typing import Any, cast

import msgspec

from operations._signals import shutdown_event
from operations._text import printable
from operations.access import Identity
from operations.calls.config import WorkerConfig
from operations.calls.deadlines import NEVER, Deadlines
from operations.calls.events import (
    CallAborted,
    CallCredited,
    CallProbed,
    CallRequested,
    MalformedEvent,
    RequestPayload,
    UnknownEvent,
    encode_error,
    read_event,
)
from operations.calls.failure_detector import watch_callers, watch_loop_lag
from operations.calls.ids import check_request
from operations.calls.jobs import (
    Job,
    answer,
    claimed_identity,
    context_for,
    is_stream,
    job_for,
    principal_of,
    refusal_of,
)
from operations.calls.reply_cache import ReplyCache, undisturbed
from operations.calls.services import SERVICES, serves_itself, service_operations
from operations.calls.task_pool import TaskPool
from operations.context import CallerChannel
from operations.errors import CallError, ErrorCode, TransportError, timed_out, timeout_error
from operations.front.front import Front
from operations.front.identity import caller_key, identify_credential
from operations.front.limits import UNCOUNTED_OUTPUT, Limits, Slot
from operations.front.public_errors import public_error
from operations.front.queue import AdmissionQueue
from operations.pubsub.base import PUT_TYPE, EventTarget, Local, Subscription, usable
from operations.registry import OperationRegistry
from operations.specs import OperationType
from operations.types import options_of

logger = logging.getLogger("operations")

_FAREWELL = 1.0
"""Seconds for cancelled handlers and last answers when a worker stops."""


class CallServer:
    """A running worker. `serve_calls` makes one.

    Attributes:
        jobs: What is here and was not answered yet, by request id.
        malformed: Messages that were no events.
        ignored: Events of unknown types.
        refused: Requests beyond the bounds.
        duplicates: Requests that had been seen before.
    """

    def __init__(
        self, registry: OperationRegistry, target: EventTarget, config: WorkerConfig
    ) -> None:
        limits, front = config.limits, config.front
        self.registry = registry
        self.target = target
        self.group = config.group
        self.mailbox = target.mailbox()
        self.jobs: dict[str, Job] = {}
        self.restored_at = 0.0
        self.malformed = self.ignored = self.refused = self.duplicates = 0
        self._services = OperationRegistry(service_operations(registry, target))
        self._shared = front
        # The queue limits calls per caller; behind a broker all callers have one address.
        own = Limits(calls=limits.calls, calls_per_caller=limits.calls)
        self._front = front or Front(registry, own)
        self._backlog = limits.calls + limits.queue
        self._address = config.address
        self._resolve = config.resolve
        self._grace = config.grace
        exposes = config.expose_errors
        self._expose_errors = target.trusted if exposes is None else exposes
        self._admission: AdmissionQueue[Job] = AdmissionQueue(limits, self._start)
        self._pool: TaskPool[Job] = TaskPool(self._attend, self._admission.done, self._failed)
        self._deadlines: Deadlines[Job] = Deadlines(self.jobs, self._expire)
        self._reply_cache = self._new_reply_cache()
        self._background: set[asyncio.Task[Any]] = set()
        self._minding: list[asyncio.Task[Any]] = []
        self._taking: Subscription | None = None
        self._listening: Subscription | None = None
        self._is_serving = self._is_leaving = False
        self._idle = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    # ---------------------------------------------------------------------------------------- lifetime

    @property
    def active(self) -> int:
        """Calls that run here now."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """Calls that wait for a place."""
        return self._admission.waiting

    async def start(self) -> None:
        """Listen, and take requests from the target.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        await self.listen()
        self._taking = await self.target.consume(
            self.group, self, lambda: self._admission.free, self._backlog
        )

    async def listen(self) -> None:
        """Listen for aborts, credit and probes, and announce this worker to the callers.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        workers = self.target.topic(f"{self.group}.workers")
        self._listening = await self.target.listen((self.mailbox, workers), self)
        # Callers must know a worker before it can have their calls: what is not known is not missed.
        await self._reply_cache.announce(leaving=False)
        self._is_serving = True
        self._is_leaving = False
        self._minding = [self._spawn(watch_loop_lag(self))]
        if not self.target.direct:
            self._minding.append(self._spawn(watch_callers(self)))

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, or until the peer has gone that this worker is for; then drain.

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
        """Take nothing new, give what runs `grace` seconds, end the rest with `UNAVAILABLE`.

        It is retryable but for mutations that have begun.
        """
        was_serving, self._is_serving = self._is_serving, False
        taking, self._taking = self._taking, None
        if taking is not None:
            with suppress(TransportError):
                await taking.aclose()
        if was_serving:
            self._is_leaving = True
            await self._reply_cache.announce(leaving=True)
        if self.jobs:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace):
                    await self._idle.wait()
        self._admission.empty()
        for job in tuple(self.jobs.values()):
            self.give_up(job, "the worker stops")
        for task in self._minding:
            task.cancel()
        last = (*self._pool.tasks, *self._background)
        if last:
            await asyncio.wait(last, timeout=_FAREWELL)
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._deadlines.clear()
        # Whoever keeps a worker that was closed does not keep what it said.
        self._reply_cache = self._new_reply_cache()
        listening, self._listening = self._listening, None
        if listening is not None:
            with suppress(TransportError):
                await listening.aclose()
        await self._services.aclose()

    def give_up(self, job: Job, reason: str) -> None:
        """Cancel a job that will not be finished here."""
        spec = self.registry.get_spec(job.request.operation_id)
        # Whoever retries without looking would run it twice.
        may_matter = (
            spec is not None and spec.type is OperationType.MUTATION and not spec.idempotent
        )
        retryable = job.task is None or not may_matter
        self.stop(job, CallError(ErrorCode.UNAVAILABLE, reason, retryable=retryable))

    def _new_reply_cache(self) -> ReplyCache:
        return ReplyCache(
            self.target,
            self.group,
            self.mailbox,
            self.jobs,
            lambda: not self._is_serving,
            self._spawn,
        )

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # ---------------------------------------------------------------------------------------- receiving

    def receive(self, body: Any, reply_to: str, age: float = 0.0) -> None:
        """Take an event from the target."""
        if type(body) is RequestPayload:
            # Handed over as it is: nothing of it is held that its caller does not hold anyway.
            self._enter(body, reply_to, 0, self.target.local)
            return
        event = read_event(body, self.target.max_values)
        if type(event) is CallRequested:
            request = _aged(event.payload, age) if age else event.payload
            self._admit(request, reply_to or request.reply_to or "", len(body))
        elif type(event) is CallAborted:
            self._abort(event.payload.request_id)
        elif type(event) is CallCredited:
            job = self.jobs.get(event.payload.request_id)
            if job is not None and job.pace is not None:
                job.pace.grant(event.payload.credit)
        elif type(event) is CallProbed:
            self._reply_cache.account(event.payload)
        elif type(event) is MalformedEvent:
            self._reject(event, reply_to)
        elif type(event) is UnknownEvent:
            self.ignored += 1

    async def serve(self, request: RequestPayload, reply_to: str) -> None:
        """Run a request that did not arrive through the target; return when its last reply was sent.

        Cancelling this aborts the request.
        """
        replied = asyncio.Event()
        self._admit(request, reply_to, 0, replied)
        try:
            await replied.wait()
        except asyncio.CancelledError:
            self._abort(request.request_id)
            raise

    def _admit(
        self,
        request: RequestPayload,
        reply_to: str,
        size: int,
        replied: asyncio.Event | None = None,
    ) -> None:
        request_id = request.request_id
        wrong = check_request(request)
        if wrong is not None:
            malformed = MalformedEvent(wrong, PUT_TYPE, request_id)
            _set_after(self._reject(malformed, reply_to), replied)
        elif not self._reply_cache.is_new(request_id):
            self.duplicates += 1
            _set_after(self._reply_cache.repeat(request_id, reply_to), replied)
        elif self._is_leaving:
            # What was taken is finished; this came by another way.
            error = CallError(ErrorCode.UNAVAILABLE, "the worker stops", retryable=True)
            _set_after(self._reply_cache.refuse(request_id, reply_to, error), replied)
        else:
            self._enter(request, reply_to, size, None, replied)

    def _enter(
        self,
        request: RequestPayload,
        reply_to: str,
        size: int,
        local: Local | None,
        replied: asyncio.Event | None = None,
    ) -> None:
        request_id = request.request_id
        job = job_for(self, request, reply_to, size, self._loop.time(), local)
        job.replied = replied
        self.jobs[request_id] = job
        if job.expires_at < self._deadlines.next:
            self._deadlines.schedule(job.expires_at)
        reason = self._admission.offer(job)
        if reason is not None:
            self._refuse(job, _exhausted(reason))

    def _refuse(self, job: Job, error: CallError) -> None:
        """Answer a job that does not run."""
        self.refused += 1
        if not job.answered:
            self.settle(job)
            refusal = self._reply_cache.refuse(job.request.request_id, job.reply_to, error)
            _set_after(refusal, job.replied)

    def _abort(self, request_id: str) -> None:
        job = self.jobs.get(request_id)
        if job is not None:
            self.stop(job, CallError(ErrorCode.ABORTED, "the call was aborted"))
        else:
            # It may have overtaken the request, which then counts as seen.
            self._reply_cache.is_new(request_id)

    def _reject(self, event: MalformedEvent, reply_to: str) -> "asyncio.Task[Any] | None":
        """Reply to a malformed request in the background; None if it has no id or no reply address."""
        self.malformed += 1
        address = reply_to or event.reply_to
        if event.type != PUT_TYPE or not event.request_id or not address:
            return None
        error = CallError(event.code, f"the request is malformed: {event.reason}")
        return self._reply_cache.object_to(event.request_id, address, error)

    def undelivered(self, key: str) -> None:
        """Nothing is put into queues from here."""

    def lost(self, reason: str) -> None:
        """The connection is gone; where it was the caller itself, nobody wants the answers any more."""
        if self.target.direct:
            for job in tuple(self.jobs.values()):
                self.stop(job, CallError(ErrorCode.ABORTED, reason))

    def restored(self) -> None:
        """The connection is back: tell the callers that this worker is."""
        self.restored_at = self._loop.time()
        self._spawn(self._reply_cache.announce(leaving=False))

    # ---------------------------------------------------------------------------------------- running

    def _start(self, job: Job) -> bool:
        # Its time may have run out, or its caller left, while it stood in line.
        if job.expires_at <= self._loop.time():
            self._expire(job)
        return self._pool.add(job)

    def _attend(self, job: Job) -> Coroutine[Any, Any, None]:
        # The timer cannot ring while something keeps the loop, and what is ready then comes before it.
        if job.expires_at <= self._loop.time():
            return self._too_late(job)
        request = job.request
        if request.credential is None:
            return self._pass_front(job, claimed_identity(request, self.target))
        return self._identify(job, request.credential)

    async def _too_late(self, job: Job) -> None:
        # Its task may be others' as well, and is not cancelled.
        await undisturbed(job.error(_late(job), None))

    async def _identify(self, job: Job, credential: str) -> None:
        try:
            identity = await identify_credential(
                credential, self._resolve, self._front.auth, self._address
            )
        except CallError as error:
            await job.error(error, None)
            return
        reason = self._admission.identified(job, principal_of(identity))
        if reason is not None:
            self._refuse(job, _exhausted(reason))
        elif job.expires_at <= self._loop.time():
            await self._too_late(job)
        else:
            await self._pass_front(job, identity)

    def _pass_front(self, job: Job, identity: Identity | None) -> Coroutine[Any, Any, None]:
        if self._shared is None:
            return self._answer(job, identity)
        return self._admitted(self._shared, job, identity)

    async def _admitted(self, front: Front, job: Job, identity: Identity | None) -> None:
        """Admit a call by the rules that all entry points of a server share."""
        registry = self.registry_of(job.request.operation_id)
        caller = job.caller = caller_key(identity, self._address)
        spec = registry.get_spec(job.request.operation_id)
        try:
            if spec is not None:
                front.enforce_visible(spec, identity)
            slot = front.admit(caller, is_stream=is_stream(registry, job.request))
        except CallError as error:
            self._refuse(job, error)
            return
        with slot:
            await self._answer(job, identity)

    def _answer(self, job: Job, identity: Identity | None) -> Coroutine[Any, Any, None]:
        request, registry = job.request, self.registry_of(job.request.operation_id)
        deadline = None
        if job.ends_at != NEVER:
            # Counted from its arrival: the clock of its caller may be another one.
            deadline = (time() + job.ends_at - self._loop.time()) * 1000
        context = context_for(
            request, identity, deadline, registry, CallerChannel(deadline=deadline)
        )
        return answer(registry, request, context, job)

    def registry_of(self, operation_id: str) -> OperationRegistry:
        """Where an operation is: what every worker says about itself has a registry of its own."""
        if operation_id in SERVICES and not serves_itself(self.registry, operation_id):
            return self._services
        return self.registry

    def expect(self, job: Job) -> None:
        """From now on the next item has its time."""
        job.expires_at = min(job.ends_at, self._loop.time() + job.idle)
        if job.expires_at < self._deadlines.next:
            self._deadlines.schedule(job.expires_at)

    def _failed(self, job: Job, failure: BaseException) -> None:
        """Answer a job that could not do so itself."""
        if isinstance(failure, asyncio.CancelledError):
            self.stop(job, CallError(ErrorCode.ABORTED, "the call was cancelled"))
            return
        operation_id = job.request.operation_id
        logger.error("%s could not be answered", printable(operation_id), exc_info=failure)
        self.stop(job, CallError(ErrorCode.EXECUTION_ERROR, f"{operation_id} failed"))

    def _expire(self, job: Job) -> None:
        self.stop(job, _late(job))

    def stop(self, job: Job, error: CallError) -> None:
        """Answer a job with `error`, unless it was answered, and cancel it. Its place is free when it has ended."""
        if not job.answered:
            last = self.conclude(job, encode_error(job.request.request_id, error))
            self._spawn(undisturbed(last))
        if job.task is not None:
            job.task.cancel()

    def settle(self, job: Job) -> None:
        """The call has had its end."""
        job.answered = True
        self.jobs.pop(job.request.request_id, None)
        if not self.jobs and not self._is_serving:
            self._idle.set()

    # ---------------------------------------------------------------------------------------- answering

    def conclude(self, job: Job, body: bytes) -> Awaitable[None]:
        """Send the event that ends a call, and keep it in case it does not arrive."""
        if job.answered:
            return _nothing()
        self.settle(job)
        error = refusal_of(body, self.target)
        unread = None
        if error is None:
            try:
                unread = self.count_output(job, len(body))
            except CallError as exhausted:
                error = exhausted
        if error is not None:
            body = encode_error(job.request.request_id, error)
        if job.local is not None:
            # Within one process nothing is lost, and nobody will ask.
            return self.target.send(job.reply_to, body)
        sending = self._reply_cache.conclude(job.request.request_id, job.reply_to, body)
        if unread is not None:
            sending = _sent(sending, unread.release)
        return sending if job.replied is None else _sent(sending, job.replied.set)

    def count_output(self, job: Job, size: int) -> Slot | None:
        """Count a message until its caller has read it; small ones, and those behind a broker, are not counted.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the caller has too many unread bytes.
        """
        if self._shared is None or size <= UNCOUNTED_OUTPUT:
            return None
        return self._shared.output.enter(job.caller, size)

    def presentable(self, error: CallError, request: RequestPayload) -> CallError:
        """`error` as a caller elsewhere may see it: what nobody declared stays in our log."""
        return public_error(error, request.request_id, expose=self._expose_errors)


def _aged(request: RequestPayload, age: float) -> RequestPayload:
    """A request that waited for a worker: that time is gone, and perhaps nobody waits for it any more."""
    spent = age * 1000
    left = None
    if request.timeout_ms is not None:
        left = request.timeout_ms - spent
    elif request.idle_timeout is not None and spent >= request.idle_timeout:
        left = 0.0
    return request if left is None else msgspec.structs.replace(request, timeout_ms=left)


def _late(job: Job) -> CallError:
    if job.expires_at < job.ends_at:
        return timeout_error(f"no item came for {job.idle:g} seconds")
    request = job.request
    seconds = job.expires_at - job.arrived_at
    return timed_out(request.operation_id, seconds, deadline=request.deadline)


def _exhausted(reason: str) -> CallError:
    return CallError(ErrorCode.RESOURCE_EXHAUSTED, reason, retryable=True)


async def _sent(sending: Awaitable[None], then: Callable[[], None]) -> None:
    try:
        await sending
    finally:
        then()


def _set_after(sending: "asyncio.Task[Any] | None", replied: asyncio.Event | None) -> None:
    """Set `replied` when `sending` has ended; at once if there is nothing to send."""
    if replied is None:
        return
    if sending is None:
        replied.set()
    else:
        sending.add_done_callback(lambda _: replied.set())


async def _nothing() -> None:
    """For a call that was answered already."""


@options_of(WorkerConfig)
@asynccontextmanager
async def serve_calls(
    config: WorkerConfig, registry: OperationRegistry, target: EventTarget
) -> AsyncGenerator[CallServer]:
    """Serve a registry's operations to callers of a group for the length of an `async with` block.

    Requests arrive when the block starts. When it ends, the worker accepts no more requests and finishes those that
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
