"""What the servers behind a hub offer, and what of a request reaches them."""

from typing import Any

import aiohttp
import pytest
from mcp import Client as SDKClient
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import Context, MCPServer
from starlette.requests import Request
from tests.mcp_serving.support import serving
from tests.mcp_serving.test_tasks import TASKS, Client

from operations import AccessControl, Identity, OperationRegistry
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp

SOURCES = "alkdev.operations/sources"
OTHER = "com.example/other"
UI = "io.modelcontextprotocol/ui"


class Offering(MCPServer):
    """A server with an extension that this library does not know."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(name)
        server: Server[Any] = self._lowlevel_server
        server.extensions = {OTHER: settings}

        @self.tool()
        def told(context: Context) -> list[str]:
            meta: Any = context.request_context.meta or {}
            return sorted(key for key in meta if key in ("baggage", "traceparent"))


async def offered(registry: OperationRegistry, **settings: Any) -> dict[str, Any]:
    app = to_mcp(registry, **settings).asgi_app()
    async with serving(app) as url, aiohttp.ClientSession() as http:
        found = await Client(http, url).post("server/discover", {}, {})
    extensions: dict[str, Any] = found["result"]["capabilities"].get("extensions") or {}
    return extensions


@pytest.mark.requirement("R77")
async def test_a_hub_lists_the_extensions_of_its_servers_by_namespace() -> None:
    registry = OperationRegistry()
    secret = AccessControl(["never"])
    async with (
        connect_mcp("a", MCPClientConfig(server=Offering("a", level=1))) as a,
        connect_mcp("b", MCPClientConfig(server=Offering("b", level=2))) as b,
        connect_mcp("c", MCPClientConfig(server=Offering("c"), access=secret)) as c,
        connect_mcp("d", MCPClientConfig(server=MCPServer("d"))) as d,
    ):
        for client in (a, b, c, d):
            registry.register_all(client)
        found = await offered(registry)
        limited = await offered(registry, extensions=["io.modelcontextprotocol/tasks"])

    assert found[SOURCES] == {
        "a": {"extensions": {OTHER: {"level": 1}}},
        "b": {"extensions": {OTHER: {"level": 2}}},
    }
    assert SOURCES not in limited


async def test_settings_that_are_too_large_are_not_listed() -> None:
    async with connect_mcp("a", MCPClientConfig(server=Offering("a", text="x" * 9_000))) as a:
        registry = OperationRegistry(a)
        found = await offered(registry)

    assert found[SOURCES] == {"a": {"extensions": {OTHER: {}}}}


@pytest.mark.requirement("R77")
@pytest.mark.parametrize("mode", ["legacy", "auto"])
@pytest.mark.parametrize("lean", [False, True])
async def test_baggage_reaches_only_servers_that_are_configured_for_it(
    mode: Any, lean: bool
) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    meta: Any = {"baggage": "tenant=7", "traceparent": parent}
    registry = OperationRegistry()

    async with (
        connect_mcp("a", MCPClientConfig(server=Offering("a"))) as a,
        connect_mcp("b", MCPClientConfig(server=Offering("b"), baggage=True)) as b,
    ):
        registry.register_all(a)
        registry.register_all(b)
        app = to_mcp(registry).asgi_app(lean=lean)
        async with serving(app) as url, SDKClient(f"{url}/mcp", mode=mode) as client:
            told = [
                (await client.call_tool(f"{name}__told", {}, meta=meta)).structured_content
                for name in ("a", "b")
            ]

    assert told == [{"result": ["traceparent"]}, {"result": ["baggage", "traceparent"]}]


@pytest.mark.requirement("R77")
@pytest.mark.parametrize(
    ("config", "reaches"),
    [
        ({"per_caller": True}, {"com.example/zones": {"level": 3}, UI: {"mimeTypes": ["x/y"]}}),
        (
            {"per_caller": True, "extensions": ["com.example/zones"]},
            {"com.example/zones": {"level": 3}},
        ),
        ({"per_caller": True, "extensions": []}, {}),
        ({}, {UI: {"mimeTypes": ["text/html;profile=mcp-app"]}}),
        ({"extensions": ["com.example/zones"]}, {"com.example/zones": {}}),
    ],
)
async def test_what_a_client_declares_reaches_only_connections_of_its_own(
    config: dict[str, Any], reaches: dict[str, Any]
) -> None:
    upstream = MCPServer("up")

    @upstream.tool()
    def declared(context: Context) -> dict[str, Any]:
        found = context.request_context.session.client_params
        return {} if found is None else dict(found.capabilities.extensions or {})

    async def identify(_: Request) -> Identity:
        return Identity("ada", [])

    async with (
        serving(upstream.streamable_http_app()) as address,
        connect_mcp("up", MCPClientConfig(url=f"{address}/mcp", **config)) as client,
    ):
        app = to_mcp(OperationRegistry(client), identify=identify, disclosure="tools").asgi_app()
        async with serving(app) as url, aiohttp.ClientSession() as http:
            sent = {"com.example/zones": {"level": 3}, UI: {"mimeTypes": ["x/y"]}, TASKS: {}}
            result = await Client(http, url).call("up__declared", {}, {"extensions": sent})

    assert result["structuredContent"] == reaches
