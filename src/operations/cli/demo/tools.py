"""A small MCP server on standard input and output, for the demo. It does not use this library."""

from typing import TypedDict

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

_RATES = {"EUR": 1.0, "USD": 1.1, "JPY": 170.0}

server = MCPServer("money", version="1.0.0")


class Money(TypedDict):
    """An amount in a currency."""

    amount: float
    currency: str


@server.tool()
def convert(amount: float, to: str) -> Money:
    """Convert euros into another currency."""
    if to not in _RATES:
        raise ToolError(f"There is no rate for {to}: use {', '.join(_RATES)}")
    return Money(amount=round(amount * _RATES[to], 2), currency=to)


if __name__ == "__main__":
    server.run()
