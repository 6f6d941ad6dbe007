"""Several threads, each with its own event loop, share a registry and its store."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from tests.authority.test_approvals import REQUIRED, Office, agent
from tests.limits import time_limit

from operations import CallError, ErrorCode, OperationContext, OperationRegistry
from operations.authority import Authority, SQLiteValues, Store

THREADS, CALLS = 4, 25


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store() if request.param == "memory" else Store(SQLiteValues(tmp_path / "authority.db"))


def in_threads(call: Any) -> list[Any]:
    """Make many calls in several threads at the same time, and return their results."""
    start = Barrier(THREADS)

    async def calls() -> list[Any]:
        start.wait()
        return list(await asyncio.gather(*(call() for _ in range(CALLS))))

    with ThreadPoolExecutor(THREADS) as threads:
        runs = [threads.submit(lambda: asyncio.run(calls())) for _ in range(THREADS)]
        return [each for run in runs for each in run.result()]


@pytest.mark.anyio
async def test_a_waiting_call_runs_when_it_is_approved_in_another_thread(store: Store) -> None:
    # Only an announcement wakes the call.
    store.poll_seconds = inf
    office = Office(store, hold=30)
    call = asyncio.create_task(office.call())
    while not await office.pending():
        await asyncio.sleep(0)

    with time_limit(20):
        answer = await asyncio.to_thread(lambda: asyncio.run(office.answer()))
        assert (answer, await call) == ("approved", "deleted")


def test_threads_use_an_approval_once(store: Store) -> None:
    office = Office(store, hold=0)
    assert set(in_threads(office.call)) == {REQUIRED}
    assert asyncio.run(office.answer()) == "approved"
    found = in_threads(office.call)

    assert (found.count("deleted"), found.count(REQUIRED)) == (1, THREADS * CALLS - 1)
    assert len(office.ran) == 1


def test_threads_share_a_budget(store: Store) -> None:
    registry = OperationRegistry(authority=Authority(store))

    @registry.operation("task.add", scopes=["task"])
    async def add() -> str:
        return "added"

    bot = OperationContext(identity=asyncio.run(agent(calls={"task.*": 10})))

    async def call() -> Any:
        try:
            return (await registry.execute("task.add", {}, bot)).data
        except CallError as error:
            return error.code

    found = in_threads(call)

    assert found.count("added") == 10
    assert found.count(ErrorCode.RESOURCE_EXHAUSTED) == THREADS * CALLS - 10
