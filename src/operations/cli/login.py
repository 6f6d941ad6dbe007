"""`operations login`: a person signs in to an MCP server through a browser."""

import webbrowser

from operations._text import suggestion
from operations.cli.options import DEFAULTS, Common, command
from operations.errors import OperationsError
from operations.hub.sources.mcp import client_config
from operations.mcp import sign_in


@command
async def login(server: str, /, *, common: Common = DEFAULTS) -> None:
    """Sign in to an MCP server whose `auth` is "oauth". The tokens are kept for every later command.

    Args:
        server: Its name in [mcp].
        common: What every command takes.
    """
    screen = common.screen()
    file = common.load()
    servers = file.config.mcp
    if server not in servers:
        raise OperationsError(f"There is no [mcp.{server}].{suggestion(server, servers)}")

    def show(address: str) -> None:
        screen.note(f"Open this address to sign in:\n{address}")
        webbrowser.open(address)

    client = await sign_in(server, client_config(server, servers[server], file), show)
    screen.note(f"Signed in to {server}, which offers {len(client)} operations")
