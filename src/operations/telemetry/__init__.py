"""Follow calls: log lines, audit records and metrics here, OpenTelemetry in `otel` and `otlp`.

    registry.observe(Audit())

Rule 1: an audit record names caller, operation, outcome, duration and id, never arguments or results.
Rule 2: metrics are labelled with operation ids and codes. Both are bounded: unregistered operations share one label,
        and so do the codes of an operation beyond a number.
Rule 3: each option is defined once, for Python and for config files.
"""

import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal
from weakref import finalize

import msgspec

from operations._files import LineFile
from operations._pipeline.plan import BUCKETS
from operations._text import enforce_lists, visible, visible_json
from operations.calls.monitoring import GroupReport
from operations.calls.worker import CallServer
from operations.front import Front
from operations.observe import CallAbandoned, CallEvent, CallFinished
from operations.registry import OperationRegistry
from operations.types import JSONObject, Seconds, options_of


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Records of every call: caller, operation, outcome, duration and id, never arguments or results."""

    enabled: bool | None = None
    """Write records; by default if `file` is set."""

    file: str | Path | None = None
    """Append records to this file, one JSON object per line; by default they go to the logger `operations.audit`. The
    file is opened again after log rotation has moved it."""


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
    """When the call ended, in milliseconds since the epoch."""

    request_id: str
    parent_request_id: str | None = None

    identity_id: str | None = None
    """The caller; None if it is unknown."""

    issuer: str | None = None
    """The issuer of the token that named the caller."""

    acting: tuple[str, ...] = ()
    """The parties that act for the caller, such as the holder of a grant, in the order of delegation."""

    authority: str | None = None
    """The operation on whose authority a nested call ran; None if it ran as the caller."""

    operation_id: str

    outcome: str
    """`ok`, `abandoned`, or the error's code."""

    milliseconds: float = 0.0


class AuditFile:
    """Appends audit records to a file that only its owner can read, one line of JSON for each.

    The file is opened again after log rotation has moved or removed it.

    Args:
        path: The file; its folder must exist.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = LineFile(path, "audit records")

    def __call__(self, record: AuditRecord) -> None:
        """Append a record; if that fails, for example because the disk is full, log the reason and continue."""
        self._file.write(msgspec.json.encode(record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Audit:
    """Observes the calls of a registry and writes a record of each.

    Args:
        sink: Receives each record; it must be quick. By default the logger `operations.audit`, one JSON line per
            record.
    """

    def __init__(self, sink: Callable[[AuditRecord], None] | None = None) -> None:
        self._sink = sink or _log

    def __call__(self, event: CallEvent, /) -> None:
        """Process an event."""
        if isinstance(event, CallFinished):
            self._sink(
                AuditRecord(
                    timestamp=event.timestamp,
                    request_id=event.request_id,
                    parent_request_id=event.parent_request_id,
                    identity_id=event.identity_id,
                    issuer=event.issuer,
                    acting=event.acting,
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
    # JSON escapes control characters, so that a record is always one line.
    _audit_logger.info("%s", msgspec.json.encode(record).decode())


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


# ------------------------------------------------------------ metrics

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


class CallMetrics:
    """Counts the calls of a registry for Prometheus, until it is closed or garbage-collected.

    All instances for one registry share their counters, so that several cost no more than one.

    Args:
        registry: The registry whose calls are counted.
        time_all: Whether to time all calls; False times only those from entry points.
    """

    def __init__(self, registry: OperationRegistry, *, time_all: bool = True) -> None:
        self._registry = registry
        self._time_all = time_all
        self.sources: list[tuple[str | None, Callable[[], Awaitable[bytes]]]] = []
        """Additional metrics in the same format. Each is visible only to callers that may call the given operation."""
        self._stop: Callable[[], None] | None = None
        self.open()

    def open(self) -> None:
        """Start counting again after `close`."""
        if self._stop is None:
            self._counters, stop = self._registry.count_calls(time_all=self._time_all)
            self._stop = finalize(self, stop)

    def close(self) -> None:
        """Stop counting. Closing twice is harmless."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    async def collect(self, operations: Collection[str]) -> bytes:
        """Return the metrics of these operations, and the additional metrics that their callers may see."""
        shown = [
            source for needed, source in self.sources if needed is None or needed in operations
        ]
        return b"".join([self.render(operations), *[await source() for source in shown]])

    def render(self, operations: Collection[str] | None = None) -> bytes:
        """Return the metrics of these operations, or of all, in the text format of Prometheus."""
        enforce_lists(operations=operations)
        shown = {
            f'operation="{_label(name)}"': series
            for name, series in self._counters
            if operations is None or name in operations
        }
        calls: dict[str, float] = {}
        changes: dict[str, float] = {}
        for labels, series in shown.items():
            codes = Counter(series.codes) + Counter({"": series.untimed})
            calls |= {f'{labels},code="{_label(code)}"': codes[code] for code in sorted(codes)}
            kinds = sorted(series.changes.items())
            changes |= {f'{labels},kind="{_label(kind)}"': count for kind, count in kinds}
        about = "Calls that ended, by error code (empty: success)."
        lines = _family("operations_calls_total", about, calls, "counter")
        about = "Values that normalisation changed, by kind."
        lines += _family("operations_changes_total", about, changes, "counter")
        for name, about, counter, kind in _OF_CALLS:
            values = {labels: getattr(series, counter) for labels, series in shown.items()}
            lines += _family(name, about, values, kind)
        lines += _family("operations_call_seconds", "Duration of calls.", {}, "histogram")
        for labels, series in shown.items():
            lines += _histogram("operations_call_seconds", labels, series.buckets, series.seconds)
        return _text(lines)


_OF_CALLS = (
    ("operations_calls_running", "Running calls.", "running", "gauge"),
    ("operations_items_total", "Items that subscriptions returned.", "items", "counter"),
    ("operations_abandoned_total", "Handlers that outlived their caller.", "abandoned", "counter"),
    ("operations_retries_total", "Attempts of a call after the first.", "retries", "counter"),
)
"""The description, counter and kind of each metric."""


def _histogram(name: str, labels: str, buckets: Sequence[int], seconds: float) -> list[str]:
    lines: list[str] = []
    total = 0
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), buckets, strict=True):
        total += count
        lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
    lines.append(f"{name}_sum{{{labels}}} {seconds:.6f}")
    lines.append(f"{name}_count{{{labels}}} {total}")
    return lines


def source_metrics(states: Mapping[str, str]) -> bytes:
    """Return which sources of a hub are connected, by name, in the text format of Prometheus."""
    values = {f'source="{_label(name)}"': int(states[name] == "connected") for name in states}
    return _text(_family("operations_source_connected", "Whether a source is connected.", values))


def front_metrics(front: Front) -> bytes:
    """Return the limits of a server, and the requests that they rejected, in the text format of Prometheus."""
    limiters = {
        "calls": front.calls,
        "streams": front.streams,
        "websockets": front.sockets,
        "output_bytes": front.output,
    }
    used = {f'limit="{name}"': limiter.total for name, limiter in limiters.items()}
    limits = {f'limit="{name}"': limiter.limit for name, limiter in limiters.items()}
    counts = {name: limiter.rejected for name, limiter in limiters.items()}
    counts |= {"rate": front.rate.rejected, "credential": front.auth.rejected}
    rejected = {f'reason="{name}"': count for name, count in counts.items()}
    lines = _family("operations_limit_used", "How much of a limit is used now.", used)
    lines += _family("operations_limit", "Limits for all callers together.", limits)
    about = "Requests that were rejected before an operation was called."
    return _text(lines + _family("operations_rejected_total", about, rejected, "counter"))


def worker_metrics(server: CallServer) -> bytes:
    """Return the counters of a worker in the text format of Prometheus."""
    stats = server.stats()
    labels = f'group="{_label(server.group)}"'
    outcomes = {
        "ok": stats.finished - stats.failed,
        "failed": stats.failed,
        "refused": stats.refused,
        "duplicate": server.duplicates,
        "malformed": server.malformed,
    }
    by_outcome = {f'{labels},outcome="{name}"': count for name, count in outcomes.items()}
    lines: list[str] = []
    for name, about, counter in _OF_WORKERS:
        lines += _family(name, about, {labels: getattr(stats, counter)})
    lines += _family("operations_worker_calls_total", "Calls by outcome.", by_outcome, "counter")
    name = "operations_worker_queue_seconds"
    lines += _family(name, "Time that calls waited before they began.", {}, "histogram")
    return _text(lines + _histogram(name, labels, server.queue_buckets, stats.queue_seconds))


_OF_WORKERS = (
    ("operations_worker_running", "Calls that run on this worker.", "running"),
    ("operations_worker_waiting", "Calls that wait on this worker.", "waiting"),
    ("operations_worker_concurrency", "The largest number of concurrent calls on this worker.", "concurrency"),
)  # fmt: skip


def group_metrics(reports: Collection[GroupReport]) -> bytes:
    """Return the state of worker groups in the text format of Prometheus; unknown values are omitted."""
    by_group = {f'group="{_label(each.group)}"': each for each in reports}
    lines: list[str] = []
    for name, about, value_of in _OF_GROUPS:
        values = {labels: value_of(report) for labels, report in by_group.items()}
        lines += _family(name, about, {k: v for k, v in values.items() if v is not None})
    return _text(lines)


_OF_GROUPS: tuple[tuple[str, str, Callable[[GroupReport], float | None]], ...] = (
    ("operations_group_workers", "Connected workers.", lambda each: len(each.workers)),
    ("operations_group_silent_workers", "Workers that do not respond.", lambda each: each.silent),
    ("operations_group_running", "Calls that run on all workers.", lambda each: each.running),
    ("operations_queue_depth", "Waiting calls.", lambda each: each.waiting),
    ("operations_queue_lag_seconds", "Age of the oldest waiting call.", lambda each: each.lag),
    ("operations_dead_letters", "Dead letters at the broker.", lambda each: each.dead_letters),
)


def _family(name: str, about: str, values: Mapping[str, float], kind: str = "gauge") -> list[str]:
    """Return the lines of a metric; `values` maps labels to values."""
    head = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    return head + [f"{name}{{{labels}}} {value}" for labels, value in values.items()]


def _text(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode() if lines else b""


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
