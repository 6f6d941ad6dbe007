"""Serve clients before 2026-07-28 over HTTP, which open a session with a handshake.

Rule 1: a session belongs to the caller that opened it; other callers cannot use it.
"""

from collections.abc import Mapping
from contextlib import aclosing, nullcontext
from typing import Any

import mcp_types as types
from mcp.server import Server
from mcp.server.connection import Connection
from mcp.server.runner import ServerRunner, serve_one
from mcp.shared.jsonrpc_dispatcher import progress_token_from_params
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from operations._json import object_of
from operations.channel import NOTHING
from operations.front.http import RequestState
from operations.front.messages import EVENT_STREAM, JSON, Reply
from operations.mcp.serving.caller import MCPCaller
from operations.mcp.serving.channels import SILENT, channel_for
from operations.mcp.serving.exchange import SESSION_HEADER, Exchange
from operations.mcp.serving.requests import (
    VERSION,
    PlainRequest,
    accepted_kinds,
    accepted_reply,
    decode_message,
    decode_meta,
    decode_plain,
    failure,
    rejection,
    serve_plain,
)
from operations.mcp.serving.service import Service
from operations.mcp.serving.sessions import STANDALONE, Session, SessionTable


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

    async def serve(self, state: RequestState, body: bytes) -> Reply | None:
        """Serve one request; return the response unless it was sent as a stream."""
        method = state.scope["method"]
        allowed = (b"POST",) if self._is_stateless else (b"GET", b"POST", b"DELETE")
        rejected = rejection(state, allowed)
        if rejected is not None:
            return rejected
        is_new = SESSION_HEADER not in state.headers
        if self._is_stateless or (is_new and method == "POST"):
            return await self._post(state, body, None)
        if is_new:
            return failure(400, "Bad Request: Missing session ID")
        session = self._find(state)
        if session is None:
            return failure(404, "Session not found")
        if method == "DELETE":
            await self.sessions.end(session)
            return Reply(200, b"", [JSON])
        self.sessions.begin(session, state.credential, state.front.credentials)
        try:
            if method == "GET":
                return await self._read(state, session)
            return await self._post(state, body, session)
        finally:
            self.sessions.finish(session)

    def knows(self, state: RequestState) -> bool:
        """Return whether a request names an open session of its caller."""
        return self._find(state) is not None

    def _find(self, state: RequestState) -> Session | None:
        session_id = state.headers.get(SESSION_HEADER, b"").decode("latin-1")
        owner = None if state.identity is None else state.identity.key
        return self.sessions.find(session_id, owner)

    # ------------------------------------------------------------ POST

    async def _post(
        self, state: RequestState, body: bytes, session: Session | None
    ) -> Reply | None:
        is_missing = session is None and not self._is_stateless
        plain = decode_plain(body) if self._lean and not is_missing else None
        if plain is not None and plain.params.meta.version is None:
            return await self._plain(state, plain, body, session)
        message = decode_message(body, state.front.limits.values)
        if isinstance(message, Reply):
            return message
        is_notification = "id" not in message
        if "method" not in message:
            if session is not None:
                session.answer(message)
            return accepted_reply()
        method, params = message["method"], message.get("params")
        if is_missing:
            if method != "initialize" or is_notification:
                return failure(400, "Bad Request: Missing session ID")
            return await self._open(state, message)
        request_id = "" if is_notification else message["id"]
        token = progress_token_from_params(params)
        exchange = self._exchange(state, request_id, session, token)
        # The SDK checks the message and calls our handler for it.
        if session is None:
            if is_notification:
                return accepted_reply()
            connection = Connection.from_envelope(self._version(state, None), None, None)
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
        return accepted_reply()

    async def _open(self, state: RequestState, message: Mapping[str, Any]) -> Reply | None:
        """Serve the request that opens a session."""
        await self.sessions.make_room(state.caller, state.front.limits)
        session = Session(state.caller, None if state.identity is None else state.identity.key)
        params = message.get("params")
        exchange = Exchange(state, message["id"], session, streams=False)
        options = self._server.create_initialization_options()
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
        self, state: RequestState, request: PlainRequest, body: bytes, session: Session | None
    ) -> Reply | None:
        """Serve a plain call without the SDK's models."""
        version = self._version(state, session)
        connection = self._stateless[version] if session is None else session.connection
        meta = request.params.meta
        exchange = self._exchange(state, request.id, session, meta.progress)
        capabilities = NOTHING if session is None else session.capabilities
        sent = decode_meta(body, request, self._service)
        caller = MCPCaller.of(state, version, capabilities, meta.trace, sent)
        channel = SILENT
        if exchange.streams:
            release = exchange.release if exchange.can_release else None
            channel = channel_for(exchange, connection, capabilities, release=release)
        return await serve_plain(self._service, state, request, exchange, caller, channel)

    def _exchange(
        self,
        state: RequestState,
        request_id: int | str,
        session: Session | None,
        progress_token: int | str | None,
    ) -> Exchange:
        return Exchange(
            state,
            request_id,
            session,
            progress_token,
            streams=True,
            prefers_stream=accepted_kinds(state.headers)[2],
        )

    @staticmethod
    def _version(state: RequestState, session: Session | None) -> str:
        if session is not None:
            return session.connection.protocol_version
        return state.headers.get(VERSION, b"").decode() or types.DEFAULT_NEGOTIATED_VERSION

    # ------------------------------------------------------------ GET

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
