"""The interoperable mode: which topics are subscribed to, and when they are released."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.calls.waiting import until
from tests.limits import time_limit
from tests.servers import Broker, RedisServer, running
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from operations import OperationRegistry
from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, serve_calls
from operations.pubsub.redis import connect_redis_interop
from operations.pubsub.websocket import AcceptedTarget, connect_websocket, serve_websocket


@asynccontextmanager
async def peer() -> AsyncGenerator[tuple[str, list[tuple[str, str]], list[ServerConnection]]]:
    """A WebSocket server that keeps the control messages it gets, and its connections."""
    controls: list[tuple[str, str]] = []
    connections: list[ServerConnection] = []

    async def keep(connection: ServerConnection) -> None:
        connections.append(connection)
        async for message in connection:
            frame: Any = json.loads(message)
            if frame["type"].startswith("__"):
                controls.append((frame["type"], frame["payload"]["topic"]))

    async with serve(keep, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}", controls, connections


CALLER = {"call.responded:", "call.completed:", "call.error:", "call.aborted:"}
WORKER = {"call.requested:", "call.credit:"}


@pytest.mark.requirement("R50")
async def test_a_topic_is_subscribed_once_and_released_when_its_last_listener_leaves() -> None:
    async with peer() as (url, controls, _), connect_websocket(url, interop=True) as target:
        with time_limit(20):
            first, second = PendingRequestMap(target), PendingRequestMap(target)
            await first.open()
            await second.open()
            async with serve_calls(OperationRegistry(), target):
                await until(lambda: len(controls) == 6)
                assert sorted(controls) == sorted(
                    ("__subscribe", topic) for topic in CALLER | WORKER
                )
                controls.clear()
            await until(lambda: len(controls) == 2)
            assert sorted(controls) == sorted(("__unsubscribe", topic) for topic in WORKER)
            controls.clear()
            await first.aclose()
            await second.aclose()
            await until(lambda: len(controls) == 4)

    assert sorted(controls) == sorted(("__unsubscribe", topic) for topic in CALLER)


@pytest.mark.requirement("R50")
async def test_a_new_connection_subscribes_to_every_topic_once() -> None:
    async with (
        peer() as (url, controls, connections),
        connect_websocket(url, interop=True) as target,
        PendingRequestMap(target),
    ):
        with time_limit(30):
            await until(lambda: len(controls) == 4)
            controls.clear()
            await connections[0].close()
            await until(lambda: len(controls) == 4)
            # Earlier messages arrive before the answer to this one.
            await (await connections[1].ping())
        assert sorted(controls) == sorted(("__subscribe", topic) for topic in CALLER)


@pytest.mark.requirement("R50", "R33")
async def test_a_server_reads_a_long_subscription_of_its_client() -> None:
    registry = OperationRegistry()
    count = 1000
    received: list[int] = []
    done = asyncio.Event()

    @registry.operation("count.up")
    async def up(n: int) -> AsyncGenerator[int]:
        for number in range(n):
            yield number

    async def attach(target: AcceptedTarget) -> None:
        async with PendingRequestMap(target) as calls:
            await target.wants("call.requested:")
            items = calls.subscribe("count.up", {"n": count})
            received.extend([item.data async for item in items])
            done.set()

    async with serve_websocket(attach, interop=True) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with (
            connect_websocket(f"ws://127.0.0.1:{port}", interop=True) as target,
            serve_calls(registry, target),
        ):
            with time_limit(20):
                await done.wait()

    assert received == list(range(count))


async def test_a_control_message_may_have_other_fields() -> None:
    subscribed = asyncio.Event()

    async def attach(target: AcceptedTarget) -> None:
        async with PendingRequestMap(target):
            with time_limit(20):
                await target.wants("call.requested:")
            subscribed.set()

    async with serve_websocket(attach, interop=True) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with connect(f"ws://127.0.0.1:{port}") as socket:
            payload = {"topic": "call.requested:", "requestId": 7}
            await socket.send(json.dumps({"type": "__subscribe", "payload": payload}))
            with time_limit(20):
                await subscribed.wait()


def one_operation() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("math.one", type="query")
    async def one() -> int:
        return 1

    return registry


@pytest.fixture(scope="module")
def broker() -> Any:
    with running(RedisServer()) as started:
        yield started


@pytest.mark.requirement("R50", "R32")
async def test_over_redis_a_missing_worker_is_reported_at_once(broker: Broker) -> None:
    async with (
        connect_redis_interop(broker.url, prefix="none:") as near,
        connect_redis_interop(broker.url, prefix="none:") as far,
        PendingRequestMap(near) as calls,
        PendingRequestMap(far),
    ):
        with time_limit(20):
            for _ in range(2):
                with pytest.raises(CallError) as caught:
                    await calls.call("math.one")
                assert caught.value.code == ErrorCode.UNAVAILABLE
                # A worker that serves, and then stops.
                async with serve_calls(one_operation(), far):
                    assert (await calls.call("math.one")).data == 1


@pytest.mark.requirement("R50", "R34")
async def test_over_redis_subscriptions_survive_a_new_connection(broker: Broker) -> None:
    async with (
        connect_redis_interop(broker.url, prefix="again:") as near,
        connect_redis_interop(broker.url, prefix="again:") as far,
        serve_calls(one_operation(), far),
        PendingRequestMap(near) as calls,
        connect_redis_interop(broker.url) as admin,
    ):
        assert (await calls.call("math.one")).data == 1
        await admin.link.request("CLIENT", "KILL", "TYPE", "pubsub")
        with time_limit(40):
            while True:
                try:
                    assert (await calls.call("math.one", timeout=2)).data == 1
                    break
                except CallError:
                    await asyncio.sleep(0.05)


@pytest.mark.requirement("R34", "R50")
async def test_over_redis_a_request_runs_while_another_connection_is_restored(
    broker: Broker,
) -> None:
    registry = OperationRegistry()
    ran = asyncio.Event()

    @registry.operation("task.run")
    async def run() -> str:
        ran.set()
        return "done"

    payload = {"requestId": "r1", "operationId": "task.run", "input": {}}
    request = json.dumps({"type": "call.requested", "id": "", "payload": payload})
    async with (
        connect_redis_interop(broker.url, prefix="half:") as target,
        serve_calls(registry, target),
        Redis.from_url(broker.url) as redis,
        redis.pubsub() as replies,
    ):
        await replies.subscribe("half:call.responded:")
        assert (await replies.get_message(timeout=60))["type"] == "subscribe"
        commands = await target.link.request("CLIENT", "ID")
        # Redis accepts no new connection until this is undone.
        await redis.config_set("maxclients", 1)
        try:
            await redis.client_kill_filter(_id=commands)
            await until(lambda: not target.is_connected)
            await redis.publish("half:call.requested:", request)
            with time_limit(20):
                await ran.wait()
        finally:
            await redis.config_set("maxclients", 10_000)
        reply = await replies.get_message(timeout=60)

    assert json.loads(reply["data"])["payload"]["output"]["data"] == "done"


@pytest.mark.requirement("R13", "R50")
async def test_over_redis_a_malformed_request_with_an_id_gets_an_error(broker: Broker) -> None:
    payload = {"requestId": "r1", "operationId": 7}
    event = json.dumps({"type": "call.requested", "id": "", "payload": payload})
    async with (
        connect_redis_interop(broker.url, prefix="odd:") as target,
        serve_calls(one_operation(), target),
        Redis.from_url(broker.url) as redis,
        redis.pubsub() as errors,
    ):
        await errors.subscribe("odd:call.error:")
        assert (await errors.get_message(timeout=60))["type"] == "subscribe"
        await redis.publish("odd:call.requested:", event)
        message = await errors.get_message(timeout=60)

    assert json.loads(message["data"])["payload"]["code"] == "VALIDATION_ERROR"
