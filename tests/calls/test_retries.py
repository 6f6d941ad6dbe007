"""A retry policy of the tool table repeats calls of workers, and never runs a mutation twice."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.calls.operations_under_test import note
from tests.calls.test_deploys import release
from tests.calls.waiting import lines, until
from tests.calls.worlds import World
from tests.limits import time_limit

from operations.base.errors import CallError, ErrorCode
from operations.calls import from_calls
from operations.contract.context import OperationContext
from operations.registry import OperationRegistry
from operations.tools import RetryPolicy, ToolConfig, configure_tools

PATIENT = RetryPolicy(attempts=1000, first_pause=0.05, last_pause=0.05, budget=1000)


@pytest.mark.requirement("R36")
async def test_a_mutation_waits_for_a_worker_and_runs_once(
    broker_world: World, tmp_path: Path
) -> None:
    hub, ledger = OperationRegistry(), tmp_path / "ledger"
    configure_tools(hub, {"shop.pay": ToolConfig(retry=PATIENT)})
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(broker_world.connect())
        async with broker_world.serve(release(ledger, "shop.pay")):
            hub.register_all(await stack.enter_async_context(from_calls(target)))
        counters, stop = hub.count_calls()
        stack.callback(stop)
        paying = asyncio.create_task(hub.execute("shop.pay", {"number": 1}, timeout=60))
        with time_limit(40):
            await until(lambda: counters.of("shop.pay").retries > 1)
            assert lines(ledger) == []
            async with broker_world.serve(release(ledger, "shop.pay")):
                assert (await paying).data == 1

    assert lines(ledger) == ["shop.pay 1"]


@pytest.mark.requirement("R36")
async def test_a_handler_is_not_repeated_because_a_call_of_it_was_not_begun(
    broker_world: World, tmp_path: Path
) -> None:
    hub, ledger = OperationRegistry(), tmp_path / "ledger"
    configure_tools(hub, {"order.*": ToolConfig(retry=3)})

    @hub.operation("order.place")
    async def place(context: OperationContext) -> None:
        note(str(ledger), "placed")
        await context.env.shop.pay({"number": 1})

    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(broker_world.connect())
        async with broker_world.serve(release(ledger, "shop.pay")):
            hub.register_all(await stack.enter_async_context(from_calls(target)))
        with time_limit(30), pytest.raises(CallError) as caught:
            await hub.execute("order.place")

    assert (caught.value.code, caught.value.begun) == (ErrorCode.UNAVAILABLE, False)
    assert lines(ledger) == ["placed"]
