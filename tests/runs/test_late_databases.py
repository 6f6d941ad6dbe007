"""A database that is down when a process starts: a hub serves the rest, is not ready, and recovers by itself."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.limits import time_limit
from tests.servers import PostgresServer

from operations import CallError, OperationContext, OperationRegistry
from operations.config import ConfigError
from operations.hub import open_hub
from operations.hub.operations import readiness
from operations.runs import Runs, RunStoreError

OPERATOR = OperationContext(trusted=True)
MODULE = """
from operations import operation

@operation("late.add", type="query")
async def add(a: int) -> int:
    return a + 1

@operation("late.guarded")
async def guarded() -> int:
    return 5
"""


@pytest.fixture
def late() -> Iterator[PostgresServer]:
    """A server that a test starts."""
    server = PostgresServer("fsync=off")
    try:
        yield server
    finally:
        if hasattr(server, "process"):
            server.stop()


def address(server: PostgresServer, database: str = "postgres") -> str:
    return f"postgresql://postgres:hunter2@127.0.0.1:{server.port}/{database}"


def config(folder: Path, tables: str) -> Path:
    (folder / "late_operations.py").write_text(MODULE)
    path = folder / "operations.toml"
    path.write_text(f'modules = ["late_operations.py"]\n[record.trace]\nenabled = false\n{tables}')
    return path


async def until_ready(hub: Any) -> None:
    with time_limit(60):
        while await readiness(hub) is not True:
            await asyncio.sleep(0.05)


async def test_a_registry_reports_which_store_cannot_be_opened(late: PostgresServer) -> None:
    registry = OperationRegistry(runs=Runs(address(late)))

    with pytest.raises(RunStoreError) as caught:
        async with registry:
            pass
    await registry.aclose()

    assert f"postgresql://127.0.0.1:{late.port}/postgres" in caught.value.message
    assert "refused" in caught.value.message
    assert "hunter2" not in caught.value.message


@pytest.mark.timeout(180)
async def test_a_hub_waits_for_its_database(
    late: PostgresServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = config(
        tmp_path,
        f'[state]\nurl = "{address(late)}"\n[runs]\nadvanced.lease = 2\n'
        '[runs.schedules.often]\noperation = "late.guarded"\nevery = 1\n'
        '[tools."late.guarded"]\napprove = false\n',
    )
    caplog.set_level(logging.WARNING)
    async with open_hub(path, works=True) as hub:
        registry = hub.registry
        before = await readiness(hub)
        added = await registry.execute("late.add", {"a": 1}, OPERATOR)
        with pytest.raises(CallError) as refused:
            await registry.start("late.add", {"a": 1}, OPERATOR)
        await asyncio.to_thread(late.start)
        await until_ready(hub)
        run = await registry.start("late.add", {"a": 2}, OPERATOR)

        assert added.data == 2
        assert refused.value.code == "UNAVAILABLE"
        assert "127.0.0.1" not in refused.value.message
        assert isinstance(before, dict)
        assert before["status"] == "unavailable"
        assert before["disconnected"] == ["state", "runs"]
        assert "[state] and [runs]" in before["message"]
        assert (await run.result(20)).data == 3
        # The schedules are followed as well.
        with time_limit(30):
            while not (await registry.runs(OPERATOR, operation="late.guarded")).runs:
                await asyncio.sleep(0.05)
        await asyncio.to_thread(late.stop)
        with time_limit(60):
            while (after := await readiness(hub)) is True:
                await asyncio.sleep(0.05)

        assert isinstance(after, dict)
        assert after["status"] == "degraded"
        assert "message" not in after
        await asyncio.to_thread(late.start)
        await until_ready(hub)
    logged = caplog.text

    assert f"postgresql://127.0.0.1:{late.port}/postgres cannot be opened" in logged
    assert "can be used now" in logged
    assert "the store of [state] cannot be used" in logged
    assert "hunter2" not in logged


@pytest.mark.timeout(120)
async def test_a_wrong_database_is_in_the_log(
    late: PostgresServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(late.start)
    path = config(tmp_path, f'[runs]\nurl = "{address(late, "missing")}"\n')
    async with open_hub(path, works=True) as hub:
        found = await readiness(hub)

    assert isinstance(found, dict)
    assert found["status"] == "unavailable"
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len(errors) == 1
    assert 'database "missing" does not exist' in errors[0]
    assert "hunter2" not in caplog.text


async def test_a_file_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    path = config(tmp_path, '[runs]\nurl = "sqlite:missing/runs.db"\n')

    with pytest.raises((RunStoreError, ConfigError), match=r"missing/runs\.db"):
        async with open_hub(path, works=True):
            pass
