"""A served operation beside a bare Starlette endpoint that validates the same input; open streams and their memory.

    scripts/bench serving
    .venv/bin/python benchmarks/serving.py --seconds 3 --repeats 3

Every contender runs in a process of its own, under the same uvicorn settings, one at a time, in turns. CPU is the
server's processor time per request; `x base` above 1 is better than the bare endpoint in both columns.
"""

import argparse
import asyncio
import re
import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
from _harness import show
from _load import Load, load, ratio, report, served

BODY = {"title": "Ship it", "priority": 3, "tags": ["a", "b"]}
CPU_GOAL = 0.85
"""The least share of the bare endpoint's rate per CPU second; the aim is 1.0."""

LATENCY_GOAL = 1.3
"""The most time that a request on one kept-alive connection may take, as a multiple of the bare endpoint's."""


# ------------------------------------------------------------ what is served


def serve_ours(port: int) -> None:
    import uvloop

    from operations import OperationRegistry
    from operations.server import create_app
    from operations.server.http11.running import running

    registry = OperationRegistry()

    @registry.operation("task.create")
    async def create(title: str, priority: int, tags: list[str]) -> dict[str, Any]:
        return {"id": 1, "title": title, "priority": priority, "tags": tags}

    @registry.operation("task.watch")
    async def watch() -> Any:
        yield {"id": 1}
        await asyncio.Event().wait()

    async def serve() -> None:
        async with running(create_app(registry), port=port):
            await asyncio.Event().wait()

    # The path of `operations serve`, on the event loop that the others get from uvicorn.
    uvloop.run(serve())


def serve_bare(port: int) -> None:
    import jsonschema_rs
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    validator = jsonschema_rs.validator_for(
        {
            "type": "object",
            "properties": {
                "title": {"type": "string"},
                "priority": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["title", "priority", "tags"],
            "additionalProperties": False,
        }
    )

    async def create(request: Request) -> JSONResponse:
        body = await request.json()
        if not validator.is_valid(body):
            return JSONResponse({"error": "invalid"}, status_code=422)
        return JSONResponse({"id": 1, **body})

    app = Starlette(routes=[Route("/task/create", create, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, access_log=False, log_config=None)


def serve_fastmcp(port: int) -> None:
    import uvicorn
    from fastmcp import FastMCP

    server: Any = FastMCP("benchmark")

    @server.tool
    async def create(title: str, priority: int, tags: list[str]) -> dict[str, Any]:
        return {"id": 1, "title": title, "priority": priority, "tags": tags}

    app = server.http_app(path="/mcp", stateless_http=True, json_response=True)
    uvicorn.run(app, host="127.0.0.1", port=port, access_log=False, log_config=None)


SERVERS = {"bare Starlette": serve_bare, "operations": serve_ours}
if find_spec("fastmcp"):
    SERVERS["FastMCP, streamable HTTP"] = serve_fastmcp

REQUESTS: dict[str, tuple[str, Any]] = dict.fromkeys(SERVERS, ("/task/create", BODY))
REQUESTS["FastMCP, streamable HTTP"] = (
    "/mcp",
    {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "create", "arguments": BODY},
    },
)


# ------------------------------------------------------------ how it is measured


def command(name: str) -> Callable[[int], list[str]]:
    return lambda port: [sys.executable, __file__, "--serve", name, "--port", str(port)]


def resident(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


async def stream_memory(process: int, port: int, count: int) -> int:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def open_one() -> aiohttp.ClientResponse:
            response = await session.get(f"http://127.0.0.1:{port}/task/watch")
            await response.content.readuntil(b"\n\n")
            return response

        warm = [await open_one() for _ in range(10)]
        before = resident(process)
        responses = await asyncio.gather(*(open_one() for _ in range(count)))
        used = resident(process) - before
        for response in (*responses, *warm):
            response.close()
    return used


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", choices=SERVERS)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--streams", type=int, default=1000)
    options = parser.parse_args()
    if options.serve:
        SERVERS[options.serve](options.port)
        return
    runs: dict[str, list[Load]] = {name: [] for name in SERVERS}
    for _ in range(options.repeats):
        for name in SERVERS:
            path, body = REQUESTS[name]
            with served(command(name)) as (process, port):
                run = load(
                    process, port, path, body,
                    headers={"accept": "application/json, text/event-stream"},
                    seconds=options.seconds, connections=options.connections,
                )  # fmt: skip
                runs[name].append(run)
    report("POST, JSON, validated", runs, "bare Starlette")
    with served(command("operations")) as (process, port):
        used = asyncio.run(stream_memory(process, port, options.streams))
    ours, bare = runs["operations"], runs["bare Starlette"]
    share = 1 / ratio(ours, bare, "cpu")
    slower = ratio(ours, bare, "alone")
    alone = statistics.median(run.alone for run in ours)
    show(
        "one connection, and open streams",
        {
            "a request on one connection": {"ms": alone, "x bare": slower},
            f"{options.streams:,} open streams": {"MB": used / 1e6},
        },
    )
    goals = {
        f"CPU: at least {CPU_GOAL} x bare": share >= CPU_GOAL,
        f"latency: at most {LATENCY_GOAL} x bare, under 1 ms": slower <= LATENCY_GOAL and alone < 1,
        "memory: under 50 MB for 1,000 streams": used < 50e6,
    }
    for goal, is_met in goals.items():
        print(f"goal, {goal}: {'met' if is_met else 'MISSED'}")


if __name__ == "__main__":
    main()
