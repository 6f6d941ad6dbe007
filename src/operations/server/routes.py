"""One path per operation: `/{namespace}/{name}`.

    query          GET with query parameters, or POST
    mutation       POST
    subscription   GET with query parameters, or POST; server-sent events

Rule 1: a path has exactly one spelling. Ids are made of letters that need no escape, so a path with one is
        nobody's.
Rule 2: whether a caller may call is the registry's to say, not the route's.
"""

from collections.abc import Awaitable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from operations.gateway import may_call
from operations.openapi.exporting.export import has_path
from operations.openapi.exporting.query_arguments import QueryArguments
from operations.schema import validate_or_raise
from operations.server.doors import route_path
from operations.server.edge import Edge, Endpoint, Visit, decode_json
from operations.server.events import serve_events
from operations.server.faults import malformed, wrong_method
from operations.server.replies import Reply, result_reply
from operations.specs import OperationSpec, OperationType

_METHODS = {
    OperationType.QUERY: ("GET", "POST"),
    OperationType.MUTATION: ("POST",),
    OperationType.SUBSCRIPTION: ("GET", "POST"),
}


class _Path:
    """One operation as it is served."""

    __slots__ = ("_arguments", "_edge", "_id", "_methods", "_spec", "endpoint")

    def __init__(self, edge: Edge, spec: OperationSpec) -> None:
        self._edge = edge
        self._spec = spec
        self._id = spec.id
        self._methods = _METHODS[spec.type]
        self._arguments: QueryArguments | None = None
        self.endpoint: Endpoint = (
            self._stream if spec.type is OperationType.SUBSCRIPTION else self._call
        )

    async def _call(self, visit: Visit) -> Reply:
        edge = self._edge
        if edge.resolver is None:
            visit.identified(None)
        else:
            await edge.identify(visit)
        edge.admit(visit, keeps_time=True)
        context = visit.context
        with edge.calls.enter(visit.caller):
            value = await self._read(visit)
            edge.watch_work(visit)
            envelope = await edge.registry.execute(self._id, value, context)
        return result_reply(
            envelope, context.request_id, with_meta=b"operations-meta" in visit.headers
        )

    async def _stream(self, visit: Visit) -> None:
        edge = self._edge
        await edge.enter(visit, is_stream=True)
        value = await self._read(visit)
        await serve_events(edge, visit, self._spec, value)

    async def _read(self, visit: Visit) -> Any:
        """The input of a call."""
        method = visit.scope["method"]
        if method not in self._methods:
            raise wrong_method(self._methods)
        visit.spec = spec = self._spec
        if method == "GET":
            return self._query(visit.scope["query_string"])
        body = await self._edge.read(visit)
        if not body:
            return None
        value = decode_json(body)
        if value is None and may_call(spec, visit.context):
            # No body is no input; a null is a value like any other.
            validate_or_raise(spec.input_schema, None, subject=f"input of {spec.id}")
        return value

    def _query(self, query: bytes) -> Any:
        """The input in a query string."""
        if self._arguments is None:
            self._arguments = QueryArguments(self._spec.input_schema)
        try:
            return self._arguments.read(query)
        except ValueError as error:
            raise malformed(f"The query cannot be read: {error}") from None


class OperationPaths:
    """ASGI middleware: every operation of a registry at its path, also those registered later.

    It stands before the router, because nearly all requests are for operations.
    """

    def __init__(self, app: ASGIApp, edge: Edge) -> None:
        self._app = app
        self._edge = edge
        self._paths: dict[str, _Path] = {}
        self._revision = -1

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve a call, or leave the request to the application."""
        path = self._find(route_path(scope)) if scope["type"] == "http" else None
        if path is None or b"%" in scope.get("raw_path", b""):
            return self._app(scope, receive, send)
        return self._edge.serve(scope, receive, send, path.endpoint)

    def _find(self, text: str) -> _Path | None:
        registry = self._edge.registry
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
                # Not kept: there is no end to the paths that are nobody's.
                return None
            known = self._paths[text] = _Path(self._edge, spec)
        return known
