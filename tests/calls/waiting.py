"""Wait for conditions that no event announces."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.calls.worlds import World
from tests.limits import time_limit

from operations.calls import PendingRequestMap
from operations.calls.source.monitoring import GroupMonitor, GroupReport


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait until `condition` holds."""
    with time_limit(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def complete_report(monitor: GroupMonitor, workers: int) -> GroupReport:
    """Return a report of this many workers; on a busy machine, some may respond too late for the first one."""
    with time_limit(30):
        while len((report := await monitor.look()).workers) < workers:
            pass
    return report


def lines(path: Path) -> list[str]:
    """Return the lines of a file, which may not exist yet."""
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def started(path: Path) -> list[int]:
    """Return the processes that recorded a start in the file."""
    return [int(line.split()[1]) for line in lines(path) if line.startswith("started")]


@asynccontextmanager
async def caller(world: World, **options: object) -> AsyncGenerator[PendingRequestMap]:
    """A caller in `world`."""
    async with (
        world.connect() as target,
        PendingRequestMap(target, **options) as calls,  # type: ignore[arg-type]
    ):
        yield calls
