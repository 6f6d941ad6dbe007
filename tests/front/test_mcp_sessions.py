"""Sessions of MCP clients of 2025: answers are admitted while calls wait for them, and sessions end with their key."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from starlette.requests import HTTPConnection
from tests.limits import time_limit

from operations import Identity, OperationContext, OperationRegistry
from operations.server import CredentialError, Limits, create_app
from operations.server.http11.running import running

ACCEPT = {"accept": "application/json, text/event-stream"}
FORM = {"type": "object", "properties": {"name": {"type": "string"}}}


@dataclass
class Client:
    """A client of 2025 that sends raw messages."""

    url: str
    session: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=lambda: dict(ACCEPT))
    tool: str = ""

    def call(self, request_id: int) -> dict[str, Any]:
        """Return the message that calls the only tool."""
        params = {"name": self.tool, "arguments": {}}
        return {"id": request_id, "method": "tools/call", "params": params}

    async def open(self, **headers: str) -> str:
        """Open a session; return its id."""
        params = {
            "protocolVersion": "2025-06-18",
            "capabilities": {"elicitation": {}},
            "clientInfo": {"name": "test", "version": "1"},
        }
        body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
        self.headers.update(headers)
        async with self.session.post(self.url, json=body, headers=self.headers) as response:
            assert response.status == 200
            self.headers["mcp-session-id"] = response.headers["mcp-session-id"]
            await response.read()
        assert (await self.send({"method": "notifications/initialized"}))[0] == 202
        async with self.post({"id": "tools", "method": "tools/list"}) as response:
            listed = await response.json()
        self.tool = listed["result"]["tools"][0]["name"]
        return self.headers["mcp-session-id"]

    async def send(self, message: dict[str, Any], **headers: str) -> tuple[int, str]:
        """Send a message; return the status and the response."""
        async with self.post(message, **headers) as response:
            return response.status, await response.text()

    def post(self, message: dict[str, Any], **headers: str) -> Any:
        body = {"jsonrpc": "2.0", **message}
        return self.session.post(self.url, json=body, headers={**self.headers, **headers})


async def message_in(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the next message of an event stream."""
    while True:
        line = (await response.content.readline()).decode()
        if line.startswith("data: {"):
            found: dict[str, Any] = json.loads(line.removeprefix("data: "))
            return found


class Keys:
    """A resolver with keys that can be revoked."""

    def __init__(self) -> None:
        self.valid = {"first", "second"}
        self.rejected = asyncio.Event()

    def __call__(self, connection: HTTPConnection) -> Identity | None:
        key = connection.headers.get("x-api-key")
        if key is None:
            return None
        if key not in self.valid:
            self.rejected.set()
            raise CredentialError("a revoked key")
        return Identity("ann")


@asynccontextmanager
async def serving(limits: Limits, keys: Keys | None = None) -> AsyncGenerator[Client]:
    registry = OperationRegistry()

    @registry.operation("test.ask")
    async def ask(context: OperationContext) -> str:
        answer = await context.elicit("Who?", FORM)
        return f"hello {answer['content']['name']}"

    app = create_app(registry, identity=keys, limits=limits, mcp=True)
    with time_limit(20):
        async with running(app) as url, aiohttp.ClientSession() as session:
            yield Client(f"{url}/mcp", session)


@pytest.mark.parametrize("limits", [Limits(calls_per_caller=1), Limits(calls=1)])
async def test_an_answer_is_admitted_while_the_call_that_waits_for_it_has_the_only_slot(
    limits: Limits,
) -> None:
    async with serving(limits) as client:
        await client.open()
        async with client.post(client.call(2)) as response:
            question = await message_in(response)
            assert question["method"] == "elicitation/create"
            # A second call still exceeds the limit.
            assert (await client.send(client.call(3)))[0] == 429
            result = {"action": "accept", "content": {"name": "Ann"}}
            status, text = await client.send({"id": question["id"], "result": result})
            assert status == 202, text
            answer = await message_in(response)
        assert answer["result"]["content"][0]["text"] == "hello Ann"


async def test_a_call_can_be_cancelled_while_it_has_the_only_slot() -> None:
    async with serving(Limits(calls_per_caller=1)) as client:
        await client.open()
        async with client.post(client.call(2)) as response:
            await message_in(response)
            cancel = {"method": "notifications/cancelled", "params": {"requestId": 2}}
            assert (await client.send(cancel))[0] == 202
            await response.content.read()
        # Its slot is free.
        async with client.post(client.call(3)) as response:
            assert (await message_in(response))["method"] == "elicitation/create"


async def test_answers_have_their_own_limit() -> None:
    async with serving(Limits(calls_per_caller=1)) as client:
        await client.open()

        async def endless() -> AsyncGenerator[bytes]:
            yield b"{"
            await asyncio.Event().wait()

        async with client.post(client.call(2)) as response:
            await message_in(response)
            headers = {**client.headers, "content-type": "application/json"}
            slow = asyncio.ensure_future(
                client.session.post(client.url, data=endless(), headers=headers)
            )
            while (await client.send({"id": "x", "result": {}}))[0] != 429:
                await asyncio.sleep(0.01)
            slow.cancel()


@pytest.mark.requirement("R57")
async def test_a_session_ends_when_its_key_is_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.front.credentials.RECHECK_SECONDS", 0.3)
    keys = Keys()
    async with serving(Limits(), keys) as client:
        await client.open(**{"x-api-key": "first"})
        keys.valid.remove("first")
        with time_limit(20):
            await keys.rejected.wait()
            # Another key of the same caller finds no session any more.
            status, _ = await client.send({"method": "ping", "id": 4}, **{"x-api-key": "second"})
        assert status == 404


@pytest.mark.requirement("R57")
async def test_a_session_continues_with_a_renewed_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.front.credentials.RECHECK_SECONDS", 0.2)
    keys = Keys()
    async with serving(Limits(), keys) as client:
        await client.open(**{"x-api-key": "first"})
        renewed = {"x-api-key": "second"}
        assert (await client.send({"method": "ping", "id": 4}, **renewed))[0] == 200
        keys.valid.remove("first")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(keys.rejected.wait(), 1)
        assert (await client.send({"method": "ping", "id": 5}, **renewed))[0] == 200
        keys.valid = {"first"}
        await keys.rejected.wait()
        status, _ = await client.send({"method": "ping", "id": 6}, **{"x-api-key": "first"})
        assert status == 404
