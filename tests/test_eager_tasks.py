"""Everything works if the program lets its loop start tasks eagerly (Python 3.12)."""

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest
from tests.limits import scaled

from operations import CallError, ErrorCode, OperationRegistry
from operations.calls import PendingRequestMap, from_calls, serve_calls
from operations.pubsub.memory import MemoryTarget

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks never start eagerly")


@pytest.fixture(autouse=True)
async def eager(anyio_backend: str) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        loop.set_task_factory(asyncio.eager_task_factory)
    yield
    loop.set_task_factory(None)


async def test_waiting_calls_do_not_run_inside_each_other(registry: OperationRegistry) -> None:
    begin = asyncio.Event()

    @registry.operation("work.add", type="query")
    async def add(a: int) -> int:
        await begin.wait()
        return a + 1

    target = MemoryTarget()
    async with serve_calls(registry, target, concurrency=1), PendingRequestMap(target) as calls:
        waiting = [asyncio.create_task(calls.call("work.add", {"a": a})) for a in range(1_000)]
        begin.set()
        results = await asyncio.gather(*waiting)

    assert [each.data for each in results] == list(range(1, 1_001))


async def test_a_call_times_out_with_its_own_code(registry: OperationRegistry) -> None:
    @registry.operation("work.hang")
    async def hang() -> None:
        await asyncio.Event().wait()

    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        for call in (calls.call, registry.execute):
            with pytest.raises(CallError) as caught:
                await call("work.hang", {}, timeout=0.05)
            assert caught.value.code == ErrorCode.TIMEOUT


async def test_an_import_follows_its_worker(registry: OperationRegistry) -> None:
    @registry.operation("work.count")
    async def count(to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number

    target = MemoryTarget()
    async with serve_calls(registry, target), from_calls(target) as remote:
        here = OperationRegistry()
        here.register_all(remote)
        items = [item.data async for item in here.subscribe("work.count", {"to": 3})]
        changed = asyncio.Event()
        here.watch(lambda _: changed.set())
        registry.unregister("work.count")
        async with asyncio.timeout(scaled(20)):
            await changed.wait()

    assert items == [0, 1, 2]
