"""Fault F36: the only worker is killed, and another one starts soon."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import pytest
from tests.calls.processes import worker_process
from tests.calls.waiting import caller, lines, started, until
from tests.calls.worlds import World

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, from_calls
from operations.calls.protocol.replayability import ReplayableOperations, encode_list
from operations.contract.envelopes import ResponseEnvelope
from operations.registry import OperationRegistry

Call: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[ResponseEnvelope[Any]]]


@asynccontextmanager
async def importer(world: World) -> AsyncGenerator[Call]:
    """A registry with the operations of the worker."""
    registry = OperationRegistry()
    async with world.connect() as target, from_calls(target) as service:
        registry.register_all(service)
        yield registry.execute


@asynccontextmanager
async def acquainted(world: World) -> AsyncGenerator[PendingRequestMap]:
    """A caller that has the list of the worker."""
    async with caller(world) as calls:
        assert (await calls.call("math.add", {"a": 1, "b": 1})).data == 2
        await until(lambda: calls._workers.is_replayable("math.add", None))
        yield calls


@asynccontextmanager
async def client(world: World) -> AsyncGenerator[Call]:
    """A caller that knows only the ids of operations."""
    async with acquainted(world) as calls:
        yield calls.call


@pytest.mark.slow
@pytest.mark.requirement("F36", "R36")
@pytest.mark.parametrize("absence", [0.2, 2, 5])
@pytest.mark.parametrize("connect", [client, importer])
async def test_f36_only_mutations_fail_when_the_only_worker_is_killed_and_returns(
    restarted_world: World,
    tmp_path: Path,
    absence: float,
    connect: Callable[[World], Any],
) -> None:
    read, saved, wrote = (tmp_path / name for name in ("read", "saved", "wrote"))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        victim = await enter(worker_process(restarted_world))
        call = await enter(connect(restarted_world))
        running = [
            asyncio.ensure_future(call(name, {"seconds": 1, "path": str(path)}))
            for name, path in (
                ("slow.sleep", read),
                ("slow.save", saved),
                ("slow.write", wrote),
            )
        ]
        await until(lambda: all(map(started, (read, saved, wrote))))
        victim.kill()
        await victim.wait()
        await asyncio.sleep(absence)
        await enter(worker_process(restarted_world))
        with anyio.fail_after(60):
            query, save, write = await asyncio.gather(*running, return_exceptions=True)

    assert isinstance(query, ResponseEnvelope), query
    assert isinstance(save, ResponseEnvelope), save
    assert (query.data, save.data) == ("slept", "saved")
    assert isinstance(write, CallError)
    assert (write.code, write.retryable) == (ErrorCode.UNAVAILABLE, False)
    assert (len(started(read)), len(started(saved)), len(started(wrote))) == (2, 2, 1)
    assert "finished" not in lines(wrote)


@pytest.mark.slow
@pytest.mark.requirement("F36")
async def test_f36_a_query_whose_worker_does_not_return_ends_at_its_deadline_and_is_retryable(
    restarted_world: World, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with worker_process(restarted_world) as victim, acquainted(restarted_world) as calls:
        value = {"seconds": 60, "path": str(path)}
        call = asyncio.create_task(calls.call("slow.sleep", value, timeout=5))
        await until(lambda: started(path))
        victim.kill()
        with anyio.fail_after(60), pytest.raises(CallError) as caught:
            await call

    assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert caught.value.begun is None


@pytest.mark.slow
@pytest.mark.requirement("F36")
async def test_f36_queries_that_are_made_while_the_only_worker_is_gone_wait_for_its_return(
    restarted_world: World,
) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        victim = await enter(worker_process(restarted_world))
        calls = await enter(acquainted(restarted_world))
        victim.kill()
        await victim.wait()
        made = [
            asyncio.create_task(calls.call("math.add", {"a": number, "b": 1}))
            for number in range(20)
        ]
        await asyncio.sleep(3)
        await enter(worker_process(restarted_world))
        with anyio.fail_after(60):
            sums = [(await each).data for each in made]

    assert sums == list(range(1, 21))


@pytest.mark.requirement("F36")
async def test_f36_a_list_contains_the_given_operations_only() -> None:
    listed = ReplayableOperations(encode_list(["task.read", "task.list"]))

    assert "task.read" in listed
    assert "task.list" in listed
    assert "task.delete" not in listed
    assert len(listed) == 2
