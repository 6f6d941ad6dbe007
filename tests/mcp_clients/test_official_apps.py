"""Two copies of an app server of the official SDK behind one hub, and a host of the official SDK."""

import asyncio
import json
from asyncio.subprocess import PIPE
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.limits import time_limit
from tests.mcp_serving.support import serving
from tests.node_packages import install_node_packages

from operations import OperationRegistry
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp

FOLDER = Path(__file__).parent / "apps"


@pytest.mark.slow
@pytest.mark.requirement("R77")
async def test_a_host_tells_the_views_of_two_copies_of_a_server_apart() -> None:
    await asyncio.to_thread(
        install_node_packages, FOLDER, "@modelcontextprotocol/ext-apps/package.json"
    )
    registry = OperationRegistry()
    async with AsyncExitStack() as stack:
        for place in ("oslo", "rome"):
            config = MCPClientConfig(command="node", args=[str(FOLDER / "server.mjs"), place])
            registry.register_all(await stack.enter_async_context(connect_mcp(place, config)))
        app = to_mcp(registry, disclosure="tools").asgi_app()
        address = await stack.enter_async_context(serving(app))
        host = await asyncio.create_subprocess_exec(
            "node", str(FOLDER / "host.mjs"), f"{address}/mcp", stdout=PIPE
        )
        with time_limit(60):
            output, _ = await host.communicate()

    found = json.loads(output)
    assert set(found) == {"oslo__show-time", "rome__show-time"}
    for name, each in found.items():
        place = name.partition("__")[0]
        uri = f"ui://{place}/clock/view.html"
        assert {each["named"], each["shown"], each["linked"], each["read"]} == {uri}
        assert each["title"] == f"<title>{place}</title>"
        assert each["echo"] == f"{place} ui://clock/view.html"
