"""Events of calls, which the call graph, audit and telemetry observe.

Rule 1: an observer cannot change a call. If it raises, the error is logged and the call continues.
Rule 2: no event contains arguments or results; of a change to a result only its kind.
"""

import logging
import re
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping
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


# ------------------------------------------------------------ counting


BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram of durations, in seconds."""

UNKNOWN: Final = "(unknown)"
"""The series of calls to operations that are not registered: their ids are not bounded."""


class CallSeries:
    """The counters of one operation. An observer costs several times as much as these.

    Attributes:
        times_all: Whether calls from code in this process are timed, and not only those from entry points.
        started: Calls that started.
        untimed: Calls that succeeded and were not timed.
        codes: Other calls that ended, by error code; an empty code is success.
        changes: Values of results that normalisation changed, by kind.
        items: Items of subscriptions.
        abandoned: Handlers that were still running after their caller had left.
        retries: Attempts after the first one of a call.
        seconds: Total duration of the timed calls that ended.
        buckets: Timed calls by duration; see `BUCKETS`.
    """

    __slots__ = (
        "abandoned",
        "buckets",
        "changes",
        "codes",
        "items",
        "retries",
        "seconds",
        "started",
        "times_all",
        "untimed",
    )

    def __init__(self, *, times_all: bool) -> None:
        self.times_all = times_all
        self.started = 0
        self.untimed = 0
        self.codes: dict[str, int] = {}
        self.changes: dict[str, int] = {}
        self.items = 0
        self.abandoned = 0
        self.retries = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BUCKETS) + 1)

    def finish(self, code: str | None, seconds: float | None) -> None:
        """Count a call that ended; its duration is None if it was not timed."""
        name = code or ""
        self.codes[name] = self.codes.get(name, 0) + 1
        if seconds is not None:
            self.seconds += seconds
            self.buckets[bisect_left(BUCKETS, seconds)] += 1

    def add_changes(self, changes: dict[str, int] | None) -> None:
        """Count the changes of a result, by kind."""
        if changes is not None:
            add_counts(self.changes, changes)

    @property
    def running(self) -> int:
        """Calls that have not ended."""
        return self.started - self.untimed - sum(self.codes.values())


class CallCounters:
    """Counts the calls of a registry.

    Args:
        known: The operations that are counted by name.
    """

    def __init__(self, known: Container[str]) -> None:
        self._known = known
        self._series: dict[str, CallSeries] = {}
        self._times_all = False

    @property
    def times_all(self) -> bool:
        """Whether calls from code in this process are timed, and not only those from entry points."""
        return self._times_all

    @times_all.setter
    def times_all(self, value: bool) -> None:
        self._times_all = value
        for series in self._series.values():
            series.times_all = value

    def of(self, operation_id: str) -> CallSeries:
        """Return the counters of an operation."""
        series = self._series.get(operation_id)
        if series is None:
            name = operation_id if operation_id in self._known else UNKNOWN
            series = self._series.setdefault(name, CallSeries(times_all=self._times_all))
        return series

    def __iter__(self) -> Iterator[tuple[str, CallSeries]]:
        return iter(sorted(self._series.items()))
