"""The database under a journal: transactions, a clock, and news from other processes.

Rule 1: a connection belongs to one thread.
Rule 2: `commit` either commits or raises; if its outcome is not known, it finds it out before it returns.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

ALL: Final = "*"
"""News that cannot name the runs that changed."""


class Unreadable:
    """Stands for a value that was encrypted with a key that this process does not have."""


class Connection(Protocol):
    """A connection to the database. Its methods may raise any exception."""

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended, so that a transaction which was not being committed is undone."""
        ...

    def begin(self, *, writes: bool) -> None:
        """Begin a transaction."""
        ...

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """Run a statement with `?` for values, and return its rows as tuples."""
        ...

    def count(self, sql: str, *values: Any) -> int:
        """Run a statement, and return the number of rows that it changed."""
        ...

    def now(self) -> int:
        """Return the time of the database in milliseconds since the epoch; the same during a transaction."""
        ...

    def ticks(self) -> int:
        """Return milliseconds of a clock for leases, which all processes share."""
        ...

    def changed(self, run_id: str) -> None:
        """Announce that a run has changed, to other processes after the commit."""
        ...

    def commit(self) -> None:
        """Commit the transaction.

        Raises:
            TransportError: If it may have been committed or not, and that cannot be found out.
        """
        ...

    def rollback(self) -> None:
        """Undo the transaction. Never raises."""
        ...

    def news(self, seconds: float) -> Sequence[str]:
        """Wait at most this long until other processes have changed runs; return their ids, or `ALL`."""
        ...

    def close(self) -> None:
        """Close the connection. Never raises."""
        ...


class Database(Protocol):
    """Where a journal is kept."""

    name: str
    """Names the place in messages, without a password."""

    is_remote: bool
    """Whether it is on a server, which may be down for a while."""

    blob: str
    """The type of columns with bytes."""

    lock: str
    """The end of a `SELECT` that locks rows, so that they do not change before the commit."""

    share: str
    """The end of a `SELECT` that keeps rows from being deleted before the commit."""

    skip_locked: str
    """The end of a `SELECT` that locks rows and omits those that another process has locked."""

    boot: str
    """Names the time in which `ticks` count: a lease with another name is over."""

    def connect(self, *, writes: bool = True) -> Connection:
        """Open a connection for the current thread."""
        ...

    def lock_all(self, connection: Connection, name: str) -> None:
        """Let no other process do something with this name before the commit."""
        ...
