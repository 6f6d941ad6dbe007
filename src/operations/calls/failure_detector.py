"""Detect lost workers and lost callers long before a deadline, and a blocked event loop.

A client probes calls that take longer than a heartbeat: every worker of the group reports which of them it has, and
sends again the replies to those that have ended.

    claimed by a worker                                    -> wait on
    the broker reports that the worker is gone             -> lost, now
    the worker is connected but silent                     -> it may be busy: lost only after `silence`
    every worker responded, and none has the call          -> lost, after a second probe
    no worker ever responded, and none is present now      -> lost, after a second probe

Rule 1: a verdict needs the broker's report or a whole group's; a worker that is merely busy loses nothing.
Rule 2: a lost call runs again if that is known to be safe (a query, or idempotent), at most `MAX_ATTEMPTS` times.
        Every other one ends with `UNAVAILABLE`: it may have run.
Rule 3: workers that never respond to probes (other implementations) are not judged by them.
Rule 4: a worker cancels the calls of callers that are gone.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

from operations._json import is_object
from operations.calls.events import (
    AlivePayload,
    CallProbed,
    CallRequested,
    ProbePayload,
    encode_event,
)
from operations.calls.jobs import Job
from operations.calls.pending_call import PendingCall
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, NotSentError, TransportError
from operations.pubsub.base import EventTarget

logger = logging.getLogger("operations")

SETTLING = 2.0
"""Seconds after a reconnect in which others may still be on their way back."""


async def is_there(target: EventTarget, address: str) -> bool:
    """Return whether a process listens at `address`; False for a malformed address.

    Raises:
        TransportError: If that cannot be known now.
    """
    try:
        return await target.is_present(address)
    except NotSentError:
        if target.is_connected:
            return False
        raise


MAX_ATTEMPTS = 3
"""How often a call is given to workers that are lost while they have it."""

_ANSWER = 0.4
"""Part of a heartbeat that the workers of a group have to answer."""

_LOOKS = 2
"""How often nobody must have a call before it counts as lost."""

_PER_PROBE = 1000
"""Calls asked after in one event."""

_MAX_WORKERS = 10_000
"""Workers of one group that are remembered: anybody may say that it is one."""

_STUCK = 2.0
"""Seconds a subscription may wait for an item that later ones have overtaken."""


class Calls(Protocol):
    """What the watch needs of the map it watches over."""

    target: EventTarget
    group: str
    mailbox: str
    pending: dict[str, PendingCall]

    def end(self, request_id: str, error: CallError) -> None:
        """End a call."""
        ...

    async def resend(self, call: PendingCall) -> None:
        """Send a call again."""
        ...

    async def call(
        self, operation_id: str, input: Any = None, *, timeout: float | None, credential: str | None
    ) -> ResponseEnvelope[Any]:
        """Call an operation of the group."""
        ...


class FailureDetector:
    """Looks after the calls of one map."""

    def __init__(self, calls: Calls, *, heartbeat: float, silence: float) -> None:
        self._calls = calls
        self._heartbeat = heartbeat
        self._silence = silence
        self._workers: dict[str, float] = {}
        self._answers = False
        self._were_there = False
        self._replayable: dict[str, bool] = {}
        self._settled_at = 0.0
        self._hurry = asyncio.Event()
        # Workers must be known before they can be missed.
        self._roll_call = True

    def heard(self, alive: AlivePayload) -> None:
        """A worker spoke up."""
        self._answers = True
        now = asyncio.get_running_loop().time()
        if alive.leaving:
            self._workers.pop(alive.worker, None)
        elif alive.worker in self._workers or len(self._workers) < _MAX_WORKERS:
            self._workers[alive.worker] = now
        for request_id in alive.request_ids:
            call = self._calls.pending.get(request_id)
            if call is not None:
                call.worker = alive.worker
                call.seen_at = now
                call.misses = 0

    @property
    def _workers_topic(self) -> str:
        return self._calls.target.topic(f"{self._calls.group}.workers")

    @property
    def is_settling(self) -> bool:
        """Whether a reconnect was so recent that absence means nothing yet."""
        return asyncio.get_running_loop().time() < self._settled_at

    def restored(self) -> None:
        """The connection is back: ask at once for what was answered meanwhile."""
        self._settled_at = asyncio.get_running_loop().time() + SETTLING
        self._hurry.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            # Before looking: who hurries meanwhile means the next look.
            self._hurry.clear()
            try:
                await self._look()
            except TransportError as error:
                # Nothing can be known now. The calls have their deadlines.
                logger.debug("workers cannot be asked: %s", error)
            except Exception:
                # Whatever it was, the next worker that is lost must be found.
                logger.exception("the workers could not be looked after")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat):
                    await self._hurry.wait()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        patience = 0.0 if self.is_settling else self._heartbeat
        quiet = [
            call
            for call in self._calls.pending.values()
            if call.sent_at and asked_at - call.seen_at >= patience
        ]
        if not self._calls.target.is_connected or not (quiet or self._roll_call):
            return
        self._roll_call = False
        for start in range(0, max(1, len(quiet)), _PER_PROBE):
            await self._probe(call.payload.request_id for call in quiet[start : start + _PER_PROBE])
        if not quiet or self.is_settling:
            return
        await asyncio.sleep(_ANSWER * self._heartbeat)
        is_known = self._answers or await self._are_there() is False
        if not is_known or self.is_settling:
            return
        missing = [call for call in quiet if call.seen_at < asked_at and self._is_open(call)]
        if missing and self._calls.target.is_connected:
            gone, busy = await self._silent_since(asked_at)
            lost = [call for call in missing if self._is_lost(call, gone, busy)]
            await asyncio.gather(*(self._replace(call) for call in lost if self._is_open(call)))
        await self._tend_streams(quiet)

    async def _are_there(self) -> bool | None:
        """Whether workers are there that answer such questions; None where there never were any."""
        there = await is_there(self._calls.target, self._workers_topic)
        self._were_there = self._were_there or there
        return there if self._were_there else None

    async def _probe(self, request_ids: Iterable[str]) -> None:
        calls = self._calls
        payload = ProbePayload(request_ids=list(request_ids), reply_to=calls.mailbox)
        await calls.target.send(self._workers_topic, encode_event(CallProbed(payload=payload)))

    def _is_open(self, call: PendingCall) -> bool:
        return call.payload.request_id in self._calls.pending

    async def _silent_since(self, moment: float) -> tuple[set[str], set[str]]:
        """The workers that did not answer: those that are gone, and those that are there but busy."""
        silent = [worker for worker, heard_at in self._workers.items() if heard_at < moment]
        target = self._calls.target
        present = await asyncio.gather(*(is_there(target, worker) for worker in silent))
        gone = {worker for worker, there in zip(silent, present, strict=True) if not there}
        for worker in gone:
            self._workers.pop(worker, None)
        return gone, set(silent) - gone

    def _is_lost(self, call: PendingCall, gone: set[str], busy: set[str]) -> bool:
        if call.worker in gone:
            return True
        if call.worker in busy or (call.worker is None and busy):
            return asyncio.get_running_loop().time() - call.seen_at > self._silence
        # Everybody who is there has answered, and nobody has it.
        call.misses += 1
        return call.misses >= _LOOKS

    async def _replace(self, call: PendingCall) -> None:
        """Send a lost call again if that is safe, or end it."""
        request = call.payload
        is_safe = call.stream is not None or await self._may_run_again(call)
        error = CallError(
            ErrorCode.UNAVAILABLE,
            f"the worker was lost; {request.operation_id} may have run",
            # Not for whoever retries without looking: it would run twice.
            retryable=is_safe,
        )
        if call.stream is not None or not is_safe:
            self._calls.end(request.request_id, error)
        elif call.attempt < MAX_ATTEMPTS:
            logger.info("%s is sent again: its worker was lost", request.request_id)
            await self._calls.resend(call)
        else:
            logger.error(
                "%s was set aside: %s lost %d workers",
                request.request_id,
                request.operation_id,
                call.attempt,
            )
            body = encode_event(CallRequested(payload=request))
            await self._calls.target.dead_letter(self._calls.group, body)
            error = CallError(
                ErrorCode.UNAVAILABLE,
                f"{request.operation_id} was given up: every worker that took it was lost",
                {"deliveries": call.attempt},
                retryable=False,
            )
            self._calls.end(request.request_id, error)

    async def _may_run_again(self, call: PendingCall) -> bool:
        """Whether the operation is a query or idempotent, as its caller or its group says."""
        if call.replayable is not None:
            return call.replayable
        operation_id = call.payload.operation_id
        known = self._replayable.get(operation_id)
        if known is not None:
            return known
        try:
            envelope = await self._calls.call(
                "services.schema",
                {"operationId": operation_id},
                timeout=2.0,
                credential=call.payload.credential,
            )
        except CallError:
            return False
        spec: Any = envelope.data
        # A worker may say anything.
        answer = is_object(spec) and (spec.get("type") == "query" or spec.get("idempotent") is True)
        self._replayable[operation_id] = answer
        return answer

    async def _tend_streams(self, calls: Iterable[PendingCall]) -> None:
        """End subscriptions that miss an item for too long; tell again how much room the others have."""
        now = asyncio.get_running_loop().time()
        for call in calls:
            if call.stream is None or not self._is_open(call):
                continue
            if call.stream.stuck_for(now) > _STUCK:
                error = CallError(ErrorCode.UNAVAILABLE, "items of the subscription were lost")
                self._calls.end(call.payload.request_id, error)
            elif call.worker is not None:
                # The grant itself may have been lost; it says a total, so twice does no harm.
                await self._calls.target.send(call.worker, call.stream.credit())


_LOOK = 0.25
"""Seconds between two checks of the callers; a caller that misses two is gone."""

_STANDSTILL = 1.0
"""Seconds for which the event loop may be blocked without a warning."""


class Watched(Protocol):
    """What the watchdog needs of a worker."""

    target: EventTarget
    jobs: dict[str, Job]
    restored_at: float

    def give_up(self, job: Job, reason: str) -> None:
        """Cancel a job that will not be finished here."""
        ...


async def watch_callers(worker: Watched) -> None:
    """Cancel the calls of callers that are gone."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_LOOK)
        now = loop.time()
        old = [job for job in worker.jobs.values() if now - job.arrived_at > _LOOK]
        if not old or now - worker.restored_at < SETTLING or not worker.target.is_connected:
            continue
        callers = list({job.reply_to for job in old})
        try:
            present = await asyncio.gather(*(is_there(worker.target, caller) for caller in callers))
        except TransportError:
            continue
        gone = {caller for caller, there in zip(callers, present, strict=True) if not there}
        for job in old:
            job.absent = job.absent + 1 if job.reply_to in gone else 0
            if job.absent > 1:
                # A caller that was only disconnected receives the error when it is back.
                worker.give_up(job, "the caller was gone")


async def watch_loop_lag(worker: Watched) -> None:
    """Warn when the event loop was blocked."""
    loop = asyncio.get_running_loop()
    tick = _STANDSTILL / 4
    while True:
        before = loop.time()
        await asyncio.sleep(tick)
        late = loop.time() - before - tick
        if late > _STANDSTILL:
            suspects = sorted({job.request.operation_id for job in worker.jobs.values()})
            logger.warning(
                "the event loop was blocked for %.1f s; running then: %s",
                late,
                ", ".join(suspects[:10]) or "nothing that still runs",
            )
