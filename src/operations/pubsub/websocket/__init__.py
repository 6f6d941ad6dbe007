"""Event targets on WebSockets, on which both ends may call and serve.

Connect to a WebSocket, accept a WebSocket of any framework, or serve WebSockets with the `websockets` library.

Rule 1: a client reconnects automatically. The server side of a connection ends when the connection breaks.
Rule 2: a peer is rejected in the handshake, so that it does not count as connected.
"""

import asyncio
import inspect
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from http import HTTPStatus
from importlib.util import find_spec
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

from operations.base.errors import CallError, ErrorCode, MissingExtraError, TransportError

if find_spec("websockets") is None:
    raise MissingExtraError("operations.pubsub.websocket", extra="websocket")

from websockets.asyncio.client import connect
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import (
    InvalidProxy,
    InvalidProxyStatus,
    InvalidStatus,
    InvalidURI,
    WebSocketException,
)
from websockets.http11 import Request, Response

from operations.base.json.values import MAX_REQUEST_VALUES
from operations.base.tasks import shielded
from operations.base.text import enforce_lists, without_secrets
from operations.contract.access import Identity
from operations.io.guard import LOOPBACK, HostRules
from operations.io.proxies import PROXY_LOGIN, shown_proxy, usual_proxy
from operations.io.reconnect import ReconnectingTask
from operations.pubsub.config import connect_failure, enforce_address
from operations.pubsub.websocket.target import (
    ANNOUNCED,
    BATCHES,
    MAX_BATCH,
    MAX_BYTES,
    MAX_RECEIVED,
    SETTINGS,
    LibrarySocket,
    Socket,
    WebSocketTarget,
)

__all__ = [
    "AcceptedTarget",
    "Socket",
    "WebSocketTarget",
    "accept_websocket",
    "connect_websocket",
    "serve_websocket",
]

logger = logging.getLogger("operations")

_LIMIT = re.compile(r"\d{1,15}", re.ASCII)


@asynccontextmanager
async def connect_websocket(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    identity: Identity | None = None,
    trusted: bool = False,
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_REQUEST_VALUES,
    interop: bool = False,
    **options: Any,
) -> AsyncGenerator[WebSocketTarget]:
    """Connect to a WebSocket for the duration of an `async with` block; a lost connection is restored.

    Args:
        url: `ws://` or `wss://`.
        headers: Headers of the handshake, for example with a bearer token.
        identity: The identity of the server, for operations that it calls on this client.
        trusted: Use the `identity` inside events.
        max_bytes: The largest message in both directions; the server may announce a lower limit for received messages.
        max_values: How many JSON values a message may hold, both ways.
        interop: Use the original protocol: subscribe to topics by control messages.
        options: Options of `websockets.connect`, for example `ssl`.

    Raises:
        TransportError: If the address is malformed, or the server cannot be reached or rejects the handshake.
    """
    enforce_address(url, ("ws", "wss"))
    offered = {BATCHES: "1"} if max_bytes >= MAX_BATCH else {}

    async def open_socket() -> Any:
        given: dict[str, Any] = {"proxy": True, **SETTINGS, **options}
        proxy = given["proxy"] = usual_proxy(url) if given["proxy"] is True else given["proxy"]
        shown = without_secrets(url)
        try:
            return await connect(
                url,
                additional_headers={**offered, **(headers or {})},
                max_size=max_bytes,
                **given,
            )
        except InvalidURI:
            reason = "the address is not one of a WebSocket: ws://user:password@host/path"
        except InvalidProxy as error:
            reason = f"the proxy of {shown} cannot be used: {error.msg}"
        except ImportError:
            advice = (
                "install python-socks, or add the host to NO_PROXY to connect without the proxy"
            )
            reason = f"the proxy of {shown} is a SOCKS proxy: {advice}"
        except (WebSocketException, OSError, TimeoutError) as error:
            way = "" if proxy is None else f" through {shown_proxy(proxy)}"
            failure = connect_failure(error, "the variable SSL_CERT_FILE", "ssl", "ws://")
            reason = f"{failure}{_hint(error)}"
            raise TransportError(f"{shown} cannot be reached{way}: {reason}") from error
        # Without its cause: the library quotes the whole address, including its password.
        raise TransportError(reason)

    target = _ClientTarget(
        open_socket,
        trusted=trusted,
        identity=identity,
        max_bytes=max_bytes,
        max_values=max_values,
        interop=interop,
    )
    async with aclosing(target):
        await target.start()
        yield target


_HINTS = {
    421: ": add the name in the address to allowed_hosts of the server",
    426: ": the proxy in front of the server must use HTTP/1.1 and pass on the headers Upgrade and Connection",
    **dict.fromkeys(
        (401, 403, 404),
        ": check the credentials and the path (`operations serve` listens at /ws)",
    ),
}


def _hint(error: BaseException) -> str:
    """Return advice if the server or a proxy rejected the handshake."""
    if isinstance(error, InvalidProxyStatus) and error.response.status_code == 407:
        return f": {PROXY_LOGIN}"
    return _HINTS.get(error.response.status_code, "") if isinstance(error, InvalidStatus) else ""


class _ClientTarget(WebSocketTarget):
    """The client side of a connection, which reconnects."""

    def __init__(self, open_socket: Callable[[], Awaitable[Any]], **options: Any) -> None:
        super().__init__(**options)
        self._open_socket = open_socket
        self.reconnects = True
        self._own_limit: int = options["max_bytes"]
        self._was_connected = False
        self._connecting = ReconnectingTask(
            self._connection,
            self._use,
            # The program learns at once that its address or its credential is wrong.
            is_final=lambda _: True,
            on_failure=self._failed,
        )

    async def start(self) -> None:
        """Connect, and stay connected until the target is closed."""
        await self._connecting.open()

    async def end_task(self) -> None:
        """End the task that transports events."""
        await self._connecting.aclose()

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[LibrarySocket]:
        # A lost socket is closed already; `aclose` closes the last one.
        yield await self._connect()

    async def _use(self, link: LibrarySocket) -> None:
        if self._was_connected:
            self.restored()
        self._was_connected = True
        raise TransportError(await self.run(link))

    def _failed(self, error: Exception, was_open: bool) -> None:
        if was_open:
            logger.warning("%s; connecting again", error)
        else:
            logger.debug("still disconnected: %s", error)

    async def _connect(self) -> LibrarySocket:
        connection = await self._open_socket()
        announced = connection.response.headers.get_all(ANNOUNCED)
        limits = [int(each) for each in announced if _LIMIT.fullmatch(each)]
        self.max_bytes = min([self._own_limit, *limits])
        both = connection.request.headers, connection.response.headers
        link = LibrarySocket(connection, all(BATCHES in each for each in both))
        self.connected(link)
        return link

    def _is_wanted(self, body: bytes) -> bool:
        # Only the server filters by topic.
        return True


Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

Identify: TypeAlias = Callable[[Any], Identity | Awaitable[Identity | None] | None]
"""Returns the identity of a peer, given its handshake request."""

Authenticate: TypeAlias = Callable[[str, Headers, Callable[[], Any]], Awaitable[Identity | None]]
"""Calls the last argument to identify a peer; the others are its address and the headers of its handshake."""


@asynccontextmanager
async def accept_websocket(
    socket: Socket,
    *,
    identity: Identity | None = None,
    trusted: bool = False,
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_REQUEST_VALUES,
    interop: bool = False,
    address: str = "",
    check: Callable[[], Any] | None = None,
) -> AsyncGenerator["AcceptedTarget"]:
    """Use a WebSocket that any framework has accepted for the duration of an `async with` block.

    `await target.wait_closed()` inside the block returns when the peer has disconnected.

    Args:
        socket: The accepted socket.
        identity: The authenticated identity of the peer.
        trusted: Use the `identity` inside events.
        max_bytes: The largest message to send; limit received messages in the framework.
        max_values: How many JSON values a message may hold, both ways.
        interop: Use the original protocol: send only topics that the peer has subscribed to.
        address: The address of the peer, for limits on peers without identity.
        check: Returns the current identity for the peer's credential, or an awaitable of it; raises if there is none.
    """
    target = AcceptedTarget(
        address,
        check,
        trusted=trusted,
        identity=identity,
        max_bytes=max_bytes,
        max_values=max_values,
        interop=interop,
    )
    target.start(socket)
    async with aclosing(target):
        yield target


class AcceptedTarget(WebSocketTarget):
    """The server side of one connection.

    Attributes:
        address: The address of the peer.
        check: Returns the current identity for the peer's credential.
    """

    def __init__(self, address: str, check: Callable[[], Any] | None, **options: Any) -> None:
        super().__init__(**options)
        self.address = address
        self.check = check

    def start(self, socket: Socket) -> None:
        """Start to transport events in the background."""
        self.connected(socket)
        self.task = asyncio.Task(self.run(socket))

    async def wait_closed(self) -> None:
        """Return when the peer has disconnected."""
        if self.task is not None:
            await asyncio.wait({self.task})


class _Handshakes:
    """Checks handshakes: Host and Origin, the path, and the identity of the peer."""

    def __init__(
        self,
        rules: HostRules,
        path: str,
        identify: Identify | None,
        authenticate: Authenticate | None,
    ) -> None:
        self._rules = rules
        self._path = path
        self._identify = identify
        self._authenticate = authenticate or _identify
        self._known: WeakKeyDictionary[ServerConnection, Identity] = WeakKeyDictionary()

    def identity_of(self, connection: ServerConnection) -> Identity | None:
        """Return the identity of a peer, once."""
        return self._known.pop(connection, None)

    async def check(self, connection: ServerConnection, request: Request) -> Response | None:
        """Reject in the handshake: a client that is rejected later counts as connected, and reconnects at once."""
        headers = _raw_headers(request)
        rejected, _ = self._rules.check(headers)
        if rejected is not None:
            return connection.respond(HTTPStatus(rejected.status), rejected.message + "\n")
        if request.path.partition("?")[0] != self._path:
            return connection.respond(HTTPStatus.NOT_FOUND, "There is nothing at this path\n")
        if self._identify is None:
            return None
        check = partial(self._identify, request)
        try:
            identity = await self._authenticate(_address(connection), headers, check)
        except CallError as error:
            is_too_many = error.code == ErrorCode.RESOURCE_EXHAUSTED
            status = HTTPStatus.TOO_MANY_REQUESTS if is_too_many else HTTPStatus.UNAUTHORIZED
            return connection.respond(status, f"{error}\n")
        except Exception as error:  # noqa: BLE001 - any exception rejects
            # Omit its text, which may contain the credential.
            logger.warning("a WebSocket was rejected: identify raised %s", type(error).__name__)
            return connection.respond(HTTPStatus.UNAUTHORIZED, "The credential is not valid\n")
        if identity is not None:
            self._known[connection] = identity
        return None


@asynccontextmanager
async def serve_websocket(
    on_connection: Callable[[AcceptedTarget], Awaitable[None]],
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    path: str = "/",
    identify: Identify | None = None,
    authenticate: Authenticate | None = None,
    allowed_hosts: Collection[str] | None = None,
    allowed_origins: Collection[str] = (),
    max_bytes: int = MAX_BYTES,
    max_received: int = MAX_RECEIVED,
    max_values: int = MAX_REQUEST_VALUES,
    interop: bool = False,
    **options: Any,
) -> AsyncGenerator[Server]:
    """Accept WebSockets with the `websockets` library for the duration of an `async with` block.

    A handshake is rejected with 421 for an unknown Host, with 403 for a web page of another site, and with 404 at
    another path.

    Args:
        on_connection: Runs for the duration of a connection, for example `hub.attach`.
        host: The address to listen on.
        port: The port to listen on; 0 selects a free port.
        path: The path for clients, for example `/ws`.
        identify: Returns the identity of a peer, from its handshake; an exception rejects the connection.
        authenticate: Calls `identify`, for example with throttling of peers that guess credentials.
        allowed_hosts: Accepted host names; `*` for any. Default: the names of this machine, and `host`.
        allowed_origins: `scheme://host[:port]` of pages of other sites that may connect.
        max_bytes: The largest message to send.
        max_received: The largest message to accept, at most `max_bytes`; announced to clients of this library.
        max_values: How many JSON values a message may hold, both ways.
        interop: Use the original protocol.
        options: Options of `websockets.serve` except `process_request` and `process_response`, for example `ssl`.
    """
    enforce_lists(allowed_hosts=allowed_hosts, allowed_origins=allowed_origins)
    rules = HostRules(
        (*LOOPBACK, host) if allowed_hosts is None else allowed_hosts, allowed_origins
    )
    handshakes = _Handshakes(rules, path, identify, authenticate)
    max_received = min(max_received, max_bytes)
    accepts_batches = not interop and max_received >= MAX_BATCH

    def announce(connection: ServerConnection, request: Request, response: Response) -> None:
        response.headers[ANNOUNCED] = str(max_received)
        if accepts_batches and BATCHES in request.headers:
            response.headers[BATCHES] = "1"

    async def handle(connection: ServerConnection) -> None:
        request = cast("Request", connection.request)
        batches = accepts_batches and BATCHES in request.headers
        async with accept_websocket(
            LibrarySocket(connection, batches),
            identity=handshakes.identity_of(connection),
            max_bytes=max_bytes,
            max_values=max_values,
            interop=interop,
            address=_address(connection),
            check=None if identify is None else partial(identify, request),
        ) as target:
            await on_connection(target)

    server = await serve(
        handle,
        host,
        port,
        max_size=max_received,
        process_request=handshakes.check,
        process_response=announce,
        **{**SETTINGS, **options},
    )
    try:
        yield server
    finally:
        await _close_server(server)


@shielded
async def _close_server(server: Server) -> None:
    server.close()
    await server.wait_closed()


def _address(connection: ServerConnection) -> str:
    """Return the address of a peer; empty for a UNIX socket."""
    peer: Any = connection.remote_address
    return str(peer[0]) if peer and not isinstance(peer, str) else ""


def _raw_headers(request: Request) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower().encode(), value.encode("latin-1", "replace"))
        for name, value in request.headers.raw_items()
    ]


async def _identify(address: str, headers: Headers, check: Callable[[], Any]) -> Any:
    """Return the identity of a peer, without throttling."""
    identity = check()
    return await identity if inspect.isawaitable(identity) else identity
