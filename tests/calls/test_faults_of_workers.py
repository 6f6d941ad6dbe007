"""Faults F1-F3, F25, F26, F30 and F33: workers that die, stop, or block."""

import asyncio
import logging
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.calls.conftest import make_world
from tests.calls.operations_under_test import build_registry
from tests.calls.processes import worker_process
from tests.calls.waiting import caller, lines, started, until
from tests.calls.worlds import MemoryWorld, WebSocketWorld, World
from tests.limits import time_limit

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, serve_calls
from operations.calls.source.monitoring import monitor_group
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import OperationSpec
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.websocket import AcceptedTarget, serve_websocket

pytestmark = pytest.mark.slow


@pytest.mark.requirement("R12", "R36", "F1")
async def test_f1_a_mutation_whose_worker_is_killed_ends_unavailable_and_is_not_run_again(
    remote_world: World, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        victim = await enter(worker_process(remote_world))
        calls = await enter(caller(remote_world))
        call = asyncio.create_task(
            calls.call("slow.write", {"seconds": 60, "path": str(path)}, timeout=30)
        )
        await until(lambda: started(path))
        if remote_world.name != "websocket":
            await enter(worker_process(remote_world))
        victim.kill()
        with time_limit(28), pytest.raises(CallError) as caught:
            await call

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert not caught.value.retryable, "it may have run"
    assert len(started(path)) == 1


@pytest.mark.requirement("R36", "F1")
async def test_f1_a_mutation_whose_only_worker_hangs_ends_long_before_its_deadline(
    broker_world: World, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    write = {"seconds": 600, "path": str(path)}
    async with (
        worker_process(broker_world) as worker,
        caller(broker_world, heartbeat=0.5, silence=1) as calls,
    ):
        call = asyncio.create_task(calls.call("slow.write", write, timeout=600))
        await until(lambda: started(path))
        # A worker that never responded to a probe may not support them.
        await until(lambda: calls._workers.heard_at)
        worker.process.send_signal(signal.SIGSTOP)
        with time_limit(60), pytest.raises(CallError, match="may have run") as caught:
            await call

    assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, False)


@pytest.mark.requirement("R36", "F1")
async def test_f1_a_lost_mutation_does_not_wait_for_a_worker_without_a_free_slot(
    broker_world: World, tmp_path: Path
) -> None:
    path, busy = tmp_path / "log", tmp_path / "busy"
    async with (
        caller(broker_world, heartbeat=0.5) as calls,
        caller(broker_world, heartbeat=0.5) as others,
        worker_process(broker_world) as victim,
    ):
        write = {"seconds": 600, "path": str(path)}
        call = asyncio.create_task(calls.call("slow.write", write, timeout=600))
        await until(lambda: started(path))
        async with worker_process(broker_world, options={"concurrency": 1}) as next_worker:
            sleep = {"seconds": 600, "path": str(busy)}
            filling: list[asyncio.Task[Any]] = []
            while next_worker.pid not in started(busy):
                filling.append(asyncio.create_task(others.call("slow.sleep", sleep, timeout=600)))
                await until(lambda: len(started(busy)) == len(filling))
            victim.kill()
            with time_limit(60), pytest.raises(CallError, match="may have run") as caught:
                await call
        for task in filling:
            task.cancel()
        await asyncio.gather(*filling, return_exceptions=True)

    assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, False)
    assert len(started(path)) == 1


@pytest.mark.requirement("R36", "F1")
async def test_f1_a_worker_that_hangs_before_its_first_heartbeat_and_dies_is_detected(
    broker_world: World,
) -> None:
    async with worker_process(broker_world) as victim, AsyncExitStack() as stack:
        victim.process.send_signal(signal.SIGSTOP)
        calls = await stack.enter_async_context(caller(broker_world))
        call = asyncio.create_task(calls.call("math.add", {"a": 1, "b": 2}, timeout=30))
        # Wait until the caller has probed for it.
        await asyncio.sleep(2.5)
        victim.kill()
        with time_limit(28), pytest.raises(CallError) as caught:
            await call

    assert caught.value.code == ErrorCode.UNAVAILABLE


@pytest.mark.requirement("R36", "F1")
async def test_f1_a_query_whose_worker_is_killed_is_run_by_another_one(
    broker_world: World, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with (
        worker_process(broker_world) as one,
        worker_process(broker_world) as two,
        caller(broker_world) as calls,
    ):
        call = asyncio.create_task(
            calls.call("slow.sleep", {"seconds": 1, "path": str(path)}, timeout=30)
        )
        await until(lambda: started(path))
        victim = one if started(path)[0] == one.pid else two
        victim.kill()
        with time_limit(28):
            envelope = await call

    assert envelope.data == "slept"
    assert started(path) == [victim.pid, (two if victim is one else one).pid]


@pytest.mark.requirement("F1")
async def test_f1_the_loss_of_the_last_worker_of_a_group_is_detected_in_time(
    broker_world: World, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with worker_process(broker_world) as worker, caller(broker_world) as calls:
        # Queries wait until the worker returns.
        call = asyncio.create_task(calls.call("slow.write", {"seconds": 60, "path": str(path)}))
        await until(lambda: started(path))
        worker.kill()
        with time_limit(28), pytest.raises(CallError) as caught:
            await call

    assert caught.value.code == ErrorCode.UNAVAILABLE


@pytest.mark.requirement("R33", "F2")
async def test_f2_a_stream_whose_worker_is_killed_keeps_its_items_and_then_fails_once(
    remote_world: World,
) -> None:
    items: list[Any] = []
    async with worker_process(remote_world) as worker, caller(remote_world) as calls:
        stream = calls.subscribe("count.forever", {"pause": 0.01})
        with time_limit(28), pytest.raises(CallError) as caught:
            async for envelope in stream:
                items.append(envelope.data)
                if len(items) == 3:
                    worker.kill()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert items[:3] == [0, 1, 2]
    assert items == list(range(len(items)))


@pytest.mark.requirement("F3")
@pytest.mark.parametrize("name", ["memory", "redis", "nats"])
async def test_f3_without_a_worker_a_call_is_unavailable_at_once(
    name: str, request: pytest.FixtureRequest
) -> None:
    world = make_world(name, request)
    async with caller(world) as calls:
        # A call that waits for a worker to respond has the time of its timeout.
        with time_limit(10):
            for _ in range(5):
                with pytest.raises(CallError) as caught:
                    await calls.call("math.add", {"a": 1, "b": 2}, timeout=3600)
                assert caught.value.code == ErrorCode.UNAVAILABLE
                assert "start a worker" in caught.value.message


@pytest.mark.requirement("F3")
async def test_f3_a_peer_that_serves_nothing_is_unavailable() -> None:
    world = WebSocketWorld()

    async def only_call(target: AcceptedTarget) -> None:
        async with PendingRequestMap(target):
            await target.wait_closed()

    async with serve_websocket(only_call, port=world.port), caller(world) as calls:
        with time_limit(28), pytest.raises(CallError) as caught:
            await calls.call("math.add", {"a": 1, "b": 2})

    assert caught.value.code == ErrorCode.UNAVAILABLE


@pytest.mark.requirement("R38", "F25")
async def test_f25_sigterm_finishes_running_calls_and_marks_the_rest_retryable(
    broker_world: World, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with (
        worker_process(broker_world, options={"grace": 1.5}) as worker,
        caller(broker_world) as calls,
    ):
        short = asyncio.create_task(calls.call("slow.write", {"seconds": 0.8, "path": str(path)}))
        long = asyncio.gather(
            calls.call("slow.write", {"seconds": 60, "path": str(path)}),
            calls.call("slow.sleep", {"seconds": 60, "path": str(path)}),
            return_exceptions=True,
        )
        await until(lambda: len(started(path)) == 3)
        worker.terminate()
        assert (await short).data == "written"
        with time_limit(28):
            mutation, query = await long
        assert await worker.wait() == 0

    assert isinstance(mutation, CallError)
    assert isinstance(query, CallError)
    assert mutation.code == query.code == ErrorCode.UNAVAILABLE
    # A call that has begun to write would write twice.
    assert (mutation.retryable, query.retryable) == (False, True)


@pytest.mark.requirement("F25")
async def test_f25_a_second_sigterm_ends_the_worker_now(
    broker_world: World, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with worker_process(broker_world) as worker, caller(broker_world) as calls:
        call = asyncio.create_task(calls.call("slow.write", {"seconds": 60, "path": str(path)}))
        await until(lambda: started(path))
        ending = asyncio.create_task(worker.wait())
        with time_limit(28):
            # Repeatedly: a busy machine may deliver two signals as one.
            while not ending.done():
                worker.terminate()
                await asyncio.wait({ending}, timeout=0.2)
        assert ending.result() != 0
        with pytest.raises(CallError):
            await call


@pytest.mark.requirement("R38", "F26")
async def test_f26_a_rolling_restart_under_load_fails_no_call(broker_world: World) -> None:
    stop = asyncio.Event()
    answered = 0

    async def load(calls: Any) -> None:
        nonlocal answered
        while not stop.is_set():
            envelope = await calls.call("slow.sleep", {"seconds": 0.02})
            assert envelope.data == "slept"
            answered += 1

    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        workers = [await enter(worker_process(broker_world)) for _ in range(2)]
        calls = await enter(caller(broker_world))
        tasks = [asyncio.create_task(load(calls)) for _ in range(16)]
        for old in workers:
            await enter(worker_process(broker_world))
            old.terminate()
            assert await old.wait() == 0
        stop.set()
        await asyncio.gather(*tasks)

    assert answered > 100


@pytest.mark.requirement("R49", "F30")
async def test_f30_a_request_that_kills_every_worker_is_a_dead_letter_after_three_deliveries(
    broker_world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(worker_process(broker_world))
        calls = await stack.enter_async_context(caller(broker_world))
        with time_limit(140), pytest.raises(CallError) as caught:
            await calls.call("slow.crash", {"path": str(path)}, timeout=150)
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        if broker_world.name == "redis":
            async with monitor_group(calls.target) as monitor:
                (letter,) = await monitor.letters()
            assert (letter.operation, letter.deliveries) == ("slow.crash", 3)

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert caught.value.details == {"deliveries": 3}
    assert not caught.value.retryable
    assert len(started(path)) == 3
    assert any("dead letter" in record.message for record in caplog.records)


@pytest.mark.requirement("R43", "F33")
async def test_f33_a_worker_that_is_blocked_for_five_seconds_loses_nothing(
    remote_world: World, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(worker_process(remote_world))
        calls = await enter(caller(remote_world))
        if remote_world.name != "websocket":
            # The caller must know the first worker by then: it cannot miss a worker that it never knew.
            await enter(worker_process(remote_world))
        with time_limit(25):
            envelope = await calls.call("slow.block_loop", {"seconds": 5, "path": str(path)})

    assert envelope.data == "blocked"
    assert len(started(path)) == 1


async def test_f33_a_warning_names_the_call_that_blocked_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = MemoryWorld()
    caplog.set_level(logging.WARNING)
    async with world.serve(build_registry()), caller(world) as calls:
        slow = asyncio.create_task(calls.call("slow.sleep", {"seconds": 2.5}))
        await asyncio.sleep(0.3)
        await calls.call("slow.block_loop", {"seconds": 1.5, "path": str(tmp_path / "log")})
        await slow

    assert any("was blocked" in record.message for record in caplog.records)
    assert lines(tmp_path / "log")


@pytest.mark.requirement("R43", "F33")
async def test_f33_one_warning_is_logged_for_all_workers_of_a_blocked_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server has a worker for each WebSocket."""
    caplog.set_level(logging.WARNING)
    registry = build_registry()
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serve_calls(registry, MemoryTarget()))
        calls: list[asyncio.Task[ResponseEnvelope[Any]]] = []
        for _ in range(3):
            target = MemoryTarget()
            await stack.enter_async_context(serve_calls(registry, target))
            client = await stack.enter_async_context(PendingRequestMap(target))
            calls.append(asyncio.create_task(client.call("slow.sleep", {"seconds": 2})))
        # The next worker watches the loop when the first one ends.
        await first.aclose()
        await asyncio.sleep(0.3)
        time.sleep(1.5)  # noqa: ASYNC251 - block the loop
        await asyncio.gather(*calls)

    (warning,) = [record.message for record in caplog.records if "was blocked" in record.message]
    assert warning.endswith("running then: slow.sleep")


async def test_the_operations_are_not_encoded_for_each_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Encoding the operations for each WebSocket would block the loop of a server."""
    encoded: list[str] = []
    encode = OperationSpec.encode

    def count(spec: OperationSpec) -> bytes:
        encoded.append(spec.id)
        return encode(spec)

    monkeypatch.setattr(OperationSpec, "encode", count)
    registry = build_registry()
    async with AsyncExitStack() as stack:
        for _ in range(3):
            target = MemoryTarget()
            target.direct = True
            await stack.enter_async_context(serve_calls(registry, target, heartbeat=0.01))

        @registry.operation("late.added", type="query")
        async def added() -> int:
            return 1

        await asyncio.sleep(0.1)
    assert not encoded
