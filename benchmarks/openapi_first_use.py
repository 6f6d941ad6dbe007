"""Measure the first call of every operation of a large document: time, memory, and how long the loop is blocked.

usage: openapi_first_use.py [--document FILE] [--operations N]

The promises, for Stripe: under 300 MB in total, a median under 30 ms, and no block of the loop over 50 ms. The
responses come from a transport in this process and are made from the schemas, so that only this library is measured.
"""

import argparse
import asyncio
import gc
import json
import logging
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _harness import show

from operations import CallError, OperationRegistry
from operations.openapi import HTTPServiceConfig, from_openapi

SCALARS: dict[str, Any] = {
    "string": "x", "integer": 1, "number": 1.5, "boolean": True, "null": None, "array": [], "object": {},
}  # fmt: skip


def resident() -> float:
    """Megabytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def sample(schema: Any, definitions: Any, depth: int = 0, *, whole: bool = True) -> Any:
    """Return a value of a schema; without `whole`, only its required properties."""
    if not isinstance(schema, dict):
        return {}
    if "$ref" in schema:
        return sample(
            definitions[schema["$ref"].rpartition("/")[2]], definitions, depth, whole=whole
        )
    for keyword in ("anyOf", "oneOf", "allOf"):
        if schema.get(keyword):
            return sample(schema[keyword][-1], definitions, depth, whole=whole)
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "array" and depth < 4:
        return [sample(schema.get("items"), definitions, depth + 1, whole=whole)]
    if kind != "object":
        return SCALARS[kind]
    names = schema.get("properties", {})
    if depth > 3 or not whole:
        names = {name: names[name] for name in schema.get("required", ()) if name in names}
    if depth > 8:
        return {}
    return {name: sample(part, definitions, depth + 1, whole=whole) for name, part in names.items()}


class Canned:
    """A transport that responds with one body."""

    def __init__(self) -> None:
        self.body = b"{}"

    @asynccontextmanager
    async def send(self, request: Any) -> AsyncGenerator[Any]:
        """Respond at once."""
        await asyncio.sleep(0)
        yield SimpleNamespace(
            status=200,
            reason="OK",
            headers={"content-type": "application/json"},
            chunks=self.chunks,
        )

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The body in one piece."""
        yield self.body

    async def aclose(self) -> None:
        """There is nothing to close."""


async def longest_block(until: asyncio.Event, blocks: list[float], busy: list[float]) -> None:
    """Record the delays of the event loop, and the processor time of its thread during each delay."""
    while not until.is_set():
        began, worked = time.perf_counter(), time.thread_time()
        await asyncio.sleep(0.001)
        blocks.append(time.perf_counter() - began - 0.001)
        busy.append(time.thread_time() - worked)


async def main(document: Any, count: int) -> None:
    logging.disable(logging.CRITICAL)
    # Created from another import, so that the measured import starts without caches.
    examples = {
        op.spec.id: [
            json.dumps(sample(s.document, s.document.get("$defs", {}), whole=whole))  # type: ignore[union-attr]
            for s, whole in ((op.spec.input_schema, False), (op.spec.output_schema, True))
        ]
        for op in from_openapi(document, HTTPServiceConfig(namespace="api"))
    }
    gc.collect()
    transport = Canned()
    config = HTTPServiceConfig(
        namespace="api",
        base_url="http://127.0.0.1:1",
        transport=transport,
        allowed_hosts=("127.0.0.1",),
    )
    before = resident()
    service = from_openapi(document, config)
    registry = OperationRegistry(service)
    took: list[tuple[float, str]] = []
    blocks: list[float] = []
    busy: list[float] = []
    failed = 0
    done = asyncio.Event()
    watcher = asyncio.create_task(longest_block(done, blocks, busy))
    for operation in list(service)[:count]:
        arguments, answer = examples[operation.spec.id]
        transport.body = answer.encode()
        began = time.perf_counter()
        try:
            if operation.spec.type != "subscription":
                await registry.execute(operation.spec.id, json.loads(arguments))
        except CallError:
            failed += 1
        took.append((time.perf_counter() - began, operation.spec.id))
    done.set()
    await watcher
    seconds = [each for each, _ in took]
    slowest = max(took)
    show(
        f"first use of {document['info']['title']}",
        {
            f"{len(took)} operations, {failed} with an error": {
                "median ms": statistics.median(seconds) * 1000,
                "slowest ms": slowest[0] * 1000,
                "loop blocked, ms": max(blocks) * 1000,
                "by its own thread, ms": max(busy) * 1000,
                "MB more": resident() - before,
                "MB in total": resident(),
            }
        },
    )
    print(f"slowest: {slowest[1]}")
    with suppress(CallError):
        await service.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    shared = Path(__file__).parents[2] / "shared" / "openapi" / "stripe__spec3-2021-06-07.json"
    parser.add_argument("--document", type=Path, default=shared)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, help="taken for the other benchmarks' sake")
    options = parser.parse_args()
    asyncio.run(main(json.loads(options.document.read_bytes()), options.operations))
