"""Tools, resources and prompts of MCP servers."""

from dataclasses import replace
from typing import Any

from operations.access import AccessControl
from operations.config import ConfigFile
from operations.config.model import MCPEntry
from operations.hub.source import ListedServer, Opened, load_tokens, per_source
from operations.mcp import MCPClient, MCPClientConfig, read_servers
from operations.mcp.oauth import token_path
from operations.scanner import Skipped
from operations.types import JSONObject


async def open_server(name: str, entry: MCPEntry | ListedServer, file: ConfigFile) -> Opened:
    """Connect to a server.

    Raises:
        ConfigError: If a secret or an `mcp.json` cannot be read.
        CallError: `UNAVAILABLE`, if the server cannot be reached.
        ValueError: If an `mcp.json` is wrong.
    """
    if isinstance(entry, ListedServer):
        title, listed = _listed(entry, file)
        config = MCPClientConfig.from_entry(listed)
        origin = entry.path
    else:
        title, config = name, client_config(name, entry, file)
        load_tokens(file, [config.auth])
        origin = config.target
    client = MCPClient(title, config)
    await client.open()
    info = client.server_info
    return Opened(
        operations=client,
        close=client.aclose,
        calls=lambda: client.calls,
        origin=origin,
        skipped=_skipped(client),
        title=info.title or info.name if info is not None else "",
        problem=lambda: client.problem,
        next_attempt=lambda: client.next_attempt,
    )


def _listed(server: ListedServer, file: ConfigFile) -> tuple[str, JSONObject]:
    """Return the name and the entry of a server in an `mcp.json`; relative paths start at that file."""
    listing = file.existing(server.path, "mcp_json")
    if server.entry is None:
        read_servers(listing)
        raise ValueError(f"{server.path} cannot be read")
    entry = dict(server.entry)
    name = entry.pop("name")
    if "command" in entry:
        entry["cwd"] = str(listing.parent / entry.get("cwd", ""))
    return name, entry


def _skipped(client: MCPClient) -> list[Skipped]:
    return [Skipped(what, reason) for what, reason in client.skipped.items()]


def client_config(name: str, entry: MCPEntry, file: ConfigFile) -> MCPClientConfig:
    """Return the config of the client, with its secrets.

    Raises:
        ConfigError: If a secret cannot be read.
    """
    short: dict[str, Any] = {}
    if "cwd" not in entry.options:
        short["cwd"] = file.folder
    if entry.token is not None:
        short["auth"] = file.secret(entry.token)
    if "concurrency" not in entry.options:
        short["concurrency"] = per_source(file)
    if entry.scopes:
        short["access"] = AccessControl(entry.scopes)
    config = MCPClientConfig(**file.options(MCPClientConfig, entry), **short)
    if config.login is None:
        return config
    # Two tables may sign in two people to one server.
    store = token_path(config, config.login, name)
    return replace(config, login=replace(config.login, store=store))
