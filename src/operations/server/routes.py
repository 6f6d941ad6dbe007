"""One path per operation: `/{namespace}/{name}`.

    query          GET with query parameters, or POST
    mutation       POST
    subscription   GET with query parameters, or POST; server-sent events

Rule 1: a path has exactly one spelling. Ids are made of letters that need no escape, so a path with one is
        nobody's.
Rule 2: whether a caller may call is the registry's to say, not the route's.
"""

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from operations.gateway import may_call
from operations.openapi.export import has_path
from operations.openapi.query_arguments import QueryArguments
from operations.schema import validate_or_raise
from operations.server.alarms import Departure
from operations.server.doors import route_path
from operations.server.edge import Edge, Visit, decode_json
from operations.server.events import serve_events
from operations.server.faults import ClientLeftError, malformed, wrong_method
from operations.server.replies import Reply, result_reply
from operations.specs import OperationSpec, OperationType

_METHODS = {
    OperationType.QUERY: ("GET", "POST"),
    OperationType.MUTATION: ("POST",),
    OperationType.SUBSCRIPTION: ("GET", "POST"),
}
_FOUND = "operations.path"


class _Path:
    """One operation as it is served."""

    __slots__ = ("_arguments", "methods", "spec", "streams")

    def __init__(self, spec: OperationSpec) -> None:
        self.spec = spec
        self.methods = _METHODS[spec.type]
        self.streams = spec.type is OperationType.SUBSCRIPTION
        self._arguments: QueryArguments | None = None

    def read(self, query: bytes) -> Any:
        """The input in a query string."""
        if self._arguments is None:
            self._arguments = QueryArguments(self.spec.input_schema)
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call, or leave the request to the application."""
        path = self._find(route_path(scope)) if scope["type"] == "http" else None
        if path is None or b"%" in scope.get("raw_path", b""):
            await self._app(scope, receive, send)
            return
        scope[_FOUND] = path
        endpoint = self._stream if path.streams else self._call
        await self._edge.serve(scope, receive, send, endpoint)

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
            known = self._paths[text] = _Path(spec)
        return known

    async def _call(self, visit: Visit) -> Reply:
        edge = self._edge
        visit.context = await edge.enter(visit)
        with edge.calls.enter(visit.caller):
            spec, input = await self._read(visit)  # noqa: A001 - the contract's word
            envelope = await run_call(edge, visit, spec.id, input)
        return result_reply(
            envelope,
            visit.context.request_id,
            with_meta=b"operations-meta" in visit.headers,
        )

    async def _stream(self, visit: Visit) -> None:
        edge = self._edge
        visit.context = await edge.enter(visit, is_stream=True)
        spec, input = await self._read(visit)  # noqa: A001 - the contract's word
        await serve_events(edge, visit, spec, input)

    async def _read(self, visit: Visit) -> tuple[OperationSpec, Any]:
        path: _Path = visit.scope[_FOUND]
        method = visit.scope["method"]
        if method not in path.methods:
            raise wrong_method(path.methods)
        visit.spec = path.spec
        if method == "GET":
            return path.spec, path.read(visit.scope["query_string"])
        body = await self._edge.read(visit)
        if not body:
            return path.spec, None
        value = decode_json(body)
        if value is None and may_call(path.spec, visit.context):
            # No body is no input; a null is a value like any other.
            validate_or_raise(path.spec.input_schema, None, subject=f"input of {path.spec.id}")
        return path.spec, value


async def run_call(edge: Edge, visit: Visit, operation_id: str, input: Any) -> Any:
    """Execute, for as long as the client is there.

    Raises:
        CallError: As `execute`.
        ClientLeftError: If it left; the handler has been stopped.
    """
    with Departure(visit.receive):
        return await edge.registry.execute(operation_id, input, visit.context)
    # Only a departure ends the block in silence.
    raise ClientLeftError
