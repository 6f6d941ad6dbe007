"""The open sessions of clients before 2026-07-28: declared capabilities, running requests and sent messages.

Rule 1: callers without identity count by their address, with a limit of its own, because one address may have many
        clients: a proxy, a container host, an office.
Rule 2: if a caller or an address reaches its limit, its own oldest idle session ends. If the total limit is reached,
        the oldest idle session without identity ends, so that anonymous clients cannot lock out others. It is logged.
Rule 3: a session ends when the last credential that was used in it expires or is revoked. A renewed credential keeps it
        open.
Rule 4: the last events of a session are stored, so that a client can resume a lost stream.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from secrets import token_hex
from time import monotonic
from typing import Any, Final

import msgspec
from mcp import MCPError
from mcp.server.connection import Connection
from mcp.server.runner import aclose_shielded
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import NoBackChannelError
from mcp_types.version import is_version_at_least

from operations.base.errors import CallError, ErrorCode
from operations.base.logs import LogThrottle
from operations.base.tasks import start_task
from operations.base.text import printable
from operations.base.types import JSONObject
from operations.contract.channel import NOTHING
from operations.front.credentials import Credential, CredentialMonitor
from operations.front.limits import Limits
from operations.io.sse import ALIVE, encoded_event

logger = logging.getLogger("operations.mcp")

MAX_EVENTS: Final = 256
"""The largest number of stored events of one session."""

MAX_EVENT_BYTES: Final = 4 * 1024 * 1024
"""The largest size of the stored events of one session in bytes; the last event is stored even if it is larger."""

STANDALONE: Final = 0
"""The stream that does not belong to a request; a client reads it with GET."""

_RESUMABLE: Final = "2025-11-25"
"""Since this version, clients accept an event without a message, and resume streams."""

_RETRY_MILLISECONDS: Final = 500
"""Milliseconds after which a client should reconnect when its stream ended early."""

_MAX_DIGITS: Final = 18

_encode = msgspec.json.Encoder().encode


def event(message: bytes, number: int | None = None) -> bytes:
    """Return a message as a server-sent event."""
    event_id = None if number is None else b"%d" % number
    return encoded_event(message, name=b"message", event_id=event_id)


def notification(method: str, params: Mapping[str, Any] | None) -> bytes:
    """Return an encoded notification."""
    message: JSONObject = {"jsonrpc": "2.0", "method": method}
    if params is not None:
        message["params"] = params
    return _encode(message)


def _number(text: str) -> int:
    """Return the number of an event or question that a client sent; 0, which is never used, if it is not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else 0


class EventLog:
    """The last events of all streams of one session. Readers of a stream follow the log."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, int, bytes]] = deque()
        self._bytes = 0
        self.latest = 0
        """The number of the last event."""

        self._streams = count(STANDALONE + 1)
        self._open = {STANDALONE}
        self._readers: dict[int, object] = {}
        self._changed = asyncio.Event()

    def open_stream(self) -> int:
        """Return a new stream."""
        stream = next(self._streams)
        self._open.add(stream)
        return stream

    def close_stream(self, stream: int) -> None:
        """End a stream; its readers return after its last event."""
        self._open.discard(stream)
        self._wake()

    def close(self) -> None:
        """End all streams."""
        self._open.clear()
        self._wake()

    def add(self, stream: int, message: bytes) -> bytes:
        """Store a message, and return it as an event."""
        return self._add(stream, event(message, self.latest + 1))

    def add_start(self, stream: int) -> bytes:
        """Return an event without a message, so that a client can resume before the first message."""
        place = b"%d" % (self.latest + 1)
        return self._add(stream, encoded_event(b"", event_id=place, retry=_RETRY_MILLISECONDS))

    def _add(self, stream: int, frame: bytes) -> bytes:
        self.latest += 1
        self._events.append((self.latest, stream, frame))
        self._bytes += len(frame)
        while len(self._events) > 1 and (
            len(self._events) > MAX_EVENTS or self._bytes > MAX_EVENT_BYTES
        ):
            self._bytes -= len(self._events.popleft()[2])
        self._wake()
        return frame

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def find(self, event_id: str) -> tuple[int, int] | None:
        """Return the number and the stream of an event; None if it is unknown."""
        number = _number(event_id)
        return next(((known, of) for known, of, _ in self._events if known == number), None)

    def is_read(self, stream: int) -> bool:
        """Return whether a stream has a reader."""
        return stream in self._readers

    async def follow(self, stream: int, after: int, heartbeat: float) -> AsyncGenerator[bytes]:
        """Yield the events of a stream after an event, until the stream ends or another reader replaces this one.

        A comment follows after `heartbeat` seconds without an event.
        """
        reader = self._readers[stream] = object()
        self._wake()
        ping_at = monotonic() + heartbeat
        try:
            while self._readers.get(stream) is reader:
                changed = self._changed
                for number, of, frame in tuple(self._events):
                    if number > after and of == stream:
                        after = number
                        yield frame
                        ping_at = monotonic() + heartbeat
                if stream not in self._open:
                    return
                try:
                    # Events of other streams also set it.
                    async with asyncio.timeout(ping_at - monotonic()):
                        await changed.wait()
                except TimeoutError:
                    yield ALIVE
                    ping_at = monotonic() + heartbeat
        finally:
            if self._readers.get(stream) is reader:
                del self._readers[stream]


class Session:
    """One open session. It is also the channel for messages that do not belong to a request."""

    def __init__(self, caller: str, owner: str | None) -> None:
        self.id = token_hex(16)
        self.caller = caller

        self.owner = owner
        """The id of the identity that opened the session; None for a caller without identity."""

        self.connection = Connection.for_loop(self, session_id=self.id)
        """The SDK's state of the session: version, capabilities, log level, subscribed resources."""

        self.log = EventLog()
        self.running: dict[int | str, Callable[[], None]] = {}
        """Functions that cancel the running requests, by id."""

        self.used_at = monotonic()
        self.in_flight = 0

        self.credential: Credential | None = None
        """The last credential that was used in the session."""

        self.stop_watch: Callable[[], object] | None = None
        """Stops checking that credential."""

        self._questions: dict[int, asyncio.Future[JSONObject]] = {}
        self._numbers = count(1)

    @cached_property
    def capabilities(self) -> Mapping[str, Any]:
        """The declared capabilities of the client, which are known after the handshake."""
        declared = self.connection.client_capabilities
        return (
            NOTHING if declared is None else declared.model_dump(by_alias=True, exclude_none=True)
        )

    @property
    def can_resume(self) -> bool:
        """Whether the client can resume a stream."""
        return is_version_at_least(self.connection.protocol_version, _RESUMABLE)

    def ask(self) -> tuple[int, asyncio.Future[JSONObject]]:
        """Return the id of a new question to the client, and its answer."""
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._questions.pop(number, None))
        return number, answer

    def answer(self, message: Mapping[str, Any]) -> None:
        """Process the client's answer to a question; ignore unknown answers."""
        answer = self._questions.get(_number(str(message["id"])))
        if answer is None or answer.done():
            return
        error = message.get("error")
        if error is None:
            answer.set_result(message["result"])
        else:
            answer.set_exception(MCPError(error["code"], error["message"], error.get("data")))

    def cancel(self, request_id: Any) -> None:
        """End a request that the client no longer waits for."""
        if isinstance(request_id, int | str) and request_id in self.running:
            self.running[request_id]()

    async def close(self) -> None:
        """End all requests and streams of the session."""
        for cancel in tuple(self.running.values()):
            cancel()
        self.log.close()
        await aclose_shielded(self.connection)

    # ------------------------------------------------------------ as the SDK's `Outbound`

    async def notify(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> None:
        """Send a notification on the stream that does not belong to a request."""
        self.log.add(STANDALONE, notification(method, params))

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        """Raise an error, because questions always belong to a request."""
        raise NoBackChannelError(method)


class SessionTable:
    """The open sessions, least recently used first.

    Args:
        idle_timeout: Seconds after which an idle session ends.
    """

    def __init__(self, idle_timeout: float) -> None:
        self._idle_timeout = idle_timeout
        self._open: OrderedDict[str, Session] = OrderedDict()
        self._ending: set[asyncio.Task[Any]] = set()
        self._evictions = LogThrottle()

    def find(self, session_id: str, owner: str | None) -> Session | None:
        """Return an open session of this caller."""
        session = self._open.get(session_id)
        return session if session is not None and session.owner == owner else None

    async def make_room(self, caller: str, limits: Limits, *, is_identified: bool) -> None:
        """End idle sessions so that a caller can open another; without an identity it counts by its address.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if there are too many sessions.
        """
        mine = sum(session.caller == caller for session in self._open.values())
        name = "sessions_per_caller" if is_identified else "sessions_per_address"
        if mine >= getattr(limits, name):
            await self._evict(lambda session: session.caller == caller, name)
        if len(self._open) >= limits.sessions:
            await self._evict(lambda session: session.owner is None, "sessions")

    async def _evict(self, may_end: Callable[[Session], bool], limit: str) -> None:
        for session in self._open.values():
            if not session.in_flight and may_end(session):
                logger.log(
                    self._evictions.level(),
                    "ended the idle MCP session of %s for a new one: limits.%s is reached",
                    printable(session.caller.removeprefix("id:").removeprefix("at:")),
                    limit,
                )
                await self.end(session)
                return
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "Too many open sessions", retryable=True)

    def add(
        self, session: Session, credential: Credential | None, monitor: CredentialMonitor
    ) -> None:
        """Add a new session."""
        self._open[session.id] = session
        self._watch_credential(session, credential, monitor)

    def _watch_credential(
        self, session: Session, credential: Credential | None, monitor: CredentialMonitor
    ) -> None:
        if session.stop_watch is not None:
            session.stop_watch()
        session.credential = credential
        session.stop_watch = monitor.watch(credential, lambda: self._revoke(session))

    def _revoke(self, session: Session) -> None:
        """End a session whose credential is no longer valid."""
        start_task(self._ending, self.end(session))

    async def end(self, session: Session) -> None:
        """End a session and remove its id."""
        self._open.pop(session.id, None)
        if session.stop_watch is not None:
            session.stop_watch()
        await session.close()

    @contextmanager
    def in_use(
        self, session: Session, credential: Credential | None, monitor: CredentialMonitor
    ) -> Generator[None]:
        """Keep a session open for the duration of a request."""
        session.in_flight += 1
        known = session.credential
        if credential is not None and known is not None and known.key != credential.key:
            self._watch_credential(session, credential, monitor)
        try:
            yield
        finally:
            session.in_flight -= 1
            session.used_at = monotonic()
            if session.id in self._open:
                self._open.move_to_end(session.id)

    async def expire(self) -> None:
        """End idle sessions, until cancelled."""
        while True:
            now = monotonic()
            due = now + self._idle_timeout
            for session in tuple(self._open.values()):
                if session.in_flight:
                    continue
                if session.used_at + self._idle_timeout > now:
                    due = session.used_at + self._idle_timeout
                    break
                await self.end(session)
            await asyncio.sleep(due - now)

    async def close(self) -> None:
        """End all sessions."""
        while self._open:
            await self.end(next(iter(self._open.values())))
