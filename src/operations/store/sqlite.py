"""A store in a SQLite file."""

import sqlite3
from asyncio import to_thread
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from operations.store.contract import StoreError
from operations.store.state import Store


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


@asynccontextmanager
async def open_sqlite(url: str, password: str | None = None) -> AsyncGenerator[Store]:
    """Yield a store in a SQLite file: `sqlite:PATH`.

    Raises:
        StoreError: If the file cannot be used.
        ValueError: If there is no path, or a password.
    """
    path = url.removeprefix("sqlite:")
    if not path:
        raise ValueError("must name a file: sqlite:PATH")
    if password is not None:
        raise ValueError("a SQLite file has no password")
    yield Store(SQLiteValues(path))
