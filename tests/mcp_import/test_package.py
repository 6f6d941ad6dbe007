"""The names of the package."""

import operations.mcp


def test_the_contracts_names_are_exported() -> None:
    promised = {"connect_mcp", "MCPClientLoader", "MCPClientConfig", "map_content_blocks"}

    assert promised <= set(operations.mcp.__all__)
    assert all(hasattr(operations.mcp, name) for name in operations.mcp.__all__)
