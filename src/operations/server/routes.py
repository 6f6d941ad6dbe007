"""Route requests: one path per operation, fixed paths, mounted applications, and 404 for every other path.

    /{namespace}/{name}
        query          GET or HEAD with query parameters, or POST
        mutation       POST
        subscription   GET with query parameters, or POST; server-sent events (`server.events`)

Rule 1: a path has exactly one spelling. Ids contain no characters that need escaping, so a path with an escape does not
        match an operation.
Rule 2: the registry checks access. If an operation is hidden from a caller, the request is treated like a request for
        an unknown path.
Rule 3: the caller is identified in the same way at every path, also at unknown ones, so that a response does not reveal
        whether the path exists.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from operations.base.errors import CallError, ErrorCode, SchemaError, timed_out, unusable_schema
from operations.base.json.values import WRAPPING_DEPTH, count_values, nests_within
from operations.contract.context import OperationContext, new_request_id
from operations.contract.specs import Operation, OperationType
from operations.front.limits import caller_key, client_address
from operations.front.messages import (
    Reply,
    decode_body,
    error_reply,
    reject_handshake,
    result_reply,
    route_path,
)
from operations.front.pipeline import Elsewhere, RequestPipeline
from operations.front.public_errors import (
    malformed,
    not_found,
    too_large,
    wrong_method,
)
from operations.front.request import IDENTITY, OPEN, RequestState, Slots, Target
from operations.openapi.serving import has_path
from operations.openapi.serving.query_arguments import QueryArguments
from operations.schema import ValidationIssue, mismatch_error
from operations.server.entries import FixedPath
from operations.server.events import serve_events
from operations.server.runs import RUN_PATH, call_run, may_be_run


class _UnknownPath:
    """Serves a path at which there is nothing."""

    def place(self, _state: RequestState) -> Target:
        """Return that the request only counts against its caller."""
        return Target()

    async def read(self, _state: RequestState) -> None:
        """Read nothing."""

    async def run(self, state: RequestState, _asked: None) -> Reply:
        """Raise the error."""
        registry = state.front.registry
        namespace, slash, _ = (path := route_path(state.scope)[1:]).partition("/")
        if slash and OPEN not in state.scope and registry.is_absent(namespace):
            # The operation may be one of a source that is not connected yet.
            context = OperationContext(identity=state.identity)
            raise registry.not_found(path.replace("/", ".", 1), context)
        raise not_found()


_UNKNOWN = _UnknownPath()


class Router:
    """Serves the fixed paths, MCP and WebSockets, and responds with 404 at all other paths.

    Args:
        pipeline: Runs the steps of each request.
        paths: The fixed paths.
        mcp: Serves `/mcp`, with the same pipeline.
        websocket: Serves WebSockets at `/ws`.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        paths: Mapping[str, FixedPath],
        *,
        mcp: ASGIApp | None = None,
        websocket: ASGIApp | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._paths = paths
        self._mcp = mcp
        self._websocket = websocket
        self.lifespan: ASGIApp | None = None
        """Receives the events of the lifespan."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, WebSocket or lifespan."""
        if scope["type"] == "lifespan" and self.lifespan is not None:
            await self.lifespan(scope, receive, send)
            return
        path = route_path(scope)
        if scope["type"] == "websocket":
            await self._serve_socket(path, scope, receive, send)
        elif (fixed := self._paths.get(path)) is not None:
            if fixed.is_probe:
                # Not even a wrong credential matters.
                scope[IDENTITY] = None
            if fixed.is_open:
                scope[OPEN] = True
            await self._pipeline.serve(scope, receive, send, fixed)
        elif path.startswith("/runs/"):
            await self._pipeline.serve(scope, receive, send, RUN_PATH)
        elif self._mcp is not None and path in ("/mcp", "/mcp/"):
            # It serves the request with the same pipeline.
            await self._mcp(scope, receive, send)
        else:
            if "." in path[1:].partition("/")[0]:
                # No operation or entry point can have this path. Browsers and OAuth clients request `/favicon.ico` and
                # paths below `/.well-known`, and expect 404.
                scope[OPEN] = True
            await self._pipeline.serve(scope, receive, send, _UNKNOWN)

    async def _serve_socket(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        pipeline = self._pipeline
        front = pipeline.front
        try:
            try:
                async with asyncio.timeout(front.timeout):
                    scope[IDENTITY] = await pipeline.authenticate(scope)
            except TimeoutError:
                raise timed_out("The handshake", front.timeout) from None
            if self._websocket is None or path != "/ws":
                raise not_found()
            slot = front.sockets.enter(caller_key(scope[IDENTITY], client_address(scope)))
        except CallError as error:
            reply = error_reply(error, new_request_id(), expose=front.expose_errors)
            await reject_handshake(reply, scope, send)
            return
        with slot:
            await self._websocket(scope, receive, send)


_METHODS = {
    OperationType.QUERY: ("GET", "HEAD", "POST"),
    OperationType.MUTATION: ("POST",),
    OperationType.SUBSCRIPTION: ("GET", "POST"),
}


class OperationPath:
    """Serves one operation at its path.

    Args:
        operation: The operation.
        elsewhere: Serves callers that may not see the operation.
    """

    __slots__ = (
        "_arguments", "_elsewhere", "_id", "_is_open", "_is_stream", "_methods", "_operation", "_spec", "_target",
    )  # fmt: skip

    def __init__(self, operation: Operation, elsewhere: ASGIApp) -> None:
        self._operation = operation
        self._spec = spec = operation.spec
        self._elsewhere = Elsewhere(elsewhere)
        self._is_open = spec.access_control.is_open
        self._id = spec.id
        self._methods = _METHODS[spec.type]
        self._arguments: QueryArguments | None = None
        self._is_stream = spec.type is OperationType.SUBSCRIPTION
        self._target = (
            Target(slots=Slots.STREAMS)
            if self._is_stream
            else Target(slots=Slots.CALLS, operation=operation, keeps_time=True)
        )

    def place(self, state: RequestState) -> Target | Elsewhere:
        """Return what the call takes; hide the operation from callers that may not see it.

        A wrong credential must not reveal it either.
        """
        # Only a grant can hide an open operation.
        if state.identity is not None or not self._is_open:
            try:
                state.front.enforce_visible(self._spec, state.identity)
            except CallError as error:
                if error.code != ErrorCode.ACCESS_DENIED:
                    return self._elsewhere
                state.problem = state.problem or error
        return self._target

    async def read(self, state: RequestState) -> Any:
        """Return the input of a call."""
        method = state.scope["method"]
        if method not in self._methods:
            raise wrong_method(self._methods)
        state.spec = self._spec
        if method != "POST":
            return self._query(state)
        body = await state.read()
        value = decode_body(body, state.front.limits) if body else None
        if body and value is None and not self._spec.input_schema.check(None):
            # A client that sends null sends an input, unlike one that sends nothing.
            issue = ValidationIssue("", "must be an object, not null", "type")
            message = f"Invalid input of {self._spec.id}"
            raise mismatch_error(ErrorCode.VALIDATION_ERROR, message, [issue])
        return value

    async def run(self, state: RequestState, asked: Any) -> Reply | None:
        """Make the call."""
        if self._is_stream:
            await serve_events(state, self._spec, asked)
            return None
        try:
            if may_be_run(state, self._operation):
                answer = await call_run(state, self._operation, asked)
                if isinstance(answer, Reply):
                    return answer
                envelope = answer
            else:
                envelope = await state.front.registry.execute(self._id, asked, state.context)
        except asyncio.CancelledError:
            if (error := state.cancelled_elsewhere(self._id)) is None:
                raise
            raise error from None
        return result_reply(
            envelope, state.context.request_id, with_meta=b"operations-meta" in state.headers
        )

    def _query(self, state: RequestState) -> Any:
        """Return the input in the query of a request."""
        try:
            if self._arguments is None:
                self._arguments = QueryArguments(self._spec.input_schema)
            return read_query(self._arguments, state)
        except SchemaError as error:
            raise unusable_schema(self._spec.id, error, "the input schema") from error


def read_query(arguments: QueryArguments, state: RequestState) -> Any:
    """Return the values in the query of a request.

    Raises:
        RequestError: 400 if it cannot be read, 413 if it has too many values.
        CallError: `VALIDATION_ERROR` if a parameter is repeated that is not a list.
    """
    query: bytes = state.scope["query_string"]
    limits = state.front.limits
    try:
        value = arguments.read(query)
    except SchemaError:
        raise
    except ValueError as error:
        raise malformed(f"The query cannot be read: {error}") from None
    # Each value and each level takes at least one byte.
    if len(query) > limits.values and count_values(value, limits.values) > limits.values:
        raise too_large(f"The query contains more than {limits.values:,} values")
    if len(query) > limits.depth and not nests_within(value, limits.depth + WRAPPING_DEPTH):
        raise malformed(f"The query is nested too deeply: data may have {limits.depth} levels")
    return value


class OperationPaths:
    """ASGI middleware that serves every operation of a registry at its path, also those registered later.

    Runs before the router, because nearly all requests are for operations.
    """

    def __init__(self, app: ASGIApp, pipeline: RequestPipeline) -> None:
        self._app = app
        self._pipeline = pipeline
        self._paths: dict[str, OperationPath] = {}
        self._revision = -1

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve a call, or forward the request to the router."""
        path = self._find(route_path(scope)) if scope["type"] == "http" else None
        if path is None or b"%" in scope.get("raw_path", b""):
            return self._app(scope, receive, send)
        return self._pipeline.serve(scope, receive, send, path)

    def _find(self, text: str) -> OperationPath | None:
        registry = self._pipeline.front.registry
        if self._revision != registry.revision:
            self._revision = registry.revision
            self._paths.clear()
        known = self._paths.get(text)
        if known is None:
            namespace, slash, name = text[1:].partition("/")
            is_path = slash and "/" not in name and "." not in namespace
            operation = registry.get(f"{namespace}.{name}") if is_path else None
            if operation is None or not has_path(operation.spec):
                # Not cached, because the number of unknown paths is unlimited.
                return None
            known = self._paths[text] = OperationPath(operation, self._app)
        return known
