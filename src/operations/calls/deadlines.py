"""Many deadlines, one timer.

Most calls end long before their deadline, so whatever is done for each of them when it starts is done in vain. Here
that is one comparison: the timer is set for the nearest deadline, and when it rings the table is looked through.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

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
