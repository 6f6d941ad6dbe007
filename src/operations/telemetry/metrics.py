"""Calls counted, for Prometheus: an observer that can be scraped.

Rule 1: labels are operation ids and codes, both bounded: ids nobody registered are not counted by name.
"""

from bisect import bisect_left
from collections.abc import Collection, Container
from typing import Final, cast

from operations._words import enforce_lists
from operations.observe import CallAbandoned, CallEvent, CallFinished, CallStarted, CallYielded

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0)
"""Upper bounds of the durations' histogram, in seconds."""

_OTHERS = "(unknown)"
"""What calls of anything else are counted as."""


class _Series:
    """What is known of one operation."""

    __slots__ = ("abandoned", "buckets", "codes", "items", "running", "seconds")

    def __init__(self) -> None:
        self.running = 0
        self.items = 0
        self.abandoned = 0
        self.codes: dict[str, int] = {}
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0


class CallMetrics:
    """Counts calls: `registry.observe(metrics)`, then `metrics.render()`.

    Args:
        known: The operations that are counted by name: a registry.
    """

    def __init__(self, known: Container[str]) -> None:
        self._known = known
        self._series: dict[str, _Series] = {}

    def __call__(self, event: CallEvent, /) -> None:
        """Take notice of an event."""
        # By type, as this happens twice in every call.
        kind = type(event)
        if kind is CallStarted:
            self._of(cast("CallStarted", event).operation_id).running += 1
        elif kind is CallFinished:
            self._finish(cast("CallFinished", event))
        elif kind is CallYielded:
            self._of(cast("CallYielded", event).operation_id).items += 1
        elif kind is CallAbandoned:
            self._of(cast("CallAbandoned", event).operation_id).abandoned += 1

    def _finish(self, event: CallFinished) -> None:
        series = self._of(event.operation_id)
        series.running -= 1
        code = event.code or ""
        series.codes[code] = series.codes.get(code, 0) + 1
        series.seconds += event.duration
        series.buckets[bisect_left(BUCKETS, event.duration)] += 1

    def _of(self, operation_id: str) -> _Series:
        series = self._series.get(operation_id)
        if series is None:
            name = operation_id if operation_id in self._known else _OTHERS
            series = self._series.setdefault(name, _Series())
        return series

    def render(self, operations: Collection[str] | None = None) -> bytes:
        """Prometheus' text format, of these operations, or of all."""
        enforce_lists(operations=operations)
        shown = {
            name: series
            for name, series in sorted(self._series.items())
            if operations is None or name in operations
        }
        lines: list[str] = []

        def family(name: str, kind: str, text: str) -> None:
            lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))

        family(
            "operations_calls_total", "counter", "Calls that ended, by error code (empty: success)."
        )
        for name, series in shown.items():
            for code, count in sorted(series.codes.items()):
                labels = f'operation="{_label(name)}",code="{_label(code)}"'
                lines.append(f"operations_calls_total{{{labels}}} {count}")
        family("operations_calls_running", "gauge", "Calls under way.")
        for name, series in shown.items():
            lines.append(f'operations_calls_running{{operation="{_label(name)}"}} {series.running}')
        family("operations_items_total", "counter", "Items that subscriptions gave.")
        for name, series in shown.items():
            lines.append(f'operations_items_total{{operation="{_label(name)}"}} {series.items}')
        family(
            "operations_abandoned_total", "counter", "Handlers that ran on after their caller left."
        )
        for name, series in shown.items():
            lines.append(
                f'operations_abandoned_total{{operation="{_label(name)}"}} {series.abandoned}'
            )
        family("operations_call_seconds", "histogram", "How long calls took.")
        for name, series in shown.items():
            lines.extend(_histogram(_label(name), series))
        return ("\n".join(lines) + "\n").encode()


def _histogram(name: str, series: _Series) -> list[str]:
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
