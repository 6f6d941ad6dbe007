"""Clients and servers the tests of MCP serving share."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from mcp import Client

from operations import (
    CallError,
    ErrorDefinition,
    OperationRegistry,
    ResponseEnvelope,
    http_envelope,
)
from operations.server.http11.protocol import HTTPProtocol

ERAS = ["legacy", "auto"]
"""The modes of the SDK's client: clients before 2026-07-28, and since."""

MODERN = "2026-07-28"
MODERN_META: dict[str, Any] = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
}
"""The `_meta` of each request since 2026-07-28."""


def modern_headers(method: str, name: str = "") -> dict[str, str]:
    """Return the headers of a request since 2026-07-28."""
    headers = {
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": MODERN,
        "mcp-method": method,
    }
    return {**headers, "mcp-name": name} if name else headers


def error_of(result: Any) -> Any:
    """Return the error of a tool: in the structured content, or in `_meta` if the tool declares an output schema."""
    if isinstance(result, dict):
        return result.get("structuredContent") or result["_meta"]["alkdev.operations/error"]
    return result.structured_content or result.meta["alkdev.operations/error"]


PNG = b"\x89PNG\r\n\x1a\n rest"


def example() -> OperationRegistry:
    """A registry with operations of every kind."""
    registry = OperationRegistry()

    @registry.operation("math.add", type="query", title="Add", tags=["sum"])
    async def add(a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    @registry.operation("task.get", type="query")
    async def get(id: str) -> dict[str, str]:
        return {"id": id}

    @registry.operation("task.find", type="query")
    async def find(name: str) -> str | None:
        return name or None

    @registry.operation("task.delete", scopes=["task:write"], idempotent=True)
    async def delete(id: str) -> None:
        return None

    @registry.operation(
        "task.fail", errors=[ErrorDefinition("TASK_LOCKED", "Somebody works on it")]
    )
    async def fail() -> None:
        raise CallError("TASK_LOCKED", "locked", {"by": "ann"})

    @registry.operation("task.crash")
    async def crash() -> None:
        raise RuntimeError("password is hunter2")

    @registry.operation("task.watch")
    async def watch(n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number

    @registry.operation("file.icon", type="query")
    async def icon() -> bytes:
        return PNG

    @registry.operation("file.fetch", type="query")
    async def fetch() -> ResponseEnvelope[Any]:
        return http_envelope(b"abc", status_code=200, headers={}, content_type="application/zip")

    @registry.operation("note.any", type="query")
    async def anything(value: Any = None) -> Any:
        return value

    return registry


@asynccontextmanager
async def serving(app: Any) -> AsyncGenerator[str]:
    """Serve an ASGI application on a free port, and give its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=HTTPProtocol, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


async def tool_names(client: Client) -> list[str]:
    return [tool.name for tool in (await client.list_tools()).tools]
