"""Calls through a hub to an upstream: ours beside FastMCP's proxy, FastMCP's import of OpenAPI, and mcpo.

    scripts/bench hub

- MCP in, MCP out: a client of 2025 with a session calls a tool of an MCP server behind the hub.
- HTTP in, MCP out: a request to a path calls a tool of an MCP server behind the hub, which is what mcpo does.
- MCP in, REST out: a tool calls an operation of a REST API behind the hub.

Every hub is a process of its own and calls the same upstream, another process. CPU is the hub's own processor time per
call; `x base` above 1 is better than the first row. Every repeat runs every hub once, in turn.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _load import Load, load, report, served

from mcp_serving import ACCEPT, CALL, LEGACY, opened

HERE = str(Path(__file__).parent)
UPSTREAM = os.environ.get("BENCH_UPSTREAM", "")
SPEC = {
    "openapi": "3.1.0",
    "info": {"title": "math", "version": "1"},
    "paths": {
        "/add": {
            "post": {
                "operationId": "add",
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {
                            "schema": {
                                "type": "object",
                                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                                "required": ["a", "b"],
                            }
                        }
                    },
                },
                "responses": {
                    "200": {
                        "description": "The sum.",
                        "content": {
                            "application/json": {
                                "schema": {
                                    "type": "object",
                                    "properties": {"sum": {"type": "integer"}},
                                    "required": ["sum"],
                                }
                            }
                        },
                    }
                },
            }
        }
    },
}

# ---------------------------------------------------------------- the upstreams and the hubs, in processes of their own


def serve(app: Any, port: int) -> None:
    import uvicorn

    uvicorn.run(
        app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", log_level="error", access_log=False
    )  # fmt: skip


def upstream_mcp(port: int) -> None:
    """Serve a tool with FastMCP, in sessions, with JSON responses."""
    from fastmcp import FastMCP

    from mcp_serving import add

    server = FastMCP("upstream")
    server.tool(add)
    serve(server.http_app(json_response=True), port)


def upstream_rest(port: int) -> None:
    import msgspec
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def add(request: Request) -> Response:
        given = msgspec.json.decode(await request.body())
        total = msgspec.json.encode({"sum": given["a"] + given["b"]})
        return Response(total, media_type="application/json")

    serve(Starlette(routes=[Route("/add", add, methods=["POST"])]), port)


def ours(port: int, source: Any) -> None:
    """Serve the operations of a source over HTTP and MCP, as `operations serve` does."""
    import uvloop

    from operations import OperationRegistry
    from operations.server import create_app
    from operations.server.http11.running import running

    async def run() -> None:
        registry = OperationRegistry()
        async with source as operations:
            for operation in operations:
                registry.register(operation)
            async with running(create_app(registry, mcp=True), port=port):
                await asyncio.Event().wait()

    uvloop.run(run())


def ours_mcp(port: int) -> None:
    from operations.mcp import connect_mcp

    ours(port, connect_mcp("up", {"url": UPSTREAM, "version": "2025-11-25"}))


def ours_rest(port: int) -> None:
    from operations.openapi import HTTPServiceConfig, from_openapi

    ours(port, from_openapi(SPEC, HTTPServiceConfig(namespace="up", base_url=UPSTREAM)))


def fastmcp_proxy(port: int) -> None:
    from fastmcp.server import create_proxy

    serve(create_proxy(UPSTREAM).http_app(), port)


def fastmcp_rest(port: int) -> None:
    import httpx2
    from fastmcp import FastMCP

    client = httpx2.AsyncClient(base_url=UPSTREAM)
    serve(FastMCP.from_openapi(SPEC, client=client).http_app(), port)


def mcpo(port: int) -> list[str]:
    return [
        mcpo_python(), "-c", "from mcpo import app; app()", "--host", "127.0.0.1", "--port", str(port),
        "--log-level", "ERROR", "--server-type", "streamable-http", "--", UPSTREAM,
    ]  # fmt: skip


def mcpo_python() -> str:
    """Return the Python of an environment with mcpo, which needs an older SDK than ours; install it if missing."""
    place = Path(HERE).parent / ".venv-bench-mcpo"
    python = str(place / "bin" / "python")
    if not (place / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        requirements = str(Path(HERE) / "requirements-mcpo.txt")
        options = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([python, *options, "-r", requirements], check=True)
        (place / "ready").touch()
    return python


# ---------------------------------------------------------------- measuring

TABLES: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "MCP in, MCP out": (
        "upstream_mcp",
        {
            "FastMCP proxy": ("fastmcp_proxy", "add"),
            "operations": ("ours_mcp", "up__add"),
        },
    ),
    "HTTP in, MCP out": (
        "upstream_mcp",
        {
            "mcpo": ("mcpo", "/add"),
            "operations": ("ours_mcp", "/up/add"),
        },
    ),
    "MCP in, REST out": (
        "upstream_rest",
        {
            "FastMCP from_openapi": ("fastmcp_rest", "add"),
            "operations": ("ours_rest", "up__add"),
        },
    ),
}


def command(name: str) -> Callable[[int], list[str]]:
    if name == "mcpo":
        return mcpo
    return lambda port: [sys.executable, __file__, "--serve", name, "--port", str(port)]


def measured(name: str, what: str, seconds: float, connections: int) -> Load:
    """Measure one hub: by the path of an operation, or by the name of a tool."""
    with served(command(name), dict(os.environ)) as (process, port):
        if what.startswith("/"):
            arguments = CALL["arguments"]
            return load(process, port, what, arguments, seconds=seconds, connections=connections)
        body = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {**CALL, "name": what},
        }
        headers = {**ACCEPT, "mcp-protocol-version": LEGACY}
        return load(
            process, port, "/mcp", body,
            headers=headers, each=opened(port, connections), seconds=seconds, connections=connections,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--only", default="")
    parser.add_argument("--serve")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.serve:
        globals()[options.serve](options.port)
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [HERE, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    for title, (upstream, hubs) in TABLES.items():
        if options.only not in title:
            continue
        runs: dict[str, list[Load]] = {name: [] for name in hubs}
        with served(command(upstream)) as (_, port):
            path = "/mcp" if upstream == "upstream_mcp" else ""
            os.environ["BENCH_UPSTREAM"] = globals()["UPSTREAM"] = f"http://127.0.0.1:{port}{path}"
            for _ in range(options.repeats):
                for name, (hub, what) in hubs.items():
                    runs[name].append(measured(hub, what, options.seconds, options.connections))
        report(title, runs, next(iter(hubs)))


if __name__ == "__main__":
    main()
