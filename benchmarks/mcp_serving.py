"""Tool calls over MCP's streamable HTTP: ours beside FastMCP and the SDK's low-level server.

In a session of 2025 (one per connection), without a session, and as a client since 2026-07-28, which has none.

Each server is a process with one uvicorn worker on uvloop, ours with the HTTP protocol of `operations serve`, the
others with uvicorn's own; the load generator shares the machine with it.
Every repeat runs every server once and ratios are taken within a repeat, so that other work disturbs all alike. CPU
is the server's own processor time per call; `x base` above 1 is better than FastMCP in both columns.
"""

import json
import os
import sys
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from _harness import arguments
from _load import Load, load, report, served

LEGACY = "2025-06-18"
MODERN = "2026-07-28"
ACCEPT = {"accept": "application/json, text/event-stream"}
MODES = {"2025, session": LEGACY, "2025, stateless": LEGACY, MODERN: MODERN}
CALL = {"name": "math__add", "arguments": {"a": 2, "b": 3}}
STATELESS = bool(os.environ.get("BENCH_STATELESS"))

# ---------------------------------------------------------------- what is served, in a process of its own


async def add(a: int, b: int) -> int:
    return a + b


def ours(**options: Any) -> Any:
    from operations import OperationRegistry
    from operations.mcp import to_mcp

    registry = OperationRegistry()
    registry.operation("math.add", type="query")(add)
    return to_mcp(registry, stateless=STATELESS).asgi_app(**options)


def fastmcp() -> Any:
    from fastmcp import FastMCP

    server = FastMCP("bench")
    server.tool(add, name="math__add")
    return server.http_app(stateless_http=STATELESS, json_response=STATELESS)


def lowlevel() -> Any:
    from mcp.server import Server
    from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}

    async def list_tools(_context: Any, _params: Any) -> ListToolsResult:
        return ListToolsResult(tools=[Tool(name="math__add", input_schema=schema)])

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
        get_tool_input_schema={"math__add": schema}.get,
    )
    return server.streamable_http_app(stateless_http=STATELESS, json_response=STATELESS)


def plain() -> Any:
    """The lower bound: a Starlette endpoint that decodes, adds and encodes, without MCP."""
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
    "operations, SDK path only": "sdk_path",
    "operations": "ours",
    "bare Starlette, no MCP": "plain",
}
OURS = ("ours", "sdk_path")


def app() -> Any:
    name = os.environ["BENCH_SERVER"]
    return ours(lean=False) if name == "sdk_path" else globals()[name]()


# ---------------------------------------------------------------- measuring


def command(name: str) -> Callable[[int], list[str]]:
    # As `operations serve` runs it; the others as uvicorn does.
    protocol = "operations.server.http11.protocol:HTTPProtocol" if name in OURS else "httptools"
    return lambda port: [
        sys.executable, "-m", "uvicorn", "--factory", "mcp_serving:app", "--host", "127.0.0.1", "--port", str(port),
        "--loop", "uvloop", "--http", protocol, "--no-access-log", "--log-level", "error",
    ]  # fmt: skip


def request(era: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the body and headers of one `tools/call`."""
    params: dict[str, Any] = dict(CALL)
    headers = {**ACCEPT, "mcp-protocol-version": era}
    if era == MODERN:
        headers |= {"mcp-method": "tools/call", "mcp-name": str(CALL["name"])}
        params["_meta"] = {
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
        }
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}, headers


def opened(port: int, count: int) -> list[dict[str, str]]:
    """Open sessions; return the headers that name them."""
    info = {"name": "bench", "version": "1"}
    params = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": info}
    opening = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    sessions: list[dict[str, str]] = []
    for _ in range(count):
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {**ACCEPT, "content-type": "application/json"}
        connection.request("POST", "/mcp", json.dumps(opening), headers)
        response = connection.getresponse()
        session = {"mcp-session-id": response.headers["mcp-session-id"]}
        response.read()
        connection.request("POST", "/mcp", json.dumps(ready), {**headers, **session})
        connection.getresponse().read()
        connection.close()
        sessions.append(session)
    return sessions


def main() -> None:
    options = arguments(seconds=2.0, connections=32)
    for mode, era in MODES.items():
        body, headers = request(era)
        has_sessions = "session" in mode
        runs: dict[str, list[Load]] = {title: [] for title in SERVERS}
        for _ in range(min(options.repeats, 3)):
            for title, name in SERVERS.items():
                environment = {
                    "BENCH_SERVER": name,
                    "BENCH_STATELESS": "" if has_sessions else "1",
                    "PYTHONPATH": str(Path(__file__).parent),
                }
                with served(command(name), environment) as (process, port):
                    is_mcp = has_sessions and name != "plain"
                    run = load(
                        process, port, "/mcp", body,
                        headers=headers, each=opened(port, options.connections) if is_mcp else None,
                        seconds=options.seconds, connections=options.connections,
                    )  # fmt: skip
                    runs[title].append(run)
        report(f"tools/call, {mode}", runs, "FastMCP")


if __name__ == "__main__":
    main()
