import tracemalloc
from typing import Any

import msgspec
import pytest

from operations import (
    RESPONSE_ENVELOPE_SCHEMA,
    RESPONSE_META_SCHEMA,
    RESPONSE_SOURCES,
    AudioContent,
    CallError,
    Change,
    ErrorCode,
    ImageContent,
    MCPAnnotations,
    MCPContentBlock,
    MCPResourceContent,
    MCPResponseMeta,
    ResourceContent,
    ResourceLink,
    ResponseEnvelope,
    TextContent,
    http_envelope,
    is_response_envelope,
    local_envelope,
    mcp_envelope,
    unwrap,
)
from operations.calls.protocol.events import read_event, read_output
from operations.contract.envelopes import MAX_CHANGES, add_changes, content_block

BLOCKS: list[MCPContentBlock] = [
    TextContent(text="hi", annotations=MCPAnnotations(audience=["user"], priority=0.5)),
    ImageContent(data="aGk=", mime_type="image/png"),
    AudioContent(data="aGk=", mime_type="audio/wav", meta={"a": 1}),
    ResourceContent(resource=MCPResourceContent(uri="x:y", text="t", mime_type="text/plain")),
    ResourceLink(uri="x:y", name="n", title="N", size=3),
]

ENVELOPES = {
    "local": local_envelope({"a": 1}, "task.get"),
    "local null": local_envelope(None, "task.get"),
    "local bytes": local_envelope(b"\x00\xff", "task.get"),
    "http": http_envelope([1], status_code=201, headers={"X-A": "1"}, content_type="text/plain"),
    "mcp": mcp_envelope({"b": 2}, is_error=False, content=BLOCKS, structured_content={"b": 2}),
    "mcp text": mcp_envelope(None, content=BLOCKS[:1]),
    "mcp error": mcp_envelope("no", is_error=True, content=BLOCKS[:1], meta={"trace": "1"}),
}


@pytest.mark.parametrize("envelope", ENVELOPES.values(), ids=ENVELOPES.keys())
def test_an_envelope_round_trips_through_json(envelope: ResponseEnvelope[Any]) -> None:
    assert ResponseEnvelope.decode(envelope.encode()) == envelope
    assert ResponseEnvelope.from_wire(envelope.to_wire()) == envelope
    assert msgspec.json.decode(envelope.encode()) == envelope.to_wire()


@pytest.mark.parametrize("envelope", ENVELOPES.values(), ids=ENVELOPES.keys())
def test_an_envelope_on_the_wire_fits_the_published_schemas(
    envelope: ResponseEnvelope[Any],
) -> None:
    wire = envelope.to_wire()

    assert "data" in wire
    assert RESPONSE_ENVELOPE_SCHEMA.errors(wire) == []
    assert RESPONSE_META_SCHEMA.errors(wire["meta"]) == []
    assert is_response_envelope(wire)


def test_the_wire_names_are_those_of_the_protocol() -> None:
    wire = ENVELOPES["mcp error"].to_wire()["meta"]

    assert wire["source"] == "mcp"
    assert wire["isError"] is True
    assert wire["_meta"] == {"trace": "1"}
    assert ENVELOPES["http"].to_wire()["meta"] == {
        "source": "http",
        "statusCode": 201,
        "headers": {"x-a": "1"},
        "contentType": "text/plain",
    }
    assert set(ENVELOPES["local"].to_wire()["meta"]) == {"source", "operationId", "timestamp"}


def test_bytes_are_sent_as_marked_base64() -> None:
    wire = ENVELOPES["local bytes"].to_wire()

    assert wire["data"] == "AP8="
    assert wire["encoding"] == "base64"


def test_every_meta_knows_its_source() -> None:
    assert {envelope.meta.source for envelope in ENVELOPES.values()} == set(RESPONSE_SOURCES)


LOCAL = {"source": "local", "operationId": "a.b", "timestamp": 1}
HTTP = {"source": "http", "statusCode": 200, "headers": {}, "contentType": ""}
MCP = {"source": "mcp", "isError": False, "content": []}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "envelope",
        {},
        {"data": 1},
        {"data": 1, "meta": None},
        {"data": 1, "meta": {}},
        {"data": 1, "meta": {"source": "ftp"}},
        {"data": 1, "meta": {"source": ["local"]}},
        {"data": 1, "meta": {"source": "local"}},
        {"data": 1, "meta": {**LOCAL, "timestamp": "now"}},
        {"data": 1, "meta": {**LOCAL, "operationId": 3}},
        {"data": 1, "meta": {"source": "local", "operation_id": "a.b", "timestamp": 1}},
        {"data": 1, "meta": {**HTTP, "statusCode": "200"}},
        {"data": 1, "meta": {**HTTP, "headers": [("a", "b")]}},
        {"data": 1, "meta": {**HTTP, "headers": {"a": 1}}},
        {"data": 1, "meta": {**MCP, "isError": 0}},
        {"data": 1, "meta": {**MCP, "content": "text"}},
        {"data": 1, "meta": {**MCP, "_meta": 3}},
        {"data": "not base64!", "encoding": "base64", "meta": LOCAL},
        {"data": "é", "encoding": "base64", "meta": LOCAL},
        {"data": 1, "meta": {**MCP, "content": [object()]}},
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_envelope_lookalike_is_not_an_envelope(value: object) -> None:
    assert not is_response_envelope(value)
    with pytest.raises(ValueError, match="not a response envelope"):
        ResponseEnvelope.from_wire(value)


@pytest.mark.parametrize("meta", [LOCAL, HTTP, MCP], ids=lambda meta: meta["source"])
def test_a_mapping_with_the_content_of_an_envelope_is_one(meta: dict[str, Any]) -> None:
    assert is_response_envelope({"data": None, "meta": meta})
    assert ResponseEnvelope.from_wire({"data": None, "meta": meta}).meta.source == meta["source"]


@pytest.mark.requirement("R42")
def test_long_names_of_unknown_fields_are_not_stored() -> None:
    tracemalloc.start()
    try:
        for number in range(10):
            block = content_block({"type": "text", "text": "a", "u" * 1_000_000 + str(number): 1})
            assert isinstance(block, TextContent)
            del block
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()


def test_an_unknown_block_becomes_text_that_holds_its_json() -> None:
    wire = {"data": 1, "meta": {**MCP, "content": [{"type": "hologram", "x": [1]}, 7]}}

    meta = ResponseEnvelope.from_wire(wire).meta

    assert isinstance(meta, MCPResponseMeta)
    assert [block.text for block in meta.content if isinstance(block, TextContent)] == [
        '{"type":"hologram","x":[1]}',
        "7",
    ]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: type(block).__name__)
def test_a_known_block_survives_the_wire(block: MCPContentBlock) -> None:
    assert content_block(msgspec.to_builtins(block)) == block
    assert content_block(block) is block


def test_several_headers_of_one_name_are_joined() -> None:
    envelope = http_envelope(
        None, status_code=200, headers={"Vary": "a", "vary": "b"}, content_type=""
    )

    assert envelope.to_wire()["meta"]["headers"] == {"vary": "a, b"}


def test_unwrap_returns_the_data() -> None:
    assert unwrap(ENVELOPES["local"]) == {"a": 1}


def test_raise_for_error_returns_a_successful_envelope() -> None:
    for name in ("local", "http", "mcp"):
        assert ENVELOPES[name].raise_for_error() is ENVELOPES[name]


def test_raise_for_error_raises_the_message_of_a_tool() -> None:
    envelope = mcp_envelope(
        None, is_error=True, content=[TextContent(text="disk full")], structured_content=[1]
    )

    with pytest.raises(CallError) as caught:
        envelope.raise_for_error()

    assert caught.value.code == ErrorCode.EXECUTION_ERROR
    assert caught.value.message == "disk full"
    assert caught.value.details == {
        "content": [{"type": "text", "text": "disk full"}],
        "structuredContent": [1],
    }


def test_raise_for_error_restores_a_structured_error() -> None:
    error = CallError("TASK_CLOSED", "it is closed", {"id": 7})
    envelope = mcp_envelope(
        error.to_wire(), is_error=True, content=[], structured_content=error.to_wire()
    )

    with pytest.raises(CallError) as caught:
        envelope.raise_for_error()

    assert (caught.value.code, caught.value.details) == ("TASK_CLOSED", {"id": 7})


def test_an_error_without_text_still_has_a_message() -> None:
    with pytest.raises(CallError, match="the tool reported an error"):
        mcp_envelope(None, is_error=True, content=[]).raise_for_error()


def test_an_envelope_cannot_be_altered() -> None:
    with pytest.raises(AttributeError):
        ENVELOPES["local"].data = None  # type: ignore[misc]


MISFIT = Change("/status", "mismatch", 1, "must be one of active, closed")
STRIPPED = Change("/items/0/x", "stripped", 20, "is not declared")


@pytest.mark.requirement("R52")
@pytest.mark.parametrize("envelope", ENVELOPES.values(), ids=ENVELOPES.keys())
def test_changes_travel_with_the_envelope_and_are_absent_without_changes(
    envelope: ResponseEnvelope[Any],
) -> None:
    changed = ResponseEnvelope(envelope.data, add_changes(envelope.meta, [STRIPPED, MISFIT]))
    wire = changed.to_wire()

    assert not {"changes", "changesCount"} & set(envelope.to_wire()["meta"])
    assert wire["meta"]["changesCount"] == 21
    assert [entry["kind"] for entry in wire["meta"]["changes"]] == ["mismatch", "stripped"]
    assert RESPONSE_ENVELOPE_SCHEMA.errors(wire) == []
    assert ResponseEnvelope.decode(changed.encode()) == changed
    assert ResponseEnvelope.from_wire(wire) == changed


def test_a_later_hop_appends_its_changes_within_the_limit() -> None:
    first = add_changes(ENVELOPES["local"].meta, [Change(f"/{n}", "filled") for n in range(15)])
    second = add_changes(first, [Change(f"/{n}", "stripped", 2) for n in range(9)] + [MISFIT])

    assert first.changes_count == 15
    assert len(second.changes) == MAX_CHANGES
    assert second.changes[0] == MISFIT
    assert second.changes[1:16] == first.changes
    assert second.changes_count == 15 + 18 + 1


def test_a_mismatch_that_an_earlier_hop_reported_is_not_counted_again() -> None:
    once = add_changes(ENVELOPES["http"].meta, [MISFIT])

    assert add_changes(once, [MISFIT]) is once
    assert add_changes(once, []) is once


def test_changes_that_this_version_cannot_read_do_not_spoil_the_envelope() -> None:
    known = {"path": "/a", "kind": "filled", "count": 2, "message": "m"}
    wire = {"data": 1, "meta": {**LOCAL, "changes": [known, {"kind": "folded"}, 7]}}

    assert ResponseEnvelope.from_wire(wire).meta.changes == (Change("/a", "filled", 2, "m"),)
    assert is_response_envelope({"data": 1, "meta": {**LOCAL, "changes": "many"}})
    assert ResponseEnvelope.from_wire(wire).meta.changes_count == 2
    for count in (None, "3", 2.5, -1):
        counted = {"data": 1, "meta": {**LOCAL, "changesCount": count}}
        assert ResponseEnvelope.from_wire(counted).meta.changes_count == 0


@pytest.mark.parametrize("over_calls", [False, True])
def test_changes_from_another_process_keep_to_the_limits(over_calls: bool) -> None:
    path = "/" + "a" * 5000
    long = {"path": path, "kind": "stripped", "count": 3, "message": "m" * 5000}
    none = {"path": "/b", "kind": "stripped", "count": -3}
    wire: Any = {
        "data": 1,
        "meta": {**LOCAL, "changes": [none, *[long] * 1000], "changesCount": -1},
    }
    if over_calls:
        body = {"type": "call.responded", "payload": {"requestId": "r", "output": wire}}
        event: Any = read_event(msgspec.json.encode(body))
        meta = read_output(event.payload.output).meta
    else:
        meta = ResponseEnvelope.from_wire(wire).meta

    assert meta.changes == (Change(path[:400], "stripped", 3, "m" * 200),) * 19
    assert meta.changes_count == 57
    assert RESPONSE_META_SCHEMA.check(msgspec.json.decode(msgspec.json.encode(meta)))
    assert not RESPONSE_META_SCHEMA.check(wire["meta"])
