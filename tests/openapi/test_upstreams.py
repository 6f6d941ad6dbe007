"""An upstream that does not respond affects only its own calls, and only briefly."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from tests.limits import time_limit
from tests.openapi.serving import document, imported, serving
from tests.support import first_done, soon

from operations import CallError, ErrorCode, OperationContext, OperationRegistry
from operations.base.retry import FAILURES, CircuitBreaker, CircuitOpenError
from operations.base.slots import Bulkhead
from operations.front.limits import Limits
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.server import create_app
from operations.server.http11.running import running


def test_a_breaker_opens_after_failures_in_a_row_and_lets_one_probe_through() -> None:
    now = 100.0
    breaker = CircuitBreaker("api", clock=lambda: now)
    for _ in range(FAILURES - 1):
        breaker.record(False, is_probe=breaker.enter())
    breaker.enter()
    breaker.succeed()
    for _ in range(FAILURES):
        breaker.record(False, is_probe=breaker.enter())

    pauses: list[float] = []
    for _ in range(40):
        # A call that began earlier fails now: that changes nothing.
        breaker.record(False, is_probe=False)
        start = now
        while True:
            try:
                is_probe = breaker.enter()
                break
            except CircuitOpenError:
                now += 0.1
        pauses.append(now - start)
        assert is_probe
        with pytest.raises(CircuitOpenError):
            breaker.enter()
        breaker.record(False, is_probe=is_probe)
    assert max(pauses[:3]) <= 0.7
    assert 5 < max(pauses) <= 30.1

    now += 31
    breaker.record(None, is_probe=breaker.enter())
    assert breaker.enter()
    breaker.succeed()
    assert not breaker.enter()


def test_the_error_of_an_open_breaker_contains_the_time_until_the_next_attempt() -> None:
    now = 100.0
    breaker = CircuitBreaker("api", clock=lambda: now)
    for _ in range(FAILURES):
        breaker.record(False, is_probe=breaker.enter())

    with pytest.raises(CircuitOpenError) as caught:
        breaker.enter()

    now += caught.value.details["retryAfterMs"] / 1000
    assert breaker.enter()


async def outcomes(registry: OperationRegistry, count: int, name: str = "api.call") -> list[str]:
    found: list[str] = []
    for _ in range(count):
        try:
            await registry.execute(name, {})
            found.append("ok")
        except CallError as error:
            found.append("open" if isinstance(error, CircuitOpenError) else error.code)
    return found


async def test_a_dead_api_is_not_called_until_a_probe_succeeds(unused_port: int) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    async with imported(document(), base_url=url, retries=0) as registry:
        found = await outcomes(registry, 20)
        assert found[:FAILURES] == [ErrorCode.UNAVAILABLE] * FAILURES
        assert found.count("open") >= 10

        async def respond(request: web.Request) -> web.Response:
            return web.json_response({}, status=503)

        async with serving(respond, port=unused_port):
            with time_limit(20):
                while (await outcomes(registry, 1)) != [ErrorCode.EXECUTION_ERROR]:
                    await asyncio.sleep(0.05)
            # A status is a response: the breaker is closed.
            assert await outcomes(registry, 10) == [ErrorCode.EXECUTION_ERROR] * 10


async def test_statuses_never_open_the_breaker() -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(status=500)

    async with serving(respond) as url, imported(document(), base_url=url, retries=0) as registry:
        assert await outcomes(registry, 12) == [ErrorCode.EXECUTION_ERROR] * 12


@pytest.mark.parametrize("by", ["timeout", "deadline"])
async def test_timeouts_open_the_breaker(by: str) -> None:
    stopped = asyncio.Event()
    calls = 0

    async def stall(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        await stopped.wait()
        return web.Response()

    async with (
        serving(stall) as url,
        imported(
            document(), base_url=url, retries=0, timeout=2 if by == "timeout" else 30
        ) as registry,
    ):

        async def call() -> CallError:
            context = OperationContext() if by == "timeout" else soon(2_000)
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", {}, context)
            return caught.value

        found = await asyncio.gather(*(call() for _ in range(FAILURES)))
        # The pause before a probe is random, so that the next call may be one.
        with time_limit(60):
            while not isinstance(last := await call(), CircuitOpenError):
                found.append(last)
        stopped.set()
    assert {each.code for each in found} == {ErrorCode.TIMEOUT}
    assert calls == len(found)


@pytest.mark.requirement("R54")
async def test_callers_with_short_deadlines_do_not_open_the_breaker() -> None:
    is_slow = True

    async def respond(request: web.Request) -> web.Response:
        if is_slow:
            await asyncio.sleep(0.2)
        return web.json_response({})

    async with serving(respond) as url, imported(document(), base_url=url, retries=0) as registry:
        await registry.execute("api.call", {})
        for _ in range(2 * FAILURES):
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", {}, soon(20))
            assert caught.value.code == ErrorCode.TIMEOUT
        is_slow = False
        await registry.execute("api.call", {})


async def test_calls_fail_at_once_while_the_probe_has_the_last_slot() -> None:
    stopped, arrived = asyncio.Event(), asyncio.Event()

    async def stall(request: web.Request) -> web.Response:
        arrived.set()
        await stopped.wait()
        return web.json_response({})

    async with (
        serving(stall) as url,
        imported(document(), base_url=url, retries=0, concurrency=2) as registry,
    ):
        held = [asyncio.create_task(registry.execute("api.call", {}))]
        for _ in range(FAILURES):
            with pytest.raises(CallError):
                await registry.execute("api.call", {}, soon(2_000))
        arrived.clear()
        with time_limit(20):
            while not arrived.is_set():
                held.append(asyncio.create_task(registry.execute("api.call", {})))
                await asyncio.wait(held[-1:], timeout=0.05)
        with time_limit(20), pytest.raises(CircuitOpenError):
            await registry.execute("api.call", {})
        stopped.set()
        await asyncio.gather(*held, return_exceptions=True)


async def test_a_caller_that_leaves_does_not_count_against_the_upstream() -> None:
    arrived, stopped = asyncio.Event(), asyncio.Event()

    async def stall(request: web.Request) -> web.Response:
        arrived.set()
        if not stopped.is_set():
            await stopped.wait()
        return web.json_response({})

    async with serving(stall) as url, imported(document(), base_url=url, retries=0) as registry:
        for _ in range(FAILURES + 2):
            arrived.clear()
            call = asyncio.create_task(registry.execute("api.call", {}))
            await arrived.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        stopped.set()
        assert (await registry.execute("api.call", {})).data == {}


async def test_each_upstream_has_its_own_breaker(unused_port: int) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response({"alive": True})

    dead = f"http://127.0.0.1:{unused_port}"
    async with serving(respond) as url, OperationRegistry() as registry:
        for name, base in (("dead", dead), ("alive", url)):
            config = HTTPServiceConfig(namespace=name, base_url=base, retries=0)
            registry.register_all(from_openapi(document(), config))
        await outcomes(registry, 10, "dead.call")
        assert await outcomes(registry, 10, "alive.call") == ["ok"] * 10


# ------------------------------------------------------------ how many at a time


async def test_calls_beyond_the_limit_wait_while_others_finish() -> None:
    bulkhead, running, most = Bulkhead("api", 3, patience=3), 0, 0

    async def call() -> None:
        nonlocal running, most
        async with bulkhead:
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1

    # Together they take longer than one of them would wait for another.
    await asyncio.gather(*(call() for _ in range(1000)))
    assert most == 3


@asynccontextmanager
async def filled(bulkhead: Bulkhead, count: int) -> AsyncGenerator[asyncio.Event]:
    ends, taken = asyncio.Event(), 0

    async def hold() -> None:
        nonlocal taken
        async with bulkhead:
            taken += 1
            await ends.wait()

    holders = [asyncio.create_task(hold()) for _ in range(count)]
    while taken < count:
        await asyncio.sleep(0)
    try:
        yield ends
    finally:
        ends.set()
        await asyncio.gather(*holders)


async def test_calls_beyond_the_limit_fail_if_none_finishes() -> None:
    bulkhead = Bulkhead("api", 2, patience=0.1)
    async with filled(bulkhead, 2):
        for _ in range(2):
            with pytest.raises(CallError) as caught:
                async with bulkhead:
                    pass
            assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
            assert caught.value.retryable
    async with bulkhead:
        pass


async def test_a_changed_limit_applies_to_waiting_calls() -> None:
    bulkhead = Bulkhead("api", 1, patience=5)
    async with filled(bulkhead, 1):
        waiting = [asyncio.create_task(bulkhead.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        bulkhead.resize(3)
        done, still = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), bulkhead.calls) == (2, 4)
        bulkhead.resize(1)
        bulkhead.leave()
        assert not bulkhead.try_enter()
    bulkhead.leave()
    await asyncio.gather(*still)
    bulkhead.leave()
    assert bulkhead.calls == 0


async def test_a_lower_limit_does_not_reject_calls_at_once() -> None:
    bulkhead = Bulkhead("api", 3, patience=60)
    async with filled(bulkhead, 2) as ends:
        bulkhead.resize(1)
        waiting = asyncio.create_task(bulkhead.enter())
        await asyncio.sleep(0)
        assert not waiting.done()
        ends.set()
        await waiting
    assert bulkhead.calls == 1
    bulkhead.leave()


async def test_a_caller_that_leaves_the_queue_loses_no_slot() -> None:
    bulkhead = Bulkhead("api", 1, patience=5)

    async def call() -> None:
        async with bulkhead:
            pass

    async with filled(bulkhead, 1) as ends:
        waiting = [asyncio.create_task(call()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        ends.set()
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    with time_limit(20):
        await asyncio.gather(*(call() for _ in range(5)))


async def test_a_stalled_api_accepts_no_more_calls_than_it_has_connections() -> None:
    stopped = asyncio.Event()

    async def stall(request: web.Request) -> web.Response:
        await stopped.wait()
        return web.json_response({})

    async with (
        serving(stall) as url,
        imported(document(), base_url=url, connections=4, retries=0) as registry,
    ):
        calls = [asyncio.create_task(registry.execute("api.call", {})) for _ in range(10)]
        done, _ = await first_done(calls, 6)
        codes = [call.exception() for call in done]
        stopped.set()
        await asyncio.gather(*calls, return_exceptions=True)
    assert len(codes) == 6
    assert {error.code for error in codes if isinstance(error, CallError)} == {
        ErrorCode.RESOURCE_EXHAUSTED
    }


async def test_a_dead_api_leaves_slots_of_a_caller_for_other_apis() -> None:
    stopped = asyncio.Event()

    async def respond(request: web.Request) -> web.Response:
        if request.path.startswith("/dead"):
            await stopped.wait()
        return web.json_response({})

    async with serving(respond) as url, OperationRegistry() as registry:
        for name in ("dead", "alive"):
            config = HTTPServiceConfig(namespace=name, base_url=f"{url}/{name}", concurrency=3)
            registry.register_all(from_openapi(document(), config))
        app = create_app(registry, limits=Limits(calls_per_caller=4))
        async with running(app) as hub, aiohttp.ClientSession() as session:

            async def call(operation: str) -> int:
                body = {"operation": operation, "input": {}}
                async with session.post(f"{hub}/call", json=body) as response:
                    return response.status

            dead = [asyncio.create_task(call("dead.call")) for _ in range(4)]
            with time_limit(60):
                while (await call("alive.call")) == 429:
                    await asyncio.sleep(0.1)
            assert await call("alive.call") == 200
            assert sorted(task.done() for task in dead) == [False, False, False, True]
            stopped.set()
            assert sorted(await asyncio.gather(*dead)) == [200, 200, 200, 429]
