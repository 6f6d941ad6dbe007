"""Pub/Sub on Redis: the channels of a client, and the original protocol, which uses nothing else.

In the original protocol the channel of an event is `prefix + type + ":" + id`; we send an empty id and accept any. All
subscribers get all replies, so nothing is private, and every worker gets every request, so run only one.

Rule 1: subscriptions have a connection of their own, which is restored with all its channels.
Rule 2: a client subscribes only to channels it needs. Redis counts subscribers of a request, so a caller learns at once
        that there is no worker.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from operations._json import MAX_REQUEST_VALUES
from operations._text import enforce_lists
from operations.errors import NoReceiverError, NotSentError, TooLargeError, TransportError
from operations.pubsub.base import (
    PUT_TYPE,
    Consumer,
    Delivery,
    EventTarget,
    Receiver,
    Registration,
    deliver,
)
from operations.pubsub.redis.connection import (
    CONNECTION_ERRORS,
    KEEPALIVE,
    SILENCE,
    Connector,
    PipelinedConnection,
    ReconnectingConnection,
)


class PubSubConnection(ReconnectingConnection):
    """A reconnecting connection that only subscribes.

    Args:
        connector: Opens the connections.
        lost: Called when the connection breaks.
        restored: Called when it is restored.
        link: The connection of the same client for commands.
        wanted: Returns the command that subscribes a new connection to all channels; empty if there are none.
        deliver: Called with every message.
    """

    def __init__(
        self,
        connector: Connector,
        lost: Callable[[str], None],
        restored: Callable[[], None],
        link: PipelinedConnection,
        *,
        wanted: Callable[[], Iterable[str]],
        deliver: Callable[[Any], None],
    ) -> None:
        super().__init__(connector, lost, restored, link)
        self._wanted = wanted
        self._deliver = deliver
        self._connection: Any = None
        self._leaving: asyncio.Future[None] | None = None
        self._heard_at = 0.0

    def _follow(self) -> None:
        """Leave a server that another one has replaced: it keeps the connections of subscribers."""
        connection = self._connection
        if connection is not None:
            # Wakes the reader with an error.
            self._leaving = asyncio.ensure_future(connection.disconnect(nowait=True))

    async def post(self, *command: str) -> None:
        """Send a command; do nothing while disconnected, because the next connection subscribes to all channels."""
        if self._connection is not None:
            # If it breaks now, the reader notices and reconnects.
            with suppress(*CONNECTION_ERRORS):
                await self._connection.send_command(*command)

    async def _prepare(self, connection: Any) -> None:
        self._connector.followers.add(self._follow)
        command = tuple(self._wanted())
        self._connection = connection
        if command:
            await connection.send_command(*command)
        self._heard_at = self._loop.time()

    async def _work(self, connection: Any) -> None:
        keeping_alive = self._loop.create_task(self._keep_alive(connection))
        try:
            while True:
                message = await connection.read_response()
                self._heard_at = self._loop.time()
                # Without a subscription, the reply to PING is not a message.
                if isinstance(message, list):
                    self._deliver(message)
        finally:
            keeping_alive.cancel()

    def _broken(self) -> None:
        self._connection = None
        self._connector.followers.discard(self._follow)

    async def _keep_alive(self, connection: Any) -> None:
        while True:
            await asyncio.sleep(KEEPALIVE)
            if self._loop.time() - self._heard_at > SILENCE:
                # Wakes the reader with an error.
                await connection.disconnect(nowait=True)
                return
            await connection.send_command("PING")


class Channels(PubSubConnection):
    """The channels of a client: topics, and the presence of everything that listens here."""

    def __init__(self, *wiring: Any, sender_of: Callable[[str], str]) -> None:
        super().__init__(*wiring, wanted=self._wanted_channels, deliver=self._deliver_message)
        self._sender_of = sender_of
        self._receivers: dict[str, list[Receiver | None]] = {}
        self._confirmed: dict[str, asyncio.Event] = {}

    async def subscribe(self, channel: str, receiver: Receiver | None) -> None:
        """Subscribe, and return when the server has confirmed it.

        Raises:
            TransportError: If it does not.
        """
        first = channel not in self._receivers
        self._receivers.setdefault(channel, []).append(receiver)
        confirmed = self._confirmed.setdefault(channel, asyncio.Event())
        try:
            if first:
                await self.post("SUBSCRIBE", channel)
            async with asyncio.timeout(SILENCE):
                await confirmed.wait()
        except BaseException as error:
            await self.unsubscribe(channel, receiver)
            if not isinstance(error, TimeoutError):
                raise
            raise TransportError(
                f"Redis does not confirm a subscription to {channel!r}: may this user subscribe to it?"
            ) from None

    async def unsubscribe(self, channel: str, receiver: Receiver | None) -> None:
        """Undo one `subscribe`."""
        receivers = self._receivers.get(channel, [])
        if receiver in receivers:
            receivers.remove(receiver)
        if not receivers and self._receivers.pop(channel, None) is not None:
            self._confirmed.pop(channel, None)
            await self.post("UNSUBSCRIBE", channel)

    def _wanted_channels(self) -> Iterable[str]:
        return ("SUBSCRIBE", *self._receivers) if self._receivers else ()

    def _deliver_message(self, message: Any) -> None:
        kind, channel = message[0], message[1].decode() if message[1] else ""
        if kind == b"message":
            for receiver in tuple(self._receivers.get(channel, ())):
                if receiver is not None:
                    deliver(receiver, Delivery(message[2], sender=self._sender_of(channel)))
        elif kind == b"subscribe":
            confirmed = self._confirmed.get(channel)
            if confirmed is not None:
                confirmed.set()


_SEND_WAIT = 3.0
"""Seconds that a reply waits for a connection that is being restored."""


_REPLIES = (
    *("call.responded", "call.completed", "call.error", "call.aborted"),
    *("call.credit", "call.probed", "call.alive"),
)
"""The types of all events but requests."""


class _Frame(msgspec.Struct):
    type: str


_frames = msgspec.json.Decoder(_Frame)


class RedisInteropTarget(EventTarget):
    """A client of the original protocol. Created by `connect_redis_interop`."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str,
        trusted: bool,
        max_bytes: int,
        max_values: int,
        connect_timeout: float,
    ) -> None:
        self.trusted = trusted
        self.max_bytes = max_bytes
        self.max_values = max_values
        self.broadcasts_replies = True
        self._prefix = prefix
        connector = Connector(url, connect_timeout)
        self._link = PipelinedConnection(connector, self._lost, self._restored)
        self._listeners: list[Receiver] = []
        self._takers: list[Receiver] = []
        self._confirmed: dict[str, asyncio.Event] = {}
        self._connection = PubSubConnection(
            *(connector, self._lost, self._restored, self._link),
            wanted=self._wanted,
            deliver=self._deliver,
        )

    async def open(self) -> None:
        """Connect.

        Raises:
            TransportError: If Redis cannot be reached.
        """
        await self._link.open()
        await self._connection.open()

    async def aclose(self) -> None:
        """Disconnect."""
        await self._connection.stop()
        await self._link.aclose()

    @property
    def is_connected(self) -> bool:
        """Whether Redis can be reached now."""
        return self._link.is_up and self._connection.is_up

    def mailbox(self) -> str:
        """Return an empty address: there are no private ones."""
        return ""

    def topic(self, name: str) -> str:
        """Return an empty address: the type of an event is its channel."""
        return ""

    def control(self, name: str) -> str:
        """Return an empty address: the type of an event is its channel."""
        return ""

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> Registration:
        """Receive all events except requests."""
        enforce_lists(addresses=addresses)
        return await self._register(self._listeners, receiver)

    async def consume(self, queue: str, consumer: Consumer) -> Registration:
        """Receive all requests."""
        return await self._register(self._takers, consumer)

    async def _register(self, receivers: list[Receiver], receiver: Receiver) -> Registration:
        """Add a receiver; return when Redis has confirmed the subscriptions.

        Raises:
            TransportError: If it does not.
        """
        registration = Registration(receivers, receiver, self._update_patterns)
        try:
            await self._update_patterns()
            async with asyncio.timeout(SILENCE):
                for confirmed in tuple(self._confirmed.values()):
                    await confirmed.wait()
        except BaseException as error:
            await registration.aclose()
            if not isinstance(error, TimeoutError):
                raise
            raise TransportError(
                "Redis does not confirm the subscriptions: may this user subscribe to "
                f"{self._prefix}call.*?"
            ) from None
        return registration

    async def _update_patterns(self) -> None:
        """Subscribe to the needed channels, and unsubscribe from the others."""
        needed = self._patterns()
        added = [pattern for pattern in needed if pattern not in self._confirmed]
        released = [pattern for pattern in self._confirmed if pattern not in needed]
        for pattern in added:
            self._confirmed[pattern] = asyncio.Event()
        for pattern in released:
            del self._confirmed[pattern]
        if added:
            await self._connection.post("PSUBSCRIBE", *added)
        if released:
            await self._connection.post("PUNSUBSCRIBE", *released)

    def _patterns(self) -> list[str]:
        types = [*(_REPLIES if self._listeners else ()), *((PUT_TYPE,) if self._takers else ())]
        return [f"{_literally(self._prefix)}{kind}:*" for kind in types]

    def _wanted(self) -> Sequence[str]:
        patterns = self._patterns()
        return ("PSUBSCRIBE", *patterns) if patterns else ()

    async def send(self, address: str, body: bytes) -> None:
        """Publish to all subscribers."""
        if len(body) > self.max_bytes:
            raise TooLargeError(f"{len(body)} bytes are more than {self.max_bytes}")
        await self._link.ready(_SEND_WAIT)
        await self._link.post("PUBLISH", self._channel(body), body, size=len(body))

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float
    ) -> str:
        """Publish a request to all workers."""
        if len(body) > self.max_bytes:
            raise TooLargeError(f"{len(body)} bytes are more than {self.max_bytes}")
        await self._link.ready(wait)
        if not await self._link.request("PUBLISH", self._channel(body), body, size=len(body)):
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
        await self._link.post(
            *("XADD", f"{self._prefix}aside:{queue}", "MAXLEN", "~", 1000, "*", "e", body),
            size=len(body),
        )

    # ---------------------------------------------------------------------------------------- reading

    def _deliver(self, message: Any) -> None:
        if message[0] == b"psubscribe":
            confirmed = self._confirmed.get(message[1].decode())
            if confirmed is not None:
                confirmed.set()
        elif message[0] == b"pmessage":
            is_request = message[2].startswith(f"{self._prefix}{PUT_TYPE}:".encode())
            for receiver in tuple(self._takers if is_request else self._listeners):
                deliver(receiver, Delivery(message[3]))

    def _lost(self, reason: str) -> None:
        for receiver in (*self._listeners, *self._takers):
            receiver.lost(reason)

    def _restored(self) -> None:
        for receiver in (*self._listeners, *self._takers):
            receiver.restored()


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
    target = RedisInteropTarget(
        url,
        prefix=prefix,
        trusted=trusted,
        max_bytes=max_bytes,
        max_values=max_values,
        connect_timeout=connect_timeout,
    )
    try:
        await target.open()
        yield target
    finally:
        await target.aclose()
