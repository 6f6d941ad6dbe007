"""Audit lines: who called what, when, and how it ended."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from operations.base.files import LineFile
from operations.contract.events import CallAbandoned, CallEvent, CallFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Records of every call: caller, operation, outcome, duration and id, never arguments or results."""

    enabled: bool | None = None
    """Write records; by default if `file` is set."""

    file: str | Path | None = None
    """Append records to this file, one JSON object per line; by default they go to the logger `operations.audit`. The
    file is opened again after log rotation has moved it."""


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
    """Observes the calls of a registry and writes a record of each.

    Args:
        sink: Receives each record; it must be quick. By default the logger `operations.audit`, one JSON line per
            record.
    """

    def __init__(self, sink: Callable[[AuditRecord], None] | None = None) -> None:
        self._sink = sink or _log

    def __call__(self, event: CallEvent, /) -> None:
        """Process an event."""
        if isinstance(event, CallFinished):
            self._sink(
                AuditRecord(
                    timestamp=event.timestamp,
                    request_id=event.request_id,
                    parent_request_id=event.parent_request_id,
                    identity_id=event.identity_id,
                    issuer=event.issuer,
                    acting=event.acting,
                    authority=event.authority,
                    operation_id=event.operation_id,
                    outcome=event.code or "ok",
                    milliseconds=round(event.duration * 1000, 3),
                )
            )
        elif isinstance(event, CallAbandoned):
            self._sink(
                AuditRecord(
                    timestamp=event.timestamp,
                    request_id=event.request_id,
                    operation_id=event.operation_id,
                    outcome="abandoned",
                )
            )


def _log(record: AuditRecord) -> None:
    # JSON escapes control characters, so that a record is always one line.
    _audit_logger.info("%s", msgspec.json.encode(record).decode())
