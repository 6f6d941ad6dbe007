"""Tools, resources and prompts of MCP servers."""

from typing import Any

from operations.access import AccessControl
from operations.config import ConfigFile
from operations.config.model import MCPEntry
from operations.hub.sources import MCPFile, Opened, per_source
from operations.mcp import (
    MCPClient,
    MCPClientConfig,
    MCPClientLoader,
    read_servers,
    unknown_keys,
)
from operations.mcp.names import safe_namespace
from operations.scanner import Skipped

_PATIENCE_SECONDS = 60
"""For a server that is wanted: longer than it may take to connect."""


async def open_server(name: str, entry: MCPEntry | MCPFile, file: ConfigFile) -> Opened:
    """Connect to one server, or to all that an `mcp.json` lists.

    Raises:
        ConfigError: If a secret, or an `mcp.json`, is not where the config says.
        CallError: `UNAVAILABLE`, if the server cannot be reached.
    """
    if isinstance(entry, MCPFile):
        return await _open_file(entry, file)
    client = MCPClient(name, client_config(name, entry, file))
    await client.open()
    return Opened(
        operations=client,
        origin=client.config.target,
        skipped=_skipped(client),
        title=client.server_info.title or client.server_info.name if client.server_info else "",
    )


async def _open_file(listed: MCPFile, file: ConfigFile) -> Opened:
    path, only = listed.path, listed.only
    listing = file.existing(path, "mcp_json")
    folder = listing.parent
    entries = {
        # Relative paths start at the file, as everywhere in the configuration.
        name: {**entry, "cwd": str(folder / entry.get("cwd", ""))} if "command" in entry else entry
        for name, entry in read_servers(listing).items()
        if only in (None, entry.get("namespace"), safe_namespace(name))
    }
    # Where nothing else is asked for, one that is slow to start keeps nobody waiting.
    loader = MCPClientLoader() if only is None else MCPClientLoader(wait=_PATIENCE_SECONDS)
    await loader.load(entries)
    reasons = {
        **{name: str(error) for name, error in loader.failures.items()},
        **dict.fromkeys(loader.pending, "it is still starting"),
    }
    failed = [
        Skipped(entries[name].get("namespace") or safe_namespace(name), reason)
        for name, reason in reasons.items()
    ]
    skipped = [each for client in loader.clients for each in _skipped(client)]
    doubts = [
        Skipped(f"{name}.{key}", words)
        for name, entry in entries.items()
        for key, words in unknown_keys(entry).items()
    ]
    return Opened(operations=loader, origin=path, failed=failed, skipped=skipped, doubts=doubts)


def _skipped(client: MCPClient) -> list[Skipped]:
    return [Skipped(what, reason) for what, reason in client.skipped.items()]


def client_config(name: str, entry: MCPEntry, file: ConfigFile) -> MCPClientConfig:
    """Return the config of the client, with its secrets.

    Raises:
        ConfigError: If a secret is not where the config says.
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
    return MCPClientConfig(**file.options(MCPClientConfig, entry), **short)
