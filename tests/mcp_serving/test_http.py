"""Streamable HTTP, served by uvicorn: all protocol revisions, the lean path and the SDK, and authentication."""

import asyncio
import gzip
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import httpx2
import msgspec
import pytest
from mcp import Client, MCPError
from mcp_types import INTERNAL_ERROR, ElicitResult, PaginatedRequestParams
from starlette.requests import Request
from tests.limits import time_limit
from tests.mcp_serving import upstream
from tests.mcp_serving.support import (
    ERAS,
    MODERN,
    MODERN_META,
    error_of,
    example,
    serving,
    tool_names,
)

from operations import CallError, Identity, OperationContext, OperationRegistry
from operations.base.types import JSONObject
from operations.front.limits import Limits
from operations.mcp import MCPClientConfig, connect_mcp, release_stream, to_mcp

BOTH = pytest.mark.parametrize("era", ERAS)


def identify(request: Request) -> Identity | None:
    key = request.headers.get("x-key")
    if key == "broken":
        raise RuntimeError("the key store is away: CANARY")
    if key is not None and key not in ("ann", "bob"):
        raise CallError("ACCESS_DENIED", "unknown key")
    return None if key is None else Identity(key, ["task:write"] if key == "ann" else [])


def post(method: str, params: JSONObject, version: str = MODERN, **headers: str) -> Any:
    if version == MODERN:
        params = {**params, "_meta": {**MODERN_META, **params.get("_meta", {})}}
        headers = {"mcp-method": method, "mcp-name": params.get("name", ""), **headers}
    return {
        "json": {"jsonrpc": "2.0", "id": 1, "method": method, "params": params},
        "headers": {
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": version,
            **headers,
        },
    }


@asynccontextmanager
async def http(app: Any) -> AsyncGenerator[httpx2.AsyncClient]:
    async with serving(app) as address, httpx2.AsyncClient(base_url=address) as client:
        yield client


@BOTH
@pytest.mark.parametrize("lean", [True, False])
async def test_the_sdks_client_lists_and_calls(era: str, lean: bool) -> None:
    async with (
        serving(to_mcp(example()).asgi_app(lean=lean)) as address,
        Client(f"{address}/mcp", mode=era) as client,
    ):
        names = await tool_names(client)
        added = await client.call_tool("math__add", {"a": 1})
        failed = await client.call_tool("task__fail", {})

    assert "math__add" in names
    assert added.content[0].text == "2"  # type: ignore[union-attr]
    assert error_of(failed)["code"] == "TASK_LOCKED"


@BOTH
@pytest.mark.parametrize("path", ["http", "memory"])
async def test_the_text_of_an_unexpected_exception_is_not_sent(era: str, path: str) -> None:
    async def fail(_request: Any, _params: Any) -> Any:
        raise RuntimeError("a secret of the server")

    server = to_mcp(example())
    server.add_request_handler("prompts/list", PaginatedRequestParams, fail)
    async with (
        serving(server.asgi_app()) as address,
        Client(f"{address}/mcp" if path == "http" else server, mode=era) as client,
    ):
        with pytest.raises(MCPError) as caught:
            await client.list_prompts()

    assert (caught.value.code, caught.value.message) == (INTERNAL_ERROR, "Internal server error")


@BOTH
async def test_questions_and_progress_cross_http(era: str) -> None:
    registry, reports = OperationRegistry(), list[str | None]()

    @registry.operation("ask.name")
    async def name(context: OperationContext) -> str:
        await context.progress(1, 2, "asking")
        reply = await context.elicit("Who?", {"type": "object", "properties": {}})
        return str(reply["action"])

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        reports.append(message)

    async def decline(context: Any, params: Any) -> Any:
        return ElicitResult(action="decline")

    async with (
        serving(to_mcp(registry).asgi_app()) as address,
        Client(f"{address}/mcp", mode=era, elicitation_callback=decline) as client,
    ):
        result = await client.call_tool("ask__name", {}, progress_callback=hear)

    assert result.content[0].text == "decline"  # type: ignore[union-attr]
    assert reports == ["asking"]


PLAIN: list[tuple[str, JSONObject]] = [
    ("tools/list", {}),
    ("tools/list", {"cursor": "nonsense"}),
    ("tools/call", {"name": "math__add", "arguments": {"a": 1}}),
    ("tools/call", {"name": "task__find", "arguments": {"name": ""}}),
    ("tools/call", {"name": "math__add", "arguments": {"a": "x"}}),
    ("tools/call", {"name": "math__add", "arguments": {"a": 2**70}}),
    ("tools/call", {"name": "math__add"}),
    ("tools/call", {"name": "task__fail"}),
    ("tools/call", {"name": "task__delete", "arguments": {"id": "1"}}),
    ("tools/call", {"name": "task__watch", "arguments": {"n": 2}}),
    ("tools/call", {"name": "file__icon"}),
    ("tools/call", {"name": "note__any", "arguments": {"value": None}}),
    ("tools/call", {"name": "no__such"}),
    ("tools/call", {"name": "math__add", "arguments": []}),
    ("tools/call", {}),
    ("tools/call", {"name": "math__add", "arguments": {"a": 1}, "_meta": {"progressToken": 1}}),
]


@pytest.mark.parametrize("version", [MODERN, "2025-11-25", "2025-06-18"])
async def test_the_lean_path_returns_the_error_messages_of_the_sdk(version: str) -> None:
    server = to_mcp(example(), stateless=True)
    async with (
        http(server.asgi_app()) as lean,
        http(to_mcp(example(), stateless=True).asgi_app(lean=False)) as sdk,
    ):
        for method, params in PLAIN:
            request = post(method, params, version)
            ours, theirs = await lean.post("/mcp", **request), await sdk.post("/mcp", **request)
            assert ours.status_code == theirs.status_code, (method, params)
            assert (
                ours.headers["content-type"].partition(";")[0]
                == theirs.headers["content-type"].partition(";")[0]
            ), (method, params)
            if ours.headers["content-type"].startswith("application/json"):
                assert ours.json() == theirs.json(), (method, params)


@pytest.mark.parametrize(
    "headers",
    [
        {"mcp-method": "tools/list"},
        {"mcp-name": "other"},
        {"accept": "text/html"},
        {"content-type": "text/plain"},
        {"mcp-protocol-version": "2099-01-01"},
        {"mcp-param-x": "1"},
    ],
)
async def test_requests_that_contradict_themselves_go_to_the_sdk(headers: dict[str, str]) -> None:
    request = post("tools/call", {"name": "math__add", "arguments": {"a": 1}})
    request["headers"] |= headers
    async with (
        http(to_mcp(example()).asgi_app()) as lean,
        http(to_mcp(example()).asgi_app(lean=False)) as sdk,
    ):
        ours, theirs = await lean.post("/mcp", **request), await sdk.post("/mcp", **request)

    assert (ours.status_code, ours.text) == (theirs.status_code, theirs.text)
    assert ours.status_code == 200 or ours.status_code >= 400


async def test_an_unknown_version_gets_the_supported_versions() -> None:
    request = post("tools/list", {}, **{"mcp-protocol-version": "2099-01-01"})
    request["json"]["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] = "2099-01-01"
    async with http(to_mcp(example()).asgi_app()) as client:
        response = await client.post("/mcp", **request)
        del request["json"]["id"]
        notification = await client.post("/mcp", **request)

    assert (response.status_code, notification.status_code) == (400, 400)
    error = response.json()["error"]
    assert error["data"] == {"supported": [MODERN], "requested": "2099-01-01"}
    assert notification.json()["error"] == error


@pytest.mark.requirement("R13", "R28")
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"1e999", b"\xff", b"[" * 100_000, b'{"jsonrpc":"2.0"}',
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"math__add","arguments":{"a":NaN}}}',
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"math__add","arguments":{"a":"\\ud800"}}}',
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
    ],
    ids=range(12),
)  # fmt: skip
@pytest.mark.parametrize("version", [MODERN, "2025-06-18"])
async def test_malformed_bodies_get_an_error_and_affect_nothing_else(
    body: bytes, version: str
) -> None:
    request = post("tools/call", {"name": "math__add", "arguments": {"a": 1}}, version)
    async with http(to_mcp(example(), stateless=True).asgi_app()) as client:
        bad = await client.post(
            "/mcp",
            content=body,
            headers={**request["headers"], "content-type": "application/json"},
        )
        good = await client.post("/mcp", **request)

    assert bad.status_code in (200, 202, 400, 413)
    assert b"Traceback" not in bad.content
    assert "result" in good.text


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("version", [MODERN, "2025-06-18"])
async def test_a_compressed_body_is_rejected_with_the_reason(version: str) -> None:
    request = post("tools/call", {"name": "math__add", "arguments": {"a": 1}}, version)
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with http(to_mcp(example(), stateless=True).asgi_app()) as client:
        response = await client.post(
            "/mcp",
            content=gzip.compress(msgspec.json.encode(request["json"])),
            headers={**request["headers"], **headers},
        )

    assert response.status_code == 415
    assert "Content-Encoding" in response.text


@pytest.mark.requirement("R21")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "localhost.evil.example"}, 421),
        ({"host": "[::1"}, 421),
        ({"host": "127.0.0.1@evil.example"}, 421),
        ({"host": "evil.example@127.0.0.1"}, 421),
        ({"host": "localhost/evil.example"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost.evil.example"}, 403),
        ({"origin": "http://localhost:9"}, 403),
        ({"origin": "https://app.example"}, 200),
        ({"host": "localhost"}, 200),
    ],
)
async def test_other_hosts_and_origins_are_rejected_before_any_work(
    headers: dict[str, str], status: int
) -> None:
    questions = 0

    def who(_request: Request) -> None:
        nonlocal questions
        questions += 1

    app = to_mcp(example(), identify=who).asgi_app(origins=["https://app.example"])
    async with http(app) as client:
        answer = await client.post("/mcp", **post("tools/list", {}, **headers))

    assert answer.status_code == status
    assert bool(questions) is (status == 200)


async def test_any_host_may_be_allowed_but_pages_of_other_sites_are_rejected() -> None:
    async with http(to_mcp(example()).asgi_app(hosts=None)) as client:
        same = post("tools/list", {}, host="api.example", origin="https://api.example")
        other = post("tools/list", {}, host="api.example", origin="https://evil.example")

        assert (await client.post("/mcp", **same)).status_code == 200
        assert (await client.post("/mcp", **other)).status_code == 403


@pytest.mark.requirement("R07", "R08", "R16")
@pytest.mark.parametrize("lean", [True, False])
async def test_the_identity_decides_and_failed_checks_reject(
    lean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = to_mcp(example(), identify=identify, scopes_supported=["task:write"])
    async with http(server.asgi_app(lean=lean)) as client:

        async def deleting(**headers: str) -> httpx2.Response:
            params = {"name": "task__delete", "arguments": {"id": "1"}}
            return await client.post("/mcp", **post("tools/call", params, **headers))

        async def names(**headers: str) -> list[str]:
            answer = await client.post("/mcp", **post("tools/list", {}, **headers))
            return [tool["name"] for tool in answer.json()["result"]["tools"]]

        done = (await deleting(**{"x-key": "ann"})).json()["result"]
        assert done["structuredContent"] == {"result": None}
        for headers in (dict[str, str]({"x-key": "bob"}), dict[str, str]()):
            denied = (await deleting(**headers)).json()["result"]
            assert error_of(denied)["code"] == "ACCESS_DENIED"
            assert "task__delete" not in await names(**headers)
        assert "task__delete" in await names(**{"x-key": "ann"})
        for key in ("mallory", "broken"):
            assert (await deleting(**{"x-key": key})).status_code == 401

    assert "CANARY" not in caplog.text


@pytest.mark.requirement("R11")
async def test_a_session_belongs_to_its_opener() -> None:
    opening = {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "t", "version": "1"},
    }
    async with http(to_mcp(example(), identify=identify).asgi_app()) as client:
        opened = await client.post(
            "/mcp", **post("initialize", opening, "2025-11-25", **{"x-key": "ann"})
        )
        session = opened.headers["mcp-session-id"]
        statuses = [
            (
                await client.post(
                    "/mcp",
                    **post("ping", {}, "2025-11-25", **{"mcp-session-id": session, "x-key": key}),
                )
            ).status_code
            for key in ("ann", "bob")
        ]

    assert statuses == [200, 404]


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("lean", [True, False])
async def test_a_body_beyond_the_limit_is_rejected(lean: bool) -> None:
    request = post("tools/call", {"name": "math__add", "arguments": {"a": "x" * 5_000}})
    async with http(
        to_mcp(example(), limits=Limits(body_bytes=4_000)).asgi_app(lean=lean)
    ) as client:
        whole = await client.post("/mcp", **request)

        async def pieces() -> AsyncGenerator[bytes]:
            for _ in range(5):
                yield b" " * 1_000

        pieced = await client.post("/mcp", content=pieces(), headers=request["headers"])

    assert (whole.status_code, pieced.status_code) == (413, 413)


async def test_a_body_that_does_not_arrive_is_abandoned() -> None:
    async with serving(to_mcp(example(), limits=Limits(body_seconds=0.1)).asgi_app()) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(b"POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
        with time_limit(20):
            answer = await reader.readline()
        writer.close()

    assert b" 408 " in answer


@pytest.mark.requirement("R31")
@pytest.mark.parametrize("lean", [True, False])
async def test_a_client_that_leaves_stops_the_handler(lean: bool) -> None:
    registry = OperationRegistry()
    started, stopped = asyncio.Event(), asyncio.Event()

    @registry.operation("job.wait")
    async def wait() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with http(to_mcp(registry).asgi_app(lean=lean)) as client:
        async with anyio.create_task_group() as tasks:
            request = post("tools/call", {"name": "job__wait"})
            tasks.start_soon(lambda: client.post("/mcp", **request))
            await started.wait()
            tasks.cancel_scope.cancel()
        with time_limit(20):
            await stopped.wait()


@pytest.mark.parametrize("timeout", [60, 0.5], ids=["result", "timeout"])
async def test_a_call_that_takes_long_keeps_its_connection_open(
    timeout: float,
) -> None:
    registry, release = OperationRegistry(), asyncio.Event()

    @registry.operation("job.wait", timeout=timeout)
    async def wait() -> str:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()
        return "done"

    request = post("tools/call", {"name": "job__wait"})
    with time_limit(20):
        async with (
            http(to_mcp(registry, heartbeat=0.02).asgi_app()) as client,
            client.stream("POST", "/mcp", **request) as response,
        ):
            lines = response.aiter_lines()
            assert await anext(lines) == ": alive"
            if timeout == 60:
                release.set()
            sent = [line async for line in lines if line.startswith("data: ")]
            release.set()

    assert response.headers["content-type"] == "text/event-stream"
    (result,) = (msgspec.json.decode(line.removeprefix("data: "))["result"] for line in sent)
    assert ("TIMEOUT" in result["content"][0]["text"]) == (timeout == 0.5)
    assert result["resultType"] == "complete"


@pytest.mark.requirement("R58")
async def test_a_response_of_the_sdk_is_refused_if_too_much_is_unread() -> None:
    registry, limits = OperationRegistry(), Limits(output_bytes_per_caller=100_000)

    served = {"resource": {"uri": "note://all"}, "tool": True}

    @registry.operation("note.all", type="query", meta={"mcp": served})
    async def notes(context: OperationContext) -> str:
        await context.progress(1, 2, "half")
        return "x" * 200_000

    app = to_mcp(registry, limits=limits).asgi_app()
    async with http(app) as client:
        uri = {"uri": "note://all"}
        whole = await client.post("/mcp", **post("resources/read", uri, **{"mcp-name": uri["uri"]}))
        reporting = {"name": "note__all", "_meta": {"progressToken": 1}}
        streamed = await client.post("/mcp", **post("tools/call", reporting))

    assert whole.status_code == 429
    assert whole.json()["code"] == "RESOURCE_EXHAUSTED"
    last = msgspec.json.decode(streamed.text.rstrip().rpartition("data: ")[2])
    assert last["error"]["message"].startswith("Too many response bytes")


@pytest.mark.parametrize("lean", [True, False])
async def test_white_space_around_a_header_is_removed(lean: bool) -> None:
    request = post("tools/call", {"name": "math__add", "arguments": {"a": 1}})
    headers = {"host": "localhost", "content-type": "application/json", **request["headers"]}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/mcp",
        "headers": [(name.encode(), f" {value} ".encode()) for name, value in headers.items()],
    }
    body = {"type": "http.request", "body": msgspec.json.encode(request["json"])}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    app = to_mcp(example()).asgi_app(lean=lean)
    async with app.running():
        await app(scope, once(body), send)

    assert sent[0]["status"] == 200
    assert b'"structuredContent":2' in sent[1]["body"]


def asgi(method: str, params: JSONObject, version: str, **headers: str) -> tuple[Any, Any]:
    """Return the scope and the `receive` of a POST."""
    request = post(method, params, version, **headers)
    named = {"host": "localhost", "content-type": "application/json", **request["headers"]}
    pairs = [(name.encode(), value.encode()) for name, value in named.items()]
    scope = {"type": "http", "method": "POST", "path": "/mcp", "headers": pairs}
    return scope, once({"type": "http.request", "body": msgspec.json.encode(request["json"])})


@pytest.mark.parametrize("version", [MODERN, "2025-06-18"])
async def test_the_end_of_a_stream_waits_for_its_head(version: str) -> None:
    registry = OperationRegistry()
    sending, over, sent = asyncio.Event(), asyncio.Event(), list[Any]()

    @registry.operation("job.wait")
    async def wait() -> str:
        await sending.wait()
        asyncio.get_running_loop().call_later(0.05, over.set)
        return "done"

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            sending.set()
            await over.wait()
        sent.append(message)

    app = to_mcp(registry, stateless=True, heartbeat=0.02).asgi_app()
    async with app.running():
        with time_limit(20):
            await app(*asgi("tools/call", {"name": "job__wait"}, version), send)

    assert [message["type"].rpartition(".")[2] for message in sent[:2]] == ["start", "body"]
    assert b"done" in sent[-2]["body"]
    assert sent[-1] == {"type": "http.response.body", "body": b""}


@pytest.mark.parametrize("version", [MODERN, "2025-06-18"])
async def test_a_call_that_was_answered_late_does_not_become_a_stream(version: str) -> None:
    registry = OperationRegistry()
    over, sent = asyncio.Event(), list[Any]()

    @registry.operation("job.stubborn")
    async def stubborn() -> None:
        asyncio.get_running_loop().call_later(1, over.set)
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()

    async def send(message: Any) -> None:
        sent.append(message)

    app = to_mcp(registry, stateless=True, timeout=0.1, heartbeat=0.5).asgi_app()
    async with app.running():
        with time_limit(20):
            await app(*asgi("tools/call", {"name": "job__stubborn"}, version), send)

    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


@pytest.mark.parametrize("version", [MODERN, "2025-06-18"])
@pytest.mark.parametrize("lean", [True, False])
async def test_r55_a_message_is_decoded_once(version: str, lean: bool) -> None:
    """Also for a tool of another server, which receives the `_meta` of the request."""
    registry, sent, decoded = OperationRegistry(), list[Any](), list[Any]()

    def count(_frame: Any, event: str, function: Any) -> None:
        is_decoder = isinstance(getattr(function, "__self__", None), msgspec.json.Decoder)
        if event == "c_call" and is_decoder:
            decoded.append(function)

    async def send(message: Any) -> None:
        sent.append(message)

    async with connect_mcp("up", MCPClientConfig(server=upstream.build())) as client:
        registry.register_all(client)
        app = to_mcp(registry, stateless=True).asgi_app(lean=lean)
        request = asgi("tools/call", {"name": "up__link", "_meta": {"example.org/x": 1}}, version)
        async with app.running():
            # Not `cProfile`, whose statistics do not name the decoder.
            sys.setprofile(count)
            try:
                await app(*request, send)
            finally:
                sys.setprofile(None)

    assert b"note://today" in sent[1]["body"]
    assert len(decoded) == 1


def once(message: Any) -> Any:
    waiting = [message]

    async def receive() -> Any:
        return waiting.pop() if waiting else await asyncio.Event().wait()

    return receive


async def test_a_long_call_releases_its_stream_and_is_answered_on_another() -> None:
    registry, released = OperationRegistry(), list[bool]()

    @registry.operation("job.long")
    async def long() -> str:
        released.append(await release_stream())
        await asyncio.sleep(0.1)
        return "done"

    async with (
        serving(to_mcp(registry).asgi_app()) as address,
        Client(f"{address}/mcp", mode="legacy") as client,
    ):
        with time_limit(20):
            result = await client.call_tool("job__long", {})

    assert released == [True]
    assert result.content[0].text == "done"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "words"), [(b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', "batches"), (b"{}", "2.0")]
)
async def test_a_body_that_is_not_a_message_is_explained_in_one_sentence(
    body: bytes, words: str
) -> None:
    async with http(to_mcp(example()).asgi_app()) as client:
        headers = post("ping", {}, "2025-06-18", **{"content-type": "application/json"})["headers"]
        response = await client.post("/mcp", content=body, headers=headers)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == -32600
    assert words in error["message"]
    assert len(error["message"]) < 100


async def test_other_paths_and_protocols_are_not_served() -> None:
    app = to_mcp(example()).asgi_app()
    async with http(app) as client:
        assert (await client.post("/other", **post("tools/list", {}))).status_code == 404
    async with http(to_mcp(example()).asgi_app(path=None)) as client:
        assert (await client.post("/any", **post("tools/list", {}))).status_code == 200
    with pytest.raises(RuntimeError):
        await app({"type": "websocket"}, _never, _never)


async def _never(*_args: Any) -> Any:
    raise AssertionError


def test_an_application_rejects_an_unknown_option() -> None:
    options: Any = {"max_body_bytes": 1_000}
    with pytest.raises(TypeError, match="max_body_bytes"):
        to_mcp(example()).asgi_app(**options)
