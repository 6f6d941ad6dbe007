"""Every limit, guard and identity rule has the same outcome at every entry point.

entry point x rule x identity: one table of outcomes, which does not name the entry point
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.front.outcomes import ACCESS, DEEP, SIZES, VALUES
from tests.limits import time_limit
from tests.mcp_serving.support import MODERN_META, modern_headers
from tests.receivers import SilentReceiver
from tests.servers import NatsServer, RedisServer
from tests.servers import running as serving
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from operations import CallError, ErrorCode, Identity, OperationRegistry
from operations.base.text import tool_name
from operations.calls import PendingRequestMap, serve_calls
from operations.calls.socket import WebSocketHub
from operations.pubsub.base import Delivery
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis import connect_redis
from operations.pubsub.websocket import connect_websocket
from operations.server import APIKeys, Limits, create_app, hash_key
from operations.server.http11.running import running

CALLERS = {"ann": Identity("ann", ["run"]), "bob": Identity("bob", ["other"])}


@dataclass
class Hub:
    """One server with all entry points."""

    url: str
    socket_url: str
    release: asyncio.Event
    running: list[str]
    ran: list[Any] = field(default_factory=list[Any])
    headers: dict[str, str] = field(default_factory=dict[str, str])


@asynccontextmanager
async def hub(limits: Limits, **options: Any) -> AsyncGenerator[Hub]:
    registry = OperationRegistry()
    release, waiting, ran = asyncio.Event(), list[str](), list[Any]()

    @registry.operation("test.open")
    async def opened(value: Any = None) -> str:
        ran.append(value)
        return "fine"

    @registry.operation("test.advertised", scopes=["run"])
    async def advertised() -> str:
        return "fine"

    @registry.operation("test.hidden", scopes=["secret"])
    async def hidden() -> str:
        return "fine"

    @registry.operation("test.wait")
    async def wait() -> str:
        waiting.append("")
        await release.wait()
        return "fine"

    @registry.operation("test.limited", timeout=0.1)
    async def limited() -> str:
        await release.wait()
        return "fine"

    @registry.operation("test.broken")
    async def broken() -> str:
        raise RuntimeError("CANARY")

    registry.operation("test.cancelled")(cancelled)
    registry.operation("test.cancelled_later")(cancelled_later)
    registry.operation("test.exit")(leave)

    app = create_app(
        registry,
        identity=APIKeys({hash_key(key): caller for key, caller in CALLERS.items()}),
        limits=limits,
        mcp=True,
        websocket=True,
        resolve=CALLERS.get,
        scopes_supported=["run"],
        **options,
    )
    peers = WebSocketHub(registry, front=app.state.pipeline.front, max_operations=0)
    with time_limit(30):
        async with running(app) as url, peers.serve(identify=_identify) as server:
            port = server.sockets[0].getsockname()[1]
            yield Hub(url, f"ws://127.0.0.1:{port}/", release, waiting, ran)


async def cancelled() -> None:
    """Cancel the task that runs the handler."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def cancelled_later() -> None:
    """Let a callback of the event loop cancel the task that runs the handler."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.Event().wait()


async def leave() -> None:
    """Raise an exception that is not an `Exception`."""
    raise GeneratorExit("CANARY")


def _identify(request: Any) -> Identity | None:
    key = request.headers.get("x-api-key")
    return None if key is None else CALLERS[key]


Call = Callable[[Hub, str, Any, str | None], Coroutine[Any, Any, str]]
"""Call an operation with an input as an identity; return `fine` or the code of the error."""


async def over_http(hub: Hub, operation: str, value: Any, key: str | None) -> str:
    # No input is an empty body: `null` would be an input.
    body = b"" if value is None else value
    return await _posted(hub, "/" + operation.replace(".", "/"), body, key, {})


async def over_gateway(hub: Hub, operation: str, value: Any, key: str | None) -> str:
    return await _posted(hub, "/call", {"operation": operation, "input": value}, key, {})


async def over_lean_mcp(hub: Hub, operation: str, value: Any, key: str | None) -> str:
    return await _over_mcp(hub, operation, value, key, {})


async def over_sdk_mcp(hub: Hub, operation: str, value: Any, key: str | None) -> str:
    # The SDK serves requests for progress reports.
    return await _over_mcp(hub, operation, value, key, {"progressToken": 1})


async def over_socket(hub: Hub, operation: str, value: Any, key: str | None) -> str:
    return await _over_socket(_socket_url(hub), operation, value, key)


async def over_peer(hub: Hub, operation: str, value: Any, key: str | None) -> str:
    return await _over_socket(hub.socket_url, operation, value, key)


async def _over_socket(url: str, operation: str, value: Any, key: str | None) -> str:
    headers = {} if key is None else {"x-api-key": key}
    try:
        async with (
            connect_websocket(
                url, headers=headers, max_bytes=1 << 30, max_values=1 << 30
            ) as target,
            PendingRequestMap(target) as calls,
        ):
            await calls.call(operation, value)
    except CallError as error:
        return f"leaked {error}" if "CANARY" in str(error.to_wire()) else error.code
    except Exception as error:  # noqa: BLE001 - the handshake was rejected
        return f"rejected {type(error).__name__}"
    return "fine"


async def over_socket_credential(hub: Hub, operation: str, value: Any, key: str | None) -> str:
    try:
        async with (
            connect_websocket(_socket_url(hub), max_values=1 << 30) as target,
            PendingRequestMap(target) as calls,
        ):
            await calls.call(operation, value, credential=key)
    except CallError as error:
        return f"leaked {error}" if "CANARY" in str(error.to_wire()) else error.code
    return "fine"


ENTRY_POINTS: dict[str, Call] = {
    "http": over_http,
    "gateway": over_gateway,
    "mcp": over_lean_mcp,
    "mcp-sdk": over_sdk_mcp,
    "socket": over_socket,
    "socket-credential": over_socket_credential,
    "websocket-hub": over_peer,
}
EVERY = pytest.mark.parametrize("call", ENTRY_POINTS.values(), ids=ENTRY_POINTS)


def _socket_url(hub: Hub) -> str:
    return hub.url.replace("http", "ws") + "/ws"


async def _over_mcp(
    hub: Hub, operation: str, value: Any, key: str | None, meta: dict[str, Any]
) -> str:
    name = tool_name(operation)
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": name, "arguments": value, "_meta": {**MODERN_META, **meta}},
    }
    return await _posted(hub, "/mcp", body, key, modern_headers("tools/call", name))


async def _posted(hub: Hub, path: str, body: Any, key: str | None, headers: dict[str, str]) -> str:
    if key is not None:
        headers = {**headers, "x-api-key": key}
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    headers = {"content-type": "application/json", **hub.headers, **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.post(hub.url + path, data=data, headers=headers) as response,
    ):
        text = await response.text()
    assert "CANARY" not in text
    if text.startswith(("event:", "data:")):
        text = text.partition("data: ")[2].partition("\n")[0]
    answer = msgspec.json.decode(text)
    if not (isinstance(answer, dict) and "jsonrpc" in answer):
        return _code(answer, response.status)
    if "error" in answer:
        is_unknown = answer["error"]["message"].startswith("Unknown tool")
        return "OPERATION_NOT_FOUND" if is_unknown else _code(answer["error"].get("data"), 200)
    result = answer["result"]
    if not result.get("isError"):
        return "fine"
    return _code(result.get("structuredContent") or next(iter(result["_meta"].values())), 0)


def _code(answer: Any, status: int) -> str:
    if status == 200 and not (isinstance(answer, dict) and "code" in answer):
        return "fine"
    return str(answer["code"])


# ------------------------------------------------------------ identity and access


@pytest.mark.requirement("R07", "R54")
@EVERY
@pytest.mark.parametrize(("operation", "key", "outcome"), ACCESS)
async def test_access(call: Call, operation: str, key: str | None, outcome: str) -> None:
    async with hub(Limits()) as served:
        assert await call(served, operation, {}, key) == outcome


@pytest.mark.requirement("R54")
@EVERY
async def test_null_stands_for_no_input(call: Call) -> None:
    async with hub(Limits()) as served:
        assert await call(served, "test.open", None, "ann") == "fine"
        assert served.ran == [None]


@pytest.mark.requirement("R54", "R60")
@EVERY
async def test_wrong_credentials_are_rejected_and_slowed_down_but_valid_ones_pass(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.front.credentials.DELAY_SECONDS", 0.01)
    limits = Limits(failed_attempts=2, failed_attempts_per_second=0.0001)
    async with hub(limits) as served:
        outcomes = [await call(served, "test.open", {}, f"guess {n}") for n in range(4)]
        valid = await call(served, "test.advertised", {}, "ann")

    if call in (over_socket, over_peer):
        # A handshake has no code: it is rejected.
        assert all(outcome.startswith("rejected") for outcome in outcomes)
    else:
        assert outcomes == ["ACCESS_DENIED"] * 2 + ["RESOURCE_EXHAUSTED"] * 2
    assert valid == "fine"


# ------------------------------------------------------------ limits


@pytest.mark.requirement("R39", "R54")
@EVERY
@pytest.mark.parametrize("key", [None, "ann"])
async def test_concurrent_calls_are_limited(call: Call, key: str | None) -> None:
    async with hub(Limits(calls_per_caller=2)) as served:
        calls = [asyncio.create_task(call(served, "test.wait", {}, key)) for _ in range(2)]
        while len(served.running) < 2:
            await asyncio.sleep(0.01)
        assert await call(served, "test.open", {}, key) == "RESOURCE_EXHAUSTED"
        other = None if key else "ann"
        assert await call(served, "test.open", {}, other) == "fine"
        served.release.set()
        assert [await task for task in calls] == ["fine", "fine"]


@pytest.mark.requirement("R39", "R54")
async def test_concurrent_calls_count_for_all_entry_points_together() -> None:
    async with hub(Limits(calls_per_caller=len(ENTRY_POINTS))) as served:
        calls = [
            asyncio.create_task(call(served, "test.wait", {}, "ann"))
            for call in ENTRY_POINTS.values()
        ]
        while len(served.running) < len(ENTRY_POINTS):
            await asyncio.sleep(0.01)
        outcomes = [await call(served, "test.open", {}, "ann") for call in ENTRY_POINTS.values()]
        served.release.set()
        assert {await task for task in calls} == {"fine"}

    assert outcomes == ["RESOURCE_EXHAUSTED"] * len(ENTRY_POINTS)


@pytest.mark.requirement("R39", "R54")
@EVERY
async def test_the_rate_is_limited(call: Call) -> None:
    async with hub(Limits(rate_per_caller=0.001, burst=3)) as served:
        outcomes = [await call(served, "test.open", {}, "ann") for _ in range(5)]

    assert outcomes == ["fine"] * 3 + ["RESOURCE_EXHAUSTED"] * 2


@pytest.mark.requirement("R55", "R54")
@EVERY
@pytest.mark.parametrize(("limits", "value", "outcome"), SIZES.values(), ids=SIZES)
async def test_sizes_are_limited_before_anything_runs(
    call: Call, limits: Limits, value: Any, outcome: str
) -> None:
    async with hub(limits) as served:
        if call is over_socket_credential:
            # The client of the library would detect this itself.
            found = await _raw_event(_socket_url(served), {"value": value}, credential="ann")
        else:
            found = await call(served, "test.open", {"value": value}, "ann")
        if limits.body_bytes < 30_000 and call is over_socket_credential:
            # The id of a message that is too large is not known, so the connection is closed.
            assert found == "closed 1009"
        else:
            assert found == outcome
        assert served.ran == []
        assert await call(served, "test.open", {"value": 1}, "ann") == "fine"


@pytest.mark.requirement("R12", "R54")
@EVERY
async def test_calls_have_a_default_deadline(call: Call) -> None:
    async with hub(Limits(), timeout=0.5) as served:
        if "socket" in call.__name__ or call is over_peer:
            # The client of the library would send a time limit of its own.
            url = served.socket_url if call is over_peer else _socket_url(served)
            found = await _raw_event(url, {}, operationId="test.wait")
        else:
            found = await call(served, "test.wait", {}, "ann")

    assert found == "TIMEOUT"


@pytest.mark.requirement("R12", "R54")
@EVERY
async def test_a_caller_cannot_extend_the_time_limit_of_an_operation(call: Call) -> None:
    async with hub(Limits()) as served:
        # The clients of the other entry points send 30 seconds.
        served.headers["operations-timeout"] = "60000"
        found = await call(served, "test.limited", {}, "ann")

    assert found == "TIMEOUT"


@pytest.mark.requirement("R12", "R54")
@pytest.mark.parametrize("broker", ["none", "memory", "redis", "nats"])
async def test_a_caller_cannot_extend_the_time_limit_of_an_operation_at_a_worker(
    broker: str,
) -> None:
    registry = OperationRegistry()

    @registry.operation("test.limited", timeout=0.1)
    async def limited() -> None:
        await asyncio.Event().wait()

    with time_limit(20), ExitStack() as stack, pytest.raises(CallError) as caught:
        if broker == "none":
            await registry.execute("test.limited", timeout=60)
        target: Any = nullcontext(MemoryTarget())
        if broker == "redis":
            target = connect_redis(stack.enter_context(serving(RedisServer())).url)
        elif broker == "nats":
            target = connect_nats(stack.enter_context(serving(NatsServer())).url)
        async with (
            target as opened,
            serve_calls(registry, opened),
            PendingRequestMap(opened) as calls,
        ):
            await calls.call("test.limited", timeout=60)

    assert caught.value.code == "TIMEOUT"


async def _raw_event(url: str, value: Any, **more: str) -> str:
    """Send a request as JSON; return the code of the reply, or the code with which the socket was closed."""
    payload = {"requestId": "1", "operationId": "test.open", "input": value, **more}
    text = msgspec.json.encode({"type": "call.requested", "id": "", "payload": payload})
    try:
        async with connect(url) as socket:
            await socket.send(text, text=True)
            while True:
                event = msgspec.json.decode(await socket.recv())
                if event["payload"].get("requestId") == "1":
                    return str(event["payload"].get("code", "fine"))
    except ConnectionClosed as error:
        return f"closed {error.rcvd.code if error.rcvd else None}"


@pytest.mark.requirement("R55")
@EVERY
async def test_a_server_may_allow_more_values(call: Call) -> None:
    async with hub(Limits(values=3 * len(VALUES))) as served:
        assert await call(served, "test.open", {"value": [1] * 2 * len(VALUES)}, "ann") == "fine"


# ------------------------------------------------------------ attacks


@pytest.mark.requirement("R21", "R54")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "localhost", "origin": "https://evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
        ({"host": "localhost:1", "origin": "http://localhost:2"}, 403),
    ],
)
async def test_hosts_and_origins_are_checked_everywhere(
    headers: dict[str, str], status: int
) -> None:
    async with hub(Limits()) as served, AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for path in ("/test/open", "/call", "/mcp", "/search"):
            async with session.post(served.url + path, json={}, headers=headers) as response:
                assert response.status == status
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect(served.url + "/ws", headers=headers)
        assert caught.value.status == status
        assert served.ran == []


@pytest.mark.requirement("R54", "R55")
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
async def test_a_websocket_reply_does_not_depend_on_the_format_of_the_request(
    separators: tuple[str, str],
) -> None:
    async with (
        hub(Limits(values=1_000)) as served,
        aiohttp.ClientSession() as session,
        session.ws_connect(served.url + "/ws") as socket,
    ):
        for number, value in enumerate(([1] * 2_000, deep(200))):
            request = {"requestId": str(number), "operationId": "test.open", "input": value}
            event = {"type": "call.requested", "id": "", "payload": request}
            await socket.send_str(json.dumps(event, separators=separators))
        replies = [(await socket.receive_json(timeout=20))["payload"] for _ in range(2)]

    codes = {reply["requestId"]: reply["code"] for reply in replies}
    assert codes == {"0": ErrorCode.RESOURCE_EXHAUSTED, "1": ErrorCode.VALIDATION_ERROR}
    assert served.ran == []


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


# ------------------------------------------------------------ workers


@dataclass
class Worker:
    """A worker with one caller."""

    calls: PendingRequestMap
    started: asyncio.Queue[str]
    release: asyncio.Event


@asynccontextmanager
async def worker(target: MemoryTarget | None = None, **options: Any) -> AsyncGenerator[Worker]:
    registry = OperationRegistry()
    release, started = asyncio.Event(), asyncio.Queue[str]()

    @registry.operation("test.open")
    async def opened(value: Any = None) -> str:
        return "fine"

    @registry.operation("test.advertised", scopes=["run"])
    async def advertised() -> str:
        return "fine"

    @registry.operation("test.hidden", scopes=["secret"])
    async def hidden() -> str:
        return "fine"

    @registry.operation("test.wait")
    async def wait() -> str:
        started.put_nowait("")
        await release.wait()
        return "fine"

    @registry.operation("test.broken")
    async def broken() -> str:
        raise RuntimeError("CANARY")

    registry.operation("test.cancelled")(cancelled)
    registry.operation("test.cancelled_later")(cancelled_later)
    registry.operation("test.exit")(leave)

    target = target or MemoryTarget(trusted=False)
    async with (
        serve_calls(registry, target, resolve=CALLERS.get, **options),
        PendingRequestMap(target) as calls,
    ):
        with time_limit(20):
            yield Worker(calls, started, release)


async def at_worker(served: Worker, operation: str, value: Any, key: str | None) -> str:
    try:
        await served.calls.call(operation, value, credential=key)
    except CallError as error:
        if "CANARY" in str(error):
            return f"leaked {error}"
        # A denied call is never sent again.
        is_final = error.code == "RESOURCE_EXHAUSTED" or not error.retryable
        return error.code if is_final else f"retryable {error.code}"
    return "fine"


@pytest.mark.requirement("R07", "R54")
@pytest.mark.parametrize(("operation", "key", "outcome"), ACCESS)
async def test_access_at_a_worker(operation: str, key: str | None, outcome: str) -> None:
    if operation == "test.hidden":
        # Callers behind a broker get ACCESS_DENIED.
        outcome = "ACCESS_DENIED"
    elif outcome == "OPERATION_NOT_FOUND":
        # Another worker of the group may have it, while a new version is deployed.
        outcome = "retryable OPERATION_NOT_FOUND"
    async with worker() as served:
        assert await at_worker(served, operation, {}, key) == outcome


@pytest.mark.requirement("R54", "R60")
async def test_wrong_credentials_at_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.front.credentials.DELAY_SECONDS", 0.01)
    async with worker(per_principal=1) as served:
        outcomes = [await at_worker(served, "test.open", {}, f"{n}") for n in range(22)]
        assert await at_worker(served, "test.advertised", {}, "ann") == "fine"

    assert outcomes == ["ACCESS_DENIED"] * 20 + ["RESOURCE_EXHAUSTED"] * 2


@pytest.mark.requirement("R39", "R54")
async def test_concurrent_calls_are_limited_at_a_worker() -> None:
    async with worker(per_principal=2) as served:
        waiting = [asyncio.create_task(at_worker(served, "test.wait", {}, "ann")) for _ in range(2)]
        for _ in waiting:
            await served.started.get()
        assert await at_worker(served, "test.open", {}, "ann") == "RESOURCE_EXHAUSTED"
        assert await at_worker(served, "test.open", {}, "bob") == "fine"
        served.release.set()
        assert await asyncio.gather(*waiting) == ["fine", "fine"]


@pytest.mark.requirement("R39", "R54")
@pytest.mark.parametrize("key", ["ann", None])
async def test_the_rate_is_limited_at_a_worker(key: str | None) -> None:
    async with worker(limits=Limits(rate_per_caller=0.001, burst=3)) as served:
        outcomes = [await at_worker(served, "test.open", {}, key) for _ in range(5)]
        assert await at_worker(served, "test.open", {}, "bob") == "fine"

    assert outcomes == ["fine"] * 3 + ["RESOURCE_EXHAUSTED"] * 2


@pytest.mark.requirement("R55", "R54")
@pytest.mark.parametrize(("limits", "value", "outcome"), SIZES.values(), ids=SIZES)
async def test_sizes_are_limited_at_a_worker(limits: Limits, value: Any, outcome: str) -> None:
    target = MemoryTarget(trusted=False, max_values=limits.values, max_bytes=limits.body_bytes)
    async with worker(target) as served:
        assert await at_worker(served, "test.open", {"value": value}, None) == outcome
        assert await at_worker(served, "test.open", {"value": 1}, None) == "fine"


@pytest.mark.requirement("R55", "R54")
@pytest.mark.parametrize(
    ("value", "outcome"),
    [(VALUES, "RESOURCE_EXHAUSTED"), (DEEP, "VALIDATION_ERROR"), (1, "fine")],
    ids=["values", "depth", "fine"],
)
async def test_a_worker_validates_input_that_a_caller_did_not(value: Any, outcome: str) -> None:
    payload = {"requestId": "1", "operationId": "test.open", "input": {"value": value}}
    body = msgspec.json.encode({"type": "call.requested", "id": "", "payload": payload})
    target = MemoryTarget(trusted=False)
    replies = asyncio.Queue[bytes]()

    class Receiver(SilentReceiver):
        def receive(self, delivery: Delivery) -> None:
            replies.put_nowait(delivery.body)

    async with worker(target):
        mailbox = target.mailbox()
        listening = await target.listen((mailbox,), Receiver())
        await target.enqueue("operations", body, key="1", reply_to=mailbox, wait=1)
        reply = msgspec.json.decode(await replies.get())
        await listening.aclose()

    assert reply["payload"].get("code", "fine") == outcome
