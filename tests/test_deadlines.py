"""Deadlines of calls: one timer for many, and what ends the wait."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from tests.clocks import MovableLoop as Loop
from tests.support import single, soon

from operations import CallError, ErrorCode, OperationContext, OperationRegistry, OperationType


def run(work: Callable[[Loop], Any], loop: Loop | None = None) -> Any:
    if loop is not None:
        return loop.run_until_complete(work(loop))
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(work(runner.get_loop()))  # type: ignore[arg-type]


async def echo(input: Any, _context: OperationContext) -> Any:
    return input


async def forever(_input: Any, _context: OperationContext) -> None:
    await asyncio.Event().wait()


async def code_of(call: Any) -> str:
    with pytest.raises(CallError) as caught:
        await call
    return caught.value.code


def test_calls_with_deadlines_share_one_timer() -> None:
    registry = single(echo)

    async def work(loop: Loop) -> int:
        await registry.execute("test.run", 0, soon(60_000))
        before = loop.timers
        for index in range(100):
            await registry.execute("test.run", index, soon(60_000 + index))
        await asyncio.gather(
            *(registry.execute("test.run", index, soon(90_000 - index)) for index in range(100))
        )
        return loop.timers - before

    assert run(work) == 0


def test_a_later_call_with_an_earlier_deadline_ends_first() -> None:
    registry = single(forever)
    ended: list[str] = []

    async def call(name: str, milliseconds: float) -> None:
        assert await code_of(registry.execute("test.run", None, soon(milliseconds))) == "TIMEOUT"
        ended.append(name)

    async def work(_: Loop) -> None:
        await asyncio.gather(call("last", 900), call("first", 100), call("second", 500))

    run(work)
    assert ended == ["first", "second", "last"]


def test_a_result_in_the_iteration_of_the_deadline_is_returned() -> None:
    gate = asyncio.Event()

    async def handler(_input: Any, _context: OperationContext) -> str:
        await gate.wait()
        return "in time"

    registry = single(handler)

    async def work(loop: Loop) -> Any:
        call = asyncio.create_task(registry.execute("test.run", None, soon(60_000)))
        for _ in range(3):
            await asyncio.sleep(0)
        loop.ahead = 120
        gate.set()
        return (await call).data

    assert run(work) == "in time"


@pytest.mark.parametrize("iterations", range(6))
def test_a_caller_that_is_cancelled_at_any_step_of_the_call_is_cancelled(iterations: int) -> None:
    ended: list[str] = []

    async def handler(_input: Any, _context: OperationContext) -> str:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append("handler")
        return "done"

    registry = single(handler)

    async def work(_: Loop) -> None:
        call = asyncio.create_task(registry.execute("test.run", None, soon(60_000)))
        for _step in range(iterations):
            await asyncio.sleep(0)
        was_done = not call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert call.cancelled() is not was_done
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(work)
    assert ended == ([] if iterations == 0 else ["handler"])


def test_a_cancelled_caller_does_not_wait_for_a_handler_that_ignores_it() -> None:
    release = asyncio.Event()

    async def stubborn(_input: Any, _context: OperationContext) -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "too late"

    registry = single(stubborn)

    async def work(_: Loop) -> None:
        call = asyncio.create_task(registry.execute("test.run", None, soon(60_000)))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not release.is_set()
        release.set()
        await registry.aclose()

    run(work)


def test_a_cancelled_handler_may_finish_its_cleanup_first() -> None:
    order: list[str] = []

    async def handler(_input: Any, _context: OperationContext) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("cleanup")

    registry = single(handler)

    async def work(_: Loop) -> None:
        assert await code_of(registry.execute("test.run", None, soon(50))) == ErrorCode.TIMEOUT
        order.append("caller")

    run(work)
    assert order == ["cleanup", "caller"]


def test_a_nested_deadline_ends_the_nested_call_only() -> None:
    async def handler(input: Any, context: OperationContext) -> Any:
        if input == "inner":
            await asyncio.Event().wait()
        inner = context.registry.execute("test.run", "inner", soon(50))  # type: ignore[union-attr]
        return await code_of(inner)

    registry = single(handler)

    async def work(_: Loop) -> Any:
        return (await registry.execute("test.run", None, soon(60_000))).data

    assert run(work) == ErrorCode.TIMEOUT


def test_a_deadline_that_both_share_is_reported_by_the_outer_call() -> None:
    seen: list[str] = []

    async def handler(input: Any, context: OperationContext) -> Any:
        if input == "inner":
            await asyncio.Event().wait()
        try:
            await context.env.test.run("inner")
        except BaseException as error:
            seen.append(type(error).__name__)
            raise

    registry = single(handler)

    async def work(_: Loop) -> str:
        return await code_of(registry.execute("test.run", None, soon(50)))

    assert run(work) == ErrorCode.TIMEOUT
    assert seen == ["CancelledError"]


def test_a_call_that_is_never_awaited_starts_nothing() -> None:
    registry = single(echo)

    async def work(_: Loop) -> None:
        registry.execute("test.run", None, soon(60_000)).close()
        await registry.execute("test.run", None, soon(60_000))
        registry.execute("test.run", None, soon(60_000)).close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(work)


def test_deadlines_hold_on_loops_that_take_turns_in_a_thread() -> None:
    registry = single(forever)
    loops = [Loop(), Loop()]

    async def begin(loop: Loop) -> Any:
        call = asyncio.create_task(code_of(registry.execute("test.run", None, soon(60_000))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return call

    pending = [run(begin, loop) for loop in (*loops, *loops)]
    codes = []
    for index, call in enumerate(pending):
        loops[index % 2].ahead = 120
        codes.append(loops[index % 2].run_until_complete(call))
    for loop in loops:
        loop.close()
    assert codes == [ErrorCode.TIMEOUT] * 4


def test_a_loop_that_closes_with_open_calls_does_not_affect_the_next_one() -> None:
    registry = single(forever)
    for _ in range(3):

        async def work(_: Loop) -> Any:
            opened = asyncio.create_task(registry.execute("test.run", None, soon(60_000)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            code = await code_of(registry.execute("test.run", None, soon(50)))
            # Not awaited: the loop cancels it when it closes.
            return code, opened

        code, opened = run(work)
        assert code == ErrorCode.TIMEOUT
        assert opened.cancelled()


def test_a_stream_whose_handler_cancels_its_own_task_ends_at_once() -> None:
    async def handler(_input: Any, _context: OperationContext) -> AsyncGenerator[int, None]:
        yield 1
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(0)
        yield 2

    registry = single(handler, type=OperationType.SUBSCRIPTION)

    async def work(_: Loop) -> Any:
        stream = registry.subscribe("test.run", None, soon(60_000))
        first = (await anext(stream)).data
        return first, await code_of(anext(stream))

    assert run(work) == (1, ErrorCode.ABORTED)


def test_items_of_a_stream_share_the_timer() -> None:
    async def handler(_input: Any, _context: OperationContext) -> AsyncGenerator[int, None]:
        for index in range(100):
            yield index

    registry = single(handler, type=OperationType.SUBSCRIPTION)

    async def work(loop: Loop) -> int:
        return len([each async for each in registry.subscribe("test.run", None, soon(60_000))])

    loop = Loop()
    assert run(work, loop) == 100
    # One for the deadline, and one for closing the stream.
    assert loop.timers <= 2
    loop.close()


def test_an_operations_own_time_limit_ends_a_call_without_a_deadline() -> None:
    registry = OperationRegistry()

    @registry.operation("test.slow", type="query", timeout=0.05)
    async def slow() -> None:
        await asyncio.Event().wait()

    async def work(_: Loop) -> str:
        return await code_of(registry.execute("test.slow", {}))

    assert run(work) == ErrorCode.TIMEOUT
