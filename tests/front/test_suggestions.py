"""Every entry point names the operation or property that was probably meant, and never one the caller may not see."""

from typing import Any

import pytest
from mcp import Client as MCPClient
from mcp import MCPError
from tests.server.asgi import Client

from operations import CallError, OperationContext, OperationRegistry
from operations.mcp import to_mcp
from operations.server import create_app


def build() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("task.create")
    async def create(title: str, due: str = "") -> str:
        return title + due

    @registry.operation("task.creates", scopes=["admin"])
    async def hidden() -> str:
        return "hidden"

    return registry


MEANT = 'Did you mean "task.create"?'


@pytest.mark.requirement("R07")
@pytest.mark.parametrize("given", ["task.creat", "task.creates", "tsk.create"])
async def test_an_unknown_id_is_reported_with_a_similar_visible_one(given: str) -> None:
    registry = build()
    client = Client(create_app(registry))
    call = {"operation": given, "input": {}}
    if given != "task.creates":
        with pytest.raises(CallError, match=r'Did you mean "task\.create"\?'):
            await registry.execute(given, {}, OperationContext())

    for path in ("/call", "/schema", "/subscribe"):
        body = {"operation": given} if path == "/schema" else call
        assert MEANT in (await client.post(path, json=body)).json["message"], path
    batch = (await client.post("/batch", json={"calls": [call]})).json
    assert MEANT in batch["results"][0]["error"]["message"]


@pytest.mark.requirement("R07")
async def test_an_unknown_tool_is_reported_with_a_similar_visible_one() -> None:
    async with MCPClient(to_mcp(build())) as client:
        [tool] = (await client.list_tools()).tools
        for given in (f"{tool.name}e", f"{tool.name}s"):
            with pytest.raises(MCPError, match=f'Did you mean "{tool.name}"'):
                await client.call_tool(given, {})


async def test_a_name_that_resembles_nothing_gets_no_suggestion() -> None:
    with pytest.raises(CallError) as caught:
        await build().execute("zebra", {}, OperationContext())

    assert caught.value.message == "There is no operation 'zebra'"


@pytest.mark.parametrize(
    ("input", "expected"),
    [
        ({"title": "a", "deu": "b"}, {"/deu": "due"}),
        ({"titel": "a"}, {"/titel": "title"}),
        # A property that is given already cannot be the one that was meant.
        ({"title": "a", "titel": "b", "deu": "c"}, {"/titel": None, "/deu": "due"}),
    ],
)
async def test_an_unknown_property_is_reported_with_a_similar_one(
    input: Any, expected: dict[str, str | None]
) -> None:
    with pytest.raises(CallError) as caught:
        await build().execute("task.create", input, OperationContext())

    faults = {fault["path"]: fault["message"] for fault in caught.value.details["errors"]}
    for path, meant in expected.items():
        end = "" if meant is None else f'. Did you mean "{meant}"?'
        assert faults[path] == f"is not a known property{end}"
