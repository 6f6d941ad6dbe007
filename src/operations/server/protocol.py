"""uvicorn's HTTP and WebSocket protocols with limits on slow and large peers, which uvicorn does not have.

Rule 1: a connection that does not send the whole head of a request in time is closed, and so is one whose body takes
        longer than the application waits for it.
Rule 2: a head beyond a size is rejected (431) while it arrives.
Rule 3: trailers are limited in size like a head, and dropped: they never become headers.
Rule 4: a connection whose client does not read for some time is cut, so that unread responses are freed.
Rule 5: the head and the body of a response are sent in one write.
Rule 6: a WebSocket message counts as sent when its client has read nearly all of it.
"""

import asyncio
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

try:
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
except ModuleNotFoundError:
    # Without the `websocket` extra there are no WebSockets.
    WebSocketsSansIOProtocol = None  # type: ignore[assignment, misc]

HEAD_SECONDS: Final = 15.0
HEAD_BYTES: Final = 64 * 1024

BODY_SECONDS: Final = 60.0
"""Time for the body to arrive after the head. The application gives up earlier by itself (`Limits.body_seconds`); this
also ends requests whose body it does not read."""

SEND_SECONDS: Final = 30.0
"""Time in which a client must read some of its response."""

_WRITE_BUFFER: Final = 32 * 1024
"""Bytes waiting to be sent beyond which the application waits before it sends more."""

_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _JoinedWrites:
    """A transport that sends what is written in one turn of the event loop in one piece."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self._size = 0
        self.abort = transport.abort
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def __getattr__(self, name: str) -> Any:
        # What is used seldom.
        return getattr(self._transport, name)

    def write(self, data: Any) -> None:
        """Send soon, together with what else is written in this turn."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)
        self._size += len(data)
        if self._size > _WRITE_BUFFER:
            self._flush()

    def close(self) -> None:
        """Send what waits, then close."""
        self._flush()
        self._transport.close()

    def get_write_buffer_size(self) -> int:
        """Return the bytes that were not sent yet."""
        return self._size + self._transport.get_write_buffer_size()

    def _flush(self) -> None:
        if self._waiting:
            waiting, self._waiting, self._size = self._waiting, [], 0
            self._transport.write(waiting[0] if len(waiting) == 1 else b"".join(waiting))


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    _alarm: asyncio.TimerHandle | None = None
    _unread_alarm: asyncio.TimerHandle | None = None
    _in_head = True
    _in_request = False
    _overhead = 0
    """Bytes of the request since the last one of its body: of its head, of chunk sizes, of trailers."""
    _body_received = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        # uvloop joins writes by itself.
        if type(transport).__module__.startswith("asyncio"):
            transport = cast("asyncio.Transport", _JoinedWrites(transport))
        super().connection_made(transport)
        self._start_alarm(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._stop_alarm()
        self.resume_writing()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Expect the head of a request."""
        self._in_head = self._in_request = True
        self._overhead = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Expect the body."""
        self._in_head = False
        self._stop_alarm()
        super().on_headers_complete()
        if not cast("Any", self.parser).should_upgrade():
            # uvicorn appends trailers to this list; the request keeps its own.
            self.headers = []

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._body_received = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect nothing more of this request."""
        self._in_request = False
        self._stop_alarm()
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Take bytes; count those that are not of a body, and limit the time for the rest of the request."""
        self._body_received = False
        super().data_received(data)
        # Most requests arrive in one piece and need no timer.
        if self.transport.is_closing() or not (self._in_head or self._in_request):
            return
        self._start_alarm(HEAD_SECONDS if self._in_head else BODY_SECONDS)
        self._overhead = 0 if self._body_received else self._overhead + len(data)
        if self._overhead > HEAD_BYTES:
            if self._in_head:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
            else:
                self.transport.abort()

    def pause_writing(self) -> None:
        """Expect the client to read."""
        super().pause_writing()
        if self._unread_alarm is None:
            self._unread_alarm = self._call_later(SEND_SECONDS, self._cut)

    def resume_writing(self) -> None:
        """Note that the client has read."""
        if self._unread_alarm is not None:
            self._unread_alarm.cancel()
            self._unread_alarm = None
        super().resume_writing()

    def _start_alarm(self, seconds: float) -> None:
        if self._alarm is None:
            self._alarm = self._call_later(seconds, self._give_up)

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _call_later(self, seconds: float, action: Any) -> asyncio.TimerHandle:
        loop = cast("asyncio.AbstractEventLoop", cast("Any", self).loop)
        return loop.call_later(seconds, action)

    def _give_up(self) -> None:
        self._alarm = None
        if not self.transport.is_closing():
            self.transport.close()

    def _cut(self) -> None:
        # Closing would wait until the client has read.
        self._unread_alarm = None
        self.transport.abort()


if WebSocketsSansIOProtocol is None:
    WEBSOCKET_PROTOCOL: Any = "none"
else:

    class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
        """One WebSocket."""

        _unread_alarm: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            """Limit what waits to be sent."""
            cast("asyncio.Transport", transport).set_write_buffer_limits(high=_WRITE_BUFFER)
            super().connection_made(transport)

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

    WEBSOCKET_PROTOCOL = BoundedWebSocketProtocol
