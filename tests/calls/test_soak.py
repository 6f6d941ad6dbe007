"""F32: mixed load with faults on every transport at once, for twenty seconds here and for an hour by `scripts/soak`."""

import asyncio
import gc
import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.calls.conftest import WORLDS, make_world
from tests.calls.operations_under_test import build_registry, note
from tests.calls.worlds import Workers, World, cuttable
from tests.leftovers import resident_kilobytes
from tests.servers import Proxy

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap

SECONDS = float(os.environ.get("OPERATIONS_SOAK_SECONDS", "10"))
REPORT = os.environ.get("OPERATIONS_SOAK_REPORT", os.devnull)
LOADERS = 8
PAUSE = 0.05
"""Seconds between two calls of one loader; a high rate is not needed to find leaks."""

WARM_UP = max(5.0, min(120.0, SECONDS / 8))
"""Seconds of the warm-up without pauses, and again with pauses; afterwards all bounded caches are full."""

CUT_EVERY = 4.0
EXPECTED = {ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT}

# Measuring coverage would need a second core; other tests cover these lines.
pytestmark = [pytest.mark.slow, pytest.mark.no_cover]


class Load:
    """The calls of one caller on one transport, and their outcomes."""

    def __init__(self, world: World, workers: Workers, calls: PendingRequestMap) -> None:
        self.world = world
        self.workers = workers
        self.calls = calls
        self.outcomes: Counter[str] = Counter()
        self._random = random.Random(world.name)

    async def run(self, until: float, pause: float) -> None:
        await asyncio.gather(*(self._loader(until, pause) for _ in range(LOADERS)))

    async def _loader(self, until: float, pause: float) -> None:
        while time.monotonic() < until:
            try:
                self.outcomes[await self._one()] += 1
            except CallError as error:
                self.outcomes[error.code] += 1
            await asyncio.sleep(pause)

    async def _one(self) -> str:
        kind, number = self._random.random(), self._random.randrange(1_000_000)
        if kind < 0.9:
            answer = await self.calls.call("math.add", {"a": number, "b": 1})
            return "right" if answer.data == number + 1 else "wrong"
        if kind < 0.95:
            items = [item.data async for item in self.calls.subscribe("count.up", {"n": 20})]
            return "right" if items == list(range(20)) else "wrong"
        if kind < 0.99:
            await self.calls.call("slow.sleep", {"seconds": 5}, timeout=0.01)
            return "wrong"
        task = asyncio.create_task(self.calls.call("slow.sleep", {"seconds": 5}))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return "cancelled"


async def cut_now_and_then(proxies: list[Proxy]) -> None:
    """Reset the connections of one caller after the other."""
    while proxies:
        for through in proxies:
            await asyncio.sleep(CUT_EVERY)
            through.cut()


@asynccontextmanager
async def loaded(
    name: str, request: pytest.FixtureRequest
) -> AsyncGenerator[tuple[Load, list[Proxy]]]:
    """One worker and one caller, whose connection can be cut."""
    world: Any = make_world(name, request)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        workers = await enter(world.serve(build_registry()))
        proxies: list[Proxy] = []
        if name == "memory":
            target = await enter(world.connect())
        else:
            target, through = await enter(cuttable(world))
            proxies.append(through)
        yield Load(world, workers, await enter(PendingRequestMap(target))), proxies


async def tell_every_minute() -> None:
    """Record memory, tasks and file descriptors of the process while it runs."""
    while True:
        note(REPORT, f"{resident_kilobytes()} KB, {len(asyncio.all_tasks())} tasks")
        await asyncio.sleep(60)


def held() -> tuple[int, int]:
    """Tasks and file descriptors."""
    return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only their number


@pytest.mark.requirement("R42", "F32")
@pytest.mark.timeout(2 * SECONDS + 120)
async def test_f32_mixed_load_with_faults_leaks_nothing(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    # Every cut is a warning, and pytest keeps them all.
    caplog.set_level(logging.ERROR, "operations")
    async with AsyncExitStack() as stack:
        entered = [await stack.enter_async_context(loaded(name, request)) for name in WORLDS]
        loads = [load for load, _ in entered]
        proxies = [through for _, some in entered for through in some]

        async def run(seconds: float, pause: float) -> None:
            beside = [
                asyncio.create_task(cut_now_and_then(proxies)),
                asyncio.create_task(tell_every_minute()),
            ]
            ends = time.monotonic() + seconds
            await asyncio.gather(*(load.run(ends, pause) for load in loads))
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            for load in loads:
                # Over the connection that may just have been replaced.
                assert (await load.calls.call("math.add", {"a": 1, "b": 2}, timeout=60)).data == 3
            gc.collect()
            await asyncio.sleep(1)

        await run(WARM_UP, 0.0)
        await run(WARM_UP, PAUSE)
        (tasks, descriptors), memory = held(), resident_kilobytes()
        await run(SECONDS, PAUSE)
        (tasks_after, descriptors_after), memory_after = held(), resident_kilobytes()
        for load in loads:
            assert len(load.calls) == 0
            assert all(worker.active == 0 and not worker.jobs for worker in load.workers)

    report = {load.world.name: dict(load.outcomes) for load in loads}
    growth = f"{memory_after - memory} KB, {tasks_after - tasks} tasks, {descriptors_after - descriptors} fds"
    note(REPORT, f"{SECONDS:g} s: {growth}; {report}")
    assert tasks_after <= tasks + 4
    assert descriptors_after <= descriptors + 4
    assert memory_after - memory < 20_000
    for outcomes in report.values():
        assert set(outcomes) <= {"right", "cancelled", *EXPECTED}
        assert outcomes["right"] > 100
        assert outcomes.get(ErrorCode.UNAVAILABLE, 0) < sum(outcomes.values()) / 50
