"""Where operations come from: the entries of a config, and one file per kind of source that opens them.

Kinds whose packages take long to import, or may not be installed, are imported when a config has one of them.
"""

from collections.abc import Awaitable, Callable, Iterator
from importlib import import_module
from typing import Any, cast

from operations._mcp_config import read_servers, unknown_keys
from operations._text import safe_namespace
from operations.config import ConfigError, ConfigFile
from operations.hub.source import Kind, ListedServer, Opened, Source
from operations.hub.sources.local import open_modules
from operations.scanner import Skipped

_OPENERS: dict[Kind, str] = {
    "openapi": "operations.hub.sources.openapi:open_service",
    "mcp": "operations.hub.sources.mcp:open_server",
    "broker": "operations.hub.sources.broker:open_workers",
}


def sources_of(file: ConfigFile) -> Iterator[Source]:
    """Yield every source that a config names, in the order in which they are opened."""
    config = file.config
    for module in config.modules:
        yield Source(kind="local", name=module, entry=module)
    for name, api in config.openapi.items():
        yield Source(kind="openapi", name=name, entry=api, is_enabled=api.enabled)
    for name, server in config.mcp.items():
        yield Source(kind="mcp", name=name, entry=server, is_enabled=server.enabled)
    for path in config.mcp_json:
        yield from _listed(path, file)
    for name, broker in config.brokers.items():
        if broker.workers:
            yield Source(kind="broker", name=name, entry=broker, is_enabled=broker.enabled)


def _listed(path: str, file: ConfigFile) -> Iterator[Source]:
    try:
        servers = read_servers(file.existing(path, "mcp_json"))
    except (ConfigError, OSError, ValueError):
        # Opening it reports the reason.
        yield Source(kind="mcp", name=path, entry=ListedServer(path))
        return
    for name, entry in servers.items():
        namespace = str(entry.get("namespace") or safe_namespace(name))
        yield Source(
            kind="mcp",
            name=namespace,
            entry=ListedServer(path, {"name": name, **entry}),
            warnings=tuple(Skipped(key, words) for key, words in unknown_keys(entry).items()),
        )


async def open_source(source: Source, file: ConfigFile) -> Opened:
    """Open a source.

    Raises:
        OperationsError, OSError, ValueError: If it cannot be opened.
    """
    if source.kind == "local":
        return open_modules(source.entry, file)
    module, _, function = _OPENERS[source.kind].partition(":")
    opener = cast(
        "Callable[[str, Any, ConfigFile], Awaitable[Opened]]",
        getattr(import_module(module), function),
    )
    return await opener(source.name, source.entry, file)
