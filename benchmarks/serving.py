"""A served operation beside a bare Starlette endpoint that validates the same input; open streams and their memory.

    scripts/bench serving
    .venv/bin/python benchmarks/serving.py --seconds 3 --repeats 3

Every contender runs in a process of its own, under the same uvicorn settings, one at a time, in turns.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp
from _harness import latency

BODY = {"title": "Ship it", "priority": 3, "tags": ["a", "b"]}
GOAL = 0.7


# ------------------------------------------------------------ what is served


def serve_ours(port: int) -> None:
    import uvloop

    from operations import OperationRegistry
    from operations.server import create_app
    from operations.server.running import running

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


@contextmanager
def started(name: str, port: int) -> Generator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, __file__, "--serve", name, "--port", str(port)])
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                urlopen(f"http://127.0.0.1:{port}/healthz").close()
                break
            except URLError as error:
                if getattr(error, "code", None) is not None:
                    break
                time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(10)


# ------------------------------------------------------------ how it is measured


def with_wrk(name: str, port: int, seconds: float, connections: int) -> float:
    path, body = REQUESTS[name]
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(
            'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n'
            'wrk.headers["Accept"] = "application/json, text/event-stream"\n'
            f"wrk.body = [=[{json.dumps(body)}]=]\n"
        )
        script.flush()
        output = subprocess.run(
            ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", script.name,
             f"http://127.0.0.1:{port}{path}"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    assert "Non-2xx" not in output, output
    found = re.search(r"Requests/sec:\s+([\d.]+)", output)
    assert found is not None, output
    return float(found[1])


async def with_python(name: str, port: int, seconds: float, connections: int) -> float:
    path, body = REQUESTS[name]
    accept = {"Accept": "application/json, text/event-stream"}
    done = 0
    async with aiohttp.ClientSession() as session:

        async def work(until: float) -> None:
            nonlocal done
            while time.monotonic() < until:
                async with session.post(
                    f"http://127.0.0.1:{port}{path}", json=body, headers=accept
                ) as response:
                    await response.read()
                    assert response.status == 200
                done += 1

        began = time.monotonic()
        await asyncio.gather(*(work(began + seconds) for _ in range(connections)))
        return done / (time.monotonic() - began)


def rate(name: str, port: int, seconds: float, connections: int) -> float:
    if shutil.which("wrk"):
        return with_wrk(name, port, seconds, connections)
    return asyncio.run(with_python(name, port, seconds, connections))


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """User and system time of a process so far. Unlike a rate it does not depend on who else is busy."""
    fields = (
        Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    )
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(process: subprocess.Popen[bytes]) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


async def stream_memory(process: subprocess.Popen[bytes], port: int, count: int) -> int:
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
    rates: dict[str, list[float]] = {name: [] for name in SERVERS}
    costs: dict[str, list[float]] = {name: [] for name in SERVERS}
    delays: dict[str, list[float]] = {name: [] for name in SERVERS}
    for _ in range(options.repeats):
        for name in SERVERS:
            with started(name, options.port) as process:
                rate(name, options.port, 1, options.connections)
                delays[name].append(latency(options.port, *REQUESTS[name]))
                before, began = cpu_seconds(process), time.monotonic()
                rates[name].append(
                    rate(name, options.port, int(options.seconds), options.connections)
                )
                done = rates[name][-1] * (time.monotonic() - began)
                costs[name].append((cpu_seconds(process) - before) / done * 1e6)
    base = costs["bare Starlette"]
    share = statistics.median(b / a for a, b in zip(costs["operations"], base, strict=True))
    print(
        f"\n{'POST, JSON, validated':24}{'requests/s':>12}{'CPU us each':>14}{'x bare':>10}{'p50 ms':>10}"
    )
    for name, values in rates.items():
        ratio = statistics.median(b / a for a, b in zip(costs[name], base, strict=True))
        print(
            f"{name:24}{statistics.median(values):12.0f}{statistics.median(costs[name]):14.0f}{ratio:10.2f}"
            f"{statistics.median(delays[name]):10.2f}"
        )
    with started("operations", options.port) as process:
        used = asyncio.run(stream_memory(process, options.port, options.streams))
    print(f"\n{options.streams} open streams: {used / 1e6:.1f} MB")
    print(f"\ngoal {GOAL:.2f} x bare: {'met' if share >= GOAL else 'MISSED'}")
    print(f"goal under 50 MB for 1000 streams: {'met' if used < 50e6 else 'MISSED'}")


if __name__ == "__main__":
    main()
