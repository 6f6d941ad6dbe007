"""Operations that workers serve on a broker, and the broker itself."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib import import_module
from typing import Any, cast
from urllib.parse import quote, urlsplit, urlunsplit

from operations.calls import from_calls
from operations.cli.sources import Opened
from operations.config import ConfigFile
from operations.config.model import BrokerEntry
from operations.pubsub.base import EventTarget
from operations.specs import Operation

_CONNECTORS = {
    "redis": "operations.pubsub.redis:connect_redis",
    "rediss": "operations.pubsub.redis:connect_redis",
    "nats": "operations.pubsub.nats:connect_nats",
    "tls": "operations.pubsub.nats:connect_nats",
}
"""By the scheme of the address. Imported when needed: each has its own extra."""


async def open_workers(name: str, entry: BrokerEntry, file: ConfigFile) -> Opened:
    """Import what the workers of a group offer.

    Raises:
        ConfigError: If a secret is not where the config says.
        TransportError: If the broker cannot be reached.
        CallError: `UNAVAILABLE`, if no worker is there.
    """
    stack = AsyncExitStack()
    try:
        target = await stack.enter_async_context(connect_broker(entry, file))
        credential = None if entry.credential is None else file.secret(entry.credential)
        service = from_calls(
            target,
            group=entry.group,
            namespace=entry.namespace,
            output=entry.output,
            credential=credential,
        )
        await stack.enter_async_context(service)
    except BaseException:
        await stack.aclose()
        raise
    return Opened(
        operations=_Workers(service.operations, stack),
        origin=entry.url,
        title=f"group {entry.group}",
    )


class _Workers:
    """What the workers offer; closing it leaves the broker."""

    def __init__(self, operations: list[Operation], stack: AsyncExitStack) -> None:
        self._operations = operations
        self._stack = stack

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._operations)

    async def aclose(self) -> None:
        """End what is under way there."""
        await self._stack.aclose()


@asynccontextmanager
async def connect_broker(entry: BrokerEntry, file: ConfigFile) -> AsyncGenerator[EventTarget]:
    """The broker of an entry, for the length of an `async with` block.

    Raises:
        ConfigError: If its password is not where the config says.
        TransportError: If it cannot be reached.
    """
    scheme = urlsplit(entry.url).scheme
    module, _, function = _CONNECTORS[scheme].partition(":")
    connect = cast(
        "Callable[..., AbstractAsyncContextManager[EventTarget]]",
        getattr(import_module(module), function),
    )
    named = {"prefix": entry.prefix, "client": entry.client}
    options: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    if entry.durable:
        options["durable"] = True
    if entry.secret is not None:
        options["secret"] = file.secret(entry.secret)
    async with connect(
        _address(entry, file), trusted=entry.trusted, private=entry.private, **options
    ) as target:
        yield target


def _address(entry: BrokerEntry, file: ConfigFile) -> str:
    if entry.password is None:
        return entry.url
    parts = urlsplit(entry.url)
    host = parts.netloc.rpartition("@")[2]
    login = f"{parts.username or ''}:{quote(file.secret(entry.password), safe='')}"
    return urlunsplit(parts._replace(netloc=f"{login}@{host}"))
