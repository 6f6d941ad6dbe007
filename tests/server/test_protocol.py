"""HTTP/1.1 on the wire: what a connection does with requests, responses and errors of either side."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from operations.server.running import running

GET = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n"
CLOSE = b"GET /%b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def plain(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with the path, the query and the body."""
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    text = b"%b?%b:%b" % (scope["path"].encode(), scope["query_string"], body)
    await send(plain((b"Content-Length", str(len(text)).encode())))
    await send(part(text))


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncGenerator[int]:
    async with running(Starlette(routes=[Mount("/", app)])) as url:
        yield int(url.rpartition(":")[2])


async def exchange(app: ASGIApp, *sent: bytes) -> bytes:
    """Return all that a server sends until it closes the connection."""
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with anyio.fail_after(10):
            for piece in sent:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            received = await reader.read()
        writer.close()
        return received


def bodies(received: bytes) -> list[bytes]:
    return [part.partition(b"\r\n\r\n")[2] for part in received.split(b"HTTP/1.1 200 OK")[1:]]


@pytest.mark.requirement("R18")
async def test_pipelined_requests_are_answered_in_order() -> None:
    many = b"".join(GET % str(number).encode() for number in range(20)) + CLOSE % b"last"

    received = await exchange(echo, many)

    names = [*map(str, range(20)), "last"]
    assert bodies(received) == [f"/{name}?:".encode() for name in names]
    assert received.count(b"connection: close") == 1


async def test_a_pipelined_body_belongs_to_its_own_request() -> None:
    def post(name: bytes, body: bytes, extra: bytes = b"") -> bytes:
        length = b"Content-Length: %d\r\n" % len(body)
        return (
            b"POST /" + name + b" HTTP/1.1\r\nHost: localhost\r\n" + extra + length + b"\r\n" + body
        )

    received = await exchange(
        echo, post(b"a", b"first") + post(b"b", b"second")[:-3], b"ond" + post(b"c", b"", b"Connection: close\r\n")
    )  # fmt: skip

    assert bodies(received) == [b"/a?:first", b"/b?:second", b"/c?:"]


async def test_a_chunked_body_arrives_whole_and_a_path_is_unescaped() -> None:
    head = b"POST /a%20b?x=%20 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"

    received = await exchange(echo, head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")

    assert bodies(received) == [b"/a b?x=%20:abcde"]


async def test_a_client_that_waits_for_permission_gets_it_once() -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nExpect: 100-continue\r\n"

    async with serving(echo) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with anyio.fail_after(10):
            writer.write(head + b"Content-Length: 2\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"ok")
            received = await reader.read()
        writer.close()

    assert bodies(received) == [b"/?:ok"]
    assert b"100 Continue" not in received


async def test_a_response_without_a_length_is_chunked_and_its_head_is_sent_at_once() -> None:
    release = asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain())
        await release.wait()
        await send(part(b"one", more=True))
        await send(part(b"", more=True))
        await send(part(b"two"))

    async with serving(stream) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with anyio.fail_after(10):
            writer.write(CLOSE % b"")
            head = await reader.readuntil(b"\r\n\r\n")
            release.set()
            body = await reader.read()
        writer.close()

    assert b"transfer-encoding: chunked" in head
    assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_old_clients_and_head_requests_get_no_chunks(method: str, version: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain())
        await send(part(b"text"))

    request = f"{method} / HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    received = await exchange(app, request.encode())

    body = received.partition(b"\r\n\r\n")[2]
    expected = {("GET", "1.0"): b"text", ("GET", "1.1"): b"4\r\ntext\r\n0\r\n\r\n"}
    assert body == expected.get((method, version), b"")


@pytest.mark.parametrize("status", [204, 304])
async def test_a_status_without_a_body_has_no_chunks(status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain(status=status))
        await send(part(b""))

    received = await exchange(app, CLOSE % b"")

    assert b"chunked" not in received
    assert received.endswith(b"connection: close\r\n\r\n")


@pytest.mark.requirement("R18")
@pytest.mark.parametrize(
    "header",
    [(b"x-name", b"a\r\nset-cookie: b"), (b"x-name", b"a\0"), (b"x: y\r\nz", b"a"), (b"", b"a"), (b"x y", b"a")],
)  # fmt: skip
async def test_no_header_of_a_response_becomes_two(
    header: tuple[bytes, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain((b"content-length", b"2"), header))
        await send(part(b"{}"))

    received = await exchange(app, GET % b"")

    assert received.startswith(b"HTTP/1.1 500 ")
    assert b"set-cookie" not in received
    assert "the application failed" in caplog.text


@pytest.mark.parametrize("messages", [
    [], [part(b"x")], [plain((b"content-length", b"2"))], [plain((b"content-length", b"2")), part(b"xyz")],
    [plain((b"content-length", b"2")), plain()], [{"type": "http.other"}],
])  # fmt: skip
async def test_an_application_that_breaks_the_rules_fails_with_500(
    messages: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    with caplog.at_level(logging.ERROR):
        received = await exchange(app, GET % b"")

    assert b"the application" in caplog.text.encode()
    assert received == b"" or received.startswith(b"HTTP/1.1 500 ")


async def test_a_failure_after_the_head_ends_the_connection() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain())
        await send(part(b"x", more=True))
        raise ValueError

    received = await exchange(app, GET % b"")

    assert received.endswith(b"1\r\nx\r\n")


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("garbage", [
    b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n",
])  # fmt: skip
async def test_garbage_is_rejected_and_spoils_no_response_before_it(garbage: bytes) -> None:
    assert (await exchange(echo, garbage)).startswith(b"HTTP/1.1 400 ")

    received = await exchange(echo, GET % b"first" + garbage)

    assert bodies(received) == [b"/first?:"]
    assert b" 400 " not in received


async def test_a_request_for_another_protocol_is_answered_and_the_connection_closed() -> None:
    request = b"GET /x HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"

    assert bodies(await exchange(echo, request + b"more")) == [b"/x?:"]


async def test_an_application_learns_that_its_client_has_disconnected() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert await receive() == {"type": "http.request", "body": b"", "more_body": False}
        began.set()
        assert await receive() == {"type": "http.disconnect"}
        await send(plain())
        await send(part(b"into the void"))
        ended.set()

    async with serving(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        with anyio.fail_after(10):
            writer.write(GET % b"")
            await began.wait()
            writer.close()
            await ended.wait()


async def test_a_large_body_is_read_as_the_application_asks_for_it() -> None:
    size = 3_000_000
    head = (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % size
    )

    received = await exchange(echo, head, b"x" * size)

    assert bodies(received)[0] == b"/?:" + b"x" * size
