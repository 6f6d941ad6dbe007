"""Calls of HTTP APIs in runs: those with an idempotency key are sent again, and no token of a caller is stored."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from aiohttp import web
from tests.openapi.serving import document, serving
from tests.runs.conftest import OpenRegistry
from tests.runs.test_runs import ADA, BEN, durable, ended, resumed

from operations import CallError, Identity, OperationContext, OperationRegistry, operation
from operations.openapi import HTTPAuth, HTTPServiceConfig, from_openapi
from operations.sources.credentials import CallerToken, TokenExchange


class Payments:
    """An API that charges once for each key, and can be held after it has charged."""

    def __init__(self) -> None:
        self.url = ""
        self.keys: list[str | None] = []
        self.charged, self.released = asyncio.Event(), asyncio.Event()

    async def charge(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("idempotency-key"))
        self.charged.set()
        await self.released.wait()
        return web.json_response({"number": len(set(self.keys))})


@pytest.fixture
async def payments() -> AsyncGenerator[Payments]:
    api = Payments()
    async with serving(api.charge) as api.url:
        yield api


def imported(payments: Payments, **options: Any) -> Any:
    body = {"content": {"application/json": {"schema": {"type": "object"}}}}
    doc = document("/charges", "post", requestBody=body)
    config = HTTPServiceConfig(namespace="pay", base_url=payments.url, **options)
    return from_openapi(doc, config)


def opened(registries: OpenRegistry, payments: Payments, **options: Any) -> OperationRegistry:
    registry = registries(durable(order))
    registry.register_all(imported(payments, **options))
    return registry


async def order(context: OperationContext) -> Any:
    return (await context.env.pay.call({"body": {"amount": 1}})).data


@pytest.mark.requirement("R71")
@pytest.mark.parametrize("root", ["shop.order", "pay.call"])
async def test_a_call_with_an_idempotency_key_is_sent_again(
    registries: OpenRegistry, payments: Payments, root: str
) -> None:
    first = opened(registries, payments, idempotency=True)
    given = {} if root == "shop.order" else {"body": {"amount": 1}}
    run = await first.start(root, given, ADA)
    await payments.charged.wait()
    await first.aclose()
    payments.released.set()
    second = opened(registries, payments, idempotency=True)
    state = await resumed(second, run)

    assert (state.status, state.result["data"]) == ("completed", {"number": 1})
    assert len(payments.keys) == 2
    assert len(set(payments.keys)) == 1
    assert payments.keys[0]


async def test_without_an_idempotency_key_the_outcome_is_unknown(
    registries: OpenRegistry, payments: Payments
) -> None:
    first = opened(registries, payments)
    run = await first.start("shop.order", {}, ADA)
    await payments.charged.wait()
    await first.aclose()

    second = opened(registries, payments)
    assert (await resumed(second, run)).status == "unknown"
    assert payments.keys == [None]


async def test_other_calls_and_callers_have_other_keys(
    registries: OpenRegistry, payments: Payments
) -> None:
    payments.released.set()
    registry = opened(registries, payments, idempotency=True)
    for caller in (ADA, ADA, BEN, ADA.changed(key="1"), ADA.changed(key="1"), BEN.changed(key="1")):
        await registry.execute("pay.call", {"body": {}}, caller)

    assert payments.keys[3] == payments.keys[4]
    assert len(set(payments.keys)) == 5


async def test_an_operation_that_needs_the_token_of_its_caller_is_no_run(
    registries: OpenRegistry, payments: Payments
) -> None:
    """A run stores no token, so that another attempt could not be made."""
    exchange = TokenExchange(token_url=payments.url, client_id="hub")
    token = CallerToken(exchange=exchange)
    auth = HTTPAuth(type="bearer", token=token)
    registry = opened(registries, payments, auth=auth)
    caller = OperationContext(identity=Identity("ada", ["shop"]))

    with pytest.raises(CallError) as caught:
        await registry.start("pay.call", {"body": {}}, caller)
    state = await ended(await registry.start("shop.order", {}, caller))

    assert caught.value.code == state.error["code"] == "UNAVAILABLE"
    assert "run" in caught.value.message
    assert "run" in state.error["message"]
    assert payments.keys == []


async def test_parts_of_a_step_have_keys_of_their_own(
    registries: OpenRegistry, payments: Payments
) -> None:
    """An API would otherwise take the second call for a repetition of the first one."""
    payments.released.set()
    registry = registries(operation("shop.twice")(twice))
    registry.register_all(imported(payments, idempotency=True))
    await (await registry.start("shop.twice", {}, ADA)).result(10)

    assert len(payments.keys) == len(set(payments.keys)) == 3


async def twice(context: OperationContext) -> None:
    assert context.registry is not None
    for amount in (1, 2):
        await context.registry.execute("pay.call", {"body": {"amount": amount}}, context)
    await context.env.pay.call({"body": {"amount": 1}})


@pytest.mark.requirement("R71")
@pytest.mark.parametrize("root", ["shop.order", "pay.call"])
async def test_a_call_is_not_sent_again_to_a_service_that_no_longer_recognises_keys(
    registries: OpenRegistry, payments: Payments, root: str
) -> None:
    """The person who decides what has happened can let it run."""
    first = opened(registries, payments, idempotency=True)
    given = {} if root == "shop.order" else {"body": {"amount": 1}}
    run = await first.start(root, given, ADA)
    await payments.charged.wait()
    await first.aclose()
    payments.released.set()
    second = opened(registries, payments)
    state = await resumed(second, run)
    same = await second.run(run.id, ADA)

    assert (state.status, state.error["code"]) == ("unknown", "OUTCOME_UNKNOWN")
    assert state.error["details"]["operation"] == "pay.call"
    assert len(payments.keys) == 1
    await same.retry(not_run=True)
    assert (await same.result(10)).data == {"number": 2}


@pytest.mark.requirement("R71")
@pytest.mark.parametrize("root", ["shop.order", "pay.call"])
async def test_a_function_that_recognises_keys_runs_again(
    registries: OpenRegistry, root: str
) -> None:
    keys: list[str | None] = []
    begun, released = asyncio.Event(), asyncio.Event()

    @operation("pay.call", keyed=True)
    async def pay(body: dict[str, int], context: OperationContext) -> int:
        keys.append(context.key)
        begun.set()
        await released.wait()
        return len(set(keys))

    given = {} if root == "shop.order" else {"body": {"amount": 1}}
    first = registries(durable(order), pay)
    run = await first.start(root, given, ADA)
    await begun.wait()
    await first.aclose()
    released.set()
    state = await resumed(registries(durable(order), pay), run)

    assert (state.status, state.result["data"]) == ("completed", 1)
    assert len(keys) == 2
