"""Events over one WebSocket: both ends may call, and both may serve.

Every message is a text frame with the JSON of one event. There is nobody but the peer, so addresses do not matter:
requests go to whoever takes at the other end, everything else to whoever listens there.

Rule 1: the connection is the peer. When it breaks, all that was asked over it is lost, and said to be.
Rule 2: a client connects again by itself; a server's end of a connection is over when it breaks.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import msgspec

from operations.access import Identity
from operations.errors import MissingExtraError, NotSentError, TooLargeError, TransportError
from operations.pubsub.backoff import reconnect_delay
from operations.pubsub.base import PUT_TYPE, Receiver, Registration

try:
    from websockets.asyncio.client import connect
    from websockets.asyncio.connection import Connection
    from websockets.asyncio.server import Server, ServerConnection, serve
    from websockets.exceptions import ConnectionClosed, WebSocketException
    from websockets.protocol import State
except ModuleNotFoundError as error:
    raise MissingExtraError("operations.pubsub.websocket", extra="websocket") from error

logger = logging.getLogger("operations")

MAX_BYTES = 16 * 1024 * 1024

PING_INTERVAL = 8.0
PING_TIMEOUT = 8.0
"""Together they bound how long a peer that vanished goes unnoticed."""

_MAX_EARLY = 100
"""Messages that are kept for the first one to listen."""

_PEER = "peer"
_CALL_START = b'{"type":"call.'
_REQUEST_START = b'{"type":"' + PUT_TYPE.encode() + b'"'
_CALLER_TOPICS = ("call.responded:", "call.completed:", "call.error:", "call.aborted:")
_WORKER_TOPICS = ("call.requested:", "call.aborted:")


class Socket(Protocol):
    """An accepted WebSocket of any framework."""

    async def send(self, text: bytes) -> None:
        """Send a text frame of UTF-8.

        Raises:
            EOFError: If the socket is closed.
        """
        ...

    async def receive(self) -> bytes:
        """The next text frame.

        Raises:
            EOFError: If the socket is closed.
        """
        ...

    async def close(self) -> None:
        """Close the socket."""
        ...


class _Frame(msgspec.Struct):
    """As much of an event as a socket needs to know."""

    type: Any = None
    payload: Any = None


_frames = msgspec.json.Decoder(_Frame)


class WebSocketTarget:
    """One end of a WebSocket.

    Attributes:
        malformed: Frames that were no events.
    """

    def __init__(
        self, *, trusted: bool, identity: Identity | None, max_bytes: int, interop: bool
    ) -> None:
        self.trusted = trusted
        self.identity = identity
        self.max_bytes = max_bytes
        self.direct = True
        self.local = None
        self.malformed = 0
        self._interop = interop
        self._topics: set[str] = set()
        self._topics_changed = asyncio.Event()
        self._socket: Socket | None = None
        self._connected = asyncio.Event()
        self._attached = asyncio.Event()
        self._early: list[bytes] = []
        self._listeners: list[Receiver] = []
        self._takers: list[Receiver] = []

    @property
    def is_connected(self) -> bool:
        """Whether the peer is there now."""
        return self._socket is not None

    def mailbox(self) -> str:
        """The peer."""
        return _PEER

    def topic(self, name: str) -> str:
        """The peer."""
        return _PEER

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> Registration:
        """Get everything but requests that the peer sends."""
        registration = Registration(self._listeners, receiver)
        self._attach()
        await self._announce(_CALLER_TOPICS)
        return registration

    async def take(
        self, queue: str, receiver: Receiver, capacity: Callable[[], int]
    ) -> Registration:
        """Get the requests that the peer sends, whatever the queue: a peer is a group of one."""
        registration = Registration(self._takers, receiver)
        self._attach()
        await self._announce(_WORKER_TOPICS)
        return registration

    async def send(self, address: str, body: bytes) -> None:
        """Send to the peer."""
        if len(body) > self.max_bytes:
            raise TooLargeError(f"{len(body)} bytes are more than {self.max_bytes}")
        socket = self._socket
        if socket is None:
            raise NotSentError("the WebSocket is not connected")
        if self._interop and not self._is_wanted(body):
            return
        try:
            await socket.send(body)
        except EOFError as error:
            raise TransportError(f"the WebSocket was closed: {error}") from error

    async def put(self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float) -> None:
        """Send a request to the peer."""
        if self._socket is None:
            try:
                async with asyncio.timeout(wait):
                    await self._connected.wait()
            except TimeoutError:
                raise NotSentError("the WebSocket is not connected") from None
        await self.send(_PEER, body)

    async def is_present(self, address: str) -> bool:
        """Whether the peer is there."""
        return self._socket is not None

    async def set_aside(self, queue: str, body: bytes) -> None:
        """Only say so: there is nowhere to keep it."""
        logger.error("a request that broke its peer was dropped")

    # ---------------------------------------------------------------------------------------- the socket

    async def run(self, socket: Socket) -> str:
        """Carry events until the socket closes; gives the reason."""
        self._topics.clear()
        self._socket = socket
        self._connected.set()
        reason = "the WebSocket was closed"
        try:
            if self._interop:
                await self._announce(_CALLER_TOPICS if self._listeners else ())
                await self._announce(_WORKER_TOPICS if self._takers else ())
            while True:
                body = await socket.receive()
                if self._attached.is_set():
                    self._deliver(body)
                else:
                    await self._keep(body)
        except EOFError as error:
            reason = f"{reason}: {error}" if str(error) else reason
        finally:
            self._socket = None
            self._connected.clear()
            for receiver in (*self._listeners, *self._takers):
                receiver.lost(reason)
        return reason

    async def _keep(self, body: bytes) -> None:
        """What the peer says before anybody here is ready to hear it waits, but only so much of it."""
        self._early.append(body)
        if len(self._early) >= _MAX_EARLY:
            await self._attached.wait()

    def _attach(self) -> None:
        """Somebody is ready: deliver what came before."""
        self._attached.set()
        early, self._early = self._early, []
        for body in early:
            self._deliver(body)

    def restored(self) -> None:
        """The peer is back."""
        for receiver in (*self._listeners, *self._takers):
            receiver.restored()

    def _deliver(self, body: bytes) -> None:
        if body.startswith(_REQUEST_START):
            is_request = True
        elif body.startswith(_CALL_START):
            # Written as we write: the type is known without reading further.
            is_request = False
        else:
            try:
                frame = _frames.decode(body)
            except (ValueError, RecursionError):
                self.malformed += 1
                return
            if frame.type in ("__subscribe", "__unsubscribe"):
                self._control(frame.type, frame.payload)
                return
            is_request = frame.type == PUT_TYPE
        receivers = self._takers[:1] or self._listeners if is_request else self._listeners
        for receiver in tuple(receivers):
            receiver.receive(body, _PEER)

    # ---------------------------------------------------------------------------------------- interop

    def _control(self, kind: str, payload: Any) -> None:
        """The original protocol's way to say which events a peer wants."""
        topic = payload.get("topic") if isinstance(payload, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(topic, str) or (kind == "__subscribe" and len(self._topics) >= 10_000):
            self.malformed += 1
        elif kind == "__subscribe":
            self._topics.add(topic)
            self._topics_changed.set()
        else:
            self._topics.discard(topic)

    async def wants(self, topic: str) -> None:
        """Wait until the peer has subscribed to `topic`, for example to `call.requested:`."""
        while topic not in self._topics:
            self._topics_changed.clear()
            await self._topics_changed.wait()

    async def _announce(self, topics: Sequence[str]) -> None:
        socket = self._socket
        if not self._interop or socket is None:
            return
        for topic in topics:
            control = {"type": "__subscribe", "id": "", "payload": {"topic": topic}}
            with suppress(EOFError):
                await socket.send(msgspec.json.encode(control))

    def _is_wanted(self, body: bytes) -> bool:
        """Whether the peer subscribed to this event, by its type alone or by type and request id."""
        frame = _frames.decode(body)
        if f"{frame.type}:" in self._topics:
            return True
        request_id = frame.payload.get("requestId", "")
        return f"{frame.type}:{request_id}" in self._topics


class _LibrarySocket:
    """A connection of the `websockets` library.

    What is sent in one turn of the event loop is written to the network at once. The library would write every message
    for itself, and the system call is most of what a small message costs.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._flushing = False

    async def send(self, text: bytes) -> None:
        connection = self._connection
        if not _CAN_GATHER or connection.protocol.state is not State.OPEN:
            try:
                await connection.send(text, text=True)
            except ConnectionClosed as error:
                raise EOFError(str(error)) from error
            return
        connection.protocol.send_text(text)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)
        if connection.paused:
            await connection.drain()

    def _flush(self) -> None:
        self._flushing = False
        connection = self._connection
        if connection.protocol.state is State.OPEN:
            connection.transport.write(b"".join(connection.protocol.data_to_send()))
        else:
            connection.send_data()

    async def receive(self) -> bytes:
        try:
            body: bytes = await self._connection.recv(decode=False)
        except ConnectionClosed as error:
            raise EOFError(str(error)) from error
        return body

    async def close(self) -> None:
        await self._connection.close()


# Not part of the library's promises; where they are missing, messages are sent one by one.
_CAN_GATHER = hasattr(Connection, "send_data") and hasattr(Connection, "drain")


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
async def connect_websocket(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    identity: Identity | None = None,
    trusted: bool = False,
    max_bytes: int = MAX_BYTES,
    interop: bool = False,
    **options: Any,
) -> AsyncGenerator[WebSocketTarget]:
    """Connect to a WebSocket for the length of an `async with` block; a lost connection is restored.

    Args:
        url: `ws://` or `wss://`.
        headers: To send with the handshake, for example a bearer token.
        identity: Who the server is, for operations that it calls here.
        trusted: Believe the `identity` inside events.
        max_bytes: The largest message, both ways.
        interop: Speak the original protocol: subscribe to topics by control messages.
        options: For `websockets.connect`, for example `ssl`.

    Raises:
        TransportError: If the server cannot be reached now, or refuses the handshake.
    """

    async def dial() -> Any:
        try:
            return await connect(
                url,
                additional_headers=headers,
                max_size=max_bytes,
                compression=None,
                ping_interval=PING_INTERVAL,
                ping_timeout=PING_TIMEOUT,
                close_timeout=1,
                **options,
            )
        except (WebSocketException, OSError, TimeoutError) as error:
            raise TransportError(f"{url} cannot be reached: {error}") from error

    target = _DialedTarget(
        dial, trusted=trusted, identity=identity, max_bytes=max_bytes, interop=interop
    )
    await target.start()
    try:
        yield target
    finally:
        await target.aclose()


class _DialedTarget(WebSocketTarget):
    """The calling end, which connects again."""

    def __init__(self, dial: Callable[[], Awaitable[Any]], **options: Any) -> None:
        super().__init__(**options)
        self._dial = dial
        self._connection: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._connection = await self._dial()
        self._socket = _LibrarySocket(self._connection)
        self._task = asyncio.get_running_loop().create_task(self._stay())

    async def _stay(self) -> None:
        while True:
            reason = await self.run(_LibrarySocket(self._connection))
            logger.warning("%s; connecting again", reason)
            attempt = 0
            while True:
                await asyncio.sleep(reconnect_delay(attempt))
                attempt += 1
                try:
                    self._connection = await self._dial()
                except TransportError as error:
                    logger.debug("not yet: %s", error)
                else:
                    break
            self._socket = _LibrarySocket(self._connection)
            self.restored()

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._connection.close()

    def _is_wanted(self, body: bytes) -> bool:
        # The other side decides what it listens to; a client sends what it has to say.
        return True


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

    async def handle(connection: ServerConnection) -> None:
        identity = None
        if identify is not None:
            try:
                found = identify(connection.request)
                identity = await found if isinstance(found, Awaitable) else found
            except Exception:
                logger.exception("a WebSocket was refused: its identity could not be judged")
                await connection.close(1008, "refused")
                return
        async with accept_websocket(
            _LibrarySocket(connection), identity=identity, max_bytes=max_bytes, interop=interop
        ) as target:
            await on_connection(target)

    async with serve(
        handle,
        host,
        port,
        max_size=max_bytes,
        compression=None,
        ping_interval=PING_INTERVAL,
        ping_timeout=PING_TIMEOUT,
        close_timeout=1,
        **options,
    ) as server:
        yield server
