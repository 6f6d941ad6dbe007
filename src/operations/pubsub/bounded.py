"""Limits of a transport: how many requests it takes at once, names it has seen, and how often it logs a problem."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic

_EVERY = 60.0
"""Seconds between two warnings of the same kind."""


_MAX_BATCH = 64
"""Requests that a worker takes in one read."""

_PROMPT = 0.005
"""Seconds in which a whole batch must begin for the next one to be larger."""

_BLOCKED = 0.02
"""Seconds of one loop turn after which the handlers here count as blocking."""

_FULL_POLLS = (0.0, 0.0, 0.0, 0.001, 0.002)
"""Pauses between checks for a free slot; the longest is `_FULL_POLL`."""

_FULL_POLL = 0.005

IDLE = 0.02
"""Seconds without a request after which a worker counts as idle."""


class BatchSize:
    """Decides how many requests a worker takes from the broker in one read.

    A request that was taken cannot go to another worker, so a worker takes only what it begins at once. The size
    starts at 1, doubles while a whole batch begins promptly, and returns to 1 when the worker was idle or a handler
    blocked the event loop.

    Args:
        capacity: Returns how many more requests can begin now.
    """

    def __init__(self, capacity: Callable[[], int]) -> None:
        self._capacity = capacity
        self._size = 1
        self._loop = asyncio.get_running_loop()

    @property
    def is_hot(self) -> bool:
        """Whether requests arrived a moment ago."""
        return self._size > 1

    async def room(self) -> int:
        """Return the size of the next batch; wait while the worker is full."""
        pauses = iter(_FULL_POLLS)
        while (free := self._capacity()) <= 0:  # noqa: ASYNC110 - an event per call would cost every call more
            await asyncio.sleep(next(pauses, _FULL_POLL))
        return min(free, self._size)

    def reset(self) -> None:
        """Note that no request arrived for a while."""
        self._size = 1

    async def begun(self, count: int, since: float) -> None:
        """Wait until a batch of `count` requests that was delivered after `since` has begun; adapt the size.

        The next read must not be sent earlier: a handler that blocks the loop would keep what it takes.
        """
        before = since
        for _ in range(count.bit_length() + 1):
            await asyncio.sleep(0)
            now = self._loop.time()
            if now - before > _BLOCKED:
                self._size = 1
                return
            before = now
        if count >= self._size and before - since < _PROMPT:
            self._size = min(2 * self._size, _MAX_BATCH)


class LogThrottle:
    """The level of a repeated message: a warning once a minute, in between for debugging only."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._logged_at: float | None = None

    def level(self) -> int:
        """Return the level for logging the message now."""
        now = self._clock()
        if self._logged_at is not None and now - self._logged_at < _EVERY:
            return logging.DEBUG
        self._logged_at = now
        return logging.WARNING


class BoundedSet:
    """A set of names that forgets: its older half is dropped when the newer half is full.

    Dropping one name at a time would cost more: a dict whose first keys were removed is searched for the next one.
    """

    __slots__ = ("_newer", "_older", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._newer: set[str] = set()
        self._older: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._newer or name in self._older

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def add(self, name: str) -> bool:
        """Remember `name`; return False if it was known."""
        newer = self._newer
        if name in newer or name in self._older:
            return False
        newer.add(name)
        if len(newer) >= self._size:
            self._older, self._newer = newer, set()
        return True

    def discard(self, name: str) -> None:
        """Forget `name`."""
        self._newer.discard(name)
        self._older.discard(name)
