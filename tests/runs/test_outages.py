"""The database of the runs is restarted, crashes, or is slow: no run is lost or left behind."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.runs.shop import CUSTOMER, ORDER_RESULT, outcome, registry_of
from tests.runs.test_failures import none_twice
from tests.runs.test_runs import ADA, Effects, durable, ended
from tests.servers import PostgresServer, running

from operations import OperationContext, OperationRegistry, operation
from operations.postgres import PostgresDatabase
from operations.postgres.journal import CommitUnknownError
from operations.runs import Run, Runs, RunState
from operations.runs.executor import Executor


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server that a test stops and starts. Its commits reach the disk."""
    server = PostgresServer()
    with running(server):
        yield server


@pytest.fixture
async def effects() -> Effects:
    return Effects()


async def restart(server: PostgresServer, *, kills: bool) -> None:
    await asyncio.to_thread(server.kill if kills else server.stop)
    await asyncio.to_thread(server.start)


def opened(server: PostgresServer, *operations: Any) -> OperationRegistry:
    """Return a registry whose lease holds for the whole test."""
    return OperationRegistry(operations, runs=Runs(server.url, lease=60.0, grace=0.0))


async def ended_of(registry: OperationRegistry, run: Run) -> RunState:
    """Return how a run has ended. A wait for a run ends with the store; asking again finds the run."""
    await is_working(registry)
    return await ended(await registry.run(run.id, ADA))


async def is_working(registry: OperationRegistry) -> None:
    """Wait until the store of runs works."""
    store: Any = registry.run_store
    while not await store.works():
        await asyncio.sleep(0.05)


async def is_down(registry: OperationRegistry) -> None:
    """Wait until it does not: the processes of a server that was killed end a little later."""
    store: Any = registry.run_store
    while await store.works():
        await asyncio.sleep(0.05)


@pytest.mark.requirement("F40")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kills", [True, False])
async def test_a_restarted_database_interrupts_no_attempt(
    server: PostgresServer, effects: Effects, kills: bool
) -> None:
    """n: the outcome of a call that may run only once is recorded as soon as the database is there again."""

    async def order(context: OperationContext) -> int:
        first = await context.call(effects.charge, 1)
        await asyncio.to_thread(server.kill if kills else server.stop)
        effects.begun.set()
        return int(first + await context.call(effects.charge, 2))

    async with opened(server, durable(order), effects.charge) as registry:
        run = await registry.start("shop.order", {}, ADA)
        await effects.begun.wait()
        await is_down(registry)
        await asyncio.to_thread(server.start)
        state = await ended_of(registry, run)

    assert (state.status, state.attempt) == ("completed", 1)
    assert state.result["data"] == 3
    assert effects.made == [1, 2]


@pytest.mark.timeout(120)
async def test_a_call_that_runs_while_the_database_restarts_keeps_its_result(
    server: PostgresServer, effects: Effects
) -> None:
    """n: a call of an operation that is not durable is one step, and may run only once."""

    async def pay(context: OperationContext) -> int:
        await asyncio.to_thread(server.kill)
        effects.begun.set()
        return 7

    async with opened(server, operation("shop.pay", scopes=["shop"])(pay)) as registry:
        run = await registry.start("shop.pay", {}, ADA)
        await effects.begun.wait()
        await is_down(registry)
        await asyncio.to_thread(server.start)
        state = await ended_of(registry, run)

    assert (state.status, state.result["data"]) == ("completed", 7)


@pytest.mark.timeout(120)
async def test_a_commit_that_a_crash_has_undone_is_not_believed(server: PostgresServer) -> None:
    """n: after a crash, the server gives the number of a lost transaction to another one."""
    await asyncio.to_thread(create_accounts, server)
    database = PostgresDatabase(server.url)
    connection = await asyncio.to_thread(database.connect)
    connection.begin(writes=True)
    connection.count("UPDATE accounts SET balance = 1 WHERE id = ?", "A")
    lost = connection._transaction
    assert lost is not None
    await restart(server, kills=True)
    await asyncio.to_thread(commit_others, server, int(lost))

    with pytest.raises(CommitUnknownError):
        await asyncio.to_thread(connection.commit)
    assert await asyncio.to_thread(balance, server) == 0


@pytest.mark.timeout(120)
async def test_a_commit_before_a_restart_in_order_is_believed(server: PostgresServer) -> None:
    """n: the reply of the commit is lost, and the server is restarted in order."""
    await asyncio.to_thread(create_accounts, server)
    database = PostgresDatabase(server.url)
    connection = await asyncio.to_thread(database.connect)
    connection.begin(writes=True)
    connection.count("UPDATE accounts SET balance = 1 WHERE id = ?", "A")
    connection._connection.execute(b"COMMIT")
    await restart(server, kills=False)

    await asyncio.to_thread(connection.commit)
    assert await asyncio.to_thread(balance, server) == 1


@pytest.mark.timeout(120)
async def test_a_commit_that_never_reached_a_crashed_server_has_not_happened(
    server: PostgresServer,
) -> None:
    """n: no other transaction has its number, so the answer is certain, and is not waited for."""
    await asyncio.to_thread(create_accounts, server)
    database = PostgresDatabase(server.url)
    connection = await asyncio.to_thread(database.connect)
    connection.begin(writes=True)
    connection.count("UPDATE accounts SET balance = 1 WHERE id = ?", "A")
    await restart(server, kills=True)

    with pytest.raises(psycopg.OperationalError):
        await asyncio.to_thread(connection.commit)
    assert await asyncio.to_thread(balance, server) == 0


def create_accounts(server: PostgresServer) -> None:
    server.run("CREATE TABLE accounts (id text PRIMARY KEY, balance int)")
    server.run("INSERT INTO accounts VALUES ('A', 0), ('B', 0)")


def commit_others(server: PostgresServer, number: int) -> None:
    """Commit until the server has used a number for a transaction."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        used = 0
        while used < number:
            connection.execute("UPDATE accounts SET balance = balance + 1 WHERE id = 'B'")
            row = connection.execute(
                "SELECT max(xmin::text::bigint) FROM accounts WHERE id = 'B'"
            ).fetchone()
            used = 0 if row is None else row[0]


def balance(server: PostgresServer) -> int:
    with psycopg.connect(server.url) as connection:
        row = connection.execute("SELECT balance FROM accounts WHERE id = 'A'").fetchone()
        return -1 if row is None else int(row[0])


# ------------------------------------------------------------ the lease


class ManualLease:
    """A lease that is late, and is renewed for the same holder."""

    def __init__(self, holder: str) -> None:
        self.holder: str | None = holder
        self.is_valid = True
        self.asked = asyncio.Event()

    @property
    def remaining(self) -> float:
        self.asked.set()
        return 0.05 if self.is_valid else 0.0


async def test_a_run_that_became_ready_while_the_lease_was_late_begins_with_the_lease(
    effects: Effects, tmp_path: Path
) -> None:
    """Nothing else tells the executor: the lease is still its own."""
    store: Any = Runs(f"sqlite:{tmp_path / 'runs.db'}", executes=False)
    registry = OperationRegistry([effects.charge], runs=store)
    run = await registry.start("shop.charge", {"amount": 3}, ADA)
    await store.write(lambda db: store.journal.renew(db, "me", 60_000, new=True))
    lease = ManualLease("me")
    lease.is_valid = False
    executor = Executor(store, lease, lambda run_id: None)
    store._executor = executor
    executor.start()
    for _ in range(3):
        # It has looked for runs, and at the lease.
        lease.asked.clear()
        await lease.asked.wait()
    assert not effects.made
    lease.is_valid = True

    assert (await ended(run)).status == "completed"
    await executor.close(0)
    store._executor = None
    await registry.aclose()


@pytest.mark.requirement("F40")
@pytest.mark.timeout(180)
async def test_a_database_that_goes_away_again_and_again_leaves_no_run_behind(
    server: PostgresServer, tmp_path: Path
) -> None:
    """n: the same process continues them all; those whose start was rejected may exist."""
    async with registry_of(tmp_path, server.url) as registry:
        runs = []
        for number in range(4):
            starts = (
                registry.start("shop.order", {"id": f"{number}-{each}"}, CUSTOMER)
                for each in range(30)
            )
            found = await asyncio.gather(*starts, return_exceptions=True)
            runs += [run for run in found if not isinstance(run, BaseException)]
            await restart(server, kills=number % 2 == 1)
            await is_working(registry)
        outcomes = {await outcome(await registry.run(run.id, CUSTOMER)) for run in runs}

    assert outcomes <= {f"completed {ORDER_RESULT}", "unknown OUTCOME_UNKNOWN"}
    none_twice(tmp_path)
