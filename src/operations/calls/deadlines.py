"""Many deadlines, few timers.

Most calls end long before their deadline, so a timer for each would be made only to be cancelled. Here deadlines that
are close together share one.
"""

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")

RESOLUTION = 0.02
"""Seconds by which a deadline may be late."""


class Deadlines(Generic[KeyT]):
    """Calls `expire(key)` for every key whose time has come and which was not discarded before."""

    def __init__(self, expire: Callable[[KeyT], None]) -> None:
        self._expire = expire
        self._slots: dict[int, set[KeyT]] = {}
        self._order: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0

    def add(self, when: float, key: KeyT) -> int:
        """Expire `key` at `when`, by the loop's clock; gives the slot for `discard`."""
        slot = int(when / RESOLUTION) + 1
        keys = self._slots.get(slot)
        if keys is None:
            keys = self._slots[slot] = set()
            heappush(self._order, slot)
            if self._timer is None or slot < self._next:
                self._schedule()
        keys.add(key)
        return slot

    def discard(self, slot: int, key: KeyT) -> None:
        """Forget `key`; nothing if it has expired."""
        keys = self._slots.get(slot)
        if keys is not None:
            keys.discard(key)

    def clear(self) -> None:
        """Forget everything."""
        self._slots.clear()
        self._order.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = self._order[0]
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(self._next * RESOLUTION, self._tick)

    def _tick(self) -> None:
        self._timer = None
        # The loop may wake a little early; a slot is due when its time has come by the loop's own clock.
        now = int(asyncio.get_running_loop().time() / RESOLUTION + 0.5)
        while self._order and self._order[0] <= now:
            for key in self._slots.pop(heappop(self._order)):
                self._expire(key)
        if self._order and self._timer is None:
            self._schedule()
