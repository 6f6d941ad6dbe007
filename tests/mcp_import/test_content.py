"""Results and blocks: the envelope contains the whole response of a server."""

from collections.abc import AsyncGenerator
from typing import Any

import mcp_types as types
import msgspec
import pytest
from tests.mcp_import.support import raw

from operations import (
    CallError,
    ErrorCode,
    MCPResponseMeta,
    OperationRegistry,
    ResponseEnvelope,
)
from operations.mcp import connect_mcp, map_content_blocks
from operations.mcp.source.tools import (
    content_to_wire,
    prompt_envelope,
    resource_envelope,
    tool_envelope,
)
from operations.schema import Schema, from_schema

BLOCKS: list[dict[str, Any]] = [
    {
        "type": "text",
        "text": "hello",
        "annotations": {
            "audience": ["user"],
            "priority": 0.5,
            "lastModified": "2026-01-01T00:00:00Z",
        },
        "_meta": {"k": 1},
    },
    {"type": "image", "data": "aGk=", "mimeType": "image/png"},
    {"type": "audio", "data": "aGk=", "mimeType": "audio/wav"},
    {"type": "resource", "resource": {"uri": "a://b", "mimeType": "text/plain", "text": "t"}},
    {"type": "resource", "resource": {"uri": "a://b", "blob": "aGk=", "_meta": {"m": True}}},
    {
        "type": "resource_link",
        "uri": "a://b",
        "name": "b",
        "title": "B",
        "size": 3,
        "_meta": {"k": 2},
    },
]


def test_all_five_types_round_trip_unchanged() -> None:
    assert content_to_wire(map_content_blocks(BLOCKS)) == BLOCKS


def test_blocks_of_the_sdk_are_accepted() -> None:
    block = types.TextContent(type="text", text="hello", annotations=types.Annotations(priority=1))

    (mapped,) = map_content_blocks([block])

    assert content_to_wire([mapped]) == [
        {"type": "text", "text": "hello", "annotations": {"priority": 1.0}}
    ]


def test_an_unknown_block_becomes_a_text_that_holds_its_json() -> None:
    (mapped,) = content_to_wire(map_content_blocks([{"type": "hologram", "depth": 3}]))

    assert mapped == {"type": "text", "text": '{"type":"hologram","depth":3}'}


@pytest.fixture
async def registry() -> AsyncGenerator[OperationRegistry]:
    async with connect_mcp("raw", raw()) as client:
        yield OperationRegistry(client)


async def answer(registry: OperationRegistry, result: dict[str, Any]) -> ResponseEnvelope[Any]:
    return await registry.execute("raw.answer", {"result": result})


async def test_every_block_arrives(registry: OperationRegistry) -> None:
    envelope = await answer(
        registry, {"content": [*BLOCKS, {"type": "new", "x": 1}], "_meta": {"a": "b"}}
    )

    assert envelope.data[:-1] == BLOCKS
    assert isinstance(envelope.meta, MCPResponseMeta)
    assert len(envelope.meta.content) == len(BLOCKS) + 1
    assert envelope.meta.meta == {"a": "b"}
    assert not envelope.meta.is_error


@pytest.mark.parametrize("value", [{}, {"a": 1}, [], 0, False, "", [1, {"b": None}]])
async def test_structured_content_is_the_data_also_when_it_is_falsy(
    registry: OperationRegistry, value: Any
) -> None:
    envelope = await answer(registry, {"content": [BLOCKS[0]], "structuredContent": value})

    assert envelope.data == value
    assert type(envelope.data) is type(value)
    assert isinstance(envelope.meta, MCPResponseMeta)
    assert envelope.meta.structured_content == value
    assert len(envelope.meta.content) == 1


async def test_an_error_result_is_an_envelope_with_everything_in_it(
    registry: OperationRegistry,
) -> None:
    details = {"code": "NO_TEA", "message": "The pot is empty.", "details": {"pot": 3}}

    envelope = await answer(
        registry,
        {"isError": True, "content": [BLOCKS[0]], "structuredContent": details, "_meta": {"t": 1}},
    )

    assert envelope.data == details
    assert isinstance(envelope.meta, MCPResponseMeta)
    assert envelope.meta.is_error
    assert envelope.meta.meta == {"t": 1}


@pytest.mark.parametrize("result", [{}, {"content": None}, {"isError": None}])
async def test_a_result_without_content_is_empty(
    registry: OperationRegistry, result: dict[str, Any]
) -> None:
    envelope = await answer(registry, result)

    assert envelope.data == []
    assert isinstance(envelope.meta, MCPResponseMeta)
    assert envelope.meta.is_error is False


@pytest.mark.parametrize("result", [{"content": "text"}, {"content": {}}, {"isError": "yes"}])
async def test_a_malformed_result_is_an_error(
    registry: OperationRegistry, result: dict[str, Any]
) -> None:
    with pytest.raises(CallError) as caught:
        await answer(registry, result)

    assert caught.value.code == ErrorCode.EXECUTION_ERROR


@pytest.mark.parametrize("items", ["text", {}, ["text"]])
def test_malformed_resources_and_prompts_are_errors(items: Any) -> None:
    with pytest.raises(CallError):
        resource_envelope({"contents": items})
    with pytest.raises(CallError):
        prompt_envelope({"messages": items})


SCHEMA = from_schema(
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
)


def data_of(text: str, schema: Schema, **result: Any) -> Any:
    content = [{"type": "text", "text": text}]
    return tool_envelope({"content": content, **result}, schema).data


def test_text_is_read_as_json_if_the_tool_has_an_output_schema() -> None:
    assert data_of('{"n": 3}', SCHEMA) == {"n": 3}


@pytest.mark.parametrize("text", ["n is 3", '{"n": NaN}', "[" * 5000])
def test_text_that_is_not_json_stays_text(text: str) -> None:
    assert data_of(text, SCHEMA) == [{"type": "text", "text": text}]


@pytest.mark.requirement("R52")
@pytest.mark.parametrize("block", [{"type": "hologram", "data": "x"}, {"type": "text"}, 5])
def test_the_json_of_an_unknown_block_is_not_the_data(block: Any) -> None:
    envelope = tool_envelope({"content": [block]}, Schema({"type": "object"}))

    assert [each["type"] for each in envelope.data] == ["text"]
    assert [each["text"] for each in envelope.data] == [msgspec.json.encode(block).decode()]


def test_text_stays_text_if_nothing_is_declared_or_the_tool_failed() -> None:
    block = [{"type": "text", "text": '{"n": 3}'}]

    assert data_of('{"n": 3}', Schema({})) == block
    assert data_of('{"n": 3}', SCHEMA, isError=True) == block
