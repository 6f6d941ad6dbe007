"""Faults F13, F22-F24, F29 and F34: handlers, readers and clocks that misbehave."""

import asyncio
import gc
import multiprocessing
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from tests.calls.processes import PROJECT, worker_process
from tests.calls.waiting import caller, lines, until
from tests.calls.worlds import World, calling
from tests.limits import scaled, time_limit

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, serve_calls
from operations.contract.context import new_request_id
from operations.pubsub.memory import MemoryTarget
from operations.registry import OperationRegistry


@pytest.mark.requirement("R30", "F13")
@pytest.mark.slow
@pytest.mark.parametrize("skew", [600, -600])
async def test_f13_a_worker_whose_clock_is_wrong_keeps_deadlines(
    broker_world: World, skew: int, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with worker_process(broker_world, skew=skew), caller(broker_world) as calls:
        assert (await calls.call("math.add", {"a": 1, "b": 2}, timeout=20)).data == 3
        started = time.monotonic()
        with time_limit(20), pytest.raises(CallError) as caught:
            await calls.call("slow.sleep", {"seconds": 3600, "path": str(path)}, timeout=1)
        elapsed = time.monotonic() - started
        await until(lambda: "cancelled" in lines(path))

    assert caught.value.code == ErrorCode.TIMEOUT
    assert elapsed > 0.9


_SET_THE_CLOCK = """
import asyncio, sys, time
real, ahead = time.time, 0
# The clock must be changed before modules that read it are imported.
time.time = lambda: real() + ahead
import aiohttp
from operations import OperationContext, OperationRegistry
from operations.calls import PendingRequestMap, serve_calls
from operations.base.errors import CallError
from operations.pubsub.memory import MemoryTarget
from operations.server import create_app
from operations.server.http11.running import running

far, beyond, target = OperationRegistry(), MemoryTarget(), MemoryTarget()

@far.operation("far.left", type="query")
async def left(context: OperationContext) -> float:
    return context.deadline / 1000 - time.time()

async def main() -> None:
    async with (
        serve_calls(far, beyond),
        PendingRequestMap(beyond) as remote,
        PendingRequestMap(target) as calls,
    ):
        near = OperationRegistry(remote=remote)

        @near.operation("near.set", type="query")
        async def set_clock(context: OperationContext) -> float:
            global ahead
            ahead += int(sys.argv[1])
            try:
                await near.execute("near.wait", {}, context, timeout=0.1)
            except CallError:
                return (await context.env.far.left({})).data

        @near.operation("near.wait", type="query")
        async def wait() -> None:
            await asyncio.Event().wait()

        async with (
            serve_calls(near, target),
            running(create_app(near)) as url,
            aiohttp.ClientSession() as client,
        ):
            print((await calls.call("near.set", {}, timeout=20)).data)
            headers = {"Operations-Timeout": "20000"}
            async with client.post(f"{url}/near/set", json={}, headers=headers) as response:
                print(await response.json())

asyncio.run(main())
"""


@pytest.mark.requirement("R30", "F13")
@pytest.mark.parametrize("seconds", [3600, -3600])
async def test_f13_a_clock_that_is_set_during_a_call_does_not_change_its_time(seconds: int) -> None:
    command = (sys.executable, "-c", _SET_THE_CLOCK, str(seconds))
    done = await anyio.run_process(command, cwd=PROJECT, check=False)

    left = [float(line) for line in done.stdout.split()]
    assert len(left) == 2, done.stderr.decode()
    assert all(0 < each <= 20 for each in left)


@pytest.mark.requirement("R31", "R33", "F22")
@pytest.mark.parametrize("how", ["break", "drop", "cancel", "close", "close from elsewhere"])
async def test_f22_a_reader_that_leaves_stops_only_its_handler(
    world: World, registry: OperationRegistry, tmp_path: Path, how: str
) -> None:
    path = tmp_path / "log"
    async with calling(world, registry) as calls:
        stream = calls.subscribe("count.forever", {"path": str(path), "pause": 0.01})
        begun = asyncio.Event()

        async def read(items: AsyncIterator[Any]) -> None:
            async for envelope in items:
                begun.set()
                if envelope.data == 3 and how == "break":
                    break

        if how in ("break", "cancel", "close from elsewhere"):
            reader = asyncio.create_task(read(stream))
            if how != "break":
                await begun.wait()
            if how == "cancel":
                reader.cancel()
            elif how == "close from elsewhere":
                await stream.aclose()
            await asyncio.wait({reader})
            assert reader.cancelled() == (how == "cancel")
            del reader
        else:
            await anext(stream)
            if how == "close":
                await stream.aclose()
        del stream
        gc.collect()
        await until(lambda: lines(path))
        assert len(calls) == 0


@pytest.mark.requirement("R31", "F22")
@pytest.mark.slow
async def test_f22_a_caller_that_is_killed_stops_its_handlers(
    broker_world: Any, registry: OperationRegistry, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    module = "operations.pubsub." + broker_world.name
    prefix = broker_world.prefix + (":" if broker_world.name == "redis" else "")
    script = f"""
import asyncio
from {module} import connect_{broker_world.name} as connect
from operations.calls import PendingRequestMap
async def main():
    async with connect({broker_world.url!r}, prefix={prefix!r}) as target:
        async with PendingRequestMap(target) as calls:
            async for envelope in calls.subscribe("count.forever", {{"path": {str(path)!r}, "pause": 0.05}}):
                print(envelope.data, flush=True)
asyncio.run(main())
"""
    async with broker_world.serve(registry):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", script), cwd=PROJECT, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        with time_limit(60):
            await process.stdout.readline()
        process.kill()
        await process.wait()
        await until(lambda: lines(path))


@pytest.mark.requirement("R12", "R32", "F23", "F24")
@pytest.mark.parametrize("operation", ["slow.sleep", "held.stubborn", "held.thread"])
async def test_f23_f24_a_handler_that_does_not_end_does_not_keep_its_caller(
    world: World, registry: OperationRegistry, operation: str
) -> None:
    release, ended = threading.Event(), list[str]()

    @registry.operation("held.stubborn")
    async def stubborn(seconds: float) -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        ended.append("stubborn")

    @registry.operation("held.thread", type="query")
    def thread(seconds: float) -> None:
        release.wait(seconds)
        ended.append("thread")

    async with calling(world, registry, grace=0.1) as calls:
        with time_limit(30), pytest.raises(CallError) as caught:
            await calls.call(operation, {"seconds": 3600}, timeout=0.5)
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        assert not ended
        # They must end before the test does.
        release.set()
        await until(lambda: ended or operation == "slow.sleep")

    assert caught.value.code == ErrorCode.TIMEOUT


@pytest.mark.requirement("F29")
@pytest.mark.parametrize("kind", ["group", "recursion", "memory", "exit", "base", "unserialisable"])
async def test_f29_every_exception_of_a_handler_is_one_error_and_the_worker_lives(
    world: World, registry: OperationRegistry, kind: str
) -> None:
    async with calling(world, registry) as calls:
        with pytest.raises(CallError) as caught:
            await calls.call("fail.system", {"kind": kind})
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3

    assert caught.value.code == ErrorCode.EXECUTION_ERROR


@pytest.mark.requirement("F29")
async def test_f29_an_exit_of_a_subscription_is_one_error(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry) as calls:
        items = calls.subscribe("count.exit")
        first = await anext(items)
        with pytest.raises(CallError) as caught:
            await anext(items)

    assert first.data == 0
    assert caught.value.code == ErrorCode.EXECUTION_ERROR


def _keep(task: "asyncio.Task[Any]", kept: list[Any]) -> None:
    kept.append(task)


def _keep_weakly(task: "asyncio.Task[Any]", kept: list[Any]) -> None:
    kept.append(weakref.ref(task))


def _cancel_later(task: "asyncio.Task[Any]", kept: list[Any]) -> None:
    asyncio.get_running_loop().call_later(0.05, task.cancel)


def _cancel_and_take_back(task: "asyncio.Task[Any]", kept: list[Any]) -> None:
    task.cancel()
    task.uncancel()


def _rename(task: "asyncio.Task[Any]", kept: list[Any]) -> None:
    task.set_name("renamed")


def _hang_on(task: "asyncio.Task[Any]", kept: list[Any]) -> None:
    task.add_done_callback(lambda _: kept.append("left"))


@pytest.mark.requirement("R32")
@pytest.mark.parametrize(
    "deed", [_keep, _keep_weakly, _cancel_later, _cancel_and_take_back, _rename, _hang_on]
)
async def test_r32_a_handler_that_cancels_its_task_affects_no_other_call(
    deed: Callable[["asyncio.Task[Any]", list[Any]], None],
) -> None:
    registry = OperationRegistry()
    kept: list[Any] = []
    names: list[str] = []

    @registry.operation("task.touch")
    async def touch() -> str:
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        deed(task, kept)
        return "touched"

    @registry.operation("task.wait")
    async def wait() -> list[Any]:
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        names.append(task.get_name())
        assert task not in kept
        assert task not in [item() for item in kept if isinstance(item, weakref.ref)]
        await asyncio.sleep(0.2)
        return [item for item in kept if item == "left"]

    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        # The first calls warm up the interpreter's caches, which may change the counts.
        for _ in range(30):
            await asyncio.gather(calls.call("task.touch", {}), return_exceptions=True)
        kept.clear()
        outcomes = await asyncio.gather(
            calls.call("task.touch", {}), calls.call("task.wait", {}), return_exceptions=True
        )
    touched: Any
    waited: Any
    touched, waited = outcomes

    assert getattr(touched, "data", touched) == "touched"
    assert getattr(waited, "data", waited) == (["left"] if deed is _hang_on else [])
    assert "renamed" not in names


@pytest.mark.requirement("R43", "F33")
async def test_r43_a_hundred_blocking_handlers_do_not_hold_up_the_loop(
    registry: OperationRegistry,
) -> None:
    release, target = threading.Event(), MemoryTarget()

    @registry.operation("held.thread", type="query")
    def thread() -> None:
        release.wait(3600)

    async with (
        serve_calls(registry, target, concurrency=200),
        PendingRequestMap(target) as calls,
    ):
        work = [asyncio.create_task(calls.call("held.thread", timeout=3600)) for _ in range(100)]
        with time_limit(60):
            for number in range(20):
                assert (await calls.call("math.add", {"a": number, "b": 1})).data == number + 1
        assert not any(task.done() for task in work)
        release.set()
        await asyncio.gather(*work)


@pytest.mark.requirement("F34")
def test_f34_a_map_used_from_another_event_loop_raises(registry: OperationRegistry) -> None:
    target = MemoryTarget()
    calls = PendingRequestMap(target)

    async def opened() -> None:
        await calls.open()

    async def used() -> str:
        with pytest.raises(CallError) as caught:
            await calls.call("math.add", {"a": 1, "b": 2})
        return caught.value.code

    first = asyncio.new_event_loop()
    first.run_until_complete(opened())
    assert asyncio.run(used()) == ErrorCode.UNAVAILABLE
    first.run_until_complete(calls.aclose())
    first.close()


@pytest.mark.requirement("F34")
@pytest.mark.slow
@pytest.mark.parametrize("ending", ["return", "sys.exit(0)", "raise SystemExit(0)"])
def test_f34_an_interpreter_exits_although_a_client_is_open(broker_world: Any, ending: str) -> None:
    script = f"""
import asyncio, sys
from operations.pubsub.{broker_world.name} import connect_{broker_world.name} as connect
from operations.calls import PendingRequestMap
async def main():
    manager = connect({broker_world.url!r})
    target = await manager.__aenter__()
    calls = PendingRequestMap(target)
    await calls.open()
    {ending}
asyncio.run(main())
"""
    finished = subprocess.run(
        [sys.executable, "-c", script],
        cwd=PROJECT,
        timeout=scaled(60),
        capture_output=True,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr


@pytest.mark.requirement("F34")
def test_f34_a_forked_child_does_not_repeat_its_parents_ids() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    new_request_id()
    child = context.Process(target=lambda: queue.put([new_request_id() for _ in range(10)]))
    child.start()
    theirs = queue.get(timeout=60)
    child.join(60)

    assert not set(theirs) & {new_request_id() for _ in range(600)}
