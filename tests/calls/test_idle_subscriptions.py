"""A subscription has no deadline but an idle timeout, which the worker enforces for every caller."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from tests.calls.waiting import until
from tests.limits import time_limit
from tests.receivers import SilentReceiver

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, serve_calls
from operations.pubsub.base import Delivery
from operations.pubsub.memory import MemoryTarget
from operations.registry import OperationRegistry

ME = "box.me"


class Plain(SilentReceiver):
    """A minimal caller, with requests and answers only."""

    def __init__(self, target: MemoryTarget) -> None:
        self._target = target
        self._events: asyncio.Queue[Any] = asyncio.Queue()

    async def request(self, operation_id: str, **wishes: Any) -> None:
        await self._target.listen((ME,), self)
        payload: dict[str, Any] = {"requestId": "r1", "operationId": operation_id, **wishes}
        body = msgspec.json.encode({"type": "call.requested", "id": "", "payload": payload})
        await self._target.enqueue("operations", body, key="r1", reply_to=ME, wait=1)

    async def next(self) -> Any:
        with time_limit(20):
            return await self._events.get()

    def receive(self, delivery: Delivery) -> None:
        self._events.put_nowait(msgspec.json.decode(delivery.body))


@pytest.fixture
def ticking() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("clock.tick")
    async def tick() -> AsyncGenerator[int]:
        for number in range(8):
            yield number
            await asyncio.sleep(0.15)

    @registry.operation("clock.stop")
    async def stop() -> AsyncGenerator[int]:
        yield 0
        await asyncio.sleep(60)

    @registry.operation("clock.read", type="query")
    async def read() -> None:
        await asyncio.sleep(60)

    return registry


@pytest.mark.parametrize("wishes", [{}, {"idleTimeout": 2000}])
async def test_a_plain_subscription_continues_while_items_come(
    ticking: OperationRegistry, monkeypatch: pytest.MonkeyPatch, wishes: dict[str, Any]
) -> None:
    monkeypatch.setattr("operations.calls.serving.jobs.DEFAULT_TIMEOUT", 1)
    target = MemoryTarget()
    plain = Plain(target)
    async with serve_calls(ticking, target):
        await plain.request("clock.tick", **wishes)
        types = [(await plain.next())["type"] for _ in range(9)]

    assert types == ["call.responded"] * 8 + ["call.completed"]


@pytest.mark.parametrize("wishes", [{}, {"idleTimeout": 500}, {"idleTimeout": 500, "credit": 8}])
async def test_a_subscription_without_items_ends_where_it_runs(
    ticking: OperationRegistry, monkeypatch: pytest.MonkeyPatch, wishes: dict[str, Any]
) -> None:
    monkeypatch.setattr("operations.calls.serving.jobs.DEFAULT_TIMEOUT", 0.5)
    target = MemoryTarget()
    plain = Plain(target)
    async with serve_calls(ticking, target) as worker:
        await plain.request("clock.stop", **wishes)
        assert (await plain.next())["type"] == "call.responded"
        error = await plain.next()
        await until(lambda: worker.active == 0)

    assert (error["type"], error["payload"]["code"]) == ("call.error", ErrorCode.TIMEOUT)


async def test_a_call_ignores_the_idle_timeout(
    ticking: OperationRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.calls.serving.jobs.DEFAULT_TIMEOUT", 0.5)
    target = MemoryTarget()
    plain = Plain(target)
    async with serve_calls(ticking, target):
        await plain.request("clock.read", idleTimeout=60_000)
        error = await plain.next()

    assert (error["type"], error["payload"]["code"]) == ("call.error", ErrorCode.TIMEOUT)


async def test_a_deadline_applies_even_while_items_arrive(ticking: OperationRegistry) -> None:
    target = MemoryTarget()
    plain = Plain(target)
    async with serve_calls(ticking, target):
        await plain.request("clock.tick", idleTimeout=60_000, timeoutMs=500)
        items = 0
        while (event := await plain.next())["type"] == "call.responded":
            items += 1

    assert 0 < items < 8
    assert event["payload"]["code"] == ErrorCode.TIMEOUT


async def test_a_slow_reader_is_not_idle(ticking: OperationRegistry) -> None:
    target = MemoryTarget()
    seen: list[Any] = []
    async with serve_calls(ticking, target), PendingRequestMap(target) as calls:
        stream = calls.subscribe("clock.tick", {}, window=1, idle_timeout=1)
        async for item in stream:
            seen.append(item.data)
            if item.data == 2:
                # The worker has the next one, and may not send it.
                await asyncio.sleep(2)

    assert seen == list(range(8))


async def test_a_describing_worker_counts_as_a_subscription(ticking: OperationRegistry) -> None:
    target = MemoryTarget()
    plain = Plain(target)
    async with serve_calls(ticking, target) as worker:
        await plain.request("services.describe")
        job = next(iter(worker.jobs.values()))
        assert job.ends_at == float("inf")
        assert (await plain.next())["type"] == "call.responded"


async def test_a_quiet_subscription_ends_its_reader_with_timeout(
    ticking: OperationRegistry,
) -> None:
    target = MemoryTarget()
    async with serve_calls(ticking, target) as worker, PendingRequestMap(target) as calls:
        stream = calls.subscribe("clock.stop", {}, idle_timeout=0.5)
        assert (await anext(stream)).data == 0
        with pytest.raises(CallError) as caught:
            await anext(stream)
        await until(lambda: worker.active == 0)

    assert caught.value.code == ErrorCode.TIMEOUT
