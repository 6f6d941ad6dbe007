"""Real brokers for every test that asks for a world."""

import asyncio
import gc
import inspect
from collections.abc import AsyncGenerator, Iterator

import pytest
from tests.calls.operations_under_test import build_registry
from tests.calls.worlds import MemoryWorld, WebSocketWorld, World, nats_world, redis_world
from tests.servers import Broker, NatsServer, RedisServer, running

from operations.registry import OperationRegistry

WORLDS = ("memory", "redis", "nats", "websocket")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Broker]:
    with running(RedisServer()) as broker:
        yield broker


@pytest.fixture(scope="session")
def nats_server() -> Iterator[Broker]:
    with running(NatsServer()) as broker:
        yield broker


def make_world(name: str, request: pytest.FixtureRequest) -> World:
    if name == "redis":
        return redis_world(request.getfixturevalue("redis_server").url)
    if name == "nats":
        return nats_world(request.getfixturevalue("nats_server").url)
    return MemoryWorld() if name == "memory" else WebSocketWorld()


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    """Every transport, one after the other."""
    return make_world(request.param, request)


@pytest.fixture(params=("redis", "nats"))
def broker_world(request: pytest.FixtureRequest) -> World:
    """The transports with a broker in between."""
    return make_world(request.param, request)


@pytest.fixture
def registry() -> OperationRegistry:
    return build_registry()


@pytest.fixture(autouse=True)
def nothing_unheard(request: pytest.FixtureRequest) -> None:
    """No test leaves an exception behind that nobody looked at."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("complaints")


@pytest.fixture
async def complaints(anyio_backend: str) -> AsyncGenerator[list[str]]:
    """What the event loop complains of; nothing, at the end."""
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(repr(context)))
    yield complaints
    gc.collect()
    await asyncio.sleep(0)
    assert not complaints
