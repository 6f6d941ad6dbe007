"""HTTP/1.1 connections for uvicorn, with limits on time and size that uvicorn's own protocols do not have.

Rule 1: a connection is closed if the head of a request does not arrive in time, or if the body takes longer than the
        application waits for it.
Rule 2: a head that exceeds a size limit is rejected (431) while it arrives.
Rule 3: trailers are limited in size like a head, and ignored: they never become headers.
Rule 4: a request with malformed framing is rejected as a whole, and nothing after it is read.
Rule 5: a request does not see context variables of other requests on the same connection.
Rule 6: a request that the client sent before it could know of a shutdown gets its response.

`server.exchange` serves each request and writes its response.
"""

import asyncio
import re
from collections import deque
from contextvars import copy_context
from typing import Any, Final, NoReturn, cast
from urllib.parse import unquote

import httptools
import uvicorn

from operations.front.messages import OWN_SERVER
from operations.front.request import RequestTask
from operations.front.timing import Scope
from operations.server.http11.exchange import NO_BODY, STATUS_LINES, FlowControl, HTTPExchange

HEAD_SECONDS: Final = 15.0
"""Seconds for the head of a request to arrive."""

HEAD_BYTES: Final = 64 * 1024
"""The largest head of a request, in bytes."""

BODY_SECONDS: Final = 60.0
"""Seconds for the body to arrive, also if the application, which has a shorter limit, does not read it."""

LINGER_SECONDS: Final = 0.5
"""Seconds that a connection stays open during a shutdown, for a request or body that the client has already sent."""

DISCARD_SECONDS: Final = 10.0
"""Seconds that the rest of a body is read after the response: many clients read the response only then."""

_READ_BUFFER: Final = 64 * 1024
"""Reading pauses while more bytes of a body than this wait for the application."""

_MAX_PIPELINED: Final = 64
"""The largest number of pipelined requests, which use memory for each received byte."""

_MAX_AHEAD: Final = 8
"""Reading pauses while more pipelined requests than this wait. A disconnect is noticed only while reading."""

_NEVER: Final = float("inf")
_AUTHORITY: Final = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


class HTTPProtocol(asyncio.Protocol):
    """One HTTP connection. uvicorn creates it (`Config(http=HTTPProtocol)`) and calls `shutdown`.

    Args:
        config: The configuration of the server.
        server_state: The open connections and running requests of the server.
        app_state: The state of the application's lifespan.
        _loop: Unused; the connection uses the running loop.
    """

    __slots__ = (
        "_app", "_app_state", "_client", "_codings", "_config", "_context", "_discards_until", "_due",
        "_expects_continue", "_flow", "_headers", "_in_body", "_in_head", "_is_done", "_is_leaving", "_local", "_loop",
        "_overhead", "_parser", "_pending", "_received_body", "_scheme", "_state", "_timer", "_timer_at", "_transport",
        "_url", "exchange",
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
        self._app_state, self._state = app_state, server_state
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        """The context of the server. Data callbacks may run in the context of an earlier request that resumed
        reading."""
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._flow: FlowControl = cast("Any", None)
        """Set with the transport, in `connection_made`."""
        self._client: tuple[str, int] | None = None
        self._local: tuple[str, int] | None = None
        self._scheme = "http"
        self.exchange: HTTPExchange | None = None
        """The request that is being served."""
        self._pending: deque[HTTPExchange] = deque()
        """Pipelined requests: received before the previous response was sent."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = self._due = _NEVER
        self._is_done = False
        """Whether all further data is ignored."""
        self._is_leaving = False
        """Whether the server shuts down: the next response is the last one."""
        self._discards_until = 0.0
        """The time at which the connection is closed although its body, which is ignored, is not complete; 0 if the
        body is not ignored."""
        self._in_head = self._in_body = False
        self._overhead = 0
        """Bytes of the head, of chunk sizes or of trailers since the last byte of the body."""
        self._received_body = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._codings: tuple[bytes, ...] = ()

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start waiting for a request."""
        self._transport = transport
        self._flow = FlowControl(transport)
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
        if self.exchange is not None:
            self.exchange.disconnect()
        self.resume_writing()

    def _leave(self) -> None:
        self._state.connections.discard(self)
        self._due = _NEVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def shutdown(self) -> None:
        """Close the connection after its last response; if it is unused, unless a request arrives at once."""
        self._is_leaving = True
        if self.exchange is not None:
            (self._pending[-1] if self._pending else self.exchange).keep_alive = False
        else:
            self._expect(LINGER_SECONDS)

    def _close(self) -> None:
        self._is_done = True
        self._flow.close()

    def _finish(self) -> None:
        """Close the connection after its last response."""
        if not self._in_body or self._transport.is_closing():
            self._close()
            return
        # Closing now would reset the connection, and a client that still sends would lose the response.
        seconds = LINGER_SECONDS if self._is_leaving else DISCARD_SECONDS
        self._discards_until = self._loop.time() + seconds
        # The rest of the body may belong to a pipelined request, which is not served.
        self._pending.clear()
        if self._transport.can_write_eof():
            # Not possible with TLS, where the client ends the connection.
            self._transport.write_eof()
        self._flow.resume_reading()
        self._expect_rest()

    def _expect_rest(self) -> None:
        """Wait for more of a body that is ignored."""
        # A client of HTTP/1.0 that sends nothing may wait for the end of the connection.
        is_old = self._parser.get_http_version() == "1.0"
        is_waiting = is_old and not self._transport.can_write_eof()
        seconds = LINGER_SECONDS if is_waiting else DISCARD_SECONDS
        self._expect(min(seconds, self._discards_until - self._loop.time()))

    def pause_writing(self) -> None:
        """Pause sending: the client has to read first."""
        self._flow.pause_writing()

    def resume_writing(self) -> None:
        """Continue sending: the client has read."""
        self._flow.resume_writing()

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
        if self._in_head and self.exchange is not None:
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
        if self._discards_until and not self._is_leaving:
            self._expect_rest()
        is_between = not (self._in_head or self._in_body)
        if is_between or (self._in_body and self._received_body):
            self._overhead = 0
        if is_between:
            return
        if self._due == _NEVER:
            self._expect(HEAD_SECONDS if self._in_head else BODY_SECONDS)
        if self._overhead > HEAD_BYTES:
            if self._in_head and self.exchange is None:
                self._write_error(431)
            else:
                self._transport.abort()

    def _reject_rest(self) -> None:
        """Ignore the rest; respond with 400 unless an earlier request is being served."""
        self._is_done = True
        exchange = self.exchange
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

    def _reject_head(self, status: int) -> NoReturn:
        """Respond with an error, unless an earlier request is being served, and stop the parser."""
        if self.exchange is None:
            self._write_error(status)
        raise ValueError

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
        self._codings = ()

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
            elif name == b"transfer-encoding":
                self._codings += (value.strip().lower(),)

    def on_headers_complete(self) -> None:
        """Serve the request, after the earlier ones."""
        parser, self._in_head, self._due = self._parser, False, _NEVER
        version = parser.get_http_version()
        self._enforce_head(version)
        if parser.should_upgrade():
            # `_upgrade` handles it.
            return
        if version not in ("1.1", "1.0") or len(self._pending) >= _MAX_PIPELINED:
            raise ValueError
        exchange = HTTPExchange(
            self._transport,
            self._flow,
            self._state,
            self._scope(version),
            self._response_completed,
            version != "1.0" and parser.should_keep_alive() and not self._is_leaving,
            self._expects_continue and version != "1.0",
        )
        self._in_body = True
        if self.exchange is None:
            self._start(exchange)
        else:
            self._pending.append(exchange)
            if len(self._pending) >= _MAX_AHEAD:
                self._flow.pause_reading()

    def _enforce_head(self, version: str) -> None:
        """Reject a head that is too large, or a body in a coding that the parser does not decode."""
        if self._overhead > HEAD_BYTES:
            # Other parts may have arrived with the head.
            sizes = (len(name) + len(value) + 4 for name, value in self._headers)
            if len(self._url) + sum(sizes) > HEAD_BYTES:
                self._reject_head(431)
        if self._codings and (self._codings != (b"chunked",) or version == "1.0"):
            # The parser accepts every coding before `chunked`. HTTP/1.0 has no codings.
            self._reject_head(400 if version == "1.0" else 501)

    def _scope(self, version: str) -> Scope:
        url = httptools.parse_url(self._url)
        if url.schema:
            self._enforce_host()
        raw_path: bytes = url.path or b"/"
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._local,
            "client": self._client,
            "scheme": self._scheme,
            "method": self._parser.get_method().decode("ascii"),
            "root_path": self._config.root_path,
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": self._headers,
            "state": self._app_state.copy(),
            OWN_SERVER: True,
        }

    def _enforce_host(self) -> None:
        """Reject an absolute URL of another host than the Host header, which is checked (RFC 9112, 3.2.2).

        Raises:
            ValueError: To stop the parser.
        """
        authority = _AUTHORITY.match(self._url)
        hosts = [value.strip().lower() for name, value in self._headers if name == b"host"]
        if authority is None or hosts != [authority[1].lower()]:
            self._reject_head(400)

    def _start(self, exchange: HTTPExchange) -> None:
        self.exchange = exchange
        task = RequestTask(exchange.run(self._app), loop=self._loop, context=self._context.copy())
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def on_body(self, body: bytes) -> None:
        """Add a part of the body."""
        self._received_body = True
        self._overhead -= len(body)
        exchange = self._pending[-1] if self._pending else self.exchange
        if exchange is not None and exchange.add_body(body) > _READ_BUFFER:
            self._flow.pause_reading()

    def on_message_complete(self) -> None:
        """End the request."""
        self._in_body = False
        exchange = self._pending[-1] if self._pending else self.exchange
        if exchange is not None:
            exchange.end_body()
            self._due = _NEVER
        elif self._discards_until:
            self._close()
            # Stop the parser: no request follows.
            raise ValueError
        elif not self._transport.is_closing():
            # The response was sent before the request was complete.
            self._expect(self._config.timeout_keep_alive)

    def _response_completed(self, keep_alive: bool) -> None:
        """Serve the next request, or wait for one."""
        self._state.total_requests += 1
        self.exchange = None
        if not keep_alive:
            self._finish()
        elif self._pending:
            self._start(self._pending.popleft())
            if len(self._pending) < _MAX_AHEAD:
                self._flow.resume_reading()
        else:
            self._flow.resume_reading()
            if not (self._in_head or self._in_body):
                self._expect(self._config.timeout_keep_alive)

    # ------------------------------------------------------------ other protocols

    def _upgrade(self, rest: bytes) -> None:
        """Parse an upgrade request and the following bytes again, as a WebSocket or as a plain request."""
        method = self._parser.get_method()
        if self.exchange is not None or method == b"CONNECT":
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
