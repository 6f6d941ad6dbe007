"""Importing an exported registry restores the same operations, for generated registries and all protocol
revisions."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp import Client
from tests.mcp_serving.support import ERAS, example
from tests.server.asgi import Client as HTTPClient

from operations import (
    CallError,
    ErrorDefinition,
    MCPResponseMeta,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    Schema,
    mcp_envelope,
)
from operations.base.text import tool_name
from operations.base.types import JSONObject, JSONSchema
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.mcp.shared.codec import restore_arguments, restore_envelope, restore_spec
from operations.mcp.source.tools import tool_envelope
from operations.server import create_app

BOTH = pytest.mark.parametrize("era", ERAS)

GONE = ErrorDefinition("GONE", "It is gone", Schema({"type": "object"}), 410)

SCHEMAS: list[tuple[JSONSchema, list[Any]]] = [
    ({}, [None, 1, "x", [1], {"result": 1}, {}]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, [{"a": 1}]),
    ({"type": "integer"}, [0, -(2**70)]),
    ({"type": ["string", "null"]}, ["", "x", None]),
    ({"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "number"}}}, [[], [1.5]]),
    ({"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}}, [{}]),
    ({"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"$ref": "#"}}]}, [True, [False, [True]]]),
    ({"type": "string", "contentEncoding": "base64"}, [b"", b"\x00\xff"]),
    ({"type": "null"}, [None]),
    ({"type": "object", "properties": {"a": {"type": "array"}}}, [{"a": [1, "x"]}]),
    ({"type": "array", "prefixItems": [{"type": "integer"}]}, [[1]]),
]  # fmt: skip


@st.composite
def registries(draw: st.DrawFn) -> tuple[OperationRegistry, dict[str, Any]]:
    """A registry whose operations give one value each, and those values by id."""
    registry, values = OperationRegistry(), dict[str, Any]()
    for number in range(draw(st.integers(1, 4))):
        input_schema, inputs = draw(
            st.sampled_from([pair for pair in SCHEMAS if b"" not in pair[1]])
        )
        output_schema, outputs = draw(st.sampled_from(SCHEMAS))
        taken, value = draw(st.sampled_from(inputs)), draw(st.sampled_from(outputs))
        kind = draw(st.sampled_from(list(OperationType)))
        if kind is OperationType.SUBSCRIPTION and isinstance(value, bytes):
            kind = OperationType.QUERY
        spec = OperationSpec(
            namespace=draw(st.sampled_from(["a", "b-c"])),
            name=f"n{number}",
            version=draw(st.sampled_from(["1.0.0", "2.1.0"])),
            type=kind,
            title=draw(st.sampled_from([None, "Title"])),
            description=draw(st.sampled_from(["", "What it does."])),
            tags=draw(st.sampled_from([(), ("t",)])),
            input_schema=Schema(input_schema),
            output_schema=Schema(output_schema),
            error_schemas=draw(st.sampled_from([(), (GONE,)])),
            idempotent=draw(st.booleans()),
        )  # fmt: skip

        def bind(value: Any, kind: OperationType) -> Any:
            async def give(_input: Any, _context: OperationContext) -> Any:
                return value

            async def stream(_input: Any, _context: OperationContext) -> AsyncIterator[Any]:
                yield value
                yield value

            return stream if kind is OperationType.SUBSCRIPTION else give

        registry.register(Operation(spec, bind(value, kind)))
        # A tool's arguments are an object, also for an operation without an input schema.
        values[spec.id] = (taken if input_schema else {}, value)
    return registry, values


def contract(spec: OperationSpec) -> JSONObject:
    wire = spec.to_wire()
    del wire["accessControl"]
    wire.pop("_meta", None)
    return wire


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(made=registries())
@BOTH
async def test_an_export_carries_all_that_an_import_needs(
    era: str, made: tuple[OperationRegistry, dict[str, Any]]
) -> None:
    registry, values = made
    originals = {tool_name(spec.id): spec for spec in registry.specs()}
    async with Client(to_mcp(registry), mode=era) as client:
        for tool in (await client.list_tools()).tools:
            meta = tool.meta
            listed = OperationSpec(
                namespace="far",
                name="tool",
                type=OperationType.MUTATION,
                title=tool.title,
                description=tool.description or "",
                input_schema=Schema(tool.input_schema),
                output_schema=Schema(tool.output_schema or {}),
            )
            restored = restore_spec(listed, meta)
            original = originals[tool.name]
            if original.type is not OperationType.SUBSCRIPTION:
                assert contract(restored) == contract(original)

            taken, value = values[original.id]
            raw = await client.call_tool(tool.name, restore_arguments(taken, meta))
            result = raw.model_dump(by_alias=True, mode="json", exclude_none=True)
            assert not result["isError"], result
            data = restore_envelope(tool_envelope(result, restored.output_schema), meta).data
            if original.type is OperationType.SUBSCRIPTION:
                assert data == {"items": [value, value], "complete": True}
            else:
                assert data == value
                assert type(data) is type(value)


@pytest.mark.parametrize("data", [{"result": 1}, {"a": 1}, {}])
@pytest.mark.parametrize("version", ["2025-11-25", "auto"])
async def test_an_object_of_an_imported_tool_without_output_schema_is_forwarded_unchanged(
    version: str, data: JSONObject
) -> None:
    registry = OperationRegistry()

    @registry.operation("far.tool")
    async def tool() -> Any:
        return mcp_envelope(data, is_error=False, content=[], structured_content=data)

    config = MCPClientConfig(server=to_mcp(registry), trust_annotations=True, version=version)
    async with connect_mcp("far", config) as client:
        envelope = await OperationRegistry(client).execute("far.tool", {})

    assert envelope.data == data
    assert isinstance(envelope.meta, MCPResponseMeta)
    assert envelope.meta.structured_content == data


@settings(max_examples=20, deadline=None)
@given(made=registries())
@pytest.mark.parametrize("version", ["2025-11-25", "auto"])
async def test_an_import_of_a_trusted_export_has_the_same_contracts_and_results(
    version: str, made: tuple[OperationRegistry, dict[str, Any]]
) -> None:
    registry, values = made
    config = MCPClientConfig(server=to_mcp(registry), trust_annotations=True, version=version)
    async with connect_mcp("far", config) as client:
        imported = OperationRegistry(client)
        for operation_id, (taken, value) in values.items():
            original, restored = registry.get_spec(operation_id), imported.get_spec(operation_id)
            assert original is not None
            if original.type is OperationType.SUBSCRIPTION:
                continue
            assert restored is not None
            assert contract(restored) == contract(original)
            data = (await imported.execute(operation_id, taken)).data
            assert data == value
            assert type(data) is type(value)


async def test_an_import_of_an_export_restores_the_operations() -> None:
    registry = example()
    config = MCPClientConfig(server=to_mcp(registry), trust_annotations=True)
    async with connect_mcp("far", config) as client:
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == ("operations", "1.0.0")
        imported = OperationRegistry(client)
        ids = {"math.add", "task.get", "task.fail", "task.crash"}
        for operation_id in ids:
            here, there = registry.get_spec(operation_id), imported.get_spec(operation_id)
            assert here is not None
            assert there is not None
            assert (there.type, there.version, there.error_schemas) == (
                here.type,
                here.version,
                here.error_schemas,
            )
            assert there.input_schema == here.input_schema

        assert (await imported.execute("math.add", {"a": 1})).data == 2
        assert (await imported.execute("task.get", {"id": "x"})).data == {"id": "x"}
        with pytest.raises(CallError) as caught:
            (await imported.execute("task.fail", {})).raise_for_error()

    assert (caught.value.code, caught.value.details) == ("TASK_LOCKED", {"by": "ann"})


async def test_the_items_of_a_subscription_survive_a_trusted_import() -> None:
    async def watch(_input: Any, _context: OperationContext) -> AsyncIterator[JSONObject]:
        yield {"id": 1}

    item = {"properties": {"id": {"type": "integer"}}, "additionalProperties": False}
    spec = OperationSpec(
        namespace="task",
        name="watch",
        version="2.0.0",
        type=OperationType.SUBSCRIPTION,
        output_schema=Schema(item),
        error_schemas=(ErrorDefinition("TASK_LOCKED", "It is locked."),),
    )
    server = to_mcp(OperationRegistry([Operation(spec, watch)]))
    config = MCPClientConfig(server=server, trust_annotations=True)
    async with connect_mcp("far", config) as client:
        (imported,) = client.operations
        envelope = await OperationRegistry(client).execute("task.watch", {})

    there = imported.spec
    assert (there.type, there.version) == (OperationType.QUERY, "2.0.0")
    assert there.error_schemas == spec.error_schemas
    assert envelope.data == {"items": [{"id": 1}], "complete": True}
    assert envelope.meta.changes_count == 0


@pytest.mark.parametrize("output", [{}, {"type": "object"}])
async def test_a_trusted_import_raises_our_own_codes(output: JSONObject) -> None:
    """A caller of a hub that imports another hub can act on its errors; an HTTP client gets the same status."""

    async def order(_input: Any, _context: OperationContext) -> JSONObject:
        raise CallError("RESOURCE_EXHAUSTED", "Try again later", retryable=True)

    spec = OperationSpec(
        namespace="shop", name="order", type=OperationType.MUTATION, output_schema=Schema(output)
    )
    config = MCPClientConfig(
        server=to_mcp(OperationRegistry([Operation(spec, order)])), trust_annotations=True
    )
    async with connect_mcp("near", config) as near:
        again = MCPClientConfig(server=to_mcp(OperationRegistry(near)), trust_annotations=True)
        async with connect_mcp("far", again) as far:
            registry = OperationRegistry(far)
            with pytest.raises(CallError) as caught:
                (await registry.execute("shop.order", {})).raise_for_error()
            served = await HTTPClient(create_app(registry)).post("/shop/order", json={})

    assert (caught.value.code, caught.value.retryable) == ("RESOURCE_EXHAUSTED", True)
    assert served.status == 429


async def test_serving_twice_returns_the_same_contract() -> None:
    """A registry, imported, served again and imported again."""
    config = MCPClientConfig(server=to_mcp(example()), trust_annotations=True)
    async with connect_mcp("near", config) as near:
        again = MCPClientConfig(server=to_mcp(OperationRegistry(near)), trust_annotations=True)
        async with connect_mcp("far", again) as far:
            registry = OperationRegistry(far)
            assert (await registry.execute("task.get", {"id": "x"})).data == {"id": "x"}
            failed = await registry.execute("task.fail", {})
            with pytest.raises(CallError) as caught:
                failed.raise_for_error()

    assert caught.value.code == "TASK_LOCKED"
