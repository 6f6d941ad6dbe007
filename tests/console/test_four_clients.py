"""One demo, used by four independent clients: an MCP client, curl, a browser and our own. The test is in this
folder because it needs a browser.
"""

import asyncio
import json
import shutil
import subprocess
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from playwright.sync_api import Browser
from tests.limits import scaled, time_limit

from operations import CallError, OperationRegistry
from operations.calls import from_calls
from operations.cli.demo import open_demo
from operations.hub.app import build_app
from operations.mcp import MCPClientConfig, connect_mcp
from operations.openapi import HTTPServiceConfig, from_openapi_url
from operations.openapi.source.config import HTTPAuth
from operations.pubsub.websocket import connect_websocket
from operations.server.http11.running import running

KEY = "the manager's key"
BEARER = {"Authorization": f"Bearer {KEY}"}
T = TypeVar("T")

QUOTE = {"item": "Flat white", "amount": 646.0, "currency": "JPY"}
ASKED = {"item": 2, "currency": "JPY"}
CUPS = [{"number": number, "ready": True} for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    """The address of the demo, served with every entry point by a thread of its own."""
    started = threading.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        async with open_demo(KEY) as hub:
            app = build_app(
                hub, entry_points=("http", "mcp", "websocket", "console"), host="127.0.0.1"
            )
            async with running(app) as url:
                stop = asyncio.Event()
                found.update(url=url, stop=stop, loop=asyncio.get_running_loop())
                started.set()
                await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(scaled(60)), "the demo did not start"
    yield found["url"]
    found["loop"].call_soon_threadsafe(found["stop"].set)
    thread.join(scaled(15))


def alone(work: Coroutine[Any, Any, T]) -> T:
    """Run in a thread, because the driver of the browser uses the event loop of this one."""

    async def bounded() -> T:
        with time_limit(60):
            return await work

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, bounded()).result()


@pytest.mark.requirement("R07", "R08", "R09")
@pytest.mark.parametrize("era", ["auto", "legacy"])
def test_an_agent_calls_operations_with_the_official_mcp_client(demo: str, era: Any) -> None:
    async def use() -> None:
        async with Client(f"{demo}/mcp", mode=era) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert {"cafe__quote", "cafe__brew", "shop__get_item", "money__convert"} <= set(tools)
            assert "cafe__close" not in tools
            result = await client.call_tool("cafe__quote", ASKED)
            assert (result.structured_content, result.is_error) == (QUOTE, False)
            result = await client.call_tool("cafe__brew", {"cups": 3})
            assert result.structured_content == {"items": CUPS, "complete": True}
            result = await client.call_tool("cafe__order", {"item": 3})
            assert result.is_error
            assert result.meta is not None
            assert result.meta["alkdev.operations/error"]["code"] == "SOLD_OUT"
        async with (
            httpx2.AsyncClient(headers=BEARER) as http,
            Client(streamable_http_client(f"{demo}/mcp", http_client=http), mode=era) as client,
        ):
            assert "cafe__close" in {tool.name for tool in (await client.list_tools()).tools}
            result = await client.call_tool("cafe__close", {"reason": "holiday"})
            assert "closed: holiday" in str(result.structured_content)

    alone(use())


@pytest.mark.requirement("R07", "R10")
def test_a_shell_calls_operations_with_curl(demo: str) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl on this machine")

    def asked(path: str, *arguments: str) -> tuple[int, str]:
        command = [curl, "--silent", "--max-time", "30", "--write-out", "\n%{http_code}"]
        ran = subprocess.run(
            [*command, *arguments, demo + path], capture_output=True, text=True, check=True
        )
        body, _, status = ran.stdout.rpartition("\n")
        return int(status), body

    def posted(path: str, value: Any, *arguments: str) -> tuple[int, Any]:
        status, body = asked(path, "--json", json.dumps(value), *arguments)
        return status, json.loads(body)

    status, body = asked("/cafe/quote?item=2&currency=JPY")
    assert (status, json.loads(body)) == (200, QUOTE)
    assert posted("/cafe/quote", ASKED) == (200, QUOTE)
    assert posted("/call", {"operation": "cafe.quote", "input": ASKED})[1]["data"] == QUOTE

    status, body = asked("/cafe/brew?cups=3", "--no-buffer")
    lines = [line for line in body.splitlines() if line]
    assert [json.loads(line.removeprefix("data: ")) for line in lines[:3]] == CUPS
    assert (status, lines[3:]) == (200, ["event: complete", "data: {}"])

    status, answer = posted("/cafe/order", {"item": 3})
    assert (status, answer["code"], answer["details"]) == (409, "SOLD_OUT", {"item": 3})
    assert posted("/cafe/quote", {"item": "two"})[0] == 422
    assert posted("/cafe/close", {})[0] == 401
    bearer = ("--oauth2-bearer", KEY)
    assert posted("/cafe/close", {"reason": "holiday"}, *bearer) == (200, "closed: holiday")
    # The result does not depend on the form of the request: HTTP/1.0, chunks, or `Expect: 100-continue`.
    assert posted("/cafe/quote", ASKED, "--http1.0") == (200, QUOTE)
    chunked = ("--header", "Transfer-Encoding: chunked")
    assert posted("/cafe/quote", ASKED, *chunked) == (200, QUOTE)
    assert posted("/cafe/quote", ASKED, "--header", "Expect: 100-continue") == (200, QUOTE)
    assert asked("/cafe/quote", "--request", "DELETE")[0] == 405


@pytest.mark.requirement("R11")
def test_a_browser_reads_streams_with_event_source(demo: str, browser: Browser) -> None:
    page = browser.new_page()
    page.goto(f"{demo}/")

    seen = page.evaluate(
        """() => new Promise((resolve, reject) => {
          const seen = [];
          const source = new EventSource("cafe/brew?cups=3");
          source.onmessage = (event) => seen.push(JSON.parse(event.data));
          source.onerror = () => reject(new Error("the stream broke off"));
          source.addEventListener("complete", () => { source.close(); resolve(seen); });
        })"""
    )
    assert seen == CUPS

    answers = page.evaluate(
        """async (key) => {
          const post = (path, body, headers) => fetch(path, {
            method: "POST", body: JSON.stringify(body),
            headers: {"Content-Type": "application/json", ...headers},
          });
          const before = (await post("cafe/close", {})).status;
          const signedIn = (await post("session", {}, {Authorization: `Bearer ${key}`})).status;
          const after = await (await post("cafe/close", {reason: "holiday"})).json();
          return [before, signedIn, after, document.cookie];
        }""",
        KEY,
    )
    assert answers == [401, 200, "closed: holiday", ""]
    page.close()


@pytest.mark.requirement("R10", "R28")
def test_our_own_client_works_at_every_entry_point(demo: str) -> None:
    async def use() -> None:
        config = HTTPServiceConfig(
            namespace="unused", base_url=demo, restore=True, auth=HTTPAuth(type="bearer", token=KEY)
        )
        socket = demo.replace("http", "ws") + "/ws"
        async with OperationRegistry() as registry:
            registry.register_all(await from_openapi_url(f"{demo}/openapi.json", config))
            await used(registry, "cafe.", streams=True)
        async with connect_mcp("hub", MCPClientConfig(url=f"{demo}/mcp", headers=BEARER)) as mcp:
            await used(OperationRegistry(mcp), "hub.cafe__", streams=False)
        async with connect_websocket(socket, headers=BEARER) as target, from_calls(target) as there:
            await used(OperationRegistry(there), "cafe.", streams=True)

    async def used(registry: OperationRegistry, prefix: str, *, streams: bool) -> None:
        quote = await registry.execute(f"{prefix}quote", ASKED)
        assert quote.data == QUOTE
        if streams:
            brewed = [item.data async for item in registry.subscribe(f"{prefix}brew", {})]
        else:
            brewed = (await registry.execute(f"{prefix}brew", {})).data["items"]
        assert brewed == CUPS
        with pytest.raises(CallError) as caught:
            (await registry.execute(f"{prefix}order", {"item": 3})).raise_for_error()
        assert "SOLD_OUT" in f"{caught.value.code} {caught.value.message} {caught.value.details}"

    alone(use())
