"""Messages that the client of a WebSocket does not read count against it, and it is disconnected."""

import asyncio
import base64
import gc
import json
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.limits import time_limit

from operations import OperationRegistry
from operations.calls.socket import WebSocketHub
from operations.front.front import Front
from operations.server import Limits, create_app
from operations.server.http11.running import running


class SlowClient:
    """A client of the call protocol that reads only on request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    def send(self, request_id: str, operation: str, **input: Any) -> None:
        payload = {"requestId": request_id, "operationId": operation, "input": input, "credit": 9}
        if operation != "test.items":
            del payload["credit"]
        event = {"type": "call.requested", "id": "", "payload": payload}
        text = json.dumps(event).encode()
        # A masked text frame whose mask is zero.
        self._writer.write(b"\x81\xfe" + len(text).to_bytes(2, "big") + b"\0\0\0\0" + text)

    async def read(self) -> dict[str, Any]:
        """Return the next event."""
        length = (await self.reader.readexactly(2))[1]
        if length >= 126:
            size = await self.reader.readexactly(2 if length == 126 else 8)
            length = int.from_bytes(size, "big")
        found: dict[str, Any] = json.loads(await self.reader.readexactly(length))
        return found


KINDS = pytest.mark.parametrize("kind", ["app", "hub"])


@asynccontextmanager
async def serving(kind: str, limits: Limits, **options: Any) -> AsyncGenerator[tuple[int, Front]]:
    registry = OperationRegistry()

    @registry.operation("test.text")
    async def text(size: int) -> str:
        return "x" * size

    @registry.operation("test.items")
    async def items(size: int) -> AsyncGenerator[str]:
        yield "x" * size
        yield "x" * size

    app = create_app(registry, websocket=True, limits=limits)
    with time_limit(60):
        if kind == "hub":
            hub = WebSocketHub(registry, limits=limits, max_operations=0)
            async with hub.serve(path="/ws", **options) as server:
                yield server.sockets[0].getsockname()[1], hub.front
            return
        async with running(app) as url:
            yield int(url.rpartition(":")[2]), app.state.pipeline.front


@asynccontextmanager
async def connected(port: int) -> AsyncGenerator[SlowClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    key = base64.b64encode(b"0" * 16).decode()
    writer.write(
        f"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    assert b"101" in await reader.readuntil(b"\r\n\r\n")
    try:
        yield SlowClient(reader, writer)
    finally:
        writer.close()


@pytest.mark.requirement("R58")
@KINDS
@pytest.mark.parametrize("operation", ["test.text", "test.items"])
async def test_unread_messages_are_limited_and_hold_their_slots(kind: str, operation: str) -> None:
    size = 10_000_000
    limits = Limits(output_bytes_per_caller=25_000_000)
    async with serving(kind, limits) as (port, front), connected(port) as client:
        for number in range(4):
            client.send(str(number), operation, size=size)
        # Two results fit; the other two are replaced by errors, which wait behind them.
        while not 2 * size <= front.output.total < 3 * size:
            await asyncio.sleep(0.01)
        assert front.calls.total + front.streams.total == 4

        events = [await client.read() for _ in range(4)]
        codes = {event["payload"].get("code") for event in events}
        assert codes == {None, "RESOURCE_EXHAUSTED"}
        assert sum(event["type"] == "call.responded" for event in events) == 2
        if operation == "test.text":
            while front.output.total or front.calls.total:
                await asyncio.sleep(0.01)


@pytest.mark.requirement("R58")
@KINDS
@pytest.mark.parametrize("operation", ["test.text", "test.items"])
async def test_refused_results_take_no_memory(kind: str, operation: str) -> None:
    size, number = 10_000_000, 10
    limits = Limits(output_bytes_per_caller=15_000_000)
    async with serving(kind, limits) as (port, front), connected(port) as client:
        tracemalloc.start()
        try:
            for each in range(number):
                client.send(str(each), operation, size=size)
            while front.output.rejected < number - 1:
                await asyncio.sleep(0.01)
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    # The first result: as bytes, and in the buffer of the socket.
    assert held < 4 * size


@pytest.mark.requirement("R58")
@KINDS
async def test_a_client_that_does_not_read_is_disconnected(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.server.http11.exchange.SEND_SECONDS", 0.3)
    keepalive = {"ping_interval": 0.1, "ping_timeout": 0.2}
    async with serving(kind, Limits(), **keepalive) as (port, front), connected(port) as client:
        client.send("1", "test.text", size=12_000_000)
        while not front.output.total:
            await asyncio.sleep(0.01)
        while front.output.total or front.calls.total:
            await asyncio.sleep(0.01)


@pytest.mark.requirement("R58")
@KINDS
async def test_a_client_that_reads_slowly_stays_connected(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.server.http11.exchange.SEND_SECONDS", 2.0)
    async with serving(kind, Limits()) as (port, front), connected(port) as client:
        client.send("1", "test.text", size=12_000_000)
        reader = client.reader
        left = 12_000_000
        while left > 0:
            part = await reader.read(100_000)
            assert part, "the connection was cut"
            left -= len(part)
            await asyncio.sleep(0.025)
        client.send("2", "test.text", size=1)
        while front.output.total:
            await asyncio.sleep(0.01)
