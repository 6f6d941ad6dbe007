"""One end of a WebSocket: the event target and its socket.

Every message is a text frame with the JSON of one event. The peer is the only address: requests are delivered to its
consumer, all other events to its listeners.

Rule 1: the connection is the peer. When it breaks, its calls are lost, and their callers receive an error.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from sys import maxsize
from typing import Any, Protocol

import msgspec
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from operations.base.errors import NotSentError, TransportError
from operations.base.tasks import cancel_tasks, shielded
from operations.contract.access import Identity
from operations.pubsub.base import (
    PUT_TYPE,
    Consumer,
    Delivery,
    EventFrame,
    EventTarget,
    Receiver,
    decode_frame,
    enforce_loop,
    wait_until,
)
from operations.pubsub.delivery import deliver, enforce_size

MAX_BYTES = 16 * 1024 * 1024
"""The default size limit of messages at a client, in bytes."""

MAX_RECEIVED = 4 * 1024 * 1024
"""The default size limit of messages at a server, in bytes; larger messages would block the event loop noticeably."""

ANNOUNCED = "Operations-Max-Bytes"
"""The response header of a handshake with the largest message that the server accepts."""

BATCHES = "Operations-Batches"
"""The handshake header, in both directions, of a peer that accepts several events in one frame, one per line."""

PING_INTERVAL = 8.0
PING_TIMEOUT = 8.0
"""Seconds; their sum is the longest time until a lost peer is detected."""

CLOSE_TIMEOUT = 1.0
"""Seconds for the closing handshake."""

_MAX_UNSENT = 256 * 1024
"""Senders wait while more bytes than this are unsent."""

MAX_BATCH = 64 * 1024
"""The largest frame with several events, in bytes. A peer with a lower limit does not accept batches."""

_WATCH_EVERY = 1.0
"""Seconds between two checks that a peer reads."""

_logger = logging.getLogger("operations.websocket")
_logger.setLevel(logging.INFO)
"""The log level of the library: at debug level it would log headers and messages with credentials."""

SETTINGS: dict[str, Any] = {
    "logger": _logger,
    "compression": None,
    "ping_interval": PING_INTERVAL,
    "ping_timeout": PING_TIMEOUT,
    "close_timeout": CLOSE_TIMEOUT,
}
"""The settings of the library at both ends."""


class Socket(Protocol):
    """An accepted WebSocket of any framework."""

    async def send(self, text: bytes) -> None:
        """Send a text frame of UTF-8.

        Raises:
            EOFError: If the socket is closed.
        """
        ...

    async def receive(self) -> bytes:
        """Return the next text frame.

        Raises:
            EOFError: If the socket is closed.
        """
        ...

    async def close(self) -> None:
        """Close the socket."""
        ...


class LibrarySocket:
    """A connection of the `websockets` library.

    The messages of one iteration of the event loop are sent as one frame if the peer accepts batches: for a small
    message, the frame and the system call cost more than the message itself.

    The library's keepalive waits for buffer space before it pings, so it does not detect a peer that has stopped
    reading; this class does.

    Attributes:
        batches: Whether a frame may contain several events, one per line.
    """

    def __init__(self, connection: Any, batches: bool = False) -> None:
        self.batches = batches
        self._connection = connection
        self._unsent: OrderedDict[asyncio.Future[None], bytes] = OrderedDict()
        self._unsent_bytes = 0
        self._sending: asyncio.Task[None] | None = None
        self._failure = ""
        self._loop = asyncio.get_running_loop()
        self._watching: asyncio.TimerHandle

    async def send(self, text: bytes) -> None:
        """Send a message, together with other messages of this iteration of the event loop.

        Waits while much is unsent, so a large message counts as sent when the peer has read nearly all of it. A message
        is dropped if its sender is cancelled before its turn.
        """
        sent = self._loop.create_future()
        self._unsent[sent] = text
        self._unsent_bytes += len(text)
        self._sending = self._sending or asyncio.Task(self._send_all())
        if self._unsent_bytes > _MAX_UNSENT or self._connection.state is not State.OPEN:
            try:
                await sent
            except asyncio.CancelledError:
                if self._unsent.pop(sent, None) is not None:
                    self._unsent_bytes -= len(text)
                raise
            if self._connection.state is not State.OPEN:
                raise EOFError(self._failure or "the peer did not read the whole message")

    async def _send_all(self) -> None:
        try:
            while self._unsent:
                await self._send_frame(self._next_messages())
        finally:
            self._sending = None

    def _next_messages(self) -> dict[asyncio.Future[None], bytes]:
        """Return the next message or, if the peer accepts batches, as many messages as a frame may contain."""
        messages: dict[asyncio.Future[None], bytes] = {}
        size = 0
        for sent, text in self._unsent.items():
            size += len(text) + 1
            if messages and (size > MAX_BATCH or not self.batches):
                break
            messages[sent] = text
        for sent in messages:
            del self._unsent[sent]
        return messages

    async def _send_frame(self, messages: dict[asyncio.Future[None], bytes]) -> None:
        self._watch_later(maxsize, 0.0)
        try:
            await self._connection.send(b"\n".join(messages.values()), text=True)
        except ConnectionClosed as error:
            self._failure = self._failure or str(error)
        finally:
            self._watching.cancel()
            self._unsent_bytes -= sum(map(len, messages.values()))
            for sent in messages:
                if not sent.done():
                    sent.set_result(None)

    def _watch_later(self, least: int, idle: float) -> None:
        self._watching = self._loop.call_later(_WATCH_EVERY, self._watch, least, idle)

    def _watch(self, least: int, idle: float) -> None:
        """Abort the connection if the peer reads no data for the time of a ping and its response."""
        connection = self._connection
        interval, timeout = connection.ping_interval, connection.ping_timeout
        unread: int = connection.transport.get_write_buffer_size()
        idle = 0.0 if unread < least else idle + _WATCH_EVERY
        if interval is not None and timeout is not None and idle > interval + timeout:
            self._failure = f"the peer has read nothing for {idle:g} seconds"
            connection.transport.abort()
        else:
            self._watch_later(min(unread, least), idle)

    async def receive(self) -> bytes:
        """Return the next frame."""
        try:
            body: bytes = await self._connection.recv(decode=False)
        except ConnectionClosed as error:
            raise EOFError(self._failure or str(error)) from error
        return body

    async def close(self) -> None:
        """Send all messages and close the connection, even if the peer has stopped reading."""
        try:
            async with asyncio.timeout(self._connection.close_timeout):
                if self._sending is not None:
                    await asyncio.wait({self._sending})
                await self._connection.close()
        except TimeoutError:
            self._connection.transport.abort()
            await self._connection.wait_closed()


_MAX_EARLY = 100
_MAX_EARLY_BYTES = 1024 * 1024
"""Limits of messages and bytes that are buffered for the first listener."""

_MESSAGES_PER_TURN = 32
"""The number of messages after which their calls run and reply, so that the peer has work while others are read."""

_PEER = "peer"
_EVENT_START = b'{"type":"call.'
_REQUEST_START = b'{"type":"%b"' % PUT_TYPE.encode()


class WebSocketTarget(EventTarget):
    """One end of a WebSocket.

    Attributes:
        malformed: Control messages that could not be processed.
        task: Transports the events.
    """

    reconnects = False

    def __init__(
        self,
        *,
        trusted: bool,
        identity: Identity | None,
        max_bytes: int,
        max_values: int,
        interop: bool,
    ) -> None:
        self.trusted = trusted
        self.identity = identity
        self.max_bytes = max_bytes
        self.max_values = max_values
        self.direct = True
        self.broadcasts_replies = True
        self.malformed = 0
        self._interop = interop
        self._loop = asyncio.get_running_loop()
        self._wanted: set[str] = set()
        self._wanted_more = asyncio.Event()
        self._subscribed: set[str] = set()
        self.task: asyncio.Task[Any] | None = None
        self._socket: Socket | None = None
        self._last_socket: Socket | None = None
        self._connected = asyncio.Event()
        self._attached = asyncio.Event()
        self._early: list[bytes] = []
        self._listeners: list[Receiver] = []
        self._consumers: list[Receiver] = []

    @property
    def is_connected(self) -> bool:
        """Whether the peer is connected."""
        return self._socket is not None

    def mailbox(self) -> str:
        """Return the address of the peer."""
        return _PEER

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> AsyncExitStack:
        """Receive all events of the peer except requests."""
        return await self._register(self._listeners, receiver)

    async def consume(self, queue: str, consumer: Consumer) -> AsyncExitStack:
        """Receive the requests of the peer, for any queue: a peer is a group with one worker."""
        return await self._register(self._consumers, consumer)

    async def _register(self, receivers: list[Receiver], receiver: Receiver) -> AsyncExitStack:
        enforce_loop(self._loop)
        undo = AsyncExitStack()
        undo.push_async_callback(self._update_topics)
        undo.callback(receivers.remove, receiver)
        receivers.append(receiver)
        # Deliver the messages that were buffered for the first listener.
        self._attached.set()
        early, self._early = self._early, []
        for body in early:
            self._deliver(body)
        await self._update_topics()
        return undo

    async def send(self, address: str, body: bytes) -> None:
        """Send to the peer."""
        enforce_loop(self._loop)
        enforce_size(body, self.max_bytes)
        socket = self._socket
        if socket is None:
            raise NotSentError("the WebSocket is not connected")
        if not self._is_wanted(body):
            return
        try:
            await socket.send(body)
        except EOFError as error:
            raise TransportError(f"the WebSocket was closed: {error}") from error

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float, worker: str = ""
    ) -> str:
        """Send a request to the peer."""
        enforce_loop(self._loop)
        if self._socket is None and self.reconnects:
            await wait_until(self._connected, wait, "the WebSocket is not connected")
        await self.send(_PEER, body)
        return ""

    async def is_present(self, address: str) -> bool:
        """Return whether the peer is connected."""
        return self._socket is not None

    # ---------------------------------------------------------------------------------------- the socket

    def connected(self, socket: Socket) -> None:
        """Use a new socket. `run` must follow."""
        self._socket = self._last_socket = socket
        self._subscribed = set()
        self._wanted.clear()
        self._connected.set()

    @shielded
    async def aclose(self) -> None:
        """End the background task and close the socket; closing twice is harmless."""
        self.reconnects = False
        await self.end_task()
        if self._last_socket is not None:
            with suppress(EOFError, OSError):
                await self._last_socket.close()

    async def end_task(self) -> None:
        """End the task that transports events."""
        await cancel_tasks(self.task)

    async def run(self, socket: Socket) -> str:
        """Transport events until the socket closes; return the reason."""
        reason = "the WebSocket was closed"
        batches = isinstance(socket, LibrarySocket) and socket.batches
        received = 0
        try:
            await self._update_topics()
            while True:
                frame = await socket.receive()
                for body in frame.split(b"\n") if batches else (frame,):
                    if self._attached.is_set():
                        self._deliver(body)
                    else:
                        await self._buffer(body)
                    received += 1
                    if received % _MESSAGES_PER_TURN == 0:
                        await asyncio.sleep(0)
        except EOFError as error:
            reason = f"{reason}: {error}" if str(error) else reason
        finally:
            self._socket = None
            self._connected.clear()
            for receiver in (*self._listeners, *self._consumers):
                receiver.lost(reason)
        return reason

    async def _buffer(self, body: bytes) -> None:
        """Buffer messages that arrive before the first listener, up to a limit."""
        self._early.append(body)
        if len(self._early) >= _MAX_EARLY or sum(map(len, self._early)) > _MAX_EARLY_BYTES:
            await self._attached.wait()

    def restored(self) -> None:
        """Handle a reconnected peer."""
        for receiver in (*self._listeners, *self._consumers):
            receiver.restored()

    def _deliver(self, body: bytes) -> None:
        if body.startswith(_EVENT_START):
            # This library writes the type first, so that it is known without decoding.
            is_request = body.startswith(_REQUEST_START)
        else:
            try:
                frame = decode_frame(body)
            except (ValueError, RecursionError):
                frame = _UNREADABLE
            if frame.type in _CONTROLS:
                self._control(frame.type, frame.payload)
                return
            # The receiver applies the limits, so that it can reply to a request that is too large.
            is_request = frame.type == PUT_TYPE
        # Without a consumer, a listener rejects the request.
        receivers = (self._consumers or self._listeners)[:1] if is_request else self._listeners
        for receiver in tuple(receivers):
            deliver(receiver, Delivery(body, _PEER))

    # ---------------------------------------------------------------------------------------- interop

    def _control(self, kind: str, payload: msgspec.Raw) -> None:
        """Process a control message, with which the original protocol subscribes to events."""
        try:
            topic = _decode_subject(payload).topic
        except (ValueError, RecursionError):
            topic = None
        if not self._interop or topic is None:
            self.malformed += 1
        elif kind == "__unsubscribe":
            self._wanted.discard(topic)
        elif len(self._wanted) >= _MAX_TOPICS:
            self.malformed += 1
        else:
            self._wanted.add(topic)
            self._wanted_more.set()

    async def wants(self, topic: str) -> None:
        """Wait until the peer has subscribed to `topic`, for example to `call.requested:`."""
        while self._interop and topic not in self._wanted:
            self._wanted_more.clear()
            await self._wanted_more.wait()

    async def _update_topics(self) -> None:
        """Subscribe once to each topic with a local listener, and unsubscribe from topics without one."""
        socket = self._socket
        if not self._interop or socket is None:
            return
        before = self._subscribed
        callers = _CALLER_TOPICS if self._listeners else ()
        self._subscribed = {*callers, *(_WORKER_TOPICS if self._consumers else ())}
        with suppress(EOFError):
            for topic in sorted(self._subscribed - before):
                await socket.send(_control_message("__subscribe", topic))
            for topic in sorted(before - self._subscribed):
                await socket.send(_control_message("__unsubscribe", topic))

    def _is_wanted(self, body: bytes) -> bool:
        """Return whether the peer has subscribed to this event, by its type or by its type and request id."""
        if not self._interop:
            return True
        frame = decode_frame(body)
        request_id = _decode_subject(frame.payload).request_id
        return not self._wanted.isdisjoint((f"{frame.type}:", f"{frame.type}:{request_id}"))


_CALLER_TOPICS = ("call.responded:", "call.completed:", "call.error:", "call.aborted:")
_WORKER_TOPICS = ("call.requested:", "call.aborted:", "call.credit:")
_CONTROLS = ("__subscribe", "__unsubscribe")

_UNREADABLE = EventFrame(PUT_TYPE)
"""What is not JSON goes to the receiver of requests, which counts it."""

_MAX_TOPICS = 10_000


class _Subject(msgspec.Struct, rename="camel"):
    """The parts of a payload that a socket needs."""

    topic: str | None = None
    request_id: Any = ""


_decode_subject = msgspec.json.Decoder(_Subject).decode


def _control_message(kind: str, topic: str) -> bytes:
    """Return the control message that subscribes to a topic (`__subscribe`) or unsubscribes (`__unsubscribe`)."""
    return msgspec.json.encode({"type": kind, "id": "", "payload": {"topic": topic}})
