"""Parity with the original TypeScript design, one test per line of the checklist.

Lines that need a transport or an MCP server are tested beside their module: `tests/calls/test_seed_parity.py` and
`tests/mcp_import/test_results.py`.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from time import time
from typing import Any, ClassVar, get_args

import msgspec
import pytest

import operations
from operations import (
    CALL_EVENT_SCHEMAS,
    OPERATION_SPEC_SCHEMA,
    RESPONSE_META_SCHEMA,
    RESPONSE_SOURCES,
    AccessControl,
    CallError,
    ErrorCode,
    Identity,
    MCPResponseMeta,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    ResponseEnvelope,
    Schema,
    TextContent,
    assert_is_schema,
    check_access,
    http_envelope,
    is_response_envelope,
    mcp_envelope,
)
from operations.base.errors import SchemaError
from operations.calls import PendingRequestMap, serve_calls
from operations.calls.protocol.events import (
    CallFailed,
    CallRequested,
    ErrorPayload,
    RequestPayload,
    encode_event,
    read_event,
    read_output,
)
from operations.mcp import map_content_blocks
from operations.mcp.shared.interaction import question_envelope
from operations.mcp.source.tools import tool_envelope
from operations.openapi import HTTPAuth, HTTPRequest, HTTPServiceConfig, from_openapi
from operations.pubsub.memory import MemoryTarget

SPEC = {
    "name": "create",
    "namespace": "task",
    "version": "1.0.0",
    "type": "mutation",
    "description": "",
    "inputSchema": {},
    "outputSchema": {},
    "accessControl": {"requiredScopes": []},
}


def test_the_meta_of_a_spec_survives_the_wire() -> None:
    wire = {**SPEC, "_meta": {"origin": "elsewhere"}}

    spec = OperationSpec.from_wire(wire)

    assert spec.meta == {"origin": "elsewhere"}
    assert spec.to_wire() == wire
    assert OPERATION_SPEC_SCHEMA.check(wire)


@pytest.mark.parametrize("schema", [{}, {"type": "object"}])
def test_structured_content_null_falls_back_to_the_blocks(schema: Any) -> None:
    block = {"type": "text", "text": "done"}

    envelope = tool_envelope({"content": [block], "structuredContent": None}, Schema(schema))

    assert envelope.data == [block]


@pytest.mark.parametrize("structured", [False, 0, "", [], {}])
def test_other_falsy_structured_content_is_the_data(structured: Any) -> None:
    envelope = tool_envelope({"content": [], "structuredContent": structured}, Schema({}))

    assert envelope.data == structured


def test_json_in_a_text_block_is_the_data_if_the_tool_has_an_output_schema() -> None:
    result = {"content": [{"type": "text", "text": '{"n": "5", "extra": 1}'}]}
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    assert tool_envelope(result, Schema(schema)).data == {"n": "5", "extra": 1}
    assert tool_envelope(result, Schema({})).data == result["content"]


async def test_json_in_a_text_block_is_normalised_like_structured_content() -> None:
    number: Any = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    spec = OperationSpec.from_wire({**SPEC, "outputSchema": number})
    results: list[Any] = []
    registry = OperationRegistry()
    registry.register(Operation(spec, lambda *_: tool_envelope(results.pop(), spec.output_schema)))

    async def data_of(**result: Any) -> Any:
        results.append(result)
        return (await registry.execute("task.create", {})).data

    written = '{"n": "5", "extra": 1}'
    assert await data_of(content=[{"type": "text", "text": written}]) == {"n": 5}
    assert await data_of(content=[], structuredContent={"n": "5", "extra": 1}) == {"n": 5}
    for block in ({"type": "text", "text": "five"}, {"type": "text", "text": "{", "extra": 1}):
        assert await data_of(content=[block]) == [block]
    failed: Any = {"type": "text", "text": written}
    assert await data_of(content=[failed], isError=True) == [failed]
    # A question to the caller is not the tool's output.
    question = {"resultType": "input_required", "requestState": "s"}
    registry.register(Operation(spec, lambda *_: question_envelope(question)), replace=True)
    assert (await registry.execute("task.create", {})).data == question


def test_content_given_as_plain_dicts_is_converted() -> None:
    envelope = mcp_envelope(1, is_error=False, content=[{"type": "text", "text": "Done"}])

    assert isinstance(envelope.meta, MCPResponseMeta)
    assert envelope.meta.content == [TextContent(text="Done")]


LOCAL_META = {"source": "local", "operationId": "a.b", "timestamp": 1}


def test_absent_data_from_another_implementation_reads_as_null() -> None:
    assert ResponseEnvelope.from_wire({"meta": LOCAL_META}).data is None
    body = b'{"type":"call.responded","payload":{"requestId":"r","output":{"meta":%b}}}'
    event: Any = read_event(body % msgspec.json.encode(LOCAL_META))
    assert read_output(event.payload.output).data is None
    # The structural check keeps requiring it, as `isResponseEnvelope` does.
    assert not is_response_envelope({"meta": LOCAL_META})


@pytest.mark.parametrize("timestamp", [0, 1.5, 1.7e12, -1])
def test_any_number_is_accepted_as_a_timestamp(timestamp: float) -> None:
    wire = {"data": 1, "meta": {**LOCAL_META, "timestamp": timestamp}}

    assert is_response_envelope(wire)
    assert ResponseEnvelope.from_wire(wire).to_wire() == wire
    body = b'{"type":"call.responded","payload":{"requestId":"r","output":%b}}'
    event: Any = read_event(body % msgspec.json.encode(wire))
    assert read_output(event.payload.output).to_wire() == wire


def test_call_requested_always_has_input() -> None:
    event = CallRequested(payload=RequestPayload(request_id="r", operation_id="a.b"))

    wire = msgspec.json.decode(encode_event(event))

    assert wire["payload"] == {"requestId": "r", "operationId": "a.b", "input": None}
    assert CALL_EVENT_SCHEMAS["call.requested"].check(wire)


def test_call_error_always_has_message() -> None:
    event = CallFailed(payload=ErrorPayload(request_id="r", code="NO"))

    wire = msgspec.json.decode(encode_event(event))

    assert wire["payload"] == {"requestId": "r", "code": "NO", "message": ""}
    assert CALL_EVENT_SCHEMAS["call.error"].check(wire)


def test_an_empty_list_of_alternative_scopes_is_not_a_restriction() -> None:
    access = AccessControl(required_scopes_any=[])
    wire = {**SPEC, "accessControl": {"requiredScopes": [], "requiredScopesAny": []}}

    assert access.is_open
    assert check_access(access, None)
    assert check_access(AccessControl(["a"], []), Identity("me", ["a"]))
    assert OperationSpec.from_wire(wire).access_control.is_open
    assert OPERATION_SPEC_SCHEMA.check(wire)


BLOCKS: list[dict[str, Any]] = [
    {"type": "text", "text": "a", "score": 1, "snake_case": [2], "x-y": None},
    {"type": "image", "data": "AA==", "mimeType": "image/png", "alt": "a dot"},
    {"type": "audio", "data": "AA==", "mimeType": "audio/ogg", "seconds": 1.5},
    {
        "type": "resource",
        "resource": {"uri": "file:///a", "text": "a", "etag": "x"},
        "annotations": {"priority": 1, "rank": 3},
    },
    {"type": "resource_link", "uri": "file:///a", "name": "a", "icons": [{"src": "a.png"}]},
]


def test_unknown_fields_of_known_blocks_survive() -> None:
    blocks = map_content_blocks(BLOCKS)
    envelope = mcp_envelope(None, is_error=False, content=blocks)

    assert [type(block).__name__ for block in blocks] == [
        "TextContent",
        "ImageContent",
        "AudioContent",
        "ResourceContent",
        "ResourceLink",
    ]
    assert msgspec.to_builtins(blocks) == BLOCKS
    assert ResponseEnvelope.decode(envelope.encode()).to_wire()["meta"]["content"] == BLOCKS
    body = b'{"type":"call.responded","payload":{"requestId":"r","output":%b}}' % envelope.encode()
    event: Any = read_event(body)
    assert read_output(event.payload.output).to_wire()["meta"]["content"] == BLOCKS


def test_a_block_with_hundreds_of_unknown_fields_becomes_its_json() -> None:
    block = {"type": "text", "text": "a", **{f"x{index}": index for index in range(500)}}

    (mapped,) = map_content_blocks([block])

    assert isinstance(mapped, TextContent)
    assert msgspec.json.decode(mapped.text) == block


def test_assert_is_schema_accepts_a_schema() -> None:
    assert_is_schema(Schema({"type": "object"}))
    with pytest.raises(SchemaError):
        assert_is_schema(Schema({"type": "objekt"}))


def test_the_exported_schema_has_the_enum_of_audience() -> None:
    def meta(audience: str) -> Any:
        block = {"type": "text", "text": "", "annotations": {"audience": [audience]}}
        return {"source": "mcp", "isError": False, "content": [block]}

    assert RESPONSE_META_SCHEMA.check(meta("assistant"))
    assert not RESPONSE_META_SCHEMA.check(meta("machine"))
    # A block of a newer server keeps its type.
    envelope = ResponseEnvelope.from_wire({"data": 1, "meta": meta("machine")})
    assert isinstance(envelope.meta, MCPResponseMeta)
    assert isinstance(envelope.meta.content[0], TextContent)


def test_response_source_is_an_alias_of_the_sources() -> None:
    assert get_args(operations.ResponseSource) == RESPONSE_SOURCES


async def test_operation_not_found_carries_the_operation_id() -> None:
    registry = OperationRegistry()
    registry.register_spec(OperationSpec.from_wire(SPEC))
    outer: list[CallError] = []

    @registry.operation("task.nested")
    async def nested(context: OperationContext) -> None:
        try:
            await context.env.call("task.unknown")
        except CallError as error:
            outer.append(error)

    for operation_id in ("task.unknown", "task.create"):
        with pytest.raises(CallError) as caught:
            await registry.execute(operation_id)
        assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND
        assert caught.value.details == {"operationId": operation_id}
    await registry.execute("task.nested", {})
    assert outer[0].details == {"operationId": "task.unknown"}


async def test_timeout_carries_the_deadline() -> None:
    registry = OperationRegistry()

    @registry.operation("slow.wait")
    async def wait() -> None:
        await asyncio.Event().wait()

    for deadline in (time() * 1000 + 20, time() * 1000 - 1):
        with pytest.raises(CallError) as caught:
            await registry.execute("slow.wait", {}, OperationContext(deadline=deadline))
        assert caught.value.code == ErrorCode.TIMEOUT
        assert caught.value.details == {"deadline": deadline}


async def test_over_the_call_protocol_timeout_and_not_found_carry_the_same() -> None:
    registry = OperationRegistry()

    @registry.operation("slow.wait")
    async def wait() -> None:
        await asyncio.Event().wait()

    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        with pytest.raises(CallError) as missing:
            await calls.call("task.unknown")
        before = time() * 1000
        with pytest.raises(CallError) as late:
            await calls.call("slow.wait", {}, timeout=0.05)

    assert missing.value.details == {"operationId": "task.unknown"}
    assert late.value.code == ErrorCode.TIMEOUT
    assert before < late.value.details["deadline"] < before + 30_000


class RecordingTransport:
    """Keeps every request and answers `{}`."""

    def __init__(self) -> None:
        self.requests: list[HTTPRequest] = []

    @asynccontextmanager
    async def send(self, request: HTTPRequest) -> AsyncGenerator[Any]:
        self.requests.append(request)
        yield self

    status, reason = 200, "OK"
    headers: ClassVar = {"content-type": "application/json"}

    async def chunks(self) -> AsyncGenerator[bytes]:
        yield b"{}"

    async def aclose(self) -> None:
        """Nothing is open."""


DOCUMENT = {
    "openapi": "3.1.0",
    "info": {"title": "test", "version": "1"},
    "paths": {
        "/thing": {
            "get": {
                "operationId": "call",
                "parameters": [
                    {"name": name, "in": place, "schema": {"type": "string"}}
                    for name, place in (
                        ("user-agent", "header"),
                        ("X-Trace", "header"),
                        ("c", "cookie"),
                    )
                ],
                "responses": {"200": {"description": "ok"}},
            }
        }
    },
}


async def sent(input: Any, **config: Any) -> HTTPRequest:
    """Return the request that a custom transport gets for one call."""
    transport = RecordingTransport()
    entry = {"namespace": "api", "baseUrl": "http://127.0.0.1:1", "transport": transport, **config}
    registry = OperationRegistry()
    registry.register_all(from_openapi(DOCUMENT, entry))
    await registry.execute("api.call", input)
    return transport.requests[0]


async def test_from_openapi_accepts_a_mapping() -> None:
    request = await sent({}, auth={"type": "apiKey", "token": "t", "headerName": "X-Key"})

    assert request.url == "http://127.0.0.1:1/thing"
    assert request.headers["X-Key"] == "t"
    with pytest.raises(ValueError, match=r"no field 'baseUri'\. Did you mean"):
        from_openapi(DOCUMENT, {"namespace": "api", "baseUri": "http://127.0.0.1:1"})
    with pytest.raises(ValueError, match="namespace"):
        from_openapi(DOCUMENT, {"baseUrl": "http://127.0.0.1:1"})


async def test_the_prefix_of_an_api_key_is_prepended_exactly_as_given() -> None:
    for prefix in ("Key ", "Key=", "", None):
        auth = HTTPAuth(type="apiKey", token="t", header_name="X-Key", prefix=prefix)
        assert (await sent({}, auth=auth)).headers["X-Key"] == f"{prefix or ''}t"


@pytest.mark.parametrize("kind", ["bearer", "apiKey", "basic"])
def test_auth_without_a_token_is_rejected_at_configuration_time(kind: Any) -> None:
    with pytest.raises(ValueError, match="needs a token"):
        HTTPAuth(type=kind)
    for auth in ({"type": kind}, {"type": kind, "token": ""}):
        with pytest.raises(ValueError, match="needs a token"):
            HTTPServiceConfig(namespace="api", auth=auth)
    HTTPAuth(type=kind, token=lambda context: None)


async def test_a_custom_transport_gets_each_header_once() -> None:
    request = await sent(
        {"user-agent": "mine", "X-Trace": "1", "c": "2"},
        headers={"cookie": "a=1", "authorization": "Basic old"},
        auth={"type": "bearer", "token": "new"},
    )

    lowered = [name.lower() for name in request.headers]
    assert sorted(lowered) == sorted(set(lowered))
    values = {name.lower(): value for name, value in request.headers.items()}
    assert values["user-agent"] == "mine"
    assert values["authorization"] == "Bearer new"
    assert values["cookie"] == "a=1; c=2"


async def test_items_of_the_call_protocol_carry_their_sequence() -> None:
    registry = OperationRegistry()

    @registry.operation("count.up")
    async def count() -> AsyncGenerator[int]:
        for number in range(3):
            yield number

    @registry.operation("page.all")
    async def pages() -> AsyncGenerator[Any]:
        yield http_envelope(1, status_code=200, headers={}, content_type="", sequence="a7")

    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        counted = [item.meta.sequence async for item in calls.subscribe("count.up", {})]
        relayed = [item.meta.sequence async for item in calls.subscribe("page.all", {})]
    local = [item async for item in registry.subscribe("count.up", {})]

    assert counted == [0, 1, 2]
    # The position at the source is the one to resume from.
    assert relayed == ["a7"]
    # Within one process there is no transport, and no event.
    assert [item.to_wire()["meta"].get("sequence") for item in local] == [None] * 3


async def test_server_sent_events_carry_their_id_as_sequence() -> None:
    class Events(RecordingTransport):
        headers: ClassVar = {"content-type": "text/event-stream"}

        async def chunks(self) -> AsyncGenerator[bytes]:
            yield b"id: e1\ndata: 1\n\ndata: 2\n\nid: e3\ndata: 3\n\ndata: [DONE]\n\n"

    content = {"text/event-stream": {"schema": {"type": "integer"}}}
    get = {"operationId": "call", "responses": {"200": {"description": "", "content": content}}}
    document = {**DOCUMENT, "paths": {"/thing": {"get": get}}}
    entry = {"namespace": "api", "baseUrl": "http://127.0.0.1:1", "transport": Events()}
    registry = OperationRegistry()
    registry.register_all(from_openapi(document, entry))

    items = [item async for item in registry.subscribe("api.call", {})]

    assert [(item.data, item.meta.sequence) for item in items] == [(1, "e1"), (2, "e1"), (3, "e3")]
