"""The transport of requests: proxies, certificates, and headers that depend on the call."""

import asyncio
import base64
import errno
import gc
import socket
import ssl
import struct
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.limits import scaled
from tests.openapi.echo import Echo
from tests.openapi.serving import document, imported, serving, writing
from tests.proxies import Proxy, running_proxy

from operations import CallError, ErrorCode, Identity, OperationContext
from operations.base.errors import DocumentError
from operations.base.retry import FAILURES
from operations.io.hosts import TrustedHosts
from operations.io.http.aiohttp import AiohttpTransport
from operations.io.http.aiohttp import _call_error as failure
from operations.io.http.client import HTTPRequest
from operations.io.proxies import Proxies
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.openapi.source.client import ServiceClient


@pytest.fixture
async def proxy() -> AsyncGenerator[Proxy]:
    async with running_proxy() as found:
        yield found


async def test_requests_go_through_the_proxy(proxy: Proxy, echo: Echo) -> None:
    echo.seen.clear()
    login = proxy.url.replace("//", "//me:s3cret@")
    base = echo.url.replace("127.0.0.1", "api.example.com")
    async with imported(document(), base_url=base, proxy=login) as registry:
        await registry.execute("api.call", {})

    assert proxy.targets == [f"GET {base}/thing"]
    assert proxy.logins == ["Basic " + base64.b64encode(b"me:s3cret").decode()]
    assert echo.seen[0].header("host") == base.removeprefix("http://")
    assert echo.seen[0].header("proxy-authorization") in (None, proxy.logins[0])


async def test_proxies_of_the_environment_are_used_only_if_that_is_allowed(
    proxy: Proxy, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    async with imported(document(), base_url=echo.url) as registry:
        await registry.execute("api.call", {})
    assert proxy.targets == []

    async with imported(document(), base_url=echo.url, trust_env=True) as registry:
        await registry.execute("api.call", {})
    assert len(proxy.targets) == 1

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.com, 127.0.0.1")
    async with imported(document(), base_url=echo.url, trust_env=True) as registry:
        await registry.execute("api.call", {})
    assert len(proxy.targets) == 1


@pytest.mark.requirement("R05")
@pytest.mark.parametrize("host", ["10.0.0.1", "metadata.internal", "nowhere.invalid"])
async def test_a_proxy_does_not_reach_hosts_that_only_the_document_names(
    host: str, proxy: Proxy
) -> None:
    doc = document(servers=[{"url": f"http://{host}/"}])
    async with imported(doc, proxy=proxy.url, retries=0) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    expected = ErrorCode.UNAVAILABLE if host.endswith("invalid") else ErrorCode.ACCESS_DENIED
    assert caught.value.code == expected
    assert proxy.targets == []


async def test_a_proxy_that_is_unavailable_is_named_without_its_login(unused_port: int) -> None:
    proxy = f"http://me:s3cret@127.0.0.1:{unused_port}"
    config: dict[str, Any] = {"base_url": "http://api.example.com", "proxy": proxy, "retries": 0}
    assert "s3cret" not in repr(HTTPServiceConfig(namespace="api", **config))
    async with imported(document(), **config) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert f"the proxy http://127.0.0.1:{unused_port} cannot be used: " in caught.value.message
    assert "s3cret" not in str(caught.value.to_wire())


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_proxy_whose_name_is_unknown_is_named(scheme: str) -> None:
    config = {"base_url": f"{scheme}://127.0.0.1:9", "proxy": "http://proxy.invalid:3128"}
    async with imported(document(), retries=0, **config) as registry:
        with pytest.raises(CallError, match=r"the proxy http://proxy.invalid:3128 cannot be") as at:
            await registry.execute("api.call", {})

    assert at.value.code == ErrorCode.UNAVAILABLE
    assert at.value.begun is False


@pytest.mark.parametrize(("status", "advice"), [(407, "write the user and"), (502, "status 502")])
async def test_a_proxy_that_refuses_a_tunnel_is_named(status: int, advice: str) -> None:
    async with running_proxy(status) as proxy:
        login = proxy.url.replace("//", "//me:s3cret@")
        config = {"base_url": "https://127.0.0.1:9", "proxy": login}
        async with imported(document(), retries=0, **config) as registry:
            with pytest.raises(CallError, match=advice) as caught:
                await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert caught.value.begun is False
    assert f"the proxy {proxy.url} cannot be used: it rejected" in caught.value.message
    assert "s3cret" not in str(caught.value.to_wire())


async def test_an_address_of_the_environment_needs_no_scheme(
    proxy: Proxy, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", proxy.url.removeprefix("http://"))
    async with imported(document(), base_url=echo.url, trust_env=True) as registry:
        await registry.execute("api.call", {})

    assert len(proxy.targets) == 1


async def test_a_socks_proxy_of_the_environment_is_rejected(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.setenv("all_proxy", "socks5://me:s3cret@127.0.0.1:1080")
    async with imported(document(), base_url=echo.url, trust_env=True) as registry:
        with pytest.raises(CallError, match="socks5:// is not supported") as caught:
            await registry.execute("api.call", {})

    assert "s3cret" not in str(caught.value.to_wire())


@pytest.mark.parametrize("login", ["me:s3cr/et", "me:s3cr#et", "me:s3cr?et", "me:s3cr[et"])
@pytest.mark.parametrize("scheme", ["http://", ""])
async def test_a_password_that_is_not_encoded_is_not_shown(
    login: str, scheme: str, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = f"{scheme}{login}@127.0.0.1:3128"
    with pytest.raises(ValueError, match="proxy must be a URL") as invalid:
        HTTPServiceConfig(namespace="api", proxy=proxy)
    monkeypatch.setenv("http_proxy", proxy)
    async with imported(document(), base_url=echo.url, trust_env=True) as registry:
        with pytest.raises(CallError, match="proxy of the environment cannot be used") as caught:
            await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert "s3cr" not in f"{invalid.value} {caught.value.to_wire()}"


@pytest.mark.parametrize(
    ("exceptions", "host", "is_direct"),
    [
        ("*", "api.example.com", True),
        ("example.com", "api.example.com", True),
        (".example.com", "api.example.com", True),
        ("*.example.com", "api.example.com", True),
        ("example.com:443", "example.com", True),
        ("example.com:80", "example.com", False),
        ("ample.com", "example.com", False),
        ("localhost, 10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.0.0.0/8", "api.example.com", False),
        ("fd00::/8,[::1]", "::1", True),
        ("fd00::/8", "fd00::1", True),
        ("nonsense/8", "10.1.2.3", False),
    ],
)
def test_hosts_of_no_proxy_are_called_directly(
    exceptions: str, host: str, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:3128")
    monkeypatch.setenv("no_proxy", exceptions)
    found = Proxies(None, trust_env=True).find("https", host, 443)

    assert found == (None if is_direct else "http://127.0.0.1:3128")


# ------------------------------------------------------------ certificates


@asynccontextmanager
async def tls_server(certificates: Path, *, wants_client: bool) -> AsyncGenerator[str]:
    """A server that returns the client's certificate name."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.pem")
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED if wants_client else ssl.CERT_OPTIONAL

    async def respond(request: web.Request) -> web.Response:
        assert request.transport is not None
        shown: Any = request.transport.get_extra_info("peercert")
        return web.json_response({"client": shown["subject"][0][0][1] if shown else None})

    async with serving(respond, context) as url:
        yield url.replace("http://", "https://")


async def test_a_certificate_authority_can_be_named(certificates: Path, proxy: Proxy) -> None:
    named = {"ca_file": str(certificates / "ca.pem"), "retries": 0}
    async with tls_server(certificates, wants_client=False) as url:
        async with imported(document(), base_url=url, retries=0) as registry:
            with pytest.raises(CallError, match=r"TLS failed: .*certificate.*; .* set ca_file"):
                await registry.execute("api.call", {})
        there = url.replace("127.0.0.1", "localhost")
        async with imported(document(), base_url=there, **named) as registry:
            with pytest.raises(CallError, match=r"TLS failed: .*not valid for 'localhost'"):
                await registry.execute("api.call", {})
        async with imported(document(), base_url=url, **named) as registry:
            assert (await registry.execute("api.call", {})).data == {"client": None}
        away = url.replace("127.0.0.1", "api.example.com")
        async with imported(document(), base_url=away, proxy=proxy.url, **named) as registry:
            assert (await registry.execute("api.call", {})).data == {"client": None}
    assert proxy.targets == [f"CONNECT {away.removeprefix('https://')}"]


@pytest.mark.parametrize(
    "files",
    [
        {"client_certificate": "both.pem"},
        {"client_certificate": "client.pem", "client_key": "client.key"},
    ],
)
async def test_a_client_certificate_is_presented(certificates: Path, files: dict[str, str]) -> None:
    paths = {name: str(certificates / file) for name, file in files.items()}
    async with (
        tls_server(certificates, wants_client=True) as url,
        imported(
            document(), base_url=url, ca_file=str(certificates / "ca.pem"), **paths
        ) as registry,
    ):
        assert (await registry.execute("api.call", {})).data == {"client": "client"}


async def test_a_port_without_tls_is_reported(echo: Echo) -> None:
    url = echo.url.replace("http://", "https://")
    async with imported(document(), base_url=url, retries=0) as registry:
        with pytest.raises(CallError, match=r"TLS failed: .* use TLS, write http://"):
            await registry.execute("api.call", {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ca_file": "missing.pem"}, "ca_file"),
        ({"ca_file": "ca.key"}, "ca_file"),
        ({"client_certificate": "client.pem"}, "client_certificate"),
        ({"client_certificate": "client.pem", "client_key": "server.key"}, "client_certificate"),
        ({"client_key": "client.key"}, "client_key"),
        ({"proxy": "proxy:3128"}, "proxy"),
    ],
)
def test_unusable_files_are_reported_at_import(
    certificates: Path, options: dict[str, str], message: str
) -> None:
    paths = {
        name: value if name == "proxy" else str(certificates / value)
        for name, value in options.items()
    }
    with pytest.raises(ValueError, match=message):
        from_openapi(document(), HTTPServiceConfig(namespace="api", **paths))  # type: ignore[arg-type]


# ------------------------------------------------------------ headers of the call


async def test_a_header_can_be_a_function_of_the_call(echo: Echo) -> None:
    echo.seen.clear()

    async def tenant(context: OperationContext) -> str | None:
        return context.identity.id if context.identity is not None else None

    headers: dict[str, Any] = {
        "X-Request-Id": lambda context: context.request_id,
        "X-Tenant": tenant,
        "X-Fix": "1",
    }
    async with imported(document(), base_url=echo.url, headers=headers) as registry:
        await registry.execute(
            "api.call", {}, OperationContext(request_id="r1", identity=Identity("ann", []))
        )
        await registry.execute("api.call", {}, OperationContext(request_id="r2"))

    names = ("x-request-id", "x-tenant", "x-fix")
    assert [[seen.header(name) for name in names] for seen in echo.seen] == [
        ["r1", "ann", "1"],
        ["r2", None, "1"],
    ]


async def test_a_header_can_have_a_value_of_the_call(echo: Echo) -> None:
    echo.seen.clear()
    names = {"X-Id": "request_id", "X-Parent": "parent_request_id", "X-Who": "identity_id"}
    async with imported(document(), base_url=echo.url, call_headers=names) as registry:
        context = OperationContext(
            request_id="r1", parent_request_id="r0", identity=Identity("ann", [])
        )
        await registry.execute("api.call", {}, context)
        await registry.execute("api.call", {}, OperationContext(request_id="r2"))

    found = [[seen.header(name) for name in names] for seen in echo.seen]
    assert found == [["r1", "r0", "ann"], ["r2", None, None]]


async def test_an_idempotency_key_is_the_same_for_every_attempt() -> None:
    keys: list[str | None] = []
    numbers = iter(range(10))

    async def respond(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Idempotency-Key"))
        return web.Response(status=429 if len(keys) < 3 else 200, headers={"Retry-After": "0"})

    headers = {"Idempotency-Key": lambda context: f"key-{next(numbers)}"}
    async with (
        serving(respond) as url,
        imported(document("/thing", "post"), base_url=url, headers=headers) as registry,
    ):
        await registry.execute("api.call", {})
        await registry.execute("api.call", {})

    assert keys == ["key-0", "key-0", "key-0", "key-1"]


@pytest.mark.requirement("R02")
async def test_no_argument_can_set_a_header_that_a_function_sets(echo: Echo) -> None:
    parameter = {"in": "header", "name": "X_Tenant", "schema": {"type": "string"}}
    headers = {"X-Tenant": lambda context: "genuine"}
    doc = document(parameters=[parameter])
    async with imported(doc, base_url=echo.url, headers=headers) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {"X_Tenant": "evil"})

    assert caught.value.code == ErrorCode.VALIDATION_ERROR


@pytest.mark.requirement("R03", "R08")
@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", None])
async def test_a_header_function_that_fails_or_returns_an_invalid_value_stops_the_call(
    value: str | None, echo: Echo
) -> None:
    echo.seen.clear()

    def build(context: OperationContext) -> str:
        if value is None:
            raise KeyError("CANARY")
        return value

    async with imported(document(), base_url=echo.url, headers={"X-A": build}) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert "CANARY" not in str(caught.value.to_wire())
    assert echo.seen == []


async def test_an_idle_connection_is_closed_before_servers_close_theirs() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        assert await reader.read() == b""
        closed.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with imported(document(), base_url=url) as registry:
            await registry.execute("api.call", {})
            assert not closed.is_set()
            # By default, aiohttp keeps an idle connection for 15 s.
            async with asyncio.timeout(scaled(13)):
                await closed.wait()


@pytest.mark.requirement("R35")
@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="macOS has another name for it")
async def test_a_stream_notices_a_lost_host_within_20_seconds() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    transport = AiohttpTransport(HTTPServiceConfig(namespace="api"))
    async with writing(head) as url, aclosing(transport):
        request = HTTPRequest(method="GET", url=f"{url}/", timeout=5, is_stream=True)
        async with transport.send(request) as response:
            used: Any = response
            option = used._response.connection.transport.get_extra_info("socket").getsockopt
            is_on = option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle = option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            interval = option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            packets = option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)

    assert is_on
    assert idle + packets * interval <= 20


async def test_a_response_may_have_a_long_header() -> None:
    policy = "x" * 60_000

    async def respond(request: web.Request) -> web.Response:
        return web.json_response({}, headers={"Content-Security-Policy": policy})

    async with serving(respond) as url, imported(document(), base_url=url) as registry:
        meta: Any = (await registry.execute("api.call", {})).meta
    assert meta.headers["content-security-policy"] == policy


def test_a_lost_connection_is_reported_with_its_own_reason() -> None:
    request = HTTPRequest(method="GET", url="https://api.test/x", headers={}, body=None, timeout=5)
    reasons = {
        "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] certificate required; set client_certificate": 1,
        "Connection reset by peer": errno.ECONNRESET,
    }
    for reason, number in reasons.items():
        error = failure(aiohttp.ClientOSError(number, reason.partition(";")[0]), request)
        assert reason in error.message
    refused = failure(OSError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)"), request)
    assert "(Connection refused)" in refused.message


async def test_a_reset_of_an_unused_connection_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/jsonl\r\nTransfer-Encoding: chunked\r\n"
    received, read, reset = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + b"\r\n2\r\n1\n\r\n")
        await received.wait()
        writer.write(b"0\r\n\r\n")
        await read.wait()
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        reset.set()

    responses = {"200": {"description": "", "content": {"application/jsonl": {}}}}
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with imported(document(responses=responses), base_url=url) as registry:
            for _ in range(2):
                async for _item in registry.subscribe("api.call", {}):
                    received.set()
                read.set()
                await reset.wait()
            gc.collect()

    assert "never retrieved" not in caplog.text


class Resetting:
    """A server that answers a number of requests per connection, and resets the connection after the next."""

    def __init__(self, answered: int) -> None:
        self.answered = answered
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(self.answered):
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n1"
            )
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
        writer.transport.abort()


@pytest.mark.parametrize("retries", [0, 1, 2])
@pytest.mark.parametrize("method", ["get", "delete"])
async def test_a_request_is_sent_once_and_as_often_as_it_may_be_retried(
    method: str, retries: int
) -> None:
    resetting = Resetting(answered=0)
    async with await asyncio.start_server(resetting.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with imported(document("/thing", method), base_url=url, retries=retries) as registry:
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert resetting.requests == 1 + retries


async def test_unused_connections_that_a_server_has_closed_do_not_open_the_breaker() -> None:
    resetting = Resetting(answered=1)
    async with await asyncio.start_server(resetting.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with imported(document(), base_url=url, retries=1) as registry:
            for _ in range(2):
                calls = [registry.execute("api.call", {}) for _ in range(2 * FAILURES)]
                assert [each.data for each in await asyncio.gather(*calls)] == [1] * len(calls)


async def test_a_repeated_request_uses_a_new_connection() -> None:
    resetting = Resetting(answered=1)
    async with await asyncio.start_server(resetting.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with imported(document(), base_url=url, retries=1) as registry:
            await asyncio.gather(*(registry.execute("api.call", {}) for _ in range(2)))
            assert (await registry.execute("api.call", {})).data == 1


@pytest.mark.parametrize(
    ("method", "retries", "sent"), [("GET", 2, 2), ("GET", 0, 1), ("POST", 2, 1)]
)
async def test_a_request_outside_a_call_is_repeated_once(
    method: str, retries: int, sent: int
) -> None:
    resetting = Resetting(answered=0)
    async with await asyncio.start_server(resetting.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = ServiceClient(
            HTTPServiceConfig(namespace="api", retries=retries), TrustedHosts([url])
        )
        with pytest.raises(CallError) as caught:
            await client.fetch(method, url, {}, None, True)
        await client.aclose()

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert resetting.requests == sent


async def test_documents_are_fetched_if_a_server_has_closed_unused_connections() -> None:
    resetting = Resetting(answered=1)
    async with await asyncio.start_server(resetting.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = ServiceClient(HTTPServiceConfig(namespace="api"), TrustedHosts([url]))
        for _ in range(2):
            fetched = [client.download(url) for _ in range(2 * FAILURES)]
            assert await asyncio.gather(*fetched) == [b"1"] * len(fetched)
        await client.aclose()


async def test_a_request_outside_a_call_is_not_repeated_after_the_client_was_closed() -> None:
    requests: list[str] = []
    arrived = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        requests.append(request.path)
        arrived.set()
        await asyncio.Event().wait()
        return web.Response()

    async with serving(handler) as url:
        client = ServiceClient(HTTPServiceConfig(namespace="api"), TrustedHosts([url]))
        fetching = asyncio.create_task(client.download(url))
        await arrived.wait()
        await client.aclose()
        with pytest.raises(DocumentError, match="cannot be fetched"):
            await fetching

    assert requests == ["/"]
