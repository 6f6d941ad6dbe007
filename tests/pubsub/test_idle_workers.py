"""How much an idle worker on Redis asks the server."""

import asyncio
from time import monotonic
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.servers import RedisServer, running

from operations.calls import PendingRequestMap, serve_calls
from operations.pubsub.redis import connect_redis
from operations.registry import OperationRegistry

_SECONDS = 6

_PER_SECOND = 2
"""Commands of an idle worker, including those in scripts."""

_ONCE = 4
"""Commands that are not repeated as often, such as comparing the clocks."""


async def commands(admin: Any) -> int:
    """Return the number of commands that the server has run."""
    counts = await admin.info("commandstats")
    return sum(each["calls"] for each in counts.values())


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 50])
async def test_an_idle_worker_sends_two_commands_per_second(
    registry: OperationRegistry, count: int
) -> None:
    @registry.operation("task.read", type="query")
    async def read() -> int:
        return 1

    clients = [f"client{number}" for number in range(count)]
    with running(RedisServer()) as broker:
        async with (
            connect_redis(broker.url, connect_timeout=30, clients=clients) as there,
            serve_calls(registry, there),
            Redis(port=broker.port) as admin,
        ):
            async with (
                connect_redis(broker.url, connect_timeout=30, client=clients[-1]) as here,
                PendingRequestMap(here) as calls,
            ):
                assert (await calls.call("task.read")).data == 1
            # The last read for requests that keep arriving has ended.
            await asyncio.sleep(1)
            before, began = await commands(admin), monotonic()
            await asyncio.sleep(_SECONDS)
            sent = await commands(admin) - before

    assert sent <= _PER_SECOND * (monotonic() - began) + _ONCE
