"""What a list of tools takes: short descriptions, the share of output schemas, and the size beside FastMCP's list."""

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mcp import Client
from tests.limits import scaled
from tests.mcp_clients.matrix import MatrixError, prepare
from tests.openapi.serving import document

from operations import OperationRegistry
from operations.cli.export import mcp_tools
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.tools import ToolConfig, configure_tools

GITHUB = Path(__file__).parents[3] / "shared" / "openapi" / "octokit__api.github.com.json"

LONG = "Return the item. It has a price.\n\nPrices are in cents."
PARAMETER: dict[str, Any] = {
    "in": "path",
    "name": "id",
    "required": True,
    "description": "The id.  It\nis a number. Ids begin with 1.",
    "schema": {"type": "integer"},
}
ITEM = document("/items/{id}", description=LONG, parameters=[PARAMETER])


def service(doc: dict[str, Any] = ITEM, **options: Any) -> OperationRegistry:
    config = HTTPServiceConfig(namespace="api", base_url="http://127.0.0.1:9", **options)
    return OperationRegistry(from_openapi(doc, config))


async def listed(registry: OperationRegistry) -> dict[str, Any]:
    async with Client(to_mcp(registry, disclosure="tools")) as client:
        tools = (await client.list_tools()).tools
    return {tool.name: tool.model_dump(by_alias=True, exclude_none=True) for tool in tools}


def texts(tool: dict[str, Any]) -> tuple[str, str]:
    """The descriptions of a tool and of its argument."""
    return tool["description"], tool["inputSchema"]["properties"]["id"]["description"]


SHORT = ("Return the item.", "The id.")


async def test_short_descriptions_are_first_sentences() -> None:
    full, short = service(), service(descriptions="short")

    assert texts((await listed(full))["api__call"]) == (LONG, PARAMETER["description"])
    assert texts((await listed(short))["api__call"]) == SHORT
    assert next(iter(short.specs())).description == LONG


async def test_the_descriptions_of_any_operation_and_of_mcp_tools_can_be_short() -> None:
    registry = service()
    configure_tools(registry, {"api.*": ToolConfig(descriptions="short")})
    assert texts((await listed(registry))["api__call"]) == SHORT

    target = MCPClientConfig(server=to_mcp(service(), disclosure="tools"), descriptions="short")
    async with connect_mcp("far", target) as imported:
        (tool,) = (await listed(OperationRegistry(imported))).values()
    assert texts(tool) == SHORT


def test_an_unknown_setting_of_descriptions_is_an_error() -> None:
    options: Any = {"descriptions": "brief"}
    for create in (ToolConfig, service):
        with pytest.raises(ValueError, match="descriptions must be full or short"):
            create(**options)


def test_the_open_output_schemas_of_a_source_share_64_kb() -> None:
    doc = document("/items/0")
    text = {"type": "string", "description": "x" * 1_500}
    schema = {"type": "object", "properties": {"text": text}}
    content = {"application/json": {"schema": schema}}
    responses = {"200": {"description": "ok", "content": content}}
    doc["paths"] = {
        f"/items/{number}": {"get": {"operationId": f"get{number}", "responses": responses}}
        for number in range(60)
    }

    def with_schema(registry: OperationRegistry) -> int:
        tools = mcp_tools([*registry.specs()], registry)
        return sum("outputSchema" in tool for tool in tools)

    assert with_schema(service(doc)) == 0
    assert with_schema(service(doc, include=lambda outline: outline.name < "get3")) == 23
    assert with_schema(service(doc, exact_schemas=True)) == 60


def test_exported_tools_have_no_contract_for_importers() -> None:
    registry = service()
    (tool,) = mcp_tools([*registry.specs()], registry)
    assert tool["name"] == "api__call"
    assert "_meta" not in tool


FASTMCP = """
import asyncio
import json
import sys

from fastmcp import Client, FastMCP

try:
    import httpx
except ImportError:
    import httpx2 as httpx


async def main():
    with open(sys.argv[1]) as file:
        document = json.load(file)
    client = httpx.AsyncClient(base_url="http://127.0.0.1:1")
    async with Client(FastMCP.from_openapi(document, client=client)) as session:
        tools = await session.list_tools()
    wires = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in tools]
    for wire in wires:
        wire.pop("outputSchema", None)
    print(len(json.dumps(wires, separators=(",", ":"), ensure_ascii=False).encode()))


asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(not GITHUB.exists(), reason="the shared documents are not here")
def test_the_list_of_github_is_not_much_larger_than_the_inputs_alone_of_fastmcp() -> None:
    try:
        python = prepare("fastmcp-4") / "bin" / "python"
    except MatrixError as error:
        pytest.skip(f"FastMCP cannot be installed here: {error}")
    done = subprocess.run(
        [python, "-c", FASTMCP, GITHUB],
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=True,
    )
    doc = msgspec.json.decode(GITHUB.read_bytes())
    registry = OperationRegistry(from_openapi(doc, HTTPServiceConfig(namespace="github")))

    tools = mcp_tools([*registry.specs()], registry)

    assert len(msgspec.json.encode(tools)) < 1.1 * int(done.stdout)
