"""An MCP server with one tool, which reports a structured error; for _peers.py."""

import asyncio
from typing import Any

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool

TOOL = Tool(name="fail", description="Fail.", input_schema={"type": "object"})
RESULT = CallToolResult(
    content=[TextContent(type="text", text="it failed")],
    structured_content={"code": "SOLD_OUT", "left": 0},
    is_error=True,
)


async def list_tools(_: Any, __: Any) -> ListToolsResult:
    return ListToolsResult(tools=[TOOL])


async def call_tool(_: Any, __: Any) -> CallToolResult:
    return RESULT


async def main() -> None:
    server: Server[Any] = Server("failing", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
