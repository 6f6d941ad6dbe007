"""What an event means for a call, without any I/O.

Rule 1: what an event does depends on what its caller expects, and on nothing else: `TRANSITIONS` says it all.
Rule 2: an event for a call that is not open is normal (it timed out, or was aborted) and changes nothing.
Rule 3: items of a subscription are delivered in order or not at all; a gap ends it with an error.
"""

from enum import Enum
from typing import Any, TypeAlias

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
