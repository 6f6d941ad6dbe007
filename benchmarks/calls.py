"""Calls over every transport, side by side with the bare transport: 1 KiB, 64 callers, uvloop, two processes.

    python benchmarks/calls.py [--calls 4000] [--repeats 9] [--workers 1] [--only redis]

The bare contenders do what a user would write by hand: `nats.request`, a request and a reply stream on Redis, an
echo matched by id on a WebSocket. Our calls send the same kilobyte, with access check, validation and envelope.
`of bare` above 1 is better than the bare contender in every column; for CPU, its time is divided by ours.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import nats
import redis.asyncio as aioredis
import uvloop
import websockets
from _harness import show
from _load import Load, cpu_seconds, ratio
from redis.exceptions import ResponseError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.servers import NatsServer, RedisServer, free_port, running, wait_for_port

from operations.calls import PendingRequestMap, serve_calls
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis import connect_redis
from operations.pubsub.websocket import AcceptedTarget, connect_websocket, serve_websocket
from operations.registry import OperationRegistry

INPUT = {"value": {"text": "y" * 990}}
BODY = json.dumps(INPUT).encode()
CALLERS = 64
ITEMS = 10_000
CONTENDERS = (
    "nats bare",
    "nats",
    "redis bare",
    "redis",
    "websocket bare",
    "websocket",
    "memory",
)
PROMISED = {"nats": 0.70, "redis": 0.80, "websocket": 0.70}


def build_registry() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("echo.any", type="query")
    async def echo(value: dict[str, Any]) -> dict[str, Any]:
        return value

    @registry.operation("echo.many")
    async def many(n: int) -> Any:
        for _ in range(n):
            yield INPUT["value"]

    return registry


# ------------------------------------------------------------------------------------------------ the other process


async def serve(ports: dict[str, int]) -> None:
    registry = build_registry()
    client = await nats.connect(f"nats://127.0.0.1:{ports['nats']}")

    async def answer(message: Any) -> None:
        await message.respond(message.data)

    async def flood(message: Any) -> None:
        for _ in range(ITEMS):
            await client.publish(message.reply, BODY)

    await client.subscribe("bare", queue="bare", cb=answer)
    await client.subscribe("bare.many", queue="bare", cb=flood)
    store = aioredis.Redis(port=ports["redis"], socket_timeout=None)

    async def streams() -> None:
        with suppress(ResponseError):
            await store.xgroup_create("bare.requests", "g", mkstream=True)
        name = str(os.getpid())
        while True:
            found = await store.xreadgroup("g", name, {"bare.requests": ">"}, count=64, block=1000)
            for _, entries in found or []:
                pipe = store.pipeline(transaction=False)
                for entry, fields in entries:
                    if b"many" in fields:
                        for start in range(0, ITEMS, 100):
                            many = store.pipeline(transaction=False)
                            for _ in range(min(100, ITEMS - start)):
                                many.xadd(
                                    "bare.replies", {"m": BODY}, maxlen=20_000, approximate=True
                                )
                            await many.execute()
                    else:
                        pipe.xadd("bare.replies", fields, maxlen=10_000, approximate=True)
                    pipe.xack("bare.requests", "g", entry)
                await pipe.execute()

    async def on_bare_socket(socket: Any) -> None:
        async for message in socket:
            if message == b"many":
                for _ in range(ITEMS):
                    await socket.send(BODY)
            else:
                await socket.send(message)

    async def on_socket(target: AcceptedTarget) -> None:
        async with serve_calls(registry, target):
            await target.wait_closed()

    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(
            serve_calls(registry, await enter(connect_nats(f"nats://127.0.0.1:{ports['nats']}")))
        )
        await enter(
            serve_calls(registry, await enter(connect_redis(f"redis://127.0.0.1:{ports['redis']}")))
        )
        # With several workers, the first one has the port.
        with suppress(OSError):
            await enter(
                websockets.serve(on_bare_socket, "127.0.0.1", ports["bare"], compression=None)
            )
            await enter(serve_websocket(on_socket, port=ports["websocket"]))
        await streams()


# ------------------------------------------------------------------------------------------------ the contenders


class Matched:
    """Matches answers to questions by a number at their start."""

    def __init__(self) -> None:
        self.waiting: dict[bytes, asyncio.Future[Any]] = {}
        self.numbers = itertools.count()

    def ask(self) -> tuple[bytes, "asyncio.Future[Any]"]:
        """A number, and the future of its answer."""
        number = b"%016d" % next(self.numbers)
        future = self.waiting[number] = asyncio.get_running_loop().create_future()
        return number, future

    def done(self, message: bytes) -> None:
        """An answer arrived."""
        future = self.waiting.pop(bytes(message[:16]), None)
        if future is not None:
            future.set_result(message[16:])


Contender = tuple[Callable[[], Awaitable[Any]], Callable[[], Awaitable[int]]]


async def ours(stack: AsyncExitStack, target: Any) -> Contender:
    calls = await stack.enter_async_context(PendingRequestMap(target))

    async def stream() -> int:
        count = 0
        async for _ in calls.subscribe("echo.many", {"n": ITEMS}):
            count += 1
        return count

    return lambda: calls.call("echo.any", INPUT), stream


async def bare_nats(stack: AsyncExitStack, url: str) -> Contender:
    client = await nats.connect(url)
    stack.push_async_callback(client.close)

    async def stream() -> int:
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox)
        await client.publish("bare.many", b"", reply=inbox)
        for _ in range(ITEMS):
            await subscription.next_msg()
        await subscription.unsubscribe()
        return ITEMS

    return lambda: client.request("bare", BODY, timeout=10), stream


async def bare_redis(stack: AsyncExitStack, port: int) -> Contender:
    store = aioredis.Redis(port=port, socket_timeout=None)
    stack.push_async_callback(store.aclose)
    matched = Matched()
    received = 0

    async def read() -> None:
        nonlocal received
        last: Any = "$"
        while True:
            for _, entries in await store.xread({"bare.replies": last}, count=64, block=1000) or []:
                for last, fields in entries:  # noqa: B007 - the next read starts after it
                    received += 1
                    matched.done(fields[b"m"])

    task = asyncio.create_task(read())
    stack.callback(task.cancel)
    await asyncio.sleep(0.1)

    async def call() -> Any:
        number, future = matched.ask()
        await store.xadd("bare.requests", {"m": number + BODY}, maxlen=10_000, approximate=True)
        return await asyncio.wait_for(future, 10)

    async def stream() -> int:
        before = received
        await store.xadd("bare.requests", {"many": b"1"})
        while received - before < ITEMS:  # noqa: ASYNC110 - an event per item would cost the bare one more
            await asyncio.sleep(0.001)
        return ITEMS

    return call, stream


async def bare_websocket(stack: AsyncExitStack, port: int) -> Contender:
    socket = await stack.enter_async_context(
        websockets.connect(f"ws://127.0.0.1:{port}", compression=None)
    )
    matched = Matched()
    received = 0

    async def read() -> None:
        nonlocal received
        async for message in socket:
            received += 1
            matched.done(message)  # type: ignore[arg-type]

    task = asyncio.create_task(read())
    stack.callback(task.cancel)

    async def call() -> Any:
        number, future = matched.ask()
        await socket.send(number + BODY)
        return await asyncio.wait_for(future, 10)

    async def stream() -> int:
        before = received
        await socket.send(b"many")
        while received - before < ITEMS:  # noqa: ASYNC110 - an event per item would cost the bare one more
            await asyncio.sleep(0.001)
        return ITEMS

    return call, stream


# ------------------------------------------------------------------------------------------------ measuring


async def load(call: Callable[[], Awaitable[Any]], total: int, workers: list[int]) -> Load:
    """Measure `total` calls; CPU is that of this process and of the workers, without the broker."""
    left = total
    latencies: list[float] = []

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            began = time.perf_counter()
            await call()
            latencies.append(time.perf_counter() - began)

    spent = time.process_time() + sum(map(cpu_seconds, workers))
    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    elapsed = time.perf_counter() - started
    spent = time.process_time() + sum(map(cpu_seconds, workers)) - spent
    return Load.of(latencies, elapsed, spent)


async def stream_rate(stream: Callable[[], Awaitable[int]]) -> float:
    started = time.perf_counter()
    return await stream() / (time.perf_counter() - started)


def peak_megabytes() -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0


async def connect(stack: AsyncExitStack, name: str, ports: dict[str, int]) -> Contender:
    """Return the functions that call one worker, or read its stream, over the transport of that name."""
    enter = stack.enter_async_context
    match name:
        case "nats bare":
            return await bare_nats(stack, f"nats://127.0.0.1:{ports['nats']}")
        case "nats":
            return await ours(stack, await enter(connect_nats(f"nats://127.0.0.1:{ports['nats']}")))
        case "redis bare":
            return await bare_redis(stack, ports["redis"])
        case "redis":
            url = f"redis://127.0.0.1:{ports['redis']}"
            return await ours(stack, await enter(connect_redis(url)))
        case "websocket bare":
            return await bare_websocket(stack, ports["bare"])
        case "websocket":
            url = f"ws://127.0.0.1:{ports['websocket']}"
            return await ours(stack, await enter(connect_websocket(url)))
        case _:
            memory = MemoryTarget()
            await enter(serve_calls(build_registry(), memory))
            return await ours(stack, memory)


async def measure(
    ports: dict[str, int], workers: list[int], calls: int, repeats: int, only: str
) -> None:
    async with AsyncExitStack() as stack:
        contenders = {
            name: await connect(stack, name, ports) for name in CONTENDERS if only in name
        }
        runs: dict[str, list[Load]] = {name: [] for name in contenders}
        streams: dict[str, list[float]] = {name: [] for name in contenders}
        for call, _ in contenders.values():
            await load(call, 200, workers)
        for _ in range(repeats):
            for name, (call, stream) in contenders.items():
                runs[name].append(await load(call, calls, workers))
                streams[name].append(await stream_rate(stream))
        rows: dict[str, Any] = {}
        for name in contenders:
            base = f"{name} bare"
            share = cpu_share = items = None
            if base in runs:
                share = ratio(runs[name], runs[base], "rate")
                cpu_share = ratio(runs[base], runs[name], "cpu")
                pairs = zip(streams[name], streams[base], strict=True)
                items = statistics.median(one / bare for one, bare in pairs)
            rate, p50, p99, cpu, _ = (
                statistics.median(column) for column in zip(*runs[name], strict=True)
            )
            rows[name] = {
                "calls/s": round(rate),
                "of bare": share,
                "goal": PROMISED.get(name),
                "p50 ms": p50,
                "p99 ms": p99,
                "CPU us": cpu,
                "CPU, of bare": cpu_share,
                "items/s": round(statistics.median(streams[name])),
                "items, of bare": items,
            }
        count = f", {len(workers)} workers" if len(workers) > 1 else ""
        show(f"64 callers, 1 KiB{count}", rows)


async def burst(ports: dict[str, int], name: str) -> None:
    """Print the rate, the errors and the peak memory of 10,000 calls at once, as JSON."""
    async with AsyncExitStack() as stack:
        call, _ = await connect(stack, name, ports)
        started = time.perf_counter()
        results = await asyncio.gather(*(call() for _ in range(10_000)), return_exceptions=True)
        elapsed = time.perf_counter() - started
    errors = sum(isinstance(result, BaseException) for result in results)
    row = {"calls/s": round(10_000 / elapsed), "errors": errors, "MB": round(peak_megabytes())}
    print(json.dumps(row))


def bursts(ports: dict[str, int], only: str) -> None:
    """Measure 10,000 calls at once over each transport, each in a process of its own."""
    rows = {}
    for name in CONTENDERS:
        if only in name and "bare" not in name:
            command = [sys.executable, __file__, "--burst", name, "--ports", json.dumps(ports)]
            rows[name] = json.loads(subprocess.check_output(command))
    show("10,000 calls at once", rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", default="")
    # How the benchmark starts its own processes: a worker, and one burst of calls.
    parser.add_argument("--ports", type=json.loads)
    parser.add_argument("--burst")
    arguments = parser.parse_args()
    if arguments.burst:
        uvloop.run(burst(arguments.ports, arguments.burst))
        return
    if arguments.ports:
        uvloop.run(serve(arguments.ports))
        return
    with running(NatsServer()) as on_nats, running(RedisServer()) as on_redis:
        ports = {
            "nats": on_nats.port,
            "redis": on_redis.port,
            "bare": free_port(),
            "websocket": free_port(),
        }
        command = [sys.executable, __file__, "--ports", json.dumps(ports)]
        others = [subprocess.Popen(command) for _ in range(arguments.workers)]
        try:
            wait_for_port(ports["websocket"], 60)
            time.sleep(0.3 + 0.3 * arguments.workers)
            pids = [other.pid for other in others]
            uvloop.run(measure(ports, pids, arguments.calls, arguments.repeats, arguments.only))
            if arguments.workers == 1:
                bursts(ports, arguments.only)
        finally:
            for other in others:
                other.kill()
                other.wait()


if __name__ == "__main__":
    main()
