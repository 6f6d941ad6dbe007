"""A store beside the connection of a broker."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
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
    listening = await target.listen((topic,), store)
    try:
        yield store
    finally:
        await listening.aclose()
