"""Callers that lose their connection to the broker while a worker runs their call."""

import asyncio
from pathlib import Path

import pytest
from tests.calls.operations_under_test import note
from tests.calls.waiting import lines, until
from tests.calls.worlds import BrokerWorld, cuttable
from tests.limits import time_limit

from operations.calls import PendingRequestMap
from operations.registry import OperationRegistry


def working(ledger: Path) -> OperationRegistry:
    registry = OperationRegistry()

    async def work(number: int, seconds: float) -> int:
        note(str(ledger), f"began {number}")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            note(str(ledger), f"cancelled {number}")
            raise
        note(str(ledger), f"finished {number}")
        return number

    registry.operation("work.write")(work)
    registry.operation("work.read", type="query")(work)
    return registry


@pytest.mark.requirement("F22")
async def test_a_mutation_survives_a_short_outage_of_its_caller(
    broker_world: BrokerWorld, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    async with (
        broker_world.serve(working(ledger)),
        cuttable(broker_world) as (target, through),
        PendingRequestMap(target, heartbeat=0.2) as calls,
    ):
        writing = asyncio.create_task(
            calls.call("work.write", {"number": 1, "seconds": 1.1}, replayable=False)
        )
        await until(lambda: lines(ledger))
        await through.refuse()
        # Longer than a worker needs to notice that the caller has left.
        await asyncio.sleep(0.8)
        await through.accept()
        with time_limit(30):
            assert (await writing).data == 1

    assert lines(ledger) == ["began 1", "finished 1"]


@pytest.mark.requirement("F22", "R31")
async def test_calls_of_a_caller_that_stays_unavailable_are_cancelled(
    broker_world: BrokerWorld, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    async with (
        broker_world.serve(working(ledger), patience=3),
        cuttable(broker_world) as (target, through),
        PendingRequestMap(target) as calls,
    ):
        pending = [
            asyncio.create_task(calls.call(operation, {"number": number, "seconds": 30}))
            for number, operation in enumerate(("work.write", "work.read"))
        ]
        await until(lambda: len(lines(ledger)) == 2)
        loop = asyncio.get_running_loop()
        cut_at = loop.time()
        await through.refuse()
        await until(lambda: "cancelled 1" in lines(ledger))
        assert "cancelled 0" not in lines(ledger)
        await until(lambda: "cancelled 0" in lines(ledger))
        assert loop.time() - cut_at >= 3
        for call in pending:
            call.cancel()
        await asyncio.wait(pending)
