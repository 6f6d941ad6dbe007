"""Under a server of the user's own choice, the application enforces what it can by itself."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import uvicorn
from tests.limits import time_limit
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from operations import Identity, OperationRegistry
from operations.server import Limits, create_app
from operations.server.http11.protocol import HTTPProtocol

HEAD = b"POST /test/echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
FORGED = b"Host: localhost\r\nX-API-Key: key\r\nX-Forwarded-For: 10.0.0.9\r\n\r\n"


@asynccontextmanager
async def plain_uvicorn(**options: Any) -> AsyncGenerator[tuple[int, list[str]]]:
    """Serve as `uvicorn app:app` does; yield the port and the names of all headers that a resolver has seen."""
    registry = OperationRegistry()
    seen: list[str] = []

    @registry.operation("test.echo")
    async def echo() -> str:
        return "fine"

    def resolve(connection: Any) -> Identity | None:
        seen.extend(connection.headers)
        return None

    app = create_app(registry, identity=resolve, limits=Limits(body_bytes=100_000), websocket=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, **options)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listener]))
        with time_limit(20):
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                yield listener.getsockname()[1], seen
            finally:
                server.should_exit = True
                await task


@pytest.mark.requirement("R56")
@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_trailers_never_become_headers(http: Any) -> None:
    async with plain_uvicorn(http=http) as (port, seen):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # In one piece: the server has read the trailers before the application runs.
        writer.write(CHUNKED + FORGED)
        assert b" 411 " in await reader.readline()
        writer.close()

    assert seen == []


@pytest.mark.requirement("R56")
async def test_our_protocol_can_be_used_under_plain_uvicorn() -> None:
    async with plain_uvicorn(http=HTTPProtocol) as (port, seen):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED + FORGED)
        assert b" 200 " in await reader.readline()
        writer.close()

    assert "x-api-key" not in seen


@pytest.mark.requirement("R55")
async def test_a_message_that_expands_beyond_the_limit_closes_the_socket() -> None:
    async with plain_uvicorn() as (port, _):
        async with connect(f"ws://127.0.0.1:{port}/ws", compression="deflate") as socket:
            with pytest.raises(ConnectionClosed) as caught:
                await socket.send("[]," * 1_000_000)
                while True:
                    await socket.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009
        url = f"http://127.0.0.1:{port}/test/echo"
        async with aiohttp.ClientSession() as session, session.post(url, json={}) as response:
            assert response.status == 200
