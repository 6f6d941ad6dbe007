"""Settings for operations by id or pattern apply to every source, and override those of the operation."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from mcp import Client as MCPClient
from tests.limits import processor_limit, time_limit
from tests.mcp_import.support import eventually, raw
from tests.server.asgi import Client

from operations import (
    CallError,
    ErrorCode,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    http_envelope,
    mcp_envelope,
)
from operations.base.errors import RegistrationError
from operations.contract.channel import CallerChannel
from operations.contract.envelopes import TextContent
from operations.mcp import connect_mcp
from operations.server import create_app
from operations.server.http11.running import running
from operations.telemetry import CallMetrics
from operations.tools import RetryPolicy, ToolConfig, configure_tools

pytestmark = pytest.mark.anyio

ANN, BEN = (OperationContext(identity=Identity(name, ["use"])) for name in ("ann", "ben"))


def build(**tools: Any) -> tuple[OperationRegistry, list[Any]]:
    """A registry with one operation of each type that counts its calls, and settings for `shop.*`."""
    registry, seen = OperationRegistry(), list[Any]()
    configure_tools(registry, {"shop.*": ToolConfig(**tools)})

    @registry.operation("shop.list", type="query", scopes=["use"])
    async def list_(n: int = 0) -> dict[str, Any]:
        seen.append(n)
        return {"items": [{"id": n, "secret": "s"}], "total": 1}

    @registry.operation("shop.buy", scopes=["use"])
    async def buy(n: int = 0) -> int:
        seen.append(n)
        return n

    @registry.operation("shop.watch", scopes=["use"])
    async def watch() -> AsyncIterator[dict[str, int]]:
        for number in range(3):
            yield {"id": number, "price": 7}

    return registry, seen


async def code_of(call: Any) -> str:
    with pytest.raises(CallError) as caught:
        await call
    return caught.value.code


async def test_scopes_of_the_table_replace_those_of_the_operation() -> None:
    registry, _ = build(scopes=["admin"])
    admin = OperationContext(identity=Identity("eve", ["admin"]))

    assert await code_of(registry.execute("shop.buy", {}, ANN)) == ErrorCode.ACCESS_DENIED
    assert (await registry.execute("shop.buy", {"n": 2}, admin)).data == 2
    spec = registry.get_spec("shop.buy")
    assert spec is not None
    assert list(spec.access_control.required_scopes) == ["admin"]


async def test_a_hidden_operation_can_be_called_only_by_code_in_the_process() -> None:
    registry, _ = build(hide=True)
    client = Client(create_app(registry))

    assert (await client.post("/shop/buy", json={})).status == 404
    assert b"shop" not in (await client.get("/openapi.json")).body
    assert await code_of(registry.execute("shop.buy", {}, ANN)) == ErrorCode.ACCESS_DENIED
    assert (await registry.execute("shop.buy", {}, OperationContext(trusted=True))).data == 0


async def test_the_cache_is_for_queries_and_each_caller_and_input_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("operations.tools.cache.monotonic", lambda: now)
    registry, seen = build(cache=60)

    first = await registry.execute("shop.list", {"n": 1}, ANN)
    first.data["items"].clear()
    for context in (ANN, BEN, ANN):
        assert (await registry.execute("shop.list", {"n": 1}, context)).data["total"] == 1
        for number in (2, 2):
            await registry.execute("shop.buy", {"n": number}, context)
    again = await registry.execute("shop.list", {"n": 1}, ANN)
    assert again.data["items"] == [{"id": 1, "secret": "s"}]
    assert seen.count(1) == 2
    assert seen.count(2) == 6
    joe = OperationContext(identity=Identity("joe"))
    assert await code_of(registry.execute("shop.list", {"n": 1}, joe)) == ErrorCode.ACCESS_DENIED

    now = 61
    await registry.execute("shop.list", {"n": 1}, ANN)
    assert seen.count(1) == 3


async def test_sessions_without_identity_do_not_share_the_cache() -> None:
    registry, seen = build(cache=60, scopes=[])
    for session, calls in (("one", 1), ("one", 1), ("two", 2), ("", 3), ("", 3)):
        context = OperationContext(channel=CallerChannel(session=session))
        await registry.execute("shop.list", {"n": 1}, context)
        assert len(seen) == calls


async def test_operations_whose_settings_stay_the_same_keep_their_cache_and_rate() -> None:
    registry, seen = OperationRegistry(), list[str]()
    cached, limited = ToolConfig(cache=60), ToolConfig(rate=0.001)
    tools = configure_tools(registry, {"shop.list": cached, "shop.buy": limited})

    @registry.operation("shop.list", type="query")
    async def list_() -> None:
        seen.append("list")

    @registry.operation("shop.buy")
    async def buy() -> None:
        seen.append("buy")

    await registry.execute("shop.list")
    await registry.execute("shop.buy")
    tools.change({"shop.list": cached, "shop.buy": limited, "other.*": ToolConfig(hide=True)})
    await registry.execute("shop.list")
    assert await code_of(registry.execute("shop.buy")) == ErrorCode.RESOURCE_EXHAUSTED
    assert seen == ["list", "buy"]

    tools.change({"shop.buy": limited, "shop.*": ToolConfig(cache=30)})
    await registry.execute("shop.list")
    assert seen == ["list", "buy", "list"]


async def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.tools.cache._MAX_ENTRIES", 3)
    registry, seen = build(cache=60)

    for number in (1, 2, 3, 4, 1):
        await registry.execute("shop.list", {"n": number}, ANN)

    assert seen == [1, 2, 3, 4, 1]


async def test_a_rate_limits_each_caller_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.base.rates.monotonic", lambda: 0.0)
    registry, seen = build(rate=2.0)

    for _ in range(2):
        await registry.execute("shop.buy", {}, ANN)
    assert await code_of(registry.execute("shop.buy", {}, ANN)) == ErrorCode.RESOURCE_EXHAUSTED
    await registry.execute("shop.buy", {}, BEN)
    await registry.execute("shop.list", {}, ANN)
    assert len(seen) == 4


async def test_concurrency_is_limited_for_each_operation() -> None:
    registry = OperationRegistry()
    configure_tools(registry, {"shop.wait": ToolConfig(concurrency=2)})
    go, started = asyncio.Event(), list[int]()

    @registry.operation("shop.wait")
    async def wait() -> None:
        started.append(1)
        await go.wait()

    with time_limit(30):
        calls = [asyncio.create_task(registry.execute("shop.wait")) for _ in range(2)]
        while len(started) < 2:
            await anyio.lowlevel.checkpoint()
        # The calls are those of all callers, so the message does not count them for this one.
        with pytest.raises(CallError, match=r"concurrent calls of shop\.wait") as caught:
            await registry.execute("shop.wait")
        assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
        assert "you have" not in caught.value.message
        go.set()
        await asyncio.gather(*calls)
        await registry.execute("shop.wait")


async def test_a_timeout_holds_even_if_the_handler_ignores_it() -> None:
    registry = OperationRegistry()
    configure_tools(registry, {"shop.*": ToolConfig(timeout=0.5)})
    deadlines = list[float | None]()
    released = asyncio.Event()

    @registry.operation("shop.stubborn")
    async def stubborn(context: OperationContext) -> None:
        deadlines.append(context.deadline)
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    with time_limit(30):
        assert await code_of(registry.execute("shop.stubborn")) == ErrorCode.TIMEOUT
        assert deadlines[0] is not None
        released.set()
        async with registry:
            pass


@pytest.mark.parametrize(
    ("type", "idempotent", "tries"),
    [("query", False, 3), ("mutation", False, 1), ("mutation", True, 3)],
)
async def test_only_replayable_calls_are_repeated(type: str, idempotent: bool, tries: int) -> None:
    registry, seen = OperationRegistry(), list[int]()
    configure_tools(registry, {"shop.*": ToolConfig(retry=2)})

    async def flaky(input: Any, context: OperationContext) -> int:
        seen.append(1)
        if len(seen) < 3:
            raise CallError(ErrorCode.UNAVAILABLE, "away", retryable=True)
        return 7

    spec = OperationSpec(
        namespace="shop", name="flaky", type=OperationType(type), idempotent=idempotent
    )
    registry.register(Operation(spec, flaky))

    if tries == 3:
        assert (await registry.execute("shop.flaky")).data == 7
    else:
        assert await code_of(registry.execute("shop.flaky")) == ErrorCode.UNAVAILABLE
    assert len(seen) == tries


@pytest.mark.parametrize(("forwards", "tries"), [(True, 3), (False, 1)])
async def test_a_mutation_that_was_not_begun_is_repeated_if_it_is_passed_on(
    forwards: bool, tries: int
) -> None:
    registry, seen = OperationRegistry(), list[int]()
    configure_tools(registry, {"shop.*": ToolConfig(retry=2)})

    async def refused(input: Any, context: OperationContext) -> int:
        seen.append(1)
        raise CallError(ErrorCode.UNAVAILABLE, "no worker", begun=False)

    spec = OperationSpec(namespace="shop", name="pay", type=OperationType.MUTATION)
    registry.register(Operation(spec, refused, forwards=forwards))

    assert await code_of(registry.execute("shop.pay")) == ErrorCode.UNAVAILABLE
    assert len(seen) == tries


async def test_a_non_retryable_error_is_not_retried() -> None:
    registry, seen = OperationRegistry(), list[int]()
    configure_tools(registry, {"shop.*": ToolConfig(retry=2)})

    @registry.operation("shop.fail", type="query")
    async def fail() -> None:
        seen.append(1)
        raise CallError("NO_STOCK", "none left")

    assert await code_of(registry.execute("shop.fail")) == "NO_STOCK"
    assert seen == [1]


def failing(error: CallError, retry: RetryPolicy | int) -> tuple[OperationRegistry, list[int]]:
    """A registry with a query that always fails, and the list of its attempts."""
    registry, seen = OperationRegistry(), list[int]()
    configure_tools(registry, {"shop.*": ToolConfig(retry=retry)})

    @registry.operation("shop.fail", type="query")
    async def fail() -> None:
        seen.append(1)
        raise error

    return registry, seen


async def test_calls_that_wait_for_a_person_are_never_repeated() -> None:
    error = CallError(ErrorCode.APPROVAL_REQUIRED, "ask", retryable=True, begun=False)
    registry, seen = failing(error, 5)

    assert await code_of(registry.execute("shop.fail")) == ErrorCode.APPROVAL_REQUIRED
    assert len(seen) == 1


async def test_retries_are_bounded_by_attempts_and_by_their_budget() -> None:
    away = CallError(ErrorCode.UNAVAILABLE, "away")
    registry, seen = failing(away, RetryPolicy(attempts=4, first_pause=0, budget=0))

    for attempts in (4, 8, 12, 14, 15):
        # Ten retries are allowed at once.
        assert await code_of(registry.execute("shop.fail")) == ErrorCode.UNAVAILABLE
        assert len(seen) == attempts

    registry, seen = failing(away, RetryPolicy(attempts=4, first_pause=0, budget=3))
    for _ in range(10):
        assert await code_of(registry.execute("shop.fail")) == ErrorCode.UNAVAILABLE
    assert len(seen) == 40


async def test_nothing_is_repeated_past_the_deadline_of_the_caller() -> None:
    busy = CallError("BUSY", "busy", {"headers": {"retry-after": "60"}}, retryable=True)
    registry, seen = failing(busy, 5)

    with time_limit(20):
        assert await code_of(registry.execute("shop.fail", timeout=30)) == "BUSY"
        # Without a deadline, an API cannot hold a call for hours.
        busy.details["headers"]["retry-after"] = "3600"
        assert await code_of(registry.execute("shop.fail")) == "BUSY"
    assert len(seen) == 2

    away = CallError(ErrorCode.UNAVAILABLE, "away")
    registry, seen = failing(away, RetryPolicy(attempts=10**6, first_pause=0.02, budget=10**6))
    with time_limit(20):
        assert await code_of(registry.execute("shop.fail", timeout=1)) == ErrorCode.UNAVAILABLE
    assert len(seen) > 1


async def test_a_retry_waits_as_long_as_the_error_asks() -> None:
    limited = CallError(ErrorCode.UNAVAILABLE, "limited", {"retryAfterMs": 60_000})
    registry, seen = failing(limited, 5)

    with time_limit(20):
        # The call would have to wait beyond its deadline.
        assert await code_of(registry.execute("shop.fail", timeout=30)) == ErrorCode.UNAVAILABLE
    assert len(seen) == 1


async def test_retries_are_counted() -> None:
    registry, _ = failing(CallError(ErrorCode.UNAVAILABLE, "away"), 2)
    metrics = CallMetrics(registry)

    assert await code_of(registry.execute("shop.fail")) == ErrorCode.UNAVAILABLE

    text = metrics.render().decode()
    assert 'operations_retries_total{operation="shop.fail"} 2' in text
    assert 'operations_calls_total{operation="shop.fail",code="UNAVAILABLE"} 1' in text


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"first_pause": -1.0}, {"budget": -0.1}])
def test_a_contradictory_policy_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RetryPolicy(**wrong)


async def test_select_keeps_parts_of_results_and_of_items() -> None:
    registry, _ = build(select=["/items/*/id", "/id", "/items/*/id/deeper"])

    assert (await registry.execute("shop.list", {"n": 5}, ANN)).data == {"items": [{"id": 5}]}
    items = [each.data async for each in registry.subscribe("shop.watch", {}, ANN)]
    assert items == [{"id": 0}, {"id": 1}, {"id": 2}]
    spec = registry.get_spec("shop.list")
    assert spec is not None
    assert spec.output_schema.is_unknown


async def test_select_keeps_the_values_of_all_pointers() -> None:
    registry = OperationRegistry()
    pointers = ["/items/*/id", "/items/0/name", "/*/total", "/sums/all", "/whole/part", "/whole"]
    configure_tools(registry, {"shop.*": ToolConfig(select=pointers)})

    @registry.operation("shop.list", type="query")
    async def list_() -> dict[str, Any]:
        item = {"id": 1, "name": "n", "price": 2}
        sums = {"all": 3, "total": 4, "other": 5}
        return {"items": [item, item], "sums": sums, "whole": {"part": 1, "rest": 2}}

    assert (await registry.execute("shop.list")).data == {
        "items": [{"id": 1, "name": "n"}, {"id": 1}],
        "sums": {"all": 3, "total": 4},
        "whole": {"part": 1, "rest": 2},
    }


async def test_a_result_that_cannot_be_cached_is_returned_anyway() -> None:
    registry = OperationRegistry()
    configure_tools(registry, {"shop.*": ToolConfig(cache=60)})

    @registry.operation("shop.count", type="query")
    async def count() -> dict[str, Any]:
        return {"atoms": 10**80}

    for _ in range(2):
        assert (await registry.execute("shop.count")).data == {"atoms": 10**80}


async def test_many_pointers_select_parts_of_a_large_object_quickly() -> None:
    registry, names = OperationRegistry(), [f"name-{number}" for number in range(10_000)]

    @registry.operation("shop.list", type="query")
    async def list_() -> dict[str, int]:
        return dict.fromkeys(names, 1)

    configure_tools(registry, {"shop.*": ToolConfig(select=[f"/{name}" for name in names[1:]])})
    with processor_limit(4):
        selected = (await registry.execute("shop.list")).data

    assert list(selected) == names[1:]


async def test_select_empties_the_blocks_of_an_mcp_result_and_keeps_errors() -> None:
    registry = OperationRegistry()
    configure_tools(registry, {"far.*": ToolConfig(select=["/a"])})

    async def tool(input: Any, context: OperationContext) -> Any:
        content = [TextContent(text='{"a": 1, "b": "CANARY"}')]
        data = {"a": 1, "b": "CANARY"}
        return mcp_envelope(data, is_error=bool(input), content=content, structured_content=data)

    async def endpoint(input: Any, context: OperationContext) -> Any:
        return http_envelope({"b": 2}, status_code=200, headers={}, content_type="application/json")

    for name, handler in {"tool": tool, "endpoint": endpoint}.items():
        spec = OperationSpec(namespace="far", name=name, type=OperationType.QUERY)
        registry.register(Operation(spec, handler))

    good = await registry.execute("far.tool")
    bad = await registry.execute("far.tool", {"fail": True})

    assert good.data == {"a": 1}
    assert "CANARY" not in repr(good)
    assert bad.data["b"] == "CANARY"
    assert (await registry.execute("far.endpoint")).data == {}


async def test_a_renamed_operation_has_only_its_new_id_and_can_be_removed_by_the_old_one() -> None:
    registry = OperationRegistry()
    configure_tools(registry, {"shop.buy": ToolConfig(rename="store.order", timeout=5)})

    @registry.operation("shop.buy")
    async def buy() -> int:
        return 1

    given = registry.registered("shop.buy")
    assert "shop.buy" not in registry
    assert (await registry.execute("store.order")).data == 1
    assert given is not None
    registry.register(given, replace=True)
    assert len(registry) == 1
    registry.unregister("shop.buy")
    assert len(registry) == 0
    registry.register(given)
    other = Operation(OperationSpec(namespace="store", name="order", type="query"), given.handler)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError):
        registry.register(other)
    registry.unregister("shop.buy")
    registry.register(other)
    with pytest.raises(RegistrationError):
        registry.register(given, replace=True)
    with pytest.raises(ValueError, match="pattern"):
        configure_tools(registry, {"shop.*": ToolConfig(rename="a.b")})


async def test_settings_apply_to_registered_operations_and_later_ones_win() -> None:
    registry = OperationRegistry()

    @registry.operation("shop.buy")
    async def buy() -> Any:
        return {"a": 1, "b": 2}

    configure_tools(
        registry,
        {
            "shop.*": ToolConfig(select=["/a"], scopes=["use"]),
            "shop.buy": ToolConfig(scopes=["buy"]),
        },
    )

    buyer = OperationContext(identity=Identity("ann", ["buy"]))
    assert await code_of(registry.execute("shop.buy", {}, ANN)) == ErrorCode.ACCESS_DENIED
    assert (await registry.execute("shop.buy", {}, buyer)).data == {"a": 1}


@pytest.mark.parametrize(("table", "outcome"), [("strict", "EXECUTION_ERROR"), (None, "mismatch")])
async def test_the_output_policy_of_the_table_overrides_the_operation(
    table: Any, outcome: str
) -> None:
    registry = OperationRegistry(output="off")
    configure_tools(registry, {"shop.*": ToolConfig(output=table, timeout=5)})

    @registry.operation("shop.bad", output="cast")
    async def bad() -> int:
        return "no number"  # type: ignore[return-value]

    if table is None:
        envelope = await registry.execute("shop.bad")
        assert [change.kind for change in envelope.meta.changes] == [outcome]
    else:
        assert await code_of(registry.execute("shop.bad")) == outcome


async def test_nested_calls_middleware_and_observers_see_one_call() -> None:
    registry, _ = build(timeout=5, cache=5)
    seen = list[str]()

    @registry.operation("shop.outer", type="query")
    async def outer(context: OperationContext) -> Any:
        return (await context.env.call("shop.buy", {"n": 3})).data

    registry.observe(lambda event: seen.append(f"{type(event).__name__} {event.operation_id}"))
    assert (await registry.execute("shop.outer", {}, ANN)).data == 3

    assert seen.count("CallStarted shop.outer") == 1
    assert seen.count("CallStarted shop.buy") == 1


def test_wrong_settings_are_rejected() -> None:
    for options in ({"rename": "x"}, {"select": ["a"]}, {"output": "x"}, {"scopes": "x"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            ToolConfig(**options)


async def test_every_entry_point_applies_the_table() -> None:
    registry, _ = build(select=["/total"], scopes=[])
    app = create_app(registry, mcp=True)

    with time_limit(30):
        async with running(app) as url, MCPClient(f"{url}/mcp") as agent:
            result = await agent.call_tool("shop__list", {})
            assert result.structured_content == {"total": 1}
            assert "secret" not in str(result)
            assert (await Client(app).get("/shop/list")).json == {"total": 1}


async def test_tools_of_an_mcp_server_keep_their_settings_when_they_change() -> None:
    registry = OperationRegistry()
    tools = {"raw.*": ToolConfig(scopes=["use"]), "raw.extra": ToolConfig(rename="my.extra")}
    configure_tools(registry, tools)

    def description() -> str:
        spec = registry.get_spec("my.extra")
        return "" if spec is None else spec.description

    with time_limit(30):
        async with connect_mcp("raw", raw()) as client:
            registry.register_all(client)
            await registry.execute("raw.change", {"tool": "extra"}, ANN)
            await eventually(lambda: "my.extra" in registry)
            await registry.execute("raw.change", {"tool": "extra", "description": "New."}, ANN)
            await eventually(lambda: description() == "New.")
            assert await code_of(registry.execute("my.extra")) == ErrorCode.ACCESS_DENIED
            await registry.execute("raw.remove", {"tool": "extra"}, ANN)
            await eventually(lambda: "my.extra" not in registry)


async def test_settings_hold_for_a_spec_whose_handler_comes_later() -> None:
    registry = OperationRegistry()
    tools = {"shop.buy": ToolConfig(rename="store.order", select=["/a"])}
    configure_tools(registry, tools)

    async def handler(input: Any, context: OperationContext) -> Any:
        return {"a": 1, "b": 2}

    registry.register_spec(OperationSpec(namespace="shop", name="buy", type=OperationType.QUERY))
    assert registry.get_handler("store.order") is None
    assert await code_of(registry.execute("store.order")) == ErrorCode.OPERATION_NOT_FOUND
    registry.register_handler("shop.buy", handler)

    assert (await registry.execute("store.order")).data == {"a": 1}
    assert len(registry) == 1
