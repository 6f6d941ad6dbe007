"""Calls over a network on which a round trip to the broker takes a large part of a second."""

import asyncio

import pytest
from redis.asyncio import Redis
from tests.calls.worlds import BrokerWorld, redis_world
from tests.limits import time_limit
from tests.servers import Broker, Proxy, proxy

from operations.calls import PendingRequestMap
from operations.registry import OperationRegistry


@pytest.fixture
def world(redis_server: Broker) -> BrokerWorld:
    return redis_world(redis_server.url)


async def pieces(calls: PendingRequestMap, through: Proxy, count: int) -> int:
    """Return in how many pieces the messages of `count` concurrent calls arrive if each takes 75 ms."""
    through.delay = 0.075
    before = through.pieces
    with time_limit(100):
        results = await asyncio.gather(
            *(calls.call("math.add", {"a": n, "b": 1}, timeout=60) for n in range(count))
        )
    assert [each.data for each in results] == [n + 1 for n in range(count)]
    return through.pieces - before


async def test_a_worker_far_from_redis_starts_queries_in_batches(
    world: BrokerWorld, redis_server: Broker, registry: OperationRegistry
) -> None:
    async with (
        proxy(redis_server.port) as through,
        world.serve(registry, url=f"redis://127.0.0.1:{through.port}"),
        world.connect() as target,
        PendingRequestMap(target) as calls,
    ):
        await calls.call("math.add", {"a": 1, "b": 1})

        # With two round trips for each call, there would be 1,200.
        assert await pieces(calls, through, 300) < 400


async def test_a_caller_far_from_redis_reads_replies_in_large_batches(
    world: BrokerWorld, redis_server: Broker, registry: OperationRegistry
) -> None:
    async with (
        proxy(redis_server.port) as through,
        world.serve(registry),
        world.connect(url=f"redis://127.0.0.1:{through.port}") as target,
        PendingRequestMap(target) as calls,
        Redis.from_url(redis_server.url) as admin,
    ):
        await admin.config_set("slowlog-max-len", 100_000)
        await admin.config_set("slowlog-log-slower-than", 0)
        try:
            assert await pieces(calls, through, 2000) < 4000
            words = [each["command"].split() for each in await admin.slowlog_get(100_000)]
        finally:
            await admin.config_set("slowlog-log-slower-than", 10_000)
        batches = {int(each[2]) for each in words if each[0] == b"XREAD" and each[3] == b"BLOCK"}
        # How many replies one read finds depends on the load of the machine; in batches of 64, it would find no more.
        assert batches
        assert min(batches) > 64
