"""Tasks of an imported server: they become runs of the hub."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.requests import Request
from tests.mcp_serving.support import serving
from tests.mcp_serving.test_tasks import ALL, Client, Shop

from operations import CallError, Identity, OperationContext, OperationRegistry
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.runs import Runs


async def identify(request: Request) -> Identity:
    return Identity(request.headers.get("x-user", "hub"), [])


class World:
    """A server with tasks, and a hub in front of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shop = Shop()
        self.upstream = OperationRegistry(runs=Runs(f"sqlite:{folder / 'up.db'}", grace=0.0))
        self.shop.fill(self.upstream)

    @asynccontextmanager
    async def server(self) -> AsyncGenerator[str]:
        """Serve the operations; yield the address."""
        app = to_mcp(self.upstream, identify=identify, task_after=0.05).asgi_app()
        async with self.upstream, serving(app) as address:
            yield address
            self.shop.gate.set()

    @asynccontextmanager
    async def hub(self, address: str, **config: Any) -> AsyncGenerator[OperationRegistry]:
        """Yield the registry of a hub."""
        registry = OperationRegistry(runs=Runs(f"sqlite:{self.folder / 'hub.db'}", grace=0.0))
        async with connect_mcp("up", MCPClientConfig(url=f"{address}/mcp", **config)) as client:
            registry.register_all(client)
            async with registry:
                yield registry

    @asynccontextmanager
    async def client(self, registry: OperationRegistry) -> AsyncGenerator[Client]:
        """Yield a client of a hub."""
        settings: dict[str, Any] = {"names": "dotted", "task_after": 0.05}
        app = to_mcp(registry, identify=identify, **settings).asgi_app()
        async with serving(app) as address, aiohttp.ClientSession() as http:
            yield Client(http, address)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.requirement("R77")
@pytest.mark.parametrize("name", ["wait", "fail", "quick"])
async def test_a_task_has_the_same_result_as_with_a_direct_connection(
    world: World, name: str
) -> None:
    world.shop.gate.set()
    async with world.server() as address, world.hub(address) as registry:
        found = []
        async with aiohttp.ClientSession() as http, world.client(registry) as through:
            direct = Client(http, address)
            for client, tool in ((direct, f"job__{name}"), (through, f"up.job__{name}")):
                result = await client.call(tool)
                if result["resultType"] == "task":
                    result = (await client.ended(result["taskId"]))["result"]
                found.append((result["content"], result.get("isError")))

    assert found[0] == found[1]


async def test_questions_of_a_task_reach_the_client_of_the_hub(world: World) -> None:
    async with (
        world.server() as address,
        world.hub(address) as registry,
        world.client(registry) as client,
    ):
        task_id = (await client.call("up.job__ask"))["taskId"]
        answered = dict[str, Any]()
        async with asyncio.timeout(30):
            while (state := await client.get(task_id))["status"] != "completed":
                for key, each in state.get("inputRequests", {}).items():
                    field = next(iter(each["params"]["requestedSchema"]["properties"]))
                    assert "$id" not in each["params"]["requestedSchema"]
                    value = {"name": "Ada", "place": "Rome"}[field]
                    answered[key] = {"action": "accept", "content": {field: value}}
                if answered:
                    await client.post(
                        "tasks/update", {"taskId": task_id, "inputResponses": answered}
                    )
                await asyncio.sleep(0.02)

    assert len(answered) == 2
    assert state["result"]["structuredContent"] == "Ada in Rome"


async def test_a_cancelled_run_cancels_the_task(world: World) -> None:
    async with (
        world.server() as address,
        world.hub(address) as registry,
        world.client(registry) as client,
    ):
        task_id = (await client.call("up.job__wait"))["taskId"]
        await world.shop.begun.wait()
        await client.post("tasks/cancel", {"taskId": task_id})
        ended = await client.ended(task_id)
        operator = OperationContext(trusted=True)
        async with asyncio.timeout(20):
            for each in (await world.upstream.runs(operator)).runs:
                run = await world.upstream.run(each.id, operator)
                async for state in run.watch():
                    last = state.status

    assert ended["status"] == "cancelled"
    assert last == "cancelled"


async def test_a_task_survives_a_restart_of_the_hub(world: World) -> None:
    async with world.server() as address:
        async with world.hub(address) as registry, world.client(registry) as client:
            task_id = (await client.call("up.job__wait"))["taskId"]
            await world.shop.begun.wait()
        async with world.hub(address) as registry, world.client(registry) as client:
            assert (await client.get(task_id))["status"] == "working"
            world.shop.gate.set()
            ended = await client.ended(task_id)
        started = (await world.upstream.runs(OperationContext(trusted=True))).runs

    assert ended["result"]["structuredContent"] == "done"
    assert len(started) == 1, "the call was repeated"


async def test_a_task_of_a_registry_without_runs_is_awaited(world: World) -> None:
    async with world.server() as address:
        config = MCPClientConfig(url=f"{address}/mcp")
        async with connect_mcp("up", config) as client:
            registry = OperationRegistry()
            registry.register_all(client)
            calling = asyncio.create_task(registry.execute("up.job__wait", {}))
            await world.shop.begun.wait()
            world.shop.gate.set()
            result = (await calling).data
            with pytest.raises(CallError):
                (await registry.execute("up.job__fail", {})).raise_for_error()

    assert result == "done"


async def test_tools_are_runs_as_the_configuration_says(world: World) -> None:
    async with world.server() as address, world.hub(address, durable=["*wait"]) as registry:
        durable = {each.spec.id for each in registry if each.durable}

    assert durable == {"up.job__wait"}


async def test_a_required_task_is_called_for_a_client_without_tasks(world: World) -> None:
    async with (
        world.server() as address,
        world.hub(address) as registry,
        world.client(registry) as client,
    ):
        world.shop.gate.set()
        result = await client.call("up.job__strict", {}, {})
        again = await client.call("up.job__strict", {}, ALL)
        if again["resultType"] == "task":
            again = (await client.ended(again["taskId"]))["result"]

    assert result["structuredContent"] == again["structuredContent"] == "done"
