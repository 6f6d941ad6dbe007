"""No argument and no document can send a request or a secret to a wrong host."""

import asyncio
import logging
import socket
import traceback
from contextlib import AsyncExitStack
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, unquote

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.openapi.echo import Echo
from tests.openapi.serving import document, imported, serving

from operations import CallError, ErrorCode, Identity, OperationContext, OperationRegistry
from operations.io.hosts import TrustedHosts, enforce_public, is_public, origin_of
from operations.io.http.aiohttp import AiohttpTransport
from operations.io.http.client import HTTPRequest
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.openapi.reading.model import Model, Parameter
from operations.openapi.reading.references import References
from operations.openapi.reading.schemas import SchemaConverter
from operations.openapi.source.parameters import query_pairs
from operations.openapi.source.request_plan import RequestPlan
from operations.schema import Schema

STRING = {"type": "string"}
HOSTILE = [
    "..", "../admin", "%2e%2e%2f", "%252e%252e", "a\\..\\b", "a/b", "a?x=1", "a#f", "//evil", "http://evil/",
    "@evil", "", ".", "\0", "a\0b", "\r", "\n", "a\r\nX: 1", "..;/admin", "%2e", "%25252e%25252e", "..%2f", "\u2025",
    "\uff0e\uff0e", "a%00b", "%" * 50, "%25" * 50,
]  # fmt: skip
NOT_PUBLIC = [
    "127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::ffff:127.0.0.1]", "localhost.", "localhost",
    "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254", "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b::169.254.169.254]", "[2002:a9fe:a9fe::]",
    "[::169.254.169.254]", "[fe80::5efe:a9fe:a9fe]", "[2001:0:0:0:0:0:5601:5601]", "[fd00:ec2::254]", "168.63.129.16",
    "192.0.0.192", "192.88.99.1", "[3fff::1]", "[3fff:fff::1]", "[5f00::1]", "[::ffff:192.0.0.192]",
    "[::1]", "[::]", "[fe80::1]", "[fc00::1]", "[ff02::1]", "224.0.0.1", "255.255.255.255", "0", "metadata.internal",
    "printer.local", "[fec0::1]", "[64:ff9b:1::a00:1]",
]  # fmt: skip


def path_plan(path: str, **parameter: Any) -> RequestPlan:
    model = Model(parameters=(Parameter(name="id", place="path", required=True, **parameter),))
    schemas = SchemaConverter(References({}), ref_siblings=True)
    return RequestPlan(path, model, schemas, owned=frozenset(), flatten=False)


def sent_path(plan: RequestPlan, value: Any) -> str | None:
    try:
        return plan.draft("GET", "http://x", {"id": value}, {}).path
    except CallError:
        return None


def assert_in_place(raw: str) -> None:
    before, segment, after = raw.split("/")[1:]
    assert (before, after) == ("a", "z")
    assert segment
    assert not set(segment) & set("?#\\\r\n\0 ")
    decoded = segment
    for _ in range(10):
        assert decoded not in {".", ".."}
        assert not any(piece in {".", ".."} for piece in decoded.replace("\\", "/").split("/"))
        decoded = unquote(decoded)


@pytest.mark.requirement("R01")
@pytest.mark.parametrize("value", HOSTILE, ids=repr)
async def test_a_path_argument_stays_in_its_segment(value: str, echo: Echo) -> None:
    raw = sent_path(path_plan("/a/{id}/z"), value)
    if raw is None:
        return
    assert_in_place(raw)
    echo.seen.clear()
    parameters = [{"name": "id", "in": "path", "required": True, "schema": STRING}]
    doc = document("/a/{id}/z", parameters=parameters)
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute("api.call", {"id": value})
    assert echo.seen[0].target == raw
    assert unquote(raw.split("/")[2]) == value


@pytest.mark.requirement("R01")
@pytest.mark.parametrize(
    "value", ["..", ".", "", "../admin", "%2e%2e%2f", "%252e%252e", "a\\..\\b", None, [], {}]
)
def test_dot_segments_and_empty_values_are_rejected(value: Any) -> None:
    assert sent_path(path_plan("/a/{id}/z"), value) is None


@pytest.mark.requirement("R01")
@given(value=st.one_of(st.text(), st.text("./\\%2e5;?#@:"), st.lists(st.text("./%a"), max_size=3)))
@settings(deadline=None, max_examples=150)
@pytest.mark.parametrize("style", ["simple", "label", "matrix"])
@pytest.mark.parametrize("explode", [False, True])
def test_no_text_leaves_its_segment_in_any_style(value: Any, style: str, explode: bool) -> None:
    raw = sent_path(path_plan("/a/{id}/z", style=style, explode=explode), value)
    if raw is not None:
        assert_in_place(raw)


OWNED = [
    "Host", "Authorization", "Cookie", "Connection", "Transfer-Encoding", "Content-Length", "Mcp-Session-Id",
    "X-Forwarded-For", "Proxy-Authorization", "X-API-Key", "Content-Type", "TE", "Upgrade", "Keep-Alive",
]  # fmt: skip


@pytest.mark.requirement("R02")
@pytest.mark.parametrize("name", OWNED)
async def test_no_argument_sets_a_header_that_is_not_the_callers(name: str, echo: Echo) -> None:
    echo.seen.clear()
    parameters = [{"name": name, "in": "header", "required": True, "schema": STRING}]
    auth = {"type": "bearer", "token": "configured"}
    async with imported(
        document(parameters=parameters), base_url=echo.url, auth=auth, headers={"X-API-Key": "mine"}
    ) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {name: "evil"})
        assert caught.value.code == ErrorCode.VALIDATION_ERROR
        await registry.execute("api.call", {})

    (seen,) = echo.seen
    assert seen.header("authorization") == "Bearer configured"
    assert seen.header("x-api-key") == "mine"
    assert "evil" not in str(seen.headers)


@pytest.mark.requirement("R02")
async def test_no_argument_overrides_a_configured_query_key_or_cookie(echo: Echo) -> None:
    echo.seen.clear()
    doc = document(
        parameters=[
            {"name": "key", "in": "query", "schema": STRING},
            {"name": "sid", "in": "cookie", "schema": STRING},
        ],
        security=[{"q": [], "c": []}],
        components={
            "securitySchemes": {
                "q": {"type": "apiKey", "in": "query", "name": "key"},
                "c": {"type": "apiKey", "in": "cookie", "name": "sid"},
            }
        },
    )  # fmt: skip
    async with imported(doc, base_url=echo.url, credentials={"q": "K", "c": "C"}) as registry:
        await registry.execute("api.call", {})
        for name in ("key", "sid"):
            with pytest.raises(CallError):
                await registry.execute("api.call", {name: "evil"})

    (seen,) = echo.seen
    assert (seen.query, seen.header("cookie")) == ("key=K", "sid=C")


@pytest.mark.requirement("R03")
@pytest.mark.parametrize("value", ["a\r\nX: 1", "a\nb", "a\rb", "a\0b", ["a", "b\r\nc"]], ids=repr)
async def test_a_header_argument_cannot_add_a_header(value: Any, echo: Echo) -> None:
    echo.seen.clear()
    async with imported(
        document(parameters=[{"name": "X-Note", "in": "header", "schema": {}}]), base_url=echo.url
    ) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {"X-Note": value})

    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert echo.seen == []


@pytest.mark.requirement("R03")
@pytest.mark.parametrize("style", ["form", "cookie"])
@pytest.mark.parametrize("value", ["a; admin=1", "a\r\nX: 1", "a, b=1"])
async def test_a_cookie_argument_cannot_add_a_cookie(style: str, value: str, echo: Echo) -> None:
    echo.seen.clear()
    parameters = [{"name": "theme", "in": "cookie", "style": style, "schema": STRING}]
    async with imported(document(parameters=parameters), base_url=echo.url) as registry:
        await registry.execute("api.call", {"theme": value})

    cookie = echo.seen[0].header("cookie") or ""
    assert cookie.startswith("theme=")
    assert not set(cookie.removeprefix("theme=")) & set(";, \r\n")
    assert list(SimpleCookie(cookie)) == ["theme"]


async def test_a_cookie_in_a_swagger_document_is_sent(echo: Echo) -> None:
    echo.seen.clear()
    parameters: list[Any] = [
        {"in": "cookie", "name": "session", "type": "string"},
        {"in": "cookie", "name": "ids", "type": "array", "items": {"type": "integer"}},
    ]
    operation: Any = {"operationId": "call", "parameters": parameters, "responses": {}}
    doc: Any = {"swagger": "2.0", "info": {}, "paths": {"/x": {"get": operation}}}
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute("api.call", {"session": "s1", "ids": [1, 2]})

    assert echo.seen[0].header("cookie") == "session=s1; ids=1,2"


@pytest.mark.parametrize("value", ["YWJj==", "a%2Cb/c:d", "{a}|<b>"])
async def test_a_valid_value_of_a_cookie_is_not_escaped(value: str, echo: Echo) -> None:
    echo.seen.clear()
    parameters = [{"name": "theme", "in": "cookie", "style": "cookie", "schema": STRING}]
    doc = {**document(parameters=parameters), "openapi": "3.2.0"}
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute("api.call", {"theme": value})

    assert echo.seen[0].header("cookie") == f"theme={value}"


@pytest.mark.parametrize(
    ("version", "style", "sent"),
    [
        ("3.2.0", "simple", "a:b@c%20d%2Fe%3Bf%25"),
        ("3.2.0", "matrix", ";id=a:b@c%20d%2Fe%3Bf%25"),
        ("3.1.0", "simple", "a%3Ab%40c%2520d%2Fe%3Bf%25"),
    ],
)
async def test_reserved_characters_of_a_path_are_kept_if_allowed(
    version: str, style: str, sent: str, echo: Echo
) -> None:
    echo.seen.clear()
    parameter = {"name": "id", "in": "path", "required": True, "schema": STRING, "style": style}
    doc = document("/x/{id}/y", parameters=[{**parameter, "allowReserved": True}])
    async with imported({**doc, "openapi": version}, base_url=echo.url) as registry:
        await registry.execute("api.call", {"id": "a:b@c%20d/e;f%"})
        for wrong in ("..", "%2e%2E", "a%2F..%2Fb", "%252e%252e"):
            with pytest.raises(CallError, match="dot segment"):
                await registry.execute("api.call", {"id": wrong})

    assert [seen.target for seen in echo.seen] == [f"/x/{sent}/y"]


@pytest.mark.requirement("R05")
@pytest.mark.parametrize("host", NOT_PUBLIC)
async def test_a_host_that_only_the_document_names_must_be_public(host: str) -> None:
    async with imported(document(servers=[{"url": f"http://{host}:9/v1"}])) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.ACCESS_DENIED


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808", "2002:808:808::"]
)
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(address)
    enforce_public(address)


@pytest.mark.requirement("R05")
@pytest.mark.parametrize(
    "url",
    ["http://user@host/", "http://good\\@evil/", "file:///etc/passwd", "//host/", "http:/host", "http://ho st/",
     "http://a:99999/", "gopher://x/", "http://[::1", ""],
)  # fmt: skip
def test_urls_that_parsers_may_disagree_on_have_no_origin(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|port"):
        origin_of(url)


def test_a_trusted_host_is_trusted_at_its_port_or_at_all() -> None:
    hosts = TrustedHosts(
        ["https://a.test/v1"], ["b.test", "c.test:8443", "http://d.test", "[::1]:80"]
    )
    trusted = [
        "https://a.test/x",
        "http://b.test:1/",
        "https://c.test:8443",
        "http://d.test/",
        "http://[::1]/",
    ]
    assert all(origin_of(url) in hosts for url in trusted)
    others = [
        "http://a.test/",
        "https://a.test:444/",
        "https://c.test/",
        "https://d.test/",
        "http://x.b.test/",
    ]
    assert not any(origin_of(url) in hosts for url in others)


class _Rebinding(AbstractResolver):
    """Answers the first question with a public address, the next ones with this machine's."""

    def __init__(self, first: str) -> None:
        self.answers = [first]

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self.answers.pop() if self.answers else "127.0.0.1"
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0
            )
        ]

    async def close(self) -> None:
        pass


@pytest.mark.requirement("R05")
async def test_a_host_name_that_later_resolves_to_a_private_address_is_rejected(echo: Echo) -> None:
    echo.seen.clear()
    port = echo.url.rpartition(":")[2]
    resolver = _Rebinding("192.0.2.1")
    transport = AiohttpTransport(HTTPServiceConfig(namespace="api"), resolver=resolver)
    request = HTTPRequest(
        method="GET", url=f"http://rebind.test:{port}/", timeout=30, public_only=True
    )
    try:
        for _ in range(2):
            with pytest.raises(CallError) as caught:
                async with transport.send(request):
                    pass
            assert caught.value.code == ErrorCode.ACCESS_DENIED
    finally:
        await transport.aclose()
    assert echo.seen == []


@pytest.mark.requirement("R05", "R16")
async def test_a_server_that_only_the_document_names_gets_no_credential(
    echo: Echo, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[HTTPRequest] = []

    class Recording:
        def send(self, request: HTTPRequest) -> Any:
            sent.append(request)
            raise CallError(ErrorCode.ABORTED, "enough")

        async def aclose(self) -> None:
            pass

    doc = document(
        servers=[{"url": "https://elsewhere.example/v1"}],
        security=[{"key": []}],
        components={"securitySchemes": {"key": {"type": "apiKey", "in": "query", "name": "k"}}},
    )
    config: dict[str, Any] = {
        "auth": {"type": "bearer", "token": "CANARY1"},
        "credentials": {"key": "CANARY2"},
        "headers": {"X-Team": "CANARY3"},
        "transport": Recording(),
    }
    async with imported(doc, **config) as registry:
        with pytest.raises(CallError):
            await registry.execute("api.call", {})
    async with imported(doc, allowed_hosts=("elsewhere.example",), **config) as registry:
        with pytest.raises(CallError):
            await registry.execute("api.call", {})

    without, trusted = sent
    assert "CANARY" not in f"{without.url} {dict(without.headers)}"
    assert without.public_only
    assert "CANARY2" in trusted.url
    assert trusted.headers["Authorization"] == "Bearer CANARY1"
    assert "credentials are not sent to https://elsewhere.example" in caplog.text


async def test_a_limited_number_of_hosts_without_credentials_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.openapi.source.security._MAX_WARNED", 2)
    security = from_openapi(
        document(), HTTPServiceConfig("api", headers={"X-Team": "x"})
    )._client.security
    for number in (1, 2, 1, 3):
        security.warn(origin_of(f"https://host{number}.example"))

    assert caplog.text.count("credentials are not sent to") == 2


@pytest.mark.requirement("R06")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("follow", [False, True])
async def test_no_redirect_crosses_an_origin(status: int, follow: bool, echo: Echo) -> None:
    echo.seen.clear()

    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": f"{echo.url}/stolen"})

    doc = document("/thing", "post", requestBody={"content": {"application/json": {}}})
    async with (
        serving(redirect) as url,
        imported(
            doc,
            base_url=url,
            follow_redirects=follow,
            auth={"type": "apiKey", "token": "CANARY", "header_name": "X-Key"},
        ) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {"body": {"secret": 1}})

    assert echo.seen == []
    assert caught.value.details["statusCode"] == status


@pytest.mark.requirement("R06")
@pytest.mark.parametrize(
    ("status", "method", "body"),
    [
        (301, "GET", b""),
        (302, "GET", b""),
        (303, "GET", b""),
        (307, "POST", b"{}"),
        (308, "POST", b"{}"),
    ],
)
async def test_a_redirect_within_its_origin_is_followed_on_request(
    status: int, method: str, body: bytes
) -> None:
    arrived: list[tuple[str, str, bytes]] = []

    async def redirect(request: web.Request) -> web.Response:
        arrived.append((request.method, request.path, await request.read()))
        if request.path == "/thing":
            return web.Response(status=status, headers={"Location": "/other"})
        return web.json_response({"ok": True})

    doc = document("/thing", "post", requestBody={"content": {"application/json": {}}})
    async with serving(redirect) as url:
        async with imported(doc, base_url=url) as registry:
            with pytest.raises(CallError):
                await registry.execute("api.call", {"body": {}})
        arrived.clear()
        async with imported(doc, base_url=url, follow_redirects=True) as registry:
            envelope = await registry.execute("api.call", {"body": {}})

    assert envelope.data == {"ok": True}
    assert arrived[1] == (method, "/other", body)


@pytest.mark.requirement("R06")
@pytest.mark.parametrize(
    ("method", "status", "expected"),
    [
        ("put", 301, "PUT"),
        ("delete", 302, "DELETE"),
        ("put", 303, "GET"),
        ("patch", 302, "PATCH"),
        ("head", 303, "HEAD"),
    ],
)
async def test_a_redirect_changes_the_method_only_as_http_defines(
    method: str, status: int, expected: str
) -> None:
    arrived: list[tuple[str, str]] = []

    async def redirect(request: web.Request) -> web.Response:
        arrived.append((request.method, request.raw_path))
        if len(arrived) == 1:
            return web.Response(status=status, headers={"Location": "/a b?c=d e#f"})
        return web.json_response({})

    async with (
        serving(redirect) as url,
        imported(document("/thing", method), base_url=url, follow_redirects=True) as registry,
    ):
        await registry.execute("api.call", {})

    assert arrived[1] == (expected, "/a%20b?c=d%20e")


@pytest.mark.requirement("R06")
async def test_redirects_share_the_time_of_their_call() -> None:
    async def slowly(request: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        return web.Response(status=302, headers={"Location": f"{request.path}x"})

    async with (
        serving(slowly) as url,
        imported(document(), base_url=url, follow_redirects=True, timeout=0.5) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})
    assert caught.value.code == ErrorCode.TIMEOUT


@pytest.mark.requirement("R06")
async def test_redirects_that_never_end_are_abandoned() -> None:
    async def around(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "/thing"})

    async with (
        serving(around) as url,
        imported(document(), base_url=url, follow_redirects=True) as registry,
    ):
        with pytest.raises(CallError, match="redirects"):
            await registry.execute("api.call", {})


@pytest.mark.requirement("R16", "R17")
async def test_secrets_are_in_no_log_error_repr_or_spec(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def refuse(request: web.Request) -> web.Response:
        echoed = {"sent": dict(request.headers), "query": request.query_string}
        response = web.json_response(echoed, status=int(request.query["status"]))
        response.set_cookie("session", "CANARY-COOKIE")
        response.headers["X-Echo"] = request.headers["X-Team-Key"]
        return response

    doc = document(
        parameters=[{"name": "status", "in": "query", "schema": {"type": "integer"}}],
        security=[{"key": [], "basic": []}],
        components={
            "securitySchemes": {
                "key": {"type": "apiKey", "in": "query", "name": "k"},
                "basic": {"type": "http", "scheme": "basic"},
            }
        },
    )
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(refuse))
        config = HTTPServiceConfig(
            namespace="api",
            base_url=url,
            auth={"type": "apiKey", "token": "CANARY-AUTH"},
            credentials={"key": "CANARY-KEY", "basic": ("user", "CANARY-PASSWORD")},
            headers={"X-Team-Key": "CANARY-TEAM"},
            retries=0,
        )
        service = await stack.enter_async_context(from_openapi(doc, config))
        (operation,) = service
        registry = OperationRegistry([operation])
        shown = [
            repr(config),
            repr(service),
            repr(operation.spec),
            operation.spec.encode().decode(),
        ]
        for status in (401, 500):
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", {"status": status})
            shown += [str(caught.value), repr(caught.value), repr(caught.value.to_wire())]
        good = await registry.execute("api.call", {"status": 200})
        shown.append(repr(good.meta.headers.get("set-cookie")))  # type: ignore[union-attr]

    assert "CANARY" not in caplog.text
    for text in shown:
        assert "CANARY" not in text


@pytest.mark.requirement("R16")
@pytest.mark.parametrize("fault", ["nobody", "time", "lost"])
async def test_no_traceback_of_a_lost_request_holds_its_address(
    fault: str, unused_port: int
) -> None:
    over = asyncio.Event()

    async def respond(request: web.Request) -> web.Response:
        if fault == "lost":
            assert request.transport is not None
            request.transport.abort()
        await over.wait()
        return web.Response()

    doc = document(
        security=[{"key": []}],
        components={"securitySchemes": {"key": {"type": "apiKey", "in": "query", "name": "k"}}},
    )
    async with serving(respond) as server:
        url = f"http://127.0.0.1:{unused_port}" if fault == "nobody" else server
        config: dict[str, Any] = {"retries": 0, "timeout": 0.2, "credentials": {"key": "CANARY"}}
        async with imported(doc, base_url=url, **config) as registry:
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", {})
        over.set()
    assert "CANARY" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.requirement("R16")
async def test_a_key_is_not_in_an_error_in_either_spelling() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"raw": request.raw_path, "k": request.query["k"]}, status=400)

    doc = document(
        security=[{"key": []}],
        components={"securitySchemes": {"key": {"type": "apiKey", "in": "query", "name": "k"}}},
    )
    async with (
        serving(refuse) as url,
        imported(doc, base_url=url, credentials={"key": "CAN/ARY"}) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})
    assert caught.value.details["body"] == {"raw": "/thing?k=***", "k": "***"}


@pytest.mark.requirement("R16")
async def test_only_headers_with_secret_names_are_kept_out_of_errors() -> None:
    async def refuse(request: web.Request) -> web.Response:
        names = ("Accept", "X-Version", "X-Api-Key", "Authorization", "Cookie")
        echoed = {name: request.headers[name] for name in names}
        echoed["token"] = request.headers["Authorization"].split()[1]
        return web.json_response(echoed, status=422)

    headers = {
        "Accept": "application/json",
        "X-Version": "2024",
        "X-Api-Key": "CANARY-1",
        "Authorization": "Bearer CANARY-2",
        "Cookie": "sid=CANARY-3",
    }
    async with serving(refuse) as url, imported(document(), base_url=url, headers=headers) as api:
        with pytest.raises(CallError) as caught:
            await api.execute("api.call", {})

    details = caught.value.details
    assert details["headers"]["content-type"] == "application/json; charset=utf-8"
    assert (details["body"]["Accept"], details["body"]["X-Version"]) == ("application/json", "2024")
    assert "CANARY" not in str(details)


@pytest.mark.requirement("R23")
async def test_the_callers_own_token_is_not_forwarded(echo: Echo) -> None:
    echo.seen.clear()
    context = OperationContext(
        identity=Identity("user", ["a"]),
        metadata={"authorization": "Bearer CALLER", "token": "CALLER"},
    )
    async with imported(document(), base_url=echo.url) as registry:
        await registry.execute("api.call", {}, context)

    assert "CALLER" not in str(echo.seen[0].headers)
    assert echo.seen[0].header("authorization") is None


@pytest.mark.requirement("R27")
async def test_arguments_are_validated_before_anything_is_sent(echo: Echo) -> None:
    echo.seen.clear()
    parameters = [
        {
            "name": "id",
            "in": "query",
            "required": True,
            "schema": {"type": "string", "pattern": "^a+$"},
        }
    ]
    async with imported(document(parameters=parameters), base_url=echo.url) as registry:
        for bad in ({}, {"id": "b"}, {"id": "a", "extra": 1}, {"id": None}):
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", bad)
            assert caught.value.code == ErrorCode.VALIDATION_ERROR

    assert echo.seen == []


@given(
    name=st.text(),
    value=st.one_of(st.text(), st.lists(st.text()), st.dictionaries(st.text(), st.text())),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_no_query_argument_adds_a_parameter(name: str, value: Any) -> None:
    try:
        f"{name}{value}".encode()
    except UnicodeEncodeError:
        return
    for reserved in (False, True):
        parameter = Parameter(
            name=name, place="query", style="form", explode=False, allow_reserved=reserved
        )
        (pair,) = query_pairs(parameter, value)
        assert not set(pair) & set("&#+ \r\n")
        if name and not reserved:
            assert parse_qsl(pair, keep_blank_values=True)[0][0] == name


async def test_closing_a_service_twice_is_harmless(echo: Echo) -> None:
    async with imported(document(), base_url=echo.url) as registry:
        await asyncio.gather(*(registry.execute("api.call", {}) for _ in range(5)))
        await registry.aclose()
        await registry.aclose()


@pytest.mark.requirement("R47")
def test_descriptions_with_invisible_characters_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = HTTPServiceConfig(namespace="api")
    from_openapi(document(description="Read a thing.\n\n*Größe*: 🍵"), config)
    assert not caplog.messages

    from_openapi(document(description="Read a thing.\U000e0069\u200b"), config)
    (message,) = caplog.messages
    assert message.endswith(
        "the descriptions of 1 operation contain invisible characters, for example that of api.call"
    )


FORGED = "X\x1b[31m\r\nERROR forged\u202e"


@pytest.mark.requirement("R47")
def test_r47_texts_of_a_document_are_escaped_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    hostile: Any = document(description=FORGED)
    hostile["info"]["title"] = FORGED
    hostile["paths"]["/" + FORGED] = {"get": {"parameters": [{"name": "a", "in": FORGED}]}}
    itself = {"$ref": "#/components/schemas/" + FORGED}
    hostile["paths"]["/thing"]["get"]["responses"]["200"]["content"]["application/json"] = {
        "schema": itself
    }
    hostile["components"] = {
        "schemas": {FORGED: {"allOf": [itself]}},
        "securitySchemes": {FORGED: {"type": "http", "scheme": "bearer"}},
    }
    for operation in from_openapi(
        hostile, HTTPServiceConfig(namespace="api", credentials={"key": "k"})
    ):
        operation.spec.output_schema.compile()
    for keyword in ({"type": FORGED}, {"pattern": "(?=a)" + FORGED}):
        Schema({"properties": {FORGED: keyword}}, lenient=True).errors({FORGED: "a"})

    assert len(caplog.messages) >= 6
    assert all(message.isprintable() for message in caplog.messages)
