"""The testing kit: a registry under test, an application with Starlette's client, and a fake upstream."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from operations import CallError, ErrorCode, OperationContext, OperationRegistry
from operations.base.errors import OperationsError
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.server import create_app
from operations.testing import FakeUpstream, RegistryUnderTest
from operations.testing.plugin import under_test

__all__ = ["under_test"]

UnderTest = Callable[[OperationRegistry], RegistryUnderTest]

registry = OperationRegistry()


@registry.operation("mail.send", scopes=["mail"])
async def send(to: str) -> dict[str, int]:
    """Send a real mail."""
    raise AssertionError("no test sends mail")


@registry.operation("shop.order", calls=["mail.*"])
async def order(article: str, context: OperationContext) -> str:
    sent = await context.env.mail.send({"to": "ann"})
    return f"{article}: mail {sent.data['id']}"


@registry.operation("shop.tell")
async def tell() -> Any:
    yield 1


async def test_operations_are_replaced_and_their_calls_recorded(under_test: UnderTest) -> None:
    shop = under_test(registry)
    mail = shop.fake("mail.send", {"id": 7})

    assert await shop.call("shop.order", {"article": "tea"}) == "tea: mail 7"

    assert mail.inputs == [{"to": "ann"}]
    assert shop.called == ["shop.order", "mail.send"]


async def test_a_fake_may_fail_and_keeps_the_contract() -> None:
    original = registry.get("mail.send")
    with RegistryUnderTest(registry) as shop:
        shop.fake("mail.send", lambda mail: CallError("BUSY", f"not to {mail['to']}"))
        with pytest.raises(CallError, match="not to bob"):
            await shop.call("mail.send", {"to": "bob"}, scopes=["mail"])
        for value, scopes, code in (
            ({"to": "bob"}, [], ErrorCode.ACCESS_DENIED),
            ({"two": "bob"}, ["mail"], ErrorCode.VALIDATION_ERROR),
        ):
            with pytest.raises(CallError) as caught:
                await shop.call("mail.send", value, caller="ann", scopes=scopes)
            assert caught.value.code == code
        with pytest.raises(
            OperationsError, match=r"There is no operation 'mail\.sent'.*mail\.send"
        ):
            shop.fake("mail.sent")
    assert registry.get("mail.send") == original


async def test_a_fake_may_be_a_coroutine_function() -> None:
    async def later(mail: dict[str, str]) -> dict[str, int]:
        return {"id": len(mail["to"])}

    with RegistryUnderTest(registry) as shop:
        shop.fake("mail.send", later)
        assert await shop.call("shop.order", {"article": "tea"}) == "tea: mail 3"


async def test_the_items_of_a_subscription_are_replaced() -> None:
    async def counting(input: dict[str, int]) -> AsyncIterator[int]:
        for item in range(2):
            yield item

    with RegistryUnderTest(registry) as shop:
        for result, expected in (([3, 4], [3, 4]), (counting, [0, 1]), (lambda _: [5], [5])):
            told = shop.fake("shop.tell", result)
            items = [envelope.data async for envelope in registry.subscribe("shop.tell")]
            assert (items, told.inputs) == (expected, [{}])
        shop.fake("shop.tell", CallError("BUSY", "not now"))
        with pytest.raises(CallError, match="not now"):
            await anext(registry.subscribe("shop.tell"))
    assert [envelope.data async for envelope in registry.subscribe("shop.tell")] == [1]


def test_an_application_is_served_to_the_test_client_and_to_no_other_host() -> None:
    app = create_app(registry, mcp=True)
    with RegistryUnderTest(registry) as shop, TestClient(app) as client:
        shop.fake("mail.send", {"id": 8})
        assert client.post("/shop/order", json={"article": "tea"}).json() == "tea: mail 8"
        assert client.post("/mcp", json={}).status_code != 421
    with TestClient(app, client=("10.0.0.1", 50000)) as client:
        assert client.get("/operations").status_code == 421


PETS: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "pets", "version": "1"},
    "servers": [{"url": "https://pets.example/v1"}],
    "components": {
        "schemas": {
            "Pet": {
                "type": "object",
                "required": ["id", "name"],
                "properties": {"id": {"type": "integer"}, "name": {"type": "string"}},
            }
        }
    },
    "paths": {
        "/pets/{id}": {
            "parameters": [
                {"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}
            ],
            "get": {
                "operationId": "getPet",
                "responses": {
                    "200": {
                        "description": "ok",
                        "content": {
                            "application/json": {
                                "schema": {"$ref": "#/components/schemas/Pet"},
                                "examples": {"rex": {"value": {"id": 1, "name": "Rex"}}},
                            }
                        },
                    },
                    "404": {"description": "gone"},
                },
            },
            "delete": {"operationId": "removePet", "responses": {"204": {"description": "gone"}}},
        },
        "/pets/newest": {
            "get": {
                "operationId": "newestPet",
                "responses": {
                    "200": {
                        "description": "ok",
                        "content": {
                            "application/json": {"schema": {"$ref": "#/components/schemas/Pet"}}
                        },
                    }
                },
            }
        },
    },
}


async def test_a_fake_upstream_responds_with_the_examples_of_its_document() -> None:
    upstream = FakeUpstream(PETS)
    service = from_openapi(PETS, HTTPServiceConfig(namespace="pets", transport=upstream))
    async with OperationRegistry(service) as pets:
        assert (await pets.execute("pets.getPet", {"id": 5})).data == {"id": 1, "name": "Rex"}
        assert (await pets.execute("pets.newestPet", {})).data == {"id": 0, "name": ""}
        assert (await pets.execute("pets.removePet", {"id": 5})).data is None
        upstream.respond("get", "/pets/{id}", {"reason": "sold"}, status=404)
        with pytest.raises(CallError, match="404"):
            await pets.execute("pets.getPet", {"id": 6})

    sent = [(request.method, request.url) for request in upstream.requests]
    assert sent[0] == ("GET", "https://pets.example/v1/pets/5")
    assert sent[1] == ("GET", "https://pets.example/v1/pets/newest")
    assert len(sent) == 4
    with pytest.raises(KeyError, match="/cats"):
        upstream.respond("GET", "/cats")


def build() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("mail.send")
    async def send(to: str) -> dict[str, int]:
        return {"id": 1}

    @registry.operation("shop.tell")
    async def tell() -> AsyncIterator[str]:
        yield "text"

    return registry


def test_a_fake_rejects_results_that_the_operation_cannot_return() -> None:
    with RegistryUnderTest(build()) as shop:
        with pytest.raises(OperationsError, match=r"mail\.send returns what .* cannot return: /id"):
            shop.fake("mail.send", {"id": "seven"})
        with pytest.raises(OperationsError, match="cannot return: the result"):
            shop.fake("mail.send")
        with pytest.raises(OperationsError, match="cannot return"):
            shop.fake("shop.tell", ["text", {"no": "text"}])
        shop.fake("mail.send", {"id": "7"})  # converted, as a result of the operation would be


async def test_the_result_of_a_function_is_checked_when_it_is_called() -> None:
    with RegistryUnderTest(build()) as shop:
        shop.fake("mail.send", lambda _: {"id": "seven"})
        with pytest.raises(CallError) as caught:
            await shop.call("mail.send", {"to": "a"})

    assert "cannot return: /id" in str(caught.value.__cause__)
