"""MCP servers for tests, and checks for leaks."""

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from tests.limits import time_limit
from tests.node_packages import install_node_packages
from tests.servers import free_port

from operations.mcp import MCPClientConfig

HERE = Path(__file__).parent
RAW = str(HERE / "raw_server.py")


def raw(mode: str = "normal", *arguments: str, **options: Any) -> MCPClientConfig:
    """The hand-written server as a child, in one of its modes."""
    options.setdefault("shutdown_timeout", 0.5)
    return MCPClientConfig(
        command=sys.executable, args=["-I", "-S", RAW, mode, *arguments], **options
    )


def demo_server(name: str = "demo") -> MCPServer:
    """A server made with the SDK, with tools, resources and prompts of every kind."""
    server = MCPServer(name, version="2.1.0")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def fail(message: str) -> str:
        raise ValueError(message)

    @server.tool()
    def pid() -> int:
        return os.getpid()

    @server.tool()
    async def slow(seconds: float) -> str:
        await anyio.sleep(seconds)
        return "awake"

    @server.tool()
    async def steps(context: Context[Any, Any]) -> str:
        for step in range(1, 4):
            await context.report_progress(step, 3, f"step {step}")
        return "done"

    @server.resource("memo://today")
    def today() -> str:
        return "Sunday"

    @server.resource("memo://day/{name}")
    def day(name: str) -> str:
        return f"the day is {name}"

    @server.prompt()
    def summarise(text: str) -> str:
        return f"Summarise: {text}"

    return server


@asynccontextmanager
async def serving(
    app: Any, port: int | None = None, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[str]:
    """An ASGI application on a real socket of this process; its base URL."""
    port = port or free_port()
    config = uvicorn.Config(
        app, port=port, log_level="error", timeout_graceful_shutdown=1, lifespan="on", ws="none"
    )
    config.load()
    config.ssl = tls
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    # The server's own `serve` takes the process's signals; `_serve` does not.
    task = asyncio.create_task(server._serve())
    try:
        with time_limit(30):
            while not server.started:
                if task.done():
                    task.result()
                await anyio.sleep(0.01)
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await asyncio.wait({task})


@asynccontextmanager
async def serving_demo(
    port: int | None = None,
    *,
    build: Callable[[], MCPServer] = demo_server,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> AsyncGenerator[str]:
    """The demo server by streamable HTTP; the URL of its endpoint."""
    async with serving(build().streamable_http_app(**options), port, tls) as base:
        yield base + "/mcp"


def children() -> set[int]:
    """The processes this one has started and not yet reaped."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except FileNotFoundError:
            continue
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until `condition` holds, if no event announces it."""
    with time_limit(seconds):
        while not condition():
            await anyio.sleep(0.01)


def descriptors() -> int:
    """How many files this process holds open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fails if the block leaves a process, a descriptor or (inside a loop) a task."""
    before = children(), descriptors()
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        tasks = None
    yield
    assert children() <= before[0]
    assert descriptors() <= before[1]
    if tasks is not None:
        # The tasks of the test runner, and one that sse_starlette keeps for each loop, are not ours.
        others = ("TestRunner", "sse_starlette")
        left = [repr(task) for task in asyncio.all_tasks() - tasks if not task.done()]
        left = [task for task in left if not any(other in task for other in others)]
        assert left == [], left


def install_node_servers() -> None:
    """Install the MCP servers of `package.json` once; skip the test where that is not possible."""
    install_node_packages(HERE, ".bin/mcp-server-memory")
