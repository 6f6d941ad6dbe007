"""Write log lines to standard error, access log lines, and an audit record for every call.

registry.observe(Audit())

Rule 1: an audit record names caller, operation, outcome, duration and id, never arguments or results.
"""

import logging
import os
import sys
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import msgspec

from operations.observe import CallAbandoned, CallEvent, CallFinished
from operations.telemetry import LogConfig
from operations.types import JSONObject, options_of

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


_access_logger = logging.getLogger("operations.access")

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_App: TypeAlias = Callable[[_Message, _Receive, _Send], Awaitable[None]]

_MAX_PATH = 200


class AccessLog:
    """ASGI middleware that logs requests if the logger is enabled."""

    def __init__(self, app: _App) -> None:
        self._app = app

    def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> Awaitable[None]:
        """Serve, and log how it went."""
        if scope["type"] == "http" and _access_logger.isEnabledFor(logging.INFO):
            return self._logged(scope, receive, send)
        return self._app(scope, receive, send)

    async def _logged(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        began = perf_counter()
        status = size = 0

        async def counted(message: _Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            identity = scope.get("operations.identity")
            client = scope.get("client")
            record = {
                "method": scope["method"],
                "path": scope["path"][:_MAX_PATH],
                # 499: the client disconnected before the response.
                "status": status or 499,
                "bytes": size,
                "ms": round((perf_counter() - began) * 1000, 3),
                "caller": identity.id if identity is not None else None,
                "requestId": scope.get("operations.request_id"),
                "client": client[0] if client else None,
            }
            _access_logger.info("%s", msgspec.json.encode(record).decode())
