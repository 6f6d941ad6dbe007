"""Serve MCP requests over HTTP, if possible without the SDK's models and streams.

`FastPath` serves clients since 2026-07-28. `HandshakeTransport` serves clients before it, which open a session with a
handshake.

Rule 1: the lean path serves only well-formed `tools/list` and `tools/call` requests. All others, in particular invalid
        requests, are passed to the SDK unchanged; requests of a session in the same exchange.
Rule 2: responses are identical to those of the SDK; a test compares them.
Rule 3: a session belongs to the caller that opened it; other callers cannot use it.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, nullcontext
from functools import partial
from typing import Any, Final, Literal, cast

import mcp_types as types
import msgspec
from mcp import MCPError
from mcp.server import Server
from mcp.server.connection import Connection
from mcp.server.runner import ServerRunner, serve_one
from mcp.shared.jsonrpc_dispatcher import progress_token_from_params
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from operations._decoding import build_from, decode_json
from operations._json import JSONValueError, object_of
from operations.channel import NOTHING
from operations.front.http import RequestState
from operations.front.messages import EVENT_STREAM, JSON, Reply
from operations.front.public_errors import Header
from operations.mcp.codec import sent_meta
from operations.mcp.serving.caller import LimitedCall, MCPCaller, SlowReply
from operations.mcp.serving.channels import SILENT, can_answer, lean_channel
from operations.mcp.serving.exchange import SESSION_HEADER, Exchange
from operations.mcp.serving.service import Service
from operations.mcp.serving.sessions import STANDALONE, Session, SessionTable
from operations.observe import trace_context
from operations.types import JSONObject

# ------------------------------------------------------------ plain requests


class _Implementation(msgspec.Struct):
    name: str
    version: str


class _Meta(msgspec.Struct):
    version: str | None = msgspec.field(
        default=None, name="io.modelcontextprotocol/protocolVersion"
    )
    capabilities: dict[str, dict[str, Any]] | None = msgspec.field(
        default=None, name="io.modelcontextprotocol/clientCapabilities"
    )
    client: _Implementation | None = msgspec.field(
        default=None, name="io.modelcontextprotocol/clientInfo"
    )
    level: msgspec.Raw | None = msgspec.field(default=None, name="io.modelcontextprotocol/logLevel")
    progress: int | str | None = msgspec.field(default=None, name="progressToken")
    traceparent: Any = None
    tracestate: Any = None

    @property
    def trace(self) -> Mapping[str, Any]:
        """The trace context of the request."""
        if self.traceparent is None:
            return NOTHING
        return trace_context({"traceparent": self.traceparent, "tracestate": self.tracestate})


class _Params(msgspec.Struct, rename="camel"):
    name: str | None = None
    arguments: dict[str, Any] | None = None
    cursor: str | None = None
    meta: _Meta | None = msgspec.field(default=None, name="_meta")
    task: msgspec.Raw | None = None
    request_state: msgspec.Raw | None = None
    input_responses: msgspec.Raw | None = None


class PlainRequest(msgspec.Struct):
    """A request that the lean path may serve."""

    jsonrpc: Literal["2.0"]
    id: int | str
    method: Literal["tools/call", "tools/list"]
    params: _Params = msgspec.field(default_factory=_Params)


_decode = msgspec.json.Decoder(PlainRequest).decode
_encode = msgspec.json.Encoder().encode


def decode_plain(body: bytes) -> PlainRequest | None:
    """Return the decoded request; None if it is not a well-formed call or listing of tools."""
    try:
        request = build_from(_decode, body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if request.method == "tools/call" and request.params.name is None:
        return None
    return None if request.params.task is not None else request


class _Named(msgspec.Struct):
    name: str


class _ToolCall(msgspec.Struct):
    method: Literal["tools/call"]
    params: _Named


_decode_call = msgspec.json.Decoder(_ToolCall).decode


def called_tool(body: bytes) -> str:
    """Return the name of the tool that a request calls; empty if the request does not call a tool."""
    try:
        return _decode_call(body).params.name
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ""


class _MetaOnly(msgspec.Struct):
    meta: dict[str, Any] | None = msgspec.field(default=None, name="_meta")


class _MetaRequest(msgspec.Struct):
    params: _MetaOnly


_decode_meta = msgspec.json.Decoder(_MetaRequest).decode


def decode_meta(body: bytes, request: PlainRequest, service: Service) -> Mapping[str, Any]:
    """Return the `_meta` of a plain request to forward to the server of its tool."""
    tool = service.catalog.tools.get(request.params.name or "")
    if request.params.meta is None or tool is None or not tool.is_imported:
        return NOTHING
    return sent_meta(_decode_meta(body).params.meta)


class FastPath:
    """Serves plain requests of clients since 2026-07-28.

    Args:
        service: Serves the requests.
        run_interactive: Runs calls of clients that can answer questions; see `RegistryServer.run_interactive`.
        server_info: The description of the server, which is part of every response since 2026-07-28.
    """

    def __init__(
        self,
        service: Service,
        run_interactive: Callable[..., Awaitable[JSONObject]],
        server_info: JSONObject,
    ) -> None:
        self._service = service
        self._streams = not service.settings.json_response
        self._run_interactive = run_interactive
        self._stamp = {types.SERVER_INFO_META_KEY: msgspec.Raw(_encode(server_info))}

    async def serve(self, state: RequestState, body: bytes) -> Reply | None:
        """Return the response to a POST if it is plain, else None."""
        headers = state.headers
        version = headers.get(b"mcp-protocol-version", b"").decode("latin-1")
        if version not in MODERN_PROTOCOL_VERSIONS or not _is_routable(state):
            return None
        request = decode_plain(body)
        if request is None or not self._is_plain(request, headers, version):
            return None
        meta = request.params.meta
        capabilities = meta.capabilities if meta is not None and meta.capabilities else NOTHING
        trace = NOTHING if meta is None else meta.trace
        sent = decode_meta(body, request, self._service)
        caller = MCPCaller.of(state, version, capabilities, trace, sent)
        stream = SlowReply(state, streams=self._streams and request.method == "tools/call")
        try:
            reply = self._reply(request, await self._answer(request, caller, state, stream))
        except MCPError:
            if stream.has_begun:
                raise
            # The SDK reports errors of the protocol, which are detected before the call starts.
            state.timeout.pause()
            return None
        finally:
            stream.stop()
            is_late, state.is_answered = state.is_answered, state.is_answered or stream.has_begun
        if stream.has_begun and not is_late:
            await stream.end(request.id, reply)
        return reply

    async def _answer(
        self, request: PlainRequest, caller: MCPCaller, state: RequestState, stream: SlowReply
    ) -> JSONObject:
        params, service = request.params, self._service
        if request.method == "tools/list":
            return service.list_tools_encoded(caller, params.cursor)
        name, arguments = params.name or "", params.arguments or {}
        if caller.capabilities and can_answer(caller.capabilities):
            work = self._run_interactive(
                caller, service.call_tool, SILENT, "tools/call", NOTHING, name, arguments
            )
            return await _until_disconnect(work, state)
        limited = service.limited_call(caller, state, name)
        work = service.call_tool(caller, name, arguments, SILENT, limited)
        if limited is None:
            return await _until_disconnect(work, state)
        state.answer_late = partial(self._answer_late, request, limited, stream)
        limited.start()
        return await limited.run(work)

    async def _answer_late(
        self, request: PlainRequest, limited: LimitedCall, stream: SlowReply
    ) -> None:
        stream.stop()
        reply = self._reply(request, limited.late_result())
        if stream.has_begun:
            await stream.end(request.id, reply)
        else:
            await reply.send(limited.state.send)

    def _reply(self, request: PlainRequest, result: JSONObject) -> Reply:
        noted = result.get("_meta")
        result["_meta"] = self._stamp if noted is None else {**noted, **self._stamp}
        message = {"jsonrpc": "2.0", "id": request.id, "result": result}
        return Reply(200, _encode(message), [JSON])

    def _is_plain(self, request: PlainRequest, headers: dict[bytes, bytes], version: str) -> bool:
        params = request.params
        meta = params.meta
        if (
            params.request_state is not None
            or params.input_responses is not None
            or meta is None
            or meta.progress is not None
            or meta.level is not None
            or meta.version != version
            or meta.capabilities is None
            or headers.get(b"mcp-method") != request.method.encode()
        ):
            return False
        if request.method == "tools/list":
            return True
        tool = self._service.catalog.tools.get(params.name or "")
        return (
            tool is not None
            and not tool.mirrors_headers
            and headers.get(b"mcp-name") == tool.name.encode()
        )


async def _until_disconnect(work: Awaitable[JSONObject], state: RequestState) -> JSONObject:
    """Return the result of work that is cancelled when its client disconnects."""
    state.timeout.start(None, state.receive)
    result = await work
    state.timeout.pause()
    return result


def _is_routable(state: RequestState) -> bool:
    """Return whether the headers are those of a plain request, without repetitions."""
    headers = state.headers
    accept = headers.get(b"accept", b"")
    if (
        len(headers) != len(state.scope["headers"])
        or b"mcp-session-id" in headers
        or not headers.get(b"content-type", b"").startswith(b"application/json")
        or b"application/json" not in accept
        or b"text/event-stream" not in accept
    ):
        return False
    return not any(name.startswith(b"mcp-param-") for name in headers)


# ------------------------------------------------------------ clients before 2026-07-28

_VERSION: Final = b"mcp-protocol-version"
_NO_SESSION: Final = "Session not found"


def is_handshake_version(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request comes from a client before 2026-07-28, by its headers."""
    version = headers.get(_VERSION)
    return version is None or version.decode("latin-1") in HANDSHAKE_PROTOCOL_VERSIONS


class HandshakeTransport:
    """Serves the requests of all clients before 2026-07-28.

    Args:
        server: The SDK's server, which handles all other requests.
        service: Serves plain calls.
        sessions: The open sessions; None without sessions.
        json_response: Whether responses are always JSON.
        lean: Whether plain calls use the lean path.
    """

    def __init__(
        self,
        server: Server[Any],
        service: Service,
        sessions: SessionTable | None,
        *,
        json_response: bool,
        lean: bool,
    ) -> None:
        self._server = server
        self._service = service
        self._sessions = sessions
        self._streams = not json_response
        self._lean = lean
        self._stateless = {
            version: Connection.from_envelope(version, None, None)
            for version in HANDSHAKE_PROTOCOL_VERSIONS
        }

    async def serve(self, state: RequestState, body: bytes) -> Reply | None:
        """Serve one request; return the response unless it was sent as a stream."""
        method = state.scope["method"]
        rejected = self._rejection(method, state.headers)
        if rejected is not None:
            return rejected
        if self._sessions is None:
            return await self._post(state, body, None)
        session_id = state.headers.get(SESSION_HEADER)
        if session_id is None:
            if method != "POST":
                return _failure(400, "Bad Request: Missing session ID")
            return await self._post(state, body, None)
        session = self._find(state)
        if session is None:
            return _failure(404, _NO_SESSION)
        if method == "DELETE":
            await self._sessions.end(session)
            return Reply(200, b"", [JSON])
        self._sessions.begin(session, state.credential, state.front.credentials)
        try:
            if method == "GET":
                return await self._read(state, session)
            return await self._post(state, body, session)
        finally:
            self._sessions.finish(session)

    def _rejection(self, method: str, headers: Mapping[bytes, bytes]) -> Reply | None:
        """Return the error response to a request whose method or headers the transport does not support."""
        if method != "POST" and (self._sessions is None or method not in ("GET", "DELETE")):
            allowed = b"POST" if self._sessions is None else b"GET, POST, DELETE"
            return _failure(405, "Method Not Allowed", (b"allow", allowed))
        accepts_json, accepts_stream, _ = _accepted(headers)
        if method == "GET" and not accepts_stream:
            return _failure(406, "Not Acceptable: Client must accept text/event-stream")
        if method != "POST":
            return None
        if not accepts_json or (self._streams and not accepts_stream):
            kinds = "both application/json and text/event-stream"
            kinds = kinds if self._streams else "application/json"
            return _failure(406, f"Not Acceptable: Client must accept {kinds}")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            return _failure(415, "Unsupported Media Type: Content-Type must be application/json")
        return None

    def knows(self, state: RequestState) -> bool:
        """Return whether a request names an open session of its caller."""
        return self._find(state) is not None

    def _find(self, state: RequestState) -> Session | None:
        if self._sessions is None:
            return None
        session_id = state.headers.get(SESSION_HEADER, b"").decode("latin-1")
        owner = None if state.identity is None else state.identity.key
        return self._sessions.find(session_id, owner)

    # ------------------------------------------------------------ POST

    async def _post(
        self, state: RequestState, body: bytes, session: Session | None
    ) -> Reply | None:
        plain = decode_plain(body) if self._lean else None
        if plain is not None and (plain.params.meta is None or plain.params.meta.version is None):
            sent = decode_meta(body, plain, self._service)
            return await self._plain(state, plain, session, sent)
        message = _decode_message(body, state.front.limits.values)
        if isinstance(message, Reply):
            return message
        is_notification = "id" not in message
        if "method" not in message:
            if session is not None:
                session.answer(message)
            return _accepted_reply()
        method, params = message["method"], message.get("params")
        if self._sessions is not None and session is None:
            if method != "initialize" or is_notification:
                return _failure(400, "Bad Request: Missing session ID")
            return await self._open(state, message)
        version = self._version(state, session)
        request_id = "" if is_notification else message["id"]
        token = progress_token_from_params(params)
        exchange = self._exchange(state, request_id, version, session, token)
        # The SDK checks the message and calls our handler for it.
        if session is None:
            if is_notification:
                return _accepted_reply()
            connection = Connection.from_envelope(version, None, None)
            options: Any = {"connection": connection, "lifespan_state": None}
            work = serve_one(self._server, exchange, method, params, **options)
            return await exchange.serve(work)
        runner = ServerRunner(self._server, session.connection, None)
        if not is_notification:
            return await exchange.serve(runner.on_request(exchange, method, params))
        if method == "notifications/cancelled":
            session.cancel(object_of(params).get("requestId"))
        else:
            await runner.on_notify(exchange, method, params)
        return _accepted_reply()

    async def _open(self, state: RequestState, message: Mapping[str, Any]) -> Reply | None:
        """Serve the request that opens a session."""
        sessions = self._sessions
        assert sessions is not None  # noqa: S101 - only called with sessions
        await sessions.make_room(state.caller, state.front.limits)
        session = Session(state.caller, None if state.identity is None else state.identity.key)
        params = message.get("params")
        exchange = Exchange(state, message["id"], "", session, streams=False)
        options = self._server.create_initialization_options()
        options.instructions = self._service.instructions(state.identity)
        runner = ServerRunner(self._server, session.connection, None, init_options=options)
        reply = await exchange.serve(
            runner.on_request(exchange, "initialize", params),
            (SESSION_HEADER, session.id.encode()),
        )
        if session.connection.initialize_accepted:
            session.opened()
            sessions.add(session, state.credential, state.front.credentials)
        return reply

    async def _plain(
        self,
        state: RequestState,
        request: PlainRequest,
        session: Session | None,
        sent: Mapping[str, Any],
    ) -> Reply | None:
        """Serve a plain call without the SDK's models."""
        if self._sessions is not None and session is None:
            return _failure(400, "Bad Request: Missing session ID")
        version = self._version(state, session)
        connection = self._stateless[version] if session is None else session.connection
        meta = request.params.meta
        token = None if meta is None else meta.progress
        exchange = self._exchange(state, request.id, version, session, token)
        trace = NOTHING if meta is None else meta.trace
        capabilities = NOTHING if session is None else session.capabilities
        caller = MCPCaller.of(state, version, capabilities, trace, sent)
        params = request.params
        if request.method == "tools/list":
            return await exchange.serve(self._list(caller, params.cursor))
        name = params.name or ""
        channel = lean_channel(exchange, connection, version, capabilities)
        limited = self._service.limited_call(caller, state, name)
        call = self._service.call_tool(caller, name, params.arguments or {}, channel, limited)
        return await exchange.serve(call, limited=limited)

    async def _list(self, caller: MCPCaller, cursor: str | None) -> JSONObject:
        return self._service.list_tools_encoded(caller, cursor)

    def _exchange(
        self,
        state: RequestState,
        request_id: int | str,
        version: str,
        session: Session | None,
        progress_token: int | str | None,
    ) -> Exchange:
        return Exchange(
            state,
            request_id,
            version,
            session,
            progress_token,
            streams=self._streams,
            prefers_stream=self._streams and _accepted(state.headers)[2],
        )

    @staticmethod
    def _version(state: RequestState, session: Session | None) -> str:
        if session is not None:
            return session.connection.protocol_version
        return state.headers.get(_VERSION, b"").decode() or types.DEFAULT_NEGOTIATED_VERSION

    # ------------------------------------------------------------ GET

    async def _read(self, state: RequestState, session: Session) -> Reply | None:
        """Send the events of a stream until it ends, live or after the last event that the client received."""
        log = session.log
        last = state.headers.get(b"last-event-id")
        place: tuple[int, int] | None
        if last is None:
            if log.is_read(STANDALONE):
                return _failure(409, "Conflict: Only one SSE stream is allowed per session")
            place = (log.latest, STANDALONE)
        else:
            place = log.find(last.decode("latin-1"))
        headers = [*EVENT_STREAM, (SESSION_HEADER, session.id.encode())]
        await state.send({"type": "http.response.start", "status": 200, "headers": headers})
        state.timeout.start(None, state.receive)
        idle = nullcontext() if last is not None else state.front.open_streams.idle()
        with state.front.credentials.ending(state.credential), idle:
            if place is not None:
                # Some servers send the headers only with the first part of the body.
                await state.send_part(b": open\n\n")
                async with aclosing(log.follow(place[1], place[0])) as parts:
                    async for part in parts:
                        await state.send_part(part)
        state.timeout.pause()
        await state.send({"type": "http.response.body", "body": b""})
        return None


def _accepted(headers: Mapping[bytes, bytes]) -> tuple[bool, bool, bool]:
    """Return whether a client accepts JSON, whether it accepts event streams, and whether it prefers event streams."""
    accept = headers.get(b"accept", b"")
    kinds = [part.partition(b";")[0].strip().lower() for part in accept.split(b",")]
    anything = b"*/*" in kinds
    accepts_json = anything or b"application/json" in kinds or b"application/*" in kinds
    accepts_stream = anything or b"text/event-stream" in kinds or b"text/*" in kinds
    prefers_stream = accepts_json and kinds[0] == b"text/event-stream"
    return accepts_json, accepts_stream, prefers_stream


def _decode_message(body: bytes, max_values: int) -> JSONObject | Reply:
    """Return the JSON-RPC message in a body; the error response if it is not valid."""
    try:
        message = decode_json(body, max_values=max_values)
    except JSONValueError as error:
        return _failure(400, f"Parse error: the body {error.reason}", code=types.PARSE_ERROR)
    try:
        checked = types.jsonrpc_message_adapter.validate_python(message, by_name=False)
    except ValidationError:
        reason = "the body is not a message of JSON-RPC 2.0"
        if isinstance(message, list):
            reason = "batches are not supported, send one message per request"
        return _failure(400, f"Invalid Request: {reason}")
    if isinstance(checked, types.JSONRPCNotification) and "id" in message:
        return _failure(400, "Validation error: the id is neither a number nor a string")
    return cast("JSONObject", message)


def _accepted_reply() -> Reply:
    return Reply(202, b"", [])


def _failure(
    status: int, message: str, *headers: Header, code: int = types.INVALID_REQUEST
) -> Reply:
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return Reply(status, msgspec.json.encode(body), [JSON, *headers])


def reject_malformed(body: bytes, max_values: int) -> Reply | None:
    """Return the error response to a body that is not valid JSON by our rules; None if it is valid."""
    try:
        decode_json(body, max_values=max_values)
    except JSONValueError as error:
        return _failure(400, f"Parse error: the body {error.reason}", code=types.PARSE_ERROR)
    return None
