"""An operation whose schema cannot be built is missing from listings, which contain all others."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from mcp import Client as MCPClient
from mcp import MCPError
from tests.server.asgi import Client

from operations import Operation, OperationRegistry, OperationSpec, OperationType, Schema
from operations.agents import Toolbox
from operations.mcp import to_mcp
from operations.server import create_app


def failing() -> Any:
    raise RuntimeError("no schema today")


async def answer(_input: Any, _context: Any) -> int:
    return 1


Build = Callable[[], Any]
BAD = pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: {"default": object()}, "/default is an object, which is not JSON"),
        (lambda: {"description": "\ud800"}, "/description contains a lone surrogate"),
        (failing, "no schema today"),
    ],
)


def registry_with(build: Build, name: str = "bad") -> OperationRegistry:
    bad = OperationSpec(
        name=name, namespace="task", type=OperationType.QUERY, input_schema=Schema(build)
    )
    good = OperationSpec(name="good", namespace="task", type=OperationType.QUERY)
    return OperationRegistry([Operation(bad, answer), Operation(good, answer)])


@BAD
async def test_lists_over_http(build: Build, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    # Each operation is logged once in a process.
    client = Client(create_app(registry_with(build, "logged")))

    with caplog.at_level(logging.WARNING, "operations"):
        document = await client.get("/openapi.json")
        found = await client.get("/search")

    assert [*document.json["paths"]] == ["/task/good"]
    assert [each["id"] for each in found.json["operations"]] == ["task.good"]
    (message,) = [each for each in caplog.messages if "task.logged" in each]
    assert reason in message


@BAD
async def test_one_schema_over_http(build: Build, reason: str) -> None:
    client = Client(create_app(registry_with(build)))

    for path in ("/schema?operation=task.bad", "/task/bad?a=1"):
        shown = await client.get(path)
        assert shown.status == 500
        assert "task.bad" in shown.json["message"]


@pytest.mark.requirement("R17")
async def test_why_a_schema_cannot_be_built_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = registry_with(failing, "private")
    client = Client(create_app(registry))

    responses = [
        await client.get("/schema?operation=task.private"),
        await client.post("/call", {"operation": "task.private", "input": {}}),
        await client.get("/task/private"),
        await client.get("/search"),
    ]
    async with MCPClient(to_mcp(registry, disclosure="gateway")) as mcp:
        shown = await mcp.call_tool("schema", {"operation": "task.private"})
        called = await mcp.call_tool("call", {"operation": "task.private", "input": {}})

    assert [each.status for each in responses] == [500, 500, 500, 200]
    assert shown.is_error
    assert called.is_error
    for each in (*(response.body for response in responses), shown, called):
        assert "no schema today" not in str(each)
    assert "no schema today" in caplog.text


@BAD
@pytest.mark.parametrize("disclosure", ["auto", "tools"])
async def test_tools_over_mcp(
    build: Build, reason: str, disclosure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    registry = registry_with(build, f"tool_{disclosure}")
    async with MCPClient(to_mcp(registry, disclosure=disclosure)) as client:
        listed = await client.list_tools()
        with pytest.raises(MCPError, match="Unknown tool"):
            await client.call_tool(f"task__tool_{disclosure}", {})

    assert [tool.name for tool in listed.tools] == ["task__good"]
    assert reason in caplog.text


@BAD
@pytest.mark.parametrize("kind", ["prompt", "resource", "template"])
async def test_prompts_and_resources_over_mcp(build: Build, reason: str, kind: str) -> None:
    def spec(name: str, schema: Schema) -> OperationSpec:
        uri = f"task://{name}" if kind == "resource" else f"task://{name}/{{id}}"
        meta = {"prompt": True} if kind == "prompt" else {"resource": {"uri": uri}}
        return OperationSpec(
            name=name,
            namespace="task",
            type=OperationType.QUERY,
            input_schema=schema,
            meta={"mcp": meta},
        )

    specs = spec("good", Schema({"type": "object"})), spec("bad", Schema(build))
    registry = OperationRegistry([Operation(each, answer) for each in specs])
    async with MCPClient(to_mcp(registry)) as client:
        if kind == "prompt":
            assert [each.name for each in (await client.list_prompts()).prompts] == ["task__good"]
            with pytest.raises(MCPError, match="Unknown prompt"):
                await client.get_prompt("task__bad")
        elif kind == "resource":
            listed = await client.list_resources()
            assert [each.uri for each in listed.resources] == ["task://good"]
            with pytest.raises(MCPError, match="Resource not found"):
                await client.read_resource("task://bad")
        else:
            found = (await client.list_resource_templates()).resource_templates
            assert [each.uri_template for each in found] == ["task://good/{id}"]
            with pytest.raises(MCPError, match="Resource not found"):
                await client.read_resource("task://bad/1")


async def test_many_operations_that_cannot_be_listed_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    specs = [
        OperationSpec(
            name=f"many{number}",
            namespace="task",
            type=OperationType.QUERY,
            input_schema=Schema(failing),
        )
        for number in range(200)
    ]
    registry = OperationRegistry([Operation(each, answer) for each in specs])
    async with MCPClient(to_mcp(registry, disclosure="tools")) as client:
        for _ in range(2):
            assert (await client.list_tools()).tools == []

    assert len([each for each in caplog.messages if "task.many" in each]) == len(specs)


async def test_a_schema_that_can_be_built_later_is_used() -> None:
    def build() -> Any:
        return {"type": "object"} if is_ready else failing()

    is_ready = False
    async with MCPClient(to_mcp(registry_with(build), disclosure="tools")) as client:
        with pytest.raises(MCPError, match="Unknown tool"):
            await client.call_tool("task__bad", {})
        is_ready = True
        listed = await client.list_tools()
        assert [tool.name for tool in listed.tools] == ["task__bad", "task__good"]
        assert not (await client.call_tool("task__bad", {})).is_error


async def test_schemas_are_built_when_first_listed() -> None:
    built: list[str] = []

    def operation(name: str) -> Operation:
        def build() -> Any:
            built.append(name)
            return {"type": "object"}

        spec = OperationSpec(
            name=name, namespace="task", type=OperationType.QUERY, input_schema=Schema(build)
        )
        return Operation(spec, answer)

    registry = OperationRegistry([operation(f"n{number}") for number in range(7)])
    create_app(registry, mcp=True)
    server = to_mcp(registry, disclosure="tools", page_size=5)
    async with MCPClient(to_mcp(registry, max_tools=6)) as client:
        await client.list_tools()
    assert built == []

    async with MCPClient(server) as client:
        page = await client.list_tools()

    assert built == [f"n{number}" for number in range(5)]
    assert len(page.tools) == 5


@BAD
def test_tools_of_an_agent(build: Build, reason: str) -> None:
    tools = Toolbox(registry_with(build), allow=["task.*"]).openai()

    names = [tool["function"]["name"] for tool in tools]
    assert "task__good" in names
    assert "task__bad" not in names
