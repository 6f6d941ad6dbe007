"""`operations demo`: everything at work, with nothing to configure.

    shop.*    a REST API (api.py), imported from its OpenAPI document
    money.*   an MCP server (tools.py), started as a child
    cafe.*    Python functions (local.py), which call the other two

The demo is the product: it opens a config like any other, and serves it like `operations serve`.
"""

from operations.cli.demo.command import demo

__all__ = ["demo"]
