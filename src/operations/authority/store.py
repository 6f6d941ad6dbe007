"""Stores for budgets, revocations and approvals: small values that change by compare-and-set.

Rule 1: a store that does not work raises `StoreError`, and calls that need it are rejected.
Rule 2: several threads, each with its own event loop, may share a store in memory or in a file.
"""

import asyncio
import logging
import sqlite3
from asyncio import to_thread
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from math import inf
from pathlib import Path
from threading import Lock
from time import monotonic, time
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from operations._resilience import LogThrottle
from operations.errors import CallError, ErrorCode, TransportError
from operations.pubsub.base import EventTarget

logger = logging.getLogger("operations")

T = TypeVar("T")

_CHECK_KEY = "store.checked"

_CHECK_SECONDS = 1.0
"""Seconds between two writes of `Store.check`."""

_CHECK_TIMEOUT = 5.0
"""Seconds after which a store that does not respond counts as not writable."""

_LOCKS = 16
"""The number of values that the tasks of an event loop can change concurrently."""


class StoreError(CallError):
    """The store does not work, so the call that needs it is rejected."""

    def __init__(self, message: str = "The authority of this call cannot be checked now") -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message)


class Values(Protocol):
    """The backend of a store: values by key, `table.name`. Its methods may raise any exception."""

    poll_seconds: float
    """Seconds after which to read a value again, because a change may not have been announced; infinite within one
    process."""

    async def get(self, key: str) -> bytes | None:
        """Return a value; None if there is none."""
        ...

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace `old` by `new` if the current value is `old`; return whether it was. None means no value."""
        ...

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table, by key."""
        ...


class MemoryValues:
    """Values in the memory of this process."""

    poll_seconds = inf

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._swapping = Lock()

    async def get(self, key: str) -> bytes | None:
        """Return a value."""
        return self._values.get(key)

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a value."""
        with self._swapping:
            if self._values.get(key) != old:
                return False
            self._values.pop(key, None)
            if new is not None:
                self._values[key] = new
            return True

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table."""
        values = self._values.copy()
        return {key: value for key, value in values.items() if key.startswith(f"{table}.")}


class SQLiteValues:
    """Values in a file, which survive restarts; several processes on one machine may share it.

    Args:
        path: The file; its folder must exist. Only its owner can read it.

    Raises:
        StoreError: If the file cannot be used.
    """

    poll_seconds = 0.25

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._path.touch(mode=0o600)
            self._run("CREATE TABLE IF NOT EXISTS held (key TEXT PRIMARY KEY, value BLOB)")
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot use {path}: {error}") from error

    def _run(self, sql: str, *values: Any) -> list[Any]:
        # Open a new connection each time, so that a removed file is an error and not an empty store.
        with closing(sqlite3.connect(self._path, timeout=5, isolation_level=None)) as connection:
            return connection.execute(sql, values).fetchall()

    async def get(self, key: str) -> bytes | None:
        """Return a value."""
        rows = await to_thread(self._run, "SELECT value FROM held WHERE key = ?", key)
        return rows[0][0] if rows else None

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a value."""
        if new is None:
            sql = "DELETE FROM held WHERE key = ? AND value = ? RETURNING 1"
            return bool(await to_thread(self._run, sql, key, old))
        sql = "REPLACE INTO held SELECT ?, ? WHERE (SELECT value FROM held WHERE key = ?) IS ? RETURNING 1"
        return bool(await to_thread(self._run, sql, key, new, key, old))

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table."""
        sql = "SELECT key, value FROM held WHERE key GLOB ?"
        return dict(await to_thread(self._run, sql, f"{table}.*"))


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
            return await work
        except Exception as error:
            message = "the store of grants and approvals does not work: %r"
            logger.log(self._failures.level(), message, error)
            raise StoreError from error


@asynccontextmanager
async def open_broker_store(target: EventTarget) -> AsyncGenerator[Store]:
    """Yield a store on the broker of a target, which several hubs can share.

    Raises:
        TransportError: If the broker cannot be reached, or cannot store values.
    """
    if target.values is None:
        raise TransportError("this connection cannot store values for several processes")
    topic = target.topic("authority")
    store = Store(target.values, partial(target.send, topic, b'{"type":"changed"}'))
    listening = await target.listen((topic,), store)
    try:
        yield store
    finally:
        await listening.aclose()
