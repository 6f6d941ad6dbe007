"""Runs that wait: for signals, answers, approvals and time. Letters are those of the scenarios in `docs/runs.md`."""

import asyncio
from itertools import starmap
from random import Random
from time import time
from typing import Any

import pytest
from tests.limits import time_limit
from tests.runs.conftest import OpenRegistry
from tests.runs.test_runs import ADA, BEN, MANAGER, OPERATOR, Effects, crash, ended

from operations import (
    CallError,
    ErrorCode,
    Identity,
    OperationContext,
    OperationRegistry,
    operation,
)
from operations.authority import ApprovalRule, Authority
from operations.runs import Limits, Retention, Run, RunState
from operations.runs.database import Connection
from operations.runs.records import Question
from operations.store.state import Store

KEPT, AT_ONCE = 60.0, 0.0
"""Seconds for which a waiting run stays in memory."""

parked = pytest.mark.parametrize("park", [KEPT, AT_ONCE], ids=["in memory", "parked"])


@pytest.fixture
async def effects() -> Effects:
    return Effects()


def durable(function: Any, **options: Any) -> Any:
    return operation("shop.order", durable=True, scopes=["shop"], **options)(function)


async def waiting(run: Run) -> RunState:
    """Return the state of a run once it waits."""
    with time_limit(10):
        async for state in run.watch():
            if state.waiting:
                return state
    raise AssertionError(run.state)


async def without_attempt(registry: OperationRegistry) -> None:
    """Wait until no run is in the memory of a process."""
    store: Any = registry.run_store
    with time_limit(10):
        while store._executor._sessions:
            await asyncio.sleep(0.01)


# ------------------------------------------------------------ signals


@parked
async def test_a_signal_continues_a_run(
    registries: OpenRegistry, effects: Effects, park: float
) -> None:
    async def order(context: OperationContext) -> list[Any]:
        paid = await context.call(effects.charge, 1)
        return [paid, await context.wait_for("shipped"), await context.wait_for("shipped")]

    registry = registries(durable(order), effects.charge, park=park)
    run = await registry.start("shop.order", {}, ADA)
    state = await waiting(run)
    if park == AT_ONCE:
        await without_attempt(registry)

    await run.signal("other", 0)
    await run.signal("shipped", {"by": "train"})
    await run.signal("shipped")
    end = await ended(run)

    assert state.status == "input_required"
    assert [(each.kind, each.request) for each in state.waiting] == [
        ("signal", {"name": "shipped"})
    ]
    assert end.result["data"] == [1, {"by": "train"}, None]
    assert effects.made == [1]
    with pytest.raises(CallError) as late:
        await run.signal("shipped")
    assert late.value.code == ErrorCode.RUN_ENDED


async def test_a_signal_may_come_before_the_run_waits_for_it(registries: OpenRegistry) -> None:
    """q"""

    async def order(context: OperationContext) -> Any:
        return await context.wait_for("shipped")

    registry = registries(durable(order))
    run = await registry.start("shop.order", {}, ADA, delay=0.2)
    await run.signal("shipped", 5)

    assert (await run.result(10)).data == 5


@parked
async def test_waiting_for_a_signal_ends_in_time(registries: OpenRegistry, park: float) -> None:
    async def order(context: OperationContext) -> str:
        try:
            return str(await context.wait_for("shipped", timeout=0.1))
        except CallError as error:
            return error.code

    registry = registries(durable(order), park=park)

    run = await registry.start("shop.order", {}, ADA)

    assert (await run.result(10)).data == "TIMEOUT"


async def test_a_run_waits_for_several_signals_at_the_same_time(registries: OpenRegistry) -> None:
    async def order(context: OperationContext) -> list[Any]:
        return list(await asyncio.gather(context.wait_for("a"), context.wait_for("b")))

    registry = registries(durable(order), park=AT_ONCE)
    run = await registry.start("shop.order", {}, ADA)
    await waiting(run)
    await run.signal("b", 2)
    await run.signal("a", 1)

    assert (await run.result(10)).data == [1, 2]


async def test_operations_that_are_not_durable_cannot_wait_for_signals(
    registries: OpenRegistry,
) -> None:
    @operation("shop.plain", scopes=["shop"])
    async def plain(context: OperationContext) -> str:
        assert context.run is not None
        assert await context.step("x", lambda: 1) == 1
        await context.sleep(0)
        return str(await context.wait_for("x"))

    registry = registries(plain)

    state = await ended(await registry.start("shop.plain", {}, ADA))

    assert state.error["code"] == "UNAVAILABLE"


# ------------------------------------------------------------ questions


FORM = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}


@parked
async def test_an_answer_continues_a_run(registries: OpenRegistry, park: float) -> None:
    """q: the first answer wins."""

    async def order(context: OperationContext) -> Any:
        return await context.elicit("Which size?", FORM)

    registry = registries(durable(order), park=park)
    run = await registry.start("shop.order", {}, ADA)
    (question,) = (await waiting(run)).waiting
    other = await registry.run(run.id, MANAGER)

    with pytest.raises(CallError) as wrong:
        await run.answer(question.key, {"action": "accept", "content": {"size": "big"}})
    answers = await asyncio.gather(
        *(
            run.answer(question.key, {"action": "accept", "content": {"size": size}})
            for size in (1, 2)
        )
    )
    late = await other.answer(question.key, {"action": "cancel"})
    end = await ended(run)

    assert (question.kind, question.request) == (
        "elicit",
        {"message": "Which size?", "schema": FORM},
    )
    assert wrong.value.code == ErrorCode.VALIDATION_ERROR
    assert sorted(answers) == [False, True]
    assert late is False
    assert end.result["data"]["content"]["size"] == 1 + answers.index(True)


async def test_a_question_is_asked_once_and_keeps_its_key_after_a_crash(
    registries: OpenRegistry,
) -> None:
    """x"""

    async def order(context: OperationContext) -> Any:
        first = await context.elicit("First?", FORM)
        second = await context.sample({"messages": []})
        return [first["action"], second]

    first = registries(durable(order))
    run = await first.start("shop.order", {}, ADA)
    (question,) = (await waiting(run)).waiting
    await run.answer(question.key, {"action": "decline"})
    with time_limit(10):
        async for state in run.watch():
            if state.waiting and state.waiting[0].key != question.key:
                break
    (second,) = run.state.waiting
    await crash(first)
    registry = registries(durable(order))
    await registry.run_store.open()  # type: ignore[union-attr]
    again = await registry.run(run.id, ADA)
    same = await waiting(again)

    assert same.waiting == (second,)
    assert await again.answer(second.key, {"role": "assistant"})
    assert (await again.result(10)).data == ["decline", {"role": "assistant"}]


async def test_a_question_of_another_caller_and_one_of_a_cancelled_run_is_not_answered(
    registries: OpenRegistry,
) -> None:
    """q"""

    async def order(context: OperationContext) -> Any:
        return await context.elicit("Which size?", FORM)

    registry = registries(durable(order), park=AT_ONCE)
    run = await registry.start("shop.order", {}, ADA)
    (question,) = (await waiting(run)).waiting
    store = registry.run_store
    assert store is not None
    with pytest.raises(CallError) as other:
        await store.answer(run.id, question.key, {"action": "cancel"}, BEN)
    assert not await run.answer("unknown", {"action": "cancel"})
    await run.cancel()

    assert other.value.code == ErrorCode.RUN_NOT_FOUND
    assert not await run.answer(question.key, {"action": "cancel"})
    assert (await ended(run)).status == "cancelled"


# ------------------------------------------------------------ approvals

APPROVER = OperationContext(identity=Identity("max", ["approvals:answer"]))


async def answer_next(registry: OperationRegistry, *, approve: bool) -> None:
    """Answer the only request for approval, once there is one."""
    with time_limit(10):
        while True:
            page = await registry.execute("approvals.list", {}, APPROVER)
            if page.data["approvals"]:
                break
            await asyncio.sleep(0.01)
    (record,) = page.data["approvals"]
    await registry.execute("approvals.answer", {"id": record["id"], "approve": approve}, APPROVER)


def with_approval(registry: OperationRegistry, operation_id: str) -> None:
    from msgspec.structs import replace  # noqa: PLC0415 - only here

    known = registry.get(operation_id)
    assert known is not None
    registry.register(replace(known, approve=ApprovalRule(hold=30)), replace=True)
    registry.register_object(registry.authority.approvals)


@parked
@pytest.mark.parametrize("approve", [True, False])
async def test_a_nested_call_that_needs_an_approval_waits_without_a_slot(
    registries: OpenRegistry, effects: Effects, park: float, approve: bool
) -> None:
    async def order(context: OperationContext) -> int:
        await context.call(effects.charge, 1)
        return int(await context.call(effects.slow, 2))

    registry = registries(
        durable(order),
        effects.charge,
        effects.slow,
        effects.price,
        park=park,
        limits=Limits(working=1),
    )
    with_approval(registry, "shop.slow")
    effects.released.set()
    run = await registry.start("shop.order", {}, ADA)
    state = await waiting(run)
    # The only slot is free.
    assert (await (await registry.start("shop.price", {"item": 1}, ADA)).result(10)).data == 10
    await answer_next(registry, approve=approve)
    end = await ended(run)

    assert (state.status, state.waiting[0].kind) == ("input_required", "approval")
    assert end.status == ("completed" if approve else "failed")
    assert [each for each in effects.made if each != "price 1"] == ([1, 2] if approve else [1])
    assert approve or end.error["code"] == "ACCESS_DENIED"


@parked
async def test_a_run_that_needs_an_approval_itself_waits(
    registries: OpenRegistry, effects: Effects, park: float
) -> None:
    registry = registries(effects.charge, park=park)
    with_approval(registry, "shop.charge")
    run = await registry.start("shop.charge", {"amount": 3}, ADA)
    state = await waiting(run)
    await answer_next(registry, approve=True)

    assert state.status == "input_required"
    assert (await run.result(10)).data == 3
    assert effects.made == [3]


def with_short_approval(registry: OperationRegistry, operation_id: str) -> None:
    """Let requests for approval expire at once, so that a run asks again and again."""
    from msgspec.structs import replace  # noqa: PLC0415 - only here

    known = registry.get(operation_id)
    assert known is not None
    registry.register(replace(known, approve=ApprovalRule(seconds=0.2)), replace=True)


async def test_an_approval_is_noticed_if_the_process_that_asked_is_gone(
    registries: OpenRegistry, effects: Effects
) -> None:
    async def order(context: OperationContext) -> int:
        return int(await context.call(effects.charge, 1))

    shared = Authority(Store())
    first, second = (
        registries(durable(order), effects.charge, park=AT_ONCE, authority=shared) for _ in range(2)
    )
    for registry in (first, second):
        with_approval(registry, "shop.charge")
        await registry.run_store.open()  # type: ignore[union-attr]
    store: Any = second.run_store
    # It has found no run that waits for an approval.
    await store._approvals
    run = await first.start("shop.order", {}, ADA)
    await waiting(run)
    await without_attempt(first)
    await first.aclose()
    await answer_next(second, approve=True)

    assert (await (await second.run(run.id, ADA)).result(10)).data == 1


@parked
@pytest.mark.requirement("R70")
async def test_a_run_whose_approval_is_never_answered_fails(
    registries: OpenRegistry, effects: Effects, park: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it asks again, because each request expires before the time of the run is over."""
    monkeypatch.setattr("operations.runs._APPROVAL_SECONDS", 0.05)

    async def order(context: OperationContext) -> int:
        return int(await context.call(effects.charge, 1))

    registry = registries(
        durable(order), effects.charge, park=park, retention=Retention(unanswered=1)
    )
    with_short_approval(registry, "shop.charge")
    run = await registry.start("shop.order", {}, ADA)
    state = await ended(run)

    assert (state.status, state.error["code"], effects.made) == ("failed", "TIMEOUT", [])


@parked
async def test_an_approval_after_one_that_expired_names_who_has_answered(
    registries: OpenRegistry, effects: Effects, park: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.runs._APPROVAL_SECONDS", 0.05)

    async def order(context: OperationContext) -> int:
        return int(await context.call(effects.charge, 1))

    registry = registries(durable(order), effects.charge, park=park, keep_steps=True)
    with_short_approval(registry, "shop.charge")
    run = await registry.start("shop.order", {}, ADA)
    first = (await waiting(run)).waiting[0].request["approval"]
    # The next request has time.
    with_approval(registry, "shop.charge")
    async for state in run.watch():
        if state.waiting and state.waiting[0].request["approval"] != first:
            break
    await answer_next(registry, approve=True)
    state = await ended(run)
    (step,) = [each for each in await run.steps() if each.operation == "approval"]

    assert (state.status, effects.made) == ("completed", [1])
    assert step.answered_by == "max"


@pytest.mark.requirement("R72")
@parked
@pytest.mark.parametrize("approved", ["shop.charge", "shop.order"])
async def test_a_caller_that_expires_while_it_waits_for_an_approval_continues_nothing(
    registries: OpenRegistry, effects: Effects, park: float, approved: str
) -> None:
    """r"""

    async def order(context: OperationContext) -> int:
        effects.made.append("order")
        return int(await context.call(effects.charge, 1))

    expires_at = int((time() + 3) * 1000)
    caller = OperationContext(identity=Identity("ada", ["shop"], expires_at=expires_at))
    registry = registries(durable(order), effects.charge, park=park)
    with_approval(registry, approved)
    run = await registry.start("shop.order", {}, caller)
    await waiting(run)
    while time() * 1000 < expires_at:
        await asyncio.sleep(0.05)
    await answer_next(registry, approve=True)
    state = await ended(await registry.run(run.id, OPERATOR))

    assert (state.status, state.error["code"]) == ("failed", "ACCESS_DENIED")
    assert effects.made == (["order"] if approved == "shop.charge" else [])


async def test_an_approval_is_used_once_for_all_attempts_of_a_run(
    registries: OpenRegistry, effects: Effects
) -> None:
    """f: the approval and the budget of the root call."""

    async def order(context: OperationContext) -> int:
        if not effects.begun.is_set():
            effects.begun.set()
            await asyncio.Event().wait()
        return 1

    first = registries(durable(order))
    with_approval(first, "shop.order")
    run = await first.start("shop.order", {}, ADA)
    await waiting(run)
    await answer_next(first, approve=True)
    await effects.begun.wait()
    await crash(first)
    second = registries(durable(order))
    with_approval(second, "shop.order")
    await second.run_store.open()  # type: ignore[union-attr]

    assert (await (await second.run(run.id, ADA)).result(10)).data == 1


# ------------------------------------------------------------ time


@parked
async def test_a_sleeping_run_has_no_slot_and_continues_in_time(
    registries: OpenRegistry, effects: Effects, park: float
) -> None:
    async def order(context: OperationContext) -> int:
        await context.call(effects.charge, 1)
        await context.sleep(0.5)
        return 2

    registry = registries(
        durable(order), effects.charge, effects.price, park=park, limits=Limits(working=1)
    )
    run = await registry.start("shop.order", {}, ADA)
    assert (await (await registry.start("shop.price", {"item": 1}, ADA)).result(10)).data == 10
    state = await run.refresh()
    end = await ended(run)

    assert state.status == "working"
    assert end.result["data"] == 2
    assert end.updated - end.created >= 500
    assert effects.made == [1, "price 1"]


async def test_runs_that_continue_wait_for_slots(
    registries: OpenRegistry, effects: Effects
) -> None:
    working, most = 0, 0

    async def order(number: int, context: OperationContext) -> Any:
        nonlocal working, most
        got = await context.wait_for("go")
        working += 1
        most = max(most, working)
        await asyncio.sleep(0)
        await context.call(effects.charge, number)
        working -= 1
        return got

    registry = registries(
        durable(order), effects.slow, effects.charge, limits=Limits(working=1), park=KEPT
    )
    runs = [await registry.start("shop.order", {"number": n}, ADA) for n in range(3)]
    for run in runs:
        await waiting(run)
    other = await registry.start("shop.slow", {"amount": 10}, ADA)
    await effects.begun.wait()
    for run in runs:
        await run.signal("go", run.id)
    await runs[0].cancel()
    cancelled = await ended(runs[0])
    before = list(effects.made)
    effects.released.set()

    assert (await other.result(10)).data == 10
    assert [(await run.result(10)).data for run in runs[1:]] == [run.id for run in runs[1:]]
    assert (before, cancelled.status, most) == ([10], "cancelled", 1)
    assert sorted(effects.made) == [1, 2, 10]


async def test_a_run_sleeps_only_for_the_rest_after_a_crash(
    registries: OpenRegistry, effects: Effects
) -> None:
    async def order(context: OperationContext) -> int:
        effects.begun.set()
        await context.sleep(0.5)
        return 2

    first = registries(durable(order))
    run = await first.start("shop.order", {}, ADA)
    await effects.begun.wait()
    await asyncio.sleep(0.1)
    await crash(first)
    second = registries(durable(order))
    await second.run_store.open()  # type: ignore[union-attr]
    end = await ended(await second.run(run.id, ADA))

    assert end.updated - end.created >= 500


# ------------------------------------------------------------ decisions


async def begun_and_lost(
    registries: OpenRegistry, effects: Effects, *operations: Any, root: str, given: Any
) -> Run:
    first = registries(*operations)
    run = await first.start(root, given, ADA)
    await effects.begun.wait()
    await crash(first)
    second = registries(*operations)
    await second.run_store.open()  # type: ignore[union-attr]
    run = await second.run(run.id, ADA)
    assert (await ended(run)).status == "unknown"
    return run


@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("nested", [True, False])
async def test_an_unknown_run_is_retried_with_a_decision(
    registries: OpenRegistry, effects: Effects, ran: bool, nested: bool
) -> None:
    async def order(context: OperationContext) -> int:
        return int(await context.call(effects.slow, 1))

    operations = durable(order), effects.slow
    root, given = ("shop.order", {}) if nested else ("shop.slow", {"amount": 1})
    run = await begun_and_lost(registries, effects, *operations, root=root, given=given)
    effects.released.set()

    with pytest.raises(CallError) as undecided:
        await run.retry()
    with pytest.raises(CallError):
        await run.retry(ran=7, not_run=True)
    if ran:
        await run.retry(ran=7)
    else:
        await run.retry(not_run=True)
    end = await ended(run)

    assert undecided.value.code == ErrorCode.VALIDATION_ERROR
    assert (end.status, end.result["data"]) == ("completed", 7 if ran else 1)
    assert effects.made == ([1] if ran else [1, 1])
    with pytest.raises(CallError):
        await run.retry()


async def test_a_failed_run_is_retried_with_its_recorded_results(
    registries: OpenRegistry, effects: Effects
) -> None:
    fails = iter([True, False])

    @operation("shop.ship", scopes=["shop"])
    async def ship() -> str:
        if next(fails):
            raise CallError("NO_TRAIN", "no train")
        return "shipped"

    async def order(context: OperationContext) -> list[Any]:
        return [await context.call(effects.charge, 1), await context.call(ship)]

    registry = registries(durable(order), effects.charge, ship)
    run = await registry.start("shop.order", {}, ADA)
    failed = await ended(run)
    await run.retry()
    end = await ended(run)

    assert failed.error["code"] == "NO_TRAIN"
    assert (end.id, end.result["data"], end.attempt) == (failed.id, [1, "shipped"], 2)
    assert effects.made == [1]


async def test_a_retry_after_a_timeout_needs_a_decision_about_the_call_that_was_running(
    registries: OpenRegistry, effects: Effects
) -> None:
    async def order(context: OperationContext) -> int:
        return int(await context.call(effects.slow, 1))

    registry = registries(durable(order, timeout=0.5), effects.slow)
    run = await registry.start("shop.order", {}, ADA)
    state = await ended(run)
    with pytest.raises(CallError) as undecided:
        await run.retry()
    await run.retry(ran=5)

    assert (state.status, state.error["code"]) == ("failed", "TIMEOUT")
    assert undecided.value.code == ErrorCode.VALIDATION_ERROR
    assert (await run.result(10)).data == 5
    assert effects.made == [1]


async def test_only_a_call_of_unknown_outcome_has_a_result_to_record(
    registries: OpenRegistry, effects: Effects
) -> None:
    registry = registries(effects.fail)
    run = await registry.start("shop.fail", {"reason": "NO_TRAIN"}, ADA)
    await ended(run)

    with pytest.raises(CallError) as caught:
        await run.retry(ran=7)

    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert (await run.refresh()).status == "failed"


async def test_a_recorded_result_of_the_root_call_keeps_its_step_if_steps_are_kept(
    registries: OpenRegistry, effects: Effects
) -> None:
    first = registries(effects.slow)
    run = await first.start("shop.slow", {"amount": 1}, ADA)
    await effects.begun.wait()
    await crash(first)
    second = registries(effects.slow, keep_steps=True)
    await second.run_store.open()  # type: ignore[union-attr]
    run = await second.run(run.id, ADA)
    await ended(run)

    await run.retry(ran=7)
    (step,) = await run.steps()

    assert (await run.result(10)).data == 7
    assert (step.name, step.ended is not None) == (".", True)


async def test_a_retry_needs_room_for_one_more_live_run(
    registries: OpenRegistry, effects: Effects
) -> None:
    registry = registries(effects.charge, limits=Limits(live_per_caller=1))
    cancelled = await registry.start("shop.charge", {"amount": 1}, ADA, delay=3600)
    await cancelled.cancel()
    live = await registry.start("shop.charge", {"amount": 1}, ADA, delay=3600)

    with pytest.raises(CallError) as caught:
        await cancelled.retry()
    await live.cancel()
    await cancelled.retry()

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert (await cancelled.result(10)).data == 1


async def test_a_retried_run_asks_again_with_the_whole_time(registries: OpenRegistry) -> None:
    waits = iter([("old", 0.2), ("new", 60)])

    async def order(context: OperationContext) -> Any:
        name, seconds = next(waits)
        return await context.wait_for(name, seconds)

    registry = registries(durable(order))
    run = await registry.start("shop.order", {}, ADA)
    await waiting(run)
    await run.cancel()
    await ended(run)
    await run.retry()
    state = await waiting(run)
    await run.signal("new", 5)

    assert [each.request["name"] for each in state.waiting] == ["new"]
    assert (await run.result(10)).data == 5


async def test_a_retried_run_uses_the_approval_of_its_first_attempt(
    registries: OpenRegistry, effects: Effects
) -> None:
    """f: the nested calls of the first attempt are recorded, so the call goes on and is not made again."""
    fails = iter([True, False])

    async def order(context: OperationContext) -> int:
        charged = await context.call(effects.charge, 1)
        if next(fails):
            raise CallError("NO_TRAIN", "no train")
        return int(charged)

    registry = registries(durable(order), effects.charge)
    with_approval(registry, "shop.order")
    run = await registry.start("shop.order", {}, ADA)
    await waiting(run)
    await answer_next(registry, approve=True)
    failed = await ended(run)
    await run.retry()

    assert failed.error["code"] == "NO_TRAIN"
    assert (await run.result(10)).data == 1
    assert effects.made == [1]


async def test_a_call_that_did_not_run_keeps_its_approval(
    registries: OpenRegistry, effects: Effects
) -> None:
    first = registries(effects.slow)
    with_approval(first, "shop.slow")
    run = await first.start("shop.slow", {"amount": 1}, ADA)
    await waiting(run)
    await answer_next(first, approve=True)
    await effects.begun.wait()
    await crash(first)
    second = registries(effects.slow)
    with_approval(second, "shop.slow")
    await second.run_store.open()  # type: ignore[union-attr]
    run = await second.run(run.id, ADA)
    unknown = await ended(run)
    effects.released.set()
    await run.retry(not_run=True)

    assert unknown.status == "unknown"
    assert (await run.result(10)).data == 1


# ------------------------------------------------------------ branches


async def test_a_signal_that_an_attempt_has_taken_before_it_is_parked_is_not_forgotten(
    registries: OpenRegistry,
) -> None:
    async def order(context: OperationContext) -> Any:
        return await context.wait_for("go")

    registry = registries(durable(order))
    run = await registry.start("shop.order", {}, ADA)
    (asked,) = (await waiting(run)).waiting
    store: Any = registry.run_store
    question = Question(asked.key, "signal", b'{"name":"go"}')

    def take_and_park(db: Connection) -> None:
        store.journal.signal(db, run.id, "go", b"7", "ada")
        store.journal.ask(db, run.id, 1, question, "go", None)
        store.journal.park(db, run.id, 1, [])

    await store.write(take_and_park)
    store._executor.wake()

    assert (await run.result(10)).data == 7


@pytest.mark.parametrize("plain", [False, True])
async def test_a_branch_beside_one_that_waits_continues_after_a_shutdown(
    registries: OpenRegistry, effects: Effects, plain: bool
) -> None:
    async def order(context: OperationContext) -> int:
        async def work() -> None:
            await context.call(effects.slow, 1)
            if plain:
                # Neither a step nor a wait of the run.
                await asyncio.sleep(0.1)
            await context.call(effects.charge, 2)
            run = context.run
            assert run is not None
            await context.step("signal", lambda: run.signal("done", 3))

        async with asyncio.TaskGroup() as group:
            group.create_task(work())
            got = group.create_task(context.wait_for("done"))
        return int(got.result())

    operations = durable(order), effects.slow, effects.charge
    first = registries(*operations, grace=5.0)
    run = await first.start("shop.order", {}, ADA)
    await effects.begun.wait()
    await waiting(run)
    closing = asyncio.create_task(first.aclose())
    await asyncio.sleep(0)
    effects.released.set()
    await closing
    second = registries(*operations)
    await second.run_store.open()  # type: ignore[union-attr]

    assert (await (await second.run(run.id, ADA)).result(10)).data == 3
    assert effects.made == [1, 2]


@pytest.mark.parametrize("park", [AT_ONCE, 0.02, KEPT])
async def test_runs_with_branches_that_wait_all_end(
    registries: OpenRegistry, effects: Effects, park: float
) -> None:
    """Branches are answered, signalled and cancelled by two processes while attempts end."""
    chance = Random(park)

    async def order(plan: list[str], context: OperationContext) -> int:
        async def branch(number: int, kind: str) -> None:
            match kind:
                case "charge":
                    await context.call(effects.charge, number)
                case "sleep":
                    await context.sleep(0.02)
                case "signal":
                    await context.wait_for(f"s{number}")
                case _:
                    await context.elicit(f"Question {number}", FORM)

        await asyncio.gather(*starmap(branch, enumerate(plan)))
        for number, kind in enumerate(plan, len(plan)):
            await branch(number, kind)
        return len(plan)

    some = [
        registries(durable(order), effects.charge, park=park, limits=Limits(working=2), lease=5.0)
        for _ in range(2)
    ]
    for registry in some:
        await registry.run_store.open()  # type: ignore[union-attr]

    async def drive() -> RunState:
        plan = chance.choices(["charge", "sleep", "signal", "ask"], k=3)
        run = await chance.choice(some).start("shop.order", {"plan": plan}, ADA)
        sent = set[str]()
        async for state in (await chance.choice(some).run(run.id, ADA)).watch():
            handle = await chance.choice(some).run(run.id, ADA)
            for each in state.waiting:
                if each.kind == "elicit":
                    await handle.answer(each.key, {"action": "accept", "content": {"size": 1}})
                elif each.key not in sent:
                    sent.add(each.key)
                    await handle.signal(each.request["name"])
        return await run.refresh()

    with time_limit(60):
        states = await asyncio.gather(*(drive() for _ in range(30)))

    assert {state.status for state in states} == {"completed"}


# ------------------------------------------------------------ many


async def test_many_waiting_runs_need_no_memory_and_others_start_at_once(
    registries: OpenRegistry, effects: Effects
) -> None:
    """s, in small: `benchmarks/runs.py` has 10,000."""

    async def order(number: int, context: OperationContext) -> Any:
        return await context.wait_for("go")

    registry = registries(durable(order), effects.charge, park=AT_ONCE)
    runs = [await registry.start("shop.order", {"number": n}, OPERATOR) for n in range(200)]
    for run in runs:
        await waiting(run)
    await without_attempt(registry)

    assert (await (await registry.start("shop.charge", {"amount": 1}, ADA)).result(10)).data == 1
    await runs[150].signal("go", "150")
    assert (await runs[150].result(10)).data == "150"


async def test_a_run_whose_wait_ends_while_it_is_parked_is_not_lost(
    registries: OpenRegistry,
) -> None:
    async def order(context: OperationContext) -> int:
        session: Any = context.scope._session  # type: ignore[union-attr]
        sleeping = asyncio.ensure_future(context.sleep(600))
        while not session._is_idle:
            await asyncio.sleep(0)
        # Both in one turn of the event loop: the sleep ends before the attempt does.
        sleeping.cancel()
        session._start_parking()
        await asyncio.wait([sleeping])
        return 5

    registry = registries(durable(order))
    run = await registry.start("shop.order", {}, ADA)

    assert (await run.result(20)).data == 5
