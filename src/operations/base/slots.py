"""Slots of a service for calls that run at the same time; who comes too late waits."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

from operations.base.errors import CallError, ErrorCode
from operations.base.retry import STALLED


class Bulkhead:
    """Limits the concurrent calls to one source, separately for each event loop.

    Args:
        name: The name of the source, for messages.
        limit: The largest number of concurrent calls.
        patience: Seconds without a finished call after which a source without a free slot rejects calls.
    """

    def __init__(self, name: str, limit: int, *, patience: float = STALLED) -> None:
        self._name = name
        self._limit = limit
        self._patience = patience
        self._loops: dict[asyncio.AbstractEventLoop, _Slots] = {}

    @property
    def calls(self) -> int:
        """The number of running and waiting calls on all event loops."""
        return sum(each.taken + len(each.waiting) for each in self._loops.values())

    def try_enter(self) -> bool:
        """Take a slot if one is free, and return whether a slot was taken. Release it with `leave`."""
        slots = self._slots()
        if slots.taken >= self._limit:
            return False
        slots.taken += 1
        if slots.taken == self._limit:
            slots.moved_at = slots.loop.time()
        return True

    async def enter(self) -> None:
        """Wait for a free slot and take it. Release it with `leave`.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if no slot has become free for some time.
        """
        if not self.try_enter():
            await self._wait(self._slots())

    def leave(self) -> None:
        """Release the slot, or pass it to the call that has waited longest."""
        slots = self._slots()
        if slots.taken >= self._limit:
            slots.moved_at = slots.loop.time()
        slots.taken -= 1
        self._start_waiting(slots)

    def resize(self, limit: int) -> None:
        """Change the limit. Running calls continue, even if the new limit is lower."""
        self._limit = limit
        for slots in tuple(self._loops.values()):
            # Before, there may have been free slots, so the time without a finished call starts here.
            slots.moved_at = slots.loop.time()
        self._start_waiting(self._slots())

    def _start_waiting(self, slots: "_Slots") -> None:
        while slots.waiting and slots.taken < self._limit:
            waiter = slots.waiting.popleft()
            if not waiter.done():
                slots.taken += 1
                waiter.set_result(None)

    async def __aenter__(self) -> None:
        await self.enter()

    async def __aexit__(self, *exc_info: object) -> None:
        self.leave()

    async def _wait(self, slots: "_Slots") -> None:
        loop = slots.loop
        waiter: asyncio.Future[None] = loop.create_future()
        slots.waiting.append(waiter)
        try:
            while not waiter.done():
                left = slots.moved_at + self._patience - loop.time()
                if left <= 0:
                    raise CallError(
                        ErrorCode.RESOURCE_EXHAUSTED,
                        f"{self._limit} calls to {self._name} are running, and none has finished for"
                        f" {self._patience:g} s.",
                        retryable=True,
                        begun=False,
                    )
                await asyncio.wait({waiter}, timeout=left)
        except BaseException:
            if waiter.done() and not waiter.cancelled():
                # This call received a slot just before it was cancelled: pass the slot to the next call.
                self.leave()
            waiter.cancel()
            raise

    def _slots(self) -> "_Slots":
        loop = asyncio.get_running_loop()
        slots = self._loops.get(loop)
        if slots is None:
            for over in [each for each in self._loops if each.is_closed()]:
                del self._loops[over]
            slots = self._loops[loop] = _Slots(loop)
        return slots


class _Slots:
    """The slots of one event loop."""

    __slots__ = ("loop", "moved_at", "taken", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.taken = 0
        self.moved_at = 0.0
        self.waiting: deque[asyncio.Future[None]] = deque()


held_slot: ContextVar[Callable[[], AbstractContextManager[None]] | None] = ContextVar(
    "held_slot", default=None
)
"""Releases the slot that the current call holds at its entry point, for the duration of a `with` block."""


def lent_slot() -> AbstractContextManager[None]:
    """Release the slot of the current call while it waits for a person."""
    lend = held_slot.get()
    return nullcontext() if lend is None else lend()
