"""The sources of a config, and how they are opened. Brokers are opened here.

Kinds whose packages take long to import, or may not be installed, are imported when a config has one of them.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from operations._mcp_config import read_servers, unknown_keys
from operations._text import safe_namespace
from operations.authority import Grants
from operations.calls import from_calls
from operations.calls.config import RemoteConfig, WorkerConfig
from operations.calls.monitoring import monitor_group
from operations.config import ConfigError, ConfigFile
from operations.config.model import BrokerEntry
from operations.hub.source import ListedServer, Opened, Source, open_modules, per_source
from operations.pubsub.base import EventTarget
from operations.pubsub.config import NatsConfig, RedisConfig
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
            return await open_workers(source.name, source.entry, file)


async def open_workers(name: str, entry: BrokerEntry, file: ConfigFile) -> Opened:
    """Import the operations of the workers of a group.

    Raises:
        ConfigError: If a secret cannot be read.
        TransportError: If the broker cannot be reached.
        CallError: `UNAVAILABLE`, if no worker responds.
    """
    stack = AsyncExitStack()
    try:
        target = await stack.enter_async_context(connect_broker(entry, file))
        options: dict[str, Any] = {"concurrent_calls": per_source(file)}
        options |= file.options(RemoteConfig, entry)
        grants = file.config.access.grants
        group = worker_config(entry, file).group
        if entry.delegate and grants is not None:
            options["delegate"] = Grants(file.secret(grants.key)).delegate(group)
        service = from_calls(target, **options)
        monitor = await stack.enter_async_context(monitor_group(target, group))
        await stack.enter_async_context(service)
    except BaseException:
        await stack.aclose()
        raise
    return Opened(
        operations=service,
        problem=lambda: service.problem,
        close=stack.aclose,
        calls=lambda: service.calls.pending_count,
        origin=entry.url,
        title=f"group {group}",
        monitor=monitor,
    )


@asynccontextmanager
async def connect_broker(entry: BrokerEntry, file: ConfigFile) -> AsyncGenerator[EventTarget]:
    """The broker of an entry, for the length of an `async with` block.

    Raises:
        ConfigError: If its password cannot be read.
        TransportError: If it cannot be reached.
    """
    connection: AbstractAsyncContextManager[EventTarget]
    if entry.is_nats:
        from operations.pubsub.nats import connect_nats  # noqa: PLC0415 - needs an extra

        connection = connect_nats(entry.url, **file.options(NatsConfig, entry))
    else:
        from operations.pubsub.redis import connect_redis  # noqa: PLC0415 - needs an extra

        connection = connect_redis(entry.url, **file.options(RedisConfig, entry))
    async with connection as target:
        yield target


def worker_config(entry: BrokerEntry, file: ConfigFile) -> WorkerConfig:
    """Return the options of a worker on a broker."""
    return WorkerConfig(**file.options(WorkerConfig, entry))
