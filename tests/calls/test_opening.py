"""Clients and workers that fail to open, or are closed while opening, leave nothing behind."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest
from tests.calls.conftest import make_world
from tests.calls.waiting import until
from tests.calls.worlds import World, nats_world, redis_world
from tests.limits import time_limit
from tests.servers import NatsServer, RedisServer, running

from operations.base.errors import CallError, ErrorCode, TransportError
from operations.calls import PendingRequestMap, RemoteService, from_calls, serve_calls
from operations.pubsub.base import Consumer, Delivery, EventTarget, Receiver
from operations.pubsub.memory import MemoryTarget
from operations.registry import OperationRegistry

pytestmark = pytest.mark.requirement("R42")

STEPS = 40


@pytest.fixture(params=("memory", "redis", "nats"))
def town(request: pytest.FixtureRequest) -> World:
    """The transports that can report whether a client listens."""
    return make_world(request.param, request)


async def _running(target: EventTarget) -> set["asyncio.Task[Any]"]:
    # The first probe and the first request open connections that later ones reuse.
    mailbox = target.mailbox()
    await target.is_present(mailbox)
    with suppress(TransportError):
        await target.enqueue("operations", b"{}", key="first", reply_to=mailbox, wait=1)
    return asyncio.all_tasks()


async def _left(before: set["asyncio.Task[Any]"]) -> None:
    """Check that no new task is running."""
    await until(lambda: not {task for task in asyncio.all_tasks() - before if not task.done()})


async def _gone(target: EventTarget, mailbox: str) -> None:
    """Wait until the broker reports that no client listens there."""
    with time_limit(20):
        while await target.is_present(mailbox):
            await asyncio.sleep(0.01)


async def _entered(service: RemoteService) -> None:
    async with service:
        pass


@pytest.mark.parametrize("opened", [_entered, RemoteService.open])
async def test_an_import_without_workers_leaves_nothing_open(
    town: World, opened: Callable[[RemoteService], Awaitable[None]]
) -> None:
    async with town.connect() as target:
        before = await _running(target)
        for _ in range(3):
            service = from_calls(target)
            with pytest.raises(CallError) as caught:
                await opened(service)
            assert caught.value.code == ErrorCode.UNAVAILABLE
            await _gone(target, service.calls.mailbox)
        await _left(before)


async def test_calls_that_are_closed_while_they_open_are_closed(
    town: World, registry: OperationRegistry
) -> None:
    async with town.serve(registry), town.connect() as target:
        before = await _running(target)
        for steps in range(STEPS):
            calls = PendingRequestMap(target)
            two = [asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2})) for _ in "ab"]
            for _ in range(steps):
                await asyncio.sleep(0)
            await calls.aclose()
            await _gone(target, calls.mailbox)
            for outcome in await asyncio.gather(*two, return_exceptions=True):
                if isinstance(outcome, CallError):
                    assert outcome.code == ErrorCode.ABORTED
                else:
                    assert not isinstance(outcome, BaseException)
                    assert outcome.data == 3
        await _left(before)


async def test_opening_can_be_cancelled_at_every_step(
    town: World, registry: OperationRegistry
) -> None:
    async with town.serve(registry), town.connect() as target:
        before = await _running(target)
        for steps in range(STEPS):
            service = from_calls(target)
            task = asyncio.create_task(_entered(service))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await _gone(target, service.calls.mailbox)
        await _left(before)


class _Crowded(MemoryTarget):
    """Fails every subscription to a queue."""

    async def consume(self, queue: str, consumer: Consumer) -> Any:
        raise TransportError("there is no room")


async def test_a_worker_that_cannot_start_leaves_nothing(registry: OperationRegistry) -> None:
    target = _Crowded()
    before = asyncio.all_tasks()
    with pytest.raises(TransportError):
        async with serve_calls(registry, target):
            pass

    assert not await target.is_present(target.control("operations"))
    await _left(before)


class _Slow(MemoryTarget):
    """Delays subscriptions until the test allows them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.may = asyncio.Event()

    async def listen(self, addresses: Any, receiver: Receiver) -> Any:
        self.asked.set()
        await self.may.wait()
        return await super().listen(addresses, receiver)


async def test_nothing_is_sent_before_the_subscription_is_active(
    registry: OperationRegistry,
) -> None:
    target = _Slow()
    target.may.set()
    async with serve_calls(registry, target):
        target.may.clear()
        target.asked.clear()
        calls = PendingRequestMap(target)
        first = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2}))
        await target.asked.wait()
        second = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2}))
        await asyncio.sleep(0)
        assert calls.pending_count == 0
        target.may.set()
        assert [answer.data for answer in await asyncio.gather(first, second)] == [3, 3]
        await calls.aclose()


@pytest.mark.slow
async def test_calls_that_could_not_open_can_be_used_once_the_broker_is_there(
    registry: OperationRegistry,
) -> None:
    with running(RedisServer()) as broker:
        world = redis_world(broker.url)
        async with world.serve(registry), world.connect() as target:
            broker.kill()
            await until(lambda: not target.is_connected)
            calls = PendingRequestMap(target)
            with time_limit(20), pytest.raises(CallError) as call:
                await calls.call("math.add", {"a": 1, "b": 2}, timeout=0.5)
            with time_limit(20), pytest.raises(CallError) as stream:
                await anext(calls.subscribe("math.add", {"a": 1, "b": 2}, idle_timeout=0.5))
            broker.start()
            with time_limit(60):
                while True:
                    try:
                        answer = await calls.call("math.add", {"a": 1, "b": 2}, timeout=20)
                        break
                    except CallError as error:
                        # The worker may connect again later than the caller.
                        assert error.code == ErrorCode.UNAVAILABLE  # noqa: PT017 - and then once more
                        await asyncio.sleep(0.05)
            assert answer.data == 3
            await calls.aclose()

    for caught in (call, stream):
        assert caught.value.code == ErrorCode.TIMEOUT
        assert "was not sent: no connection was possible within 0.5 s" in caught.value.message


async def test_a_call_ends_at_its_deadline_although_giving_up_takes_longer() -> None:
    with running(NatsServer()) as broker:
        async with nats_world(broker.url).connect() as target:
            assert broker.process is not None
            broker.process.send_signal(signal.SIGSTOP)
            await asyncio.to_thread(os.waitid, os.P_PID, broker.process.pid, os.WSTOPPED)
            calls = PendingRequestMap(target)
            try:
                with time_limit(3), pytest.raises(CallError, match="was not sent"):
                    await calls.call("math.add", {"a": 1, "b": 2}, timeout=0.5)
            finally:
                broker.process.send_signal(signal.SIGCONT)
            await calls.aclose()


async def test_a_cancelled_caller_is_cancelled_while_the_request_is_sent_again(
    registry: OperationRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates: list[asyncio.Future[None]] = []
    replies: list[Delivery] = []

    class Gated(MemoryTarget):
        direct = False

        async def enqueue(self, *arguments: Any, **options: Any) -> str:
            receipt = await super().enqueue(*arguments, **options)
            gates.append(asyncio.get_running_loop().create_future())
            await gates[-1]
            return receipt

    target = Gated()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        receive = calls.receive
        monkeypatch.setattr(calls, "receive", replies.append)
        caller = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 1}))
        await until(lambda: any(b"call.responded" in reply.body for reply in replies))
        [request_id] = calls.pending
        calls.undelivered(request_id, "gone")
        await until(lambda: len(gates) == 2)
        # The reply interrupts the second sender; the caller is the first one.
        receive(next(reply for reply in replies if b"call.responded" in reply.body))
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller


async def test_a_first_call_with_a_short_timeout_is_not_an_outage() -> None:
    reachable = asyncio.Event()

    class Slow(MemoryTarget):
        async def listen(self, *arguments: Any) -> Any:
            await reachable.wait()
            return await super().listen(*arguments)

    async with aclosing(PendingRequestMap(Slow())) as calls:
        with pytest.raises(CallError, match="was not sent"):
            await calls.call("math.add", timeout=0.01)
        reachable.set()
        # After an outage it would wait for workers that may be reconnecting.
        with time_limit(1), pytest.raises(CallError) as caught:
            await calls.call("math.add")
    assert caught.value.code == ErrorCode.UNAVAILABLE
