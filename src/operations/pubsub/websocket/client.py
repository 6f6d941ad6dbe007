"""The calling end of a WebSocket, which connects again."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException

from operations._backoff import Backoff
from operations._json import MAX_REQUEST_VALUES
from operations._text import without_secrets
from operations.access import Identity
from operations.errors import TransportError
from operations.pubsub.config import enforce_address
from operations.pubsub.websocket.sockets import ANNOUNCED, MAX_BYTES, SETTINGS, LibrarySocket
from operations.pubsub.websocket.target import WebSocketTarget

logger = logging.getLogger("operations")

_REFUSALS = frozenset({401, 403, 404})

_STABLE = 2.0
"""Seconds after which a connection stands. Whoever is let in and thrown out at once does not come back at once."""


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
    """Connect to a WebSocket for the length of an `async with` block; a lost connection is restored.

    Args:
        url: `ws://` or `wss://`.
        headers: To send with the handshake, for example a bearer token.
        identity: Who the server is, for operations that it calls here.
        trusted: Believe the `identity` inside events.
        max_bytes: The largest message, both ways; the server may announce a lower limit for those it receives.
        max_values: How many JSON values a message may hold, both ways.
        interop: Speak the original protocol: subscribe to topics by control messages.
        options: For `websockets.connect`, for example `ssl`.

    Raises:
        TransportError: If the address cannot be read, the server cannot be reached now, or refuses the handshake.
    """
    enforce_address(url, ("ws", "wss"))

    async def dial() -> Any:
        try:
            return await connect(
                url,
                additional_headers=headers,
                max_size=max_bytes,
                **{**SETTINGS, **options},
            )
        except (WebSocketException, OSError, TimeoutError) as error:
            # What the library says of an address quotes all of it, and must not hang on to what we say.
            if not isinstance(error, InvalidURI):
                shown = without_secrets(url)
                raise TransportError(f"{shown} cannot be reached: {error}{_hint(error)}") from error
        raise TransportError("the address is not one of a WebSocket: ws://user:password@host/path")

    target = _DialedTarget(
        dial,
        trusted=trusted,
        identity=identity,
        max_bytes=max_bytes,
        max_values=max_values,
        interop=interop,
    )
    await target.start()
    try:
        yield target
    finally:
        await target.aclose()


def _hint(error: BaseException) -> str:
    """Return what to check if the server rejected the handshake."""
    if not isinstance(error, InvalidStatus):
        return ""
    status = error.response.status_code
    if status == 421:
        return ": add the name in the address to allowed_hosts of the server"
    if status in _REFUSALS:
        return ": look at the path, which is /ws where `operations serve` listens, and at the login"
    return ""


class _DialedTarget(WebSocketTarget):
    """The calling end, which connects again."""

    def __init__(self, dial: Callable[[], Awaitable[Any]], **options: Any) -> None:
        super().__init__(**options)
        self._dial = dial
        self._own_limit: int = options["max_bytes"]
        self._link: LibrarySocket | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._socket = self._link = await self._connect()
        self._task = asyncio.get_running_loop().create_task(self._stay(self._link))

    async def _stay(self, link: LibrarySocket) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        while True:
            since = loop.time()
            reason = await self.run(link)
            if loop.time() - since > _STABLE:
                backoff.reset()
            logger.warning("%s; connecting again", reason)
            while True:
                await asyncio.sleep(backoff.pause())
                try:
                    link = await self._connect()
                except TransportError as error:
                    logger.debug("not yet: %s", error)
                else:
                    break
            self._socket = self._link = link
            self.restored()

    async def _connect(self) -> LibrarySocket:
        connection = await self._dial()
        announced = connection.response.headers.get(ANNOUNCED, "")
        is_number = announced.isascii() and announced.isdecimal()
        self.max_bytes = min(self._own_limit, int(announced)) if is_number else self._own_limit
        return LibrarySocket(connection)

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._link is not None:
            await self._link.close()

    def _is_wanted(self, body: bytes) -> bool:
        # The other side decides what it listens to; a client sends what it has to say.
        return True
