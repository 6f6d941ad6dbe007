"""The format of log lines."""

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import msgspec

from operations.base.text import visible, visible_json
from operations.base.types import JSONObject, options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """How log records are written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    """The lowest level that is written."""

    json: bool = False
    """Write one JSON object per line, for programs that collect logs."""

    timestamps: bool = False
    """Begin each line with the time in UTC; JSON lines always contain it."""

    requests: bool = False
    """Write a line for every HTTP request, and for every call of a worker with its operation, duration and time in the
    queue (the logger `operations.access`), at every level."""


_STRUCTURED = frozenset({"operations.access", "operations.audit"})
"""Loggers whose messages are JSON objects: their fields become fields of the line."""


class LogFormatter(logging.Formatter):
    """Writes records as `LogConfig` requires."""

    def __init__(self, config: LogConfig) -> None:
        super().__init__("%(levelname)s %(message)s")
        self._config = config

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON, or as text."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        if not self._config.json:
            # Also the text of an exception, which is not escaped where it is logged.
            text = visible(super().format(record))
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
        return visible_json(msgspec.json.encode(line).decode())


@options_of(LogConfig)
@contextmanager
def logging_to_stderr(config: LogConfig) -> Generator[None]:
    """Write the records of all loggers to standard error for the duration of a `with` block.

    The options are the fields of `LogConfig`. The previous handlers of the root logger are restored after the block.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(config))
    root, level = logging.getLogger(), config.level.upper()
    levels = {
        "": level,
        "operations": level,
        # Request lines are INFO records: accept that level only if requests are logged.
        "operations.access": "INFO" if config.requests else "CRITICAL",
    }
    # Their INFO records contain the ids of sessions, and a line with the address for every request and WebSocket.
    for name in ("mcp", "httpx2", "uvicorn.error"):
        levels[name] = "WARNING" if level == "INFO" else level
    handlers, before = root.handlers[:], {name: logging.getLogger(name).level for name in levels}
    root.handlers[:] = [handler]
    for name, value in levels.items():
        logging.getLogger(name).setLevel(value)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for name, number in before.items():
            logging.getLogger(name).setLevel(number)
