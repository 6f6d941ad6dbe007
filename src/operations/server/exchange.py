"""One HTTP/1.1 request and its response, as an ASGI application sees them.

Rule 1: the head of a response with a length is sent together with the first part of its body, in one write.
Rule 2: no header of a response can become two: control characters are rejected.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final, Protocol

from operations.front.timing import Message, Scope

logger = logging.getLogger("operations.server")

SEND_SECONDS: Final = 30.0
"""Time in which a client must read some of its response."""

WRITE_BUFFER: Final = 32 * 1024
"""Bytes waiting to be sent beyond which the application waits before it sends more."""

STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
NO_BODY: Final = b"connection: close\r\ncontent-length: 0\r\n\r\n"
"""Headers of a response that ends the connection."""

_CONTROLS: Final = bytes({*range(32), 127} - {9})
"""Characters that must not be in a header: with a line break, one value could become several headers."""

_NAME_CHARACTERS: Final = (
    b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)
_MAX_NAMES: Final = 500
_field_starts: dict[bytes, bytes] = {}
"""How the line of a header begins, by its name."""


class Connection(Protocol):
    """The connection that carries exchanges."""

    drained: asyncio.Event | None
    """Set when the client has read on; None if nothing waits to be read."""

    @property
    def default_headers(self) -> bytes:
        """The headers of every response, such as its date."""
        ...

    def resume_reading(self) -> None:
        """Read on."""
        ...

    def response_completed(self, *, keep_alive: bool) -> None:
        """Serve the next request, or close the connection."""
        ...


class Exchange:
    """One request and its response.

    Args:
        connection: On which they travel.
        transport: Of the connection.
        scope: Of the request.
        keep_alive: Whether the connection may stay open after the response.
        expects_continue: Whether the client waits for permission to send the body.
    """

    __slots__ = (
        "_body", "_changed", "_connection", "_expects_continue", "_has_body", "_head", "_is_chunked", "_is_complete",
        "_is_disconnected", "_is_received", "_left", "_more_body", "_transport", "is_started", "keep_alive", "scope",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        transport: Any,
        scope: Scope,
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self._connection = connection
        self._transport = transport
        self.scope = scope
        self.keep_alive = keep_alive
        self._expects_continue = expects_continue
        self._body: bytes | bytearray = b""
        self._more_body = True
        self._is_received = False
        """Whether the application has the whole body."""
        self._changed: asyncio.Event | None = None
        self._head: Message | None = None
        """The head of the response while it waits for the body."""
        self.is_started = False
        """Whether some of the response was sent."""
        self._is_complete = self._is_disconnected = False
        self._is_chunked = False
        self._has_body = True
        """Whether the response may have a body."""
        self._left: int | None = None
        """Bytes of the response that are still to be sent, if its length is known."""

    async def run(self, app: Callable[..., Awaitable[None]]) -> None:
        """Serve the request; respond with 500 if the application fails to."""
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
            self._transport.write(
                b"%b%b%b" % (STATUS_LINES[500], self._connection.default_headers, NO_BODY)
            )
        self._complete(keep_alive=False)

    def add_body(self, body: bytes) -> int:
        """Take a part of the request's body; return how many bytes wait for the application."""
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
        """Note that the request is complete."""
        self._more_body = False
        self._notify()

    def disconnect(self) -> None:
        """Note that the client has disconnected."""
        self._is_disconnected = True
        self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def receive(self) -> Message:
        """Return the next part of the request's body, finally that the client has disconnected (ASGI)."""
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
                self._connection.resume_reading()
            if self._changed is None:
                self._changed = asyncio.Event()
            self._changed.clear()
            await self._changed.wait()

    async def send(self, message: Message) -> None:
        """Send the head or a part of the body of the response (ASGI).

        Raises:
            RuntimeError: If the application breaks the rules of ASGI or HTTP.
        """
        drained = self._connection.drained
        if drained is not None and not self._is_disconnected:
            await drained.wait()
        if self._is_disconnected:
            return
        kind = message["type"]
        if kind == "http.response.start" and self._head is None and not self.is_started:
            self._head = message
            for name, _ in message.get("headers", ()):
                if name == b"content-length":
                    return
            # Without a length, the body may take a while.
            self._transport.write(self._render(message))
            self.is_started = True
            return
        if kind != "http.response.body" or not (self.is_started or self._head):
            raise RuntimeError(f"unexpected ASGI message {kind!r}")
        if self._is_complete:
            raise RuntimeError("the response is complete")
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        head = b"" if self._head is None else self._render(self._head)
        if not self._has_body:
            body = b""
        elif self._is_chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = body if more else body + b"0\r\n\r\n"
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left > 0 and not more):
                raise RuntimeError("the response is longer or shorter than its content-length")
        self.is_started = True
        if len(body) > WRITE_BUFFER:
            if head:
                self._transport.write(head)
            self._transport.write(body)
        elif head or body:
            self._transport.write(head + body)
        if not more:
            self._complete(keep_alive=self.keep_alive)

    def _complete(self, *, keep_alive: bool) -> None:
        self._is_complete = True
        self._body = b""
        self._notify()
        self._connection.response_completed(keep_alive=keep_alive)

    def _render(self, message: Message) -> bytes:
        """Return the head of the response as bytes.

        Raises:
            RuntimeError: If a header contains a character that could end it, or the length is not one number.
        """
        self._head = None
        status: int = message["status"]
        count = 0
        fields: list[bytes] = []
        for name, value in message.get("headers", ()):
            start = _field_starts.get(name) or _field_start(name)
            if start == b"content-length: ":
                if self._left is not None or not value.isdigit():
                    raise RuntimeError("the content-length of the response is not one number")
                self._left = int(value)
            elif start == b"transfer-encoding: ":
                # Chosen below.
                continue
            elif start == b"connection: ":
                self.keep_alive = self.keep_alive and b"close" not in value.lower()
                continue
            fields += (start, value, b"\r\n")
            count += 1
        rendered = b"".join(fields)
        if len(rendered) - len(rendered.translate(None, _CONTROLS)) != 2 * count:
            raise RuntimeError("a header of the response contains a control character")
        if self._expects_continue and self._more_body:
            # The client may send the body or leave it out, so the following bytes are ambiguous.
            self.keep_alive = False
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        self._has_body = self.scope["method"] != "HEAD" and status not in (204, 304)
        if self._left is None and self._has_body and self.scope["http_version"] != "1.0":
            self._is_chunked = True
            end = b"transfer-encoding: chunked\r\n" + end
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        return b"".join((line, self._connection.default_headers, rendered, end))


def _field_start(name: bytes) -> bytes:
    """Return how the line of a header begins.

    Raises:
        RuntimeError: If the name is not valid.
    """
    if not name or name.translate(None, _NAME_CHARACTERS):
        raise RuntimeError("the response has a header with an invalid name")
    start = name.lower() + b": "
    if len(_field_starts) < _MAX_NAMES:
        _field_starts[name] = start
    return start
