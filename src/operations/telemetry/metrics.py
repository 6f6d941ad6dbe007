"""Calls counted, in the text format of Prometheus.

Rule 1: labels are operation ids and codes, both bounded: operations that are not registered are counted together.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final
from weakref import finalize

from operations._pipeline.outcome import BUCKETS
from operations._text import enforce_lists
from operations.calls.monitoring import GroupReport
from operations.calls.worker import CallServer
from operations.registry import OperationRegistry

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


class CallMetrics:
    """Counts the calls of a registry for Prometheus, until it is closed or garbage-collected.

    All metrics of one registry share their counters, so that several cost as much as one.

    Args:
        registry: Its calls are counted.
        time_all: Whether to time calls from code in this process too, and not only those from entry points.
    """

    def __init__(self, registry: OperationRegistry, *, time_all: bool = True) -> None:
        self._registry = registry
        self._time_all = time_all
        self.sources: list[tuple[str | None, Callable[[], Awaitable[bytes]]]] = []
        """Further metrics in the same format, and the operation that a caller must be allowed to call to see each."""
        self._stop: Callable[[], None] | None = None
        self.open()

    def open(self) -> None:
        """Count again after `close`."""
        if self._stop is None:
            self._counters, stop = self._registry.count_calls(time_all=self._time_all)
            self._stop = finalize(self, stop)

    def close(self) -> None:
        """Stop counting. Closing twice is harmless."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    async def collect(self, operations: Collection[str]) -> bytes:
        """Return the metrics of these operations, and of the sources that go with them."""
        shown = [
            source for needed, source in self.sources if needed is None or needed in operations
        ]
        return b"".join([self.render(operations), *[await source() for source in shown]])

    def render(self, operations: Collection[str] | None = None) -> bytes:
        """Prometheus' text format, of these operations, or of all."""
        enforce_lists(operations=operations)
        shown = {
            name: series
            for name, series in self._counters
            if operations is None or name in operations
        }
        lines: list[str] = []

        def family(name: str, kind: str, text: str) -> None:
            lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))

        family(
            "operations_calls_total", "counter", "Calls that ended, by error code (empty: success)."
        )
        for name, series in shown.items():
            codes = Counter(series.codes) + Counter({"": series.untimed})
            for code, count in sorted(codes.items()):
                labels = f'operation="{_label(name)}",code="{_label(code)}"'
                lines.append(f"operations_calls_total{{{labels}}} {count}")
        family("operations_calls_running", "gauge", "Calls under way.")
        for name, series in shown.items():
            lines.append(f'operations_calls_running{{operation="{_label(name)}"}} {series.running}')
        family("operations_items_total", "counter", "Items that subscriptions gave.")
        for name, series in shown.items():
            lines.append(f'operations_items_total{{operation="{_label(name)}"}} {series.items}')
        family("operations_changes_total", "counter", "Values that normalisation changed, by kind.")
        for name, series in shown.items():
            for kind, count in sorted(series.changes.items()):
                labels = f'operation="{_label(name)}",kind="{_label(kind)}"'
                lines.append(f"operations_changes_total{{{labels}}} {count}")
        family(
            "operations_abandoned_total", "counter", "Handlers that ran on after their caller left."
        )
        for name, series in shown.items():
            lines.append(
                f'operations_abandoned_total{{operation="{_label(name)}"}} {series.abandoned}'
            )
        family("operations_retries_total", "counter", "Attempts after the first one of a call.")
        for name, series in shown.items():
            lines.append(f'operations_retries_total{{operation="{_label(name)}"}} {series.retries}')
        family("operations_call_seconds", "histogram", "Duration of calls.")
        for name, series in shown.items():
            labels = f'operation="{_label(name)}"'
            lines += _histogram("operations_call_seconds", labels, series.buckets, series.seconds)
        return _text(lines)


def _histogram(name: str, labels: str, buckets: Sequence[int], seconds: float) -> list[str]:
    lines: list[str] = []
    total = 0
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), buckets, strict=True):
        total += count
        lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
    lines.append(f"{name}_sum{{{labels}}} {seconds:.6f}")
    lines.append(f"{name}_count{{{labels}}} {total}")
    return lines


def worker_metrics(server: CallServer) -> bytes:
    """Return the counters of a worker in Prometheus' text format."""
    counters, stats = server.counters, server.counters.stats()
    labels = f'group="{_label(server.group)}"'
    outcomes = {
        "ok": stats.finished - stats.failed,
        "failed": stats.failed,
        "refused": stats.refused,
        "duplicate": server.duplicates,
        "malformed": server.malformed,
    }
    by_outcome = {f'{labels},outcome="{name}"': count for name, count in outcomes.items()}
    name = "operations_worker_queue_seconds"
    return _text(
        [
            *_family("operations_worker_running", "Calls that run here.", {labels: stats.running}),
            *_family("operations_worker_waiting", "Calls that wait here.", {labels: stats.waiting}),
            *_family(
                "operations_worker_concurrency",
                "Calls that may run here at a time.",
                {labels: stats.concurrency},
            ),
            *_family("operations_worker_calls_total", "Calls by outcome.", by_outcome, "counter"),
            *_family(name, "Time that calls waited before they began.", {}, "histogram"),
            *_histogram(name, labels, counters.queue_buckets, counters.queue_seconds),
        ]
    )


def group_metrics(reports: Collection[GroupReport]) -> bytes:
    """Return the state of worker groups in Prometheus' text format; unknown values are left out."""
    by_group = {f'group="{_label(each.group)}"': each for each in reports}
    lines: list[str] = []
    for name, about, value_of in _OF_GROUPS:
        values = {labels: value_of(report) for labels, report in by_group.items()}
        lines += _family(name, about, {k: v for k, v in values.items() if v is not None})
    return _text(lines)


_OF_GROUPS: tuple[tuple[str, str, Callable[[GroupReport], float | None]], ...] = (
    ("operations_group_workers", "Connected workers.", lambda each: len(each.workers)),
    ("operations_group_silent_workers", "Workers that do not answer.", lambda each: each.silent),
    ("operations_group_running", "Calls that run on all workers.", lambda each: each.running),
    ("operations_queue_depth", "Calls that wait.", lambda each: each.waiting),
    ("operations_queue_lag_seconds", "Age of the oldest call that waits.", lambda each: each.lag),
    ("operations_dead_letters", "Dead letters at the broker.", lambda each: each.dead_letters),
)


def _family(name: str, about: str, values: Mapping[str, float], kind: str = "gauge") -> list[str]:
    """Return the lines of a metric; `values` are by their labels."""
    head = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    return head + [f"{name}{{{labels}}} {value}" for labels, value in values.items()]


def _text(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode() if lines else b""


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
