"""Callers and workers that misbehave, or leave at a bad moment, do not harm others."""

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from typing import Any

import pytest
from tests.calls.operations_under_test import build_registry
from tests.calls.waiting import caller, until
from tests.calls.worlds import BrokerWorld, MemoryWorld, World, calling, nats_world, redis_world
from tests.limits import time_limit
from tests.receivers import SilentReceiver
from tests.servers import Broker
from websockets.asyncio.server import ServerConnection, serve

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, from_calls, serve_calls
from operations.calls.protocol.events import (
    AbortPayload,
    AlivePayload,
    CallAborted,
    CallAlive,
    CallProbed,
    CallRequested,
    ProbePayload,
    RequestPayload,
    encode_event,
    encode_item,
    read_event,
)
from operations.calls.protocol.services import Presence
from operations.contract.context import new_request_id
from operations.contract.envelopes import local_envelope
from operations.pubsub.base import Delivery
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.websocket import AcceptedTarget, connect_websocket, serve_websocket
from operations.registry import OperationRegistry


def ticking() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("tick.for_ever")
    async def tick() -> Any:
        while True:
            yield 1
            await asyncio.sleep(0.01)

    @registry.operation("tick.slowly", type="query")
    async def slowly() -> None:
        await asyncio.sleep(60)

    return registry


@pytest.mark.requirement("R33", "F22")
async def test_f22_a_subscription_cancelled_while_it_is_opened_is_stopped_at_its_worker(
    world: World,
) -> None:
    async with (
        world.serve(ticking()) as workers,
        world.connect() as target,
        PendingRequestMap(target) as calls,
    ):
        await calls.call("services.list")
        for steps in range(12):
            stream = calls.subscribe("tick.for_ever")
            reading = asyncio.create_task(anext(stream))
            for _ in range(steps):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            if not reading.cancelled():
                # The first item arrived before the cancellation, so the stream is open.
                await stream.aclose()
        assert len(calls) == 0
        # Earlier messages arrive before this one.
        await calls.call("services.list")
        await until(lambda: not any(worker.active for worker in workers))


@pytest.mark.requirement("R33", "F22")
async def test_f22_a_subscription_closed_by_another_task_while_it_is_opened_ends_at_once(
    broker_world: BrokerWorld,
) -> None:
    async with (
        broker_world.serve(ticking()) as workers,
        broker_world.connect() as target,
        PendingRequestMap(target) as calls,
    ):
        await calls.call("services.list")
        stream = calls.subscribe("tick.for_ever")
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await reading
        assert len(calls) == 0
        await until(lambda: not any(worker.active for worker in workers))


async def test_a_subscription_is_read_by_one_task_at_a_time() -> None:
    async with calling(MemoryWorld(), ticking()) as calls:
        stream = calls.subscribe("tick.for_ever")
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="read by one task"):
            await anext(stream)
        assert (await reading).data == 1
        await stream.aclose()


@pytest.mark.requirement("R31", "F22")
async def test_f22_requests_without_an_address_do_not_hide_a_disconnected_caller(
    nats_server: Broker,
) -> None:
    world = nats_world(nats_server.url)
    async with world.serve(ticking()) as workers, world.connect() as stranger:
        (worker,) = workers
        for operation_id in ("tick.slowly", "tick.for_ever"):
            payload = RequestPayload(request_id=new_request_id(), operation_id=operation_id)
            body = encode_event(CallRequested(payload=payload))
            await stranger.enqueue("operations", body, key=payload.request_id, reply_to="", wait=1)
        async with world.connect() as target:
            calls = PendingRequestMap(target)
            waiting = asyncio.create_task(calls.call("tick.slowly", timeout=60))
            await until(lambda: any(job.reply_to for job in worker.jobs.values()))
        # Its connection is lost without a goodbye message.
        await until(lambda: worker.active == 0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await calls.aclose()


@pytest.mark.requirement("F15")
async def test_f15_a_subscription_has_room_for_one_item_at_least() -> None:
    target = MemoryTarget()
    async with serve_calls(ticking(), target) as worker, PendingRequestMap(target) as calls:
        body = b'{"type":"call.requested","payload":{"requestId":"r","operationId":"tick.for_ever","credit":0}}'
        await target.enqueue("operations", body, key="r", reply_to=calls.mailbox, wait=1)

        assert worker.malformed == 1
        assert worker.active == 0


@pytest.mark.requirement("R38", "F25")
async def test_f25_a_worker_that_drains_on_a_websocket_takes_nothing_new() -> None:
    registry = OperationRegistry()
    ran: list[int] = []
    started, draining = asyncio.Event(), asyncio.Event()

    @registry.operation("till.pay")
    async def pay(number: int) -> int:
        ran.append(number)
        started.set()
        if number == 0:
            await draining.wait()
        return number

    close = asyncio.Event()

    async def attach(target: AcceptedTarget) -> None:
        # The connection is used in both directions.
        async with PendingRequestMap(target):
            async with serve_calls(registry, target):
                await close.wait()
            await target.wait_closed()

    async with serve_websocket(attach) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with connect_websocket(url) as target, PendingRequestMap(target) as calls:
            first = asyncio.create_task(calls.call("till.pay", {"number": 0}))
            await started.wait()
            close.set()
            await asyncio.sleep(0)
            with pytest.raises(CallError) as caught:
                await calls.call("till.pay", {"number": 1})
            draining.set()
            assert (await first).data == 0

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert caught.value.retryable
    assert ran == [0]


@pytest.mark.requirement("R38", "F10", "F25")
async def test_f25_a_draining_worker_does_not_reject_a_repeated_request_that_it_runs() -> None:
    registry = OperationRegistry()
    started, draining = asyncio.Event(), asyncio.Event()

    @registry.operation("till.pay")
    async def pay() -> str:
        started.set()
        await draining.wait()
        return "paid"

    target = MemoryTarget()
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(serve_calls(registry, target))
        calls = await stack.enter_async_context(PendingRequestMap(target))
        call = asyncio.create_task(calls.call("till.pay"))
        await started.wait()
        (job,) = worker.jobs.values()
        closing = asyncio.create_task(worker.aclose())
        await asyncio.sleep(0)
        request = encode_event(CallRequested(payload=job.request))
        worker.receive(Delivery(request, calls.mailbox))
        await asyncio.sleep(0)
        draining.set()
        assert (await call).data == "paid"
        await closing

    assert worker.duplicates == 1


@pytest.mark.requirement("R13", "R42")
async def test_r13_a_worker_does_not_store_long_names() -> None:
    target = MemoryTarget()
    async with serve_calls(ticking(), target) as worker:
        for number in range(100):
            request_id = f"{number}" + "x" * 1000
            aborted = CallAborted(payload=AbortPayload(request_id=request_id))
            await target.send(worker.mailbox, encode_event(aborted))

        assert worker.malformed == 100


@pytest.mark.requirement("R13", "F8")
async def test_f8_a_probe_that_names_a_call_a_hundred_times_is_answered_once() -> None:
    registry = OperationRegistry()

    @registry.operation("say.much", type="query")
    async def much() -> str:
        return "x" * 100_000

    heard: list[bytes] = []

    class Recorder(SilentReceiver):
        def receive(self, delivery: Delivery) -> None:
            heard.append(delivery.body)

    target = MemoryTarget()
    box, request_id = target.mailbox(), new_request_id()
    async with serve_calls(registry, target) as worker:
        await target.listen([box], Recorder())
        payload = RequestPayload(request_id=request_id, operation_id="say.much", reply_to=box)
        body = encode_event(CallRequested(payload=payload))
        await target.enqueue("operations", body, key=request_id, reply_to=box, wait=1)
        await until(lambda: len(heard) == 1)
        probe = ProbePayload(request_ids=[request_id] * 100, reply_to=box)
        await target.send(worker.mailbox, encode_event(CallProbed(payload=probe)))
        await until(lambda: b"call.alive" in heard[-1])

    assert [len(body) > 100_000 for body in heard] == [True, True, False]


@pytest.mark.requirement("R12", "F1")
async def test_f1_a_malformed_reply_about_a_lost_call_does_not_end_the_detection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The caller must ask, because the worker does not list the operations that may run again.
    monkeypatch.setattr(Presence, "replayable", lambda _: None)
    registry = ticking()

    @registry.operation("services.schema", type="query")
    async def schema(operationId: str) -> list[str]:  # noqa: N803 - its name on the wire
        return ["no", "object"]

    target = MemoryTarget()
    async with PendingRequestMap(target, heartbeat=0.1) as calls, serve_calls(registry, target):
        for _ in range(2):
            # A silent worker with a running call.
            async with serve_calls(registry, target, grace=0.2) as dead:
                waiting = asyncio.gather(
                    *(calls.call("tick.slowly", timeout=60) for _ in range(4)),
                    return_exceptions=True,
                )
                await until(lambda: dead.active)
                lost = dead.jobs.copy()
                dead.jobs.clear()
                await until(partial(lost.keys().isdisjoint, calls.pending))
                for request_id in tuple(calls.pending):
                    calls.abort(request_id)
                outcomes = await waiting
                # It ends its running calls.
                dead.jobs |= lost

            codes = {getattr(outcome, "code", None) for outcome in outcomes}
            assert codes == {ErrorCode.UNAVAILABLE, ErrorCode.ABORTED}


@pytest.mark.requirement("R47")
async def test_r47_third_party_descriptions_stay_on_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = OperationRegistry()

    @registry.operation("services.describe")
    async def describe() -> Any:
        reason = "a.b: no\nCRITICAL operations: root logged in\x1b[2J" + "x" * 10_000
        yield json.dumps({"leftOut": reason}) + "\n"

    target = MemoryTarget()
    async with serve_calls(registry, target), from_calls(target) as service:
        assert len(service) == 0

    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 600


@pytest.mark.requirement("R13", "F15")
async def test_f15_a_malformed_nats_message_stops_no_reader(
    nats_server: Broker,
) -> None:
    world = nats_world(nats_server.url)
    async with world.serve(build_registry()), caller(world) as calls:
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        reader, writer = await asyncio.open_connection("127.0.0.1", nats_server.port)
        writer.write(b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\nPING\r\n')
        while await reader.readline() != b"PONG\r\n":
            pass
        queue = f"{world.prefix}.queue.operations.any".encode()
        for body in (b"", b"x"):
            # Not UTF-8, which the server accepts.
            writer.write(b"PUB %b \xff\xfe %d\r\n%b\r\n" % (queue, len(body), body))
        writer.write(b"PING\r\n")
        while await reader.readline() != b"PONG\r\n":
            pass
        assert (await calls.call("math.add", {"a": 1, "b": 2}, timeout=20)).data == 3
        writer.close()
        await writer.wait_closed()


@pytest.mark.requirement("R13", "F15")
async def test_f15_an_item_nested_too_deeply_ends_only_its_subscription() -> None:
    async def answer(socket: ServerConnection) -> None:
        async for message in socket:
            request = json.loads(message)
            if request["type"] != "call.requested":
                continue
            depth = request["payload"].get("input", 0)
            data = b"[" * depth + b"]" * depth if depth else b"1"
            # Declared as base64, so that it is checked.
            more = (b',"encoding":"x"', b',"sequence":0') if depth else (b"", b"")
            meta = b'{"source":"local","operationId":"a.b","timestamp":1}'
            output = b'{"data":%b,"meta":%b%b}' % (data, meta, more[0])
            payload = b'"requestId":"%b","output":%b%b' % (
                request["payload"]["requestId"].encode(),
                output,
                more[1],
            )
            await socket.send(b'{"type":"call.responded","payload":{%b}}' % payload, text=True)

    async with serve(answer, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        async with connect_websocket(url) as target, PendingRequestMap(target) as calls:
            # One of them is just too deep for one of the readers.
            for depth in range(900, 1010, 2):
                with suppress(CallError):
                    await anext(calls.subscribe("a.b", depth, idle_timeout=0.1))
            assert (await calls.call("a.b", timeout=20)).data == 1


@pytest.mark.requirement("F18")
@pytest.mark.parametrize("broker", ["nats", "redis"])
async def test_f18_no_request_is_sent_to_an_address_that_is_not_a_worker(
    broker: str, request: pytest.FixtureRequest
) -> None:
    ran: list[int] = []
    heard: list[bytes] = []
    registry = OperationRegistry()

    @registry.operation("test.pay")
    async def pay(n: int) -> None:
        ran.append(n)

    class Recorder(SilentReceiver):
        def receive(self, delivery: Delivery) -> None:
            heard.append(delivery.body)

    url = request.getfixturevalue(f"{broker}_server").url
    world = nats_world(url) if broker == "nats" else redis_world(url)
    async with (
        world.serve(registry),
        world.serve(registry),
        caller(world) as calls,
        world.connect() as stranger,
    ):
        topic, box = stranger.topic("spy"), stranger.mailbox()
        async with aclosing(await stranger.listen((topic, box), Recorder())):
            # At the address of the group, every worker would run the request.
            false = (stranger.control("operations"), topic, box, "_INBOX.spy", "0" * 32, "")
            for address in false:
                alive = AlivePayload(worker=address, accepts=True, specs=f"digest of {address}")
                body = encode_event(CallAlive(payload=alive))
                await stranger.send(stranger.topic("operations.callers"), body)
            await until(lambda: calls.malformed == len(false))
            await asyncio.gather(*(calls.call("test.pay", {"n": n}) for n in range(24)))
            with pytest.raises(CallError) as caught:
                await calls.call("test.unknown")

    assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND
    assert sorted(ran) == list(range(24))
    assert heard == []


@pytest.mark.requirement("F12")
@pytest.mark.parametrize("broker", ["nats", "redis"])
async def test_f12_a_worker_with_a_malformed_address_does_not_hide_lost_items_of_others(
    broker: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{broker}_server").url
    world = nats_world(url) if broker == "nats" else redis_world(url)

    class Worker(SilentReceiver):
        def receive(self, delivery: Delivery) -> None:
            event = read_event(delivery.body)
            assert isinstance(event, CallRequested)
            request, name = event.payload, event.payload.operation_id
            # The second item of the other subscription is lost.
            numbers, address = ((0,), "nowhere") if name == "tick.first" else ((0, 2), "")
            for number in numbers:
                item = encode_item(
                    request.request_id, local_envelope(number, name), number, address
                )
                tasks.append(asyncio.create_task(target.send(request.reply_to or "", item)))

    tasks: list[asyncio.Task[None]] = []
    async with (
        world.connect() as target,
        aclosing(await target.consume("operations", Worker())),
        caller(world, heartbeat=0.2) as calls,
        aclosing(calls.subscribe("tick.first")) as first,
    ):
        await anext(first)
        other = calls.subscribe("tick.other")
        await anext(other)
        with time_limit(20), pytest.raises(CallError, match="items of the subscription"):
            await anext(other)


@pytest.mark.requirement("R38", "F25")
async def test_f25_the_last_announcement_of_a_stopping_worker_is_its_departure() -> None:
    heard: list[Any] = []

    class Recorder(SilentReceiver):
        def receive(self, delivery: Delivery) -> None:
            heard.append(read_event(delivery.body))

    target = MemoryTarget()
    async with serve_calls(OperationRegistry(), target) as worker:
        await target.listen([target.topic("operations.callers"), "box.me"], Recorder())
        probe = ProbePayload(request_ids=["nobody's"], reply_to="box.me")
        worker.receive(Delivery(encode_event(CallProbed(payload=probe))))

    assert [event.payload.leaving for event in heard] == [True, True]


@pytest.mark.requirement("R38", "F25")
async def test_f25_a_worker_for_one_peer_leaves_with_it_and_a_signal_reaches_them_all() -> None:
    began: list[AcceptedTarget] = []
    ended: list[AcceptedTarget] = []

    async def attach(target: AcceptedTarget) -> None:
        began.append(target)
        async with serve_calls(ticking(), target) as worker:
            await worker.run()
        ended.append(target)

    before = signal.getsignal(signal.SIGINT)
    with time_limit(20):
        async with serve_websocket(attach) as server, AsyncExitStack() as stack:
            stack.callback(signal.signal, signal.SIGINT, before)
            url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            for _ in range(2):
                await stack.enter_async_context(connect_websocket(url))
            async with connect_websocket(url):
                await until(lambda: len(began) == 3)
            await until(lambda: len(ended) == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            # The peers connect again at once, to workers that began after the signal.
            await until(lambda: len(ended) >= 3)

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
