"""Attacks on a server in another process: it continues to respond, and its memory stays bounded.

Each is small here; `scripts/attack` runs them at the size at which they once succeeded.
"""

import asyncio
import base64
import os
import sys
import zlib
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from subprocess import PIPE, Popen
from time import process_time
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.conftest import PROJECT
from tests.limits import slowness, time_limit
from tests.mcp_opening import INITIALIZE, MCP_HEADERS
from tests.openapi.serving import document, imported, serving
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from operations import CallError

SCALE = float(os.environ.get("OPERATIONS_ATTACK_SCALE", "0.05"))
MEGABYTE = 1 << 20
HEAD = b"POST /test/echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

pytestmark = pytest.mark.timeout(210 + 600 * SCALE)


@dataclass
class Victim:
    """A server in another process, and a client of it."""

    pid: int
    port: int
    hub_port: int
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def resident(self) -> int:
        """Return its memory, in bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096

    async def post(self, path: str, body: Any, **headers: str) -> int:
        """Send JSON; return the status."""
        data = body if isinstance(body, bytes) else None
        json = None if data is not None else body
        headers = {"content-type": "application/json", **MCP_HEADERS, **headers}
        body = None if data is None else BytesIO(data)
        async with self.session.post(
            self.url + path, data=body, json=json, headers=headers
        ) as response:
            await response.read()
            return response.status

    async def lag(self) -> float:
        """Return the longest time that its event loop was blocked since the last call, on the reference machine."""
        async with self.session.post(f"{self.url}/test/lag", json={}) as response:
            found: float = await response.json()
            return found / max(1.0, slowness())


@pytest.fixture(scope="module")
def process() -> Generator[tuple[int, int, int]]:
    """Start the server; give its process id, its port, and the port of its WebSocket hub."""
    command = [sys.executable, "-m", "tests.attacks.victim"]
    with Popen(command, cwd=PROJECT, stdin=PIPE, stdout=PIPE) as child:
        assert child.stdout is not None
        try:
            port, hub_port = map(int, child.stdout.readline().split())
            yield child.pid, port, hub_port
        finally:
            child.kill()


@pytest.fixture
async def victim(process: tuple[int, int, int]) -> AsyncGenerator[Victim]:
    async with aiohttp.ClientSession() as session:
        served = Victim(*process, session)
        assert await served.post("/test/echo", {}) == 200
        await served.lag()
        yield served
        assert await served.post("/test/echo", {}) == 200


@asynccontextmanager
async def connected(victim: Victim) -> AsyncGenerator[tuple[asyncio.StreamReader, Any]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", victim.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@pytest.mark.requirement("R56")
async def test_109_megabytes_of_trailers(victim: Victim) -> None:
    before = victim.resident()
    part = b"X-A: b\r\n" * 10_000
    async with connected(victim) as (_, writer):
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(max(400, int(109 * MEGABYTE * SCALE) // len(part))):
                writer.write(part)
                await writer.drain()

    assert victim.resident() - before < 30 * MEGABYTE


@pytest.mark.requirement("R58")
async def test_300_connections_that_do_not_read_5_megabytes(victim: Victim) -> None:
    before = victim.resident()
    body = b'{"size": 5000000}'
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with AsyncExitStack() as stack:
        heads: list[bytes] = []
        for _ in range(max(20, int(300 * SCALE))):
            reader, writer = await stack.enter_async_context(connected(victim))
            writer.write(request)
            heads.append(await reader.readline())
        # Another caller is served meanwhile.
        key = {"x-api-key": "key"}
        assert await victim.post("/test/echo", {"size": 100_000}, **key) == 200
        grown = victim.resident() - before

    assert {head.split()[1] for head in heads} == {b"200", b"429"}
    # 64 MiB for one caller, and about as much again while a response is encoded.
    assert grown < 200 * MEGABYTE


@pytest.mark.requirement("R60")
async def test_1000_sessions_without_identity(victim: Victim) -> None:
    for _ in range(max(120, int(1100 * SCALE))):
        assert await victim.post("/mcp", INITIALIZE) == 200
    assert await victim.post("/mcp", INITIALIZE) == 200
    assert await victim.post("/mcp", INITIALIZE, **{"x-api-key": "key"}) == 200


@pytest.mark.requirement("R60")
async def test_wrong_keys_do_not_lock_out_others(victim: Victim) -> None:
    guesses = [victim.post("/test/echo", {}, **{"x-api-key": f"guess {n}"}) for n in range(60)]
    statuses = await asyncio.gather(*guesses)

    assert set(statuses) == {401, 429}
    assert await victim.post("/test/echo", {}, **{"x-api-key": "key"}) == 200
    assert await victim.post("/test/echo", {}) == 200


PROMISED = 0.3
"""Seconds for which hostile input may block the event loop, in processor time of the reference machine.

It needs less than a third of it; without limits it took seconds.
"""

LEGITIMATE = 0.75
"""The same for input within all limits, which is decoded, validated and answered."""

LISTS = b"[" + b"[]," * 1_390_000 + b"1]"
NEAR = b"[" + b"[]," * 99_000 + b"1]"
DEEP = b"[" + (b"[" * 50 + b"]" * 50 + b",") * 1_900 + b"1]"
QUOTES = b'"' + b'\\"[' * 1_300_000 + b'"'
MESSAGE = b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"a":%s}}'


@pytest.mark.requirement("R55")
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/test/echo", b'{"value": %s}' % LISTS, 413),
        ("/test/typed", b'{"items": %s}' % LISTS, 413),
        ("/test/closed", b'{"items": %s}' % LISTS, 404),
        ("/call", b'{"operation": "test.echo", "input": {"value": %s}}' % LISTS, 413),
        ("/mcp", b'{"jsonrpc":"2.0","id":1,"method":"x","params":%s}' % LISTS, 413),
        ("/search", b'{"query": "%s"}' % (b"ab " * 1_390_000), 422),
    ],
    ids=["path", "typed", "closed", "gateway", "mcp", "search"],
)
async def test_four_megabytes_do_not_block_the_event_loop(
    victim: Victim, path: str, body: bytes, status: int
) -> None:
    assert await victim.post(path, body) == status
    # It took 1 to 5 s.
    assert await victim.lag() < PROMISED


@pytest.mark.requirement("R55")
@pytest.mark.parametrize(
    ("path", "body", "statuses"),
    [
        ("/test/echo", b'{"value": %s}' % NEAR, {200}),
        ("/test/typed", b'{"items": %s}' % NEAR, {422}),
        ("/test/echo", b'{"value": %s}' % DEEP, {200}),
        ("/test/echo", b'{"value": %s}' % QUOTES, {200}),
        ("/mcp", MESSAGE % NEAR, {400, 404}),
        ("/mcp", MESSAGE % QUOTES, {400, 404}),
    ],
    ids=["lists", "typed", "deep", "quotes", "lists-mcp", "quotes-mcp"],
)
async def test_a_request_within_all_limits_does_not_block_the_event_loop(
    victim: Victim, path: str, body: bytes, statuses: set[int]
) -> None:
    assert await victim.post(path, body) in statuses
    assert await victim.lag() < LEGITIMATE


@pytest.mark.requirement("R55")
async def test_16_kilobytes_of_deflate_at_a_socket(victim: Victim) -> None:
    bomb = zlib.compressobj(9, wbits=-15)
    deflated = bomb.compress(b"[]," * 5_500_000) + bomb.flush(zlib.Z_SYNC_FLUSH)
    key = base64.b64encode(b"0" * 16)
    async with connected(victim) as (reader, writer):
        writer.write(
            b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Extensions: permessage-deflate\r\n"
            b"Sec-WebSocket-Key: %s\r\n\r\n" % key
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 101 " in head
        assert b"permessage-deflate" not in head
        # A masked text frame with the mark of a compressed one.
        writer.write(b"\xc1\xff" + len(deflated).to_bytes(8, "big") + b"\0\0\0\0" + deflated)
        with time_limit(30):
            await reader.read()

    assert await victim.lag() < PROMISED


@pytest.mark.requirement("R54", "R55")
@pytest.mark.parametrize("is_hub", [False, True], ids=["app", "hub"])
@pytest.mark.parametrize("input", [LISTS, b"[" * 4_100_000], ids=["lists", "deep"])
async def test_four_megabytes_at_a_socket(victim: Victim, input: bytes, is_hub: bool) -> None:
    url = f"ws://127.0.0.1:{victim.hub_port if is_hub else victim.port}/ws"
    payload = b'{"requestId": "1", "operationId": "test.echo", "input": %s}' % input
    socket = await connect(url)
    await socket.send(b'{"type":"call.requested","payload":%s}' % payload, text=True)
    # The frame is rejected by its head, perhaps before the rest is sent. The library then closes the transport again,
    # which Python 3.11 answers with an AttributeError if it was closed while it was sending.
    with suppress(ConnectionClosed, AttributeError), time_limit(30):
        await socket.send(b"x" * (5 * MEGABYTE), text=True)
        while True:
            await socket.recv()
    await socket.wait_closed()

    assert socket.close_code == 1009
    assert await victim.lag() < PROMISED


@cache
def packed(part: bytes, count: int) -> bytes:
    """Return a JSON list of `count` equal parts, compressed."""
    packer = zlib.compressobj(9, wbits=31)
    start = packer.compress(b"[")
    blocks = [packer.compress(part * 10_000) for _ in range(count // 10_000)]
    return start + b"".join(blocks) + packer.compress(b"1]") + packer.flush()


@pytest.mark.requirement("R18", "R55")
@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize(
    ("part", "count", "promised"),
    [
        # It took 3.1 GB and blocked the event loop for 36 to 95 s.
        (b"[],", 21_500_000, PROMISED),
        (b"[],", 50_000, LEGITIMATE),
        (b'{"a":1},', 20_000, LEGITIMATE),
    ],
    ids=["63 KB", "lists", "objects"],
)
async def test_a_compressed_response_of_an_api_does_not_block_the_event_loop(
    part: bytes, count: int, promised: float, is_typed: bool
) -> None:
    body = packed(part, count)
    schema = {
        "type": "array",
        "items": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
    content = {"application/json": {"schema": schema}} if is_typed else {}
    doc = document(responses={"200": {"description": "ok", "content": content}})

    async def respond(request: web.Request) -> web.Response:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return web.Response(body=body, headers=headers)

    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            before = process_time()
            await asyncio.sleep(0.001)
            longest = max(longest, process_time() - before)

    async with serving(respond) as url, imported(doc, base_url=url, timeout=100) as registry:
        before = most_resident(reset=True)
        ticking = asyncio.create_task(tick())
        try:
            await registry.execute("api.call", {})
        except CallError as error:
            assert error.code == "RESOURCE_EXHAUSTED"  # noqa: PT017
        await asyncio.sleep(0.01)
        ticking.cancel()

    assert longest / max(1.0, slowness()) < promised
    assert most_resident() - before < 150 * MEGABYTE


def most_resident(*, reset: bool = False) -> int:
    """Return the most memory that this process had since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
