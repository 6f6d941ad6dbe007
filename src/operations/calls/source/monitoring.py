"""Monitor workers: the state of a group, and its dead letters.

Rule 1: workers report counters to every client that probes them. The counters contain no operations, callers or inputs.
Rule 2: a dead letter is stored without its credential. Replaying it is a new call of the operator.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import msgspec

from operations.base.errors import CallError, ErrorCode, TransportError
from operations.base.tasks import cancel_tasks, shielded
from operations.base.types import JSONObject
from operations.calls.protocol.events import (
    CallAlive,
    CallProbed,
    CallRequested,
    ProbePayload,
    RequestPayload,
    encode_event,
    read_event,
)
from operations.calls.serving.jobs import DEFAULT_GROUP
from operations.calls.source.client import PendingRequestMap
from operations.contract.envelopes import ResponseEnvelope
from operations.pubsub.base import (
    Delivery,
    EventTarget,
    QueueState,
    Receiver,
    StoredLetter,
    Subscription,
    WorkerStats,
    usable,
)

logger = logging.getLogger("operations")

MAX_LETTERS = 100
"""The largest number of dead letters in a list."""

_ANSWER = 1.0
"""Seconds that workers have to report, if the broker counts workers."""

_ANSWER_UNCOUNTED = 0.4
"""Seconds to wait for reports, if the broker does not count workers."""

_MAX_WORKERS = 10_000
"""The largest number of workers in one report."""


class WorkerReport(WorkerStats, kw_only=True, omit_defaults=False):
    """A connected worker."""

    worker: str
    """The address of the worker."""


class GroupReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A group of workers and its queue."""

    group: str
    workers: list[WorkerReport]

    silent: int = 0
    """Connected workers that did not respond: their event loop is blocked, or they have an older version."""

    running: int = 0
    """The number of running calls on all workers."""

    waiting: int = 0
    """The number of waiting calls, at the broker (if it stores requests) and in the workers."""

    lag: float | None = None
    """Seconds that the oldest request has waited at the broker; None if the broker does not store requests."""

    dead_letters: int | None = None
    """The number of dead letters; None if the broker does not store them."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A request that was abandoned because every worker that started it was lost."""

    id: str

    stored_at: int
    """Milliseconds since the epoch."""

    operation: str
    request_id: str

    deliveries: int
    """How often it was started."""

    input: Any = None
    caller: str | None = None
    """The caller, if the request named one."""

    metadata: JSONObject | None = None


def _letter(stored: StoredLetter, request: RequestPayload) -> DeadLetter:
    return DeadLetter(
        id=stored.id,
        stored_at=stored.stored_at,
        operation=request.operation_id,
        request_id=request.request_id,
        deliveries=request.attempt,
        input=request.input,
        caller=None if request.identity is None else request.identity.id,
        metadata=request.metadata,
    )


class GroupMonitor(Receiver):
    """Monitors a group of workers. It subscribes with the first `look`, until it is closed."""

    def __init__(self, target: EventTarget, group: str) -> None:
        self._target = target
        self._group = group
        self._workers = target.control(group)
        self.mailbox = target.mailbox()
        self._reports: dict[str, WorkerReport] = {}
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[GroupReport] | None = None
        self._listening: Subscription | None = None

    @shielded
    async def aclose(self) -> None:
        """Stop listening."""
        await cancel_tasks(self._looking)
        listening, self._listening = self._listening, None
        if listening is not None:
            with suppress(TransportError):
                await listening.aclose()

    # ------------------------------------------------------------ as a receiver

    def receive(self, delivery: Delivery) -> None:
        """Store the report of a worker."""
        event = read_event(delivery.body, self._target.max_values)
        if isinstance(event, CallAlive) and event.payload.stats is not None:
            worker, fields = event.payload.worker, msgspec.structs.asdict(event.payload.stats)
            if len(self._reports) < _MAX_WORKERS:
                self._reports[worker] = WorkerReport(worker=worker, **fields)
                self._changed.set()

    # ------------------------------------------------------------ reports

    async def look(self) -> GroupReport:
        """Return the state of the group, from its workers and the broker. Concurrent calls share one result.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        if self._looking is None or self._looking.done():
            self._looking = asyncio.Task(self._look())
            # The task continues even if all waiting callers were cancelled.
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
        try:
            return await self._target.state(self._group)
        except TransportError as error:
            logger.debug("the queue of %s is not known: %s", self._group, error)
            return QueueState()

    async def _wait_for(self, count: int | None) -> None:
        """Wait briefly until this many workers have reported."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_UNCOUNTED if count is None else _ANSWER):
                while count is None or len(self._reports) < count:
                    self._changed.clear()
                    await self._changed.wait()

    # ------------------------------------------------------------ dead letters

    async def letters(self) -> list[DeadLetter]:
        """Return the newest dead letters.

        Raises:
            TransportError: If the broker cannot be reached, or does not store dead letters.
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
            timeout: The time limit of the call in seconds.

        Raises:
            CallError: The error of the call, which may crash another worker; the letter then stays stored.
                `VALIDATION_ERROR` if there is no such letter.
            TransportError: As `letters`.
        """
        _, request = await self._one(letter_id)
        async with PendingRequestMap(self._target, group=self._group) as calls:
            envelope = await calls.call(
                request.operation_id,
                request.input,
                timeout=timeout,
                identity=request.identity,
                credential=credential,
                metadata=request.metadata,
                # One attempt only, because a request that crashes workers must not crash several again.
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
        if not await self._target.remove(self._group, letter_id):
            raise _no_letter(letter_id)

    async def _one(self, letter_id: str) -> tuple[StoredLetter, RequestPayload]:
        found = await self._find(letter_id) if letter_id else []
        if not found:
            raise _no_letter(letter_id)
        return found[0]

    async def _find(self, letter_id: str) -> list[tuple[StoredLetter, RequestPayload]]:
        stored = await self._target.letters(self._group, MAX_LETTERS, letter_id)
        events = ((each, read_event(each.body, self._target.max_values)) for each in stored)
        # Other programs may write to the queue too: skip entries that are not requests.
        return [(each, event.payload) for each, event in events if isinstance(event, CallRequested)]


def _no_letter(letter_id: str) -> CallError:
    return CallError(ErrorCode.VALIDATION_ERROR, f"there is no dead letter {letter_id!r}")


@asynccontextmanager
async def monitor_group(
    target: EventTarget, group: str = DEFAULT_GROUP
) -> AsyncGenerator[GroupMonitor]:
    """Monitor a group of workers for the duration of an `async with` block."""
    async with aclosing(GroupMonitor(usable(target), group)) as monitor:
        yield monitor
