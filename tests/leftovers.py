"""Find leftovers of a test: waiting calls, tasks, unretrieved exceptions, memory."""

import asyncio
import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.limits import scaled

from operations.calls import PendingRequestMap

MAX_GROWTH = 20_000
"""Kilobytes by which the memory of a process may grow during a test."""

_SMALL = 512
"""Bytes of the largest block that Python takes from arenas of its own; larger ones come from the C library."""


class _Usage(ctypes.Structure):
    """The memory statistics of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_libc: Any = ctypes.CDLL(None)
_mallinfo2 = getattr(_libc, "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _Usage


def resident_kilobytes() -> int:
    """The memory this process holds."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


def used_kilobytes() -> int:
    """The memory that is in use, and never less: small blocks are counted as if each were as large as can be."""
    if _mallinfo2 is None:
        # With another C library, only the first measurement is available.
        return resident_kilobytes()
    usage = _mallinfo2()
    in_use: int = usage.uordblks + usage.hblkhd + _SMALL * sys.getallocatedblocks()
    return in_use // 1024


class Memory:
    """Measure the memory of the process, to compare it later.

    Measured twice, to be reliable. The system's number contains everything, but also memory that was freed and not
    returned: most of it is, once cycles are collected and the C library trims (50 MB after F5), but after
    ten thousand calls at once up to 22 MB stay, in arenas of which some small object keeps a part. What the allocators
    count contains nothing that was freed, but overestimates small blocks. Both are upper bounds, so that every
    leak is found; the smaller of the two is nearly exact.
    """

    def __init__(self) -> None:
        self._before = self._look()

    def _look(self) -> tuple[int, int]:
        gc.collect()
        if _mallinfo2 is not None:
            _libc.malloc_trim(0)
        return resident_kilobytes(), used_kilobytes()

    def growth(self) -> int:
        """Kilobytes that the process holds more than before."""
        return min(now - before for now, before in zip(self._look(), self._before, strict=True))


class Leftovers:
    """Records the state before a test, to find leftovers after it.

    Args:
        loop: The event loop of the test, which does not run just now; None if it has none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._found: list[str] = []
        self._tasks = self._all_tasks()
        if loop is not None:
            loop.set_exception_handler(lambda _, context: self._found.append(repr(context)))
        self._memory = Memory()

    def _all_tasks(self) -> set["asyncio.Task[object]"]:
        return set() if self._loop is None else asyncio.all_tasks(self._loop)

    def collect(self) -> list[str]:
        """Return the leftovers of the test."""
        if self._loop is not None:
            self._loop.run_until_complete(asyncio.sleep(0))
            # A task that was cancelled may need a few more turns.
            ending = [task for task in self._all_tasks() - self._tasks if task.cancelling()]
            if ending:
                self._loop.run_until_complete(asyncio.wait(ending, timeout=scaled(30)))
        # Unretrieved exceptions are reported when they are collected.
        growth = self._memory.growth()
        found = [*self._found, *map(repr, self._all_tasks() - self._tasks)]
        if growth >= MAX_GROWTH:
            found.append(f"{growth} KB of memory")
        return found


@contextmanager
def counted_at_closing() -> Iterator[list[str]]:
    """The calls that were pending when their map was closed; closing ends them, so they are not visible later."""
    waiting: list[str] = []
    close = PendingRequestMap.aclose

    async def aclose(calls: PendingRequestMap) -> None:
        ids = (call.payload.operation_id for call in calls.pending.values())
        # The failure detector asks the workers by itself whether a lost call may run again.
        waiting.extend(each for each in ids if each != "services.schema")
        await close(calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingRequestMap, "aclose", aclose)
        yield waiting
