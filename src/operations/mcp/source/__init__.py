"""Operations of MCP servers: connections, listings and calls."""

from operations.base.extras import enforce_installed

# The OpenAI Agents SDK installs the MCP SDK, but not aiohttp.
enforce_installed("operations.mcp", "mcp", "aiohttp", extra="mcp")
