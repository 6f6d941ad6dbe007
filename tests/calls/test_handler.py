"""Requests that the program itself received: `build_call_handler`, `respond`, `emit_error` and `complete`."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.calls.waiting import until
from tests.calls.worlds import BrokerWorld
from tests.limits import time_limit
from tests.receivers import SilentReceiver

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, build_call_handler
from operations.calls.protocol.events import (
    CallRequested,
    CallResponded,
    RequestPayload,
    read_event,
    read_output,
)
from operations.contract.access import Identity
from operations.contract.envelopes import local_envelope
from operations.pubsub.base import Delivery, EventTarget
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.redis import connect_redis_interop
from operations.pubsub.websocket import AcceptedTarget, connect_websocket, serve_websocket
from operations.registry import OperationRegistry


class Inbox(SilentReceiver):
    """Keeps the events that arrive."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def receive(self, delivery: Delivery) -> None:
        self.events.append(read_event(delivery.body))


class RequestsTo(Inbox):
    """Gives every request to a call handler, as a program with its own routing does."""

    def __init__(self, handle: Callable[[CallRequested], Any]) -> None:
        super().__init__()
        self._handle = handle
        self.tasks: list[asyncio.Task[None]] = []

    def receive(self, delivery: Delivery) -> None:
        super().receive(delivery)
        self.tasks.append(asyncio.create_task(self._handle(self.events[-1])))


def requested(operation_id: str, input: Any = None, **fields: Any) -> CallRequested:
    fields = {"request_id": "r1", "reply_to": "box.me", **fields}
    return CallRequested(payload=RequestPayload(operation_id=operation_id, input=input, **fields))


async def handled(
    registry: OperationRegistry, event: CallRequested, *, trusted: bool = True, **options: Any
) -> list[Any]:
    """Return the events that `build_call_handler` publishes for one request."""
    target = MemoryTarget(trusted=trusted)
    inbox = Inbox()
    await target.listen(("box.me",), inbox)
    async with PendingRequestMap(target) as calls:
        await build_call_handler(registry, calls, **options)(event)
        return inbox.events


async def test_a_handler_publishes_the_envelope(registry: OperationRegistry) -> None:
    (reply,) = await handled(registry, requested("math.add", {"a": 1, "b": 2}))

    assert reply.payload.request_id == "r1"
    assert read_output(reply.payload.output).data == 3


async def test_a_handler_publishes_declared_errors(registry: OperationRegistry) -> None:
    (reply,) = await handled(registry, requested("fail.domain", {}))

    assert reply.payload.code == "NO_FUNDS"
    assert reply.payload.details == {"missing": 3}


async def test_a_handler_publishes_every_item_and_the_end(registry: OperationRegistry) -> None:
    *items, end = await handled(registry, requested("count.up", {"n": 3}))

    assert [item.payload.sequence for item in items] == [0, 1, 2]
    assert end.payload.sequence == 3


async def test_a_handler_trusts_identities_only_if_the_target_does(
    registry: OperationRegistry,
) -> None:
    event = requested("secret.read", {}, identity=Identity("a", ["secret:read"]))

    (refused,) = await handled(registry, event, trusted=False)
    (allowed,) = await handled(registry, event, trusted=True)

    assert refused.payload.code == ErrorCode.ACCESS_DENIED
    assert read_output(allowed.payload.output).data == "42"


async def test_a_handler_resolves_credentials(registry: OperationRegistry) -> None:
    def resolve(credential: str) -> Identity | None:
        return Identity("a", ["secret:read"]) if credential == "right" else None

    (allowed,) = await handled(
        registry, requested("secret.read", {}, credential="right"), resolve=resolve
    )
    claimed = Identity("a", ["secret:read"])
    (refused,) = await handled(
        registry,
        requested("secret.read", {}, credential="wrong", identity=claimed),
        resolve=resolve,
    )
    (unresolved,) = await handled(registry, requested("math.add", {}, credential="right"))

    assert read_output(allowed.payload.output).data == "42"
    assert refused.payload.code == unresolved.payload.code == ErrorCode.ACCESS_DENIED


@pytest.mark.parametrize("exposed", [False, True])
async def test_a_handler_publishes_exception_texts_only_if_they_are_exposed(exposed: bool) -> None:
    registry = OperationRegistry()

    @registry.operation("db.read")
    async def read() -> None:
        raise RuntimeError("password=hunter2")

    for options in ({"trusted": exposed}, {"trusted": not exposed, "expose_errors": exposed}):
        (reply,) = await handled(registry, requested("db.read", {}), **options)
        assert ("hunter2" in reply.payload.message) is exposed


async def test_a_handler_publishes_retryable_as_the_operation_set_it() -> None:
    registry = OperationRegistry()

    @registry.operation("busy.raise")
    async def fail(code: str, retryable: bool) -> None:
        raise CallError(code, "no", retryable=retryable)

    for code in (ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED, "OWN"):
        for retryable in (False, True):
            event = requested("busy.raise", {"code": code, "retryable": retryable})
            (reply,) = await handled(registry, event)
            assert (reply.payload.code, reply.payload.retryable) == (code, retryable)


async def test_a_handler_enforces_the_deadline_of_an_operation_that_ignores_it() -> None:
    registry = OperationRegistry()
    finish = asyncio.Event()

    @registry.operation("slow.stubborn")
    async def stubborn() -> None:
        while not finish.is_set():
            try:
                await finish.wait()
            except asyncio.CancelledError:
                continue

    with time_limit(20):
        target, inbox = MemoryTarget(), Inbox()
        await target.listen(("box.me",), inbox)
        async with PendingRequestMap(target) as calls:
            handle = build_call_handler(registry, calls)
            await handle(requested("slow.stubborn", {}, timeout_ms=50))
            finish.set()

    assert inbox.events[0].payload.code == ErrorCode.TIMEOUT


async def test_a_handler_runs_a_request_that_arrives_twice_once() -> None:
    registry = OperationRegistry()
    ran: list[int] = []

    @registry.operation("till.pay")
    async def pay() -> int:
        ran.append(1)
        return len(ran)

    target, inbox = MemoryTarget(), Inbox()
    await target.listen(("box.me",), inbox)
    async with PendingRequestMap(target) as calls:
        handle = build_call_handler(registry, calls)
        for _ in range(2):
            await handle(requested("till.pay", {}))

    assert ran == [1]
    assert [read_output(event.payload.output).data for event in inbox.events] == [1, 1]


async def test_closing_that_is_cancelled_while_a_request_runs_leaves_nothing() -> None:
    registry = OperationRegistry()
    begun = asyncio.Event()

    @registry.operation("slow.wait")
    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    target = MemoryTarget()
    calls = PendingRequestMap(target)
    await calls.open()
    handling = asyncio.create_task(build_call_handler(registry, calls)(requested("slow.wait", {})))
    await begun.wait()
    closing = asyncio.create_task(calls.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with time_limit(20):
        await asyncio.gather(closing, handling, return_exceptions=True)
        await until(lambda: asyncio.all_tasks() <= before)

    assert closing.cancelled()
    assert await target.count_present(calls.mailbox) == 0


async def test_a_closed_map_closes_its_handlers_at_the_same_time() -> None:
    calls, begun, may_end = PendingRequestMap(), list[int](), asyncio.Event()

    async def close() -> None:
        begun.append(1)
        await may_end.wait()

    for _ in range(2):
        await calls.close_with(close)
    closing = asyncio.create_task(calls.aclose())
    try:
        await until(lambda: len(begun) == 2)
    finally:
        may_end.set()
        await closing
    assert len(begun) == 2


async def test_cancelling_a_handler_aborts_the_request() -> None:
    registry = OperationRegistry()
    started, cancelled = asyncio.Event(), asyncio.Event()

    @registry.operation("slow.wait")
    async def wait() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    target, inbox = MemoryTarget(), Inbox()
    await target.listen(("box.me",), inbox)
    with time_limit(20):
        async with PendingRequestMap(target) as calls:
            task = asyncio.create_task(build_call_handler(registry, calls)(requested("slow.wait")))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await cancelled.wait()
            await until(lambda: inbox.events)

    assert inbox.events[0].payload.code == ErrorCode.ABORTED


async def test_a_handler_of_a_closed_map_runs_nothing(registry: OperationRegistry) -> None:
    calls = PendingRequestMap(MemoryTarget())
    await calls.aclose()
    with pytest.raises(CallError) as caught:
        await build_call_handler(registry, calls)(requested("math.add", {"a": 1, "b": 2}))

    assert caught.value.code == ErrorCode.ABORTED


async def test_a_request_without_an_address_does_not_count_as_abandoned(
    registry: OperationRegistry,
) -> None:
    target, inbox = MemoryTarget(), Inbox()
    await target.listen((target.topic("operations.callers"),), inbox)
    calls = PendingRequestMap(target)
    handle = build_call_handler(registry, calls)
    with time_limit(20):
        await handle(requested("slow.sleep", {"seconds": 1.0}, reply_to=None))
    await calls.aclose()

    replies = [event for event in inbox.events if isinstance(event, CallResponded)]
    assert [read_output(reply.payload.output).data for reply in replies] == ["slept"]


async def test_over_a_broker_a_slow_reader_slows_the_handler_and_slow_calls_continue(
    broker_world: BrokerWorld, registry: OperationRegistry
) -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(broker_world.connect())
        serving = await stack.enter_async_context(PendingRequestMap(target))
        requests = RequestsTo(build_call_handler(registry, serving))
        taking = await target.consume("operations", requests)
        stack.push_async_callback(taking.aclose)
        caller = await stack.enter_async_context(broker_world.connect())
        calls = await stack.enter_async_context(PendingRequestMap(caller, heartbeat=0.1))
        with time_limit(30):
            slow = asyncio.create_task(calls.call("slow.sleep", {"seconds": 1.0}))
            items = [item.data async for item in calls.subscribe("count.up", {"n": 600}, window=8)]
            assert len(items) == 600
            # The caller asks several times whether a worker still has it.
            assert (await slow).data == "slept"
            await asyncio.gather(*requests.tasks)


# ------------------------------------------------------------------------------------------------ respond


@asynccontextmanager
async def memory_ends() -> AsyncGenerator[tuple[EventTarget, EventTarget]]:
    target = MemoryTarget()
    yield target, target


@asynccontextmanager
async def websocket_ends(interop: bool) -> AsyncGenerator[tuple[EventTarget, EventTarget]]:
    accepted: list[AcceptedTarget] = []

    async def keep(target: AcceptedTarget) -> None:
        accepted.append(target)
        await target.wait_closed()

    async with serve_websocket(keep, interop=interop) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with connect_websocket(url, interop=interop) as client:
            await until(lambda: accepted)
            yield client, accepted[0]


@asynccontextmanager
async def interop_ends(url: str) -> AsyncGenerator[tuple[EventTarget, EventTarget]]:
    async with connect_redis_interop(url) as first, connect_redis_interop(url) as second:
        yield first, second


@pytest.fixture(params=["memory", "websocket", "websocket interop", "redis interop"])
async def ends(request: pytest.FixtureRequest) -> Any:
    """The caller's and the worker's end of a target on which a reply needs no address."""
    if request.param == "memory":
        opened = memory_ends()
    elif request.param == "redis interop":
        opened = interop_ends(request.getfixturevalue("redis_server").url)
    else:
        opened = websocket_ends(interop="interop" in request.param)
    return opened


async def test_replies_without_an_address_are_published(ends: Any) -> None:
    async with ends as (near, far):
        inbox = Inbox()
        taking = await far.consume("operations", inbox)
        async with (
            PendingRequestMap(near, timeout=30) as calls,
            PendingRequestMap(far) as answering,
        ):
            if hasattr(far, "wants"):
                await far.wants("call.completed:")
            answered = asyncio.create_task(calls.call("a.b", 1))
            failed = asyncio.create_task(calls.call("a.c", 1))
            stream = calls.subscribe("a.d", 1)
            reading = asyncio.create_task(anext(stream))
            await until(lambda: len(inbox.events) == 3)
            ids = {event.payload.operation_id: event.payload.request_id for event in inbox.events}

            await answering.respond(ids["a.b"], local_envelope(2, "a.b"))
            await answering.emit_error(ids["a.c"], "NO", "no", {"x": 1}, retryable=True)
            for number in range(2):
                await answering.respond(ids["a.d"], local_envelope(number, "a.d"))
            await answering.complete(ids["a.d"])

            with time_limit(20):
                assert (await answered).data == 2
                with pytest.raises(CallError) as caught:
                    await failed
                assert (await reading).data == 0
                assert [item.data async for item in stream] == [1]
        await taking.aclose()

    assert (caught.value.code, caught.value.details, caught.value.retryable) == (
        "NO",
        {"x": 1},
        True,
    )


async def test_on_a_target_with_queues_a_reply_without_an_address_is_an_error(
    broker_world: BrokerWorld, registry: OperationRegistry
) -> None:
    async with broker_world.connect() as target, PendingRequestMap(target) as calls:
        with pytest.raises(ValueError, match="'r1'"):
            await calls.respond("r1", local_envelope(1, "a.b"))
        with pytest.raises(ValueError, match="'r1'"):
            await calls.emit_error("r1", "NO", "no")
        with pytest.raises(ValueError, match="'r1'"):
            await calls.complete("r1")
        with pytest.raises(ValueError, match="'r1'"):
            await build_call_handler(registry, calls)(requested("math.add", reply_to=None))


async def test_on_a_target_with_queues_a_subscription_is_replied_to_at_its_address(
    broker_world: BrokerWorld,
) -> None:
    async with (
        broker_world.connect() as near,
        broker_world.connect() as far,
        PendingRequestMap(near) as calls,
        PendingRequestMap(far) as answering,
    ):
        inbox = Inbox()
        taking = await far.consume("operations", inbox)
        stream = calls.subscribe("a.b", 1)
        reading = asyncio.create_task(anext(stream))
        await until(lambda: inbox.events)
        request = inbox.events[0].payload
        request_id, reply_to = request.request_id, request.reply_to
        for number in range(2):
            await answering.respond(request_id, local_envelope(number, "a.b"), reply_to=reply_to)
        await answering.complete(request_id, reply_to=reply_to)
        with time_limit(20):
            assert (await reading).data == 0
            assert [item.data async for item in stream] == [1]
        await taking.aclose()


class SlowTarget(MemoryTarget):
    """Sends nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_sending, self.released = asyncio.Event(), asyncio.Event()

    async def send(self, address: str, body: bytes) -> None:
        self.is_sending.set()
        await self.released.wait()
        await super().send(address, body)


async def test_a_first_request_that_is_cancelled_leaves_no_worker() -> None:
    registry = OperationRegistry()

    @registry.operation("math.one")
    async def one() -> int:
        return 1

    target, inbox = SlowTarget(), Inbox()
    await target.listen(("box.me",), inbox)
    with time_limit(20):
        async with PendingRequestMap(target) as calls:
            handle = build_call_handler(registry, calls)
            workers = target.control(calls.group)
            first = asyncio.create_task(handle(requested("math.one")))
            await until(lambda: workers in target._listeners)
            await target.is_sending.wait()
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert await target.count_present(workers) == 0
            target.released.set()
            await handle(requested("math.one"))
            assert await target.count_present(workers) == 1

    assert [read_output(event.payload.output).data for event in inbox.events] == [1]
