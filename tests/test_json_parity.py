"""The same JSON text has the same outcome at every entry point and from every upstream service."""

import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import anyio
import httpx2
import pytest
from aiohttp import web
from anyio.streams.buffered import BufferedByteReceiveStream
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.calls.waiting import until
from tests.calls.worlds import MemoryWorld, WebSocketWorld, World, nats_world, redis_world
from tests.conftest import PROJECT
from tests.limits import time_limit
from tests.mcp_serving.support import serving
from tests.openapi.serving import document, imported
from tests.openapi.serving import serving as serving_http
from tests.receivers import SilentReceiver
from tests.server.asgi import Client
from tests.servers import NatsServer, RedisServer, running

from operations import CallError, OperationRegistry
from operations.base.json.values import MAX_REQUEST_VALUES
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.pubsub.base import Delivery
from operations.server import create_app

REJECTED: Any = object()

Send: TypeAlias = Callable[[bytes], Awaitable[Any]]
"""Sends a JSON text as `value` and returns the value that arrived, or `REJECTED`."""


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


TEXTS: dict[str, tuple[bytes, Any]] = {
    "NaN": (b"NaN", REJECTED),
    "Infinity": (b"-Infinity", REJECTED),
    "too large a float": (b"1e400", REJECTED),
    "a lone surrogate": (b'"\\ud800"', REJECTED),
    "a lone surrogate as key": (b'{"\\udfff":1}', REJECTED),
    "cut off": (b"[1,", REJECTED),
    "invalid UTF-8": (b'"\xff"', REJECTED),
    "too many digits": (b"9" * 5000, REJECTED),
    "too deep": (deep(100), REJECTED),
    "far too deep": (deep(50_000), REJECTED),
    "too many values": (b"[" + b"0," * MAX_REQUEST_VALUES + b"0]", REJECTED),
    "too many containers": (b"[" + b"[]," * MAX_REQUEST_VALUES + b"[]]", REJECTED),
    "duplicate keys": (b'{"a":1,"a":2}', {"a": 2}),
    "a large integer": (b"123456789012345678901234567890", 123456789012345678901234567890),
    "deep enough": (deep(50), json.loads(deep(50))),
    "many values": (b"[" + b"0," * 90_000 + b"0]", [0] * 90_001),
    "many separators in a string": (b'"' + b"[,{:" * 60_000 + b'"', "[,{:" * 60_000),
    "NUL": (b'"\\u0000"', "\0"),
}


def echo() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("note.any", type="query")
    async def anything(value: Any = None) -> Any:
        return value

    return registry


# ------------------------------------------------------------ requests


@asynccontextmanager
async def http_body() -> AsyncGenerator[Send]:
    client = Client(create_app(echo()))

    async def send(text: bytes) -> Any:
        headers = {"content-type": "application/json"}
        body = b'{"value":' + text + b"}"
        response = await client.request("POST", "/note/any", body=body, headers=headers)
        return _of_status(response.status, response.body)

    yield send


@asynccontextmanager
async def http_gateway() -> AsyncGenerator[Send]:
    client = Client(create_app(echo()))

    async def send(text: bytes) -> Any:
        headers = {"content-type": "application/json"}
        body = b'{"operation":"note.any","input":{"value":' + text + b"}}"
        response = await client.request("POST", "/call", body=body, headers=headers)
        return _of_status(response.status, response.body, "data")

    yield send


def _of_status(status: int, body: bytes, *path: str) -> Any:
    if status >= 400:
        assert status in (400, 413, 422), status
        return REJECTED
    value = json.loads(body)
    for name in path:
        value = value[name]
    return value


def mcp_request(text: bytes, more: bytes = b"") -> bytes:
    return (
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call",'
        b'"params":{' + more + b'"name":"note__any","arguments":{"value":' + text + b"}}}"
    )


def mcp_outcome(response: bytes) -> Any:
    answer = json.loads(response)
    if "error" in answer or answer["result"].get("isError"):
        return REJECTED
    text_of_value = answer["result"]["content"][0]["text"]
    try:
        return json.loads(text_of_value)
    except ValueError:
        return text_of_value


def mcp_serving(
    *, lean: bool, version: str = "2025-06-18"
) -> Callable[[], AbstractAsyncContextManager[Send]]:
    headers = {
        "accept": "application/json, text/event-stream",
        "content-type": "application/json",
        "mcp-protocol-version": version,
    }
    more = b""
    if version == "2026-07-28":
        headers |= {"mcp-method": "tools/call", "mcp-name": "note__any"}
        about = {"protocolVersion": version, "clientCapabilities": {}}
        about |= {"clientInfo": {"name": "test", "version": "1"}}
        meta = {f"io.modelcontextprotocol/{name}": value for name, value in about.items()}
        more = b'"_meta":%b,' % json.dumps(meta).encode()

    @asynccontextmanager
    async def entry() -> AsyncGenerator[Send]:
        app = to_mcp(echo(), stateless=True).asgi_app(lean=lean)
        async with serving(app) as address, httpx2.AsyncClient(base_url=address) as client:

            async def send(text: bytes) -> Any:
                body = mcp_request(text, more)
                response = await client.post("/mcp", content=body, headers=headers)
                if response.status_code >= 400:
                    assert response.status_code in (400, 413)
                    return REJECTED
                assert b"Internal server error" not in response.content
                return mcp_outcome(response.content)

            yield send

    return entry


SERVE_STDIO = """
import asyncio
from tests.test_json_parity import echo
from operations.mcp import to_mcp
asyncio.run(to_mcp(echo()).run_stdio())
"""


@asynccontextmanager
async def mcp_stdio() -> AsyncGenerator[Send]:
    command = [sys.executable, "-c", SERVE_STDIO]
    async with await anyio.open_process(command, cwd=PROJECT, stderr=None) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        stdin, lines = child.stdin, BufferedByteReceiveStream(child.stdout)

        async def exchange(line: bytes) -> bytes:
            await stdin.send(line + b"\n")
            return await lines.receive_until(b"\n", 10_000_000)

        about = {"protocolVersion": "2025-06-18", "capabilities": {}}
        params = {**about, "clientInfo": {"name": "test", "version": "1"}}
        first = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        await exchange(json.dumps(first).encode())
        await stdin.send(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')

        async def send(text: bytes) -> Any:
            return mcp_outcome(await exchange(mcp_request(text)))

        yield send
        await stdin.aclose()


class Recorder(SilentReceiver):
    def __init__(self) -> None:
        self.events: dict[str, Any] = {}

    def receive(self, delivery: Delivery) -> None:
        event = json.loads(delivery.body)
        self.events[event["payload"].get("requestId", "")] = event


@asynccontextmanager
async def call_events(world: World) -> AsyncGenerator[Send]:
    async with world.serve(echo()) as workers, world.connect() as target:
        box = target.mailbox()
        recorder = Recorder()
        await target.listen((box,), recorder)
        sent = 0

        async def send(text: bytes) -> Any:
            nonlocal sent
            sent += 1
            request_id = f"r{sent}"
            malformed = sum(worker.malformed for worker in workers)
            body = (
                (
                    b'{"type":"call.requested","id":"","payload":{"requestId":"%b",'
                    b'"operationId":"note.any","replyTo":"%b","input":{"value":'
                    % (request_id.encode(), box.encode())
                )
                + text
                + b"}}}"
            )
            await target.enqueue("operations", body, key=f"k{sent}", reply_to=box, wait=1)
            await until(
                lambda: (
                    request_id in recorder.events
                    or sum(worker.malformed for worker in workers) > malformed
                )
            )
            answer = recorder.events.get(request_id, {"type": "call.error"})
            if answer["type"] == "call.error":
                return REJECTED
            return answer["payload"]["output"]["data"]

        yield send


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running(RedisServer()) as broker:
        yield broker.url


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    with running(NatsServer()) as broker:
        yield broker.url


# ------------------------------------------------------------ responses of other services


@asynccontextmanager
async def openapi_response() -> AsyncGenerator[Send]:
    body = b""

    async def respond(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async with (
        serving_http(respond) as url,
        imported(document(), base_url=url, max_response_values=MAX_REQUEST_VALUES) as registry,
    ):

        async def send(text: bytes) -> Any:
            nonlocal body
            body = text
            try:
                envelope = await registry.execute("api.call", {})
            except CallError:
                return REJECTED
            # A value that cannot be represented costs that value only, here the whole response.
            return REJECTED if envelope.meta.changes else envelope.data

        yield send


def mcp_response(*, stream: bool) -> Callable[[], AbstractAsyncContextManager[Send]]:
    @asynccontextmanager
    async def entry() -> AsyncGenerator[Send]:
        value = b""

        async def endpoint(request: Request) -> Response:
            if request.method != "POST":
                return Response(status_code=405)
            message = await request.json()
            if "id" not in message:
                return Response(status_code=202)
            result = {
                "initialize": b'{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},'
                b'"serverInfo":{"name":"odd","version":"1"}}',
                "tools/list": b'{"tools":[{"name":"odd","inputSchema":{"type":"object"}}]}',
                "tools/call": b'{"content":[],"structuredContent":{"value":' + value + b"}}",
            }.get(message["method"], b"{}")
            text = b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (message["id"], result)
            if stream:
                return Response(b"data: " + text + b"\n\n", media_type="text/event-stream")
            return Response(text, media_type="application/json")

        app = Starlette(routes=[Route("/mcp", endpoint, methods=["GET", "POST", "DELETE"])])
        async with serving(app) as base:
            config = MCPClientConfig(url=base + "/mcp", max_message_values=MAX_REQUEST_VALUES)
            async with connect_mcp("odd", config) as client:
                registry = OperationRegistry(client)

                async def send(text: bytes) -> Any:
                    nonlocal value
                    value = text
                    try:
                        return (await registry.execute("odd.odd", {})).data["value"]
                    except CallError:
                        return REJECTED

                yield send

    return entry


ENTRIES: dict[str, Callable[[], AbstractAsyncContextManager[Send]]] = {
    "HTTP body": http_body,
    "HTTP gateway": http_gateway,
    "MCP, lean": mcp_serving(lean=True),
    "MCP, SDK": mcp_serving(lean=False),
    "MCP 2026-07-28, lean": mcp_serving(lean=True, version="2026-07-28"),
    "MCP 2026-07-28, SDK": mcp_serving(lean=False, version="2026-07-28"),
    "MCP, stdio": mcp_stdio,
    "calls over memory": lambda: call_events(MemoryWorld()),
    "calls over WebSocket": lambda: call_events(WebSocketWorld()),
    "response of an HTTP API": openapi_response,
    "response of an MCP server": mcp_response(stream=False),
    "event of an MCP server": mcp_response(stream=True),
}


async def check(entry: AbstractAsyncContextManager[Send]) -> None:
    with time_limit(200):
        async with entry as send:
            for name, (text, expected) in TEXTS.items():
                outcome = await send(text)
                assert (outcome is REJECTED) is (expected is REJECTED), name
                assert expected is REJECTED or outcome == expected, name


@pytest.mark.requirement("R20", "R28", "R55")
@pytest.mark.parametrize("name", ENTRIES)
async def test_json_has_the_same_outcome_at_every_entry_point(name: str) -> None:
    await check(ENTRIES[name]())


@pytest.mark.requirement("R20", "R28", "R55")
async def test_json_has_the_same_outcome_over_redis(redis_url: str) -> None:
    await check(call_events(redis_world(redis_url)))


@pytest.mark.requirement("R20", "R28", "R55")
async def test_json_has_the_same_outcome_over_nats(nats_url: str) -> None:
    await check(call_events(nats_world(nats_url)))
