"""MCP, in both directions."""

from operations.errors import MissingExtraError

try:
    import mcp as _sdk  # noqa: F401 # pyright: ignore[reportUnusedImport]
except ModuleNotFoundError as error:
    raise MissingExtraError("operations.mcp", extra="mcp") from error

from operations.mcp.serving.app import MCPApp
from operations.mcp.serving.client import list_roots, release_stream
from operations.mcp.serving.server import RegistryServer, to_mcp
from operations.mcp.serving.settings import MCPServerSettings

__all__ = [
    "MCPApp",
    "MCPServerSettings",
    "RegistryServer",
    "list_roots",
    "release_stream",
    "to_mcp",
]
