"""`create_app` assembles everything that it is asked for, and its application can be started again."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from inspect import iscoroutinefunction
from typing import Any

import aiohttp
import pytest
from mcp import Client
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Mount
from tests.limits import time_limit

from operations import OperationRegistry
from operations.calls import PendingRequestMap
from operations.mcp import MCPServerSettings, to_mcp
from operations.pubsub.websocket import connect_websocket
from operations.server import create_app
from operations.server.app import create_probe_app
from operations.server.http11.running import running

pytestmark = pytest.mark.anyio


def registry() -> OperationRegistry:
    found = OperationRegistry()

    @found.operation("math.add", type="query")
    async def add(a: int, b: int) -> int:
        return a + b

    return found


async def tools_at(url: str) -> list[str]:
    async with Client(url) as client:
        result = await client.call_tool("math__add", {"a": 1, "b": 2})
        assert not result.is_error
        return [tool.name for tool in (await client.list_tools()).tools]


async def test_an_app_with_everything_needs_no_assembly_and_starts_twice() -> None:
    app = create_app(registry(), mcp=True, console=True, websocket=True)

    with time_limit(60):
        for _ in range(2):
            async with running(app) as url:
                assert await tools_at(f"{url}/mcp") == ["math__add"]
                async with (
                    connect_websocket(f"{url.replace('http', 'ws')}/ws") as target,
                    PendingRequestMap(target) as calls,
                ):
                    assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3


async def test_mcp_settings_are_used() -> None:
    settings = MCPServerSettings(names="dotted", instructions="Add numbers.")
    app = create_app(registry(), mcp=settings, timeout=7)

    with time_limit(60):
        async with running(app) as url, Client(f"{url}/mcp") as client:
            assert client.instructions == "Add numbers."
            assert [tool.name for tool in (await client.list_tools()).tools] == ["math.add"]


@pytest.mark.parametrize("framework", ["starlette", "fastapi"])
@pytest.mark.parametrize("has_lifespan", [True, False])
async def test_an_app_works_when_it_is_mounted(framework: str, has_lifespan: bool) -> None:
    app = create_app(registry(), mcp=True, console=True, websocket=True)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncGenerator[None]:
        async with app.router.lifespan_context(app) if has_lifespan else nullcontext():
            yield

    site = mounted(framework, "/hub", app, lifespan)

    with time_limit(60):
        for _ in range(2):
            async with running(site) as url:
                assert await tools_at(f"{url}/hub/mcp") == ["math__add"]


@pytest.mark.parametrize("framework", ["starlette", "fastapi"])
@pytest.mark.parametrize("path", ["/mcp", "/tools"])
async def test_an_mcp_server_alone_works_when_it_is_mounted(framework: str, path: str) -> None:
    site = mounted(framework, path, to_mcp(registry()).asgi_app(path=None))

    with time_limit(60):
        async with running(site) as url:
            assert await tools_at(f"{url}{path}/") == ["math__add"]


def mounted(framework: str, path: str, app: Any, lifespan: Any = None) -> Any:
    if framework == "starlette":
        return Starlette(routes=[Mount(path, app)], lifespan=lifespan)
    site = pytest.importorskip("fastapi").FastAPI(lifespan=lifespan)
    site.mount(path, app)
    return site


def test_what_has_no_effect_on_an_app_is_rejected() -> None:
    app = create_app(registry())

    with pytest.raises(TypeError, match="add_middleware"):
        app.add_exception_handler(404, lambda *_: Response())
    with pytest.raises(TypeError, match="mount it in"):
        app.add_route("/own", lambda _: Response())
    with pytest.raises(TypeError, match="mount it in"):
        app.mount("/own", Starlette())
    with pytest.raises(TypeError, match="mount it in"):
        app.host("example.org", Starlette())


def test_middleware_recognizes_an_application() -> None:
    def check(app: Any) -> Any:
        # asgiref, which the middleware of OpenTelemetry uses, calls anything else in the way of ASGI 2.
        assert iscoroutinefunction(app.__call__)
        return app

    for app in (create_app(registry()), create_probe_app(registry())):
        app.add_middleware(check)
        app.build_middleware_stack()


def test_mcp_is_imported_only_if_it_is_served() -> None:
    modules = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name == "operations.mcp"
    }
    try:
        create_app(registry(), console=True)
        assert "operations.mcp" not in sys.modules
    finally:
        sys.modules.update(modules)


@pytest.mark.requirement("R13")
async def test_a_binary_frame_does_not_end_a_websocket() -> None:
    payload = {"requestId": "r1", "operationId": "math.add", "input": {"a": 1, "b": 2}}
    app = create_app(registry(), websocket=True)
    async with (
        running(app) as url,
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{url}/ws") as socket,
    ):
        await socket.send_bytes(b"\xff\x00")
        await socket.send_json({"type": "call.requested", "id": "", "payload": payload})
        reply = await socket.receive_json(timeout=60)

    assert reply["type"] == "call.responded"


@pytest.mark.parametrize("serve", [create_app, to_mcp])
def test_operations_without_a_registry_are_rejected(serve: Any) -> None:
    with pytest.raises(TypeError, match="pass an OperationRegistry, not a list"):
        serve([])
