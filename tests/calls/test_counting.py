"""Faults F8 and F9: both ends count the unread items of a subscription equally."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from tests.calls.waiting import until
from tests.limits import time_limit

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, serve_calls
from operations.contract.envelopes import (
    ResponseEnvelope,
    TextContent,
    local_envelope,
    mcp_envelope,
)
from operations.pubsub.base import Delivery
from operations.pubsub.memory import MemoryTarget
from operations.registry import OperationRegistry
from operations.registry.middleware import Call, NextStream

# Tracing tens of thousands of items would take most of a minute.
pytestmark = pytest.mark.no_cover


def flags() -> ResponseEnvelope[Any]:
    """As text it is five times as large as packed."""
    return local_envelope([False] * 9_000, "flood.start")


def content() -> ResponseEnvelope[Any]:
    """Most of its size is not data."""
    return mcp_envelope(None, is_error=False, content=[TextContent(text="x" * 200_000)])


def tiny() -> ResponseEnvelope[Any]:
    """Most of its size is the frame."""
    return local_envelope(1, "flood.start")


def flooding(item: Callable[[], ResponseEnvelope[Any]], count: int) -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("flood.start")
    async def flood() -> Any:
        for _ in range(count):
            yield item()

    return registry


async def as_it_is(call: Call, following: NextStream) -> AsyncGenerator[ResponseEnvelope[Any]]:
    async for envelope in following(call):
        yield envelope


@pytest.mark.requirement("R33", "F8")
@pytest.mark.parametrize("way", ["directly", "through a middleware"])
@pytest.mark.parametrize(
    ("item", "count", "window"), [(flags, 60, 256), (content, 60, 256), (tiny, 30_000, 50_000)]
)
async def test_f8_a_reader_counts_items_as_its_worker_does(
    item: Callable[[], ResponseEnvelope[Any]], count: int, window: int, way: str
) -> None:
    registry = flooding(item, count)
    if way == "through a middleware":
        registry.use(as_it_is)
    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        # A reader that miscounts its credit would wait for ever.
        stream = calls.subscribe("flood.start", window=window, idle_timeout=30)
        assert len([None async for _ in stream]) == count


@pytest.mark.requirement("F9")
@pytest.mark.parametrize(("item", "count"), [(flags, 300), (content, 100), (tiny, 3_000)])
async def test_f9_a_producer_that_ignores_its_bounds_is_cut_off_with_an_error(
    item: Callable[[], ResponseEnvelope[Any]], count: int
) -> None:
    # A worker that does not support credit and sends as fast as it can.
    target = MemoryTarget()
    async with (
        serve_calls(flooding(item, count), target) as server,
        PendingRequestMap(target) as calls,
    ):
        original = server.receive

        def without_credit(delivery: Delivery) -> None:
            original(delivery)
            for job in server.jobs.values():
                job.pace = None

        server.receive = without_credit  # type: ignore[method-assign]
        await server.aclose()
        await server.start()
        stream = calls.subscribe("flood.start")
        items = 0
        with time_limit(60), pytest.raises(CallError) as caught:
            async for _ in stream:
                items += 1
                # A reader that stops after its first item; items that were buffered until the end are still delivered.
                await until(lambda: server.active == 0)

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    # At most 8 MiB, and 1,000 items, wait for the reader, which already has one or two.
    assert 0 < items <= {tiny: 1002, flags: 200, content: 60}[item]
