"""The address of a server, and its shutdown."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mcp import Client as MCPClient
from mcp.client.subscriptions import SubscriptionLost
from mcp.client.subscriptions import listen as listen_for
from tests.limits import time_limit
from tests.mcp_opening import INITIALIZE, MCP_HEADERS

from operations import CallError, ErrorCode, OperationRegistry, ResponseEnvelope
from operations.calls import PendingRequestMap
from operations.front.config import ListenConfig, MCPServerSettings
from operations.mcp import to_mcp
from operations.pubsub.websocket import connect_websocket
from operations.server import APIKeys, create_app
from operations.server.http11 import running as running_module
from operations.server.http11.running import (
    InsecureBindError,
    build_server,
    is_loopback,
    listen,
    running,
)


@pytest.mark.requirement("R22")
def test_the_server_listens_on_loopback_by_default(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(OperationRegistry())

    assert build_server(app).config.host == "127.0.0.1"
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org"):
        with pytest.raises(InsecureBindError, match="identity"):
            build_server(app, host=host)
    with caplog.at_level(logging.WARNING):
        build_server(app, host="0.0.0.0", public=True)
    assert "without authentication" in caplog.text
    build_server(create_app(OperationRegistry(), identity=APIKeys({})), host="0.0.0.0")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("localhost.evil.example", False)],
)  # fmt: skip
def test_loopback_addresses_are_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


async def test_resources_live_as_long_as_the_server_and_calls_may_finish() -> None:
    registry, steps = OperationRegistry(), list[str]()
    began, release = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def resource() -> AsyncGenerator[None]:
        steps.append("opened")
        yield
        steps.append("closed")

    @registry.operation("test.run")
    async def run() -> str:
        began.set()
        await release.wait()
        return "finished"

    with time_limit(20):
        async with aiohttp.ClientSession() as session:
            async with running(create_app(registry, resources=[resource()])) as url:
                assert steps == ["opened"]
                call = asyncio.create_task(session.post(f"{url}/test/run"))
                await began.wait()
                asyncio.get_running_loop().call_later(0.1, release.set)
            response = await call
            assert await response.json() == "finished"
    assert steps == ["opened", "closed"]


async def test_streams_without_a_call_do_not_delay_a_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients of MCP keep a stream open for notifications, however long they are idle."""
    monkeypatch.setattr(running_module, "GRACE", 60)
    app, lost = create_app(OperationRegistry(), mcp=True), asyncio.Event()

    async def follow(url: str, is_open: asyncio.Event) -> None:
        async with MCPClient(f"{url}/mcp") as client:
            with suppress(SubscriptionLost):
                async with listen_for(client.session, tools_list_changed=True) as changes:
                    is_open.set()
                    async for _ in changes:
                        pass
            lost.set()

    with time_limit(40):
        async with aiohttp.ClientSession(headers=MCP_HEADERS) as client:
            async with running(app) as url:
                async with client.post(f"{url}/mcp", json=INITIALIZE) as response:
                    session = {"Mcp-Session-Id": response.headers["Mcp-Session-Id"]}
                old = await client.get(f"{url}/mcp", headers=session)
                assert await old.content.readline() == b": open\n"
                is_open = asyncio.Event()
                following = asyncio.create_task(follow(url, is_open))
                await is_open.wait()
            # The stream ended as HTTP requires; aiohttp would raise an error for one that was cut.
            assert await old.content.read() == b"\n"
            await lost.wait()
            following.cancel()
            await asyncio.wait({following})


async def test_a_subscription_that_outlives_the_grace_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_module, "GRACE", 0.2)
    with time_limit(20):
        async with aiohttp.ClientSession() as client:
            async with running(create_app(_watched())) as url:
                response = await client.post(f"{url}/test/watch")
                assert await response.content.readline() == b"data: 1\n"
            assert b'event: error\ndata: {"code":"UNAVAILABLE"' in await response.content.read()


async def test_a_subscription_that_can_be_resumed_does_not_delay_a_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_module, "GRACE", 60)
    with time_limit(20):
        async with aiohttp.ClientSession() as client:
            async with running(create_app(_watched(meta={"resume": {"id": ""}}))) as url:
                response = await client.get(f"{url}/test/watch")
                assert await response.content.readline() == b"id: 1\n"
            events = await response.content.read()

    assert b'event: error\ndata: {"code":"UNAVAILABLE"' in events
    assert b'"retryable":true' in events


async def test_a_server_with_its_own_loop_shuts_down_as_gracefully(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_module, "GRACE", 0.2)
    server = build_server(create_app(_watched()))

    with time_limit(20), listen(ListenConfig()) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with aiohttp.ClientSession() as client:
            serving = asyncio.create_task(server.serve([listener]))
            response = await client.post(f"{url}/test/watch")
            assert await response.content.readline() == b"data: 1\n"
            server.should_exit = True
            assert b'event: error\ndata: {"code":"UNAVAILABLE"' in await response.content.read()
            await serving


@pytest.mark.requirement("R38")
@pytest.mark.parametrize("kind", ["mutation", "query"])
@pytest.mark.parametrize("path", ["/test/run", "/call", "/mcp"])
async def test_f25_a_call_over_http_that_outlives_the_grace_ends_with_an_error(
    path: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_module, "GRACE", 0.2)
    registry, began = OperationRegistry(), asyncio.Event()

    @registry.operation("test.run", type=kind)
    async def run() -> None:
        began.set()
        await asyncio.Event().wait()

    bodies: dict[str, Any] = {
        "/test/run": {},
        "/call": {"operation": "test.run", "input": {}},
        "/mcp": {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": "test__run"},
        },
    }
    app = create_app(registry, mcp=MCPServerSettings(stateless=True))
    with time_limit(20):
        async with aiohttp.ClientSession(headers=MCP_HEADERS) as client:
            async with running(app) as url:
                call = asyncio.create_task(client.post(url + path, json=bodies[path]))
                await began.wait()
            response = await call
            failed = await response.json()

    assert response.status == 503
    assert failed["code"] == ErrorCode.UNAVAILABLE
    # The operation of an MCP request is not known there.
    assert failed.get("retryable", False) is (kind == "query" and path != "/mcp")


def _watched(**options: Any) -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("test.watch", **options)
    async def watch() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    return registry


@asynccontextmanager
async def _call_over_websocket(
    began: asyncio.Event, release: asyncio.Event
) -> AsyncGenerator[tuple[PendingRequestMap, "asyncio.Task[ResponseEnvelope[Any]]"]]:
    """Call over a WebSocket; at the end of the block, shut the server down while the call runs."""
    registry = OperationRegistry()

    @registry.operation("test.run")
    async def run() -> str:
        began.set()
        await release.wait()
        return "finished"

    async with AsyncExitStack() as stack, running(create_app(registry, websocket=True)) as url:
        link = connect_websocket(f"{url.replace('http', 'ws')}/ws")
        # An idle connection must not delay the shutdown.
        await stack.enter_async_context(connect_websocket(f"{url.replace('http', 'ws')}/ws"))
        calls = PendingRequestMap(await stack.enter_async_context(link))
        await stack.enter_async_context(calls)
        call = asyncio.create_task(calls.call("test.run"))
        await began.wait()
        yield calls, call


@pytest.mark.requirement("R38")
async def test_a_call_over_a_websocket_may_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_module, "GRACE", 60)
    began, release = asyncio.Event(), asyncio.Event()

    async def call_again(calls: PendingRequestMap) -> CallError:
        try:
            while True:
                await calls.call("services.list")
        except CallError as error:
            return error
        finally:
            release.set()

    with time_limit(40):
        async with _call_over_websocket(began, release) as (calls, call):
            refused = asyncio.create_task(call_again(calls))
        assert (await call).data == "finished"
        error = await refused

    assert (error.code, error.retryable, error.begun) == (ErrorCode.UNAVAILABLE, True, False)


@pytest.mark.requirement("R38")
async def test_a_call_over_a_websocket_that_outlives_the_grace_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_module, "GRACE", 0.2)
    with time_limit(20), pytest.raises(CallError, match="the worker stops") as caught:
        async with _call_over_websocket(asyncio.Event(), asyncio.Event()) as (_, call):
            pass
        await call

    assert caught.value.code == ErrorCode.UNAVAILABLE


@pytest.mark.requirement("R62")
async def test_a_server_that_shuts_down_answers_probes_until_its_calls_are_finished() -> None:
    registry, stop = OperationRegistry(), asyncio.Event()
    began, release = asyncio.Event(), asyncio.Event()

    @registry.operation("test.run")
    async def run() -> str:
        began.set()
        await release.wait()
        return "finished"

    @registry.operation("test.watch")
    async def watch() -> AsyncGenerator[str]:
        yield "began"
        asyncio.get_running_loop().call_later(0.3, end.set)
        release.set()
        await end.wait()
        yield "finished"

    end = asyncio.Event()
    app, found = create_app(registry), asyncio.get_running_loop().create_future()

    async def serve() -> None:
        async with running(app) as url:
            found.set_result(url)
            await stop.wait()

    async def call(method: str, path: str) -> tuple[int, object]:
        # Probes come on connections of their own.
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{await found}{path}") as response,
        ):
            return response.status, await response.json()

    with time_limit(20):
        serving = asyncio.create_task(serve())
        under_way = asyncio.create_task(call("POST", "/test/run"))
        await began.wait()
        assert await call("GET", "/readyz") == (200, {"status": "ok"})
        stop.set()
        while await call("GET", "/readyz") != (503, {"status": "unavailable"}):
            pass
        assert (await call("GET", "/healthz"))[0] == 200
        # A load balancer may not have noticed yet.
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{await found}/test/watch") as late,
        ):
            assert b"event: complete" in await late.read()
        assert await under_way == (200, "finished")
        await serving


async def test_a_taken_port_is_reported() -> None:
    app = create_app(OperationRegistry())

    async with running(app) as url:
        with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
            async with running(app, port=int(url.rpartition(":")[2])):
                pass


async def test_the_server_does_not_name_itself() -> None:
    async with (
        running(create_app(OperationRegistry())) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/healthz") as response,
    ):
        assert "server" not in response.headers


def test_an_mcp_server_in_place_of_its_settings_is_rejected_at_once() -> None:
    registry = OperationRegistry()
    with pytest.raises(TypeError, match="MCPServerSettings"):
        create_app(registry, mcp=to_mcp(registry, disclosure="gateway"))  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["websocket", "console"])
def test_an_application_in_place_of_a_boolean_is_rejected_at_once(option: str) -> None:
    options: Any = {option: create_app(OperationRegistry())}
    with pytest.raises(TypeError, match=f"{option} must be bool, not _App"):
        create_app(OperationRegistry(), **options)


@pytest.mark.parametrize("option", ["heartbeat", "timeout"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_times_that_are_not_positive_are_rejected(option: str, seconds: float) -> None:
    """A stream with a heartbeat of 0 would send comments without a pause."""
    options: Any = {option: seconds}
    for build in (create_app, to_mcp):
        with pytest.raises(ValueError, match=f"{option} is a positive number"):
            build(OperationRegistry(), **options)


async def test_small_responses_are_sent_without_delay() -> None:
    async with accepted_socket() as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.requirement("R35")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other options")
async def test_a_server_notices_lost_hosts_of_clients() -> None:
    async with accepted_socket() as accepted:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        option = partial(accepted.getsockopt, socket.IPPROTO_TCP)
        packets, interval = option(socket.TCP_KEEPCNT), option(socket.TCP_KEEPINTVL)
        assert option(socket.TCP_KEEPIDLE) + packets * interval <= 20
        assert option(socket.TCP_USER_TIMEOUT) == 30_000


@asynccontextmanager
async def accepted_socket() -> AsyncGenerator[socket.socket]:
    """Yield the server's socket of a connection that has served a request."""
    async with running(create_app(OperationRegistry())) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        try:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            with _peer_of(writer.get_extra_info("sockname")) as accepted:
                yield accepted
        finally:
            writer.close()


def _peer_of(address: tuple[str, int]) -> socket.socket:
    """Return a copy of the socket in this process that is connected to `address`."""
    for entry in Path("/proc/self/fd").iterdir():
        if not entry.is_socket():
            continue
        with ExitStack() as cleanup, suppress(OSError):
            found = cleanup.enter_context(socket.socket(fileno=os.dup(int(entry.name))))
            if found.family == socket.AF_INET and found.getpeername() == address:
                cleanup.pop_all()
                return found
    raise AssertionError(f"no socket is connected to {address}")


async def test_an_unused_connection_is_closed_after_the_time_in_the_config() -> None:
    with time_limit(30):
        async with running(create_app(OperationRegistry()), keep_alive=1) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"connection: close" not in await reader.read()
            writer.close()


_LIMITED = """
import asyncio, logging, resource
from operations import OperationRegistry
from operations.server import create_app
from operations.server.http11.running import running

async def main():
    async with running(create_app(OperationRegistry())) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
logging.basicConfig()
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no limit of open files")
async def test_a_server_at_its_limit_of_open_files_warns_once_and_recovers() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _LIMITED), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with time_limit(50):
            url = (await process.stdout.readline()).decode().strip()
            port = int(url.rpartition(":")[2])
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
            warning = await process.stderr.readline()
            for _, writer in opened:
                writer.close()
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{url}/healthz") as response,
            ):
                assert response.status == 200
    finally:
        process.kill()
        _, rest = await process.communicate()

    assert b"WARNING:asyncio:connections wait, because they cannot be accepted" in warning
    assert b"Too many open files" in warning
    assert b"accept" not in rest
