"""The detection of lost workers, and the messages that it needs."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
import pytest
from tests.calls.operations_under_test import note
from tests.calls.processes import worker_process
from tests.calls.shim import Shim
from tests.calls.waiting import caller, lines, started, until
from tests.calls.worlds import World, redis_world
from tests.limits import time_limit
from tests.receivers import SilentReceiver
from tests.servers import Broker

from operations.base.errors import CallError, ErrorCode, NoReceiverError, TransportError
from operations.calls import PendingRequestMap, serve_calls
from operations.calls.protocol.events import (
    AlivePayload,
    CallAlive,
    CallOffered,
    CallProbed,
    CallRequested,
    FencePayload,
    OfferPayload,
    ProbePayload,
    encode_error,
    encode_event,
    read_event,
)
from operations.calls.protocol.states import MAX_SENDS
from operations.calls.serving.jobs import DEFAULT_GROUP
from operations.calls.source import sending
from operations.pubsub.base import Delivery
from operations.pubsub.memory import MemoryTarget
from operations.registry import OperationRegistry


def slow_registry(ledger: Path) -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("slow.pay")
    async def pay(number: int, seconds: float) -> int:
        note(str(ledger), str(number))
        await asyncio.sleep(seconds)
        return number

    @registry.operation("slow.blocking_pay")
    async def blocking_pay(number: int, seconds: float) -> int:
        note(str(ledger), str(number))
        time.sleep(seconds)  # noqa: ASYNC251 - blocking the loop is the point
        return number

    return registry


@pytest.mark.requirement("F33", "R36")
async def test_a_busy_worker_that_the_caller_does_not_know_is_not_lost(
    broker_world: World, tmp_path: Path
) -> None:
    """Both workers block their loops; a new caller gets a response from one of them only late."""
    ledger = tmp_path / "ledger"
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(worker_process(broker_world))
        first = await stack.enter_async_context(caller(broker_world))
        blocking = [
            asyncio.create_task(
                first.call("slow.block_loop", {"seconds": seconds, "path": str(ledger)})
            )
            for seconds in (0.7, 2.5)
        ]
        await until(lambda: len(started(ledger)) == 2)
        calls = await stack.enter_async_context(caller(broker_world, heartbeat=0.2))
        written = tmp_path / "written"
        with time_limit(20):
            results = await asyncio.gather(
                *(
                    calls.call("slow.write", {"seconds": 1, "path": str(written)}, replayable=False)
                    for _ in range(8)
                ),
            )
            await asyncio.gather(*blocking)

    assert [result.data for result in results] == ["written"] * 8
    assert Counter(line.split()[0] for line in lines(written)) == {"started": 8, "finished": 8}


async def test_requests_that_wait_at_the_broker_are_not_lost(
    broker_world: World, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    async with (
        broker_world.serve(slow_registry(ledger), concurrency=1),
        caller(broker_world, heartbeat=0.1) as calls,
    ):
        with time_limit(20):
            results = await asyncio.gather(
                *(
                    calls.call("slow.pay", {"number": number, "seconds": 0.4}, replayable=False)
                    for number in range(4)
                )
            )

    assert [result.data for result in results] == [0, 1, 2, 3]
    assert Counter(lines(ledger)) == Counter("0123")


async def test_no_other_worker_answers_for_one_that_was_killed(
    broker_world: World, tmp_path: Path
) -> None:
    async with worker_process(broker_world) as process, caller(broker_world) as calls:
        await until(lambda: len(calls.workers_by_specs) == 1)
        (killed,) = calls.workers_by_specs.values()
        async with broker_world.serve(slow_registry(tmp_path / "ledger")):
            await until(lambda: len(calls.workers_by_specs) == 2)
            process.kill()
            await process.wait()
            with time_limit(20), pytest.raises(CallError) as caught:
                async for _ in calls.subscribe("services.describe", worker=killed):
                    pass

    assert caught.value.code == ErrorCode.UNAVAILABLE
    # The other worker has the operation too.
    assert "the only worker" not in caught.value.message


@pytest.mark.requirement("F1", "R36")
async def test_the_loss_of_a_worker_that_has_never_responded_is_detected(
    broker_world: World, tmp_path: Path
) -> None:
    """It was present when the caller connected, and was killed before it responded to a probe."""
    path = tmp_path / "log"

    def drop_probes(body: bytes) -> Sequence[bytes]:
        return () if b'"call.probed"' in body else (body,)

    async with (
        worker_process(broker_world) as worker,
        broker_world.connect() as target,
        PendingRequestMap(Shim(target, on_send=drop_probes)) as calls,
    ):
        value = {"seconds": 60, "path": str(path)}
        call = asyncio.create_task(calls.call("slow.sleep", value, timeout=60))
        await until(lambda: started(path))
        worker.kill()
        with time_limit(28), pytest.raises(CallError) as caught:
            await call

    assert caught.value.code == ErrorCode.UNAVAILABLE


class Losing(Shim):
    """Loses one request: another message arrives instead. Requests to drop a call are slow."""

    late = b""
    address = ""

    async def send(self, address: str, body: bytes) -> None:
        if b'"fences":[{' in body:
            asyncio.get_running_loop().call_later(
                0.6, asyncio.ensure_future, super().send(address, body)
            )
        else:
            await super().send(address, body)

    async def enqueue(self, queue: str, body: bytes, **options: Any) -> str:
        if b'"number":3' in body and not self.late:
            self.late, self.address, body = body, options["worker"], b"{}"
        return await super().enqueue(queue, body, **options)


@pytest.mark.requirement("R36")
async def test_a_mutation_that_no_worker_has_begun_is_sent_again(
    broker_world: World, tmp_path: Path
) -> None:
    """The lost copy arrives late, and does not run."""
    ledger = tmp_path / "ledger"
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        for _ in range(2):
            await enter(broker_world.serve(slow_registry(ledger)))
        target = Losing(await enter(broker_world.connect()))
        calls = await enter(PendingRequestMap(target, heartbeat=1))
        with time_limit(60):
            for number in range(5):
                # The first call is long enough for the caller to find all workers.
                value = {"number": number, "seconds": 0 if number else 2}
                assert (await calls.call("slow.pay", value, replayable=False)).data == number
        for _ in range(4):
            if target.chooses_worker:
                await target.send(target.address, target.late)
            else:
                key = token_hex(8)
                await target.enqueue("operations", target.late, key=key, reply_to="", wait=1)
        assert (await calls.call("slow.pay", {"number": 5, "seconds": 0})).data == 5

    assert Counter(lines(ledger)) == Counter("012345")


class Slow(Losing):
    """Also sends its first probes late, and the first one that drops a call after more than a heartbeat."""

    has_dropped = False

    async def send(self, address: str, body: bytes) -> None:
        delay = 0.0 if self.late else 0.6
        if b'"fences":[{' in body and not self.has_dropped:
            self.has_dropped, delay = True, 1.5
        if delay and b'"call.probed"' in body:
            asyncio.get_running_loop().call_later(delay, self._send, address, body)
        else:
            await Shim.send(self, address, body)

    def _send(self, address: str, body: bytes) -> None:
        self.sending = asyncio.ensure_future(Shim.send(self, address, body))


@pytest.mark.requirement("R36")
async def test_workers_that_respond_late_can_confirm_that_a_mutation_has_not_begun(
    broker_world: World, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    async with (
        broker_world.serve(slow_registry(ledger)),
        broker_world.serve(slow_registry(ledger)),
        broker_world.connect() as connected,
        PendingRequestMap(Slow(connected), heartbeat=1) as calls,
    ):
        with time_limit(60):
            for number, seconds in ((0, 4), (3, 0)):
                value = {"number": number, "seconds": seconds}
                assert (await calls.call("slow.pay", value, replayable=False)).data == number

    assert Counter(lines(ledger)) == Counter("03")


@pytest.mark.requirement("R36")
async def test_workers_are_probed_again_after_a_reconnect_during_a_probe(
    broker_world: World,
) -> None:
    probes: list[bytes] = []
    probed = asyncio.Event()

    def record(body: bytes) -> list[bytes]:
        if b'"call.probed"' in body:
            probes.append(body)
            probed.set()
        return [body]

    async with (
        broker_world.serve(OperationRegistry()),
        broker_world.connect() as target,
        PendingRequestMap(Shim(target, on_send=record), heartbeat=1) as calls,
    ):
        with time_limit(20):
            await probed.wait()
            calls.lost("for a moment")
            calls.restored()
            await until(lambda: len(probes) == 2)


class ReportingWorker(SilentReceiver):
    """Responds to probes, and confirms that it drops calls."""

    def __init__(self, target: MemoryTarget) -> None:
        self._target = target
        self._address = target.mailbox()
        self.addresses = [target.control("operations"), self._address]
        self.fences: list[FencePayload] = []
        self._sending: list[asyncio.Task[None]] = []

    def receive(self, delivery: Delivery) -> None:
        event = read_event(delivery.body)
        if not isinstance(event, CallProbed):
            return
        address, probe = self._address, event.payload
        self.fences += probe.fences
        alive = AlivePayload(worker=address, specs=address, fenced=probe.fences)
        body = encode_event(CallAlive(payload=alive))
        self._sending.append(asyncio.create_task(self._target.send(probe.reply_to, body)))


class Queue(SilentReceiver):
    """Records the inputs of requests, and does not serve them."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def receive(self, delivery: Delivery) -> None:
        event = read_event(delivery.body)
        assert isinstance(event, CallRequested)
        self.requests.append(event.payload.input)


@pytest.mark.requirement("F1")
async def test_a_query_does_not_wait_until_a_killed_worker_returns() -> None:
    target, queue = MemoryTarget(), Queue()
    known, killed = ReportingWorker(target), ReportingWorker(target)
    with time_limit(30):
        async with (
            aclosing(await target.consume("operations", queue)),
            aclosing(await target.listen(known.addresses, known)),
            aclosing(await target.listen(killed.addresses, killed)) as listening,
            PendingRequestMap(target, heartbeat=0.2) as calls,
        ):
            query = asyncio.create_task(calls.call("test.read", replayable=True))
            await until(lambda: len(queue.requests) == 2)
            known.fences.clear()
            await listening.aclose()
            await until(lambda: len(queue.requests) == 3)
            query.cancel()
            await asyncio.wait([query])

    assert len(known.fences) == 1


@pytest.mark.requirement("R36")
async def test_a_killed_worker_does_not_count_instead_of_one_that_has_not_responded() -> None:
    target, queue = MemoryTarget(), Queue()
    requests = queue.requests
    known, silent = ReportingWorker(target), SilentReceiver()
    killed = ReportingWorker(target)
    with time_limit(30):
        async with (
            aclosing(await target.consume("operations", queue)),
            aclosing(await target.listen(known.addresses, known)),
            aclosing(await target.listen(known.addresses[:1], silent)) as silent_listening,
            aclosing(await target.listen(killed.addresses, killed)) as killed_listening,
            PendingRequestMap(target, heartbeat=0.1) as calls,
        ):
            await until(lambda: len(calls.workers_by_specs) == 2)
            await killed_listening.aclose()
            query = asyncio.create_task(calls.call("test.read", "query", replayable=True))
            await until(lambda: len(requests) == 2)
            mutation = asyncio.create_task(calls.call("test.pay", "mutation", replayable=False))
            await until(lambda: "mutation" in requests)
            # It was killed after it had started the mutation.
            await silent_listening.aclose()
            with pytest.raises(CallError, match="may have run"):
                await mutation
            query.cancel()
            await asyncio.wait([query])

    assert requests.count("mutation") == 1


@pytest.mark.requirement("F13")
async def test_a_call_that_is_sent_again_keeps_its_time_if_the_clock_changes(
    broker_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The request is made an hour before it is sent again.
    monkeypatch.setattr(sending, "time", lambda: time.time() - 3600)
    ledger = tmp_path / "ledger"
    async with (
        broker_world.serve(slow_registry(ledger)),
        broker_world.connect() as connected,
        PendingRequestMap(Losing(connected), heartbeat=1) as calls,
    ):
        with time_limit(60):
            # The first call is long enough for the caller to find all workers.
            for number, seconds in ((0, 2), (3, 0)):
                value = {"number": number, "seconds": seconds}
                assert (await calls.call("slow.pay", value, replayable=False)).data == number

    assert Counter(lines(ledger)) == Counter("03")


@pytest.mark.requirement("R36")
async def test_an_offer_that_arrives_before_the_reconnect_is_complete_is_rejected(
    redis_server: Broker, tmp_path: Path
) -> None:
    """On Redis the mailbox has its own connection, which may be restored before the others."""
    sent: list[bytes] = []

    def record(body: bytes) -> list[bytes]:
        sent.append(body)
        return [body]

    world = redis_world(redis_server.url)
    async with (
        world.serve(slow_registry(tmp_path / "ledger")),
        world.connect() as target,
        PendingRequestMap(Shim(target, on_send=record), heartbeat=60) as calls,
    ):
        paying = asyncio.create_task(calls.call("slow.pay", {"number": 1, "seconds": 1}))
        await until(lambda: lines(tmp_path / "ledger"))
        (request_id,) = calls.pending
        calls.lost("one of the connections is lost")
        offer = OfferPayload(request_id=request_id, worker=target.control("other"))
        calls.receive(Delivery(encode_event(CallOffered(payload=offer))))
        await until(lambda: any(b"call.aborted" in body for body in sent))
        calls.restored()
        await paying

    assert not any(b"call.confirmed" in body for body in sent)


@pytest.mark.requirement("R36")
async def test_a_rejection_that_arrives_twice_sends_one_more_copy(
    broker_world: World, tmp_path: Path
) -> None:
    """A stopping worker repeats its reply if the caller asks for it; the second copy may have begun by then."""
    sent: list[bytes] = []

    def record(body: bytes) -> list[bytes]:
        sent.append(body)
        return [body]

    async with (
        broker_world.serve(slow_registry(tmp_path / "ledger")),
        broker_world.connect() as target,
        PendingRequestMap(Shim(target, on_enqueue=record), heartbeat=60) as calls,
    ):
        paying = asyncio.create_task(calls.call("slow.pay", {"number": 1, "seconds": 1}))
        await until(lambda: lines(tmp_path / "ledger"))
        (request_id,) = calls.pending
        error = CallError(ErrorCode.UNAVAILABLE, "the worker stops")
        rejection = encode_error(request_id, error, begun=False, worker=target.control("other"))
        calls.receive(Delivery(rejection))
        calls.receive(Delivery(rejection))
        await until(lambda: len(sent) == 2)
        calls.receive(Delivery(rejection))
        await paying

    assert len(sent) == 2


async def test_a_worker_that_closes_still_knows_what_it_ran(tmp_path: Path) -> None:
    """A caller asks while the worker cancels its subscriptions."""
    answers: list[AlivePayload] = []
    request_ids: list[str] = []

    class Asking(Shim):
        async def listen(self, addresses: Sequence[str], receiver: Any) -> Any:
            subscription = await self._target.listen(addresses, receiver)

            async def ask() -> None:
                fence = FencePayload(request_id=request_ids[0])
                probe = ProbePayload(request_ids=[], reply_to="asking", fences=[fence])
                receiver.receive(Delivery(encode_event(CallProbed(payload=probe))))
                await until(lambda: answers)
                await subscription.aclose()

            undo = AsyncExitStack()
            undo.push_async_callback(ask)
            return undo

        async def send(self, address: str, body: bytes) -> None:
            if address == "asking":
                answers.append(msgspec.json.decode(body, type=CallAlive).payload)
            else:
                await super().send(address, body)

    target = MemoryTarget()
    async with (
        PendingRequestMap(target) as calls,
        serve_calls(slow_registry(tmp_path / "ledger"), Asking(target)),
    ):
        paying = asyncio.create_task(calls.call("slow.pay", {"number": 1, "seconds": 0.1}))
        await until(lambda: calls.pending)
        request_ids += calls.pending
        await paying

    assert [answer.fenced for answer in answers] == [[]]


async def test_only_the_worker_that_has_a_call_is_probed(
    broker_world: World, tmp_path: Path
) -> None:
    probes: Counter[bool] = Counter()
    answers: Counter[str] = Counter()

    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(broker_world.serve(slow_registry(tmp_path / "ledger")))
            for _ in range(4)
        ]
        target = await stack.enter_async_context(broker_world.connect())
        topic = target.control("operations")

        class Counting(Shim):
            async def send(self, address: str, body: bytes) -> None:
                if b"call.probed" in body:
                    probes[address == topic] += 1
                await super().send(address, body)

        calls = await stack.enter_async_context(PendingRequestMap(Counting(target), heartbeat=0.1))
        receive = calls.receive

        def count(delivery: Delivery) -> None:
            answers[json.loads(delivery.body)["type"]] += 1
            receive(delivery)

        calls.receive = count  # type: ignore[method-assign]
        assert len(workers) == 4
        pay = calls.call("slow.pay", {"number": 1, "seconds": 300}, replayable=False)
        paying = asyncio.create_task(pay)
        await until(lambda: probes[False] >= 12)
        paying.cancel()

    # The first two probes go to all workers; the others go to the worker that has the call.
    assert probes[True] <= probes[False]
    assert answers["call.alive"] <= 4 * probes[True] + probes[False] + 4


async def test_few_workers_respond_to_the_probes_of_a_call_that_waits_at_the_broker(
    redis_server: Broker, registry: OperationRegistry
) -> None:
    probes = 0
    answers: Counter[str] = Counter()

    async with AsyncExitStack() as stack:
        world = redis_world(redis_server.url)
        servers = [
            (await stack.enter_async_context(world.serve(registry, concurrency=1)))[0]
            for _ in range(6)
        ]
        others = await stack.enter_async_context(caller(world))
        sleep = {"seconds": 300}
        blocking = [asyncio.create_task(others.call("slow.sleep", sleep)) for _ in servers]
        await until(lambda: all(server.active for server in servers))
        target = await stack.enter_async_context(world.connect())

        class Counting(Shim):
            async def send(self, address: str, body: bytes) -> None:
                nonlocal probes
                probes += b"call.probed" in body
                await super().send(address, body)

        calls = await stack.enter_async_context(PendingRequestMap(Counting(target), heartbeat=0.1))
        receive = calls.receive

        def count(delivery: Delivery) -> None:
            answers[json.loads(delivery.body)["type"]] += 1
            receive(delivery)

        calls.receive = count  # type: ignore[method-assign]
        waiting = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 1}))
        await until(lambda: probes >= 32)
        for call in (waiting, *blocking):
            call.cancel()

    # Six responses to each would be 192.
    assert answers["call.alive"] <= 96


class FailingTarget(MemoryTarget):
    """Fails to send probes to all workers, and records the times."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    async def send(self, address: str, body: bytes) -> None:
        if address == self.control(DEFAULT_GROUP):
            self.times.append(asyncio.get_running_loop().time())
            raise TransportError("the broker does not respond")
        await super().send(address, body)


async def test_a_probe_that_cannot_be_sent_is_repeated_with_the_next_heartbeat() -> None:
    target, heartbeat = FailingTarget(), 0.1
    async with (
        serve_calls(OperationRegistry(), target),
        PendingRequestMap(target, heartbeat=heartbeat),
    ):
        with time_limit(20):
            await until(lambda: len(target.times) == 6)

    # With a pause that doubles, this takes 31 heartbeats.
    assert target.times[-1] - target.times[0] < 20 * heartbeat


@pytest.mark.requirement("R34", "F4")
@pytest.mark.parametrize("reports", [False, True], ids=["raises", "reports"])
async def test_copies_that_find_no_worker_do_not_count_as_sent(
    monkeypatch: pytest.MonkeyPatch, reports: bool
) -> None:
    """Otherwise, after an outage, a call could not be sent to another worker any more."""
    monkeypatch.setattr("operations.calls.source.redirects._RETRY", 0.001)
    attempts, delivered = 2 * MAX_SENDS, list[bytes]()

    class Absent(MemoryTarget):
        direct = False

        async def enqueue(self, queue: str, body: bytes, *, key: str, **options: Any) -> str:
            nonlocal attempts
            if attempts:
                attempts -= 1
                if not reports:
                    raise NoReceiverError("no worker")
                asyncio.get_running_loop().call_soon(calls.undelivered, key)
                return ""
            delivered.append(body)
            return await super().enqueue(queue, body, key=key, **options)

    registry, target = OperationRegistry(), Absent()

    @registry.operation("shop.pay", type="mutation")
    async def pay() -> str:
        return "paid"

    async with PendingRequestMap(target) as calls, serve_calls(registry, target):
        calls.restored()
        with time_limit(20):
            assert (await calls.call("shop.pay", timeout=60)).data == "paid"

    assert b"resends" not in delivered[0]
