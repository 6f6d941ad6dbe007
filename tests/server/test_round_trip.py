"""A registry served, its document imported again: the same operations, and the same results."""

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.limits import time_limit

from operations import (
    CallError,
    ErrorDefinition,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    from_schema,
)
from operations.openapi.serving import to_openapi
from operations.server import create_app
from operations.server.http11.running import running

importing = pytest.importorskip(
    "operations.openapi.source.service", reason="nothing here imports documents"
)
config = pytest.importorskip("operations.openapi.source.config")

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,6}[A-Za-z0-9]", fullmatch=True)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: math.copysign(1, x) > 0 or x)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abé$", max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
SCHEMAS: st.SearchStrategy[Any] = st.sampled_from([
    {},
    {"type": "object", "properties": {"v": {"$ref": "#/$defs/Any"}}, "$defs": {"Any": {}}},
    {"anyOf": [{"type": "object"}, {"not": {"type": "object"}}]},
    {"properties": {"next": {"$ref": "#"}}},
])  # fmt: skip


async def echo(input: Any, context: OperationContext) -> Any:
    return input


async def fail(input: Any, context: OperationContext) -> Any:
    raise CallError("DECLARED", "as declared", {"input": input})


async def repeat(input: Any, context: OperationContext) -> AsyncIterator[Any]:
    for _ in range(3):
        yield input


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    handler = draw(st.sampled_from([echo, fail, repeat]))
    kind = st.sampled_from([OperationType.QUERY, OperationType.MUTATION])
    spec = OperationSpec(
        namespace=draw(NAMES).replace(".", "_"),
        name=draw(NAMES),
        type=OperationType.SUBSCRIPTION if handler is repeat else draw(kind),
        description=draw(st.text("ab \né", max_size=10)),
        input_schema=from_schema(draw(SCHEMAS)),
        output_schema=from_schema(draw(SCHEMAS)),
        error_schemas=(ErrorDefinition("DECLARED", "It can.", http_status=draw(st.integers(400, 499))),),
        idempotent=draw(st.booleans()),
    )  # fmt: skip
    return Operation(spec, handler)


async def outcome(registry: OperationRegistry, spec: OperationSpec, value: Any) -> Any:
    """Return the result or the error of a call."""
    try:
        if spec.type is OperationType.SUBSCRIPTION:
            return [envelope.data async for envelope in registry.subscribe(spec.id, value)]
        return (await registry.execute(spec.id, value)).data
    except CallError as error:
        return error.code, error.message, error.details


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(operations(), min_size=1, max_size=4, unique_by=lambda o: o.spec.id),
    st.lists(VALUES, min_size=1, max_size=4),
)
async def test_a_served_registry_is_imported_with_equal_specs_and_results(
    served: list[Operation], values: list[Any]
) -> None:
    there = OperationRegistry(served)
    with time_limit(30):
        async with running(create_app(there)) as url, OperationRegistry() as here:
            settings = config.HTTPServiceConfig(namespace="x", base_url=url, restore=True)
            here.register_all(importing.from_openapi(to_openapi(there), settings))

            assert {spec.id for spec in here.specs()} == {spec.id for spec in there.specs()}
            for spec in there.specs():
                again = here.get_spec(spec.id)
                assert again is not None
                assert again.digest == spec.digest
                for value in values:
                    assert await outcome(here, spec, value) == await outcome(there, spec, value)
