"""Servers over HTTP: all protocol revisions, the old SSE transport, hostile responses, and authentication."""

import asyncio
import gzip
import json
import logging
import resource
import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import mcp_types as types
import pytest
from mcp.server import Server
from mcp.server.mcpserver import Context
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.limits import time_limit
from tests.mcp_import.support import (
    demo_server,
    nothing_left_behind,
    serving,
    serving_demo,
)
from tests.proxies import running_proxy
from tests.servers import free_port

from operations import CallError, ErrorCode, Identity, OperationContext, OperationRegistry
from operations.mcp import MCPClient, MCPClientConfig, MCPClientCredentials, connect_mcp


@pytest.fixture(autouse=True)
async def clean() -> AsyncGenerator[None]:
    with nothing_left_behind():
        yield


REVISIONS = ["auto", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"]


@pytest.mark.parametrize("version", REVISIONS)
@pytest.mark.parametrize("json_response", [False, True], ids=["sse", "json"])
async def test_every_protocol_revision_is_supported(version: str, json_response: bool) -> None:
    with time_limit(20):
        async with (
            serving_demo(json_response=json_response) as url,
            connect_mcp("demo", MCPClientConfig(url=url, version=version)) as client,
        ):
            registry = OperationRegistry(client)
            envelope = await registry.execute("demo.add", {"a": 1, "b": 2})
            failed = await registry.execute("demo.fail", {"message": "sorry"})

    assert envelope.data == {"result": 3}
    assert failed.meta.is_error  # type: ignore[union-attr]
    assert client.server_info is not None
    assert client.server_info.name == "demo"
    assert client.server_info.protocol_version == ("2026-07-28" if version == "auto" else version)


@pytest.mark.parametrize("version", ["2025-11-25", "2026-07-28"])
async def test_a_redirect_to_another_path_of_the_server_is_followed(version: str) -> None:
    with time_limit(20):
        async with serving(demo_server().streamable_http_app(streamable_http_path="/mcp/")) as base:
            config = MCPClientConfig(url=base + "/mcp", version=version)
            async with connect_mcp("demo", config) as client:
                envelope = await OperationRegistry(client).execute("demo.add", {"a": 1, "b": 2})

    assert envelope.data == {"result": 3}


async def test_the_transport_of_2024_is_supported() -> None:
    with time_limit(20):
        async with serving(demo_server().sse_app()) as base:
            config = MCPClientConfig(url=base + "/sse", transport="sse")
            async with connect_mcp("demo", config) as client:
                envelope = await OperationRegistry(client).execute("demo.add", {"a": 1, "b": 2})

    assert envelope.data == {"result": 3}


@pytest.mark.parametrize("from_env", [False, True], ids=["configured", "environment"])
@pytest.mark.parametrize("version", ["2025-06-18", "2026-07-28"])
async def test_all_requests_go_through_the_proxy(
    version: str, from_env: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with time_limit(20):
        async with running_proxy() as proxy, serving_demo() as url:
            login = proxy.url.replace("//", "//me:s3cret@")
            # Only the proxy knows the name.
            config = MCPClientConfig(
                url=url.replace("127.0.0.1", "mcp.example.com"),
                headers={"Host": url.split("/")[2]},
                version=version,
                proxy=None if from_env else login,
                trust_env=from_env,
            )
            monkeypatch.setenv("http_proxy", login)
            async with connect_mcp("demo", config) as client:
                before = len(proxy.targets)
                envelope = await OperationRegistry(client).execute("demo.add", {"a": 1, "b": 2})

    assert envelope.data == {"result": 3}
    assert before > 0
    assert proxy.targets[before:][0] == f"POST {config.url}"
    assert len(proxy.logins) == len(proxy.targets)


async def test_proxies_of_the_environment_are_not_used_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with time_limit(20):
        async with running_proxy() as proxy, serving_demo() as url:
            monkeypatch.setenv("http_proxy", proxy.url)
            async with connect_mcp("demo", MCPClientConfig(url=url)) as client:
                await OperationRegistry(client).execute("demo.add", {"a": 1, "b": 2})

    assert proxy.targets == []


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_proxy_that_cannot_be_reached_is_named(scheme: str) -> None:
    port = free_port()
    config = MCPClientConfig(
        url=f"{scheme}://mcp.example.com/mcp", proxy=f"http://me:s3cret@127.0.0.1:{port}"
    )
    with pytest.raises(CallError) as caught:
        async with connect_mcp("demo", config):
            pass

    assert f"cannot be reached through the proxy http://127.0.0.1:{port}: " in caught.value.message
    assert "s3cret" not in str(caught.value)


async def test_a_password_of_a_proxy_that_is_not_encoded_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("http_proxy", "http://me:s3cr/et@127.0.0.1:3128")
    config = MCPClientConfig(url="http://mcp.example.com/mcp", trust_env=True)
    with pytest.raises(CallError, match="proxy of the environment cannot be used") as caught:
        async with connect_mcp("demo", config):
            pass

    assert "s3cr" not in f"{caught.value} {caplog.text}"


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_proxy_that_rejects_requests_is_named(scheme: str) -> None:
    async with running_proxy(407) as proxy:
        config = MCPClientConfig(url=f"{scheme}://mcp.example.com/mcp", proxy=proxy.url)
        with pytest.raises(CallError) as caught:
            async with connect_mcp("demo", config):
                pass

    assert "407" in caught.value.message
    assert "write the user and the password of the proxy into its address" in str(caught.value)


async def test_a_lost_proxy_is_named_by_calls() -> None:
    with time_limit(20):
        async with serving_demo() as url:
            async with running_proxy() as proxy:
                options: dict[str, Any] = {"proxy": proxy.url, "reconnect_timeout": 0.1}
                opened = connect_mcp("demo", MCPClientConfig(url=url, **options))
                client = await opened.__aenter__()
            with pytest.raises(CallError, match=f"through the proxy {proxy.url}: "):
                await OperationRegistry(client).execute("demo.add", {"a": 1, "b": 2})
            await opened.__aexit__(None, None, None)


def presenting(certificates: Path) -> ssl.SSLContext:
    """The TLS settings of a server that requires a certificate of its clients."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.pem")
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.mark.parametrize("through_proxy", [False, True], ids=["direct", "proxy"])
async def test_a_certificate_authority_and_a_client_certificate_can_be_named(
    certificates: Path, through_proxy: bool
) -> None:
    async with running_proxy() as proxy, serving_demo(tls=presenting(certificates)) as url:
        with time_limit(20):
            entry = {
                "url": url,
                "caFile": str(certificates / "ca.pem"),
                "clientCertificate": str(certificates / "client.pem"),
                "clientKey": str(certificates / "client.key"),
                "proxy": proxy.url if through_proxy else None,
            }
            async with connect_mcp("demo", MCPClientConfig.from_entry(entry)) as client:
                envelope = await OperationRegistry(client).execute("demo.add", {"a": 1, "b": 2})

    assert envelope.data == {"result": 3}
    assert bool(proxy.targets) == through_proxy


async def test_an_unknown_certificate_authority_is_reported(certificates: Path) -> None:
    async with serving_demo(tls=presenting(certificates)) as url:
        with pytest.raises(CallError, match="if its authority is private, set ca_file"):
            async with connect_mcp("demo", MCPClientConfig(url=url)):
                pass


@pytest.mark.parametrize("key", ["ca_file", "client_certificate", "client_key"])
async def test_unusable_certificates_are_reported(certificates: Path, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        MCPClientConfig.from_entry({"url": "https://a.example", key: str(certificates / "ca.key")})


async def test_a_message_that_a_server_of_2024_rejects_fails_only_its_call() -> None:
    app, refusing = demo_server().sse_app(), asyncio.Event()

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and refusing.is_set():
            refusing.clear()
            await Response("not now", 500)(scope, receive, send)
        else:
            await app(scope, receive, send)

    with time_limit(20), nothing_left_behind():
        async with serving(outer) as base:
            config = MCPClientConfig(url=base + "/sse", transport="sse")
            async with connect_mcp("demo", config) as client:
                registry = OperationRegistry(client)
                refusing.set()
                with pytest.raises(CallError) as caught, time_limit(20):
                    await registry.execute("demo.add", {"a": 1, "b": 2})
                envelope = await registry.execute("demo.add", {"a": 1, "b": 2})

    assert caught.value.code == ErrorCode.EXECUTION_ERROR
    assert caught.value.details["statusCode"] == 500
    assert envelope.data == {"result": 3}


async def test_an_answer_that_a_server_of_2024_rejects_fails_no_call() -> None:
    server, refused, has_refused_all = demo_server(), list[bytes](), asyncio.Event()

    @server.tool()
    async def ask(context: Context[Any, Any]) -> str:
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(
                    context.session.send_request, types.PingRequest(), types.EmptyResult
                )
            await has_refused_all.wait()
            tasks.cancel_scope.cancel()
        return "asked"

    app = server.sse_app()

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        body = await Request(scope, receive).body()

        async def again() -> Any:
            return {"type": "http.request", "body": body}

        if "method" in json.loads(body):
            await app(scope, again, send)
            return
        await Response("not now", 500)(scope, again, send)
        refused.append(body)
        if len(refused) == 20:
            has_refused_all.set()

    with time_limit(20), nothing_left_behind():
        async with serving(outer) as base:
            config = MCPClientConfig(url=base + "/sse", transport="sse", version="2024-11-05")
            async with connect_mcp("demo", config) as client:
                envelope = await OperationRegistry(client).execute("demo.ask", {})

    assert envelope.data == {"result": "asked"}


async def test_a_url_that_does_not_respond_is_unavailable() -> None:
    with time_limit(20), nothing_left_behind(), pytest.raises(CallError) as caught:
        async with connect_mcp("demo", MCPClientConfig(url=f"http://127.0.0.1:{free_port()}/mcp")):
            pass

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert "cannot be reached" in caught.value.message


@pytest.mark.parametrize("version", ["2025-11-25", "2026-07-28"])
async def test_a_server_that_disconnects_and_returns_is_used_again(version: str) -> None:
    registry, port = OperationRegistry(), free_port()
    with time_limit(30):
        async with serving_demo(port) as url:
            config = MCPClientConfig(url=url, version=version, reconnect_timeout=0.2)
            connecting = connect_mcp("demo", config)
            client = await connecting.__aenter__()
            registry.register_all(client)
        with pytest.raises(CallError) as caught:
            await registry.execute("demo.add", {"a": 1, "b": 2})
        async with serving_demo(port):
            again = None
            while again is None:
                try:
                    again = await registry.execute("demo.add", {"a": 1, "b": 2})
                except CallError:
                    await anyio.sleep(0.05)
            await connecting.__aexit__(None, None, None)

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert str(port) not in caught.value.message
    assert again.data == {"result": 3}


async def test_a_server_that_stays_unavailable_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("_CHECK_SECONDS", "_LONGEST_REFRESH_SECONDS"):
        monkeypatch.setattr(f"operations.mcp.source.client.{name}", 0.05)
    caplog.set_level(logging.INFO, "operations.mcp")
    port, attempts = free_port(), anyio.Semaphore(0)
    refresh = MCPClient.refresh

    async def counted(client: MCPClient) -> None:
        try:
            await refresh(client)
        finally:
            attempts.release()

    def reports() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if "listed again" in message]

    with time_limit(30):
        async with serving_demo(port) as url:
            connecting = connect_mcp("demo", MCPClientConfig(url=url, reconnect_timeout=0.1))
            await connecting.__aenter__()
        monkeypatch.setattr(MCPClient, "refresh", counted)
        for _ in range(5):
            await attempts.acquire()
        away = reports()
        async with serving_demo(port):
            while len(reports()) == len(away):
                await attempts.acquire()
                await anyio.lowlevel.checkpoint()
            await connecting.__aexit__(None, None, None)

    # A request that was under way when the server stopped fails in a way of its own.
    assert [line for line in away if "broke the connection off" not in line] == away[-1:]
    assert away[-1].startswith("demo could not be listed again: demo cannot be reached")
    assert reports()[len(away) :] == ["demo is listed again"]


@pytest.mark.parametrize("version", ["2025-11-25", "2026-07-28"])
async def test_a_call_waits_for_a_server_that_is_being_restarted(version: str) -> None:
    registry, port = OperationRegistry(), free_port()
    with time_limit(30):
        async with serving_demo(port) as url:
            connecting = connect_mcp("demo", MCPClientConfig(url=url, version=version))
            client = await connecting.__aenter__()
            registry.register_all(client)
        calling = asyncio.create_task(registry.execute("demo.add", {"a": 1, "b": 2}))
        await anyio.sleep(0.3)
        async with serving_demo(port):
            envelope = await calling
            await connecting.__aexit__(None, None, None)

    assert envelope.data == {"result": 3}


async def test_arguments_are_sent_as_headers_and_changed_headers_are_fetched() -> None:
    header = ["Region"]
    seen: list[Any] = []

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        region = {"type": "string", "x-mcp-header": header[0]}
        schema = {"type": "object", "properties": {"region": region}}
        return types.ListToolsResult(tools=[types.Tool(name="where", input_schema=schema)])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        seen.append(params.arguments)
        return types.CallToolResult(content=[])

    server: Server[Any] = Server("headers", on_list_tools=list_tools, on_call_tool=call_tool)
    with time_limit(20):
        async with (
            serving(server.streamable_http_app()) as base,
            connect_mcp("headers", MCPClientConfig(url=base + "/mcp", pin="off")) as client,
        ):
            registry = OperationRegistry(client)
            await registry.execute("headers.where", {"region": "north"})
            header[0] = "Place"
            await registry.execute("headers.where", {"region": "south"})

    assert seen == [{"region": "north"}, {"region": "south"}]


# ------------------------------------------------------------ hostile answers


Answer = Callable[[Request, dict[str, Any]], Response]


@asynccontextmanager
async def answering(answer: Answer, **options: Any) -> AsyncGenerator[OperationRegistry]:
    """A valid server whose tool `odd` responds as `answer` defines."""

    async def endpoint(request: Request) -> Response:
        if request.method != "POST":
            return Response(status_code=405)
        message = await request.json()
        method = message.get("method")
        if method == "tools/call":
            if message["params"]["name"] == "odd":
                return answer(request, message)
            result: Any = {"content": []}
        elif method == "initialize":
            result = {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "odd", "version": "1"},
            }
        elif method == "tools/list":
            result = {
                "tools": [{"name": n, "inputSchema": {"type": "object"}} for n in ("odd", "even")]
            }
        elif "id" not in message:
            return Response(status_code=202)
        else:
            error = {"code": -32601, "message": "Method not found"}
            return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "error": error})
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": result})

    app = Starlette(routes=[Route("/mcp", endpoint, methods=["GET", "POST", "DELETE"])])
    async with (
        serving(app) as base,
        connect_mcp("odd", MCPClientConfig(url=base + "/mcp", **options)) as client,
    ):
        yield OperationRegistry(client)


async def outcome(answer: Answer, **options: Any) -> CallError:
    """Return the outcome of the odd call, after checking that other calls during and after it succeed."""
    with time_limit(60):
        async with answering(answer, **options) as registry:
            with pytest.raises(CallError) as caught:
                await registry.execute("odd.odd", {})
            assert (await registry.execute("odd.even", {})).data == []
    return caught.value


def whole(request: Request, message: dict[str, Any], size: int) -> dict[str, Any]:
    text = {"type": "text", "text": "x" * size}
    return {"jsonrpc": "2.0", "id": message["id"], "result": {"content": [text]}}


def big_json(request: Request, message: dict[str, Any]) -> Response:
    return JSONResponse(whole(request, message, 50_000_000))


def big_event(request: Request, message: dict[str, Any]) -> Response:
    async def events() -> AsyncGenerator[bytes]:
        yield b"data: " + json.dumps(whole(request, message, 50_000_000)).encode() + b"\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def bomb(request: Request, message: dict[str, Any]) -> Response:
    body = gzip.compress(json.dumps(whole(request, message, 50_000_000)).encode())
    return Response(body, headers={"content-encoding": "gzip", "content-type": "application/json"})


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("answer", [big_json, big_event, bomb])
async def test_a_response_that_is_too_large_is_rejected_while_it_arrives(answer: Answer) -> None:
    error = await outcome(answer, max_message_bytes=1_000_000)

    assert error.code == ErrorCode.RESOURCE_EXHAUSTED


async def test_a_large_response_within_the_limit_arrives() -> None:
    def three_megabytes(request: Request, message: dict[str, Any]) -> Response:
        async def events() -> AsyncGenerator[bytes]:
            yield b"data: " + json.dumps(whole(request, message, 3_000_000)).encode() + b"\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    with time_limit(60):
        async with answering(three_megabytes) as registry:
            envelope = await registry.execute("odd.odd", {})

    assert len(envelope.data[0]["text"]) == 3_000_000


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (lambda _, __: Response("<html>", media_type="text/html"), ErrorCode.EXECUTION_ERROR),
        (lambda _, __: Response("{", media_type="application/json"), ErrorCode.EXECUTION_ERROR),
        (lambda _, __: Response(status_code=202), ErrorCode.EXECUTION_ERROR),
        (lambda _, __: Response("teapot", status_code=418), ErrorCode.EXECUTION_ERROR),
        (lambda _, __: Response("oops", status_code=500), ErrorCode.EXECUTION_ERROR),
        (lambda _, __: Response(status_code=503), ErrorCode.UNAVAILABLE),
        (
            lambda _, __: Response("data: \n\n", media_type="text/event-stream"),
            ErrorCode.UNAVAILABLE,
        ),
        (
            lambda _, __: Response(status_code=307, headers={"location": "http://127.0.0.2:9/"}),
            ErrorCode.EXECUTION_ERROR,
        ),
    ],
    ids=["html", "no-json", "202", "418", "500", "503", "empty-stream", "redirect"],
)
async def test_a_malformed_response_fails_only_its_call(answer: Answer, code: ErrorCode) -> None:
    assert (await outcome(answer)).code == code


def responding(method: str, result: str, media_type: str) -> Starlette:
    """A server whose result of one method is `result`, a text that need not be JSON."""

    async def endpoint(request: Request) -> Response:
        message = await request.json() if request.method == "POST" else {}
        if "id" not in message:
            return Response(status_code=202 if message else 405)
        about = '"capabilities": {"tools": {}}, "serverInfo": {"name": "a", "version": "1"}'
        found = f'{{"protocolVersion": "2025-11-25", {about}}}'
        outcome = result if message["method"] == method else found
        known = message["method"] in ("initialize", "tools/list")
        rest = f'"result": {outcome}' if known else '"error": {"code": -32601, "message": "no"}'
        text = f'{{"jsonrpc": "2.0", "id": {message["id"]}, {rest}}}'
        if media_type == "text/event-stream":
            text = f"data: {text}\n\n"
        return Response(text, media_type=media_type)

    return Starlette(routes=[Route("/mcp", endpoint, methods=["GET", "POST", "DELETE"])])


@pytest.mark.parametrize("media_type", ["application/json", "text/event-stream"])
@pytest.mark.parametrize(
    ("method", "result"),
    [("initialize", "5"), ("initialize", '{"serverInfo": 5}'), ("tools/list", '"\\ud800 secret"')],
)
async def test_a_malformed_response_while_connecting_is_reported_in_one_line_without_its_data(
    media_type: str, method: str, result: str, caplog: pytest.LogCaptureFixture
) -> None:
    with time_limit(20):
        async with serving(responding(method, result, media_type)) as base:
            with pytest.raises(CallError) as caught:
                async with connect_mcp("odd", MCPClientConfig(url=base + "/mcp")):
                    pass

    assert caught.value.message == "odd sent a response that the protocol does not allow"
    assert "secret" not in str(caught.value.details)
    assert not any(record.exc_info for record in caplog.records if record.levelno >= 30)


@pytest.mark.requirement("R25")
@pytest.mark.parametrize("media_type", ["application/json", "text/event-stream"])
async def test_a_tool_that_is_not_json_hides_no_others(media_type: str) -> None:
    bad = '{"name": "bad", "inputSchema": {"default": NaN}}'
    cut = '{"name": "cut", "title": "\\ud800", "inputSchema": {}}'
    listed = f'{{"tools": [{bad}, {cut}]}}'
    with time_limit(20):
        async with (
            serving(responding("tools/list", listed, media_type)) as base,
            connect_mcp("odd", MCPClientConfig(url=base + "/mcp")) as client,
        ):
            assert [operation.spec.title for operation in client] == ["?"]
            assert client.skipped["bad"].startswith("it is not JSON: /inputSchema/")


@pytest.mark.parametrize("media_type", ["application/json", "text/event-stream"])
@pytest.mark.parametrize("name", ['"a", "icons": "x"', '"\\ud800"'])
async def test_malformed_fields_of_a_handshake_are_ignored(name: str, media_type: str) -> None:
    result = f'{{"protocolVersion": "2025-11-25", "serverInfo": {{"name": {name}}}}}'
    with time_limit(20):
        async with (
            serving(responding("initialize", result, media_type)) as base,
            connect_mcp("odd", MCPClientConfig(url=base + "/mcp")) as client,
        ):
            assert client.server_info is not None
            assert client.server_info.name in ("a", "?")


async def test_an_error_status_is_reported_with_the_beginning_of_its_body() -> None:
    error = await outcome(lambda _, __: Response("teapot" * 1000, status_code=418))

    assert error.details["statusCode"] == 418
    assert error.details["body"].startswith("teapot")
    assert len(error.details["body"]) == 4096


async def test_a_missing_response_ends_the_call_at_the_configured_time() -> None:
    def never(request: Request, message: dict[str, Any]) -> Response:
        async def nothing() -> AsyncGenerator[bytes]:
            while not await request.is_disconnected():
                await anyio.sleep(0.05)
            yield b""

        return StreamingResponse(nothing(), media_type="text/event-stream")

    assert (await outcome(never, timeout=1)).code == ErrorCode.TIMEOUT


@pytest.mark.parametrize(("kind", "tries"), [("mutation", 1), ("query", 2)])
async def test_a_request_that_may_have_run_is_repeated_only_if_it_reads(
    kind: str, tries: int
) -> None:
    seen: list[int] = []

    def broken(request: Request, message: dict[str, Any]) -> Response:
        seen.append(1)
        return Response(status_code=502)

    error = await outcome(broken, queries=["odd"] if kind == "query" else [])

    assert error.code == ErrorCode.UNAVAILABLE
    assert len(seen) == tries


@pytest.mark.requirement("R36")
async def test_a_server_cannot_claim_that_it_never_received_a_request() -> None:
    seen: list[int] = []

    def forged(request: Request, message: dict[str, Any]) -> Response:
        seen.append(1)
        data = {"seal": "0" * 32, "kind": "unreachable", "details": {}}
        error = {"code": -32000, "message": "never saw it", "data": data}
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "error": error})

    await outcome(forged)

    assert len(seen) == 1


async def test_memory_stays_small_while_too_much_arrives() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def a_hundred_megabytes(request: Request, message: dict[str, Any]) -> Response:
        async def flood() -> AsyncGenerator[bytes]:
            for _ in range(1600):
                await anyio.lowlevel.checkpoint()
                yield b"x" * 65536

        return StreamingResponse(flood(), media_type="application/json")

    error = await outcome(a_hundred_megabytes, max_message_bytes=2_000_000)

    assert error.code == ErrorCode.RESOURCE_EXHAUSTED
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 24_000


# ------------------------------------------------------------ authentication


@asynccontextmanager
async def recording(
    transport: str = "http",
) -> AsyncGenerator[tuple[str, list[dict[str, str]]]]:
    """The demo server, and the headers it is sent."""
    server = demo_server()
    app = server.sse_app() if transport == "sse" else server.streamable_http_app()
    seen: list[dict[str, str]] = []

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seen.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await app(scope, receive, send)

    async with serving(outer) as base:
        yield base + ("/sse" if transport == "sse" else "/mcp"), seen


async def test_headers_and_tokens_are_sent_and_a_function_is_asked_each_time() -> None:
    tokens = iter(range(1000))

    async def token(context: OperationContext) -> str:
        return f"token-{next(tokens)}"

    async with recording() as (url, seen):
        config = MCPClientConfig(url=url, headers={"X-Team": "tea"}, auth=token)
        async with connect_mcp("demo", config) as client:
            await OperationRegistry(client).execute("demo.add", {"a": 1, "b": 2})

    assert all(headers["x-team"] == "tea" for headers in seen)
    sent = [headers["authorization"] for headers in seen]
    assert len(set(sent)) == len(sent) > 2
    assert all(each.startswith("Bearer token-") for each in sent)


@pytest.mark.parametrize("transport", ["http", "sse"])
async def test_a_token_function_receives_the_context_of_the_call(transport: Any) -> None:
    async def token(context: OperationContext) -> str | None:
        return None if context.identity is None else f"token-of-{context.identity.id}"

    async with recording(transport) as (url, seen):
        config = MCPClientConfig(url=url, auth=token, transport=transport)
        async with connect_mcp("demo", config) as client:
            registry = OperationRegistry(client)
            assert all("authorization" not in headers for headers in seen)
            seen.clear()
            await asyncio.gather(
                *(
                    registry.execute(
                        "demo.add", {"a": 1, "b": 2}, OperationContext(identity=Identity(who, []))
                    )
                    for who in ("ann", "ben", "cat")
                )
            )

    sent = [headers["authorization"] for headers in seen if "authorization" in headers]
    assert sorted(sent) == ["Bearer token-of-ann", "Bearer token-of-ben", "Bearer token-of-cat"]


@pytest.mark.requirement("R08")
@pytest.mark.parametrize("found", [object, ""], ids=str)
async def test_a_token_function_that_returns_no_token_rejects_the_call(found: Any) -> None:
    async with recording("http") as (url, seen):
        config = MCPClientConfig(
            url=url, auth=lambda context: None if context.identity is None else found
        )
        async with connect_mcp("demo", config) as client:
            registry = OperationRegistry(client)
            seen.clear()
            with pytest.raises(CallError):
                await registry.execute(
                    "demo.add", {"a": 1, "b": 2}, OperationContext(identity=Identity("ann", []))
                )

    assert not any("authorization" in headers for headers in seen)


@pytest.mark.requirement("R16")
async def test_a_rejected_token_is_reported_without_the_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")

    async def refuse(request: Request) -> Response:
        return Response("no", status_code=401)

    async with serving(Starlette(routes=[Route("/mcp", refuse, methods=["GET", "POST"])])) as base:
        with time_limit(20), pytest.raises(CallError) as caught:
            async with connect_mcp("demo", MCPClientConfig(url=base + "/mcp", auth="canary")):
                pass

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert caught.value.details["statusCode"] == 401
    assert "canary" not in caplog.text + str(caught.value.details) + caught.value.message


@pytest.mark.requirement("R16")
async def test_a_function_that_has_no_token_fails_the_connection_and_keeps_its_secret() -> None:
    def token(context: OperationContext) -> str:
        raise RuntimeError("canary")

    async with serving_demo() as url:
        with time_limit(20), pytest.raises(CallError) as caught:
            async with connect_mcp("demo", MCPClientConfig(url=url, auth=token)):
                pass

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert "canary" not in caught.value.message + str(caught.value.details)


async def test_client_credentials_are_exchanged_for_a_token() -> None:
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    inner = demo_server().streamable_http_app()
    granted: list[dict[str, Any]] = []

    async def metadata(request: Request) -> Response:
        return JSONResponse({"resource": base + "/mcp", "authorization_servers": [base]})

    async def server_metadata(request: Request) -> Response:
        return JSONResponse(
            {
                "issuer": base,
                "authorization_endpoint": base + "/authorize",
                "token_endpoint": base + "/token",
                "response_types_supported": ["code"],
                "grant_types_supported": ["client_credentials"],
                "token_endpoint_auth_methods_supported": ["client_secret_basic"],
            }
        )

    async def token(request: Request) -> Response:
        granted.append({"authorization": request.headers["authorization"], **await request.form()})
        return JSONResponse({"access_token": "granted", "token_type": "Bearer", "expires_in": 3600})

    outer = Starlette(
        routes=[
            Route("/.well-known/oauth-protected-resource/mcp", metadata),
            Route("/.well-known/oauth-protected-resource", metadata),
            Route("/.well-known/oauth-authorization-server", server_metadata),
            Route("/token", token, methods=["POST"]),
        ]
    )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "lifespan":
            await inner(scope, receive, send)
        elif scope["path"] != "/mcp":
            await outer(scope, receive, send)
        elif headers.get(b"authorization") == b"Bearer granted":
            await inner(scope, receive, send)
        else:
            where = f'Bearer resource_metadata="{base}/.well-known/oauth-protected-resource/mcp"'
            await Response(status_code=401, headers={"www-authenticate": where})(
                scope, receive, send
            )

    async with serving(app, port):
        auth = MCPClientCredentials(client_id="me", client_secret="secret", issuer=base)
        async with connect_mcp("demo", MCPClientConfig(url=base + "/mcp", auth=auth)) as client:
            envelope = await OperationRegistry(client).execute("demo.add", {"a": 1, "b": 2})

    assert envelope.data == {"result": 3}
    assert granted[0]["grant_type"] == "client_credentials"


@pytest.mark.requirement("R05")
@pytest.mark.parametrize(
    ("place", "host"),
    [
        ("challenge", "127.0.0.1"),
        ("challenge", "[::ffff:127.0.0.1]"),
        ("challenge", "2130706433"),
        ("metadata", "127.0.0.1"),
        ("token", "localhost"),
    ],
)
async def test_oauth_discovery_does_not_reach_private_addresses_that_a_server_names(
    place: str, host: str
) -> None:
    port, hits = free_port(), list[str]()
    base = f"http://127.0.0.1:{port}"

    async def canary(request: Request) -> Response:
        hits.append(request.url.path)
        return JSONResponse({})

    async with serving(
        Starlette(routes=[Route("/{path:path}", canary, methods=["GET", "POST"])])
    ) as other:
        there = f"http://{host}:{other.rpartition(':')[2]}"

        async def respond(request: Request) -> Response:
            path = request.url.path
            if path == "/mcp":
                at = f"{there if place == 'challenge' else base}/prm"
                challenge = {"www-authenticate": f'Bearer resource_metadata="{at}"'}
                return Response(status_code=401, headers=challenge)
            issuer = there if place == "metadata" else base
            if path == "/prm":
                return JSONResponse({"resource": base + "/mcp", "authorization_servers": [issuer]})
            return JSONResponse(
                {
                    "issuer": issuer,
                    "authorization_endpoint": base + "/authorize",
                    "token_endpoint": there + "/token",
                    "response_types_supported": ["code"],
                }
            )

        app = Starlette(routes=[Route("/{path:path}", respond, methods=["GET", "POST"])])
        async with serving(app, port):
            auth = MCPClientCredentials(client_id="me", client_secret="secret", issuer=base)
            config = MCPClientConfig(url=base + "/mcp", auth=auth)
            with pytest.raises(CallError):
                async with connect_mcp("demo", config):
                    pass
            assert hits == []

            if place == "token":
                with pytest.raises(CallError):
                    async with connect_mcp("demo", replace(config, allowed_hosts=[there])):
                        pass
                assert set(hits) == {"/token"}


def echoing(answer: Callable[[Request, Any], Response]) -> Starlette:
    """A server with one tool, which answers a call with `answer(request, id)`."""

    async def respond(request: Request) -> Response:
        message = await request.json()
        results = {
            "initialize": {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "echoing", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "tell", "inputSchema": {"type": "object"}}]},
        }
        if message.get("id") is None:
            return Response(status_code=202)
        wire = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "tools/call":
            return answer(request, message["id"])
        if message["method"] not in results:
            return JSONResponse({**wire, "error": {"code": -32601, "message": "no"}})
        return JSONResponse({**wire, "result": results[message["method"]]})

    return Starlette(routes=[Route("/mcp", respond, methods=["POST"])])


def debug_page(request: Request, _: Any) -> Response:
    # The secret ends where the body is truncated.
    headers = json.dumps(dict(request.headers))
    return Response(headers + "x" * (4080 - len(headers)) + request.headers["authorization"], 500)


def debug_error(request: Request, message_id: Any) -> Response:
    credential = request.headers["authorization"]
    data = {"headers": [dict(request.headers)], "url": str(request.url), credential: 1}
    error = {"code": -1, "message": f"I do not like {credential}", "data": data}
    return JSONResponse({"jsonrpc": "2.0", "id": message_id, "error": error})


@pytest.mark.requirement("R16")
@pytest.mark.requirement("R17")
@pytest.mark.parametrize("answer", [debug_page, debug_error])
@pytest.mark.parametrize("asks", [False, True], ids=["fixed", "asked for"])
async def test_secrets_that_a_server_echoes_are_redacted(
    answer: Callable[[Request, Any], Response], asks: bool
) -> None:
    token = "canary/token"
    with time_limit(20):
        async with serving(echoing(answer)) as base:
            config = MCPClientConfig(
                url=f"{base}/mcp?key=canary-query",
                headers={"X-K": "canary-header"},
                auth=(lambda context: token) if asks else token,
            )
            async with connect_mcp("web", config) as client:
                with pytest.raises(CallError) as caught:
                    await OperationRegistry(client).execute("web.tell", {})

    assert caught.value.code == ErrorCode.EXECUTION_ERROR
    assert "***" in json.dumps(caught.value.details)
    assert "canary" not in json.dumps(caught.value.to_wire())


@pytest.mark.requirement("R16")
async def test_a_refused_connection_reveals_no_secret() -> None:
    async def refuse(request: Request) -> Response:
        return Response(str(dict(request.headers)), 401)

    with time_limit(20):
        async with serving(Starlette(routes=[Route("/mcp", refuse, methods=["POST"])])) as base:
            with pytest.raises(CallError) as caught:
                async with connect_mcp("web", MCPClientConfig(url=f"{base}/mcp", auth="canary")):
                    pass

    assert "***" in caught.value.details["body"]
    assert "canary" not in caught.value.details["body"]


@pytest.mark.requirement("R16")
async def test_a_token_endpoint_that_repeats_its_request_reveals_no_secret() -> None:
    async def refuse(request: Request) -> Response:
        return Response(f"{dict(request.headers)}", 400)

    async def describe(request: Request) -> Response:
        own = str(request.base_url).rstrip("/")
        return JSONResponse(
            {
                "issuer": own,
                "authorization_endpoint": f"{own}/authorize",
                "token_endpoint": f"{own}/token",
                "response_types_supported": ["code"],
                "token_endpoint_auth_methods_supported": ["client_secret_basic"],
            }
        )

    routes = [
        Route("/.well-known/oauth-authorization-server", describe),
        Route("/token", refuse, methods=["POST"]),
        Route("/mcp", lambda _: Response(status_code=401), methods=["POST"]),
    ]
    with time_limit(20):
        async with serving(Starlette(routes=routes)) as base:
            auth = MCPClientCredentials(client_id="me", client_secret="can:ary", issuer=base)
            with pytest.raises(CallError) as caught:
                async with connect_mcp("web", MCPClientConfig(url=f"{base}/mcp", auth=auth)):
                    pass

    assert "Basic ***" in str(caught.value)
    assert b64encode(b"me:can%3Aary").decode() not in str(caught.value)


@pytest.mark.requirement("R16")
async def test_the_query_and_the_login_of_an_address_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    with time_limit(20):
        async with serving_demo() as url:
            address = url.replace("://", "://canary:canary@") + "?key=canary"
            async with connect_mcp("demo", MCPClientConfig(url=address)) as client:
                await OperationRegistry(client).execute("demo.add", {"a": 1, "b": 2})

    logged = [r.getMessage() for r in caplog.records if r.name.startswith(("httpx2", "mcp.client"))]
    assert any(f"POST {url} " in text for text in logged)
    assert not [text for text in logged if "canary" in text]
