"""The serving end of a WebSocket."""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from operations._host_rules import LOOPBACK, HostRules
from operations._json import MAX_REQUEST_VALUES
from operations._text import enforce_lists
from operations.access import Identity
from operations.errors import CallError, ErrorCode
from operations.pubsub.websocket.sockets import (
    ANNOUNCED,
    MAX_BYTES,
    MAX_RECEIVED,
    SETTINGS,
    LibrarySocket,
    Socket,
)
from operations.pubsub.websocket.target import WebSocketTarget

logger = logging.getLogger("operations")

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

Identify: TypeAlias = Callable[[Any], Identity | Awaitable[Identity | None] | None]
"""Returns who signed in, from the request of a handshake."""

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
    """The serving end of a WebSocket that any framework has accepted, for the length of an `async with` block.

    `await target.wait_closed()` inside the block returns when the peer has gone.

    Args:
        socket: The accepted socket.
        identity: Who signed in on it.
        trusted: Believe the `identity` inside events.
        max_bytes: The largest message to send; limit what is received where the socket is accepted.
        max_values: How many JSON values a message may hold, both ways.
        interop: Speak the original protocol: send only the topics the peer subscribed to.
        address: The address of the peer, by which limits count a peer without identity.
        check: Returns the identity behind the peer's credential now, or an awaitable of it; raises if there is none.
    """
    target = AcceptedTarget(
        socket,
        address,
        check,
        trusted=trusted,
        identity=identity,
        max_bytes=max_bytes,
        max_values=max_values,
        interop=interop,
    )
    target.start()
    try:
        yield target
    finally:
        await target.aclose()


class AcceptedTarget(WebSocketTarget):
    """The serving end of one connection.

    Attributes:
        address: The address of the peer.
        check: Returns the identity behind the peer's credential now.
    """

    def __init__(
        self, socket: Socket, address: str, check: Callable[[], Any] | None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.address = address
        self.check = check
        self._accepted = socket
        self._task: asyncio.Task[str] | None = None

    def start(self) -> None:
        """Carry events in the background."""
        self._socket = self._accepted
        self._task = asyncio.get_running_loop().create_task(self.run(self._accepted))

    async def wait_closed(self) -> None:
        """Return when the peer has gone."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def aclose(self) -> None:
        """Close the socket; closing twice is harmless."""
        with suppress(EOFError, OSError):
            await self._accepted.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


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
    """Accept WebSockets with the `websockets` library for the length of an `async with` block.

    A handshake for an unknown Host is rejected with 421, one of a web page elsewhere with 403, and one at another path
    with 404.

    Args:
        on_connection: Runs for as long as a connection lives, for example `hub.attach`.
        host: The address to listen on.
        port: The port to listen on; 0 picks a free one.
        path: The path at which clients connect, for example `/ws`.
        identify: Returns who signed in, from the handshake's request; an exception rejects the connection.
        authenticate: Calls `identify`, for example to slow down peers that guess credentials.
        allowed_hosts: Names this server answers to; `*` for any. Default: the names of this machine, and `host`.
        allowed_origins: `scheme://host[:port]` of web pages elsewhere that may connect.
        max_bytes: The largest message to send.
        max_received: The largest message to accept, at most `max_bytes`; clients of this library are told.
        max_values: How many JSON values a message may hold, both ways.
        interop: Speak the original protocol.
        options: For `websockets.serve`, for example `ssl`.
    """
    enforce_lists(allowed_hosts=allowed_hosts, allowed_origins=allowed_origins)
    rules = HostRules(
        (*LOOPBACK, host) if allowed_hosts is None else allowed_hosts, allowed_origins
    )
    # By connection, from its handshake until it is served.
    known: WeakKeyDictionary[ServerConnection, tuple[Identity, Request]] = WeakKeyDictionary()
    process_request = options.pop("process_request", None)
    process_response = options.pop("process_response", None)
    max_received = min(max_received, max_bytes)

    async def greet(connection: ServerConnection, request: Request) -> Response | None:
        """Reject in the handshake: a client that is rejected later believes it is connected, and reconnects at once."""
        rejected, _ = rules.check(_raw_headers(request))
        if rejected is not None:
            return connection.respond(HTTPStatus(rejected.status), rejected.message + "\n")
        if request.path.partition("?")[0] != path:
            return connection.respond(HTTPStatus.NOT_FOUND, "There is nothing here\n")
        if process_request is not None:
            response: Response | None = await _settled(process_request(connection, request))
            if response is not None:
                return response
        if identify is None:
            return None
        check = partial(identify, request)
        try:
            identity: Identity | None = (
                await _settled(check())
                if authenticate is None
                else await authenticate(_address(connection), _raw_headers(request), check)
            )
        except CallError as error:
            is_too_many = error.code == ErrorCode.RESOURCE_EXHAUSTED
            status = HTTPStatus.TOO_MANY_REQUESTS if is_too_many else HTTPStatus.UNAUTHORIZED
            return connection.respond(status, f"{error}\n")
        except Exception as error:  # noqa: BLE001 - any exception rejects
            # Not its text, which may hold what was presented.
            logger.warning("a WebSocket was rejected: identify raised %s", type(error).__name__)
            return connection.respond(HTTPStatus.UNAUTHORIZED, "The credential is not valid\n")
        if identity is not None:
            known[connection] = identity, request
        return None

    async def announce(
        connection: ServerConnection, request: Request, response: Response
    ) -> Response | None:
        response.headers[ANNOUNCED] = str(max_received)
        if process_response is None:
            return None
        changed: Response | None = await _settled(process_response(connection, request, response))
        return changed

    async def handle(connection: ServerConnection) -> None:
        identity, request = known.pop(connection, (None, None))
        async with accept_websocket(
            LibrarySocket(connection),
            identity=identity,
            max_bytes=max_bytes,
            max_values=max_values,
            interop=interop,
            address=_address(connection),
            check=None if identify is None else partial(identify, request),
        ) as target:
            await on_connection(target)

    async with serve(
        handle,
        host,
        port,
        max_size=max_received,
        process_request=greet,
        process_response=announce,
        **{**SETTINGS, **options},
    ) as server:
        yield server


def _address(connection: ServerConnection) -> str:
    """Return the address of a peer; empty for a UNIX socket."""
    peer: Any = connection.remote_address
    return str(peer[0]) if peer and not isinstance(peer, str) else ""


def _raw_headers(request: Request) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower().encode(), value.encode("latin-1", "replace"))
        for name, value in request.headers.raw_items()
    ]


async def _settled(value: Any) -> Any:
    """What a plain or a coroutine function gave."""
    return await value if inspect.isawaitable(value) else value
