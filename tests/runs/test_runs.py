"""Runs: start, steps, keys, cancel, and who may see what. Letters are those of the scenarios in `docs/runs.md`."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import pytest
from msgspec.structs import replace
from tests.limits import scaled, time_limit
from tests.runs.conftest import OpenRegistry

from operations import (
    CallError,
    ErrorCode,
    Identity,
    OperationContext,
    OperationRegistry,
    operation,
)
from operations.contract.grant import Block, Grant, Issuer
from operations.runs import Limits, Run, Runs, RunState, RunStatus

OPERATOR = OperationContext(trusted=True)
ADA = OperationContext(identity=Identity("ada", ["shop"]))
BEN = OperationContext(identity=Identity("ben", ["shop"]))
AUDITOR = OperationContext(identity=Identity("eve", ["runs:read"]))
MANAGER = OperationContext(identity=Identity("max", ["runs:manage"]))


class Effects:
    """Operations that count their effects, and can be held."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.begun = asyncio.Event()
        self.released = asyncio.Event()

    @operation("shop.charge", scopes=["shop"])
    async def charge(self, amount: int) -> int:
        """Run only once."""
        self.made.append(amount)
        return amount

    @operation("shop.slow", scopes=["shop"])
    async def slow(self, amount: int) -> int:
        """Run only once, until the test releases it."""
        self.made.append(amount)
        self.begun.set()
        await self.released.wait()
        return amount

    @operation("shop.price", type="query", scopes=["shop"])
    async def price(self, item: int) -> int:
        """Return a price."""
        self.made.append(f"price {item}")
        return 10 * item

    @operation("shop.fail", scopes=["shop"])
    async def fail(self, reason: str) -> int:
        """Fail."""
        self.made.append(reason)
        raise CallError(reason, "as asked", begun=False if reason == "NOT_BEGUN" else None)


@pytest.fixture
async def effects() -> Effects:
    return Effects()


async def ended(run: Run) -> RunState:
    """Return the final state of a run."""
    with time_limit(20):
        await run.wait(scaled(20))
    assert run.state.is_final
    return run.state


def durable(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a function as the durable operation `shop.order`."""
    return operation("shop.order", durable=True, scopes=["shop"], **options)(function)


# ------------------------------------------------------------ start and results


async def test_a_run_returns_the_envelope_of_its_call(
    registries: OpenRegistry, effects: Effects
) -> None:
    registry = registries(effects.charge)

    run = await registry.start("shop.charge", {"amount": 3}, ADA)
    envelope = await run.result(10)
    same = await registry.run(run.id, ADA)

    assert (envelope.data, run.status, len(run.id)) == (3, RunStatus.COMPLETED, 32)
    assert (await same.result()).data == 3
    assert effects.made == [3]


async def test_a_start_is_checked_as_the_call(registries: OpenRegistry, effects: Effects) -> None:
    @operation("shop.watch")
    async def watch() -> Any:
        yield 1

    registry = registries(effects.charge, watch)

    codes: list[str] = []
    for operation_id, given, context in (
        ("shop.charge", {"amount": 3}, OperationContext()),
        ("shop.charge", {"amount": "x"}, ADA),
        ("shop.watch", {}, ADA),
        ("shop.unknown", {}, ADA),
        ("shop.charge", {"amount": 3, "more": "x" * 300_000}, ADA),
    ):
        with pytest.raises(CallError) as caught:
            await registry.start(operation_id, given, context)
        codes.append(caught.value.code)

    assert codes == [
        "ACCESS_DENIED", "VALIDATION_ERROR", "VALIDATION_ERROR", "OPERATION_NOT_FOUND", "VALIDATION_ERROR",
    ]  # fmt: skip
    assert not (await registry.runs(OPERATOR)).runs


async def test_without_a_store_there_are_no_runs(effects: Effects) -> None:
    registry = OperationRegistry([effects.charge])

    for call in (
        registry.start("shop.charge", {"amount": 3}, ADA),
        registry.run("0" * 32, ADA),
        registry.runs(ADA),
    ):
        with pytest.raises(CallError) as caught:
            await call
        assert caught.value.code == ErrorCode.UNAVAILABLE


async def test_a_durable_operation_is_a_run_for_its_caller(
    registries: OpenRegistry, effects: Effects
) -> None:
    async def order(context: OperationContext) -> str:
        return str(context.run.id)

    registry = registries(durable(order))
    without = OperationRegistry([operation("shop.inline", durable=True)(_in_run)])

    envelope = await registry.execute("shop.order", {}, ADA)
    page = await registry.runs(ADA)

    assert [run.id for run in page.runs] == [envelope.data]
    assert (await without.execute("shop.inline", {})).data is False


async def _in_run(context: OperationContext) -> bool:
    await context.sleep(0)
    assert await context.step("x", lambda: 1) == 1
    with pytest.raises(CallError) as caught:
        await context.wait_for("x")
    assert caught.value.code == ErrorCode.UNAVAILABLE
    return context.run is not None


async def test_cancelling_the_waiting_caller_does_not_cancel_the_run(
    registries: OpenRegistry, effects: Effects
) -> None:
    async def order(context: OperationContext) -> int:
        return int(await context.call(effects.slow, 1))

    registry = registries(durable(order), effects.slow)

    caller = asyncio.create_task(registry.execute("shop.order", {}, ADA))
    await effects.begun.wait()
    caller.cancel()
    await asyncio.wait({caller})
    effects.released.set()
    (state,) = (await registry.runs(ADA)).runs
    run = await registry.run(state.id, ADA)

    assert (await run.result(10)).data == 1


async def test_a_deadline_and_a_timeout_end_the_wait_and_not_the_run(
    registries: OpenRegistry, effects: Effects
) -> None:
    registry = registries(effects.slow)

    run = await registry.start("shop.slow", {"amount": 1}, ADA)
    with pytest.raises(CallError) as caught:
        await run.result(0.01)
    effects.released.set()

    assert caught.value.code == ErrorCode.TIMEOUT
    assert (await run.result(10)).data == 1


async def test_the_error_of_a_call_is_that_of_its_run(
    registries: OpenRegistry, effects: Effects
) -> None:
    registry = registries(effects.fail)

    run = await registry.start("shop.fail", {"reason": "SOLD_OUT"}, ADA)
    with pytest.raises(CallError) as caught:
        await run.result(10)

    assert (run.status, caught.value.code, caught.value.message) == (
        "failed",
        "SOLD_OUT",
        "as asked",
    )


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (object(), "EXECUTION_ERROR"),
        ("x" * 2_000_000, "EXECUTION_ERROR"),
        (b"\x00\xff", b"\x00\xff"),
        (None, None),
    ],
    ids=["not JSON", "too large", "bytes", "none"],
)
async def test_results_are_recorded_as_they_are(
    registries: OpenRegistry, result: Any, expected: Any
) -> None:
    """v"""

    @operation("shop.any", idempotent=True)
    async def any_result() -> Any:
        return result

    async def order(context: OperationContext) -> Any:
        try:
            return (await context.env.call("shop.any")).data
        except CallError as error:
            return error.code

    registry = registries(any_result, durable(order))

    data = (await (await registry.start("shop.order", {}, ADA)).result(10)).data
    plain = await ended(await registry.start("shop.any", {}, ADA))

    assert data == expected
    assert plain.status == ("failed" if expected == "EXECUTION_ERROR" else "completed")


async def test_watching_yields_the_present_state_every_change_and_the_end(
    registries: OpenRegistry, effects: Effects
) -> None:
    async def order(context: OperationContext) -> int:
        await context.progress(1, 2, "half")
        return int(await context.call(effects.slow, 1))

    registry = registries(durable(order), effects.slow)

    run = await registry.start("shop.order", {}, ADA)
    seen: list[RunState] = []
    async for state in run.watch():
        seen.append(state)
        if state.message == "half":
            effects.released.set()

    assert (seen[0].status, seen[-1].status) == ("working", "completed")
    assert any(state.progress == {"progress": 1, "total": 2} for state in seen)
    revisions = [state.revision for state in seen]
    assert revisions == sorted(set(revisions))


# ------------------------------------------------------------ keys


@pytest.mark.requirement("R73")
async def test_a_key_names_one_run(registries: OpenRegistry, effects: Effects) -> None:
    """h, j"""
    registry = registries(effects.charge, effects.price)

    first = await registry.start("shop.charge", {"amount": 3}, ADA, key="k")
    await first.result(10)
    again = await registry.start("shop.charge", {"amount": 3}, ADA, key="k")
    others = [
        await registry.start("shop.charge", {"amount": 3}, BEN, key="k"),
        await registry.start("shop.price", {"item": 3}, ADA, key="k"),
    ]
    with pytest.raises(CallError) as conflict:
        await registry.start("shop.charge", {"amount": 4}, ADA, key="k")

    assert again.id == first.id
    assert (await again.result()).data == 3
    assert len({first.id, *(each.id for each in others)}) == 3
    assert conflict.value.code == ErrorCode.VALIDATION_ERROR
    assert conflict.value.details["errors"][0]["path"] == "/key"


@pytest.mark.requirement("R73")
async def test_many_starts_with_one_key_at_the_same_time_are_one_run(
    registries: OpenRegistry, effects: Effects
) -> None:
    registry = registries(effects.charge)
    await registry.run_store.open()  # type: ignore[union-attr]

    runs = await asyncio.gather(
        *(registry.start("shop.charge", {"amount": 3}, ADA, key="k") for _ in range(20))
    )
    await runs[0].result(10)

    assert len({run.id for run in runs}) == 1
    assert effects.made == [3]


def granted(block_id: str, issuer: Issuer | None = None) -> OperationContext:
    block = Block(id=block_id, holder="agent", operations=("shop.*",))
    grant = Grant(blocks=(block,), keys=(f"key of {block_id}",))
    if issuer is not None:
        grant = grant.issued_by(issuer)
    return OperationContext(identity=Identity("ada", ["shop"], acting=("agent",), grant=grant))


async def test_a_renewed_grant_uses_the_same_key(
    registries: OpenRegistry, effects: Effects
) -> None:
    """g"""
    registry = registries(effects.charge)

    first = await registry.start("shop.charge", {"amount": 3}, granted("1"), key="k")
    second = await registry.start("shop.charge", {"amount": 3}, granted("2"), key="k")

    assert first.id == second.id


async def test_anonymous_callers_and_strange_keys_are_rejected(registries: OpenRegistry) -> None:
    @operation("shop.open")
    async def anyone() -> int:
        return 1

    registry = registries(anyone)

    for context, key in ((OperationContext(), "k"), (ADA, ""), (ADA, "k" * 256), (ADA, "\ud800")):
        with pytest.raises(CallError) as caught:
            await registry.start("shop.open", {}, context, key=key)
        assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_an_expired_run_is_not_there_and_its_key_is_free(
    registries: OpenRegistry, effects: Effects
) -> None:
    """i"""
    registry = registries(effects.charge)

    first = await registry.start("shop.charge", {"amount": 3}, ADA, key="k", retention=0)
    with pytest.raises(CallError) as gone:
        while True:
            await first.refresh()
    second = await registry.start("shop.charge", {"amount": 4}, ADA, key="k")

    assert gone.value.code == ErrorCode.RUN_NOT_FOUND
    assert (await second.result(10)).data == 4


# ------------------------------------------------------------ steps


async def crash(registry: OperationRegistry) -> None:
    """End the attempts of a registry as a crash does: nothing more is recorded."""
    store: Any = registry.run_store
    store._executor.stop_all("crash")
    await registry.aclose()


async def test_recorded_steps_are_not_made_again(
    registries: OpenRegistry, effects: Effects
) -> None:
    attempts = count(1)

    async def order(context: OperationContext) -> list[Any]:
        number = next(attempts)
        found: list[Any] = [
            *await asyncio.gather(*(context.call(effects.charge, n) for n in (1, 2, 1)))
        ]
        found.append(await context.call(effects.price, 5))
        try:
            await context.call(effects.fail, "SOLD_OUT")
        except CallError as error:
            found.append(error.code)
        found.append(await context.step("random", lambda: uuid4().hex))
        if number == 1:
            effects.begun.set()
            await asyncio.Event().wait()
        return found

    operations = durable(order), effects.charge, effects.price, effects.fail
    first = registries(*operations)
    run = await first.start("shop.order", {}, ADA)
    await effects.begun.wait()
    await crash(first)
    events: list[Any] = []
    second = registries(*operations)
    second.observe(events.append)
    await second.run_store.open()  # type: ignore[union-attr]
    state = await ended(await second.run(run.id, ADA))

    assert state.result["data"][:5] == [1, 2, 1, 50, "SOLD_OUT"]
    assert sorted(map(str, effects.made)) == ["1", "1", "2", "SOLD_OUT", "price 5"]
    assert next(attempts) == 3
    assert state.attempt == 2
    # Replayed steps are reported to no observer.
    assert {event.operation_id for event in events} == {"shop.order"}


@pytest.mark.parametrize("caught", [Exception, BaseException])
async def test_a_handler_cannot_catch_an_unknown_outcome(
    registries: OpenRegistry, effects: Effects, caught: type[BaseException]
) -> None:
    """c: the call was begun by an attempt that is gone."""

    async def order(context: OperationContext) -> str:
        try:
            await context.call(effects.slow, 1)
        except caught:
            effects.made.append("caught")
        await context.call(effects.charge, 2)
        return "as if nothing had happened"

    operations = durable(order), effects.slow, effects.charge
    first = registries(*operations)
    run = await first.start("shop.order", {}, ADA)
    await effects.begun.wait()
    await crash(first)
    effects.made.clear()
    second = registries(*operations)
    await second.run_store.open()  # type: ignore[union-attr]
    state = await ended(await second.run(run.id, ADA))

    assert (state.status, state.error["code"]) == ("unknown", "OUTCOME_UNKNOWN")
    assert state.error["details"]["operation"] == "shop.slow"
    assert effects.made == []


async def test_a_handler_that_catches_everything_does_nothing_after_its_attempt(
    registries: OpenRegistry, effects: Effects
) -> None:
    """c: the attempt ends while a nested call runs, and the handler goes on."""

    async def order(context: OperationContext) -> str:
        try:
            await context.call(effects.slow, 1)
        except BaseException:  # noqa: BLE001 - what a handler may do
            effects.made.append("caught")
        await context.call(effects.charge, 2)
        return "as if nothing had happened"

    registry = registries(durable(order), effects.slow, effects.charge)
    run = await registry.start("shop.order", {}, ADA)
    await effects.begun.wait()
    await crash(registry)

    assert effects.made == [1, "caught"]
    client = registries(executes=False)
    assert (await client.run(run.id, ADA)).status == "working"


async def test_a_random_input_ends_the_run_and_charges_nothing_again(
    registries: OpenRegistry, effects: Effects
) -> None:
    """d"""
    amounts = count(100)

    async def order(context: OperationContext) -> str:
        await context.call(effects.charge, next(amounts))
        effects.begun.set()
        await asyncio.Event().wait()
        return ""

    operations = durable(order), effects.charge
    first = registries(*operations)
    run = await first.start("shop.order", {}, ADA)
    await effects.begun.wait()
    await crash(first)
    second = registries(*operations)
    await second.run_store.open()  # type: ignore[union-attr]
    state = await ended(await second.run(run.id, ADA))

    assert (state.status, state.error["code"]) == ("unknown", "RUN_DIVERGED")
    assert effects.made == [100]


async def test_a_call_that_never_began_keeps_its_name(
    registries: OpenRegistry, effects: Effects
) -> None:
    """The handler repeats the call until it succeeds; the next attempt gets that result from its first call."""
    outcomes = iter([False, True])
    replies: list[Any] = []

    @operation("shop.flaky", scopes=["shop"])
    async def flaky() -> str:
        if not next(outcomes):
            raise CallError("UNAVAILABLE", "nobody listens", begun=False)
        return "sent"

    async def order(context: OperationContext) -> str:
        for _ in range(2):
            try:
                replies.append(await context.call(flaky))
                break
            except CallError as error:
                replies.append(error.code)
        if len(replies) == 2:
            effects.begun.set()
            await asyncio.Event().wait()
        return str(replies[-1])

    operations = durable(order), flaky
    first = registries(*operations)
    run = await first.start("shop.order", {}, ADA)
    await effects.begun.wait()
    await crash(first)
    second = registries(*operations)
    await second.run_store.open()  # type: ignore[union-attr]
    state = await ended(await second.run(run.id, ADA))

    assert state.status == "completed"
    assert replies == ["UNAVAILABLE", "sent", "sent"]


async def test_a_call_that_the_handler_times_out_is_not_repeated(
    registries: OpenRegistry, effects: Effects
) -> None:
    async def order(context: OperationContext) -> str:
        try:
            async with asyncio.timeout(0.01):
                await context.call(effects.slow, 1)
        except TimeoutError:
            return "timed out"
        return "done"

    registry = registries(durable(order), effects.slow)

    state = await ended(await registry.start("shop.order", {}, ADA))

    assert state.result["data"] == "timed out"


async def test_a_call_that_the_handler_timed_out_is_recorded_and_the_run_continues(
    registries: OpenRegistry, effects: Effects
) -> None:
    attempts, called = count(1), asyncio.Event()

    async def order(context: OperationContext) -> str:
        try:
            async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
                group.create_task(end_when_begun(limit))
                await context.call(effects.slow, 1)
        except (TimeoutError, ExceptionGroup):
            await context.call(effects.charge, 2)
        if next(attempts) == 1:
            called.set()
            await asyncio.Event().wait()
        return "timed out"

    async def end_when_begun(limit: asyncio.Timeout) -> None:
        await effects.begun.wait()
        limit.reschedule(0)

    operations = durable(order), effects.slow, effects.charge
    first = registries(*operations)
    run = await first.start("shop.order", {}, ADA)
    await called.wait()
    assert any(step.error for step in await run.steps())
    await crash(first)
    second = registries(*operations)
    await second.run_store.open()  # type: ignore[union-attr]
    state = await ended(await second.run(run.id, ADA))

    assert (state.status, effects.made) == ("completed", [1, 2])


async def test_a_call_with_the_context_of_the_handler_is_rejected(
    registries: OpenRegistry, effects: Effects
) -> None:
    """It would not be recorded."""

    async def order(context: OperationContext) -> str:
        try:
            await registry.execute("shop.charge", {"amount": 1}, context)
        except CallError as error:
            return error.message
        return ""

    registry = registries(durable(order), effects.charge)

    state = await ended(await registry.start("shop.order", {}, ADA))

    assert "context.env" in state.result["data"]
    assert effects.made == []


async def test_nested_calls_of_a_nested_durable_operation_are_steps_of_the_same_run(
    registries: OpenRegistry, effects: Effects
) -> None:
    @operation("shop.inner", durable=True, scopes=["shop"])
    async def inner(amount: int, context: OperationContext) -> int:
        return int(await context.call(effects.charge, amount))

    async def order(context: OperationContext) -> int:
        # The same call inside and outside: two steps.
        total = await context.call(inner, 1) + await context.call(effects.charge, 1)
        if not effects.begun.is_set():
            effects.begun.set()
            await asyncio.Event().wait()
        return int(total + await context.call(effects.charge, 1))

    operations = durable(order), inner, effects.charge
    first = registries(*operations)
    run = await first.start("shop.order", {}, ADA)
    await effects.begun.wait()
    await crash(first)
    second = registries(*operations)
    await second.run_store.open()  # type: ignore[union-attr]
    state = await ended(await second.run(run.id, ADA))

    assert state.result["data"] == 3
    assert effects.made == [1, 1, 1]
    assert len((await second.runs(ADA)).runs) == 1


# ------------------------------------------------------------ resume


async def interrupted(
    registries: OpenRegistry, effects: Effects, context: OperationContext, **options: Any
) -> tuple[Run, Callable[..., Any]]:
    """Start a run, and end its first attempt; return it and its operation."""

    async def order(context: OperationContext) -> int:
        if not effects.begun.is_set():
            effects.begun.set()
            await asyncio.Event().wait()
        return int(await context.call(effects.charge, 1))

    root = durable(order)
    first = registries(root, effects.charge, **options)
    run = await first.start("shop.order", {}, context)
    await effects.begun.wait()
    await crash(first)
    return run, root


async def resumed(registry: OperationRegistry, run: Run) -> RunState:
    await registry.run_store.open()  # type: ignore[union-attr]
    return await ended(await registry.run(run.id, OPERATOR))


@pytest.mark.requirement("R72")
@pytest.mark.parametrize(
    ("today", "status"),
    [
        (Identity("ada", ["shop"]), "completed"),
        (Identity("ada", []), "failed"),
        (None, "failed"),
    ],
    ids=["the same", "fewer scopes", "unknown"],
)
async def test_a_run_continues_with_the_authority_of_today(
    registries: OpenRegistry, effects: Effects, today: Identity | None, status: str
) -> None:
    """r"""
    run, root = await interrupted(registries, effects, ADA, subjects=lambda *_: today)

    registry = registries(root, effects.charge, subjects=lambda *_: today)
    state = await resumed(registry, run)

    assert state.status == status
    assert status == "completed" or state.error["code"] == "ACCESS_DENIED"
    assert effects.made == ([1] if status == "completed" else [])


async def test_an_expired_caller_continues_nothing(
    registries: OpenRegistry, effects: Effects
) -> None:
    """r"""
    caller = OperationContext(identity=Identity("ada", ["shop"], expires_at=1))
    store: Any = None
    run, root = await interrupted(registries, effects, ADA)
    registry = registries(root, effects.charge)
    store = registry.run_store
    from operations.runs import callers  # noqa: PLC0415 - only here

    await store.write(lambda db: db.count("UPDATE runs SET caller = ?", callers.stored(caller)))
    state = await resumed(registry, run)

    assert (state.status, state.error["code"]) == ("failed", "ACCESS_DENIED")


class RevokingIssuer:
    """Says which grants were revoked."""

    def __init__(self) -> None:
        self.revoked = False

    def is_valid(self, grant: Grant) -> bool:
        return not self.revoked

    def has_revoked(self, grant: Grant) -> bool:
        return self.revoked

    async def is_revoked(self, grant: Grant) -> bool:
        return self.revoked


@pytest.mark.requirement("R72")
@pytest.mark.parametrize("revoked", [False, True])
async def test_a_revoked_grant_continues_nothing(
    registries: OpenRegistry, effects: Effects, revoked: bool
) -> None:
    """r"""
    issuer = RevokingIssuer()
    run, root = await interrupted(registries, effects, granted("1", issuer))

    issuer.revoked = revoked
    registry = registries(root, effects.charge, grants=issuer)
    state = await resumed(registry, run)

    assert state.status == ("failed" if revoked else "completed")


@pytest.mark.parametrize("knows", [True, False])
async def test_a_grant_continues_nothing_where_its_revocation_cannot_be_checked(
    registries: OpenRegistry, effects: Effects, knows: bool
) -> None:
    issuer = RevokingIssuer()
    run, root = await interrupted(registries, effects, granted("1", issuer))

    registry = registries(root, effects.charge, grants=issuer if knows else None)

    assert (await resumed(registry, run)).status == ("completed" if knows else "failed")


@pytest.mark.parametrize("change", ["removed", "changed"])
async def test_a_changed_or_removed_operation_ends_its_runs(
    registries: OpenRegistry, effects: Effects, change: str
) -> None:
    """r"""
    run, _ = await interrupted(registries, effects, ADA)

    async def order(more: int, context: OperationContext) -> int:
        return more

    registry = registries(effects.charge, *([durable(order)] if change == "changed" else []))
    state = await resumed(registry, run)

    expected = {"removed": "OPERATION_NOT_FOUND", "changed": "OPERATION_CHANGED"}
    assert (state.status, state.error["code"]) == ("failed", expected[change])


async def test_a_run_that_crashes_its_process_every_time_fails(
    registries: OpenRegistry, effects: Effects
) -> None:
    run, root = await interrupted(registries, effects, ADA)
    registry = registries(root, effects.charge)
    store: Any = registry.run_store
    await store.write(lambda db: db.count("UPDATE runs SET crashes = 20"))

    state = await resumed(registry, run)

    assert (state.status, state.error["code"]) == ("failed", "EXECUTION_ERROR")


# ------------------------------------------------------------ cancel


async def test_cancelling_ends_a_working_run_and_names_what_had_begun(
    registries: OpenRegistry, effects: Effects
) -> None:
    """p"""

    async def order(context: OperationContext) -> int:
        try:
            return int(await context.call(effects.slow, 1))
        finally:
            await context.call(effects.charge, 2)

    registry = registries(durable(order), effects.slow, effects.charge)
    run = await registry.start("shop.order", {}, ADA)
    await effects.begun.wait()

    await run.cancel()
    await run.cancel()
    state = await ended(run)
    await run.cancel()

    assert (state.status, state.error["code"]) == ("cancelled", "ABORTED")
    assert [each["operation"] for each in state.error["details"]["begun"]] == ["shop.slow"]
    # The handler may clean up.
    assert effects.made == [1, 2]
    assert (await run.refresh()) == state


async def test_a_run_that_is_cancelled_while_its_caller_is_resolved_does_nothing(
    registries: OpenRegistry, effects: Effects
) -> None:
    """p"""
    asked = asyncio.Event()

    async def subjects(known: Identity) -> Identity:
        asked.set()
        await effects.released.wait()
        return known

    registry = registries(effects.charge, subjects=subjects)
    run = await registry.start("shop.charge", {"amount": 1}, ADA, delay=0.01)
    await asked.wait()
    await run.cancel()
    state = await ended(run)
    effects.released.set()

    assert (state.status, effects.made) == ("cancelled", [])


async def test_a_run_that_ends_first_keeps_its_result(
    registries: OpenRegistry, effects: Effects
) -> None:
    """p"""

    async def order(context: OperationContext) -> str:
        effects.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "done anyway"
        return ""

    registry = registries(durable(order))
    run = await registry.start("shop.order", {}, ADA)
    await effects.begun.wait()
    await run.cancel()
    state = await ended(run)

    assert (state.status, state.result["data"]) == ("completed", "done anyway")


async def test_a_queued_run_is_cancelled_at_once(
    registries: OpenRegistry, effects: Effects
) -> None:
    """p"""
    registry = registries(effects.charge)

    run = await registry.start("shop.charge", {"amount": 1}, ADA, delay=3600)
    before = run.status
    await run.cancel()

    assert (before, run.status) == ("queued", "cancelled")
    assert effects.made == []


async def test_a_run_of_another_process_is_cancelled_there(
    registries: OpenRegistry, effects: Effects
) -> None:
    """k, p: the other process is a client, which works on nothing."""
    registry = registries(effects.slow)
    client = registries(effects.slow, executes=False)
    run = await registry.start("shop.slow", {"amount": 1}, ADA)
    await effects.begun.wait()

    await (await client.run(run.id, ADA)).cancel()

    assert (await ended(run)).status == "cancelled"


async def test_a_run_that_nobody_works_on_is_cancelled_by_the_next_claim(
    registries: OpenRegistry, effects: Effects
) -> None:
    """p: its process was killed, and its lease is not over yet."""
    first = registries(effects.slow)
    run = await first.start("shop.slow", {"amount": 1}, ADA)
    await effects.begun.wait()
    store: Any = first.run_store
    store._executor.session(run.id).stop("crash")
    client = registries(effects.slow, executes=False)
    await (await client.run(run.id, ADA)).cancel()
    await first.aclose()

    second = registries(effects.slow)
    state = await resumed(second, run)

    assert state.status == "cancelled"
    assert state.error["details"]["begun"][0]["operation"] == "shop.slow"
    assert effects.made == [1]


# ------------------------------------------------------------ queue


async def test_lanes_limit_what_works_at_a_time(registries: OpenRegistry) -> None:
    """In two processes with one journal."""
    working, most, done = set[int](), list[int](), asyncio.Semaphore(0)

    @operation("shop.lane", lane_limit=2, idempotent=True)
    async def lane(number: int) -> None:
        working.add(number)
        most.append(len(working))
        await asyncio.sleep(0)
        done.release()
        await asyncio.sleep(0.01)
        working.discard(number)

    two = [registries(lane), registries(lane)]
    for each in two:
        await each.run_store.open()  # type: ignore[union-attr]
    runs = [await two[n % 2].start("shop.lane", {"number": n}, OPERATOR) for n in range(10)]
    for run in runs:
        await run.result(20)

    assert max(most) <= 2


async def test_the_last_progress_is_in_the_final_state(registries: OpenRegistry) -> None:
    @operation("shop.count", scopes=["shop"])
    async def count_all(context: OperationContext) -> None:
        for done in range(1, 11):
            await context.progress(done, 10, f"{done} of 10")

    registry = registries(count_all)
    state = await ended(await registry.start("shop.count", {}, ADA))

    assert (state.progress, state.message) == ({"progress": 10, "total": 10}, "10 of 10")


async def test_lower_priorities_begin_first(registries: OpenRegistry, effects: Effects) -> None:
    registry = registries(effects.charge, effects.slow, limits=Limits(working=1))
    blocking = await registry.start("shop.slow", {"amount": 0}, ADA)
    await effects.begun.wait()

    runs = [
        await registry.start("shop.charge", {"amount": n}, ADA, priority=p)
        for n, p in ((1, 100), (2, 50), (3, 100), (4, 1))
    ]
    effects.released.set()
    for run in (blocking, *runs):
        await run.result(10)

    assert effects.made == [0, 4, 2, 1, 3]


async def test_a_delayed_run_waits_in_the_queue(registries: OpenRegistry, effects: Effects) -> None:
    registry = registries(effects.charge)

    run = await registry.start("shop.charge", {"amount": 1}, ADA, delay=0.3)
    state = await ended(run)

    assert state.updated - state.created >= 300
    with pytest.raises(CallError):
        await registry.start("shop.charge", {"amount": 1}, ADA, delay=1, at=5)


async def test_a_client_works_on_nothing(registries: OpenRegistry, effects: Effects) -> None:
    """k"""
    client = registries(effects.charge, executes=False)

    run = await client.start("shop.charge", {"amount": 1}, ADA)
    queued = (await client.run(run.id, ADA)).status
    server = registries(effects.charge)
    await server.run_store.open()  # type: ignore[union-attr]

    assert queued == "queued"
    assert (await run.result(10)).data == 1


async def test_two_processes_on_one_file_steal_nothing(
    registries: OpenRegistry, effects: Effects
) -> None:
    """l"""
    one, two = registries(effects.slow), registries(effects.slow)
    run = await one.start("shop.slow", {"amount": 1}, ADA)
    await effects.begun.wait()
    await two.run_store.open()  # type: ignore[union-attr]
    effects.released.set()

    assert (await run.result(10)).data == 1
    assert (await run.refresh()).attempt == 1
    assert effects.made == [1]


async def test_limits_reject_further_runs(registries: OpenRegistry, effects: Effects) -> None:
    registry = registries(effects.charge, limits=Limits(live_per_caller=2, live=3))

    for context in (ADA, ADA, BEN):
        await registry.start("shop.charge", {"amount": 1}, context, delay=3600)
    for context in (ADA, BEN):
        with pytest.raises(CallError) as caught:
            await registry.start("shop.charge", {"amount": 1}, context, delay=3600)
        assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


async def test_the_limit_of_all_live_runs_holds_for_all_processes_together(
    registries: OpenRegistry, effects: Effects
) -> None:
    first, second = (registries(effects.charge, limits=Limits(live=3)) for _ in range(2))
    await second.run_store.open()  # type: ignore[union-attr]

    for context in (ADA, BEN, ADA):
        await first.start("shop.charge", {"amount": 1}, context, delay=3600)
    with pytest.raises(CallError) as caught:
        await second.start("shop.charge", {"amount": 1}, BEN, delay=3600)

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("kind", ["calls", "sleeps", "signals"])
async def test_calls_at_the_same_time_have_no_more_steps_than_others(
    registries: OpenRegistry, effects: Effects, kind: str
) -> None:
    async def order(context: OperationContext) -> int:
        for name in "abc":
            await context.run.signal(name)
        made = {
            "calls": lambda number: context.call(effects.price, number),
            "sleeps": lambda _: context.sleep(0),
            "signals": lambda number: context.wait_for("abc"[number]),
        }[kind]
        results = await asyncio.gather(*map(made, range(3)), return_exceptions=True)
        errors = [each for each in results if isinstance(each, CallError)]
        assert all(each.code == ErrorCode.RESOURCE_EXHAUSTED for each in errors)
        return len(errors)

    registry = registries(durable(order), effects.price, limits=Limits(steps=2))
    run = await registry.start("shop.order", {}, ADA)

    assert (await run.result(10)).data == 1


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("delay", -1),
        ("delay", float("inf")),
        ("delay", float("nan")),
        ("at", float("inf")),
        ("retention", -1),
        ("retention", float("nan")),
    ],
)
async def test_times_that_do_not_exist_are_rejected(
    registries: OpenRegistry, effects: Effects, name: str, given: float
) -> None:
    registry = registries(effects.charge)

    with pytest.raises(CallError) as caught:
        await registry.start("shop.charge", {"amount": 1}, ADA, **{name: given})  # type: ignore[arg-type]

    assert caught.value.details["errors"][0]["path"] == f"/{name}"


# ------------------------------------------------------------ who may see what


async def test_only_its_owner_and_readers_see_a_run(
    registries: OpenRegistry, effects: Effects
) -> None:
    """w"""
    registry = registries(effects.charge)
    run = await registry.start("shop.charge", {"amount": 1}, ADA, delay=3600)
    agents = await registry.start("shop.charge", {"amount": 1}, granted("1"), delay=3600)

    async def seen(context: OperationContext) -> set[str]:
        visible = set[str]()
        for each in (run, agents):
            with suppress(CallError):
                visible.add((await registry.run(each.id, context)).id)
        assert visible == {state.id for state in (await registry.runs(context)).runs}
        return visible

    both = {run.id, agents.id}
    assert await seen(ADA) == await seen(AUDITOR) == await seen(OPERATOR) == both
    assert await seen(granted("1")) == {agents.id}
    assert await seen(granted("2")) == await seen(BEN) == await seen(OperationContext()) == set()


async def test_a_reader_cannot_cancel_and_a_manager_can(
    registries: OpenRegistry, effects: Effects
) -> None:
    registry = registries(effects.charge)
    run = await registry.start("shop.charge", {"amount": 1}, ADA, delay=3600)

    with pytest.raises(CallError) as caught:
        await (await registry.run(run.id, AUDITOR)).cancel()
    await (await registry.run(run.id, MANAGER)).cancel()

    assert caught.value.code == ErrorCode.RUN_NOT_FOUND
    assert (await run.refresh()).status == "cancelled"


async def test_an_agent_of_a_manager_sees_only_its_own_runs(
    registries: OpenRegistry, effects: Effects
) -> None:
    registry = registries(effects.charge)
    run = await registry.start("shop.charge", {"amount": 1}, ADA, delay=3600)
    identity = granted("1").identity
    assert identity is not None
    agent = OperationContext(identity=replace(identity, id="max", scopes=["runs:manage", "shop"]))
    own = await registry.start("shop.charge", {"amount": 2}, agent, delay=3600)

    with pytest.raises(CallError) as caught:
        await registry.run(run.id, agent)
    await (await registry.run(own.id, agent)).cancel()

    assert caught.value.code == ErrorCode.RUN_NOT_FOUND
    assert [state.id for state in (await registry.runs(agent)).runs] == [own.id]
    assert (await run.refresh()).status == "queued"


async def test_anonymous_runs_are_seen_by_id_only(registries: OpenRegistry) -> None:
    @operation("shop.open")
    async def anyone() -> int:
        return 1

    registry = registries(anyone)
    run = await registry.start("shop.open")

    assert (await (await registry.run(run.id)).result(10)).data == 1
    assert (await registry.runs()).runs == []


async def test_pages_cover_all_runs(registries: OpenRegistry, effects: Effects) -> None:
    registry = registries(effects.charge)
    started = {
        (await registry.start("shop.charge", {"amount": n}, ADA, delay=3600)).id for n in range(7)
    }

    found: list[str] = []
    after: str | None = None
    while True:
        page = await registry.runs(
            ADA, status="queued", operation="shop.charge", limit=3, after=after
        )
        found += [state.id for state in page.runs]
        after = page.next
        if after is None:
            break

    assert sorted(found) == sorted(started)
    assert not (await registry.runs(ADA, status="failed")).runs
    for options in ({"status": "lost"}, {"after": "x"}):
        with pytest.raises(CallError) as caught:
            await registry.runs(ADA, **options)  # type: ignore[arg-type]
        assert caught.value.code == ErrorCode.VALIDATION_ERROR


# ------------------------------------------------------------ the store


async def test_a_shutdown_hands_runs_over(registries: OpenRegistry, effects: Effects) -> None:
    """The next process continues at once, although the lease is long."""

    async def order(context: OperationContext) -> int:
        first = await context.call(effects.charge, 1)
        if not effects.begun.is_set():
            effects.begun.set()
            await asyncio.Event().wait()
        return int(first + await context.call(effects.charge, 2))

    operations = durable(order), effects.charge
    first = registries(*operations, lease=3600.0)
    run = await first.start("shop.order", {}, ADA)
    await effects.begun.wait()
    await first.aclose()
    second = registries(*operations)

    state = await resumed(second, run)

    assert (state.status, state.result["data"]) == ("completed", 3)
    assert effects.made == [1, 2]


async def test_a_shutdown_begins_nothing_while_a_call_ends(
    registries: OpenRegistry, effects: Effects
) -> None:
    async def order(context: OperationContext) -> int:
        async def charge() -> None:
            for amount in range(10):
                await context.call(effects.charge, amount)

        async with asyncio.TaskGroup() as group:
            group.create_task(context.call(effects.slow, 100))
            await effects.begun.wait()
            if begins:
                await leaving.wait()
                group.create_task(charge())
        return len(effects.made)

    leaving, begins = asyncio.Event(), [True]
    operations = durable(order), effects.slow, effects.charge
    first = registries(*operations, grace=20.0)
    run = await first.start("shop.order", {}, ADA)
    await effects.begun.wait()
    store: Any = first.run_store
    session = store._executor.session(run.id)
    closing = asyncio.create_task(first.aclose())
    while not session._is_leaving:
        await asyncio.sleep(0)
    leaving.set()
    # Time for calls that must not begin.
    await asyncio.sleep(0.1)
    before = list(effects.made)
    effects.released.set()
    await closing
    begins.clear()
    second = registries(*operations)
    await second.run_store.open()  # type: ignore[union-attr]
    state = await ended(await second.run(run.id, ADA))

    assert (before, state.status) == ([100], "completed")


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_the_file_is_private_and_safe(
    url: str, registries: OpenRegistry, effects: Effects
) -> None:
    registry = registries(effects.charge)
    await registry.run_store.open()  # type: ignore[union-attr]
    path = Path(url.removeprefix("sqlite:"))

    assert path.stat().st_mode & 0o777 == 0o600  # noqa: ASYNC240
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


async def test_a_newer_journal_is_read_but_not_worked_on(
    registries: OpenRegistry, effects: Effects
) -> None:
    older = registries(effects.charge, executes=False)
    run = await older.start("shop.charge", {"amount": 1}, ADA)
    store: Any = older.run_store
    await store.write(lambda db: db.count("UPDATE meta SET value = '99' WHERE name = 'version'"))

    registry = registries(effects.charge)
    await registry.run_store.open()  # type: ignore[union-attr]

    assert (await registry.run(run.id, ADA)).status == "queued"
    with anyio.move_on_after(0.3):
        await run.result()
    assert effects.made == []


def test_strange_urls_are_rejected() -> None:
    for url in ("runs.db", "sqlite:", "mysql://localhost"):
        with pytest.raises(ValueError, match="sqlite:PATH"):
            Runs(url)


async def test_one_store_belongs_to_one_registry(url: str) -> None:
    """z"""
    runs = Runs(url)
    OperationRegistry(runs=runs)
    with pytest.raises(ValueError, match="one registry"):
        OperationRegistry(runs=runs)


async def test_two_stores_in_one_process_are_independent(
    registries: OpenRegistry, tmp_path: Path, effects: Effects
) -> None:
    """z"""
    one = registries(effects.charge)
    two = registries(effects.charge, url=f"sqlite:{tmp_path / 'other.db'}")

    await (await one.start("shop.charge", {"amount": 1}, ADA)).result(10)
    await (await two.start("shop.charge", {"amount": 2}, ADA)).result(10)

    assert [len((await each.runs(ADA)).runs) for each in (one, two)] == [1, 1]


async def test_a_handler_that_blocks_the_loop_keeps_its_lease(registries: OpenRegistry) -> None:
    """t: the thread of the store renews it."""
    import time  # noqa: PLC0415 - the only blocking code

    @operation("shop.block", idempotent=True)
    async def block() -> int:
        time.sleep(1.5)  # noqa: ASYNC251 - as careless handlers do
        return 1

    one, two = registries(block, lease=0.5), registries(block, lease=0.5)
    run = await one.start("shop.block", {}, OPERATOR)
    await two.run_store.open()  # type: ignore[union-attr]

    assert (await run.result(10)).data == 1
    assert (await run.refresh()).attempt == 1
