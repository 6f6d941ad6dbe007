"""The states of calls and the order of items, by the protocol's own test vectors."""

import json
from contextlib import suppress
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.calls.test_events import PROTOCOL, named
from tests.calls.waiting import until
from tests.receivers import SilentReceiver

from operations.calls import PendingRequestMap
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
    encode_event,
)
from operations.calls.states import (
    REORDER_WINDOW,
    Arrival,
    SequenceError,
    Sequencer,
)
from operations.envelopes import LocalResponseMeta
from operations.errors import CallError
from operations.pubsub.base import Delivery
from operations.pubsub.memory import MemoryTarget

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
async def test_r50_events_change_calls_as_the_vectors_require(case: Any) -> None:
    target = MemoryTarget()
    await target.consume("operations", SilentReceiver())
    async with PendingRequestMap(target) as calls, anyio.create_task_group() as tasks:
        stream = calls.subscribe("a.b")

        async def call() -> None:
            with suppress(CallError):
                await calls.call("a.b")

        items: list[Any] = []

        async def read() -> None:
            with suppress(CallError):
                async for envelope in stream:
                    items.append(envelope.data)  # noqa: PERF401 - one by one

        if case["expects"] != "none":
            tasks.start_soon(call if case["expects"] == "one" else read)
            await until(lambda: len(calls) == 1)
        request_id = next(iter(calls.pending), "r")
        verdicts = []
        for name in case["events"]:
            event = EVENTS[name]
            payload: Any = msgspec.structs.replace(event.payload, request_id=request_id)
            before, read_before = len(calls), len(items)
            calls.receive(Delivery(encode_event(msgspec.structs.replace(event, payload=payload))))
            await anyio.wait_all_tasks_blocked()
            is_item = len(items) > read_before
            verdicts.append("item" if is_item else "last" if len(calls) < before else "ignore")
        tasks.cancel_scope.cancel()

    assert verdicts == case["verdicts"]


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


def test_a_missing_item_is_detected_after_a_window() -> None:
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
