"""A hub in front of two real servers gives a client everything that direct connections give, counted by kind."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.server import Server
from mcp_types import (
    CallToolResult,
    CreateMessageResult,
    ElicitResult,
    EmptyResult,
    ListResourcesResult,
    ListRootsResult,
    ListToolsResult,
    PromptReference,
    Resource,
    ResourceUpdatedNotification,
    Root,
    TextContent,
    Tool,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import FileUrl
from tests.limits import time_limit
from tests.mcp_import.support import install_node_servers
from tests.mcp_serving.support import ERAS, serving
from tests.servers import free_port, wait_for_port

from operations import OperationRegistry
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp

pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")

HERE = Path(__file__).parent
EVERYTHING = HERE.parent / "mcp_import" / "node_modules" / ".bin" / "mcp-server-everything"

CALLS: dict[str, dict[str, Any]] = {
    "touch": {"uri": "note://today"},
    "report": {},
    "ask_person": {},
    "ask_model": {},
    "ask_roots": {},
    "echo": {"message": "hello"},
    "get-annotated-message": {"messageType": "error", "includeImage": True},
    "get-resource-links": {"count": 2},
    "get-structured-content": {"location": "Chicago"},
    "toggle-simulated-logging": {},
    "trigger-long-running-operation": {"duration": 0.2, "steps": 4},
    "trigger-elicitation-request": {},
    "trigger-sampling-request": {"prompt": "say", "maxTokens": 10},
}


SENT = {"example.org/note": "n", "example.org/api-key": "CANARY", "alkdev.operations/x": 1}


class Person:
    """A client of the SDK that can do everything, and counts what it gets."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.updated = anyio.Event()
        self.instructions: list[str] = []
        self.simulated: set[str] = set()
        self.received: set[str] = set()
        """The keys of `_meta` that a server received."""

    async def elicit(self, context: Any, params: Any) -> ElicitResult:
        self.count["elicitations"] += 1
        return ElicitResult(action="accept", content={"name": "Ada"})

    async def sample(self, context: Any, params: Any) -> CreateMessageResult:
        self.count["samplings"] += 1
        content = TextContent(type="text", text="a completion")
        return CreateMessageResult(role="assistant", content=content, model="m")

    async def roots(self, context: Any) -> ListRootsResult:
        self.count["roots"] += 1
        return ListRootsResult(roots=[Root(uri=FileUrl("file:///a"), name="a")])

    async def log(self, params: Any) -> None:
        text = str(params.data).lower()
        if "level" in text and "message" in text:
            # The server sends another one every five seconds: only whether they arrive is counted.
            if self.simulated:
                return
            self.simulated.add(text)
        if "roots" not in text:
            self.count["logs"] += 1
            self.count["loggers"] += params.logger is not None

    async def hear(self, message: Any) -> None:
        if isinstance(message, ResourceUpdatedNotification):
            self.updated.set()

    async def progress(self, done: float, total: float | None, message: str | None) -> None:
        self.count["progress"] += 1

    @asynccontextmanager
    async def connected(self, server: Any, era: str) -> AsyncGenerator[Client]:
        async with Client(
            server,
            mode=era,
            elicitation_callback=self.elicit,
            sampling_callback=self.sample,
            list_roots_callback=self.roots,
            logging_callback=self.log,
            log_level="debug",
            message_handler=self.hear,
        ) as client:
            yield client

    async def take(self, client: Client) -> None:
        """Use everything that the server behind `client` lists."""
        self.instructions.append(client.instructions or "")
        for tool in await self._tools(client):
            self.count["tools"] += 1
            self.count["titles"] += tool.title is not None
            self.count["icons"] += len(tool.icons or [])
            self.count["hints"] += len(_hints(tool))
            self.count["meta"] += "example.org/kind" in (tool.meta or {})
            name = tool.name.rpartition("__")[2].rpartition(".")[2]
            if name in CALLS:
                result = await client.call_tool(
                    tool.name,
                    CALLS[name],
                    progress_callback=cast("Any", self.progress),
                    meta=cast("Any", SENT),
                )
                assert not result.is_error, (tool.name, result)
                self.count["blocks"] += len(result.content)
                self.count["annotated"] += sum(
                    getattr(block, "annotations", None) is not None for block in result.content
                )
                self.count["meta"] += "example.org/mark" in (result.meta or {})
                received = (result.meta or {}).get("example.org/received", [])
                self.count["sent meta"] += "example.org/note" in received
                self.received |= set(received)
        for prompt in (await client.list_prompts()).prompts:
            self.count["prompts"] += 1
            self.count["icons"] += len(prompt.icons or [])
            self.count["meta"] += "example.org/kind" in (prompt.meta or {})
            arguments = {each.name: "Text" for each in prompt.arguments or []}
            if "resourceId" in arguments:
                arguments["resourceId"] = "1"
            got = await client.get_prompt(prompt.name, arguments)
            self.count["messages"] += len(got.messages)
            self.count["descriptions"] += got.description is not None
            for argument in arguments:
                reference = PromptReference(type="ref/prompt", name=prompt.name)
                found = await client.complete(reference, {"name": argument, "value": ""})
                self.count["completions"] += len(found.completion.values)
        for resource in (await client.list_resources()).resources:
            self.count["resources"] += 1
            self.count["icons"] += len(resource.icons or [])
            self.count["annotated"] += resource.annotations is not None
            self.count["sizes"] += resource.size is not None
            self.count["meta"] += "example.org/kind" in (resource.meta or {})
            read = await client.read_resource(str(resource.uri))
            self.count["contents"] += len(read.contents)
            self.count["meta"] += "example.org/mark" in (read.contents[0].meta or {})
        for template in (await client.list_resource_templates()).resource_templates:
            self.count["templates"] += 1
            uri = template.uri_template.replace("{name}", "monday").replace("{resourceId}", "1")
            self.count["contents"] += len((await client.read_resource(uri)).contents)

    async def watch(self, client: Client, uri: str) -> None:
        """Subscribe to a resource, change it, and count the change."""
        (touch,) = [tool.name for tool in await self._tools(client) if "touch" in tool.name]
        if client.session.protocol_version in MODERN_PROTOCOL_VERSIONS:
            async with client.listen(resource_subscriptions=[uri]) as changes:
                await client.call_tool(touch, {"uri": "note://today"})
                async for change in changes:
                    assert change.uri == uri  # type: ignore[union-attr]
                    break
        else:
            await client.subscribe_resource(uri)
            self.updated = anyio.Event()
            await client.call_tool(touch, {"uri": "note://today"})
            await self.updated.wait()
            await client.unsubscribe_resource(uri)
        self.count["updates"] += 1

    async def _tools(self, client: Client) -> list[Any]:
        tools = (await client.list_tools()).tools
        # Those that answer in the background are out of scope: tasks are not served.
        return [tool for tool in tools if not re.search("async|research", tool.name)]


def _hints(tool: Any) -> dict[str, Any]:
    hints = {} if tool.annotations is None else tool.annotations.model_dump(exclude_none=True)
    return {name: value for name, value in hints.items() if name.endswith("hint")}


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    """The address of the Python server, in a process of its own."""
    port = free_port()
    command = [sys.executable, str(HERE / "upstream.py"), str(port)]
    with subprocess.Popen(command) as process:
        try:
            wait_for_port(port, seconds=60)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


@asynccontextmanager
async def hub(**configs: MCPClientConfig) -> AsyncGenerator[str]:
    """The address of a hub in front of these servers."""
    async with AsyncExitStack() as stack:
        registry = OperationRegistry()
        for name, config in configs.items():
            client = await stack.enter_async_context(connect_mcp(name, config))
            registry.register_all(client)
        base = await stack.enter_async_context(serving(to_mcp(registry).asgi_app()))
        yield f"{base}/mcp"


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("version", ["2025-11-25", "2026-07-28"])
async def test_a_hub_passes_every_mcp_feature_through(
    upstream: str, era: str, version: str
) -> None:
    direct, through = Person(), Person()
    with time_limit(60):
        mode = "legacy" if version == "2025-11-25" else "auto"
        async with direct.connected(upstream, mode) as client:
            await direct.take(client)
            await direct.watch(client, "note://today")
        config = MCPClientConfig(url=upstream, version=version)
        async with hub(shelf=config) as address, through.connected(address, era) as client:
            await through.take(client)
            await through.watch(client, "note://today")

    assert through.count == direct.count
    assert min(through.count.values()) > 0, through.count
    assert through.instructions == direct.instructions != [""]
    assert not through.received & {"example.org/api-key", "alkdev.operations/x"}


@asynccontextmanager
async def subscribers(server: Any) -> AsyncGenerator[list[Any]]:
    """The sessions that subscribed on one connection."""
    yield []


def noting() -> Server[Any]:
    """A server that reports changes to the subscribers of the connection that a change came through."""

    async def tools(context: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=[Tool(name="touch", input_schema={"type": "object"})])

    async def touch(context: Any, params: Any) -> CallToolResult:
        for subscriber in context.lifespan_context:
            await subscriber.send_resource_updated("note://today")
        return CallToolResult(content=[])

    async def resources(context: Any, params: Any) -> ListResourcesResult:
        return ListResourcesResult(resources=[Resource(name="today", uri="note://today")])

    async def subscribe(context: Any, params: Any) -> EmptyResult:
        context.lifespan_context.append(context.session)
        return EmptyResult()

    return Server(
        "noting",
        lifespan=subscribers,
        on_list_tools=tools,
        on_call_tool=touch,
        on_list_resources=resources,
        on_subscribe_resource=subscribe,
    )


@pytest.mark.requirement("R11")
async def test_with_a_connection_per_caller_each_subscribes_at_its_own_connection() -> None:
    ann, ben = Person(), Person()
    config = MCPClientConfig(server=noting(), version="2025-11-25", per_caller=True)
    with time_limit(20):
        async with (
            hub(shelf=config) as address,
            ann.connected(address, "legacy") as hers,
            ben.connected(address, "legacy") as his,
        ):
            await his.subscribe_resource("note://today")
            ben.updated = anyio.Event()
            await ann.watch(hers, "note://today")
            assert not ben.updated.is_set()
            await ben.watch(his, "note://today")


@pytest.mark.slow
@pytest.mark.parametrize("era", ERAS)
async def test_two_servers_behind_a_hub_equal_direct_connections(upstream: str, era: str) -> None:
    install_node_servers()
    direct, through = Person(), Person()
    with time_limit(90):
        for server in (upstream, StdioServerParameters(command=str(EVERYTHING))):
            async with direct.connected(server, "legacy") as client:
                await direct.take(client)
        shelf = MCPClientConfig(url=upstream, version="2025-11-25")
        everything = MCPClientConfig(command=str(EVERYTHING))
        async with (
            hub(shelf=shelf, everything=everything) as address,
            through.connected(address, era) as client,
        ):
            await through.take(client)

    # The one server asks for roots when it is connected, on its own account.
    del direct.count["roots"], through.count["roots"]
    assert through.count == direct.count
    kinds = ("prompts", "resources", "templates", "elicitations", "samplings", "logs")
    assert [through.count[kind] for kind in kinds] == [6, 9, 3, 2, 2, 3]
    assert min(through.count[kind] for kind in ("progress", "hints", "icons", "meta")) > 0
    assert len(direct.instructions) == 2
    assert all(text in through.instructions[0] for text in direct.instructions)
