"""HTTP/1.1 connections for uvicorn, with limits on time and size that uvicorn's own protocols do not have.

Rule 1: a connection is closed if the head of a request does not arrive in time, or if the body takes longer than the
        application waits for it.
Rule 2: a head that exceeds a size limit is rejected (431) while it arrives.
Rule 3: trailers are limited in size like a head, and ignored: they never become headers.
Rule 4: a connection is aborted if its client does not read for some time, so that unread responses are freed.
Rule 5: a request with malformed framing is rejected as a whole, and nothing after it is read.
Rule 6: a request does not see context variables of other requests on the same connection.
Rule 7: the head of a response with a length is sent together with the first part of its body, in one write.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
import uvicorn

from operations.front.limits import Message, Scope
from operations.front.messages import OWN_SERVER
from operations.server.response_head import NO_BODY, STATUS_LINES, render_head

logger = logging.getLogger("operations.server")

SEND_SECONDS: Final = 30.0
"""Seconds within which a client must read some of its response."""

WRITE_BUFFER: Final = 32 * 1024
"""The application waits while more bytes than this are waiting to be sent."""

HEAD_SECONDS: Final = 15.0
HEAD_BYTES: Final = 64 * 1024

BODY_SECONDS: Final = 60.0
"""Seconds for the body to arrive, also if the application, which has a shorter limit, does not read it."""

_READ_BUFFER: Final = 64 * 1024
"""Reading pauses while more bytes of a body than this wait for the application."""

_MAX_PIPELINED: Final = 64
"""The largest number of pipelined requests, which use memory for each received byte."""

_MAX_AHEAD: Final = 8
"""Reading pauses while more pipelined requests than this wait. A disconnect is noticed only while reading."""

_NEVER: Final = float("inf")


class Exchange:
    """One request and its response.

    Args:
        connection: The connection.
        transport: The transport of the connection.
        scope: The ASGI scope of the request.
        keep_alive: Whether the connection may stay open after the response.
        expects_continue: Whether the client waits for permission to send the body.
    """

    __slots__ = (
        "_body", "_changed", "_connection", "_expects_continue", "_has_body", "_head", "_is_chunked", "_is_complete",
        "_is_disconnected", "_is_received", "_left", "_more_body", "_transport", "is_started", "keep_alive", "scope",
    )  # fmt: skip

    def __init__(
        self,
        connection: "HTTPProtocol",
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
        """Whether the application has received the whole body."""
        self._changed: asyncio.Event | None = None
        self._head: Message | None = None
        """The head of the response, until the first part of the body is sent."""
        self.is_started = False
        """Whether a part of the response was sent."""
        self._is_complete = self._is_disconnected = False
        self._is_chunked = False
        self._has_body = True
        """Whether the response may have a body."""
        self._left: int | None = None
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
            self._transport.write(
                b"%b%b%b" % (STATUS_LINES[500], self._connection.default_headers, NO_BODY)
            )
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
            # Without a length, the body may be produced slowly: send the head at once.
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
        """Return the head of the response as bytes; raise if it is not valid (`render_head`)."""
        self._head = None
        # The client may or may not send the body now, so the following bytes are ambiguous.
        keep_alive = self.keep_alive and not (self._expects_continue and self._more_body)
        headers = self._connection.default_headers
        head = render_head(message, self.scope, headers, keep_alive=keep_alive)
        self.keep_alive, self._left = head.keep_alive, head.length
        self._is_chunked, self._has_body = head.is_chunked, head.has_body
        return head.data


class HTTPProtocol(asyncio.Protocol):
    """One HTTP connection. uvicorn creates it (`Config(http=HTTPProtocol)`) and calls `shutdown`.

    Args:
        config: The configuration of the server.
        server_state: The open connections and running requests of the server.
        app_state: The state of the application's lifespan.
        _loop: Unused; the connection uses the running loop.
    """

    __slots__ = (
        "_app", "_app_state", "_client", "_config", "_context", "_due", "_exchange", "_expects_continue", "_headers",
        "_in_body", "_in_head", "_is_done", "_is_reading", "_local", "_loop", "_overhead", "_parser", "_pending",
        "_received_body", "_scheme", "_state", "_timer", "_timer_at", "_transport", "_unread_timer", "_url", "drained",
    )  # fmt: skip

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config = config
        self._app: Any = cast("Any", config).loaded_app
        self._app_state = app_state
        self._state = server_state
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        """The context of the server. Data callbacks may run in the context of an earlier request that resumed
        reading."""
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._client: tuple[str, int] | None = None
        self._local: tuple[str, int] | None = None
        self._scheme = "http"
        self._exchange: Exchange | None = None
        self._pending: deque[Exchange] = deque()
        """Pipelined requests: received before the previous response was sent."""
        self.drained: asyncio.Event | None = None
        """Set when the client has read more data; None if no sender waits."""
        self._unread_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = self._due = _NEVER
        self._is_reading = True
        self._is_done = False
        """Whether all further data is ignored."""
        self._in_head = self._in_body = False
        self._overhead = 0
        """Bytes of the head, of chunk sizes or of trailers since the last byte of the body."""
        self._received_body = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start waiting for a request."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
        self._client = _address(transport.get_extra_info("peername"))
        self._local = _address(transport.get_extra_info("sockname"))
        if transport.get_extra_info("sslcontext") is not None:
            self._scheme = "https"
        self._state.connections.add(self)
        self._expect(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that is being served."""
        self._leave()
        self._pending.clear()
        if self._exchange is not None:
            self._exchange.disconnect()
        self.resume_writing()

    def _leave(self) -> None:
        self._state.connections.discard(self)
        self._due = _NEVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def exchange(self) -> Exchange | None:
        """The request that is being served."""
        return self._exchange

    def shutdown(self) -> None:
        """Close the connection once the response that is being sent is complete."""
        if self._exchange is None:
            self._close()
        else:
            self._exchange.keep_alive = False

    def _close(self) -> None:
        """Close the connection when the client has read all output; abort it if it does not."""
        self._is_done = True
        self._transport.close()
        if self._unread_timer is None and self._transport.get_write_buffer_size():
            self._expect_reading()

    def pause_writing(self) -> None:
        """Start the timeout for the client to read."""
        self.drained = asyncio.Event()
        if self._unread_timer is None:
            self._expect_reading()

    def _expect_reading(self) -> None:
        # Abort, because closing would wait for the client to read.
        self._unread_timer = self._loop.call_later(SEND_SECONDS, self._transport.abort)

    def resume_writing(self) -> None:
        """Continue sending: the client has read."""
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        if self._is_done and self._transport.get_write_buffer_size():
            self._expect_reading()
        if self.drained is not None:
            self.drained.set()
            self.drained = None

    def _expect(self, seconds: float) -> None:
        """Set the timeout after which the connection is closed.

        The timer is replaced only if it would fire too late, so that most requests need no timer of their own.
        """
        self._due = due = self._loop.time() + seconds
        if self._timer is None or self._timer_at > due:
            if self._timer is not None:
                self._timer.cancel()
            self._set_timer(due)

    def _set_timer(self, when: float) -> None:
        self._timer_at = when
        self._timer = self._loop.call_at(when, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        if self._due == _NEVER:
            return
        if self._in_head and self._exchange is not None:
            # The next request has to wait for this response anyway.
            self._expect(HEAD_SECONDS)
        elif self._loop.time() >= self._due:
            self._close()
        else:
            self._set_timer(self._due)

    # ------------------------------------------------------------ requests

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, count those outside of a body, and set the timeout for the rest of the request."""
        if self._is_done:
            return
        self._received_body = False
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            if not self._is_done:
                self._reject_rest()
            return
        is_between = not (self._in_head or self._in_body)
        self._overhead = 0 if is_between or self._received_body else self._overhead
        if is_between:
            return
        if self._due == _NEVER:
            self._expect(HEAD_SECONDS if self._in_head else BODY_SECONDS)
        if self._overhead > HEAD_BYTES:
            if self._in_head and self._exchange is None:
                self._write_error(431)
            else:
                self._transport.abort()

    def _reject_rest(self) -> None:
        """Ignore the rest; respond with 400 unless an earlier request is being served."""
        self._is_done = True
        exchange = self._exchange
        if self._in_body and not self._pending:
            if exchange is None or exchange.is_started:
                self._close()
            else:
                self._write_error(400)
            if exchange is not None:
                exchange.disconnect()
            return
        if self._in_body:
            self._pending.pop()
        if exchange is None:
            self._write_error(400)
        else:
            (self._pending[-1] if self._pending else exchange).keep_alive = False

    def _write_error(self, status: int) -> None:
        self._transport.write(STATUS_LINES[status] + NO_BODY)
        self._close()

    def on_message_begin(self) -> None:
        """Start the timeout for the head of a request."""
        self._in_head = True
        self._due = _NEVER
        self._url = b""
        self._headers = []
        self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        """Add a part of the URL."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; ignore trailers."""
        if self._in_head:
            name = name.lower()
            self._headers.append((name, value))
            if name == b"expect" and value.lower() == b"100-continue":
                self._expects_continue = True

    def on_headers_complete(self) -> None:
        """Serve the request, after the earlier ones."""
        parser, self._in_head, self._due = self._parser, False, _NEVER
        if self._overhead > HEAD_BYTES:
            # Other parts may have arrived with the head.
            sizes = (len(name) + len(value) + 4 for name, value in self._headers)
            if len(self._url) + sum(sizes) > HEAD_BYTES:
                if self._exchange is None:
                    self._write_error(431)
                raise ValueError
        if parser.should_upgrade():
            # `_upgrade` handles it.
            return
        version = parser.get_http_version()
        if version not in ("1.1", "1.0") or len(self._pending) >= _MAX_PIPELINED:
            raise ValueError
        url = httptools.parse_url(self._url)
        raw_path: bytes = url.path
        path = raw_path.decode("ascii")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._local,
            "client": self._client,
            "scheme": self._scheme,
            "method": parser.get_method().decode("ascii"),
            "root_path": self._config.root_path,
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": self._headers,
            "state": self._app_state.copy(),
            OWN_SERVER: True,
        }
        keep_alive = version != "1.0" and parser.should_keep_alive()
        exchange = Exchange(
            self,
            self._transport,
            scope,
            keep_alive=keep_alive,
            expects_continue=self._expects_continue and version != "1.0",
        )
        self._in_body = True
        if self._exchange is None:
            self._start(exchange)
        else:
            self._pending.append(exchange)
            if len(self._pending) >= _MAX_AHEAD:
                self.pause_reading()

    def _start(self, exchange: Exchange) -> None:
        self._exchange = exchange
        tasks = self._state.tasks
        task = self._loop.create_task(exchange.run(self._app), context=self._context.copy())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def on_body(self, body: bytes) -> None:
        """Add a part of the body."""
        self._received_body = True
        exchange = self._pending[-1] if self._pending else self._exchange
        if exchange is not None and exchange.add_body(body) > _READ_BUFFER:
            self.pause_reading()

    def on_message_complete(self) -> None:
        """End the request."""
        self._in_body = False
        exchange = self._pending[-1] if self._pending else self._exchange
        if exchange is not None:
            exchange.end_body()
            self._due = _NEVER
        elif not self._transport.is_closing():
            # The response was sent before the request was complete.
            self._expect(self._config.timeout_keep_alive)

    def response_completed(self, *, keep_alive: bool) -> None:
        """Serve the next request, or wait for one."""
        self._state.total_requests += 1
        self._exchange = None
        if not keep_alive:
            self._close()
        elif self._pending:
            self._start(self._pending.popleft())
            if len(self._pending) < _MAX_AHEAD:
                self.resume_reading()
        else:
            self.resume_reading()
            if not (self._in_head or self._in_body):
                self._expect(self._config.timeout_keep_alive)

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

    @property
    def default_headers(self) -> bytes:
        """The headers of every response, such as its date."""
        return b"".join([b"%b: %b\r\n" % header for header in self._state.default_headers])

    # ------------------------------------------------------------ other protocols

    def _upgrade(self, rest: bytes) -> None:
        """Parse an upgrade request and the following bytes again, as a WebSocket or as a plain request."""
        method = self._parser.get_method()
        if self._exchange is not None or method == b"CONNECT":
            self._reject_rest()
            return
        config = self._config
        # The annotation allows any protocol; uvicorn passes these arguments.
        create: Any = config.ws_protocol_class
        is_websocket = create and dict(self._headers).get(b"upgrade", b"").lower() == b"websocket"
        version = self._parser.get_http_version().encode()
        head = [method, b" ", self._url, b" HTTP/", version, b"\r\n"]
        for name, value in self._headers:
            if is_websocket or name != b"upgrade":
                head += (name, b": ", value, b"\r\n")
        data = b"".join([*head, b"\r\n"])
        if create is None or not is_websocket:
            # The parser has skipped its body.
            self._parser, self._overhead = httptools.HttpRequestParser(self), 0
            self.data_received(data + rest)
            return
        self._leave()
        protocol = create(config=config, server_state=self._state, app_state=self._app_state)
        protocol.connection_made(self._transport)
        self._transport.set_protocol(protocol)
        self._context.run(protocol.data_received, data)
        if rest:
            protocol.data_received(rest)


def _address(name: tuple[Any, ...] | str | None) -> tuple[str, int] | None:
    """Return the address and port of a socket; None if it has none."""
    if not isinstance(name, tuple):
        return None
    host, port, *_ = name
    return str(host), int(port)
