"""What can be seen of calls while they happen: the call graph, audit and telemetry all read these events.

Rule 1: an observer is told, never asked. It cannot change a call, and one that raises is logged and passed over.
Rule 2: no event carries arguments or results.
"""

import logging
from collections.abc import Iterable
from time import time_ns
from typing import Literal, Protocol, TypeAlias

import msgspec

logger = logging.getLogger("operations")


def now() -> int:
    """Milliseconds since the epoch."""
    return time_ns() // 1_000_000


class _Event(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="event"):
    """What every call event says."""

    request_id: str
    operation_id: str

    timestamp: int
    """Milliseconds since the epoch."""


class CallStarted(_Event, frozen=True, kw_only=True, tag="started"):
    """A call arrived; nothing has been judged yet."""

    parent_request_id: str | None
    identity_id: str | None

    traceparent: str | None = None
    """The W3C trace context that the call came with, from its metadata."""


class CallYielded(_Event, frozen=True, kw_only=True, tag="yielded"):
    """A subscription gave an item."""

    index: int
    """Counted from 0."""


class CallFinished(_Event, frozen=True, kw_only=True, tag="finished"):
    """A call ended; exactly one for each that started."""

    parent_request_id: str | None
    identity_id: str | None

    code: str | None
    """The error's code; `EXECUTION_ERROR` also for a result that says it is one, as an MCP tool's; None for success."""

    duration: float
    """Seconds."""


class CallAbandoned(_Event, frozen=True, kw_only=True, tag="abandoned"):
    """The caller is gone, but the handler could not be stopped and still runs."""


class RegistryChanged(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="event", tag="changed"
):
    """An operation appeared, was replaced, or went."""

    operation_id: str
    change: Literal["added", "replaced", "removed"]


CallEvent: TypeAlias = CallStarted | CallYielded | CallFinished | CallAbandoned | RegistryChanged
"""What an observer is told."""


class Observer(Protocol):
    """Follows calls. Called on the event loop, in order; it must be quick and must not block."""

    def __call__(self, event: CallEvent, /) -> None:
        """Take notice of `event`."""
        ...


def notify(observers: Iterable[Observer], event: CallEvent) -> None:
    """Tell every observer; one that raises is logged and costs nobody else anything."""
    for observer in observers:
        try:
            observer(event)
        except Exception:
            logger.exception("an observer failed at %s", type(event).__name__)
