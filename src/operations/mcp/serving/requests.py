"""Serve MCP requests over HTTP, if possible without the SDK's models and streams.

`ModernTransport` serves clients since 2026-07-28. `HandshakeTransport` serves clients before it, which open a session
with a handshake.

Rule 1: the lean path serves only well-formed `tools/list` and `tools/call` requests. All others, in particular invalid
        requests, are passed to the SDK unchanged, in the same exchange.
Rule 2: responses are identical to those of the SDK; a test compares them.
Rule 3: a session belongs to the caller that opened it; other callers cannot use it.
"""

from collections.abc import Awaitable, Mapping
from contextlib import aclosing, nullcontext
from typing import Any, Final, Literal, TypeVar

import mcp_types as types
import msgspec
from mcp import MCPError
from mcp.server import Server
from mcp.server.connection import Connection
from mcp.server.runner import ServerRunner, serve_one
from mcp.shared.inbound import (
    InboundLadderRejection,
    classify_inbound_request,
    decode_header_value,
    find_duplicated_routing_header,
    unsupported_protocol_version_rejection,
    validate_mcp_param_headers,
)
from mcp.shared.jsonrpc_dispatcher import progress_token_from_params
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from starlette.datastructures import Headers

from operations.base.json.decoding import decode_bounded
from operations.base.json.values import JSONValueError, is_object, object_of, text_of
from operations.base.types import JSONObject
from operations.contract.channel import NOTHING, CallerChannel
from operations.front.messages import EVENT_STREAM, JSON, Reply
from operations.front.public_errors import Header
from operations.front.request import RequestState
from operations.mcp.serving.caller import MCPCaller
from operations.mcp.serving.channels import SILENT, can_answer, channel_for
from operations.mcp.serving.exchange import SESSION_HEADER, Exchange
from operations.mcp.serving.service import Service
from operations.mcp.serving.sessions import STANDALONE, Session, SessionTable

VerdictT = TypeVar("VerdictT")

LISTEN: Final = b"subscriptions/listen"
"""The method whose response stays open."""

_TASK_METHODS: Final = ("tasks/get", "tasks/update", "tasks/cancel")

VERSION: Final = b"mcp-protocol-version"
"""The header with the protocol revision of a request."""

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
    level: Any = msgspec.field(default=None, name="io.modelcontextprotocol/logLevel")
    progress: int | str | None = msgspec.field(default=None, name="progressToken")


class _Params(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    arguments: dict[str, Any] | None = None
    cursor: str | None = None
    meta: _Meta = msgspec.field(default_factory=_Meta, name="_meta")


class PlainRequest(msgspec.Struct):
    """A request that the lean path may serve."""

    jsonrpc: Literal["2.0"]
    id: int | str
    method: Literal["tools/call", "tools/list"]
    params: _Params = msgspec.field(default_factory=_Params)


_encode = msgspec.json.Encoder().encode


def plain_request(message: Any) -> PlainRequest | None:
    """Return a message as a plain request; None if it is not a well-formed call or listing of tools."""
    try:
        request = msgspec.convert(message, PlainRequest)
    except msgspec.ValidationError:
        return None
    is_named = request.method == "tools/list" or request.params.name is not None
    return request if is_named else None


def called_tool(message: Any) -> str:
    """Return the name of the tool that a request calls; empty if the request does not call a tool."""
    request = object_of(message)
    name = object_of(request.get("params")).get("name")
    return text_of(name) if request.get("method") == "tools/call" else ""


def is_answer(message: Any) -> bool:
    """Return whether a message does not start a call: an answer to a question, or a notification."""
    return is_object(message) and (message.get("method") is None or message.get("id") is None)


# ------------------------------------------------------------ clients since 2026-07-28


class ModernTransport:
    """Serves the requests of all clients since 2026-07-28.

    Args:
        server: The SDK's server, which handles all other requests.
        service: Serves plain requests.
        lean: Whether plain requests use the lean path.
    """

    def __init__(self, server: Server[Any], service: Service, *, lean: bool) -> None:
        self._server = server
        self._service = service
        self._lean = lean
        self._stamp = {types.SERVER_INFO_META_KEY: msgspec.Raw(_encode(server.server_info_stamp))}

    def methods(self) -> tuple[bytes, ...]:
        """Return the supported HTTP methods."""
        return (b"POST",)

    async def serve(self, state: RequestState, message: Any) -> Reply | None:
        """Serve one message; return the response unless it was sent as a stream."""
        is_stream = state.headers.get(b"mcp-method") == LISTEN
        plain = self._find(state, message) if self._lean else None
        if plain is not None:
            return await self._plain(state, plain, message)
        invalid = refusal(message)
        if invalid is not None:
            return invalid
        if "method" not in message:
            return failure(400, "Invalid Request: responses are not accepted")
        if "id" not in message:
            refused = unsupported_protocol_version_rejection(
                state.headers[VERSION].decode("latin-1")
            )
            if refused is None:
                return accepted_reply()
            return failure(400, refused.message, code=refused.code, data=refused.data)
        token = progress_token_from_params(message.get("params"))
        options: Any = {"streams": True, "stamp": self._stamp}
        exchange = Exchange(state, message["id"], None, token, **options)
        ending = state.front.open_streams.watching(exchange.end, is_idle=True)
        with ending if is_stream else nullcontext():
            return await exchange.serve(self._run(state, message, exchange))

    async def _run(
        self, state: RequestState, message: JSONObject, exchange: Exchange
    ) -> JSONObject:
        """Let the SDK's server handle a request whose headers match its body.

        Raises:
            MCPError: If they do not match.
        """
        headers = Headers(raw=state.scope["headers"])
        duplicated = find_duplicated_routing_header(headers.items())
        if duplicated is not None:
            raise MCPError(types.HEADER_MISMATCH, f"{duplicated} header appears more than once")
        route = _accept(classify_inbound_request(message, headers=dict(headers)))
        method, params = message["method"], message.get("params")
        if method in _TASK_METHODS:
            named = decode_header_value(headers.get("mcp-name"))
            # Clients of fastmcp-tasks 4.1 omit it.
            if named is not None and named != object_of(params).get("taskId"):
                reason = "Mcp-Name header does not match the request body's 'taskId' parameter"
                raise MCPError(types.HEADER_MISMATCH, reason)
        schema_of = self._server.get_tool_input_schema
        if method == "tools/call" and schema_of is not None:
            called = object_of(params)
            schema, arguments = schema_of(text_of(called.get("name"))), called.get("arguments")
            _accept(validate_mcp_param_headers(schema, object_of(arguments), headers))
        connection = Connection.from_envelope(
            route.protocol_version, route.client_info, route.client_capabilities
        )
        options: Any = {"connection": connection, "lifespan_state": None}
        return await serve_one(self._server, exchange, method, params, **options)

    def _find(self, state: RequestState, message: Any) -> PlainRequest | None:
        """Return a message as a plain request, if it is one and its headers match it."""
        headers, request = state.headers, plain_request(message)
        version = headers.get(VERSION, b"").decode("latin-1")
        if (
            request is None
            or version not in MODERN_PROTOCOL_VERSIONS
            or len(headers) != len(state.scope["headers"])
            or b"mcp-session-id" in headers
            or any(name.startswith(b"mcp-param-") for name in headers)
            or headers.get(b"mcp-method") != request.method.encode()
        ):
            return None
        params, meta = request.params, request.params.meta
        if (
            meta.progress is not None
            or meta.level is not None
            or meta.version != version
            or meta.capabilities is None
        ):
            return None
        if request.method == "tools/list":
            return request
        tool = self._service.catalog.tools.get(params.name or "")
        is_named = tool is not None and headers.get(b"mcp-name") == tool.name.encode()
        return None if tool is None or tool.mirrors_headers or not is_named else request

    async def _plain(
        self, state: RequestState, request: PlainRequest, message: JSONObject
    ) -> Reply | None:
        """Serve a plain request without the SDK's models."""
        service, params, meta = self._service, request.params, request.params.meta
        version, capabilities = meta.version or "", meta.capabilities or NOTHING
        caller = MCPCaller.of(state, version, capabilities, message["params"]["_meta"])
        is_call = request.method == "tools/call"
        exchange = Exchange(state, request.id, streams=is_call, stamp=self._stamp)
        if is_call and capabilities and can_answer(capabilities):
            what = (SILENT, "tools/call", NOTHING, params.name, params.arguments or {})
            return await exchange.serve(service.run_interactive(caller, service.call_tool, *what))
        return await serve_plain(service, state, request, exchange, caller, SILENT)


def _accept(verdict: VerdictT | InboundLadderRejection) -> VerdictT:
    """Return the verdict of a check of the SDK.

    Raises:
        MCPError: If the request is rejected.
    """
    if isinstance(verdict, InboundLadderRejection):
        raise MCPError(verdict.code, verdict.message, verdict.data)
    return verdict


def serve_plain(
    service: Service,
    state: RequestState,
    request: PlainRequest,
    exchange: Exchange,
    caller: MCPCaller,
    channel: CallerChannel,
) -> Awaitable[Reply | None]:
    """Serve a plain request; return the response unless it was sent as a stream."""
    params = request.params
    if request.method == "tools/list":
        return exchange.serve(service.list_tools(caller, params.cursor))
    name = params.name or ""
    limited = service.limited_call(caller, state, name)
    call = service.call_tool(caller, name, params.arguments or {}, channel, limited)
    return exchange.serve(call, limited=limited)


# ------------------------------------------------------------ clients before 2026-07-28


class HandshakeTransport:
    """Serves the requests of all clients before 2026-07-28.

    Args:
        server: The SDK's server, which handles all other requests.
        service: Serves plain calls.
        lean: Whether plain calls use the lean path.
    """

    def __init__(self, server: Server[Any], service: Service, *, lean: bool) -> None:
        self._server = server
        self._service = service
        self.sessions = SessionTable(service.settings.session_idle_timeout)
        """The open sessions; none if the server is stateless."""

        self._is_stateless = service.settings.stateless
        self._lean = lean
        self._stateless = {
            version: Connection.from_envelope(version, None, None)
            for version in HANDSHAKE_PROTOCOL_VERSIONS
        }

    def methods(self) -> tuple[bytes, ...]:
        """Return the supported HTTP methods."""
        return (b"POST",) if self._is_stateless else (b"GET", b"POST", b"DELETE")

    async def serve(self, state: RequestState, message: Any) -> Reply | None:
        """Serve one request, with the message of a POST; return the response unless it was sent as a stream."""
        method = state.scope["method"]
        is_new = SESSION_HEADER not in state.headers
        if self._is_stateless or (is_new and method == "POST"):
            return await self._post(state, message, None)
        if is_new:
            return failure(400, "Bad Request: Missing session ID")
        session = self._find(state)
        if session is None:
            return failure(404, "Session not found")
        if method == "DELETE":
            await self.sessions.end(session)
            return Reply(200, b"", [JSON])
        with self.sessions.in_use(session, state.credential, state.front.credentials):
            if method == "GET":
                return await self._read(state, session)
            return await self._post(state, message, session)

    def knows(self, state: RequestState) -> bool:
        """Return whether a request names an open session of its caller."""
        return self._find(state) is not None

    def _find(self, state: RequestState) -> Session | None:
        session_id = state.headers.get(SESSION_HEADER, b"").decode("latin-1")
        owner = None if state.identity is None else state.identity.key
        return self.sessions.find(session_id, owner)

    async def _post(
        self, state: RequestState, message: Any, session: Session | None
    ) -> Reply | None:
        is_missing = session is None and not self._is_stateless
        plain = plain_request(message) if self._lean and not is_missing else None
        if plain is not None and plain.params.meta.version is None:
            return await self._plain(state, plain, message, session)
        invalid = refusal(message)
        if invalid is not None:
            return invalid
        if "method" not in message:
            if session is not None:
                session.answer(message)
            return accepted_reply()
        is_notification = "id" not in message
        if is_missing:
            if message["method"] != "initialize" or is_notification:
                return failure(400, "Bad Request: Missing session ID")
            return await self._open(state, message)
        request_id = "" if is_notification else message["id"]
        token = progress_token_from_params(message.get("params"))
        exchange = Exchange(state, request_id, session, token, streams=True)
        return await self._run(state, message, session, exchange)

    async def _run(
        self, state: RequestState, message: JSONObject, session: Session | None, exchange: Exchange
    ) -> Reply | None:
        """Serve a message; the SDK checks it and calls our handler."""
        method, params = message["method"], message.get("params")
        is_request = "id" in message
        if session is None:
            if not is_request:
                return accepted_reply()
            connection = Connection.from_envelope(self._version(state), None, None)
            options: Any = {"connection": connection, "lifespan_state": None}
            work = serve_one(self._server, exchange, method, params, **options)
            return await exchange.serve(work)
        runner = ServerRunner(self._server, session.connection, None)
        if is_request:
            return await exchange.serve(runner.on_request(exchange, method, params))
        if method == "notifications/cancelled":
            session.cancel(object_of(params).get("requestId"))
        else:
            await runner.on_notify(exchange, method, params)
        return accepted_reply()

    async def _open(self, state: RequestState, message: Mapping[str, Any]) -> Reply | None:
        """Serve the request that opens a session."""
        await self.sessions.make_room(
            state.caller, state.front.limits, is_identified=state.identity is not None
        )
        session = Session(state.caller, None if state.identity is None else state.identity.key)
        params = message.get("params")
        exchange = Exchange(state, message["id"], session, streams=False)
        extensions = self._service.extensions(state.identity)
        options = self._server.create_initialization_options(extensions=extensions)
        options.instructions = self._service.instructions(state.identity)
        runner = ServerRunner(self._server, session.connection, None, init_options=options)
        reply = await exchange.serve(
            runner.on_request(exchange, "initialize", params),
            (SESSION_HEADER, session.id.encode()),
        )
        if session.connection.initialize_accepted:
            self.sessions.add(session, state.credential, state.front.credentials)
        return reply

    async def _plain(
        self,
        state: RequestState,
        request: PlainRequest,
        message: JSONObject,
        session: Session | None,
    ) -> Reply | None:
        """Serve a plain call without the SDK's models."""
        connection = (
            self._stateless[self._version(state)] if session is None else session.connection
        )
        token = request.params.meta.progress
        exchange = Exchange(state, request.id, session, token, streams=True)
        capabilities = NOTHING if session is None else session.capabilities
        meta = object_of(message.get("params")).get("_meta")
        caller = MCPCaller.of(state, connection.protocol_version, capabilities, meta)
        release = exchange.release if exchange.can_release else None
        channel = channel_for(exchange, connection, capabilities, release=release)
        return await serve_plain(self._service, state, request, exchange, caller, channel)

    @staticmethod
    def _version(state: RequestState) -> str:
        """Return the revision of a client without a session."""
        return state.headers.get(VERSION, b"").decode() or types.DEFAULT_NEGOTIATED_VERSION

    async def _read(self, state: RequestState, session: Session) -> Reply | None:
        """Send the events of a stream until it ends, live or after the last event that the client received."""
        log = session.log
        last = state.headers.get(b"last-event-id")
        place: tuple[int, int] | None
        if last is None:
            if log.is_read(STANDALONE):
                return failure(409, "Conflict: Only one SSE stream is allowed per session")
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
                async with aclosing(log.follow(place[1], place[0], state.front.heartbeat)) as parts:
                    async for part in parts:
                        await state.send_part(part)
        state.timeout.pause()
        await state.send({"type": "http.response.body", "body": b""})
        return None


# ------------------------------------------------------------ headers and messages


def is_handshake_version(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request comes from a client before 2026-07-28, by its headers."""
    version = headers.get(VERSION)
    return version is None or version.decode("latin-1") in HANDSHAKE_PROTOCOL_VERSIONS


def rejection(state: RequestState, allowed: tuple[bytes, ...]) -> Reply | None:
    """Return the error response to a request whose method or headers are not supported."""
    method, headers = state.scope["method"], state.headers
    if method.encode() not in allowed:
        return failure(405, "Method Not Allowed", (b"allow", b", ".join(allowed)))
    accepts_json, accepts_stream = _accepts(headers)
    if method == "GET" and not accepts_stream:
        return failure(406, "Not Acceptable: Client must accept text/event-stream")
    if method != "POST":
        return None
    if not (accepts_json and accepts_stream):
        kinds = "both application/json and text/event-stream"
        return failure(406, f"Not Acceptable: Client must accept {kinds}")
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        return failure(415, "Unsupported Media Type: Content-Type must be application/json")
    return None


def _accepts(headers: Mapping[bytes, bytes]) -> tuple[bool, bool]:
    """Return whether a client accepts JSON, and whether it accepts event streams."""
    accept = headers.get(b"accept", b"")
    kinds = {part.partition(b";")[0].strip().lower() for part in accept.split(b",")}
    accepts_json = not kinds.isdisjoint((b"application/json", b"application/*", b"*/*"))
    return accepts_json, not kinds.isdisjoint((b"text/event-stream", b"text/*", b"*/*"))


def decode_message(body: bytes) -> Any:
    """Return the message in a body, which is not checked; the error response if the body is not JSON."""
    try:
        return decode_bounded(body)
    except JSONValueError as error:
        return failure(400, f"Parse error: the body {error.reason}", code=types.PARSE_ERROR)


def refusal(message: Any) -> Reply | None:
    """Return the error response to a value that is not a message of JSON-RPC."""
    try:
        checked = types.jsonrpc_message_adapter.validate_python(message, by_name=False)
    except ValidationError:
        reason = "the body is not a message of JSON-RPC 2.0"
        if isinstance(message, list):
            reason = "batches are not supported, send one message per request"
        return failure(400, f"Invalid Request: {reason}")
    if isinstance(checked, types.JSONRPCNotification) and "id" in message:
        return failure(400, "Validation error: the id is neither a number nor a string")
    return None


def accepted_reply() -> Reply:
    """Return the response to a message that has no result."""
    return Reply(202, b"", [])


def failure(
    status: int, message: str, *headers: Header, code: int = types.INVALID_REQUEST, data: Any = None
) -> Reply:
    """Return the response to a message that is rejected."""
    error = {"code": code, "message": message, **({"data": data} if data else {})}
    return Reply(status, _encode({"jsonrpc": "2.0", "id": None, "error": error}), [JSON, *headers])
