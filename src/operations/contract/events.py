"""Events of calls, which observers and sinks receive: caller, parent, time and outcome.

A `CallGraph` records them as a tree. Calls that cross processes carry their parent's id, so the lines that several
processes write form one graph.

Rule 1: an observer cannot change a call. If it raises, the error is logged and the call continues.
Rule 2: events contain no arguments and no results. For changes to a result they contain only the kinds and counts.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from time import time_ns
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from operations.base.logs import LogThrottle

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


class _CallEvent(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="event"):
    """The fields of all call events."""

    request_id: str
    operation_id: str

    timestamp: int
    """Milliseconds since the epoch."""


class _CallerEvent(_CallEvent, frozen=True, kw_only=True):
    """The fields of the events that begin and end a call."""

    parent_request_id: str | None
    identity_id: str | None

    issuer: str | None = None
    """The issuer of the token that named the caller."""

    acting: tuple[str, ...] = ()
    """The parties that act for the caller, in the order of delegation."""

    authority: str | None = None
    """The operation on whose authority a nested call ran; None if it ran as the caller."""


class CallStarted(_CallerEvent, frozen=True, kw_only=True, tag="started"):
    """A call arrived; access and input have not been checked yet."""

    grants: tuple[str, ...] = ()
    """The blocks of the grant that the caller presented."""

    traceparent: str | None = None
    """The W3C trace context from the metadata of the call."""

    tracestate: str | None = None
    """The state of other tracing systems, from the metadata of the call."""

    queued: float | None = None
    """Seconds that the request waited before it began; None if it did not wait in a queue."""

    run: str | None = None
    """The run that the call belongs to."""

    step: str | None = None
    """The step that the call is, or is part of; `.` for the call of the run itself."""

    attempt: int | None = None
    """The number of the attempt of the run, from 1 on."""


class CallYielded(_CallEvent, frozen=True, kw_only=True, tag="yielded"):
    """A subscription returned an item."""

    index: int
    """Counted from 0."""

    changes: dict[str, int] | None = None
    """The number of values of the item that normalisation changed, by kind; None if it changed none."""


class CallFinished(_CallerEvent, frozen=True, kw_only=True, tag="finished"):
    """A call ended. Every `CallStarted` is followed by exactly one of these."""

    code: str | None
    """The error's code; `EXECUTION_ERROR` also for a result marked as an error (MCP tools); None for success."""

    duration: float
    """Duration of the call in seconds."""

    changes: dict[str, int] | None = None
    """The number of values of the result that normalisation changed, by kind; None if it changed none."""


class CallAbandoned(_CallEvent, frozen=True, kw_only=True, tag="abandoned"):
    """The caller has left, but the handler could not be stopped and still runs."""


class _HandlerEvent(_CallerEvent, frozen=True, kw_only=True):
    """The fields of the events about the handler of a call. `acting` also names the hubs that forwarded the call."""

    run: str | None = None
    """The run that the call belongs to."""

    step: str | None = None
    """The step that the call is, or is part of; `.` for the call of the run itself."""

    script: str | None = None
    """The digest of the script that made the call."""


class CallAdmitted(_HandlerEvent, frozen=True, kw_only=True, tag="admitted"):
    """Access, input, approval and budgets of a call were checked: its handler starts next."""

    approval: str | None = None
    """The approval that the call has used."""


class CallRejected(_HandlerEvent, frozen=True, kw_only=True, tag="rejected"):
    """A call with a valid input was rejected before its handler started."""

    code: str
    """The error's code."""


class HandlerEnded(_HandlerEvent, frozen=True, kw_only=True, tag="ended"):
    """The handler of a call has ended."""

    code: str | None
    """The code that the caller receives; None for success."""


class RegistryChanged(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="event", tag="changed"
):
    """An operation was added, replaced or removed."""

    operation_id: str
    change: Literal["added", "replaced", "removed"]


class _RunEvent(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="event"):
    """The fields of all events of runs."""

    run: str
    operation_id: str

    timestamp: int
    """Milliseconds since the epoch."""


class RunStarted(_RunEvent, frozen=True, kw_only=True, tag="run.started"):
    """A run was stored."""


class RunResumed(_RunEvent, frozen=True, kw_only=True, tag="run.resumed"):
    """Another attempt of a run begins in this process."""

    attempt: int

    reason: str
    """`crash`, `shutdown`, `answer`, `time`, `retry` or `store`: why the last attempt has ended."""


class RunEnded(_RunEvent, frozen=True, kw_only=True, tag="run.ended"):
    """A run has ended."""

    status: str

    code: str | None = None
    """The code of its error."""


class RunChanged(_RunEvent, frozen=True, kw_only=True, tag="run.changed"):
    """The journal of runs is about to store a change of a run."""

    change: str
    """`run.started`, `run.resumed`, `run.ended`, `run.answered`, `run.cancelled`, `run.retried` or `run.settled`."""

    facts: dict[str, Any]
    """What else is known about the change, such as `status`, or `by`: who made it."""

    call: CallAdmitted | None = None
    """The call that started the run."""


RunEvent: TypeAlias = RunStarted | RunResumed | RunEnded

CallEvent: TypeAlias = (
    CallStarted | CallYielded | CallFinished | CallAbandoned | RegistryChanged | RunEvent
)
"""The events that observers receive."""

HandlerEvent: TypeAlias = CallAdmitted | CallRejected | HandlerEnded | RunChanged
"""Further events, which exist only if a sink wants them; see `operations.recorder.recorder`."""


class Observer(Protocol):
    """Receives events on the event loop, in order; it must be quick and must not block."""

    def __call__(self, event: CallEvent, /) -> None:
        """Receive an event."""
        ...


def add_counts(total: dict[str, int], more: dict[str, int]) -> None:
    """Add the counts of `more` to `total`, by key."""
    for key, count in more.items():
        total[key] = total.get(key, 0) + count


def notify(
    observers: Iterable[Observer], event: CallEvent, failures: dict[int, LogThrottle]
) -> None:
    """Send an event to all observers; if one raises, log the error and continue.

    Args:
        observers: The observers.
        event: The event.
        failures: Limits how often errors are logged, by the id of the observer.
    """
    for observer in observers:
        try:
            observer(event)
        except Exception:
            level = failures.setdefault(id(observer), LogThrottle()).level()
            logger.log(level, "an observer failed at %s", type(event).__name__, exc_info=True)
