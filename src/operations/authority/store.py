"""Small values that change by compare-and-set: budgets, revocations and approvals.

Rule: a store that does not work raises `StoreError`, and the call that needed it is rejected.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar

from operations.errors import CallError, ErrorCode

logger = logging.getLogger("operations")

T = TypeVar("T")


class StoreError(CallError):
    """The store does not work, so the call that needs it is rejected."""

    def __init__(self, message: str = "The authority of this call cannot be checked now") -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message)


class Store(Protocol):
    """Values by key, `table/name`."""

    @property
    def is_shared(self) -> bool:
        """Whether several processes see the same values."""
        ...

    @property
    def poll_seconds(self) -> float:
        """Time after which a change may have happened that was not announced here."""
        ...

    @property
    def listeners(self) -> list[Callable[[], None]]:
        """Called when a change is announced."""
        ...

    async def announce(self) -> None:
        """Call the listeners, if possible those of other processes as well."""
        ...

    async def get(self, key: str) -> tuple[bytes | None, int]:
        """Return a value and its revision; None and 0 if there is none.

        Raises:
            Exception: If the store does not work.
        """
        ...

    async def put(self, key: str, value: bytes, revision: int) -> bool:
        """Set a value if its revision is still this one, 0 for none; return whether it was set."""
        ...

    async def delete(self, key: str) -> None:
        """Remove a value, if there is one."""
        ...

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table, by name."""
        ...


class MemoryStore:
    """Values of this process, which end with it."""

    is_shared = False
    poll_seconds = inf

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._values: dict[str, tuple[bytes, int]] = {}

    async def announce(self) -> None:
        """Call the listeners."""
        for each in self.listeners:
            each()

    async def get(self, key: str) -> tuple[bytes | None, int]:
        """Return a value and its revision."""
        return self._values.get(key, (None, 0))

    async def put(self, key: str, value: bytes, revision: int) -> bool:
        """Set a value if its revision is still this one."""
        if self._values.get(key, (None, 0))[1] != revision:
            return False
        self._values[key] = (value, revision + 1)
        return True

    async def delete(self, key: str) -> None:
        """Remove a value."""
        self._values.pop(key, None)

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table, by name."""
        prefix = table + "/"
        return {
            key.removeprefix(prefix): value
            for key, (value, _) in self._values.items()
            if key.startswith(prefix)
        }


class SQLiteStore:
    """Values in a file, which survive restarts; the processes of one machine may share it.

    Args:
        path: The file; its folder must exist. Only its owner can read it.

    Raises:
        StoreError: If the file cannot be used.
    """

    is_shared = True
    poll_seconds = 0.25

    def __init__(self, path: str | Path) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._lock = Lock()
        try:
            Path(path).touch(mode=0o600)
            self._connection = sqlite3.connect(
                path, timeout=5, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS held (key TEXT PRIMARY KEY, value BLOB, revision INT)"
            )
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot use {path}: {error}") from error

    async def announce(self) -> None:
        """Call the listeners of this process; others see a change within `poll_seconds`."""
        for each in self.listeners:
            each()

    async def get(self, key: str) -> tuple[bytes | None, int]:
        """Return a value and its revision."""
        rows = await self._run("SELECT value, revision FROM held WHERE key = ?", key)
        return rows[0] if rows else (None, 0)

    async def put(self, key: str, value: bytes, revision: int) -> bool:
        """Set a value if its revision is still this one."""
        if revision:
            sql = "UPDATE held SET value = ?2, revision = revision + 1 WHERE key = ?1 AND revision = ?3 RETURNING 1"
            return bool(await self._run(sql, key, value, revision))
        sql = "INSERT INTO held VALUES (?1, ?2, 1) ON CONFLICT DO NOTHING RETURNING 1"
        return bool(await self._run(sql, key, value))

    async def delete(self, key: str) -> None:
        """Remove a value."""
        await self._run("DELETE FROM held WHERE key = ?", key)

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table, by name."""
        prefix = table + "/"
        sql = "SELECT substr(key, ?2), value FROM held WHERE substr(key, 1, ?2 - 1) = ?1"
        return dict(await self._run(sql, prefix, len(prefix) + 1))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    async def _run(self, sql: str, *values: Any) -> list[Any]:
        def run() -> list[Any]:
            with self._lock:
                return self._connection.execute(sql, values).fetchall()

        return await asyncio.to_thread(run)


async def checked(work: Awaitable[T]) -> T:
    """Return the result of a store, awaited if necessary.

    Raises:
        StoreError: If the store does not work.
    """
    try:
        return await work
    except Exception as error:
        logger.warning("the store of grants and approvals does not work: %r", error)
        raise StoreError from error


async def change(
    store: Store, key: str, update: Callable[[bytes | None], tuple[bytes | None, T]]
) -> T:
    """Change a value by compare-and-set, again if it changed meanwhile; return what `update` made of it.

    Args:
        store: Where it is.
        key: Its key.
        update: Takes the value and returns the new one, None to leave it, and the result. It may run more than once.

    Raises:
        StoreError: If the store does not work, or the value changes all the time.
        Exception: Any error that `update` raises.
    """
    for attempt in range(100):
        value, revision = await checked(store.get(key))
        new, result = update(value)
        if new is None:
            return result
        if await checked(store.put(key, new, revision)):
            return result
        await asyncio.sleep(0.001 * min(attempt, 20))
    raise StoreError
