"""The state of a hub on a store: changes are announced, and equal keys wait for each other."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from math import inf
from time import monotonic, time
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from operations.base.logs import LogThrottle
from operations.store.contract import StoreError, Values
from operations.store.memory import MemoryValues

logger = logging.getLogger("operations")

T = TypeVar("T")

_CHECK_KEY = "store.checked"

_CHECK_SECONDS = 1.0
"""Seconds between two writes of `Store.check`."""

_CHECK_TIMEOUT = 5.0
"""Seconds after which a store that does not respond counts as not writable."""

_LOCKS = 16
"""The number of values that the tasks of an event loop can change concurrently."""


class Signal:
    """An event that is set once, for the tasks of all event loops."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def is_set(self) -> bool:
        """Return whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Wake the tasks that wait."""
        self._is_set = True
        for event, loop in self._waiting.copy().items():
            # A loop that is closed has no waiting tasks.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

    async def wait(self) -> None:
        """Wait until it is set."""
        event = asyncio.Event()
        self._waiting[event] = asyncio.get_running_loop()
        try:
            # Another thread may have set it just before.
            if not self._is_set:
                await event.wait()
        finally:
            del self._waiting[event]


class LoopLocks:
    """Locks between the tasks of one event loop; each loop has its own."""

    def __init__(self) -> None:
        self._locks = WeakKeyDictionary[asyncio.AbstractEventLoop, list[asyncio.Lock]]()

    def __call__(self, key: str) -> asyncio.Lock:
        """Return the lock for a key."""
        loop = asyncio.get_running_loop()
        locks = self._locks.get(loop)
        if locks is None:
            locks = self._locks[loop] = [asyncio.Lock() for _ in range(_LOCKS)]
        return locks[hash(key) % _LOCKS]


class Store:
    """Values with notification of changes. Can be registered at a broker to receive announcements.

    Args:
        values: The backend; by default the memory of this process.
        publish: Announces a change to other processes.

    Attributes:
        poll_seconds: Seconds after which to read a value again, because a change may not have been announced.
        changed: Set, and replaced by another signal, when a change is announced.
        is_connected: Returns whether the backend can be reached, as far as is known.
    """

    def __init__(
        self, values: Values | None = None, publish: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._values = values or MemoryValues()
        self._publish = publish
        self.poll_seconds = self._values.poll_seconds
        self.changed = Signal()
        self.is_connected: Callable[[], bool] = lambda: True
        self._lock, self._checking = LoopLocks(), LoopLocks()
        self._failures = LogThrottle()
        self._checked_at = -inf
        self._is_writable = True
        self.has_worked = False
        """Whether a value could be read or written since the start."""

    def seal(self, *keys: bytes) -> None:
        """Encrypt all values from now on; what is stored already must have been encrypted with one of these keys.

        Args:
            keys: Each of at least 32 random bytes; the first one encrypts.

        Raises:
            ValueError: If a key is too short.
            MissingExtraError: If the extra `jwt` is not installed.
        """
        self._values = import_module("operations.store.sealing").SealedValues(self._values, keys)

    def wake(self, *_: Any, **__: Any) -> None:
        """Wake the tasks of this process that wait for a change."""
        changed, self.changed = self.changed, Signal()
        changed.set()

    def lost(self, *_: Any, **__: Any) -> None:
        """Do nothing: waiting tasks keep waiting until the connection to the broker is restored."""

    receive, restored, undelivered = wake, wake, lost

    async def announce(self) -> None:
        """Wake the tasks that wait for a change, if possible in other processes as well."""
        self.wake()
        if self._publish is not None:
            # The change is stored: other processes find it when they poll.
            with suppress(StoreError):
                await self._checked(self._publish())

    async def check(self) -> bool:
        """Return whether values can be written. Finds out with a write, at most once a second."""
        if not self.is_connected():
            return False
        async with self._checking(_CHECK_KEY):
            if monotonic() >= self._checked_at + _CHECK_SECONDS:
                self._is_writable = await self._write_check()
                self._checked_at = monotonic()
            return self._is_writable

    async def _write_check(self) -> bool:
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT):
                # If another process changes the value in between, the store works as well.
                held = await self.get(_CHECK_KEY)
                await self.swap(_CHECK_KEY, held, str(time()).encode())
        except (StoreError, TimeoutError):
            return False
        return True

    async def get(self, key: str) -> bytes | None:
        """Return a value; None if there is none."""
        return await self._checked(self._values.get(key))

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace `old` by `new` if the current value is `old`; return whether it was. None means no value."""
        return await self._checked(self._values.swap(key, old, new))

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table, by key."""
        return await self._checked(self._values.items(table))

    async def change(self, key: str, update: Callable[[bytes | None], bytes]) -> bytes:
        """Replace a value by the result of `update` and return it.

        `update` runs again if another process changed the value.

        Raises:
            StoreError: If the store does not work, or other processes keep changing the value.
            Exception: Any error that `update` raises.
        """
        # Serialise the changes of an event loop, so that its callers do not compete for the value.
        async with self._lock(key):
            for attempt in range(100):
                held = await self.get(key)
                new = update(held)
                if new == held or await self.swap(key, held, new):
                    return new
                await asyncio.sleep(0.001 * min(attempt, 20))
        raise StoreError

    async def _checked(self, work: Awaitable[T]) -> T:
        try:
            found = await work
        except Exception as error:
            message = "the store of grants and approvals does not work: %r"
            logger.log(self._failures.level(), message, error)
            raise StoreError from error
        self.has_worked = True
        return found
