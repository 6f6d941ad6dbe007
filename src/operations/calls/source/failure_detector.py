"""Detect lost workers long before the deadlines of their calls.

A client probes calls that take longer than a heartbeat. It probes the worker that has the call or, if that is unknown,
all workers of the group. The workers report which of the calls they have, and repeat the replies of ended calls.

    claimed by a worker                                     -> wait
    the broker still has the request                        -> wait, if there are workers or the broker stores requests
    the broker reports that the worker has left             -> lost; a mutation waits two heartbeats for its return
    the worker is connected but silent                      -> it may be busy: lost only after `silence`
    no worker responds that it has the call                 -> all workers are asked to respond
    every worker responded, and none has the call           -> lost, after a second probe
    no worker is present any more                           -> lost, after a second probe

Rule 1: a busy worker does not lose its calls, and a busy client does not lose its workers. "Every worker" means the
        number of workers that the broker counts (Redis). NATS does not count workers. There it means all workers that
        responded before, and only if one of them or this client was disconnected since the call was sent; otherwise a
        worker that has not responded yet may have the call.
Rule 2: a lost call is sent again if every worker that can have received it confirms that it did not start and drops it.
        On NATS this is the worker that it was sent to, on Redis all workers that were connected when it was sent.
Rule 3: any other lost call may have run. It runs again if that is known to be safe (a query, or idempotent), at most
        `MAX_ATTEMPTS` times; otherwise it ends with `UNAVAILABLE`.
        From the second attempt on it runs alone, because it may be the reason why its worker was lost (`suspects`).
Rule 4: probes are not used for workers of other implementations, which never respond to them.
Rule 5: a lost call that may run again waits for a worker until its deadline. A new call that may run again does so if
        workers were lost a short time ago; any other call ends soon if there is no worker.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec.structs import replace

from operations.base.deadline import NEVER
from operations.base.errors import CallError, ErrorCode, NotSentError, TransportError
from operations.base.json.values import is_object
from operations.calls.protocol.events import (
    AlivePayload,
    CallProbed,
    CallRequested,
    FencePayload,
    OfferPayload,
    ProbePayload,
    encode_event,
)
from operations.calls.protocol.states import MAX_SENDS, SETTLING, KnownWorkers, Outages, PendingCall
from operations.calls.source.open_calls import OpenCalls
from operations.calls.source.sending import Outbox
from operations.contract.envelopes import ResponseEnvelope
from operations.pubsub.base import EventTarget

logger = logging.getLogger("operations")

MAX_ATTEMPTS = 3
"""The largest number of times that a call is sent to workers that are lost."""

_RETURN = 1.0
"""Seconds in which a lost worker may reconnect to another server of the broker; two heartbeats if longer."""

_ROLL_CALL_PAUSE = 60.0
"""The longest pause between two probes of all workers, in seconds, while a worker does not respond."""

_ASK_EVERY = 5.0
_ASK_EACH = 0.25
"""Seconds between two probes of all workers while this client chooses among them, at least and for each worker. It does
not choose those that did not respond to the last but one, or to a probe of their calls."""

_RESTART = 10.0
"""Seconds after the loss of workers in which new calls that may run again wait for their return."""

_LAG = 0.5
"""Heartbeats by which a step of this detector may be late before this process counts as blocked."""

_ANSWER = 0.4
"""The fraction of a heartbeat within which the workers of a group respond to a probe."""

_LOOKS = 2
"""A call counts as lost after this number of probes in which no worker has it."""

_PER_PROBE = 1000
"""Calls in one probe."""


class _View(NamedTuple):
    """The workers that did not respond to a probe.

    Attributes:
        gone: Workers that have been disconnected for some time.
        absent: Disconnected workers that may be reconnecting.
        silent: Connected workers.
        others: Whether there are workers that this client does not know; None if the broker does not count workers.
        are_there: Whether any worker is connected; None if there never was one.
    """

    gone: set[str]
    absent: set[str]
    silent: set[str]
    others: bool | None
    are_there: bool | None


class FailureDetector:
    """Detects lost calls of one client.

    Args:
        target: Transports the probes.
        group: The worker group.
        mailbox: The address for responses to probes.
        open_calls: The calls of the client.
        outbox: Sends lost calls again.
        workers: The workers that the client knows.
        outages: The outages of the connection.
        call: Calls an operation of the group.
        heartbeat: Seconds between probes.
        silence: Seconds after which a connected worker that does not respond counts as lost.

    Attributes:
        asks_peer: Whether the peer of a direct connection must still be asked which of its operations may run again.
    """

    def __init__(
        self,
        target: EventTarget,
        group: str,
        mailbox: str,
        open_calls: OpenCalls,
        outbox: Outbox,
        workers: KnownWorkers,
        outages: Outages,
        *,
        call: Callable[..., Awaitable[ResponseEnvelope[Any]]],
        heartbeat: float,
        silence: float,
    ) -> None:
        self._target = target
        self._group = group
        self._mailbox = mailbox
        self._open = open_calls
        self._outbox = outbox
        self._workers = workers
        self._outages = outages
        self._call = call
        self._all_workers = target.control(group)
        self._heartbeat = heartbeat
        self._absence_limit = max(_RETURN, 2 * heartbeat)
        self._silence = silence
        self.asks_peer = target.direct
        self._were_there = False
        self._replayable: dict[str, bool] = {}
        self._parked: dict[str, PendingCall] = {}
        """The calls that wait for a worker to return."""
        self._lost_at = -NEVER
        """When workers were last found to be lost."""
        self._is_unserved = False
        """Whether the last look found no worker."""
        self._changed_at = 0.0
        """The last time that a worker or this client disconnected or reconnected."""
        self._hurry = asyncio.Event()
        self._heard = asyncio.Event()
        self._dropped = asyncio.Event()
        self._absent_since: dict[str, float] = {}
        self._unserved_since = NEVER
        # Only known workers can be detected as lost.
        self._roll_call_at = self._roll_called_at = 0.0
        self._greeted_at = 0.0
        """When the first probe of all workers was sent, until the first look; 0 if it could not be sent."""
        self._roll_call_pause = heartbeat

    def on_alive(self, alive: AlivePayload) -> None:
        """Process the report of a worker."""
        now = asyncio.get_running_loop().time()
        if alive.replayable is not None:
            self._workers.learn(alive.specs, alive.replayable)
            if self._target.direct:
                # The peer reports nothing else in the response.
                return
        self._unserved_since, self._is_unserved = NEVER, False
        self._heard.set()
        if alive.arrived:
            self._changed_at = now
        self._absent_since.pop(alive.worker, None)
        if alive.leaving and all(call.worker != alive.worker for call in self._open.by_id.values()):
            self._workers.forget(alive.worker)
        else:
            self._workers.record(alive, now)
        for request_id in alive.request_ids:
            call = self._open.get(request_id)
            if call is not None:
                call.claim(alive.worker, now)
                call.misses = 0
        for fence in alive.fenced:
            call = self._open.get(fence.request_id)
            if call is not None and call.payload.resends == fence.resends:
                call.fenced_by |= {alive.worker}
                call.dropped_by |= {alive.worker}
        if alive.fenced:
            self._dropped.set()
        if alive.accepts:
            self._send_parked()

    def on_absent(self, worker: str) -> None:
        """Handle a worker that the broker does not have: do not choose it, and remove it if it does not return."""
        self._workers.skip(worker)
        if worker in self._workers.heard_at:
            now = asyncio.get_running_loop().time()
            since = self._absent_since.setdefault(worker, now)
            if self._outages.is_settled and now - since >= self._absence_limit:
                self._remove(worker, now)

    def _remove(self, worker: str, now: float) -> None:
        if worker in self._workers.staying:
            self._lost_at = now
        self._workers.forget(worker)
        self._absent_since.pop(worker, None)
        self._changed_at = now

    async def find_workers(self) -> bool:
        """Return whether any worker is connected to the broker; if none is, remove all known workers.

        Raises:
            TransportError: If that cannot be known now.
        """
        known = next(iter(self._workers.heard_at), None)
        # All workers of a group respond to a ping of the group, so that one of them is asked first.
        if known is not None and await self._target.is_present(known):
            return True
        if await self._target.is_present(self._all_workers):
            return True
        self._remove_all()
        return False

    def _remove_all(self) -> None:
        if self._workers.staying:
            self._lost_at = asyncio.get_running_loop().time()
        self._workers.forget_all()

    def expects_workers(self) -> bool:
        """Return whether a group that has no workers at the broker now may soon have workers again.

        Workers that did not announce that they stop may be reconnecting to another server of the broker.
        """
        now = asyncio.get_running_loop().time()
        if self._unserved_since == NEVER:
            self._unserved_since = now
        if not self._outages.is_settled or (
            self._workers.heard_at and now - self._unserved_since < SETTLING
        ):
            return True
        self._remove_all()
        return False

    def awaits_return(self, call: PendingCall) -> bool:
        """Return whether a call that found no worker waits until one returns; if so, `on_alive` sends it again."""
        now = asyncio.get_running_loop().time()
        if self._workers.staying:
            self._lost_at = now
        is_lost = call.payload.attempt > 1 or now - self._lost_at < _RESTART
        if not is_lost or not self.may_run_again(call):
            return False
        self._parked[call.payload.request_id] = call
        return True

    def _send_parked(self) -> None:
        """Send the calls that wait for a worker, because one has returned."""
        parked, self._parked = self._parked, {}
        for call in parked.values():
            if self._open.is_open(call):
                self._outbox.spawn(self._outbox.send_again(call))

    def is_unserved(self, call: PendingCall) -> bool:
        """Return whether a call that may run again has found no worker; forget it, because it ends now."""
        waits = call.is_held and bool(self._parked)
        is_parked = self._parked.pop(call.payload.request_id, None) is not None
        return is_parked or waits or (self._is_unserved and self.may_run_again(call) is True)

    def may_be_restored(self, call: PendingCall) -> bool:
        """Return whether a restored broker may have delivered a request a second time."""
        # The mailbox may receive messages before the reconnect is complete.
        return not self._target.stores_requests and 0 < call.sent_at <= self._outages.changed_at

    def is_unanswered(self, call: PendingCall) -> bool:
        """Return whether no worker has responded to the probes of a call."""
        waited = asyncio.get_running_loop().time() - call.made_at
        answered_at = max(self._workers.heard_at.values(), default=0.0)
        return waited > 2 * self._heartbeat and answered_at < call.made_at

    async def accepts(self, offer: OfferPayload) -> bool:
        """Return whether a worker may start a request that waited; if so, record that it has the call."""
        if self._target.stores_requests:
            # A worker that started it before a reconnect responds to the following probe, and has the call.
            await self._outages.settle()
        call = self._open.get(offer.request_id)
        if (
            call is None
            or (call.payload.attempt, call.payload.resends) != (offer.attempt, offer.resends)
            or call.worker not in {None, offer.worker}
            or self.may_be_restored(call)
        ):
            return False
        call.claim(offer.worker, asyncio.get_running_loop().time())
        call.confirmed = offer.attempt
        return True

    def lost(self) -> None:
        """Handle a lost connection: until it is restored, workers may start and stop unnoticed."""
        self._workers.is_complete = False
        self._outages.lost()
        self._is_unserved = self._target.direct

    def restored(self) -> None:
        """Handle a restored connection: probe at once for workers and for missed replies."""
        self._outages.restored()
        # None is chosen until it responds.
        self._workers.skip_silent(NEVER)
        self._roll_call_at = 0.0
        self._roll_call_pause = self._heartbeat
        self._changed_at = self._outages.restored_at
        self._hurry.set()
        self.asks_peer = self._target.direct
        if self._target.direct:
            self._is_unserved = False
            # The peer may have been replaced by another version.
            self._workers.specs_changed.set()

    async def run(self) -> None:
        """Probe and check calls until cancelled."""
        now = asyncio.get_running_loop().time()
        if await self.ask_for_list(self._all_workers):
            self._greeted_at = now
        while True:
            # Cleared before the probe, because a reconnect during the probe requires another one.
            self._hurry.clear()
            try:
                await self._look()
            except TransportError as error:
                # The deadlines of the calls still apply.
                logger.debug("workers cannot be asked: %s", error)
            except Exception:
                # The next probe may find a lost worker.
                logger.exception("the workers could not be checked")
            self._workers.have_reported.set()
            rested_at = asyncio.get_running_loop().time()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat):
                    await self._hurry.wait()
            self._excuse(rested_at + self._heartbeat)

    def _excuse(self, expected_at: float) -> bool:
        """Return whether this process was blocked, so that it could not read what workers sent.

        The time counts for none of the workers.

        Args:
            expected_at: When it should have continued at the latest.
        """
        lag = asyncio.get_running_loop().time() - expected_at
        if lag < _LAG * self._heartbeat:
            return False
        for call in self._open.by_id.values():
            if call.seen_at:
                call.seen_at += lag
        for worker in self._absent_since:
            self._absent_since[worker] += lag
        return True

    async def _look(self) -> None:
        """Ask the workers of the calls without news, and handle the calls that no worker reports in time."""
        if not self._target.is_connected:
            return
        self._parked = {key: call for key, call in self._parked.items() if self._open.is_open(call)}
        if self._parked and await self._target.is_present(self._all_workers):
            # The announcement of the worker may have been lost.
            self._send_parked()
        # Some workers respond late.
        await self._count_workers()
        asked_at = asyncio.get_running_loop().time()
        silence_limit = self._heartbeat if self._outages.is_settled else 0.0
        quiet = [
            call
            for call in self._open.by_id.values()
            if call.sent_at and asked_at - call.seen_at >= silence_limit
        ]
        is_roll_call = asked_at >= self._next_roll_call_at
        if not (quiet or is_roll_call):
            return
        restorations = self._outages.restorations
        if is_roll_call:
            # A worker that is present now may be lost before it responds.
            self._were_there = self._were_there or await self._target.is_present(self._all_workers)
        asks_all = is_roll_call or silence_limit == 0.0
        sought = [] if asks_all else [call for call in quiet if self._is_sought(call)]
        if self._greeted_at:
            asked_at, self._greeted_at = self._greeted_at, 0.0
        else:
            await self._probe_all(quiet, sought, is_roll_call)
        # If it could not be sent, or the connection was restored, all workers are probed again with the next heartbeat.
        if is_roll_call and restorations == self._outages.restorations:
            self._plan_roll_call(asked_at)
        answered_by = asyncio.get_running_loop().time() + _ANSWER * self._heartbeat
        with suppress(TimeoutError):
            async with asyncio.timeout_at(answered_by):
                while True:
                    self._heard.clear()
                    await self._count_workers()
                    await self._heard.wait()
        if self._excuse(answered_by):
            # What the workers have sent is read first.
            return
        missing = [
            call
            for call in quiet
            if call.seen_at < asked_at and self._open.is_open(call) and call not in sought
        ]
        for call in missing:
            if call.worker is not None:
                self._workers.skip(call.worker)
        if missing and self._target.is_connected:
            if not self._outages.is_settled:
                # Missing workers do not count as lost yet, but reconnected workers may report that they have not
                # started a call. Workers that are stopping wait for this question.
                before = [call for call in missing if call.sent_at <= self._outages.restored_at]
                await self._resend_unbegun(before)
            else:
                await self._replace_lost(missing, asked_at)
        if self._outages.is_settled:
            await self._repeat_credit(quiet)

    @property
    def _next_roll_call_at(self) -> float:
        if self._workers.has_chosen:
            pause = max(_ASK_EVERY, _ASK_EACH * len(self._workers.heard_at))
            return min(self._roll_call_at, self._roll_called_at + pause)
        return self._roll_call_at

    def _is_sought(self, call: PendingCall) -> bool:
        """Return whether only the worker that has a call needs to respond; record the probe.

        Most calls are claimed then. A request that waits at the broker is claimed by no worker for a long time, so that
        all workers are asked to respond from time to time only, until a probe finds none that has it.
        """
        if call.worker is not None or call.misses:
            return False
        call.probes += 1
        return call.probes != 2 and call.probes % 4 != 0

    def _plan_roll_call(self, asked_at: float) -> None:
        """Skip the workers that did not respond to the roll call before this one; plan the next one."""
        self._workers.skip_silent(self._roll_called_at)
        self._workers.has_chosen = False
        self._roll_called_at = asked_at
        self._roll_call_at = asked_at + self._roll_call_pause
        self._roll_call_pause = min(2 * self._roll_call_pause, _ROLL_CALL_PAUSE)

    async def _probe_all(
        self, quiet: list[PendingCall], sought: list[PendingCall], is_roll_call: bool
    ) -> None:
        """Ask each worker for the calls that it has, and all workers for the calls whose worker is unknown.

        Args:
            quiet: The calls.
            sought: Those for which only the worker that has them responds.
            is_roll_call: Whether all workers must respond in any case.
        """
        by_address: dict[tuple[str, bool], list[str]] = {}
        if is_roll_call:
            by_address[self._all_workers, False] = []
        for call in quiet:
            asked = call.worker or self._all_workers, call in sought
            by_address.setdefault(asked, []).append(call.payload.request_id)
        for (address, holders), ids in by_address.items():
            for start in range(0, max(1, len(ids)), _PER_PROBE):
                await self._probe(address, ids[start : start + _PER_PROBE], holders=holders)

    async def _count_workers(self) -> None:
        """Record whether all workers have responded since the last probe of all of them."""
        if self._roll_call_at == NEVER:
            return
        since = self._roll_called_at
        heard = [worker for worker, at in self._workers.heard_at.items() if at >= since]
        count = await self._target.count_present(self._all_workers)
        if count is not None and len(heard) >= count:
            # Workers that have left since they responded must not count instead of others.
            present = await asyncio.gather(*map(self._target.is_present, heard))
            heard = [worker for worker, there in zip(heard, present, strict=True) if there]
        # After a reconnect, all workers are probed again.
        if (count is None or len(heard) >= count) and self._outages.changed_at < since:
            self._roll_call_at = NEVER
            self._workers.is_complete = count is not None
            if count is not None:
                self._workers.have_reported.set()

    async def _are_there(self, moment: float) -> bool | None:
        """Return whether workers are present that respond to probes; None if there never were any."""
        if any(heard_at >= moment for heard_at in self._workers.heard_at.values()):
            self._were_there = True
            return True
        there = await self._target.is_present(self._all_workers)
        self._were_there = self._were_there or there
        self._is_unserved = not there
        return there if self._were_there else None

    async def _probe(
        self,
        address: str,
        request_ids: list[str],
        fences: Sequence[FencePayload] = (),
        *,
        holders: bool = False,
    ) -> None:
        payload = ProbePayload(
            request_ids=request_ids, reply_to=self._mailbox, fences=list(fences), holders=holders
        )
        # The address of a lost worker does not exist any more; its presence is checked below.
        with suppress(NotSentError):
            await self._target.send(address, encode_event(CallProbed(payload=payload)))

    async def _replace_lost(self, missing: list[PendingCall], asked_at: float) -> None:
        """Send lost calls again, or end them."""
        are_there = await self._are_there(asked_at)
        have_answered = self._workers.heard_at or self._workers.departures
        if not (have_answered or are_there is False) or not self._outages.is_settled:
            return
        view = await self._view(missing, asked_at, are_there)
        lost = [call for call in missing if await self._is_lost(call, view)]
        safe = [call for call in lost if call.worker not in view.gone]
        unsafe = [call for call in lost if call.worker in view.gone]
        unsafe += await self._resend_unbegun(safe)
        await asyncio.gather(*(self.replace(call) for call in unsafe if self._open.is_open(call)))

    async def _view(
        self, missing: list[PendingCall], moment: float, are_there: bool | None
    ) -> _View:
        """Return the workers that have not responded since `moment`, and remove those that have left."""
        heard_at = self._workers.heard_at
        asked = {call.worker for call in missing if call.worker is not None}
        if any(call.worker is None for call in missing):
            asked |= heard_at.keys()
        silent = [worker for worker in asked if heard_at.get(worker, 0.0) < moment]
        present = await asyncio.gather(*map(self._target.is_present, silent))
        absent = {worker for worker, there in zip(silent, present, strict=True) if not there}
        for worker in asked - absent:
            self._absent_since.pop(worker, None)
        gone = {
            worker
            for worker in absent
            if moment - self._absent_since.setdefault(worker, moment) >= self._absence_limit
        }
        for worker in gone:
            self._remove(worker, moment)
        count = await self._target.count_present(self._all_workers)
        others = None if count is None else count > len(self._workers.heard_at.keys() - absent)
        return _View(gone, absent - gone, set(silent) - absent, others, are_there)

    async def _is_lost(self, call: PendingCall, view: _View) -> bool:
        if call.worker in view.gone:
            return True
        if view.absent and (call.worker is None or call.worker in view.absent):
            # A worker may be reconnecting to another server of the broker; only a mutation waits for it.
            if call.stream is None and not self.may_run_again(call):
                call.misses += 1
                return False
            if call.worker is not None:
                return True
        # Without workers, a request in the queue of the broker is lost, unless the broker stores it or it may wait.
        waits = view.are_there or self._target.stores_requests or self.may_run_again(call)
        if waits and await self._is_waiting(call):
            return False
        if view.are_there is False:
            return self._is_missed(call)
        others = call.sent_at > self._changed_at if view.others is None else view.others
        if call.worker in view.silent or (call.worker is None and (view.silent or others)):
            silent = view.silent if call.worker is None else {call.worker}
            silence = max(self._silence, self._workers.longest_silence(silent))
            return asyncio.get_running_loop().time() - call.seen_at > silence
        return self._is_missed(call)

    def _is_missed(self, call: PendingCall) -> bool:
        """Record that every worker responded and none has the call; return whether the call is lost."""
        call.misses += 1
        return call.misses >= _LOOKS

    async def _is_waiting(self, call: PendingCall) -> bool:
        """Return whether the broker still has the request, or cannot report it."""
        if call.worker is not None or not call.receipt:
            return False
        try:
            return await self._target.is_waiting(self._group, call.receipt)
        except TransportError as error:
            logger.debug("%s: %s", call.payload.request_id, error)
            return True

    async def _resend_unbegun(self, calls: Sequence[PendingCall]) -> list[PendingCall]:
        """Send calls that no worker has started again; return the calls that may have started.

        Each worker that can have a call is asked to drop it. If all of them confirm, no copy of it can start any more.
        It is then sent again as soon as the broker does not have it either. While a worker does not respond, the call
        is in neither group; the worker is asked again after the next probe.
        """
        asked = [call for call in calls if call.can_be_fenced]
        others = [call for call in calls if not call.can_be_fenced]
        if not asked:
            return others
        asked_at = asyncio.get_running_loop().time()
        await self._ask_to_drop(asked, asked_at)
        count = await self._target.count_present(self._all_workers)
        unbegun: list[PendingCall] = []
        for call in asked:
            if self._workers.have_dropped(call, count):
                unbegun.append(call)
            elif not self._awaits_worker(call, asked_at):
                others.append(call)
        waiting = await asyncio.gather(*map(self._is_waiting, unbegun))
        for call, is_waiting in zip(unbegun, waiting, strict=True):
            if not is_waiting and self._open.is_open(call):
                logger.info("%s is sent again: no worker has started it", call.payload.request_id)
                await self._outbox.resend(call, may_have_begun=False)
        return others

    async def _ask_to_drop(self, calls: list[PendingCall], now: float) -> None:
        """Ask the workers that can have these calls to drop them; wait up to a heartbeat until all have confirmed."""
        by_address: dict[str, list[FencePayload]] = {}
        for call in calls:
            call.fenced_by = frozenset()
            by_address.setdefault(call.worker or self._all_workers, []).append(call.fence(now))
        for address, fences in by_address.items():
            for start in range(0, len(fences), _PER_PROBE):
                await self._probe(address, [], fences[start : start + _PER_PROBE])
        count = await self._target.count_present(self._all_workers)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat):
                while not all(self._workers.have_dropped(call, count) for call in calls):
                    self._dropped.clear()
                    await self._dropped.wait()

    def _awaits_worker(self, call: PendingCall, moment: float) -> bool:
        """Return whether a worker that can have a mutation has not responded since then, but does not count as lost."""
        if call.stream is not None or self.may_run_again(call):
            return False
        workers = [call.worker] if call.worker is not None else self._workers.heard_at
        if all(self._workers.heard_at.get(worker, 0.0) >= moment for worker in workers):
            return False
        silence = max(self._silence, self._workers.longest_silence(workers))
        return moment - call.seen_at <= silence

    async def replace(self, call: PendingCall) -> None:
        """Send a lost call again if that is safe, or end it."""
        request = call.payload
        is_safe = call.stream is not None or await self._ask_if_replayable(call)
        if call.stream is not None or not is_safe:
            reason = "the worker was lost"
            if call.worker is None:
                reason = "neither a worker nor the broker has the request any more"
                if self._target.problem:
                    reason = self._target.problem
            error = CallError(
                ErrorCode.UNAVAILABLE,
                f"{reason}; {request.operation_id} may have run",
                # A retry could run it twice.
                retryable=is_safe,
            )
            self._open.end(request.request_id, error)
        elif 1 < request.attempt != call.confirmed and call.sends < MAX_SENDS:
            logger.info("%s is sent again: its worker was lost before it began", request.request_id)
            await self._outbox.resend(call, may_have_begun=False)
        elif request.attempt < MAX_ATTEMPTS:
            logger.info("%s is sent again: its worker was lost", request.request_id)
            await self._outbox.resend(call)
        else:
            logger.error(
                "%s became a dead letter: %s lost %d workers",
                request.request_id,
                request.operation_id,
                request.attempt,
            )
            # The credential is removed, so that operators who inspect it cannot act as the caller.
            body = encode_event(CallRequested(payload=replace(request, credential=None)))
            await self._target.dead_letter(self._group, body)
            error = CallError(
                ErrorCode.UNAVAILABLE,
                f"{request.operation_id} was abandoned: every worker that received it was lost",
                {"deliveries": request.attempt},
                retryable=False,
            )
            self._open.end(request.request_id, error)

    def may_run_again(self, call: PendingCall) -> bool | None:
        """Return whether an operation is a query or idempotent; None if neither its caller nor a worker has said so."""
        if call.replayable is not None:
            return call.replayable
        operation_id = call.payload.operation_id
        known = self._workers.is_replayable(operation_id, call.worker)
        return self._replayable.get(operation_id) if known is None else known

    async def _ask_if_replayable(self, call: PendingCall) -> bool:
        """Return whether the operation is a query or idempotent; ask the other workers if that is not known."""
        known = self.may_run_again(call)
        if known is not None or self._target.direct:
            return known is True
        operation_id = call.payload.operation_id
        try:
            envelope = await self._call(
                "services.schema",
                {"operationId": operation_id},
                timeout=2.0,
                credential=call.payload.credential,
                replayable=True,
            )
        except CallError:
            return False
        spec: Any = envelope.data
        # The reply may be malformed.
        answer = is_object(spec) and (spec.get("type") == "query" or spec.get("idempotent") is True)
        self._replayable[operation_id] = answer
        return answer

    async def ask_peer(self) -> None:
        """Ask the peer of a direct connection which of its operations may run again."""
        self.asks_peer = not await self.ask_for_list(self._all_workers)

    async def ask_for_list(self, address: str) -> bool:
        """Ask workers which of their operations may run again; return False if the question was not sent."""
        payload = ProbePayload(request_ids=[], reply_to=self._mailbox, replayable=True)
        try:
            await self._target.send(address, encode_event(CallProbed(payload=payload)))
        except TransportError as error:
            # Without the list, the workers are asked when a call is lost.
            logger.debug("workers cannot be asked: %s", error)
            return False
        return True

    async def _repeat_credit(self, calls: Iterable[PendingCall]) -> None:
        """Repeat the credit of subscriptions."""
        for call in calls:
            if call.stream is not None and call.worker is not None and self._open.is_open(call):
                # The last credit may have been lost. It is a total, so sending it twice is harmless.
                with suppress(NotSentError):
                    await self._target.send(call.worker, call.stream.credit())
