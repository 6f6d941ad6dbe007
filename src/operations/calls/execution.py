"""Run the jobs of a worker, and send their replies, responses to probes, and the worker's presence.

Rule 1: a request gets exactly one last reply, unless its caller aborted it.
Rule 2: the last reply of a call is cached while there is room, and sent again only to the client that made the call.
Rule 3: no request runs twice: an id is remembered until `max_ids` others have come after it, and never longer than
        twice that.
Rule 4: a copy of a request that the worker gave up (`FencePayload`) does not begin; a later copy may.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from time import monotonic
from typing import Any

from operations._text import printable
from operations.access import Identity
from operations.calls.config import WorkerConfig
from operations.calls.events import (
    AbortPayload,
    AlivePayload,
    CallAlive,
    CallCompleted,
    CallOffered,
    CompletePayload,
    FencePayload,
    OfferPayload,
    ProbePayload,
    encode_error,
    encode_event,
    encode_item,
    encode_response,
)
from operations.calls.jobs import (
    Job,
    RefusedError,
    WorkerCounters,
    exhausted,
    may_have_run,
    principal_of,
    refusal_of,
)
from operations.calls.states import NEVER, Deadlines
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, TransportError
from operations.front.front import Front, credential_ended, identify_credential
from operations.front.limits import UNCOUNTED_OUTPUT, AdmissionQueue, Limits, Slot, caller_key
from operations.front.public_errors import public_error
from operations.pubsub.base import BoundedSet, EventTarget, LogThrottle
from operations.registry import OperationRegistry

logger = logging.getLogger("operations")

MAX_IDS = 20_000
MAX_BYTES = 8 * 1024 * 1024

WEIGHT = 320
"""Bytes that a last reply takes besides its own: its id, whom it is for, and their places."""


class Recent:
    """Request ids, and the last event of those that ended.

    Args:
        max_ids: How many ids are remembered at least.
        max_bytes: What the last events may take; the elder half of them goes when the younger is full.
    """

    def __init__(self, max_ids: int = MAX_IDS, max_bytes: int = MAX_BYTES) -> None:
        self._ids = BoundedSet(max_ids)
        self._younger: dict[str, tuple[bytes, str]] = {}
        self._elder: dict[str, tuple[bytes, str]] = {}
        self._half = max_bytes // 2
        self._left = self._half
        self.add = self._ids.add
        """Remember that this request has come; False if it had."""
        self.forget = self._ids.discard
        """Let the request come again: it was refused, not run."""

    def __len__(self) -> int:
        return len(self._ids)

    def never_had(self, request_id: str, age: float) -> bool:
        """Return whether the request certainly has not come in the last `age` seconds."""
        return request_id not in self._ids and monotonic() - age > self._ids.complete_since

    def finish(self, request_id: str, body: bytes, reply_to: str) -> None:
        """Keep the last event of a call, unless it alone would take a quarter of the room."""
        weight = len(body) + len(reply_to) + WEIGHT
        if weight > self._half // 2:
            return
        if weight > self._left:
            self._elder, self._younger = self._younger, {}
            self._left = self._half
        self._left -= weight
        self._younger[request_id] = (body, reply_to)

    def last_reply(self, request_id: str, reply_to: str) -> bytes | None:
        """The last event of a call that ended, for the one it was sent to, while it is remembered."""
        word = self._younger.get(request_id) or self._elder.get(request_id)
        return word[0] if word is not None and word[1] == reply_to else None


class Replies:
    """Sends the replies of one worker.

    Args:
        target: Carries them.
        group: Its callers receive the worker's presence.
        mailbox: The worker's address.
        jobs: The requests without a last reply, by their keys.
        front: Counts unread output, if the worker shares the front of a server.
        expose_errors: Whether callers see the text of unexpected exceptions.
        deadlines: The deadlines of the jobs.
        counters: Counts the jobs that end.
        spawn: Runs a coroutine in the background.

    Attributes:
        is_leaving: Whether the worker takes nothing new.
    """

    def __init__(
        self,
        target: EventTarget,
        group: str,
        mailbox: str,
        jobs: dict[str, Job],
        *,
        front: Front | None,
        expose_errors: bool,
        deadlines: Deadlines[Job],
        counters: WorkerCounters,
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[Any]"],
    ) -> None:
        self.is_leaving = False
        self.idle = asyncio.Event()
        """Set when the last job of a worker that is leaving has its reply."""
        self._target = target
        self._group = group
        self._mailbox = mailbox
        self._jobs = jobs
        self._front = front
        self._expose_errors = expose_errors
        self._deadlines = deadlines
        self._counters = counters
        self._spawn = spawn
        self._recent = Recent()
        self._fenced = BoundedSet(MAX_IDS)
        self._misdirections = LogThrottle()
        self.specs = ""
        """A digest of the operations that the worker serves."""

    def is_new(self, key: str, resends: int = 0) -> bool:
        """Remember the key of a request; return False if it was known, or this copy of it was given up."""
        if len(self._fenced) and f"{key} {resends}" in self._fenced:
            return False
        return self._recent.add(key)

    def _fence(self, fence: FencePayload, sender: str) -> bool:
        """Give up a copy of a request; return False if it has begun, or may have begun and was forgotten."""
        request_id, age = fence.request_id, fence.age_ms / 1000
        key = sender + request_id
        job = self.find(request_id, sender)
        if job is None:
            if not all(self._recent.never_had(each, age) for each in (key, request_id)):
                return False
        elif job.is_started and job.claim is None and not job.is_offered:
            return False
        else:
            # Its caller decides: it will not confirm this copy any more.
            job.is_stale = True
        self._fenced.add(f"{key} {fence.resends}")
        return True

    def find(self, request_id: str, sender: str) -> Job | None:
        """Return the job of a request, if its own client refers to it."""
        job = self._jobs.get(sender + request_id)
        if job is None:
            # The program itself received it, so that only its reply address identifies the caller.
            job = self._jobs.get(request_id)
            job = job if job is not None and job.reply_to.startswith(sender) else None
        return job

    def is_allowed(self, address: str, sender: str) -> bool:
        """Return whether a client may ask for replies to `address`: only to its own mailboxes, or to none."""
        if not address or address.startswith(sender):
            return True
        level = self._misdirections.level()
        logger.log(level, "a message was dropped: its reply address does not begin with %r", sender)
        return False

    def clear(self) -> None:
        """Forget all ids and replies."""
        self._recent = Recent()

    # ---------------------------------------------------------------------------------------- results

    # Not a coroutine: the caller awaits its result, which saves one step for every call.
    def respond(self, job: Job, envelope: ResponseEnvelope[Any]) -> Awaitable[None]:
        """Send the one reply of a call.

        Raises:
            CallError: `EXECUTION_ERROR` if the envelope cannot be written as JSON.
        """
        try:
            body = encode_response(job.request.request_id, envelope)
        except (TypeError, ValueError) as error:
            reason = f"the result cannot be written as JSON: {error}"
            raise CallError(ErrorCode.EXECUTION_ERROR, reason) from error
        return self.conclude(job, body)

    async def item(self, job: Job, envelope: ResponseEnvelope[Any], sequence: int) -> None:
        """Send one item of a subscription, as soon as there is room for it.

        Raises:
            CallError: If it cannot be sent.
        """
        pace = job.pace
        if pace is not None and pace.is_full:
            # The item is ready, so the subscription is not idle while its reader is slow.
            job.expires_at = job.ends_at
            await pace.room()
        self._expect_item(job)
        if job.answered:
            raise CallError(ErrorCode.ABORTED, "the subscription has ended")
        body = encode_item(job.request.request_id, envelope, sequence, self._mailbox)
        error = refusal_of(body, self._target)
        if error is not None:
            raise error
        unread = self._count_output(job, len(body))
        try:
            await self._target.send(job.reply_to, body)
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
            job.expires_at = min(job.ends_at, asyncio.get_running_loop().time() + job.idle)
            if job.expires_at < self._deadlines.next:
                self._deadlines.schedule(job.expires_at)

    def complete(self, job: Job, sequence: int) -> Awaitable[None]:
        """Send the end of a subscription."""
        payload = CompletePayload(request_id=job.request.request_id, sequence=sequence)
        return self.conclude(job, encode_event(CallCompleted(payload=payload)))

    def fail(self, job: Job, error: CallError, sequence: int | None = None) -> Awaitable[None]:
        """Send the error of a call, as its caller may see it."""
        request_id = job.request.request_id
        error = public_error(error, request_id, expose=self._expose_errors)
        return self.conclude(job, self._encode_error(job, error, sequence))

    def _encode_error(self, job: Job, error: CallError, sequence: int | None = None) -> bytes:
        request_id = job.request.request_id
        job.code = error.code
        if job.begun:
            return encode_error(request_id, error, sequence)
        return encode_error(request_id, error, sequence, begun=False, worker=self._mailbox)

    def conclude(self, job: Job, body: bytes) -> Awaitable[None]:
        """Send the event that ends a call, and cache it in case it does not arrive."""
        if job.answered:
            return _nothing()
        self.settle(job)
        request_id = job.request.request_id
        error = refusal_of(body, self._target)
        unread = None
        if error is None:
            try:
                unread = self._count_output(job, len(body))
            except CallError as exhausted:
                error = exhausted
        if error is not None:
            job.code = error.code
            body = encode_error(request_id, error)
        self._counters.end(job)
        if job.claim is None:
            self._recent.finish(job.key, body, job.reply_to)
            sending: Awaitable[None] = self._target.send(job.reply_to, body)
        else:
            sending = self._send_claimed(job, body)
        if unread is not None:
            sending = _then(sending, unread.release)
        return sending if job.replied is None else _then(sending, job.replied.set)

    def settle(self, job: Job) -> None:
        """Mark a call as ended."""
        job.answered = True
        self._jobs.pop(job.key, None)
        if not self._jobs and self.is_leaving:
            self.idle.set()

    def _count_output(self, job: Job, size: int) -> Slot | None:
        """Count a message until its caller has read it; small ones, and those behind a broker, are not counted.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the caller has too many unread bytes.
        """
        if self._front is None or size <= UNCOUNTED_OUTPUT:
            return None
        return self._front.output.enter(job.caller, size)

    def drop(self, job: Job) -> None:
        """Forget a request that is left to another worker."""
        self.settle(job)
        self._recent.forget(job.key)

    async def _send_claimed(self, job: Job, body: bytes) -> None:
        """Reply to a request that has not begun, unless another worker has it."""
        claim, job.claim = job.claim, None
        if claim is None or await claim.take(alone=False):
            await self._target.send(job.reply_to, body)

    # ---------------------------------------------------------------------------------------- in the background

    def stop(self, job: Job, error: CallError) -> None:
        """Reply with `error` unless the job has its reply, and cancel its task. Its slot is free when it has ended."""
        if not job.answered:
            self._send_later(self.conclude(job, self._encode_error(job, error)))
        if job.task is not None and job.is_started:
            job.task.cancel()

    def _send_later(self, sending: Awaitable[None]) -> "asyncio.Task[Any]":
        task = self._spawn(quietly(sending))
        if isinstance(sending, Coroutine):
            # A task that is cancelled before it begins leaves it unawaited.
            task.add_done_callback(lambda _: sending.close())
        return task

    def abort(self, abort: AbortPayload, sender: str) -> None:
        """Stop a job at the request of its caller, or refuse one that was offered."""
        job = self.find(abort.request_id, sender)
        copy = abort.resends
        # The refusal of an offer that was made twice comes twice.
        if copy is not None and (job is None or not job.is_offered or job.request.resends != copy):
            return
        if job is None:
            # It may have overtaken the request, which then counts as known.
            self.is_new(sender + abort.request_id)
            return
        if job.is_offered:
            # Another worker may have the call: its caller waits for the reply of that one.
            self.drop(job)
        self.stop(job, CallError(ErrorCode.ABORTED, "the call was aborted"))

    def repeat(self, key: str, reply_to: str) -> "asyncio.Task[Any] | None":
        """Send the last reply of a call again to its caller; None if it is not cached."""
        reply = self._recent.last_reply(key, reply_to)
        return None if reply is None else self._spawn(self._send(reply_to, reply))

    def refuse(self, job: Job, error: CallError) -> "asyncio.Task[Any]":
        """Reply to a request that does not run, and forget its id: it may come again."""
        self.drop(job)
        body = encode_error(job.request.request_id, error, begun=False, worker=self._mailbox)
        return self._send_later(self._send_claimed(job, body))

    async def offer(self, job: Job) -> None:
        """Ask the caller whether a request that waited may begin."""
        request = job.request
        payload = OfferPayload(
            request_id=request.request_id,
            worker=self._mailbox,
            attempt=request.attempt,
            resends=request.resends,
        )
        await self._send(job.reply_to, encode_event(CallOffered(payload=payload)))

    def reject(self, request_id: str, reply_to: str, error: CallError) -> "asyncio.Task[Any]":
        """Reply to a malformed request; its id may be that of another call."""
        return self._spawn(self._send(reply_to, encode_error(request_id, error)))

    def account(self, probe: ProbePayload, sender: str) -> None:
        """Report which calls this worker has, and send the last replies of those that have ended again."""
        if self.is_allowed(probe.reply_to, sender):
            self._spawn(self._account(probe, sender))

    async def _account(self, probe: ProbePayload, sender: str) -> None:
        held: list[str] = []
        for request_id in dict.fromkeys(probe.request_ids):
            job = self.find(request_id, sender)
            reply = self._recent.last_reply(sender + request_id, probe.reply_to)
            reply = reply or self._recent.last_reply(request_id, probe.reply_to)
            # Only for the client that made the call; for others it does not exist.
            if job is not None and job.reply_to == probe.reply_to:
                if job.is_offered:
                    # Not a claim: another worker may have begun the same request.
                    await self.offer(job)
                # Until it is removed from its queue, another worker may take it over.
                elif job.claim is None:
                    held.append(request_id)
            elif reply is not None:
                await self._send(probe.reply_to, reply)
        leaving = self.is_leaving and not held
        stats = self._counters.stats(leaving=self.is_leaving) if probe.stats else None
        payload = AlivePayload(
            worker=self._mailbox,
            request_ids=held,
            fenced=[fence for fence in probe.fences if self._fence(fence, sender)],
            leaving=leaving,
            specs=self.specs,
            stats=stats,
        )
        await self._send(probe.reply_to, encode_event(CallAlive(payload=payload)))

    async def announce(self, *, arrived: bool = False) -> None:
        """Tell all callers of the group that this worker is here, leaves, or serves other operations."""
        payload = AlivePayload(
            worker=self._mailbox, arrived=arrived, leaving=self.is_leaving, specs=self.specs
        )
        callers = self._target.topic(f"{self._group}.callers")
        await self._send(callers, encode_event(CallAlive(payload=payload)))

    async def _send(self, address: str, body: bytes) -> None:
        await quietly(self._target.send(address, body))


async def quietly(sending: Awaitable[None]) -> None:
    """Send a message that its receiver asks for again if it does not arrive."""
    try:
        await sending
    except TransportError as error:
        logger.debug("a reply could not be sent: %s", error)


async def _then(sending: Awaitable[None], callback: Callable[[], object]) -> None:
    try:
        await sending
    finally:
        callback()


async def _nothing() -> None:
    """For a call that has its reply already."""


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
