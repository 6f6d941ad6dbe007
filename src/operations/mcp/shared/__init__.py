"""What both directions of MCP share."""
