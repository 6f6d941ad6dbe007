"""Monitor workers: the state of a group, and its dead letters.

Rule 1: workers report counts to every client that probes them. The counts name no operation, caller or input.
Rule 2: a dead letter is stored without its credential. Replayed, it is a new call of the operator.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from operations.calls.client import PendingRequestMap
from operations.calls.events import (
    CallAlive,
    CallProbed,
    CallRequested,
    ProbePayload,
    RequestPayload,
    encode_event,
    read_event,
)
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, TransportError
from operations.pubsub.base import (
    Delivery,
    EventTarget,
    QueueState,
    Subscription,
    WorkerStats,
    usable,
)
from operations.types import JSONObject

logger = logging.getLogger("operations")

MAX_LETTERS = 100
"""Dead letters in one list."""

_ANSWER = 1.0
"""Seconds that workers have to report, if the broker knows how many there are."""

_ANSWER_UNCOUNTED = 0.4
"""The same if it does not: all of them are waited for."""

_MAX_WORKERS = 10_000
"""Workers in one report."""


class WorkerReport(WorkerStats, frozen=True, kw_only=True, omit_defaults=False):
    """A connected worker."""

    worker: str
    """Its mailbox."""


class GroupReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A group of workers and its queue."""

    group: str
    workers: list[WorkerReport]

    silent: int = 0
    """Workers that are connected and did not answer: their event loop is blocked, or they are of an older version."""

    running: int = 0
    """Calls that run on all workers."""

    waiting: int = 0
    """Calls that wait: at the broker, if it keeps them, and in the workers."""

    lag: float | None = None
    """Seconds that the oldest request has waited at the broker; None if the broker keeps no requests."""

    dead_letters: int | None = None
    """None if the broker keeps none."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A request that was given up because it cost every worker that began it."""

    id: str

    stored_at: int
    """Milliseconds since the epoch."""

    operation: str
    request_id: str

    deliveries: int
    """How often it was begun."""

    input: Any = None
    caller: str | None = None
    """The caller, if the request named one."""

    metadata: JSONObject | None = None


class GroupMonitor:
    """Shows a group of workers to an operator. It listens from the first look until it is closed."""

    def __init__(self, target: EventTarget, group: str) -> None:
        self._target = target
        self._group = group
        self._admin = target.admin
        self._workers = target.control(group)
        self.mailbox = target.mailbox()
        self._reports: dict[str, WorkerReport] = {}
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[GroupReport] | None = None
        self._listening: Subscription | None = None

    async def aclose(self) -> None:
        """Stop listening."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})
        listening, self._listening = self._listening, None
        if listening is not None:
            with suppress(TransportError):
                await listening.aclose()

    # ------------------------------------------------------------ as a receiver

    def receive(self, delivery: Delivery) -> None:
        """Note the report of a worker."""
        event = read_event(delivery.body, self._target.max_values)
        if isinstance(event, CallAlive) and event.payload.stats is not None:
            alive, known = event.payload, len(self._reports)
            if known < _MAX_WORKERS:
                fields = msgspec.structs.asdict(event.payload.stats)
                self._reports[alive.worker] = WorkerReport(worker=alive.worker, **fields)
                self._changed.set()

    def undelivered(self, key: str, misdirected: bool = False) -> None:
        """Nothing is put into queues here."""

    def lost(self, reason: str) -> None:
        """The next look fails, or waits."""

    def restored(self) -> None:
        """The next look works again."""

    # ------------------------------------------------------------ looking

    async def look(self) -> GroupReport:
        """Ask the workers and the broker; several that look at the same time share one answer.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
            # Also if all that waited have left.
            self._looking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._looking)

    async def _look(self) -> GroupReport:
        self._reports = {}
        if self._listening is None:
            self._listening = await self._target.listen((self.mailbox,), self)
        count = await self._target.count_present(self._workers)
        payload = ProbePayload(request_ids=[], reply_to=self.mailbox, stats=True)
        await self._target.send(self._workers, encode_event(CallProbed(payload=payload)))
        state = await self._state()
        await self._wait_for(count)
        reports = sorted(self._reports.values(), key=lambda each: (each.name, each.worker))
        return GroupReport(
            group=self._group,
            workers=reports,
            silent=max(0, (count or 0) - len(reports)),
            running=sum(each.running for each in reports),
            waiting=(state.waiting or 0) + sum(each.waiting for each in reports),
            lag=state.oldest,
            dead_letters=state.dead_letters,
        )

    async def _state(self) -> QueueState:
        """Return the broker's data about the queue, if this client may read it."""
        if self._admin is None:
            return QueueState()
        try:
            return await self._admin.state(self._group)
        except TransportError as error:
            logger.debug("the queue of %s is not known: %s", self._group, error)
            return QueueState()

    async def _wait_for(self, count: int | None) -> None:
        """Wait until so many workers have reported, but not for long."""
        try:
            async with asyncio.timeout(_ANSWER_UNCOUNTED if count is None else _ANSWER):
                while count is None or len(self._reports) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    # ------------------------------------------------------------ dead letters

    async def letters(self) -> list[DeadLetter]:
        """Return the newest dead letters.

        Raises:
            TransportError: If the broker cannot be reached, or keeps none.
        """
        return [_letter(*found) for found in await self._find("")]

    async def letter(self, letter_id: str) -> DeadLetter:
        """Return one dead letter.

        Raises:
            CallError: `VALIDATION_ERROR` if there is none with this id.
            TransportError: As `letters`.
        """
        return _letter(*await self._one(letter_id))

    async def replay(
        self, letter_id: str, *, credential: str | None = None, timeout: float | None = None
    ) -> ResponseEnvelope[Any]:
        """Call the operation of a dead letter once more, as the operator; remove the letter if that succeeds.

        Args:
            letter_id: The id of the letter.
            credential: A token for the workers' resolver.
            timeout: Seconds for the call.

        Raises:
            CallError: As the call, which may cost one more worker; the letter is kept then. `VALIDATION_ERROR` if there
                is no such letter.
            TransportError: As `letters`.
        """
        _, _, request = await self._one(letter_id)
        async with PendingRequestMap(self._target, group=self._group) as calls:
            envelope = await calls.call(
                request.operation_id,
                request.input,
                timeout=timeout,
                identity=request.identity,
                credential=credential,
                metadata=request.metadata,
                # One attempt: a request that kills workers must not kill several again.
                replayable=False,
            )
        await self.remove(letter_id)
        return envelope

    async def remove(self, letter_id: str) -> None:
        """Remove a dead letter.

        Raises:
            CallError: `VALIDATION_ERROR` if there is none with this id.
            TransportError: As `letters`.
        """
        if self._admin is None or not await self._admin.remove(self._group, letter_id):
            raise _no_letter(letter_id)

    async def _one(self, letter_id: str) -> tuple[str, int, RequestPayload]:
        found = await self._find(letter_id) if letter_id else []
        if not found:
            raise _no_letter(letter_id)
        return found[0]

    async def _find(self, letter_id: str) -> list[tuple[str, int, RequestPayload]]:
        if self._admin is None:
            raise TransportError("this broker keeps no dead letters")
        stored = await self._admin.letters(self._group, MAX_LETTERS, letter_id)
        events = ((each, read_event(each.body, self._target.max_values)) for each in stored)
        # Other programs may write there, too: skip entries that are not requests.
        return [
            (each.id, each.stored_at, event.payload)
            for each, event in events
            if isinstance(event, CallRequested)
        ]


def _letter(letter_id: str, stored_at: int, request: RequestPayload) -> DeadLetter:
    return DeadLetter(
        id=letter_id,
        stored_at=stored_at,
        operation=request.operation_id,
        request_id=request.request_id,
        deliveries=request.attempt,
        input=request.input,
        caller=None if request.identity is None else request.identity.id,
        metadata=request.metadata,
    )


def _no_letter(letter_id: str) -> CallError:
    return CallError(ErrorCode.VALIDATION_ERROR, f"there is no dead letter {letter_id!r}")


@asynccontextmanager
async def monitor_group(
    target: EventTarget, group: str = "operations"
) -> AsyncGenerator[GroupMonitor]:
    """Watch a group of workers for the length of an `async with` block."""
    monitor = GroupMonitor(usable(target), group)
    try:
        yield monitor
    finally:
        await monitor.aclose()
