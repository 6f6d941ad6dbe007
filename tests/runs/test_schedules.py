"""Schedules: the slots of `every` and `cron`, and which of them run."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.limits import time_limit
from tests.runs.conftest import OpenRegistry
from tests.runs.test_runs import OPERATOR

from operations import Identity, OperationContext, OperationRegistry, operation
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


EVERY = 10_000_000.0
"""Seconds between two slots: the next one is far away."""


async def make_old(registry: OperationRegistry) -> None:
    """Let the schedules of a store be as old as the epoch, as if their processes had been down since then."""
    store: Any = registry.run_store
    await store.write(
        lambda db: db.count("UPDATE meta SET value = '0' WHERE name LIKE 'schedule:%'")
    )


async def follow(registry: OperationRegistry) -> None:
    """Open a registry, and wait until it has looked at its schedules."""
    store: Any = registry.run_store
    await store.open()
    for each in store.following:
        await each.looked.wait()


@pytest.fixture
def made() -> list[int]:
    """The numbers with which runs were started."""
    return []


@pytest.fixture
def tick(made: list[int]) -> Any:
    @operation("shop.tick")
    async def tick(number: int) -> int:
        made.append(number)
        return number

    return tick


def every(number: int, **options: Any) -> dict[str, Schedule]:
    return {
        "tick": Schedule(operation="shop.tick", input={"number": number}, every=EVERY, **options)
    }


async def test_a_new_schedule_waits_for_its_next_slot(
    registries: OpenRegistry, tick: Any, made: list[int]
) -> None:
    for _ in range(2):
        registry = registries(tick, schedules=every(5))
        await follow(registry)
        await (await registry.start("shop.tick", {"number": 6}, OPERATOR)).result()
        await registry.aclose()

    assert made == [6, 6]


async def test_two_processes_start_one_run_for_a_missed_slot(
    registries: OpenRegistry, tick: Any, made: list[int]
) -> None:
    before = registries(tick, schedules=every(5))
    await follow(before)
    await make_old(before)
    await before.aclose()
    two = [registries(tick, schedules=every(5)) for _ in range(2)]
    with time_limit(10):
        for registry in two:
            await follow(registry)
        for run in (await two[0].runs(OPERATOR)).runs:
            await (await two[0].run(run.id, OPERATOR)).result()

    assert made == [5]


@pytest.mark.parametrize(
    "changed",
    [
        every(7),
        every(5, context=OperationContext(identity=Identity("ada"))),
        {"tick": Schedule(operation="shop.tick", input={"number": 5}, cron="0 0 1 1 *")},
    ],
    ids=["input", "caller", "times"],
)
async def test_a_changed_schedule_does_not_repeat_a_slot(
    registries: OpenRegistry,
    tick: Any,
    made: list[int],
    changed: dict[str, Schedule],
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = registries(tick, schedules=every(5))
    await follow(before)
    await make_old(before)
    await before.aclose()
    for schedules in (every(5), changed):
        registry = registries(tick, schedules=schedules)
        await follow(registry)
        for run in (await registry.runs(OPERATOR)).runs:
            await (await registry.run(run.id, OPERATOR)).result()
        await registry.aclose()

    assert made == [5]
    assert [each.message for each in caplog.records if "schedule" in each.message] == []
