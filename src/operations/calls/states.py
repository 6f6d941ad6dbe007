"""The states of calls without I/O: what an event means for a call, the order of items, and deadlines.

Rule 1: what an event does depends on what its caller expects, and on nothing else: `TRANSITIONS` says it all.
Rule 2: an event for a call that is not open is normal (it timed out, or was aborted) and changes nothing.
Rule 3: items of a subscription are delivered in order or not at all; a gap ends it with an error.
Rule 4: one timer serves all deadlines of a table, because most calls end long before theirs: starting a call costs one
        comparison.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from operations.calls.events import (
    CallAborted,
    CallCompleted,
    CallEvent,
    CallFailed,
    CallResponded,
)

REORDER_WINDOW = 64
"""Items that may arrive ahead of a missing one before it counts as lost."""


class Expects(Enum):
    """What a caller waits for."""

    ONE = "one"
    MANY = "many"


class Verdict(Enum):
    """What an event does to a call."""

    ITEM = "item"
    """One of several results; the call stays open."""

    LAST = "last"
    """The call is over."""

    IGNORE = "ignore"
    """Nothing."""


TRANSITIONS: dict[tuple[Expects, type[Any]], Verdict] = {
    (Expects.ONE, CallResponded): Verdict.LAST,
    (Expects.ONE, CallFailed): Verdict.LAST,
    (Expects.ONE, CallAborted): Verdict.LAST,
    # A worker that completes a call without answering it has broken the protocol; waiting on would not help.
    (Expects.ONE, CallCompleted): Verdict.LAST,
    (Expects.MANY, CallResponded): Verdict.ITEM,
    (Expects.MANY, CallFailed): Verdict.LAST,
    (Expects.MANY, CallAborted): Verdict.LAST,
    (Expects.MANY, CallCompleted): Verdict.LAST,
}


def judge(expects: Expects | None, event: CallEvent) -> Verdict:
    """What `event` does to a call that expects `expects`; None stands for a call that is not open."""
    if expects is None:
        return Verdict.IGNORE
    return TRANSITIONS.get((expects, type(event)), Verdict.IGNORE)


Arrival: TypeAlias = tuple[CallEvent, int]
"""An event, and the bytes that its worker counts for it."""


class SequenceError(Exception):
    """Items are missing, or too far out of order to wait for the rest."""


class Sequencer:
    """Puts the items of one subscription into order, each with the bytes that it takes.

    Attributes:
        expected: The number of the next item.
    """

    __slots__ = ("_early", "_total", "expected")

    def __init__(self) -> None:
        self.expected = 0
        self._early: dict[int, Arrival] = {}
        self._total: tuple[int, Arrival] | None = None

    def push(self, event: CallEvent, size: int = 0) -> list[Arrival]:
        """The events that can be delivered now that `event` is here, in order.

        Items seen before are dropped. An item without a number comes from a peer that does not count; it is
        taken as it comes.

        Raises:
            SequenceError: If an item did not come although `REORDER_WINDOW` later ones did.
        """
        sequence = getattr(event.payload, "sequence", None)
        if sequence is None:
            if isinstance(event, CallResponded):
                self.expected += 1
            return [(event, size)]
        if isinstance(event, CallResponded):
            if sequence < self.expected:
                return []
            self._early[sequence] = (event, size)
        else:
            self._total = (sequence, (event, size))
        return self._ready()

    def _ready(self) -> list[Arrival]:
        ready: list[Arrival] = []
        while (arrival := self._early.pop(self.expected, None)) is not None:
            ready.append(arrival)
            self.expected += 1
        if self._total is not None and self.expected >= self._total[0]:
            ready.append(self._total[1])
        elif len(self._early) > REORDER_WINDOW:
            raise SequenceError(f"item {self.expected} is missing")
        return ready

    @property
    def is_waiting(self) -> bool:
        """Whether something has arrived that cannot be delivered before something else does."""
        return bool(self._early) or self._total is not None


RESOLUTION = 0.02
"""Seconds by which a deadline may be late."""

NEVER = float("inf")


class Expirable(Protocol):
    """Something that has its time.

    Attributes:
        expires_at: When that ends, by the loop's clock; `NEVER` if it does not.
    """

    expires_at: float


ExpirableT = TypeVar("ExpirableT", bound=Expirable)


class Deadlines(Generic[ExpirableT]):
    """Calls `expire` with everything in `table` whose time has come.

    Attributes:
        next: When the table will be looked through. Whoever adds what ends before that says so with `schedule`.
    """

    def __init__(
        self, table: Mapping[Any, ExpirableT], expire: Callable[[ExpirableT], None]
    ) -> None:
        self.next = NEVER
        self._table = table
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self, when: float) -> None:
        """Look through the table at `when`."""
        if self._timer is not None:
            self._timer.cancel()
        self.next = when
        self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def clear(self) -> None:
        """Let nothing expire any more."""
        self.next = NEVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        self.next = NEVER
        now = asyncio.get_running_loop().time()
        # The loop may wake a little early, and what is nearly due need not be waited for again.
        for entry in self._due(now + RESOLUTION / 2):
            self._expire(entry)
        nearest = min((entry.expires_at for entry in self._table.values()), default=NEVER)
        if nearest < self.next:
            self.schedule(max(nearest, now + RESOLUTION))

    def _due(self, now: float) -> Iterable[ExpirableT]:
        return [entry for entry in self._table.values() if entry.expires_at <= now]
