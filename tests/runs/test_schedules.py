"""Schedules: the slots of `every` and `cron`, and which of them run."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.limits import time_limit
from tests.runs.conftest import OpenRegistry
from tests.runs.test_runs import OPERATOR

from operations import operation
from operations.runs import Cron, Schedule


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("cron", "after", "until"),
    [
        ("0 3 * * *", "2026-05-02 03:00", "2026-05-01 03:00"),
        ("*/15 * * * *", "2026-05-01 12:45", "2026-05-01 12:30"),
        ("0 0 1 jan *", "2027-01-01 00:00", "2026-01-01 00:00"),
        ("30 9 * * mon-fri", "2026-05-04 09:30", "2026-05-01 09:30"),
        ("0 12 29 2 *", "2028-02-29 12:00", "2024-02-29 12:00"),
        ("0 0 13 * 5", "2026-05-08 00:00", "2026-05-01 00:00"),
        ("5,10 8-9 * * 7", "2026-05-03 08:05", "2026-04-26 09:10"),
    ],
)
def test_the_slots_of_a_time_table(cron: str, after: str, until: str) -> None:
    now = at("2026-05-01 12:30")  # a Friday

    assert Cron(cron).after(now) == at(after)
    assert Cron(cron).until(now) == at(until)


@given(
    st.integers(1_577_836_800, 2_208_988_800),
    st.sampled_from(["7 */5 * * *", "0 0 31 * *"]),
)
def test_no_slot_is_between_the_last_and_the_next(moment: int, cron: str) -> None:
    table, now = Cron(cron), datetime.fromtimestamp(moment, UTC)
    last, later = table.until(now), table.after(now)

    assert last <= now < later
    assert table.after(last) == later


@pytest.mark.parametrize(
    "cron", ["", "* * * *", "60 * * * *", "* 5-3 * * *", "*/0 * * * *", "x * * * *", "0 0 31 2 *"]
)
def test_wrong_time_tables_are_rejected(cron: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Cron(cron)


@pytest.mark.parametrize("options", [{}, {"every": 60, "cron": "* * * * *"}, {"every": 0.5}])
def test_wrong_schedules_are_rejected(options: Any) -> None:
    with pytest.raises(ValueError, match="schedule"):
        Schedule(operation="a.b", **options)


async def test_two_processes_start_one_run_for_a_slot(registries: OpenRegistry) -> None:
    made: list[int] = []

    @operation("shop.tick")
    async def tick(number: int) -> int:
        made.append(number)
        return number

    schedules = {"tick": Schedule(operation="shop.tick", input={"number": 5}, every=36_000)}
    two = [registries(tick, schedules=schedules) for _ in range(2)]
    for registry in two:
        await registry.run_store.open()  # type: ignore[union-attr]
    with time_limit(10):
        runs = (await two[0].runs(OPERATOR)).runs
        while not runs or not runs[0].is_final:
            runs = (await two[0].runs(OPERATOR)).runs
        await (await two[1].start("shop.tick", {"number": 6}, OPERATOR)).result()

    assert made == [5, 6]
