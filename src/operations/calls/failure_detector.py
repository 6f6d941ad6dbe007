"""Detect lost workers long before the deadline of the calls they have, lost callers, and a blocked event loop.

A client probes calls that take longer than a heartbeat: the worker that has a call or, as long as that is unknown, all
workers of the group. They report which of the calls they have, and send the replies again to those that have ended.

    claimed by a worker                                     -> wait
    the broker still keeps the request                      -> wait, if workers are there or the queue is durable
    the broker reports that the worker has left             -> lost, now
    the worker is connected but silent                      -> it may be busy: lost only after `silence`
    every worker responded, and none has the call           -> lost, after a second probe
    no worker ever responded, and none is present now       -> lost, after a second probe

Rule 1: a worker that is merely busy loses nothing. "Every worker" means as many as the broker counts (Redis). NATS
        does not count; there it means all that responded before, and only if one of them, or this client, was
        disconnected since the call was sent. Otherwise a worker that did not respond yet may have the call.
Rule 2: a lost call runs again if that is known to be safe (a query, or idempotent), at most `MAX_ATTEMPTS` times.
        Every other one ends with `UNAVAILABLE`: it may have run.
Rule 3: workers of other implementations that never respond to probes are not judged by them.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from operations._json import is_object
from operations.calls.events import (
    AlivePayload,
    CallProbed,
    CallRequested,
    OfferPayload,
    ProbePayload,
    encode_event,
)
from operations.calls.jobs import Job
from operations.calls.states import NEVER, PendingCall
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
"""How often a call is sent to workers that are lost while they have it."""

_ANSWER = 0.4
"""Part of a heartbeat in which the workers of a group respond to a probe."""

_LOOKS = 2
"""How many probes must find no worker with a call before it counts as lost."""

_PER_PROBE = 1000
"""Calls in one probe."""

_MAX_WORKERS = 10_000
"""Workers of one group that are remembered: any client may claim to be one."""

_STUCK = 2.0
"""Seconds a subscription may wait for an item that later ones have overtaken."""


class FailureDetector:
    """Detects lost calls of one client.

    Args:
        target: Carries the probes.
        group: The worker group.
        mailbox: The address for responses to probes.
        pending: The calls of the client.
        end: Ends a call with an error.
        resend: Sends a call again.
        call: Calls an operation of the group.
        specs_changed: Called when the workers serve other operations than before.
        heartbeat: Seconds between probes.
        silence: Seconds after which a connected worker that does not respond counts as lost.
    """

    def __init__(
        self,
        target: EventTarget,
        group: str,
        mailbox: str,
        pending: Mapping[str, PendingCall],
        *,
        end: Callable[[str, CallError], None],
        resend: Callable[[PendingCall], Awaitable[None]],
        call: Callable[..., Awaitable[ResponseEnvelope[Any]]],
        specs_changed: Callable[[], None],
        heartbeat: float,
        silence: float,
    ) -> None:
        self._target = target
        self._group = group
        self._mailbox = mailbox
        self._pending = pending
        self._end = end
        self._resend = resend
        self._call = call
        self._all_workers = target.control(group)
        self._heartbeat = heartbeat
        self._silence = silence
        self._workers: dict[str, float] = {}
        self._specs: dict[str, str] = {}
        self._specs_changed = specs_changed
        self._answers = False
        self._were_there = False
        self._replayable: dict[str, bool] = {}
        self.restored_at = 0.0
        """The time of the last reconnect, by the loop's clock."""
        self._changed_at = 0.0
        """When a worker, or this client, was last found to be gone or back."""
        self._hurry = asyncio.Event()
        # Workers must be known before they can be missed.
        self._roll_call = True

    def on_alive(self, alive: AlivePayload) -> None:
        """Note that a worker has reported its presence."""
        self._answers = True
        now = asyncio.get_running_loop().time()
        if alive.arrived:
            self._changed_at = now
        if alive.leaving and all(call.worker != alive.worker for call in self._pending.values()):
            self._forget(alive.worker)
        elif alive.worker in self._workers or len(self._workers) < _MAX_WORKERS:
            self._workers[alive.worker] = now
            if alive.specs and self._specs.get(alive.worker) != alive.specs:
                self._specs.pop(alive.worker, None)
                self._specs[alive.worker] = alive.specs
                self._specs_changed()
        for request_id in alive.request_ids:
            call = self._pending.get(request_id)
            if call is not None:
                call.worker = alive.worker
                call.seen_at = now
                call.misses = 0

    def _forget(self, worker: str) -> None:
        self._workers.pop(worker, None)
        if self._specs.pop(worker, None) is not None:
            self._specs_changed()

    @property
    def workers_by_specs(self) -> dict[str, str]:
        """One worker for each digest of specs in the group; the one that came last is the last."""
        return {digest: worker for worker, digest in self._specs.items()}

    def specs_of(self, worker: str | None) -> str:
        """Return the digest of the specs of a worker; empty if it is not known."""
        return self._specs.get(worker or "", "")

    async def find_workers(self) -> bool:
        """Return whether any worker is connected to the broker; forget all if none is.

        Raises:
            TransportError: If that cannot be known now.
        """
        if await is_there(self._target, self._all_workers):
            return True
        for worker in tuple(self._workers):
            self._forget(worker)
        return False

    @property
    def is_settling(self) -> bool:
        """Whether a reconnect was so recent that absence means nothing yet."""
        return asyncio.get_running_loop().time() < self.restored_at + SETTLING

    async def accepts(self, offer: OfferPayload) -> bool:
        """Return whether a worker may begin a request that waited, and note that it has the call then."""
        loop = asyncio.get_running_loop()
        if self._target.durable:
            # A worker that began it before a reconnect responds to the probe after that, and has the call.
            await asyncio.sleep(max(0.0, self.restored_at + SETTLING - loop.time()))
        call = self._pending.get(offer.request_id)
        if (
            call is None
            or call.attempt != offer.attempt
            or call.worker not in {None, offer.worker}
            # Any other restored broker may deliver a request a second time.
            or (not self._target.durable and 0 < call.sent_at <= self.restored_at)
        ):
            return False
        call.worker = offer.worker
        call.seen_at = loop.time()
        return True

    def restored(self) -> None:
        """Note that the connection is restored: probe at once for workers and for replies sent meanwhile."""
        self._roll_call = True
        self.restored_at = self._changed_at = asyncio.get_running_loop().time()
        self._hurry.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            # Before the probe: a reconnect meanwhile requires another one.
            self._hurry.clear()
            try:
                await self._look()
            except TransportError as error:
                # The calls still have their deadlines.
                logger.debug("workers cannot be asked: %s", error)
            except Exception:
                # The next probe may find a lost worker.
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
            for call in self._pending.values()
            if call.sent_at and asked_at - call.seen_at >= patience
        ]
        if not self._target.is_connected or not (quiet or self._roll_call):
            return
        await self._probe_all(quiet)
        if not quiet or self.is_settling:
            return
        await asyncio.sleep(_ANSWER * self._heartbeat)
        are_there = await self._are_there(asked_at)
        if not (self._answers or are_there is False) or self.is_settling:
            return
        missing = [call for call in quiet if call.seen_at < asked_at and self._is_open(call)]
        if missing and self._target.is_connected:
            gone, silent, others = await self._silent_since(asked_at)
            if are_there is False:
                # A request that the broker keeps will not be consumed, either, unless it may wait for a worker.
                is_durable = self._target.durable
                waiting = [is_durable and await self._is_waiting(call) for call in missing]
                pairs = zip(missing, waiting, strict=True)
                lost = [call for call, waits in pairs if not waits and self._is_missed(call)]
            else:
                lost = [call for call in missing if await self._is_lost(call, gone, silent, others)]
            await asyncio.gather(*(self._replace(call) for call in lost if self._is_open(call)))
        await self._tend_streams(quiet)

    async def _probe_all(self, quiet: list[PendingCall]) -> None:
        """Ask each worker for the calls that it has, and all workers for the calls whose worker is unknown."""
        by_address: dict[str, list[str]] = {}
        if self._roll_call:
            by_address[self._all_workers] = []
            self._roll_call = False
        for call in quiet:
            address = call.worker or self._all_workers
            by_address.setdefault(address, []).append(call.payload.request_id)
        for address, ids in by_address.items():
            for start in range(0, max(1, len(ids)), _PER_PROBE):
                await self._probe(address, ids[start : start + _PER_PROBE])

    async def _are_there(self, moment: float) -> bool | None:
        """Return whether workers are present that respond to probes; None if there never were any."""
        if any(seen_at >= moment for seen_at in self._workers.values()):
            self._were_there = True
            return True
        there = await is_there(self._target, self._all_workers)
        self._were_there = self._were_there or there
        return there if self._were_there else None

    async def _probe(self, address: str, request_ids: list[str]) -> None:
        payload = ProbePayload(request_ids=request_ids, reply_to=self._mailbox)
        # The address of a lost worker no longer exists; presence is checked below.
        with suppress(NotSentError):
            await self._target.send(address, encode_event(CallProbed(payload=payload)))

    def _is_open(self, call: PendingCall) -> bool:
        return call.payload.request_id in self._pending

    async def _silent_since(self, moment: float) -> tuple[set[str], set[str], bool | None]:
        """Return the workers that have left, those that are connected but silent, and whether there are others.

        The last one is None if the broker does not count them.
        """
        silent = [worker for worker, seen_at in self._workers.items() if seen_at < moment]
        present = await asyncio.gather(*(is_there(self._target, worker) for worker in silent))
        gone = {worker for worker, there in zip(silent, present, strict=True) if not there}
        for worker in gone:
            self._forget(worker)
            self._changed_at = moment
        count = await self._target.count_present(self._all_workers)
        return gone, set(silent) - gone, None if count is None else count > len(self._workers)

    async def _is_lost(
        self, call: PendingCall, gone: set[str], silent: set[str], others: bool | None
    ) -> bool:
        if call.worker in gone:
            return True
        if await self._is_waiting(call):
            return False
        if others is None:
            others = call.sent_at > self._changed_at
        if call.worker in silent or (call.worker is None and (silent or others)):
            return asyncio.get_running_loop().time() - call.seen_at > self._silence
        return self._is_missed(call)

    def _is_missed(self, call: PendingCall) -> bool:
        """Note that every worker responded and none has a call; return whether it is lost."""
        call.misses += 1
        return call.misses >= _LOOKS

    async def _is_waiting(self, call: PendingCall) -> bool:
        """Return whether the broker still keeps the request, or cannot report it."""
        if call.worker is not None or not call.receipt:
            return False
        try:
            return await self._target.is_waiting(self._group, call.receipt)
        except TransportError as error:
            logger.debug("%s: %s", call.payload.request_id, error)
            return True

    async def _replace(self, call: PendingCall) -> None:
        """Send a lost call again if that is safe, or end it."""
        request = call.payload
        is_safe = call.stream is not None or await self._may_run_again(call)
        error = CallError(
            ErrorCode.UNAVAILABLE,
            f"the worker was lost; {request.operation_id} may have run",
            # A blind retry could run it twice.
            retryable=is_safe,
        )
        if call.stream is not None or not is_safe:
            self._end(request.request_id, error)
        elif call.attempt < MAX_ATTEMPTS:
            logger.info("%s is sent again: its worker was lost", request.request_id)
            await self._resend(call)
        else:
            logger.error(
                "%s became a dead letter: %s lost %d workers",
                request.request_id,
                request.operation_id,
                call.attempt,
            )
            # Operators who inspect it must not be able to act as the caller.
            body = encode_event(CallRequested(payload=replace(request, credential=None)))
            await self._target.dead_letter(self._group, body)
            error = CallError(
                ErrorCode.UNAVAILABLE,
                f"{request.operation_id} was abandoned: every worker that received it was lost",
                {"deliveries": call.attempt},
                retryable=False,
            )
            self._end(request.request_id, error)

    async def _may_run_again(self, call: PendingCall) -> bool:
        """Return whether the operation is a query or idempotent, according to its caller or its workers."""
        if call.replayable is not None:
            return call.replayable
        operation_id = call.payload.operation_id
        known = self._replayable.get(operation_id)
        if known is not None:
            return known
        try:
            envelope = await self._call(
                "services.schema",
                {"operationId": operation_id},
                timeout=2.0,
                credential=call.payload.credential,
            )
        except CallError:
            return False
        spec: Any = envelope.data
        # The reply may be malformed.
        answer = is_object(spec) and (spec.get("type") == "query" or spec.get("idempotent") is True)
        self._replayable[operation_id] = answer
        return answer

    async def _tend_streams(self, calls: Iterable[PendingCall]) -> None:
        """End subscriptions that miss an item for too long; repeat the credit of the others."""
        now = asyncio.get_running_loop().time()
        for call in calls:
            if call.stream is None or not self._is_open(call):
                continue
            if call.stream.stuck_for(now) > _STUCK:
                error = CallError(ErrorCode.UNAVAILABLE, "items of the subscription were lost")
                self._end(call.payload.request_id, error)
            elif call.worker is not None:
                # The last credit may have been lost. It is a total, so sending it twice does no harm.
                await self._target.send(call.worker, call.stream.credit())


_CHECK_CALLERS = 0.25
"""Seconds between two checks of the callers; a caller that misses two has left."""


async def abandoned_jobs(target: EventTarget, jobs: Mapping[str, Job]) -> AsyncGenerator[Job]:
    """Return the jobs of a worker whose callers have left, again in each check until they end."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_CHECK_CALLERS)
        now = loop.time()
        # A job that has a claim is still in its queue.
        old = [
            job
            for job in jobs.values()
            if job.claim is None and now - job.arrived_at > _CHECK_CALLERS
        ]
        if not old or not target.is_connected:
            continue
        callers = list({job.reply_to for job in old})
        try:
            present = await asyncio.gather(*(is_there(target, caller) for caller in callers))
        except TransportError:
            continue
        gone = {caller for caller, there in zip(callers, present, strict=True) if not there}
        for job in old:
            if job.reply_to not in gone:
                job.absent_since = NEVER
            elif job.absent_since == NEVER:
                job.absent_since = now
            elif not job.answered:
                yield job


_BLOCKED = 1.0
"""Seconds for which the event loop may be blocked without a warning."""


async def watch_loop_lag(jobs: Mapping[str, Job]) -> None:
    """Warn when the event loop of a worker was blocked."""
    loop = asyncio.get_running_loop()
    tick = _BLOCKED / 4
    while True:
        before = loop.time()
        await asyncio.sleep(tick)
        lag = loop.time() - before - tick
        if lag > _BLOCKED:
            suspects = sorted({job.request.operation_id for job in jobs.values()})
            logger.warning(
                "the event loop was blocked for %.1f s; running then: %s",
                lag,
                ", ".join(suspects[:10]) or "nothing that still runs",
            )
