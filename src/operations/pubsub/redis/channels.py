"""The Pub/Sub connection of a Redis client, and the channels it listens to."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from operations.errors import TransportError
from operations.pubsub.base import Receiver, deliver
from operations.pubsub.redis.connection import (
    CONNECTION_ERRORS,
    KEEPALIVE,
    SILENCE,
    Connector,
    PipelinedConnection,
    ReconnectingTask,
)


class PubSubConnection:
    """A connection that only listens, and comes back by itself.

    Args:
        connector: Opens the connections.
        link: The connection of the same client that speaks.
        wanted: The command that subscribes to everything, for a new connection; nothing if there is nothing.
        deliver: Takes every message.
        lost: Hears that the connection broke.
        restored: Hears that it is back.
    """

    def __init__(
        self,
        connector: Connector,
        link: PipelinedConnection,
        *,
        wanted: Callable[[], Iterable[str]],
        deliver: Callable[[Any], None],
        lost: Callable[[str], None],
        restored: Callable[[], None],
    ) -> None:
        self._connector = connector
        self._wanted = wanted
        self._deliver = deliver
        self._restored = restored
        self._connection: Any = None
        self._heard_at = 0.0
        self._supervised = ReconnectingTask(self._live, lost, connector, link)
        self._ready = asyncio.Event()

    @property
    def is_up(self) -> bool:
        """Whether the connection stands."""
        return self._connection is not None

    async def open(self) -> None:
        """Connect, and stay connected.

        Raises:
            TransportError: If that fails; then nothing goes on in the background.
        """
        await self._supervised.start(self._ready)

    async def aclose(self) -> None:
        """Disconnect."""
        await self._supervised.stop()

    async def tell(self, *command: str) -> None:
        """Send a command; nothing while there is no connection, for the next one is told all that is wanted."""
        if self._connection is not None:
            # Where it breaks just now, the reader notices, and there is a next one.
            with suppress(*CONNECTION_ERRORS):
                await self._connection.send_command(*command)

    async def _live(self) -> None:
        connection = await self._connector.connect()
        loop = asyncio.get_running_loop()
        keep_alive: asyncio.Task[None] | None = None
        try:
            command = tuple(self._wanted())
            if command:
                await connection.send_command(*command)
            self._connection = connection
            self._heard_at = loop.time()
            keep_alive = loop.create_task(self._keep_alive(connection))
            if self._ready.is_set():
                self._restored()
            self._ready.set()
            self._supervised.backoff.reset()
            while True:
                message = await connection.read_response()
                self._heard_at = loop.time()
                # Without any subscription the answer to a PING is no message.
                if isinstance(message, list):
                    self._deliver(message)
        finally:
            self._connection = None
            if keep_alive is not None:
                keep_alive.cancel()
            await connection.disconnect(nowait=True)

    async def _keep_alive(self, connection: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(KEEPALIVE)
            if loop.time() - self._heard_at > SILENCE:
                # Wakes the reader with an error.
                await connection.disconnect(nowait=True)
                return
            await connection.send_command("PING")


class Channels:
    """The channels of a client: topics, and the presence of everything that listens here."""

    def __init__(
        self,
        connector: Connector,
        link: PipelinedConnection,
        lost: Callable[[str], None],
        restored: Callable[[], None],
    ) -> None:
        self._receivers: dict[str, list[Receiver | None]] = {}
        self._confirmed: dict[str, asyncio.Event] = {}
        self._connection = PubSubConnection(
            connector,
            link,
            wanted=self._wanted,
            deliver=self._deliver,
            lost=lost,
            restored=restored,
        )
        self.open = self._connection.open
        self.aclose = self._connection.aclose

    @property
    def is_up(self) -> bool:
        """Whether the connection stands."""
        return self._connection.is_up

    async def subscribe(self, channel: str, receiver: Receiver | None) -> None:
        """Subscribe; returns when the server has confirmed it.

        Raises:
            TransportError: If it does not.
        """
        first = channel not in self._receivers
        self._receivers.setdefault(channel, []).append(receiver)
        confirmed = self._confirmed.setdefault(channel, asyncio.Event())
        try:
            if first:
                await self._connection.tell("SUBSCRIBE", channel)
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
            await self._connection.tell("UNSUBSCRIBE", channel)

    def _wanted(self) -> Iterable[str]:
        return ("SUBSCRIBE", *self._receivers) if self._receivers else ()

    def _deliver(self, message: Any) -> None:
        kind, channel = message[0], message[1].decode() if message[1] else ""
        if kind == b"message":
            for receiver in tuple(self._receivers.get(channel, ())):
                if receiver is not None:
                    deliver(receiver, message[2], "")
        elif kind == b"subscribe":
            confirmed = self._confirmed.get(channel)
            if confirmed is not None:
                confirmed.set()
