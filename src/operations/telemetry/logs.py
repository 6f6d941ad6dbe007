"""Write log records to standard error: as text or JSON, with or without the time."""

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime

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
