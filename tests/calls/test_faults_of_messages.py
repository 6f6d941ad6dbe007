"""Faults F10-F12 and F14-F17: messages that are duplicated, late, swapped, too large, malformed or unexpected."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.calls.conftest import make_world
from tests.calls.operations_under_test import build_registry
from tests.calls.shim import Shim, as_they_are
from tests.calls.waiting import caller, started, until
from tests.calls.worlds import MemoryWorld, WebSocketWorld, World, calling
from tests.limits import time_limit
from tests.receivers import SilentReceiver
from websockets.asyncio.client import connect

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import MAX_REQUEST_VALUES
from operations.calls import CallServer, PendingRequestMap, serve_calls
from operations.calls.protocol.events import (
    MalformedEvent,
    encode_error,
    encode_response,
    read_event,
)
from operations.contract.envelopes import local_envelope
from operations.pubsub.base import Delivery
from operations.pubsub.memory import MemoryTarget
from operations.registry import OperationRegistry

Change = Callable[[bytes], Iterable[bytes]]


class Recorder(SilentReceiver):
    """Collects the messages at an address."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    def receive(self, delivery: Delivery) -> None:
        self.bodies.append(msgspec.json.decode(delivery.body))


async def through(
    stack: AsyncExitStack,
    world: World,
    on_enqueue: Change = as_they_are,
    on_send: Change = as_they_are,
) -> PendingRequestMap:
    """A caller and a worker in `world` whose messages go through a shim."""
    registry = build_registry()
    if world.name == "websocket":
        await stack.enter_async_context(world.serve(registry))
    else:
        worker = await stack.enter_async_context(world.connect())
        await stack.enter_async_context(serve_calls(registry, Shim(worker, on_send=on_send)))
    target = await stack.enter_async_context(world.connect())
    return await stack.enter_async_context(PendingRequestMap(Shim(target, on_enqueue=on_enqueue)))


@pytest.mark.requirement("R36", "F10")
async def test_f10_a_request_that_is_delivered_twice_runs_once(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with AsyncExitStack() as stack:
        if world.name == "redis":
            await stack.enter_async_context(world.serve(build_registry()))
        calls = await through(stack, world, on_enqueue=lambda body: (body, body, body))
        for _ in range(4):
            envelope = await calls.call("slow.write", {"seconds": 0, "path": str(path)})
            assert envelope.data == "written"

    assert len(started(path)) == 4


@pytest.mark.requirement("R10", "R41", "F11")
@pytest.mark.parametrize("name", ["memory", "redis", "nats"])
async def test_f11_a_second_reply_is_dropped_and_counted(
    name: str, request: pytest.FixtureRequest
) -> None:
    async with AsyncExitStack() as stack:
        calls = await through(
            stack,
            make_world(name, request),
            on_send=lambda body: (body, body) if b"call.responded" in body else (body,),
        )
        for index in range(20):
            assert (await calls.call("math.add", {"a": index, "b": 1})).data == index + 1
        await until(lambda: calls.ignored == 20)


@pytest.mark.requirement("R33", "F12")
async def test_f12_an_item_that_is_overtaken_is_an_error_and_never_out_of_order() -> None:
    held: list[bytes] = []

    def swap(body: bytes) -> Iterable[bytes]:
        if b'"sequence":5' in body:
            held.append(body)
            return ()
        return (body, *held) if b'"sequence":6' in body else (body,)

    items: list[Any] = []
    async with AsyncExitStack() as stack:
        calls = await through(stack, MemoryWorld(), on_send=swap)
        with time_limit(20), pytest.raises(CallError) as caught:
            async for envelope in calls.subscribe("count.up", {"n": 10}):
                items += [envelope.data]

    assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert items == list(range(5))


@pytest.mark.requirement("R33", "F12")
@pytest.mark.parametrize("lost", [2, 8, 9])
async def test_f12_a_missing_item_is_an_error_and_never_a_gap(lost: int) -> None:
    def drop(body: bytes) -> Iterable[bytes]:
        return () if f'"sequence":{lost}'.encode() in body and b"responded" in body else (body,)

    items: list[Any] = []
    async with AsyncExitStack() as stack:
        calls = await through(stack, MemoryWorld(), on_send=drop)
        with time_limit(20), pytest.raises(CallError) as caught:
            async for envelope in calls.subscribe("count.up", {"n": 10}):
                items += [envelope.data]

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert items == list(range(lost))


@pytest.mark.requirement("R18", "F14")
async def test_f14_a_request_that_is_too_large_is_rejected_at_once(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry) as calls:
        limit = calls.target.max_bytes = min(calls.target.max_bytes, 1024 * 1024)
        with time_limit(15), pytest.raises(CallError) as request_error:
            await calls.call("echo.any", {"value": "x" * limit})
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3

    assert request_error.value.code == ErrorCode.RESOURCE_EXHAUSTED


@pytest.mark.requirement("R18", "F14")
async def test_f14_a_result_that_is_too_large_is_an_error(
    world: World, registry: OperationRegistry
) -> None:
    # Larger than any transport here carries by default.
    async with calling(world, registry) as calls:
        if world.name == "memory":
            calls.target.max_bytes = 1024 * 1024
        with time_limit(25), pytest.raises(CallError) as caught:
            await calls.call("echo.bytes", {"size": 20 * 1024 * 1024})
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


@pytest.mark.requirement("R55", "F14")
async def test_f14_too_many_values_are_rejected_in_both_directions(
    world: World, registry: OperationRegistry
) -> None:
    @registry.operation("list.long")
    async def long(n: int) -> list[int]:
        return [0] * n

    @registry.operation("list.longer")
    async def longer(n: int) -> AsyncIterator[list[int]]:
        yield [0] * n

    limit = MAX_REQUEST_VALUES
    async with calling(world, registry) as calls:
        with time_limit(20):
            with pytest.raises(CallError) as request_error:
                await calls.call("echo.any", {"value": [0] * limit})
            with pytest.raises(CallError) as result_error:
                await calls.call("list.long", {"n": limit})
            with pytest.raises(CallError) as item_error:
                async for _ in calls.subscribe("list.longer", {"n": limit}):
                    pass
            assert len((await calls.call("list.long", {"n": limit - 100})).data) == limit - 100

    for error in (request_error, result_error, item_error):
        assert error.value.code == ErrorCode.RESOURCE_EXHAUSTED


@pytest.mark.requirement("R55", "F14")
async def test_f14_an_item_that_only_its_caller_rejects_stops_the_worker(
    remote_world: World, registry: OperationRegistry
) -> None:
    ended = asyncio.Event()

    @registry.operation("list.endless")
    async def endless() -> AsyncIterator[list[int]]:
        try:
            while True:
                yield [0] * 500
        finally:
            ended.set()

    async with (
        remote_world.serve(registry),
        remote_world.connect(max_values=300) as target,
        PendingRequestMap(target) as calls,
    ):
        with time_limit(30):
            with pytest.raises(CallError) as caught:
                await anext(calls.subscribe("list.endless", {}))
            await ended.wait()

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


@pytest.mark.requirement("R55", "F14")
def test_f14_a_response_with_too_many_values_is_not_decoded() -> None:
    body = (
        b'{"type":"call.responded","id":"","payload":{"requestId":"r1","output":{"data":['
        + b"0," * MAX_REQUEST_VALUES
        + b'0],"meta":{"source":"local","operationId":"a.b","timestamp":1}}}}'
    )

    event = read_event(body)

    assert isinstance(event, MalformedEvent)
    assert event.request_id == "r1"
    assert event.code == ErrorCode.RESOURCE_EXHAUSTED


MALFORMED = {
    "not JSON": b"{",
    "empty object": b"{}",
    "a list": b"[]",
    "wrong types": b'{"type":"call.requested","id":"","payload":{"requestId":7,"operationId":[]}}',
    "no payload": b'{"type":"call.requested","id":""}',
    "deep": b'{"type":"call.requested","payload":' + b"[" * 100_000,
    "NaN": b'{"type":"call.requested","payload":{"requestId":"1","operationId":"a.b","input":NaN}}',
    "huge int": b'{"type":"call.requested","payload":{"requestId":"1","operationId":"a.b","timeoutMs":'
    + b"9" * 5000
    + b"}}",
    "bad UTF-8": b'{"type":"call.requested","payload":{"requestId":"\xff"}}',
    "empty": b"",
    "1e999": b'{"type":"call.requested","payload":{"requestId":"1","operationId":"a.b","timeoutMs":1e999}}',
    "lone surrogate": b'{"type":"call.requested","payload":{"requestId":"\\ud800","operationId":"a.b"}}',
    "type is no text": b'{"type":7,"payload":{}}',
    "negative credit": b'{"type":"call.requested","payload":{"requestId":"1","operationId":"count.up","credit":"x"}}',
    "only a string": b'"call.requested"',
}


@pytest.mark.requirement("R13", "F15")
@pytest.mark.parametrize("case", MALFORMED)
async def test_f15_a_malformed_event_stops_no_client(
    world: World, registry: OperationRegistry, case: str
) -> None:
    async with calling(world, registry) as calls:
        target = calls.target
        await target.enqueue("operations", MALFORMED[case], key="k", reply_to=calls.mailbox, wait=1)
        await target.send(target.control("operations"), MALFORMED[case])
        await target.send(target.topic("operations.callers"), MALFORMED[case])
        with time_limit(20):
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3


@pytest.mark.requirement("R13", "R41", "F15")
async def test_f15_only_a_malformed_reply_ends_its_call() -> None:
    target = MemoryTarget()
    async with PendingRequestMap(target) as calls:
        await target.consume("operations", SilentReceiver())
        running = asyncio.ensure_future(calls.call("slow.work", timeout=60))
        await until(lambda: calls.pending)
        (request_id,) = calls.pending
        for kind in ("call.requested", "call.offered", "call.alive", "call.error"):
            assert request_id in calls.pending
            body = {"type": kind, "payload": {"requestId": request_id, "worker": 1}}
            calls.receive(Delivery(msgspec.json.encode(body)))
        with pytest.raises(CallError) as caught:
            await running

    assert caught.value.code == ErrorCode.UNKNOWN_ERROR
    assert calls.malformed == 4


@pytest.mark.requirement("R13", "R28", "F15")
async def test_f15_duplicate_keys_take_the_last_value(
    world: World, registry: OperationRegistry
) -> None:
    async with world.serve(registry), world.connect() as target:
        box = target.mailbox()
        recorder = Recorder()
        await target.listen((box,), recorder)
        body = (
            b'{"type":"call.requested","id":"","payload":{"requestId":"r1","operationId":"a.b",'
            b'"operationId":"math.add","input":{"a":9,"a":1,"b":2},"replyTo":"'
            + box.encode()
            + b'"}}'
        )
        await target.enqueue("operations", body, key="k1", reply_to=box, wait=1)
        await until(lambda: recorder.bodies)

    assert recorder.bodies[0]["payload"]["output"]["data"] == 3


@pytest.mark.requirement("R13", "F15")
@pytest.mark.parametrize("reply_to", [7, {"a": []}])
async def test_f15_a_request_on_a_socket_whose_reply_address_is_not_text_gets_a_validation_error(
    reply_to: Any, registry: OperationRegistry
) -> None:
    world = WebSocketWorld()
    async with world.serve(registry), connect(world.url) as socket:
        payload = {"requestId": "r1", "operationId": "math.add", "replyTo": reply_to}
        request = {"type": "call.requested", "id": "", "payload": payload}
        await socket.send(msgspec.json.encode(request).decode())
        with time_limit(20):
            reply = msgspec.json.decode(await socket.recv())

    assert reply["type"] == "call.error"
    assert reply["payload"]["requestId"] == "r1"
    assert reply["payload"]["code"] == ErrorCode.VALIDATION_ERROR


@pytest.mark.requirement("R13", "F15")
async def test_f15_a_malformed_request_with_a_reply_address_gets_a_validation_error(
    world: World, registry: OperationRegistry
) -> None:
    async with world.serve(registry), world.connect() as target:
        box = target.mailbox()
        recorder = Recorder()
        await target.listen((box,), recorder)
        payload = {"requestId": "r1", "operationId": 7, "replyTo": box}
        body = msgspec.json.encode({"type": "call.requested", "id": "", "payload": payload})
        await target.enqueue("operations", body, key="k1", reply_to=box, wait=1)
        await until(lambda: recorder.bodies)

    assert recorder.bodies[0]["type"] == "call.error"
    assert recorder.bodies[0]["payload"]["code"] == ErrorCode.VALIDATION_ERROR


@pytest.mark.requirement("F16")
async def test_f16_unknown_types_and_fields_are_ignored_and_an_unknown_version_is_rejected(
    world: World, registry: OperationRegistry
) -> None:
    async with world.serve(registry), world.connect() as target:
        box = target.mailbox()
        recorder = Recorder()
        await target.listen((box,), recorder)

        async def put(number: int, **fields: Any) -> None:
            payload = {
                "requestId": f"r{number}",
                "operationId": "math.add",
                "input": {"a": 1, "b": number},
                "replyTo": box,
                **fields,
            }
            body = {"type": "call.requested", "id": "", "payload": payload, "colour": "blue"}
            await target.enqueue(
                "operations", msgspec.json.encode(body), key=f"k{number}", reply_to=box, wait=1
            )

        unknown = msgspec.json.encode({"type": "call.invented", "id": "", "payload": {"x": 1}})
        await target.enqueue("operations", unknown, key="k0", reply_to=box, wait=1)
        await put(1, mood="good")
        await put(2, requiredVersion=99)
        await until(lambda: len(recorder.bodies) == 2)

    answers = {body["payload"]["requestId"]: body["payload"] for body in recorder.bodies}
    assert answers["r1"]["output"]["data"] == 2
    assert answers["r2"]["code"] == ErrorCode.VALIDATION_ERROR


@pytest.mark.requirement("R10", "R41", "F17")
async def test_f17_replies_to_unknown_requests_are_ignored(
    world: World, registry: OperationRegistry
) -> None:
    async with world.serve(registry), caller(world) as calls:
        if world.name == "websocket":
            calls.receive(Delivery(encode_response("nope", local_envelope(1, "a.b"))))
        else:
            async with world.connect() as stranger:
                await stranger.send(
                    calls.mailbox, encode_response("x" * 32, local_envelope(1, "a.b"))
                )
                await stranger.send(calls.mailbox, encode_error("y" * 32, CallError("X", "x")))
        await until(lambda: calls.ignored > 0)
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3


@pytest.mark.no_cover
@pytest.mark.requirement("R13")
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False)
            | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(
                    st.sampled_from(
                        [
                            "type",
                            "id",
                            "payload",
                            "requestId",
                            "requestIds",
                            "replyTo",
                            "credit",
                            "code",
                        ]
                    )
                    | st.text(max_size=4),
                    inner,
                    max_size=6,
                )
            ),
            max_leaves=12,
        ).map(msgspec.json.encode),
        st.builds(
            lambda kind, payload: msgspec.json.encode({"type": kind, "payload": payload}),
            st.sampled_from(
                [f"call.{name}" for name in ("requested", "responded", "error", "alive", "probed")]
            ),
            st.dictionaries(
                st.sampled_from(["requestId", "requestIds", "replyTo", "worker", "output", "code"]),
                st.none() | st.text(max_size=4) | st.lists(st.text(max_size=4), max_size=3),
            ),
        ),
    )
)
def test_r13_no_bytes_stop_a_worker_or_a_caller(body: bytes) -> None:
    async def scenario() -> None:
        target = MemoryTarget()
        async with (
            serve_calls(build_registry(), target) as server,
            PendingRequestMap(target) as calls,
        ):
            assert isinstance(server, CallServer)
            server.receive(Delivery(body))
            server.receive(Delivery(body, calls.mailbox))
            calls.receive(Delivery(body))
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3

    asyncio.run(scenario())
