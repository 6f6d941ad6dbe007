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

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap
from operations.calls.protocol.events import (
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
from operations.calls.protocol.states import Outages, StreamEntry
from operations.contract.envelopes import LocalResponseMeta
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


async def arrived(arrivals: list[Any], total: int | None) -> tuple[list[Any], str]:
    """What a reader gets, and the code of the error."""
    stream = StreamEntry("r", 256)
    for arrival in arrivals:
        if arrival == "end":
            stream.push(CallCompleted(payload=CompletePayload(request_id="r", sequence=total)), 1)
        else:
            output = msgspec.structs.replace(OUTPUT, data=arrival)
            payload = ResponsePayload(request_id="r", output=output, sequence=arrival)
            stream.push(CallResponded(payload=payload), 1)
    read: list[Any] = []
    try:
        while (envelope := await stream.read(1)) is not None:
            read.append(envelope.data)
    except CallError as error:
        return read, error.code
    return [*read, "end"], ""


@pytest.mark.requirement("R50", "F12")
@named(json.loads((PROTOCOL / "sequences.json").read_text(encoding="utf-8"))["cases"])
async def test_r50_items_are_accepted_as_the_vectors_require(case: Any) -> None:
    delivered, code = await arrived(case["arrivals"], case["total"])

    if case["total"] is None:
        delivered = [*range(len(delivered) - 1), "end"]
    assert delivered == case["delivered"]
    assert code == (ErrorCode.UNAVAILABLE if case.get("lost") else "")


@given(st.data())
async def test_items_are_delivered_in_order_or_the_subscription_fails(data: st.DataObject) -> None:
    total = data.draw(st.integers(0, 8))
    arrivals: list[Any] = data.draw(st.permutations([*range(total), "end"]))
    delivered, code = await arrived(arrivals, total)

    if arrivals == [*range(total), "end"]:
        assert (delivered, code) == (arrivals, "")
    else:
        assert delivered == list(range(len(delivered)))
        assert code == ErrorCode.UNAVAILABLE


async def test_outages_in_a_row_began_with_the_first_one() -> None:
    outages = Outages()
    outages.lost()
    began = outages.lost_at
    assert began == outages.changed_at > 0
    await anyio.sleep(0.05)
    outages.restored()
    # Other clients have not had time to reconnect.
    outages.lost()
    assert outages.lost_at == began < outages.changed_at
