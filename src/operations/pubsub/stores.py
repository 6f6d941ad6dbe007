"""A store on the connection of a broker."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from operations.base.errors import TransportError
from operations.pubsub.base import EventTarget
from operations.store.state import Store


@asynccontextmanager
async def open_broker_store(target: EventTarget) -> AsyncGenerator[Store]:
    """Yield a store on the broker of a target, which several hubs can share.

    Raises:
        TransportError: If the broker cannot be reached, or cannot store values.
    """
    if target.values is None:
        raise TransportError("this connection cannot store values for several processes")
    topic = target.topic("authority")
    store = Store(target.values, partial(target.send, topic, b'{"type":"changed"}'))
    store.is_connected = lambda: target.is_connected
    listening = await target.listen((topic,), store)
    try:
        yield store
    finally:
        await listening.aclose()


@asynccontextmanager
async def _on(connection: AbstractAsyncContextManager[EventTarget]) -> AsyncGenerator[Store]:
    async with connection as target, open_broker_store(target) as store:
        yield store


def open_redis(url: str, password: str | None = None) -> AbstractAsyncContextManager[Store]:
    """Open a store on a Redis server, with a connection of its own."""
    from operations.pubsub.redis import connect_redis  # noqa: PLC0415 - needs an extra

    return _on(connect_redis(url, password=password))


def open_nats(url: str, password: str | None = None) -> AbstractAsyncContextManager[Store]:
    """Open a store on a NATS server with JetStream, with a connection of its own."""
    from operations.pubsub.nats import connect_nats  # noqa: PLC0415 - needs an extra

    return _on(connect_nats(url, password=password))
