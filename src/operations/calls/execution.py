"""Run the jobs of a worker: identify the caller, admit the call, execute it and send its results."""

import asyncio
import logging
from functools import partial

from operations._text import printable
from operations.access import Identity
from operations.calls.config import WorkerConfig
from operations.calls.jobs import Job, RefusedError, exhausted, may_have_run, principal_of
from operations.calls.reply_cache import Replies, quietly
from operations.errors import CallError, ErrorCode, TransportError
from operations.front.front import Front, credential_ended, identify_credential
from operations.front.limits import AdmissionQueue, Limits, caller_key
from operations.registry import OperationRegistry

logger = logging.getLogger("operations")


class JobExecutor:
    """Runs the jobs of one worker.

    Args:
        registry: The operations that it serves.
        config: The options of the worker.
        admission: Counts the calls of identified callers.
        replies: Sends the results.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        config: WorkerConfig,
        admission: AdmissionQueue[Job],
        replies: Replies,
    ) -> None:
        # The queue limits calls per caller; behind a broker all callers have one address.
        calls = config.limits.calls
        self._front = config.front or Front(registry, Limits(calls=calls, calls_per_caller=calls))
        self._shared = config.front
        self._address = config.address
        self._resolve = config.resolve
        self._admission = admission
        self._replies = replies
        self._clock = asyncio.get_running_loop().time

    async def attend(self, job: Job) -> None:
        """Identify the caller of a job, and run it.

        Raises:
            RefusedError: If it was not started.
        """
        # The timer cannot fire while a handler blocks the loop.
        if job.expires_at <= self._clock():
            await quietly(self._replies.fail(job, job.timeout_error()))
            return
        request = job.request
        try:
            identity = job.identity
            if request.credential is not None:
                identity = await self._identify(job, request.credential)
            if self._shared is None:
                await self._execute(job, identity)
            else:
                await self._execute_through(self._shared, job, identity)
        except CallError as error:
            await quietly(self._replies.fail(job, error))

    async def _identify(self, job: Job, credential: str) -> Identity | None:
        identity = await identify_credential(
            credential, self._resolve, self._front.auth, self._address
        )
        reason = self._admission.identified(job, principal_of(identity))
        if reason is not None:
            raise RefusedError(exhausted(reason))
        if job.expires_at <= self._clock():
            raise job.timeout_error()
        return identity

    async def _execute_through(self, front: Front, job: Job, identity: Identity | None) -> None:
        """Run a job if the rules that all entry points of a server share admit it."""
        caller = job.caller = caller_key(identity, self._address)
        try:
            if job.spec is not None:
                front.enforce_visible(job.spec, identity)
                if job.request.attempt > 1 and not job.replayable:
                    raise may_have_run(job)
            elif not job.registry.has_remote:  # It gets the same reply as a hidden operation.
                front.find(job.request.operation_id, identity)
            slot = front.admit(caller, is_stream=job.is_stream)
        except CallError as error:
            raise RefusedError(error) from error
        with slot:
            await self._execute(job, identity)

    async def _execute(self, job: Job, identity: Identity | None) -> None:
        """Run the operation and send its results."""
        job.identity_id = None if identity is None else identity.id
        request, replies, registry = job.request, self._replies, job.registry
        context = job.context(identity, self._clock())
        sequence: int | None = None
        try:
            job.begun = job.spec is not None or registry.has_remote
            if not job.is_stream:
                envelope = await registry.execute(request.operation_id, request.input, context)
                await replies.respond(job, envelope)
                return
            sequence = 0
            end = partial(replies.stop, job, credential_ended())
            watch = self._front.credentials.watch_message
            unwatch = watch(request.credential, identity, self._resolve, end)
            stream = registry.subscribe(request.operation_id, request.input, context)
            try:
                async for envelope in stream:
                    await replies.item(job, envelope, sequence)
                    sequence += 1
            finally:
                unwatch()
                await stream.aclose()
            await replies.complete(job, sequence)
        except CallError as error:
            if not job.begun and error.code == ErrorCode.OPERATION_NOT_FOUND:
                # Another worker of the group may have it: its code may be newer.
                error = CallError(error.code, error.message, error.details, retryable=True)
            await quietly(replies.fail(job, error, sequence))
        except TransportError as error:
            # The caller will ask for the reply.
            logger.debug("%s: a reply could not be sent: %s", printable(request.request_id), error)
