"""What a hub passes on beside results: errors of the protocol, freshness of lists, and who the servers are."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
import pytest
from mcp import Client, MCPError
from mcp.server import Server
from mcp.server.caching import CacheHint
from tests.mcp_serving.support import ERAS, example

from operations import AccessControl, OperationRegistry
from operations.base.types import JSONObject
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.mcp.shared.codec import SOURCES_KEY

BOTH = pytest.mark.parametrize("era", ERAS)

ICON = {"src": "https://example.org/icon.png", "mimeType": "image/png"}


def server(error: MCPError | None = None, hints: Any = None, **options: Any) -> Server[Any]:
    """A server with one tool, one resource and one prompt, which raise an error."""

    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        tool = {
            "name": "buy",
            "inputSchema": {"type": "object"},
            "execution": {"taskSupport": "optional"},
            "icons": [ICON],
        }
        return types.ListToolsResult(tools=[types.Tool.model_validate(tool, by_name=False)])

    async def list_resources(_context: Any, _params: Any) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=[types.Resource(uri="note://a", name="a")])

    async def list_prompts(_context: Any, _params: Any) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=[types.Prompt(name="ask")])

    async def fail(_context: Any, _params: Any) -> Any:
        assert error is not None
        raise error

    return Server(
        "far",
        version="1.2",
        title="Far shop",
        website_url="https://example.org",
        icons=[types.Icon.model_validate(ICON, by_name=False)],
        on_list_tools=list_tools,
        on_call_tool=fail,
        on_list_resources=list_resources,
        on_read_resource=fail,
        on_list_prompts=list_prompts,
        on_get_prompt=fail,
        cache_hints=hints,
        **options,
    )


@asynccontextmanager
async def hub(far: Any, era: str = "auto", **options: Any) -> AsyncGenerator[Client]:
    """A client of a hub in front of a server."""
    async with connect_mcp("far", MCPClientConfig(server=far, **options)) as imported:
        registry = OperationRegistry(imported)
        async with Client(to_mcp(registry), mode=era) as client:
            yield client


OPEN_THIS: JSONObject = {
    "elicitations": [
        {
            "mode": "url",
            "elicitationId": "1",
            "url": "https://example.org/pay?order=7",
            "message": "Pay the order",
        }
    ]
}
ERRORS = [
    MCPError(types.URL_ELICITATION_REQUIRED, "This needs a payment", OPEN_THIS),
    MCPError(types.INVALID_PARAMS, "no such order"),
    MCPError(-32050, "no luck", {"why": "today"}),
]


@BOTH
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error.code))
async def test_an_error_of_the_protocol_passes_as_at_a_direct_connection(
    era: str, error: MCPError
) -> None:
    async def errors(client: Client) -> list[Any]:
        found = list[Any]()
        (tool,) = (await client.list_tools()).tools
        (prompt,) = (await client.list_prompts()).prompts
        for request in (
            client.call_tool(tool.name, {}),
            client.read_resource("note://a"),
            client.get_prompt(prompt.name),
        ):
            with pytest.raises(MCPError) as caught:
                await request
            found.append((caught.value.code, caught.value.message, caught.value.data))
        return found

    async with Client(server(error), mode=era) as client:
        direct = await errors(client)
    async with hub(server(error), era) as client:
        through = await errors(client)

    assert through == direct == [(error.code, error.message, error.data)] * 3


async def test_an_error_of_the_connection_to_a_server_is_a_result() -> None:
    error = MCPError(types.UNSUPPORTED_PROTOCOL_VERSION, "not this one")
    async with hub(server(error)) as client:
        result = await client.call_tool("far__buy", {})

    assert result.is_error


HINTS = {
    "tools/list": CacheHint(ttl_ms=5_000, scope="public"),
    "prompts/list": CacheHint(ttl_ms=90_000, scope="private"),
}


async def freshness(client: Client, method: str = "list_tools") -> tuple[int, str]:
    listed = await getattr(client, method)()
    return listed.ttl_ms, listed.cache_scope


async def test_lists_state_for_how_long_they_are_valid() -> None:
    async with hub(server(hints=HINTS), version="2026-07-28") as client:
        tools = await freshness(client)
        prompts = await freshness(client, "list_prompts")
        resources = await freshness(client, "list_resources")
    async with hub(server(hints=HINTS), version="2025-11-25") as client:
        older = await freshness(client)
    async with Client(to_mcp(OperationRegistry())) as client:
        empty = await freshness(client)

    assert tools == (5_000, "public")
    assert prompts == (60_000, "private")
    assert resources == (0, "private")  # as the server itself states by default
    assert older == empty == (60_000, "public")


async def test_a_list_that_hides_operations_is_private() -> None:
    async with Client(to_mcp(example())) as client:
        hides_some = await freshness(client)

    assert hides_some == (60_000, "private")


async def test_a_list_that_another_source_will_extend_is_not_cached() -> None:
    registry = OperationRegistry()
    registry.follow_sources(is_absent=lambda _: False, awaits_any=lambda: True)
    async with Client(to_mcp(registry)) as client:
        assert await freshness(client) == (0, "private")


@BOTH
async def test_the_self_description_of_a_server_is_kept_per_namespace(era: str) -> None:
    async with hub(server(), era, version="2025-11-25") as client:
        listed = await client.list_tools()
    (tool,) = listed.tools

    assert listed.meta is not None
    assert listed.meta[SOURCES_KEY] == {
        "far": {
            "name": "far",
            "version": "1.2",
            "title": "Far shop",
            "websiteUrl": "https://example.org",
            "icons": [ICON],
        }
    }
    wire = tool.model_dump(by_alias=True, mode="json", exclude_none=True)
    assert wire["icons"] == [ICON]
    expected = {"taskSupport": "optional"} if era == "legacy" else None
    assert wire.get("execution") == expected


async def test_callers_see_only_the_servers_whose_tools_they_see() -> None:
    async with hub(server(), access=AccessControl(["buy"])) as client:
        listed = await client.list_tools()

    assert listed.meta is None or SOURCES_KEY not in listed.meta


async def test_a_connection_has_the_self_description_of_its_server() -> None:
    async with connect_mcp("far", MCPClientConfig(server=server())) as far:
        info = far.server_info

    assert info is not None
    assert (info.name, info.title, info.version) == ("far", "Far shop", "1.2")
    assert (info.website_url, list(info.icons)) == ("https://example.org", [ICON])
