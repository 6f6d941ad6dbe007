"""Runs over brokers and WebSocket: workers with a store start and keep them for their callers."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.calls.waiting import caller, until
from tests.calls.worlds import World
from tests.limits import time_limit

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, serve_calls
from operations.contract.access import Identity
from operations.contract.context import OperationContext
from operations.contract.grant import Block, Grant
from operations.pubsub.memory import MemoryTarget
from operations.registry import OperationRegistry
from operations.runs import Runs, RunStatus


def shop(store: Runs | None) -> OperationRegistry:
    registry = OperationRegistry(runs=store)

    @registry.operation("math.double", type="query")
    async def double(number: int) -> int:
        return 2 * number

    @registry.operation("job.order", durable=True)
    async def order(number: int, context: OperationContext) -> Any:
        doubled = await context.call(double, number)
        paid = await context.wait_for("paid")
        return {"doubled": doubled, "paid": paid}

    @registry.operation("job.ask", durable=True)
    async def ask(context: OperationContext) -> Any:
        answer = await context.elicit("Go on?", {"type": "object", "properties": {}})
        return answer["action"]

    @registry.operation("job.fail", scopes=["fail"])
    async def fail() -> None:
        raise RuntimeError("password=hunter2")

    return registry


def resolve(credential: str) -> Identity | None:
    return Identity(credential, ["fail"]) if credential in {"ada", "bob"} else None


@asynccontextmanager
async def working(world: World, folder: Path) -> AsyncGenerator[PendingRequestMap]:
    """A worker with a store, and a caller."""
    async with (
        shop(Runs(f"sqlite:{folder / 'runs.db'}")) as registry,
        world.serve(registry, resolve=resolve, expose_errors=False),
        world.connect() as target,
        PendingRequestMap(target, credential="ada") as calls,
    ):
        yield calls


@pytest.mark.requirement("R70", "R73")
async def test_a_run_is_started_once_for_its_key_and_followed_to_its_end(
    world: World, tmp_path: Path
) -> None:
    async with working(world, tmp_path) as calls:
        with time_limit(30):
            run = await calls.start("job.order", {"number": 4}, key="order 1")
            again = await calls.start("job.order", {"number": 4}, key="order 1")
            with pytest.raises(CallError) as conflict:
                await calls.start("job.order", {"number": 5}, key="order 1")
            watching = asyncio.create_task(seen(run))
            await (await calls.run(run.id)).signal("paid", 12)
            envelope = await run.result()
            statuses = await watching
            page = await calls.runs(status="completed")
            stream = calls.subscribe("run.watch", {"run": run.id})
            last = [each.data["status"] async for each in stream]

    assert again.id == run.id
    assert conflict.value.code == ErrorCode.VALIDATION_ERROR
    assert envelope.data == {"doubled": 8, "paid": 12}
    assert statuses[-1] == RunStatus.COMPLETED
    assert [each.id for each in page.runs] == [run.id]
    assert last == ["completed"]


async def seen(run: Any) -> list[str]:
    return [state.status async for state in run.watch()]


async def test_a_question_of_a_run_is_answered_and_a_run_is_cancelled(
    world: World, tmp_path: Path
) -> None:
    async with working(world, tmp_path) as calls:
        with time_limit(30):
            run, other = [await calls.start("job.ask") for _ in range(2)]
            while not run.state.waiting:
                await run.refresh()
            (question,) = run.state.waiting
            assert not await run.answer("unknown", {"action": "accept", "content": {}})
            assert await run.answer(question.key, {"action": "accept", "content": {}})
            assert (await run.result()).data == "accept"
            await other.cancel()
            with pytest.raises(CallError) as cancelled:
                await other.result()

    assert cancelled.value.code == ErrorCode.ABORTED
    assert other.status == RunStatus.CANCELLED


@pytest.mark.requirement("R11", "R17")
async def test_runs_of_others_do_not_exist_and_their_failures_reveal_nothing(
    world: World, tmp_path: Path
) -> None:
    async with working(world, tmp_path) as calls:
        with time_limit(30):
            run = await calls.start("job.fail")
            with pytest.raises(CallError) as failed:
                await run.result()
            async with (
                world.connect() as target,
                PendingRequestMap(target, credential="bob") as bob,
            ):
                errors = []
                for run_id in (run.id, "0" * 32):
                    with pytest.raises(CallError) as unseen:
                        await bob.run(run_id)
                    errors.append((unseen.value.code, str(unseen.value).replace(run_id, "")))
                page = await bob.runs()

    assert failed.value.code == ErrorCode.EXECUTION_ERROR
    assert "hunter2" not in str(failed.value)
    assert errors[0] == errors[1]
    assert errors[0][0] == ErrorCode.RUN_NOT_FOUND
    assert page.runs == []


async def test_an_agent_starts_what_its_grant_covers_and_follows_its_own_runs(
    world: World, tmp_path: Path
) -> None:
    def agent(credential: str) -> Identity | None:
        if credential == "ada":
            return resolve(credential)
        block = Block(id=credential, holder="bot", operations=("job.*",), calls={"job.ask": 1})
        grant = Grant(blocks=(block,), keys=(f"key of {credential}",))
        return Identity("ada", acting=("bot",), grant=grant)

    async with (
        shop(Runs(f"sqlite:{tmp_path / 'runs.db'}")) as registry,
        world.serve(registry, resolve=agent),
        world.connect() as target,
        PendingRequestMap(target, credential="bot") as bot,
        PendingRequestMap(target, credential="another bot") as other,
        PendingRequestMap(target, credential="ada") as person,
    ):
        with time_limit(30):
            run = await bot.start("job.ask")
            with pytest.raises(CallError) as denied:
                await bot.start("math.double", {"number": 1})
            with pytest.raises(CallError) as unseen:
                await other.run(run.id)
            while not run.state.waiting:
                await run.refresh()
            (question,) = run.state.waiting
            await (await person.run(run.id)).answer(question.key, {"action": "decline"})
            envelope = await run.result()
            with pytest.raises(CallError) as spent:
                await (await bot.start("job.ask")).result()

    assert envelope.data == "decline"
    assert denied.value.code == ErrorCode.ACCESS_DENIED
    assert unseen.value.code == ErrorCode.RUN_NOT_FOUND
    assert spent.value.code == ErrorCode.RESOURCE_EXHAUSTED


async def test_workers_without_a_store_have_no_runs(world: World) -> None:
    async with world.serve(shop(None)), caller(world) as calls:
        with time_limit(30), pytest.raises(CallError) as missing:
            await calls.start("job.ask")

    assert missing.value.code == ErrorCode.OPERATION_NOT_FOUND


@pytest.mark.requirement("F1", "R70")
async def test_a_caller_waits_for_its_run_while_workers_change(
    broker_world: World, tmp_path: Path
) -> None:
    """The worker that started the run stops; another one with the same store has continued it."""
    url = f"sqlite:{tmp_path / 'runs.db'}"
    async with (
        broker_world.connect() as target,
        PendingRequestMap(target, credential="ada") as calls,
    ):
        async with shop(Runs(url)) as old, broker_world.serve(old, resolve=resolve):
            run = await calls.start("job.order", {"number": 4})
            waiting = asyncio.create_task(run.result())
            await until(lambda: len(calls) > 0)
        async with shop(Runs(url)) as new, broker_world.serve(new, resolve=resolve):
            with time_limit(60):
                handle = await calls.run(run.id)
                await handle.signal("paid", 7)
                envelope = await waiting

    assert envelope.data == {"doubled": 8, "paid": 7}


@pytest.mark.requirement("R73")
@pytest.mark.parametrize("key", ["order 1", None])
async def test_only_a_start_with_a_key_is_sent_again(key: str | None) -> None:
    starts = 0
    registry = OperationRegistry()

    @registry.operation("run.start")
    async def start(id: str, input: Any, secrets: bool, key: str | None = None) -> Any:
        nonlocal starts
        starts += 1
        if starts == 1:
            raise CallError(ErrorCode.UNAVAILABLE, "the worker was lost", retryable=False)
        return {
            "id": "1" * 32,
            "operation": id,
            "status": "queued",
            "created": 0,
            "updated": 0,
            "attempt": 0,
        }

    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        if key is None:
            with pytest.raises(CallError, match="lost"):
                await calls.start("job.order")
        else:
            assert (await calls.start("job.order", key=key)).id == "1" * 32

    assert starts == (1 if key is None else 2)
