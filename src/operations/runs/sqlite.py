"""A journal in a SQLite file, for one machine: WAL, and each commit is on the disk before it returns.

Rule 1: only the owner can read the file.
Rule 2: a file on a network file system is refused: its locks and shared memory do not work between machines.
Rule 3: leases are measured by the clock since boot, which all processes share, and which setting the time leaves alone.
"""

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from operations.runs.database import ALL, Connection

_BUSY_SECONDS: Final = 10.0
"""How long a transaction waits for those of other processes."""

_POLL_SECONDS: Final = 0.05
"""Seconds between two looks for changes by other processes."""

_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "glusterfs", "afs"}
)
"""File systems on which several machines can open one file."""


class SQLiteConnection:
    """A connection to the file, for one thread."""

    def __init__(self, database: "SQLiteDatabase", *, writes: bool) -> None:
        self._database = database
        self._connection = sqlite3.connect(
            database.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        run = self._connection.execute
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        run("PRAGMA foreign_keys=OFF")
        if not writes:
            run("PRAGMA query_only=ON")
        self._version: Any = None
        self._writes = False
        self._now = 0

    is_lost = False

    def begin(self, *, writes: bool) -> None:
        """Begin a transaction; one that writes waits until no other does."""
        self._writes = writes
        self._connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        self._now = self._database.now()

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """Run a statement and return its rows."""
        return self._connection.execute(sql, values).fetchall()

    def count(self, sql: str, *values: Any) -> int:
        """Run a statement and return the number of changed rows."""
        return self._connection.execute(sql, values).rowcount

    def now(self) -> int:
        """Return the time of the transaction."""
        return self._now

    def ticks(self) -> int:
        """Return milliseconds since the machine was started."""
        return int(time.clock_gettime(_CLOCK) * 1000)

    def changed(self, run_id: str) -> None:
        """Do nothing: other processes see that the file has changed."""

    def commit(self) -> None:
        """Commit, and wait until the disk has the data."""
        if self._writes:
            self._database.committing()
        self._connection.execute("COMMIT")
        if self._writes:
            self._database.committed()

    def rollback(self) -> None:
        """Undo the transaction."""
        with suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def news(self, seconds: float) -> Sequence[str]:
        """Wait until another connection has changed the file."""
        ends = time.monotonic() + seconds
        while True:
            version = self._connection.execute("PRAGMA data_version").fetchone()
            if version != self._version:
                self._version = version
                return (ALL,)
            left = ends - time.monotonic()
            if left <= 0:
                return ()
            time.sleep(min(left, _POLL_SECONDS))

    def close(self) -> None:
        """Close the connection."""
        with suppress(sqlite3.Error):
            self._connection.close()


_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SQLiteDatabase:
    """The file of a journal.

    Args:
        path: The file; its folder must exist.

    Raises:
        ValueError: If the file is on a network file system.
    """

    is_remote = False
    blob = "BLOB"
    lock = share = skip_locked = ""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.name = f"sqlite:{path}"
        self.boot = _boot_id()
        kind = _file_system(self.path.parent)
        if kind in _NETWORK:
            raise ValueError(
                f"{path} is on a network file system ({kind}), where SQLite loses data: "
                "use a local disk, or PostgreSQL"
            )

    def connect(self, *, writes: bool = True) -> Connection:
        """Open the file; create it if it is missing."""
        self.path.touch(mode=0o600)
        return SQLiteConnection(self, writes=writes)

    def lock_all(self, connection: Connection, name: str) -> None:
        """Do nothing: only one transaction writes at a time."""

    def now(self) -> int:
        """Return the real time in milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def committing(self) -> None:
        """Do nothing. Called before each commit that writes; tests kill the process here."""

    def committed(self) -> None:
        """Do nothing. Called after each commit that writes; tests kill the process here."""


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _file_system(folder: Path) -> str:
    """Return the kind of file system of a folder; empty if it is not known."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
        real = os.path.realpath(folder)
    except OSError:
        return ""
    best, kind = "", ""
    for line in mounts:
        _, place, name, *_ = line.split(" ")
        place = place.replace("\\040", " ")
        if os.path.commonpath([real, place]) == place and len(place) >= len(best):
            best, kind = place, name
    return kind
