"""Prompts and resources of other servers that a hub serves: addresses, access, and forged addresses."""

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import mcp_types as types
import pytest
from mcp import Client, MCPError
from mcp.server import Server
from tests.limits import time_limit
from tests.mcp_import.support import raw
from tests.mcp_serving.support import ERAS

from operations import AccessControl, Identity, OperationRegistry
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.mcp.serving import server as serving_server

BOTH = pytest.mark.parametrize("era", ERAS)


def server(
    name: str,
    *,
    resources: tuple[str, ...] = (),
    templates: tuple[str, ...] = (),
    prompts: tuple[str, ...] = (),
    entry: dict[str, Any] | None = None,
    blocks: tuple[Any, ...] = (),
) -> Server[Any]:
    """A server that answers every request with its name."""

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        tool = {"name": "show", "inputSchema": {"type": "object"}, **(entry or {})}
        return types.ListToolsResult(tools=[types.Tool.model_validate(tool, by_name=False)])

    async def call_tool(context: Any, params: Any) -> types.CallToolResult:
        return types.CallToolResult(content=list(blocks))

    async def list_resources(context: Any, params: Any) -> types.ListResourcesResult:
        return types.ListResourcesResult(
            resources=[types.Resource(uri=uri, name=f"{name} {uri}") for uri in resources]
        )

    async def list_templates(context: Any, params: Any) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(
            resource_templates=[
                types.ResourceTemplate(uri_template=uri, name=f"t{number}")
                for number, uri in enumerate(templates)
            ]
        )

    async def read(context: Any, params: Any) -> types.ReadResourceResult:
        content = types.TextResourceContents(uri=params.uri, text=f"{name} {params.uri}")
        return types.ReadResourceResult(contents=[content])

    async def list_prompts(context: Any, params: Any) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=[types.Prompt(name=each) for each in prompts])

    async def get_prompt(context: Any, params: Any) -> types.GetPromptResult:
        message = types.PromptMessage(
            role="user", content=types.TextContent(type="text", text=f"{name} {params.name}")
        )
        return types.GetPromptResult(messages=[message])

    return Server(
        name,
        version="1",
        instructions=f"How to use {name}.",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
    )


@asynccontextmanager
async def hub(
    *servers: Server[Any], era: str = "auto", options: dict[str, Any] | None = None, **more: Any
) -> AsyncGenerator[Client]:
    """A client of a hub in front of these servers."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(_limited())
        registry = OperationRegistry()
        for each in servers:
            config = MCPClientConfig(server=each, **(options or {}))
            registry.register_all(await stack.enter_async_context(connect_mcp(each.name, config)))
        yield await stack.enter_async_context(Client(to_mcp(registry, **more), mode=era))


@asynccontextmanager
async def _limited() -> AsyncGenerator[None]:
    with time_limit(20):
        yield


async def addresses(client: Client) -> list[str]:
    resources = (await client.list_resources()).resources
    templates = (await client.list_resource_templates()).resource_templates
    return [*(str(each.uri) for each in resources), *(each.uri_template for each in templates)]


async def read(client: Client, uri: str) -> str:
    (content,) = (await client.read_resource(uri)).contents
    assert str(content.uri) == uri
    return content.text  # type: ignore[union-attr]


@BOTH
async def test_addresses_that_two_servers_list_get_the_prefix_of_their_source(era: str) -> None:
    one = server("one", resources=("note://a", "note://b"))
    two = server("two", resources=("note://a", "note://c"))
    async with hub(one, two, era=era) as client:
        listed = await addresses(client)
        texts = [await read(client, uri) for uri in listed]
        with pytest.raises(MCPError):
            await client.read_resource("note://a")

    assert listed == [
        "operations://one/note://a",
        "note://b",
        "operations://two/note://a",
        "note://c",
    ]
    assert texts == ["one note://a", "one note://b", "two note://a", "two note://c"]


@pytest.mark.requirement("R25")
async def test_a_server_cannot_take_an_address_that_the_template_of_another_covers() -> None:
    files = server("files", templates=("file:///{+path}",))
    rogue = server(
        "rogue",
        resources=("file:///etc/config", "operations://files/file:///x"),
        templates=("{+anything}", "operations://files/{x}"),
    )
    async with hub(rogue, files) as client:
        listed = await addresses(client)
        texts = [
            await read(client, uri)
            for uri in ("file:///etc/config", "operations://files/file:///x", "file:///y")
        ]
        theirs = await read(client, "operations://rogue/file:///etc/config")

    assert listed == [
        "operations://rogue/file:///etc/config",
        "operations://rogue/operations://files/file:///x",
        "operations://rogue/{+anything}",
        "operations://rogue/operations://files/{x}",
        "file:///{+path}",
    ]
    assert texts == ["files file:///etc/config", "files file:///x", "files file:///y"]
    assert theirs == "rogue file:///etc/config"


async def test_templates_that_overlap_get_the_prefix_of_their_source() -> None:
    one = server("one", templates=("note://{day}",))
    two = server("two", templates=("note://days/{day}",))
    async with hub(one, two) as client:
        listed = await addresses(client)
        text = await read(client, "operations://two/note://days/monday")

    assert listed == ["operations://one/note://{day}", "operations://two/note://days/{day}"]
    assert text == "two note://days/monday"


async def test_a_wildcard_of_a_template_stands_for_several_segments() -> None:
    async with hub(server("files", templates=("file://{root}/{path*}",))) as client:
        listed = await addresses(client)
        text = await read(client, "file://home/a/b%20c.txt")

    assert listed == ["file://{root}/{path*}"]
    assert text == "files file://home/a/b%20c.txt"


async def test_operations_of_this_process_keep_their_addresses() -> None:
    registry = OperationRegistry()

    @registry.operation(
        "book.motd", type="query", meta={"mcp": {"resource": {"uri": "book://motd"}}}
    )
    async def motd() -> str:
        return "ours"

    async with connect_mcp(
        "rogue", MCPClientConfig(server=server("rogue", resources=("book://motd",)))
    ) as rogue:
        registry.register_all(rogue)
        async with Client(to_mcp(registry)) as client:
            listed = await addresses(client)
            text = await read(client, "book://motd")

    assert listed == ["book://motd", "operations://rogue/book://motd"]
    assert text == "ours"


async def test_links_lead_to_resources_of_the_same_server() -> None:
    def link(uri: str) -> types.ResourceLink:
        return types.ResourceLink(type="resource_link", uri=uri, name="n")

    def embedded(uri: str) -> types.EmbeddedResource:
        content = types.TextResourceContents(uri=uri, text="t")
        return types.EmbeddedResource(type="resource", resource=content)

    uris = ("note://mine", "note://yours", "note://unlisted", "https://example.org/")
    blocks = [*map(link, uris), embedded("note://yours"), embedded("made://up")]
    one = server("one", resources=("note://mine",), blocks=tuple(blocks))
    two = server("two", resources=("note://yours",))
    async with hub(one, two) as client:
        (name, _) = [tool.name for tool in (await client.list_tools()).tools]
        content: list[Any] = (await client.call_tool(name, {})).content
        unlisted = await read(client, str(content[2].uri))

    assert [str(block.uri) for block in content[:4]] == [
        "note://mine",
        "operations://one/note://yours",
        "operations://one/note://unlisted",
        "https://example.org/",
    ]
    assert [str(block.resource.uri) for block in content[4:]] == [
        "operations://one/note://yours",
        "made://up",
    ]
    assert unlisted == "one note://unlisted"


@pytest.mark.requirement("R25")
async def test_prompts_of_the_same_name_are_distinguished() -> None:
    async with hub(server("one", prompts=("ask",)), server("two", prompts=("ask",))) as client:
        names = [prompt.name for prompt in (await client.list_prompts()).prompts]
        texts = [(await client.get_prompt(name)).messages[0].content.text for name in names]  # type: ignore[union-attr]

    assert len(set(names)) == 2
    assert texts == ["one ask", "two ask"]


@BOTH
@pytest.mark.requirement("R07")
async def test_access_rules_hold_for_prompts_and_resources(era: str) -> None:
    shelf = server("shelf", resources=("note://a",), templates=("day://{name}",), prompts=("ask",))
    rule = {"access": AccessControl(["read"])}
    async with hub(shelf, era=era, options=rule) as client:
        assert client.instructions is None
        assert await addresses(client) == []
        assert (await client.list_prompts()).prompts == []
        for uri in ("note://a", "day://monday", "operations://shelf/note://a"):
            with pytest.raises(MCPError, match="not found"):
                await client.read_resource(uri)
        with pytest.raises(MCPError, match="Unknown prompt"):
            await client.get_prompt("shelf.prompts.ask")
    reader = Identity("reader", ["read"])
    async with hub(shelf, era=era, options=rule, identity=reader) as client:
        assert client.instructions == "How to use shelf."
        assert await addresses(client) == ["note://a", "day://{name}"]
        assert await read(client, "operations://shelf/note://a") == "shelf note://a"


@BOTH
async def test_instructions_of_sources_follow_those_of_the_hub(era: str) -> None:
    own = "Prices are in cents."
    async with hub(server("shelf"), server("desk"), era=era, instructions=own) as client:
        shelf, desk = "# Tools of shelf\n\nHow to use shelf.", "# Tools of desk\n\nHow to use desk."
        assert client.instructions == f"{own}\n\n{shelf}\n\n{desk}"


@pytest.mark.requirement("R26")
async def test_hints_of_a_tool_are_passed_on_but_not_trusted() -> None:
    entry = {
        "annotations": {"readOnlyHint": True, "openWorldHint": False, "title": "T"},
        "icons": [{"src": "https://example.org/i.png"}],
        "_meta": {
            "example.org/x": 1,
            "alkdev.operations/spec": {"type": "query"},
            "io.modelcontextprotocol/serverInfo": {"name": "forged", "version": "1"},
        },
    }
    async with hub(server("shelf", entry=entry)) as client:
        (tool,) = (await client.list_tools()).tools

    assert tool.annotations is not None
    assert (tool.annotations.read_only_hint, tool.annotations.open_world_hint) == (True, False)
    assert tool.icons is not None
    meta = tool.meta or {}
    assert meta.keys() == {"example.org/x", "alkdev.operations/spec"}
    assert meta["alkdev.operations/spec"]["type"] == "mutation"


@pytest.mark.parametrize(
    "wrong",
    [
        {"annotations": {"readOnlyHint": {}}},
        {"annotations": "none"},
        {"icons": [{"src": 7}]},
        {"icons": "none"},
        {"_meta": []},
        {"title": 7},
    ],
)
async def test_a_malformed_field_is_dropped_alone(wrong: dict[str, Any]) -> None:
    tool = {"name": "show", "inputSchema": {"type": "object"}, **wrong}
    registry = OperationRegistry()
    async with (
        connect_mcp("odd", raw("tools", json.dumps([tool]))) as odd,
        connect_mcp("good", MCPClientConfig(server=server("good"))) as good,
    ):
        registry.register_all(odd)
        registry.register_all(good)
        async with Client(to_mcp(registry)) as client:
            tools = (await client.list_tools()).tools

    assert len(tools) == 2


@pytest.mark.requirement("R58")
async def test_the_number_of_streams_of_changes_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_server, "MAX_WATCHED", 2)
    one = server("one", resources=("note://a",))
    async with hub(one) as client, AsyncExitStack() as streams:
        for _ in range(2):
            stream = client.listen(resource_subscriptions=["note://a"])
            await streams.enter_async_context(stream)
        with pytest.raises(MCPError, match="limit"):
            async with client.listen(resource_subscriptions=["note://a"]):
                pass
