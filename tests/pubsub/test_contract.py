"""The contract of event targets, for every transport."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tests.calls.waiting import until
from tests.calls.worlds import BrokerWorld, World, cuttable
from tests.limits import time_limit
from tests.receivers import SilentReceiver
from tests.servers import Broker

from operations.base.errors import NoReceiverError, TooLargeError
from operations.pubsub.base import Delivery, EventTarget
from operations.pubsub.nats import NatsTarget, connect_nats
from operations.pubsub.websocket import AcceptedTarget, connect_websocket, serve_websocket


class Recorder(SilentReceiver):
    """Keeps the messages and undelivered keys."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.unclaimed: list[str] = []

    def receive(self, delivery: Delivery) -> None:
        self.bodies.append(delivery.body)
        if delivery.claim is not None:
            delivery.claim.remove()

    def undelivered(self, key: str, worker: str = "") -> None:
        self.unclaimed.append(key)


@asynccontextmanager
async def two_ends(world: World) -> AsyncGenerator[tuple[EventTarget, EventTarget]]:
    """Two targets that can reach each other."""
    async with AsyncExitStack() as stack:
        if world.name != "websocket":
            yield (
                await stack.enter_async_context(world.connect()),
                await stack.enter_async_context(world.connect()),
            )
            return
        accepted: asyncio.Future[AcceptedTarget] = asyncio.get_running_loop().create_future()

        async def attach(target: AcceptedTarget) -> None:
            accepted.set_result(target)
            await target.wait_closed()

        server = await stack.enter_async_context(serve_websocket(attach))
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield await stack.enter_async_context(connect_websocket(url)), await accepted


def event(number: int, kind: str = "call.responded") -> bytes:
    return b'{"type":"%s","id":"","payload":{"n":%d}}' % (kind.encode(), number)


async def test_messages_to_a_mailbox_arrive_whole_and_in_order(world: World) -> None:
    async with two_ends(world) as (near, far):
        recorder = Recorder()
        box = near.mailbox()
        subscription = await near.listen((box,), recorder)
        for number in range(500):
            await far.send(box, event(number))
        await until(lambda: len(recorder.bodies) == 500)
        await subscription.aclose()

    assert recorder.bodies == [event(number) for number in range(500)]


async def test_messages_to_a_topic_reach_every_listener(world: World) -> None:
    if world.name == "websocket":
        pytest.skip("a socket has only one peer")
    async with two_ends(world) as (near, far):
        here, there = Recorder(), Recorder()
        topic = near.topic("news")
        await near.listen((near.mailbox(), topic), here)
        await far.listen((far.mailbox(), topic), there)
        await far.send(topic, event(1))
        await until(lambda: here.bodies and there.bodies)

    assert here.bodies == there.bodies == [event(1)]


async def test_every_message_in_a_queue_goes_to_exactly_one_consumer(world: World) -> None:
    async with two_ends(world) as (near, far):
        takers = [Recorder(), Recorder()]
        count = 1 if world.name == "websocket" else 2
        for taker in takers[:count]:
            await far.consume("work", taker)
        box = near.mailbox()
        await near.listen((box,), Recorder())
        for number in range(200):
            await near.enqueue(
                "work", event(number, "call.requested"), key=f"k{number}", reply_to=box, wait=1
            )
        await until(lambda: sum(len(taker.bodies) for taker in takers) == 200)
        await asyncio.sleep(0.05)

    taken = [body for taker in takers for body in taker.bodies]
    assert sorted(taken) == sorted(event(number, "call.requested") for number in range(200))
    assert all(taker.bodies for taker in takers[:count])


@pytest.mark.requirement("F3")
async def test_a_queue_without_workers_raises(world: World) -> None:
    if world.name == "websocket":
        pytest.skip("the peer's recorder answers")
    async with two_ends(world) as (near, _):
        recorder = Recorder()
        box = near.mailbox()
        await near.listen((box,), recorder)
        try:
            await near.enqueue("nobody", event(1, "call.requested"), key="k1", reply_to=box, wait=1)
        except NoReceiverError:
            return
        await until(lambda: recorder.unclaimed == ["k1"])


async def test_presence_is_known_without_replies_of_listeners(world: World) -> None:
    async with two_ends(world) as (near, far):
        box = far.mailbox()
        if world.name != "websocket":
            assert not await near.is_present(box)
        subscription = await far.listen((box,), Recorder())
        assert await near.is_present(box)
        await subscription.aclose()
        if world.name != "websocket":
            # The two ends have separate connections, so the question may reach the broker first.
            with time_limit(30):
                while await near.is_present(box):
                    await asyncio.sleep(0.01)


async def test_nothing_arrives_after_a_subscription_is_closed(world: World) -> None:
    async with two_ends(world) as (near, far):
        recorder, other = Recorder(), Recorder()
        box, still_there = near.mailbox(), near.mailbox()
        subscription = await near.listen((box,), recorder)
        await near.listen((still_there,), other)
        await subscription.aclose()
        await subscription.aclose()
        await far.send(box, event(1))
        await far.send(still_there, event(2))
        await until(lambda: event(2) in other.bodies)

    assert recorder.bodies == []


async def test_a_message_that_is_too_large_is_rejected_before_it_is_sent(world: World) -> None:
    if world.name == "memory":
        pytest.skip("nothing is too large for memory; the calls have their own bound")
    async with two_ends(world) as (near, far):
        await far.listen((far.mailbox(),), Recorder())
        large = event(1) + b" " * near.max_bytes
        with pytest.raises(TooLargeError):
            await near.send(far.mailbox(), large)
        with pytest.raises(TooLargeError):
            await near.enqueue("work", large, key="k", reply_to=near.mailbox(), wait=1)


async def test_closing_a_consumer_loses_no_message_that_it_received(broker_world: World) -> None:
    async with two_ends(broker_world) as (near, far):
        first, second = Recorder(), Recorder()
        box = near.mailbox()
        await near.listen((box,), Recorder())
        leaving = await far.consume("work", first)
        await far.consume("work", second)

        async def fill() -> None:
            for number in range(300):
                await near.enqueue(
                    "work", event(number, "call.requested"), key=f"k{number}", reply_to=box, wait=1
                )

        filling = asyncio.create_task(fill())
        await until(lambda: first.bodies)
        await leaving.aclose()
        await filling
        await until(lambda: len(first.bodies) + len(second.bodies) == 300)


async def test_mailboxes_cannot_be_guessed(broker_world: World) -> None:
    async with broker_world.connect() as target:
        names = {target.mailbox() for _ in range(100)}

    assert len(names) == 100
    assert all(len(name) > 32 for name in names)


@pytest.mark.slow
async def test_a_target_that_was_idle_can_still_be_used(world: World) -> None:
    async with two_ends(world) as (near, far):
        # Longer than the heartbeat interval of every transport.
        await asyncio.sleep(6)
        assert near.is_connected
        recorder = Recorder()
        box = near.mailbox()
        await near.listen((box,), recorder)
        await far.send(box, event(1))
        await until(lambda: recorder.bodies == [event(1)])


async def test_a_nats_client_reconnects_after_every_server_error(
    nats_server: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect_nats(nats_server.url) as target:
        assert isinstance(target, NatsTarget)
        recorder = Recorder()
        box = target.mailbox()
        await target.listen((box,), recorder)
        # Longer than any line that the server accepts: it reports an error and disconnects.
        await target._nats.publish("x" * 5000, b"1")
        await until(lambda: target._nats.stats["reconnects"] == 1 and target.is_connected)
        await target.send(box, event(1))
        await until(lambda: recorder.bodies == [event(1)])
    # Closing is not a loss.
    assert caplog.text.count("the connection to NATS was lost") == 1


@pytest.mark.requirement("R33", "F8")
async def test_a_mailbox_keeps_all_items_of_120_subscriptions_while_its_owner_pauses(
    broker_world: BrokerWorld,
) -> None:
    """Each of them may send 256 items ahead of its reader."""
    count = 120 * 256
    async with cuttable(broker_world) as (near, through), broker_world.connect() as far:
        recorder = Recorder()
        box = near.mailbox()
        await near.listen((box,), recorder)
        through.delay = 2
        for number in range(count):
            await far.send(box, event(number))
        through.delay = 0
        await until(lambda: len(recorder.bodies) == count, seconds=60)

    assert recorder.bodies == [event(number) for number in range(count)]


@pytest.mark.requirement("R13", "F15")
async def test_messages_next_to_one_that_its_receiver_cannot_process_arrive(
    broker_world: World,
) -> None:
    class Picky(Recorder):
        def receive(self, delivery: Delivery) -> None:
            if delivery.body == event(3, "call.requested"):
                raise ValueError("not this one")
            super().receive(delivery)

    async with two_ends(broker_world) as (near, far):
        picky = Picky()
        await far.consume("work", picky)
        await asyncio.gather(
            *(
                near.enqueue(
                    "work", event(n, "call.requested"), key=f"k{n}", reply_to="box", wait=1
                )
                for n in range(20)
            )
        )
        await until(lambda: len(picky.bodies) == 19)
