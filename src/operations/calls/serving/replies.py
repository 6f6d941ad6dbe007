"""The jobs of a worker that have no last reply yet, and their replies.

Rule 1: a request gets exactly one last reply, unless its caller aborted it.
Rule 2: the last reply of a call is cached up to a size limit, and sent again only to the client that made the call.
Rule 3: no request runs twice: an id is stored until `max_ids` to `2 * max_ids` later requests have arrived.
"""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from secrets import token_hex
from time import time
from typing import Any

from operations.base.concurrency import Slot
from operations.base.deadline import NEVER, DeadlineTable
from operations.base.errors import CallError, ErrorCode
from operations.base.tasks import start_task
from operations.calls.protocol.events import encode_error, enforce_limits
from operations.calls.protocol.services import SERVICES
from operations.calls.serving.admission import AdmissionQueue
from operations.calls.serving.jobs import (
    Job,
    WorkerConfig,
    access_log,
    log_call,
    nothing,
    quietly,
    set_after,
    then,
)
from operations.front.limits import UNCOUNTED_OUTPUT, caller_key
from operations.front.public_errors import public_error
from operations.pubsub.base import EventTarget, WorkerStats
from operations.pubsub.delivery import Recent


class Replies:
    """Ends the jobs of one worker, each with one last reply.

    Args:
        target: Transports the replies.
        config: The settings of the worker.
        queue: The calls that wait for a slot.

    Attributes:
        mailbox: The address of the worker.
        jobs: The requests without a last reply, by their keys.
        recent: The ids of received requests, and the last replies.
        counters: Counts the calls.
        exposes_errors: Whether callers see the text of unexpected exceptions.
        is_leaving: Whether the worker stops.
        finished_at: When the last call ended, by the loop's clock.
        background: The tasks that send messages.
    """

    def __init__(self, target: EventTarget, config: WorkerConfig, queue: AdmissionQueue) -> None:
        self.target = target
        self.mailbox = target.control(token_hex(16))
        self.jobs: dict[str, Job] = {}
        self.recent = Recent()
        self.counters = WorkerStats(
            name=config.name,
            version=config.version,
            started_at=int(time() * 1000),
            concurrency=config.concurrency,
        )
        exposes = config.expose_errors
        self.exposes_errors = target.trusted if exposes is None else exposes
        self.is_leaving = False
        self.finished_at = -NEVER
        self.background: set[asyncio.Task[Any]] = set()
        self._config, self._shared = config, config.front
        self._queue = queue
        self._deadlines: DeadlineTable[Job] = DeadlineTable(self.jobs, self._expire)
        self._idle = asyncio.Event()
        """Set when the last job of a stopping worker has its reply."""
        self._loop = asyncio.get_running_loop()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine in the background."""
        return start_task(self.background, work)

    def add(self, job: Job) -> None:
        """Add a job."""
        self.jobs[job.key] = job
        self.check_deadline(job)

    def check_deadline(self, job: Job) -> None:
        """Let a job end at its deadline, which may be earlier than before."""
        if job.expires_at < self._deadlines.next:
            self._deadlines.schedule(job.expires_at)

    def clear_deadlines(self) -> None:
        """Stop checking deadlines."""
        self._deadlines.clear()

    async def wait_until_idle(self) -> None:
        """Wait until the last job of a stopping worker has its reply."""
        if self.jobs:
            self._idle.clear()
            await self._idle.wait()

    def fail(self, job: Job, error: CallError, sequence: int | None = None) -> Awaitable[None]:
        """Send the error of a call, as its caller may see it."""
        error = public_error(error, job.request.request_id, expose=self.exposes_errors)
        return self.conclude(job, self._encode_error(job, error, sequence))

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
        is_stop = self.is_leaving and error.code == ErrorCode.UNAVAILABLE and error.retryable
        return is_stop and not job.is_stream and job.is_safe_to_retry

    # Not a coroutine: the caller awaits the returned awaitable, which saves one step per call.
    def conclude(self, job: Job, body: bytes) -> Awaitable[None]:
        """Send the event that ends a call, and cache it in case it does not arrive."""
        if job.answered:
            return nothing()
        self._settle(job)
        unread = None
        try:
            enforce_limits(body, self.target)
            unread = self.count_output(job, len(body))
        except CallError as error:
            job.code = error.code
            body = encode_error(job.request.request_id, error)
        self._count(job)
        if job.claim is None:
            self.recent.finish(job.key, body, job.reply_to)
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
            now = self.finished_at = self._loop.time()
            counters.finished += 1
            counters.failed += bool(job.code)
            counters.seconds += now - (job.began_at or now)
            if access_log.isEnabledFor(logging.INFO):
                log_call(job, self._config.group, now)

    def _settle(self, job: Job) -> None:
        """Mark a call as ended."""
        job.answered = True
        self.jobs.pop(job.key, None)
        if not job.began_at:
            self._queue.withdraw(job)
        if not self.jobs and self.is_leaving:
            self._idle.set()

    def count_output(self, job: Job, size: int) -> Slot | None:
        """Count a message as unread output of its caller.

        Small messages, and messages through a broker, are not counted.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the caller has too many unread bytes.
        """
        if self._shared is None or size <= UNCOUNTED_OUTPUT:
            return None
        return self._shared.output.enter(caller_key(job.identity, self._config.address), size)

    def drop(self, job: Job) -> None:
        """Remove a request that another worker will handle."""
        self._settle(job)
        self.recent.forget(job.key)

    def refuse(self, job: Job, error: CallError) -> None:
        """Reject a request without running it, and remove its id, so that it may be sent again."""
        if job.answered:
            return
        body = self._encode_error(job, error)
        self.counters.refused += 1
        if access_log.isEnabledFor(logging.INFO):
            log_call(job, self._config.group, self._loop.time())
        self.drop(job)
        set_after(self._send_later(self._send_claimed(job, body)), job.replied)

    async def _send_claimed(self, job: Job, body: bytes) -> None:
        """Reply to a request that has not started, unless another worker has it."""
        claim, job.claim = job.claim, None
        if claim is not None:
            # A mutation is removed as when it starts: only the worker that does so knows that it has not run.
            is_ours = await claim.acquire(alone=not job.replayable)
            if not is_ours or (claim.is_disputed and not job.replayable):
                return
        await self.target.send(job.reply_to, body)

    def _expire(self, job: Job) -> None:
        self.stop(job, job.timeout_error())

    def stop(self, job: Job, error: CallError) -> None:
        """Reply with `error` unless the job has its reply, and cancel its task.

        The slot is released when the task has ended.
        """
        if not job.answered:
            self._send_later(self.conclude(job, self._encode_error(job, error)))
        if job.task is not None and job.is_started:
            job.task.cancel()

    def _send_later(self, sending: Awaitable[None]) -> "asyncio.Task[Any]":
        task = self.spawn(quietly(sending))
        if isinstance(sending, Coroutine):
            # A task that is cancelled before it starts never awaits the coroutine.
            task.add_done_callback(lambda _: sending.close())
        return task

    async def send(self, address: str, body: bytes) -> None:
        """Send a message and ignore failures, because its receiver requests it again."""
        await quietly(self.target.send(address, body))
