"""Operations that are resources, templates and prompts, and the changes that are announced to clients."""

import asyncio
from base64 import b64decode
from typing import Any, Literal

import pytest
from mcp import Client, MCPError
from mcp_types import PromptReference, ResourceTemplateReference
from tests.limits import time_limit
from tests.mcp_serving.support import ERAS, PNG, example, tool_names

from operations import Identity, OperationRegistry, http_envelope, mcp_envelope
from operations.contract.envelopes import MCPResourceContent, ResourceContent, TextContent
from operations.mcp import RegistryServer, to_mcp

BOTH = pytest.mark.parametrize("era", ERAS)


def library() -> OperationRegistry:
    registry = OperationRegistry()

    def resource(uri: str, **options: Any) -> dict[str, Any]:
        return {"mcp": {"resource": {"uri": uri, **options}}}

    @registry.operation("book.motd", type="query", meta=resource("book://motd"))
    async def motd() -> str:
        """The message of the day."""
        return "hello"

    @registry.operation("book.cover", type="query", meta=resource("book://cover"))
    async def cover() -> bytes:
        return PNG

    @registry.operation("book.page", type="query", meta=resource("book://{title}/pages/{page}"))
    async def page(title: str, page: int, kind: Literal["a", "ab", "b"] = "a") -> dict[str, Any]:
        return {"title": title, "page": page}

    @registry.operation("book.secret", scopes=["x"], meta=resource("book://secret"))
    async def secret() -> str:
        return "s"

    @registry.operation("book.broken", meta=resource("book://{"))
    async def broken() -> str:
        return "s"

    @registry.operation("book.both", type="query", meta={"mcp": {"tool": True, "prompt": True}})
    async def both(topic: Literal["cats", "dogs"]) -> list[Any]:
        """Ask about a topic.

        Args:
            topic: What about.
        """
        return [f"About {topic}", {"role": "assistant", "content": "Yes?"}]

    @registry.operation("book.closed", scopes=["x"], meta={"mcp": {"prompt": True}})
    async def closed() -> str:
        return "s"

    return registry


@BOTH
async def test_operations_are_listed_by_their_marks(era: str) -> None:
    async with Client(to_mcp(library()), mode=era) as client:
        resources = (await client.list_resources()).resources
        templates = (await client.list_resource_templates()).resource_templates
        prompts = (await client.list_prompts()).prompts
        tools = await tool_names(client)

    assert [(str(item.uri), item.name) for item in resources] == [
        ("book://motd", "book.motd"),
        ("book://cover", "book.cover"),
    ]
    assert resources[0].description == "The message of the day."
    assert [item.uri_template for item in templates] == ["book://{title}/pages/{page}"]
    assert [prompt.name for prompt in prompts] == ["book__both"]
    (argument,) = prompts[0].arguments or []
    assert (argument.name, argument.description, argument.required) == (
        "topic",
        "What about.",
        True,
    )
    assert tools == ["book__both"]


@BOTH
async def test_resources_are_read_by_their_operations(era: str) -> None:
    async with Client(to_mcp(library()), mode=era) as client:
        (text,) = (await client.read_resource("book://motd")).contents
        (blob,) = (await client.read_resource("book://cover")).contents
        (data,) = (await client.read_resource("book://Emma/pages/7")).contents

    assert (text.mime_type, text.text) == ("text/plain", "hello")  # type: ignore[union-attr]
    assert (blob.mime_type, b64decode(blob.blob)) == ("image/png", PNG)  # type: ignore[union-attr]
    assert data.text == '{"title":"Emma","page":7}'  # type: ignore[union-attr]


@BOTH
@pytest.mark.parametrize("uri", ["book://secret", "book://nothing", "book://Emma/pages/7/8"])
@pytest.mark.requirement("R07")
async def test_resources_without_access_are_not_listed(era: str, uri: str) -> None:
    async with Client(to_mcp(library()), mode=era) as client:
        with pytest.raises(MCPError) as caught:
            await client.read_resource(uri)

    assert caught.value.code == (-32002 if era == "legacy" else -32602)


@BOTH
async def test_a_variable_that_does_not_match_is_rejected_by_the_operation(era: str) -> None:
    async with Client(to_mcp(library()), mode=era) as client:
        with pytest.raises(MCPError) as caught:
            await client.read_resource("book://Emma/pages/seven")

    assert caught.value.code == -32602
    assert caught.value.data["code"] == "VALIDATION_ERROR"


@BOTH
async def test_prompts_are_filled_in_by_their_operations(era: str) -> None:
    async with Client(to_mcp(library()), mode=era) as client:
        prompt = await client.get_prompt("book__both", {"topic": "cats"})
        for name in ("book__closed", "book__nothing"):
            with pytest.raises(MCPError):
                await client.get_prompt(name, {})
        with pytest.raises(MCPError, match='Did you mean "book__both"'):
            await client.get_prompt("book__bot", {})

    assert [(message.role, message.content.text) for message in prompt.messages] == [  # type: ignore[union-attr]
        ("user", "About cats"),
        ("assistant", "Yes?"),
    ]


@BOTH
async def test_prompts_and_resources_of_other_servers_are_passed_on(
    registry: OperationRegistry, era: str
) -> None:
    inside = MCPResourceContent(uri="far://x", mime_type="text/plain", text="far")
    envelope = mcp_envelope(
        None, is_error=False, content=[ResourceContent(resource=inside), TextContent(text="t")]
    )

    @registry.operation("far.prompt", meta={"mcp": {"prompt": True}})
    async def prompt() -> Any:
        return envelope

    @registry.operation("far.described", meta={"mcp": {"prompt": True}})
    async def described() -> Any:
        """Mine."""
        block = {"type": "text", "text": "b"}
        return {"description": "Theirs", "messages": [{"role": "assistant", "content": block}, 7]}

    @registry.operation("far.resource", meta={"mcp": {"resource": {"uri": "near://x"}}})
    async def resource() -> Any:
        return envelope

    @registry.operation("far.page", meta={"mcp": {"resource": {"uri": "near://page"}}})
    async def page() -> Any:
        return http_envelope("<p>", status_code=200, headers={}, content_type="text/html")

    async with Client(to_mcp(registry), mode=era) as client:
        passed = await client.get_prompt("far__prompt")
        theirs = await client.get_prompt("far__described")
        (read,) = (await client.read_resource("near://x")).contents
        (fetched,) = (await client.read_resource("near://page")).contents

    assert [message.content.type for message in passed.messages] == ["resource", "text"]
    assert theirs.description == "Theirs"
    assert [message.content.text for message in theirs.messages] == ["b", "7"]  # type: ignore[union-attr]
    assert (read.uri, read.text) == ("far://x", "far")  # type: ignore[union-attr]
    assert (fetched.mime_type, fetched.text) == ("text/html", "<p>")  # type: ignore[union-attr]


@BOTH
async def test_arguments_are_completed_from_the_values_their_schemas_list(era: str) -> None:
    async with Client(to_mcp(library()), mode=era) as client:
        prompt = PromptReference(type="ref/prompt", name="book__both")
        topics = await client.complete(prompt, {"name": "topic", "value": "c"})
        template = ResourceTemplateReference(type="ref/resource", uri="book://{title}/pages/{page}")
        kinds = await client.complete(template, {"name": "kind", "value": "a"})
        with pytest.raises(MCPError):
            nothing = ResourceTemplateReference(type="ref/resource", uri="book://{x}")
            await client.complete(nothing, {"name": "kind", "value": "a"})

    assert topics.completion.values == ["cats"]
    assert kinds.completion.values == ["a", "ab"]


async def until(condition: Any) -> None:
    with time_limit(20):
        while not condition():
            await asyncio.sleep(0.01)


def grow(registry: OperationRegistry) -> None:
    @registry.operation("new.tool")
    async def tool() -> int:
        return 1


async def test_older_clients_are_notified_of_changed_listings_only() -> None:
    registry, received = example(), list[str]()

    async def hear(message: Any) -> None:
        received.append(message.method)

    async with Client(to_mcp(registry), mode="legacy", message_handler=hear) as client:
        await client.list_tools()
        grow(registry)
        await until(lambda: received)
        assert "new__tool" in await tool_names(client)

    assert received == ["notifications/tools/list_changed"]


async def test_newer_clients_are_notified_of_changes_they_subscribe_to() -> None:
    registry = example()
    async with (
        Client(to_mcp(registry)) as client,
        client.listen(tools_list_changed=True) as changes,
    ):
        grow(registry)
        with time_limit(20):
            event = await anext(aiter(changes))

    assert type(event).__name__ == "ToolsListChanged"


@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
@pytest.mark.requirement("R11")
async def test_subscribers_of_a_resource_are_notified_of_updates() -> None:
    server: RegistryServer = to_mcp(library())
    received: list[str] = []

    async def hear(message: Any) -> None:
        received.append(str(message.params.uri))

    async with Client(server, mode="legacy", message_handler=hear) as client:
        await client.subscribe_resource("book://motd")
        with pytest.raises(MCPError):
            await client.subscribe_resource("book://secret")
        await server.resource_updated("book://motd")
        await server.resource_updated("book://secret")
        await until(lambda: received)
        await client.unsubscribe_resource("book://motd")
        await server.resource_updated("book://motd")
        await client.list_tools()

    assert received == ["book://motd"]


@pytest.mark.requirement("R11")
async def test_newer_clients_watch_resources_with_access() -> None:
    server = to_mcp(library(), identity=Identity("ann", []))
    async with (
        Client(server) as client,
        client.listen(resource_subscriptions=["book://secret", "book://motd"]) as changes,
    ):
        await server.resource_updated("book://secret")
        await server.resource_updated("book://motd")
        with time_limit(20):
            event = await anext(aiter(changes))

    assert event.uri == "book://motd"  # type: ignore[union-attr]
