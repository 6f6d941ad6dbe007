"""HTTP/1.1 on the wire: requests, responses and errors of either side."""

import asyncio
import logging
import socket
import ssl
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.hub.test_the_file_covers_the_product import make_certificate
from tests.limits import time_limit

from operations.server.http11.protocol import HTTPProtocol
from operations.server.http11.running import running

GET = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n"
CLOSE = b"GET /%b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n%b\r\n"
)
PING = b"\x89\x84\0\0\0\0ping"

seen: ContextVar[str] = ContextVar("seen", default="nothing")


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
        with time_limit(14):
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
        with time_limit(14):
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
        with time_limit(14):
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
async def test_no_header_of_a_response_can_add_another(
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
    [plain((b"content-length", b"2"), (b"content-length", b"2")), part(b"xy")],
    [plain((b"content-length", b"+2")), part(b"xy")],
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
    assert received.startswith(b"HTTP/1.1 500 ")


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


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("framing", [
    b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\nzz\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n2;a\nb\r\nab\r\n0\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n2\nab\n0\n\n",
    b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
])  # fmt: skip
async def test_a_malformed_body_is_rejected_at_once(framing: bytes) -> None:
    ended: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        while message.get("more_body"):
            message = await receive()
        ended.append(message["type"])
        await echo(scope, receive, send)

    malformed = b"POST /bad HTTP/1.1\r\nHost: localhost\r\n" + framing + CLOSE % b"smuggled"

    received = await exchange(app, malformed)

    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1
    assert ended == ["http.disconnect"]
    assert bodies(await exchange(echo, GET % b"first" + malformed)) == [b"/first?:"]


@pytest.mark.requirement("R18")
@pytest.mark.parametrize(("status", "framing"), [
    (501, b"Transfer-Encoding: gzip, chunked\r\n"), (501, b"Transfer-Encoding: gzip\r\n"),
    (501, b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"), (501, b"Transfer-Encoding: , chunked\r\n"),
    (501, b"Transfer-Encoding: chun\r\nTransfer-Encoding: ked\r\n"),
    (501, b"Transfer-Encoding: xchunked\r\n"), (501, b"Transfer-Encoding: identity\r\n"),
    (501, b"Connection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: gzip, chunked\r\n"),
    (400, b"Transfer-Encoding: chunked, identity\r\n"), (400, b"Transfer-Encoding: chunked, chunked\r\n"),
    (400, b"Transfer-Encoding: chunked\r\nContent-Length: 15\r\n"),
    (400, b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n"),
    (400, b"Content-Length: 15\r\nContent-Length: 15\r\n"), (400, b"Content-Length: 15, 15\r\n"),
    (400, b"Content-Length: 0\r\nContent-Length: 15\r\n"), (400, b"Content-Length: +15\r\n"),
    (400, b"Transfer-Encoding:\r\nContent-Length: 15\r\n"), (400, b"Transfer-Encoding : chunked\r\n"),
])  # fmt: skip
async def test_a_body_whose_framing_or_coding_is_not_certain_is_rejected(
    status: int, framing: bytes
) -> None:
    head = b"POST /bad HTTP/1.1\r\nHost: localhost\r\n" + framing + b"\r\n"
    request = head + b"5\r\nhello\r\n0\r\n\r\n" + CLOSE % b"smuggled"

    received = await exchange(echo, request)

    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert received.count(b"HTTP/1.1") == 1
    assert bodies(await exchange(echo, GET % b"first" + request)) == [b"/first?:"]


@pytest.mark.requirement("R18")
async def test_a_client_of_an_old_version_cannot_send_chunks() -> None:
    head = b"POST / HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

    received = await exchange(echo, head + b"5\r\nhello\r\n0\r\n\r\n")

    assert received.startswith(b"HTTP/1.1 400 ")


@pytest.mark.requirement("R21")
@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://localhost/a?b", b"/a?b:"), (b"HTTP://LOCALHOST/a", b"/a?:"), (b"http://localhost", b"/?:"),
        (b"http://localhost?b", b"/?b:"), (b"http://evil.example/a", None), (b"http://localhost:1/a", None),
        (b"http://me@localhost/a", None), (b"ftp://localhost/a", None),
    ],
)  # fmt: skip
async def test_an_absolute_url_has_the_host_of_its_request(
    target: bytes, path: bytes | None
) -> None:
    head = b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    received = await exchange(echo, head)

    assert bodies(received) == ([] if path is None else [path])
    assert received.startswith(b"HTTP/1.1 400 " if path is None else b"HTTP/1.1 200 ")


async def test_a_malformed_rest_of_a_body_gets_no_second_response() -> None:
    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain((b"content-length", b"0"), status=413))
        await send(part(b""))

    async with serving(early) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with time_limit(14):
            writer.write(
                b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            assert b" 413 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"zz\r\n")
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("is_secure", [False, True])
async def test_a_client_that_reads_after_sending_gets_an_early_response(
    is_secure: bool, tmp_path: Path
) -> None:
    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain((b"content-length", b"5"), (b"connection", b"close"), status=413))
        await send(part(b"large"))

    files: dict[str, Any] = {}
    if is_secure:
        make_certificate(tmp_path)
        files = {
            "certificate": str(tmp_path / "server.pem"),
            "certificate_key": str(tmp_path / "key.pem"),
        }
    size = 20_000_000
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size

    def post(url: str) -> bytes:
        connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 14)
        if is_secure:
            tls = ssl.create_default_context(cafile=files["certificate"])
            connection = tls.wrap_socket(connection, server_hostname="127.0.0.1")
        with connection:
            connection.sendall(head + bytes(size))
            return connection.makefile("rb").readline()

    async with running(Starlette(routes=[Mount("/", early)]), **files) as url:
        assert (await asyncio.to_thread(post, url)).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("version", "sent"), [(b"1.0", 0), (b"1.0", 9), (b"1.0", 10), (b"1.1", 10)]
)
async def test_a_connection_ends_soon_after_an_early_response(
    version: bytes, sent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS, if the whole body arrives, or if a client of HTTP/1.0 sends nothing more."""

    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain((b"content-length", b"5"), (b"connection", b"close"), status=413))
        await send(part(b"large"))

    monkeypatch.setattr("operations.server.http11.protocol.DISCARD_SECONDS", 600)
    make_certificate(tmp_path)
    certificate, key = str(tmp_path / "server.pem"), str(tmp_path / "key.pem")
    tls = ssl.create_default_context(cafile=certificate)
    app = Starlette(routes=[Mount("/", early)])
    with time_limit(14):
        async with running(app, certificate=certificate, certificate_key=key) as url:
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            writer.write(
                b"POST / HTTP/%b\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n" % version
            )
            received = await reader.readuntil(b"large")
            # Another request must not be served.
            writer.write(bytes(sent) + (GET % b"a" if sent == 10 else b""))
            received += await reader.read()
            writer.close()
    assert received.startswith(b"HTTP/1.1 413 ")
    assert received.endswith(b"large")


async def test_no_pipelined_request_is_served_after_the_last_response() -> None:
    served, may_end = list[str](), asyncio.Event()

    async def last(scope: Scope, receive: Receive, send: Send) -> None:
        served.append(scope["path"])
        await may_end.wait()
        await send(plain((b"content-length", b"4"), (b"connection", b"close")))
        await send(part(b"last"))

    post = b"POST /b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
    with time_limit(14):
        async with serving(last) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET % b"a" + post + bytes(5))
            while not served:
                await asyncio.sleep(0)
            may_end.set()
            received = await reader.readuntil(b"last")
            writer.write(bytes(5) + GET % b"c")
            received += await reader.read()
            writer.close()
    assert received.endswith(b"last")
    assert served == ["/a"]


async def test_the_rest_of_a_body_is_not_read_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain((b"content-length", b"0"), (b"connection", b"close"), status=413))
        await send(part(b""))

    monkeypatch.setattr("operations.server.http11.protocol.DISCARD_SECONDS", 0.1)
    async with serving(early) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")
        with time_limit(14), pytest.raises(ConnectionError):
            while True:
                writer.write(bytes(1000))
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()


async def test_the_rest_of_a_body_does_not_delay_a_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain((b"content-length", b"0"), status=413))
        await send(part(b""))

    def shut_down(protocol: Any) -> None:
        leave(protocol)
        writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")

    leave = HTTPProtocol.shutdown
    monkeypatch.setattr(HTTPProtocol, "shutdown", shut_down)
    monkeypatch.setattr("operations.server.http11.protocol.LINGER_SECONDS", 2)
    monkeypatch.setattr("operations.server.http11.protocol.DISCARD_SECONDS", 600)
    monkeypatch.setattr("operations.server.http11.running.GRACE", 600)
    with time_limit(14):
        async with serving(early) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET % b"a")
            await reader.readuntil(b"\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()


@pytest.mark.requirement("R18")
async def test_a_client_that_was_not_asked_for_its_body_cannot_send_another_request() -> None:
    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain((b"content-length", b"0"), status=413))
        await send(part(b""))

    head = (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 99\r\n\r\n"
    )

    received = await exchange(early, head)

    assert received.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in received


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("size", [0, 400_000], ids=["pipelined", "after-a-large-body"])
async def test_a_request_sees_no_context_variables_of_the_one_before(size: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found = seen.get().encode()
        seen.set("another request")
        await asyncio.sleep(0)
        while (await receive()).get("more_body"):
            pass
        await send(plain((b"content-length", str(len(found)).encode())))
        await send(part(found))

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with time_limit(14):
            head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size
            writer.write(head + b"x" * size)
            if size:
                await reader.readuntil(b"\r\n\r\nnothing")
            writer.write(CLOSE % b"")
            received = await reader.read()
        writer.close()

    assert received.endswith(b"nothing")
    assert b"another" not in received


@pytest.mark.parametrize("status", [204, 304])
async def test_a_status_without_a_body_drops_the_body_of_the_application(status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain((b"content-length", b"5"), status=status))
        await send(part(b"hello" if scope["path"] == "/body" else b""))

    received = await exchange(app, GET % b"body" + CLOSE % b"")

    assert received.count(b"HTTP/1.1 %d " % status) == 2
    assert b"hello" not in received


@pytest.mark.parametrize("version", [b"", b" HTTP/0.9", b" HTTP/2.0"])
async def test_other_versions_are_rejected(version: bytes) -> None:
    received = await exchange(echo, b"GET /" + version + b"\r\nHost: localhost\r\n\r\n")

    assert received.startswith(b"HTTP/1.1 400 ")


@pytest.mark.requirement("R18")
async def test_few_requests_wait_for_the_response_to_the_one_before() -> None:
    received = await exchange(echo, b"".join(GET % b"%d" % number for number in range(1000)))

    assert bodies(received) == [b"/%d?:" % number for number in range(65)]
    assert b"connection: close" in received


async def test_a_request_for_another_protocol_is_served_with_its_body() -> None:
    head = b"POST /x HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 4\r\n\r\n"

    assert bodies(await exchange(echo, head + b"text" + CLOSE % b"y")) == [b"/x?:text", b"/y?:"]
    assert bodies(await exchange(echo, head, b"text", CLOSE % b"y")) == [b"/x?:text", b"/y?:"]


@pytest.mark.requirement("R58")
async def test_a_websocket_cannot_begin_while_a_response_is_being_sent() -> None:
    kinds: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kinds.append(scope["type"])
        await echo(scope, receive, send)

    received = await exchange(app, GET % b"first" + HANDSHAKE % b"")

    assert bodies(received) == [b"/first?:"]
    assert kinds == ["http"]


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("before", [b"", GET % b"first"], ids=["first", "second"])
async def test_a_large_head_that_arrives_at_once_is_rejected(before: bytes) -> None:
    head = b"GET /large HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 70_000 + b"\r\n\r\n"

    async with serving(echo) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        with time_limit(14):
            # One write, which the server reads at once.
            writer.write(before + head)
            received = await reader.read()
        writer.close()

    assert b"/large" not in received
    assert received.startswith(b"HTTP/1.1 200" if before else b"HTTP/1.1 431")


@pytest.mark.requirement("R18")
async def test_a_head_that_begins_behind_a_body_is_counted_from_its_start() -> None:
    post = b"POST /first HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n" + b"a" * 50
    head = b"GET /large HTTP/1.1\r\nHost: localhost\r\nX-A: "

    async with serving(echo) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        with time_limit(10):
            writer.write(post)
            await writer.drain()
            # One write, which the server reads at once.
            writer.write(b"a" * 50 + head + b"a" * 60_000)
            first = await reader.readuntil(b"a" * 100)
            writer.write(b"a" * 10_000)
            rest = await reader.read()
        writer.close()

    assert first.startswith(b"HTTP/1.1 200")
    assert rest.startswith(b"HTTP/1.1 431")


async def test_a_large_body_that_arrives_with_its_head_is_accepted() -> None:
    head = b"POST /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 100000\r\n\r\n"

    received = await exchange(echo, head + b"a" * 100_000)

    assert bodies(received) == [b"/x?:" + b"a" * 100_000]


@pytest.mark.requirement("R55")
@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (400, b"Content-Length: 4\r\n"),
        (400, b"Transfer-Encoding: chunked\r\n"),
        (431, b"X-A: b\r\n" * 200),
        (431, b"X-A: " + b"b" * 10_000 + b"\r\n"),
    ],
    ids=["length", "chunked", "many", "long"],
)
async def test_a_malformed_handshake_is_rejected_at_once(status: int, headers: bytes) -> None:
    received = await exchange(echo, HANDSHAKE % headers)

    assert received.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("is_later", [False, True])
async def test_nothing_is_sent_before_the_response_to_a_handshake(*, is_later: bool) -> None:
    began, release = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        began.set()
        await release.wait()

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with time_limit(14):
            writer.write(HANDSHAKE % b"" + (b"" if is_later else PING))
            await began.wait()
            if is_later:
                writer.write(PING)
            received = await reader.read()
            release.set()
        writer.close()

    assert b"ping" not in received


@pytest.mark.requirement("R58")
async def test_a_closed_connection_does_not_wait_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = asyncio.Event()

    class Watched(HTTPProtocol):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain((b"content-length", b"50000000")))
        await send(part(b"x" * 50_000_000))

    monkeypatch.setattr("operations.server.http11.running.HTTPProtocol", Watched)
    monkeypatch.setattr("operations.server.http11.exchange.SEND_SECONDS", 0.2)
    # The application need not wait, as with a response that is smaller than the limit.
    monkeypatch.setattr("operations.server.http11.exchange.WRITE_BUFFER", 100_000_000)
    async with serving(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CLOSE % b"")
        with time_limit(20):
            await lost.wait()
        writer.close()


@pytest.mark.requirement("R58")
async def test_a_client_that_reads_slowly_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 20_000_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(plain((b"content-length", b"%d" % size)))
        await send(part(b"x" * size))

    monkeypatch.setattr("operations.server.http11.exchange.SEND_SECONDS", 2.0)
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=100_000)
        writer.write(CLOSE % b"")
        await reader.readuntil(b"\r\n\r\n")
        left = size
        while left > 0:
            part_read = await reader.read(100_000)
            assert part_read, "the connection was cut"
            left -= len(part_read)
            await asyncio.sleep(0.02)
        writer.close()


@pytest.mark.parametrize("pipelined", [0, 1, 7])
async def test_an_application_learns_that_its_client_has_disconnected(pipelined: int) -> None:
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
        with time_limit(20):
            writer.write((GET % b"") * (1 + pipelined))
            await began.wait()
            writer.close()
            await ended.wait()


@pytest.mark.parametrize("is_websocket", [False, True])
async def test_a_connection_that_is_reset_during_a_large_response_is_not_logged(
    caplog: pytest.LogCaptureFixture, *, is_websocket: bool
) -> None:
    reset, ended = asyncio.Event(), asyncio.Event()

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"} if is_websocket else plain())
        await reset.wait()
        for _ in range(20):
            content = bytes(100_000)
            sent = {"type": "websocket.send", "bytes": content}
            await send(sent if is_websocket else part(content, more=True))
        if not is_websocket:
            await send(part(b""))
        ended.set()

    with time_limit(20):
        async with serving(large) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HANDSHAKE % b"" if is_websocket else GET % b"")
            await reader.readuntil(b"\r\n\r\n")
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            # The application continues before the server has noticed the reset.
            reset.set()
            await ended.wait()

    assert caplog.messages == []


async def test_a_large_body_is_read_as_the_application_asks_for_it() -> None:
    size = 3_000_000
    head = (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % size
    )

    received = await exchange(echo, head, b"x" * size)

    assert bodies(received)[0] == b"/?:" + b"x" * size


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", GET % b"b"), (GET % b"a", GET % b"b"), ((GET % b"b")[:9], (GET % b"b")[9:])],
    ids=["new", "used", "incomplete"],
)
async def test_a_request_that_crosses_a_shutdown_gets_its_response(
    before: bytes, after: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.server.http11.protocol.LINGER_SECONDS", 60)
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def serve() -> None:
        async with serving(echo) as found:
            port.set_result(found)
            await stop.wait()

    with time_limit(40):
        server = asyncio.create_task(serve())
        reader, writer = await asyncio.open_connection("127.0.0.1", await port)
        writer.write(before)
        if before.endswith(b"\r\n\r\n"):
            await reader.readuntil(b"/a?:")
        stop.set()
        with pytest.raises(ConnectionError):
            while True:
                (await asyncio.open_connection("127.0.0.1", port.result()))[1].close()
        writer.write(after)
        received = await reader.read()
        writer.close()
        await server

    assert bodies(received) == [b"/b?:"]
    assert b"connection: close" in received
