"""The fixed doors to a whole registry: `/search`, `/schema`, `/call`, `/batch`, `/subscribe`.

Rule 1: they do what `operations.gateway` does, as the caller; only reading and writing HTTP is here.
"""

from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from operations.errors import CallError, ErrorCode, operation_not_found
from operations.gateway import BatchCall
from operations.server.doors import Door
from operations.server.edge import Edge, Visit, decode_json
from operations.server.events import serve_events
from operations.server.faults import RequestError, malformed
from operations.server.replies import JSON, Reply, error_wire, json_reply
from operations.specs import OperationType

T = TypeVar("T")

MAX_RESULTS = 200
"""Operations that one search gives."""


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a gateway path takes."""


class Search(_Body, frozen=True, kw_only=True):
    """Words, and what to look at; all of it without words."""

    query: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_RESULTS)] = 20
    namespace: str | None = None
    tags: list[str] = []
    type: OperationType | None = None


class Named(_Body, frozen=True, kw_only=True):
    """One operation."""

    operation: str


class Called(_Body, frozen=True, kw_only=True):
    """One operation and its input."""

    operation: str
    input: Any = None


class Batch(_Body, frozen=True, kw_only=True):
    """Several calls."""

    calls: list[BatchCall]


class GatewayDoors:
    """The five paths."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self.doors = {
            "/search": Door(methods=("GET", "POST"), endpoint=self._search),
            "/schema": Door(methods=("GET", "POST"), endpoint=self._schema),
            "/call": Door(methods=("POST",), endpoint=self._call),
            "/batch": Door(methods=("POST",), endpoint=self._batch),
            "/subscribe": Door(methods=("GET", "POST"), endpoint=self._subscribe, is_stream=True),
        }

    async def _search(self, visit: Visit) -> Reply:
        wanted = await self._read(visit, Search, many=("tags",))
        found = self._edge.gateway.search(
            wanted.query,
            visit.context,
            limit=wanted.limit,
            namespace=wanted.namespace,
            tags=wanted.tags,
            type=wanted.type,
        )
        return json_reply({"operations": found})

    async def _schema(self, visit: Visit) -> Reply:
        wanted = await self._read(visit, Named)
        return json_reply(self._edge.gateway.schema(wanted.operation, visit.context).to_wire())

    async def _call(self, visit: Visit) -> Reply:
        edge = self._edge
        with edge.calls.enter(visit.caller):
            wanted = await self._read(visit, Called)
            visit.spec = edge.registry.get_spec(wanted.operation)
            edge.watch_work(visit)
            envelope = await edge.registry.execute(wanted.operation, wanted.input, visit.context)
        request_id = (b"x-request-id", visit.context.request_id.encode())
        return Reply(200, envelope.encode(), [JSON, request_id])

    async def _batch(self, visit: Visit) -> Reply:
        edge = self._edge
        with edge.calls.enter(visit.caller):
            wanted = await self._read(visit, Batch)
            try:
                edge.rate.spend(visit.caller, len(wanted.calls), paid=1)
            except CallError as error:
                if error.retryable:
                    raise
                # Nobody is to come back with it: unlike other refusals by rate, this one names no time.
                raise RequestError(429, error.code, error.message) from None

            def shown(error: CallError) -> dict[str, Any]:
                return error_wire(
                    error, visit.context.request_id, exposed=edge.settings.expose_errors
                )

            edge.watch_work(visit)
            results = await edge.gateway.batch(wanted.calls, visit.context, describe=shown)
            return json_reply({"results": results})

    async def _subscribe(self, visit: Visit) -> None:
        wanted = await self._read(visit, Called, as_json=("input",))
        spec = visit.spec = self._edge.registry.get_spec(wanted.operation)
        if spec is None:
            raise operation_not_found(wanted.operation)
        await serve_events(self._edge, visit, spec, wanted.input)

    async def _read(
        self,
        visit: Visit,
        kind: type[T],
        *,
        many: tuple[str, ...] = (),
        as_json: tuple[str, ...] = (),
    ) -> T:
        """What a request asks for, in its query or its body.

        Raises:
            CallError: `VALIDATION_ERROR` naming the place that is wrong.
        """
        is_query = visit.scope["method"] == "GET"
        asked = (
            _query(visit.scope["query_string"], many, as_json)
            if is_query
            else await self._edge.read_json(visit)
        )
        try:
            return msgspec.convert({} if asked is None else asked, kind, strict=not is_query)
        except msgspec.ValidationError as error:
            raise CallError(ErrorCode.VALIDATION_ERROR, f"Invalid request: {error}") from None


def _query(query: bytes, many: tuple[str, ...], as_json: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query.decode("ascii"), True, errors="strict", max_num_fields=100)
    except ValueError as error:
        raise malformed(f"The query cannot be read: {error}") from None
    for name, text in pairs:
        if name in many:
            values.setdefault(name, []).append(text)
        elif name in values:
            raise malformed(f"{name!r} is given more than once")
        else:
            values[name] = decode_json(text) if name in as_json else text
    return values
