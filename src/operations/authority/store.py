"""Small values that change by compare-and-set: budgets, revocations and approvals.

Rule: a store that does not work raises `StoreError`, and the call that needed it is rejected.
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
from typing import Any, Protocol, TypeVar

from operations.errors import CallError, ErrorCode, TransportError
from operations.pubsub.base import EventTarget

logger = logging.getLogger("operations")

T = TypeVar("T")

_LOCKS = 16
"""Values that callers in this process change at a time."""


class StoreError(CallError):
    """The store does not work, so the call that needs it is rejected."""

    def __init__(self, message: str = "The authority of this call cannot be checked now") -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message)


class Values(Protocol):
    """Where the values of a store are, by key, `table.name`. Methods raise any exception if it does not work."""

    poll_seconds: float
    """Time after which a change may have happened that was not announced here; infinite within one process."""

    async def get(self, key: str) -> bytes | None:
        """Return a value; None if there is none."""
        ...

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Set or remove (None) a value if it is still `old`, None for none; return whether it was."""
        ...

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table, by key."""
        ...


class MemoryValues:
    """Values of this process, which end with it."""

    poll_seconds = inf

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    async def get(self, key: str) -> bytes | None:
        """Return a value."""
        return self._values.get(key)

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a value."""
        if self._values.get(key) != old:
            return False
        self._values.pop(key, None)
        if new is not None:
            self._values[key] = new
        return True

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table."""
        return {key: self._values[key] for key in self._values if key.startswith(f"{table}.")}


class SQLiteValues:
    """Values in a file, which survive restarts; the processes of one machine may share it.

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
        # A connection of its own each time: a file that was removed meanwhile is an error, not an empty store.
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


class Store:
    """Values, and the announcement of their changes. It can be the receiver of announcements at a broker.

    Args:
        values: Where the values are; by default in this process.
        publish: Announces a change to other processes.

    Attributes:
        poll_seconds: Time after which a change may have happened that was not announced here.
        changed: Set, and replaced by another event, when a change is announced.
    """

    def __init__(
        self, values: Values | None = None, publish: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._values = values or MemoryValues()
        self._publish = publish
        self.poll_seconds = self._values.poll_seconds
        self.changed = asyncio.Event()
        self._locks = [asyncio.Lock() for _ in range(_LOCKS)]

    def wake(self, *_: Any, **__: Any) -> None:
        """Wake those in this process who wait for a change."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def lost(self, *_: Any, **__: Any) -> None:
        """Let those who wait do so until the connection to the broker is restored."""

    receive, restored, undelivered = wake, wake, lost

    async def announce(self) -> None:
        """Wake those who wait for a change, if possible in other processes as well."""
        self.wake()
        if self._publish is not None:
            # The change is stored: others find it later, when they look by themselves.
            with suppress(StoreError):
                await _checked(self._publish())

    async def get(self, key: str) -> bytes | None:
        """Return a value; None if there is none."""
        return await _checked(self._values.get(key))

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Set or remove (None) a value if it is still `old`, None for none; return whether it was."""
        return await _checked(self._values.swap(key, old, new))

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table, by key."""
        return await _checked(self._values.items(table))

    async def change(self, key: str, update: Callable[[bytes | None], bytes]) -> bytes:
        """Replace a value by what `update` makes of it, which runs again if the value changes meanwhile; return that.

        Raises:
            StoreError: If the store does not work, or the value changes all the time.
            Exception: Any error that `update` raises.
        """
        # One at a time: callers in this process do not compete for the value.
        async with self._locks[hash(key) % _LOCKS]:
            for attempt in range(100):
                held = await self.get(key)
                new = update(held)
                if new == held or await self.swap(key, held, new):
                    return new
                await asyncio.sleep(0.001 * min(attempt, 20))
        raise StoreError


@asynccontextmanager
async def open_broker_store(target: EventTarget) -> AsyncGenerator[Store]:
    """Yield a store at the broker of a target, which several hubs share.

    Raises:
        TransportError: If the broker cannot be reached, or keeps no values.
    """
    if target.values is None:
        raise TransportError("this connection keeps no values for several processes")
    topic = target.topic("authority")
    store = Store(target.values, partial(target.send, topic, b'{"type":"changed"}'))
    listening = await target.listen((topic,), store)
    try:
        yield store
    finally:
        await listening.aclose()


async def _checked(work: Awaitable[T]) -> T:
    try:
        return await work
    except Exception as error:
        logger.warning("the store of grants and approvals does not work: %r", error)
        raise StoreError from error
