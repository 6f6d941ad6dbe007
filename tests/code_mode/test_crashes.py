"""Processes are killed with SIGKILL at every suspension of a script of ten calls, and at every commit of its run."""

import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.code_mode import crashing
from tests.runs.shop import Ledger, start_process

AT_ONCE = 6


def crash(folder: Path, number: int, moment: str) -> str | None:
    """Kill a process, let another one continue; return the outcome, None if the first one has ended before."""
    folder.mkdir()
    url = f"sqlite:{folder}/runs.db"
    first = start_process(crashing.run, folder, url, number, moment).wait()
    if first == 0:
        return None
    # 255 if the fork server has not seen the signal.
    assert first in (-signal.SIGKILL, 255)
    assert start_process(crashing.run, folder, url, 0, "after").wait() == 0
    outcome = (folder / "outcome").read_text()
    effects = Ledger(folder / "ledger").effects()
    charges = Counter({line: count for line, count in effects.items() if "charge" in line})
    twice = {line: count for line, count in charges.items() if count > (2 if " B " in line else 1)}
    assert not twice, f"{number} {moment}: {twice}"
    assert len([line for line in charges if "-" in line]) <= 1
    if outcome.startswith("completed"):
        assert charges.total() == 6
    return outcome


def crashes(folder: Path, moment: str) -> list[str]:
    outcomes: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        number = 1
        while True:
            tries = [
                pool.submit(crash, folder / f"{each}", each, moment)
                for each in range(number, number + AT_ONCE)
            ]
            found = [each.result() for each in tries]
            outcomes += [each for each in found if each is not None]
            if None in found:
                return outcomes
            number += AT_ONCE


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("moment", ["suspension", "before"])
def test_a_script_that_is_killed_ends_and_repeats_no_mutation(tmp_path: Path, moment: str) -> None:
    outcomes = crashes(tmp_path, moment)

    assert len(outcomes) > 10
    assert set(outcomes) <= {f"completed {crashing.RESULT}", "unknown OUTCOME_UNKNOWN"}
    assert f"completed {crashing.RESULT}" in outcomes
