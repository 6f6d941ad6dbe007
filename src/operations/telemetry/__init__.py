"""Follow calls: log lines and audit records here, counters in `metrics`, OpenTelemetry in `otel`.

    registry.observe(Audit())

Rule 1: an audit record names caller, operation, outcome, duration and id, never arguments or results.
Rule 2: each option is described once, for Python and for config files.
"""

import logging
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Literal

import msgspec

from operations.observe import CallAbandoned, CallEvent, CallFinished
from operations.types import JSONObject, Seconds, options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """How log records are written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    """The lowest level that is written."""

    json: bool = False
    """Write one JSON object per line, for programs that collect logs."""

    timestamps: bool = False
    """Begin each line with the time, in UTC; lines of JSON always have one."""

    requests: bool = False
    """Write a line for every HTTP request, and for every call of a worker with its operation, duration and time in the
    queue (the logger `operations.access`), at every level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Records of every call: who, what, outcome, duration and id, never arguments or results."""

    enabled: bool = False
    """Keep records."""

    file: str | Path | None = None
    """Append them to this file, one JSON object per line; without it they go to the logger `operations.audit`. The file
    is opened again when it was moved, as log rotation does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Traces and metrics that are sent to an OpenTelemetry collector."""

    endpoint: str | None = None
    """The address of the collector for OTLP over HTTP, such as `http://127.0.0.1:4318`; without it nothing is sent."""

    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Sent with every export, such as an API key."""

    service_name: str = "operations"
    """The name of this service in traces and metrics."""

    traces: bool = True
    """Send a span for every call."""

    metrics: bool = True
    """Send the number and duration of calls."""

    interval: Seconds = 60
    """Seconds between two exports of metrics."""

    timeout: Seconds = 10
    """Seconds for one export."""

    def __post_init__(self) -> None:
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError("endpoint must begin with http:// or https://")


_audit_logger = logging.getLogger("operations.audit")


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A call that ended."""

    timestamp: int
    """Milliseconds since the epoch, when it ended."""

    request_id: str
    parent_request_id: str | None = None

    identity_id: str | None = None
    """The caller; None if it is not known."""

    authority: str | None = None
    """The operation on whose authority a nested call ran; None: its caller's own."""

    operation_id: str

    outcome: str
    """`ok`, `abandoned`, or the error's code."""

    milliseconds: float = 0.0


class _PrivateFile(WatchedFileHandler):
    """A log file that is created for its owner only, also after rotation."""

    def __init__(self, path: str | Path) -> None:
        _create(path)
        super().__init__(path, encoding="utf-8")

    def reopenIfNeeded(self) -> None:  # noqa: N802 - the name in logging
        _create(self.baseFilename)
        super().reopenIfNeeded()


def _create(path: str | Path) -> None:
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))


class AuditFile:
    """Appends audit records to a file that only its owner can read, one line of JSON for each.

    The file is opened again when it was moved or removed, as log rotation does.

    Args:
        path: The file; its folder must exist.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._handler = _PrivateFile(path)

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
    # As JSON, which escapes control characters, so that a record is always one line.
    _audit_logger.info("%s", msgspec.json.encode(record).decode())


_STRUCTURED = frozenset({"operations.access", "operations.audit"})
"""Loggers whose messages are JSON objects: their fields become fields of the line."""


class _Lines(logging.Formatter):
    def __init__(self, config: LogConfig) -> None:
        super().__init__("%(levelname)s %(message)s")
        self._config = config

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON, or as text."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        if not self._config.json:
            text = super().format(record)
            return f"{time} {text}" if self._config.timestamps else text
        line: JSONObject = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if record.name in _STRUCTURED:
            line |= msgspec.json.decode(record.getMessage())
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


@options_of(LogConfig)
@contextmanager
def logging_to_stderr(config: LogConfig) -> Generator[None]:
    """Write the records of all loggers to standard error for the duration of a `with` block.

    The options are the fields of `LogConfig`. Handlers that the root logger had are back after the block.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(config))
    root, ours = logging.getLogger(), logging.getLogger("operations")
    access = logging.getLogger("operations.access")
    before = root.handlers[:], root.level, ours.level, access.level
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    ours.setLevel(config.level.upper())
    # Below the level of an INFO record only if requests are wanted.
    access.setLevel(logging.INFO if config.requests else logging.CRITICAL)
    try:
        yield
    finally:
        root.handlers[:] = before[0]
        for logger, level in zip((root, ours, access), before[1:], strict=True):
            logger.setLevel(level)
