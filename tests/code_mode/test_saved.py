"""Saved scripts: as operations of their own, and as operations that scripts call."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.code_mode.shop import BUYER, GUEST, OPERATOR, Meeting, items, order, run, shop
from tests.limits import time_limit

from operations import (
    AccessControl,
    CallError,
    ErrorCode,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    operation,
)
from operations.authority.approvals import Authority
from operations.code import Code, CodeLimits, SavedScript
from operations.contract.events import CallStarted
from operations.contract.functions import operation_of
from operations.contract.specs import ApprovalRule
from operations.runs import Runs, RunStatus

ORDER = SavedScript(id="saved.order", script="return await shop.order(item=arguments['item'])")
AGAIN = SavedScript(
    id="saved.again",
    script="left = arguments['left']\nreturn 0 if left == 0 else 1 + await saved.again(left=left - 1)",
)
MEET = SavedScript(id="saved.meet", script="return await meeting.join(number=arguments['number'])")
COUNT = SavedScript(
    id="saved.count",
    script="for number in range(arguments['times']):\n    await shop.items()\nreturn number",
)


async def limit_of(registry: OperationRegistry, script: str) -> str:
    with time_limit(60), pytest.raises(CallError) as caught:
        await run(registry, script)
    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    return str(caught.value.details["limit"])


async def test_a_saved_script_has_no_authority_of_its_own() -> None:
    async with shop(saved=[ORDER]) as registry:
        assert (await registry.execute("saved.order", {"item": 3}, BUYER)).data == {"ordered": 3}
        with pytest.raises(CallError) as caught:
            await registry.execute("saved.order", {"item": 3}, GUEST)
    assert caught.value.code == "SCRIPT_REJECTED"


async def test_a_script_calls_a_saved_script_as_any_operation() -> None:
    script = "return [await saved.order(item=n) for n in range(2)]"
    async with shop(saved=[ORDER]) as registry:
        found = await registry.execute("code.search", {"query": "saved order"}, BUYER)
        assert "async def order(self, **more: Any) -> Any" in found.data["stubs"]
        assert await run(registry, script, BUYER) == [{"ordered": 0}, {"ordered": 1}]
        # Each call of it is a call of the caller, also if it is nested.
        with pytest.raises(CallError) as caught:
            await run(registry, script, GUEST)
        assert caught.value.code == "SCRIPT_FAILED"
        assert caught.value.details["cause"]["code"] == "SCRIPT_REJECTED"


async def test_a_saved_script_is_hidden_from_callers_without_its_scopes() -> None:
    hidden = SavedScript(id="shop.saved", script=ORDER.script, access=AccessControl(("buy",)))
    async with shop(saved=[hidden]) as registry:
        found = await registry.execute("code.search", {"query": "saved order"}, GUEST)
        assert "saved" not in str(found.data)
        with pytest.raises(CallError) as caught:
            await run(registry, "return await shop.saved(item=1)", GUEST)
        assert caught.value.code == "SCRIPT_REJECTED"
        script = "try:\n    await eval('shop').saved(item=1)\nexcept CallError as e:\n    return error_of(e)['code']"
        assert await run(registry, script, GUEST) == ErrorCode.OPERATION_NOT_FOUND


async def test_the_calls_of_a_saved_script_are_below_its_own_call() -> None:
    parents: dict[str, str | None] = {}
    ids: dict[str, str] = {}

    def note(event: Any) -> None:
        if isinstance(event, CallStarted):
            parents[event.operation_id] = event.parent_request_id
            ids[event.operation_id] = event.request_id

    async with shop(saved=[ORDER]) as registry:
        registry.observe(note)
        await run(registry, "return await saved.order(item=1)")
    assert parents["shop.order"] == ids["saved.order"]
    assert parents["saved.order"] == ids["code.run"]


async def test_the_calls_of_nested_scripts_count_together() -> None:
    script = "for n in range(9):\n    await saved.count(times=3)"
    async with shop(saved=[COUNT], limits=CodeLimits(calls=10)) as registry:
        assert await run(registry, "return await saved.count(times=9)") == 8
        assert await limit_of(registry, script) == "calls"


async def test_scripts_are_nested_four_deep() -> None:
    async with shop(saved=[AGAIN]) as registry:
        assert await run(registry, "return await saved.again(left=2)") == 2
        script = (
            "try:\n    return await saved.again(left=3)\nexcept CallError as e:\n    return str(e)"
        )
        assert "nested" in await run(registry, script)


async def test_nested_scripts_wait_for_deeper_ones_only() -> None:
    limits = CodeLimits(processes=1, concurrent=1, per_caller=1)
    script = (
        "import asyncio\nreturn await asyncio.gather(*(saved.again(left=n) for n in (2, 1, 0)))"
    )
    async with shop(saved=[AGAIN], limits=limits) as registry:
        with time_limit(60):
            results = await asyncio.gather(*(run(registry, script) for _ in range(3)))
            assert await run(registry, script, BUYER) == [2, 1, 0]
    assert results == [[2, 1, 0]] * 3


async def test_saved_scripts_run_at_the_same_time() -> None:
    meeting = Meeting(3)
    script = (
        "import asyncio\nreturn await asyncio.gather(*(saved.meet(number=n) for n in range(3)))"
    )
    async with shop(meeting.operation, saved=[MEET]) as registry:
        with time_limit(60):
            assert await run(registry, script, BUYER) == [0, 1, 2]


async def test_an_operation_that_runs_a_script_in_a_script_is_rejected_unless_it_is_saved() -> None:
    @operation("shop.indirect")
    async def indirect(saved: bool, context: OperationContext) -> Any:
        if saved:
            return (await context.env.saved.order({"item": 1})).data
        return (await context.env.code.run({"script": "return 1"})).data

    async with shop(indirect, saved=[ORDER]) as registry:
        assert await run(registry, "return await shop.indirect(saved=True)") == {"ordered": 1}
        script = "try:\n    await shop.indirect(saved=False)\nexcept CallError as e:\n    return error_of(e)['details']"
        assert await run(registry, script) == {"limit": "scripts"}


async def test_an_approval_in_a_nested_script_parks_the_run(tmp_path: Path) -> None:
    ordered: list[int] = []

    @operation("shop.buy")
    async def buy(item: int) -> int:
        ordered.append(item)
        return item

    plain: Any = operation_of(buy)
    assert isinstance(plain, Operation)
    guarded = replace(plain, spec=replace(plain.spec, name="agreed"), approve=ApprovalRule())
    saved = SavedScript(
        id="saved.both",
        script="first = await shop.buy(item=1)\nreturn [first, await shop.agreed(item=2)]",
    )
    authority = Authority()
    ada = OperationContext(identity=Identity("ada", []))
    boss = OperationContext(identity=Identity("boss", ["approvals:answer"]))

    def opened() -> OperationRegistry:
        runs = Runs(f"sqlite:{tmp_path / 'runs.db'}", lease=1.0, grace=0.0, park=0.0)
        registry = OperationRegistry([items, order, plain, guarded], runs=runs, authority=authority)
        registry.register_object(authority.approvals)
        registry.register_all(Code(registry, saved=[saved], limits=CodeLimits(processes=1)))
        return registry

    with time_limit(120):
        async with opened() as first:
            script = "return [await shop.buy(item=0), await saved.both()]"
            started = await first.start("code.run", {"script": script}, ada)
            async for state in started.watch():
                if state.status is RunStatus.INPUT_REQUIRED:
                    break
        assert ordered == [0, 1]
        async with opened() as second:
            (asked,) = (await second.execute("approvals.list", {}, boss)).data["approvals"]
            assert (asked["operation"], asked["claim"]["line"]) == ("shop.agreed", 2)
            answer = {"id": asked["id"], "approve": True}
            await second.execute("approvals.answer", answer, boss)
            again = await second.run(started.id, ada)
            assert (await again.result()).data["result"] == [0, [1, 2]]
    assert ordered == [0, 1, 2]


async def test_an_operator_saves_a_script_that_uses_a_saved_one() -> None:
    async with shop(saved=[ORDER]) as registry:
        code = Code(registry)
        used = code.used_by("return await saved.order(item=1)", OPERATOR)
    assert [spec.id for spec in used] == ["saved.order"]
