"""Run the jobs of a worker.

Rule 1: a job has a slot until its task has ended, except while it waits for a person.
Rule 2: a handler is cancelled when its caller aborts, disconnects or reaches its deadline. The caller does not wait for
        a handler that ignores cancellation.
"""

import asyncio
import logging
from bisect import bisect_left
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from time import monotonic, time
from typing import Any, final

from operations.base.deadline import NEVER
from operations.base.errors import CallError, ErrorCode, TransportError
from operations.base.slots import held_slot
from operations.base.text import printable
from operations.calls.protocol.events import (
    CallCompleted,
    CompletePayload,
    encode_event,
    encode_item,
    encode_response,
    enforce_limits,
)
from operations.calls.serving.admission import AdmissionQueue
from operations.calls.serving.claims import Claims
from operations.calls.serving.jobs import Job, WorkerConfig, may_have_run, quietly
from operations.calls.serving.replies import Replies
from operations.contract.channel import NOTHING, CallerChannel
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.front.credentials import credential_ended, identify_credential
from operations.front.front import Front
from operations.front.limits import Limits, caller_key
from operations.registry.counters import BUCKETS
from operations.registry.registry import OperationRegistry

logger = logging.getLogger("operations")

_ITEMS_PER_TURN = 16
"""The number of items of a subscription after which other calls, probes and heartbeats get a turn."""


@final
class JobRunner:
    """Runs the jobs of one worker that have a slot.

    Args:
        registry: The operations that the worker serves.
        config: The settings of the worker.
        queue: Starts a job when it has a slot.
        replies: Ends the jobs.
        claims: Decides whether a request that waited may start.

    Attributes:
        queue_buckets: Calls by the time that they waited before they started; see `BUCKETS`.
        running: The tasks of the jobs.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        config: WorkerConfig,
        queue: AdmissionQueue,
        replies: Replies,
        claims: Claims,
    ) -> None:
        self.queue_buckets = [0] * (len(BUCKETS) + 1)
        self.running: set[asyncio.Task[None]] = set()
        self._config, self._shared = config, config.front
        self._queue = queue
        self._replies = replies
        self._claims = claims
        self._front = config.front or Front(registry)
        self.limit(config.limits or Limits())
        self._loop = asyncio.get_running_loop()
        # Handlers do not see the context variables of the code that delivers a request.
        self._context = copy_context()
        queue.start = self._start

    def limit(self, limits: Limits) -> None:
        """Change the rate of each caller and of wrong credentials; a front that is shared has limits of its own."""
        self._has_rate = self._shared is None and limits.rate_per_caller is not None
        if self._shared is None:
            # Behind a broker all callers have one address.
            calls = self._config.concurrency
            limits = replace(limits, calls=calls, calls_per_caller=calls)
            self._front.configure(limits, timeout=self._front.timeout)

    def _start(self, job: Job) -> bool:
        """Run a job in its own task; return False if it has already ended."""
        now = self._loop.time()
        if job.expires_at <= now:
            self._replies.stop(job, job.timeout_error())
        if job.answered:
            return False
        job.began_at = now
        waited = now - job.queued_at
        self._replies.counters.queue_seconds += waited
        self.queue_buckets[bisect_left(BUCKETS, waited)] += 1
        context = self._context.copy()
        task = job.task = asyncio.Task(self._run(job), loop=self._loop, context=context)
        self.running.add(task)
        return True

    async def _run(self, job: Job) -> None:
        job.is_started = True
        held_slot.set(partial(self._queue.lent, job))
        try:
            if job.claim is not None or job.is_stale:
                await self._claims.prepare(job)
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
            self.running.discard(job.task)
            job.task = None
        self._queue.done(job)
        if error is not None:
            self._replies.stop(job, error)

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
                    self._replies.refuse(job, error)
                else:
                    await quietly(self._replies.fail(job, error))
                return
        try:
            if credential is not None:
                self._queue.count(job, caller_key(job.identity, ""))
            if self._has_rate:
                self._front.rate.spend(caller_key(job.identity, job.reply_to))
        except CallError as error:
            self._replies.refuse(job, error)
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
            self._replies.refuse(job, error)
            return
        with slot:
            held_slot.set(partial(self._queue.lent, job, slot))
            await self._execute(job)

    async def _execute(self, job: Job) -> None:
        """Run the operation and send its results."""
        if job.expires_at <= self._loop.time():
            # The timer cannot fire while a handler blocks the loop.
            await quietly(self._replies.fail(job, job.timeout_error()))
            return
        request, registry, context = job.request, job.registry, self._context_of(job)
        try:
            job.begun = job.spec is not None or registry.has_remote
            if job.is_stream:
                sending = self._replies.conclude(job, await self._send_items(job, context))
            else:
                envelope = await registry.execute(request.operation_id, request.input, context)
                try:
                    body = encode_response(request.request_id, envelope)
                except (TypeError, ValueError) as error:
                    reason = f"the result cannot be written as JSON: {error}"
                    raise CallError(ErrorCode.EXECUTION_ERROR, reason) from error
                sending = self._replies.conclude(job, body)
                # The reply may wait for a caller that does not read, and may be an error instead of this result.
                del envelope, body
            await sending
        except CallError as error:
            elsewhere = ErrorCode.OPERATION_NOT_FOUND, ErrorCode.UNAVAILABLE
            if not job.begun and error.code in elsewhere:
                # Another worker may have the operation: its code may be newer, or its source may be connected.
                error.retryable = True
                self._replies.refuse(job, error)
            else:
                sending = self._replies.fail(job, error, job.items)
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
            partial(self._replies.stop, job, credential_ended()),
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
        body = encode_item(job.request.request_id, envelope, sequence, self._replies.mailbox)
        enforce_limits(body, self._replies.target)
        unread = self._replies.count_output(job, len(body))
        try:
            await self._replies.target.send(job.reply_to, body)
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
            self._replies.check_deadline(job)
