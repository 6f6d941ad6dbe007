"""A tamper-evident record of calls: JSON lines, each with an HMAC over its text and the HMAC of the previous line.

Rule 1: edits, deletions, reordering and repetition break the chain. Missing lines at the end do not, so a separate
        file, the head, stores the last number and HMAC.
Rule 2: a line contains a keyed hash of the input, never the arguments.
Rule 3: a file has one writer. After log rotation has moved the file, a new file continues the chain.
Rule 4: the line after lines that could not be written contains their number.
Rule 5: each line contains the name of its ledger, so that the ledger of another process or machine with the same key
        cannot take its place.
"""

import hmac
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from operations.base.clock import clock
from operations.base.errors import OperationsError
from operations.base.logs import LogThrottle
from operations.base.types import JSONObject
from operations.contract.events import (
    CallAdmitted,
    CallFinished,
    CallRejected,
    CallStarted,
    HandlerEnded,
    RunChanged,
)
from operations.contract.grant import secret_key
from operations.contract.options import Secret

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger("operations")

_TAIL = 64 * 1024
"""Bytes at the end of a file to search first for the last line."""

_MAC = b',"mac":"'
_End: TypeAlias = tuple[int, str]
"""The number and the HMAC of a line."""

_START: _End = (0, "")
"""The end of a ledger without lines."""


class LedgerError(OperationsError):
    """A ledger cannot be used, or was changed."""


class Ledger:
    """Writes a ledger: `registry.record(Ledger(path, key))`.

    Args:
        path: The file; its folder must exist. Only its owner can read it. It is opened with the first line.
        key: At least 32 random bytes.
        head: A file in another place that stores the last number and HMAC.
        strict: Reject calls whose lines cannot be written.
        sync: Wait until each line is on the disk, so that a power failure loses no line.
        name: The name of the ledger in each line; by default the name of the file.

    Raises:
        ValueError: If the key is too short.
    """

    wants = frozenset({"admitted", "rejected", "ended", "run.changed"})

    def __init__(
        self,
        path: str | Path,
        key: str | bytes,
        *,
        head: str | Path | None = None,
        strict: bool = False,
        sync: bool = False,
        name: str | None = None,
    ) -> None:
        self._path = Path(path)
        self._name = name or self._path.name
        self._key = secret_key(key, "a ledger")
        self._head = None if head is None else Path(head)
        self.strict, self._sync = strict, sync
        self._file, self._inode, self._process = -1, 0, 0
        self._end = _START
        self._unwritten = 0
        self._failures = LogThrottle()
        # A registry may be used by several threads.
        self._writing = Lock()

    def open(self) -> None:
        """Open the file now, to report problems before the first call.

        Raises:
            LedgerError: If the file cannot be written, has another writer, or does not end with `head`.
        """
        if self._file != -1:
            return
        try:
            self._open()
            last, head = self._last(), _START if self._head is None else _read_head(self._head)
            if last and head is None:
                # Lines may be missing at the end as well: a new head would hide that.
                raise ValueError(
                    f"its head {self._head} is missing. Restore the head; or keep the ledger in another place, where "
                    "`operations ledger verify` can check it, and start with a new one"
                )
            # Log rotation may have moved the file while no process was running.
            known = head or _START
            line = _read(self._key, last) if last else _Line(known, known)
            if line.name not in (None, self._name):
                raise ValueError(f"it is the ledger {line.name!r}, not {self._name!r}")
            if self._head is not None and known not in (line.before, line.end):
                raise ValueError(f"it ends at line {line.end[0]}, but its head is {known[0]}")
            # After a rotation without a head, only this process knows the end.
            self._end = max(self._end, line.end)
            self._write_head()
        except (OSError, ValueError) as error:
            self.close()
            raise LedgerError(f"cannot use the ledger {self._path}: {error}") from error

    def check(self) -> bool:
        """Return whether lines can be written. After a failure, try to write a line with the number of lost lines."""
        with self._writing:
            if self._unwritten:
                self._unwritten += 1
                try:
                    self.open()
                    self._write({"event": "resumed"})
                except (OSError, LedgerError):
                    # Nothing was lost; and the line may have been written, but not the head.
                    self._unwritten = max(0, self._unwritten - 1)
            return self._unwritten == 0

    def begin(self, call: CallStarted | CallAdmitted, digest: Callable[[], str] | None) -> None:
        """Record that the handler of a call begins.

        Raises:
            LedgerError: If the line cannot be written and the ledger is strict.
        """
        if isinstance(call, CallStarted) or digest is None:
            return
        # Keyed, because an unkeyed digest of a short input reveals it.
        text = hmac.digest(self._key, b"input" + digest().encode(), "sha256").hex()[:32]
        line = {"event": "begun", "operation": call.operation_id, "input": text}
        self._record({**line, "approval": call.approval, **_facts(call)})

    def end(self, call: CallFinished | HandlerEnded | CallRejected) -> None:
        """Record how a call ended, or that it was rejected before it began. Failures are logged."""
        if isinstance(call, CallFinished):
            return
        event = "rejected" if isinstance(call, CallRejected) else "ended"
        outcome = "ok" if call.code is None else call.code
        line = {"event": event, "operation": call.operation_id, "outcome": outcome}
        with suppress(LedgerError):
            self._record({**line, **_facts(call)})

    def note(self, event: object) -> None:
        """Record a change of a run.

        Raises:
            LedgerError: If the line cannot be written and the ledger is strict.
        """
        if isinstance(event, RunChanged):
            facts = {} if event.call is None else _facts(event.call)
            line = {"event": event.change, "operation": event.operation_id, "run": event.run}
            self._record({**line, **event.facts, **facts})

    def _record(self, line: JSONObject) -> None:
        try:
            with self._writing:
                self._unwritten += 1
                self.open()
                self._write({key: value for key, value in line.items() if value is not None})
        except (OSError, LedgerError) as error:
            message = "a line of the ledger %s cannot be written: %s"
            logger.log(self._failures.level(), message, self._path, error)
            if self.strict:
                raise LedgerError(f"cannot write the ledger {self._path}: {error}") from error

    def _write(self, line: JSONObject) -> None:
        inode = 0
        with suppress(FileNotFoundError):
            inode = self._path.stat().st_ino
        if inode != self._inode or os.getpid() != self._process:
            # Another process may have continued the chain meanwhile. A forked process shares the lock of its parent.
            self.close()
            self.open()
        number, previous = self._end
        lost = {"lost": self._unwritten - 1} if self._unwritten > 1 else {}
        whole = {
            "n": number + 1,
            "ledger": self._name,
            "time": clock(),
            **line,
            **lost,
            "previous": previous,
        }
        text, mac = _signed(self._key, msgspec.json.encode(whole))
        start = os.fstat(self._file).st_size
        try:
            if os.write(self._file, text) != len(text):
                raise OSError("the disk is full")
            if self._sync:
                os.fsync(self._file)
        except OSError:
            # A partial line would break the chain.
            with suppress(OSError):
                os.ftruncate(self._file, start)
            raise
        self._end, self._unwritten = (number + 1, mac), 0
        self._write_head()

    def _write_head(self) -> None:
        if self._head is not None:
            file = os.open(self._head, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(file, "{:020d} {}\n".format(*self._end).encode(), 0)
            finally:
                os.close(file)

    def _open(self) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise OSError("another process writes it: put {pid} into its name") from None
        self.close()
        self._file, self._inode, self._process = file, os.fstat(file).st_ino, os.getpid()

    def _last(self) -> bytes:
        """Return the last line; remove an incomplete line that a crash left."""
        size, length = os.fstat(self._file).st_size, _TAIL
        tail = os.pread(self._file, length, max(0, size - length))
        while tail.count(b"\n") < 2 and length < size:
            length *= 2
            tail = os.pread(self._file, length, max(0, size - length))
        whole = tail[: tail.rfind(b"\n") + 1]
        if len(whole) < len(tail):
            logger.warning("%s ends in a partial line, which is removed", self._path)
            os.ftruncate(self._file, size - len(tail) + len(whole))
        return whole[whole.rfind(b"\n", 0, -1) + 1 :]

    def close(self) -> None:
        """Close the file."""
        if self._file != -1:
            os.close(self._file)
            self._file = -1


def _facts(call: CallAdmitted | CallRejected | HandlerEnded) -> JSONObject:
    """Return what a line tells of a caller."""
    facts: JSONObject = {
        "identity": call.identity_id,
        "issuer": call.issuer,
        "acting": call.acting or None,
        "request": call.request_id,
        "authority": call.authority,
    }
    if call.script is not None:
        # The calls of a script, as a tree.
        facts |= {"parent": call.parent_request_id, "script": call.script}
    # The line about a run has its id already.
    return facts if call.run is None else {**facts, "run": call.run, "step": call.step}


def _signed(key: bytes, body: bytes) -> tuple[bytes, str]:
    """Return the line for a JSON text, with its HMAC added to the object, and the HMAC."""
    mac = hmac.digest(key, body, "sha256").hex()
    return body[:-1] + _MAC + mac.encode() + b'"}\n', mac


class _Line(NamedTuple):
    """A line of a ledger."""

    before: _End
    """The number and HMAC of the previous line."""

    end: _End
    lost: int = 0
    """The number of lines between the two that could not be written."""

    name: str | None = None
    """The name of its ledger; None in a line of an earlier version."""


def _read(key: bytes, text: bytes) -> _Line:
    """Read a line.

    Raises:
        ValueError: If the line was not signed with the key.
    """
    body = text.rpartition(_MAC)[0] + b"}"
    expected, mac = _signed(key, body)
    if not hmac.compare_digest(expected, text):
        raise ValueError("not a line of this ledger, or changed")
    line: JSONObject = msgspec.json.decode(body)
    before = line["n"] - 1, line["previous"]
    return _Line(before, (line["n"], mac), line.get("lost", 0), line.get("ledger"))


def _read_head(path: Path) -> _End | None:
    """Return the last number and HMAC; None if the file is missing, or empty because the disk was full.

    Raises:
        ValueError: If the file is damaged.
    """
    text = path.read_text(encoding="ascii").strip() if path.exists() else ""
    if not text:
        return None
    number, _, mac = text.partition(" ")
    if not number.isdecimal():
        raise ValueError(f"the head {path} is damaged")
    return int(number), mac


# ------------------------------------------------------------ the kind of sink

_PROCESS = "{pid}"
"""Replaced by the process id in the file names of a ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A tamper-evident record of calls: `operations ledger verify` checks it.

    Attributes:
        file: The record, relative to this file. Each process needs its own file: `{pid}` is replaced by the process id.
        key: At least 32 random bytes, which sign the lines.
        head: A file in another place for the last number and signature, so that missing lines at the end are detected.
        strict: Reject calls whose lines cannot be written.
        sync: Wait until each line is on the disk, so that a power failure loses no line. Calls take longer.
    """

    file: str
    key: Secret
    head: str | None = None
    strict: bool = False
    sync: bool = False

    def paths(self, resolve: Callable[[str], Path], process: str) -> tuple[Path, Path | None]:
        """Return the file and the head of one process."""
        head = None if self.head is None else resolve(self.head.replace(_PROCESS, process))
        return resolve(self.file.replace(_PROCESS, process)), head

    def all_paths(self, resolve: Callable[[str], Path]) -> list[tuple[Path, Path | None]]:
        """Return the files and the heads of all processes that have one."""
        # A head without its file shows that the file was removed.
        found = [_processes(resolve(each)) for each in (self.file, self.head) if each]
        processes = sorted(set[str]().union(*found)) if _PROCESS in self.file else [""]
        return [self.paths(resolve, each) for each in processes]


def _processes(path: Path) -> set[str]:
    """Return the ids of the processes that have such a file."""
    start, is_many, end = path.name.partition(_PROCESS)
    names = (each.name for each in path.parent.glob(f"{start}*{end}")) if is_many else ()
    return {each.removeprefix(start).removesuffix(end) for each in names}


class LedgerPlace(Protocol):
    """What the ledger uses of the file."""

    def resolve(self, path: str) -> Path:
        """Return a path of the file as an absolute path."""
        ...

    def secret(self, secret: Secret) -> str:
        """Return the value of a secret."""
        ...

    def error(self, message: str, key: str = "") -> ValueError:
        """Return an error about a value of the table."""
        ...


class LedgerKind:
    """The ledger, as a kind of sink."""

    about = "A tamper-evident record of calls."
    entry = LedgerEntry
    is_default = False

    def open(self, entry: LedgerEntry, place: LedgerPlace) -> Ledger:
        """Return the ledger; its file is opened later."""
        path, head = entry.paths(place.resolve, str(os.getpid()))
        key, strict, sync = place.secret(entry.key), entry.strict, entry.sync
        try:
            return Ledger(path, key, head=head, strict=strict, sync=sync)
        except ValueError as error:
            raise place.error(f"cannot be used: {error}", "key") from error


KIND = LedgerKind()


# ------------------------------------------------------------ checking a ledger


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of checking a ledger."""

    lines: int
    first: int
    last: int

    tail_checked: bool
    """Whether the end was compared with a head."""

    problem: str | None = None
    """The first error in the chain; None if it is intact."""

    lost: int = 0
    """The number of lines that could not be written, for example because the disk was full."""


def verify(
    paths: Iterable[Path], key: str | bytes, head: Path | None = None, name: str | None = None
) -> Verified:
    """Check the chain of a ledger, whose files are given from the oldest to the newest.

    Args:
        paths: The files.
        key: The key.
        head: The file with the last number and HMAC.
        name: The name that its lines must have; by default any, but all the same.

    Raises:
        LedgerError: If a file or the head cannot be read.
    """
    secret = secret_key(key, "a ledger")
    stored: _End | None = _START
    first, last = 0, _Line(_START, _START)
    count = lost = 0
    place, problem = "the head", None
    try:
        if head is not None:
            stored = _read_head(head)
        for place, text in _lines(paths):  # noqa: B007 - a problem names it
            line = _read(secret, text)
            if count and line.before != last.end:
                raise ValueError(f"number {line.end[0]} follows {last.end[0]}")
            # Lines of an earlier version have no name; none may follow one with a name.
            is_early = line.name is last.name is None
            if not is_early and line.name != (name or last.name or line.name):
                raise ValueError(f"a line of the ledger {line.name!r}")
            first, last = first or line.end[0], line
            count, lost = count + 1, lost + line.lost
    except ValueError as error:
        problem = f"{place}: {error}"
    except OSError as error:
        # A process that recorded nothing leaves a head, and its file may be removed.
        is_used = stored is not None and stored[0] > 0
        if head is None or is_used or not isinstance(error, FileNotFoundError):
            raise LedgerError(f"cannot read the ledger: {error}") from error
    if stored is None and not count:
        stored = _START
    # One line may follow the head, if the process ended before it wrote the head.
    if problem is None and head is not None and stored not in (last.before, last.end):
        number = 0 if stored is None else stored[0]
        problem = f"the head is number {number}: lines at the end are missing, or the head is"
    return Verified(count, first, last.end[0], head is not None, problem, lost)


def _lines(paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield f"{path.name}, line {number}", line
