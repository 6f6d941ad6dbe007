"""Names that no database can store, stores of authority that fail for a while, full lanes, and locked files."""

import asyncio
import random
import sqlite3
import threading
import time
from collections.abc import Awaitable
from typing import Any

import psycopg
import pytest
from tests.limits import time_limit
from tests.runs.conftest import OpenRegistry
from tests.runs.test_runs import ADA, OPERATOR, Effects, durable, ended, interrupted, resumed

from operations import CallError, ErrorCode, Identity, OperationContext, operation
from operations.contract.grant import Grant
from operations.runs import Limits, Retention, RunStatus

# The last one is longer than a row of an index may be, and cannot be compressed.
STRANGE = [
    "a\x00b",
    "a\ud800b",
    "".join(chr(random.randrange(0x4E00, 0x9FFF)) for _ in range(9000)),
]


@pytest.fixture
async def effects() -> Effects:
    return Effects()


async def code_of(call: Awaitable[Any]) -> str:
    with pytest.raises(CallError) as caught:
        await call
    return caught.value.code


# ------------------------------------------------------------ names


@pytest.mark.requirement("R70")
@pytest.mark.parametrize("name", STRANGE, ids=["NUL", "surrogate", "long"])
@pytest.mark.parametrize("kind", ["step", "signal", "call"])
async def test_a_name_that_cannot_be_stored_fails_its_run(
    registries: OpenRegistry, name: str, kind: str
) -> None:
    """Not the store, which would make the attempt again and again."""

    async def order(context: OperationContext) -> Any:
        if kind == "step":
            return await context.step(name, lambda: 1)
        if kind == "call":
            return await context.env.call(f"shop.{name}", {})
        return await context.wait_for(name, timeout=10)

    run = await registries(durable(order)).start("shop.order", {}, ADA)
    state = await ended(run)

    assert (state.status, state.attempt) == ("failed", 1)


@pytest.mark.requirement("R70")
@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e17])
async def test_a_sleep_without_end_fails_its_run(registries: OpenRegistry, seconds: float) -> None:
    async def order(context: OperationContext) -> None:
        await context.sleep(seconds)

    state = await ended(await registries(durable(order)).start("shop.order", {}, ADA))

    assert (state.status, state.error["code"], state.attempt) == ("failed", "VALIDATION_ERROR", 1)


async def test_a_signal_may_be_awaited_for_ever(registries: OpenRegistry) -> None:
    async def order(context: OperationContext) -> Any:
        with pytest.raises(CallError):
            await context.wait_for("paid", timeout=float("nan"))
        return await context.wait_for("paid", timeout=float("inf"))

    run = await registries(durable(order)).start("shop.order", {}, ADA)
    await run.signal("paid", 5)

    assert (await run.result(10)).data == 5


async def test_a_value_that_cannot_be_stored_is_no_failure_of_the_store(
    registries: OpenRegistry, effects: Effects
) -> None:
    registry = registries(effects.charge)
    store: Any = registry.run_store
    await store.open()
    wrong = store.write(lambda db: db.count("UPDATE runs SET lane = ?", "a\x00\ud800"))
    right = store.write(lambda db: db.now())

    assert await code_of(wrong) == "EXECUTION_ERROR"
    assert await right
    assert store._writer.works


@pytest.mark.parametrize("name", STRANGE, ids=["NUL", "surrogate", "long"])
async def test_strange_names_of_callers_are_rejected_and_the_store_works(
    registries: OpenRegistry, effects: Effects, name: str
) -> None:
    registry = registries(effects.charge, effects.slow)
    run = await registry.start("shop.slow", {"amount": 1}, ADA)
    await effects.begun.wait()

    codes = [
        await code_of(each)
        for each in (
            run.signal(name),
            registry.runs(ADA, operation=name),
            registry.runs(ADA, after=f"12-{name}"),
            registry.runs(ADA, after="9" * 30 + "-a"),
            registry.start("shop.charge", {"amount": 1}, ADA, lane=name),
            registry.start("shop.charge", {"amount": 1}, ADA, priority=2**70),
        )
    ]
    assert set(codes) == {"VALIDATION_ERROR"}
    assert await code_of(registry.run(name, ADA)) == "RUN_NOT_FOUND"
    assert not await run.answer(name, {"action": "decline"})
    effects.released.set()
    assert (await run.result(10)).data == 1


async def test_strange_texts_of_people_are_stored_in_part(registries: OpenRegistry) -> None:
    reported = asyncio.Event()

    async def order(context: OperationContext) -> int:
        await context.progress(1, 2, "a\x00b\ud800c")
        await reported.wait()
        return 1

    registry = registries(durable(order))
    caller = OperationContext(identity=Identity("a\x00da", ["shop"]))
    run = await registry.start("shop.order", {}, caller)
    messages: list[str | None] = []
    async for state in run.watch():
        messages.append(state.message)
        if state.message is not None:
            reported.set()

    assert messages[-1] == "a?b?c"
    assert (run.status, run.state.owner) == ("completed", "a?da")


# ------------------------------------------------------------ authority that cannot be read


class Unreadable:
    """An issuer whose revocations cannot be read for a while."""

    def __init__(self) -> None:
        self.asked, self.fails = asyncio.Event(), False

    def is_valid(self, grant: Grant) -> bool:
        return True

    def has_revoked(self, grant: Grant) -> bool:
        return False

    async def is_revoked(self, grant: Grant) -> bool:
        self.asked.set()
        if self.fails:
            raise CallError(ErrorCode.UNAVAILABLE, "The store cannot be read")
        return False


def agent(issuer: Unreadable) -> OperationContext:
    grant = Grant(blocks=(), keys=("1",)).issued_by(issuer)
    return OperationContext(identity=Identity("ada", ["shop"], acting=("bot",), grant=grant))


@pytest.mark.requirement("R72", "F40")
async def test_a_run_whose_grant_cannot_be_checked_now_continues_later(
    registries: OpenRegistry, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.runs.session._ABSENT_MILLISECONDS", 50)
    issuer = Unreadable()
    run, root = await interrupted(registries, effects, agent(issuer))

    issuer.fails = True
    issuer.asked.clear()
    registry = registries(root, effects.charge, grants=issuer)
    await registry.run_store.open()  # type: ignore[union-attr]
    await issuer.asked.wait()
    issuer.fails = False

    assert (await ended(await registry.run(run.id, OPERATOR))).status == "completed"


@pytest.mark.requirement("R72")
async def test_a_run_whose_caller_cannot_be_resolved_now_continues_later(
    registries: OpenRegistry, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.runs.session._ABSENT_MILLISECONDS", 50)
    run, root = await interrupted(registries, effects, ADA)
    asked = 0

    async def subjects(identity: Identity) -> Identity:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise OSError("the directory does not respond")
        return identity

    registry = registries(root, effects.charge, subjects=subjects)

    assert (await resumed(registry, run)).status == "completed"
    assert asked == 2


async def test_a_step_that_was_refused_keeps_its_name(
    registries: OpenRegistry, effects: Effects
) -> None:
    """Otherwise its repetition has another name, and the next attempt calls it again or diverges."""
    issuer = Unreadable()

    async def order(context: OperationContext) -> int:
        if not effects.begun.is_set():
            issuer.fails = True
            for _ in range(2):
                with pytest.raises(CallError):
                    await context.call(effects.charge, 1)
                with pytest.raises(CallError):
                    await context.step("note", lambda: 1)
            issuer.fails = False
        paid = await context.call(effects.charge, 1)
        noted = await context.step("note", lambda: 2)
        if not effects.begun.is_set():
            effects.begun.set()
            await asyncio.Event().wait()
        return int(paid + noted)

    operations = durable(order), effects.charge
    first = registries(*operations, grants=issuer)
    run = await first.start("shop.order", {}, agent(issuer))
    await effects.begun.wait()
    await first.aclose()
    state = await resumed(registries(*operations, grants=issuer), run)

    assert (state.status, effects.made) == ("completed", [1])


# ------------------------------------------------------------ queue and lease


async def test_full_lanes_do_not_hold_up_others(registries: OpenRegistry) -> None:
    released = asyncio.Event()

    @operation("shop.lane", lane_limit=1, idempotent=True)
    async def lane() -> None:
        await released.wait()

    registry = registries(lane, limits=Limits(working=1000), lease=60.0)
    full = [
        await registry.start("shop.lane", {}, OPERATOR, lane=f"full {number // 2}")
        for number in range(240)
    ]
    last = await registry.start("shop.lane", {}, OPERATOR, lane="free")
    async for state in last.watch():
        if state.status is RunStatus.WORKING:
            break
    released.set()

    assert (await last.result(20)).data is None
    for run in full:
        await run.result(60)


async def test_a_start_during_the_end_of_a_process_is_left_to_the_next_one(
    registries: OpenRegistry, effects: Effects
) -> None:
    first = registries(effects.charge)
    store: Any = first.run_store
    await store.open()
    held, release, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def hold(_: Any) -> None:
        loop.call_soon_threadsafe(held.set)
        release.wait(10)

    holding = store.write(hold)
    await held.wait()
    starting = asyncio.ensure_future(first.start("shop.charge", {"amount": 1}, ADA))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(first.aclose())
    executor: Any = store._executor
    while store._keeper is not None:
        await asyncio.sleep(0)
    release.set()
    await holding
    run = await starting
    await closing

    assert executor.working == 0
    assert effects.made == []
    assert (await resumed(registries(effects.charge), run)).status == "completed"
    assert effects.made == [1]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_a_process_whose_lease_cannot_be_renewed_stops_its_runs_in_time(
    registries: OpenRegistry, url: str
) -> None:
    """Also while the thread that renews it waits for the database, which takes up to 10 s."""
    begun, stopped = asyncio.Event(), asyncio.Event()

    @operation("shop.order", durable=True)
    async def order() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    registry = registries(order, lease=1.0)
    await registry.start("shop.order", {}, OPERATOR)
    await begun.wait()
    other = sqlite3.connect(url.removeprefix("sqlite:"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        async with asyncio.timeout(6):
            await stopped.wait()
    finally:
        other.execute("ROLLBACK")
        other.close()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_a_run_that_was_answered_does_not_fail_for_want_of_an_answer(
    registries: OpenRegistry,
) -> None:
    async def order(context: OperationContext) -> Any:
        return await context.wait_for("paid")

    first = registries(durable(order), park=0.0, retention=Retention(unanswered=0))
    run = await first.start("shop.order", {}, ADA)
    async for state in run.watch():
        if state.status is RunStatus.INPUT_REQUIRED:
            break
    await first.aclose()
    client = registries(durable(order), executes=False, retention=Retention(unanswered=0))
    await (await client.run(run.id, ADA)).signal("paid", 5)
    store: Any = client.run_store
    assert await store.write(store.journal.end_unanswered) == 0

    second = registries(durable(order), retention=Retention(unanswered=0))
    assert (await resumed(second, run)).result["data"] == 5


@pytest.mark.requirement("F40")
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_the_check_of_a_store_writes_to_the_disk(registries: OpenRegistry, url: str) -> None:
    """Otherwise a full disk is not noticed."""
    store: Any = registries(executes=False).run_store
    assert await store.works()
    other = sqlite3.connect(url.removeprefix("sqlite:"))
    versions = set[int]()
    for _ in range(3):
        versions.add(other.execute("PRAGMA data_version").fetchone()[0])
        assert await store.works()
    other.close()

    assert len(versions) == 3


# ------------------------------------------------------------ clocks and threads


async def test_a_clock_that_is_an_hour_off_changes_no_lease_and_no_delay(
    registries: OpenRegistry, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """m"""
    one = registries(effects.slow, effects.charge)
    run = await one.start("shop.slow", {"amount": 1}, ADA)
    await effects.begun.wait()
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr("time.time", lambda: real() + 3600)
    monkeypatch.setattr("time.time_ns", lambda: real_ns() + 3_600_000_000_000)
    two = registries(effects.slow, effects.charge)
    later = await two.start("shop.charge", {"amount": 2}, ADA, delay=1.5)
    state = await ended(later)
    effects.released.set()

    assert (await run.result(10)).data == 1
    assert (await run.refresh()).attempt == 1
    assert state.updated - state.created >= 1500
    assert effects.made == [1, 2]


@pytest.mark.requirement("R70", "R71")
async def test_the_end_of_a_thread_whose_run_was_cancelled_is_not_recorded(
    registries: OpenRegistry, effects: Effects
) -> None:
    """u"""
    release, ends = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @operation("shop.block", scopes=["shop"])
    def block() -> int:
        loop.call_soon_threadsafe(effects.begun.set)
        release.wait(20)
        loop.call_soon_threadsafe(ends.set)
        return 1

    async def order(context: OperationContext) -> int:
        return int(await context.call(block))

    registry = registries(durable(order), block)
    run = await registry.start("shop.order", {}, ADA)
    await effects.begun.wait()
    await run.cancel()
    state = await ended(run)
    release.set()
    await ends.wait()
    (step,) = [each for each in await run.steps() if each.operation == "shop.block"]

    assert (state.status, await run.refresh()) == ("cancelled", state)
    assert state.error["details"]["begun"][0]["operation"] == "shop.block"
    assert step.ended is None


@pytest.mark.requirement("R70")
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"lane_limit": 1}])
async def test_a_run_that_is_locked_when_others_are_claimed_begins_later(
    registries: OpenRegistry, effects: Effects, url: str, options: Any
) -> None:
    """As by a signal: nothing else would wake an executor, because the signal does not change the run."""

    @operation("shop.locked", **options)
    async def locked() -> int:
        return 5

    client = registries(locked, effects.charge, executes=False)
    run = await client.start("shop.locked", {}, OPERATOR)
    with psycopg.connect(url) as other:
        other.execute("SELECT 1 FROM runs WHERE id = %s FOR UPDATE", (run.id,))
        worker = registries(locked, effects.charge)
        for amount in (1, 2):
            await (await worker.start("shop.charge", {"amount": amount}, OPERATOR)).result(20)
        assert (await run.refresh()).status == "queued"

    assert (await run.result(20)).data == 5


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_a_transaction_that_ends_a_deadlock_is_made_again(
    registries: OpenRegistry, effects: Effects
) -> None:
    """Two processes change the same runs in another order."""
    two: list[Any] = [registries(effects.charge, executes=False).run_store for _ in range(2)]
    await asyncio.gather(*(each.works() for each in two))
    names = "ab"
    await two[0].write(
        lambda db: [
            db.count("INSERT INTO meta (name, value) VALUES (?, '')", name) for name in names
        ]
    )
    both = threading.Barrier(2)

    def change(order: str) -> Any:
        tries = 0

        def job(db: Any) -> None:
            nonlocal tries
            tries += 1
            for name in order:
                db.count("UPDATE meta SET value = value || ? WHERE name = ?", order[0], name)
                if tries == 1 and name == order[0]:
                    both.wait(20)

        return job

    with time_limit(30):
        await asyncio.gather(two[0].write(change("ab")), two[1].write(change("ba")))
    rows = await two[0].read(lambda db: db.rows("SELECT value FROM meta WHERE name IN ('a', 'b')"))

    assert [sorted(value) for (value,) in rows] == [["a", "b"], ["a", "b"]]
