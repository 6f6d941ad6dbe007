"""The queue of a worker: calls wait for a slot, up to a limit.

Rule 1: a call beyond the limits is rejected at once, which costs almost nothing, instead of being served too late.
Rule 2: a slot is free when the call has ended, not when its caller has disconnected.
Rule 3: a call whose time ran out while it waited is not started.
Rule 4: a caller counts by its credential, and by its identity as soon as that is known: one identity may have many
        credentials. What was counted is released exactly once.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from operations._text import counted
from operations.front.limits import Limits


class Work(Protocol):
    """What the queue needs to know of a call."""

    @property
    def size(self) -> int:
        """Size of its request, in bytes."""
        ...

    @property
    def principal(self) -> str:
        """The caller, as far as it is known when the call arrives."""
        ...

    counted_as: tuple[str, ...]
    """The names under which it counts now. Only for `AdmissionQueue`."""


WorkT = TypeVar("WorkT", bound=Work)


class AdmissionQueue(Generic[WorkT]):
    """The slots of one worker, and the calls that wait for them.

    Args:
        limits: Of the worker: `calls`, `calls_per_caller`, `queue`, `queue_bytes`.
        start: Starts a call; returns False if it need not be started any more.
    """

    def __init__(self, limits: Limits, start: Callable[[WorkT], bool]) -> None:
        self._limits = limits
        most = limits.calls + limits.queue
        # Without a limit, callers are not counted at all.
        self._per_caller = limits.calls_per_caller if limits.calls_per_caller < most else None
        self._start = start
        self._line: deque[WorkT] = deque()
        self._line_bytes = 0
        self._principals: Counter[str] = Counter()
        self.running = 0

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._line)

    @property
    def free(self) -> int:
        """How many more calls could start at once."""
        return self._limits.calls - self.running

    def offer(self, work: WorkT) -> str | None:
        """Start a call, or let it wait; return the reason if it is rejected."""
        limits = self._limits
        if self._per_caller is not None:
            reason = self._count(work, work.principal, self._per_caller)
            if reason is not None:
                return reason
        if self.running < limits.calls:
            if self._start(work):
                self.running += 1
            else:
                self._forget(work)
            return None
        if len(self._line) >= limits.queue or self._line_bytes + work.size > limits.queue_bytes:
            self._forget(work)
            return f"{counted(self.running, 'call')} under way here, and {len(self._line)} in line already"
        self._line.append(work)
        self._line_bytes += work.size
        return None

    def identified(self, work: WorkT, principal: str) -> str | None:
        """Note the identity behind a call that has a slot; return the reason if it has too many."""
        limit = self._per_caller
        return None if limit is None else self._count(work, principal, limit)

    def done(self, work: WorkT) -> None:
        """Give the slot of a call that has ended to the next one."""
        if work.counted_as:
            self._forget(work)
        self.running -= 1
        while self._line and self.running < self._limits.calls:
            following = self._line.popleft()
            self._line_bytes -= following.size
            if self._start(following):
                self.running += 1
            else:
                self._forget(following)

    def empty(self) -> list[WorkT]:
        """Empty the queue; return the calls that waited."""
        line = list(self._line)
        self._line.clear()
        self._line_bytes = 0
        for work in line:
            self._forget(work)
        return line

    def _count(self, work: WorkT, principal: str, limit: int) -> str | None:
        if principal in work.counted_as:
            return None
        if self._principals.get(principal, 0) >= limit:
            return f"this caller has {counted(limit, 'call')} here already"
        self._principals[principal] += 1
        work.counted_as += (principal,)
        return None

    def _forget(self, work: WorkT) -> None:
        names, work.counted_as = work.counted_as, ()
        for name in names:
            self._principals[name] -= 1
            if not self._principals[name]:
                del self._principals[name]
