"""Close, cancel and lose the broker in every order, while other calls still run."""

import asyncio
import gc
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.calls.waiting import started, until
from tests.calls.worlds import BrokerWorld, World, calling
from tests.limits import scaled, time_limit
from tests.receivers import SilentReceiver
from tests.servers import Broker, proxy

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, from_calls, serve_calls
from operations.calls.protocol.events import (
    CallFailed,
    CallRequested,
    RequestPayload,
    encode_event,
    read_event,
)
from operations.contract.access import Identity
from operations.pubsub.base import Delivery
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.redis import connection
from operations.registry import OperationRegistry


@pytest.mark.requirement("R12")
async def test_a_call_can_be_cancelled_at_every_step(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry) as calls:
        for steps in range(30):
            task = asyncio.create_task(calls.call("math.add", {"a": steps, "b": 1}))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            outcome: Any = (await asyncio.gather(task, return_exceptions=True))[0]
            assert isinstance(outcome, asyncio.CancelledError) or outcome.data == steps + 1
            assert len(calls) == 0
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3


@pytest.mark.requirement("R12", "R33")
async def test_a_subscription_can_be_cancelled_at_every_step(
    world: World, registry: OperationRegistry
) -> None:
    async def read(calls: PendingRequestMap) -> list[Any]:
        return [item.data async for item in calls.subscribe("count.up", {"n": 5})]

    async with calling(world, registry) as calls:
        for steps in range(30):
            task = asyncio.create_task(read(calls))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            outcome: Any = (await asyncio.gather(task, return_exceptions=True))[0]
            assert isinstance(outcome, asyncio.CancelledError) or outcome == [0, 1, 2, 3, 4]
        await until(lambda: len(calls) == 0)
        assert await read(calls) == [0, 1, 2, 3, 4]


async def test_a_worker_whose_connection_is_closed_first_stops_at_once(
    broker_world: World, registry: OperationRegistry
) -> None:
    connecting = AsyncExitStack()
    target = await connecting.enter_async_context(broker_world.connect())
    with time_limit(10) as scope:
        async with serve_calls(registry, target, grace=60):
            await connecting.aclose()
    # A worker that stops is not interrupted.
    assert not scope.cancel_called


async def test_idle_workers_and_callers_stop_at_once_while_the_broker_is_down(
    own_broker: tuple[Broker, BrokerWorld], registry: OperationRegistry
) -> None:
    broker, world = own_broker
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(world.connect())
        await stack.enter_async_context(PendingRequestMap(target))
        await stack.enter_async_context(world.serve(registry, grace=60))
        broker.kill()
        await until(lambda: not target.is_connected)
        with time_limit(10) as scope:
            await stack.aclose()
    assert not scope.cancel_called


async def test_a_worker_stays_for_callers_that_could_not_get_their_reply(
    own_broker: tuple[Broker, BrokerWorld],
) -> None:
    broker, world = own_broker
    registry, runs = OperationRegistry(), asyncio.Event()
    serving, is_down = asyncio.Event(), asyncio.Event()

    @registry.operation("shop.pay")
    async def pay() -> int:
        runs.set()
        await is_down.wait()
        return 1

    async def worker() -> None:
        async with world.serve(registry, grace=60) as (server,):
            serving.set()
            await is_down.wait()
            await until(lambda: not server.jobs)

    async with world.connect() as target, PendingRequestMap(target) as calls:
        leaving = asyncio.create_task(worker())
        await asyncio.wait_for(serving.wait(), scaled(30))
        paying = asyncio.create_task(calls.call("shop.pay", timeout=50))
        await asyncio.wait_for(runs.wait(), scaled(30))
        broker.kill()
        await until(lambda: not target.is_connected)
        is_down.set()
        # Longer than the reply waits for the connection.
        await asyncio.sleep(5)
        broker.start()
        with time_limit(60):
            assert (await paying).data == 1
            await leaving


async def test_a_worker_stays_for_replies_that_were_lost_before_the_outage_was_noticed(
    broker_world: BrokerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "KEEPALIVE", 0.5)
    monkeypatch.setattr(connection, "SILENCE", 2.0)
    options: dict[str, Any] = {}
    if broker_world.name == "nats":
        options["options"] = {"ping_interval": 1}
    registry, runs, is_down = OperationRegistry(), asyncio.Event(), asyncio.Event()

    @registry.operation("shop.pay")
    async def pay() -> int:
        runs.set()
        await is_down.wait()
        return 1

    host, _, port = broker_world.url.rpartition(":")
    async with proxy(int(port)) as through:
        options["url"] = f"{host}:{through.port}"
        async with (
            broker_world.connect(**options) as here,
            PendingRequestMap(here) as calls,
            broker_world.connect(**options) as there,
            serve_calls(registry, there, grace=60) as server,
        ):
            paying = asyncio.create_task(calls.call("shop.pay", timeout=50))
            await asyncio.wait_for(runs.wait(), scaled(30))
            through.swallow()
            is_down.set()
            await until(lambda: not server.jobs)
            await until(lambda: not (here.is_connected or there.is_connected))
            leaving = asyncio.create_task(server.aclose())
            # Longer than a worker without calls needs to stop.
            await asyncio.wait({leaving}, timeout=4)
            through.swallow(False)
            through.cut()
            with time_limit(60):
                assert (await paying).data == 1
                await leaving


@pytest.mark.parametrize("first", ["target", "map", "worker"])
async def test_closing_in_the_wrong_order_still_ends(
    world: World, registry: OperationRegistry, first: str, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with AsyncExitStack() as outer:
        serving, connecting = AsyncExitStack(), AsyncExitStack()
        await serving.enter_async_context(world.serve(registry, grace=0.1))
        target = await connecting.enter_async_context(world.connect())
        calls = PendingRequestMap(target)
        await calls.open()
        outer.push_async_callback(serving.aclose)
        outer.push_async_callback(connecting.aclose)
        outer.push_async_callback(calls.aclose)
        call = asyncio.create_task(
            calls.call("slow.sleep", {"seconds": 60, "path": str(path)}, timeout=3)
        )
        await until(lambda: started(path))
        with time_limit(20):
            if first == "target":
                await connecting.aclose()
                await calls.aclose()
            elif first == "map":
                await calls.aclose()
            else:
                await serving.aclose()
            outcome: Any = (await asyncio.gather(call, return_exceptions=True))[0]
        with time_limit(20):
            await outer.aclose()

    assert isinstance(outcome, CallError)
    assert outcome.code in (ErrorCode.ABORTED, ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT)


class _Replies(SilentReceiver):
    """Records the replies to requests."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def receive(self, delivery: Delivery) -> None:
        self.bodies.append(delivery.body)


@pytest.mark.requirement("F25", "R12")
async def test_a_request_that_arrives_at_any_step_of_closing_has_a_reply(
    registry: OperationRegistry,
) -> None:
    target, replies, sent = MemoryTarget(), _Replies(), list[str]()
    box = target.mailbox()
    async with await target.listen([box], replies), serve_calls(registry, target) as worker:
        closing = asyncio.create_task(worker.aclose())
        while await target.is_present(worker.mailbox):
            sent.append(f"request-{len(sent)}")
            payload = RequestPayload(
                request_id=sent[-1],
                operation_id="math.add",
                input={"a": 1, "b": 2},
                reply_to=box,
            )
            await target.send(worker.mailbox, encode_event(CallRequested(payload=payload)))
            await asyncio.sleep(0)
        await closing

    events: list[Any] = [read_event(body) for body in replies.bodies]
    assert [event.payload.request_id for event in events] == sent
    assert isinstance(events[-1], CallFailed)
    assert events[-1].payload.begun is False


@pytest.fixture
def nobody_waiting() -> None:
    """Close clients and workers in the middle of a call."""


async def test_a_cancelled_scope_leaves_nothing_behind(
    world: World, registry: OperationRegistry, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    ready = asyncio.Event()

    async def work() -> None:
        async with (
            world.serve(registry),
            world.connect() as target,
            PendingRequestMap(target) as calls,
            from_calls(target),
            anyio.create_task_group() as group,
        ):
            group.start_soon(calls.call, "slow.sleep", {"seconds": 60, "path": str(path)})
            await until(lambda: started(path))
            ready.set()

    with time_limit(60):
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await ready.wait()
            group.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["task", "scope"])
@pytest.mark.parametrize("role", ["worker", "caller", "importer"])
async def test_closing_that_is_cancelled_at_any_step_leaves_no_task(
    broker_world: BrokerWorld, registry: OperationRegistry, role: str, how: str
) -> None:
    async with broker_world.serve(registry), broker_world.connect() as target:

        def opened() -> AbstractAsyncContextManager[Any]:
            if role == "worker":
                return serve_calls(registry, target, group="other", grace=0)
            return PendingRequestMap(target) if role == "caller" else from_calls(target)

        async def work(scope: anyio.CancelScope) -> None:
            with scope:
                async with opened():
                    pass

        await work(anyio.CancelScope())
        before = asyncio.all_tasks()
        for steps in count():
            scope = anyio.CancelScope()
            task = asyncio.create_task(work(scope))
            for _ in range(steps):
                await asyncio.sleep(0)
            if task.done():
                break
            (task if how == "task" else scope).cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: asyncio.all_tasks() <= before)
        async with PendingRequestMap(target) as calls:
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3


@pytest.mark.slow
@pytest.mark.requirement("F5")
async def test_everything_closes_while_the_broker_is_unavailable(
    own_broker: tuple[Broker, BrokerWorld], registry: OperationRegistry, tmp_path: Path
) -> None:
    broker, world = own_broker
    path = tmp_path / "log"
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(world.serve(registry, grace=0.2))
        target = await stack.enter_async_context(world.connect())
        calls = await stack.enter_async_context(PendingRequestMap(target))
        call = asyncio.create_task(calls.call("slow.sleep", {"seconds": 60, "path": str(path)}))
        await until(lambda: started(path))
        broker.kill()
        await until(lambda: not target.is_connected)
        with time_limit(20) as scope:
            await stack.aclose()
    assert not scope.cancel_called
    outcome: Any = (await asyncio.gather(call, return_exceptions=True))[0]

    assert isinstance(outcome, CallError)


@pytest.mark.requirement("R08")
async def test_callbacks_that_raise_affect_no_others(registry: OperationRegistry) -> None:
    def resolve(token: str) -> Identity:
        if token == "broken":
            raise RuntimeError("no database")
        return Identity(token)

    def observer(event: object) -> None:
        raise RuntimeError("no disk")

    registry.observe(observer)
    target = MemoryTarget()
    async with serve_calls(registry, target, resolve=resolve), PendingRequestMap(target) as calls:
        with pytest.raises(CallError) as caught:
            await calls.call("math.add", {"a": 1, "b": 2}, credential="broken")
        assert (await calls.call("math.add", {"a": 1, "b": 2}, credential="alice")).data == 3

    assert caught.value.code == ErrorCode.ACCESS_DENIED


async def test_context_variables_and_cancellation_stay_with_their_call() -> None:
    """A call that ends without waiting leaves no state for the next call."""
    who: ContextVar[str] = ContextVar("who", default="nobody")
    registry = OperationRegistry()
    seen: list[str] = []

    @registry.operation("var.set")
    async def set_it(name: str) -> str:
        seen.append(who.get())
        who.set(name)
        return who.get()

    @registry.operation("task.cancel")
    async def cancel_itself() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "ran through"

    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        who.set("the caller")
        names = [f"n{index}" for index in range(50)]
        answers = await asyncio.gather(*(calls.call("var.set", {"name": name}) for name in names))
        assert [answer.data for answer in answers] == names
        mixed = await asyncio.gather(
            *(
                calls.call("task.cancel") if index % 2 else calls.call("var.set", {"name": "x"})
                for index in range(20)
            ),
            return_exceptions=True,
        )
        assert all(getattr(outcome, "data", None) == "x" for outcome in mixed[::2])
        assert (await calls.call("var.set", {"name": "y"})).data == "y"

    # Not the caller's either: over a broker there would be none.
    assert set(seen) == {"nobody"}


async def test_waiting_calls_do_not_block_later_calls(registry: OperationRegistry) -> None:
    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        waiting = [
            asyncio.create_task(calls.call("slow.sleep", {"seconds": 0.3})) for _ in range(300)
        ]
        with time_limit(20):
            quick = await asyncio.gather(
                *(calls.call("math.add", {"a": index, "b": 0}) for index in range(300))
            )
            assert not any(task.done() for task in waiting)
            await asyncio.gather(*waiting)

    assert [answer.data for answer in quick] == list(range(300))


async def test_a_delivered_value_is_a_copy() -> None:
    registry = OperationRegistry()

    @registry.operation("list.grow")
    async def grow(items: list[Any]) -> Any:
        items.append({"more": []})
        return items

    target = MemoryTarget()
    given: dict[str, Any] = {"items": [1, {"a": [2]}, "ü", (3,), 10**30]}
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        envelope = await calls.call("list.grow", given)

    assert envelope.data == [1, {"a": [2]}, "ü", [3], 10**30, {"more": []}]
    assert given == {"items": [1, {"a": [2]}, "ü", (3,), 10**30]}


async def test_a_rejection_cancelled_before_it_is_sent_leaves_nothing(
    registry: OperationRegistry,
) -> None:
    target = MemoryTarget()
    request = RequestPayload(request_id="r1", operation_id="math.add", input={"a": 1, "b": 2})
    async with serve_calls(registry, target) as worker:
        before = asyncio.all_tasks()
        worker._replies.is_leaving = True
        worker.receive(Delivery(encode_event(CallRequested(payload=request)), target.mailbox()))
        refusing = asyncio.all_tasks() - before
        for task in refusing:
            task.cancel()
        await asyncio.gather(*refusing, return_exceptions=True)

    assert refusing
    # An unawaited coroutine warns when it is collected, and every warning is an error.
    gc.collect()
