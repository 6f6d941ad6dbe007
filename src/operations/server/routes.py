"""One path per operation: `/{namespace}/{name}`.

    query          GET with query parameters, or POST
    mutation       POST
    subscription   GET with query parameters, or POST; server-sent events

Rule 1: a path has exactly one spelling. Ids consist of characters that need no escape, so a path with an escape
        belongs to no operation.
Rule 2: the registry decides whether a caller may call. If an operation is hidden from a caller, the request is
        passed on, as for a path without an operation.
"""

from collections.abc import Awaitable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from operations.errors import CallError, ErrorCode
from operations.front.body import decode_json
from operations.front.http import Endpoint, RequestPipeline, RequestState
from operations.front.http_errors import malformed, wrong_method
from operations.front.replies import Reply, route_path
from operations.openapi.exporting.export import has_path
from operations.openapi.exporting.query_arguments import QueryArguments
from operations.schema import validate_or_raise
from operations.server.events import serve_events
from operations.server.replies import result_reply
from operations.specs import OperationSpec, OperationType

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
        pipeline.admit(state, keeps_time=True)
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
        """Identify the caller; return whether it may know of the operation.

        Raises:
            CallError: If the credential is wrong, or if the caller may know of the operation but not call it.
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
