"""Tool calls per second over MCP's streamable HTTP: ours beside FastMCP and the SDK's low-level server, by `wrk`.

Each server is a process with one uvicorn worker (uvloop, httptools); `wrk` shares the machine with it. Every repeat
runs every server once, so that a noisy machine disturbs all alike; a ratio is taken within a repeat. Where other work
disturbs too much, calls per second of the server's own processor time say more than calls per second.
"""

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _harness import arguments, latency

MODERN = "2026-07-28"
ERAS = ("2025-06-18", MODERN)
CALL = {"name": "math.add", "arguments": {"a": 2, "b": 3}}

# ---------------------------------------------------------------- what is served, in a process of its own


async def add(a: int, b: int) -> int:
    return a + b


def ours(**options: Any) -> Any:
    from operations import OperationRegistry
    from operations.mcp import to_mcp

    registry = OperationRegistry()
    registry.operation("math.add", type="query")(add)
    return to_mcp(registry).asgi_app(stateless=True, json_response=True, **options)


def fastmcp() -> Any:
    from fastmcp import FastMCP

    server = FastMCP("bench")
    server.tool(add, name="math.add")
    return server.http_app(stateless_http=True, json_response=True)


def lowlevel() -> Any:
    from mcp.server import Server
    from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}

    async def list_tools(_context: Any, _params: Any) -> ListToolsResult:
        return ListToolsResult(tools=[Tool(name="math.add", input_schema=schema)])

    async def call_tool(_context: Any, params: Any) -> CallToolResult:
        total = params.arguments["a"] + params.arguments["b"]
        return CallToolResult(
            content=[TextContent(type="text", text=str(total))],
            structured_content={"result": total},
        )

    server = Server(
        "bench",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        get_tool_input_schema={"math.add": schema}.get,
    )
    return server.streamable_http_app(stateless_http=True, json_response=True)


def plain() -> Any:
    """The floor: a Starlette endpoint that decodes, adds and encodes, and knows no MCP."""
    import msgspec
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def endpoint(request: Request) -> Response:
        call = msgspec.json.decode(await request.body())
        total = call["params"]["arguments"]["a"] + call["params"]["arguments"]["b"]
        answer = {"jsonrpc": "2.0", "id": call["id"], "result": {"structuredContent": total}}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return Starlette(routes=[Route("/mcp", endpoint, methods=["POST"])])


SERVERS = {
    "FastMCP": "fastmcp",
    "SDK, low-level server": "lowlevel",
    "operations, by the SDK alone": "sdk_path",
    "operations": "ours",
    "bare Starlette, no MCP": "plain",
}


def app() -> Any:
    name = os.environ["BENCH_SERVER"]
    return ours(lean=False) if name == "sdk_path" else globals()[name]()


# ---------------------------------------------------------------- measuring


@contextmanager
def served(name: str) -> Iterator[tuple[int, int]]:
    """Serve; the port, and the process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            sys.executable, "-m", "uvicorn", "--factory", "mcp_serving:app", "--host", "127.0.0.1", "--port", str(port),
            "--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "error",
        ],
        env={**os.environ, "BENCH_SERVER": name, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    try:
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def call(era: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the body and the headers of a call."""
    params: dict[str, Any] = dict(CALL)
    headers = {
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": era,
    }
    if era == MODERN:
        headers |= {"mcp-method": "tools/call", "mcp-name": str(CALL["name"])}
        params["_meta"] = {
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
        }
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}, headers


def script(era: str) -> str:
    content, headers = call(era)
    body = json.dumps(content)
    lines = [
        f"wrk.headers[{json.dumps(name)}]={json.dumps(value)}" for name, value in headers.items()
    ]
    return "\n".join(['wrk.method="POST"', f"wrk.body={json.dumps(body)}", *lines])


def wrk(port: int, lua: str, seconds: int, connections: int) -> float:
    out = subprocess.run(
        [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{seconds}s",
            "-s",
            lua,
            f"http://127.0.0.1:{port}/mcp",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds + 20,
    ).stdout
    assert "Non-2xx" not in out, out
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    assert rate is not None, out
    return float(rate[1])


def main() -> None:
    options = arguments(seconds=2, connections=32)
    if shutil.which("wrk") is None:
        print("wrk is not installed; nothing measured")
        return
    for era in ERAS:
        rates: dict[str, list[float]] = {title: [] for title in SERVERS}
        costs: dict[str, list[float]] = {title: [] for title in SERVERS}
        delays: dict[str, list[float]] = {title: [] for title in SERVERS}
        with tempfile.TemporaryDirectory() as folder:
            lua = Path(folder, "call.lua")
            lua.write_text(script(era))
            for _ in range(min(options.repeats, 3)):
                for title, name in SERVERS.items():
                    with served(name) as (port, process):
                        while wrk(port, str(lua), 1, 4) == 0:
                            continue
                        delays[title].append(latency(port, "/mcp", *call(era)))
                        before = cpu_seconds(process)
                        rate = wrk(port, str(lua), options.seconds, options.connections)
                        rates[title].append(rate)
                        spent = cpu_seconds(process) - before
                        costs[title].append(rate * options.seconds / spent)
        print(f"\ntools/call over streamable HTTP, protocol {era}, stateless")
        width = max(map(len, SERVERS))
        print(
            f"{'':{width}}  {'calls/s':>9}  {'x FastMCP':>9}  {'per CPU s':>9}  {'x FastMCP':>9}  {'p50 ms':>7}"
        )
        for title in SERVERS:
            line = f"{title:{width}}"
            for table in (rates, costs):
                pairs = zip(table[title], table["FastMCP"], strict=True)
                ratio = statistics.median(value / base for value, base in pairs)
                line += f"  {statistics.median(table[title]):9,.0f}  {ratio:9.1f}"
            print(f"{line}  {statistics.median(delays[title]):7.2f}")


if __name__ == "__main__":
    main()
