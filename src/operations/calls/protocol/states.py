"""What a client knows, without I/O: the states of its calls, and the workers of its group.

Rule 1: items of a subscription are delivered in order. If one is missing or overtaken, the subscription ends with an
        error: transports keep the order of a sender. Items received before an error are delivered before the error.
Rule 2: credit is granted as items of a subscription are read, so that a slow reader slows the worker.
Rule 3: any client may claim to be a worker, so the number of stored workers is limited.
Rule 4: a client that chooses the worker of each request (NATS) takes one with the fewest of its own open requests,
        among those that accept requests.
"""

import asyncio
from collections import deque
from collections.abc import Container, Iterable
from contextlib import suppress
from itertools import islice
from random import random
from typing import Any

import msgspec

from operations.base.deadline import NEVER
from operations.base.errors import CallError, ErrorCode, timeout_error
from operations.base.time_limit import MAX_SECONDS
from operations.calls.protocol.events import (
    AlivePayload,
    CallAborted,
    CallCredited,
    CallEvent,
    CallFailed,
    CallResponded,
    CreditPayload,
    ErrorPayload,
    FencePayload,
    RequestPayload,
    ResponsePayload,
    encode_event,
    milliseconds,
    read_output,
)
from operations.calls.protocol.replayability import ReplayableOperations
from operations.contract.envelopes import ResponseEnvelope

MAX_BUFFERED_ITEMS = 1000
MAX_BUFFERED_BYTES = 8 * 1024 * 1024
"""Limits of one subscription, in case its worker ignores credit."""

GRANT_BYTES = 1024 * 1024
"""Credit is granted after reading this many bytes, because the worker counts bytes as well as items."""

MAX_SENDS = 10
"""The largest number of times that a request is sent which workers do not start."""

_MAX_WORKERS = 10_000
"""The largest number of stored workers."""

_MAX_DEPARTED = 1000
"""The number of stored workers that were lost or have left."""

_ASK_AGAIN = 1.0
"""Seconds after which another worker is asked which operations may run again, if the first one has not responded."""

_FAILED_SECONDS = 1.0
"""Seconds for which a call that failed counts as open at its worker; otherwise a worker whose calls fail at once would
get nearly all of them."""


class StreamEntry:
    """The unread items of one subscription.

    Attributes:
        must_stop: Whether the worker must be asked to stop.
    """

    def __init__(self, request_id: str, window: int) -> None:
        self.request_id = request_id
        self.must_stop = False
        self._window = window
        self._granted = window
        self._read = 0
        self._bytes_since_grant = 0
        self._items: deque[tuple[ResponseEnvelope[Any], int]] = deque()
        self._bytes = 0
        self._expected = 0
        """The number of the next item."""
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: CallError | None = None

    def push(self, event: CallEvent, size: int) -> bool:
        """Add an event of `size` bytes; return whether the subscription is over.

        Repeated items are dropped. Items without a number, of a peer that does not number them, are accepted.
        """
        if self._ended:
            return True
        sequence = getattr(event.payload, "sequence", None)
        if sequence is not None and sequence > self._expected:
            reason = f"items of the subscription were lost: item {self._expected} is missing"
            self._break(ErrorCode.UNAVAILABLE, reason)
        elif isinstance(event, CallResponded):
            if sequence is None or sequence == self._expected:
                self._expected += 1
                self._add(event.payload, size)
        elif isinstance(event, CallFailed):
            self.end(event.payload.to_error())
        elif isinstance(event, CallAborted):
            self.end(CallError(ErrorCode.ABORTED, "the subscription was aborted by its worker"))
        else:
            self.end(None)
        return self._ended

    def _add(self, payload: ResponsePayload, size: int) -> None:
        try:
            self._items.append((_numbered(payload), size))
        except ValueError as error:
            self._break(ErrorCode.UNKNOWN_ERROR, f"an item was not an envelope: {error}")
            return
        self._bytes += size
        if len(self._items) > max(MAX_BUFFERED_ITEMS, self._window) or (
            self._bytes > MAX_BUFFERED_BYTES and len(self._items) > 1
        ):
            reason = "the worker sent more items than its credit allowed"
            self._break(ErrorCode.RESOURCE_EXHAUSTED, reason)
        self._wake()

    def _break(self, code: str, message: str) -> None:
        self.must_stop = True
        self.end(CallError(code, message))

    def end(self, error: CallError | None) -> None:
        """End the subscription; items that have arrived can still be read."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self, idle_timeout: float | None) -> ResponseEnvelope[Any] | None:
        """Return the next item; None at the end.

        Raises:
            CallError: The error of the worker, or `TIMEOUT` after `idle_timeout` seconds without an item.
        """
        while not self._items:
            if self._ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                return None
            await self._wait(idle_timeout)
        envelope, size = self._items.popleft()
        self._bytes -= size
        self._read += 1
        self._bytes_since_grant += size
        return envelope

    async def _wait(self, idle_timeout: float | None) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(idle_timeout):
                await self._waiter
        except TimeoutError:
            self.must_stop = True
            self.end(timeout_error(f"no item came for {idle_timeout:g} seconds"))
        finally:
            self._waiter = None

    def grant(self) -> bytes | None:
        """Return the credit to send after items were read; None while the worker has enough."""
        if self._ended or (
            self._granted - self._read > self._window // 2 and self._bytes_since_grant < GRANT_BYTES
        ):
            return None
        self._granted = self._read + self._window
        self._bytes_since_grant = 0
        return self.credit()

    def credit(self) -> bytes:
        """Return the event with the total number of items that may be sent."""
        payload = CreditPayload(request_id=self.request_id, credit=self._granted)
        return encode_event(CallCredited(payload=payload))


def _numbered(payload: ResponsePayload) -> ResponseEnvelope[Any]:
    """Return the envelope of an item with its position, unless its source has set one."""
    envelope = read_output(payload.output)
    if payload.sequence is None or envelope.meta.sequence is not None:
        return envelope
    meta = msgspec.structs.replace(envelope.meta, sequence=payload.sequence)
    return ResponseEnvelope(envelope.data, meta)


class PendingCall(msgspec.Struct, eq=False):
    """A pending call."""

    payload: RequestPayload

    replayable: bool | None
    """Whether it may run again if its worker is lost; None if the workers must be asked."""

    expires_at: float
    """The deadline, by the loop's clock."""

    limit: float
    """The time limit in seconds."""

    made_at: float
    """When the call was made, by the loop's clock."""

    future: "asyncio.Future[ResponseEnvelope[Any]] | None" = None
    """The result of a call; None for a subscription."""

    stream: StreamEntry | None = None
    """The items of a subscription; None for a call."""

    sends: int = 0
    """How often the request was sent."""

    to: str = ""
    """The address of the worker that the request is sent to; empty for any worker."""

    rejected: int = -1
    """The last copy that a worker did not start, and that is sent to another worker."""

    refused: tuple[str, ...] = ()
    """The digests of the specs of workers that do not have the operation."""

    unavailable: ErrorPayload | None = None
    """The error of one of them that may have the operation later, because its source is not connected."""

    probes: int = 0
    """The number of probes of all workers since it was sent, while no worker is known to have it."""

    misses: int = 0
    """The number of consecutive probes that found no worker with the call."""

    worker: str | None = None
    """The address of the worker that has the call, or of the only worker that can have it; None if unknown."""

    is_claimed: bool = False
    """Whether a worker reported that it has the call, or was allowed to start it."""

    departures: int = -1
    """The number of departed workers when the request was sent, if all workers were known then; otherwise -1."""

    dropped_by: frozenset[str] = frozenset()
    """The workers that did not start its last copy, and will not."""

    fenced_by: frozenset[str] = frozenset()
    """Those of them that responded to the last probe."""

    sender: "asyncio.Task[Any] | None" = None
    """The task that is sending the request."""

    confirmed: int = 0
    """The last attempt that a worker was allowed to start, of those that need the confirmation of the caller."""

    is_held: bool = False
    """Whether it waits until other calls that may have killed a worker have ended."""

    interrupted: "asyncio.Task[Any] | None" = None
    """The task that was cancelled because the call ended. The request may or may not have been delivered."""

    receipt: str = ""
    """Identifies the request at a broker that stores it until a worker starts it."""

    occupies: str = ""
    """The worker whose open requests the call counts among, if callers choose the workers."""

    sent_at: float = 0.0

    seen_at: float = 0.0
    """When its worker last confirmed that it has the call, by the loop's clock."""

    @property
    def is_pinned(self) -> bool:
        """Whether its caller chose the worker, so that no other may serve it."""
        return bool(self.to) and not self.refused

    @property
    def can_be_fenced(self) -> bool:
        """Whether the workers that can have the call are known, and none has claimed it."""
        are_known = self.worker is not None or self.departures >= 0
        return are_known and not self.is_claimed and self.sends < MAX_SENDS

    def fence(self, now: float) -> FencePayload:
        """Return the question to a worker whether it drops this copy of the request."""
        request, age = self.payload, now - self.made_at
        return FencePayload(
            request_id=request.request_id, resends=request.resends, age_ms=milliseconds(age)
        )

    def claim(self, worker: str, now: float) -> None:
        """Record that a worker has the call."""
        self.worker, self.is_claimed, self.seen_at = worker, True, now

    def fail(self, error: CallError) -> None:
        """End the call with an error, unless it has ended."""
        if self.payload.attempt > 1:
            # An earlier attempt may have run.
            error.begun = None
        if self.stream is not None:
            self.stream.end(error)
        elif self.future is not None and not self.future.done():
            self.future.set_exception(error)

    def interrupt(self) -> None:
        """Stop sending in the next iteration of the loop, because the sender itself may be ending the call."""
        asyncio.get_running_loop().call_soon(self._interrupt)

    def _interrupt(self) -> None:
        if self.sender is not None and self.interrupted is not self.sender:
            self.interrupted = self.sender
            self.sender.cancel()


SETTLING = 2.0
"""Seconds after a reconnect in which other clients may still be reconnecting."""

_LONGEST_PAUSE = 5.0
"""The longest pause between two connection attempts of a client, in seconds."""


class Outages:
    """Records when the connection of a client was lost and restored, by the loop's clock.

    Attributes:
        changed_at: When it was last lost or restored; 0 if it never was.
        lost_at: When the last outage began, or the first one of several outages in a row; 0 if there was none.
        restored_at: When it was last restored; 0 if it never was.
        restorations: How often it was restored.
    """

    def __init__(self) -> None:
        self.changed_at = self.lost_at = self.restored_at = 0.0
        self.restorations = 0
        self._settled_at = 0.0
        self._restored = asyncio.Event()

    def lost(self) -> None:
        """Record that the connection was lost, unless it already is."""
        if self._settled_at != NEVER:
            self.changed_at = asyncio.get_running_loop().time()
            if self.is_settled:
                self.lost_at = self.changed_at
            self._settled_at = NEVER

    def restored(self) -> None:
        """Record that the connection was restored."""
        now = asyncio.get_running_loop().time()
        outage = now - self.changed_at if self._settled_at == NEVER else 0.0
        # The pauses of other clients between attempts grow with the outage.
        self._settled_at = now + SETTLING + min(outage / 2, _LONGEST_PAUSE)
        self.changed_at = self.restored_at = now
        self.restorations += 1
        self._restored.set()

    @property
    def is_settled(self) -> bool:
        """Whether the connection is not lost, and other clients have had time to reconnect as well."""
        return asyncio.get_running_loop().time() >= self._settled_at

    async def settle(self) -> None:
        """Wait until the connection is restored and other clients have had time to reconnect."""
        while not self.is_settled:
            self._restored.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._settled_at):
                    await self._restored.wait()


class KnownWorkers:
    """The workers that have reported to one client.

    Attributes:
        heard_at: When each worker last reported, by the loop's clock.
        is_complete: Whether every worker that can start requests without confirmation is known.
        departures: The number of workers that were lost or have left.
        specs_changed: Set when the workers serve other operations than before.
        has_chosen: Whether the client has chosen a worker since it last probed all of them.
        have_reported: Set when the workers have responded to the first probe, or have had the time to.
    """

    def __init__(self) -> None:
        self.heard_at: dict[str, float] = {}
        self.is_complete = False
        self.departures = 0
        self.specs_changed = asyncio.Event()
        self.has_chosen = False
        self.have_reported = asyncio.Event()
        self._departed: deque[str] = deque(maxlen=_MAX_DEPARTED)
        self._specs: dict[str, str] = {}
        self._replayable: dict[str, ReplayableOperations] = {}
        """The operations that may run again, by the digest of the specs that they belong to."""
        self._asked_at: dict[str, float] = {}
        """When a worker was asked for such a list, by the digest."""
        self._accepting: set[str] = set()
        self._leaving: set[str] = set()
        self._open: dict[str, int] = {}
        self._silences: dict[str, float] = {}

    def record(self, alive: AlivePayload, now: float) -> None:
        """Record the report of a worker, which may be leaving."""
        worker = alive.worker
        self._accepting.discard(worker)
        if worker not in self.heard_at and len(self.heard_at) >= _MAX_WORKERS:
            self.is_complete = False
            return
        self.heard_at[worker] = now
        if alive.silence_ms is not None:
            self._silences[worker] = min(alive.silence_ms / 1000, MAX_SECONDS)
        if alive.accepts:
            self._accepting.add(worker)
        if alive.leaving:
            self._leaving.add(worker)
            self._forget_specs(worker)
        elif alive.specs and self._specs.get(worker) != alive.specs:
            self._specs.pop(worker, None)
            self._specs[worker] = alive.specs
            self.specs_changed.set()

    def forget(self, worker: str) -> None:
        """Remove a worker that was lost or has left."""
        self._accepting.discard(worker)
        self._leaving.discard(worker)
        self._silences.pop(worker, None)
        if self.heard_at.pop(worker, None) is not None:
            self.departures += 1
            self._departed.append(worker)
        self._forget_specs(worker)

    def _forget_specs(self, worker: str) -> None:
        if self._specs.pop(worker, None) is not None:
            self.specs_changed.set()

    @property
    def staying(self) -> set[str]:
        """The workers that have not announced that they stop."""
        return self.heard_at.keys() - self._leaving

    def longest_silence(self, workers: Iterable[str | None]) -> float:
        """Return the longest time in seconds for which one of these workers may not respond, as far as they set one."""
        return max((self._silences.get(each or "", 0.0) for each in workers), default=0.0)

    def forget_all(self) -> None:
        """Remove all workers."""
        for worker in tuple(self.heard_at):
            self.forget(worker)

    def since(self, departures: int) -> set[str] | None:
        """Return all workers, including those that have left since then; None if some of these are not stored.

        Args:
            departures: The value of `departures` at that time.
        """
        left = self.departures - departures
        if left > len(self._departed):
            return None
        return {*self.heard_at, *islice(reversed(self._departed), left)}

    def have_dropped(self, call: PendingCall, count: int | None) -> bool:
        """Return whether every worker that can have a call has dropped it; `count` workers are connected."""
        if not call.can_be_fenced:
            return False
        if call.worker is not None:
            return call.worker in call.dropped_by
        # A worker that has left since then may have dropped the call before.
        workers = self.since(call.departures)
        if count is None or workers is None:
            return False
        return workers <= call.dropped_by and 0 < count <= len(call.fenced_by)

    # ---------------------------------------------------------------------------------------- versions

    @property
    def by_specs(self) -> dict[str, str]:
        """One worker for each digest of specs in the group, ordered by arrival."""
        return {digest: worker for worker, digest in self._specs.items()}

    def specs_of(self, worker: str | None) -> str:
        """Return the digest of the specs of a worker; empty if it is unknown."""
        return self._specs.get(worker or "", "")

    def needs_list(self, digest: str, now: float) -> bool:
        """Return whether a worker must be asked which of its operations may run again; record that it is asked."""
        if not digest or digest in self._replayable:
            return False
        if now - self._asked_at.get(digest, float("-inf")) < _ASK_AGAIN:
            return False
        self._asked_at = {**self._current(self._asked_at), digest: now}
        return True

    def learn(self, digest: str, replayable: str) -> None:
        """Store which operations may run again; malformed lists are ignored."""
        with suppress(ValueError):
            # Kept without workers, because the next worker may serve the same operations.
            learned = ReplayableOperations(replayable)
            self._replayable = {**self._current(self._replayable), digest: learned}

    def _current(self, table: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a table for the specs of known workers."""
        digests = set(self._specs.values())
        return {digest: value for digest, value in table.items() if digest in digests}

    def is_replayable(self, operation_id: str, worker: str | None) -> bool | None:
        """Return whether a call may run again, according to its worker, else all; None if that is not known."""
        own = self._replayable.get(self.specs_of(worker))
        lists = self._replayable.values() if own is None else (own,)
        verdicts = {operation_id in each for each in lists}
        return verdicts.pop() if len(verdicts) == 1 else None

    def find_other(self, refused: Container[str]) -> str:
        """Return a worker with other specs than these, preferably one that accepts requests; empty if there is none."""
        others = [worker for worker, digest in self._specs.items() if digest not in refused]
        return min(
            others, key=lambda each: (each not in self._accepting, self._load(each)), default=""
        )

    # ---------------------------------------------------------------------------------------- choosing

    def choose(self) -> str:
        """Return the worker for the next request; empty if none is known."""
        self.has_chosen = True
        accepting = self._accepting
        return min(accepting, key=self._load) if len(accepting) > 1 else next(iter(accepting), "")

    def _load(self, worker: str) -> tuple[int, float]:
        """Return the order of a worker, at random among those with as many open requests."""
        return self._open.get(worker, 0), random()  # noqa: S311 - it only distributes requests

    def first(self) -> str:
        """Return the worker that all clients choose that know the same workers; empty if none is known."""
        return min(self._accepting, default="")

    def skip(self, worker: str) -> None:
        """Do not choose a worker until it reports again."""
        self._accepting.discard(worker)

    def skip_silent(self, since: float) -> None:
        """Do not choose workers that have not reported since then, until they report again."""
        self._accepting = {each for each in self._accepting if self.heard_at[each] >= since}

    def occupy(self, call: PendingCall, worker: str) -> None:
        """Count a request as open at this worker, instead of the one before."""
        before, call.occupies = call.occupies, worker
        if worker:
            self._open[worker] = self._open.get(worker, 0) + 1
        if before:
            self._open[before] -= 1
            if not self._open[before]:
                del self._open[before]

    def release(self, call: PendingCall, *, has_failed: bool) -> None:
        """Do not count an ended call as open any more."""
        if has_failed:
            asyncio.get_running_loop().call_later(_FAILED_SECONDS, self.occupy, call, "")
        else:
            self.occupy(call, "")
