"""Time limits of the hub: what extends them, and what does not."""

import asyncio
import sys
from typing import Any

import anyio
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ElicitResult
from tests.calls.processes import PROJECT
from tests.limits import scaled, time_limit
from tests.mcp_serving.support import ERAS, error_of, serving

from operations import CallError, ErrorCode, OperationContext, OperationRegistry
from operations.base.time_limit import TimeLimit
from operations.contract.channel import CallerChannel
from operations.front.limits import Limits
from operations.front.timing import CallTimeout, RequestTimeout
from operations.mcp import to_mcp
from operations.server import create_app
from operations.tools import ToolConfig, configure_tools

BOTH = pytest.mark.parametrize("era", ERAS)
FORM = {"type": "object", "properties": {"name": {"type": "string"}}}


def registry_of(**timeouts: Any) -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("do.ask", **timeouts)
    async def ask(context: OperationContext) -> str:
        await context.elicit("Your name?", FORM)
        return "asked"

    @registry.operation("do.work", **timeouts)
    async def work(context: OperationContext, steps: int = 0, seconds: float = 0) -> str:
        for step in range(steps):
            await anyio.sleep(seconds)
            await context.progress(step)
        await anyio.sleep(seconds)
        return "done"

    return registry


class Slow:
    """A person who answers on request."""

    def __init__(self, seconds: float = 0) -> None:
        self._seconds = seconds

    async def __call__(self, context: Any, params: Any) -> ElicitResult:
        await anyio.sleep(self._seconds)
        return ElicitResult(action="accept", content={"name": "Ada"})


@BOTH
async def test_the_default_stops_while_a_person_answers(era: str) -> None:
    server = to_mcp(registry_of(), timeout=scaled(1))
    async with Client(server, mode=era, elicitation_callback=Slow(scaled(1.5))) as client:
        with time_limit(20):
            result = await client.call_tool("do__ask", {})

    assert not result.is_error, result


@BOTH
async def test_a_response_that_takes_too_long_ends_the_call(era: str) -> None:
    server = to_mcp(registry_of(), timeout=0.2, limits=Limits(answer_seconds=0.3))
    person = Slow(30 if era == "legacy" else 1)
    async with Client(server, mode=era, elicitation_callback=person) as client:
        with time_limit(20):
            # In the newer version the person is asked between two requests, and the second one receives the error.
            assert error_of(await client.call_tool("do__ask", {}))["code"] == "TIMEOUT"


@BOTH
async def test_progress_starts_the_limit_again_and_its_absence_does_not(era: str) -> None:
    limit = scaled(1)
    server = to_mcp(registry_of(), timeout=limit)
    async with Client(server, mode=era) as client:
        with time_limit(20):
            going = await client.call_tool("do__work", {"steps": 6, "seconds": limit / 5})
            silent = await client.call_tool("do__work", {"seconds": 30 * limit})

    assert not going.is_error, going
    assert error_of(silent)["code"] == "TIMEOUT"


async def test_an_operation_has_its_own_limit_at_every_entry_point() -> None:
    registry = registry_of(timeout=0.2)
    app = create_app(registry, mcp=True, timeout=30)
    with time_limit(20):
        async with serving(app) as base, httpx2.AsyncClient(base_url=base) as http:
            path = await http.post("/do/work", json={"seconds": 10})
            call = await http.post("/call", json={"operation": "do.work", "input": {"seconds": 10}})
            async with Client(f"{base}/mcp") as client:
                tool = await client.call_tool("do__work", {"seconds": 10})

    assert (path.status_code, call.status_code) == (504, 504)
    assert error_of(tool)["code"] == "TIMEOUT"


async def test_an_operation_may_take_longer_than_the_default() -> None:
    registry = registry_of(timeout=30)
    app = create_app(registry, mcp=True, timeout=0.5)
    with time_limit(20):
        async with serving(app) as base, httpx2.AsyncClient(base_url=base) as http:
            path = await http.post("/do/work", json={"seconds": 1})
            call = await http.post("/call", json={"operation": "do.work", "input": {"seconds": 1}})
            async with Client(f"{base}/mcp") as client:
                tool = await client.call_tool("do__work", {"seconds": 1})

    assert (path.status_code, call.status_code) == (200, 200)
    assert not tool.is_error


@BOTH
async def test_a_callers_own_deadline_is_never_extended(era: str) -> None:
    app = create_app(registry_of(), mcp=True)
    with time_limit(20):
        async with (
            serving(app) as base,
            httpx2.AsyncClient(headers={"operations-timeout": "1500"}) as http,
            Client(
                streamable_http_client(f"{base}/mcp", http_client=http),
                mode=era,
                elicitation_callback=Slow(30 if era == "legacy" else 0),
            ) as client,
        ):
            going = await client.call_tool("do__work", {"steps": 50, "seconds": 0.1})
            asked = await client.call_tool("do__ask", {}) if era == "legacy" else going

    assert error_of(going)["code"] == error_of(asked)["code"] == "TIMEOUT"


async def test_nested_calls_share_the_limit_of_the_call() -> None:
    registry = registry_of()

    @registry.operation("do.both")
    async def both(context: OperationContext) -> str:
        await context.elicit("Your name?", FORM)
        return str((await context.env.do.work({"steps": 6, "seconds": 0.2})).data)

    server = to_mcp(registry, timeout=1)
    async with Client(server, mode="legacy", elicitation_callback=Slow(1.2)) as client:
        with time_limit(20):
            result = await client.call_tool("do__both", {})

    assert not result.is_error, result


async def test_a_timeout_pauses_for_all_questions_up_to_the_maximum() -> None:
    limit = TimeLimit(10, answer_seconds=100)
    with limit.paused():
        with limit.paused():
            assert 100 < limit.remaining <= 110
        assert 100 < limit.remaining <= 110
    assert 0 < limit.remaining <= 10

    outer = TimeLimit(30, answer_seconds=1000)
    inner = TimeLimit(10, outer=outer)
    with inner.paused():
        assert 1020 < inner.remaining <= 1030
    assert 0 < inner.remaining <= 10


async def test_progress_has_a_maximum() -> None:
    with time_limit(20), pytest.raises(TimeoutError):
        async with CallTimeout(0.2, answer_seconds=0, max_seconds=0.5) as timeout:
            while True:
                await asyncio.sleep(0.05)
                timeout.restart()


async def test_a_limit_is_a_positive_number() -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        registry_of(timeout=0)


async def test_an_expired_timeout_ends_the_call() -> None:
    limit = TimeLimit(0.05, answer_seconds=0.05)
    registry = registry_of()
    context = OperationContext(deadline=limit.deadline, limit=limit)
    with pytest.raises(CallError) as caught:
        await registry.execute("do.work", {"seconds": 5}, context)
    assert caught.value.code == ErrorCode.TIMEOUT


async def test_a_call_ends_in_time_after_an_answer_that_took_longer_than_its_limit() -> None:
    registry = OperationRegistry()

    async def answer(message: str, schema: Any) -> Any:
        await anyio.sleep(0.2)
        return {"action": "accept"}

    @registry.operation("do.hang", timeout=0.1)
    async def hang(context: OperationContext) -> None:
        await context.elicit("Your name?", FORM)
        await anyio.sleep(60)

    with time_limit(30), pytest.raises(CallError) as caught:
        context = OperationContext(channel=CallerChannel(elicit=answer))
        await registry.execute("do.hang", {}, context)
    assert caught.value.code == ErrorCode.TIMEOUT

    async def request() -> None:
        limit, timeout = TimeLimit(0.1), RequestTimeout()
        timeout.start(0.1, limit=limit)
        with limit.paused():
            await anyio.sleep(0.2)
        await anyio.sleep(60)

    waiting = asyncio.create_task(request())
    done, _ = await asyncio.wait({waiting}, timeout=scaled(30))
    assert done
    assert waiting.cancelled()


@BOTH
async def test_a_timeout_in_the_tools_table_pauses_for_people_and_overrides_the_default(
    era: str,
) -> None:
    registry = registry_of()
    limit = scaled(0.8)
    configure_tools(registry, {"do.*": ToolConfig(timeout=limit)})
    for default in (limit / 8, 40 * limit):
        server = to_mcp(registry, timeout=default)
        async with Client(server, mode=era, elicitation_callback=Slow(1.25 * limit)) as client:
            with time_limit(20):
                asked = await client.call_tool("do__ask", {})
                going = await client.call_tool("do__work", {"steps": 5, "seconds": limit / 4})
                silent = await client.call_tool("do__work", {"seconds": 30 * limit})

        assert not asked.is_error, asked
        assert not going.is_error, going
        assert error_of(silent)["code"] == "TIMEOUT"


async def test_a_timeout_in_the_tools_table_applies_to_nested_calls() -> None:
    registry = registry_of()
    configure_tools(registry, {"do.work": ToolConfig(timeout=0.2)})

    @registry.operation("do.nested")
    async def nested(context: OperationContext) -> str:
        return str((await context.env.do.work({"seconds": 30})).data)

    async with Client(to_mcp(registry)) as client:
        with time_limit(20):
            result = await client.call_tool("do__nested", {})

    assert error_of(result)["code"] == "TIMEOUT"


async def test_a_handler_can_shorten_the_time_of_a_call() -> None:
    registry = registry_of()

    @registry.operation("do.nested")
    async def nested(context: OperationContext, timeout: float) -> str:
        request = {"steps": 3, "seconds": 0.2}
        result = await registry.execute("do.work", request, context, timeout=timeout)
        return str(result.data)

    async with Client(to_mcp(registry)) as client:
        with time_limit(20):
            ended = await client.call_tool("do__nested", {"timeout": 0.3})
            finished = await client.call_tool("do__nested", {"timeout": 15})

    assert error_of(ended)["code"] == "TIMEOUT"
    assert not finished.is_error


async def test_a_longer_time_of_a_call_does_not_extend_its_limit() -> None:
    registry = registry_of()
    limit = TimeLimit(0.3)
    context = OperationContext(limit=limit, deadline=limit.deadline)
    with time_limit(20), pytest.raises(CallError) as raised:
        await registry.execute("do.work", {"seconds": 30}, context, timeout=15)
    assert raised.value.code == ErrorCode.TIMEOUT


_SET_THE_CLOCK = """
import asyncio, sys, time
real, real_ns, ahead = time.time, time.time_ns, 0
# The clock must be changed before modules that read it are imported.
time.time, time.time_ns = lambda: real() + ahead, lambda: real_ns() + ahead * 10**9
from mcp import Client
from operations import OperationRegistry
from operations.mcp import to_mcp

registry = OperationRegistry()

@registry.operation("clock.ticks")
async def ticks():
    global ahead
    yield 1
    ahead += int(sys.argv[1])
    await asyncio.Event().wait()

async def main() -> None:
    async with Client(to_mcp(registry, timeout=float(sys.argv[2]))) as client:
        print((await client.call_tool("clock__ticks", {})).structured_content)

asyncio.run(main())
"""


@pytest.mark.requirement("R30", "F13")
@pytest.mark.parametrize("seconds", [3600, -3600])
async def test_f13_items_of_a_subscription_are_returned_although_the_clock_is_set(
    seconds: int,
) -> None:
    done = await anyio.run_process(
        (sys.executable, "-c", _SET_THE_CLOCK, str(seconds), str(scaled(0.5))),
        cwd=PROJECT,
        check=False,
    )

    assert done.stdout.decode() == "{'items': [1], 'complete': False}\n", done.stderr.decode()
