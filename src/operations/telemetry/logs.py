"""Write log records to standard error: as text or JSON, with or without the time."""

import logging
import sys
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, TypeAlias

import msgspec

from operations.telemetry.config import LogConfig
from operations.types import JSONObject, options_of

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


logger = logging.getLogger("operations.access")

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_App: TypeAlias = Callable[[_Message, _Receive, _Send], Awaitable[None]]

_MAX_PATH = 200


class AccessLog:
    """ASGI middleware that logs requests, where anybody listens to the logger."""

    def __init__(self, app: _App) -> None:
        self._app = app

    def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> Awaitable[None]:
        """Serve, and log how it went."""
        if scope["type"] == "http" and logger.isEnabledFor(logging.INFO):
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
                # 499: the client left before there was anything to say.
                "status": status or 499,
                "bytes": size,
                "ms": round((perf_counter() - began) * 1000, 3),
                "caller": identity.id if identity is not None else None,
                "requestId": scope.get("operations.request_id"),
                "client": client[0] if client else None,
            }
            logger.info("%s", msgspec.json.encode(record).decode())
