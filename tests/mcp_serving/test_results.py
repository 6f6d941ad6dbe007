"""Output schemas keep their meaning: which tools list them exactly, and what clients get for other results."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
import pytest
from mcp import Client
from mcp.server import Server
from tests.mcp_serving.support import ERAS, error_of

from operations import (
    ErrorCode,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    ResponseEnvelope,
    Schema,
    http_envelope,
)
from operations.base.types import JSONObject, JSONSchema
from operations.contract.specs import OutputPolicy
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.mcp.serving.tools import MISMATCH
from operations.openapi import HTTPServiceConfig, from_openapi

BOTH = pytest.mark.parametrize("era", ERAS)


def wire(model: Any) -> JSONObject:
    dumped: JSONObject = model.model_dump(by_alias=True, mode="json", exclude_none=True)
    return dumped


def giving(
    data: Any, schema: JSONSchema, kind: OperationType = OperationType.QUERY, **options: Any
) -> OperationRegistry:
    """A registry with one operation, `test.get`, that returns `data`."""

    async def get(_input: Any, _context: OperationContext) -> Any:
        return data

    async def stream(_input: Any, _context: OperationContext) -> AsyncGenerator[Any]:
        yield data

    spec = OperationSpec(name="get", namespace="test", type=kind, output_schema=Schema(schema))
    handler = stream if kind is OperationType.SUBSCRIPTION else get
    return OperationRegistry([Operation(spec, handler, **options)])


async def listed_and_called(registry: OperationRegistry, era: str) -> tuple[Any, JSONObject]:
    """The output schema of the only tool, and its result."""
    async with Client(to_mcp(registry), mode=era) as client:
        (tool,) = (await client.list_tools()).tools
        return tool.output_schema, wire(await client.call_tool(tool.name, {}))


TASK: JSONSchema = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "done": {"type": "boolean", "default": False}},
    "required": ["id"],
    "additionalProperties": False,
}


@BOTH
@pytest.mark.requirement("R52")
@pytest.mark.parametrize("kind", ["object", "array"])
@pytest.mark.parametrize("data", [[1, 2], {"a": 1}, None, "text", b"\0\1"], ids=repr)
@pytest.mark.parametrize("policy", ["cast", "off"])
async def test_a_result_that_does_not_match_is_an_error_that_forbids_to_repeat_the_call(
    era: str, kind: str, data: Any, policy: OutputPolicy
) -> None:
    matches = type(data) is {"object": dict, "array": list}[kind]
    registry = giving(data, {"type": kind}, output=policy)

    _, result = await listed_and_called(registry, era)
    here = await registry.execute("test.get", {})

    assert result.get("isError", False) is not matches
    assert here.data == data
    if matches:
        return
    assert result["content"][0]["text"] == MISMATCH
    assert "structuredContent" not in result
    error = error_of(result)
    assert error["code"] == ErrorCode.EXECUTION_ERROR
    assert "retryable" not in error
    assert len(error["details"]["mismatches"]) == 1
    if not isinstance(data, bytes):
        assert error["details"]["data"] == data
    config = MCPClientConfig(server=to_mcp(registry), trust_annotations=True)
    async with connect_mcp("far", config) as imported:
        envelope = await OperationRegistry(imported).execute("test.get", {})
    assert envelope.meta.is_error is True  # type: ignore[union-attr]


@BOTH
async def test_an_item_that_does_not_match_is_an_error(era: str) -> None:
    registry = giving("x", {"type": "integer"}, OperationType.SUBSCRIPTION)

    _, result = await listed_and_called(registry, era)

    details = error_of(result)["details"]
    assert details["data"] == {"items": ["x"], "complete": True}
    assert [each["path"] for each in details["mismatches"]] == ["/items/0"]


@BOTH
async def test_bytes_that_the_schema_allows_beside_other_values_match(era: str) -> None:
    text: JSONSchema = {"type": "string", "contentEncoding": "base64"}
    schema: JSONSchema = {"anyOf": [text, {"type": "null"}]}

    _, result = await listed_and_called(giving(b"\0\1", schema), era)

    assert not result["isError"], result
    assert result["structuredContent"] == {"result": "AAE="}


LARGE: JSONSchema = {**TASK, "description": "x" * 2_100}  # type: ignore[dict-item]


def http_service(schema: JSONSchema, *, exact: bool) -> OperationRegistry:
    document: JSONObject = {
        "openapi": "3.1.0",
        "info": {"title": "t", "version": "1"},
        "paths": {
            "/task": {
                "get": {
                    "operationId": "get",
                    "responses": {
                        "200": {
                            "description": "",
                            "content": {"application/json": {"schema": schema}},
                        }
                    },
                }
            }
        },
    }
    config = HTTPServiceConfig(namespace="test", base_url="http://127.0.0.1:9", exact_schemas=exact)
    registry = OperationRegistry(from_openapi(document, config))

    async def answer(call: Any, next: Any) -> ResponseEnvelope[Any]:
        data = {"id": 7, "name": "n"}
        return http_envelope(data, status_code=200, headers={}, content_type="application/json")

    registry.use(answer)
    return registry


async def test_an_openapi_source_lists_open_schemas_up_to_2_kb() -> None:
    async with Client(to_mcp(http_service(TASK, exact=False))) as client:
        (small,) = (await client.list_tools()).tools
        result = await client.call_tool("test__get", {})
    async with Client(to_mcp(http_service(LARGE, exact=False))) as client:
        (large,) = (await client.list_tools()).tools
    async with Client(to_mcp(http_service(LARGE, exact=True))) as client:
        (exact,) = (await client.list_tools()).tools

    assert small.output_schema is not None
    assert small.output_schema["anyOf"][1] == {}
    assert small.output_schema["anyOf"][0]["properties"].keys() == {"id", "done"}
    assert result.structured_content == {"id": 7, "name": "n"}
    assert large.output_schema is None
    assert exact.output_schema is not None
    assert exact.output_schema["description"] == "x" * 2_100


def upstream(result: JSONObject, schema: JSONSchema) -> Server[Any]:
    """A server of another kind, which does not check its results."""

    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        tool = {"name": "get", "inputSchema": {"type": "object"}, "outputSchema": schema}
        return types.ListToolsResult(tools=[types.Tool.model_validate(tool, by_name=False)])

    async def call_tool(_context: Any, _params: Any) -> types.CallToolResult:
        return types.CallToolResult.model_validate({"content": [], **result}, by_name=False)

    return Server("far", version="1", on_list_tools=list_tools, on_call_tool=call_tool)


@asynccontextmanager
async def hub(server: Any, **options: Any) -> AsyncGenerator[OperationRegistry]:
    async with connect_mcp("far", MCPClientConfig(server=server, **options)) as imported:
        yield OperationRegistry(imported)


async def called(server: Any, era: str) -> tuple[Any, JSONObject]:
    """The listed output schema and the result, as the wire has them: without the checks of the client."""
    async with Client(server, mode=era) as client:
        (tool,) = (await client.list_tools()).tools
    async with Client(server, mode=era) as client:
        request = types.CallToolRequest(
            params=types.CallToolRequestParams(name=tool.name, arguments={})
        )
        result = await client.session.send_request(request, types.CallToolResult)
        return tool.output_schema, wire(result)


@BOTH
@pytest.mark.parametrize(
    "result",
    [
        {"structuredContent": {"id": "7"}},
        {"structuredContent": {"id": 7, "more": [1]}},
        {"structuredContent": {"more": 1}, "isError": True},
        {"content": [{"type": "text", "text": '{"id": "7"}'}]},
        {"content": [{"type": "text", "text": "sorry"}], "isError": True},
    ],
    ids=["default", "mismatch", "error", "text", "text-error"],
)
async def test_an_imported_tool_is_listed_and_answers_as_at_a_direct_connection(
    era: str, result: JSONObject
) -> None:
    server = upstream(result, TASK)
    schema, direct = await called(server, era)
    async with hub(server) as registry:
        listed, through = await called(to_mcp(registry), era)
        here = await registry.execute("far.get", {})

    assert listed == schema == TASK
    parts = ("content", "structuredContent", "isError")
    assert {key: through.get(key) for key in parts} == {key: direct.get(key) for key in parts}
    kinds = {change["kind"] for change in changes_of(through)}
    assert kinds <= {"mismatch"}
    if result.get("structuredContent") == {"id": "7"}:
        assert here.data == {"id": "7", "done": False}  # Python callers get the normalised data


def changes_of(result: JSONObject) -> list[JSONObject]:
    noted = result.get("_meta", {}).get("alkdev.operations/changes", {"changes": []})
    found: list[JSONObject] = noted["changes"]
    return found


async def test_the_result_of_a_newer_server_is_wrapped_for_older_clients() -> None:
    async with hub(upstream({"structuredContent": 7}, {"type": "integer"})) as registry:
        older = await called(to_mcp(registry), "legacy")
        newer = await called(to_mcp(registry), "auto")

    assert older[0]["properties"]["result"] == {"type": "integer"}
    assert older[1]["structuredContent"] == {"result": 7}
    assert (newer[0], newer[1]["structuredContent"]) == ({"type": "integer"}, 7)


async def test_data_that_a_middleware_changed_is_not_replaced_by_what_the_server_sent() -> None:
    async with hub(upstream({"structuredContent": {"id": "secret"}}, TASK)) as registry:

        async def redact(call: Any, next: Any) -> ResponseEnvelope[Any]:
            envelope: ResponseEnvelope[Any] = await next(call)
            return ResponseEnvelope({**envelope.data, "id": "***"}, envelope.meta)

        registry.use(redact)
        _, result = await called(to_mcp(registry), "auto")

    assert result["structuredContent"]["id"] == "***"


async def test_an_imported_tool_can_be_listed_with_an_open_schema() -> None:
    server = upstream({"structuredContent": {"id": "7", "more": 1}}, TASK)
    async with hub(server, exact_schemas=False) as registry:
        schema, result = await called(to_mcp(registry), "auto")

    assert schema["anyOf"] == [TASK, {}]
    assert result["structuredContent"] == {"id": "7", "more": 1}


@BOTH
async def test_an_open_schema_stays_open_behind_another_hub(era: str) -> None:
    first = http_service(TASK, exact=False)
    direct = await called(to_mcp(first), era)
    async with hub(to_mcp(first), trust_annotations=True) as second:
        through = await called(to_mcp(second), era)

    assert through[0] == direct[0]
    assert through[1]["structuredContent"] == direct[1]["structuredContent"]
