"""A worker: takes requests of its group from a target and runs them on a registry.

Rule 1: reachable when started, silent when stopped: `serve_calls` returns once requests arrive, and closing it
        takes no new ones before it finishes those it has.
Rule 2: a request runs once, however often it is delivered; a second delivery gets the first one's answer.
Rule 3: a caller that aborts, or is gone, does not keep a handler running.
Rule 4: nothing that arrives can stop the worker: what cannot be read is counted, and answered where it says to whom.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from operations.access import Identity
from operations.calls.admission import DEFAULT_CONCURRENCY, DEFAULT_QUEUE, Admission, Limits
from operations.calls.events import (
    AlivePayload,
    CallAborted,
    CallAlive,
    CallCompleted,
    CallCredited,
    CallProbed,
    CallRequested,
    CompletePayload,
    MalformedEvent,
    ProbePayload,
    RequestPayload,
    UnknownEvent,
    encode_error,
    encode_event,
    encode_item,
    encode_response,
    read_event,
)
from operations.calls.handler import Pace, answer, context_for, remaining_seconds
from operations.calls.identity import CredentialResolver, identify
from operations.calls.recent import Recent
from operations.calls.services import service_operations
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, TooLargeError, TransportError
from operations.pubsub.base import EventTarget, Subscription
from operations.registry import OperationRegistry

logger = logging.getLogger("operations")

DEFAULT_TIMEOUT = 30.0
GRACE = 10.0
"""Seconds that running calls have to finish when a worker stops."""

_CALLER_CHECK = 0.4
"""Seconds between looks whether callers are still there; two looks decide."""

_SETTLING = 2.0
"""Seconds after a reconnect in which callers may still be on their way back."""

_FAREWELL = 1.0
"""Seconds for cancelled handlers and last answers when a worker stops."""

_BLOCKED = 1.0
"""Seconds of standstill of the event loop that are worth a warning."""


class _Job:
    """One request on its way through a worker."""

    __slots__ = (
        "absent",
        "arrived_at",
        "expires_at",
        "pace",
        "principal",
        "reply_to",
        "request",
        "size",
        "stopped",
        "task",
        "worker",
    )

    def __init__(
        self, worker: "CallServer", request: RequestPayload, reply_to: str, size: int, now: float
    ) -> None:
        self.worker = worker
        self.request = request
        self.reply_to = reply_to
        self.size = size
        self.principal = request.credential or reply_to
        self.arrived_at = now
        limit = remaining_seconds(request)
        if limit is None and request.credit is None:
            limit = DEFAULT_TIMEOUT
        self.expires_at = None if limit is None else now + limit
        self.pace = Pace(request.credit)
        self.task: asyncio.Task[None] | None = None
        self.stopped: CallError | None = None
        self.absent = 0

    # What `answer` publishes through.

    async def respond(self, envelope: ResponseEnvelope[Any]) -> None:
        try:
            body = encode_response(self.request.request_id, envelope)
        except (TypeError, ValueError) as error:
            raise CallError(
                ErrorCode.EXECUTION_ERROR, f"the result cannot be written as JSON: {error}"
            ) from error
        await self.worker.finish(self, body)

    async def item(self, envelope: ResponseEnvelope[Any], sequence: int) -> int:
        worker = self.worker
        body = encode_item(self.request.request_id, envelope, sequence, worker.mailbox)
        if len(body) > worker.target.max_bytes:
            raise _too_large(len(body), worker.target.max_bytes)
        try:
            await worker.target.send(self.reply_to, body)
        except TransportError as error:
            raise CallError(ErrorCode.UNAVAILABLE, f"an item could not be sent: {error}") from error
        return len(body)

    async def complete(self, sequence: int) -> None:
        payload = CompletePayload(request_id=self.request.request_id, sequence=sequence)
        await self.worker.finish(self, encode_event(CallCompleted(payload=payload)))

    async def error(self, error: CallError, sequence: int | None) -> None:
        error = self.worker.presentable(error, self.request)
        await self.worker.finish(self, encode_error(self.request.request_id, error, sequence))


class CallServer:
    """A running worker. `serve_calls` makes one.

    Attributes:
        malformed: Messages that were no events.
        ignored: Events of unknown types.
        refused: Requests beyond the bounds.
        duplicates: Requests that had been seen before.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        target: EventTarget,
        *,
        group: str,
        limits: Limits,
        resolve: CredentialResolver | None,
        grace: float,
        expose_errors: bool,
    ) -> None:
        self.registry = registry
        self.target = target
        self.group = group
        self.mailbox = target.mailbox()
        self.malformed = 0
        self.ignored = 0
        self.refused = 0
        self.duplicates = 0
        self._services = OperationRegistry(service_operations(registry))
        self._resolve = resolve
        self._grace = grace
        self._expose_errors = expose_errors
        self._admission: Admission[_Job] = Admission(limits, self._start)
        self._jobs: dict[str, _Job] = {}
        self._recent = Recent()
        self._background: set[asyncio.Task[Any]] = set()
        self._minding: list[asyncio.Task[Any]] = []
        self._taking: Subscription | None = None
        self._listening: Subscription | None = None
        self._settled_at = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

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
        """Listen, take requests, and tell the callers."""
        workers = self.target.topic(f"{self.group}.workers")
        self._listening = await self.target.listen((self.mailbox, workers), self)
        # Callers must know a worker before it can have their calls: what is not known is not missed.
        await self._announce(leaving=False)
        self._taking = await self.target.take(self.group, self, lambda: self._admission.free)
        self._minding = [self._spawn(self._mind_the_loop())]
        if not self.target.direct:
            self._minding.append(self._spawn(self._mind_the_callers()))

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. A second signal ends the process at once."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
                raise SystemExit(1)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        try:
            await stop.wait()
            await self.aclose()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def aclose(self) -> None:
        """Take nothing new, give what runs `grace` seconds, end the rest with a retryable `UNAVAILABLE`."""
        taking, self._taking = self._taking, None
        if taking is not None:
            with suppress(TransportError):
                await taking.aclose()
            with suppress(TransportError):
                await self._announce(leaving=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self._grace)
        leaving = CallError(ErrorCode.UNAVAILABLE, "the worker stops", {"reason": "shutdown"})
        for job in self._admission.empty():
            await self.finish(job, encode_error(job.request.request_id, leaving))
        for job in tuple(self._jobs.values()):
            self._stop(job, leaving)
        running = [job.task for job in self._jobs.values() if job.task is not None]
        if running:
            await asyncio.wait(running, timeout=_FAREWELL)
        listening, self._listening = self._listening, None
        for task in self._minding:
            task.cancel()
        # One turn of the loop, in which the last answers are handed over.
        await asyncio.sleep(0)
        if self._background:
            await asyncio.wait(tuple(self._background), timeout=_FAREWELL)
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if listening is not None:
            with suppress(TransportError):
                await listening.aclose()
        await self._services.aclose()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # ---------------------------------------------------------------------------------------- receiving

    def receive(self, body: bytes, reply_to: str) -> None:
        """Take an event from the target."""
        event = read_event(body)
        if isinstance(event, CallRequested):
            self._admit(event.payload, reply_to or event.payload.reply_to or "", len(body))
        elif isinstance(event, CallAborted):
            self._abort(event.payload.request_id)
        elif isinstance(event, CallCredited):
            job = self._jobs.get(event.payload.request_id)
            if job is not None:
                job.pace.grant(event.payload.credit)
        elif isinstance(event, CallProbed):
            self._spawn(self._account(event.payload))
        elif isinstance(event, MalformedEvent):
            self._reject(event, reply_to)
        elif isinstance(event, UnknownEvent):
            self.ignored += 1

    def _admit(self, request: RequestPayload, reply_to: str, size: int) -> None:
        request_id = request.request_id
        if request_id in self._recent:
            self.duplicates += 1
            word = self._recent.last_word(request_id)
            if word is not None:
                self._spawn(self._send(reply_to, word))
            return
        job = _Job(self, request, reply_to, size, asyncio.get_running_loop().time())
        self._recent.add(request_id)
        self._jobs[request_id] = job
        self._idle.clear()
        reason = self._admission.offer(job)
        if reason is not None:
            self.refused += 1
            self._forget(job)
            self._recent.forget(request_id)
            error = CallError(ErrorCode.RESOURCE_EXHAUSTED, reason, retryable=True)
            self._spawn(self._send(reply_to, encode_error(request_id, error)))

    def _abort(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None:
            self._stop(job, CallError(ErrorCode.ABORTED, "the call was aborted"))
        elif request_id not in self._recent:
            # It may have overtaken the request, which then counts as seen.
            self._recent.add(request_id)

    def _reject(self, event: MalformedEvent, reply_to: str) -> None:
        self.malformed += 1
        address = reply_to or event.reply_to
        if event.type == CallRequested.__struct_config__.tag and event.request_id and address:
            error = CallError(
                ErrorCode.VALIDATION_ERROR, f"the request is malformed: {event.reason}"
            )
            self._spawn(self._send(address, encode_error(event.request_id, error)))

    def undelivered(self, key: str) -> None:
        """Nothing is put into queues from here."""

    def lost(self, reason: str) -> None:
        """The connection is gone; where it was the caller itself, nobody wants the answers any more."""
        if self.target.direct:
            for job in tuple(self._jobs.values()):
                self._stop(job, CallError(ErrorCode.ABORTED, reason))

    def restored(self) -> None:
        """The connection is back: tell the callers that this worker is."""
        self._settled_at = asyncio.get_running_loop().time() + _SETTLING
        self._spawn(self._announce(leaving=False))

    # ---------------------------------------------------------------------------------------- running

    def _start(self, job: _Job) -> None:
        job.task = asyncio.get_running_loop().create_task(self._serve(job))
        # Not a `finally` in the task: one that is cancelled before its first step never gets there.
        job.task.add_done_callback(partial(self._ended, job))

    def _ended(self, job: _Job, task: "asyncio.Task[None]") -> None:
        """Make room for the next job, and answer this one if it could not do so itself."""
        self._forget(job)
        self._admission.done(job)
        if task.cancelled():
            error = job.stopped or CallError(ErrorCode.ABORTED, "the call was cancelled")
        elif (failure := task.exception()) is not None:
            request = job.request
            logger.error("%s could not be answered", request.operation_id, exc_info=failure)
            error = CallError(ErrorCode.EXECUTION_ERROR, f"{request.operation_id} failed")
        else:
            return
        self._spawn(self.finish(job, encode_error(job.request.request_id, error)))

    async def _serve(self, job: _Job) -> None:
        request = job.request
        remaining = None
        if job.expires_at is not None:
            remaining = job.expires_at - asyncio.get_running_loop().time()
            if remaining <= 0:
                error = CallError(
                    ErrorCode.TIMEOUT, "the call was not started: its time had run out"
                )
                await job.error(error, None)
                return
        identity: Identity | None
        try:
            identity = await identify(request, self.target, self._resolve)
        except CallError as error:
            await job.error(error, None)
            return
        if identity is not None:
            job.principal = job.principal or identity.id
        context = context_for(request, identity, remaining)
        registry = self.registry
        if request.operation_id in self._services and request.operation_id not in registry:
            registry = self._services
        await answer(registry, request, context, job, job.pace)

    def _stop(self, job: _Job, error: CallError) -> None:
        """Cancel a job, or take it out of the line. It is answered with `error`."""
        if job.task is not None:
            job.stopped = error
            job.task.cancel()
        elif self._admission.withdraw(job):
            self._forget(job)
            self._spawn(self.finish(job, encode_error(job.request.request_id, error)))

    def _forget(self, job: _Job) -> None:
        self._jobs.pop(job.request.request_id, None)
        if not self._jobs:
            self._idle.set()

    # ---------------------------------------------------------------------------------------- answering

    async def finish(self, job: _Job, body: bytes) -> None:
        """Send the event that ends a call, and keep it in case it does not arrive."""
        limit = self.target.max_bytes
        if len(body) > limit:
            body = encode_error(job.request.request_id, _too_large(len(body), limit))
        self._recent.finish(job.request.request_id, body)
        await self._send(job.reply_to, body)

    async def _send(self, address: str, body: bytes) -> None:
        try:
            await self.target.send(address, body)
        except TransportError as error:
            # The caller will ask.
            logger.debug("an answer could not be sent: %s", error)

    def presentable(self, error: CallError, request: RequestPayload) -> CallError:
        """`error` as a caller elsewhere may see it: what nobody declared stays in our log."""
        if not error.unexpected or self._expose_errors:
            return error
        logger.error("%s failed", request.operation_id, exc_info=error)
        return CallError(error.code, f"{request.operation_id} failed: request {request.request_id}")

    async def _announce(self, *, leaving: bool) -> None:
        if self.target.direct:
            # A peer knows that it has one.
            return
        payload = AlivePayload(worker=self.mailbox, leaving=leaving)
        callers = self.target.topic(f"{self.group}.callers")
        await self._send(callers, encode_event(CallAlive(payload=payload)))

    async def _account(self, probe: ProbePayload) -> None:
        """Say which calls are here, and repeat the last word on those that have ended."""
        held = [request_id for request_id in probe.request_ids if request_id in self._jobs]
        for request_id in probe.request_ids:
            word = self._recent.last_word(request_id)
            if word is not None:
                await self._send(probe.reply_to, word)
        payload = AlivePayload(
            worker=self.mailbox, request_ids=held, leaving=self._taking is None and not held
        )
        await self._send(probe.reply_to, encode_event(CallAlive(payload=payload)))

    # ---------------------------------------------------------------------------------------- minding

    async def _mind_the_callers(self) -> None:
        """Stop what runs for callers that are gone."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_CALLER_CHECK)
            now = loop.time()
            old = [job for job in self._jobs.values() if now - job.arrived_at > _CALLER_CHECK]
            if not old or now < self._settled_at or not self.target.is_connected:
                continue
            callers = list({job.reply_to for job in old})
            try:
                present = await asyncio.gather(*map(self.target.is_present, callers))
            except TransportError:
                continue
            gone = {caller for caller, there in zip(callers, present, strict=True) if not there}
            for job in old:
                job.absent = job.absent + 1 if job.reply_to in gone else 0
                if job.absent > 1 and not job.stopped:
                    self._stop(job, CallError(ErrorCode.ABORTED, "the caller is gone"))

    async def _mind_the_loop(self) -> None:
        """Warn when a handler kept everything else waiting."""
        loop = asyncio.get_running_loop()
        tick = _BLOCKED / 4
        while True:
            before = loop.time()
            await asyncio.sleep(tick)
            late = loop.time() - before - tick
            if late > _BLOCKED:
                suspects = sorted({job.request.operation_id for job in self._jobs.values()})
                logger.warning(
                    "the event loop stood still for %.1f s; running then: %s",
                    late,
                    ", ".join(suspects[:10]) or "nothing that is still here",
                )


def _too_large(size: int, limit: int) -> CallError:
    return CallError(
        ErrorCode.RESOURCE_EXHAUSTED, f"the result is {size} bytes, more than the {limit} allowed"
    )


@asynccontextmanager
async def serve_calls(
    registry: OperationRegistry,
    target: EventTarget,
    *,
    group: str = "operations",
    concurrency: int = DEFAULT_CONCURRENCY,
    queue: int = DEFAULT_QUEUE,
    per_principal: int | None = None,
    resolve: CredentialResolver | None = None,
    grace: float = GRACE,
    expose_errors: bool | None = None,
) -> AsyncGenerator[CallServer]:
    """Serve a registry's operations to callers of `group` for the length of an `async with` block.

    When the block starts, requests arrive. When it ends, no new ones are taken and those that run are finished.

    Args:
        registry: What to serve; `services.list` and `services.schema` come with it.
        target: Where requests come from.
        group: Each request goes to one worker of the group; all of them should serve the same.
        concurrency: Calls that run at a time.
        queue: Calls that wait for a place; beyond it they are refused with `RESOURCE_EXHAUSTED`.
        per_principal: Calls of one caller at a time, running and waiting.
        resolve: Who a `credential` belongs to.
        grace: Seconds that running calls have to finish at the end.
        expose_errors: Whether the text of unexpected exceptions is shown to callers; by default on trusted
            targets only.

    Raises:
        TransportError: If the broker cannot be reached.
    """
    server = CallServer(
        registry,
        target,
        group=group,
        limits=Limits(concurrency=concurrency, queue=queue, per_principal=per_principal),
        resolve=resolve,
        grace=grace,
        expose_errors=target.trusted if expose_errors is None else expose_errors,
    )
    await server.start()
    try:
        yield server
    finally:
        await server.aclose()
