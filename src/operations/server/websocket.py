"""uvicorn's WebSocket protocol, with limits on peers that do not read.

Rule 1: a message counts as sent when its client has read nearly all of it.
Rule 2: a connection whose client does not read for some time is cut, so that unread messages are freed.
Rule 3: a handshake that is malformed, or followed by data before it was answered, ends the connection.
"""

import asyncio
from typing import Any, cast

from operations.server.exchange import NO_BODY, SEND_SECONDS, STATUS_LINES, WRITE_BUFFER

try:
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
except ModuleNotFoundError:
    # Without the `websocket` extra there are no WebSockets.
    WebSocketsSansIOProtocol = None  # type: ignore[assignment, misc]


if WebSocketsSansIOProtocol is None:
    websocket_protocol: Any = "none"
else:

    class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
        """One WebSocket."""

        _unread_alarm: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            """Limit what waits to be sent."""
            cast("asyncio.Transport", transport).set_write_buffer_limits(high=WRITE_BUFFER)
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            """Take a handshake or messages."""
            if self.handshake_initiated and not self.handshake_complete:
                # Responses to messages would be sent before the one to the handshake.
                self.transport.close()
                return
            super().data_received(data)
            if self.conn.handshake_exc is not None and not self.transport.is_closing():
                # uvicorn would neither respond nor close the connection.
                response = b"".join(self.conn.data_to_send())
                self.transport.write(response or STATUS_LINES[400] + NO_BODY)
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop all timers."""
            self.resume_writing()
            super().connection_lost(exc)

        async def send(self, message: Any) -> None:
            """Send a message; return when the client has read nearly all of it."""
            await super().send(message)
            await self.writable.wait()

        def pause_writing(self) -> None:
            """Expect the client to read."""
            super().pause_writing()
            if self._unread_alarm is None:
                self._watch(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            """Note that the client has read."""
            if self._unread_alarm is not None:
                self._unread_alarm.cancel()
                self._unread_alarm = None
            super().resume_writing()

        def _watch(self, unread: int) -> None:
            loop = asyncio.get_running_loop()
            self._unread_alarm = loop.call_later(SEND_SECONDS, self._cut_unless_read, unread)

        def _cut_unless_read(self, before: int) -> None:
            unread = self.transport.get_write_buffer_size()
            if unread < before:
                self._watch(unread)
            else:
                # Closing would wait until the client has read.
                self.transport.abort()

    websocket_protocol = BoundedWebSocketProtocol
