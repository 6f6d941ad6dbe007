"""Details of registration and of calls that are the same at every entry point."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import date
from decimal import Decimal
from functools import partial
from math import nan
from typing import Annotated, Any

import msgspec
import pytest
from tests.server.asgi import Client

from operations import (
    CallError,
    ErrorCode,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    from_schema,
)
from operations.base.errors import RegistrationError
from operations.calls import PendingRequestMap, from_calls
from operations.contract.context import MAX_NESTED
from operations.mcp import MCPClientConfig
from operations.openapi import HTTPServiceConfig
from operations.pubsub.memory import MemoryTarget
from operations.server import create_app
from operations.tools import ToolConfig


async def items(input: Any, context: Any) -> AsyncIterator[int]:
    yield 1


async def value(input: Any, context: Any) -> list[int]:
    return [1]


async def opened(input: Any, context: Any) -> AsyncIterator[int]:
    return items(input, context)


def plain(input: Any, context: Any) -> list[int]:
    return [1]


def untyped(input, context):  # type: ignore[no-untyped-def]
    return items(input, context) if input else 5


class Caller:
    async def __call__(self, input: Any, context: Any) -> int:
        return 1


def subscription(handler: Any) -> OperationRegistry:
    spec = OperationSpec(name="watch", namespace="x", type=OperationType.SUBSCRIPTION)
    return OperationRegistry([Operation(spec, handler)])


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("handler", [value, plain, partial(value), Caller()])
def test_a_subscription_needs_an_async_iterator_when_it_is_registered(handler: Any) -> None:
    with pytest.raises(RegistrationError, match="async iterator"):
        subscription(handler)


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("handler", [items, opened, partial(items), untyped])
async def test_handlers_that_return_async_iterators_are_subscriptions(handler: Any) -> None:
    found = [each.data async for each in subscription(handler).subscribe("x.watch", {"a": 1})]

    assert found == [1]


@pytest.mark.requirement("R33")
async def test_typed_functions_are_subscriptions() -> None:
    registry = OperationRegistry()

    @registry.operation("x.watch")
    async def watch(context: OperationContext, count: int = 1):  # type: ignore[no-untyped-def]
        for number in range(count):
            yield number

    @registry.operation("x.relay")
    def relay(context: OperationContext) -> AsyncIterator[int]:
        return items(None, None)

    for name in ("x.watch", "x.relay"):
        assert [each.data async for each in registry.subscribe(name, {})] in ([0], [1])


async def test_a_handler_that_returns_another_value_is_named() -> None:
    with pytest.raises(CallError, match=r"x\.watch returned no async iterator, but int"):
        _ = [each async for each in subscription(untyped).subscribe("x.watch", {})]


DURATIONS: list[Callable[[], Any]] = [
    lambda: PendingRequestMap(MemoryTarget(), timeout=nan),
    lambda: PendingRequestMap(MemoryTarget(), idle_timeout=nan),
    lambda: from_calls(MemoryTarget(), timeout=nan),
    lambda: HTTPServiceConfig("api", base_url="http://127.0.0.1", timeout=nan),
    lambda: MCPClientConfig(command="server", timeout=nan),
    lambda: MCPClientConfig(command="server", connect_timeout=nan),
    lambda: ToolConfig(timeout=nan),
    lambda: create_app(OperationRegistry(), timeout=nan),
    lambda: OperationRegistry().operation("x.y", timeout=nan)(value),
]


@pytest.mark.requirement("R12")
@pytest.mark.parametrize("configure", DURATIONS)
def test_a_duration_that_is_not_a_number_is_rejected(configure: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"timeout .*nan"):
        configure()


@pytest.mark.requirement("R12")
async def test_a_deadline_that_is_not_a_number_is_rejected() -> None:
    registry = OperationRegistry()
    registry.operation("x.y")(partial(value, None, None))

    with pytest.raises(CallError) as caught:
        await registry.execute("x.y", {}, OperationContext(deadline=nan))

    assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_details_of_errors_are_json_in_the_process_as_well() -> None:
    registry = OperationRegistry()

    @registry.operation("x.json")
    async def fail() -> None:
        raise CallError("FULL", "full", {"price": Decimal("1.5"), "on": date(2020, 1, 2)})

    @registry.operation("x.object")
    async def fail_oddly() -> None:
        raise CallError("FULL", "full", {"what": object()})

    found = []
    for name in ("x.json", "x.object"):
        with pytest.raises(CallError) as caught:
            await registry.execute(name)
        found.append(caught.value.details)

    assert found[0] == {"price": "1.5", "on": "2020-01-02"}
    assert "not JSON" in found[1]["omitted"]


@pytest.mark.requirement("R20")
@pytest.mark.parametrize("deadline", [None, 4e12])
async def test_calls_are_nested_to_a_limit(deadline: float | None) -> None:
    registry = OperationRegistry()
    depths: list[int] = []

    @registry.operation("x.again")
    async def again(context: OperationContext) -> None:
        depths.append(context.depth)
        await context.env.x.again()

    async def through(call: Any, call_next: Any) -> Any:
        return await call_next(call)

    for _ in range(3):
        registry.use(through)
    with pytest.raises(CallError) as caught:
        await registry.execute("x.again", {}, OperationContext(deadline=deadline))

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert depths == list(range(MAX_NESTED + 1))


class Bill(msgspec.Struct):
    total: Decimal


@pytest.mark.requirement("R27")
@pytest.mark.parametrize(
    ("given", "expected"),
    [(0.1, "0.1"), (5, "5"), ("1.50", "1.50"), (10**30, str(10**30)), (1e22, "1E+22")],
)
async def test_a_json_number_is_accepted_for_a_decimal(given: Any, expected: str) -> None:
    registry = OperationRegistry()

    @registry.operation("x.pay")
    async def pay(
        amount: Annotated[Decimal, msgspec.Meta(ge=0)], bill: Bill, more: int | Decimal
    ) -> list[str]:
        return [str(amount), str(bill.total), str(more)]

    async def paid(amount: Any) -> Any:
        return (
            await registry.execute(
                "x.pay", {"amount": amount, "bill": {"total": amount}, "more": amount}
            )
        ).data

    *texts, more = await paid(given)
    assert texts == [expected] * 2
    assert Decimal(more) == Decimal(expected)
    for wrong in (-1, "x", True, None):
        with pytest.raises(CallError) as caught:
            await paid(wrong)
        assert caught.value.code == ErrorCode.VALIDATION_ERROR


@pytest.mark.requirement("R27")
async def test_a_body_of_null_is_no_missing_body() -> None:
    registry = OperationRegistry()

    @registry.operation("x.find")
    async def find(text: str = "all") -> str:
        return text

    client = Client(create_app(registry))
    json_type = {"content-type": "application/json"}
    nothing = await client.post("/x/find", body=b"", headers=json_type)
    null = await client.post("/x/find", body=b"null", headers=json_type)

    assert (nothing.status, nothing.json) == (200, "all")
    assert (null.status, null.json["code"]) == (422, "VALIDATION_ERROR")


ONE: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TWO: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["b"],
}


@pytest.mark.parametrize(
    ("first", "given", "expected"),
    [
        (ONE, {"a": 1, "b": 2}, {"a": 1}),
        (ONE, {"a": "1", "b": 2}, {"a": 1}),
        ({**ONE, "required": []}, {"b": 1}, {}),
        (ONE, {"b": 5}, {"b": 5}),
    ],
)
def test_create_finds_the_member_of_an_overlapping_one_of_that_fits(
    first: Any, given: Any, expected: Any
) -> None:
    schema = from_schema({"oneOf": [first, TWO]})

    found = schema.cast(given, "create")

    assert found.value == expected
    assert schema.check(found.value)
    assert "mismatch" not in {change.kind for change in found.changes}


def test_another_event_loop_than_that_of_asyncio_is_a_clear_error() -> None:
    registry = OperationRegistry()
    registry.operation("x.y")(partial(value, None, None))

    for coroutine in (registry.execute("x.y"), registry.__aenter__()):
        with pytest.raises(RuntimeError, match="asyncio only"):
            # As another event loop starts it.
            coroutine.send(None)
    assert asyncio.run(registry.execute("x.y")).data == [1]
