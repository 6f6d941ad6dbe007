"""Importing an export restores the same operations, which call the exporting server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from operations import (
    AccessControl,
    CallError,
    ErrorCode,
    ErrorDefinition,
    OperationRegistry,
    OperationType,
    from_schema,
)
from operations.openapi import HTTPServiceConfig, from_openapi, to_openapi
from operations.server import create_app
from operations.server.http11.running import running


def original() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("math.add", type="query", tags=["sums"])
    async def add(a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    @registry.operation(
        "shop.buy",
        errors=[ErrorDefinition("SOLD_OUT", "None left.", from_schema({"type": "object"}), 409)],
    )
    async def buy(thing: str) -> dict[str, str]:
        raise CallError("SOLD_OUT", f"no {thing}", {"thing": thing})

    @registry.operation("math.count")
    async def count(to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number
        if to > 2:
            raise CallError("TOO_FAR", "stop")

    return registry


async def test_an_export_is_imported_with_equal_operations_that_run() -> None:
    source = original()
    document = to_openapi(source)
    async with running(create_app(source)) as url, OperationRegistry() as registry:
        config = HTTPServiceConfig(namespace="unused", base_url=url, restore=True)
        registry.register_all(from_openapi(document, config))

        assert {spec.id for spec in registry.specs()} == {spec.id for spec in source.specs()}
        for spec in source.specs():
            again = registry.get_spec(spec.id)
            assert again is not None
            assert again.digest == spec.digest
            assert again.tags == spec.tags
        assert (await registry.execute("math.add", {"a": 2})).data == 3
        with pytest.raises(CallError) as caught:
            await registry.execute("shop.buy", {"thing": "hat"})
        assert (caught.value.code, caught.value.details) == ("SOLD_OUT", {"thing": "hat"})
        assert [e.data async for e in registry.subscribe("math.count", {"to": 2})] == [0, 1]
        with pytest.raises(CallError) as caught:
            async for _ in registry.subscribe("math.count", {"to": 3}):
                pass
        assert caught.value.code == "TOO_FAR"
        with pytest.raises(CallError) as caught:
            await registry.execute("math.add", {"a": "x"})
        assert caught.value.code == ErrorCode.VALIDATION_ERROR


def test_an_export_is_trusted_only_if_the_operator_allows_it() -> None:
    document = to_openapi(original())
    plain = list(from_openapi(document, HTTPServiceConfig(namespace="there")))
    assert {operation.spec.namespace for operation in plain} == {"there"}
    assert "math.add.get" in {operation.spec.name for operation in plain}
    restored = list(
        from_openapi(
            document,
            HTTPServiceConfig(namespace="x", restore=True, access=AccessControl(["a"])),
        )
    )
    assert {operation.spec.id for operation in restored} == {"math.add", "math.count", "shop.buy"}
    assert {operation.spec.access_control for operation in restored} == {AccessControl(["a"])}


def test_other_operations_of_a_document_get_names_that_restored_ones_do_not_have() -> None:
    def described(operation_id: str, *kinds: str) -> dict[str, Any]:
        content = {kind: {"schema": {"type": "object"}} for kind in kinds}
        responses = {"200": {"description": "", "content": content}}
        return {"operationId": operation_id, "responses": responses}

    both = ("application/json", "text/event-stream")
    paths = {
        "/one": {"post": {"x-operations": {"id": "x.list.stream"}, "responses": {}}},
        "/two": {"post": {"x-operations": {"id": "x.taken"}, "responses": {}}},
        "/list": {"get": described("list", *both)},
        "/taken": {"get": described("taken", *both)},
    }
    document = {"openapi": "3.1.0", "info": {"title": "x", "version": "1"}, "paths": paths}
    service = from_openapi(document, HTTPServiceConfig(namespace="x", restore=True))
    registry = OperationRegistry(service)

    assert {spec.name for spec in registry.specs()} == {
        *("list", "list.stream", "list.stream_"),
        *("taken", "taken_", "taken_.stream"),
    }


@pytest.mark.parametrize("extension", [7, {"id": "noname"}, {"id": "a.b", "errors": [7]}, {}])
def test_a_malformed_extension_affects_at_most_its_operation(extension: Any) -> None:
    operation = {"x-operations": extension, "responses": {}}
    document = {"openapi": "3.1.0", "paths": {"/x": {"post": operation}}}
    service = from_openapi(document, HTTPServiceConfig(namespace="x", restore=True))
    assert len(service) + len(service.problems) == 1
    for imported in service:
        assert imported.spec.type is OperationType.MUTATION
