"""Fault F37: requests that kill their worker, beside innocent ones."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.calls.processes import worker_processes
from tests.calls.waiting import caller, lines, started
from tests.calls.worlds import World
from tests.limits import time_limit

from operations.base.errors import CallError, ErrorCode
from operations.contract.envelopes import ResponseEnvelope

POISON, INNOCENT = 5, 20


@pytest.mark.slow
@pytest.mark.requirement("F37", "R49")
@pytest.mark.parametrize(("workers", "callers"), [(1, 1), (3, 2)])
async def test_f37_innocent_requests_are_answered_beside_requests_that_kill_their_worker(
    restarted_world: World, tmp_path: Path, workers: int, callers: int
) -> None:
    if restarted_world.name == "websocket" and workers > 1:
        pytest.skip("a WebSocket has one worker")
    crashes, sleeps = tmp_path / "crashes", tmp_path / "sleeps"
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(worker_processes(restarted_world, workers, kept=True))
        clients = [await enter(caller(restarted_world)) for _ in range(callers)]
        for client in clients:
            assert (await client.call("math.add", {"a": 1, "b": 1})).data == 2
        with time_limit(150):
            outcomes = await asyncio.gather(
                *(
                    clients[number % callers].call(
                        "slow.crash" if number % 5 == 0 else "slow.sleep",
                        {"path": str(crashes)}
                        if number % 5 == 0
                        else {"seconds": 0.2, "path": str(sleeps)},
                        timeout=150,
                    )
                    for number in range(POISON + INNOCENT)
                ),
                return_exceptions=True,
            )

    poison, innocent = outcomes[::5], [each for n, each in enumerate(outcomes) if n % 5]
    failed = Counter(str(each) for each in innocent if not isinstance(each, ResponseEnvelope))
    assert not failed
    assert Counter(lines(sleeps))["finished"] >= INNOCENT
    for each in poison:
        assert isinstance(each, CallError)
        assert (each.code, each.retryable) == (ErrorCode.UNAVAILABLE, False)
        assert each.details == {"deliveries": 3}
    # In the first attempts, some may not have begun when another one killed their worker.
    assert 2 * POISON < len(started(crashes)) <= 3 * POISON
