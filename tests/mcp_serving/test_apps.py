"""MCP Apps of imported servers: views of two copies of a server behind one hub."""

from base64 import b64decode
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from mcp.server.apps import Apps, client_supports_apps
from mcp.server.mcpserver import Context, MCPServer
from tests.mcp_serving.support import serving
from tests.mcp_serving.test_tasks import Client

from operations import OperationContext, OperationRegistry
from operations.front.search import Gateway, visible_specs
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.mcp.serving.apps import bridge
from operations.tools import ToolConfig, configure_tools

UI = "io.modelcontextprotocol/ui"
HOST: dict[str, Any] = {"extensions": {UI: {"mimeTypes": ["text/html;profile=mcp-app"]}}}
PAGE = "<!doctype html><html><head><title>Clock</title></head><body></body></html>"


def clock(place: str) -> MCPServer:
    """Return a server with a view, the tool that opens it, and a tool for the view only."""
    apps = Apps()

    @apps.tool(resource_uri="ui://clock/app.html", description="The time")
    def get_time(context: Context) -> str:
        return f"noon in {place}, {client_supports_apps(context)}"

    @apps.tool(resource_uri="ui://clock/app.html", visibility=["app"], description="Refresh")
    def refresh_clock() -> str:
        return f"later in {place}"

    apps.add_html_resource("ui://clock/app.html", PAGE, csp=None)
    server = MCPServer("clock", extensions=[apps])

    @server.resource("ui://hidden/{name}.html", mime_type="text/html;profile=mcp-app")
    def hidden(name: str) -> str:
        return f"<p>{name} in {place}</p>"

    return server


@asynccontextmanager
async def hub(*places: str) -> AsyncGenerator[tuple[Client, OperationRegistry]]:
    """Serve a hub in front of a clock in each place."""
    registry = OperationRegistry()
    async with AsyncExitStack() as stack:
        for place in places:
            connection = connect_mcp(place, MCPClientConfig(server=clock(place)))
            registry.register_all(await stack.enter_async_context(connection))
        app = to_mcp(registry, disclosure="tools").asgi_app()
        async with serving(app) as address, aiohttp.ClientSession() as http:
            yield Client(http, address), registry


async def listed(client: Client, capabilities: dict[str, Any]) -> dict[str, Any]:
    """Return the listed tools by name."""
    found = await client.post("tools/list", {}, capabilities)
    return {tool["name"]: tool for tool in found["result"]["tools"]}


async def read(client: Client, uri: str) -> dict[str, Any]:
    """Return the only content of a resource."""
    found = await client.post("resources/read", {"uri": uri}, HOST, named=uri)
    (content,) = found["result"]["contents"]
    assert isinstance(content, dict)
    return content


@pytest.mark.requirement("R77")
async def test_views_of_two_servers_have_different_addresses_that_stay_views() -> None:
    async with hub("oslo", "rome") as (client, _):
        tools = await listed(client, HOST)
        resources = (await client.post("resources/list", {}, HOST))["result"]["resources"]
        uris = {name: tool["_meta"]["ui"]["resourceUri"] for name, tool in tools.items()}
        pages = [await read(client, uris[f"{place}__get_time"]) for place in ("oslo", "rome")]

    assert uris["oslo__get_time"] == "ui://oslo/clock/app.html"
    assert uris["rome__get_time"] == "ui://rome/clock/app.html"
    assert sorted(each["uri"] for each in resources) == sorted(set(uris.values()))
    assert [page["uri"] for page in pages] == [uris["oslo__get_time"], uris["rome__get_time"]]
    for place, page in zip(("oslo", "rome"), pages, strict=True):
        assert page["mimeType"] == "text/html;profile=mcp-app"
        head, _, rest = page["text"].partition("<title>")
        assert f'"refresh_clock":"{place}__refresh_clock"' in head
        assert rest == "Clock</title></head><body></body></html>"


async def test_a_resource_that_is_not_listed_can_be_read() -> None:
    async with hub("oslo", "rome") as (client, _):
        content = await read(client, "ui://rome/hidden/a.html")

    assert content["uri"] == "ui://rome/hidden/a.html"
    assert content["text"].endswith("<p>a in rome</p>")


async def test_a_view_reaches_the_tools_of_its_own_server() -> None:
    async with hub("oslo", "rome") as (client, _):
        # The script in the view writes the names of this server.
        result = await client.call("rome__refresh_clock", {}, HOST)
        ambiguous = await client.call("refresh_clock", {}, HOST)
    async with hub("oslo") as (client, _):
        alone = await client.call("refresh_clock", {}, HOST)

    assert result["content"][0]["text"] == "later in rome"
    assert ambiguous["code"] == -32602
    assert alone["content"][0]["text"] == "later in oslo"


async def test_models_do_not_see_tools_that_only_views_call() -> None:
    async with hub("oslo", "rome") as (client, registry):
        for_hosts, for_others = await listed(client, HOST), await listed(client, {})
        caller = OperationContext(registry=registry)
        found = await Gateway(registry).search("refresh clock", caller)
        names = {spec.id for spec in visible_specs(registry, caller)}
        described = Gateway(registry).schema("oslo.refresh_clock", caller)
        app = to_mcp(registry, disclosure="gateway").asgi_app()
        async with serving(app) as address, aiohttp.ClientSession() as http:
            asked = {"operation": "oslo.refresh_clock"}
            refused = await Client(http, address).call("schema", asked, {})

    assert "oslo__refresh_clock" in for_hosts
    assert "oslo__get_time" in for_others
    assert not any("refresh" in name for name in for_others)
    assert not any("refresh" in each.id for each in found)
    assert "oslo.refresh_clock" in names
    # People and programs that name the operation see its contract.
    assert described["name"] == "refresh_clock"
    assert refused["isError"]


async def test_servers_are_told_that_views_can_be_shown() -> None:
    async with hub("oslo", "rome") as (client, _):
        result = await client.call("oslo__get_time", {}, HOST)
        offered = (await client.post("server/discover", {}))["result"]["capabilities"]

    assert result["content"][0]["text"] == "noon in oslo, True"
    assert UI in offered["extensions"]


@pytest.mark.parametrize("extensions", [[], ["com.example/other"]])
async def test_the_operator_limits_the_extensions(extensions: list[str]) -> None:
    config = MCPClientConfig(server=clock("oslo"), extensions=extensions)
    async with connect_mcp("oslo", config) as client:
        registry = OperationRegistry(client)
        result = (await registry.execute("oslo.get_time", {})).data

    assert result["result"] == "noon in oslo, False"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<!doctype html><html lang='a>b'><!-- <head> --><head class=x>", "<title>T</title>"),
        ("<!DOCTYPE html>", "\n<p>'<html><head>'</p>"),
        ("", "<script>const page = '<head>';</script>"),
        ("<!--><html>", "<body>"),
        ("\ufeff <head>", ""),
        ("<html>", "<header>"),
        ("", "<!-- <head>"),
        ("", "<html '"),
    ],
)
def test_the_script_of_a_view_runs_before_its_content(before: str, after: str) -> None:
    result = {"contents": [{"mimeType": "text/html;profile=mcp-app", "text": before + after}]}
    bridge(result, "oslo", {})
    page = result["contents"][0]["text"]

    assert page.startswith(f"{before}<script>")
    assert page.endswith(f"</script>{after}")


@pytest.mark.requirement("R67")
@pytest.mark.parametrize("tag", ["<head ", "<!doctype", "<html '", "<!--", '<html a="" '])
def test_the_time_for_a_view_grows_with_its_length(tag: str) -> None:
    """A time that grows with the square of the length would exceed the limit of the test by far."""
    text = tag * (4_000_000 // len(tag))
    result = {"contents": [{"mimeType": "text/html;profile=mcp-app", "text": text}]}
    bridge(result, "oslo", {})

    assert result["contents"][0]["text"].endswith(text)


async def test_a_renamed_tool_keeps_its_view_and_its_server() -> None:
    async with hub("oslo", "rome") as (client, registry):
        configure_tools(
            registry,
            {
                "oslo.get_time": ToolConfig(rename="rome.clock"),
                "oslo.refresh_clock": ToolConfig(rename="elsewhere.again"),
            },
        )
        tools = await listed(client, HOST)
        uri = tools["rome__clock"]["_meta"]["ui"]["resourceUri"]
        page = await read(client, uri)
        offered = (await client.post("server/discover", {}))["result"]["capabilities"]

    assert uri == "ui://oslo/clock/app.html"
    assert '"refresh_clock":"elsewhere__again"' in page["text"]
    assert '"get_time":"rome__clock"' in page["text"]
    assert "rome__get_time" not in page["text"]
    assert set(offered["extensions"]["alkdev.operations/sources"]) == {"oslo", "rome"}


@pytest.mark.parametrize("blob", ["x" * 5, "é", "PGI+"])
def test_a_view_that_is_not_base64_passes_unchanged(blob: str) -> None:
    """The host reports it, as with a direct connection."""
    result = {"contents": [{"mimeType": "text/html;profile=mcp-app", "blob": blob}]}
    bridge(result, "oslo", {})
    (content,) = result["contents"]

    if blob == "PGI+":
        assert b64decode(content["blob"]).endswith(b"</script><b>")
    else:
        assert content["blob"] == blob
