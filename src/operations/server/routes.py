"""Paths: one per operation, fixed ones, mounted applications, and the response for every other path.

    /{namespace}/{name}
        query          GET with query parameters, or POST
        mutation       POST
        subscription   GET with query parameters, or POST; server-sent events

Rule 1: a path has exactly one spelling. Ids consist of characters that need no escape, so a path with an escape
        belongs to no operation.
Rule 2: the registry decides whether a caller may call. If an operation is hidden from a caller, the request is
        passed on, as for a path without an operation.
Rule 3: the caller is identified in the same way everywhere, also at unknown paths: the response must
        not reveal whether something exists there.
"""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from operations.envelopes import HTTPResponseMeta, ResponseEnvelope, ResponseMeta
from operations.errors import CallError, ErrorCode, timed_out
from operations.front.http import (
    IDENTITY,
    OPEN,
    PIPELINE,
    Endpoint,
    RequestPipeline,
    RequestState,
)
from operations.front.identity import caller_key, client_address
from operations.front.messages import (
    JSON,
    Reply,
    decode_json,
    error_reply,
    reject_handshake,
    route_path,
)
from operations.front.public_errors import Header, malformed, not_found, wrong_method
from operations.openapi.exporting import BINARY, has_path
from operations.openapi.exporting.query_arguments import QueryArguments
from operations.schema import validate_or_raise
from operations.server.sse import serve_events
from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path and its endpoint."""

    methods: tuple[str, ...]
    endpoint: Endpoint

    is_stream: bool = False
    """Whether it stays open and therefore has no deadline of its own."""

    is_probe: bool = False
    """Whether it answers everyone at any time, without identification and limits."""

    is_open: bool = False
    """Whether it also answers clients without a credential if the server requires one."""


class RouteTable(BaseRoute):
    """Serves exactly these paths."""

    def __init__(self, pipeline: RequestPipeline, routes: Mapping[str, Route]) -> None:
        self._pipeline = pipeline
        self._routes = routes

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the paths of the table."""
        is_ours = scope["type"] == "http" and route_path(scope) in self._routes
        return (Match.FULL if is_ours else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        route = self._routes[route_path(scope)]

        async def endpoint(state: RequestState) -> Reply | None:
            if route.is_open:
                scope[OPEN] = True
            if not route.is_probe:
                await self._pipeline.enter(state, is_stream=route.is_stream)
            if scope["method"] not in route.methods:
                raise wrong_method(route.methods)
            return await route.endpoint(state)

        await self._pipeline.serve(scope, receive, send, endpoint)


class NotFound(BaseRoute):
    """Answers unknown paths."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match every HTTP request."""
        return (Match.FULL if scope["type"] == "http" else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with 404."""

        async def endpoint(state: RequestState) -> Reply:
            await self._pipeline.enter(state)
            raise not_found()

        await self._pipeline.serve(scope, receive, send, endpoint)


class HTTPMount(BaseRoute):
    """Serves an ASGI application at one path, with or without a trailing slash, for every method.

    The application shares the pipeline of its host: it finds it in the scope.
    """

    def __init__(self, path: str, app: ASGIApp, pipeline: RequestPipeline) -> None:
        self._path = path
        self._app = app
        self._pipeline = pipeline

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the path of the application."""
        is_ours = scope["type"] == "http" and route_path(scope) in (self._path, self._path + "/")
        return (Match.FULL if is_ours else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Identify the caller, then let the application respond."""
        scope[PIPELINE] = self._pipeline
        if getattr(self._app, "shares_pipeline", False):
            # It runs the steps of the pipeline itself.
            await self._app(scope, receive, send)
            return

        async def endpoint(state: RequestState) -> None:
            await self._pipeline.identify(state)
            self._pipeline.front.rate.spend(state.caller)
            await self._app(scope, state.receive, send)

        await self._pipeline.serve(scope, receive, send, endpoint)


class SocketMount(BaseRoute):
    """Serves an ASGI application for WebSockets at one path; handshakes elsewhere get 404.

    Args:
        path: Where the application is mounted.
        app: The application; None if there is none.
        pipeline: Identifies the callers.
    """

    def __init__(self, path: str, app: ASGIApp | None, pipeline: RequestPipeline) -> None:
        self._path = path
        self._app = app
        self._pipeline = pipeline

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match every WebSocket."""
        return (Match.FULL if scope["type"] == "websocket" else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Identify the caller, then let the application talk."""
        front = self._pipeline.front
        app = self._app if route_path(scope) == self._path else None
        try:
            try:
                async with asyncio.timeout(front.timeout):
                    scope[IDENTITY] = await self._pipeline.authenticate(scope)
            except TimeoutError:
                raise timed_out("The handshake", front.timeout) from None
            if app is None:
                raise not_found()
            slot = front.sockets.enter(caller_key(scope[IDENTITY], client_address(scope)))
        except CallError as error:
            reply = error_reply(error, "-", expose=front.expose_errors)
            await reject_handshake(reply, scope, send)
            return
        scope[PIPELINE] = self._pipeline
        with slot:
            await app(scope, receive, send)


_METHODS = {
    OperationType.QUERY: ("GET", "POST"),
    OperationType.MUTATION: ("POST",),
    OperationType.SUBSCRIPTION: ("GET", "POST"),
}


class _Path:
    """One operation at its path.

    Args:
        pipeline: Serves the requests.
        spec: The operation.
        elsewhere: Serves callers from which the operation is hidden.
    """

    __slots__ = (
        "_arguments", "_elsewhere", "_id", "_is_open", "_methods", "_pipeline", "_spec", "endpoint",
    )  # fmt: skip

    def __init__(self, pipeline: RequestPipeline, spec: OperationSpec, elsewhere: ASGIApp) -> None:
        self._pipeline = pipeline
        self._spec = spec
        self._elsewhere = elsewhere
        self._is_open = spec.access_control.is_open
        self._id = spec.id
        self._methods = _METHODS[spec.type]
        self._arguments: QueryArguments | None = None
        self.endpoint: Endpoint = (
            self._stream if spec.type is OperationType.SUBSCRIPTION else self._call
        )

    async def _call(self, state: RequestState) -> Reply | None:
        pipeline = self._pipeline
        is_visible = (self._is_open and pipeline.is_anonymous(state)) or await self._is_visible(
            state
        )
        if not is_visible:
            await self._elsewhere(state.scope, state.receive, state.send)
            return None
        pipeline.admit(state, keeps_time=True, spec=self._spec)
        context = state.context
        pipeline.take_slot(state)
        value = await self._read(state)
        pipeline.start_work(state)
        envelope = await pipeline.front.registry.execute(self._id, value, context)
        return result_reply(
            envelope, context.request_id, with_meta=b"operations-meta" in state.headers
        )

    async def _stream(self, state: RequestState) -> None:
        pipeline = self._pipeline
        if not await self._is_visible(state):
            await self._elsewhere(state.scope, state.receive, state.send)
            return
        pipeline.admit(state, is_stream=True)
        value = await self._read(state)
        await serve_events(pipeline, state, self._spec, value)

    async def _is_visible(self, state: RequestState) -> bool:
        """Identify the caller; return whether it may see the operation.

        Raises:
            CallError: If the credential is wrong, or if the caller may see the operation but not call it.
        """
        if self._is_open:
            await self._pipeline.identify(state)
            return True
        problem: CallError | None = None
        try:
            await self._pipeline.identify(state)
        except CallError as error:
            # A wrong credential must not reveal the operation either.
            problem = error
        try:
            self._pipeline.front.enforce_visible(self._spec, state.identity)
        except CallError as error:
            if error.code == ErrorCode.OPERATION_NOT_FOUND:
                return False
            problem = problem or error
        if problem is not None:
            raise problem
        return True

    async def _read(self, state: RequestState) -> Any:
        """Return the input of a call."""
        method = state.scope["method"]
        if method not in self._methods:
            raise wrong_method(self._methods)
        state.spec = spec = self._spec
        if method == "GET":
            return self._query(state.scope["query_string"])
        body = await self._pipeline.read(state)
        if not body:
            return None
        value = decode_json(body, self._pipeline.front.limits)
        if value is None:
            # No body means no input; null is a value like any other.
            validate_or_raise(spec.input_schema, None, subject=f"input of {spec.id}")
        return value

    def _query(self, query: bytes) -> Any:
        """Return the input in a query string."""
        if self._arguments is None:
            self._arguments = QueryArguments(self._spec.input_schema)
        try:
            return self._arguments.read(query)
        except ValueError as error:
            raise malformed(f"The query cannot be read: {error}") from None


class OperationPaths:
    """ASGI middleware that serves every operation of a registry at its path, also those registered later.

    It runs before the router, because nearly all requests are for operations.
    """

    def __init__(self, app: ASGIApp, pipeline: RequestPipeline) -> None:
        self._app = app
        self._pipeline = pipeline
        self._paths: dict[str, _Path] = {}
        self._revision = -1

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve a call, or pass the request on."""
        path = self._find(route_path(scope)) if scope["type"] == "http" else None
        if path is None or b"%" in scope.get("raw_path", b""):
            return self._app(scope, receive, send)
        return self._pipeline.serve(scope, receive, send, path.endpoint)

    def _find(self, text: str) -> _Path | None:
        registry = self._pipeline.front.registry
        if self._revision != registry.revision:
            self._revision = registry.revision
            self._paths.clear()
        known = self._paths.get(text)
        if known is None:
            namespace, slash, name = text[1:].partition("/")
            if not slash or "/" in name or "." in namespace:
                return None
            spec = registry.get_spec(f"{namespace}.{name}")
            if spec is None or not has_path(spec):
                # Not kept: the number of such paths is unlimited.
                return None
            known = self._paths[text] = _Path(self._pipeline, spec, self._app)
        return known


MAX_META = 7 * 1024
"""Bytes of an envelope's meta in a header. Common clients read header lines of at most 8 KiB."""

_SANDBOX: Header = (b"content-security-policy", b"sandbox; default-src 'none'")
"""Bytes of a third party must not act as a page of this origin."""


def result_reply(envelope: ResponseEnvelope[Any], request_id: str, *, with_meta: bool) -> Reply:
    """Return an envelope's data as a response: bytes with their content type, anything else as JSON.

    Raises:
        CallError: If the envelope holds the error result of an MCP tool.
    """
    envelope.raise_for_error()
    data = envelope.data
    headers = [JSON, (b"x-request-id", request_id.encode())]
    if envelope.meta.changes_count:
        headers.append((b"operations-changes", str(envelope.meta.changes_count).encode()))
    if with_meta:
        headers.append((b"operations-meta", _meta_text(envelope.meta)))
    if isinstance(data, bytes):
        headers[0] = (b"content-type", _media_type(envelope))
        headers.append(_SANDBOX)
        return Reply(200, data, headers)
    return Reply(200, msgspec.json.encode(data), headers)


def _media_type(envelope: ResponseEnvelope[Any]) -> bytes:
    kind = envelope.meta.content_type if isinstance(envelope.meta, HTTPResponseMeta) else ""
    is_writable = kind.isascii() and kind.isprintable()
    return (kind if kind and is_writable else BINARY).encode()


def _meta_text(meta: ResponseMeta) -> bytes:
    """Return as much of `meta` as fits a header: all of it, its changes, or their number."""
    whole: JSONObject = msgspec.to_builtins(meta)
    changes = {key: whole[key] for key in ("changes", "changesCount") if key in whole}
    source = {"source": meta.source, "omitted": True}
    count = {"changesCount": meta.changes_count} if changes else {}
    # Headers are ASCII, and JSON can escape everything else.
    texts = (json.dumps(part, separators=(",", ":")) for part in (whole, source | changes))
    fitting = (text for text in texts if len(text) <= MAX_META)
    return next(fitting, json.dumps(source | count, separators=(",", ":"))).encode()
