"""The socket underneath: any framework's, or one of the `websockets` library."""

import asyncio
import logging
from typing import Any, Protocol

from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

MAX_BYTES = 16 * 1024 * 1024

PING_INTERVAL = 8.0
PING_TIMEOUT = 8.0
"""Together they bound how long a peer that vanished goes unnoticed."""

_logger = logging.getLogger("operations.websocket")
_logger.setLevel(logging.INFO)
"""For the library, which would otherwise log headers and messages when debugging, and with them credentials."""

SETTINGS: dict[str, Any] = {
    "logger": _logger,
    "compression": None,
    "ping_interval": PING_INTERVAL,
    "ping_timeout": PING_TIMEOUT,
    "close_timeout": 1,
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

    What is sent in one turn of the event loop is written to the network at once. The library would write every message
    for itself, and the system call is most of what a small message costs.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._flushing = False

    async def send(self, text: bytes) -> None:
        """Send a text frame, together with all that is sent in this turn of the loop."""
        connection = self._connection
        if not _CAN_GATHER or connection.protocol.state is not State.OPEN:
            try:
                await connection.send(text, text=True)
            except ConnectionClosed as error:
                raise EOFError(str(error)) from error
            return
        connection.protocol.send_text(text)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)
        if connection.paused:
            try:
                await connection.drain()
            except OSError as error:
                raise EOFError(str(error)) from error

    def _flush(self) -> None:
        self._flushing = False
        connection = self._connection
        if connection.protocol.state is State.OPEN:
            connection.transport.write(b"".join(connection.protocol.data_to_send()))
        else:
            connection.send_data()

    async def receive(self) -> bytes:
        """The next frame."""
        try:
            body: bytes = await self._connection.recv(decode=False)
        except ConnectionClosed as error:
            raise EOFError(str(error)) from error
        return body

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()


# Not part of the library's promises; where they are missing, messages are sent one by one.
_CAN_GATHER = hasattr(Connection, "send_data") and hasattr(Connection, "drain")
