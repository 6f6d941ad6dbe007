"""Pub/Sub on Redis: the channels of a client, and the original protocol, which uses nothing else.

In the original protocol the channel of an event is `prefix + type + ":" + id`; we send an empty id and accept any. All
subscribers get all replies, so nothing is private, and every worker gets every request, so run only one.

Rule 1: subscriptions have a connection of their own, which is restored with all its channels.
Rule 2: a client subscribes only to channels it needs. Redis counts subscribers of a request, so a caller learns at once
        that there is no worker.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec

from operations._json import MAX_REQUEST_VALUES
from operations._text import enforce_lists
from operations.errors import NoReceiverError, NotSentError, TransportError
from operations.pubsub.base import PUT_TYPE, Consumer, Delivery, Receiver, deliver, enforce_size
from operations.pubsub.config import RedisConfig
from operations.pubsub.redis.connection import (
    CONNECTION_ERRORS,
    SILENCE,
    ReconnectingConnection,
    RedisClient,
)


class Channels(ReconnectingConnection):
    """The channels of a client: topics, and the presence of everything that listens here.

    Args:
        client: The client.
        kind: `P` to subscribe to patterns of channels, or empty.
        sender_of: Returns the sender of the messages on a channel, as in a `Delivery`.
    """

    def __init__(
        self, client: RedisClient, kind: str = "", sender_of: Callable[[str], str] = lambda _: ""
    ) -> None:
        super().__init__(client)
        self._kind = kind
        self._sender_of = sender_of
        self._receivers: dict[str, list[Receiver | None]] = {}
        self._confirmed: dict[str, asyncio.Event] = {}
        self._connection: Any = None
        self._moved = client.connector.moved

    async def subscribe(
        self, channels: Sequence[str], receiver: Receiver | None, undo: AsyncExitStack
    ) -> None:
        """Subscribe, and return when the server has confirmed it; without a receiver, only to be counted there.

        Raises:
            TransportError: If it does not.
        """
        undo.push_async_callback(self._unsubscribe, channels, receiver)
        added = [channel for channel in channels if channel not in self._receivers]
        for channel in channels:
            self._receivers.setdefault(channel, []).append(receiver)
            self._confirmed.setdefault(channel, asyncio.Event())
        await self._post("SUBSCRIBE", added)
        for channel in channels:
            try:
                async with asyncio.timeout(SILENCE):
                    await self._confirmed[channel].wait()
            except TimeoutError:
                raise TransportError(
                    f"Redis does not confirm a subscription to {channel!r}: may this user subscribe to it?"
                ) from None

    async def _unsubscribe(self, channels: Sequence[str], receiver: Receiver | None) -> None:
        for channel in channels:
            self._receivers[channel].remove(receiver)
        released = [channel for channel in {*channels} if not self._receivers[channel]]
        for channel in released:
            del self._receivers[channel], self._confirmed[channel]
        await self._post("UNSUBSCRIBE", released)

    async def _post(self, command: str, channels: Iterable[str]) -> None:
        """Send a command; do nothing while disconnected, because the next connection subscribes to all channels."""
        words, connection = tuple(channels), self._connection
        # The library would connect it again.
        if words and connection is not None and connection.is_connected:
            # If it breaks now, the reader notices and reconnects.
            with suppress(*CONNECTION_ERRORS):
                await connection.send_command(self._kind + command, *words)

    async def _prepare(self, connection: Any) -> None:
        self._moved = self._client.connector.moved
        self._connection = connection
        if self._receivers:
            await connection.send_command(f"{self._kind}SUBSCRIBE", *self._receivers)

    async def _work(self, connection: Any) -> None:
        # A server that another one has replaced keeps the connections of subscribers.
        await self._run_until_first(
            self._read(connection), self._keep_alive(connection.send_command), self._moved.wait()
        )
        raise TransportError("another server has taken over")

    async def _read(self, connection: Any) -> None:
        while True:
            message = await connection.read_response()
            self._heard_at = self._loop.time()
            # Without a subscription, the reply to PING is not a message.
            if isinstance(message, list):
                self._deliver(message)

    def _deliver(self, message: Any) -> None:
        kind, channel = message[0].decode().upper(), (message[1] or b"").decode()
        if kind == f"{self._kind}MESSAGE":
            for receiver in tuple(self._receivers.get(channel, ())):
                if receiver is not None:
                    deliver(receiver, Delivery(message[-1], sender=self._sender_of(channel)))
        elif kind == f"{self._kind}SUBSCRIBE" and channel in self._confirmed:
            self._confirmed[channel].set()

    def _broken(self) -> None:
        self._connection = None


_REPLIES = (
    *("call.responded", "call.completed", "call.error", "call.aborted"),
    *("call.credit", "call.probed", "call.alive"),
)
"""The types of all events but requests."""


class _Frame(msgspec.Struct):
    type: str


_frames = msgspec.json.Decoder(_Frame)


class RedisInteropTarget(RedisClient):
    """A client of the original protocol. Created by `connect_redis_interop`."""

    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config)
        self.broadcasts_replies = True
        self._prefix = config.prefix
        self._channels = Channels(self, "P")

    def mailbox(self) -> str:
        """Return an empty address: there are no private ones."""
        return ""

    def topic(self, name: str) -> str:
        """Return an empty address: the type of an event is its channel."""
        return ""

    def control(self, name: str) -> str:
        """Return an empty address: the type of an event is its channel."""
        return ""

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> AsyncExitStack:
        """Receive all events except requests."""
        enforce_lists(addresses=addresses)
        return await self._subscribe(_REPLIES, receiver)

    async def consume(self, queue: str, consumer: Consumer) -> AsyncExitStack:
        """Receive all requests."""
        return await self._subscribe((PUT_TYPE,), consumer)

    async def _subscribe(self, types: Sequence[str], receiver: Receiver) -> AsyncExitStack:
        async with AsyncExitStack() as undo:
            self.receivers.append(receiver)
            undo.callback(self.receivers.remove, receiver)
            patterns = [f"{_literally(self._prefix)}{kind}:*" for kind in types]
            await self._channels.subscribe(patterns, receiver, undo)
            return undo.pop_all()

    async def send(self, address: str, body: bytes) -> None:
        """Publish to all subscribers."""
        enforce_size(body, self.max_bytes)
        await self.link.ready()
        await self.link.post("PUBLISH", self._channel(body), body)

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float
    ) -> str:
        """Publish a request to all workers."""
        enforce_size(body, self.max_bytes)
        await self.ready(wait)
        if not await self.link.request("PUBLISH", self._channel(body), body):
            raise NoReceiverError("no worker subscribes to requests")
        return ""

    def _channel(self, body: bytes) -> str:
        try:
            return f"{self._prefix}{_frames.decode(body).type}:"
        except ValueError as error:
            raise NotSentError(f"not an event: {error}") from error

    async def is_present(self, address: str) -> bool:
        """Return True, because the presence of a listener is not known."""
        return True

    async def dead_letter(self, queue: str, body: bytes) -> None:
        """Keep a poisonous request in a stream, the last thousand of them."""
        name = f"{self._prefix}aside:{queue}"
        await self.link.post("XADD", name, "MAXLEN", "~", 1000, "*", "e", body)


def _literally(prefix: str) -> str:
    """Return a pattern that matches only `prefix`."""
    return "".join(
        f"\\{character}" if character in "*?[]\\^" else character for character in prefix
    )


@asynccontextmanager
async def connect_redis_interop(
    url: str = "redis://127.0.0.1:6379",
    *,
    prefix: str = "",
    trusted: bool = False,
    max_bytes: int = 16 * 1024 * 1024,
    max_values: int = MAX_REQUEST_VALUES,
    connect_timeout: float = 5,
) -> AsyncGenerator[RedisInteropTarget]:
    """Use the original protocol on Redis Pub/Sub during an `async with` block.

    Args:
        url: As redis-py takes it.
        prefix: Of every channel.
        trusted: Trust the `identity` inside events.
        max_bytes: The largest message.
        max_values: How many JSON values a message may hold, both ways. All clients should agree.
        connect_timeout: Seconds for a connection to be made, with its handshake.

    Raises:
        TransportError: If the address cannot be read, or Redis cannot be reached now.
    """
    config = RedisConfig(
        url,
        prefix=prefix,
        trusted=trusted,
        max_bytes=max_bytes,
        max_values=max_values,
        connect_timeout=connect_timeout,
    )
    target = RedisInteropTarget(config)
    try:
        await target.open()
        yield target
    finally:
        await target.aclose()
