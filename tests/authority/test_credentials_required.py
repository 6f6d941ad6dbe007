"""Calls without a credential that wait for approval while credentials become required."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.limits import time_limit
from tests.mcp_opening import MCP_HEADERS
from tests.mcp_serving.test_http import post

from operations import CallError, OperationContext, OperationRegistry
from operations.authority import ApprovalRule
from operations.calls import PendingRequestMap
from operations.calls.socket import WebSocketHub
from operations.front.front import Front
from operations.pubsub.websocket import connect_websocket
from operations.server import create_app
from operations.server.http11.running import running
from operations.tools import ToolConfig, configure_tools

pytestmark = pytest.mark.anyio

Call = Callable[[], Awaitable[str]]
OPERATOR = OperationContext(trusted=True)


@asynccontextmanager
async def over_http(registry: OperationRegistry) -> AsyncGenerator[tuple[Front, dict[str, Call]]]:
    app = create_app(registry, identity=lambda _: None, mcp=True, websocket=True)
    async with running(app) as url, aiohttp.ClientSession(url) as session:

        async def send(path: str, **request: Any) -> str:
            async with session.post(path, **request) as response:
                return await response.text()

        called = post("tools/call", {"name": "task__delete"})
        assert called["headers"].items() >= MCP_HEADERS.items()
        batch = {"calls": [{"operation": "task.delete", "input": {}}]}
        yield (
            app.state.pipeline.front,
            {
                "http": lambda: send("/task/delete", json={}),
                "batch": lambda: send("/batch", json=batch),
                "mcp": lambda: send("/mcp", **called),
            },
        )


@asynccontextmanager
async def over_websocket(
    registry: OperationRegistry,
) -> AsyncGenerator[tuple[Front, dict[str, Call]]]:
    hub = WebSocketHub(registry)
    async with hub.serve() as server:
        port = server.sockets[0].getsockname()[1]
        async with (
            connect_websocket(f"ws://127.0.0.1:{port}") as target,
            PendingRequestMap(target) as calls,
        ):

            async def call() -> str:
                try:
                    return str((await calls.call("task.delete", {})).data)
                except CallError as error:
                    return error.code

            yield hub.front, {"websocket": call}


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        (over_http, "http"),
        (over_http, "batch"),
        (over_http, "mcp"),
        (over_websocket, "websocket"),
    ],
    ids=["http", "batch", "mcp", "websocket"],
)
@pytest.mark.parametrize("required", [True, False])
async def test_an_approved_call_needs_the_credential_that_became_required(
    entry: Any, name: str, required: bool
) -> None:
    registry, ran = OperationRegistry(), list[str]()

    @registry.operation("task.delete")
    async def delete() -> str:
        ran.append("deleted")
        return "deleted"

    configure_tools(registry, {"task.delete": ToolConfig(approve=ApprovalRule(hold=30))})
    registry.register_object(registry.authority.approvals)
    with time_limit(30):
        async with entry(registry) as (front, calls):
            call = asyncio.ensure_future(calls[name]())
            queue = registry.subscribe("approvals.watch", {}, OPERATOR)
            found: Any = []
            while not found:
                found = (await anext(queue)).data["approvals"]
            if required:
                front.credentials.admit_anonymous(is_admitted=False)
            answer = {"id": found[0]["id"], "approve": True}
            await registry.execute("approvals.answer", answer, OPERATOR)
            text = await call
            await queue.aclose()

    assert ran == ([] if required else ["deleted"])
    assert ("ACCESS_DENIED" if required else "deleted") in text
