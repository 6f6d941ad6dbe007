"""Messages and questions of a running handler to its client, in all protocol revisions."""

import asyncio
from contextlib import suppress
from typing import Any

import anyio
import msgspec
import pytest
from mcp import Client, MCPError
from mcp.shared.exceptions import MCPDeprecationWarning
from mcp_types import (
    CreateMessageResult,
    ElicitResult,
    ErrorData,
    ListRootsResult,
    Root,
    TextContent,
)
from tests.limits import scaled, time_limit
from tests.mcp_serving.support import ERAS, MODERN_META, error_of, modern_headers, serving
from tests.server.asgi import Client as ASGIClient

from operations import CallerChannel, Identity, OperationContext, OperationRegistry
from operations.front.config import ServerConfig
from operations.front.front import Front
from operations.front.limits import Limits
from operations.mcp import list_roots, release_stream, to_mcp
from operations.mcp.serving.caller import MCPCaller
from operations.mcp.serving.channels import Elicitations
from operations.server import create_app

BOTH = pytest.mark.parametrize("era", ERAS)
FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


async def answer(context: Any, params: Any) -> ElicitResult:
    return ElicitResult(action="accept", content={"name": params.message.upper()})


async def complete(context: Any, params: Any) -> CreateMessageResult:
    return CreateMessageResult(
        role="assistant", content=TextContent(type="text", text="hello"), model="m"
    )


async def roots(context: Any) -> ListRootsResult:
    return ListRootsResult(roots=[Root(uri="file:///a")])  # type: ignore[arg-type]


def asking() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("ask.name")
    async def name(context: OperationContext) -> str:
        first = await context.elicit("ann", FORM)
        second = await context.elicit("bob", FORM)
        return f"{first['content']['name']} {second['content']['name']}"

    @registry.operation("ask.model")
    async def model(context: OperationContext) -> str:
        message = {"role": "user", "content": {"type": "text", "text": "hi"}}
        reply = await context.sample({"messages": [message], "maxTokens": 5})
        return str(reply["content"]["text"])

    @registry.operation("ask.roots")
    async def of_roots() -> list[str]:
        return [root["uri"] for root in await list_roots()]

    return registry


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("value", [object(), "\ud800"])
async def test_a_question_that_is_not_json_ends_only_its_call(value: Any) -> None:
    registry = asking()

    @registry.operation("ask.nonsense")
    async def nonsense(context: OperationContext) -> Any:
        return await context.sample({"messages": [], "maxTokens": 5, "metadata": {"x": value}})

    async with Client(to_mcp(registry), mode="legacy", sampling_callback=complete) as client:
        result = await client.call_tool("ask__nonsense", {})

        assert error_of(result)["code"] == "EXECUTION_ERROR"
        assert not (await client.call_tool("ask__model", {})).is_error


@BOTH
async def test_a_handler_asks_the_person_twice_and_runs_once(era: str) -> None:
    registry = asking()
    calls = 0

    @registry.use
    async def count(call: Any, following: Any) -> Any:
        nonlocal calls
        calls += 1
        return await following(call)

    async with Client(to_mcp(registry), mode=era, elicitation_callback=answer) as client:
        result = await client.call_tool("ask__name", {})

    assert result.content[0].text == "ANN BOB"  # type: ignore[union-attr]
    assert calls == 1


@BOTH
async def test_a_handler_uses_the_callers_model_and_roots(era: str) -> None:
    server = to_mcp(asking())
    async with Client(
        server, mode=era, sampling_callback=complete, list_roots_callback=roots
    ) as client:
        said = await client.call_tool("ask__model", {})
        listed = await client.call_tool("ask__roots", {})

    assert said.content[0].text == "hello"  # type: ignore[union-attr]
    assert listed.content[0].text == '["file:///a"]'  # type: ignore[union-attr]


@BOTH
async def test_features_that_a_client_lacks_are_unavailable(era: str) -> None:
    async with Client(to_mcp(asking()), mode=era) as client:
        for name in ("ask__name", "ask__model", "ask__roots"):
            result = await client.call_tool(name, {})
            assert result.is_error
            assert error_of(result)["code"] == "UNAVAILABLE"
            assert "client" in error_of(result)["message"]


@BOTH
async def test_an_operation_may_need_a_client_that_can_answer(
    registry: OperationRegistry, era: str
) -> None:
    @registry.operation("ask.need", meta={"mcp": {"requires": ["sampling"]}})
    async def need() -> int:
        return 1

    async with Client(to_mcp(registry), mode=era) as client:
        with pytest.raises(MCPError) as caught:
            await client.call_tool("ask__need", {})
    async with Client(to_mcp(registry), mode=era, sampling_callback=complete) as client:
        assert not (await client.call_tool("ask__need", {})).is_error

    assert caught.value.code == -32021


@BOTH
async def test_progress_reaches_the_caller(registry: OperationRegistry, era: str) -> None:
    received: list[tuple[float, float | None, str | None]] = []

    @registry.operation("job.run")
    async def run(context: OperationContext) -> None:
        await context.progress(1, 2, "half")
        await context.progress(2, 2)

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        received.append((progress, total, message))

    async with Client(to_mcp(registry), mode=era) as client:
        await client.call_tool("job__run", {}, progress_callback=hear)

    assert received == [(1, 2, "half"), (2, 2, None)]


async def test_log_messages_reach_the_caller_from_the_level_it_set(
    registry: OperationRegistry,
) -> None:
    received: list[tuple[str, Any]] = []

    @registry.operation("job.run")
    async def run(context: OperationContext) -> None:
        await context.log("debug", "small")
        await context.log("warning", {"big": True})

    async def hear(params: Any) -> None:
        received.append((params.level, params.data))

    async with Client(to_mcp(registry), mode="legacy", logging_callback=hear) as client:
        with pytest.warns(MCPDeprecationWarning):
            await client.set_logging_level("warning")
        await client.call_tool("job__run", {})

    assert received == [("warning", {"big": True})]


@BOTH
async def test_structs_and_models_can_be_logged(registry: OperationRegistry, era: str) -> None:
    received: list[Any] = []

    class Step(msgspec.Struct):
        number: int
        output: bytes

    @registry.operation("job.run")
    async def run(context: OperationContext) -> None:
        await context.log("info", [Step(1, b"\xfb"), {True: b"\xfb"}, Root(uri="file:///a")])  # type: ignore[arg-type]

    async def hear(params: Any) -> None:
        received.append(params.data)

    async with serving(to_mcp(registry).asgi_app()) as base:
        listening: Any = {"logging_callback": hear, "log_level": "info"}
        async with Client(f"{base}/mcp", mode=era, **listening) as client:
            result = await client.call_tool("job__run", {})

    assert not result.is_error
    ((step, table, root),) = received
    assert step == {"number": 1, "output": "+w=="}
    assert table == {"true": "+w=="}
    assert root["uri"] == "file:///a"


@BOTH
@pytest.mark.requirement("R31")
async def test_a_caller_that_stops_waiting_stops_the_handler(
    registry: OperationRegistry, era: str
) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    @registry.operation("job.wait")
    async def wait() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with Client(to_mcp(registry), mode=era) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "job__wait", {})
            await started.wait()
            tasks.cancel_scope.cancel()
        with time_limit(20):
            await stopped.wait()


@BOTH
@pytest.mark.requirement("R12")
async def test_a_call_ends_by_the_default_deadline(registry: OperationRegistry, era: str) -> None:
    @registry.operation("job.wait")
    async def wait() -> None:
        await asyncio.Event().wait()

    async with Client(to_mcp(registry, timeout=0.5), mode=era) as client:
        result = await client.call_tool("job__wait", {})

    assert error_of(result)["code"] == "TIMEOUT"


async def test_other_callers_have_neither_a_stream_nor_roots() -> None:
    assert await release_stream() is False


# ---------------------------------------------------------------- elicitations


async def interview(channel: CallerChannel) -> dict[str, Any]:
    assert channel.elicit is not None
    reply = await channel.elicit("name?", {"$id": "name", **FORM})
    return {"content": [], "said": reply}


CAN: dict[str, Any] = {"elicitation": {}}


@pytest.mark.requirement("R11")
async def test_only_the_caller_can_answer_its_questions() -> None:
    elicitations = Elicitations()
    question = await elicitations.begin(interview, CallerChannel(), CAN, {}, ("ann", "x"))
    token = question["requestState"]

    assert list(question["inputRequests"]) == ["name"]
    for key in (("bob", "x"), ("ann", "y")):
        with pytest.raises(MCPError):
            await elicitations.resume(token, {"name": {"action": "accept"}}, CallerChannel(), key)
    done = await elicitations.resume(
        token, {"name": {"action": "accept"}}, CallerChannel(), ("ann", "x")
    )
    assert done["said"] == {"action": "accept"}
    with pytest.raises(MCPError):
        await elicitations.resume(token, {}, CallerChannel(), ("ann", "x"))


async def test_a_call_that_waits_for_answers_ends_with_its_server() -> None:
    registry, ended = OperationRegistry(), asyncio.Event()

    @registry.operation("job.ask")
    async def ask(context: OperationContext) -> None:
        try:
            await context.elicit("name?", FORM)
        finally:
            ended.set()

    app = create_app(registry, mcp=True)
    capabilities: dict[str, Any] = {"elicitation": {"form": {}}}
    meta = {**MODERN_META, "io.modelcontextprotocol/clientCapabilities": capabilities}
    params = {"name": "job__ask", "arguments": {}, "_meta": meta}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    headers = modern_headers("tools/call", "job__ask")
    with time_limit(20):
        async with app.router.lifespan_context(app):
            response = await ASGIClient(app).post("/mcp", message, headers=headers)
            assert response.json["result"]["resultType"] == "input_required"
        await ended.wait()


async def test_the_result_of_a_call_that_ends_while_it_asks_is_kept_for_the_client() -> None:
    may_end = asyncio.Event()

    async def run(channel: CallerChannel) -> dict[str, Any]:
        assert channel.elicit is not None
        question = asyncio.ensure_future(channel.elicit("name?", FORM))
        await may_end.wait()
        question.cancel()
        return {"content": [], "said": "not needed"}

    elicitations = Elicitations()
    question = await elicitations.begin(run, CallerChannel(), CAN, {}, ("ann", "x"))
    may_end.set()
    call = elicitations._waiting[question["requestState"]]
    await asyncio.wait({call.task})

    late = {"elicitation-1": {"action": "accept"}}
    done = await elicitations.resume(question["requestState"], late, CallerChannel(), ("ann", "x"))

    assert done["said"] == "not needed"


async def test_a_result_that_no_client_requests_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.mcp.serving.channels.RESULT_SECONDS", 0.01)

    async def run(channel: CallerChannel) -> dict[str, Any]:
        assert channel.elicit is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(channel.elicit("name?", FORM), 0.1)
        return {"content": []}

    elicitations = Elicitations()
    question = await elicitations.begin(run, CallerChannel(), CAN, {}, ("ann", "x"))
    async with asyncio.timeout(scaled(20)):
        while elicitations._waiting:
            await asyncio.sleep(0.005)

    with pytest.raises(MCPError):
        await elicitations.resume(question["requestState"], {}, CallerChannel(), ("ann", "x"))


async def test_a_question_without_an_answer_is_asked_again() -> None:
    elicitations = Elicitations()
    question = await elicitations.begin(interview, CallerChannel(), CAN, {}, ("ann",))
    again = await elicitations.resume(
        question["requestState"], {"other": {}}, CallerChannel(), ("ann",)
    )

    assert again["inputRequests"] == question["inputRequests"]
    assert again["requestState"] != question["requestState"]
    done = await elicitations.resume(again["requestState"], {"name": {}}, CallerChannel(), ("ann",))
    assert done["said"] == {}


async def test_progress_of_a_resumed_call_goes_to_the_resuming_request() -> None:
    received: list[str] = []

    def channel(name: str) -> CallerChannel:
        async def progress(_done: float, _total: float | None, _message: str | None) -> None:
            received.append(f"{name} progress")

        async def log(_level: str, _data: Any, _name: str | None) -> None:
            received.append(f"{name} log")

        return CallerChannel(progress=progress, log=log)

    async def run(channel: CallerChannel) -> dict[str, Any]:
        assert channel.progress is not None
        assert channel.log is not None
        await channel.progress(1, None, None)
        done = await interview(channel)
        await channel.log("info", "x", None)
        return done

    elicitations = Elicitations()
    question = await elicitations.begin(run, channel("first"), CAN, {}, ("ann",))
    await elicitations.resume(question["requestState"], {"name": {}}, channel("second"), ("ann",))

    assert received == ["first progress", "second log"]


async def test_a_client_that_leaves_while_its_call_runs_ends_it() -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    async def run(_channel: CallerChannel) -> dict[str, Any]:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return {}

    task = asyncio.create_task(Elicitations().begin(run, CallerChannel(), CAN, {}, ("ann",)))
    await started.wait()
    task.cancel()

    with time_limit(20):
        await stopped.wait()


async def test_a_client_that_declines_to_answer_is_unavailable() -> None:
    async def refuse(context: Any, params: Any) -> Any:
        return ErrorData(code=-1, message="no")

    async with Client(to_mcp(asking()), mode="legacy", elicitation_callback=refuse) as client:
        result = await client.call_tool("ask__name", {})

    assert error_of(result)["code"] == "UNAVAILABLE"
    assert error_of(result)["details"] == {"code": -1, "message": "no"}


async def test_an_answer_may_come_with_the_call() -> None:
    done = await Elicitations().begin(
        interview, CallerChannel(), CAN, {"name": {"a": 1}, "x": 1}, ("ann",)
    )

    assert done["said"] == {"a": 1}


async def test_the_number_of_waiting_calls_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.mcp.serving.channels.MAX_WAITING", 1)
    elicitations = Elicitations()
    await elicitations.begin(interview, CallerChannel(), CAN, {}, ("ann",))

    with pytest.raises(MCPError):
        await elicitations.begin(interview, CallerChannel(), CAN, {}, ("ann",))


async def test_a_waiting_call_ends_with_its_deadline() -> None:
    server = to_mcp(registry := asking(), timeout=0.5)
    front = Front(registry, ServerConfig(limits=Limits(answer_seconds=0.1), timeout=0.5))
    caller = MCPCaller(Identity("ann", []), "2026-07-28", front, CAN)

    async def call(params: Any) -> Any:
        run, channel = server.service.call_tool, CallerChannel()
        return await server.service.run_interactive(
            caller, run, channel, "tools/call", params, "ask__name", {}
        )

    question = await call({})
    (task,) = [waiting.task for waiting in server.service.elicitations._waiting.values()]
    await asyncio.wait({task}, timeout=scaled(20))

    assert task.done()
    result = await call({"requestState": question["requestState"]})
    assert result["isError"]
    assert "TIMEOUT" in str(result)
