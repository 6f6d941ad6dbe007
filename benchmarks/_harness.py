"""Time contenders in turn, and print and record the results as one kind of table, for every benchmark.

Each repeat runs every contender once, in turn; a ratio is taken within a repeat, and the median over the repeats is
printed. So a noisy machine affects all contenders equally.
"""

import argparse
import asyncio
import gc
import inspect
import math
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "scripts"))
import doc_numbers

Contender = Callable[[], Any] | Callable[[], Awaitable[Any]]


def arguments(**defaults: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--budget", type=float, default=0.3, help="seconds per contender per repeat"
    )
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


class Rate(float):
    """Calls per second of wall time."""

    cpu = math.nan
    """Processor time of this process per call, in microseconds."""


async def rate(contender: Contender, budget: float) -> Rate:
    """Call repeatedly for `budget` seconds; the clock is read once per batch."""
    awaited = inspect.iscoroutinefunction(contender)
    done, batch, began, spent = 0, 1, time.perf_counter(), time.process_time()
    while True:
        if awaited:
            for _ in range(batch):
                await contender()
        else:
            for _ in range(batch):
                contender()
        done += batch
        elapsed = time.perf_counter() - began
        if elapsed >= budget:
            result = Rate(done / elapsed)
            result.cpu = (time.process_time() - spent) / done * 1e6
            return result
        batch = max(1, min(5000, int(done / elapsed * budget / 10)))


async def interleave(
    contenders: dict[str, Contender], repeats: int, budget: float
) -> dict[str, list[Rate]]:
    """Run every contender once per repeat, in turn."""
    rates: dict[str, list[Rate]] = {name: [] for name in contenders}
    for contender in contenders.values():
        await rate(contender, budget / 10)
    for _ in range(repeats):
        for name, contender in contenders.items():
            gc.collect()
            rates[name].append(await rate(contender, budget))
    return rates


def show(title: str, rows: doc_numbers.Rows) -> None:
    """Print a table, and record it in docs/numbers.json after `scripts/bench --record`."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    width = max(map(len, [title, *rows]))
    print(f"\n{title:{width}}" + "".join(f"{column:>{len(column) + 8}}" for column in columns))
    for name, row in rows.items():
        cells = (doc_numbers.shown(row.get(column)) for column in columns)
        print(
            f"{name:{width}}"
            + "".join(
                f"{cell:>{len(column) + 8}}" for cell, column in zip(cells, columns, strict=True)
            )
        )
    benchmark = Path(sys.argv[0]).stem
    doc_numbers.record(f"scripts/bench {benchmark}", f"{benchmark}: {title}", rows)


def medians(rates: Mapping[str, Sequence[float]], base: str) -> doc_numbers.Rows:
    """Return the median wall time and CPU time of each, and the wall time as a multiple of the base's."""
    rows: doc_numbers.Rows = {}
    for name, values in rates.items():
        cpu = statistics.median(
            value.cpu if isinstance(value, Rate) else math.nan for value in values
        )
        rows[name] = {
            "us/call": 1e6 / statistics.median(values),
            "x base": statistics.median(b / v for b, v in zip(rates[base], values, strict=True)),
            "CPU us": None if math.isnan(cpu) else cpu,
        }
    return rows


def table(title: str, rates: Mapping[str, Sequence[float]], base: str) -> None:
    """Show the medians of one comparison."""
    show(title, medians(rates, base))


def main(benchmark: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(benchmark())  # type: ignore[arg-type]
