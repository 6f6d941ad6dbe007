"""Run the requests of a worker and send their replies.

Rule 1: a request gets exactly one last reply, unless its caller aborted it.
Rule 2: the last reply of a call is cached up to a size limit, and sent again only to the client that made the call.
Rule 3: no request runs twice: an id is stored until `max_ids` to `2 * max_ids` later requests have arrived.
Rule 4: a handler is cancelled when its caller aborts, disconnects or reaches its deadline. The caller does not wait for
        a handler that ignores cancellation.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from secrets import token_hex
from sys import maxsize
from time import monotonic, time
from typing import Any

from operations.base.concurrency import ConcurrencyLimiter, Slot
from operations.base.deadline import NEVER, DeadlineTable
from operations.base.errors import CallError, ErrorCode, TransportError
from operations.base.slots import held_slot
from operations.base.tasks import start_task
from operations.base.text import counted, printable
from operations.calls.protocol.events import (
    CallCompleted,
    CompletePayload,
    encode_error,
    encode_event,
    encode_item,
    encode_response,
    enforce_limits,
)
from operations.calls.protocol.services import SERVICES
from operations.calls.serving.jobs import (
    Job,
    WorkerConfig,
    access_log,
    log_call,
    may_have_run,
    nothing,
    quietly,
    set_after,
    then,
)
from operations.calls.suspects import SuspectJobs
from operations.contract.channel import NOTHING, CallerChannel
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.front.credentials import credential_ended, identify_credential
from operations.front.front import Front
from operations.front.limits import UNCOUNTED_OUTPUT, Limits, caller_key
from operations.front.public_errors import public_error
from operations.pubsub.base import EventTarget, WorkerStats
from operations.pubsub.delivery import Recent
from operations.registry.counters import BUCKETS
from operations.registry.registry import OperationRegistry

logger = logging.getLogger("operations")

_ITEMS_PER_TURN = 16
"""The number of items of a subscription after which other calls, probes and heartbeats get a turn."""

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""The largest total size of the requests that wait for a slot, in bytes."""


class AdmissionQueue:
    """The slots of one worker, and the calls that wait for them.

    Args:
        config: The limits of the worker: `concurrency`, `max_waiting` and `per_principal`.
        start: Starts a call; returns False if the call has already ended.
    """

    def __init__(self, config: WorkerConfig, start: Callable[[Job], bool]) -> None:
        self._slots, self._places = config.concurrency, config.max_waiting
        self._callers: ConcurrencyLimiter | None = None
        if (limit := config.per_principal) is not None:
            self._callers = ConcurrencyLimiter("calls on this worker", maxsize, limit)
        self._start = start
        self._line: OrderedDict[Job, None] = OrderedDict()
        self._line_bytes = 0
        self._suspects = SuspectJobs(self._proceed)
        self.running = 0
        self._subscriptions = 0

    @property
    def waiting(self) -> int:
        """The number of waiting calls."""
        return len(self._line) + len(self._suspects.waiting)

    @property
    def free(self) -> int:
        """The number of calls that can start now."""
        return 0 if self._suspects.holds else self._slots - self.running

    def offer(self, job: Job) -> None:
        """Start a call or add it to the queue.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if there are too many calls, in total or of this caller.
        """
        if self._callers is not None:
            self.count(job, job.principal)
        if not job.is_suspect and self.free > 0:
            self._begin(job)
        elif self.waiting < self._places and self._line_bytes + job.size <= MAX_WAITING_BYTES:
            self._line_bytes += job.size
            if job.is_suspect:
                self._suspects.add(job)
                self._proceed()
            else:
                self._line[job] = None
        else:
            self._forget(job)
            reason = (
                f"{counted(self.running, 'call')} running and {self.waiting} waiting on this worker"
            )
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, reason, retryable=True)

    def _begin(self, job: Job) -> None:
        """Start a call, if it has not ended while it waited."""
        if self._start(job):
            self.running += 1
            self._subscriptions += job.is_stream
        else:
            self._suspects.done(job)
            self._forget(job)

    def count(self, job: Job, principal: str) -> None:
        """Count a call for its caller; errors are raised as by `offer`."""
        if self._callers is not None and principal not in job.counted:
            job.counted = {**job.counted, principal: self._callers.enter(principal)}

    def done(self, job: Job) -> None:
        """Pass the slot of an ended call to the next call."""
        if job.counted:
            self._forget(job)
        self._suspects.done(job)
        if job.is_lent:
            job.is_lent = False
        else:
            self._leave(job)

    @contextmanager
    def lent(self, job: Job, *slots: Slot) -> Generator[None]:
        """Release the slots of a call that waits for a person, then take them again, even beyond the limits."""
        with ExitStack() as stack:
            if job.task is None or job.is_lent:
                # A task that the handler started has outlived the call, or another one waits too.
                yield
                return
            for slot in (*job.counted.values(), *slots):
                stack.enter_context(slot.lent())
            job.is_lent = True
            self._suspects.done(job)
            self._leave(job)
            try:
                yield
            finally:
                if job.is_lent:
                    job.is_lent = False
                    self.running += 1
                    self._subscriptions += job.is_stream

    def _leave(self, job: Job) -> None:
        """Pass the slot of a call to the next one."""
        self.running -= 1
        self._subscriptions -= job.is_stream
        self._proceed()

    def _proceed(self) -> None:
        """Start the waiting calls that may start now."""
        while self.running == self._subscriptions and self.running < self._slots:
            suspect = self._suspects.take()
            if suspect is None:
                break
            self._line_bytes -= suspect.size
            self._begin(suspect)
        while self._line and self.free > 0:
            following, _ = self._line.popitem(last=False)
            self._line_bytes -= following.size
            self._begin(following)

    def withdraw(self, job: Job) -> None:
        """Remove a call that has ended while it waited."""
        if job in self._line:
            del self._line[job]
        elif job in self._suspects.waiting:
            self._suspects.withdraw(job)
        else:
            return
        self._line_bytes -= job.size
        self._forget(job)
        self._proceed()

    def _forget(self, job: Job) -> None:
        for slot in job.counted.values():
            slot.release()


class JobRunner(ABC):
    """Runs the jobs of one worker: the part of `CallServer` from a job to its last reply.

    Attributes:
        registry: The operations that it serves.
        target: Transports the requests and replies.
        group: The worker group.
        mailbox: The address of this worker.
        jobs: The requests without a last reply, by their keys.
        counters: Counts the calls.
        queue_buckets: Calls by the time that they waited before they started; see `BUCKETS`.
    """

    def __init__(
        self, registry: OperationRegistry, target: EventTarget, config: WorkerConfig
    ) -> None:
        self.registry = registry
        self.target = target
        self.group = config.group
        self.mailbox = target.control(token_hex(16))
        self.jobs: dict[str, Job] = {}
        self._config, self._shared = config, config.front
        self._front = config.front or Front(registry)
        self.limit(config.limits or Limits())
        exposes = config.expose_errors
        self._exposes_errors = target.trusted if exposes is None else exposes
        self._admission = AdmissionQueue(config, self._start)
        self.counters = WorkerStats(
            name=config.name,
            version=config.version,
            started_at=int(time() * 1000),
            concurrency=config.concurrency,
        )
        self.queue_buckets = [0] * (len(BUCKETS) + 1)
        self._deadlines: DeadlineTable[Job] = DeadlineTable(self.jobs, self._expire)
        self._recent = Recent()
        self._is_leaving = False
        self._finished_at = -NEVER
        """When the last call ended, by the loop's clock."""
        self._idle = asyncio.Event()
        """Set when the last job of a stopping worker has its reply."""
        self._running: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()
        # Handlers do not see the context variables of the code that delivers a request.
        self._context = copy_context()

    def limit(self, limits: Limits) -> None:
        """Change the rate of each caller and of wrong credentials; a front that is shared has limits of its own."""
        self._has_rate = self._shared is None and limits.rate_per_caller is not None
        if self._shared is None:
            # Behind a broker all callers have one address.
            calls = self._config.concurrency
            limits = replace(limits, calls=calls, calls_per_caller=calls)
            self._front.configure(limits, timeout=self._front.timeout)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine in the background."""
        return start_task(self._background, work)

    # ---------------------------------------------------------------------------------------- running

    def _start(self, job: Job) -> bool:
        """Run a job in its own task; return False if it has already ended."""
        now = self._loop.time()
        if job.expires_at <= now:
            self._expire(job)
        if job.answered:
            return False
        job.began_at = now
        waited = now - job.queued_at
        self.counters.queue_seconds += waited
        self.queue_buckets[bisect_left(BUCKETS, waited)] += 1
        context = self._context.copy()
        task = job.task = asyncio.Task(self._run(job), loop=self._loop, context=context)
        self._running.add(task)
        return True

    async def _run(self, job: Job) -> None:
        job.is_started = True
        held_slot.set(partial(self._admission.lent, job))
        try:
            if job.claim is not None or job.is_stale:
                await self._prepare(job)
            if not job.answered:
                await self._attend(job)
        except GeneratorExit:
            # The event loop is closed, so no other job can start.
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
            # Released in this step, so that the slot is free when the caller has its reply.
            self._end(job)

    def _end(self, job: Job, error: CallError | None = None) -> None:
        """Pass the slot of a job whose task has ended to the next job."""
        if job.task is not None:
            self._running.discard(job.task)
            job.task = None
        self._admission.done(job)
        if error is not None:
            self._stop(job, error)

    @abstractmethod
    async def _prepare(self, job: Job) -> None:
        """Remove a request from its queue, or drop it; ask its caller if another worker may have it too."""

    async def _attend(self, job: Job) -> None:
        """Identify the caller of a job, and run it if the front admits it."""
        credential, config = job.request.credential, self._config
        if credential is not None:
            try:
                job.identity = await identify_credential(
                    credential, config.resolve, self._front.auth, config.address
                )
            except CallError as error:
                if error.retryable:
                    # The id is removed, because the caller sends the request again.
                    self._refuse(job, error)
                else:
                    await quietly(self._fail(job, error))
                return
        try:
            if credential is not None:
                self._admission.count(job, caller_key(job.identity, ""))
            if self._has_rate:
                self._front.rate.spend(caller_key(job.identity, job.reply_to))
        except CallError as error:
            self._refuse(job, error)
            return
        if self._shared is None:
            await self._execute(job)
        else:
            await self._execute_through(self._shared, job)

    async def _execute_through(self, front: Front, job: Job) -> None:
        """Run a job if the rules that all entry points of a server share admit it."""
        identity = job.identity
        try:
            if identity is None and not front.serves_anonymous():
                # A hub accepts sockets of unknown peers, which may only serve operations.
                raise CallError(ErrorCode.ACCESS_DENIED, "Send a credential")
            if job.spec is not None:
                front.enforce_visible(job.spec, identity)
                if job.request.attempt > 1 and not job.replayable:
                    raise may_have_run(job)
            elif not job.registry.has_remote:
                # The caller receives the same reply as for a hidden operation.
                front.find(job.request.operation_id, identity)
            slot = front.admit(caller_key(identity, self._config.address), is_stream=job.is_stream)
        except CallError as error:
            self._refuse(job, error)
            return
        with slot:
            held_slot.set(partial(self._admission.lent, job, slot))
            await self._execute(job)

    async def _execute(self, job: Job) -> None:
        """Run the operation and send its results."""
        if job.expires_at <= self._loop.time():
            # The timer cannot fire while a handler blocks the loop.
            await quietly(self._fail(job, job.timeout_error()))
            return
        request, registry, context = job.request, job.registry, self._context_of(job)
        try:
            job.begun = job.spec is not None or registry.has_remote
            if job.is_stream:
                sending = self._conclude(job, await self._send_items(job, context))
            else:
                envelope = await registry.execute(request.operation_id, request.input, context)
                try:
                    body = encode_response(request.request_id, envelope)
                except (TypeError, ValueError) as error:
                    reason = f"the result cannot be written as JSON: {error}"
                    raise CallError(ErrorCode.EXECUTION_ERROR, reason) from error
                sending = self._conclude(job, body)
                # The reply may wait for a caller that does not read, and may be an error instead of this result.
                del envelope, body
            await sending
        except CallError as error:
            elsewhere = ErrorCode.OPERATION_NOT_FOUND, ErrorCode.UNAVAILABLE
            if not job.begun and error.code in elsewhere:
                # Another worker may have the operation: its code may be newer, or its source may be connected.
                error.retryable = True
                self._refuse(job, error)
            else:
                sending = self._fail(job, error, job.items)
                # Its frames hold an item that was refused.
                error.__traceback__ = None
                await quietly(sending)
        except TransportError as error:
            # The caller will request the reply again.
            logger.debug("%s: a reply could not be sent: %s", printable(request.request_id), error)

    def _context_of(self, job: Job) -> OperationContext:
        request, deadline, ends_at = job.request, None, None
        if job.ends_at != NEVER:
            # Measured from the arrival, because the caller's clock may differ.
            left = job.ends_at - self._loop.time()
            deadline, ends_at = (time() + left) * 1000, monotonic() + left
        return OperationContext(
            request_id=request.request_id,
            parent_request_id=request.parent_request_id,
            identity=job.identity,
            metadata=request.metadata or NOTHING,
            deadline=deadline,
            checked=request.checked,
            key=request.key,
            channel=CallerChannel(
                serves_anonymous=self._front.serves_anonymous,
                deadline=deadline,
                ends_at=ends_at,
                queued=job.began_at - job.queued_at,
                # A request that did not arrive through the target has no size, and any input.
                decoded=[request.input] if job.size else None,
            ),
            registry=job.registry,
        )

    async def _send_items(self, job: Job, context: OperationContext) -> bytes:
        """Send the items of a subscription; return the event that ends it."""
        request = job.request
        job.items = 0
        unwatch = self._front.credentials.watch_message(
            request.credential,
            job.identity,
            self._config.resolve,
            partial(self._stop, job, credential_ended()),
        )
        stream = job.registry.subscribe(request.operation_id, request.input, context)
        try:
            async for envelope in stream:
                await self._send_item(job, envelope, job.items)
                job.items += 1
                if job.items % _ITEMS_PER_TURN == 0:
                    # Neither the handler nor the target may have waited.
                    await asyncio.sleep(0)
        finally:
            unwatch()
            await stream.aclose()
        payload = CompletePayload(request_id=request.request_id, sequence=job.items)
        return encode_event(CallCompleted(payload=payload))

    # ---------------------------------------------------------------------------------------- replying

    async def _send_item(self, job: Job, envelope: ResponseEnvelope[Any], sequence: int) -> None:
        """Send one item of a subscription, when the reader's credit allows it.

        Raises:
            CallError: If it cannot be sent.
        """
        pace = job.pace
        if pace is not None and pace.is_full:
            # An item is ready, so the idle timeout must not run while the reader is slow.
            job.expires_at = job.ends_at
            await pace.room()
        self._expect_item(job)
        if job.answered:
            raise CallError(ErrorCode.ABORTED, "the subscription has ended")
        body = encode_item(job.request.request_id, envelope, sequence, self.mailbox)
        enforce_limits(body, self.target)
        unread = self._count_output(job, len(body))
        try:
            await self.target.send(job.reply_to, body)
        except TransportError as failure:
            reason = f"an item could not be sent: {failure}"
            raise CallError(ErrorCode.UNAVAILABLE, reason) from failure
        finally:
            if unread is not None:
                unread.release()
        if pace is not None:
            pace.sent(len(body))
        self._expect_item(job)

    def _expect_item(self, job: Job) -> None:
        """Restart the idle timeout."""
        if job.idle != NEVER:
            job.expires_at = min(job.ends_at, self._loop.time() + job.idle)
            if job.expires_at < self._deadlines.next:
                self._deadlines.schedule(job.expires_at)

    def _fail(self, job: Job, error: CallError, sequence: int | None = None) -> Awaitable[None]:
        """Send the error of a call, as its caller may see it."""
        error = public_error(error, job.request.request_id, expose=self._exposes_errors)
        return self._conclude(job, self._encode_error(job, error, sequence))

    def _encode_error(self, job: Job, error: CallError, sequence: int | None = None) -> bytes:
        request_id = job.request.request_id
        job.code = error.code
        if job.begun and not self._interrupts(job, error):
            return encode_error(request_id, error, sequence)
        if job.begun:
            return encode_error(
                request_id,
                error,
                worker=self.mailbox,
                resends=job.request.resends,
                leaving=True,
            )
        return encode_error(
            request_id,
            error,
            sequence,
            begun=False,
            worker=self.mailbox,
            resends=job.request.resends,
            # Not to callers of a server, or for an unknown operation: that would distinguish it from a hidden one.
            missing=error.code == ErrorCode.UNAVAILABLE
            and self._shared is None
            and job.spec is None
            and not job.registry.has_remote,
        )

    def _interrupts(self, job: Job, error: CallError) -> bool:
        """Return whether a call ends because the worker stops, and may run again on another one."""
        is_stop = self._is_leaving and error.code == ErrorCode.UNAVAILABLE and error.retryable
        return is_stop and not job.is_stream and job.is_safe_to_retry

    # Not a coroutine: the caller awaits the returned awaitable, which saves one step per call.
    def _conclude(self, job: Job, body: bytes) -> Awaitable[None]:
        """Send the event that ends a call, and cache it in case it does not arrive."""
        if job.answered:
            return nothing()
        self._settle(job)
        unread = None
        try:
            enforce_limits(body, self.target)
            unread = self._count_output(job, len(body))
        except CallError as error:
            job.code = error.code
            body = encode_error(job.request.request_id, error)
        self._count(job)
        if job.claim is None:
            self._recent.finish(job.key, body, job.reply_to)
            sending: Awaitable[None] = self.target.send(job.reply_to, body)
        else:
            sending = self._send_claimed(job, body)
        if unread is not None:
            sending = then(sending, unread.release)
        return sending if job.replied is None else then(sending, job.replied.set)

    def _count(self, job: Job) -> None:
        """Count a call that has its last reply."""
        # Clients list the operations when they connect, which is not counted as work.
        if job.request.operation_id not in SERVICES:
            counters = self.counters
            now = self._finished_at = self._loop.time()
            counters.finished += 1
            counters.failed += bool(job.code)
            counters.seconds += now - (job.began_at or now)
            if access_log.isEnabledFor(logging.INFO):
                log_call(job, self.group, now)

    def _settle(self, job: Job) -> None:
        """Mark a call as ended."""
        job.answered = True
        self.jobs.pop(job.key, None)
        if not job.began_at:
            self._admission.withdraw(job)
        if not self.jobs and self._is_leaving:
            self._idle.set()

    def _count_output(self, job: Job, size: int) -> Slot | None:
        """Count a message as unread output of its caller.

        Small messages, and messages through a broker, are not counted.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the caller has too many unread bytes.
        """
        if self._shared is None or size <= UNCOUNTED_OUTPUT:
            return None
        return self._shared.output.enter(caller_key(job.identity, self._config.address), size)

    def _drop(self, job: Job) -> None:
        """Remove a request that another worker will handle."""
        self._settle(job)
        self._recent.forget(job.key)

    def _refuse(self, job: Job, error: CallError) -> None:
        """Reject a request without running it, and remove its id, so that it may be sent again."""
        if job.answered:
            return
        body = self._encode_error(job, error)
        self.counters.refused += 1
        if access_log.isEnabledFor(logging.INFO):
            log_call(job, self.group, self._loop.time())
        self._drop(job)
        set_after(self._send_later(self._send_claimed(job, body)), job.replied)

    async def _send_claimed(self, job: Job, body: bytes) -> None:
        """Reply to a request that has not started, unless another worker has it."""
        claim, job.claim = job.claim, None
        if claim is None or await claim.acquire(alone=False):
            await self.target.send(job.reply_to, body)

    def _expire(self, job: Job) -> None:
        self._stop(job, job.timeout_error())

    def _stop(self, job: Job, error: CallError) -> None:
        """Reply with `error` unless the job has its reply, and cancel its task.

        The slot is released when the task has ended.
        """
        if not job.answered:
            self._send_later(self._conclude(job, self._encode_error(job, error)))
        if job.task is not None and job.is_started:
            job.task.cancel()

    def _send_later(self, sending: Awaitable[None]) -> "asyncio.Task[Any]":
        task = self._spawn(quietly(sending))
        if isinstance(sending, Coroutine):
            # A task that is cancelled before it starts never awaits the coroutine.
            task.add_done_callback(lambda _: sending.close())
        return task

    async def _send(self, address: str, body: bytes) -> None:
        await quietly(self.target.send(address, body))
