"""Plain calls to MCP servers over HTTP: one POST each; the SDK reads streams with other messages."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from tests.limits import time_limit

from operations import CallerChannel, CallError, OperationContext, OperationRegistry
from operations.base.types import JSONObject
from operations.mcp import MCPClientConfig, connect_mcp
from operations.mcp.source.plain_calls import OpenStream, PlainCalls

SESSION = "mcp-session-id"


class Upstream:
    """A hand-written server of revision 2025-11-25; `methods` counts the messages that arrived."""

    def __init__(self) -> None:
        self.methods: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.answers: asyncio.Queue[JSONObject] = asyncio.Queue()
        self.cancelled: asyncio.Queue[JSONObject] = asyncio.Queue()
        self.called = asyncio.Event()
        self.heard = asyncio.Event()
        self.cookie = False

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            last = request.headers.get("last-event-id")
            return await self.resumed(request) if last else web.Response(status=405)
        if request.method == "DELETE":
            return web.Response()
        message = await request.json()
        method = message.get("method", "answer")
        self.methods[method] += 1
        if method == "initialize":
            result: JSONObject = {
                "protocolVersion": "2025-11-25",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "raw", "version": "1"},
            }
            headers = {SESSION: "s-1", **({"set-cookie": "node=1"} if self.cookie else {})}
            return web.json_response(reply(message, result), headers=headers)
        if method == "answer":
            await self.answers.put(message)
        if method == "notifications/cancelled":
            await self.cancelled.put(message["params"])
        if "id" not in message or method == "answer":
            return web.Response(status=202)
        if method == "tools/list":
            names = [name.removeprefix("tool_") for name in dir(self) if name.startswith("tool_")]
            tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
            return web.json_response(reply(message, {"tools": tools}))
        if method != "tools/call":
            error = {"code": -32601, "message": "unknown"}
            return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": error})
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        name = message["params"]["name"]
        answer: web.StreamResponse = await getattr(self, f"tool_{name}")(request, message)
        return answer

    async def tool_json(self, request: web.Request, message: JSONObject) -> web.StreamResponse:
        return web.json_response(reply(message, text("json")))

    async def tool_stream(self, request: web.Request, message: JSONObject) -> web.StreamResponse:
        return await stream(request, None, reply(message, text("stream")))

    async def tool_report(self, request: web.Request, message: JSONObject) -> web.StreamResponse:
        token = message["params"]["_meta"]["progressToken"]
        params = {"progressToken": token, "progress": 1, "message": "half"}
        report = {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}
        return await stream(request, report, reply(message, text("reported")))

    async def tool_ask(self, request: web.Request, message: JSONObject) -> web.StreamResponse:
        form: JSONObject = {"type": "object", "properties": {}}
        params: JSONObject = {"message": "Who?", "requestedSchema": form}
        question = {"jsonrpc": "2.0", "id": 7, "method": "elicitation/create", "params": params}
        response = await stream(request, question, end=False)
        answer = await self.answers.get()
        await response.write(event(reply(message, text(answer["result"]["action"]))))
        return response

    async def tool_polled(self, request: web.Request, message: JSONObject) -> web.StreamResponse:
        self.polled = message
        return await stream(request, None)

    async def resumed(self, request: web.Request) -> web.StreamResponse:
        return await stream(request, reply(self.polled, text("resumed")))

    async def tool_wait(self, request: web.Request, message: JSONObject) -> web.StreamResponse:
        self.called.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def tool_refuse(self, request: web.Request, message: JSONObject) -> web.StreamResponse:
        error = {"code": -32050, "message": "no", "data": {"why": "because"}}
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": error})

    async def tool_other(self, request: web.Request, message: JSONObject) -> web.StreamResponse:
        return web.json_response(reply({"id": 5}, text("of another request")))

    async def tool_moved(self, request: web.Request, message: JSONObject) -> web.StreamResponse:
        return web.Response(status=307, headers={"location": "http://127.0.0.1:1/"})

    async def tool_many(self, request: web.Request, message: JSONObject) -> web.StreamResponse:
        return web.json_response(reply(message, {"content": [], "list": [[]] * 5_000}))

    async def tool_malformed(self, request: web.Request, message: JSONObject) -> web.StreamResponse:
        token = message["params"]["_meta"]["progressToken"]
        params = {"progressToken": token, "progress": 1}
        report = {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}
        await stream(request, report, end=False)
        await self.heard.wait()
        assert request.transport is not None
        request.transport.write(b"no chunk size\r\n")
        await asyncio.Event().wait()
        raise AssertionError

    async def tool_manystream(
        self, request: web.Request, message: JSONObject
    ) -> web.StreamResponse:
        return await stream(request, reply(message, {"content": [], "list": [[]] * 5_000}))


def reply(message: JSONObject, result: JSONObject) -> JSONObject:
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def text(value: str) -> JSONObject:
    return {"content": [{"type": "text", "text": value}]}


def event(message: JSONObject | None) -> bytes:
    return f"id: 1\nretry: 10\ndata: {'' if message is None else json.dumps(message)}\n\n".encode()


async def stream(
    request: web.Request, *messages: JSONObject | None, end: bool = True
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for message in messages:
        await response.write(event(message))
    if end:
        await response.write_eof()
    return response


@asynccontextmanager
async def connected(upstream: Upstream, **config: Any) -> AsyncGenerator[OperationRegistry]:
    app = web.Application()
    app.router.add_route("*", "/mcp", upstream.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    registry = OperationRegistry()
    settings = MCPClientConfig(url=url, version="2025-11-25", **config)
    try:
        with time_limit(20):
            async with connect_mcp("raw", settings) as raw:
                registry.register_all(raw)
                yield registry
    finally:
        await runner.cleanup()


async def text_of(registry: OperationRegistry, name: str, context: Any = None) -> str:
    envelope = await registry.execute(f"raw.{name}", {}, context)
    return str(envelope.meta.content[0].text)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["json", "stream"])
async def test_a_plain_call_is_one_post_that_the_sdk_does_not_see(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = Upstream()
    handed_over: list[str] = []

    def take(_plain: PlainCalls, key: str) -> None:
        handed_over.append(key)

    monkeypatch.setattr(PlainCalls, "take", take)
    async with connected(upstream, headers={"x-key": "k"}, auth="secret") as registry:
        assert [await text_of(registry, name) for _ in range(3)] == [name] * 3

    assert upstream.methods["tools/call"] == 3
    assert handed_over == []
    assert [upstream.headers[0][key] for key in (SESSION, "mcp-protocol-version", "x-key")] == [
        "s-1",
        "2025-11-25",
        "k",
    ]
    assert upstream.headers[0]["authorization"] == "Bearer secret"


async def test_the_sdk_reads_streams_with_reports_and_questions_without_a_second_post() -> None:
    upstream, reports = Upstream(), list[str | None]()

    async def hear(_done: float, _total: float | None, message: str | None) -> None:
        reports.append(message)

    async def answer(_message: str, _schema: JSONObject) -> JSONObject:
        return {"action": "decline"}

    context = OperationContext(channel=CallerChannel(progress=hear, elicit=answer))
    async with connected(upstream) as registry:
        assert await text_of(registry, "report", context) == "reported"
        assert await text_of(registry, "ask", context) == "decline"

    assert reports == ["half"]
    assert upstream.methods["tools/call"] == 2


async def test_a_stream_that_ends_early_is_resumed() -> None:
    upstream = Upstream()
    async with connected(upstream) as registry:
        assert await text_of(registry, "polled") == "resumed"

    assert upstream.methods["tools/call"] == 1


@pytest.mark.requirement("R31")
async def test_a_cancelled_call_is_cancelled_at_the_server() -> None:
    upstream = Upstream()
    async with connected(upstream) as registry:
        call = asyncio.ensure_future(registry.execute("raw.wait", {}))
        await upstream.called.wait()
        call.cancel()
        cancelled = await upstream.cancelled.get()

    assert cancelled["requestId"] >= 1_000_000_001


@pytest.mark.requirement("R31")
async def test_a_call_that_is_cancelled_before_the_sdk_reads_its_stream_is_cancelled_at_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upstream, streams = Upstream(), list[OpenStream]()
    hand_over = PlainCalls._handed_over

    def cancelled(calls: PlainCalls, *parts: Any) -> OpenStream:
        streams.append(hand_over(calls, *parts))
        task.cancel()
        return streams[0]

    monkeypatch.setattr(PlainCalls, "_handed_over", cancelled)
    async with connected(upstream) as registry:
        task = asyncio.create_task(registry.execute("raw.ask", {}))
        with time_limit(20):
            with pytest.raises(asyncio.CancelledError):
                await task
            await upstream.cancelled.get()
        assert streams[0].response.closed


@pytest.mark.requirement("R55")
@pytest.mark.parametrize("name", ["many", "manystream"])
async def test_results_with_too_many_values_are_rejected_before_they_are_decoded(name: str) -> None:
    async with connected(Upstream(), max_message_values=1_000) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute(f"raw.{name}", {})

    assert caught.value.code == "RESOURCE_EXHAUSTED"


@pytest.mark.requirement("R12")
async def test_an_invalid_chunk_ends_a_call_at_once() -> None:
    upstream = Upstream()

    async def hear(_done: float, _total: float | None, _message: str | None) -> None:
        upstream.heard.set()

    context = OperationContext(channel=CallerChannel(progress=hear))
    async with connected(upstream) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("raw.malformed", {}, context)

    assert caught.value.code == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("name", "details"),
    [
        ("refuse", {"code": -32050, "message": "no", "data": {"why": "because"}}),
        ("other", None),
        ("moved", {"statusCode": 307}),
    ],
)
async def test_responses_that_are_not_results_are_errors(name: str, details: Any) -> None:
    async with connected(Upstream()) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute(f"raw.{name}", {})

    assert caught.value.code == "EXECUTION_ERROR"
    assert caught.value.details == details


async def test_a_server_that_sets_cookies_gets_them_back() -> None:
    upstream = Upstream()
    upstream.cookie = True
    async with connected(upstream) as registry:
        assert await text_of(registry, "json") == "json"

    assert upstream.headers[0]["cookie"] == "node=1"
