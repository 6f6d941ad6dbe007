"""Processes are killed with SIGKILL at every commit of a run. Letters are those of the scenarios in `docs/runs.md`."""

import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from tests.runs import shop
from tests.runs.shop import Ledger, start_process
from tests.servers import PostgresServer

AT_ONCE = 6
"""Crashes that are tried at the same time: they mostly wait for a lease."""


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Return the URL of a new store at each call."""
    if request.param == "sqlite":
        numbers = count()
        return lambda: f"sqlite:{tmp_path}/{next(numbers)}.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_schema


def crash(folder: Path, url: str, operation_id: str, number: int, moment: str) -> str | None:
    """Kill a process at a commit, let another one continue; return the outcome, None if there is no such commit."""
    folder.mkdir()
    first = start_process(shop.buy, folder, url, operation_id, number, moment).wait()
    if first == 0:
        return None
    # 255 if the fork server has not seen the signal.
    assert first in (-signal.SIGKILL, 255)
    assert start_process(shop.buy, folder, url, operation_id, 0, "").wait() == 0
    outcome = (folder / "outcome").read_text()
    effects = Ledger(folder / "ledger").effects()
    twice = [line for line, count in effects.items() if line.startswith("charge") and count > 1]
    assert not twice, f"{number} {moment}: {twice}"
    if outcome.startswith("completed"):
        charges = [line for line in effects if line.startswith("charge")]
        assert len(charges) == (5 if operation_id == "shop.order" else 1)
    shutil.rmtree(folder)
    return outcome


def crashes(folder: Path, new_url: Callable[[], str], operation_id: str, moment: str) -> list[str]:
    """Kill a process at each commit of a run; return the outcomes."""
    outcomes: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        number = 1
        while True:
            numbers = range(number, number + AT_ONCE)
            tries = [
                pool.submit(crash, folder / f"{each}", new_url(), operation_id, each, moment)
                for each in numbers
            ]
            found = [each.result() for each in tries]
            outcomes += [each for each in found if each is not None]
            if None in found:
                return outcomes
            number += AT_ONCE


@pytest.mark.requirement("R70", "R71", "F38")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_run_that_is_killed_at_any_commit_ends_and_repeats_no_call(
    tmp_path: Path, new_url: Callable[[], str], moment: str
) -> None:
    """a, e, j: ten steps, many at the same time; the client repeats its start with the same key."""
    outcomes = crashes(tmp_path, new_url, "shop.order", moment)

    assert len(outcomes) > 10
    assert set(outcomes) <= {f"completed {shop.ORDER_RESULT}", "unknown OUTCOME_UNKNOWN"}
    assert set(outcomes) >= {f"completed {shop.ORDER_RESULT}"}
    # A call was begun and its end not recorded.
    assert "unknown OUTCOME_UNKNOWN" in outcomes


@pytest.mark.requirement("R71", "F38")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_run_of_one_call_is_never_made_twice(
    tmp_path: Path, new_url: Callable[[], str], moment: str
) -> None:
    outcomes = crashes(tmp_path, new_url, "shop.refund", moment)

    assert set(outcomes) == {"completed refunded", "unknown OUTCOME_UNKNOWN"}
