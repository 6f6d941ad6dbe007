"""Run an application under uvicorn.

Rule 1: the server listens on 127.0.0.1 by default. To listen on a network without authentication, you must allow it
        explicitly.
Rule 2: a WebSocket message counts as sent when its client has read nearly all of it. A connection is aborted if its
        client does not read for some time, so that unread messages are freed.
Rule 3: a malformed handshake ends the connection, and so does data that arrives before the handshake was answered.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from threading import Lock
from typing import Any, cast

import uvicorn
from anyio import move_on_after

from operations.base.logs import LogThrottle
from operations.base.types import options_of
from operations.front.config import ASGIApp, ListenConfig
from operations.front.front import OpenStreams
from operations.front.limits import Limits
from operations.front.pipeline import RequestPipeline
from operations.io.guard import notice_lost_hosts
from operations.server.http11.exchange import (
    NO_BODY,
    SEND_SECONDS,
    STATUS_LINES,
    WRITE_BUFFER,
    HTTPExchange,
    UnreadTimer,
)
from operations.server.http11.protocol import HTTPProtocol

try:
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
except ModuleNotFoundError:
    # Without the `websocket` extra, WebSockets are not served.
    WebSocketsSansIOProtocol = None  # type: ignore[assignment, misc]

logger = logging.getLogger("operations.server")
_uvicorn_logger = logging.getLogger("uvicorn.error")
_asyncio_logger = logging.getLogger("asyncio")
_accept_failures = LogThrottle()

GRACE = 10
"""Seconds that running calls have to finish when the server stops."""

_LAST_EVENTS = 1
"""Seconds that the remaining streams have to send their last event after the grace period."""

_POLL = 0.05
_BACKLOG = 2048


if WebSocketsSansIOProtocol is None:
    websocket_protocol: Any = "none"
else:

    class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
        """One WebSocket connection with bounded output."""

        _unread: UnreadTimer

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Limit the unsent output."""
            transport.set_write_buffer_limits(high=WRITE_BUFFER)
            self._unread = UnreadTimer(transport)
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            """Process a handshake or messages."""
            if self.handshake_initiated and not self.handshake_complete:
                # Otherwise responses to messages would be sent before the response to the handshake.
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
            if message["type"] == "websocket.send" and self.transport.is_closing():
                # asyncio would log every message until it reports the lost connection.
                return
            await super().send(message)
            await self.writable.wait()

        def pause_writing(self) -> None:
            """Start the timeout for the client to read."""
            super().pause_writing()
            self._unread.start()

        def resume_writing(self) -> None:
            """Stop the timeout: the client has read."""
            self._unread.stop()
            super().resume_writing()

    websocket_protocol = BoundedWebSocketProtocol


class InsecureBindError(ValueError):
    """Raised for a server that would listen on a network without authentication."""


class _GracefulServer(uvicorn.Server):
    """A uvicorn server that finishes running calls when it shuts down.

    Meanwhile `/readyz` returns 503, and the server still accepts HTTP requests, because a load balancer may not have
    noticed yet.
    """

    def __init__(self, config: uvicorn.Config, app: ASGIApp) -> None:
        super().__init__(config)
        pipeline = _pipeline_of(app)
        self._streams = OpenStreams() if pipeline is None else pipeline.front.open_streams

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with _filtered_logs():
            await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._streams.close(GRACE)
        loop = asyncio.get_running_loop()
        ends, running = loop.time() + GRACE, self._exchanges()
        await self._wait_while(
            lambda: self._streams.is_open or not running.isdisjoint(self._exchanges()), GRACE
        )
        self._streams.close()
        # Let the streams send their last events: uvicorn closes WebSockets at once.
        await self._wait_while(lambda: self._streams.is_open, _LAST_EVENTS)
        self.config.timeout_graceful_shutdown = max(1, round(ends - loop.time()))
        await super().shutdown(sockets)

    async def _wait_while(self, is_busy: Callable[[], bool], seconds: float) -> None:
        with move_on_after(seconds):
            # A second signal ends the server at once.
            while is_busy() and not self.force_exit:  # noqa: ASYNC110
                await asyncio.sleep(_POLL)

    def _exchanges(self) -> set[HTTPExchange]:
        """Return the requests that are being served."""
        connections = cast("set[object]", self.server_state.connections)
        exchanges = (each.exchange for each in connections if isinstance(each, HTTPProtocol))
        return {each for each in exchanges if each is not None}


class _EmbeddedServer(_GracefulServer):
    """A server that runs on an existing event loop and leaves signals to the application."""

    def __init__(self, config: uvicorn.Config, app: ASGIApp) -> None:
        super().__init__(config, app)
        self.is_ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_ready.set()


@options_of(ListenConfig)
def build_server(config: ListenConfig, app: ASGIApp) -> uvicorn.Server:
    """Return a uvicorn server for an application. Its `run` also handles SIGINT and SIGTERM: running calls finish.

    The options are the fields of `ListenConfig`.

    Raises:
        InsecureBindError: If other machines can reach the address, there is no authentication, and `public` is not set.
    """
    return _GracefulServer(_config(app, config), app)


def _pipeline_of(app: ASGIApp) -> RequestPipeline | None:
    """Return the pipeline of an application of `create_app`; None for other ASGI applications."""
    return getattr(getattr(app, "state", None), "pipeline", None)


def _config(app: ASGIApp, config: ListenConfig) -> uvicorn.Config:
    host, proxies = config.host, ",".join(config.trusted_proxies)
    pipeline = _pipeline_of(app)
    limits = Limits() if pipeline is None else pipeline.front.limits
    heartbeat = 15.0 if pipeline is None else pipeline.front.heartbeat
    if not is_loopback(host) and (pipeline is None or pipeline.resolve is None):
        if not config.public:
            raise InsecureBindError(
                f"{host} can be reached by others, but the app has no identity resolver: "
                "pass identity= to create_app, or public=True"
            )
        logger.warning("listening on %s without authentication", host)
    return uvicorn.Config(
        app,
        host=host,
        port=config.port,
        http=HTTPProtocol,
        ws=websocket_protocol,
        # Compression is off, because a small compressed message can become very large.
        ws_per_message_deflate=False,
        ws_max_size=limits.body_bytes,
        ws_ping_interval=heartbeat,
        log_config=None,
        server_header=False,
        ssl_certfile=config.certificate,
        ssl_keyfile=config.certificate_key,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=proxies or None,
        timeout_keep_alive=config.keep_alive,
        timeout_graceful_shutdown=GRACE,
        backlog=_BACKLOG,
    )


_filtering = Lock()
_serving = 0
"""The number of running servers of this process."""


@contextmanager
def _filtered_logs() -> Generator[None]:
    """Filter the logs of uvicorn and asyncio while a server runs; afterwards they belong to the application alone."""
    global _serving  # noqa: PLW0603
    with _filtering:
        _serving += 1
        # The same filter is not added twice.
        _uvicorn_logger.addFilter(_is_notable)
        _asyncio_logger.addFilter(_summarize_accept_failure)
    try:
        yield
    finally:
        with _filtering:
            _serving -= 1
            if not _serving:
                _uvicorn_logger.removeFilter(_is_notable)
                _asyncio_logger.removeFilter(_summarize_accept_failure)


def _is_notable(record: logging.LogRecord) -> bool:
    """Filter out the error that uvicorn logs for every rejected handshake, except at debug level."""
    is_handshake = record.msg == "ASGI callable returned without completing handshake."
    return not is_handshake or _uvicorn_logger.isEnabledFor(logging.DEBUG)


def _summarize_accept_failure(record: logging.LogRecord) -> bool:
    """Replace the error that asyncio logs for every connection it cannot accept by a warning, once a minute."""
    is_accept = record.levelno == logging.ERROR and str(record.msg).startswith("socket.accept()")
    if is_accept and record.exc_info is not None:
        record.msg = (
            f"connections wait, because they cannot be accepted: {record.exc_info[1]}. "
            "Raise the limit of open files (ulimit -n), or lower limits.streams"
        )
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.exc_info = record.exc_text = None
        return _accept_failures.level() == logging.WARNING
    return True


@options_of(ListenConfig)
def running(config: ListenConfig, app: ASGIApp) -> AbstractAsyncContextManager[str]:
    """Serve on this event loop for the duration of an `async with` block; yield the address.

    The options are the fields of `ListenConfig`.

    Raises:
        InsecureBindError: As `build_server`.
        OSError: If the port is taken.
    """
    return running_on(app, config)


@asynccontextmanager
async def running_on(
    app: ASGIApp, config: ListenConfig, listener: socket.socket | None = None
) -> AsyncGenerator[str]:
    """As `running`, also on an existing listening socket, which several processes may share."""
    # Build the server first, so that errors are raised before the port is bound.
    server = _EmbeddedServer(_config(app, config), app)
    host = config.host
    with listener or listen(config) as listening:
        task = asyncio.Task(server.serve([listening]))
        ready = asyncio.Task(server.is_ready.wait())
        try:
            await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            name = f"[{host}]" if ":" in host else host
            scheme = "http" if config.certificate is None else "https"
            yield f"{scheme}://{name}:{listening.getsockname()[1]}"
        finally:
            ready.cancel()
            server.should_exit = True
            await task


@contextmanager
def listen(config: ListenConfig) -> Generator[socket.socket]:
    """Yield a listening socket, and close it.

    Raises:
        OSError: If the port is taken.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol number.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        notice_lost_hosts(listener)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Keepalive does not end connections on which unacknowledged data is waiting.
            milliseconds = int(SEND_SECONDS * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.bind((config.host, config.port))
        listener.listen(_BACKLOG)
        yield listener


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
