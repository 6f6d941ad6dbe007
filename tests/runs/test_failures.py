"""Processes are killed and stopped, and databases fail. Letters are those of the scenarios in `docs/runs.md`."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.runs import shop
from tests.runs.conftest import OpenRegistry
from tests.runs.shop import CUSTOMER, ORDER_RESULT, Ledger, registry_of, start_process, wait_until
from tests.runs.test_runs import ADA, Effects, durable, ended
from tests.servers import PostgresServer, running

from operations import CallError, OperationContext
from operations.postgres import PostgresDatabase
from operations.runs.sqlite import SQLiteDatabase

KILLS = int(os.environ.get("OPERATIONS_RUN_KILLS", "20"))
"""How often processes are killed; `scripts/attack runs` kills 200 times."""

NO_RUN_IS_LOST = {f"completed {ORDER_RESULT}", "unknown OUTCOME_UNKNOWN"}


@pytest.fixture
async def effects() -> Effects:
    return Effects()


def none_twice(folder: Path) -> None:
    effects = Ledger(folder / "ledger").effects()
    twice = [line for line, times in effects.items() if line.startswith("charge") and times > 1]
    assert not twice


async def order_all(folder: Path, url: str, *ids: object) -> list[Any]:
    """Start orders as a client."""
    async with registry_of(folder, url, executes=False) as registry:
        return [await registry.start("shop.order", {"id": f"{each}"}, CUSTOMER) for each in ids]


async def outcomes_of(folder: Path, url: str, run_ids: list[str]) -> set[str]:
    async with registry_of(folder, url) as registry:
        runs = [await registry.run(run_id, CUSTOMER) for run_id in run_ids]
        return {await shop.outcome(run) for run in runs}


@pytest.mark.requirement("R70", "R71", "F38")
@pytest.mark.timeout(60 + 3 * KILLS)
async def test_random_kills_lose_no_run_and_repeat_no_call(tmp_path: Path, url: str) -> None:
    """a: two processes work on orders; one of them is killed again and again."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    moments = random.Random(seed)
    runs = await order_all(tmp_path, url, *range(KILLS * 3))
    for _ in range(KILLS):
        (tmp_path / "up").unlink(missing_ok=True)
        pair = [start_process(shop.work, tmp_path, url) for _ in range(2)]
        await asyncio.to_thread(wait_until, (tmp_path / "up").exists)
        await asyncio.sleep(moments.random() * 0.05)
        for each in pair:
            each.kill()
        for each in pair:
            await asyncio.to_thread(each.wait)

    assert await outcomes_of(tmp_path, url, [run.id for run in runs]) <= NO_RUN_IS_LOST
    none_twice(tmp_path)


# A process that is stopped within a transaction locks a file of SQLite for all others.
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.timeout(120)
async def test_a_process_that_stands_still_longer_than_its_lease_has_no_second_effect(
    tmp_path: Path, url: str
) -> None:
    """b"""
    process = start_process(shop.work, tmp_path, url)
    await asyncio.to_thread(wait_until, (tmp_path / "up").exists)
    runs = await order_all(tmp_path, url, *range(30))
    ledger = tmp_path / "ledger"
    await asyncio.to_thread(wait_until, ledger.exists)
    process.kill(signal.SIGSTOP)
    found = await outcomes_of(tmp_path, url, [run.id for run in runs])
    before = ledger.read_text()
    process.kill(signal.SIGCONT)
    # It begins again with work, when it has noticed that it has lost its runs.
    more = await order_all(tmp_path, url, "more")
    async with registry_of(tmp_path, url, executes=False) as registry:
        assert await shop.outcome(await registry.run(more[0].id, CUSTOMER)) in NO_RUN_IS_LOST
        states = [(await registry.run(run.id, CUSTOMER)).state for run in runs]
    process.kill()
    await asyncio.to_thread(process.wait)

    assert found <= NO_RUN_IS_LOST
    assert {state.status for state in states} <= {"completed", "unknown"}
    none_twice(tmp_path)
    # A call that had begun when the process was stopped may still end, once.
    assert "more" in ledger.read_text().removeprefix(before)


# ------------------------------------------------------------ PostgreSQL


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that a test may stop."""
    server = PostgresServer("fsync=off")
    with running(server):
        yield server


@pytest.mark.requirement("F40")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kills", [True, False])
async def test_a_database_that_is_restarted_loses_no_run(
    own_server: PostgresServer, tmp_path: Path, kills: bool
) -> None:
    """n"""
    url = own_server.url
    async with registry_of(tmp_path, url) as registry:
        runs = [
            await registry.start("shop.order", {"id": f"{each}"}, CUSTOMER) for each in range(20)
        ]
        await asyncio.to_thread(own_server.kill if kills else own_server.stop)
        with pytest.raises(CallError) as caught:
            await registry.start("shop.order", {"id": "x"}, CUSTOMER)
        assert caught.value.code == "UNAVAILABLE"
        assert not await registry.run_store.works()  # type: ignore[union-attr]
        await asyncio.to_thread(own_server.start)
        # A wait for a run ends with the store; asking again finds the run.
        found = await outcomes_of(tmp_path, url, [run.id for run in runs])

    assert found <= NO_RUN_IS_LOST
    none_twice(tmp_path)


class CutDatabase(PostgresDatabase):
    """Ends the connection of a commit: before the server has it, or before its reply arrives."""

    def __init__(self, url: str, moment: str) -> None:
        super().__init__(url)
        self._moment = moment
        self._numbers = count(1)
        self.cuts, self.is_cutting = 0, False

    def connect(self, *, writes: bool = True) -> Any:
        made = super().connect(writes=writes)
        connection: Any = made._connection

        def execute(sql: Any, *args: Any, **options: Any) -> Any:
            is_commit = isinstance(sql, bytes) and sql.endswith(b"COMMIT")
            if not (self.is_cutting and is_commit) or next(self._numbers) % 3:
                return psycopg.Connection.execute(connection, sql, *args, **options)
            self.cuts += 1
            if self._moment == "after":
                psycopg.Connection.execute(connection, sql, *args, **options)
            connection.close()
            raise psycopg.OperationalError("the connection was cut")

        connection.execute = execute
        return made


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_commit_whose_connection_ends_is_looked_up(
    postgres: PostgresServer, tmp_path: Path, moment: str
) -> None:
    """n: every third commit; the run notices nothing, and no call is repeated."""
    url = postgres.new_schema()
    database = CutDatabase(url, moment)
    # The new connections take time, but not the lease.
    async with registry_of(tmp_path, url, database, lease=60.0) as registry:
        database.is_cutting = True
        run = await registry.start("shop.order", {"id": "A"}, CUSTOMER, key="A")
        assert await shop.outcome(run) == f"completed {ORDER_RESULT}"
        database.is_cutting = False

    assert database.cuts > 2
    none_twice(tmp_path)


# ------------------------------------------------------------ SQLite


class FullDatabase(SQLiteDatabase):
    """A file on a disk that is full for a while."""

    is_full = False

    def connect(self, *, writes: bool = True) -> Any:
        connection: Any = super().connect(writes=writes)
        if writes:
            commit = connection.commit

            def full() -> None:
                if self.is_full:
                    # What SQLite does when a page cannot be written.
                    raise OSError("database or disk is full")
                commit()

            connection.commit = full
        return connection


@pytest.mark.requirement("F40")
async def test_a_full_disk_rejects_starts_and_loses_no_run(
    registries: OpenRegistry, effects: Effects, tmp_path: Path
) -> None:
    """o"""

    async def order(context: OperationContext) -> int:
        first = await context.call(effects.charge, 1)
        effects.begun.set()
        await effects.released.wait()
        return int(first + await context.call(effects.charge, 2))

    database = FullDatabase(tmp_path / "full.db")
    registry = registries(durable(order), effects.charge, url=database)
    run = await registry.start("shop.order", {}, ADA)
    await effects.begun.wait()
    database.is_full = True
    with pytest.raises(CallError) as caught:
        await registry.start("shop.charge", {"amount": 9}, ADA)
    effects.released.set()
    assert not await registry.run_store.works()  # type: ignore[union-attr]
    database.is_full = False

    assert caught.value.code == "UNAVAILABLE"
    assert (await ended(run)).result["data"] == 3
    assert effects.made == [1, 2]


# ------------------------------------------------------------ versions


async def test_two_versions_of_an_operation_finish_their_own_runs(
    registries: OpenRegistry, effects: Effects
) -> None:
    """y: a process that has another contract, or lacks the operation, ends no run of the other one wrongly."""

    async def order(context: OperationContext) -> int:
        return int(await context.call(effects.charge, 1))

    async def newer(context: OperationContext, gift: bool = False) -> int:
        return int(await context.call(effects.charge, 2))

    old, new = (
        registries(durable(order), effects.charge),
        registries(durable(newer), effects.charge),
    )
    await new.run_store.open()  # type: ignore[union-attr]
    runs = [await registry.start("shop.order", {}, ADA) for registry in (old, new) * 10]
    states = [await ended(run) for run in runs]

    assert [state.status for state in states] == ["completed"] * 20
    assert [state.result["data"] for state in states] == [1, 2] * 10
