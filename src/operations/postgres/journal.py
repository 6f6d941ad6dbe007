"""A journal in PostgreSQL, for any number of machines: the contract is `operations.runs.database`.

    begin: BEGIN and the clock of the server, in one exchange
    commit: the news for other processes and COMMIT, in one exchange

Rule 1: a commit is never repeated without asking the server: a connection may end while it commits. The answer holds
        only if the server has not crashed since, because it then gives numbers of lost transactions to others.
Rule 2: times and leases are those of the server, so that the clocks of the machines do not matter.
Rule 3: a process that is stopped within a transaction keeps no lock for long.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from typing import Any, Final, cast

import psycopg
from psycopg.conninfo import conninfo_to_dict

from operations.base.errors import TransportError

logger = logging.getLogger("operations")

ALL: Final = "*"
"""News that cannot name the runs that changed."""

_CONNECT_SECONDS: Final = 5
"""How long a connection may take to open."""

_OUTCOME_SECONDS: Final = 10.0
"""How long a commit asks whether it has happened."""

_IDLE_MILLISECONDS: Final = 5_000
"""After this time without a statement, the server ends a transaction and the connection."""

_MOST_NAMES: Final = 200
"""The largest number of runs in one message, which has at most 8,000 bytes."""

_OLDEST_SERVER: Final = 13_00_00
"""The first version that tells whether a transaction was committed."""

_CLOCK: Final = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_BEGIN: Final = f"BEGIN; {_CLOCK}, pg_current_xact_id()::text"
_BEGIN_READ: Final = f"BEGIN READ ONLY; {_CLOCK}"

# A server may be set up to lose the last commits in a crash.
_SETTINGS: Final = (
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';"
    f"SET idle_in_transaction_session_timeout = {_IDLE_MILLISECONDS};"
    "SELECT current_schema()"
)

# The server empties this table when it crashes, and a replica does not have its row, which names the time between.
_EPOCH: Final = b"SELECT id::text FROM operations_epoch"
_MAKE_EPOCH: Final = b"""
    SELECT pg_advisory_xact_lock(hashtextextended('operations epoch', 0));
    CREATE UNLOGGED TABLE IF NOT EXISTS operations_epoch (one BOOLEAN PRIMARY KEY, id UUID NOT NULL);
    INSERT INTO operations_epoch VALUES (true, gen_random_uuid()) ON CONFLICT DO NOTHING
"""


class CommitUnknownError(TransportError):
    """The connection ended during a commit, and the server cannot be asked whether it has happened."""


@cache
def _converted(sql: str) -> bytes:
    return sql.replace("%", "%%").replace("?", "%s").encode()


class PostgresConnection:
    """A connection to the server, for one thread."""

    def __init__(self, database: "PostgresDatabase", *, writes: bool = True) -> None:
        self._database = database
        self._connection = database.open()
        self._epoch = _begin_epoch(self._connection) if writes else None
        self._is_listening = False
        self._now = 0
        self._transaction: str | None = None
        self._changed: dict[str, None] = {}

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended; what was not committed is undone."""
        return self._connection.closed

    def begin(self, *, writes: bool) -> None:
        """Begin a transaction, and read the clock of the server."""
        self._changed.clear()
        cursor = self._connection.execute(_BEGIN if writes else _BEGIN_READ)
        cursor.nextset()
        row = cast("tuple[Any, ...]", cursor.fetchone())
        self._now = row[0]
        self._transaction = row[1] if writes else None

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """Run a statement and return its rows."""
        return self._connection.execute(_converted(sql), values, binary=True).fetchall()

    def count(self, sql: str, *values: Any) -> int:
        """Run a statement and return the number of changed rows."""
        return self._connection.execute(_converted(sql), values).rowcount

    def now(self) -> int:
        """Return the time at which the transaction began."""
        return self._now

    def ticks(self) -> int:
        """Return the time as well: leases use the clock of the server."""
        return self._now

    def changed(self, run_id: str) -> None:
        """Announce that a run has changed, with the commit."""
        self._changed[run_id] = None

    def commit(self) -> None:
        """Commit. If the connection ends meanwhile, find out whether that has happened.

        Raises:
            CommitUnknownError: If that cannot be found out.
        """
        writes = self._transaction is not None
        if writes:
            self._database.committing()
        names = list(self._changed)
        if len(names) > _MOST_NAMES:
            names = [ALL]
        sql = "COMMIT"
        if names:
            # Ids are hexadecimal.
            sql = f"SELECT pg_notify('{self._channel}', '{' '.join(names)}'); COMMIT"
        try:
            self._connection.execute(sql.encode())
        except psycopg.Error as error:
            if self._transaction is None or not self._connection.closed:
                raise
            if not self._was_committed(self._transaction, error):
                raise
        if writes:
            self._database.committed()

    @property
    def _channel(self) -> str:
        name = sha256(self._database.schema.encode()).hexdigest()
        return f"operations_runs_{name[:16]}"

    def _was_committed(self, transaction: str, error: psycopg.Error) -> bool:
        """Ask the server, as soon as it can be reached, whether a transaction was committed."""
        ends = time.monotonic() + _OUTCOME_SECONDS
        while True:
            status = None
            with suppress(psycopg.Error, OSError), self._database.open() as connection:
                status = self._status(connection, transaction)
            if status in ("committed", "aborted"):
                logger.warning("a connection ended in a commit, which was %s", status)
                return bool(status == "committed")
            if status == "reused" or time.monotonic() > ends:
                raise CommitUnknownError("a commit may have happened or not") from error
            time.sleep(0.05)

    def _status(self, connection: "psycopg.Connection[Any]", transaction: str) -> str | None:
        """Return the status of a transaction; `reused` if another one may have got its number since a crash."""
        has_crashed = self._epoch is None or _epoch(connection) != self._epoch
        try:
            sql = "SELECT pg_xact_status(%s::text::xid8)"
            row = connection.execute(sql, (transaction,)).fetchone()
        except psycopg.errors.InvalidParameterValue:
            # The server has not yet begun a transaction with this number, so the one that had it is lost.
            return "aborted"
        status = None if row is None else row[0]
        return "reused" if has_crashed and status == "committed" else status

    def rollback(self) -> None:
        """Undo the transaction."""
        with suppress(psycopg.Error, OSError):
            if not self._connection.closed:
                self._connection.execute("ROLLBACK")

    def news(self, seconds: float) -> Sequence[str]:
        """Wait until another connection has announced changes."""
        if not self._is_listening:
            self._connection.execute(f"LISTEN {self._channel}".encode())
            self._is_listening = True
            return (ALL,)
        found: dict[str, None] = {}
        for message in self._connection.notifies(timeout=seconds, stop_after=1):
            found.update(dict.fromkeys(message.payload.split()))
        return (ALL,) if ALL in found else tuple(found)

    def close(self) -> None:
        """Close the connection."""
        with suppress(psycopg.Error, OSError):
            self._connection.close()


class PostgresDatabase:
    """The server of a journal.

    Args:
        url: `postgresql://USER@HOST/DATABASE`, or several hosts of which one is the primary; the tables are in the
            first schema of the search path.
        password: The password of the user.

    Raises:
        ValueError: If the URL is not valid.
    """

    is_remote = True
    blob = "BYTEA"
    lock = " FOR UPDATE"
    share = " FOR KEY SHARE"
    skip_locked = " FOR UPDATE SKIP LOCKED"
    boot = ""

    def __init__(self, url: str, password: str | None = None) -> None:
        try:
            options = conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            raise ValueError(f"the URL of the database is not valid: {error}") from None
        self._options: dict[str, Any] = {
            "application_name": "operations",
            "connect_timeout": _CONNECT_SECONDS,
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "tcp_user_timeout": 10_000,
            "target_session_attrs": "read-write",
            **options,
        }
        if password is not None:
            self._options["password"] = password
        hosts, ports = options.get("host", "localhost"), options.get("port", "5432")
        self.name = f"postgresql://{hosts}:{ports}/{options.get('dbname', '')}"
        self.schema = ""

    def connect(self, *, writes: bool = True) -> PostgresConnection:
        """Open a connection for the current thread."""
        return PostgresConnection(self, writes=writes)

    def open(self) -> "psycopg.Connection[Any]":
        """Open a connection of the driver."""
        connection = psycopg.connect(**self._options, autocommit=True)
        try:
            if connection.info.server_version < _OLDEST_SERVER:
                raise psycopg.NotSupportedError("PostgreSQL 13 or newer is needed")
            cursor = connection.execute(_SETTINGS.encode())
            while cursor.nextset():
                pass
            row = cursor.fetchone()
            self.schema = "" if row is None or row[0] is None else str(row[0])
        except BaseException:
            connection.close()
            raise
        return connection

    def lock_all(self, connection: Any, name: str) -> None:
        """Let no other process do something before the commit."""
        connection.rows(
            "SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", f"operations {name}"
        )

    def committing(self) -> None:
        """Do nothing. Called before each commit that writes; tests kill the process here."""

    def committed(self) -> None:
        """Do nothing. Called after each commit that writes; tests kill the process here."""


def _begin_epoch(connection: "psycopg.Connection[Any]") -> str | None:
    """Return the name of the time since the last crash of the server; None if this user cannot store it."""
    try:
        return _epoch(connection) or _made_epoch(connection)
    except psycopg.errors.InsufficientPrivilege:
        return None


def _made_epoch(connection: "psycopg.Connection[Any]") -> str | None:
    with connection.transaction():
        connection.execute(_MAKE_EPOCH)
    return _epoch(connection)


def _epoch(connection: "psycopg.Connection[Any]") -> str | None:
    try:
        row = connection.execute(_EPOCH).fetchone()
    except psycopg.errors.UndefinedTable:
        return None
    return None if row is None else str(row[0])
