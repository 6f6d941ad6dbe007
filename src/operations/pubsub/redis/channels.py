"""The Pub/Sub connection of a Redis client."""

import asyncio
from collections.abc import Callable
from typing import Any

from operations.pubsub.base import Receiver
from operations.pubsub.redis.link import KEEPALIVE, SILENCE, Supervised, open_connection


class Channels:
    """The Pub/Sub connection: topics, and the presence of everything that listens here."""

    def __init__(
        self, pool: Any, lost: Callable[[str], None], restored: Callable[[], None]
    ) -> None:
        self._pool = pool
        self._restored = restored
        self._receivers: dict[str, list[Receiver | None]] = {}
        self._confirmed: dict[str, asyncio.Event] = {}
        self._connection: Any = None
        self._heard_at = 0.0
        self._supervised = Supervised(self._live, lost)
        self._ready = asyncio.Event()

    @property
    def is_up(self) -> bool:
        """Whether the connection stands."""
        return self._connection is not None

    async def open(self) -> None:
        """Connect, and stay connected."""
        self._supervised.start()
        await self._ready.wait()

    async def aclose(self) -> None:
        """Disconnect."""
        await self._supervised.stop()

    async def subscribe(self, channel: str, receiver: Receiver | None) -> None:
        """Subscribe; returns when the server has confirmed it."""
        first = channel not in self._receivers
        self._receivers.setdefault(channel, []).append(receiver)
        confirmed = self._confirmed.setdefault(channel, asyncio.Event())
        if first and self._connection is not None:
            await self._connection.send_command("SUBSCRIBE", channel)
        await confirmed.wait()

    async def unsubscribe(self, channel: str, receiver: Receiver | None) -> None:
        """Undo one `subscribe`."""
        receivers = self._receivers.get(channel, [])
        if receiver in receivers:
            receivers.remove(receiver)
        elif None in receivers:
            receivers.remove(None)
        if not receivers and self._receivers.pop(channel, None) is not None:
            self._confirmed.pop(channel, None)
            if self._connection is not None:
                await self._connection.send_command("UNSUBSCRIBE", channel)

    async def _live(self) -> None:
        connection = await open_connection(self._pool)
        loop = asyncio.get_running_loop()
        keep_alive: asyncio.Task[None] | None = None
        try:
            if self._receivers:
                await connection.send_command("SUBSCRIBE", *self._receivers)
            self._connection = connection
            self._heard_at = loop.time()
            keep_alive = loop.create_task(self._keep_alive(connection))
            if self._ready.is_set():
                self._restored()
            self._ready.set()
            self._supervised.attempt = 0
            while True:
                message = await connection.read_response()
                self._heard_at = loop.time()
                self._deliver(message)
        finally:
            self._connection = None
            if keep_alive is not None:
                keep_alive.cancel()
            await connection.disconnect(nowait=True)

    def _deliver(self, message: Any) -> None:
        kind, channel = message[0], message[1].decode() if message[1] else ""
        if kind == b"message":
            for receiver in tuple(self._receivers.get(channel, ())):
                if receiver is not None:
                    receiver.receive(message[2], "")
        elif kind == b"subscribe":
            confirmed = self._confirmed.get(channel)
            if confirmed is not None:
                confirmed.set()

    async def _keep_alive(self, connection: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(KEEPALIVE)
            if loop.time() - self._heard_at > SILENCE:
                # Wakes the reader with an error.
                await connection.disconnect(nowait=True)
                return
            await connection.send_command("PING")
