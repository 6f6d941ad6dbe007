"""Time limits of tests, which grow with the load and the slowness of the machine.

A limit ends a test that hangs; it is never what a test verifies. A test of a promise about time verifies an order or a
count, moves the clock (`tests.clocks`), or compares two durations of the same machine.
"""

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from time import process_time, thread_time
from timeit import timeit

import anyio

_REFERENCE = 0.02
"""Processor time of the loop in `slowness`, in seconds, on a machine for which the limits were chosen."""


def slowness() -> float:
    """Return how many times longer this machine computes now than the reference, in processor time."""
    return timeit("sum(range(1000))", number=1000, timer=thread_time) / _REFERENCE


@cache
def _slowness() -> float:
    return slowness()


def _runnable() -> int:
    """Return the number of threads that run or wait for a processor; 0 if the system does not report it."""
    try:
        return int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0])
    except OSError:
        return 0


def scale() -> float:
    """Return how many times longer a test may take now than on an idle machine of the reference speed."""
    busy = max(os.getloadavg()[0], _runnable()) / (os.cpu_count() or 1)
    return max(1.0, busy) * max(1.0, _slowness())


def scaled(seconds: float) -> float:
    """Return the limit for something that takes at most `seconds` on an idle machine."""
    return seconds * scale()


def time_limit(seconds: float) -> AbstractContextManager[anyio.CancelScope]:
    """Fail the test if the block takes longer than `scaled(seconds)`."""
    return anyio.fail_after(scaled(seconds))


@contextmanager
def processor_limit(seconds: float) -> Generator[None]:
    """Fail the test if the block computes longer than `seconds`, on a machine of the reference speed.

    Compares its processor time with that of a fixed computation before and after it: processes that share a core also
    share its caches, so processor time alone grows with the load.
    """
    before, began = slowness(), process_time()
    yield
    took = process_time() - began
    allowed = seconds * max(1.0, before, slowness())
    assert took < allowed, f"computed for {took:.2f} s instead of {allowed:.2f} s"
