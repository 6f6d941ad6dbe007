"""Audit lines: who called what, when, and how it ended."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from operations.base.files import LineFile
from operations.contract.events import CallAbandoned, CallFinished
from operations.recorder.kinds import SinkPlace
from operations.recorder.recorder import Begin, Digest, End, Note


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Records of every call: caller, operation, outcome, duration and id, never arguments or results.

    Attributes:
        enabled: Set to false to write no records.
        file: Append records to this file, relative to the config, one JSON object per line; by default they go to the
            logger `operations.audit`. The file is opened again after log rotation has moved it.
    """

    enabled: bool = True
    file: str | None = None


_audit_logger = logging.getLogger("operations.audit")


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A call that ended."""

    timestamp: int
    """When the call ended, in milliseconds since the epoch."""

    request_id: str
    parent_request_id: str | None = None

    identity_id: str | None = None
    """The caller; None if it is unknown."""

    issuer: str | None = None
    """The issuer of the token that named the caller."""

    acting: tuple[str, ...] = ()
    """The parties that act for the caller, such as the holder of a grant, in the order of delegation."""

    authority: str | None = None
    """The operation on whose authority a nested call ran; None if it ran as the caller."""

    operation_id: str

    outcome: str
    """`ok`, `abandoned`, or the error's code."""

    milliseconds: float = 0.0


class AuditFile:
    """Appends audit records to a file that only its owner can read, one line of JSON for each.

    The file is opened again after log rotation has moved or removed it.

    Args:
        path: The file; its folder must exist.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = LineFile(path, "audit records")

    def __call__(self, record: AuditRecord) -> None:
        """Append a record; if that fails, for example because the disk is full, log the reason and continue."""
        self._file.write(msgspec.json.encode(record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Audit:
    """Writes a record of each call that ended: `registry.record(Audit())`.

    Args:
        write: Receives each record; it must be quick. By default the logger `operations.audit`, one JSON line per
            record. If it has a method `close`, that is called when the audit is closed.
    """

    wants, strict = frozenset({"finished", "abandoned"}), False

    def __init__(self, write: Callable[[AuditRecord], None] | None = None) -> None:
        self._write = write or _log

    def open(self) -> None:
        """Do nothing: a file is open already."""

    def begin(self, call: Begin, digest: Digest | None) -> None:
        """Do nothing: a call is recorded at its end."""

    def end(self, call: End) -> None:
        """Record a call."""
        if isinstance(call, CallFinished):
            self._write(
                AuditRecord(
                    timestamp=call.timestamp,
                    request_id=call.request_id,
                    parent_request_id=call.parent_request_id,
                    identity_id=call.identity_id,
                    issuer=call.issuer,
                    acting=call.acting,
                    authority=call.authority,
                    operation_id=call.operation_id,
                    outcome=call.code or "ok",
                    milliseconds=round(call.duration * 1000, 3),
                )
            )

    def note(self, event: Note) -> None:
        """Record a call whose handler still runs."""
        if isinstance(event, CallAbandoned):
            self._write(
                AuditRecord(
                    timestamp=event.timestamp,
                    request_id=event.request_id,
                    operation_id=event.operation_id,
                    outcome="abandoned",
                )
            )

    def check(self) -> bool:
        """Return True: a record that cannot be written is logged."""
        return True

    def close(self) -> None:
        """Close the file, if there is one."""
        getattr(self._write, "close", _nothing)()


def _nothing() -> None:
    """Do nothing: a logger is not closed."""


def _log(record: AuditRecord) -> None:
    # JSON escapes control characters, so that a record is always one line.
    _audit_logger.info("%s", msgspec.json.encode(record).decode())


class AuditKind:
    """Audit lines, as a kind of sink."""

    about = "Records of every call."
    entry = AuditConfig
    is_default = False

    def open(self, entry: AuditConfig, place: SinkPlace) -> Audit | None:
        """Open the file."""
        if not entry.enabled:
            return None
        if entry.file is None:
            return Audit()
        try:
            return Audit(AuditFile(place.resolve(entry.file)))
        except OSError as error:
            raise place.error(f"cannot be used: {error}", "file") from error


KIND = AuditKind()
