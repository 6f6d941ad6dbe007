"""Interleaved timing and one kind of table, shared by every benchmark.

Each repeat runs every contender once, in turn; a ratio is taken within a repeat, and the median over the repeats is
printed. So a noisy machine disturbs everyone alike.
"""

import argparse
import asyncio
import gc
import inspect
import json
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

Contender = Callable[[], Any] | Callable[[], Awaitable[Any]]


def arguments(**defaults: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--budget", type=float, default=0.3, help="seconds per contender per repeat"
    )
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


async def rate(contender: Contender, budget: float) -> float:
    """Calls per second; the clock is read once per batch."""
    awaited = inspect.iscoroutinefunction(contender)
    done, batch, began = 0, 1, time.perf_counter()
    while True:
        if awaited:
            for _ in range(batch):
                await contender()
        else:
            for _ in range(batch):
                contender()
        done += batch
        elapsed = time.perf_counter() - began
        if elapsed >= budget:
            return done / elapsed
        batch = max(1, min(5000, int(done / elapsed * budget / 10)))


async def interleave(
    contenders: dict[str, Contender], repeats: int, budget: float
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        await rate(contender, budget / 10)
    for _ in range(repeats):
        for name, contender in contenders.items():
            gc.collect()
            rates[name].append(await rate(contender, budget))
    return rates


def table(title: str, rates: dict[str, list[float]], base: str) -> None:
    """Median time of each, and how many times the base's it is."""
    width = max(len(name) for name in rates)
    print(f"\n{title}\n{'':{width}}  {'us/call':>10}  {'x base':>8}")
    for name, values in rates.items():
        ratio = statistics.median(b / v for b, v in zip(rates[base], values, strict=True))
        print(f"{name:{width}}  {1e6 / statistics.median(values):10.2f}  {ratio:8.2f}")


def latency(
    port: int, path: str, body: Any, headers: dict[str, str] | None = None, count: int = 300
) -> float:
    """Return the median time of a POST on one keep-alive connection, in milliseconds.

    The requests are sent one after another: a rate over many connections hides a delay in each response.
    """
    content = json.dumps(body).encode()
    fields = {
        "Host": f"127.0.0.1:{port}",
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "Content-Length": str(len(content)),
        **(headers or {}),
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    request = "\r\n".join([*lines, "", ""]).encode() + content
    times: list[float] = []
    with socket.create_connection(("127.0.0.1", port), 5) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client.makefile("rb") as responses:
            for _ in range(count):
                began = time.perf_counter()
                client.sendall(request)
                _read_response(responses)
                times.append(time.perf_counter() - began)
    return statistics.median(times[count // 10 :]) * 1000


def _read_response(responses: Any) -> None:
    status = responses.readline()
    assert b" 200 " in status, status
    length = 0
    chunked = False
    while line := responses.readline().strip().lower():
        name, _, value = line.partition(b":")
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            chunked = True
    if not chunked:
        responses.read(length)
        return
    while size := int(responses.readline(), 16):
        responses.read(size + 2)
    responses.readline()


def main(benchmark: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(benchmark())  # type: ignore[arg-type]
