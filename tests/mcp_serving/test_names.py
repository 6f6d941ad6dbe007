"""The names of tools: a function of the operation id alone, accepted by every model."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp import Client, MCPError
from tests.mcp_serving.support import example, tool_names

from operations import OperationRegistry, OperationSpec, OperationType
from operations.base.text import TOOL_NAME, tool_name
from operations.mcp import to_mcp
from operations.mcp.serving.catalog import specs_by_name


def spec(operation_id: str, name: str | None = None) -> OperationSpec:
    namespace, _, rest = operation_id.partition(".")
    meta = {} if name is None else {"mcp": {"name": name}}
    return OperationSpec(namespace=namespace, name=rest, type=OperationType.QUERY, meta=meta)


def chosen(*specs: OperationSpec) -> dict[str, str]:
    names = specs_by_name(specs, "portable", reserved=["search"])
    return {spec.id: name for name, spec in names.items()}


@pytest.mark.parametrize(
    ("operation_id", "name"),
    [
        ("math.add", "math__add"),
        ("task.list.open", "task__list__open"),
        ("my-api.get_user", "my-api__get_user"),
        ("a." + "x" * 61, "a__" + "x" * 61),
    ],
)
def test_a_dot_becomes_two_underscores(operation_id: str, name: str) -> None:
    assert tool_name(operation_id) == name


@pytest.mark.parametrize("operation_id", ["a.b__c", "a_.b", "a." + "x" * 62, "a.b c", "a.ü", "add"])
def test_names_that_would_be_ambiguous_get_a_hash(operation_id: str) -> None:
    name = tool_name(operation_id)

    assert TOOL_NAME.fullmatch(name)
    assert re.fullmatch(r"[A-Za-z0-9_-]*_[0-9a-f]{8}", name)
    assert "__" not in name


alphabet = st.text("ab_.-", min_size=1, max_size=6)
ids = st.builds("{}.{}".format, st.text("ab_-", min_size=1, max_size=4), alphabet)


@given(st.lists(ids, unique=True, max_size=30))
def test_every_tool_name_is_valid_and_maps_back_to_its_id(several: list[str]) -> None:
    names = {tool_name(operation_id): operation_id for operation_id in several}

    assert len(names) == len(several)
    for name, operation_id in names.items():
        assert TOOL_NAME.fullmatch(name)
        if "__" in name:
            assert name.replace("__", ".") == operation_id


async def test_a_tool_name_does_not_depend_on_other_operations() -> None:
    registry = OperationRegistry()
    for operation_id in ("a.b_c", "a_b.c", "a.b.c"):
        registry.operation(operation_id, type="query")(print_nothing)
        async with Client(to_mcp(registry)) as client:
            assert "a__b_c" in await tool_names(client)


def print_nothing() -> None:
    """Do nothing."""


async def test_dotted_names_are_used_on_request() -> None:
    async with Client(to_mcp(example(), names="dotted")) as client:
        names = await tool_names(client)

    assert "math.add" in names
    assert tool_name("a." + "x" * 200, "dotted") == tool_name("a." + "x" * 200)


def test_an_unknown_style_is_rejected() -> None:
    with pytest.raises(ValueError, match="portable or dotted"):
        to_mcp(OperationRegistry(), names="doted")  # type: ignore[arg-type]


def test_an_operation_may_choose_its_name() -> None:
    assert chosen(spec("a.b", "add")) == {"a.b": "add"}


@pytest.mark.parametrize("name", ["search", "a__c", "no dots.", "x" * 65])
def test_a_chosen_name_that_is_not_available_is_not_used(name: str) -> None:
    assert chosen(spec("a.b", name), spec("a.c")) == {"a.b": "a__b", "a.c": "a__c"}


def test_a_name_that_two_operations_choose_belongs_to_neither() -> None:
    assert chosen(spec("a.b", "add"), spec("a.c", "add")) == {"a.b": "a__b", "a.c": "a__c"}


async def test_a_call_by_operation_id_is_answered_with_the_tool_name() -> None:
    async with Client(to_mcp(example())) as client:
        with pytest.raises(MCPError, match="math__add"):
            await client.call_tool("math.add", {"a": 1})
        with pytest.raises(MCPError) as hidden:
            await client.call_tool("task.delete", {"id": "1"})

    assert "task__delete" not in str(hidden.value)
