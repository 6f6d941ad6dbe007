"""Interleaved timing and one kind of table, shared by every benchmark.

Each repeat runs every contender once, in turn; a ratio is taken within a repeat, and the median over the repeats is
printed. So a noisy machine disturbs everyone alike.
"""

import argparse
import asyncio
import gc
import inspect
import math
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

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
    """Call over and over for `budget` seconds; the clock is read once per batch."""
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
) -> dict[str, list[float]]:
    """Run every contender once per repeat, in turn."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        await rate(contender, budget / 10)
    for _ in range(repeats):
        for name, contender in contenders.items():
            gc.collect()
            rates[name].append(await rate(contender, budget))
    return rates


def table(title: str, rates: dict[str, list[float]], base: str) -> None:
    """Print the median wall time and CPU time of each, and the wall time as a multiple of the base's."""
    width = max(len(name) for name in rates)
    print(f"\n{title}\n{'':{width}}  {'us/call':>10}  {'x base':>8}  {'CPU us':>10}")
    for name, values in rates.items():
        ratio = statistics.median(b / v for b, v in zip(rates[base], values, strict=True))
        cpu = statistics.median(
            value.cpu if isinstance(value, Rate) else math.nan for value in values
        )
        shown = "" if math.isnan(cpu) else f"{cpu:10.2f}"
        print(f"{name:{width}}  {1e6 / statistics.median(values):10.2f}  {ratio:8.2f}  {shown:>10}")


def main(benchmark: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(benchmark())  # type: ignore[arg-type]
