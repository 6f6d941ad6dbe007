"""A store of a hub in PostgreSQL, for several hubs: one table, whose changes are announced with NOTIFY.

Rule: a statement is one transaction. A connection that has ended is opened again with the next statement, and a change
      whose outcome is unknown is an error: the caller compares and sets again.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import psycopg

from operations.base.errors import TransportError
from operations.base.tasks import cancel_tasks
from operations.store.contract import StoreError
from operations.store.state import Store

_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS operations_state (key text PRIMARY KEY, value bytea NOT NULL)"
)
_GET: Final = "SELECT value FROM operations_state WHERE key = %s"
_ITEMS: Final = "SELECT key, value FROM operations_state WHERE starts_with(key, %s)"
_ADD: Final = "INSERT INTO operations_state VALUES (%s, %s) ON CONFLICT DO NOTHING RETURNING 1"
_CHANGE: Final = "UPDATE operations_state SET value = %s WHERE key = %s AND value = %s RETURNING 1"
_REMOVE: Final = "DELETE FROM operations_state WHERE key = %s AND value = %s RETURNING 1"
_CHANNEL: Final = "operations_state"

_CONNECT_SECONDS: Final = 5
_PAUSE: Final = 1.0
"""Seconds until a lost listener connects again."""


class PostgresValues:
    """Values in a table of a database.

    Args:
        url: The address.
        password: The password, unless it is in the address.
    """

    poll_seconds = 5.0

    def __init__(self, url: str, password: str | None) -> None:
        self._url = url
        self._password = password
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._turn = asyncio.Lock()

    async def connect(self) -> "psycopg.AsyncConnection[Any]":
        """Open a connection.

        Raises:
            TransportError: If the server cannot be reached.
        """
        try:
            return await psycopg.AsyncConnection.connect(
                self._url,
                autocommit=True,
                connect_timeout=_CONNECT_SECONDS,
                password=self._password,
            )
        except psycopg.Error as error:
            reason = " ".join(str(error).split())
            raise TransportError(f"PostgreSQL cannot be used: {reason}") from error

    async def _connect(self) -> "psycopg.AsyncConnection[Any]":
        """Open a connection to a database with the table.

        Raises:
            StoreError: If the table cannot be created.
        """
        connection = await self.connect()
        try:
            # Another process may create it at the same moment.
            with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):
                await connection.execute(_TABLE)
        except psycopg.Error as error:
            await connection.close()
            raise StoreError(f"the table operations_state cannot be created: {error}") from error
        return connection

    async def rows(self, sql: Any, *values: Any) -> list[Any]:
        """Run a statement and return its rows."""
        async with self._turn:
            if self._connection is None or self._connection.closed:
                self._connection = await self._connect()
            cursor = await self._connection.execute(sql, values)
            return await cursor.fetchall() if cursor.description is not None else []

    async def get(self, key: str) -> bytes | None:
        """Return a value."""
        found = await self.rows(_GET, key)
        return found[0][0] if found else None

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a value."""
        if old is None:
            return new is None or bool(await self.rows(_ADD, key, new))
        if new is None:
            return bool(await self.rows(_REMOVE, key, old))
        return bool(await self.rows(_CHANGE, new, key, old))

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table."""
        return dict(await self.rows(_ITEMS, f"{table}."))

    async def announce(self) -> None:
        """Tell all listeners that a value has changed."""
        await self.rows("SELECT pg_notify(%s, '')", _CHANNEL)

    async def listen(self, store: Store) -> None:
        """Wake a store whenever a value changes; connect again when the connection is lost."""
        while True:
            with suppress(TransportError, psycopg.Error):
                async with await self.connect() as connection:
                    await connection.execute(f"LISTEN {_CHANNEL}")
                    # A change may have been announced before.
                    store.wake()
                    async for _ in connection.notifies():
                        store.wake()
            await asyncio.sleep(_PAUSE)

    async def aclose(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._connection.close()


@asynccontextmanager
async def open_postgres(url: str, password: str | None = None) -> AsyncGenerator[Store]:
    """Yield a store in a PostgreSQL database, which connects and creates its table when it is first used."""
    values = PostgresValues(url, password)
    try:
        store = Store(values, values.announce)
        listening = asyncio.Task(values.listen(store))
        try:
            yield store
        finally:
            await cancel_tasks(listening)
    finally:
        await values.aclose()
