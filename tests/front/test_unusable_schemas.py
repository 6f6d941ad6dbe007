"""An operation whose schema cannot be built is missing from listings, which contain all others."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from mcp import Client as MCPClient
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
async def test_tools_over_mcp(build: Build, reason: str) -> None:
    async with MCPClient(to_mcp(registry_with(build))) as client:
        listed = await client.list_tools()

    assert [tool.name for tool in listed.tools] == ["task__good"]


@BAD
def test_tools_of_an_agent(build: Build, reason: str) -> None:
    tools = Toolbox(registry_with(build), allow=["task.*"]).openai()

    names = [tool["function"]["name"] for tool in tools]
    assert "task__good" in names
    assert "task__bad" not in names
