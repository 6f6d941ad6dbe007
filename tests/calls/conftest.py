"""Real brokers for every test that asks for a world."""

from collections.abc import Iterator

import pytest
from tests.calls.operations_under_test import build_registry
from tests.calls.worlds import (
    BrokerWorld,
    MemoryWorld,
    WebSocketWorld,
    World,
    jetstream_world,
    nats_world,
    redis_world,
)
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


@pytest.fixture(scope="session")
def jetstream_server() -> Iterator[Broker]:
    broker = NatsServer("-js")
    broker.options = ("-js", "-sd", broker.folder)
    with running(broker):
        yield broker


def make_world(name: str, request: pytest.FixtureRequest) -> World:
    if name == "redis":
        return redis_world(request.getfixturevalue("redis_server").url)
    if name == "nats":
        return nats_world(request.getfixturevalue("nats_server").url)
    if name == "jetstream":
        return jetstream_world(request.getfixturevalue("jetstream_server").url)
    return MemoryWorld() if name == "memory" else WebSocketWorld()


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    """Every transport, one after the other."""
    return make_world(request.param, request)


@pytest.fixture(params=("redis", "nats"))
def broker_world(request: pytest.FixtureRequest) -> World:
    """The transports with a broker in between."""
    return make_world(request.param, request)


@pytest.fixture(params=("redis", "nats", "websocket"))
def remote_world(request: pytest.FixtureRequest) -> World:
    """The transports over which another process can be reached."""
    return make_world(request.param, request)


@pytest.fixture(params=("redis", "nats", "jetstream", "websocket"))
def restarted_world(request: pytest.FixtureRequest) -> World:
    """The transports over which a worker can be started again, with queues in JetStream."""
    return make_world(request.param, request)


@pytest.fixture(params=("redis", "nats"))
def own_broker(request: pytest.FixtureRequest) -> Iterator[tuple[Broker, BrokerWorld]]:
    """A broker that a test may kill."""
    with running(RedisServer() if request.param == "redis" else NatsServer()) as broker:
        yield broker, (redis_world if request.param == "redis" else nats_world)(broker.url)


@pytest.fixture
def registry() -> OperationRegistry:
    return build_registry()


@pytest.fixture(autouse=True)
def nothing_left_of_calls(nothing_left: None) -> None:
    """Check that no test of this folder leaves tasks, exceptions or memory behind."""
