"""Faults F8, F9, F20, F21 and F31: too much, or too slowly."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.calls.conftest import make_world
from tests.calls.processes import worker_process
from tests.calls.waiting import caller, lines, started, until
from tests.calls.worlds import World, calling, nats_world
from tests.clocks import virtual_time
from tests.leftovers import resident_kilobytes
from tests.limits import time_limit
from tests.receivers import SilentReceiver
from tests.servers import NatsServer, running

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, serve_calls
from operations.calls.protocol.events import CallRequested, RequestPayload, encode_event, read_event
from operations.contract.access import Identity
from operations.pubsub.base import Delivery
from operations.pubsub.memory import MemoryTarget
from operations.registry import OperationRegistry


@pytest.mark.requirement("R33", "F8")
async def test_f8_a_slow_reader_slows_the_producer(
    world: World, registry: OperationRegistry, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with calling(world, registry) as calls:
        stream = calls.subscribe("count.forever", {"path": str(path)}, window=50)
        for expected in range(3):
            assert (await anext(stream)).data == expected
            await asyncio.sleep(0.3)
        await stream.aclose()
        await until(lambda: lines(path))

    produced = int(lines(path)[0].split()[-1])
    assert produced <= 50 + 25 + 5


@pytest.mark.requirement("F8")
async def test_f8_a_producer_that_never_waits_leaves_turns_to_other_calls(world: World) -> None:
    registry = OperationRegistry()
    turns = 0
    turns_at: list[int] = []

    @registry.operation("count.eager")
    async def eager() -> AsyncIterator[int]:
        for number in range(200):
            turns_at.append(turns)
            yield number

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with calling(world, registry) as calls:
        counting = asyncio.create_task(count_turns())
        items = [item.data async for item in calls.subscribe("count.eager")]
        counting.cancel()

    assert items == list(range(200))
    assert turns_at[-1] - turns_at[0] >= 10


@pytest.mark.alone
@pytest.mark.requirement("F9")
async def test_f9_a_process_that_stops_reading_loses_nothing_and_buffers_little(
    remote_world: World,
) -> None:
    before = resident_kilobytes()
    largest = items = 0
    async with worker_process(remote_world), caller(remote_world) as calls:
        # A hundred megabytes, which the credit of the reader allows to be sent at once.
        wanted = {"n": 400, "size": 250_000}
        async for _ in calls.subscribe("count.up", wanted, window=100_000):
            if items in {10, 200}:
                time.sleep(1)  # noqa: ASYNC251 - this is the fault
            items += 1
            largest = max(largest, resident_kilobytes())

    assert items == 400
    assert largest - before < 32 * 1024


@pytest.mark.alone
@pytest.mark.requirement("F9")
async def test_f9_a_reader_that_the_broker_disconnects_gets_an_error() -> None:
    limits = 'max_payload: 524288\nmax_pending: 524288\nwrite_deadline: "200ms"'
    with running(NatsServer(config=limits)) as broker:
        world = nats_world(broker.url)
        async with worker_process(world), caller(world) as calls:
            first = asyncio.Event()

            async def read() -> int:
                items = 0
                async for _ in calls.subscribe("count.up", {"n": 40, "size": 250_000}, window=40):
                    items += 1
                    first.set()
                return items

            # Together more than the buffers of the system.
            readers = [asyncio.create_task(read()) for _ in range(16)]
            await first.wait()
            time.sleep(2)  # noqa: ASYNC251 - this is the fault
            with time_limit(60):
                outcomes = await asyncio.gather(*readers, return_exceptions=True)
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3

    lost = [each for each in outcomes if isinstance(each, CallError)]
    assert lost
    assert {(each.code, each.retryable) for each in lost} == {(ErrorCode.UNAVAILABLE, True)}
    assert {each for each in outcomes if not isinstance(each, CallError)} <= {40}


@pytest.mark.alone
@pytest.mark.requirement("R40", "F20")
@pytest.mark.slow
async def test_f20_ten_thousand_calls_at_once_are_all_answered(
    world: World, registry: OperationRegistry
) -> None:
    before = resident_kilobytes()
    async with calling(world, registry) as calls:
        answers = await asyncio.gather(
            *(calls.call("math.add", {"a": index, "b": 1}, timeout=60) for index in range(10_000))
        )

    assert [answer.data for answer in answers] == list(range(1, 10_001))
    assert resident_kilobytes() - before < 300_000


@pytest.mark.requirement("R39", "F21")
async def test_f21_a_worker_rejects_calls_beyond_its_limits_and_keeps_working(
    world: World, registry: OperationRegistry, tmp_path: Path
) -> None:
    busy, path = tmp_path / "busy", tmp_path / "log"
    bounds = {"concurrency": 10, "max_waiting": 10}
    async with AsyncExitStack() as stack:
        if world.name == "memory":
            await stack.enter_async_context(world.serve(registry, **bounds))
        else:
            # In another process, which the callers do not slow down.
            await stack.enter_async_context(worker_process(world, options=bounds))
        calls = await stack.enter_async_context(caller(world))
        await calls.call("math.add", {"a": 1, "b": 1})
        slow = {"seconds": 3600, "path": str(busy)}
        filling: set[asyncio.Task[Any]] = set()
        rejected = 0
        with time_limit(60):
            while rejected < 10:
                call = asyncio.create_task(calls.call("slow.sleep", slow, timeout=3600))
                filling.add(call)
                done, _ = await asyncio.wait({call}, timeout=1)
                filling -= done
                refusals = [task.exception() for task in done]
                rejected = rejected + 1 if refusals else 0
        quick = {"seconds": 0, "path": str(path)}
        with time_limit(60):
            outcomes = await asyncio.gather(
                *(calls.call("slow.sleep", quick, timeout=60) for _ in range(200)),
                return_exceptions=True,
            )
        # They were rejected while all slots were in use, and without waiting for one.
        assert not any(task.done() for task in filling)
        assert len(started(busy)) == 10
        assert {
            (getattr(each, "code", each), getattr(each, "retryable", each)) for each in outcomes
        } == {(ErrorCode.RESOURCE_EXHAUSTED, True)}
        assert started(path) == []
        for task in filling:
            task.cancel()
        await asyncio.gather(*filling, return_exceptions=True)
        succeeded, codes = 0, set[str]()

        async def insist() -> None:
            nonlocal succeeded
            while True:
                try:
                    await calls.call("slow.sleep", quick, timeout=60)
                except CallError as error:
                    codes.add(error.code)
                    await asyncio.sleep(0.05)
                else:
                    succeeded += 1
                    return

        with time_limit(60):
            await asyncio.gather(*(insist() for _ in range(200)))
    assert codes <= {ErrorCode.RESOURCE_EXHAUSTED}
    assert len(started(path)) == succeeded == 200


@virtual_time
@pytest.mark.requirement("R39", "F21")
async def test_f21_overload_neither_slows_rejections_nor_costs_goodput(
    registry: OperationRegistry, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    took: list[float] = []
    codes: set[str] = set()
    rng = random.Random(3)
    loop = asyncio.get_running_loop()
    done = 0

    async def caller_of(calls: PendingRequestMap, until_time: float) -> None:
        nonlocal done
        # Not all at once, to measure the worker and not the queueing of callers.
        await asyncio.sleep(rng.uniform(0, 0.3))
        while loop.time() < until_time:
            before = loop.time()
            try:
                await calls.call("slow.sleep", {"seconds": 0.1, "path": str(path)}, timeout=5)
                done += 1
            except CallError as error:
                codes.add(error.code)
                took.append(loop.time() - before)
                await asyncio.sleep(rng.uniform(0.1, 0.3))

    async def goodput(calls: PendingRequestMap, callers: int) -> int:
        nonlocal done
        done = 0
        ends = loop.time() + 1.8
        await asyncio.gather(*(caller_of(calls, ends) for _ in range(callers)))
        return done

    target = MemoryTarget()
    async with (
        serve_calls(registry, target, concurrency=10, max_waiting=10),
        PendingRequestMap(target) as calls,
    ):
        peak = await goodput(calls, 20)
        assert took == []
        overloaded = await goodput(calls, 200)

    took.sort()
    assert len(took) > 500
    assert codes == {ErrorCode.RESOURCE_EXHAUSTED}
    assert took[int(len(took) * 0.95)] < 0.05
    assert overloaded >= 0.8 * peak
    assert len(started(path)) <= peak + overloaded


@pytest.mark.requirement("R39", "F21")
async def test_f21_expired_work_is_not_started(
    world: World, registry: OperationRegistry, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with calling(world, registry, concurrency=1) as calls:
        blocker = asyncio.create_task(calls.call("slow.sleep", {"seconds": 30}))
        await asyncio.sleep(0.1)
        results = await asyncio.gather(
            *(
                calls.call("slow.sleep", {"seconds": 0, "path": str(path)}, timeout=0.3)
                for _ in range(20)
            ),
            return_exceptions=True,
        )
        blocker.cancel()
        await calls.call("math.add", {"a": 1, "b": 1})

    assert {getattr(result, "code", repr(result)) for result in results} == {ErrorCode.TIMEOUT}
    assert started(path) == []


@pytest.mark.requirement("R39", "F21")
@pytest.mark.parametrize("credential", [None, "token"])
async def test_f21_work_that_expired_while_the_loop_was_blocked_is_not_started(
    credential: str | None,
) -> None:
    registry = OperationRegistry()
    ran: list[str] = []

    @registry.operation("loop.block")
    async def block() -> None:
        await asyncio.sleep(0.05)
        time.sleep(0.4)  # noqa: ASYNC251 - the fault

    @registry.operation("till.pay")
    async def pay() -> None:
        ran.append("paid")

    target = MemoryTarget()
    async with (
        serve_calls(registry, target, concurrency=1, resolve=Identity),
        PendingRequestMap(target, credential=credential) as calls,
    ):
        outcomes = await asyncio.gather(
            calls.call("loop.block", {}),
            calls.call("till.pay", {}, timeout=0.2),
            return_exceptions=True,
        )
    late: Any = outcomes[1]

    assert isinstance(late, CallError)
    assert late.code == ErrorCode.TIMEOUT
    assert ran == []


@pytest.mark.requirement("R39", "F21")
async def test_f21_work_that_expires_while_its_caller_is_identified_is_not_started() -> None:
    registry = OperationRegistry()
    ran: list[str] = []

    @registry.operation("till.pay")
    async def pay() -> None:
        ran.append("paid")

    def resolve(token: str) -> Identity:
        time.sleep(0.4)
        return Identity(token)

    target = MemoryTarget()
    async with serve_calls(registry, target, resolve=resolve), PendingRequestMap(target) as calls:
        with pytest.raises(CallError) as caught:
            await calls.call("till.pay", {}, credential="token", timeout=0.2)

    assert caught.value.code == ErrorCode.TIMEOUT
    assert ran == []


@pytest.mark.requirement("F9")
async def test_f9_a_worker_identifies_as_many_callers_at_once_as_it_runs_calls(
    registry: OperationRegistry,
) -> None:
    count, checking, all_wait = 300, 0, asyncio.Event()

    async def resolve(token: str) -> Identity:
        nonlocal checking
        checking += 1
        if checking == count:
            all_wait.set()
        await all_wait.wait()
        return Identity(token)

    target = MemoryTarget()
    async with (
        serve_calls(registry, target, concurrency=count, resolve=resolve),
        PendingRequestMap(target) as calls,
    ):
        made = [
            calls.call("math.add", {"a": 1, "b": 2}, credential=f"token {number}")
            for number in range(count)
        ]
        assert [each.data for each in await asyncio.gather(*made)] == [3] * count


class Answers(SilentReceiver):
    """Collects the messages of a mailbox."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()

    def receive(self, delivery: Delivery) -> None:
        self.events.put_nowait(read_event(delivery.body))


@pytest.mark.requirement("R39", "F21")
@pytest.mark.parametrize(
    "bounds", [{"timeout_ms": 0.0}, {"timeout_ms": -1000.0}, {"deadline": 1000.0}]
)
async def test_f21_an_expired_request_is_answered_but_not_started(
    bounds: dict[str, Any],
) -> None:
    registry = OperationRegistry()
    ran: list[str] = []

    @registry.operation("till.pay")
    async def pay() -> None:
        ran.append("paid")

    target, answers = MemoryTarget(), Answers()
    await target.listen(("box.me",), answers)
    async with serve_calls(registry, target, per_principal=1) as worker:
        for request_id in ("r1", "r2"):
            request = RequestPayload(
                request_id=request_id, operation_id="till.pay", reply_to="box.me", **bounds
            )
            body = encode_event(CallRequested(payload=request))
            await target.enqueue("operations", body, key=request_id, reply_to="box.me", wait=1)
            with time_limit(20):
                event = await answers.events.get()
            # Not RESOURCE_EXHAUSTED: a request that was not started occupies no slot.
            assert (event.payload.request_id, event.payload.code) == (
                request_id,
                ErrorCode.TIMEOUT,
            )
        assert worker.active == 0

    assert ran == []


@pytest.mark.requirement("R39")
async def test_r39_one_caller_cannot_take_every_slot(registry: OperationRegistry) -> None:
    def resolve(token: str) -> Identity:
        return Identity(token)

    target = MemoryTarget()
    async with (
        serve_calls(
            registry, target, concurrency=10, max_waiting=0, per_principal=5, resolve=resolve
        ),
        PendingRequestMap(target) as calls,
    ):
        greedy = [
            asyncio.create_task(calls.call("slow.sleep", {"seconds": 2}, credential="greedy"))
            for _ in range(20)
        ]
        await asyncio.sleep(0)
        assert (await calls.call("math.add", {"a": 1, "b": 2}, credential="modest")).data == 3
        results = await asyncio.gather(*greedy, return_exceptions=True)

    refused = [result for result in results if isinstance(result, CallError)]
    assert len(refused) == 15
    assert {error.code for error in refused} == {ErrorCode.RESOURCE_EXHAUSTED}


async def _resolve_slowly(token: str) -> Identity | None:
    """Alice and Bob identify themselves in different ways."""
    await asyncio.sleep(0.001 * token.count("_"))
    if "broken" in token:
        raise RuntimeError("no directory")
    name = token.strip(" _").lower()
    return Identity(name) if name in ("alice", "bob") else None


async def _at_a_time(calls: PendingRequestMap, path: Path, tokens: list[str]) -> list[str]:
    """Return the outcomes of concurrent calls that last."""
    tasks = [
        asyncio.create_task(
            calls.call("slow.sleep", {"seconds": 60, "path": str(path)}, credential=token)
        )
        for token in tokens
    ]
    refused: set[str] = set()
    await until(lambda: len(started(path)) + sum(task.done() for task in tasks) == len(tasks))
    for task in tasks:
        if task.done():
            with pytest.raises(CallError) as caught:
                task.result()
            refused.add(caught.value.code)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [f"{len(started(path))} run", *refused]


@pytest.mark.requirement("R39")
async def test_r39_one_identity_cannot_take_every_slot_by_many_spellings(
    registry: OperationRegistry, tmp_path: Path
) -> None:
    target = MemoryTarget()
    spellings = [f"{'_' * (count % 3)}alice{' ' * count}" for count in range(10)]
    expected = ["2 run", ErrorCode.RESOURCE_EXHAUSTED]
    rng = random.Random(3)
    async with (
        serve_calls(registry, target, per_principal=2, resolve=_resolve_slowly) as worker,
        PendingRequestMap(target) as calls,
    ):
        assert await _at_a_time(calls, tmp_path / "1", spellings) == expected
        await until(lambda: worker.active == 0)

        async def anything(number: int) -> None:
            token = rng.choice([*spellings, "bob", "_bob ", "nobody", "_nobody", "_broken"])
            wanted = {"seconds": rng.choice([0, 0.002, 60])}
            limit = rng.choice([0.001, 0.005, 0.02])
            call = calls.call("slow.sleep", wanted, credential=token, timeout=limit)
            task = asyncio.create_task(call)
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            if number % 3 == 0:
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for start in range(0, 600, 30):
            await asyncio.gather(*(anything(number) for number in range(start, start + 30)))
        await until(lambda: worker.active == worker.waiting == 0)

        # Neither more nor less than before.
        assert await _at_a_time(calls, tmp_path / "2", spellings) == expected
        await until(lambda: worker.active == 0)
        assert await _at_a_time(calls, tmp_path / "3", ["bob"] * 3) == expected
        await until(lambda: worker.active == 0)
        assert await _at_a_time(calls, tmp_path / "4", ["alice", "_alice", "bob", "bob "]) == [
            "4 run"
        ]


@pytest.mark.requirement("R39")
async def test_r39_callers_without_credential_are_counted_by_identity(
    registry: OperationRegistry,
) -> None:
    target = MemoryTarget()
    async with serve_calls(registry, target, per_principal=1), AsyncExitStack() as stack:
        maps = [await stack.enter_async_context(PendingRequestMap(target)) for _ in range(2)]
        # Two mailboxes, one caller; one mailbox, two callers.
        names = [(maps[0], "alice"), (maps[1], "alice"), (maps[1], "bob")]
        outcomes = await asyncio.gather(
            *(
                calls.call("slow.sleep", {"seconds": 1}, identity=Identity(name))
                for calls, name in names
            ),
            return_exceptions=True,
        )

    assert [getattr(outcome, "code", "ran") for outcome in outcomes] == [
        "ran",
        ErrorCode.RESOURCE_EXHAUSTED,
        "ran",
    ]


async def turns() -> int:
    """Return how often the event loop wakes up in a second in which the test only waits."""
    loop: Any = asyncio.get_running_loop()
    run_once, count = loop._run_once, 0

    def counted() -> None:
        nonlocal count
        count += 1
        run_once()

    loop._run_once = counted
    await asyncio.sleep(1)
    del loop._run_once
    return count


@pytest.mark.requirement("R10", "F31")
async def test_f31_a_storm_of_cancelled_calls_leaves_nothing_behind(
    world: World, registry: OperationRegistry
) -> None:
    rng = random.Random(7)
    async with calling(world, registry, concurrency=100) as calls:
        tasks_before, before = len(asyncio.all_tasks()), await turns()

        async def start_and_cancel(index: int) -> None:
            task = asyncio.create_task(calls.call("math.add", {"a": index, "b": 0}))
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            task.cancel()
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
            assert getattr(outcome, "data", index) == index
            assert getattr(outcome, "code", "") in ("", ErrorCode.RESOURCE_EXHAUSTED)

        for start in range(0, 10_000, 500):
            await asyncio.gather(*(start_and_cancel(start + index) for index in range(500)))
            # Including those of the worker in this process, and a few that are closing.
            assert len(asyncio.all_tasks()) < tasks_before + 300
        await until(lambda: len(calls) == 0)
        with time_limit(20):
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        await until(lambda: len(asyncio.all_tasks()) <= tasks_before)
        after = await turns()

    assert after < 2 * before + 50


@pytest.mark.requirement("F31")
@pytest.mark.parametrize("name", ["memory", "nats", "websocket"])
async def test_f31_a_call_that_was_cancelled_while_it_waited_makes_room(
    name: str, request: pytest.FixtureRequest, registry: OperationRegistry, tmp_path: Path
) -> None:
    world, path = make_world(name, request), tmp_path / "log"
    async with (
        world.serve(registry, concurrency=1, max_waiting=1) as workers,
        world.connect() as target,
        PendingRequestMap(target) as calls,
    ):
        running = asyncio.create_task(
            calls.call("slow.sleep", {"seconds": 60, "path": str(path)}, timeout=60)
        )
        await until(lambda: started(path))
        for _ in range(3):
            waiting = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 1}))
            await until(lambda: workers[0].waiting == 1)
            waiting.cancel()
            await until(lambda: workers[0].waiting == 0)
        last = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2}))
        await until(lambda: workers[0].waiting == 1)
        running.cancel()
        assert (await last).data == 3


@pytest.mark.requirement("F31")
async def test_f31_a_cancelled_call_that_still_runs_counts(registry: OperationRegistry) -> None:
    target = MemoryTarget()
    async with (
        serve_calls(registry, target, concurrency=2, max_waiting=0, grace=0) as worker,
        PendingRequestMap(target) as calls,
    ):
        stubborn = [
            asyncio.create_task(calls.call("slow.stubborn", {"seconds": 3})) for _ in range(2)
        ]
        await until(lambda: worker.active == 2)
        for task in stubborn:
            task.cancel()
        await until(lambda: len(calls) == 0)
        assert worker.active == 2
        with pytest.raises(CallError) as caught:
            await calls.call("math.add", {"a": 1, "b": 2})
        await until(lambda: worker.active == 0)
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
