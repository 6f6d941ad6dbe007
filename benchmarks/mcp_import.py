"""Measure calls of an imported MCP tool beside the bare SDK client, and the start of many servers.

Promises: at most 1.15x over stdio and over HTTP; 50 servers connect within 1.5x the time of the slowest of them. The
servers are children: the SDK's own (its costs are the same for both sides) and, for the start of many, one without
the SDK, so that the benchmark does not measure fifty interpreters that import the SDK.
"""

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from _harness import arguments, interleave, main, medians, show
from mcp import Client, StdioServerParameters

from operations import OperationRegistry
from operations.mcp import MCPClientConfig, MCPClientLoader, connect_mcp

SERVER = """
import sys
import tempfile
from mcp.server.mcpserver import MCPServer

server = MCPServer("bench")

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

if sys.argv[1] == "stdio":
    server.run("stdio")
else:
    server.run("streamable-http", port=int(sys.argv[2]))
"""

STARTER = """
import json, sys, time
time.sleep(float(sys.argv[1]))
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    answer = {"jsonrpc": "2.0", "id": message["id"]}
    if message["method"] == "initialize":
        answer["result"] = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
                            "serverInfo": {"name": "s", "version": "1"}}
    elif message["method"] == "tools/list":
        answer["result"] = {"tools": [{"name": "a", "inputSchema": {"type": "object"}}]}
    else:
        answer["error"] = {"code": -32601, "message": "no"}
    print(json.dumps(answer), flush=True)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def listening(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


async def calls(repeats: int, budget: float) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    server = subprocess.Popen(  # noqa: ASYNC220 - before anything is measured
        [sys.executable, "-c", SERVER, "http", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        await listening(port)
        rows: dict[str, Any] = {}
        for title, ours, theirs in (
            (
                "stdio",
                MCPClientConfig(command=sys.executable, args=["-c", SERVER, "stdio"]),
                StdioServerParameters(command=sys.executable, args=["-c", SERVER, "stdio"]),
            ),
            ("streamable HTTP", MCPClientConfig(url=url), url),
        ):
            for version in ("2025-11-25", "2026-07-28"):
                async with AsyncExitStack() as stack:
                    mode = "legacy" if version.startswith("2025") else version
                    bare = await stack.enter_async_context(Client(theirs, mode=mode))
                    config = MCPClientConfig(
                        command=ours.command, args=ours.args, url=ours.url, version=version
                    )
                    client = await stack.enter_async_context(connect_mcp("bench", config))
                    registry = OperationRegistry(client)
                    await bare.list_tools()

                    async def through_sdk(bare: Client = bare) -> None:
                        await bare.call_tool("add", {"a": 1, "b": 2})

                    async def through_us(registry: OperationRegistry = registry) -> None:
                        await registry.execute("bench.add", {"a": 1, "b": 2})

                    contenders = {"the SDK's Client": through_sdk, "registry.execute": through_us}
                    rates = await interleave(contenders, repeats, budget)
                    for name, row in medians(rates, "the SDK's Client").items():
                        rows[f"{name}, {title}, {version}"] = row
        show("one tool call", rows)
    finally:
        server.terminate()
        server.wait()


async def starts(seconds: float, count: int) -> None:
    script = Path(tempfile.mkdtemp()) / "starter.py"
    script.write_text(STARTER)

    def config() -> MCPClientConfig:
        return MCPClientConfig(command=sys.executable, args=["-I", "-S", str(script), str(seconds)])

    try:
        alone = time.perf_counter()
        async with connect_mcp("alone", config()):
            alone = time.perf_counter() - alone
        async with MCPClientLoader(wait=120) as loader:
            many = time.perf_counter()
            clients = await loader.load({f"s{number}": config() for number in range(count)})
            many = time.perf_counter() - many
        show(
            f"servers that need {seconds:g} s to start",
            {
                "1": {"s": alone, "x base": 1.0},
                f"{len(clients)}": {"s": many, "x base": many / alone},
            },
        )
    finally:
        script.unlink()


async def benchmark() -> None:
    options = arguments(servers=50, start=3.0)
    await calls(options.repeats, options.budget)
    await starts(options.start, options.servers)


if __name__ == "__main__":
    main(benchmark)
