"""The ways to reach the caller of an operation while its call runs."""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from operations.base.types import JSONObject

NOTHING: Mapping[str, Any] = MappingProxyType({})


class CallerChannel(msgspec.Struct, frozen=True, kw_only=True):
    """The ways to reach the caller while its call runs. A callable is None if the caller cannot be reached that way."""

    progress: Callable[[float, float | None, str | None], Awaitable[None]] | None = None
    """`(progress, total, message)`."""

    log: Callable[[str, Any, str | None], Awaitable[None]] | None = None
    """`(level, data, logger)`, with the name of the logger if it has one."""

    elicit: Callable[[str, JSONObject], Awaitable[JSONObject]] | None = None
    """`(message, schema)` -> the person's answer: `{"action": ..., "content": ...}`."""

    sample: Callable[[JSONObject], Awaitable[JSONObject]] | None = None
    """`(request)` -> the answer of the caller's model."""

    deadline: float | None = None
    """The time at which the entry point itself ends the call, in milliseconds since the epoch."""

    ends_at: float | None = None
    """The same time by `time.monotonic`: the wall clock may be set while the call runs."""

    queued: float | None = None
    """Seconds that the request waited before it began; None if it did not wait in a queue."""

    decoded: list[Any] | None = None
    """The input as the entry point decoded it from JSON text, so that it needs no conversion.

    The first call removes it from the list, because a handler may change its input and pass it on.
    """

    serves_anonymous: Callable[[], bool] | None = None
    """Returns whether the entry point still serves callers without identity; None for a call from this process."""

    session: str = ""
    """The key of the session or connection that the call came through, which distinguishes callers without identity."""

    meta: Mapping[str, Any] = NOTHING
    """The `_meta` of the caller's MCP request, for the server of an imported operation."""

    log_level: str | None = None
    """The lowest level of log messages that the caller requested; None if it requested none."""


CLOSED = CallerChannel()
"""The channel of a call from code in this process, which receives only the result."""
