"""The transports of a server: streamable HTTP, and standard input and output within limits.

MCP requests over HTTP pass the same steps as all other requests, and are then served by protocol revision.

Rule 1: `HandshakeTransport` serves clients before 2026-07-28, `ModernTransport` serves newer clients.
Rule 2: every message is first decoded with our own JSON rules, because the SDK's reader accepts NaN and replaces
        invalid UTF-8. On standard input, a malformed or too large message is answered with an error if it has an id.
Rule 3: while standard input is served, descriptor 0 is the null device, so that handlers and child processes cannot
        read messages.
"""

import asyncio
import logging
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, BinaryIO, Final, cast

import anyio.to_thread
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from operations.base.errors import CallError, ErrorCode
from operations.base.tasks import cancel_tasks
from operations.base.text import enforce_lists
from operations.front.front import Front
from operations.front.guard import HostGuard
from operations.front.messages import (
    REQUEST_ID,
    Reply,
    decode_body,
    enforce_body_bounds,
    read_body,
    route_path,
)
from operations.front.pipeline import RequestPipeline
from operations.front.public_errors import not_found, too_large
from operations.front.request import STATE, RequestState, Slots, Target, challenge_of
from operations.io.guard import LOOPBACK
from operations.mcp.serving.requests import (
    LISTEN,
    HandshakeTransport,
    ModernTransport,
    called_tool,
    decode_message,
    is_answer,
    is_handshake_version,
    rejection,
)
from operations.mcp.serving.service import Service

logger = logging.getLogger("operations")

_LARGE: Final = 1024 * 1024


class MCPApp:
    """The ASGI application. If its server does not run its lifespan, it starts with the first request.

    Args:
        server: The SDK's server.
        service: Serves the registry.
        pipeline: Identifies callers and applies limits.
        is_guarded: Whether to check Host and Origin; False if the application around it does.
        path: See `RegistryServer.asgi_app`, also for the other arguments.
    """

    def __init__(
        self,
        server: Server[Any],
        service: Service,
        pipeline: RequestPipeline,
        *,
        is_guarded: bool = True,
        path: str | None = "/mcp",
        hosts: Collection[str] | None = LOOPBACK,
        origins: Collection[str] = (),
        lean: bool = True,
    ) -> None:
        self._server = server
        self.service = service
        self._pipeline = pipeline
        self._paths = None if path is None else (path.rstrip("/"), path.rstrip("/") + "/")
        enforce_lists(hosts=hosts, origins=origins)
        self._entry: ASGIApp = self._serve_path
        if is_guarded:
            self._entry = HostGuard(self._serve_path, ("*",) if hosts is None else hosts, origins)
        self._modern = ModernTransport(server, service, lean=lean)
        self._handshake = HandshakeTransport(server, service, lean=lean)
        self._is_running = False
        self._background: asyncio.Task[None] | None = None
        self._is_ready = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Serve for the duration of an `async with` block."""
        async with self._server.lifespan(self._server):
            self._is_running = True
            sessions = self._handshake.sessions
            expiring = asyncio.Task(sessions.expire())
            try:
                yield
            finally:
                self._is_running = False
                await cancel_tasks(expiring)
                await sessions.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] == "lifespan":
            await Router(lifespan=lambda _: self.running()).lifespan(scope, receive, send)
        elif scope["type"] != "http":
            raise RuntimeError("MCP is served over HTTP")
        else:
            if not self._is_running:
                await self._start()
            await self._entry(scope, receive, send)

    async def _start(self) -> None:
        """Run in the background, because frameworks do not run the lifespan of a mounted application."""
        if self._background is None or self._background.done():
            self._is_ready = asyncio.Event()
            self._background = asyncio.Task(self._run(self._is_ready))
        await self._is_ready.wait()

    async def _run(self, is_ready: asyncio.Event) -> None:
        try:
            async with self.running():
                is_ready.set()
                await asyncio.Event().wait()
        finally:
            is_ready.set()

    async def _serve_path(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = self._paths is None or route_path(scope) in self._paths
        if is_ours:
            scope["headers"] = [(name, value.strip()) for name, value in scope["headers"]]
        await self._pipeline.serve(scope, receive, send, self if is_ours else _NOTHING)

    # ------------------------------------------------------------ the steps of a request

    def place(self, state: RequestState) -> Target:
        """Return which slot the request takes; answers of clients have slots of their own."""
        method = state.scope["method"]
        if method == "GET" or state.headers.get(b"mcp-method") == LISTEN:
            return _STREAM
        return _MESSAGE if method == "POST" and self._handshake.knows(state) else _CALL

    async def read(self, state: RequestState) -> Any:
        """Return the message of a POST; or the response that rejects the request."""
        scope = state.scope
        scope[STATE] = state
        scope[REQUEST_ID] = state.context.request_id
        is_post = scope["method"] == "POST"
        body = await _read(state) if is_post else b""
        rejected = rejection(state, self._transport(state).methods())
        if rejected is not None:
            return rejected
        message = decode_message(body) if is_post else None
        if (
            state.exhausted is not None
            and not isinstance(message, Reply)
            and not is_answer(message)
        ):
            raise state.exhausted
        return message

    async def run(self, state: RequestState, asked: Any) -> Reply | None:
        """Serve the message."""
        if isinstance(asked, Reply):
            return asked
        if state.front.challenge.authorization_servers:
            self._enforce_scopes(called_tool(asked), state)
        return await self._transport(state).serve(state, asked)

    def _transport(self, state: RequestState) -> HandshakeTransport | ModernTransport:
        return self._handshake if is_handshake_version(state.headers) else self._modern

    def _enforce_scopes(self, name: str, state: RequestState) -> None:
        """Reject a call of a tool whose scopes are advertised, so that an OAuth client requests them.

        Raises:
            CallError: 401 or 403, with a challenge.
        """
        tool = self.service.catalog.tools.get(name)
        if tool is None:
            return
        try:
            state.front.enforce_visible(tool.spec, state.identity, path=route_path(state.scope))
        except CallError as error:
            # The service reports all other errors.
            if error.code == ErrorCode.ACCESS_DENIED:
                challenge = challenge_of(state.scope, state.front)
                raise (error if state.identity else challenge.missing()) from None


async def _read(state: RequestState) -> bytes:
    limits = state.front.limits
    state.timeout.start(limits.body_seconds)
    body = await read_body(state.scope, state.receive, state.headers, limits)
    state.timeout.pause()
    enforce_body_bounds(body, limits)
    if len(body) > _LARGE:
        # Let other tasks run between the check and the decoding.
        await asyncio.sleep(0)
    return body


_CALL = Target(slots=Slots.CALLS, is_watched=False)
_MESSAGE = Target(slots=Slots.CALLS, may_answer=True, is_watched=False)
_STREAM = Target(slots=Slots.STREAMS, is_watched=False)


class _Nothing:
    """Serves the paths at which there is no MCP."""

    def place(self, _state: RequestState) -> Target:
        """Return that the request only counts against its caller."""
        return Target()

    async def read(self, _state: RequestState) -> None:
        """Read nothing."""

    async def run(self, _state: RequestState, _asked: None) -> Reply:
        """Raise the error."""
        raise not_found()


_NOTHING = _Nothing()


# ------------------------------------------------------------ standard input and output

_STDIN: Final = 0

# These match only if no nested value precedes the name, so that it is a name of the message itself.
_ID: Final = re.compile(rb'\s*\{[^\[{]{0,1000}?"id"\s*:\s*(?:(-?\d{1,18})|"([^"\\]{1,200})")')
_OUTCOME: Final = re.compile(rb'\s*\{[^\[{]{0,1000}?"(?:result|error)"\s*:')


@asynccontextmanager
async def bounded_stdio(front: Front) -> AsyncGenerator[tuple[Any, Any]]:
    """Yield the SDK's streams of standard input and output, with the limits of a front."""
    with _claimed_stdin() as file:
        lines = _BoundedLines(file, front)
        async with stdio_server(stdin=cast("Any", lines)) as (incoming, outgoing):
            lines.send = outgoing.send
            yield incoming, outgoing


@contextmanager
def _claimed_stdin() -> Generator[BinaryIO]:
    """Yield standard input as a new file, and replace descriptor 0 by the null device."""
    file = os.fdopen(os.dup(_STDIN), "rb", closefd=False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, _STDIN)
    os.close(null)
    try:
        yield file
    finally:
        # A thread may still read from it, so it is not closed.
        os.dup2(file.fileno(), _STDIN)


class _BoundedLines:
    """The lines of a file that are within the limits, for the SDK's reader."""

    def __init__(self, file: BinaryIO, front: Front) -> None:
        self._file = file
        self._front = front
        self.send: Callable[[SessionMessage], Awaitable[None]] | None = None

    async def __aiter__(self) -> AsyncGenerator[str]:
        while True:
            line, error = await anyio.to_thread.run_sync(self._read, abandon_on_cancel=True)
            if error is not None:
                await self._reject(line, error)
            elif line:
                yield line.decode()
            else:
                return

    def _read(self) -> tuple[bytes, ErrorData | None]:
        """Return the next line and the reason if it is invalid; only the beginning of a line that is too long."""
        limits = self._front.limits
        most = limits.body_bytes
        while (line := self._file.readline(most + 1)).isspace():
            # Some clients separate messages by blank lines.
            pass
        if len(line) > most and not line.endswith(b"\n"):
            while (rest := self._file.readline(most)) and not rest.endswith(b"\n"):
                pass
            return line, _refusal(too_large(f"The message is larger than {most} bytes"))
        try:
            if line:
                jsonrpc_message_adapter.validate_python(decode_body(line, limits), by_name=False)
        except CallError as error:
            return line, _refusal(error)
        except ValidationError:
            reason = "Invalid Request: the line is not a message of JSON-RPC 2.0"
            return line, ErrorData(code=INVALID_REQUEST, message=reason)
        return line, None

    async def _reject(self, line: bytes, error: ErrorData) -> None:
        # Responses are not answered: their id is ours.
        found = None if _OUTCOME.match(line) else _ID.match(line)
        if found is None or self.send is None:
            logger.warning("dropped an MCP message: %s", error.message)
            return
        number, text = found.groups()
        request_id = int(number) if number is not None else text.decode(errors="replace")
        await self.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=request_id, error=error)))


def _refusal(error: CallError) -> ErrorData:
    code = PARSE_ERROR if error.code == ErrorCode.VALIDATION_ERROR else INTERNAL_ERROR
    return ErrorData(code=code, message=error.message, data=error.to_wire())
