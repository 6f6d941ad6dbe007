"""How much work a worker takes on: so many at a time, so many waiting, and no more.

Rule 1: beyond the bounds work is refused at once, which costs almost nothing, instead of served too late.
Rule 2: a place is free when the work has ended, not when its caller has left.
Rule 3: what waited past its time is not started.
Rule 4: a caller is counted by what it shows, and by who it is as soon as that is known: one identity may have many
        credentials, or many ways to write one. What was counted is taken back exactly once.
"""

from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from operations._words import counted
from operations.access import Identity


class Work(Protocol):
    """What admission needs to know of a job."""

    @property
    def size(self) -> int:
        """Bytes it holds while it waits."""
        ...

    @property
    def principal(self) -> str:
        """On whose behalf it runs, as far as that is known when it arrives."""
        ...

    counted_as: tuple[str, ...]
    """Under which names it is counted now. For `Admission` alone."""


class Gate(Protocol):
    """The limits and rules that a worker shares with the other entry points of one server."""

    def __call__(
        self, operation_id: str, identity: Identity | None, *, is_stream: bool
    ) -> AbstractContextManager[None]:
        """Admit a call of an identified caller for as long as it runs.

        Raises:
            CallError: If the call is rejected.
        """
        ...


DEFAULT_CONCURRENCY = 1024
DEFAULT_QUEUE = 16_384

WorkT = TypeVar("WorkT", bound=Work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one worker."""

    concurrency: int = DEFAULT_CONCURRENCY
    """Calls that run at a time."""

    queue: int = DEFAULT_QUEUE
    """Calls that wait for a place."""

    queue_bytes: int = 64 * 1024 * 1024
    """What they may hold in all."""

    per_principal: int | None = None
    """Calls of one caller, running and waiting; None is as many as there are places."""


class Admission(Generic[WorkT]):
    """The places of one worker, and the line in front of them.

    Args:
        limits: The bounds.
        start: Starts a job; False if it is not worth starting any more.
    """

    def __init__(self, limits: Limits, start: Callable[[WorkT], bool]) -> None:
        self._limits = limits
        self._start = start
        self._line: deque[WorkT] = deque()
        self._line_bytes = 0
        self._principals: Counter[str] = Counter()
        self.running = 0

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return len(self._line)

    @property
    def free(self) -> int:
        """How many more could start at once."""
        return self._limits.concurrency - self.running

    def offer(self, work: WorkT) -> str | None:
        """Start `work`, or put it in line; the reason if there is no room for it."""
        limits = self._limits
        if limits.per_principal is not None:
            reason = self._count(work, work.principal, limits.per_principal)
            if reason is not None:
                return reason
        if self.running < limits.concurrency:
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
        """Note who is behind `work`, which has its place; the reason if there is no room for more of theirs."""
        limit = self._limits.per_principal
        return None if limit is None else self._count(work, principal, limit)

    def done(self, work: WorkT) -> None:
        """`work` has ended: its place goes to the next in line."""
        if work.counted_as:
            self._forget(work)
        self.running -= 1
        while self._line and self.running < self._limits.concurrency:
            following = self._line.popleft()
            self._line_bytes -= following.size
            if self._start(following):
                self.running += 1
            else:
                self._forget(following)

    def empty(self) -> list[WorkT]:
        """Everything that stands in line, which is then empty."""
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
