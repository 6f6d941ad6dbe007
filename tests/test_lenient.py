"""Inputs of the wrong type are converted for callers that are models, if nothing is lost."""

from collections.abc import AsyncIterator
from typing import Any, Literal, TypedDict

import pytest
from mcp import Client
from tests.mcp_serving.support import ERAS

from operations import (
    CallError,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    Schema,
)
from operations.calls.source.remote import RemoteConfig
from operations.mcp import MCPClientConfig, to_mcp
from operations.openapi import HTTPServiceConfig
from operations.registry.lenient import convert_input
from operations.tools import ToolConfig, configure_tools

LENIENT = OperationContext(lenient=True)


class Item(TypedDict):
    n: int


def build_registry(seen: list[Any]) -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("test.take", type="query")
    async def take(
        number: int = 0,
        ratio: float = 0.0,
        flag: bool = False,
        numbers: list[int] | None = None,
        item: Item | None = None,
        items: list[Item] | None = None,
        text: str = "",
        maybe: int | str = 0,
        level: Literal[1, 2] = 1,
    ) -> str:
        seen.append((number, ratio, flag, numbers, item, items, text, maybe, level))
        return "taken"

    @registry.operation("test.outer", type="query")
    async def outer(context: OperationContext) -> str:
        return str((await context.env.test.take({"number": "5"})).data)

    @registry.operation("test.count")
    async def count(to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number

    return registry


TAKEN = (0, 0.0, False, None, None, None, "", 0, 1)
FIELDS = ("number", "ratio", "flag", "numbers", "item", "items", "text", "maybe", "level")


@pytest.mark.requirement("R27")
@pytest.mark.parametrize(
    ("sent", "taken", "changes"),
    [
        ({"number": "5"}, {"number": 5}, {"/number": "an integer"}),
        ({"number": "-12"}, {"number": -12}, {"/number": "an integer"}),
        ({"ratio": "0.5"}, {"ratio": 0.5}, {"/ratio": "a number"}),
        ({"level": "2"}, {"level": 2}, {"/level": "an integer"}),
        (
            {"level": None, "number": "5"},
            {"number": 5},
            {"/level": "omitted", "/number": "an integer"},
        ),
        ({"flag": "true"}, {"flag": True}, {"/flag": "a boolean"}),
        ({"numbers": "[1, 2]"}, {"numbers": [1, 2]}, {"/numbers": "an array"}),
        ({"numbers": ["1", 2]}, {"numbers": [1, 2]}, {"/numbers/0": "an integer"}),
        ({"item": '{"n": 1}'}, {"item": {"n": 1}}, {"/item": "an object"}),
        (
            {"item": '{"n": "1"}'},
            {"item": {"n": 1}},
            {"/item": "an object", "/item/n": "an integer"},
        ),
        ({"items": [{"n": "1"}]}, {"items": [{"n": 1}]}, {"/items/0/n": "an integer"}),
        (
            {"text": None, "number": "1"},
            {"number": 1},
            {"/text": "omitted", "/number": "an integer"},
        ),
    ],
)
async def test_arguments_that_nearly_match_are_converted_and_reported(
    sent: Any, taken: Any, changes: dict[str, str]
) -> None:
    seen: list[Any] = []
    registry = build_registry(seen)
    before = repr(sent)

    envelope = await registry.execute("test.take", sent, LENIENT)

    assert seen == [tuple({**dict(zip(FIELDS, TAKEN, strict=True)), **taken}.values())]
    assert {change.path: change.kind for change in envelope.meta.changes} == dict.fromkeys(
        changes, "input"
    )
    for change in envelope.meta.changes:
        assert changes[change.path] in change.message
    assert repr(sent) == before, "the caller's own input is not modified"
    with pytest.raises(CallError) as strict:
        await registry.execute("test.take", sent)
    assert strict.value.code == "VALIDATION_ERROR"


@pytest.mark.requirement("R27")
@pytest.mark.parametrize(
    "sent",
    [
        {"number": "five"},
        {"number": "5.5"},
        {"number": " 5"},
        {"number": "5", "unknown": 1},
        {"number": "5", "unknown": None},
        {"number": "9" * 5000},
        {"ratio": "0.10000000000000000001"},
        {"ratio": "NaN"},
        {"numbers": "[1, 2"},
        {"numbers": '["a"]'},
        {"numbers": [None]},
        {"item": {"n": None}},
        {"item": '"{}"'},
        {"text": 5},
        {"numbers": "[" * 200 + "]" * 200},
        {"numbers": ["[" + "1," * 60_000 + "1]"] * 2},
    ],
)
async def test_other_inputs_are_rejected_as_they_were_sent(sent: Any) -> None:
    registry = build_registry([])

    with pytest.raises(CallError) as lenient:
        await registry.execute("test.take", sent, LENIENT)
    with pytest.raises(CallError) as strict:
        await registry.execute("test.take", sent)

    assert lenient.value.code == "VALIDATION_ERROR"
    assert lenient.value.to_wire() == strict.value.to_wire()


async def test_valid_input_is_not_changed() -> None:
    seen: list[Any] = []
    registry = build_registry(seen)

    envelope = await registry.execute("test.take", {"maybe": "5", "text": "[1]"}, LENIENT)

    assert seen[0][-3:-1] == ("[1]", "5")
    assert envelope.meta.changes == ()


async def test_nested_calls_are_strict() -> None:
    with pytest.raises(CallError) as caught:
        await build_registry([]).execute("test.outer", {}, LENIENT)

    # The handler made an invalid call, which is no mistake of its caller.
    assert caught.value.code == "EXECUTION_ERROR"


async def test_equal_conversions_are_counted_at_one_location() -> None:
    compiled = Schema({"type": "array", "items": {"type": "integer"}}).compile()

    converted = convert_input(compiled, ["1", "2", 3, "4"])

    assert converted is not None
    assert converted.value == [1, 2, 3, 4]
    assert [(change.path, change.count) for change in converted.changes] == [("/0", 3)]


@pytest.mark.parametrize("era", ERAS)
async def test_input_of_mcp_callers_is_lenient_by_default(era: Any) -> None:
    registry = build_registry([])
    async with Client(to_mcp(registry), mode=era) as client:
        taken = await client.call_tool("test__take", {"number": "5"})
        by_gateway = await client.call_tool(
            "call", {"operation": "test.take", "input": '{"number": 5}'}
        )
        batch = await client.call_tool(
            "batch",
            {"calls": [{"operation": "test.take", "input": {"number": n}} for n in ("1", 1)]},
        )
        found = await client.call_tool("search", {"query": "take", "limit": "1"})
        counted = await client.call_tool("test__count", {"to": "3"})
    async with Client(to_mcp(registry, lenient_input=False), mode=era) as client:
        refused = await client.call_tool("test__take", {"number": "5"})

    assert len(found.structured_content["operations"]) == 1
    for result in (taken, by_gateway, counted, found):
        assert result.meta is not None
        noted = result.meta["alkdev.operations/changes"]
        assert [change["kind"] for change in noted["changes"]] == ["input"]
        assert noted["changesCount"] == 1
    first, second = batch.structured_content["results"]
    assert first["envelope"]["meta"]["changes"][0]["path"] == "/number"
    assert "changes" not in second["envelope"]["meta"]
    assert counted.structured_content["items"] == [0, 1, 2]
    assert refused.is_error


def build_policies(**options: Any) -> tuple[OperationRegistry, list[Any]]:
    """Return a registry with one operation that takes an integer, and the inputs that its handler receives."""
    registry, seen = OperationRegistry(), list[Any]()

    async def handler(input: Any, context: OperationContext) -> Any:
        seen.append(input)

    schema = Schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    spec = OperationSpec(
        name="take", namespace="test", type=OperationType.QUERY, input_schema=schema
    )
    registry.register(Operation(spec, handler, **options))
    return registry, seen


MODEL, PROGRAM = LENIENT, OperationContext()


@pytest.mark.requirement("R27")
@pytest.mark.parametrize(
    ("policy", "context", "converts"),
    [
        (None, MODEL, True),
        (None, PROGRAM, False),
        ("convert", MODEL, True),
        ("convert", PROGRAM, True),
        ("strict", MODEL, False),
        ("strict", PROGRAM, False),
    ],
)
@pytest.mark.parametrize("is_tool", [False, True])
async def test_the_input_policy_decides_for_every_caller(
    policy: Any, context: OperationContext, converts: bool, is_tool: bool
) -> None:
    registry, seen = build_policies(input=None if is_tool else policy)
    if is_tool:
        # The second operation runs inside another, with a plan of its own.
        configure_tools(registry, {"test.*": ToolConfig(input=policy, concurrency=9)})
    if converts:
        envelope = await registry.execute("test.take", {"n": "5"}, context)
        assert [change.kind for change in envelope.meta.changes] == ["input"]
        assert seen == [{"n": 5}]
    else:
        with pytest.raises(CallError) as caught:
            await registry.execute("test.take", {"n": "5"}, context)
        assert caught.value.code == "VALIDATION_ERROR"
        assert seen == []


@pytest.mark.requirement("R27", "R28")
@pytest.mark.parametrize("is_tool", [False, True])
async def test_with_the_input_policy_off_only_json_is_required(is_tool: bool) -> None:
    registry, seen = build_policies(input=None if is_tool else "off")
    if is_tool:
        configure_tools(registry, {"test.*": ToolConfig(input="off", concurrency=9)})
    for sent in ({"n": "five", "m": [1]}, None, 3):
        envelope = await registry.execute("test.take", sent)
        assert envelope.meta.changes == ()
    for invalid in ({"n": float("nan")}, {"n": "\ud800"}, {"n": object()}):
        with pytest.raises(CallError) as caught:
            await registry.execute("test.take", invalid)
        assert caught.value.code == "VALIDATION_ERROR"
    assert seen == [{"n": "five", "m": [1]}, {}, 3]


async def test_a_function_can_have_an_input_policy() -> None:
    registry = OperationRegistry()

    @registry.operation("test.double", type="query", input="convert")
    async def double(number: int) -> int:
        return 2 * number

    assert (await registry.execute("test.double", {"number": "5"})).data == 10


async def test_the_configurations_of_sources_have_an_input_policy() -> None:
    """R27: as `output`, for operations of APIs, MCP servers and workers."""
    for build in (
        lambda policy: HTTPServiceConfig(namespace="a", input=policy),
        lambda policy: MCPClientConfig(url="https://a.example", input=policy),
        lambda policy: RemoteConfig(input=policy),
        lambda policy: ToolConfig(input=policy),
    ):
        assert build("convert").input == "convert"
        with pytest.raises(ValueError, match="input must be one of strict, convert, off"):
            build("converts")
