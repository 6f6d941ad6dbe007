"""The serving end of a WebSocket."""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any
from weakref import WeakKeyDictionary

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

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
    interop: bool = False,
) -> AsyncGenerator["AcceptedTarget"]:
    """The serving end of a WebSocket that any framework has accepted, for the length of an `async with` block.

    `await target.wait_closed()` inside the block returns when the peer has gone.

    Args:
        socket: The accepted socket.
        identity: Who signed in on it.
        trusted: Believe the `identity` inside events.
        max_bytes: The largest message to send; limit what is received where the socket is accepted.
        interop: Speak the original protocol: send only the topics the peer subscribed to.
    """
    target = AcceptedTarget(
        socket, trusted=trusted, identity=identity, max_bytes=max_bytes, interop=interop
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
    identify: Callable[[Any], Identity | Awaitable[Identity | None] | None] | None = None,
    max_bytes: int = MAX_BYTES,
    interop: bool = False,
    **options: Any,
) -> AsyncGenerator[Server]:
    """Accept WebSockets with the `websockets` library for the length of an `async with` block.

    Args:
        on_connection: Runs for as long as a connection lives, for example `hub.attach`.
        host: To listen on.
        port: To listen on; 0 picks a free one.
        identify: Who signed in, from the handshake's request; an exception refuses the connection.
        max_bytes: The largest message, both ways.
        interop: Speak the original protocol.
        options: For `websockets.serve`, for example `ssl` or `origins`.
    """
    # By connection, from its handshake until it is served.
    identities: WeakKeyDictionary[ServerConnection, Identity] = WeakKeyDictionary()
    process_request = options.pop("process_request", None)

    async def greet(connection: ServerConnection, request: Request) -> Response | None:
        """Refuse in the handshake: whoever is refused later believes to be connected, and comes back at once."""
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


async def _settled(value: Any) -> Any:
    """What a plain or a coroutine function gave."""
    return await value if inspect.isawaitable(value) else value
