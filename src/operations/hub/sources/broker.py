"""Operations that workers serve on a broker, and the broker itself."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from operations.authority import Grants
from operations.calls import from_calls
from operations.calls.config import RemoteConfig, WorkerConfig
from operations.calls.monitoring import monitor_group
from operations.config import ConfigFile
from operations.config.model import BrokerEntry
from operations.hub.source import Opened, per_source
from operations.pubsub.base import EventTarget
from operations.pubsub.config import NatsConfig, RedisConfig


async def open_workers(name: str, entry: BrokerEntry, file: ConfigFile) -> Opened:
    """Import what the workers of a group offer.

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
