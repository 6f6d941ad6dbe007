"""Third-party MCP servers from npm, over stdio and HTTP."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from tests.limits import time_limit
from tests.mcp_import.support import HERE, install_node_servers, nothing_left_behind
from tests.servers import free_port

from operations import (
    CallError,
    MCPResponseMeta,
    OperationContext,
    OperationRegistry,
    ResponseEnvelope,
)
from operations.contract.channel import CallerChannel
from operations.mcp import MCPClientConfig, connect_mcp

BIN = HERE / "node_modules" / ".bin"


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """The packages, installed once; a reason to skip where that is not possible."""
    install_node_servers()


async def elicit(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "action": "accept",
        "content": {"name": "Ada", "check": True, "email": "ada@example.org"},
    }


async def sample(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "model": "test",
        "content": {"type": "text", "text": "a completion"},
    }


EVERYTHING: dict[str, dict[str, Any]] = {
    "echo": {"message": "hello"},
    "get-annotated-message": {"messageType": "error", "includeImage": True},
    "get-env": {},
    "get-resource-links": {"count": 2},
    "get-resource-reference": {"resourceType": "Blob", "resourceId": 1},
    "get-structured-content": {"location": "Chicago"},
    "get-sum": {"a": 2, "b": 3},
    "get-tiny-image": {},
    "gzip-file-as-resource": {
        "name": "a.gz",
        "data": "data:text/plain,hello",
        "outputType": "resource",
    },
    "toggle-simulated-logging": {},
    "toggle-subscriber-updates": {},
    "trigger-long-running-operation": {"duration": 0.3, "steps": 3},
    "trigger-elicitation-request": {},
    "trigger-sampling-request": {"prompt": "say", "maxTokens": 10},
}


@asynccontextmanager
async def everything(kind: str) -> AsyncGenerator[MCPClientConfig]:
    command = str(BIN / "mcp-server-everything")
    handlers: dict[str, Any] = {"elicit": elicit, "sample": sample}
    if kind == "stdio":
        yield MCPClientConfig(command=command, **handlers)
        return
    port = free_port()
    mode, path = ("streamableHttp", "/mcp") if kind == "http" else ("sse", "/sse")
    process = await anyio.open_process([command, mode], env={**os.environ, "PORT": str(port)})
    try:
        await reachable(f"http://127.0.0.1:{port}")
        yield MCPClientConfig(
            url=f"http://127.0.0.1:{port}{path}",
            transport="http" if kind == "http" else "sse",
            **handlers,
        )
    finally:
        process.kill()
        await process.aclose()


async def reachable(url: str) -> None:
    async with httpx2.AsyncClient() as client:
        with time_limit(20):
            while True:
                try:
                    await client.get(url)
                except httpx2.TransportError:
                    await anyio.sleep(0.05)
                else:
                    return


@pytest.mark.parametrize("kind", ["stdio", "http", "sse"])
async def test_every_tool_of_the_everything_server_returns_a_correct_envelope(kind: str) -> None:
    progress: list[float] = []

    async def follow(done: float, total: float | None, message: str | None) -> None:
        progress.append(done)

    results: dict[str, ResponseEnvelope[Any]] = {}
    with time_limit(60), nothing_left_behind():
        async with everything(kind) as config, connect_mcp("everything", config) as client:
            registry = OperationRegistry(client)
            tools = {each.spec.name for each in registry if "tool" in each.spec.meta}
            context = OperationContext(channel=CallerChannel(progress=follow))
            for tool, given in EVERYTHING.items():
                assert tool in tools
                results[tool] = await registry.execute(f"everything.{tool}", given, context)
            for tool in tools - EVERYTHING.keys():
                # A tool of a newer release: it is called all the same, and must not break anything.
                with anyio.move_on_after(2), suppress(CallError):
                    await registry.execute(f"everything.{tool}", {"topic": "tea"}, context)

    for tool, envelope in results.items():
        assert isinstance(envelope.meta, MCPResponseMeta)
        assert not envelope.meta.is_error, (tool, envelope)
        assert envelope.meta.content
    kinds = {tool: [block["type"] for block in to_blocks(each)] for tool, each in results.items()}
    assert results["echo"].data[0]["text"] == "Echo: hello"
    assert results["get-sum"].data[0]["text"].endswith("5.")
    assert results["get-structured-content"].data.keys() == {
        "temperature",
        "conditions",
        "humidity",
    }
    assert kinds["get-tiny-image"] == ["text", "image", "text"]
    assert "image" in kinds["get-annotated-message"]
    assert results["get-annotated-message"].data[0]["annotations"]["audience"] == [
        "user",
        "assistant",
    ]
    assert kinds["get-resource-links"].count("resource_link") == 2
    assert "resource" in kinds["get-resource-reference"]
    assert "Ada" in str(results["trigger-elicitation-request"].data)
    assert "a completion" in str(results["trigger-sampling-request"].data)
    assert len(progress) >= 3


def to_blocks(envelope: ResponseEnvelope[Any]) -> Any:
    return envelope.to_wire()["meta"]["content"]


async def test_resources_and_prompts_of_the_everything_server() -> None:
    with time_limit(60), nothing_left_behind():
        async with everything("stdio") as config, connect_mcp("everything", config) as client:
            registry = OperationRegistry(client)
            listed = (await registry.execute("everything.resources.list", {})).data
            read = await registry.execute("everything.resources.read", {"uri": listed[0]["uri"]})
            dynamic = await registry.execute(
                "everything.templates.Dynamic_Text_Resource", {"resourceId": "1"}
            )
            prompt = await registry.execute("everything.prompts.args-prompt", {"city": "Oslo"})

    assert read.data[0]["uri"] == listed[0]["uri"]
    assert "Resource 1" in dynamic.data[0]["text"]
    assert "Oslo" in prompt.data["messages"][0]["content"]["text"]


async def test_the_filesystem_server_reads_writes_and_rejects(tmp_path: Path) -> None:
    (tmp_path / "tea.txt").write_text("green")
    with time_limit(60), nothing_left_behind():
        config = MCPClientConfig(
            command=str(BIN / "mcp-server-filesystem"), args=[str(tmp_path)], trust_annotations=True
        )
        async with connect_mcp("files", config) as client:
            registry = OperationRegistry(client)
            await registry.execute(
                "files.write_file", {"path": str(tmp_path / "new.txt"), "content": "hello"}
            )
            read = await registry.execute(
                "files.read_text_file", {"path": str(tmp_path / "tea.txt")}
            )
            refused = await registry.execute("files.read_text_file", {"path": "/etc/passwd"})
            reads = registry.get_spec("files.read_text_file")
            writes = registry.get_spec("files.write_file")

    assert (tmp_path / "new.txt").read_text() == "hello"
    assert read.data == {"content": "green"}
    assert refused.meta.is_error  # type: ignore[union-attr]
    assert "denied" in refused.data[0]["text"]
    assert reads is not None
    assert reads.replayable
    assert writes is not None
    assert writes.type == "mutation"


async def test_the_memory_server_keeps_its_entries(tmp_path: Path) -> None:
    with time_limit(60), nothing_left_behind():
        config = MCPClientConfig(
            command=str(BIN / "mcp-server-memory"),
            env={"MEMORY_FILE_PATH": str(tmp_path / "memory.jsonl")},
        )
        async with connect_mcp("memory", config) as client:
            registry = OperationRegistry(client)
            entity = {"name": "Ada", "entityType": "person", "observations": ["likes tea"]}
            await registry.execute("memory.create_entities", {"entities": [entity]})
            graph = await registry.execute("memory.read_graph", {})

    assert graph.data["entities"][0]["observations"] == ["likes tea"]
