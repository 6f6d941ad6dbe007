"""Deadlines: the time of responses, and the end of the work."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import aiohttp
import pytest
import uvloop
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tests.limits import scaled, time_limit
from tests.mcp_serving.support import MODERN_META, modern_headers

from operations import OperationContext, OperationRegistry
from operations.front.timing import RequestTimeout
from operations.server import Limits, create_app
from operations.server.http11.running import running

Serving = tuple[str, aiohttp.ClientSession]


@asynccontextmanager
async def serving(registry: OperationRegistry, **options: Any) -> AsyncGenerator[Serving]:
    app = create_app(registry, **options)
    with time_limit(20):
        async with running(app) as url, aiohttp.ClientSession() as session:
            yield url, session


async def wait_for(is_so: Callable[[], bool]) -> None:
    with time_limit(20):
        while not is_so():
            await asyncio.sleep(0.005)


@pytest.mark.requirement("R12")
async def test_a_call_that_ignores_cancellation_is_answered_in_time() -> None:
    registry = OperationRegistry()
    release = asyncio.Event()
    ended: list[int] = []

    @registry.operation("test.stubborn")
    async def stubborn() -> int:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        ended.append(1)
        return 7

    @registry.operation("test.quick")
    async def quick() -> int:
        return 8

    soon = {"Operations-Timeout": "100"}
    async with serving(registry) as (url, session):
        # The second request goes over the same connection: the late result must not delay it.
        async with session.post(f"{url}/test/stubborn", headers=soon) as response:
            assert (response.status, (await response.json())["code"]) == (504, "TIMEOUT")
        assert ended == []
        async with session.post(f"{url}/test/quick") as response:
            assert await response.json() == 8
        release.set()
        await wait_for(lambda: ended == [1])
        async with session.post(f"{url}/test/quick") as response:
            assert await response.json() == 8


@pytest.mark.requirement("R12")
async def test_a_call_without_remaining_time_is_not_started() -> None:
    registry = OperationRegistry()
    ran: list[int] = []

    @registry.operation("test.run")
    async def run() -> None:
        ran.append(1)

    now = {"Operations-Timeout": "0"}
    async with (
        serving(registry) as (url, session),
        session.post(f"{url}/test/run", headers=now) as response,
    ):
        assert (response.status, ran) == (504, [])
        failure = await response.json()

    assert failure["message"] == "test.run was not started: its 0 s had run out"


@pytest.mark.requirement("R12")
async def test_nested_calls_end_with_the_time_of_the_call_they_are_part_of() -> None:
    registry = OperationRegistry()
    outcomes: list[str] = []

    @registry.operation("test.inner")
    async def inner() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            outcomes.append("inner ended")

    @registry.operation("test.outer")
    async def outer(context: OperationContext) -> None:
        await context.env.test.inner()

    async with serving(registry, timeout=1) as (url, session):
        async with session.post(f"{url}/test/outer") as response:
            assert response.status == 504
            message = (await response.json())["message"]
            assert re.fullmatch(r"test\.outer did not finish within (1|0\.\d+) s", message)
        assert outcomes == ["inner ended"]
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()

    assert 'operations_calls_total{operation="test.outer",code="TIMEOUT"} 1' in text
    assert 'operations_calls_running{operation="test.outer"} 0' in text


async def test_a_batch_returns_the_results_of_calls_finished_in_time() -> None:
    registry = OperationRegistry()

    @registry.operation("test.slow")
    async def slow() -> None:
        await asyncio.Event().wait()

    @registry.operation("test.quick")
    async def quick() -> int:
        return 8

    calls = {"calls": [{"operation": "test.slow"}, {"operation": "test.quick"}]}
    async with (
        serving(registry, timeout=1) as (url, session),
        session.post(f"{url}/batch", json=calls) as response,
    ):
        slowly, quickly = (await response.json())["results"]

    assert slowly["error"]["code"] == "TIMEOUT"
    assert quickly["envelope"]["data"] == 8


async def test_a_result_after_cancellation_is_returned() -> None:
    registry = OperationRegistry()

    @registry.operation("test.partial")
    async def partial() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "half of it"
        raise AssertionError

    async with (
        serving(registry, timeout=1) as (url, session),
        session.post(f"{url}/test/partial") as response,
    ):
        assert (response.status, await response.json()) == (200, "half of it")


async def test_a_client_that_leaves_after_a_slow_body_is_detected() -> None:
    registry = OperationRegistry()
    seen: list[str] = []

    @registry.operation("test.wait")
    async def wait(text: str) -> None:
        seen.append(text)
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")

    async with serving(registry) as (url, _):
        port = int(url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /test/wait HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b'Content-Length: 12\r\n\r\n{"text"'
        )
        await writer.drain()
        # Longer than the interval after which the server checks the client, so that a second check is needed.
        await asyncio.sleep(0.1)
        writer.write(b':"x"}')
        await wait_for(lambda: seen == ["x"])
        writer.close()
        await wait_for(lambda: seen == ["x", "ended"])


async def test_the_time_limits_of_the_body_and_of_the_call_are_separate() -> None:
    registry = OperationRegistry()

    @registry.operation("test.run")
    async def run(text: str) -> str:
        return text

    limits = Limits(body_seconds=0.3)
    async with serving(registry, limits=limits) as (url, _):
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /test/run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: 12\r\n\r\n{")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408 ")
        assert await reader.read() != b""
        writer.close()


@pytest.mark.requirement("R12", "R31")
async def test_identifying_a_caller_ends_with_the_timeout_and_with_the_client() -> None:
    registry = OperationRegistry()
    inside = most = 0

    async def resolver(connection: HTTPConnection) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            await asyncio.Event().wait()
        finally:
            inside -= 1

    limits = Limits(calls=10, calls_per_caller=5)
    async with serving(registry, identity=resolver, limits=limits) as (url, session):
        soon = {"Operations-Timeout": "100"}
        async with session.get(f"{url}/operations", headers=soon) as response:
            assert (response.status, (await response.json())["code"]) == (504, "TIMEOUT")
        assert inside == 0
        port = int(url.rpartition(":")[2])
        writers: list[asyncio.StreamWriter] = []
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /operations HTTP/1.1\r\nHost: localhost\r\n\r\n")
            writers.append(writer)
        await wait_for(lambda: inside == 5)
        for writer in writers:
            writer.close()
        await wait_for(lambda: inside == 0)
    assert most == 5


@pytest.mark.requirement("R12", "R31")
async def test_a_socket_is_rejected_if_identifying_its_caller_takes_too_long() -> None:
    inside = most = 0

    async def resolver(connection: HTTPConnection) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            await asyncio.Event().wait()
        finally:
            inside -= 1

    options = {"identity": resolver, "timeout": 3, "websocket": True}
    limits = Limits(calls=10, calls_per_caller=5)
    async with serving(OperationRegistry(), limits=limits, **options) as (url, session):

        async def status() -> int:
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await session.ws_connect(f"{url}/ws")
            return caught.value.status

        statuses = await asyncio.gather(*(status() for _ in range(8)))
        assert sorted(statuses) == [429] * 3 + [504] * 5
    assert (inside, most) == (0, 5)


async def test_a_body_that_arrives_during_identification_is_read() -> None:
    registry = OperationRegistry()

    @registry.operation("test.run")
    async def run(text: str) -> int:
        return len(text)

    async def resolver(connection: HTTPConnection) -> None:
        # Longer than the interval after which the server checks whether the client is connected.
        await asyncio.sleep(0.2)

    async with serving(registry, identity=resolver) as (url, session):
        for size in (1, 300_000):
            async with session.post(f"{url}/test/run", json={"text": "x" * size}) as response:
                assert await response.json() == size


async def test_a_request_timeout_removes_only_its_own_cancellation() -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.current_task()
    assert task is not None
    watch = RequestTimeout()
    watch.start(0.01, never)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.Event().wait()
    assert (watch.timed_out, watch.disconnected, watch.stop()) == (True, False, False)
    assert task.cancelling() == 0

    watch = RequestTimeout()
    watch.start(0.01, never)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.Event().wait()
    task.cancel()
    assert watch.stop()
    assert task.cancelling() == 1
    # Since Python 3.13, uncancelling to zero also drops a cancellation that was not delivered yet.
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(0)
    assert task.uncancel() == 0


@pytest.mark.requirement("R12")
def test_a_request_timeout_that_is_due_at_once_can_be_started_again() -> None:
    async def restarted() -> bool:
        timeout = RequestTimeout()
        # The timer of uvloop for a time that has come is not a timer handle.
        timeout.start(0)
        timeout.start(60)
        await asyncio.sleep(0.01)
        timeout.stop()
        return timeout.timed_out

    assert not uvloop.run(restarted())


@pytest.mark.requirement("R12")
async def test_a_request_that_an_outer_application_cancels_ends_without_a_response() -> None:
    registry, sent = OperationRegistry(), list[Message]()
    started = asyncio.Event()

    @registry.operation("test.wait", type="query")
    async def wait() -> None:
        started.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    app = create_app(registry)
    scope: Scope = {
        "type": "http", "method": "GET", "path": "/test/wait", "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"operations-timeout", b"200")],
        "client": ("127.0.0.1", 1), "server": ("localhost", 80),
    }  # fmt: skip
    async with app.router.lifespan_context(app):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(scaled(10)) as outer:
                serving = asyncio.create_task(started.wait())
                serving.add_done_callback(lambda _: outer.reschedule(0))
                await app(scope, receive, send)
        # The time limit of the request must not cancel what its task does later.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.Event().wait()
    assert sent == []


@pytest.mark.requirement("R12")
async def test_a_time_limit_of_middleware_ends_a_request_as_its_own() -> None:
    """The middleware runs in the task that the server of this package created."""
    registry = OperationRegistry()
    started = asyncio.Event()
    raised: list[type[BaseException]] = []

    @registry.operation("test.wait", type="query")
    async def wait() -> None:
        started.set()
        await asyncio.Event().wait()

    class Limiting:
        def __init__(self, app: ASGIApp) -> None:
            self._app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await self._app(scope, receive, send)
                return
            try:
                async with asyncio.timeout(scaled(10)) as limit:
                    begun = asyncio.create_task(started.wait())
                    begun.add_done_callback(lambda _: limit.reschedule(0))
                    await self._app(scope, receive, send)
            except TimeoutError as error:
                raised.append(type(error))
                await PlainTextResponse("too slow", 503)(scope, receive, send)

    app = create_app(registry, mcp=True)
    app.add_middleware(Limiting)
    tool = {"name": "test__wait", "arguments": {}, "_meta": MODERN_META}
    with time_limit(20):
        async with running(app) as url, aiohttp.ClientSession() as session:
            async with session.get(f"{url}/test/wait") as response:
                called = response.status, await response.text()
            started.clear()
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": tool}
            headers = modern_headers("tools/call", "test__wait")
            async with session.post(f"{url}/mcp", json=message, headers=headers) as response:
                from_mcp = response.status, await response.text()

    assert called == from_mcp == (503, "too slow")
    assert raised == [TimeoutError] * 2


async def test_a_request_is_watched_in_its_own_context() -> None:
    """A middleware, such as that of OpenTelemetry, may read the context in `receive`."""
    current = ContextVar("current", default="")
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def receive() -> Message:
        await seen.put(current.get())
        return {"type": "http.disconnect"}

    async def request(name: str) -> None:
        current.set(name)
        timeout = RequestTimeout()
        timeout.start(30, receive)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        timeout.stop()

    with time_limit(5):
        await asyncio.gather(request("one"), request("two"))
    assert [seen.get_nowait() for _ in "12"] == ["one", "two"]
