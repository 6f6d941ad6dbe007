"""Slow clients, clients that do not read, and trailers."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.requests import HTTPConnection
from tests.limits import time_limit

from operations import Identity, OperationRegistry
from operations.server import Limits, create_app
from operations.server.http11.running import running

HEAD = b"POST /test/echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

seen: list[dict[str, str]] = []


@asynccontextmanager
async def serving(**options: Any) -> AsyncGenerator[tuple[int, Any]]:
    registry = OperationRegistry()
    seen.clear()

    @registry.operation("test.echo")
    async def echo(size: int = 0) -> str:
        return "x" * size

    async def resolve(connection: HTTPConnection) -> Identity | None:
        # Bytes that arrived together with the head have been parsed by now.
        await asyncio.sleep(0)
        seen.append(dict(connection.headers))
        return None

    app = create_app(registry, identity=resolve, **options)
    async with running(app) as url:
        yield int(url.rpartition(":")[2]), app.state.pipeline.front


@pytest.mark.requirement("R56")
async def test_trailers_never_become_headers() -> None:
    forged = b"X-Forwarded-For: 10.0.0.9\r\nHost: evil.example\r\nX-API-Key: key\r\n"
    async with serving() as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED + b"2\r\n{}\r\n0\r\n" + forged + b"\r\n")
        with time_limit(20):
            status = await reader.readline()
        writer.close()

    assert b" 200 " in status
    assert {"x-forwarded-for", "x-api-key"}.isdisjoint(seen[0])
    assert seen[0]["host"] == "localhost"


@pytest.mark.requirement("R56")
@pytest.mark.parametrize(
    "flood", [b"X-A: b\r\n", b"X-A: ", b"a" * 1000], ids=["many", "one", "bare"]
)
async def test_a_flood_of_trailers_ends_the_connection(flood: bytes) -> None:
    async with serving() as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED + b"2\r\n{}\r\n0\r\n")
        sent = 0
        with time_limit(20), pytest.raises(ConnectionError):
            while True:
                writer.write(flood * (16_000 // len(flood)))
                await writer.drain()
                sent += 16_000
        writer.close()

    # The buffers of the kernel on both sides of the loopback; 109 MB were accepted before.
    assert sent < 16_000_000


@pytest.mark.requirement("R55", "R18")
async def test_an_unread_body_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.server.http11.protocol.BODY_SECONDS", 0.2)
    async with serving() as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # The path does not exist: the response is sent at once, and the body ignored.
        writer.write(b"POST /no/such HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n")
        with time_limit(20):
            assert b" 404 " in await reader.readline()
            writer.write(b"x")
            # If the time has passed, the last byte resets the connection.
            with suppress(ConnectionResetError):
                await reader.read()
        writer.close()


@pytest.mark.requirement("R58")
async def test_unread_responses_are_limited_and_hold_their_slots() -> None:
    limits = Limits(output_bytes_per_caller=25_000_000, calls=100)
    async with serving(limits=limits) as (port, front):
        body = b'{"size": 10000000}'
        request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        for _, writer in connections:
            writer.write(request)
        with time_limit(20):
            heads = [await reader.readline() for reader, _ in connections]

            assert sorted(head.split()[1] for head in heads) == [b"200"] * 2 + [b"429"] * 4
            assert front.calls.total == 2, "a slot is free only when the response has been sent"
            assert front.output.total > 20_000_000
            for _, writer in connections:
                writer.close()
            while front.calls.total or front.output.total:
                await asyncio.sleep(0.01)
    gc.collect()


@pytest.mark.requirement("R58")
async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.server.http11.exchange.SEND_SECONDS", 0.2)
    async with serving() as (port, front):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"size": 20000000}'
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        with time_limit(20):
            while not front.output.total:
                await asyncio.sleep(0.01)
            while front.output.total or front.calls.total:
                await asyncio.sleep(0.01)
        writer.close()
