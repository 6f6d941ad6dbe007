"""The sources of a config, and one file per kind of source that opens them.

Kinds whose packages take long to import, or may not be installed, are imported when a config has one of them.
"""

from collections.abc import Iterator

from operations._mcp_config import read_servers, unknown_keys
from operations._text import safe_namespace
from operations.config import ConfigError, ConfigFile
from operations.hub.source import ListedServer, Opened, Source, open_modules
from operations.scanner import Skipped


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
    match source.kind:
        case "local":
            return open_modules(source.entry, file)
        case "openapi":
            from operations.hub.sources.openapi import open_service  # noqa: PLC0415

            return await open_service(source.name, source.entry, file)
        case "mcp":
            from operations.hub.sources.mcp import open_server  # noqa: PLC0415 - needs an extra

            return await open_server(source.name, source.entry, file)
        case "broker":
            from operations.hub.sources.broker import open_workers  # noqa: PLC0415

            return await open_workers(source.name, source.entry, file)
