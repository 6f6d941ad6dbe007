"""Measure an HTTP server: requests per second, latency, and the processor time the server spends.

The load generator runs in a process of its own (`python _load.py`), so that it never shares an interpreter with the
program that starts the servers. Each connection is kept alive and sends one request at a time. It installs with the
other benchmark requirements, so a fresh clone measures the same thing as a developer's machine.
"""

import asyncio
import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple

import uvloop
from _harness import show

_STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d)")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"


class Load(NamedTuple):
    """The result of one run."""

    rate: float
    """Requests per second of wall time."""
    p50: float
    """Median latency in milliseconds."""
    p99: float
    """99th percentile of the latency in milliseconds."""
    cpu: float
    """Processor time per request, in microseconds."""
    alone: float = math.nan
    """Median latency of a single connection, in milliseconds: many connections hide a delay in each response."""

    @classmethod
    def of(cls, latencies: Iterable[float], elapsed: float, spent: float) -> "Load":
        """Summarise the latencies of one run, its wall time and its processor time, in seconds."""
        ordered = sorted(latencies)
        count = len(ordered)
        p50, p99 = (ordered[min(count - 1, int(count * share))] * 1e3 for share in (0.5, 0.99))
        return cls(count / elapsed, p50, p99, spent / count * 1e6)


def load(
    process: int,
    port: int,
    path: str,
    body: Any,
    *,
    headers: dict[str, str] | None = None,
    each: list[dict[str, str]] | None = None,
    seconds: float,
    connections: int,
) -> Load:
    """POST `body` as JSON repeatedly, after a second on a single connection.

    `each` has more headers for each connection. Exits with a message if a response is not a success.
    """
    job = {
        "port": port,
        "path": path,
        "body": json.dumps(body),
        "headers": {"content-type": "application/json", **(headers or {})},
        "each": each or [{}],
    }
    alone = _run(process, {**job, "seconds": 1.0, "connections": 1})
    together = _run(process, {**job, "seconds": seconds, "connections": connections})
    return together._replace(alone=alone.p50)


def _run(process: int, job: dict[str, Any]) -> Load:
    before = cpu_seconds(process)
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(job),
        capture_output=True,
        check=False,
        text=True,
        timeout=job["seconds"] + 60,
    )
    spent = cpu_seconds(process) - before
    if done.returncode:
        where = f"http://127.0.0.1:{job['port']}{job['path']}"
        sys.exit(f"cannot measure {where}: {done.stderr.strip()}")
    rate, p50, p99, count = json.loads(done.stdout)
    return Load(rate, p50, p99, spent / count * 1e6)


def cpu_seconds(process: int) -> float:
    """Return the user and system time of a process so far.

    Reads the CPU clock of the process (Linux), because /proc counts in steps of 10 ms: too coarse for short runs.
    """
    return time.clock_gettime(~process << 3 | 2)


@contextmanager
def served(
    command: Callable[[int], list[str]], environment: dict[str, str] | None = None
) -> Generator[tuple[int, int]]:
    """Run a server on a free port; yield its process id and port once it accepts connections."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen(command(port), env={**os.environ, **(environment or {})})
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"cannot measure: {' '.join(process.args)} did not start")  # type: ignore[arg-type]
                time.sleep(0.05)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(10)


def report(title: str, runs: dict[str, list[Load]], base: str) -> None:
    """Show the medians of every contender, and how they compare with `base` within each repeat."""
    rows: dict[str, Any] = {}
    for name, loads in runs.items():
        rate, p50, p99, cpu, alone = (
            statistics.median(column) for column in zip(*loads, strict=True)
        )
        rows[name] = {
            "requests/s": round(rate),
            "x base": ratio(loads, runs[base], "rate"),
            "p50 ms": p50,
            "p99 ms": p99,
            "CPU us": cpu,
            "CPU x base": 1 / ratio(loads, runs[base], "cpu"),
            **({} if math.isnan(alone) else {"alone ms": alone}),
        }
    show(title, rows)


def ratio(loads: list[Load], bases: list[Load], field: str) -> float:
    """Return the median ratio of a field to that of the base, taken within each repeat."""
    pairs = zip(loads, bases, strict=True)
    return statistics.median(getattr(one, field) / getattr(base, field) for one, base in pairs)


# ---------------------------------------------------------------- the load generator's process


class _Connection(asyncio.Protocol):
    """One keep-alive connection that sends one request at a time."""

    def __init__(self, request: bytes, latencies: "array[float]", until: float) -> None:
        self._request = request
        self._latencies = latencies
        self._until = until
        self._began = 0.0
        self._received = b""
        self._transport: Any = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send(time.perf_counter())

    def _send(self, now: float) -> None:
        self._began = now
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        status, length = _STATUS.match(head), _LENGTH.search(head)
        is_chunked = length is None and _CHUNKED.search(head) is not None
        if status is None or not status[1].startswith(b"2") or (length is None and not is_chunked):
            self._fail(f"the server answered {self._received[:300]!r}")
            return
        if not rest.endswith(_LAST_CHUNK) if length is None else len(rest) < int(length[1]):
            return
        if b'"error"' in rest:
            self._fail(f"the server answered {rest[:300]!r}")
            return
        self._received = b""
        now = time.perf_counter()
        self._latencies.append(now - self._began)
        if now < self._until:
            self._send(now)
        elif not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the server closed a connection: {exc}")

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(reason))


async def _generate(job: dict[str, Any]) -> tuple[float, float, float, int]:
    """Return the rate, p50, p99 and the number of requests.

    A summary, not every latency: output larger than the buffer of a pipe can be cut off.
    """
    body = job["body"].encode()
    start = [f"POST {job['path']} HTTP/1.1", f"host: 127.0.0.1:{job['port']}"]

    def request(number: int) -> bytes:
        headers = {**job["headers"], **job["each"][number % len(job["each"])]}
        lines = [*start, *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body

    latencies = array("d")
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    connections: list[_Connection] = []
    for number in range(job["connections"]):
        sent = request(number)
        _, connection = await loop.create_connection(
            lambda sent=sent: _Connection(sent, latencies, began + job["seconds"]),
            "127.0.0.1",
            job["port"],
        )
        connections.append(connection)
    async with asyncio.timeout(job["seconds"] + 10):
        await asyncio.gather(*(connection.done for connection in connections))
    summary = Load.of(latencies, time.perf_counter() - began, 0)
    return summary.rate, summary.p50, summary.p99, len(latencies)


if __name__ == "__main__":
    try:
        print(json.dumps(uvloop.run(_generate(json.load(sys.stdin)))))
    except TimeoutError:
        sys.exit("no response within 10 seconds")
    except ConnectionError as error:
        sys.exit(str(error))
