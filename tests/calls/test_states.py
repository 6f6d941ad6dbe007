"""The state table and the order of items, by the protocol's own test vectors."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.calls.test_events import PROTOCOL, named

from operations.calls.events import (
    AbortPayload,
    CallAborted,
    CallCompleted,
    CallEvent,
    CallFailed,
    CallRequested,
    CallResponded,
    CompletePayload,
    ErrorPayload,
    Output,
    RequestPayload,
    ResponsePayload,
)
from operations.calls.states import (
    REORDER_WINDOW,
    TRANSITIONS,
    Arrival,
    Expects,
    SequenceError,
    Sequencer,
    Verdict,
    judge,
)
from operations.envelopes import LocalResponseMeta

OUTPUT = Output(data=1, meta=LocalResponseMeta(operation_id="a.b", timestamp=0))

EVENTS: dict[str, CallEvent] = {
    "call.requested": CallRequested(payload=RequestPayload(request_id="r", operation_id="a.b")),
    "call.responded": CallResponded(payload=ResponsePayload(request_id="r", output=OUTPUT)),
    "call.completed": CallCompleted(payload=CompletePayload(request_id="r")),
    "call.error": CallFailed(payload=ErrorPayload(request_id="r", code="X")),
    "call.aborted": CallAborted(payload=AbortPayload(request_id="r")),
}


@pytest.mark.requirement("R50")
@named(json.loads((PROTOCOL / "states.json").read_text(encoding="utf-8"))["cases"])
def test_r50_events_change_calls_as_the_vectors_require(case: Any) -> None:
    expects = None if case["expects"] == "none" else Expects(case["expects"])
    verdicts = []
    for name in case["events"]:
        verdict = judge(expects, EVENTS[name])
        verdicts.append(verdict.value)
        if verdict is Verdict.LAST:
            expects = None

    assert verdicts == case["verdicts"]


def test_every_answer_is_judged_for_every_expectation() -> None:
    answers = {type(event) for name, event in EVENTS.items() if name != "call.requested"}

    assert set(TRANSITIONS) == {(expects, kind) for expects in Expects for kind in answers}


def item(number: int | None) -> CallResponded:
    payload = ResponsePayload(request_id="r", output=OUTPUT, sequence=number)
    return CallResponded(payload=payload)


def end(total: int | None) -> CallCompleted:
    return CallCompleted(payload=CompletePayload(request_id="r", sequence=total))


def numbers(arrivals: list[Arrival]) -> list[Any]:
    return [
        event.payload.sequence if isinstance(event, CallResponded) else "end"
        for event, _ in arrivals
    ]


@pytest.mark.requirement("R50", "F12")
@named(json.loads((PROTOCOL / "sequences.json").read_text(encoding="utf-8"))["cases"])
def test_r50_items_are_ordered_as_the_vectors_require(case: Any) -> None:
    sequencer = Sequencer()
    delivered: list[Any] = []
    for arrival in case["arrivals"]:
        event = end(case["total"]) if arrival == "end" else item(arrival)
        delivered += numbers(sequencer.push(event))

    assert delivered == case["delivered"]
    if case.get("lost"):
        assert sequencer.is_waiting


def test_an_item_that_does_not_come_is_missed_after_a_window() -> None:
    sequencer = Sequencer()
    for number in range(1, REORDER_WINDOW + 1):
        assert sequencer.push(item(number)) == []
    with pytest.raises(SequenceError):
        sequencer.push(item(REORDER_WINDOW + 1))


@given(st.data())
def test_items_within_the_window_are_delivered_in_order(data: st.DataObject) -> None:
    total = data.draw(st.integers(0, REORDER_WINDOW))
    arrivals: list[Any] = data.draw(st.permutations([*range(total), "end"]))
    sequencer = Sequencer()
    delivered: list[Any] = []
    for arrival in arrivals:
        event = end(total) if arrival == "end" else item(arrival)
        delivered += numbers(sequencer.push(event))

    assert delivered == [*range(total), "end"]
