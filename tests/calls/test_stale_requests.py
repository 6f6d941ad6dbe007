"""Requests that waited, or that a broker delivers again after a restart or a failover, do not run a second time."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.calls.operations_under_test import note
from tests.calls.processes import worker_process
from tests.calls.waiting import caller, lines, started, until
from tests.calls.worlds import BrokerWorld, World, redis_world
from tests.limits import time_limit
from tests.servers import RedisServer, proxy, running

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap
from operations.registry import OperationRegistry

CALLS = 10


def paying(ledger: Path, copied: asyncio.Event | None = None) -> OperationRegistry:
    """A mutation that writes every execution to a ledger, and a query to wait behind it.

    With `copied`, the second execution does not end before the event is set.
    """
    registry = OperationRegistry()

    @registry.operation("shop.pay")
    async def pay(number: int) -> int:
        note(str(ledger), str(number))
        if copied is None:
            await asyncio.sleep(0.03)
        elif len(lines(ledger)) > 1:
            await copied.wait()
        return number

    @registry.operation("shop.ping", type="query")
    async def ping() -> str:
        return "pong"

    return registry


async def pay_all(calls: PendingRequestMap, copy: Any, copied: asyncio.Event) -> list[int]:
    """Pay ten times one after the other, and call `copy` while most requests are still queued."""
    paying = [
        asyncio.create_task(calls.call("shop.pay", {"number": number}, timeout=60))
        for number in range(CALLS)
    ]
    done, _ = await asyncio.wait(paying, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    await copy()
    copied.set()
    return [envelope.data for envelope in await asyncio.gather(*paying)]


async def test_r36_requests_restored_from_a_snapshot_do_not_run_again(tmp_path: Path) -> None:
    ledger, copied = tmp_path / "ledger", asyncio.Event()
    with running(RedisServer()) as broker:
        world = redis_world(broker.url)
        async with caller(world) as calls:
            async with (
                world.serve(paying(ledger, copied), concurrency=1),
                Redis.from_url(broker.url) as admin,
            ):
                assert await pay_all(calls, admin.save, copied) == list(range(CALLS))
            broker.kill()
            await until(lambda: not calls.target.is_connected)
            broker.start()
            await enforce_nothing_runs_again(world, calls, ledger)


async def test_r36_requests_of_a_lagging_replica_do_not_run_again(tmp_path: Path) -> None:
    ledger, copied = tmp_path / "ledger", asyncio.Event()
    with running(RedisServer()) as first:
        options = ("--replicaof", "127.0.0.1", str(first.port))
        with running(RedisServer(*options)) as second:
            async with (
                proxy(first.port) as through,
                Redis.from_url(second.url) as replica,
            ):
                world = redis_world(f"redis://127.0.0.1:{through.port}")
                queue = f"{world.prefix}:queue:operations:any"
                await _until_replicated(replica)

                async def fall_behind() -> None:
                    with time_limit(20):
                        while await replica.xlen(queue) <= CALLS / 2:
                            await asyncio.sleep(0.01)
                    await replica.execute_command("REPLICAOF", "NO", "ONE")  # type: ignore[no-untyped-call]

                async with caller(world) as calls:
                    async with world.serve(paying(ledger, copied), concurrency=1):
                        assert await pay_all(calls, fall_behind, copied) == list(range(CALLS))
                    assert await replica.xlen(queue) > CALLS / 2
                    through.target, before = second.port, through.accepted
                    through.cut()
                    await until(lambda: through.accepted > before)
                    await enforce_nothing_runs_again(world, calls, ledger)


async def enforce_nothing_runs_again(
    world: BrokerWorld, calls: PendingRequestMap, ledger: Path
) -> None:
    """Start a worker that did not see the requests before, and wait until it has read the whole queue."""
    async with world.serve(paying(ledger)):
        with time_limit(20):
            # The queue is in order: the restored requests are delivered before this one.
            assert (await calls.call("shop.ping")).data == "pong"
            assert (await calls.call("shop.pay", {"number": 99})).data == 99
    assert Counter(lines(ledger)) == Counter([*map(str, range(CALLS)), "99"])


async def _until_replicated(replica: Any) -> None:
    with time_limit(30):
        while (await replica.info("replication"))["master_link_status"] != "up":
            await asyncio.sleep(0.02)


@pytest.mark.requirement("F21")
async def test_requests_that_ended_with_timeout_do_not_run_later(
    broker_world: World, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    async with worker_process(broker_world) as worker, caller(broker_world) as calls:
        blocking = asyncio.create_task(
            calls.call("slow.block_loop", {"seconds": 3, "path": str(tmp_path / "blocked")})
        )
        await until(lambda: started(tmp_path / "blocked"))
        outcomes = await asyncio.gather(
            *(
                calls.call("slow.write", {"seconds": 0, "path": str(ledger)}, timeout=0.3)
                for _ in range(10)
            ),
            return_exceptions=True,
        )
        assert {getattr(outcome, "code", None) for outcome in outcomes} == {ErrorCode.TIMEOUT}
        await blocking
        assert (await calls.call("math.add", {"a": 1, "b": 1})).data == 2
        assert worker.process.returncode is None

    assert lines(ledger) == []


async def test_requests_that_waited_longer_than_a_heartbeat_run_once_confirmed(
    broker_world: World, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    async with (
        broker_world.serve(paying(ledger), concurrency=1, heartbeat=0.05),
        caller(broker_world) as calls,
    ):
        results = await asyncio.gather(
            *(calls.call("shop.pay", {"number": number}, timeout=60) for number in range(CALLS))
        )

    assert [envelope.data for envelope in results] == list(range(CALLS))
    assert Counter(lines(ledger)) == Counter(map(str, range(CALLS)))


async def test_workers_reject_a_second_attempt_of_a_mutation(
    broker_world: World, tmp_path: Path
) -> None:
    """The caller's import is outdated and declares the mutation as idempotent."""
    ledger = tmp_path / "ledger"
    async with (
        worker_process(broker_world) as first,
        worker_process(broker_world) as second,
        caller(broker_world, heartbeat=0.2) as calls,
    ):
        writing = asyncio.create_task(
            calls.call("slow.write", {"seconds": 30, "path": str(ledger)}, replayable=True)
        )
        await until(lambda: started(ledger))
        next(each for each in (first, second) if each.pid == started(ledger)[0]).kill()
        with time_limit(20), pytest.raises(CallError) as caught:
            await writing

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert not caught.value.retryable
    assert len(started(ledger)) == 1
