"""Which caller a server's own messages reach, if several call at a time."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel
from tests.limits import scaled, time_limit
from tests.mcp_import.support import raw, serving_demo

from operations import CallError, ErrorCode, Identity, OperationContext, OperationRegistry
from operations.base.logs import LogBudget
from operations.base.retry import FAILURES
from operations.contract.channel import CallerChannel
from operations.mcp import MCPClientConfig, connect_mcp

Run = Callable[[str, dict[str, Any]], Awaitable[Any]]


class Caller:
    """A caller that records questions and messages."""

    def __init__(
        self, name: str, registry: OperationRegistry, *, session: str | None = None
    ) -> None:
        self.name = name
        self.questions: list[str] = []
        self.logged: list[Any] = []
        self._registry = registry
        self._identity = Identity(name, []) if session is None else None
        self._session = session or ""

    async def elicit(self, message: str, schema: dict[str, Any]) -> dict[str, Any]:
        self.questions.append(message)
        return {"action": "accept", "content": {"name": self.name}}

    async def log(self, level: str, data: Any, name: str | None) -> None:
        self.logged.append(data)

    async def call(self, operation_id: str, **given: Any) -> Any:
        channel = CallerChannel(elicit=self.elicit, log=self.log, session=self._session)
        context = OperationContext(identity=self._identity, channel=channel)
        return await self._registry.execute(operation_id, given, context)

    async def ask(self) -> Any:
        """Call the tool that asks, and return what it was answered."""
        envelope = await self.call("raw.ask", method="elicitation/create")
        return json.loads(envelope.data[0]["text"])

    @asynccontextmanager
    async def calling(self) -> AsyncGenerator[None]:
        """Have a call in flight during this block."""
        call = asyncio.create_task(self.call("raw.never"))
        await self.call("raw.pid")
        try:
            yield
        finally:
            call.cancel()
            await asyncio.wait({call})


@asynccontextmanager
async def callers(**options: Any) -> AsyncGenerator[Callable[..., Caller]]:
    with time_limit(20):
        async with connect_mcp("raw", raw(**options)) as client:
            registry = OperationRegistry(client)
            yield lambda name, **more: Caller(name, registry, **more)


@pytest.mark.requirement("R11")
async def test_a_question_on_stdio_reaches_the_only_caller() -> None:
    async with callers() as caller:
        ann = caller("ann")
        async with ann.calling():
            assert await ann.ask() == {"action": "accept", "content": {"name": "ann"}}


@pytest.mark.requirement("R11")
async def test_a_question_on_stdio_is_declined_while_another_caller_has_a_call_in_flight() -> None:
    async with callers() as caller:
        ann, bob = caller("ann"), caller("bob")
        async with bob.calling():
            assert await ann.ask() == {"action": "decline"}
        assert ann.questions == bob.questions == []
        assert await ann.ask() == {"action": "accept", "content": {"name": "ann"}}


@pytest.mark.requirement("R11")
async def test_callers_without_identity_are_distinguished_by_their_sessions() -> None:
    async with callers() as caller:
        one, two = caller("one", session="1"), caller("two", session="2")
        async with two.calling():
            assert await one.ask() == {"action": "decline"}
        async with one.calling():
            assert (await one.ask())["action"] == "accept"
        stranger = caller("stranger", session="")
        async with stranger.calling():
            # Without a session, every call may be another caller's.
            assert await stranger.ask() == {"action": "decline"}


@pytest.mark.requirement("R11")
async def test_log_messages_stay_here_while_several_call(caplog: pytest.LogCaptureFixture) -> None:
    async with callers() as caller:
        ann, bob = caller("ann"), caller("bob")
        await ann.call("raw.log", data="for ann")
        with caplog.at_level(logging.WARNING, logger="operations.mcp"):
            async with bob.calling():
                await ann.call("raw.log", data="for somebody")

    assert (ann.logged, bob.logged) == (["for ann"], [])
    assert "for somebody" in caplog.text


async def test_a_server_cannot_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogBudget, "LINES", 3)
    async with callers() as caller:
        with caplog.at_level(logging.WARNING, logger="operations.mcp"):
            async with caller("bob").calling():
                for number in range(6):
                    await caller("ann").call("raw.log", data=f"line {number}")

    assert [text.partition(": ")[2] for text in caplog.messages if text.startswith("raw: ")] == [
        "line 0",
        "line 1",
        "line 2",
        "its further log messages of this minute are dropped",
    ]


async def test_with_a_connection_per_caller_each_gets_its_own_questions() -> None:
    async with callers(per_caller=True) as caller:
        ann, bob = caller("ann"), caller("bob")
        async with bob.calling(), ann.calling():
            answers = await asyncio.gather(ann.ask(), bob.ask())
            pids = {str((await each.call("raw.pid")).data) for each in (ann, bob, ann)}

    assert [answer["content"]["name"] for answer in answers] == ["ann", "bob"]
    assert len(pids) == 2


async def test_connections_of_callers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.mcp.source.connection.MAX_CALLERS", 1)
    async with callers(per_caller=True) as caller:
        ann, bob = caller("ann"), caller("bob")
        async with ann.calling():
            with pytest.raises(CallError) as caught:
                await bob.call("raw.pid")
        assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
        # Idle connections are closed for other callers.
        await bob.call("raw.pid")
        await ann.call("raw.pid")


async def test_the_connection_of_a_waiting_call_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.mcp.source.connection.MAX_CALLERS", 2)
    async with callers(per_caller=True, concurrency=1) as caller:
        running = asyncio.create_task(caller("ann").call("raw.never"))
        waiting = asyncio.create_task(caller("bob").call("raw.pid"))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(CallError) as caught:
            await caller("eve").call("raw.pid")
        running.cancel()

        assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
        assert (await waiting).data


class Name(BaseModel):
    name: str


def asking() -> MCPServer:
    """Its tool `greet` asks for a name, and logs; both belong to the request, as streamable HTTP shows."""
    server = MCPServer("asking")

    @server.tool()
    async def greet(context: Context[Any, Any]) -> str:
        await context.log("info", "about to ask")
        answer = await context.elicit("Your name?", Name)
        return f"Hello {answer.data.name}" if answer.action == "accept" else answer.action

    @server.tool()
    async def wait() -> str:
        await anyio.sleep(60)
        return "done"

    return server


@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
@pytest.mark.requirement("R11")
async def test_streamable_http_ties_questions_and_messages_to_their_requests() -> None:
    with time_limit(30):
        async with serving_demo(build=asking) as url:
            config = MCPClientConfig(url=url, version="2025-11-25")
            async with connect_mcp("asking", config) as client:
                registry = OperationRegistry(client)
                people = [Caller(name, registry) for name in ("ann", "bob", "cy")]
                waiting = asyncio.create_task(people[2].call("asking.wait"))
                greetings = await asyncio.gather(
                    *(each.call("asking.greet") for each in people for _ in range(5))
                )
                waiting.cancel()

    names = [greeting.data["result"] for greeting in greetings]
    assert names == [f"Hello {each.name}" for each in people for _ in range(5)]
    assert [each.logged for each in people] == [["about to ask"] * 5] * 3


@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
async def test_a_caller_that_does_not_answer_fails_only_its_own_call() -> None:
    async def never(message: str, schema: dict[str, Any]) -> dict[str, Any]:
        await anyio.sleep_forever()
        raise AssertionError

    config = MCPClientConfig(
        server=asking(), version="2025-11-25", timeout=scaled(0.8), answer_timeout=0.05
    )
    with time_limit(30):
        async with connect_mcp("asking", config) as client:
            registry = OperationRegistry(client)
            context = OperationContext(channel=CallerChannel(elicit=never))
            for _ in range(FAILURES + 1):
                with pytest.raises(CallError) as caught:
                    await registry.execute("asking.greet", {}, context)
                assert caught.value.code == ErrorCode.TIMEOUT
            # The circuit to the server is still closed.
            ann = Caller("ann", registry)
            assert (await ann.call("asking.greet")).data["result"] == "Hello ann"


async def test_the_time_of_a_source_stops_while_the_caller_answers() -> None:
    limit = scaled(1)

    async def slowly(message: str, schema: dict[str, Any]) -> dict[str, Any]:
        await anyio.sleep(1.5 * limit)
        return {"action": "accept", "content": {"name": "Ada"}}

    with time_limit(20):
        async with connect_mcp("raw", raw(timeout=limit)) as client:
            registry = OperationRegistry(client)
            context = OperationContext(channel=CallerChannel(elicit=slowly))
            await registry.execute("raw.ask", {"method": "elicitation/create"}, context)


async def test_progress_starts_the_time_of_a_source_again() -> None:
    server, limit = MCPServer("steps"), scaled(1)

    @server.tool()
    async def work(context: Context[Any, Any], steps: int) -> str:
        for step in range(steps):
            await anyio.sleep(limit / 5)
            await context.report_progress(step)
        await anyio.sleep(limit / 5 if steps else 60 * limit)
        return "done"

    with time_limit(20):
        async with connect_mcp("steps", MCPClientConfig(server=server, timeout=limit)) as client:
            registry = OperationRegistry(client)
            assert (await registry.execute("steps.work", {"steps": 6})).data["result"] == "done"
            with pytest.raises(CallError) as caught:
                await registry.execute("steps.work", {"steps": 0})

    assert caught.value.code == ErrorCode.TIMEOUT
