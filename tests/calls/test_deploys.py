"""Rolling deploys: workers stop, start and change their operations while callers continue."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.calls.operations_under_test import note
from tests.calls.processes import worker_process
from tests.calls.waiting import caller, lines, started, until
from tests.calls.worlds import BrokerWorld, World, nats_world, redis_world
from tests.limits import scaled, time_limit
from tests.servers import Broker, NatsServer, running

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, from_calls, serve_calls
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.nats import jetstream
from operations.registry import OperationRegistry


def release(ledger: Path, *operations: str, seconds: float = 0.0) -> OperationRegistry:
    """The operations of one release; each writes its executions to the ledger."""
    registry = OperationRegistry()
    for operation_id in operations:

        @registry.operation(operation_id)
        async def run(number: int, operation_id: str = operation_id) -> int:
            note(str(ledger), f"{operation_id} {number}")
            await asyncio.sleep(seconds)
            return number

    return registry


@pytest.mark.requirement("F25", "F26", "R38")
async def test_requests_that_a_stopping_worker_did_not_begin_run_elsewhere(
    broker_world: World, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    slow = release(ledger, "shop.pay", seconds=0.3)
    async with AsyncExitStack() as stack:
        calls = await stack.enter_async_context(caller(broker_world))
        async with broker_world.serve(slow, concurrency=1, grace=5):
            paying = [
                asyncio.create_task(calls.call("shop.pay", {"number": number}, replayable=False))
                for number in range(6)
            ]
            await until(lambda: lines(ledger))
            await stack.enter_async_context(broker_world.serve(release(ledger, "shop.pay")))
        with time_limit(25):
            results = await asyncio.gather(*paying)

    assert [result.data for result in results] == list(range(6))
    assert Counter(lines(ledger)) == Counter(f"shop.pay {number}" for number in range(6))


@pytest.mark.requirement("F4", "F25", "R36")
async def test_no_request_that_never_began_fails_if_a_worker_stops_during_an_outage(
    own_broker: tuple[Broker, BrokerWorld], tmp_path: Path
) -> None:
    """The broker loses the requests that wait, and the caller asks the worker that stops as well."""
    broker, world = own_broker
    ledger, is_back = tmp_path / "ledger", asyncio.Event()
    registry = OperationRegistry()

    @registry.operation("shop.pay")
    async def pay(number: int) -> int:
        note(str(ledger), str(number))
        await is_back.wait()
        return number

    serving, stopping = asyncio.Event(), asyncio.Event()

    async def old_worker() -> None:
        async with world.serve(registry, concurrency=1, grace=60):
            serving.set()
            await stopping.wait()

    async with world.serve(registry, concurrency=1), caller(world) as calls:
        leaving = asyncio.create_task(old_worker())
        await asyncio.wait_for(serving.wait(), scaled(30))
        # The caller must have found all workers: requests that are sent earlier may have begun unnoticed. On NATS, the
        # first call asks for the workers; until they respond, one worker may get all requests.
        await calls.call("services.list")
        await asyncio.sleep(2)
        paying = [
            asyncio.create_task(calls.call("shop.pay", {"number": number}, timeout=100))
            for number in range(6)
        ]
        await until(lambda: len(lines(ledger)) == 2)
        broker.kill()
        await until(lambda: not calls.target.is_connected)
        stopping.set()
        broker.start()
        is_back.set()
        with time_limit(100):
            results = await asyncio.gather(*paying)
            await leaving

    assert [result.data for result in results] == list(range(6))
    assert Counter(lines(ledger)) == Counter(map(str, range(6)))


@pytest.mark.requirement("F25", "F26")
async def test_a_request_that_a_stopping_worker_has_just_acquired_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has removed the request, but the worker does not know it yet."""
    acquiring, stopped = asyncio.Event(), asyncio.Event()
    acquire = jetstream._MessageClaim.acquire

    async def slow_acquire(self: Any, *, alone: bool) -> bool:
        is_ours = await acquire(self, alone=alone)
        if not stopped.is_set():
            acquiring.set()
            await stopped.wait()
        return is_ours

    monkeypatch.setattr(jetstream._MessageClaim, "acquire", slow_acquire)
    ledger = tmp_path / "ledger"
    broker = NatsServer()
    broker.options += ("-js", "-sd", broker.folder)
    with running(broker):
        world = nats_world(broker.url)

        async def old_worker() -> None:
            options = {"target": {"queue": "jetstream"}}
            async with world.serve(release(ledger, "shop.pay"), **options) as (worker,):
                await acquiring.wait()
            assert not worker.is_serving

        async with world.connect(queue="jetstream") as target, PendingRequestMap(target) as calls:
            stopping = asyncio.create_task(old_worker())
            paying = asyncio.create_task(calls.call("shop.pay", {"number": 1}, replayable=False))
            await acquiring.wait()
            async with world.serve(release(ledger, "shop.pay"), target={"queue": "jetstream"}):
                asyncio.get_running_loop().call_later(1, stopped.set)
                with time_limit(30):
                    assert (await paying).data == 1
                    await stopping

    assert lines(ledger) == ["shop.pay 1"]


async def test_calls_of_new_operations_find_the_workers_that_have_them(
    broker_world: World, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    old, new = release(ledger, "shop.pay"), release(ledger, "shop.pay", "shop.refund")
    async with AsyncExitStack() as stack:
        for registry in (old, old, old, new):
            await stack.enter_async_context(broker_world.serve(registry))
        calls = await stack.enter_async_context(caller(broker_world))
        await calls.call("shop.pay", {"number": 0})
        await until(lambda: len(calls.workers_by_specs) == 2)
        with time_limit(25):
            results = await asyncio.gather(
                *(calls.call("shop.refund", {"number": number}) for number in range(20))
            )
            with pytest.raises(CallError) as caught:
                await calls.call("shop.nothing", {"number": 1})

    assert [result.data for result in results] == list(range(20))
    assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND
    assert caught.value.details == {"operationId": "shop.nothing"}
    assert caught.value.retryable
    assert max(Counter(lines(ledger)).values()) == 1


async def test_the_first_calls_of_a_client_find_the_workers_that_have_the_operation(
    broker_world: World, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    old, new = release(ledger, "shop.pay"), release(ledger, "shop.refund")
    async with AsyncExitStack() as stack:
        for registry in (old, old, old, new):
            await stack.enter_async_context(broker_world.serve(registry))
        with time_limit(25):
            for client in range(5):
                async with caller(broker_world) as calls:
                    numbers = range(client, 20, 5)
                    await asyncio.gather(
                        *(calls.call("shop.refund", {"number": number}) for number in numbers)
                    )
            async with caller(broker_world) as calls:
                with pytest.raises(CallError) as caught:
                    await calls.call("shop.nothing", {"number": 1})

    assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND
    assert Counter(lines(ledger)) == Counter(f"shop.refund {number}" for number in range(20))


async def test_an_unknown_operation_is_reported_as_soon_as_all_workers_of_redis_have_responded(
    redis_server: Broker, tmp_path: Path
) -> None:
    world, ledger = redis_world(redis_server.url), tmp_path / "ledger"
    async with AsyncExitStack() as stack:
        for name in ("shop.pay", "shop.refund"):
            await stack.enter_async_context(world.serve(release(ledger, name)))
        target = await stack.enter_async_context(world.connect())
        # The workers have 24 seconds to respond.
        calls = await stack.enter_async_context(PendingRequestMap(target, heartbeat=60))
        with time_limit(20), pytest.raises(CallError) as caught:
            await calls.call("shop.nothing", {"number": 1})

    assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND


async def test_calls_find_the_workers_whose_source_is_connected(
    broker_world: World, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    waiting, connected = release(ledger, "task.run"), release(ledger, "shop.pay")
    waiting.follow_sources(is_absent=lambda namespace: namespace == "shop", awaits_any=lambda: True)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(broker_world.serve(waiting))
        calls = await stack.enter_async_context(caller(broker_world))
        with time_limit(25):
            with pytest.raises(
                CallError, match="a source that may have it is not connected"
            ) as caught:
                await calls.call("shop.pay", {"number": 0})
            with pytest.raises(
                CallError, match="a source that may have it is not connected"
            ) as streamed:
                await anext(calls.subscribe("shop.pay", {"number": 0}))
            await stack.enter_async_context(broker_world.serve(connected))
            await until(lambda: len(calls.workers_by_specs) == 2)
            results = await asyncio.gather(
                *(calls.call("shop.pay", {"number": number}) for number in range(20))
            )

    for error in (caught.value, streamed.value):
        assert error.code == ErrorCode.UNAVAILABLE
        assert error.retryable
        assert error.begun is False
    assert [result.data for result in results] == list(range(20))


@pytest.mark.requirement("R62")
async def test_a_call_names_the_source_that_is_not_connected_if_no_worker_has_its_operation(
    broker_world: World, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    waiting, other = release(ledger, "task.run"), release(ledger, "task.stop")
    waiting.follow_sources(is_absent=lambda namespace: namespace == "shop", awaits_any=lambda: True)
    async with AsyncExitStack() as stack:
        for registry in (waiting, other):
            await stack.enter_async_context(broker_world.serve(registry))
        calls = await stack.enter_async_context(caller(broker_world))
        with time_limit(25):
            await calls.call("services.list")
            await until(lambda: len(calls.workers_by_specs) == 2)
            failed = await asyncio.gather(
                *(calls.call("shop.pay", {"number": number}) for number in range(20)),
                return_exceptions=True,
            )
            with pytest.raises(CallError) as unknown:
                await calls.call("task.nothing")

    assert {(each.code, each.begun) for each in failed if isinstance(each, CallError)} == {
        (ErrorCode.UNAVAILABLE, False)
    }
    assert unknown.value.code == ErrorCode.OPERATION_NOT_FOUND


@pytest.mark.requirement("F1")
async def test_a_call_of_an_operation_whose_only_worker_was_killed_can_be_retried(
    broker_world: BrokerWorld, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    write = {"seconds": 0, "path": str(ledger)}
    async with (
        broker_world.serve(release(ledger, "shop.pay")),
        caller(broker_world) as calls,
    ):
        await until(lambda: calls.workers_by_specs)
        before = set(calls.workers_by_specs.values())
        async with worker_process(broker_world) as worker:
            await until(lambda: len(calls.workers_by_specs) == 2)
            (killed,) = set(calls.workers_by_specs.values()) - before
            worker.kill()
            await worker.wait()
            with time_limit(20):
                # Until a NATS server has noticed it, requests to this worker get lost and may have begun.
                while await calls.target.is_present(killed):
                    await asyncio.sleep(0.01)
            with time_limit(20), pytest.raises(CallError) as caught:
                await calls.call("slow.write", write)
        async with worker_process(broker_world):
            await calls.call("slow.write", write)

    error = caught.value
    assert (error.code, error.retryable, error.begun) == (ErrorCode.UNAVAILABLE, True, False)
    assert len(started(ledger)) == 1


@pytest.mark.requirement("F25")
async def test_a_call_that_only_a_stopping_worker_could_run_can_be_retried(
    broker_world: BrokerWorld, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    new = release(ledger, "shop.pay", "shop.refund", seconds=60)
    async with (
        broker_world.serve(release(ledger, "shop.pay")),
        broker_world.serve(new, concurrency=1, grace=1) as stopping,
        caller(broker_world) as calls,
    ):
        await until(lambda: len(calls.workers_by_specs) == 2)
        refund = partial(calls.call, "shop.refund")
        running = asyncio.create_task(refund({"number": 1}))
        await until(lambda: lines(ledger))
        waiting = asyncio.create_task(refund({"number": 2}))
        await until(lambda: stopping[0].waiting == 1)
        await stopping[0].aclose()
        with time_limit(20):
            outcomes = await asyncio.gather(running, waiting, return_exceptions=True)

    errors = [error for error in outcomes if isinstance(error, CallError)]
    assert [(error.retryable, error.begun) for error in errors] == [(False, None), (True, False)]
    assert lines(ledger) == ["shop.refund 1"]


async def test_an_import_follows_its_workers(broker_world: World, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    hub = OperationRegistry()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(broker_world.serve(release(ledger, "shop.pay")))
        target = await stack.enter_async_context(broker_world.connect())
        service = await stack.enter_async_context(from_calls(target))
        hub.register_all(service)
        assert [spec.id for spec in hub.specs()] == ["shop.pay"]
        assert service.problem is None

        async with broker_world.serve(release(ledger, "shop.pay", "shop.refund")) as (worker,):
            await until(lambda: "shop.refund" in hub)
            assert (await hub.execute("shop.refund", {"number": 1})).data == 1
            worker.registry.unregister("shop.refund")
            await until(lambda: "shop.refund" not in hub)

        assert "shop.pay" in hub
        assert service.problem is None


async def test_an_import_reports_that_no_worker_is_left(
    broker_world: World, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(broker_world.connect())
        served = await stack.enter_async_context(broker_world.connect())
        registry = release(tmp_path / "ledger", "shop.pay")
        async with serve_calls(registry, served):
            service = await stack.enter_async_context(from_calls(target))
        await until(lambda: service.problem is not None)
        async with serve_calls(registry, served):
            await until(lambda: service.problem is None)


@pytest.mark.requirement("R36")
async def test_an_error_of_a_remote_behind_the_worker_is_not_sent_again(tmp_path: Path) -> None:
    """The worker does not know the operation, but a forwarded request may have run."""
    ledger = tmp_path / "ledger"
    behind, inner, outer = OperationRegistry(), MemoryTarget(), MemoryTarget()

    @behind.operation("shop.pay")
    async def pay() -> None:
        note(str(ledger), "paid")
        raise CallError(ErrorCode.UNAVAILABLE, "the bank does not respond", retryable=True)

    async with (
        serve_calls(behind, inner),
        PendingRequestMap(inner) as remote,
        serve_calls(OperationRegistry(remote=remote), outer),
        PendingRequestMap(outer) as calls,
    ):
        with time_limit(20), pytest.raises(CallError) as caught:
            await calls.call("shop.pay", {})

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert lines(ledger) == ["paid"]
