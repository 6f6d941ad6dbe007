"""A WebSocket hub rejects web pages, foreign names, compressed messages and forged ids, as every entry point does."""

import json
import logging
import zlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from tests.limits import time_limit
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from operations import Identity, OperationContext, OperationRegistry
from operations.base.errors import TransportError
from operations.calls.socket import WebSocketHub
from operations.pubsub.websocket import connect_websocket, serve_websocket
from operations.server import APIKeys, Limits, create_app
from operations.server.http11.running import running

SERVERS = pytest.mark.parametrize("kind", ["hub", "app"])


def files(ran: list[str]) -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("files.read", type="query")
    async def read(path: str) -> str:
        ran.append(path)
        return "secret"

    @registry.operation("files.who", type="query")
    async def who(context: OperationContext, path: str) -> str | None:
        return None if context.identity is None else context.identity.id

    @registry.operation("files.erase", scopes=["admin"])
    async def erase(path: str) -> None:
        ran.append("erased " + path)

    @registry.operation("files.break")
    async def break_(path: str) -> str:
        raise RuntimeError(path)

    return registry


@asynccontextmanager
async def serving(
    kind: str, ran: list[str] | None = None, **options: Any
) -> AsyncGenerator[tuple[int, str]]:
    """Serve a registry on WebSockets; yield the port and the path."""
    registry = files([] if ran is None else ran)
    with time_limit(20):
        if kind == "hub":
            hub = WebSocketHub(registry, limits=options.pop("limits", None))
            async with hub.serve(**options) as server:
                yield server.sockets[0].getsockname()[1], "/"
        else:
            app = create_app(registry, websocket=True, **options)
            async with running(app) as url:
                yield int(url.rpartition(":")[2]), "/ws"


def event(operation: str, request_id: str = "1", **more: Any) -> str:
    payload = {"requestId": request_id, "operationId": operation, "input": {"path": "a"}, **more}
    return json.dumps({"type": "call.requested", "id": "", "payload": payload})


async def answer(socket: ClientConnection, message: str) -> dict[str, Any]:
    """Send a message and return the first event that is not a request of the hub."""
    await socket.send(message)
    while True:
        reply: dict[str, Any] = json.loads(await socket.recv())
        if reply["type"] != "call.requested":
            return reply


async def status_of(port: int, path: str, **options: Any) -> int:
    """Return the status of a handshake: 101 if it succeeds."""
    host = options.pop("name", f"127.0.0.1:{port}")
    url = f"ws://{host}{path}"
    try:
        async with connect(url, host="127.0.0.1", port=port, **options):
            return 101
    except InvalidStatus as error:
        return error.response.status_code


@pytest.mark.requirement("R21", "R54")
@SERVERS
@pytest.mark.parametrize(
    ("name", "origin", "status"),
    [
        ("127.0.0.1:{port}", None, 101),
        ("localhost:{port}", "http://localhost:{port}", 101),
        ("127.0.0.1:{port}", "http://evil.example", 403),
        ("127.0.0.1:{port}", "http://localhost:{port}", 403),
        ("127.0.0.1:{port}", "http://127.0.0.1:1", 403),
        ("127.0.0.1:{port}", "null", 403),
        ("127.0.0.1:{port}", "file://", 403),
        ("rebound.example:{port}", "http://rebound.example:{port}", 421),
        ("rebound.example:{port}", None, 421),
        ("127.0.0.1.nip.io:{port}", None, 421),
    ],
)
async def test_a_page_of_another_origin_cannot_connect(
    kind: str, name: str, origin: str | None, status: int
) -> None:
    async with serving(kind) as (port, path):
        name = name.format(port=port)
        origin = None if origin is None else origin.format(port=port)
        # A browser sends the header with every handshake of a page.
        assert await status_of(port, path, name=name, origin=origin) == status


@pytest.mark.requirement("R21")
@SERVERS
async def test_names_and_origins_can_be_allowed(kind: str) -> None:
    options = {"allowed_hosts": ["hub.example"], "allowed_origins": ["https://app.example"]}
    async with serving(kind, **options) as (port, path):
        page = "https://app.example"
        assert await status_of(port, path, name=f"hub.example:{port}", origin=page) == 101
        assert await status_of(port, path, name=f"hub.example:{port}", origin="https://b.c") == 403
        assert await status_of(port, path, name=f"127.0.0.1:{port}") == 421
        with pytest.raises(TransportError, match=r"HTTP 421: add the name .* to allowed_hosts"):
            async with connect_websocket(f"ws://127.0.0.1:{port}{path}"):
                pass


@pytest.mark.requirement("R39", "R54")
@SERVERS
async def test_open_sockets_are_limited_for_each_caller(kind: str) -> None:
    limits = Limits(streams_per_caller=2)
    async with serving(kind, limits=limits) as (port, path), AsyncExitStack() as stack:
        url = f"ws://127.0.0.1:{port}{path}"
        for _ in range(2):
            socket = await stack.enter_async_context(connect(url))
            assert (await answer(socket, event("files.read")))["payload"]["output"]
        with pytest.raises((InvalidStatus, ConnectionClosed)):
            async with connect(url) as rejected:
                await answer(rejected, event("files.read"))
        await socket.close()
        with time_limit(20):
            while True:
                with suppress(InvalidStatus, ConnectionClosed):
                    async with connect(url) as accepted:
                        await answer(accepted, event("files.read"))
                        break


@pytest.mark.requirement("R54", "R60")
@SERVERS
async def test_wrong_credentials_in_handshakes_are_slowed_down(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.front.credentials.DELAY_SECONDS", 0.01)
    limits = Limits(failed_attempts=2, failed_attempts_per_second=0.0001)

    def identify(request: Any) -> Identity | None:
        key = request.headers.get("x-api-key")
        if key is not None and key != "right":
            raise PermissionError(key)
        return None if key is None else Identity("ann")

    options: dict[str, Any] = {"identify" if kind == "hub" else "identity": identify}
    async with serving(kind, limits=limits, **options) as (port, path):
        statuses = [
            await status_of(port, path, additional_headers={"x-api-key": key})
            for key in ("a", "b", "c", "right")
        ]

    assert statuses == [401, 401, 429, 101]


@pytest.mark.requirement("R21")
def test_an_option_of_another_function_is_rejected_when_the_hub_is_created() -> None:
    with pytest.raises(TypeError, match="identify"):
        WebSocketHub(files([]), identify=lambda _: None)


async def test_the_rejection_comes_before_any_other_step() -> None:
    received: list[Any] = []
    async with serving("hub", identify=received.append) as (port, path):
        assert await status_of(port, path, origin="http://evil.example") == 403

    assert received == []


@pytest.mark.requirement("R21")
async def test_a_hub_accepts_the_host_name_it_listens_on() -> None:
    async with serve_websocket(WebSocketHub(files([])).attach, host="127.0.0.2") as server:
        port = server.sockets[0].getsockname()[1]
        async with connect(f"ws://127.0.0.2:{port}"):
            pass
        with pytest.raises(InvalidStatus):
            async with connect(f"ws://other.example:{port}", host="127.0.0.2"):
                pass


@pytest.mark.parametrize("is_mounted", [True, False])
async def test_a_handshake_at_an_unknown_path_gets_404(
    is_mounted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    registry = files([])
    app = create_app(registry, websocket=is_mounted, identity=APIKeys({}))
    async with running(app) as url:
        port = int(url.rpartition(":")[2])
        assert await status_of(port, "/elsewhere") == 404
        assert await status_of(port, "/ws") == (101 if is_mounted else 404)
        # As at every other path, a wrong credential is found first.
        wrong = {"x-api-key": "wrong"}
        assert await status_of(port, "/elsewhere", additional_headers=wrong) == 401
        assert await status_of(port, "/ws", additional_headers=wrong) == 401

    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_hub_accepts_handshakes_at_its_path_only() -> None:
    received: list[Any] = []
    async with serving("hub", identify=received.append) as (port, _):
        assert await status_of(port, "/elsewhere") == 404
        assert received == []
        assert await status_of(port, "/?any=query") == 101
    async with serving("hub", path="/ws") as (port, _):
        assert await status_of(port, "/ws") == 101
        assert await status_of(port, "/") == 404


@pytest.mark.requirement("R55")
@SERVERS
async def test_compressed_messages_are_not_accepted(kind: str) -> None:
    bomb = zlib.compressobj(wbits=-15)
    deflated = bomb.compress(b"[]," * 5_000_000) + bomb.flush(zlib.Z_SYNC_FLUSH)
    async with serving(kind) as (port, path):
        async with connect(f"ws://127.0.0.1:{port}{path}", compression="deflate") as socket:
            assert socket.response is not None
            assert "Sec-WebSocket-Extensions" not in socket.response.headers
            # A frame with the mark of a compressed one, which was not negotiated.
            length = len(deflated).to_bytes(8, "big")
            socket.transport.write(b"\xc1\xff" + length + b"\0\0\0\0" + deflated)
            with pytest.raises(ConnectionClosed) as caught:
                while True:
                    await socket.recv()
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1002
        assert await status_of(port, path) == 101


@pytest.mark.requirement("R13", "R47")
@SERVERS
@pytest.mark.parametrize(
    "forged",
    [
        {"request_id": "1\nERROR forged"},
        {"request_id": "1\u202e"},
        {"request_id": "\x1b[2J"},
        {"request_id": "x" * 513},
        {"request_id": ""},
        {"parentRequestId": "1\r\nforged"},
        {"parentRequestId": ""},
        {"parentRequestId": "1"},
        {"metadata": {"traceparent": {"a": 1}}},
        {"metadata": {"traceparent": "00\nforged"}},
        {"metadata": {"tracestate": 5}},
        {"metadata": {"large": "x" * 20_000}},
        {"metadata": ["not an object"]},
    ],
    ids=lambda forged: next(iter(forged)),
)
async def test_forged_ids_and_metadata_are_rejected(
    kind: str, forged: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ran: list[str] = []
    async with (
        serving(kind, ran) as (port, path),
        connect(f"ws://127.0.0.1:{port}{path}") as socket,
    ):
        if forged.get("request_id") == "":
            # There is nothing to reply to.
            await socket.send(event("files.read", **forged))
        else:
            reply = await answer(socket, event("files.read", **forged))
            assert reply["type"] == "call.error"
            assert reply["payload"]["code"] == "VALIDATION_ERROR"
        good = event("files.read", "2", parentRequestId="p-1", metadata={"traceparent": "00-0-0"})
        assert (await answer(socket, good))["payload"]["output"]["data"] == "secret"

    assert ran == ["a"]
    assert all(record.getMessage().isprintable() for record in caplog.records)


@pytest.mark.requirement("R47")
async def test_ids_are_escaped_in_logs(caplog: pytest.LogCaptureFixture) -> None:
    async with serving("hub") as (port, path), connect(f"ws://127.0.0.1:{port}{path}") as socket:
        reply = await answer(socket, event("files.break", "one"))
        assert reply["payload"]["code"] == "EXECUTION_ERROR"
        reply = await answer(socket, event("files.\x1b[2J\nforged", "two"))
        assert reply["payload"]["code"] == "OPERATION_NOT_FOUND"

    assert any("one" in record.getMessage() for record in caplog.records)
    assert all(record.getMessage().isprintable() for record in caplog.records)


@pytest.mark.requirement("R47")
async def test_text_of_a_peer_is_escaped_in_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "operations")
    async with serving("hub") as (port, path), connect(f"ws://127.0.0.1:{port}{path}") as socket:
        received = json.loads(await socket.recv())
        error = {
            "requestId": received["payload"]["requestId"],
            "code": "A\nB",
            "message": "no\nforged",
        }
        await socket.send(json.dumps({"type": "call.error", "id": "", "payload": error}))
        # Messages are read in order.
        await answer(socket, event("files.read"))

    assert any("forged" in record.getMessage() for record in caplog.records)
    assert all(record.getMessage().isprintable() for record in caplog.records)


@pytest.mark.requirement("R09", "F19")
@SERVERS
@pytest.mark.parametrize(
    "claim",
    [
        {"identity": {"id": "admin", "scopes": ["admin"]}},
        {"meta": {"principal": "admin"}, "principal": "admin"},
        {"metadata": {"identity": {"id": "admin", "scopes": ["admin"]}, "principal": "admin"}},
        {"context": {"identity": {"id": "admin", "scopes": ["admin"]}, "trusted": True}},
    ],
    ids=lambda claim: next(iter(claim)),
)
async def test_f19_an_identity_in_a_request_is_ignored(kind: str, claim: dict[str, Any]) -> None:
    ran: list[str] = []
    async with (
        serving(kind, ran) as (port, path),
        connect(f"ws://127.0.0.1:{port}{path}") as socket,
    ):
        seen = await answer(socket, event("files.who", "1", **claim))
        assert seen["payload"]["output"]["data"] is None
        denied = await answer(socket, event("files.erase", "2", **claim))
        assert denied["type"] == "call.error"

    assert ran == []
