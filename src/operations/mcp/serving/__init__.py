"""Serve a registry over MCP."""
