from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from operations import (
    OPERATION_SPEC_SCHEMA,
    AccessControl,
    ErrorDefinition,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    RegistrationError,
    from_schema,
    operation,
)
from operations.contract.functions import operation_of


@dataclass
class Task:
    id: int


FULL = OperationSpec(
    name="create.many",
    namespace="task",
    version="2.1.0",
    type=OperationType.MUTATION,
    title="Create tasks",
    description="Creates tasks.",
    tags=("a", "b"),
    input_schema=from_schema({"type": "object"}),
    output_schema=from_schema(
        {"type": "array", "items": {"$ref": "#/$defs/t"}, "$defs": {"t": True}}
    ),
    error_schemas=(ErrorDefinition("FULL", "No room.", from_schema({"type": "string"}), 409),),
    access_control=AccessControl(["x"], ["y"], "project", "edit"),
    idempotent=True,
    meta={"source": "openapi", "path": "/tasks"},
)
PLAIN = OperationSpec(name="get", namespace="task", type=OperationType.QUERY)


@pytest.mark.parametrize("spec", [FULL, PLAIN], ids=["full", "plain"])
def test_a_spec_round_trips_through_json(spec: OperationSpec) -> None:
    back = OperationSpec.decode(spec.encode())

    assert back == spec
    assert hash(back) == hash(spec)
    assert back.digest == spec.digest
    assert back.encode() == spec.encode()
    assert OPERATION_SPEC_SCHEMA.errors(spec.to_wire()) == []


names = st.from_regex(r"[A-Za-z0-9_-]{1,10}", fullmatch=True)
json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    spec=st.builds(
        OperationSpec,
        name=st.from_regex(r"[A-Za-z0-9_.-]{1,10}", fullmatch=True),
        namespace=names,
        version=st.text(max_size=5),
        type=st.sampled_from(OperationType),
        title=st.none() | st.text(max_size=5),
        description=st.text(max_size=5),
        tags=st.lists(st.text(max_size=5), max_size=3).map(tuple),
        input_schema=st.dictionaries(names, json, max_size=2).map(from_schema),
        output_schema=st.booleans().map(from_schema),
        error_schemas=st.lists(
            st.builds(
                ErrorDefinition,
                names,
                st.text(max_size=5),
                st.just(from_schema(True)),
                st.none() | st.integers(400, 599),
            ),
            max_size=2,
        ).map(tuple),
        access_control=st.builds(AccessControl, st.lists(names, max_size=2)),
        idempotent=st.booleans(),
        meta=st.dictionaries(st.text(max_size=5), json, max_size=2),
    )
)  # fmt: skip
def test_any_spec_round_trips_through_json(spec: OperationSpec) -> None:
    assert OperationSpec.decode(spec.encode()) == spec


def test_the_digest_depends_only_on_the_contract() -> None:
    reordered = structs.replace(
        FULL,
        output_schema=from_schema(
            {"$defs": {"t": True}, "items": {"$ref": "#/$defs/t"}, "type": "array"}
        ),
        tags=(),
        meta={},
    )

    assert reordered.digest == FULL.digest
    assert structs.replace(FULL, description="Other.").digest != FULL.digest
    assert structs.replace(FULL, input_schema=from_schema({})).digest != FULL.digest
    assert PLAIN.digest != FULL.digest


def test_the_id_splits_at_the_first_dot() -> None:
    assert FULL.id == "task.create.many"
    assert (FULL.namespace, FULL.name) == ("task", "create.many")


def test_replayable_operations() -> None:
    assert PLAIN.replayable
    assert FULL.replayable
    assert not OperationSpec(name="x", namespace="y", type=OperationType.MUTATION).replayable


@pytest.mark.requirement("R25")
@pytest.mark.parametrize(
    ("namespace", "name"),
    [
        ("", "x"),
        ("a.b", "x"),
        ("a", ""),
        ("a", "b\n"),
        ("a", "b c"),
        ("ä", "x"),
        ("a", "x/../y"),
        ("a" * 129, "x"),
    ],
)
def test_names_keep_to_a_safe_alphabet(namespace: str, name: str) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        OperationSpec(name=name, namespace=namespace, type=OperationType.QUERY)


def test_schemas_may_be_given_as_documents_and_types() -> None:
    spec = OperationSpec(
        name="x",
        namespace="y",
        type="query",  # type: ignore[arg-type]
        input_schema={"type": "object"},  # type: ignore[arg-type]
        output_schema=Task,  # type: ignore[arg-type]
        tags=["a"],  # type: ignore[arg-type]
        error_schemas=[ErrorDefinition("E", schema={"type": "null"})],  # type: ignore[arg-type]
    )

    assert spec.type is OperationType.QUERY
    assert spec.input_schema == from_schema({"type": "object"})
    assert spec.output_schema.check({"id": 1})
    assert spec.tags == ("a",)
    assert spec.error_schemas[0].schema.check(None)


@pytest.mark.parametrize(
    "wire",
    [
        {},
        [],
        {**PLAIN.to_wire(), "type": "event"},
        {**PLAIN.to_wire(), "inputSchema": "string"},
        {**PLAIN.to_wire(), "name": "a b"},
        {**PLAIN.to_wire(), "accessControl": {"resourceType": "x"}},
    ],
)
def test_a_mangled_spec_is_a_value_error(wire: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        OperationSpec.from_wire(wire)


# ---------------------------------------------------------------------- the decorator


def test_the_decorator_reads_the_function() -> None:
    @operation("task.create", errors=[ErrorDefinition("FULL")], meta={"a": 1}, description="Mine.")
    async def create(task: Task, context: OperationContext, urgent: bool = False) -> Task:
        """Not this."""
        return task

    marked = operation_of(create)

    assert marked is not None
    spec = marked.spec
    assert spec.type is OperationType.MUTATION
    assert spec.description == "Mine."
    assert spec.access_control.is_open
    assert spec.input_schema.check({"task": {"id": 1}})
    assert not spec.input_schema.check({"task": {"id": 1}, "context": {}})
    assert spec.output_schema.check({"id": 1})
    assert marked.blocking is False
    assert operation_of(marked) is marked
    assert operation_of(test_the_decorator_reads_the_function) is None


def test_an_async_generator_is_a_subscription() -> None:
    @operation("task.watch")
    async def watch() -> AsyncIterator[Task]:
        yield Task(1)

    marked = operation_of(watch)

    assert marked is not None
    assert marked.spec.type is OperationType.SUBSCRIPTION
    assert marked.spec.output_schema.check({"id": 1})


async def plain() -> None: ...


async def stream() -> AsyncIterator[int]:
    yield 1


def star(*args: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (plain, {"operation_id": "no-dot"}),
        (plain, {"operation_id": "a.b", "type": "subscription"}),
        (stream, {"operation_id": "a.b", "type": "query"}),
        (plain, {"operation_id": "a.b", "access": AccessControl(), "scopes": ["x"]}),
        (plain, {"operation_id": "a.b", "scopes": "admin"}),
        (star, {"operation_id": "a.b"}),
    ],
)
def test_a_function_that_cannot_be_an_operation_is_rejected(function: Any, arguments: Any) -> None:
    with pytest.raises(RegistrationError):
        operation(**arguments)(function)


def test_the_decorator_requires_a_name() -> None:
    with pytest.raises(TypeError, match="name the operation"):
        operation(plain)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name the operation"):
        operation("")
    with pytest.raises(TypeError, match="operation_id"):
        operation()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="operation_id"):
        OperationRegistry().operation()  # type: ignore[call-arg]


def test_an_unknown_option_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(
        TypeError, match=r"a\.b: there is no option 'scope'\. Did you mean \"scopes"
    ):
        operation("a.b", scope=["x"])  # type: ignore[call-arg]


def test_a_spec_cannot_be_altered() -> None:
    with pytest.raises(AttributeError):
        PLAIN.name = "x"  # type: ignore[misc]
    assert msgspec.structs.replace(PLAIN, name="y").name == "y"


def test_a_written_spec_is_a_copy() -> None:
    spec = OperationSpec(
        name="run",
        namespace="test",
        type=OperationType.QUERY,
        input_schema=from_schema({"type": "object"}),
        meta={"kept": []},
    )

    wire = spec.to_wire()
    wire["inputSchema"]["type"] = "array"
    wire["_meta"]["kept"].append(1)

    assert spec.input_schema.document == {"type": "object"}
    assert spec.meta == {"kept": []}
