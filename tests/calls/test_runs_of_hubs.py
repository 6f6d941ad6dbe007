"""Runs of a hub whose steps are calls of workers: a deploy of either interrupts none."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.calls.operations_under_test import note
from tests.calls.waiting import lines, until
from tests.calls.worlds import BrokerWorld, World
from tests.limits import time_limit
from tests.runs.shop import LEASE, start_process

from operations.calls import from_calls, serve_calls
from operations.contract.context import OperationContext
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.nats import connect_nats
from operations.pubsub.redis import connect_redis
from operations.registry import OperationRegistry
from operations.runs import Runs

OPERATOR = OperationContext(trusted=True)
CONNECT: dict[str, Callable[..., Any]] = {"redis": connect_redis, "nats": connect_nats}


class Latch:
    """What the handlers of all workers wait for, and what they have done."""

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger
        self.is_open = asyncio.Event()

    def worker(self, name: str) -> OperationRegistry:
        """The operations of a worker, which has no store."""
        registry = OperationRegistry()

        @registry.operation("shop.charge")
        async def charge(amount: int, context: OperationContext) -> str | None:
            note(str(self.ledger), f"charge {amount}")
            return context.key

        @registry.operation("shop.capture", keyed=True)
        async def capture(amount: int, context: OperationContext) -> str | None:
            note(str(self.ledger), f"capture {context.key}")
            await self.is_open.wait()
            return context.key

        @registry.operation("shop.render", type="query")
        async def render(pages: int, context: OperationContext) -> list[str | None]:
            note(str(self.ledger), f"render {name}")
            await self.is_open.wait()
            return [name, context.key]

        return registry


@asynccontextmanager
async def hub(world: World, folder: Path, grace: float = 5) -> AsyncGenerator[OperationRegistry]:
    """A hub that imports the operations of the workers, and keeps runs."""
    store = Runs(f"sqlite:{folder / 'runs.db'}", grace=grace)
    registry = OperationRegistry(runs=store)

    @registry.operation("job.order", durable=True, calls=["shop.*"])
    async def order(amount: int, context: OperationContext) -> list[object]:
        charged = await context.env.shop.charge({"amount": amount})
        rendered = await context.env.shop.render({"pages": 3})
        return [charged.data, rendered.data]

    async with world.connect() as target, from_calls(target) as service:
        registry.register_all(service)
        async with registry:
            yield registry


@pytest.mark.requirement("R38", "R70", "F25")
async def test_a_run_continues_on_another_worker_when_its_worker_stops(
    broker_world: World, tmp_path: Path
) -> None:
    latch = Latch(tmp_path / "ledger")
    async with AsyncExitStack() as stack:
        old = AsyncExitStack()
        # Shorter than the call, as 10 seconds are for a job of 14.
        await old.enter_async_context(broker_world.serve(latch.worker("old"), grace=0.1))
        registry = await stack.enter_async_context(hub(broker_world, tmp_path))
        run = await registry.start("job.order", {"amount": 5}, OPERATOR)
        await until(lambda: "render old" in lines(latch.ledger))
        await stack.enter_async_context(broker_world.serve(latch.worker("new")))
        await old.aclose()
        await until(lambda: "render new" in lines(latch.ledger))
        latch.is_open.set()
        with time_limit(30):
            (charged, (name, rendered)) = (await run.result()).data

    assert name == "new"
    assert lines(latch.ledger) == ["charge 5", "render old", "render new"]
    assert charged.startswith(f"{run.id}:shop.charge#")
    assert rendered.startswith(f"{run.id}:shop.render#")


@pytest.mark.requirement("R38", "R70", "R71")
async def test_a_run_continues_in_another_hub_when_its_hub_stops(
    broker_world: World, tmp_path: Path
) -> None:
    latch = Latch(tmp_path / "ledger")
    async with broker_world.serve(latch.worker("one")):
        async with hub(broker_world, tmp_path, grace=0.1) as registry:
            run = await registry.start("job.order", {"amount": 5}, OPERATOR)
            await until(lambda: "render one" in lines(latch.ledger))
        async with hub(broker_world, tmp_path) as registry:
            await until(lambda: lines(latch.ledger).count("render one") == 2)
            latch.is_open.set()
            with time_limit(30):
                result = (await (await registry.run(run.id, OPERATOR)).result()).data

    # The charge is recorded, and its key is the same in both attempts.
    assert lines(latch.ledger) == ["charge 5", "render one", "render one"]
    assert result[0].startswith(f"{run.id}:shop.charge#")


async def test_only_steps_have_keys() -> None:
    keys: list[str | None] = []
    registry = OperationRegistry()

    @registry.operation("task.inner")
    async def inner(context: OperationContext) -> None:
        keys.append(context.key)

    @registry.operation("task.outer")
    async def outer(context: OperationContext) -> None:
        keys.append(context.key)
        await context.call(inner)

    target = MemoryTarget()
    hub_registry = OperationRegistry()
    async with serve_calls(registry, target), from_calls(target) as service:
        hub_registry.register_all(service)
        await hub_registry.execute("task.outer", {}, OPERATOR)

    assert keys == [None, None]


async def capture_in_a_run(folder: Path, name: str, url: str, prefix: str) -> None:
    """A hub that starts a run whose step is a call of a worker."""
    store = Runs(f"sqlite:{folder / 'runs.db'}", lease=LEASE)
    registry = OperationRegistry(runs=store)

    @registry.operation("job.capture", durable=True)
    async def capture(context: OperationContext) -> object:
        return (await context.env.shop.capture({"amount": 5})).data

    world = BrokerWorld(name, url, CONNECT[name])
    world.prefix = prefix
    async with world.connect() as target, from_calls(target) as service:
        registry.register_all(service)
        async with registry:
            run = await registry.start("job.capture", {}, OPERATOR, key="one")
            (folder / "result").write_text(f"{(await run.result()).data}")


@pytest.mark.requirement("R71")
@pytest.mark.timeout(120)
async def test_a_call_with_a_key_is_made_again_when_its_hub_was_killed(
    broker_world: BrokerWorld, tmp_path: Path
) -> None:
    latch = Latch(tmp_path / "ledger")
    given = (broker_world.name, broker_world.url, broker_world.prefix)
    async with broker_world.serve(latch.worker("one")):
        killed = start_process(capture_in_a_run, tmp_path, *given)
        await until(lambda: len(lines(latch.ledger)) == 1)
        killed.kill()
        await asyncio.to_thread(killed.wait)
        latch.is_open.set()
        second = start_process(capture_in_a_run, tmp_path, *given)
        await until(lambda: (tmp_path / "result").exists() and (tmp_path / "result").read_text())
        second.kill()
        await asyncio.to_thread(second.wait)

    made = lines(latch.ledger)
    assert len(made) == 2
    assert made[0] == made[1] == f"capture {(tmp_path / 'result').read_text()}"
