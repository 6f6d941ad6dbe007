"""The socket underneath: any framework's, or one of the `websockets` library."""

import asyncio
import logging
from typing import Any, Protocol

from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

MAX_BYTES = 16 * 1024 * 1024

MAX_RECEIVED = 4 * 1024 * 1024
"""Bytes of a message that a server accepts by default: what a larger one costs the event loop is noticeable."""

ANNOUNCED = "Operations-Max-Bytes"
"""The header of a handshake's response that tells clients how large a message the server accepts."""

PING_INTERVAL = 8.0
PING_TIMEOUT = 8.0
"""Together they bound how long a peer that vanished goes unnoticed."""

CLOSE_TIMEOUT = 1.0
"""Seconds for the peer to say goodbye."""

_GATHERED = 16
_GATHERED_BYTES = 32 * 1024
"""Messages, and bytes, that are written together. All of a turn at once would keep the peer idle until its end, and
then this side until the peer is done: the two would work by turns."""

_MAX_IN_TURN = 256 * 1024
"""Bytes that may be sent before others have their turn of the loop."""

_logger = logging.getLogger("operations.websocket")
_logger.setLevel(logging.INFO)
"""For the library, which would otherwise log headers and messages when debugging, and with them credentials."""

SETTINGS: dict[str, Any] = {
    "logger": _logger,
    "compression": None,
    "ping_interval": PING_INTERVAL,
    "ping_timeout": PING_TIMEOUT,
    "close_timeout": CLOSE_TIMEOUT,
}
"""What both ends of a connection ask of the library."""


class Socket(Protocol):
    """An accepted WebSocket of any framework."""

    async def send(self, text: bytes) -> None:
        """Send a text frame of UTF-8.

        Raises:
            EOFError: If the socket is closed.
        """
        ...

    async def receive(self) -> bytes:
        """The next text frame.

        Raises:
            EOFError: If the socket is closed.
        """
        ...

    async def close(self) -> None:
        """Close the socket."""
        ...


class LibrarySocket:
    """A connection of the `websockets` library.

    What is sent in one turn of the event loop is written in pieces of `_GATHERED` messages, and the rest at its end.
    The library would write every message for itself, and the system call is most of what a small message costs.

    The library's keepalive waits for room before it pings, so it never misses a peer that stopped reading while much
    was on its way: that is watched here.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._flushing = False
        self._gathered = 0
        self._gathered_bytes = 0
        self._in_turn = 0
        self._written = 0
        self._watching: asyncio.TimerHandle | None = None
        self._reason = ""

    async def send(self, text: bytes) -> None:
        """Send a text frame, together with others that are sent in this turn of the loop."""
        connection = self._connection
        if _CAN_GATHER:
            await self._room()
        if not _CAN_GATHER or connection.protocol.state is not State.OPEN:
            try:
                await connection.send(text, text=True)
            except ConnectionClosed as error:
                raise EOFError(self._reason or str(error)) from error
            return
        connection.protocol.send_text(text)
        self._gathered += 1
        self._gathered_bytes += len(text)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)
        if self._gathered >= _GATHERED or self._gathered_bytes > _GATHERED_BYTES:
            self._in_turn += self._gathered_bytes
            self._write()
            if len(text) > _GATHERED_BYTES:
                # A large message counts as sent when the peer has read nearly all of it.
                await self._room()
                if connection.protocol.state is not State.OPEN:
                    raise EOFError(self._reason or "it was not read to its end")
            if self._in_turn > _MAX_IN_TURN:
                # Whoever sends without end shares the loop, and finds no room when the peer does not keep up.
                await asyncio.sleep(0)

    async def _room(self) -> None:
        while self._connection.paused:
            try:
                await self._connection.drain()
            except OSError as error:
                raise EOFError(self._reason or str(error)) from error

    def _flush(self) -> None:
        self._flushing = False
        self._in_turn = 0
        self._write()

    def _write(self) -> None:
        self._gathered = self._gathered_bytes = 0
        connection = self._connection
        if connection.protocol.state is not State.OPEN:
            connection.send_data()
            return
        data = b"".join(connection.protocol.data_to_send())
        self._written += len(data)
        connection.transport.write(data)
        if connection.paused and self._watching is None:
            self._watch(0.0, self._gone(), 0)

    def _watch(self, idle: float, gone: int, pings: int) -> None:
        """Give up the connection when nothing moves for as long as a ping and its answer may take."""
        connection = self._connection
        self._watching = None
        interval, timeout = connection.ping_interval, connection.ping_timeout
        if not connection.paused or interval is None or timeout is None:
            return
        before, gone = gone, self._gone()
        # What only the library can have added was one ping of our own, and then answers to those of the peer.
        pings += gone < before
        is_moving = gone > before or (gone < before and pings > 1)
        step = timeout / 8
        idle = 0.0 if is_moving else idle + step
        if idle > interval + timeout:
            self._reason = f"the peer has read nothing for {idle:g} seconds"
            connection.transport.abort()
        else:
            self._watching = connection.loop.call_later(step, self._watch, idle, gone, pings)

    def _gone(self) -> int:
        """Bytes that have left this process; less by what the library wrote by itself."""
        size: int = self._connection.transport.get_write_buffer_size()
        return self._written - size

    async def receive(self) -> bytes:
        """The next frame."""
        try:
            body: bytes = await self._connection.recv(decode=False)
        except ConnectionClosed as error:
            raise EOFError(self._reason or str(error)) from error
        return body

    async def close(self) -> None:
        """Close the connection, also where the peer reads nothing any more."""
        try:
            async with asyncio.timeout(self._connection.close_timeout):
                await self._connection.close()
        except TimeoutError:
            self._connection.transport.abort()
            await self._connection.wait_closed()


# Not part of the library's promises; where they are missing, messages are sent one by one.
_CAN_GATHER = hasattr(Connection, "send_data") and hasattr(Connection, "drain")
