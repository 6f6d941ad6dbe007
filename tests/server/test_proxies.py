"""Behind nginx and HAProxy with the settings of the recipes, callers get what the server sends, when it sends it."""

import asyncio
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from starlette.requests import HTTPConnection
from tests.hub.test_the_file_covers_the_product import make_certificate
from tests.limits import time_limit
from tests.server.sse import events_of
from tests.servers import BIN, free_port, wait_for_port

from operations import Identity, OperationContext, OperationRegistry
from operations.base.errors import TransportError
from operations.calls import PendingRequestMap
from operations.mcp import MCPClientConfig, connect_mcp
from operations.openapi import HTTPServiceConfig, from_openapi_url
from operations.pubsub.websocket import connect_websocket
from operations.server import create_app
from operations.server.http11.running import running

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "recipes"
NGINX = """
daemon off; user root; worker_processes 1; pid {folder}/pid; error_log stderr;
events {{ worker_connections 64; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  {more}
  {recipe}
}}
"""
COMPRESS = {
    "nginx": "gzip on; gzip_types *; gzip_proxied any; gzip_min_length 1;",
    "haproxy": "  compression algo gzip\n  compression type text/event-stream application/json\n",
}


def program(name: str) -> str | None:
    return shutil.which(name, path=BIN.parent / "debian") or shutil.which(name)


KINDS = [
    pytest.param(name, marks=pytest.mark.skipif(not program(name), reason=f"{name} is needed"))
    for name in COMPRESS
]
on_each = pytest.mark.parametrize("kind", KINDS)


@dataclass
class World:
    url: str
    trusting: ssl.SSLContext
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    addresses: list[str] = field(default_factory=list)


@contextmanager
def proxy(kind: str, recipe: str, folder: Path, port: int, more: str = "") -> Iterator[None]:
    """Run a proxy for the length of the block."""
    path = folder / "config"
    if kind == "nginx":
        path.write_text(NGINX.format(folder=folder, recipe=recipe, more=more))
    else:
        path.write_text(recipe + more)
    process = subprocess.Popen([str(program(kind)), "-c" if kind == "nginx" else "-f", str(path)])
    try:
        wait_for_port(port)
        yield
    finally:
        process.terminate()
        process.wait()


def certify(folder: Path) -> ssl.SSLContext:
    """Write the certificate of a proxy; return a context that trusts it."""
    make_certificate(folder)
    both = (folder / "server.pem").read_text() + (folder / "key.pem").read_text()
    (folder / "both.pem").write_text(both)
    return ssl.create_default_context(cafile=str(folder / "server.pem"))


@asynccontextmanager
async def behind(
    kind: str, folder: Path, more: str = "", *, idle: str = "60s", **options: Any
) -> AsyncGenerator[World]:
    """A server behind a proxy with the settings of its recipe."""
    trusting, port = certify(folder), free_port()
    world = World(f"https://127.0.0.1:{port}/hub", trusting)

    async def resolve(connection: HTTPConnection) -> Identity | None:
        world.addresses.append(connection.client.host if connection.client else "")
        return Identity("ann") if "x-api-key" in connection.headers else None

    options |= {"mcp": True, "websocket": True, "identity": resolve, "root_path": "/hub"}
    app = create_app(build_registry(world), **options)
    async with running(app, trusted_proxies=["127.0.0.1"], keep_alive=75) as url:
        recipe = recipe_of(kind, folder, port, url).replace(" 60s", f" {idle}")
        with proxy(kind, recipe, folder, port, more):
            yield world


def recipe_of(kind: str, folder: Path, port: int, *urls: str) -> str:
    """Return the recipe of a proxy at `port`, for one or more servers."""
    recipe = (RECIPES / ("nginx.conf" if kind == "nginx" else "haproxy.cfg")).read_text("utf-8")
    (server,) = re.findall(r"^ +server.* 127\.0\.0\.1:8000.*\n", recipe, re.MULTILINE)
    servers = (
        server.replace("127.0.0.1:8000", url.removeprefix("http://")).replace(" hub ", f" hub{n} ")
        for n, url in enumerate(urls)
    )
    for old, new in (
        (server, "".join(servers)),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("bind :443", f"bind 127.0.0.1:{port}"),
        ("/etc/ssl/hub.key", str(folder / "key.pem")),
        ("/etc/ssl/hub.pem", str(folder / "both.pem")),
    ):
        recipe = recipe.replace(old, new)
    return recipe


def build_registry(world: World) -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("test.size", type="query")
    async def size(text: str) -> int:
        return len(text)

    @registry.operation("test.watch")
    async def watch() -> AsyncIterator[int]:
        try:
            yield 1
            await world.go_on.wait()
            yield 2
        finally:
            world.stopped.set()

    @registry.operation("test.wait")
    async def wait() -> None:
        try:
            world.go_on.set()
            await asyncio.Event().wait()
        finally:
            world.stopped.set()

    @registry.operation("test.work")
    async def work(context: OperationContext) -> int:
        await context.progress(1, 2)
        await world.go_on.wait()
        return 2

    return registry


@on_each
async def test_calls_sockets_and_mcp_work_below_a_prefix(kind: str, tmp_path: Path) -> None:
    with time_limit(60):
        async with (
            behind(kind, tmp_path) as world,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=world.trusting)) as session,
        ):
            url = world.url
            body = BytesIO(b'{"text":"%b"}' % (b"x" * 4_000_000))
            json = {"content-type": "application/json"}
            async with session.post(f"{url}/test/size", data=body, headers=json) as response:
                assert await response.json() == 4_000_000
            async with session.get(f"{url}/openapi.json") as response:
                assert (await response.json())["servers"] == [{"url": "/hub"}]
            key = {"x-api-key": "k", "x-forwarded-for": "10.0.0.9"}
            async with session.post(f"{url}/session", headers=key) as response:
                cookie = response.headers["set-cookie"]
            assert "Path=/hub" in cookie
            assert "Secure" in cookie
            assert world.addresses[-1] == "10.0.0.9"

            address = url.replace("http", "ws") + "/ws"
            async with (
                connect_websocket(address, ssl=world.trusting) as target,
                PendingRequestMap(target) as calls,
            ):
                assert (await calls.call("test.size", {"text": "abc"})).data == 3

            async def seen(progress: float, total: float | None, message: str | None) -> None:
                world.go_on.set()

            http = httpx2.AsyncClient(verify=world.trusting)
            async with (
                http,
                Client(streamable_http_client(f"{url}/mcp", http_client=http)) as agent,
            ):
                # The call ends only after its progress has arrived.
                result = await agent.call_tool("test__work", {}, progress_callback=seen)
            assert result.structured_content == 2


@on_each
@pytest.mark.parametrize("is_compressed", [False, True])
async def test_events_arrive_when_they_are_sent(
    kind: str, is_compressed: bool, tmp_path: Path
) -> None:
    """HAProxy would send the end of a compressed event with the next one."""
    with time_limit(60):
        async with (
            behind(kind, tmp_path, COMPRESS[kind] if is_compressed else "") as world,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=world.trusting)) as session,
            session.post(
                f"{world.url}/test/watch", headers={"operations-meta": "true"}
            ) as response,
        ):
            events = events_of(response)
            # Before the next heartbeat, which would also send the rest of the first event.
            with time_limit(10):
                assert (await anext(events)).json == 1
            world.go_on.set()
            assert [(e.event, e.json) async for e in events] == [("message", 2), ("complete", {})]


@on_each
async def test_a_short_heartbeat_keeps_quiet_streams_and_sockets_open(
    kind: str, tmp_path: Path
) -> None:
    request = {"requestId": "r1", "operationId": "test.size", "input": {"text": "abc"}}
    with time_limit(60):
        async with (
            behind(kind, tmp_path, idle="2s", heartbeat=0.5) as world,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=world.trusting)) as session,
            session.ws_connect(f"{world.url}/ws") as socket,
            session.post(f"{world.url}/test/watch") as response,
        ):
            events = events_of(response)
            assert (await anext(events)).json == 1
            # Reading also responds to pings.
            reply = asyncio.create_task(socket.receive_json())
            # Longer than the proxy waits for data.
            await asyncio.sleep(4)
            world.go_on.set()
            assert [(e.event, e.json) async for e in events] == [("message", 2), ("complete", {})]
            await socket.send_json({"type": "call.requested", "id": "", "payload": request})
            assert (await reply)["payload"]["output"]["data"] == 3


@on_each
async def test_calls_and_streams_stop_with_their_callers(kind: str, tmp_path: Path) -> None:
    """A proxy notices only the end of a connection, not the end of TLS that a client announces before."""
    with time_limit(20):
        async with behind(kind, tmp_path) as world, AsyncExitStack() as stack:
            registry = await stack.enter_async_context(OperationRegistry())
            authority = tmp_path / "server.pem"
            server = MCPClientConfig(url=f"{world.url}/mcp", ca_file=authority)
            mcp = await stack.enter_async_context(connect_mcp("mcp", server))
            config = HTTPServiceConfig(namespace="api", ca_file=authority, restore=True)
            registry.register_all(await from_openapi_url(f"{world.url}/openapi.json", config))
            registry.register_all(mcp)
            for name in ("test.wait", "mcp.test__wait"):
                world.go_on.clear()
                call = asyncio.create_task(registry.execute(name))
                await world.go_on.wait()
                call.cancel()
                await world.stopped.wait()
                world.stopped.clear()

            world.go_on.clear()
            async with aclosing(registry.subscribe("test.watch")) as items:
                assert (await anext(items)).data == 1
            await world.stopped.wait()


@pytest.mark.alone
@on_each
async def test_a_stopped_server_neither_fails_nor_delays_requests(
    kind: str, tmp_path: Path
) -> None:
    trusting, port = certify(tmp_path), free_port()
    registry = OperationRegistry()

    @registry.operation("test.count")
    async def count() -> None:
        """A mutation, which a proxy may not repeat after it has been sent."""

    def server() -> AbstractAsyncContextManager[str]:
        app = create_app(registry, root_path="/hub")
        return running(app, trusted_proxies=["127.0.0.1"], keep_alive=75)

    async with server() as staying, AsyncExitStack() as stack:
        leaving = await stack.enter_async_context(server())
        recipe = recipe_of(kind, tmp_path, port, staying, leaving)
        with proxy(kind, recipe, tmp_path, port), time_limit(20):
            connector = aiohttp.TCPConnector(ssl=trusting)
            async with aiohttp.ClientSession(connector=connector) as session:

                async def call() -> int:
                    async with session.post(f"https://127.0.0.1:{port}/hub/test/count") as response:
                        return response.status

                assert await asyncio.gather(*[call() for _ in range(20)]) == [200] * 20
                await stack.aclose()
                # HAProxy would try the stopped server three times, after a second each.
                with time_limit(2.5):
                    statuses = await asyncio.gather(*[call() for _ in range(20)])
                assert statuses == [200] * 20


@pytest.mark.parametrize("kind", KINDS[:1])
async def test_a_proxy_that_does_not_pass_on_a_handshake_is_named(
    kind: str, tmp_path: Path
) -> None:
    """By default nginx sends requests with HTTP/1.0 and without `Upgrade`."""
    port = free_port()
    async with running(create_app(OperationRegistry(), websocket=True)) as url:
        location = f"location / {{ proxy_pass {url}; proxy_set_header Host $host; }}"
        server = f"server {{ listen 127.0.0.1:{port}; {location} }}"
        with (
            proxy(kind, server, tmp_path, port),
            pytest.raises(TransportError, match=r"HTTP 426: the proxy .* headers Upgrade"),
        ):
            async with connect_websocket(f"ws://127.0.0.1:{port}/ws"):
                pass
