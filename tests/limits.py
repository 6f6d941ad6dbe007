"""Time limits of tests, which grow with the load and the slowness of the machine.

A limit ends a test that hangs; it is never what a test verifies. A test of a promise about time verifies an order or a
count, moves the clock (`tests.clocks`), or compares two durations of the same machine.
"""

import os
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from time import thread_time
from timeit import timeit

import anyio

_REFERENCE = 0.02
"""Processor time of the loop in `_slowness`, in seconds, on a machine for which the limits were chosen."""


@cache
def _slowness() -> float:
    """Return how many times longer this machine computes than the reference."""
    return timeit("sum(range(1000))", number=1000, timer=thread_time) / _REFERENCE


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
