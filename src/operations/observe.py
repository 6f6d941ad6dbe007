"""Events of calls, which the call graph, audit and telemetry observe.

Rule 1: an observer cannot change a call. If it raises, the error is logged and the call continues.
Rule 2: no event contains arguments or results; of a change to a result only its kind.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from time import time_ns
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

logger = logging.getLogger("operations")


def now() -> int:
    """Milliseconds since the epoch."""
    return time_ns() // 1_000_000


_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE: Final = re.compile(r"[ -~]{1,512}")


def trace_context(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the W3C trace context among `values`, if it is valid: `traceparent`, and `tracestate` if there is one."""
    parent, state = values.get("traceparent"), values.get("tracestate")
    if not isinstance(parent, str) or not _TRACEPARENT.fullmatch(parent):
        return {}
    trace = {"traceparent": parent}
    if isinstance(state, str) and _TRACESTATE.fullmatch(state):
        trace["tracestate"] = state
    return trace


class _Event(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="event"):
    """The fields of all call events."""

    request_id: str
    operation_id: str

    timestamp: int
    """Milliseconds since the epoch."""


class CallStarted(_Event, frozen=True, kw_only=True, tag="started"):
    """A call arrived; access and input have not been checked yet."""

    parent_request_id: str | None
    identity_id: str | None

    authority: str | None = None
    """The operation on whose authority a nested call ran; None: its caller's own."""

    traceparent: str | None = None
    """The W3C trace context that the call came with, from its metadata."""

    queued: float | None = None
    """Seconds that the request waited before it began; None if it did not wait in a queue."""


class CallYielded(_Event, frozen=True, kw_only=True, tag="yielded"):
    """A subscription returned an item."""

    index: int
    """Counted from 0."""

    changes: dict[str, int] | None = None
    """How many values of the item normalisation changed, by kind; None for none."""


class CallFinished(_Event, frozen=True, kw_only=True, tag="finished"):
    """A call ended; exactly one for each that started."""

    parent_request_id: str | None
    identity_id: str | None

    authority: str | None = None
    """The operation on whose authority a nested call ran; None: its caller's own."""

    code: str | None
    """The error's code; `EXECUTION_ERROR` also for a result marked as an error (MCP tools); None for success."""

    duration: float
    """Seconds."""

    changes: dict[str, int] | None = None
    """How many values of the result normalisation changed, by kind; None for none."""


class CallAbandoned(_Event, frozen=True, kw_only=True, tag="abandoned"):
    """The caller has left, but the handler could not be stopped and still runs."""


class RegistryChanged(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="event", tag="changed"
):
    """An operation was added, replaced or removed."""

    operation_id: str
    change: Literal["added", "replaced", "removed"]


CallEvent: TypeAlias = CallStarted | CallYielded | CallFinished | CallAbandoned | RegistryChanged
"""The events that observers receive."""


class Observer(Protocol):
    """Receives events on the event loop, in order; it must be quick and must not block."""

    def __call__(self, event: CallEvent, /) -> None:
        """Receive an event."""
        ...


def add_counts(total: dict[str, int], more: dict[str, int]) -> None:
    """Add the counts of `more` to `total`, by key."""
    for key, count in more.items():
        total[key] = total.get(key, 0) + count


def notify(observers: Iterable[Observer], event: CallEvent) -> None:
    """Send an event to all observers; if one raises, log the error and continue."""
    for observer in observers:
        try:
            observer(event)
        except Exception:
            logger.exception("an observer failed at %s", type(event).__name__)
