"""One end of a WebSocket, whichever it is.

Every message is a text frame with the JSON of one event. There is nobody but the peer, so addresses do not matter:
requests go to whoever takes at the other end, everything else to whoever listens there.

Rule 1: the connection is the peer. When it breaks, all that was asked over it is lost, and said to be.
Rule 2: a client connects again by itself; a server's end of a connection is over when it breaks.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import msgspec

from operations._json import enforce_bounds
from operations._text import enforce_lists
from operations.access import Identity
from operations.errors import NotSentError, TooLargeError, TransportError
from operations.pubsub.base import PUT_TYPE, LogThrottle, Receiver, Registration
from operations.pubsub.websocket.sockets import Socket
from operations.types import JSONObject

logger = logging.getLogger("operations")

_MAX_EARLY = 100
_MAX_EARLY_BYTES = 1024 * 1024
"""Messages, and bytes, that are kept for the first one to listen."""

_PEER = "peer"
_CALL_START = b'{"type":"call.'
_REQUEST_START = b'{"type":"' + PUT_TYPE.encode() + b'"'


class WebSocketTarget:
    """One end of a WebSocket.

    Attributes:
        malformed: Frames that were no events.
    """

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
        self._topics = Topics(max_values) if interop else None
        self._subscribed: set[str] = set()
        self._subscribed_on: Socket | None = None
        self._socket: Socket | None = None
        self._connected = asyncio.Event()
        self._attached = asyncio.Event()
        self._early: list[bytes] = []
        self._listeners: list[Receiver] = []
        self._takers: list[Receiver] = []
        self._broken = LogThrottle()

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
        enforce_lists(addresses=addresses)
        registration = Registration(self._listeners, receiver, self._update_topics)
        self._attach()
        await self._update_topics()
        return registration

    async def consume(
        self,
        queue: str,
        receiver: Receiver,
        capacity: Callable[[], int],
        backlog: int | None = None,
    ) -> Registration:
        """Get the requests that the peer sends, whatever the queue: a peer is a group of one."""
        registration = Registration(self._takers, receiver, self._update_topics)
        self._attach()
        await self._update_topics()
        return registration

    async def send(self, address: str, body: bytes) -> None:
        """Send to the peer."""
        if len(body) > self.max_bytes:
            raise TooLargeError(f"{len(body)} bytes are more than {self.max_bytes}")
        socket = self._socket
        if socket is None:
            raise NotSentError("the WebSocket is not connected")
        if self._topics is not None and not self._is_wanted(body):
            return
        try:
            await socket.send(body)
        except EOFError as error:
            raise TransportError(f"the WebSocket was closed: {error}") from error

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float
    ) -> str:
        """Send a request to the peer."""
        if self._socket is None:
            try:
                async with asyncio.timeout(wait):
                    await self._connected.wait()
            except TimeoutError:
                raise NotSentError("the WebSocket is not connected") from None
        await self.send(_PEER, body)
        return ""

    async def is_present(self, address: str) -> bool:
        """Whether the peer is there."""
        return self._socket is not None

    async def count_present(self, address: str) -> int | None:
        """Return None: listeners are not counted."""
        return None

    async def is_waiting(self, queue: str, receipt: str) -> bool:
        """Return False: no message is kept."""
        return False

    async def dead_letter(self, queue: str, body: bytes) -> None:
        """Only say so: there is nowhere to keep it."""
        logger.error("a request that broke its peer was dropped")

    # ---------------------------------------------------------------------------------------- the socket

    async def run(self, socket: Socket) -> str:
        """Carry events until the socket closes; gives the reason."""
        if self._topics is not None:
            self._topics.clear()
        self._socket = socket
        self._connected.set()
        reason = "the WebSocket was closed"
        try:
            await self._update_topics()
            while True:
                body = await socket.receive()
                if self._attached.is_set():
                    self._deliver_safely(body)
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
        if len(self._early) >= _MAX_EARLY or sum(map(len, self._early)) > _MAX_EARLY_BYTES:
            await self._attached.wait()

    def _attach(self) -> None:
        """Somebody is ready: deliver what came before."""
        self._attached.set()
        early, self._early = self._early, []
        for body in early:
            self._deliver_safely(body)

    def restored(self) -> None:
        """The peer is back."""
        for receiver in (*self._listeners, *self._takers):
            receiver.restored()

    def _deliver_safely(self, body: bytes) -> None:
        try:
            self._deliver(body)
        except Exception:
            # Whoever reads the connection must go on, whatever the peer sends.
            self.malformed += 1
            logger.log(self._broken.level(), "a message could not be taken", exc_info=True)

    def _deliver(self, body: bytes) -> None:
        if body.startswith(_REQUEST_START):
            is_request = True
        elif body.startswith(_CALL_START):
            # Written as we write: the type is known without reading further.
            is_request = False
        else:
            try:
                frame = read_frame(body, self.max_values)
            except (ValueError, RecursionError):
                self.malformed += 1
                return
            if frame.type in CONTROLS:
                self._control(frame.type, frame.payload)
                return
            is_request = frame.type == PUT_TYPE
        # A request goes to one of those who take them; where nobody does, one says so.
        receivers = (self._takers or self._listeners)[:1] if is_request else self._listeners
        for receiver in tuple(receivers):
            receiver.receive(body, _PEER)

    # ---------------------------------------------------------------------------------------- interop

    def _control(self, kind: str, payload: Any) -> None:
        """Heed the original protocol's way to say which events a peer wants."""
        if self._topics is None or not self._topics.control(kind, payload):
            self.malformed += 1

    async def wants(self, topic: str) -> None:
        """Wait until the peer has subscribed to `topic`, for example to `call.requested:`."""
        if self._topics is not None:
            await self._topics.wait_for(topic)

    async def _update_topics(self) -> None:
        """Subscribe once to each topic with a listener here, and release topics without one."""
        socket = self._socket
        if self._topics is None or socket is None:
            return
        if self._subscribed_on is not socket:
            self._subscribed_on = socket
            self._subscribed = set()
        needed = [
            *(CALLER_TOPICS if self._listeners else ()),
            *(WORKER_TOPICS if self._takers else ()),
        ]
        added = [topic for topic in dict.fromkeys(needed) if topic not in self._subscribed]
        released = sorted(self._subscribed.difference(needed))
        self._subscribed = set(needed)
        with suppress(EOFError):
            for topic in added:
                await socket.send(control_message("__subscribe", topic))
            for topic in released:
                await socket.send(control_message("__unsubscribe", topic))

    def _is_wanted(self, body: bytes) -> bool:
        """Whether the peer wants to hear this."""
        return self._topics is None or self._topics.has(body)


CALLER_TOPICS = ("call.responded:", "call.completed:", "call.error:", "call.aborted:")
WORKER_TOPICS = ("call.requested:", "call.aborted:")
CONTROLS = ("__subscribe", "__unsubscribe")

_MAX_TOPICS = 10_000


class Frame(msgspec.Struct):
    """As much of an event as a socket needs to know."""

    type: Any = None
    payload: Any = None


_decode = msgspec.json.Decoder(Frame).decode


def read_frame(body: bytes, max_values: int) -> Frame:
    """Return the frame in a JSON text.

    Raises:
        ValueError: If it is not one, or too large to be decoded.
    """
    enforce_bounds(body, max_values=max_values)
    return _decode(body)


def control_message(kind: str, topic: str) -> bytes:
    """Return the control message that subscribes to a topic (`__subscribe`) or releases it (`__unsubscribe`)."""
    return msgspec.json.encode({"type": kind, "id": "", "payload": {"topic": topic}})


class Topics:
    """The topics that the peer has subscribed to.

    Args:
        max_values: How many JSON values a message may hold.
    """

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._topics: set[str] = set()
        self._changed = asyncio.Event()

    def clear(self) -> None:
        """Forget everything: the peer is a new one."""
        self._topics.clear()

    def control(self, kind: str, payload: Any) -> bool:
        """Heed a control message; False if it makes no sense."""
        topic = cast("JSONObject", payload).get("topic") if isinstance(payload, dict) else None
        if not isinstance(topic, str):
            return False
        if kind == "__unsubscribe":
            self._topics.discard(topic)
            return True
        if len(self._topics) >= _MAX_TOPICS:
            return False
        self._topics.add(topic)
        self._changed.set()
        return True

    async def wait_for(self, topic: str) -> None:
        """Wait until the peer has subscribed to `topic`."""
        while topic not in self._topics:
            self._changed.clear()
            await self._changed.wait()

    def has(self, body: bytes) -> bool:
        """Whether the peer subscribed to this event, by its type alone or by type and request id."""
        frame = read_frame(body, self._max_values)
        if f"{frame.type}:" in self._topics:
            return True
        request_id = frame.payload.get("requestId", "")
        return f"{frame.type}:{request_id}" in self._topics
