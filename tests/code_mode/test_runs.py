"""Scripts as runs: replay, clock and chance, approvals with claims, unknown outcomes."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.code_mode.shop import OPERATOR
from tests.limits import time_limit

from operations import (
    CallError,
    ErrorCode,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    operation,
)
from operations.authority.approvals import Authority
from operations.code import Code, CodeLimits
from operations.contract.functions import operation_of
from operations.contract.specs import ApprovalRule
from operations.runs import Runs, RunStatus
from operations.store.sqlite import SQLiteValues
from operations.store.state import Store

ADA = OperationContext(identity=Identity("ada", ["buy"]))
BOSS = OperationContext(identity=Identity("boss", ["approvals:answer"]))


class Bank:
    """Counts what ran, over all processes of a test."""

    def __init__(self, rule: ApprovalRule = ApprovalRule()) -> None:  # noqa: B008 - frozen
        self.rule = rule
        self.paid: list[int] = []
        self.read: list[str] = []
        self.fed: list[str] = []
        self.reached, self.released = asyncio.Event(), asyncio.Event()

    def operations(self) -> list[Operation]:
        @operation("bank.pay")
        async def pay(amount: int, password: str = "") -> int:
            self.paid.append(amount)
            return len(self.paid)

        @operation("bank.read", type="query")
        async def read(name: str) -> dict[str, str]:
            self.read.append(name)
            return {"name": name, "api_key": "k-1234567890"}

        @operation("bank.block")
        async def block() -> None:
            self.reached.set()
            await self.released.wait()

        @operation("bank.feed")
        async def feed(account: str, context: OperationContext) -> AsyncGenerator[int]:
            self.fed.append(account)
            nested = (await context.env.bank.read({"name": account})).data
            assert nested["name"] == account
            for amount in (1, 2, 3):
                yield amount

        rule = self.rule
        marked: list[Any] = [operation_of(each) for each in (pay, read, block)]
        guarded = replace(marked[0], spec=replace(marked[0].spec, name="transfer"), approve=rule)
        watched: Any = operation_of(feed)
        return [*marked, guarded, replace(watched, approve=rule)]


Open = Callable[..., OperationRegistry]


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.fixture
async def opened(tmp_path: Path, bank: Bank) -> AsyncGenerator[Open]:
    async with AsyncExitStack() as stack:

        def create(**options: Any) -> OperationRegistry:
            store = Store(SQLiteValues(tmp_path / "authority.db"))
            authority = Authority(store)
            runs = Runs(f"sqlite:{tmp_path / 'runs.db'}", lease=1.0, grace=0.0, **options)
            registry = OperationRegistry(bank.operations(), runs=runs, authority=authority)
            registry.register_object(authority.approvals)
            registry.register_all(Code(registry, limits=CodeLimits(processes=2)))
            stack.push_async_callback(registry.aclose)
            return registry

        yield create


async def start(registry: OperationRegistry, script: str) -> Any:
    return await registry.start("code.run", {"script": script}, ADA)


async def waiting_approval(
    registry: OperationRegistry, run: Any, operation_id: str | None = None
) -> Any:
    """Return the request for approval for which a run waits."""
    async for state in run.watch():
        if state.status is RunStatus.INPUT_REQUIRED:
            page = (await registry.execute("approvals.list", {}, BOSS)).data
            for asked in page["approvals"]:
                if operation_id in (None, asked["operation"]):
                    return asked
    raise AssertionError("the run has ended")


PAY_THREE = """
import random, time
first = await bank.pay(amount=1)
at = time.time()
chance = random.random()
name = await bank.read(name=f"{at}-{chance}")
await bank.transfer(amount=int(chance * 1000), password="hunter2")
return [at, chance, name["name"]]
"""


async def test_a_script_waits_for_an_approval_and_continues_in_another_process(
    opened: Open, bank: Bank
) -> None:
    with time_limit(120):
        first = opened(park=0.0)
        async with first:
            run = await start(first, PAY_THREE)
            approval = await waiting_approval(first, run)
        assert len(bank.paid) == 1
        second = opened()
        async with second:
            await second.execute("approvals.answer", {"id": approval["id"], "approve": True}, BOSS)
            again = await second.run(run.id, ADA)
            at, chance, name = (await again.result()).data["result"]
    # Each call ran once, and clock and chance were those of the first attempt.
    assert name == f"{at}-{chance}"
    assert bank.read == [name]
    assert bank.paid == [1, int(chance * 1000)]


async def test_an_approval_shows_the_exact_call_and_what_the_script_claims(opened: Open) -> None:
    script = PAY_THREE
    with time_limit(60):
        async with opened() as registry:
            run = await start(registry, script)
            approval = await waiting_approval(registry, run)
            await run.cancel()
    claim = approval["claim"]
    assert approval["operation"] == "bank.transfer"
    assert approval["input"].keys() == {"amount", "password"}
    assert (claim["by"], claim["line"]) == ("script", 7)
    assert "bank.transfer(amount=int(chance * 1000)" in claim["code"]
    assert "hunter2" not in str(claim)
    assert "k-1234567890" not in str(claim)
    assert [each["operation"] for each in claim["before"]] == ["bank.pay", "bank.read"]
    assert claim["before"][0]["result"] == "1"


async def test_a_denied_approval_is_an_error_that_the_script_sees(opened: Open, bank: Bank) -> None:
    script = (
        "try:\n    await bank.transfer(amount=5)\n"
        "except AccessDenied as error:\n    return error_of(error)['code']"
    )
    with time_limit(60):
        async with opened() as registry:
            run = await start(registry, script)
            approval = await waiting_approval(registry, run)
            answer = {"id": approval["id"], "approve": False}
            await registry.execute("approvals.answer", answer, BOSS)
            assert (await run.result()).data["result"] == ErrorCode.ACCESS_DENIED
    assert bank.paid == []


@pytest.mark.parametrize("catch", ["Exception", "BaseException", "CallError", "OutcomeUnknown"])
async def test_a_script_cannot_catch_an_unknown_outcome(
    opened: Open, bank: Bank, catch: str
) -> None:
    script = f"try:\n    await bank.block()\nexcept {catch}:\n    pass\nawait bank.pay(amount=9)\nreturn 1"
    with time_limit(60):
        async with opened() as first:
            run = await start(first, script)
            await bank.reached.wait()
            # The store closes without grace: the call has begun, and its outcome is not recorded.
        async with opened() as second:
            again = await second.run(run.id, ADA)
            with pytest.raises(CallError) as caught:
                await again.result()
    assert caught.value.code == ErrorCode.OUTCOME_UNKNOWN
    assert bank.paid == []


async def test_equal_calls_at_the_same_time_are_each_recorded(opened: Open, bank: Bank) -> None:
    script = (
        "import asyncio\n"
        "found = await asyncio.gather(*(bank.pay(amount=7) for n in range(3)))\n"
        "await bank.transfer(amount=1)\nreturn sorted(found)"
    )
    with time_limit(120):
        async with opened(park=0.0) as first:
            run = await start(first, script)
            approval = await waiting_approval(first, run)
        async with opened() as second:
            answer = {"id": approval["id"], "approve": True}
            await second.execute("approvals.answer", answer, BOSS)
            again = await second.run(run.id, ADA)
            assert (await again.result()).data["result"] == [1, 2, 3]
    assert bank.paid == [7, 7, 7, 1]


async def test_waiting_for_a_person_does_not_count_as_time_of_the_script(
    opened: Open, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    from operations.runs.session import Session  # noqa: PLC0415

    # As if the run had waited for an hour.
    monkeypatch.setattr(Session, "waited", property(lambda _: 3_600.0))
    with time_limit(60):
        async with opened() as registry:
            run = await start(registry, "await bank.transfer(amount=1)\nreturn 1")
            approval = await waiting_approval(registry, run)
            answer = {"id": approval["id"], "approve": True}
            await registry.execute("approvals.answer", answer, BOSS)
            assert (await run.result()).data["result"] == 1


async def test_execute_without_a_store_ends_with_the_approval_and_names_what_ran(
    bank: Bank,
) -> None:
    registry = OperationRegistry(bank.operations())
    registry.register_all(Code(registry))
    async with registry:
        script = "await bank.pay(amount=1)\nawait bank.transfer(amount=2)"
        with pytest.raises(CallError) as caught:
            await registry.execute("code.run", {"script": script}, OPERATOR)
    assert caught.value.code == ErrorCode.APPROVAL_REQUIRED
    assert caught.value.details["approval"]
    assert [each["operation"] for each in caught.value.details["ran"]] == ["bank.pay"]


FEED = """
await bank.pay(amount=1)
items = await bank.feed(account="A-1", max_items=2, seconds=9)
await bank.pay(amount=sum(items))
return items
"""


async def test_a_subscription_waits_for_an_approval_and_continues_in_another_process(
    opened: Open, bank: Bank
) -> None:
    with time_limit(120):
        async with opened(park=0.0) as first:
            run = await start(first, FEED)
            approval = await waiting_approval(first, run)
        assert (bank.paid, bank.fed) == ([1], [])
        assert (approval["operation"], approval["input"]) == ("bank.feed", {"account": "A-1"})
        claim = approval["claim"]
        assert (claim["by"], claim["line"]) == ("script", 3)
        assert claim["code"].startswith("items = await bank.feed(account=")
        assert [each["operation"] for each in claim["before"]] == ["bank.pay"]
        async with opened() as second:
            answer = {"id": approval["id"], "approve": True}
            await second.execute("approvals.answer", answer, BOSS)
            again = await second.run(run.id, ADA)
            assert (await again.result()).data["result"] == [1, 2]
    assert (bank.paid, bank.fed) == ([1, 3], ["A-1"])


async def test_approved_items_are_recorded_and_need_no_second_approval(
    opened: Open, bank: Bank
) -> None:
    script = FEED.replace("return items", "await bank.transfer(amount=9)\nreturn items")
    with time_limit(120):
        async with opened(park=0.0) as first:
            run = await start(first, script)
            feed = await waiting_approval(first, run, "bank.feed")
            await first.execute("approvals.answer", {"id": feed["id"], "approve": True}, BOSS)
            transfer = await waiting_approval(first, run, "bank.transfer")
        async with opened() as second:
            answer = {"id": transfer["id"], "approve": True}
            await second.execute("approvals.answer", answer, BOSS)
            again = await second.run(run.id, ADA)
            assert (await again.result()).data["result"] == [1, 2]
    assert (bank.paid, bank.fed) == ([1, 3, 9], ["A-1"])


async def test_a_denied_subscription_is_an_error_that_the_script_sees(
    opened: Open, bank: Bank
) -> None:
    script = (
        "try:\n    await bank.feed(account='A')\n"
        "except AccessDenied as error:\n    return error_of(error)['code']"
    )
    with time_limit(60):
        async with opened() as registry:
            run = await start(registry, script)
            approval = await waiting_approval(registry, run)
            answer = {"id": approval["id"], "approve": False}
            await registry.execute("approvals.answer", answer, BOSS)
            assert (await run.result()).data["result"] == ErrorCode.ACCESS_DENIED
    assert bank.fed == []


async def test_the_seconds_of_a_subscription_do_not_include_the_wait_for_its_approval() -> None:
    bank = Bank(ApprovalRule(hold=60))
    authority = Authority()
    registry = OperationRegistry(bank.operations(), authority=authority)
    registry.register_object(authority.approvals)
    registry.register_all(Code(registry))
    script = "return await bank.feed(account='A', seconds=0.05)"
    with time_limit(60):
        async with registry:
            call = asyncio.Task(registry.execute("code.run", {"script": script}, ADA))
            async with registry.subscribe("approvals.watch", {}, BOSS) as pages:
                async for page in pages:
                    for asked in page.data["approvals"]:
                        answer = {"id": asked["id"], "approve": True}
                        await registry.execute("approvals.answer", answer, BOSS)
                    if page.data["approvals"] or call.done():
                        break
            assert (await call).data["result"] == [1, 2, 3]
