"""The serving end of a WebSocket."""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any
from weakref import WeakKeyDictionary

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from operations._host_rules import LOOPBACK, HostRules
from operations._json import MAX_REQUEST_VALUES
from operations._text import enforce_lists
from operations.access import Identity
from operations.pubsub.websocket.sockets import MAX_BYTES, SETTINGS, LibrarySocket, Socket
from operations.pubsub.websocket.target import WebSocketTarget

logger = logging.getLogger("operations")


@asynccontextmanager
async def accept_websocket(
    socket: Socket,
    *,
    identity: Identity | None = None,
    trusted: bool = False,
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_REQUEST_VALUES,
    interop: bool = False,
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
    """
    target = AcceptedTarget(
        socket,
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
    """The serving end of one connection."""

    def __init__(self, socket: Socket, **options: Any) -> None:
        super().__init__(**options)
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
    identify: Callable[[Any], Identity | Awaitable[Identity | None] | None] | None = None,
    allowed_hosts: Collection[str] | None = None,
    allowed_origins: Collection[str] = (),
    max_bytes: int = MAX_BYTES,
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
        identify: Return who signed in, from the handshake's request; an exception rejects the connection.
        allowed_hosts: Names this server answers to; `*` for any. Default: the names of this machine, and `host`.
        allowed_origins: `scheme://host[:port]` of web pages elsewhere that may connect.
        max_bytes: The largest message, both ways.
        max_values: How many JSON values a message may hold, both ways.
        interop: Speak the original protocol.
        options: For `websockets.serve`, for example `ssl`.
    """
    enforce_lists(allowed_hosts=allowed_hosts, allowed_origins=allowed_origins)
    rules = HostRules(
        (*LOOPBACK, host) if allowed_hosts is None else allowed_hosts, allowed_origins
    )
    # By connection, from its handshake until it is served.
    identities: WeakKeyDictionary[ServerConnection, Identity] = WeakKeyDictionary()
    process_request = options.pop("process_request", None)

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
        try:
            identity: Identity | None = await _settled(identify(request))
        except Exception as error:  # noqa: BLE001 - whatever it is, it refuses
            # Not its text, which may hold what was presented.
            logger.warning("a WebSocket was refused: identify raised %s", type(error).__name__)
            return connection.respond(HTTPStatus.FORBIDDEN, "refused\n")
        if identity is not None:
            identities[connection] = identity
        return None

    async def handle(connection: ServerConnection) -> None:
        async with accept_websocket(
            LibrarySocket(connection),
            identity=identities.pop(connection, None),
            max_bytes=max_bytes,
            max_values=max_values,
            interop=interop,
        ) as target:
            await on_connection(target)

    async with serve(
        handle,
        host,
        port,
        max_size=max_bytes,
        process_request=greet,
        **{**SETTINGS, **options},
    ) as server:
        yield server


def _raw_headers(request: Request) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower().encode(), value.encode("latin-1", "replace"))
        for name, value in request.headers.raw_items()
    ]


async def _settled(value: Any) -> Any:
    """What a plain or a coroutine function gave."""
    return await value if inspect.isawaitable(value) else value
