"""Metrics in the text format of Prometheus."""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final
from weakref import finalize

from operations.base.errors import CallError
from operations.base.text import enforce_lists
from operations.calls.serving.worker import CallServer
from operations.calls.source.monitoring import GroupReport
from operations.front.front import Front
from operations.registry.counters import BUCKETS
from operations.registry.registry import OperationRegistry
from operations.registry.runs import RunStore

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


async def run_metrics(store: RunStore) -> bytes:
    """Return the runs of a store, and what this process has done, in the text format of Prometheus."""
    totals = store.totals()
    attempts = {"": totals.pop("attempts")}
    ended = {f'status="{status}"': number for status, number in sorted(totals.items())}
    lines = _family("operations_run_attempts_total", "Attempts of runs.", attempts, "counter")
    lines += _family("operations_runs_ended_total", "Runs that ended here.", ended, "counter")
    try:
        counts = await store.counts()
    except CallError:
        # `/readyz` reports that the store does not work.
        return _text(lines)
    oldest = {"": counts.pop("oldest") / 1000}
    states = {f'status="{status}"': number for status, number in sorted(counts.items())}
    lines += _family(
        "operations_runs", "Runs of all processes that have not ended, or are unknown.", states
    )
    about = "For how long a run has been ready without a free slot."
    lines += _family("operations_runs_oldest_seconds", about, oldest)
    return _text(lines)


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
    return head + [
        f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"
        for labels, value in values.items()
    ]


def _text(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode() if lines else b""


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
