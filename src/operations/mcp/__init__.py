"""Import the tools of MCP servers as operations, and serve a registry as an MCP server.

`connect_mcp` connects to one server and `MCPClientLoader` to several; `map_content_blocks` converts content blocks of
the SDK to ours; `to_mcp` serves a registry. Only the configuration can be imported without the extra `mcp`.
"""

from typing import TYPE_CHECKING

from operations.base.lazy import lazily
from operations.front.config import MCPServerSettings
from operations.mcp.config import (
    MCPClientConfig,
    MCPClientCredentials,
    OAuthLogin,
    read_servers,
    unknown_keys,
)

if TYPE_CHECKING:
    from operations.mcp.serving.app import MCPApp
    from operations.mcp.serving.server import RegistryServer, to_mcp
    from operations.mcp.serving.tasks import hand_over
    from operations.mcp.shared.failures import StartError
    from operations.mcp.shared.interaction import list_roots, release_stream
    from operations.mcp.source.client import MCPClient, connect_mcp
    from operations.mcp.source.listing import ServerInfo
    from operations.mcp.source.loader import MCPClientLoader, sign_in
    from operations.mcp.source.tools import map_content_blocks

__getattr__ = lazily(
    __name__,
    {
        "operations.mcp.serving.app": "MCPApp",
        "operations.mcp.serving.server": "RegistryServer to_mcp",
        "operations.mcp.serving.tasks": "hand_over",
        "operations.mcp.shared.failures": "StartError",
        "operations.mcp.shared.interaction": "list_roots release_stream",
        "operations.mcp.source.client": "MCPClient connect_mcp",
        "operations.mcp.source.listing": "ServerInfo",
        "operations.mcp.source.loader": "MCPClientLoader sign_in",
        "operations.mcp.source.tools": "map_content_blocks",
    },
)

__all__ = [
    "MCPApp",
    "MCPClient",
    "MCPClientConfig",
    "MCPClientCredentials",
    "MCPClientLoader",
    "MCPServerSettings",
    "OAuthLogin",
    "RegistryServer",
    "ServerInfo",
    "StartError",
    "connect_mcp",
    "hand_over",
    "list_roots",
    "map_content_blocks",
    "read_servers",
    "release_stream",
    "sign_in",
    "to_mcp",
    "unknown_keys",
]
