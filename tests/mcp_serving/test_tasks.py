"""Runs as tasks (`io.modelcontextprotocol/tasks`) over HTTP."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from starlette.requests import Request
from tests.mcp_serving.support import MODERN_META, modern_headers, serving

from operations import CallError, Identity, OperationContext, OperationRegistry
from operations.mcp import hand_over, to_mcp
from operations.runs import Runs

TASKS = "io.modelcontextprotocol/tasks"
ALL: dict[str, Any] = {"elicitation": {}, "sampling": {}, "extensions": {TASKS: {}}}


class Shop:
    """Durable operations, whose ends the test decides."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()

    def fill(self, registry: OperationRegistry) -> None:
        """Register the operations."""

        @registry.operation("job.quick", durable=True)
        async def quick() -> int:
            return 7

        @registry.operation("job.wait", durable=True)
        async def wait(context: OperationContext) -> str:
            await context.progress(1, 3, "first part")
            self.begun.set()
            await self.gate.wait()
            return "done"

        @registry.operation("job.strict", durable="required")
        async def strict() -> str:
            await self.gate.wait()
            return "done"

        @registry.operation("job.fail", durable=True)
        async def fail() -> str:
            await self.gate.wait()
            raise CallError("EMPTY", "there is nothing left")

        @registry.operation("job.ask", durable=True)
        async def ask(context: OperationContext) -> str:
            first, second = await asyncio.gather(
                context.elicit("Who?", _form("name")), context.elicit("Where?", _form("place"))
            )
            return f"{first['content']['name']} in {second['content']['place']}"

        @registry.operation("job.signal", durable=True)
        async def signal(context: OperationContext) -> Any:
            return await context.wait_for("paid")

        @registry.operation("job.first")
        async def first(context: OperationContext) -> Any:
            answer = await context.elicit("Who?", _form("name"))
            run = await registry.start("job.greet", answer["content"], context)
            return None if hand_over(run) else (await run.result()).data

        @registry.operation("job.greet", durable=True)
        async def greet(name: str) -> str:
            return f"Hello {name}"


def _form(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}


class Client:
    """Sends requests since 2026-07-28, as this caller, with these capabilities."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, f"{url}/mcp"

    async def post(
        self,
        method: str,
        params: dict[str, Any],
        capabilities: dict[str, Any] | None = None,
        *,
        user: str = "ada",
        named: str | None = None,
    ) -> dict[str, Any]:
        """Return the response to a request."""
        meta = {
            **MODERN_META,
            "io.modelcontextprotocol/clientCapabilities": ALL
            if capabilities is None
            else capabilities,
        }
        message = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": method,
            "params": {**params, "_meta": meta},
        }
        name = named or params.get("name") or params.get("taskId") or ""
        sent = {**modern_headers(method, name), "x-user": user}
        async with self._http.post(self._url, json=message, headers=sent) as response:
            text = await response.text()
        if response.content_type == "text/event-stream":
            events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            text = events[-1]
        found: dict[str, Any] = msgspec.json.decode(text)
        return found

    async def call(self, name: str, arguments: Any = None, *args: Any, **more: Any) -> Any:
        """Return the result of a tool."""
        params = {"name": name, "arguments": arguments or {}, **more}
        found = await self.post("tools/call", params, *args)
        return found.get("result") or found["error"]

    async def get(self, task_id: str) -> Any:
        """Return the state of a task."""
        return (await self.post("tasks/get", {"taskId": task_id}))["result"]

    async def ended(self, task_id: str) -> Any:
        """Return the final state of a task."""
        async with asyncio.timeout(20):
            while (state := await self.get(task_id))["status"] in ("working", "input_required"):
                await asyncio.sleep(0.02)
        return state

    @asynccontextmanager
    async def listen(self, *task_ids: str) -> AsyncGenerator[Any]:
        """Yield the notifications of a stream for tasks."""
        method = "subscriptions/listen"
        meta = {**MODERN_META, "io.modelcontextprotocol/clientCapabilities": ALL}
        params = {"notifications": {"taskIds": list(task_ids)}, "_meta": meta}
        message = {"jsonrpc": "2.0", "id": 9, "method": method, "params": params}
        sent = {**modern_headers(method), "x-user": "ada"}
        async with self._http.post(self._url, json=message, headers=sent) as response:

            async def events() -> AsyncGenerator[dict[str, Any]]:
                async for line in response.content:
                    if line.startswith(b"data: "):
                        yield msgspec.json.decode(line[6:])

            yield events()


@asynccontextmanager
async def shop(url: str, **options: Any) -> AsyncGenerator[tuple[Shop, Client, OperationRegistry]]:
    """Serve the operations with a store of runs."""
    registry = OperationRegistry(runs=Runs(url, grace=0.0))
    shop = Shop()
    shop.fill(registry)

    async def identify(request: Request) -> Identity:
        return Identity(request.headers["x-user"], [])

    app = to_mcp(registry, identify=identify, **{"task_after": 0.05, **options}).asgi_app()
    async with registry, serving(app) as address, aiohttp.ClientSession() as http:
        yield shop, Client(http, address), registry
        shop.gate.set()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a new store."""
    return f"sqlite:{tmp_path / 'runs.db'}"


async def test_a_call_that_ends_in_time_returns_its_result(url: str) -> None:
    async with shop(url, task_after=10) as (_, client, _registry):
        result = await client.call("job__quick")

    assert result["resultType"] == "complete"
    assert result["structuredContent"] == 7


async def test_a_longer_call_becomes_a_task_with_its_result(url: str) -> None:
    async with shop(url) as (operations, client, _):
        created = await client.call("job__wait")
        await operations.begun.wait()
        assert created["resultType"] == "task"
        assert created["ttlMs"] is None
        assert created["pollIntervalMs"] == 500
        assert {"result", "error", "inputRequests", "requestState"}.isdisjoint(created)
        working = await client.get(created["taskId"])
        assert working["status"] == "working"
        assert working["resultType"] == "complete"
        operations.gate.set()
        ended = await client.ended(created["taskId"])

    assert ended["status"] == "completed"
    assert ended["result"]["structuredContent"] == "done"
    assert ended["ttlMs"] > 0


async def test_an_error_of_the_operation_is_the_result_of_a_completed_task(url: str) -> None:
    async with shop(url) as (operations, client, _):
        created = await client.call("job__fail")
        operations.gate.set()
        ended = await client.ended(created["taskId"])

    assert ended["status"] == "completed"
    assert ended["result"]["isError"] is True
    assert "EMPTY" in ended["result"]["content"][0]["text"]


async def test_questions_are_answered_with_updates(url: str) -> None:
    async with shop(url, task_after=30) as (_, client, _registry):
        # A question ends the wait at once.
        created = await client.call("job__ask")
        task_id = created["taskId"]
        async with asyncio.timeout(20):
            while len((state := await client.get(task_id)).get("inputRequests", {})) < 2:
                await asyncio.sleep(0.02)
        assert state["status"] == "input_required"
        keys = {
            next(iter(each["params"]["requestedSchema"]["properties"])): key
            for key, each in state["inputRequests"].items()
        }
        answer = {"action": "accept", "content": {"name": "Ada"}}
        wrong = {"action": "accept", "content": {"name": 1}}
        refused = await client.post(
            "tasks/update", {"taskId": task_id, "inputResponses": {keys["name"]: wrong}}
        )
        assert refused["error"]["code"] == -32602
        taken = await client.post(
            "tasks/update",
            {"taskId": task_id, "inputResponses": {keys["name"]: answer, "unknown": {}}},
        )
        assert taken["result"].keys() == {"resultType", "_meta"}
        assert list((await client.get(task_id))["inputRequests"]) == [keys["place"]]
        place = {"action": "accept", "content": {"place": "Rome"}}
        await client.post(
            "tasks/update", {"taskId": task_id, "inputResponses": {keys["place"]: place}}
        )
        ended = await client.ended(task_id)

    assert ended["result"]["structuredContent"] == "Ada in Rome"


async def test_a_client_sees_only_questions_that_it_can_answer(url: str) -> None:
    only_tasks: dict[str, Any] = {"extensions": {TASKS: {}}}
    async with shop(url) as (_, client, _registry):
        created = await client.call("job__ask", {}, only_tasks)
        found = await client.post("tasks/get", {"taskId": created["taskId"]}, only_tasks)
        while found["result"].get("statusMessage") in (None, "queued"):
            # It has not asked yet.
            found = await client.post("tasks/get", {"taskId": created["taskId"]}, only_tasks)

    assert found["result"]["status"] == "working"
    assert found["result"]["statusMessage"] == "waiting for an answer"


async def test_a_signal_is_not_a_question(url: str) -> None:
    async with shop(url) as (_, client, registry):
        task_id = (await client.call("job__signal"))["taskId"]
        state = await client.get(task_id)
        run = await registry.run(task_id, OperationContext(trusted=True))
        await run.signal("paid", 5)
        ended = await client.ended(task_id)

    assert (state["status"], state["statusMessage"]) == ("working", "waiting for paid")
    assert ended["result"]["structuredContent"] == 5


async def test_a_task_is_cancelled_and_the_acknowledgement_is_repeated(url: str) -> None:
    async with shop(url) as (_, client, _registry):
        task_id = (await client.call("job__wait"))["taskId"]
        first = await client.post("tasks/cancel", {"taskId": task_id})
        ended = await client.ended(task_id)
        second = await client.post("tasks/cancel", {"taskId": task_id})

    assert ended["status"] == "cancelled"
    assert "result" not in ended
    for acknowledged in (first, second):
        assert acknowledged["result"].keys() == {"resultType", "_meta"}


async def test_requests_without_the_extension_are_rejected(url: str) -> None:
    async with shop(url) as (_, client, _registry):
        task_id = (await client.call("job__wait"))["taskId"]
        for method in ("tasks/get", "tasks/update", "tasks/cancel"):
            refused = await client.post(method, {"taskId": task_id, "inputResponses": {}}, {})
            assert refused["error"]["code"] == -32021
            assert TASKS in refused["error"]["data"]["requiredCapabilities"]["extensions"]
        strict = await client.post("tools/call", {"name": "job__strict", "arguments": {}}, {})

    assert strict["error"]["code"] == -32021


async def test_tasks_of_others_are_unknown(url: str) -> None:
    async with shop(url) as (_, client, _registry):
        task_id = (await client.call("job__wait"))["taskId"]
        errors = [
            (await client.post("tasks/get", {"taskId": task_id}, user="bob"))["error"],
            (await client.post("tasks/get", {"taskId": "0" * 32}))["error"],
            (await client.post("tasks/get", {"taskId": "a task"}))["error"],
        ]

    assert {error["code"] for error in errors} == {-32602}
    assert {error["message"] for error in errors} == {"Unknown task"}


async def test_the_name_header_must_name_the_task(url: str) -> None:
    async with shop(url) as (_, client, _registry):
        task_id = (await client.call("job__wait"))["taskId"]
        other = await client.post("tasks/get", {"taskId": task_id}, named="0" * 32)

    assert other["error"]["code"] == -32020


async def test_methods_that_were_removed_are_unknown(url: str) -> None:
    async with shop(url) as (_, client, _registry):
        for method in ("tasks/list", "tasks/result"):
            assert (await client.post(method, {}))["error"]["code"] == -32601


async def test_the_server_offers_tasks_only_with_a_store(url: str) -> None:
    async with shop(url) as (_, client, _registry):
        offered = (await client.post("server/discover", {}))["result"]["capabilities"]
    app = to_mcp(OperationRegistry()).asgi_app()
    async with serving(app) as address, aiohttp.ClientSession() as http:
        without = (await Client(http, address).post("server/discover", {}))["result"]
        refused = await Client(http, address).post("tasks/get", {"taskId": "1"})

    assert TASKS in offered["extensions"]
    assert "tasks" not in offered
    assert TASKS not in (without["capabilities"].get("extensions") or {})
    assert refused["error"]["code"] == -32601


async def test_a_stream_reports_every_state_of_a_task(url: str) -> None:
    async with shop(url) as (operations, client, _):
        task_id = (await client.call("job__wait"))["taskId"]
        async with client.listen(task_id, "0" * 32) as events, asyncio.timeout(20):
            acknowledged = await anext(events)
            assert acknowledged["params"]["notifications"]["taskIds"] == [task_id]
            operations.gate.set()
            async for each in events:
                assert each["method"] == "notifications/tasks"
                last = each["params"]
                if last["status"] == "completed":
                    break

    assert last["taskId"] == task_id
    assert last["result"]["structuredContent"] == "done"
    assert last["_meta"]["io.modelcontextprotocol/subscriptionId"] == 9


async def test_a_client_without_tasks_gets_the_result(url: str) -> None:
    async with shop(url) as (operations, client, _):
        calling = asyncio.create_task(client.call("job__wait", {}, {}))
        await operations.begun.wait()
        operations.gate.set()
        result = await calling

    assert result["resultType"] == "complete"
    assert result["structuredContent"] == "done"


async def test_the_limit_of_a_client_without_tasks_names_the_run(url: str) -> None:
    async with shop(url, timeout=1) as (operations, client, registry):
        result = await client.call("job__strict", {}, None)
        run_id = result["taskId"]
        late = await client.call("job__wait", {}, {})
        assert late["isError"] is True
        error = late["_meta"]["alkdev.operations/error"]
        assert error["code"] == "TIMEOUT"
        run = await registry.run(error["details"]["run"], OperationContext(trusted=True))
        assert not run.state.is_final
        assert run.id != run_id
        operations.gate.set()
        assert (await run.result(20)).data == "done"


async def test_a_client_without_tasks_is_asked(url: str) -> None:
    capabilities: dict[str, Any] = {"elicitation": {}}
    async with shop(url) as (_, client, _registry):
        asked = await client.call("job__ask", {}, capabilities)
        answers: dict[str, Any] = {}
        while asked["resultType"] == "input_required":
            for key, each in asked["inputRequests"].items():
                field = next(iter(each["params"]["requestedSchema"]["properties"]))
                value = {"name": "Ada", "place": "Rome"}[field]
                answers[key] = {"action": "accept", "content": {field: value}}
            state = asked["requestState"]
            asked = await client.call(
                "job__ask", {}, capabilities, requestState=state, inputResponses=answers
            )

    assert asked["structuredContent"] == "Ada in Rome"


@pytest.mark.parametrize("takes_tasks", [True, False])
async def test_a_handler_asks_first_and_hands_a_run_over(url: str, takes_tasks: bool) -> None:
    capabilities: dict[str, Any] = ALL if takes_tasks else {"elicitation": {}}
    async with shop(url) as (_, client, _registry):
        asked = await client.call("job__first", {}, capabilities)
        assert asked["resultType"] == "input_required"
        key = next(iter(asked["inputRequests"]))
        answers = {key: {"action": "accept", "content": {"name": "Ada"}}}
        result = await client.call(
            "job__first",
            {},
            capabilities,
            requestState=asked["requestState"],
            inputResponses=answers,
        )
        assert result["resultType"] == ("task" if takes_tasks else "complete")
        if takes_tasks:
            result = (await client.ended(result["taskId"]))["result"]

    assert result["structuredContent"] == "Hello Ada"


async def test_a_task_survives_its_server(url: str) -> None:
    async with shop(url) as (_, client, _registry):
        task_id = (await client.call("job__signal"))["taskId"]
    async with shop(url) as (_, client, registry):
        assert (await client.get(task_id))["status"] == "working"
        run = await registry.run(task_id, OperationContext(trusted=True))
        await run.signal("paid", 5)
        ended = await client.ended(task_id)

    assert ended["result"]["structuredContent"] == 5


async def test_the_operator_limits_what_is_offered(url: str) -> None:
    async with shop(url, extensions=[], timeout=1) as (_, client, _registry):
        offered = (await client.post("server/discover", {}))["result"]["capabilities"]
        refused = await client.post("tasks/get", {"taskId": "0" * 32})
        result = await client.call("job__wait")

    assert not offered.get("extensions")
    assert refused["error"]["code"] == -32601
    assert result["_meta"]["alkdev.operations/error"]["details"]["run"]
