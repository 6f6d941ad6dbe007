"""One HTTP/1.1 request, and its response as the application sends it.

Rule 1: the head of a response with a length is sent together with the first part of its body, in one write.
Rule 2: a connection is aborted if its client does not read for some time, so that unread responses are freed.
Rule 3: control characters in headers are rejected, so that a value cannot inject another header.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final

from operations.front.timing import Message, Scope

logger = logging.getLogger("operations.server")

SEND_SECONDS: Final = 30.0
"""Seconds within which a client must read some of its response."""

WRITE_BUFFER: Final = 32 * 1024
"""The application waits while more bytes than this are waiting to be sent."""

STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}

NO_BODY: Final = b"connection: close\r\ncontent-length: 0\r\n\r\n"
"""The headers of an empty response that closes the connection."""

_CONTROLS: Final = bytes({*range(32), 127} - {9})
"""Characters that must not be in a header: a line break would start another header."""

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""A valid name of a header."""


class UnreadTimer:
    """Aborts a connection whose client reads none of its output for `SEND_SECONDS`.

    Args:
        transport: The transport of the connection.
    """

    __slots__ = ("_timer", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer, unless it runs."""
        if self._timer is None:
            self._wait(self._transport.get_write_buffer_size())

    def stop(self) -> None:
        """Stop the timer: the client has read enough."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, unread: int) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(SEND_SECONDS, self._check, unread)

    def _check(self, before: int) -> None:
        unread = self._transport.get_write_buffer_size()
        if unread < before:
            self._wait(unread)
        else:
            # Abort, because closing would wait for the client to read.
            self._transport.abort()


class FlowControl:
    """Bounds the data that waits in memory, in both directions of one connection.

    A connection is aborted if its client does not read for some time, so that unread responses are freed.

    Args:
        transport: The transport of the connection.
    """

    __slots__ = ("_is_closing", "_is_reading", "_transport", "_unread", "drained")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        self._is_reading = True
        self._is_closing = False
        self._unread = UnreadTimer(transport)
        self.drained: asyncio.Event | None = None
        """Set when the client has read more data; None if no sender has to wait."""

    def pause_reading(self) -> None:
        """Pause reading."""
        if self._is_reading and not self._transport.is_closing():
            self._is_reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        if not (self._is_reading or self._transport.is_closing()):
            self._is_reading = True
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Let senders wait, and start the timeout for the client to read."""
        self.drained = asyncio.Event()
        self._unread.start()

    def resume_writing(self) -> None:
        """Let senders continue: the client has read."""
        self._unread.stop()
        if self._is_closing and self._transport.get_write_buffer_size():
            self._unread.start()
        if self.drained is not None:
            self.drained.set()
            self.drained = None

    def close(self) -> None:
        """Close the connection when the client has read all output; abort it if it does not."""
        self._is_closing = True
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._unread.start()


@dataclass(slots=True, eq=False, repr=False)
class HTTPExchange:
    """One request and its response.

    Args:
        transport: The transport of the connection.
        flow: Its flow control.
        server_state: The state of the uvicorn server, with the headers of every response.
        scope: The ASGI scope of the request.
        on_complete: Called once, when the response is complete, with whether the connection may stay open.
        keep_alive: Whether the connection may stay open after the response.
        expects_continue: Whether the client waits for permission to send the body.
    """

    _transport: Any
    _flow: FlowControl
    _server_state: Any
    scope: Scope
    _on_complete: Callable[[bool], None]
    keep_alive: bool
    _expects_continue: bool

    _body: bytes | bytearray = b""
    _more_body: bool = True

    _is_received: bool = False
    """Whether the application has received the whole body."""

    _changed: asyncio.Event | None = None

    _head: Message | None = None
    """The head of the response, until the first part of the body is sent."""

    is_started: bool = False
    """Whether a part of the response was sent."""

    _is_complete: bool = False
    _is_disconnected: bool = False
    _is_chunked: bool = False

    _has_body: bool = True
    """Whether the response may have a body."""

    _left: int | None = None
    """The remaining bytes of the response, if its length is known."""

    async def run(self, app: Callable[..., Awaitable[None]]) -> None:
        """Serve the request; respond with 500 if the application does not respond."""
        try:
            await app(self.scope, self.receive, self.send)
            if not self._is_complete and not self._is_disconnected:
                logger.error("the application returned without completing its response")
        except Exception:
            logger.exception("the application failed")
        finally:
            if not self._is_complete and not self._is_disconnected:
                self._abandon()

    def _abandon(self) -> None:
        if not self.is_started:
            self._transport.write(STATUS_LINES[500] + self._default_headers() + NO_BODY)
        self._complete(keep_alive=False)

    def add_body(self, body: bytes) -> int:
        """Add a part of the request's body; return the number of bytes that wait for the application."""
        if self._is_complete:
            return 0
        if not self._body:
            # Most bodies arrive in one piece, which is not copied.
            self._body = body
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += body
        self._notify()
        return len(self._body)

    def end_body(self) -> None:
        """Record that the request is complete."""
        self._more_body = False
        self._notify()

    def disconnect(self) -> None:
        """Record that the client has disconnected."""
        self._is_disconnected = True
        self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def receive(self) -> Message:
        """Return the next part of the request's body; after the end, wait for the client to disconnect (ASGI)."""
        if self._expects_continue and not self.is_started:
            self._expects_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while True:
            if self._is_disconnected or self._is_complete:
                return {"type": "http.disconnect"}
            if not self._is_received:
                more = self._more_body
                if self._body or not more:
                    body, self._body = bytes(self._body), b""
                    self._is_received = not more
                    return {"type": "http.request", "body": body, "more_body": more}
                self._flow.resume_reading()
            if self._changed is None:
                self._changed = asyncio.Event()
            self._changed.clear()
            await self._changed.wait()

    async def send(self, message: Message) -> None:
        """Send the head or a part of the body of the response (ASGI).

        Raises:
            RuntimeError: If the application breaks the rules of ASGI or HTTP.
        """
        drained = self._flow.drained
        if drained is not None and not self._is_disconnected:
            await drained.wait()
        if self._is_disconnected:
            return
        kind = message["type"]
        if kind == "http.response.start" and self._head is None and not self.is_started:
            self._start(message)
        elif kind == "http.response.body" and (self.is_started or self._head is not None):
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")

    def _start(self, head: Message) -> None:
        self._head = head
        for name, _ in head.get("headers", ()):
            if name == b"content-length":
                return
        # Without a length, the body may be produced slowly: send the head at once.
        self._transport.write(self._render(head))
        self.is_started = True

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self._is_complete:
            raise RuntimeError("the response is complete")
        head = b"" if self._head is None else self._render(self._head)
        data = self._framed(body, more=more)
        self.is_started = True
        if len(data) > WRITE_BUFFER:
            # The parts of a large body follow each other: asyncio would log every one after a lost connection.
            if not self._transport.is_closing():
                # Not joined with the head, which would copy it.
                if head:
                    self._transport.write(head)
                self._transport.write(data)
        elif head or data:
            self._transport.write(head + data)
        if not more:
            self._complete(keep_alive=self.keep_alive)

    def _framed(self, body: bytes, *, more: bool) -> bytes:
        """Return a part of the body as it is sent: in chunks, or counted against the length in the head."""
        if not self._has_body:
            return b""
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            return chunk if more else chunk + b"0\r\n\r\n"
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left > 0 and not more):
                raise RuntimeError("the response is longer or shorter than its content-length")
        return body

    def _complete(self, *, keep_alive: bool) -> None:
        self._is_complete = True
        self._body = b""
        self._notify()
        self._on_complete(keep_alive)

    def _render(self, message: Message) -> bytes:
        """Return the head of the response as bytes.

        Raises:
            RuntimeError: If the name of a header is not valid, a header contains a control character, or the content
                length is not one number.
        """
        self._head = None
        # The client may or may not send the body now, so the following bytes are ambiguous.
        keep_alive = self.keep_alive and not (self._expects_continue and self._more_body)
        status: int = message["status"]
        length: int | None = None
        count = 0
        fields: list[bytes] = []
        for given, value in message.get("headers", ()):
            if not _NAME.fullmatch(given):
                raise RuntimeError("the response has a header with an invalid name")
            name = given.lower()
            if name == b"content-length":
                if length is not None or not value.isdigit():
                    raise RuntimeError("the content-length of the response is not one number")
                length = int(value)
            elif name == b"transfer-encoding":
                # Chosen below.
                continue
            elif name == b"connection":
                keep_alive = keep_alive and b"close" not in value.lower()
                continue
            fields += (name, b": ", value, b"\r\n")
            count += 1
        rendered = b"".join(fields)
        if len(rendered) - len(rendered.translate(None, _CONTROLS)) != 2 * count:
            raise RuntimeError("a header of the response contains a control character")
        self.keep_alive, self._left = keep_alive, length
        self._has_body = self.scope["method"] != "HEAD" and status not in (204, 304)
        self._is_chunked = length is None and self._has_body and self.scope["http_version"] != "1.0"
        end = b"\r\n" if keep_alive else b"connection: close\r\n\r\n"
        if self._is_chunked:
            end = b"transfer-encoding: chunked\r\n" + end
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        return b"".join((line, self._default_headers(), rendered, end))

    def _default_headers(self) -> bytes:
        """Return the headers of every response, such as its date."""
        return _encoded(tuple(self._server_state.default_headers))


@lru_cache(maxsize=8)
def _encoded(headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """Return header lines. The default headers change once per second, with the date."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])
