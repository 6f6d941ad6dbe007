"""Deadlines: many on one timer, and a wait that ends at a deadline.

Rule 1: the deadlines of an event loop share one timer, because a timer for each call costs more than the call. The
        timer stays when a call ends: it is set again only for an earlier deadline, or when it expires.
Rule 2: a deadline is never early by more than a millisecond, and never late by more than `RESOLUTION`, unless the event
        loop is busy.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

RESOLUTION: Final = 0.02
"""Seconds by which a deadline may be late."""

_EARLY: Final = 0.001
"""Seconds by which a deadline may be early, because an event loop may wake early."""

NEVER: Final = float("inf")


class Expirable(Protocol):
    """An entry with a deadline.

    Attributes:
        expires_at: The deadline, by the loop's clock; `NEVER` for no deadline.
    """

    expires_at: float


ExpirableT = TypeVar("ExpirableT", bound=Expirable)


class DeadlineTable(Generic[ExpirableT]):
    """Calls `expire` with each entry of `table` whose deadline has passed.

    Attributes:
        next: When the table is checked next. Call `schedule` after adding an entry with an earlier deadline.
    """

    def __init__(
        self, table: Mapping[Any, ExpirableT], expire: Callable[[ExpirableT], None]
    ) -> None:
        self.next = NEVER
        self._table = table
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self, when: float) -> None:
        """Check the table at `when`."""
        if self._timer is not None:
            self._timer.cancel()
        self.next = when
        self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def clear(self) -> None:
        """Stop checking."""
        self.next = NEVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        self.next = NEVER
        now = asyncio.get_running_loop().time()
        due = [each for each in self._table.values() if each.expires_at <= now + _EARLY]
        for entry in due:
            self._expire(entry)
        nearest = min((entry.expires_at for entry in self._table.values()), default=NEVER)
        if nearest < self.next:
            self.schedule(max(nearest, now + RESOLUTION))


class Alarm(msgspec.Struct, eq=False):
    """Wakes the task that waits for a result: when it is ready, or at its deadline.

    The code that makes the result available calls `ring`. Call `remove` when the wait is over.
    """

    woken: asyncio.Future[None]
    """Await it. Cancelling it affects nothing else."""

    expires_at: float
    _more: Callable[[], float] | None
    _others: "dict[Alarm, Alarm]"

    def ring(self, _: object = None) -> None:
        """Wake the task."""
        if not self.woken.done():
            self.woken.set_result(None)

    def remove(self) -> None:
        """Forget the deadline."""
        del self._others[self]

    def expire(self) -> None:
        """Wake the task, unless the deadline was extended."""
        left = 0.0 if self._more is None else self._more()
        if left > 0:
            self.expires_at = asyncio.get_running_loop().time() + left
        else:
            self.expires_at = NEVER
            self.ring()


def alarm_in(seconds: float, more: Callable[[], float] | None = None) -> Alarm:
    """Return an alarm for a deadline in this many seconds.

    Args:
        seconds: The time until the deadline.
        more: Returns the seconds that are left at that time, if the deadline can be extended.
    """
    loop = asyncio.get_running_loop()
    alarms = _threads.alarms
    if alarms is None or alarms.loop is not loop:
        alarms = _threads.alarms = _Alarms(loop)
    when = loop.time() + seconds
    alarm = Alarm(loop.create_future(), when, more, alarms.entries)
    alarms.entries[alarm] = alarm
    # The same deadline, computed again, may differ a little.
    if when < alarms.deadlines.next - _EARLY:
        alarms.deadlines.schedule(when)
    return alarm


class _Alarms:
    """The alarms of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.entries: dict[Alarm, Alarm] = {}
        self.deadlines: DeadlineTable[Alarm] = DeadlineTable(self.entries, Alarm.expire)


class _Threads(threading.local):
    """The alarms of the event loop that last ran in each thread.

    An event loop that alternates with others in its thread gets further tables. Each works until it is empty.
    """

    alarms: _Alarms | None = None


_threads = _Threads()
