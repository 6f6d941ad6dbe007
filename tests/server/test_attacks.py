"""A table of attacks on a real server: the right status, no work done, and the next good request works."""

import asyncio
import logging
import resource
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from tests.limits import scaled, time_limit

from operations import Identity, OperationRegistry
from operations.server import APIKeys, Limits, create_app, hash_key
from operations.server.http11.running import running

ran: list[Any] = []

LIMITS = Limits()


@asynccontextmanager
async def attacked(limits: Limits = LIMITS) -> AsyncGenerator[int]:
    """A server with one operation behind a key; gives its port, and checks afterwards that it still works."""
    registry = OperationRegistry()
    ran.clear()

    @registry.operation("test.run", scopes=["run"])
    async def run(text: str = "") -> str:
        ran.append(text)
        return "fine"

    keys = APIKeys({hash_key("key"): Identity("alice", ["run"])})
    app = create_app(registry, identity=keys, limits=limits, scopes_supported=["run"])
    with time_limit(60):
        async with running(app) as url:
            port = int(url.rpartition(":")[2])
            yield port
            ran.clear()
            good = b"POST /test/run HTTP/1.1\r\nHost: localhost\r\nX-API-Key: key\r\nConnection: close\r\n\r\n"
            assert b"200 OK" in await exchange(port, good)
            assert ran == [""]


async def exchange(port: int, sent: bytes) -> bytes:
    """Return the server's response to these bytes, until it closes the connection or stays silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(65536), scaled(30))
    except ConnectionError:
        return b""
    finally:
        writer.close()


def request(
    *,
    method: str = "POST",
    target: str = "/test/run",
    body: bytes = b"{}",
    drop: tuple[str, ...] = (),
    **headers: str,
) -> bytes:
    fields = {
        "host": "localhost",
        "x-api-key": "key",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if name not in drop)
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


@pytest.mark.requirement("R13", "R21")
@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (421, request(host="evil.example")),
        (421, request(drop=("host",))),
        (403, request(origin="http://evil.example")),
        (401, request(drop=("x-api-key",))),
        (401, request(x_api_key="wrong")),
        (401, request(x_api_key="")),
        (401, request(drop=("x-api-key",), authorization="Bearer wrong")),
        (401, request(drop=("x-api-key",), cookie="operations_session=x")),
        (401, request(target="/test/run?x-api-key=key", drop=("x-api-key",))),
        (413, request(content_length="999999999")),
        (400, request(content_length="-5")),
        (400, request(body=b"{")),
        (400, request(body=b"[" * 50_000)),
        (400, request(body=b'{"text": "\\ud800"}')),
        (400, request(body=b"\x00\xff\xfe")),
        (415, request(content_encoding="gzip")),
        (415, request(content_type="text/plain")),
        (422, request(body=b"7")),
        (422, request(body=b'{"text": 7}')),
        (422, request(body=b'{"text": "x", "__proto__": {}}')),
        (405, request(method="GET")),
        (405, request(method="PROPFIND")),
        (404, request(target="/test/../test/run")),
        (404, request(target="/test%2frun")),
        (404, request(target="/test/run%0d%0aX:1")),
        (404, request(target="//test/run")),
        (404, request(target="/etc/passwd")),
        (404, request(target="/test/__class__")),
        (400, b"GARBAGE\r\n\r\n"),
        (400, b"POST /test/run HTTP/9.9\r\n\r\n"),
        (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100),
        (400, b"POST /test/run HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
        (400, b"POST /test/run HTTP/1.1\r\nHost: localhost\r\nA: b\rc: d\r\n\r\n"),
    ],
    ids=range(33),
)  # fmt: skip
async def test_an_attack_is_answered_with_its_status(status: int, sent: bytes) -> None:
    async with attacked() as port:
        answer = await exchange(port, sent)

        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
        assert ran == []
        assert b"Traceback" not in answer


async def test_a_request_with_two_lengths_is_not_two_requests() -> None:
    smuggled = b"POST /test/run HTTP/1.1\r\nHost: localhost\r\nX-API-Key: key\r\n\r\n"
    sent = (
        b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Length: %d\r\n\r\n0\r\n\r\n" % (len(smuggled) + 5)
    ) + smuggled

    async with attacked() as port:
        await exchange(port, sent)

        assert ran == []


@pytest.mark.requirement("R18")
async def test_an_endless_chunked_body_is_cut_off() -> None:
    async with attacked(Limits(body_bytes=100_000)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /test/run HTTP/1.1\r\nHost: localhost\r\nX-API-Key: key\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with time_limit(14), suppress(ConnectionError):
            # Either we read the rejection, or the connection is closed while we still write.
            while not reader.at_eof():
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await writer.drain()
        writer.close()

        assert ran == []
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


async def test_a_slow_body_is_abandoned() -> None:
    async with attacked(Limits(body_seconds=0.2)) as port:
        answer = await exchange(port, request(content_length="50"))

        assert answer.startswith(b"HTTP/1.1 408 ")
        assert ran == []


async def test_idle_and_half_open_connections_block_no_client() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(1000, soft // 4)

    async with attacked() as port:
        writers: list[asyncio.StreamWriter] = []
        try:
            for number in range(count):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                if number % 2:
                    writer.write(b"POST /test/run HTTP/1.1\r\nHost: loc")
                writers.append(writer)
            with time_limit(20):
                assert b"200 OK" in await exchange(port, request())
            assert ran == [""]
        finally:
            for writer in writers:
                writer.close()


@pytest.mark.parametrize("first", [b"", b"POST /test/run HTTP/1.1\r\nHost: loc", b"\r\n"])
async def test_a_request_head_has_a_time_limit(
    first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.server.http11.protocol.HEAD_SECONDS", 0.2)

    async with attacked() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        with time_limit(20):
            assert await reader.read() == b""
        writer.close()


async def test_a_second_request_on_a_connection_is_not_waited_for_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operations.server.http11.protocol.HEAD_SECONDS", 0.2)

    async with attacked() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
        with time_limit(20):
            answer = await reader.read()
        writer.close()

        assert answer.count(b"HTTP/1.1 200 OK") == 1


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("target", ["/", "/" + "x" * 100_000])
async def test_an_endless_request_head_is_cut_off(target: str) -> None:
    async with attacked() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {target} HTTP/1.1\r\n".encode())
        with time_limit(14), suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"X-Filler: " + b"x" * 8000 + b"\r\n")
                await writer.drain()
        writer.close()


@pytest.mark.requirement("R16", "R47")
async def test_the_access_log_holds_no_arguments_and_no_line_breaks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with attacked() as port:
        with caplog.at_level(logging.INFO, "operations.access"):
            await exchange(
                port, request(target="/test/run?text=CANARY", body=b'{"text": "CANARY"}')
            )
            await exchange(port, request(target="/nope%0aCRITICAL%20owned"))
            await exchange(port, request(x_api_key="CANARY"))

        lines = [r.getMessage() for r in caplog.records if r.name == "operations.access"]
        assert len(lines) == 3
        assert "CANARY" not in caplog.text
        assert not any("\n" in line for line in lines)
