"""List all tools, or the four gateway tools."""

from typing import Any

import msgspec
import pytest
from mcp import Client
from tests.conftest import PROJECT
from tests.mcp_serving.support import ERAS, error_of, example, tool_names

from operations import (
    Identity,
    Operation,
    OperationRegistry,
    OperationSpec,
    OperationType,
    Schema,
)
from operations.front.front import Front
from operations.mcp import to_mcp
from operations.mcp.serving.caller import MCPCaller
from operations.openapi import HTTPServiceConfig, from_openapi

BOTH = pytest.mark.parametrize("era", ERAS)
FOUR = ["search", "schema", "call", "batch"]


async def structured(client: Client, name: str, arguments: Any) -> Any:
    return (await client.call_tool(name, arguments)).structured_content


@pytest.mark.parametrize(
    ("settings", "hidden"),
    [
        ({}, False),
        ({"max_tools": 5}, True),
        ({"max_tokens": 100}, True),
        ({"max_tools": 5, "disclosure": "tools"}, False),
        ({"disclosure": "gateway"}, True),
    ],
)
async def test_many_tools_are_replaced_by_four(settings: Any, hidden: bool) -> None:
    async with Client(to_mcp(example(), **settings)) as client:
        names = await tool_names(client)

    assert (names == FOUR) is hidden


async def test_listings_depend_on_the_caller() -> None:
    registry = OperationRegistry()
    for number in range(4):

        async def nothing() -> None:
            return None

        registry.operation(f"a.n{number}", scopes=["admin"] if number else [])(nothing)

    async with Client(to_mcp(registry, max_tools=2)) as client:
        assert await tool_names(client) == ["a__n0"]
    async with Client(to_mcp(registry, max_tools=2, identity=Identity("a", ["admin"]))) as client:
        assert await tool_names(client) == FOUR


@BOTH
async def test_an_operation_is_found_read_and_called(era: str) -> None:
    async with Client(to_mcp(example(), disclosure="gateway"), mode=era) as client:
        await client.list_tools()
        found = await structured(client, "search", {"query": "add numbers", "limit": 5.0})
        contract = await structured(client, "schema", {"operation": "math.add"})
        added = await client.call_tool("call", {"operation": "math.add", "input": {"a": 1}})
        watched = await structured(client, "call", {"operation": "task.watch", "input": {"n": 2}})
        direct = await client.call_tool("math__add", {"a": 1})

    assert found["operations"][0]["id"] == "math.add"
    assert contract["inputSchema"]["required"] == ["a"]
    assert added.content[0].text == "2"  # type: ignore[union-attr]
    assert watched == {"items": [0, 1], "complete": True}
    assert direct.content == added.content


@BOTH
@pytest.mark.requirement("R07", "R17")
async def test_a_batch_runs_as_the_caller_and_reveals_no_more_than_a_call(era: str) -> None:
    ids = ["math.add", "task.delete", "task.crash", "no.such"]
    calls = [{"operation": operation_id, "input": {"a": 1}} for operation_id in ids[:1]]
    calls += [{"operation": operation_id, "input": {"id": "1"}} for operation_id in ids[1:2]]
    calls += [{"operation": operation_id} for operation_id in ids[2:]]
    async with Client(to_mcp(example(), disclosure="gateway"), mode=era) as client:
        results = (await structured(client, "batch", {"calls": calls}))["results"]

    assert results[0]["envelope"]["data"] == 2
    assert [result["error"]["code"] for result in results[1:]] == [
        "OPERATION_NOT_FOUND",
        "EXECUTION_ERROR",
        "OPERATION_NOT_FOUND",
    ]
    assert "hunter2" not in str(results)


@pytest.mark.requirement("R07")
async def test_the_gateway_hides_operations_without_access() -> None:
    async with Client(to_mcp(example(), disclosure="gateway")) as client:
        found = await structured(client, "search", {"query": "delete"})
        read = await client.call_tool("schema", {"operation": "task.delete"})
        called = await structured(
            client, "call", {"operation": "task.delete", "input": {"id": "1"}}
        )
        nothing = await structured(client, "call", {"operation": "no.such"})

    assert found == {"operations": []}
    assert read.is_error
    assert called["code"] == "OPERATION_NOT_FOUND"
    assert nothing["code"] == "OPERATION_NOT_FOUND"


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("search", {"limit": 0}, "VALIDATION_ERROR"),
        ("schema", {}, "VALIDATION_ERROR"),
        ("call", {"operation": 1}, "VALIDATION_ERROR"),
        ("batch", {"calls": [1]}, "VALIDATION_ERROR"),
        ("batch", {"calls": [{"operation": "math.add"}] * 101}, "RESOURCE_EXHAUSTED"),
    ],
)
async def test_wrong_arguments_of_the_gateway_tools_are_rejected(
    name: str, arguments: Any, code: str
) -> None:
    async with Client(to_mcp(example(), disclosure="gateway")) as client:
        assert error_of(await client.call_tool(name, arguments))["code"] == code


async def test_without_the_gateway_its_tools_do_not_exist() -> None:
    async with Client(to_mcp(example(), disclosure="tools")) as client:
        with pytest.raises(Exception, match="Unknown tool"):
            await client.call_tool("search", {})


async def test_a_listing_of_operations_that_share_much_stays_small() -> None:
    registry = OperationRegistry()
    names = [f"T{number}" for number in range(200)]
    definitions = {
        name: {
            "type": "object",
            "properties": {
                other: {"$ref": f"#/$defs/{other}"} for other in names[index : index + 3]
            },
            "description": "x" * 500,
        }
        for index, name in enumerate(names)
    }
    document = {"$ref": "#/$defs/T0", "$defs": definitions}

    async def nothing(_value: Any, _context: Any) -> None:
        return None

    for number in range(50):
        spec = OperationSpec(
            namespace="big",
            name=f"n{number}",
            type=OperationType.QUERY,
            output_schema=Schema(document),
        )
        registry.register(Operation(spec, nothing))

    listing = to_mcp(registry, disclosure="tools").service
    page = await listing.list_tools(MCPCaller(None, "2026-07-28", Front(registry)))
    size = len(msgspec.json.encode(page))
    assert size < 50 * 30_000
    assert size < 0.3 * 50 * len(msgspec.json.encode(document))


STRIPE = PROJECT.parent / "shared" / "openapi" / "stripe__spec3-2021-06-07.json"


@pytest.mark.skipif(not STRIPE.exists(), reason="the corpus of OpenAPI documents is not here")
async def test_a_large_api_is_four_tools_or_less_than_twice_its_document() -> None:
    text = STRIPE.read_bytes()
    service = from_openapi(msgspec.json.decode(text), HTTPServiceConfig(namespace="stripe"))
    registry = OperationRegistry(service)
    caller = MCPCaller(None, "2026-07-28", Front(registry))

    few = await to_mcp(registry).service.list_tools(caller)
    all_tools = to_mcp(registry, disclosure="tools", page_size=1_000).service
    all_of_them = await all_tools.list_tools(caller)

    assert [tool["name"] for tool in few["tools"]] == FOUR
    assert len(all_of_them["tools"]) == len(registry)
    assert len(msgspec.json.encode(all_of_them)) < 2 * len(text)
