"""A server that tests start as a child process."""

import asyncio

from tests.mcp_serving.support import example

from operations import Identity
from operations.mcp import to_mcp

if __name__ == "__main__":
    asyncio.run(to_mcp(example(), identity=Identity("ann", ["task:write"])).run_stdio())
