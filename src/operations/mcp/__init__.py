"""Import the tools of MCP servers as operations, and serve a registry as an MCP server.

`connect_mcp` connects to one server and `MCPClientLoader` to several; `map_content_blocks` converts content blocks of
the SDK to ours; `to_mcp` serves a registry.
"""

from importlib.util import find_spec

from operations.base.errors import MissingExtraError

# The OpenAI Agents SDK installs the MCP SDK, but not aiohttp.
if find_spec("mcp") is None or find_spec("aiohttp") is None:
    raise MissingExtraError("operations.mcp", extra="mcp")

from operations.front.config import MCPServerSettings
from operations.mcp.config import (
    MCPClientConfig,
    MCPClientCredentials,
    OAuthLogin,
    read_servers,
    unknown_keys,
)
from operations.mcp.serving.app import MCPApp
from operations.mcp.serving.server import RegistryServer, to_mcp
from operations.mcp.shared.failures import StartError
from operations.mcp.shared.interaction import list_roots, release_stream
from operations.mcp.source.client import MCPClient, connect_mcp
from operations.mcp.source.listing import ServerInfo
from operations.mcp.source.loader import MCPClientLoader, sign_in
from operations.mcp.source.tools import map_content_blocks

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
    "list_roots",
    "map_content_blocks",
    "read_servers",
    "release_stream",
    "sign_in",
    "to_mcp",
    "unknown_keys",
]
