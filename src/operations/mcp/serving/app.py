"""Streamable HTTP: who may knock, who it is, and which way the request goes.

Rule 1: Host and Origin are judged before anything else is done, then who asks; only then the body is read.
Rule 2: the SDK serves every request; the lean path only ever answers what it can answer in the same words.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, Final, TypedDict, Unpack
from urllib.parse import urlsplit

from mcp.server import Server
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from operations._words import enforce_lists
from operations.access import Identity
from operations.errors import CallError
from operations.front.identity import InvalidCredentialError
from operations.front.timing import PeekableReceive, RequestTimeout
from operations.mcp.serving.fastpath import FastPath
from operations.mcp.serving.replay import ReplayStore

logger = logging.getLogger("operations.mcp")

_HOST = re.compile(r"[^@/?#\\]+")

_RETRY_MILLISECONDS = 500
"""When a client whose stream ended early should come back."""

IDENTITY: Final = "operations.identity"
"""Where the scope of a request holds who asks, once that is known."""

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


class AppOptions(TypedDict, total=False):
    """How a server is reached over HTTP."""

    path: str | None
    """Where it is served, `/mcp` unless given; None answers at every path, for a host that has routed already."""

    hosts: Collection[str] | None
    """The names in `Host` and `Origin` that are ours, without ports; None takes any. Loopback unless given."""

    origins: Collection[str]
    """Other origins whose pages may call: `https://example.com`."""

    stateless: bool
    """No sessions: every request stands alone, and clients of 2025 cannot be asked anything."""

    json_response: bool
    """Answer clients of 2025 with JSON instead of a stream; progress and log messages are then lost."""

    lean: bool
    """Answer plain requests without the SDK's streams and tasks. True unless given."""

    max_body_bytes: int
    """4 MiB unless given."""

    body_timeout: float
    """Seconds a request's body may take to arrive; 30 unless given."""

    max_sessions: int
    """1,000 unless given."""

    session_idle_timeout: float
    """Seconds."""


class _Manager(StreamableHTTPSessionManager):
    """The SDK's sessions, each with a memory of its own."""

    @property
    def event_store(self) -> ReplayStore:
        """A new one each time: the SDK reads this once for each session."""
        return ReplayStore()

    @event_store.setter
    def event_store(self, _store: object) -> None:
        """The SDK's constructor sets what is made here."""


class MCPApp:
    """An ASGI application. `async with app.running():` where the host does not pass on the lifespan."""

    def __init__(
        self,
        server: Server[Any],
        identify: Callable[[Request], Awaitable[Identity | None]],
        timeout: float,
        fast_path: FastPath,
        **options: Unpack[AppOptions],
    ) -> None:
        self._server = server
        self._identify = identify
        self._timeout = timeout
        self._path = options.get("path", "/mcp")
        hosts = options.get("hosts", LOOPBACK)
        enforce_lists(hosts=hosts, origins=options.get("origins"))
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._origins = frozenset(options.get("origins", ()))
        self._stateless = options.get("stateless", False)
        self._json_response = options.get("json_response", False)
        self._fast_path = fast_path if options.get("lean", True) else None
        self._max_body = options.get("max_body_bytes", 4 * 1024 * 1024)
        self._max_sessions = options.get("max_sessions", 1_000)
        self._body_timeout = options.get("body_timeout", 30.0)
        self._idle_timeout = options.get("session_idle_timeout", 30 * 60.0)
        self._manager: StreamableHTTPSessionManager | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Serve for the length of an `async with` block."""
        manager = _Manager(
            self._server,
            json_response=self._json_response,
            stateless=self._stateless,
            # Judged here, for every path and before the body.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            session_idle_timeout=self._idle_timeout,
            retry_interval=_RETRY_MILLISECONDS,
            max_request_body_size=self._max_body,
            max_sessions=self._max_sessions,
        )
        async with manager.run():
            self._manager = manager
            try:
                yield
            finally:
                self._manager = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, send)
        else:
            raise RuntimeError("MCP is served over HTTP")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        # White space around a value is no part of it, and not every server takes it off.
        headers = [(name, value.strip()) for name, value in scope["headers"]]
        scope["headers"] = headers
        refusal = self._judged(headers)
        if refusal is None and self._path is not None and scope["path"] != self._path:
            refusal = PlainTextResponse("Not found", 404)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        if IDENTITY not in scope:
            ahead = PeekableReceive(receive)
            if not await self._is_identified(scope, ahead, send):
                return
            receive = ahead.receive
        _own_session(scope)
        if self._manager is None:
            raise RuntimeError("the MCP application does not run: enter `async with app.running()`")
        if scope["method"] == "POST":
            body = await self._body(headers, receive)
            if isinstance(body, PlainTextResponse):
                await body(scope, receive, send)
                return
            identity = scope[IDENTITY]
            if self._fast_path is not None and await self._fast_path.serve(
                headers, body, identity, receive, send, stateless=self._stateless
            ):
                return
            receive = _replayed(body, receive)
        await self._manager.handle_request(scope, receive, send)

    async def _body(
        self, headers: list[tuple[bytes, bytes]], receive: Receive
    ) -> list[Message] | PlainTextResponse:
        """The messages that make up a request's body, or the refusal of one that is too long or too slow."""
        too_long = PlainTextResponse("Request body too large", 413)
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_body:
                return too_long
        messages: list[Message] = []
        room = self._max_body
        try:
            async with asyncio.timeout(self._body_timeout):
                while True:
                    message = await receive()
                    messages.append(message)
                    if message["type"] != "http.request":
                        return messages
                    room -= len(message.get("body", b""))
                    if room < 0:
                        return too_long
                    if not message.get("more_body", False):
                        return messages
        except TimeoutError:
            return PlainTextResponse("Request body too slow", 408)

    def _judged(self, headers: list[tuple[bytes, bytes]]) -> PlainTextResponse | None:
        """The refusal of a request that came under another name, or from another site's page."""
        hosts = self._hosts
        host = origin = None
        for name, value in headers:
            if name == b"host":
                # Two are as good as none: who reads which?
                host = value.decode("latin-1") if host is None else ""
            elif name == b"origin":
                origin = value.decode("latin-1")
        if hosts is not None and (
            host is None or not _HOST.fullmatch(host) or _name_of(f"//{host}") not in hosts
        ):
            return PlainTextResponse("Invalid Host header", 421)
        if origin is None or origin in self._origins:
            return None
        ours = _name_of(origin) in hosts if hosts is not None else origin.endswith(f"://{host}")
        return None if ours else PlainTextResponse("Invalid Origin header", 403)

    async def _is_identified(self, scope: Scope, ahead: PeekableReceive, send: Send) -> bool:
        """Find out who asks, in time and while its client is there; False where it was refused, or has left."""
        late: list[asyncio.Future[None]] = []

        def insist() -> None:
            # Asking was cancelled, and takes no notice.
            late.append(asyncio.ensure_future(_too_late()(scope, ahead.read, send)))

        watch = RequestTimeout(insist)
        watch.start(self._timeout, ahead.peek)
        refusal: PlainTextResponse | None = None
        try:
            await self._identify(Request(scope))
        except CallError as error:
            refusal = PlainTextResponse(error.message, 429, {"Retry-After": "5"})
        except InvalidCredentialError as error:
            logger.warning("a request was refused: %s", type(error.reason).__name__)
            refusal = PlainTextResponse("Unauthorized", 401, {"WWW-Authenticate": "Bearer"})
        except asyncio.CancelledError:
            if not (watch.timed_out or watch.disconnected) or watch.stop():
                raise
        finally:
            watch.stop()
        if watch.timed_out:
            refusal = _too_late()
        if late:
            await late[0]
        elif refusal is not None and not watch.disconnected:
            await refusal(scope, ahead.read, send)
        return refusal is None and not watch.disconnected


def _too_late() -> PlainTextResponse:
    return PlainTextResponse("Finding out who asks took too long", 504)


def _own_session(scope: Scope) -> None:
    """Name the caller to the SDK, which by this keeps one caller's session from another."""
    identity = scope[IDENTITY]
    if identity is not None:
        token = AccessToken(token="", client_id=identity.id, scopes=[])
        scope["user"] = AuthenticatedUser(token)


def _name_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _replayed(messages: list[Message], receive: Receive) -> Receive:
    waiting = deque(messages)

    async def replay() -> Message:
        return waiting.popleft() if waiting else await receive()

    return replay
