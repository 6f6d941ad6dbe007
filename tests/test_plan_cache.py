"""Memory of operations that are called: equal schemas are compiled once, and plans that are rarely used are dropped."""

import asyncio
import gc
import logging
from typing import Any
from weakref import ref

import pytest

from operations import (
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    SchemaError,
    from_schema,
)
from operations.registry import cache

MAX_RECENT = 10

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store few plans, because compiling many schemas takes seconds."""
    monkeypatch.setattr(cache, "MAX_RECENT", MAX_RECENT)


def several(count: int, handler: Any) -> OperationRegistry:
    """Return a registry of operations `many.0`, `many.1`, ... with different schemas."""
    return OperationRegistry(
        Operation(
            OperationSpec(
                namespace="many",
                name=str(index),
                type=OperationType.QUERY,
                input_schema=from_schema(_closed(f"i{index}")),
                output_schema=from_schema(_closed(f"o{index}")),
            ),
            handler,
        )
        for index in range(count)
    )


def _closed(name: str) -> dict[str, Any]:
    properties = {name: {"type": "integer"}}
    return {"type": "object", "properties": properties, "additionalProperties": False}


async def give_extra(_input: Any, _context: OperationContext) -> Any:
    return {"undeclared": 1}


def test_equal_documents_are_compiled_once() -> None:
    first, second = from_schema(NAMED), from_schema({**NAMED})

    assert first.compile() is second.compile()


def test_the_order_of_properties_and_leniency_distinguish_documents() -> None:
    turned = {**NAMED, "properties": dict(reversed(NAMED["properties"].items()))}
    first, second, lenient = (
        from_schema(NAMED),
        from_schema(turned),
        from_schema(NAMED, lenient=True),
    )

    assert len({id(each.compile()) for each in (first, second, lenient)}) == 3
    value = {"b": 1, "a": "2"}
    assert list(first.cast(value).value) == list(second.cast(value).value)


def test_documents_that_only_look_equal_as_text_are_not_shared() -> None:
    fine = from_schema({"const": None})
    assert fine.check(None)

    with pytest.raises(SchemaError):
        from_schema({"const": float("nan")}).compile()


def test_a_released_document_is_freed_and_compiled_again() -> None:
    schema = from_schema({"type": "string", "title": "released"})
    schema.cast(1)
    compiled = ref(schema.compile())
    schema.forget()
    gc.collect()

    assert compiled() is None
    assert schema.check("a")
    assert not schema.check(1)


def test_a_lenient_document_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    schema = from_schema({"type": "nothing"}, lenient=True)
    for _ in range(3):
        assert schema.check(1)
        schema.forget()

    assert len(caplog.records) == 1


async def test_operations_that_are_no_longer_called_release_their_schemas() -> None:
    registry = several(4 * MAX_RECENT, give_extra)
    logging.getLogger("operations").disabled = True
    try:
        for spec in registry.specs():
            await registry.execute(spec.id, {})
    finally:
        logging.getLogger("operations").disabled = False
    held = [spec for spec in registry.specs() if spec.input_schema.is_compiled]

    assert MAX_RECENT <= len(held) <= 2 * MAX_RECENT


async def test_operations_that_are_called_again_keep_their_schemas() -> None:
    registry = several(3 * MAX_RECENT, give_extra)
    first = registry.specs()[0]
    await registry.execute(first.id, {})
    compiled = first.input_schema.compile()
    for index, spec in enumerate(registry.specs()):
        await registry.execute(spec.id, {})
        if index % 3 == 0:
            await registry.execute(first.id, {})

    assert first.input_schema.compile() is compiled


async def test_an_operation_whose_plan_was_dropped_works_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = several(3 * MAX_RECENT, give_extra)
    counters, stop = registry.count_calls()
    for _ in range(2):
        for spec in registry.specs():
            envelope = await registry.execute(spec.id, {})
            assert envelope.data == {}
            assert [change.kind for change in envelope.meta.changes] == ["stripped"]

    # The log has the first change only, also of operations that were prepared twice.
    assert len(caplog.records) == 3 * MAX_RECENT
    assert dict(counters)["many.0"].codes == {"": 2}
    stop()


async def test_a_call_that_is_running_when_its_plan_is_dropped_ends_normally() -> None:
    gate = asyncio.Event()

    async def wait(input: Any, _context: OperationContext) -> Any:
        if input:
            await gate.wait()
        return {}

    registry = several(3 * MAX_RECENT, wait)
    running = asyncio.create_task(registry.execute("many.0", {"i0": 1}))
    await asyncio.sleep(0)
    for spec in registry.specs()[1:]:
        await registry.execute(spec.id, {})
    gate.set()

    assert (await running).data == {}
