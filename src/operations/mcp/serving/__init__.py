"""A registry served over MCP."""
