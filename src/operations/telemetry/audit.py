"""An audit record for every call: who, what, outcome, duration, id. Never arguments or results.

registry.observe(Audit())
"""

import logging
import os
from collections.abc import Callable
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path

import msgspec

from operations.observe import CallAbandoned, CallEvent, CallFinished

logger = logging.getLogger("operations.audit")


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What is known about a call that ended."""

    timestamp: int
    """Milliseconds since the epoch, when it ended."""

    request_id: str
    parent_request_id: str | None = None

    identity_id: str | None = None
    """Who called; None for nobody known."""

    authority: str | None = None
    """The operation on whose authority a nested call ran; None: its caller's own."""

    operation_id: str

    outcome: str
    """`ok`, `abandoned`, or the error's code."""

    milliseconds: float = 0.0


class _PrivateFile(WatchedFileHandler):
    def _open(self) -> TextIOWrapper:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=private)  # type: ignore[return-value]


class AuditFile:
    """Appends audit records to a file that only its owner can read, one line of JSON for each.

    The file is opened again when it was moved or removed, as log rotation does.

    Args:
        path: The file; its folder must exist.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._handler = _PrivateFile(path, encoding="utf-8")

    def __call__(self, record: AuditRecord) -> None:
        """Append a record."""
        line = msgspec.json.encode(record).decode()
        self._handler.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        """Close the file."""
        self._handler.close()


class Audit:
    """Observes a registry's calls and keeps a record of each.

    Args:
        sink: Takes each record, quickly; by default the logger `operations.audit`, one line of JSON for each.
    """

    def __init__(self, sink: Callable[[AuditRecord], None] | None = None) -> None:
        self._sink = sink or _log

    def __call__(self, event: CallEvent, /) -> None:
        """Take notice of an event."""
        if isinstance(event, CallFinished):
            self._sink(
                AuditRecord(
                    timestamp=event.timestamp,
                    request_id=event.request_id,
                    parent_request_id=event.parent_request_id,
                    identity_id=event.identity_id,
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
    # As JSON, in which control characters are escaped: a record is one line whatever an id holds.
    logger.info("%s", msgspec.json.encode(record).decode())
