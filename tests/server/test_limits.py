"""Limits on sizes, times, rates and concurrency."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.types import Message
from tests.server.asgi import Client
from tests.support import first_done

from operations import CallError, ErrorCode, Identity, OperationContext, OperationRegistry
from operations.base.concurrency import ConcurrencyLimiter
from operations.base.rates import RateLimiter
from operations.calls import PendingRequestMap
from operations.contract.specs import ApprovalRule
from operations.front.messages import read_body
from operations.pubsub.websocket import connect_websocket
from operations.server import APIKeys, Limits, create_app, hash_key
from operations.server.http11.running import running
from operations.tools import ToolConfig, configure_tools


def serving(limits: Limits, **options: Any) -> tuple[Client, list[str]]:
    registry = OperationRegistry()
    ran: list[str] = []

    @registry.operation("test.run")
    async def run(text: str = "") -> int:
        ran.append(text)
        return len(text)

    return Client(create_app(registry, limits=limits, **options)), ran


@pytest.mark.requirement("R18")
async def test_a_body_one_byte_too_large_is_rejected_unread() -> None:
    client, ran = serving(Limits(body_bytes=100))
    body = b'{"text":"' + b"x" * 89 + b'"}'
    kind = {"content-type": "application/json"}

    assert len(body) == 100
    assert (await client.request("POST", "/test/run", body=body, headers=kind)).status == 200
    response = await client.request("POST", "/test/run", body=body + b" ", headers=kind)

    assert (response.status, response.json["code"]) == (413, "RESOURCE_EXHAUSTED")
    assert response.headers["connection"] == "close"
    assert len(ran) == 1


@pytest.mark.requirement("R18")
async def test_a_body_of_unknown_size_is_rejected_while_it_arrives() -> None:
    taken = 0

    async def receive() -> Message:
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    with pytest.raises(CallError) as caught:
        await read_body({}, receive, {}, Limits(body_bytes=10_000))

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert taken == 11


@pytest.mark.parametrize("length", ["99999999999999999999999", "-1", "1_0", "٣"])
async def test_an_invalid_length_is_rejected(length: str) -> None:
    with pytest.raises(CallError):
        await read_body({}, _never, {b"content-length": length.encode()}, Limits())


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.requirement("R39")
async def test_calls_at_a_time_are_bounded_for_each_caller_and_for_all() -> None:
    registry = OperationRegistry()
    release = asyncio.Event()

    @registry.operation("test.wait")
    async def wait() -> None:
        await release.wait()

    keys = APIKeys({hash_key(name): Identity(name) for name in "abc"})
    limits = Limits(calls=4, calls_per_caller=2)
    client = Client(create_app(registry, limits=limits, identity=keys))

    async def call(name: str) -> int:
        return (await client.post("/test/wait", headers={"x-api-key": name})).status

    calls = [asyncio.create_task(call(name)) for name in "aaabbbc"]
    done, pending = await first_done(calls, 3)
    assert sorted(task.result() for task in done) == [429, 429, 429]
    assert len(pending) == 4

    release.set()
    assert [await task for task in pending] == [200] * 4
    assert await call("a") == 200


@pytest.mark.requirement("R39")
async def test_the_concurrency_of_a_caller_is_counted_over_all_entry_points() -> None:
    registry = OperationRegistry()
    release = asyncio.Event()

    @registry.operation("test.wait")
    async def wait() -> None:
        await release.wait()

    @registry.operation("test.follow")
    async def follow() -> AsyncGenerator[int]:
        yield 1
        await release.wait()

    callers = {name: Identity(name) for name in "abc"}
    app = create_app(
        registry,
        limits=Limits(calls=5, calls_per_caller=2, streams_per_caller=1),
        identity=APIKeys({hash_key(name): caller for name, caller in callers.items()}),
        websocket=True,
        resolve=lambda key: callers.get(key.strip()),
    )
    client = Client(app)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        url = (await enter(running(app))).replace("http", "ws") + "/ws"
        signed_in = await enter(connect_websocket(url, headers={"x-api-key": "a"}))
        anonymous = await enter(connect_websocket(url))
        first = await enter(PendingRequestMap(signed_in))
        second = await enter(PendingRequestMap(anonymous))

        async def over_http(name: str) -> str:
            answer = await client.post("/test/wait", headers={"x-api-key": name})
            return "fine" if answer.status == 200 else str(answer.json["code"])

        async def over_a_socket(calls: PendingRequestMap, key: str | None = None) -> str:
            try:
                await calls.call("test.wait", {}, credential=key)
            except CallError as error:
                return error.code
            return "fine"

        # Calls of caller `a` in four ways and two spellings: any two of them are admitted.
        of_a = [over_http("a"), over_a_socket(first), over_a_socket(second, "a")]
        of_a += [over_a_socket(second, f"a{' ' * count}") for count in range(1, 5)]
        tasks = [asyncio.create_task(call) for call in of_a]
        done, pending = await first_done(tasks, 5)
        assert [task.result() for task in done] == ["RESOURCE_EXHAUSTED"] * 5
        others = [over_a_socket(second), over_a_socket(second), over_a_socket(second)]
        others += [over_http("b"), over_a_socket(second, "c")]
        tasks = [asyncio.create_task(call) for call in others]
        done, waiting = await first_done(tasks, 2)
        # Callers without identity have two as well, and together there are five.
        assert [task.result() for task in done] == ["RESOURCE_EXHAUSTED"] * 2

        # Open streams are counted separately.
        stream = first.subscribe("test.follow", {})
        assert (await anext(stream)).data == 1
        with pytest.raises(CallError) as caught:
            await anext(first.subscribe("test.follow", {}))
        assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED

        release.set()
        assert {await task for task in (*pending, *waiting)} == {"fine"}
        assert [item async for item in stream] == []
        assert {await over_a_socket(first), await over_http("a")} == {"fine"}
    front = app.state.pipeline.front
    assert (front.calls.total, front.streams.total) == (0, 0)
    metrics = (await client.get("/metrics")).body.decode().splitlines()
    assert 'operations_rejected_total{reason="calls"} 7' in metrics
    assert 'operations_rejected_total{reason="streams"} 1' in metrics
    assert 'operations_limit_used{limit="calls"} 0' in metrics
    assert 'operations_limit{limit="calls"} 5' in metrics


@pytest.mark.requirement("R39")
async def test_a_rate_holds_inside_a_socket_too() -> None:
    registry = OperationRegistry()

    @registry.operation("test.run")
    async def run() -> str:
        return "fine"

    limits = Limits(rate_per_caller=0.001, burst=3)
    app = create_app(registry, limits=limits, websocket=True)
    outcomes: list[str] = []
    async with (
        running(app) as url,
        connect_websocket(url.replace("http", "ws") + "/ws") as target,
        PendingRequestMap(target) as calls,
    ):
        for _ in range(5):
            try:
                outcomes.append((await calls.call("test.run", {})).data)
            except CallError as error:
                outcomes.append(error.code)

    assert outcomes == ["fine"] * 3 + ["RESOURCE_EXHAUSTED"] * 2
    assert b'operations_rejected_total{reason="rate"} 2\n' in await app.state.metrics.collect(())


@pytest.mark.requirement("R55")
@pytest.mark.parametrize("path", ["/test/find?value=", "/subscribe?operation=test.watch&input="])
async def test_values_and_depth_of_a_query_are_limited_as_those_of_a_body(path: str) -> None:
    registry = OperationRegistry()

    @registry.operation("test.find", type="query")
    async def find(value: Any = None) -> bool:
        return value is not None

    @registry.operation("test.watch")
    async def watch(value: Any = None) -> AsyncGenerator[bool]:
        yield value is not None

    client = Client(create_app(registry, limits=Limits(values=50, depth=20)))
    start, end = ("", "") if "find" in path else ('{"value":', "}")

    many = await client.get(f"{path}{start}[{','.join('1' * 50)}]{end}")
    deep = await client.get(f"{path}{start}{'[' * 30}{']' * 30}{end}")
    fits = await client.get(f"{path}{start}[[1,2,3]]{end}")

    assert (many.status, many.json["code"]) == (413, "RESOURCE_EXHAUSTED")
    assert (deep.status, deep.json["code"]) == (400, "VALIDATION_ERROR")
    assert fits.status == 200


@pytest.mark.requirement("R39")
async def test_each_caller_has_a_rate_of_its_own() -> None:
    client, ran = serving(Limits(rate_per_caller=0.001, burst=3))
    other = Client(client.app, address="10.0.0.9")

    statuses = [(await client.post("/test/run")).status for _ in range(5)]

    assert statuses == [200, 200, 200, 429, 429]
    assert (await other.post("/test/run")).status == 200
    assert (await client.get("/healthz")).status == 200
    assert len(ran) == 4


async def test_a_batch_counts_as_its_calls() -> None:
    client, ran = serving(Limits(rate_per_caller=0.001, burst=5))
    calls = {"calls": [{"operation": "test.run"}] * 6}

    assert (await client.post("/batch", json=calls)).status == 429
    assert ran == []


@pytest.mark.requirement("R39")
async def test_a_batch_runs_no_more_calls_at_a_time_than_its_caller_may() -> None:
    registry, running_now, most, ended = OperationRegistry(), 0, 0, 0
    boss = OperationContext(identity=Identity("boss", ["approvals:answer"]))
    registry.register_object(registry.authority.approvals)

    @registry.operation("test.wait")
    async def wait() -> None:
        nonlocal running_now, most, ended
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0.01)
        running_now -= 1
        ended += 1
        if ended == 11:
            (asked,) = (await registry.execute("approvals.list", {}, boss)).data["approvals"]
            answer = {"id": asked["id"], "approve": False}
            await registry.execute("approvals.answer", answer, boss)

    @registry.operation("test.approved")
    async def approved() -> None: ...

    configure_tools(registry, {"test.approved": ToolConfig(approve=ApprovalRule(hold=60))})
    app = create_app(registry, limits=Limits(calls_per_caller=3))
    slots = app.state.pipeline.front.calls
    # The call that waits for a person gives back its own slot, not those of the others.
    names = ["test.approved", *["test.wait"] * 11]
    batch = {"calls": [{"operation": name} for name in names]}

    response = await Client(app).post("/batch", json=batch)

    outcomes = [each.get("error", {}).get("code") for each in response.json["results"]]
    assert outcomes == ["ACCESS_DENIED"] + [None] * 11
    assert (most, slots.total) == (2, 0)


async def test_a_batch_over_the_limit_is_rejected_with_the_reason() -> None:
    client, ran = serving(Limits(rate_per_caller=0.001, burst=5))
    several = [{"calls": [{"operation": "test.run"}] * count} for count in (6, 4, 4)]

    never, fits, later = [await client.post("/batch", json=calls) for calls in several]

    assert (never.status, never.json["code"]) == (429, "RESOURCE_EXHAUSTED")
    assert "retryable" not in never.json
    assert "retry-after" not in never.headers
    assert "6 requests" in never.json["message"]
    assert fits.status == 200
    assert (later.status, later.json["retryable"]) == (429, True)
    # The next request is allowed after the time for one token.
    assert later.headers["retry-after"] == "1000"
    assert 999_000 < later.json["details"]["retryAfterMs"] <= 1_000_000
    assert len(ran) == 4


@pytest.mark.requirement("R39")
async def test_an_ipv6_prefix_is_one_caller() -> None:
    client, ran = serving(Limits(rate_per_caller=0.001, burst=2))
    clients = [Client(client.app, address=f"2001:db8::{number:x}") for number in range(4)]

    assert [(await one.post("/test/run")).status for one in clients] == [200, 200, 429, 429]
    assert (await Client(client.app, address="2001:db8:0:1::1").post("/test/run")).status == 200
    assert len(ran) == 3


@pytest.mark.requirement("R39")
async def test_an_ipv6_prefix_has_the_slots_of_one_caller() -> None:
    registry = OperationRegistry()
    release = asyncio.Event()

    @registry.operation("test.wait")
    async def wait() -> None:
        await release.wait()

    app = create_app(registry, limits=Limits(calls_per_caller=1))
    first = asyncio.create_task(Client(app, address="2001:db8::1").post("/test/wait"))
    front: Any = app.state.pipeline.front
    while not front.calls.total:
        await asyncio.sleep(0)

    assert (await Client(app, address="2001:db8::2").post("/test/wait")).status == 429
    release.set()
    assert (await first).status == 200


def test_a_rate_refills_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("operations.base.rates.monotonic", lambda: now)
    rate = RateLimiter(2.0, 2)

    rate.spend("a", 2)
    with pytest.raises(CallError):
        rate.spend("a")
    now = 0.5
    rate.spend("a")
    with pytest.raises(CallError):
        rate.spend("a")


def test_memory_of_rates_is_bounded() -> None:
    rate = RateLimiter(1.0, 1, remembered=10)

    for number in range(100):
        rate.spend(str(number))

    assert len(rate._buckets) == 10


def test_a_limiter_forgets_callers_that_have_left() -> None:
    gate = ConcurrencyLimiter(limit=10, limit_per_caller=10)

    with gate.enter("a"), gate.enter("a"), gate.enter("b"):
        assert gate.total == 3

    assert gate.total == 0
    assert gate._by_caller == {}
