"""Operations as tools for clients of all protocol revisions, through the SDK's client in memory."""

import asyncio
from base64 import b64decode
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from mcp import Client, MCPError
from mcp_types import INVALID_PARAMS
from tests.mcp_serving.support import ERAS, PNG, error_of, example, tool_names

from operations import (
    CallError,
    ErrorCode,
    ErrorDefinition,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    Schema,
    mcp_envelope,
)
from operations.base.types import JSONObject
from operations.contract.envelopes import ImageContent, MCPContentBlock, TextContent, sniffed
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.mcp.shared.codec import DATA_KEY, META_KEY, WRAPPED

BOTH = pytest.mark.parametrize("era", ERAS)


def wire(model: Any) -> JSONObject:
    dumped: JSONObject = model.model_dump(by_alias=True, mode="json", exclude_none=True)
    return dumped


async def call(
    registry: OperationRegistry, era: str, name: str, arguments: Any = None
) -> JSONObject:
    async with Client(to_mcp(registry), mode=era) as client:
        await client.list_tools()
        return wire(await client.call_tool(name, arguments or {}))


@dataclass
class Line:
    sku: str
    colour: Literal["red", "green"] | None = None


@BOTH
async def test_arguments_are_described_without_references(era: str) -> None:
    registry = OperationRegistry()

    @registry.operation("shop.order")
    async def order(lines: list[Line]) -> int:
        return len(lines)

    async with Client(to_mcp(registry), mode=era) as client:
        (tool,) = (await client.list_tools()).tools

    assert "$defs" not in tool.input_schema
    assert tool.input_schema["properties"]["lines"]["items"]["required"] == ["sku"]


@BOTH
async def test_a_tool_has_the_contract_of_its_operation(era: str) -> None:
    async with Client(to_mcp(example()), mode=era) as client:
        tools = {tool.name: wire(tool) for tool in (await client.list_tools()).tools}

    add = tools["math__add"]
    assert (add["title"], add["description"]) == ("Add", "Add two numbers.")
    assert add["inputSchema"]["required"] == ["a"]
    assert add["annotations"] == {
        "readOnlyHint": True,
        "destructiveHint": False,
        "idempotentHint": True,
    }
    assert tools["task__fail"]["annotations"] == {"readOnlyHint": False}
    assert tools["task__watch"]["annotations"]["readOnlyHint"] is True
    assert add["_meta"][META_KEY] == {
        "namespace": "math",
        "name": "add",
        "type": "query",
        "version": "1.0.0",
        "tags": ["sum"],
        "idempotent": False,
        **({"output": "boxed"} if era == "legacy" else {}),
    }
    (error,) = tools["task__fail"]["_meta"][META_KEY]["errorSchemas"]
    assert error["code"] == "TASK_LOCKED"


@BOTH
async def test_outputs_that_are_not_objects_are_wrapped_for_older_clients_only(era: str) -> None:
    async with Client(to_mcp(example()), mode=era) as client:
        tools = {tool.name: tool.output_schema for tool in (await client.list_tools()).tools}
        added = await client.call_tool("math__add", {"a": 1})
        got = await client.call_tool("task__get", {"id": "7"})

    assert got.structured_content == {"id": "7"}
    assert added.content[0].text == "2"  # type: ignore[union-attr]
    if era == "legacy":
        boxed = {"properties": {"result": {"type": "integer"}}, "required": ["result"]}
        assert tools["math__add"] == {"type": "object", **boxed, WRAPPED: True}
        assert added.structured_content == {"result": 2}
    else:
        assert tools["math__add"] == {"type": "integer"}
        assert added.structured_content == 2


@BOTH
@pytest.mark.parametrize("name", ["x", ""])
async def test_null_and_no_result_are_distinguished(era: str, name: str) -> None:
    result = await call(example(), era, "task__find", {"name": name})

    assert result["structuredContent"] == {"result": name or None}


@BOTH
async def test_null_of_an_operation_without_a_result_type_is_structured_content(
    era: str, registry: OperationRegistry
) -> None:
    @registry.operation("test.get")
    async def get():  # type: ignore[no-untyped-def]
        return None

    result = await call(registry, era, "test__get")
    config = MCPClientConfig(
        server=to_mcp(registry),
        trust_annotations=True,
        version="2025-11-25" if era == "legacy" else "auto",
    )
    async with connect_mcp("far", config) as imported:
        hub = OperationRegistry(imported)
        restored = await hub.execute("test.get", {})
        forwarded = await call(hub, era, "test__get")

    assert result["structuredContent"] == forwarded["structuredContent"] == {"result": None}
    assert restored.data is None


@BOTH
async def test_a_declared_error_is_a_result_with_its_code_and_details(era: str) -> None:
    result = await call(example(), era, "task__fail")

    assert result["isError"] is True
    assert "structuredContent" not in result  # the tool declares an output schema
    assert error_of(result) == {
        "code": "TASK_LOCKED",
        "message": "locked",
        "details": {"by": "ann"},
    }
    assert result["content"][0]["text"].startswith("TASK_LOCKED: locked")


@BOTH
@pytest.mark.parametrize(
    ("raised", "shown"),
    [("NOPE: not today", "NOPE: not today"), ("NOPE", "NOPE")],
)
async def test_the_text_of_an_error_has_its_code_once(
    era: str, raised: str, shown: str, registry: OperationRegistry
) -> None:
    @registry.operation("test.fail", errors=[ErrorDefinition("NOPE")])
    async def fail() -> None:
        raise LookupError(raised)

    result = await call(registry, era, "test__fail")

    assert result["content"][0]["text"] == shown
    assert error_of(result)["code"] == "NOPE"


@BOTH
@pytest.mark.requirement("R17")
async def test_an_unexpected_error_shows_only_its_code_and_the_request_id(
    era: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = await call(example(), era, "task__crash")

    assert result["isError"] is True
    error = error_of(result)
    assert error["code"] == ErrorCode.EXECUTION_ERROR
    assert "hunter2" not in str(result)
    assert "hunter2" in caplog.text
    assert error["details"]["requestId"] in caplog.text


async def test_unexpected_errors_are_shown_if_the_operator_allows_it() -> None:
    async with Client(to_mcp(example(), expose_errors=True)) as client:
        result = await client.call_tool("task__crash", {})

    assert "hunter2" in str(error_of(result))


@pytest.mark.requirement("R17")
async def test_upstream_credentials_and_long_bodies_are_not_sent_to_callers(
    registry: OperationRegistry,
) -> None:
    @registry.operation("up.stream")
    async def stream(size: int) -> None:
        headers = {"set-cookie": "s=CANARY", "x-ok": "1"}
        raise CallError("EXECUTION_ERROR", "HTTP 500", {"headers": headers, "body": "x" * size})

    short = await call(registry, "auto", "up__stream", {"size": 3})
    long = await call(registry, "auto", "up__stream", {"size": 100_000})

    assert error_of(short)["details"] == {"headers": {"x-ok": "1"}, "body": "xxx"}
    assert "omitted" in error_of(long)["details"]


@BOTH
async def test_invalid_arguments_are_named_by_their_paths(era: str) -> None:
    result = await call(example(), era, "math__add", {"a": "x", "c": 1})

    assert result["isError"] is True
    assert error_of(result)["code"] == ErrorCode.VALIDATION_ERROR
    assert {error["path"] for error in error_of(result)["details"]["errors"]} == {
        "/a",
        "/c",
    }


@BOTH
async def test_an_unknown_tool_is_an_error_of_the_protocol(era: str) -> None:
    async with Client(to_mcp(example()), mode=era) as client:
        with pytest.raises(MCPError) as caught:
            await client.call_tool("no__such", {})

    assert caught.value.code == INVALID_PARAMS


@BOTH
async def test_bytes_are_images_sound_or_blobs(era: str) -> None:
    icon = await call(example(), era, "file__icon")
    fetched = await call(example(), era, "file__fetch")

    assert icon["content"][0]["type"] == "image"
    assert b64decode(icon["content"][0]["data"]) == PNG
    assert fetched["content"][0]["resource"]["mimeType"] == "application/zip"
    assert icon["_meta"][DATA_KEY] == "bytes"


@pytest.mark.parametrize(
    ("data", "mime_type"),
    [
        (b"RIFF....WAVE", "audio/wav"),
        (b"RIFF....WEBP", "image/webp"),
        (b"\xff\xd8\xff", "image/jpeg"),
        (b"?", "application/octet-stream"),
    ],
)
def test_the_type_of_bytes_is_detected_from_their_first_bytes(data: bytes, mime_type: str) -> None:
    assert sniffed(data) == mime_type


@BOTH
async def test_an_imported_envelope_passes_its_blocks_on(
    registry: OperationRegistry, era: str
) -> None:
    blocks: list[MCPContentBlock] = [
        TextContent(text="hi"),
        ImageContent(data="AA==", mime_type="image/png"),
    ]

    @registry.operation("far.tool")
    async def tool(failing: bool) -> Any:
        return mcp_envelope(
            {"a": 1},
            is_error=failing,
            content=list(blocks),
            structured_content={"a": 1},
            meta={"k": "v"},
        )

    fine = await call(registry, era, "far__tool", {"failing": False})
    failed = await call(registry, era, "far__tool", {"failing": True})

    assert [block["type"] for block in fine["content"]] == ["text", "image"]
    assert fine["structuredContent"] == {"a": 1}
    assert fine["_meta"]["k"] == "v"
    assert failed["isError"] is True
    assert failed["structuredContent"] == {"a": 1}


@BOTH
async def test_an_input_that_is_not_an_object_is_wrapped_in_input(era: str) -> None:
    async def total(value: Any, _context: OperationContext) -> Any:
        return {"total": sum(value)}

    spec = OperationSpec(
        namespace="math",
        name="total",
        type=OperationType.QUERY,
        input_schema=Schema(
            {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "integer"}}}
        ),
    )
    registry = OperationRegistry([Operation(spec, total)])

    result = await call(registry, era, "math__total", {"input": [1, 2]})
    refused = await call(registry, era, "math__total", {"input": ["x"]})

    assert result["content"][0]["text"] == '{"total":3}'
    assert refused["isError"] is True


@BOTH
async def test_a_subscription_sends_each_item_as_progress_and_returns_all_at_the_end(
    era: str,
) -> None:
    reports: list[str | None] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        reports.append(message)

    async with Client(to_mcp(example(), max_items=3), mode=era) as client:
        two = await client.call_tool("task__watch", {"n": 2}, progress_callback=hear)
        many = await client.call_tool("task__watch", {"n": 5})

    assert reports == ["0", "1"]
    assert two.structured_content == {"items": [0, 1], "complete": True}
    assert many.structured_content == {"items": [0, 1, 2], "complete": False}


@pytest.mark.requirement("R12")
async def test_an_endless_subscription_ends_with_the_items_so_far(
    registry: OperationRegistry,
) -> None:
    @registry.operation("clock.ticks")
    async def ticks() -> Any:
        yield 1
        await asyncio.Event().wait()

    async with Client(to_mcp(registry, timeout=1)) as client:
        result = await client.call_tool("clock__ticks", {})

    assert result.structured_content == {"items": [1], "complete": False}


@BOTH
async def test_a_tool_of_a_source_that_is_not_connected_is_unavailable(era: str) -> None:
    """As at other entry points: an agent must not conclude that there is no such tool."""
    registry = OperationRegistry()
    registry.follow_sources(
        is_absent=lambda namespace: namespace == "shop", awaits_any=lambda: True
    )
    async with Client(to_mcp(registry), mode=era) as client:
        result = await client.call_tool("shop__order", {"item": 1})
        with pytest.raises(MCPError, match="Unknown tool: task__add"):
            await client.call_tool("task__add", {})

    assert result.is_error
    error = error_of(result)
    assert (error["code"], error["retryable"]) == ("UNAVAILABLE", True)
    assert error["message"].startswith("shop.order is not available now")


@BOTH
@pytest.mark.requirement("R07")
async def test_callers_see_and_call_operations_with_access(era: str) -> None:
    writer = Identity("ann", ["task:write"])
    async with Client(to_mcp(example()), mode=era) as client:
        assert "task__delete" not in await tool_names(client)
        with pytest.raises(MCPError, match=r"Unknown tool: task__delete"):
            await client.call_tool("task__delete", {"id": "1"})
    async with Client(to_mcp(example(), scopes_supported=["task:write"]), mode=era) as client:
        denied = await client.call_tool("task__delete", {"id": "1"})
    async with Client(to_mcp(example(), identity=writer), mode=era) as client:
        assert "task__delete" in await tool_names(client)
        allowed = await client.call_tool("task__delete", {"id": "1"})

    assert denied.is_error
    assert error_of(denied)["code"] == ErrorCode.ACCESS_DENIED
    assert not allowed.is_error


@BOTH
async def test_long_listings_come_in_pages(era: str) -> None:
    async with Client(to_mcp(example(), page_size=4), mode=era) as client:
        first = await client.list_tools()
        names = [tool.name for tool in first.tools]
        cursor = first.next_cursor
        while cursor is not None:
            page = await client.list_tools(cursor=cursor)
            names += [tool.name for tool in page.tools]
            cursor = page.next_cursor
        with pytest.raises(MCPError):
            await client.list_tools(cursor="nonsense")

    assert len(first.tools) == 4
    assert len(names) == len(set(names)) == len(example()) - 1


async def test_a_cursor_survives_a_change_of_the_registry() -> None:
    registry = numbered(*range(10, 16))
    async with Client(to_mcp(registry, page_size=2)) as client:
        first = await client.list_tools()
        registry.unregister("many.n10")
        numbered(16, registry=registry)
        names = [tool.name for tool in first.tools]
        cursor = first.next_cursor
        while cursor is not None:
            page = await client.list_tools(cursor=cursor)
            names += [tool.name for tool in page.tools]
            cursor = page.next_cursor

    assert names == [f"many__n{number}" for number in range(10, 17)]


async def test_an_outdated_cursor_is_rejected_with_the_reason() -> None:
    registry = numbered(*range(10, 16))
    async with Client(to_mcp(registry, page_size=2)) as client:
        cursor = (await client.list_tools()).next_cursor
        registry.unregister("many.n11")
        with pytest.raises(MCPError, match="the list has changed; list again"):
            await client.list_tools(cursor=cursor)


def numbered(*numbers: int, registry: OperationRegistry | None = None) -> OperationRegistry:
    registry = registry or OperationRegistry()
    for number in numbers:

        async def nothing() -> None:
            return None

        registry.operation(f"many.n{number}", type="query")(nothing)
    return registry


@pytest.mark.parametrize("field", ["page_size", "timeout", "max_tools"])
def test_settings_are_positive(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        to_mcp(OperationRegistry(), **{field: 0})  # type: ignore[arg-type]
