"""The limits of scripts, and what happens to a sandbox that crashes."""

import asyncio
import os
import signal
from typing import Any

import pytest
from tests.code_mode.shop import BUYER, OPERATOR, Meeting, run, shop
from tests.limits import time_limit

from operations import CallError, ErrorCode, OperationContext, operation
from operations.code import Code, CodeLimits


async def exceeded(
    text: str, context: OperationContext = OPERATOR, **limits: Any
) -> tuple[str, str]:
    async with shop(limits=CodeLimits(**limits)) as registry:
        with time_limit(60), pytest.raises(CallError) as caught:
            await run(registry, text, context)
    return caught.value.code, caught.value.details["limit"]


@pytest.mark.parametrize(
    ("script", "limits", "name"),
    [
        ("for n in range(4):\n    await shop.items()", {"calls": 3}, "calls"),
        ("import time\nwhile True:\n    time.time()", {"calls": 3}, "calls"),
        ("while True:\n    pass", {"cpu": 0.2}, "cpu"),
        ("import asyncio\nawait asyncio.sleep(1000)", {"wall": 0.2}, "wall"),
        ("x = 'a'\nwhile True:\n    x = x + x", {"memory": 4 << 20}, "memory"),
        ("10 ** 10 ** 8", {"memory": 4 << 20}, "memory"),
        ("[0] * 10 ** 10", {}, "memory"),
        ("return 'a' * 3000", {"output": 2_000}, "output"),
        ("print('a' * 3000)", {"output": 2_000}, "output"),
        ("for n in range(10000):\n    print(n)", {"output": 2_000}, "output"),
        ("def f(n):\n    return f(n + 1)\nf(0)", {}, "recursion"),
        ("# " + "a" * 3000, {"script": 2_000}, "script"),
    ],
)
async def test_an_error_names_the_limit(script: str, limits: Any, name: str) -> None:
    assert await exceeded(script, **limits) == (ErrorCode.RESOURCE_EXHAUSTED, name)


@pytest.mark.parametrize("catch", ["Exception", "BaseException"])
async def test_a_script_cannot_catch_the_end_by_a_limit(catch: str) -> None:
    script = f"while True:\n    try:\n        await shop.items()\n    except {catch}:\n        pass"
    assert await exceeded(script, calls=3) == (ErrorCode.RESOURCE_EXHAUSTED, "calls")
    script = f"while True:\n    try:\n        while True:\n            pass\n    except {catch}:\n        pass"
    assert await exceeded(script, cpu=0.2) == (ErrorCode.RESOURCE_EXHAUSTED, "cpu")


async def test_a_caller_has_a_limit_of_its_own() -> None:
    meeting = Meeting(2)
    script = "return await meeting.join(number=1)"
    limits = CodeLimits(per_caller=1)
    async with shop(meeting.operation, limits=limits) as registry, asyncio.TaskGroup() as group:
        first = group.create_task(run(registry, script, BUYER))
        while not meeting.running:
            await asyncio.sleep(0.01)
        with pytest.raises(CallError) as caught:
            await run(registry, script, BUYER)
        assert await run(registry, script) == 1
        assert await first == 1
    assert caught.value.details == {"limit": "per_caller"}


async def test_further_scripts_wait_for_a_process() -> None:
    async with shop(limits=CodeLimits(processes=2)) as registry:
        results = await asyncio.gather(*(run(registry, f"return {n}") for n in range(8)))
    assert results == [*range(8)]


async def test_a_sandbox_that_is_killed_costs_only_its_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from operations.code import sandbox  # noqa: PLC0415

    workers: list[int] = []
    enter = sandbox.Session.enter

    def noted(session: Any) -> None:
        enter(session)
        workers.append(session.pid)

    monkeypatch.setattr(sandbox.Session, "enter", noted)
    meeting = Meeting(2)

    @operation("victim.kill", type="query")
    async def kill() -> None:
        os.kill(workers[-1], signal.SIGKILL)

    async with shop(meeting.operation, kill) as registry, asyncio.TaskGroup() as group:
        other = group.create_task(run(registry, "return await meeting.join(number=1)"))
        while not meeting.running:
            await asyncio.sleep(0.01)
        with pytest.raises(CallError) as caught:
            await run(registry, "await victim.kill()\nreturn 1")
        assert await run(registry, "return await meeting.join(number=2)") == 2
        assert await other == 1
        assert await run(registry, "return 3") == 3
    assert caught.value.code == "SCRIPT_FAILED"


async def test_a_cancelled_caller_ends_a_script_that_computes() -> None:
    async with shop(limits=CodeLimits(cpu=1_000)) as registry:
        started = asyncio.Event()

        @operation("shop.begin", type="query")
        async def begin() -> None:
            started.set()

        registry.register(begin)
        script = "await shop.begin()\nwhile True:\n    pass"
        task = asyncio.create_task(run(registry, script))
        await started.wait()
        task.cancel()
        with time_limit(30), pytest.raises(asyncio.CancelledError):
            await task
        assert await run(registry, "return 1") == 1


async def test_closing_twice_is_harmless_and_a_limit_must_be_positive() -> None:
    async with shop() as registry:
        code = Code(registry)
        await code.aclose()
        await code.aclose()
    with pytest.raises(ValueError, match="calls"):
        CodeLimits(calls=0)
