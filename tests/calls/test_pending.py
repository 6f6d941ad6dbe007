"""The pending calls of a process, and its replies."""

import asyncio
import dataclasses
import datetime
import decimal
import enum
import math
import uuid
from collections import OrderedDict
from contextlib import aclosing
from typing import Any

import msgspec
import pydantic
import pytest
from tests.calls.shim import Shim
from tests.calls.waiting import until
from tests.calls.worlds import WebSocketWorld, World, calling
from tests.limits import time_limit
from tests.receivers import SilentReceiver

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, build_call_handler, serve_calls
from operations.calls.protocol.events import CallRequested, RequestPayload, encode_error, read_event
from operations.contract.context import OperationContext
from operations.contract.envelopes import (
    HTTPResponseMeta,
    MCPResponseMeta,
    ResponseEnvelope,
    http_envelope,
    local_envelope,
    mcp_envelope,
)
from operations.contract.specs import Operation, OperationSpec, OperationType
from operations.pubsub.base import Delivery
from operations.pubsub.memory import MemoryTarget
from operations.registry import OperationRegistry
from operations.registry.middleware import Call, Next, NextStream


class Mailbox(SilentReceiver):
    """Reads incoming messages."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def receive(self, delivery: Delivery) -> None:
        self.events.append(read_event(delivery.body))


async def test_only_envelopes_can_be_replies() -> None:
    async with PendingRequestMap() as calls:
        for value in (1, {}, {"data": 1}, None):
            with pytest.raises(TypeError):
                await calls.respond("r1", value)
        await calls.respond("r1", local_envelope(1, "a.b"))
        await calls.respond(
            "r1", {"data": 1, "meta": {"source": "local", "operationId": "a.b", "timestamp": 1}}
        )
        assert calls.ignored == 2


async def test_a_map_can_answer_its_own_calls() -> None:
    """Requests are answered through the same map, as in one process."""
    target = MemoryTarget()
    inbox = Mailbox()
    await target.consume("operations", inbox)
    async with PendingRequestMap(target) as calls:
        answered = asyncio.create_task(calls.call("a.b", 1))
        failed = asyncio.create_task(calls.call("a.c", 1))
        await until(lambda: len(inbox.events) == 2)
        assert calls.pending_count == len(calls) == 2
        await calls.respond(inbox.events[0].payload.request_id, local_envelope(2, "a.b"))
        await calls.emit_error(inbox.events[1].payload.request_id, "NO", "no", {"x": 1})
        assert (await answered).data == 2
        with pytest.raises(CallError) as caught:
            await failed
        assert caught.value.code == "NO"


async def test_a_call_that_is_completed_without_a_reply_fails() -> None:
    target = MemoryTarget()
    inbox = Mailbox()
    await target.consume("operations", inbox)
    async with PendingRequestMap(target) as calls:
        call = asyncio.create_task(calls.call("a.b"))
        await until(lambda: inbox.events)
        await calls.complete(inbox.events[0].payload.request_id)
        with pytest.raises(CallError) as caught:
            await call

    assert caught.value.code == ErrorCode.UNKNOWN_ERROR


@pytest.mark.requirement("R28")
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, "\ud800", {1.5: 2}, object()],
    ids=["NaN", "Infinity", "lone surrogate", "a float as key", "an object"],
)
async def test_r28_values_that_are_not_json_are_rejected_as_in_process(
    world: World, registry: OperationRegistry, value: Any
) -> None:
    with pytest.raises(CallError) as here:
        await registry.execute("echo.any", {"value": value})
    async with calling(world, registry) as calls:
        with pytest.raises(CallError) as there:
            await calls.call("echo.any", {"value": value})

    assert there.value.code == here.value.code == ErrorCode.VALIDATION_ERROR
    assert (there.value.message, there.value.details) == (here.value.message, here.value.details)


class Size(enum.Enum):
    SMALL = "small"


@dataclasses.dataclass
class Point:
    x: int


class Row(msgspec.Struct, rename="camel"):
    row_id: int


class Model(pydantic.BaseModel):
    first_name: str = pydantic.Field(alias="firstName")


CONVERTED: dict[str, tuple[Any, Any]] = {
    "Decimal": (decimal.Decimal("1.50"), "1.50"),
    "datetime": (datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), "2024-01-02T00:00:00Z"),
    "date": (datetime.date(2024, 1, 2), "2024-01-02"),
    "UUID": (uuid.UUID(int=1), str(uuid.UUID(int=1))),
    "enum": (Size.SMALL, "small"),
    "tuple": ((1, (2,)), [1, [2]]),
    "set": ({1}, [1]),
    "bytes": (b"ab", "YWI="),
    "dict subclass": (OrderedDict(a=1), {"a": 1}),
    "number as key": ({1: 2}, {"1": 2}),
    "dataclass": (Point(1), {"x": 1}),
    "struct": (Row(1), {"rowId": 1}),
    "model": (Model(firstName="Ada"), {"firstName": "Ada"}),
}


@pytest.mark.requirement("R28")
async def test_r28_values_are_converted_as_in_process(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry) as calls:
        for name, (value, expected) in CONVERTED.items():
            here = await registry.execute("echo.any", {"value": value})
            there = await calls.call("echo.any", {"value": value})
            assert there.data == here.data == expected, name


@pytest.mark.requirement("R28")
async def test_r28_a_decimal_is_not_a_number_in_every_validation(
    world: World, registry: OperationRegistry
) -> None:
    given = {"a": decimal.Decimal(1), "b": 2}
    with pytest.raises(CallError) as here:
        await registry.execute("math.add", given)
    async with calling(world, registry) as calls:
        with pytest.raises(CallError) as there:
            await calls.call("math.add", given)

    assert here.value.code == there.value.code == ErrorCode.VALIDATION_ERROR
    assert here.value.details == there.value.details


@pytest.mark.requirement("R28", "R20")
async def test_r28_deep_input_is_rejected_as_in_process(
    world: World, registry: OperationRegistry
) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    async with calling(world, registry) as calls:
        with pytest.raises(CallError) as caught:
            await calls.call("echo.any", {"value": deep})
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3

    assert caught.value.code == ErrorCode.VALIDATION_ERROR


@pytest.mark.requirement("R11")
async def test_r11_one_connection_cannot_abort_the_calls_of_another(
    registry: OperationRegistry,
) -> None:
    world = WebSocketWorld()
    async with (
        world.serve(registry),
        world.connect() as first,
        world.connect() as second,
        PendingRequestMap(first) as alice,
        PendingRequestMap(second) as eve,
    ):
        call = asyncio.create_task(alice.call("slow.sleep", {"seconds": 0.5}))
        await until(lambda: len(alice) == 1)
        (request_id,) = alice.pending
        stolen = (
            b'{"type":"call.aborted","id":"","payload":{"requestId":"%s"}}' % request_id.encode()
        )
        await eve.target.send("peer", stolen)
        assert (await call).data == "slept"


async def test_an_expired_call_is_not_sent(registry: OperationRegistry) -> None:
    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        with pytest.raises(CallError) as caught:
            await calls.call("math.add", {"a": 1, "b": 1}, OperationContext(deadline=1.0))

    assert caught.value.code == ErrorCode.TIMEOUT
    assert caught.value.message == "math.add was not sent: its time had run out"


@pytest.mark.requirement("R30")
async def test_a_timeout_that_is_not_a_number_is_rejected(registry: OperationRegistry) -> None:
    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        with time_limit(20):
            with pytest.raises(CallError, match="timeout is not a number") as of_call:
                await calls.call("slow.sleep", {"seconds": 60}, timeout=math.nan)
            with pytest.raises(CallError, match="timeout is not a number") as of_stream:
                await anext(calls.subscribe("count.forever", {"pause": 60}, idle_timeout=math.nan))
        assert len(calls) == 0

    assert of_call.value.code == of_stream.value.code == ErrorCode.VALIDATION_ERROR


async def test_an_input_that_a_middleware_changes_in_place_becomes_json() -> None:
    registry = OperationRegistry()

    @registry.operation("input.show", type="query")
    async def show(a: int, at: str) -> Any:
        return {"a": a, "at": at}

    @registry.use
    async def stamp(call: Call, call_next: Next) -> ResponseEnvelope[Any]:
        call.input["at"] = datetime.date(2026, 1, 2)
        return await call_next(call)

    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        assert (await calls.call("input.show", {"a": 1})).data == {"a": 1, "at": "2026-01-02"}


async def test_an_input_that_a_handler_changes_and_passes_on_becomes_json() -> None:
    registry = OperationRegistry()

    @registry.operation("input.show", type="query")
    async def show(a: int, at: str) -> Any:
        return {"a": a, "at": at}

    async def stamp(input: Any, context: OperationContext) -> Any:
        input["at"] = datetime.date(2026, 1, 2)
        return await context.env.call("input.show", input)

    spec = OperationSpec(name="stamp", namespace="input", type=OperationType.QUERY)
    registry.register(Operation(spec, stamp))
    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        assert (await calls.call("input.stamp", {"a": 1})).data == {"a": 1, "at": "2026-01-02"}


async def test_the_input_of_a_call_handler_becomes_json() -> None:
    registry, inputs = OperationRegistry(), list[Any]()

    async def keep(input: Any, _context: OperationContext) -> None:
        inputs.append(input)

    spec = OperationSpec(name="keep", namespace="input", type=OperationType.QUERY)
    registry.register(Operation(spec, keep))
    async with PendingRequestMap(MemoryTarget()) as calls:
        payload = RequestPayload(
            request_id="1", operation_id="input.keep", input={"at": datetime.date(2026, 1, 2)}
        )
        await build_call_handler(registry, calls)(CallRequested(payload=payload))
    assert inputs == [{"at": "2026-01-02"}]


async def test_an_envelope_that_a_middleware_returns_twice_is_copied() -> None:
    registry = OperationRegistry()
    kept: dict[str, Any] = {}

    @registry.operation("list.one")
    async def one() -> Any:
        return {"items": [1]}

    @registry.operation("list.many")
    async def many() -> Any:
        yield {"items": [1]}

    @registry.use
    async def remember(call: Call, call_next: Next) -> Any:
        if "one" not in kept:
            kept["one"] = await call_next(call)
        return kept["one"]

    @registry.use
    async def remember_items(call: Call, call_next: NextStream) -> Any:
        if "many" not in kept:
            kept["many"] = [item async for item in call_next(call)]
        for item in kept["many"]:
            yield item

    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        for _ in range(2):
            data = (await calls.call("list.one", {})).data
            assert data == {"items": [1]}
            data["items"].append("mine")
            (data,) = [envelope.data async for envelope in calls.subscribe("list.many", {})]
            assert data == {"items": [1]}
            data["items"].append("mine")


@pytest.mark.requirement("R28")
async def test_r28_fields_beside_the_data_are_json_and_measured_too() -> None:
    registry = OperationRegistry()
    headers = {"a": "b"}
    kept: ResponseEnvelope[Any] = http_envelope(
        {}, status_code=200, headers=headers, content_type="text/plain"
    )

    @registry.operation("meta.odd")
    async def odd(odd: bool) -> Any:
        value: Any = object() if odd else (datetime.date(2020, 1, 1), math.nan)
        return mcp_envelope({}, is_error=False, content=[], meta={"value": value})

    @registry.operation("meta.large")
    async def large() -> Any:
        return http_envelope(
            {}, status_code=200, headers={"a": "x" * 2000}, content_type="text/plain"
        )

    @registry.operation("meta.kept")
    async def keep() -> Any:
        return kept

    target = MemoryTarget(max_bytes=1000)
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        envelope = await calls.call("meta.odd", {"odd": False})
        assert isinstance(envelope.meta, MCPResponseMeta)
        assert envelope.meta.meta == {"value": ["2020-01-01", None]}
        with pytest.raises(CallError) as no_json:
            await calls.call("meta.odd", {"odd": True})
        with pytest.raises(CallError) as too_large:
            await calls.call("meta.large", {})
        for _ in range(2):
            envelope = await calls.call("meta.kept", {})
            assert isinstance(envelope.meta, HTTPResponseMeta)
            assert envelope.meta.headers == {"a": "b"}
            envelope.meta.headers["a"] = "mine"

    assert no_json.value.code == ErrorCode.EXECUTION_ERROR
    assert too_large.value.code == ErrorCode.RESOURCE_EXHAUSTED


class Unconfirmed(Shim):
    """Delivers requests, but their confirmation is lost."""

    async def enqueue(self, queue: str, body: bytes, **options: Any) -> str:
        receipt = await super().enqueue(queue, body, **options)
        await asyncio.Event().wait()
        return receipt


@pytest.mark.requirement("R12")
async def test_r12_a_reply_does_not_wait_for_the_confirmation_that_its_request_was_sent(
    registry: OperationRegistry,
) -> None:
    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(Unconfirmed(target)) as calls:
        with time_limit(20):
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()


@pytest.mark.requirement("R12")
async def test_r12_a_task_cancelled_when_its_call_ends_is_cancelled(
    registry: OperationRegistry,
) -> None:
    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(Unconfirmed(target)) as calls:
        call = asyncio.create_task(calls.call("slow.sleep", {"seconds": 60, "path": "/dev/null"}))
        await until(lambda: len(calls) == 1)
        calls.abort(next(iter(calls.pending)))
        # Sending is cancelled in the next iteration of the loop, after this.
        call.cancel()
        with time_limit(20), pytest.raises(asyncio.CancelledError):
            await call


async def test_a_closed_map_rejects_calls(registry: OperationRegistry) -> None:
    calls = PendingRequestMap()
    await calls.aclose()
    await calls.aclose()
    with time_limit(20), pytest.raises(CallError) as caught:
        await calls.call("math.add")

    assert caught.value.code == ErrorCode.ABORTED


@pytest.mark.requirement("R31")
async def test_a_cancelled_call_is_not_sent_again() -> None:
    arrived: list[str] = []
    is_held, may_send = asyncio.Event(), asyncio.Event()

    class HeldTarget(MemoryTarget):
        """Holds repeated requests back, like a broker that cannot be reached."""

        async def enqueue(self, queue: str, body: bytes, **options: Any) -> str:
            if arrived:
                is_held.set()
                await may_send.wait()
            return await super().enqueue(queue, body, **options)

    class StoppingWorker(SilentReceiver):
        def receive(self, delivery: Delivery) -> None:
            event = read_event(delivery.body)
            assert isinstance(event, CallRequested)
            arrived.append(event.payload.request_id)
            error = CallError(ErrorCode.UNAVAILABLE, "the worker stops", retryable=True)
            body = encode_error(event.payload.request_id, error, begun=False, worker="gone")
            refusing.append(asyncio.create_task(target.send(event.payload.reply_to or "", body)))

    target, refusing = HeldTarget(), list[asyncio.Task[None]]()
    with time_limit(20):
        async with (
            aclosing(await target.consume("operations", StoppingWorker())),
            PendingRequestMap(target) as calls,
        ):
            call = asyncio.create_task(calls.call("test.pay"))
            await is_held.wait()
            call.cancel()
            await asyncio.wait([call])
            may_send.set()

    assert len(arrived) == 1
