import asyncio
import contextvars
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from tests.limits import scaled, time_limit

from operations import CallError, ErrorCode
from operations.base import threads
from operations.base.threads import ThreadPool


async def test_a_function_runs_elsewhere_with_this_tasks_context() -> None:
    variable = contextvars.ContextVar("variable", default="outside")
    variable.set("inside")

    thread, value = await ThreadPool().run(lambda: (threading.current_thread(), variable.get()))

    assert thread is not threading.current_thread()
    assert thread.daemon
    assert value == "inside"


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("y"), SystemExit(3)])
async def test_exceptions_of_a_function_are_raised_in_the_caller(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        await ThreadPool().run(fail)


async def test_stop_iteration_becomes_an_error_a_future_can_carry() -> None:
    def stop() -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        await ThreadPool().run(stop)


@pytest.mark.requirement("R43")
async def test_no_more_than_the_limit_run_at_a_time() -> None:
    pool, running, most = ThreadPool(3), 0, 0
    lock, three = threading.Lock(), threading.Barrier(3)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait(60)
        time.sleep(0.005)
        with lock:
            running -= 1

    await asyncio.gather(*(pool.run(work) for _ in range(21)))

    assert most == 3


@pytest.mark.requirement("R43")
async def test_the_loop_stays_free_while_a_hundred_handlers_block() -> None:
    """F33, for threads."""
    pool, release = ThreadPool(100), threading.Event()
    inside = threading.Barrier(101)

    def block() -> bool:
        inside.wait()
        return release.wait(600)

    work = [asyncio.create_task(pool.run(block)) for _ in range(100)]
    with time_limit(60):
        await asyncio.to_thread(inside.wait)
        for _ in range(20):
            await asyncio.sleep(0.005)
    ended_early = [task for task in work if task.done()]

    release.set()

    assert not ended_early
    assert all(await asyncio.gather(*work))


async def test_a_thread_is_used_again() -> None:
    pool = ThreadPool()

    first = await pool.run(threading.current_thread)

    assert await pool.run(threading.current_thread) is first


async def test_an_idle_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_IDLE_SECONDS", 0.01)
    pool = ThreadPool()

    thread = await pool.run(threading.current_thread)
    thread.join(scaled(30))

    assert not thread.is_alive()
    assert await pool.run(threading.current_thread) is not thread


async def test_closing_lets_idle_threads_end() -> None:
    pool = ThreadPool()
    thread = await pool.run(threading.current_thread)

    pool.close()
    thread.join(scaled(30))

    assert not thread.is_alive()


async def test_abandoned_threads_release_their_slots_but_are_bounded() -> None:
    """F23."""
    pool, release, left = ThreadPool(2), threading.Event(), []

    async def abandon() -> None:
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stuck() -> None:
            loop.call_soon_threadsafe(started.set)
            release.wait(60)

        task = asyncio.create_task(pool.run(stuck, on_abandon=lambda: left.append(1)))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await abandon()
    assert await pool.run(lambda: "others go on") == "others go on"
    await abandon()

    with pytest.raises(CallError) as caught:
        await pool.run(lambda: None)
    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert (pool.abandoned, len(left)) == (2, 2)
    release.set()
    while pool.abandoned:
        await asyncio.sleep(0.001)
    assert await pool.run(lambda: "again") == "again"


def test_a_thread_that_outlives_its_loop_is_harmless() -> None:
    """F34."""
    pool, release = ThreadPool(), threading.Event()
    inside: list[threading.Thread] = []

    def stuck() -> None:
        inside.append(threading.current_thread())
        release.wait(60)

    async def leave() -> None:
        task: asyncio.Task[Any] = asyncio.create_task(pool.run(stuck))
        while not inside:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(leave())
    assert pool.abandoned == 1
    release.set()
    deadline = time.monotonic() + scaled(30)
    while pool.abandoned and time.monotonic() < deadline:
        time.sleep(0.001)

    assert pool.abandoned == 0


def test_a_pool_serves_one_loop_after_another() -> None:
    """F34."""
    pool = ThreadPool(1)

    async def crowd() -> list[Any]:
        results: list[Any] = await asyncio.gather(*(pool.run(lambda: 1) for _ in range(3)))
        return results

    assert asyncio.run(crowd()) == [1, 1, 1]
    assert asyncio.run(crowd()) == [1, 1, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_starts_its_own_threads() -> None:
    code = """
import asyncio, os
from operations.base.threads import ThreadPool
pool = ThreadPool()
run = lambda: asyncio.run(asyncio.wait_for(pool.run(lambda: 0), 20))
run()
child = os.fork()
if not child:
    os._exit(run())
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], timeout=scaled(100), check=False
    )

    assert done.returncode == 0
