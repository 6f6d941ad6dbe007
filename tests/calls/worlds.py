"""Each transport as a `World`, in which callers connect and workers serve in the same way."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from secrets import token_hex
from typing import Any, Protocol

from tests.servers import Proxy, free_port, proxy

from operations.calls import CallServer, PendingRequestMap, serve_calls
from operations.pubsub.base import EventTarget
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis import connect_redis
from operations.pubsub.websocket import AcceptedTarget, connect_websocket, serve_websocket
from operations.registry import OperationRegistry

Workers = list[CallServer]


class World(Protocol):
    """A transport for the tests of calls."""

    name: str

    def connect(self, **options: Any) -> AbstractAsyncContextManager[EventTarget]:
        """A caller's own connection."""
        ...

    def serve(
        self, registry: OperationRegistry, **options: Any
    ) -> AbstractAsyncContextManager[Workers]:
        """A worker; on a WebSocket there is one for each connection."""
        ...


class MemoryWorld:
    name = "memory"

    def __init__(self) -> None:
        self.target = MemoryTarget()

    @asynccontextmanager
    async def connect(self, **options: Any) -> AsyncGenerator[EventTarget]:
        yield self.target

    @asynccontextmanager
    async def serve(self, registry: OperationRegistry, **options: Any) -> AsyncGenerator[Workers]:
        async with serve_calls(registry, self.target, **options) as server:
            yield [server]


class BrokerWorld:
    def __init__(
        self, name: str, url: str, open_target: Callable[..., Any], **options: Any
    ) -> None:
        self.name = name
        self.options = options
        self.url = url
        self.prefix = f"t{token_hex(4)}"
        self._open = open_target

    @asynccontextmanager
    async def connect(self, **options: Any) -> AsyncGenerator[EventTarget]:
        url = options.pop("url", self.url)
        prefix = self.prefix + (":" if self.name == "redis" else "")
        # Longer than by default: a busy machine is not what the tests check.
        options.setdefault("connect_timeout", 30)
        async with self._open(url, prefix=prefix, **self.options, **options) as target:
            yield target

    @asynccontextmanager
    async def serve(self, registry: OperationRegistry, **options: Any) -> AsyncGenerator[Workers]:
        url = options.pop("url", self.url)
        async with (
            self.connect(url=url, **options.pop("target", {})) as target,
            serve_calls(registry, target, **options) as server,
        ):
            yield [server]


class WebSocketWorld:
    name = "websocket"

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"ws://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def connect(self, **options: Any) -> AsyncGenerator[EventTarget]:
        url = options.pop("url", self.url)
        async with connect_websocket(url, **options) as target:
            yield target

    @asynccontextmanager
    async def serve(self, registry: OperationRegistry, **options: Any) -> AsyncGenerator[Workers]:
        workers: Workers = []
        accepted = options.pop("target", {})

        async def attach(target: AcceptedTarget) -> None:
            target.trusted = bool(accepted.get("trusted"))
            async with serve_calls(registry, target, **options) as server:
                workers.append(server)
                await target.wait_closed()
            # Its connection is lost, and no other client has it.
            assert server.active == 0
            workers.remove(server)

        async with serve_websocket(attach, port=self.port, identify=accepted.get("identify")):
            yield workers


def redis_world(url: str) -> BrokerWorld:
    return BrokerWorld("redis", url, connect_redis)


def nats_world(url: str) -> BrokerWorld:
    return BrokerWorld("nats", url, connect_nats)


def jetstream_world(url: str) -> BrokerWorld:
    return BrokerWorld("nats", url, connect_nats, queue="jetstream")


@asynccontextmanager
async def cuttable(
    world: BrokerWorld | WebSocketWorld,
) -> AsyncGenerator[tuple[EventTarget, Proxy]]:
    """A caller's own connection, and the proxy it goes through."""
    host, _, port = world.url.rpartition(":")
    async with (
        proxy(int(port)) as through,
        world.connect(url=f"{host}:{through.port}") as target,
    ):
        yield target, through


@asynccontextmanager
async def calling(
    world: World, registry: OperationRegistry, **options: Any
) -> AsyncGenerator[PendingRequestMap]:
    """One worker and one caller in `world`."""
    async with (
        world.serve(registry, **options),
        world.connect() as target,
        PendingRequestMap(target) as calls,
    ):
        yield calls


@asynccontextmanager
async def calling_through(
    world: BrokerWorld | WebSocketWorld, registry: OperationRegistry
) -> AsyncGenerator[tuple[PendingRequestMap, Proxy]]:
    """One worker and one caller in `world`, and the proxy between the caller and the rest."""
    async with (
        world.serve(registry),
        cuttable(world) as (target, through),
        PendingRequestMap(target) as calls,
    ):
        await calls.call("math.add", {"a": 1, "b": 1})
        yield calls, through
