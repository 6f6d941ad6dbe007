"""A tamper-evident record of calls: JSON lines, each with an HMAC over itself and the line before.

Rule 1: edits, deletions, reordering and repetition break the chain. A missing tail does not, so `head` keeps the last
        number and HMAC elsewhere.
Rule 2: no arguments: only a keyed hash of the input.
Rule 3: one file has one writer. A file that was moved away by log rotation is followed by a new one, which goes on
        with the chain.
"""

import hmac
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from operations._grants import clock, secret_key
from operations._json import canonical
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode, OperationsError
from operations.types import JSONObject

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger("operations")

_TAIL = 64 * 1024
"""Bytes at the end of a file in which the last line is."""


class LedgerError(OperationsError):
    """A ledger cannot be used, or was changed."""


class Ledger:
    """Writes a ledger.

    Args:
        path: The file; its folder must exist. Only its owner can read it. It is opened for the first line.
        key: At least 32 random bytes.
        head: A file elsewhere, for the last number and HMAC.
        strict: Reject calls whose lines cannot be written.
        sync: Wait until each line is on the disk, so that a power failure loses none.

    Raises:
        ValueError: If the key is too short.
    """

    def __init__(
        self,
        path: str | Path,
        key: str | bytes,
        *,
        head: str | Path | None = None,
        strict: bool = False,
        sync: bool = False,
    ) -> None:
        self._path = Path(path)
        self._key = secret_key(key, "a ledger")
        self._head = None if head is None else Path(head)
        self._strict, self._sync = strict, sync
        self._file, self._inode = -1, 0
        self._number, self._mac = 0, ""

    def open(self) -> None:
        """Open the file now, so that problems are found before the first call.

        Raises:
            LedgerError: If the file cannot be written, has another writer, or does not end with `head`.
        """
        if self._file != -1:
            return
        try:
            self._open()
            last = self._last()
        except (OSError, ValueError) as error:
            self.close()
            raise LedgerError(f"cannot use the ledger {self._path}: {error}") from error
        self._number, self._mac = (0, "") if last is None else (last["n"], last["mac"])
        head = (0, "") if self._head is None else _read_head(self._head)
        if last is None:
            # Log rotation may have moved the whole file while nothing was running.
            self._number, self._mac = head
        elif head[0] and head != (self._number, self._mac) and not self._follows(last, head):
            self.close()
            ends = f"ends at line {last['n']}, but its head is {head[0]}"
            raise LedgerError(f"{self._path} {ends}")
        try:
            self._write_head()
        except OSError as error:
            self.close()
            raise LedgerError(f"cannot write the head {self._head}: {error}") from error

    def _follows(self, last: JSONObject, head: tuple[int, str]) -> bool:
        """Return whether a line was written, but not its head: the process ended in between."""
        line = {key: value for key, value in last.items() if key != "mac"}
        return bool(last["n"] == head[0] + 1) and _mac(self._key, head[1], line) == last["mac"]

    def begin(
        self, operation_id: str, value: Any, context: OperationContext, approval: str | None
    ) -> None:
        """Record that a call begins.

        Raises:
            CallError: `UNAVAILABLE` if the line cannot be written and the ledger is strict.
        """
        try:
            text = canonical(value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            text = b"not JSON"
        digest = hmac.digest(self._key, b"input" + text, "sha256").hex()[:32]
        line: JSONObject = {"event": "begun", "operation": operation_id, "input": digest}
        if approval is not None:
            line["approval"] = approval
        self._record(line, context)

    def end(
        self, operation_id: str, context: OperationContext, outcome: str, *, rejected: bool = False
    ) -> None:
        """Record how a call ended, or that it was rejected before it began. Failures are logged."""
        event = "rejected" if rejected else "ended"
        line: JSONObject = {"event": event, "operation": operation_id, "outcome": outcome}
        with suppress(CallError):
            self._record(line, context)

    def _record(self, line: JSONObject, context: OperationContext) -> None:
        identity = context.identity
        line["request"] = context.request_id
        if identity is not None:
            line["identity"] = identity.id
            if identity.acting:
                line["acting"] = list(identity.acting)
        if context.authority is not None:
            line["authority"] = context.authority[0]
        try:
            self.open()
            self._write(line)
        except (OSError, LedgerError) as error:
            logger.error("a line of the ledger cannot be written: %s", error)  # noqa: TRY400
            if self._strict:
                raise CallError(
                    ErrorCode.UNAVAILABLE, "This call cannot be recorded, so it is rejected"
                ) from error

    def _write(self, line: JSONObject) -> None:
        number = self._number + 1
        whole: JSONObject = {"n": number, "time": clock(), **line}
        try:
            moved = self._path.stat().st_ino != self._inode
        except FileNotFoundError:
            moved = True
        if moved:
            self._open()
            whole["previous"] = self._mac
        mac = _mac(self._key, self._mac, whole)
        text = msgspec.json.encode({**whole, "mac": mac}) + b"\n"
        start = os.fstat(self._file).st_size
        try:
            if os.write(self._file, text) != len(text):
                raise OSError("the disk is full")
            if self._sync:
                os.fsync(self._file)
        except OSError:
            # Half a line would end the chain.
            with suppress(OSError):
                os.ftruncate(self._file, start)
            raise
        self._number, self._mac = number, mac
        self._write_head()

    def _write_head(self) -> None:
        if self._head is not None:
            file = os.open(self._head, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(file, f"{self._number:020d} {self._mac}\n".encode(), 0)
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
        self._file, self._inode = file, os.fstat(file).st_ino

    def _last(self) -> JSONObject | None:
        """Return the last line; remove an incomplete line that a crash left."""
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, _TAIL, max(0, size - _TAIL))
        whole = tail[: tail.rfind(b"\n") + 1]
        if len(whole) < len(tail):
            logger.warning("%s ends in half a line, which is removed", self._path)
            os.ftruncate(self._file, size - len(tail) + len(whole))
        return msgspec.json.decode(whole.splitlines()[-1]) if whole else None

    def close(self) -> None:
        """Close the file."""
        if self._file != -1:
            os.close(self._file)
            self._file = -1


def _mac(key: bytes, previous: str, line: JSONObject) -> str:
    """Return the HMAC of a line, which follows on another."""
    return hmac.digest(key, previous.encode() + canonical(line), "sha256").hex()


def _read_head(path: Path) -> tuple[int, str]:
    """Return the last number and HMAC; 0 if there is none yet."""
    try:
        number, _, mac = path.read_text(encoding="ascii").strip().partition(" ")
        return int(number), mac
    except FileNotFoundError:
        return 0, ""
    except (OSError, ValueError) as error:
        raise LedgerError(f"cannot read the head {path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of checking a ledger."""

    lines: int
    first: int
    last: int

    tail_checked: bool
    """Whether the end was compared with a head."""

    problem: str | None = None
    """Where the chain breaks first; None if it holds."""


def verify(paths: Iterable[Path], key: str | bytes, head: Path | None = None) -> Verified:
    """Check the chain of a ledger, whose files are given from the oldest to the newest.

    Raises:
        LedgerError: If a file or the head cannot be read.
    """
    secret, count, first, number, mac = secret_key(key, "a ledger"), 0, 0, 0, ""
    known, before = (0, "") if head is None else _read_head(head), (0, "")

    def result(problem: str | None = None) -> Verified:
        return Verified(count, first, number, head is not None, problem)

    for place, text in _lines(paths):
        try:
            line: JSONObject = msgspec.json.decode(text)
            given, found = str(line.pop("mac")), int(line["n"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            return result(f"{place}: not a line of a ledger")
        if count == 0:
            first, number, mac = found, found - 1, str(line.get("previous", ""))
        if found != number + 1:
            return result(f"{place}: number {found} follows {number}")
        if not hmac.compare_digest(_mac(secret, mac, line), given):
            return result(f"{place}: number {found} was changed, or the line before it")
        before, count, number, mac = (number, mac), count + 1, found, given
    # One line may follow the head: the process ended before it wrote the head.
    is_end = known in (before, (number, mac)) and (known[0] > 0 or count == 0)
    if head is not None and not is_end:
        return result(
            f"the head is number {known[0]}: lines at the end are missing, or the head is"
        )
    return result()


def _lines(paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    yield f"{path.name}, line {number}", line
        except OSError as error:
            raise LedgerError(f"cannot read {path}: {error}") from error
