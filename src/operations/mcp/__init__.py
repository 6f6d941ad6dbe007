"""MCP servers as operations.

`connect_mcp` for one server, `MCPClientLoader` for several, `map_content_blocks` between the SDK's blocks and ours.
"""

from operations.errors import MissingExtraError

try:
    from operations.mcp.client import MCPClient, ServerInfo, connect_mcp
    from operations.mcp.config import ClientCredentials, MCPClientConfig, read_servers
    from operations.mcp.content import map_content_blocks
    from operations.mcp.loader import MCPClientLoader
except ModuleNotFoundError as error:
    raise MissingExtraError("operations.mcp", extra="mcp") from error

__all__ = [
    "ClientCredentials",
    "MCPClient",
    "MCPClientConfig",
    "MCPClientLoader",
    "ServerInfo",
    "connect_mcp",
    "map_content_blocks",
    "read_servers",
]
