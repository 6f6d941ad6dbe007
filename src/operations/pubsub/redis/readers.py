"""What waits at the server: the reader of mailboxes, and the taker from a queue.

Each has a connection of its own, because a read that waits keeps everything behind it waiting.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from secrets import token_hex
from typing import Any

from redis.exceptions import ResponseError

from operations.errors import TransportError
from operations.pubsub.base import Receiver
from operations.pubsub.redis.connection import (
    PipelinedConnection,
    ReconnectingTask,
    ask,
    open_connection,
)

_BATCH = 64
"""Entries taken in one go."""

_YIELD = 0.005
"""Seconds a worker without room leaves requests to others."""

_BLOCK = 5000
"""Milliseconds a read waits at the server, which is also how often it is heard of."""

_MAILBOX_BLOCK = 2000
"""The same for mailboxes, which is also how long one that was taken away is missing."""

_MAILBOX_SECONDS = 120
"""How long a mailbox outlives the last sign of its owner."""

_TRIM_EVERY = 256
"""Messages read between clean-ups of a mailbox."""


class _Reader(ABC):
    """Waits at the server on a connection of its own, and on the next one when that breaks.

    Attributes:
        is_up: Whether it reads now.
    """

    def __init__(
        self,
        pool: Any,
        link: PipelinedConnection,
        lost: Callable[[str], None],
        restored: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._link = link
        self._restored = restored
        self._supervised = ReconnectingTask(self._live, lost, link)
        self._ready = asyncio.Event()
        self.is_up = False

    async def open(self) -> None:
        """Make what is read and start to read; what is sent from now on arrives.

        Raises:
            TransportError: If Redis cannot be reached.
        """
        connection = await open_connection(self._pool)
        try:
            await self._create(connection)
        finally:
            await connection.disconnect()
        await self._supervised.start(self._ready)

    async def _live(self) -> None:
        connection = await open_connection(self._pool)
        try:
            await self._create(connection)
            self.is_up = True
            if self._ready.is_set():
                self._restored()
            self._ready.set()
            self._supervised.backoff.reset()
            await self._read(connection)
        finally:
            self.is_up = False
            await connection.disconnect(nowait=True)

    @abstractmethod
    async def _create(self, connection: Any) -> None:
        """Make what is read, where it is not there."""

    @abstractmethod
    async def _read(self, connection: Any) -> None:
        """Read until the connection breaks."""


class MailboxReader(_Reader):
    """Reads mailboxes."""

    def __init__(self, *wiring: Any, boxes: list[str], receiver: Receiver) -> None:
        super().__init__(*wiring)
        self._receiver = receiver
        self._positions: dict[str, bytes] = dict.fromkeys(boxes, b"")
        self._since_trim = 0

    async def aclose(self) -> None:
        """Stop reading, and take the streams away."""
        await self._supervised.stop()
        if self._link.is_up:
            for box in self._positions:
                await self._link.tell("DEL", box)

    async def _create(self, connection: Any) -> None:
        """Keep the streams alive, or make them, again if need be; the empty entry is nobody's message."""
        for box in self._positions:
            if not await ask(connection, "EXPIRE", box, _MAILBOX_SECONDS):
                self._positions[box] = await ask(connection, "XADD", box, "*", "e", b"")
                await ask(connection, "EXPIRE", box, _MAILBOX_SECONDS)

    async def _read(self, connection: Any) -> None:
        renewed_at = asyncio.get_running_loop().time()
        while True:
            command = ("XREAD", "COUNT", _BATCH, "BLOCK", _MAILBOX_BLOCK, "STREAMS")
            answer = await ask(connection, *command, *self._positions, *self._positions.values())
            for box, entries in answer or ():
                self._deliver(box.decode(), entries)
            now = asyncio.get_running_loop().time()
            # Nothing comes to a mailbox that was flushed or evicted: whoever is told nothing looks whether it is there.
            if not answer or now - renewed_at > _MAILBOX_SECONDS / 4:
                renewed_at = now
                await self._create(connection)
            elif self._since_trim >= _TRIM_EVERY:
                await self._trim()

    def _deliver(self, box: str, entries: list[Any]) -> None:
        for entry_id, fields in entries:
            self._positions[box] = entry_id
            if fields and fields[1]:
                self._receiver.receive(fields[1], "")
                # Large messages must not pile up.
                self._since_trim += 1 + len(fields[1]) // 4096

    async def _trim(self) -> None:
        self._since_trim = 0
        if self._link.is_up:
            for box, position in self._positions.items():
                await self._link.tell("XTRIM", box, "MINID", position)


class QueueReader(_Reader):
    """Takes from a queue."""

    def __init__(
        self, *wiring: Any, name: str, receiver: Receiver, capacity: Callable[[], int]
    ) -> None:
        super().__init__(*wiring)
        self._name = name
        self._receiver = receiver
        self._capacity = capacity
        self._consumer = token_hex(8)
        self._client_id: Any = None
        self._closing = False

    async def aclose(self) -> None:
        """Stop between two reads, so that no entry is taken and then dropped."""
        self._closing = True
        if self._link.is_up and self._client_id is not None:
            with suppress(TransportError, TimeoutError):
                await self._link.tell("CLIENT", "UNBLOCK", self._client_id)
                async with asyncio.timeout(_BLOCK / 1000 + 1):
                    await self._supervised.ended()
        await self._supervised.stop()
        if self._link.is_up:
            await self._link.tell("XGROUP", "DELCONSUMER", self._name, "workers", self._consumer)

    async def _create(self, connection: Any) -> None:
        try:
            await ask(connection, "XGROUP", "CREATE", self._name, "workers", "0", "MKSTREAM")
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise TransportError(f"Redis: {error}") from error

    async def _read(self, connection: Any) -> None:
        self._client_id = await ask(connection, "CLIENT", "ID")
        while not self._closing:
            # At most once: what is taken is not offered again. A caller that needs more asks again.
            count = min(_BATCH, self._capacity())
            if count <= 0:
                # Others may have room. What is left after a moment is ours to queue, or to refuse quickly.
                await asyncio.sleep(_YIELD)
                count = _BATCH
            try:
                answer = await ask(
                    connection,
                    *("XREADGROUP", "GROUP", "workers", self._consumer),
                    *("COUNT", count, "BLOCK", _BLOCK, "NOACK", "STREAMS", self._name, ">"),
                )
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise TransportError(f"Redis: {error}") from error
                await self._create(connection)
                continue
            for _, entries in answer or ():
                await self._deliver(entries)

    async def _deliver(self, entries: list[Any]) -> None:
        if self._link.is_up:
            await self._link.tell("XDEL", self._name, *(entry_id for entry_id, _ in entries))
        for _, fields in entries:
            if fields:
                self._receiver.receive(fields[1], "")
