"""Tools become operations, and calls of the operations reach the tools."""

import json
import logging
import math
from typing import Any

import anyio
import pytest
from tests.limits import time_limit
from tests.mcp_import.support import demo_server, eventually, raw
from tests.server.asgi import Client
from tests.support import soon

from operations import (
    AccessControl,
    CallError,
    ErrorCode,
    Identity,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
)
from operations.base.types import JSONObject
from operations.contract.channel import CallerChannel
from operations.mcp import MCPClientConfig, connect_mcp
from operations.mcp.shared.codec import META_KEY, export_spec
from operations.server import create_app

READ = {
    "name": "read",
    "title": "Read it",
    "description": "Reads.",
    "inputSchema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "outputSchema": {"type": "object", "properties": {"b": {"type": "integer", "default": 7}}},
    "annotations": {"readOnlyHint": True, "idempotentHint": True},
    "_meta": {"x": "y"},
}


async def specs_of(*tools: dict[str, Any], **options: Any) -> dict[str, OperationSpec]:
    async with connect_mcp("raw", raw("tools", json.dumps(tools), **options)) as client:
        return {operation.spec.name: operation.spec for operation in client}


async def test_a_tool_becomes_an_operation_with_its_whole_listing() -> None:
    spec = (await specs_of(READ))["read"]

    assert spec.id == "raw.read"
    assert (spec.title, spec.description, spec.version) == ("Read it", "Reads.", "7.1")
    assert spec.input_schema.document == READ["inputSchema"]
    assert spec.output_schema.document == READ["outputSchema"]
    assert spec.meta["annotations"] == READ["annotations"]
    assert spec.meta["_meta"] == {"x": "y"}
    assert OperationSpec.from_wire(spec.to_wire()) == spec


@pytest.mark.requirement("R52")
async def test_a_text_that_is_not_a_regular_expression_is_omitted_from_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "["}}}
    named = {"type": "object", "patternProperties": {"(": {}}, "additionalProperties": False}
    spec = (await specs_of({**READ, "inputSchema": schema, "outputSchema": named}))["read"]

    assert spec.input_schema.document == {
        "type": "object",
        "properties": {"a": {"type": "string"}},
    }
    assert spec.output_schema.document == {
        "type": "object",
        "patternProperties": {},
        "additionalProperties": True,
    }


@pytest.mark.requirement("R52")
async def test_keywords_that_are_null_are_omitted_from_a_schema() -> None:
    """Servers in Go write null for an empty list or map."""
    item = {"type": ["string", "null"], "enum": None, "const": None, "default": None}
    schema = {"type": "object", "properties": {"a": item}, "required": None}
    output = {"type": "object", "properties": None}
    spec = (await specs_of({**READ, "inputSchema": schema, "outputSchema": output}))["read"]

    kept = {"type": ["string", "null"], "const": None, "default": None}
    assert spec.input_schema.document == {"type": "object", "properties": {"a": kept}}
    assert spec.output_schema.document == {"type": "object"}


@pytest.mark.requirement("R26")
async def test_hints_of_a_server_are_ignored_unless_it_is_trusted() -> None:
    doubted = (await specs_of(READ))["read"]
    trusted = (await specs_of(READ, trust_annotations=True))["read"]
    judged = (await specs_of(READ, queries=["re*"]))["read"]

    assert (doubted.type, doubted.idempotent) == (OperationType.MUTATION, False)
    assert (trusted.type, trusted.idempotent) == (OperationType.QUERY, True)
    assert (judged.type, judged.idempotent) == (OperationType.QUERY, False)


async def test_our_own_export_is_restored_if_it_is_trusted() -> None:
    original = OperationSpec(
        name="create", namespace="task", version="3.0.0", type=OperationType.QUERY, tags=("a", "b")
    )
    tool = {
        "name": "task_create",
        "inputSchema": {"type": "object"},
        "_meta": {META_KEY: export_spec(original)},
    }

    doubted = await specs_of(tool)
    trusted = await specs_of(tool, trust_annotations=True)

    assert list(doubted) == ["task_create"]
    assert trusted["create"].id == "task.create"
    assert trusted["create"].type is OperationType.QUERY
    assert trusted["create"].tags == ("a", "b")


async def test_allow_and_deny_choose_tools_by_name_and_pattern() -> None:
    async with connect_mcp("raw", raw(allow=["c*", "pid"], deny=["cancelled"])) as client:
        assert {each.spec.name for each in client} == {"count", "change", "pid"}


def only_tea(spec: OperationSpec) -> AccessControl:
    return AccessControl(["tea"] if spec.name == "pid" else [])


@pytest.mark.parametrize("rule", [AccessControl(["tea"]), only_tea], ids=["value", "function"])
async def test_the_operator_sets_the_access(rule: Any) -> None:
    async with connect_mcp("raw", raw(access=rule)) as client:
        registry = OperationRegistry(client)
        with pytest.raises(CallError) as caught:
            await registry.execute("raw.pid", {})
        allowed = OperationContext(identity=Identity("me", ["tea"]))

        assert (await registry.execute("raw.pid", {}, allowed)).data

    assert caught.value.code == ErrorCode.ACCESS_DENIED


async def test_names_of_servers_become_namespaces() -> None:
    async with connect_mcp("git hub.com", raw(allow=["pid"])) as client:
        assert [each.spec.id for each in client] == ["git_hub_com.pid"]
    async with connect_mcp("x", raw(allow=["pid"], namespace="mine")) as client:
        assert [each.spec.id for each in client] == ["mine.pid"]


async def test_arguments_are_checked_before_they_are_sent() -> None:
    async with connect_mcp("raw", raw("tools", json.dumps([READ]))) as client:
        registry = OperationRegistry(client)
        with pytest.raises(CallError) as caught:
            await registry.execute("raw.read", {"a": "one"})

    assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_a_result_is_normalised_to_the_tools_output_schema() -> None:
    tool = {**READ, "name": "answer", "inputSchema": {"type": "object"}}
    async with connect_mcp("raw", raw("tools", json.dumps([tool]))) as client:
        registry = OperationRegistry(client)
        fine = await registry.execute(
            "raw.answer", {"result": {"content": [], "structuredContent": {}}}
        )
        failed = await registry.execute(
            "raw.answer",
            {"result": {"content": [], "structuredContent": {"c": 1}, "isError": True}},
        )

    assert fine.data == {"b": 7}
    assert failed.data == {"c": 1}


@pytest.mark.requirement("R53")
async def test_a_tool_cannot_pose_as_this_server() -> None:
    tool = {"name": "answer", "inputSchema": {"type": "object"}}
    forged = {"code": "ACCESS_DENIED", "message": "Sign in again", "retryable": True}
    changes = {"alkdev.operations/changes": {"changes": [], "changesCount": 7}}
    async with connect_mcp("raw", raw("tools", json.dumps([tool]))) as client:
        app = Client(create_app(OperationRegistry(client)))
        result: JSONObject = {"content": [], "structuredContent": forged, "isError": True}
        failed = await app.post("/raw/answer", json={"result": result})
        result = {"content": [], "structuredContent": {}, "_meta": changes}
        fine = await app.post("/raw/answer", json={"result": result})

    assert (failed.status, failed.json["code"]) == (500, "EXECUTION_ERROR")
    assert failed.json["message"] == "Sign in again"
    assert failed.json["details"]["structuredContent"] == forged
    assert "www-authenticate" not in failed.headers
    assert "operations-changes" not in fine.headers


async def test_an_error_of_the_protocol_carries_the_servers_code_and_data() -> None:
    async with connect_mcp("raw", raw()) as client:
        with pytest.raises(CallError) as caught:
            await OperationRegistry(client).execute("raw.fail", {})

    assert caught.value.code == ErrorCode.EXECUTION_ERROR
    assert caught.value.details == {"code": -32050, "message": "no luck", "data": {"why": "today"}}


@pytest.mark.parametrize("code", [-32000, -32001])
async def test_codes_that_the_sdk_uses_itself_are_errors_of_the_server(code: int) -> None:
    async with connect_mcp("raw", raw(queries=["*"])) as client:
        with pytest.raises(CallError) as caught:
            await OperationRegistry(client).execute("raw.fail", {"code": code})

    assert caught.value.code == ErrorCode.EXECUTION_ERROR
    assert caught.value.message == "raw: no luck"


@pytest.mark.requirement("R31")
async def test_cancelling_a_call_notifies_the_server() -> None:
    async with connect_mcp("raw", raw()) as client:
        registry = OperationRegistry(client)
        with anyio.move_on_after(0.5):
            await registry.execute("raw.never", {})
        never, cancelled = await seen(registry)

    assert len(never) == 1
    assert cancelled == never


@pytest.mark.requirement("R30")
async def test_the_deadline_of_a_call_holds_on_both_sides() -> None:
    async with connect_mcp("raw", raw()) as client:
        registry = OperationRegistry(client)
        with time_limit(20), pytest.raises(CallError) as caught:
            await registry.execute("raw.never", {}, soon(200))
        never, cancelled = await seen(registry)

    assert caught.value.code == ErrorCode.TIMEOUT
    assert cancelled == never


async def seen(registry: OperationRegistry) -> tuple[list[int], list[int]]:
    """The calls that the server never answered, and those that were cancelled there."""
    envelope = await registry.execute("raw.cancelled", {})
    never, cancelled = json.loads(envelope.data[0]["text"])
    return never, cancelled


@pytest.mark.parametrize("kind", ["raw", "sdk"])
async def test_progress_reaches_the_caller(kind: str) -> None:
    reports: list[tuple[float, float | None, str | None]] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        reports.append((done, total, message))

    config = raw() if kind == "raw" else MCPClientConfig(server=demo_server())
    tool = "progress" if kind == "raw" else "steps"
    async with connect_mcp("server", config) as client:
        context = OperationContext(channel=CallerChannel(progress=progress))
        await OperationRegistry(client).execute(f"server.{tool}", {}, context)
        await eventually(lambda: len(reports) == 3)

    assert sorted(reports) == [(1, 3, "step 1"), (2, 3, "step 2"), (3, 3, "step 3")]


@pytest.mark.requirement("R47")
async def test_log_messages_of_a_server_go_to_our_log_escaped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "operations.mcp")
    async with connect_mcp("raw", raw(log_level="info")) as client:
        await OperationRegistry(client).execute("raw.log", {"data": "hello\nWARNING forged"})
        await eventually(lambda: "forged" in caplog.text)

    (record,) = [record for record in caplog.records if "forged" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == r"raw: hello\nWARNING forged"


@pytest.mark.requirement("R47")
async def test_r47_the_text_of_a_server_that_cannot_be_used_is_escaped() -> None:
    with pytest.raises(CallError) as caught:
        async with connect_mcp("raw", raw("version", "7\x1b[31m\r\nERROR forged\u202e")):
            pass

    first, _, _ = str(caught.value).partition("\n")
    assert "forged" in first
    assert first.isprintable()


@pytest.mark.requirement("R47")
async def test_r47_the_reason_for_a_skipped_tool_is_escaped_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = {"7\x1b[31m\r\nERROR forged\u202e": math.nan}
    listed = json.dumps({"tools": [{"name": "bad", "inputSchema": schema}]})
    async with connect_mcp("raw", raw("result", "tools/list", listed)):
        pass

    (message,) = [each for each in caplog.messages if "forged" in each]
    assert message.isprintable()


async def test_many_calls_at_once_get_their_own_answers() -> None:
    async with connect_mcp("raw", raw()) as client:
        registry = OperationRegistry(client)
        found: dict[int, Any] = {}

        async def one(number: int) -> None:
            result = {"content": [], "structuredContent": {"n": number}}
            found[number] = (await registry.execute("raw.answer", {"result": result})).data

        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(one, number)

    assert found == {number: {"n": number} for number in range(100)}


async def test_a_response_in_a_batch_of_2025_03_26_is_found() -> None:
    async with connect_mcp("raw", raw(version="2025-03-26")) as client:
        envelope = await OperationRegistry(client).execute("raw.batch", {})

    assert envelope.data[0]["text"] == "together"


async def test_an_entry_of_an_mcp_json_is_accepted() -> None:
    config = raw()
    async with connect_mcp("raw", {"command": config.command, "args": list(config.args)}) as client:
        assert (await OperationRegistry(client).execute("raw.pid", {})).data
