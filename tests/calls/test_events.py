"""Events, by the protocol's own test vectors."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from operations.base.errors import CallError
from operations.calls import CALL_EVENT_SCHEMAS
from operations.calls.protocol.events import (
    CallAborted,
    CallCompleted,
    CallEvent,
    CallFailed,
    CallRequested,
    CallResponded,
    MalformedEvent,
    UnknownEvent,
    encode_error,
    encode_event,
    encode_item,
    encode_response,
    read_event,
    read_output,
)
from operations.contract.envelopes import TextContent, http_envelope, local_envelope, mcp_envelope

PROTOCOL = Path(__file__).resolve().parents[2] / "docs" / "protocol"
CASES: list[Any] = json.loads((PROTOCOL / "events.json").read_text(encoding="utf-8"))["cases"]


def named(cases: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["name"])


@pytest.mark.requirement("R50")
@named(CASES)
def test_r50_texts_are_read_as_the_vectors_require(case: Any) -> None:
    event = read_event(case["text"].encode())

    if case["reads"] == "unknown":
        assert isinstance(event, UnknownEvent)
    elif case["reads"] == "malformed":
        assert isinstance(event, MalformedEvent)
        answer = case.get("answer", {"requestId": "", "replyTo": ""})
        assert event.request_id == answer["requestId"] or "answer" not in case
        assert event.reply_to == answer["replyTo"] or "answer" not in case
    else:
        assert not isinstance(event, (UnknownEvent, MalformedEvent))
        written = json.loads(encode_event(event))
        assert written["type"] == case["type"]
        assert {key: written["payload"].get(key) for key in case["payload"]} == case["payload"]


@pytest.mark.requirement("R50")
@named([case for case in CASES if case.get("writes")])
def test_r50_events_are_written_as_the_vectors_require(case: Any) -> None:
    event = read_event(case["text"].encode())

    assert not isinstance(event, (UnknownEvent, MalformedEvent))
    assert json.loads(encode_event(event)) == json.loads(case["text"])


@pytest.mark.requirement("R50")
@named([case for case in CASES if case.get("type") in CALL_EVENT_SCHEMAS])
def test_r50_the_schemas_agree_with_the_vectors(case: Any) -> None:
    whole = {"id": "", **json.loads(case["text"])}

    assert CALL_EVENT_SCHEMAS[case["type"]].errors(whole) == []


@pytest.mark.requirement("R50")
@pytest.mark.parametrize("event", get_args(CallEvent), ids=lambda event: event.__name__)
def test_r50_the_vectors_have_every_field_of_every_event(event: Any) -> None:
    payload = msgspec.structs.fields(event)[-1].type
    tag = event.__struct_config__.tag

    used = {name for case in CASES if case.get("type") == tag for name in case["payload"]}
    assert used == {field.encode_name for field in msgspec.structs.fields(payload)}


@pytest.mark.requirement("R50")
def test_r50_a_request_that_is_malformed_does_not_fit_the_schema() -> None:
    (text,) = (case["text"] for case in CASES if case["name"] == "credit of no item")

    assert CALL_EVENT_SCHEMAS["call.requested"].errors(json.loads(text))


@pytest.mark.parametrize(
    "event", [CallRequested, CallResponded, CallCompleted, CallAborted, CallFailed]
)
def test_the_schemas_describe_every_property(event: Any) -> None:
    tag = event.__struct_config__.tag
    payload = msgspec.structs.fields(event)[-1].type
    document: Any = CALL_EVENT_SCHEMAS[tag].document

    described = document["properties"]["payload"]["properties"]
    assert described.keys() == {field.encode_name for field in msgspec.structs.fields(payload)}


@pytest.mark.parametrize("type", CALL_EVENT_SCHEMAS)
def test_the_schemas_reject_malformed_events(type: str) -> None:
    for value in ({}, {"type": type, "id": "", "payload": {}}, {"type": "x", "id": ""}, None):
        assert CALL_EVENT_SCHEMAS[type].errors(value)


@pytest.mark.parametrize(
    "envelope",
    [
        local_envelope({"a": [1, None]}, "a.b"),
        local_envelope(b"\x00\xff", "a.b"),
        http_envelope("x", status_code=200, headers={"a": "b"}, content_type="text/plain"),
        mcp_envelope(
            [], is_error=False, content=[TextContent(text="t")], structured_content={"a": 1}
        ),
    ],
    ids=["local", "bytes", "http", "mcp"],
)
def test_envelopes_are_read_back_as_they_were_written(envelope: Any) -> None:
    for body in (encode_response("r1", envelope), encode_item("r1", envelope, 0, "worker")):
        event: Any = read_event(body)
        assert read_output(event.payload.output) == envelope
        assert CALL_EVENT_SCHEMAS["call.responded"].errors(json.loads(body)) == []


def answer(output: Any) -> Any:
    payload = {"requestId": "r1", "output": output}
    return read_event(msgspec.json.encode({"type": "call.responded", "payload": payload}))


def test_a_content_block_of_an_unknown_kind_becomes_text() -> None:
    output = {
        "data": 1,
        "meta": {"source": "mcp", "isError": False, "content": [{"type": "hologram", "x": 1}]},
    }

    envelope: Any = read_output(answer(output).payload.output)

    assert envelope.meta.content[0].text == '{"type":"hologram","x":1}'


def test_a_malformed_envelope_is_rejected() -> None:
    for output in (1, {}, {"data": 1}, {"data": 1, "meta": {"source": "dream"}}):
        event = answer(output)
        assert isinstance(event, MalformedEvent)
        assert event.request_id == "r1"


def test_details_that_are_not_json_are_removed_from_errors() -> None:
    body = encode_error("r1", CallError("X", "x", {"object": object()}))

    event: Any = read_event(body)
    assert event.payload.code == "X"
    assert "omitted" in event.payload.details
