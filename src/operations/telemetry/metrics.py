"""Calls counted, in the text format of Prometheus.

Rule 1: labels are operation ids and codes, both bounded: operations that are not registered are counted together.
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Final
from weakref import finalize

from operations._text import enforce_lists
from operations.observe import BUCKETS, CallSeries
from operations.registry import OperationRegistry

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


class CallMetrics:
    """Counts the calls of a registry for Prometheus, until it is closed or garbage-collected.

    All metrics of one registry share their counters, so that several cost no more than one.

    Args:
        registry: Its calls are counted.
        time_all: Whether to time calls from code in this process too, and not only those from entry points.
    """

    def __init__(self, registry: OperationRegistry, *, time_all: bool = True) -> None:
        self._registry = registry
        self._time_all = time_all
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
            lines.extend(_histogram(_label(name), series))
        return ("\n".join(lines) + "\n").encode()


def _histogram(name: str, series: CallSeries) -> list[str]:
    lines: list[str] = []
    total = 0
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), series.buckets, strict=True):
        total += count
        lines.append(f'operations_call_seconds_bucket{{operation="{name}",le="{bound}"}} {total}')
    lines.append(f'operations_call_seconds_sum{{operation="{name}"}} {series.seconds:.6f}')
    lines.append(f'operations_call_seconds_count{{operation="{name}"}} {total}')
    return lines


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
