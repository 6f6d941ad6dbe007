"""The original protocol on Redis Pub/Sub: one channel for each type of event, read by everyone.

The channel of an event is `prefix + type + ":" + id`; the id is empty, but one is accepted. Everyone who listens gets
every answer, so nothing is private here, and every worker gets every request, so there should be one.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from operations._words import enforce_lists
from operations.access import Identity
from operations.errors import NobodyThereError, NotSentError, TooLargeError, TransportError
from operations.pubsub.base import PUT_TYPE, Receiver, Registration
from operations.pubsub.redis.channels import Ear
from operations.pubsub.redis.link import SILENCE, Link, open_pool

_SEND_WAIT = 3.0
"""Seconds an answer waits for a connection that is being restored."""


class _Frame(msgspec.Struct):
    type: str


_frames = msgspec.json.Decoder(_Frame)


class RedisInteropTarget:
    """One client that speaks the original topics. Made by `connect_redis_interop`."""

    def __init__(self, url: str, *, prefix: str, trusted: bool, max_bytes: int) -> None:
        self.trusted = trusted
        self.identity: Identity | None = None
        self.max_bytes = max_bytes
        self.direct = False
        self.broadcasts_replies = True
        self.local = None
        self._prefix = prefix
        self._pool = open_pool(url)
        self._link = Link(self._pool, _nothing, self._lost, self._restored)
        self._listeners: list[Receiver] = []
        self._takers: list[Receiver] = []
        self._confirmed = asyncio.Event()
        self._ear = Ear(
            self._pool,
            self._link,
            wanted=lambda: ("PSUBSCRIBE", f"{_literally(prefix)}call.*"),
            deliver=self._deliver,
            lost=self._lost,
            restored=self._restored,
        )

    async def open(self) -> None:
        """Connect, and subscribe to every event.

        Raises:
            TransportError: If Redis cannot be reached.
        """
        await self._link.open()
        await self._ear.open()
        try:
            async with asyncio.timeout(SILENCE):
                await self._confirmed.wait()
        except TimeoutError:
            raise TransportError(
                "Redis does not confirm a subscription to every event: may this user have one?"
            ) from None

    async def aclose(self) -> None:
        """Disconnect."""
        await self._ear.aclose()
        await self._link.aclose()
        await self._pool.disconnect()

    @property
    def is_connected(self) -> bool:
        """Whether Redis can be reached now."""
        return self._link.is_up and self._ear.is_up

    def mailbox(self) -> str:
        """Nothing: there are no private addresses here."""
        return ""

    def topic(self, name: str) -> str:
        """Nothing: the type of an event is its address."""
        return ""

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> Registration:
        """Get every event that is no request."""
        enforce_lists(addresses=addresses)
        return Registration(self._listeners, receiver)

    async def take(
        self, queue: str, receiver: Receiver, capacity: Callable[[], int]
    ) -> Registration:
        """Get every request."""
        return Registration(self._takers, receiver)

    async def send(self, address: str, body: bytes) -> None:
        """Publish to everyone."""
        if len(body) > self.max_bytes:
            raise TooLargeError(f"{len(body)} bytes are more than {self.max_bytes}")
        await self._link.ready(_SEND_WAIT)
        await self._link.tell("PUBLISH", self._channel(body), body, size=len(body))

    async def put(self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float) -> None:
        """Publish a request to everyone who takes requests."""
        if len(body) > self.max_bytes:
            raise TooLargeError(f"{len(body)} bytes are more than {self.max_bytes}")
        await self._link.ready(wait)
        if not await self._link.request("PUBLISH", self._channel(body), body, size=len(body)):
            raise NobodyThereError("nobody subscribes to requests")

    def _channel(self, body: bytes) -> str:
        try:
            return f"{self._prefix}{_frames.decode(body).type}:"
        except ValueError as error:
            raise NotSentError(f"not an event: {error}") from error

    async def is_present(self, address: str) -> bool:
        """Nobody can tell, so nobody is taken for gone."""
        return True

    async def set_aside(self, queue: str, body: bytes) -> None:
        """Keep a poisonous request in a stream, the last thousand of them."""
        await self._link.tell(
            *("XADD", f"{self._prefix}aside:{queue}", "MAXLEN", "~", 1000, "*", "e", body),
            size=len(body),
        )

    # ---------------------------------------------------------------------------------------- reading

    def _deliver(self, message: Any) -> None:
        if message[0] == b"psubscribe":
            self._confirmed.set()
        elif message[0] == b"pmessage":
            is_request = message[2].startswith(f"{self._prefix}{PUT_TYPE}:".encode())
            for receiver in tuple(self._takers if is_request else self._listeners):
                receiver.receive(message[3], "")

    def _lost(self, reason: str) -> None:
        for receiver in (*self._listeners, *self._takers):
            receiver.lost(reason)

    def _restored(self) -> None:
        for receiver in (*self._listeners, *self._takers):
            receiver.restored()


async def _nothing(connection: Any) -> None:
    """There is nothing to prepare."""


def _literally(prefix: str) -> str:
    """`prefix` as a pattern that matches nothing else."""
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
) -> AsyncGenerator[RedisInteropTarget]:
    """Speak the original protocol on Redis Pub/Sub for the length of an `async with` block.

    Args:
        url: As redis-py takes it.
        prefix: Of every channel.
        trusted: Believe the `identity` inside events.
        max_bytes: The largest message.

    Raises:
        TransportError: If the address cannot be read, or Redis cannot be reached now.
    """
    target = RedisInteropTarget(url, prefix=prefix, trusted=trusted, max_bytes=max_bytes)
    try:
        await target.open()
        yield target
    finally:
        await target.aclose()
