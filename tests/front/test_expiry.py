"""Sessions, streams and sockets end when their credential expires or is revoked."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from time import time
from typing import Any

import aiohttp
import pytest
from starlette.requests import HTTPConnection
from tests.limits import time_limit
from tests.mcp_opening import INITIALIZE, MCP_HEADERS
from tests.mcp_serving.test_http import post

from operations import CallError, Identity, OperationContext, OperationRegistry
from operations.authority import Grants, grants
from operations.calls import PendingRequestMap, serve_calls
from operations.calls.socket import WebSocketHub
from operations.contract.events import CallStarted
from operations.front.credentials import RECHECK_SECONDS, Credential, CredentialMonitor
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.websocket import connect_websocket
from operations.server import CredentialError, create_app
from operations.server.http11.running import running

KEY = {"x-api-key": "key"}


@pytest.fixture(autouse=True)
def _recheck_often(monkeypatch: pytest.MonkeyPatch) -> None:
    # A check is due after this time, and made within a third of it.
    assert RECHECK_SECONDS * 4 / 3 < 5
    monkeypatch.setattr("operations.front.credentials.RECHECK_SECONDS", 0.3)
    # No test passes because a check that hangs is given up.
    monkeypatch.setattr("operations.front.credentials._CHECK_SECONDS", 60)


class Keys:
    """A resolver whose only key can be revoked."""

    def __init__(self) -> None:
        self.is_valid = True
        self.is_down = False
        self.expires_at: float | None = None
        self.scopes = ["run"]
        self.resources: dict[str, list[str]] = {"project:7": ["edit"]}
        self.rejection: Exception = CredentialError("a revoked key")

    def __call__(self, connection: HTTPConnection) -> Identity | None:
        if "x-api-key" not in connection.headers:
            return None
        if self.is_down:
            raise ConnectionError("the directory is down")
        if not self.is_valid:
            raise self.rejection
        return Identity("ann", self.scopes, self.resources, expires_at=self.expires_at)


def following() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("test.run", scopes=["run"])
    async def run() -> str:
        return "fine"

    @registry.operation("test.wait", scopes=["run"])
    async def wait() -> None:
        await asyncio.Event().wait()

    @registry.operation("test.follow", scopes=["run"])
    async def follow() -> AsyncGenerator[int]:
        yield 1
        await asyncio.Event().wait()

    return registry


@asynccontextmanager
async def serving(
    keys: Keys, heartbeat: float = 15
) -> AsyncGenerator[tuple[str, aiohttp.ClientSession]]:
    registry = following()
    app = create_app(
        registry,
        identity=keys,
        mcp=True,
        websocket=True,
        scopes_supported=["run"],
        heartbeat=heartbeat,
    )
    peers = WebSocketHub(registry)
    with time_limit(20):
        async with (
            running(app) as url,
            peers.serve(identify=keys) as server,
            aiohttp.ClientSession() as session,
        ):
            session.headers["hub"] = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield url, session


def revoke(keys: Keys) -> None:
    keys.is_valid = False


def remove(keys: Keys) -> None:
    """Revoke all keys by removing their file."""
    keys.is_valid = False
    keys.rejection = FileNotFoundError("keys.json")


def expire(keys: Keys) -> None:
    """Nothing to do: the credential expires by itself."""


ENDINGS = pytest.mark.parametrize(
    ("end", "seconds"),
    [(revoke, None), (remove, None), (expire, 2)],
    ids=["revoked", "removed", "expired"],
)


def lose_scope(keys: Keys) -> None:
    keys.scopes = []


def lose_resource(keys: Keys) -> None:
    keys.resources = {"project:7": []}


@pytest.mark.parametrize("end", [lose_scope, lose_resource])
async def test_streams_sessions_and_sockets_end_if_their_caller_loses_access(end: Any) -> None:
    keys = Keys()
    async with serving(keys) as (url, session):
        async with session.post(f"{url}/session", headers=KEY) as response:
            headers = {"cookie": response.headers["set-cookie"].partition(";")[0]}
        async with (
            session.get(f"{url}/test/follow", headers=KEY) as stream,
            connect_websocket(url.replace("http", "ws") + "/ws", headers=KEY) as target,
            PendingRequestMap(target) as calls,
        ):
            assert (await stream.content.readuntil(b"\n\n")) == b"data: 1\n\n"
            items = calls.subscribe("test.follow", {})
            assert (await anext(items)).data == 1
            # A caller that gains access keeps what it has opened.
            keys.scopes, keys.resources = ["run", "more"], {"project:7": ["edit", "read"]}
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.content.read(1), 0.5)
            end(keys)
            assert b"ACCESS_DENIED" in await stream.content.read()
            with pytest.raises(CallError) as caught:
                await anext(items)
            assert caught.value.code == "ACCESS_DENIED"
        async with session.post(f"{url}/test/run", headers=headers) as response:
            assert response.status == 401


async def test_a_stream_that_was_opened_with_more_access_ends_when_the_caller_loses_it() -> None:
    held, ended = ["run"], asyncio.Event()

    def credential() -> Credential:
        return Credential(Identity("ann", held), lambda: Identity("ann", held), "ann")

    monitor = CredentialMonitor()
    with monitor.watching(credential(), lambda: None):
        held = ["run", "admin"]
        with monitor.watching(credential(), ended.set), time_limit(20):
            held = ["run"]
            await ended.wait()


def keys_for(seconds: float | None) -> Keys:
    keys = Keys()
    keys.expires_at = None if seconds is None else (time() + seconds) * 1000
    return keys


@pytest.mark.requirement("R57")
@ENDINGS
async def test_a_stream_ends_with_an_error(end: Any, seconds: float | None) -> None:
    keys = keys_for(seconds)
    async with (
        serving(keys) as (url, session),
        session.get(f"{url}/test/follow", headers=KEY) as response,
    ):
        assert (await response.content.readuntil(b"\n\n")) == b"data: 1\n\n"
        end(keys)
        with time_limit(20):
            rest = await response.content.read()

    assert b"event: error" in rest
    assert b"ACCESS_DENIED" in rest


@pytest.mark.requirement("R57")
@ENDINGS
async def test_a_cookie_expires(end: Any, seconds: float | None) -> None:
    keys = keys_for(seconds)
    async with serving(keys) as (url, session):
        async with session.post(f"{url}/session", headers=KEY) as response:
            cookie = response.headers["set-cookie"].partition(";")[0]
        headers = {"cookie": cookie}
        async with session.post(f"{url}/test/run", headers=headers) as response:
            assert response.status == 200
        end(keys)
        with time_limit(20):
            while True:
                async with session.post(f"{url}/test/run", headers=headers) as response:
                    if response.status != 200:
                        break
                await asyncio.sleep(0.1)

        assert response.status == 401
        assert "Max-Age=0" in response.headers["set-cookie"]


@pytest.mark.requirement("R57")
@ENDINGS
@pytest.mark.parametrize("kind", ["app", "hub"])
async def test_a_socket_is_closed_at_shutdown(end: Any, seconds: float | None, kind: str) -> None:
    keys = keys_for(seconds)
    async with serving(keys) as (url, session):
        address = url.replace("http", "ws") + "/ws" if kind == "app" else session.headers["hub"]
        async with (
            connect_websocket(address, headers=KEY) as target,
            PendingRequestMap(target) as calls,
        ):
            assert (await calls.call("test.run", {})).data == "fine"
            end(keys)
            with time_limit(20), pytest.raises(CallError) as caught:
                async for _item in calls.subscribe("test.follow", {}):
                    pass

    assert kind == "hub" or caught.value.code == "ACCESS_DENIED"


@pytest.mark.requirement("R57")
async def test_what_was_opened_without_a_credential_ends_once_every_caller_needs_one() -> None:
    registry = OperationRegistry()

    @registry.operation("test.follow")
    async def follow() -> AsyncGenerator[int]:
        yield 1
        await asyncio.Event().wait()

    app = create_app(registry, identity=Keys(), mcp=True, websocket=True)
    with time_limit(30):
        async with running(app) as url, aiohttp.ClientSession() as session:
            async with session.post(f"{url}/mcp", json=INITIALIZE, headers=MCP_HEADERS) as opened:
                session_id = opened.headers["mcp-session-id"]
            listening = {**MCP_HEADERS, "mcp-session-id": session_id}
            async with (
                session.get(f"{url}/mcp", headers=listening) as messages,
                session.get(f"{url}/test/follow") as stream,
                connect_websocket(url.replace("http", "ws") + "/ws") as target,
                PendingRequestMap(target) as calls,
            ):
                assert await stream.content.readuntil(b"\n\n") == b"data: 1\n\n"
                assert await messages.content.readuntil(b"\n\n") == b": open\n\n"
                items = calls.subscribe("test.follow", {})
                assert (await anext(items)).data == 1
                app.state.pipeline.front.credentials.admit_anonymous(is_admitted=False)
                assert b'"code":"ACCESS_DENIED"' in await stream.content.read()
                assert await messages.content.read() == b""
                with pytest.raises(CallError) as caught:
                    await anext(items)

    assert caught.value.code == "ACCESS_DENIED"


@pytest.mark.requirement("R57")
async def test_a_subscription_of_an_unknown_peer_ends_once_every_caller_needs_a_credential() -> (
    None
):
    registry = OperationRegistry()

    @registry.operation("test.follow")
    async def follow() -> AsyncGenerator[int]:
        yield 1
        await asyncio.Event().wait()

    hub = WebSocketHub(registry)
    with time_limit(30):
        async with hub.serve() as server:
            port = server.sockets[0].getsockname()[1]
            async with (
                connect_websocket(f"ws://127.0.0.1:{port}") as target,
                PendingRequestMap(target) as calls,
            ):
                items = calls.subscribe("test.follow", {})
                assert (await anext(items)).data == 1
                hub.front.credentials.admit_anonymous(is_admitted=False)
                with pytest.raises(CallError) as caught:
                    await anext(items)

    assert caught.value.code == "ACCESS_DENIED"


@pytest.mark.requirement("R57")
async def test_a_half_sent_request_opens_no_stream_once_every_caller_needs_a_credential() -> None:
    registry, asked, changed = OperationRegistry(), asyncio.Event(), asyncio.Event()

    @registry.operation("test.follow")
    async def follow() -> AsyncGenerator[int]:
        yield 1
        await asyncio.Event().wait()

    def identify(_: object) -> None:
        asked.set()

    async def body() -> AsyncGenerator[bytes]:
        yield b"{"
        await changed.wait()
        yield b"}"

    app = create_app(registry, identity=identify)
    headers = {"content-type": "application/json"}
    with time_limit(30):
        async with running(app) as url, aiohttp.ClientSession() as session:
            post = session.post(f"{url}/test/follow", data=body(), headers=headers)
            posted = asyncio.ensure_future(post.__aenter__())
            await asked.wait()
            app.state.pipeline.front.credentials.admit_anonymous(is_admitted=False)
            changed.set()
            async with await posted as stream:
                assert b'"code":"ACCESS_DENIED"' in await stream.content.read()


@pytest.mark.requirement("R57")
async def test_a_call_on_a_socket_ends_in_the_grace_period_of_a_shutdown() -> None:
    keys, registry, begun = Keys(), following(), asyncio.Event()
    registry.observe(lambda event: begun.set() if isinstance(event, CallStarted) else None)
    app = create_app(registry, identity=keys, websocket=True, scopes_supported=["run"])
    with time_limit(30):
        async with (
            running(app) as url,
            connect_websocket(url.replace("http", "ws") + "/ws", headers=KEY) as target,
            PendingRequestMap(target) as calls,
        ):
            call = asyncio.create_task(calls.call("test.wait", {}, timeout=60))
            await begun.wait()
            app.state.pipeline.front.open_streams.close(60)
            revoke(keys)
            with pytest.raises(CallError) as caught:
                await call

    assert caught.value.code == "ACCESS_DENIED"


@pytest.mark.requirement("R57")
@ENDINGS
async def test_a_subscription_through_a_worker_ends(end: Any, seconds: float | None) -> None:
    keys = keys_for(seconds)
    target = MemoryTarget()

    def resolve(credential: str) -> Identity | None:
        if not keys.is_valid:
            raise keys.rejection
        return Identity("ann", ["run"], expires_at=keys.expires_at)

    with time_limit(20):
        async with (
            serve_calls(following(), target, resolve=resolve),
            PendingRequestMap(target, credential="key") as calls,
        ):
            items = calls.subscribe("test.follow", {})
            assert (await anext(items)).data == 1
            end(keys)
            with pytest.raises(CallError) as caught:
                await anext(items)

    assert caught.value.code == "ACCESS_DENIED"


@pytest.mark.requirement("R57")
@ENDINGS
async def test_the_stream_of_an_mcp_session_ends(end: Any, seconds: float | None) -> None:
    keys = keys_for(seconds)
    async with serving(keys) as (url, session):
        headers = {**KEY, **MCP_HEADERS}
        async with session.post(f"{url}/mcp", json=INITIALIZE, headers=headers) as response:
            headers["mcp-session-id"] = response.headers["mcp-session-id"]
        async with session.get(f"{url}/mcp", headers=headers) as response:
            assert response.status == 200
            end(keys)
            with time_limit(20):
                await response.content.read()
        async with session.post(f"{url}/mcp", json=INITIALIZE, headers=headers) as response:
            assert response.status == 401


@pytest.mark.requirement("R57")
@ENDINGS
async def test_a_long_mcp_call_ends(end: Any, seconds: float | None) -> None:
    keys = keys_for(seconds)
    request = post("tools/call", {"name": "test__wait"})
    request["headers"] |= KEY
    async with (
        serving(keys, heartbeat=0.02) as (url, session),
        session.post(f"{url}/mcp", **request) as response,
    ):
        assert response.content_type == "text/event-stream"
        end(keys)
        rest = await response.content.read()

    assert b"data:" not in rest


@pytest.mark.requirement("R57")
async def test_an_unavailable_identity_directory_ends_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operations.front.credentials.RECHECK_SECONDS", 0.1)
    keys = Keys()
    async with (
        serving(keys) as (url, session),
        session.get(f"{url}/test/follow", headers=KEY) as response,
    ):
        await response.content.readuntil(b"\n\n")
        keys.is_down = True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(response.content.read(1), 0.5)


async def test_a_stream_outlives_the_grant_with_which_a_hub_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operations.front.credentials.RECHECK_SECONDS", 0.1)
    monkeypatch.setattr(grants, "_DELEGATED_MS", 1000)
    root = Grants(b"k" * 32)
    at_worker = Grants(root.for_name("workers"))
    worker, target = OperationRegistry(), MemoryTarget()

    @worker.operation("far.tick", scopes=["run"])
    async def tick(context: OperationContext) -> AsyncIterator[bool]:
        yield False
        assert context.identity is not None
        # Long enough for several checks.
        await asyncio.sleep((context.identity.expires_at or 0) / 1000 - time() + 0.1)
        yield True

    async with (
        serve_calls(worker, target, group="workers", resolve=at_worker.resolve),
        PendingRequestMap(target, group="workers", delegate=root.delegate("workers")) as calls,
    ):
        caller = OperationContext(identity=Identity("ann", ["run"]))
        with time_limit(20):
            items = [item.data async for item in calls.subscribe("far.tick", {}, context=caller)]

    assert items == [False, True]


async def never() -> Identity:
    await asyncio.Event().wait()
    return Identity("slow")


async def cancelled() -> Identity:
    raise asyncio.CancelledError


@pytest.mark.parametrize("check", [never, cancelled])
async def test_a_check_that_fails_does_not_keep_the_stream_of_another_caller_open(
    check: Any,
) -> None:
    async def revoked() -> Identity:
        raise CredentialError("a revoked key")

    monitor, ended = CredentialMonitor(), asyncio.Event()
    with (
        monitor.watching(Credential(Identity("slow"), check, "slow"), lambda: None),
        monitor.watching(Credential(Identity("ann"), revoked, "ann"), ended.set),
        time_limit(20),
    ):
        await ended.wait()


async def test_a_stream_with_a_grant_ends_if_the_store_does_not_respond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operations.front.credentials._CHECK_SECONDS", 0.1)
    root = Grants(b"k" * 32)
    identity = await root.resolve(root.create(Identity("ann"), "bot", operations=["*"]))
    assert identity is not None
    monitor, ended = CredentialMonitor(), asyncio.Event()
    with monitor.watching(Credential(identity, never, "grant"), ended.set), time_limit(20):
        await ended.wait()


async def test_a_stream_opened_while_its_credential_is_checked_ends_as_well() -> None:
    asked, answered, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def revoked() -> Identity:
        asked.set()
        await answered.wait()
        raise CredentialError("a revoked key")

    def credential() -> Credential:
        return Credential(Identity("ann"), revoked, "ann")

    monitor = CredentialMonitor()
    with monitor.watching(Credential(Identity("bob"), never, "bob"), lambda: None):
        with monitor.watching(credential(), lambda: None), time_limit(20):
            await asked.wait()
        with monitor.watching(credential(), ended.set), time_limit(20):
            answered.set()
            await ended.wait()
