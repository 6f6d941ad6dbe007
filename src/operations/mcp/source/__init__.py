"""Operations of MCP servers: connections, listings and calls."""
