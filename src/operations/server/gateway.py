"""The fixed paths to a whole registry: `/search`, `/schema`, `/call`, `/batch`, `/subscribe`.

Rule 1: they do what `operations.front.search` does, as the caller; this module only translates HTTP.
"""

from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from operations.errors import CallError, ErrorCode
from operations.front.body import decode_json
from operations.front.http import RequestPipeline, RequestState
from operations.front.http_errors import malformed
from operations.front.replies import JSON, Reply, json_reply
from operations.front.search import BatchCall
from operations.server.events import serve_events
from operations.server.routing import Route
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
    tags: Annotated[list[str], msgspec.Meta(max_length=100)] = []
    type: OperationType | None = None


class Named(_Body, frozen=True, kw_only=True):
    """One operation, and whether the schema of its output is wanted too."""

    operation: str
    output: bool = False


class Called(_Body, frozen=True, kw_only=True):
    """One operation and its input."""

    operation: str
    input: Any = None


class Batch(_Body, frozen=True, kw_only=True):
    """Several calls."""

    calls: list[BatchCall]


class GatewayRoutes:
    """The five paths."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline
        self.routes = {
            "/search": Route(methods=("GET", "POST"), endpoint=self._search),
            "/schema": Route(methods=("GET", "POST"), endpoint=self._schema),
            "/call": Route(methods=("POST",), endpoint=self._call),
            "/batch": Route(methods=("POST",), endpoint=self._batch),
            "/subscribe": Route(methods=("GET", "POST"), endpoint=self._subscribe, is_stream=True),
        }

    async def _search(self, state: RequestState) -> Reply:
        wanted = await self._read(state, Search, many=("tags",))
        found = await self._pipeline.front.gateway.search(
            wanted.query,
            state.context,
            limit=wanted.limit,
            namespace=wanted.namespace,
            tags=wanted.tags,
            type=wanted.type,
        )
        return json_reply({"operations": found})

    async def _schema(self, state: RequestState) -> Reply:
        wanted = await self._read(state, Named)
        gateway = self._pipeline.front.gateway
        return json_reply(gateway.schema(wanted.operation, state.context, output=wanted.output))

    async def _call(self, state: RequestState) -> Reply:
        pipeline = self._pipeline
        pipeline.take_slot(state)
        wanted = await self._read(state, Called)
        state.spec = pipeline.front.find(wanted.operation, state.identity)
        pipeline.start_work(state)
        envelope = await pipeline.front.registry.execute(
            wanted.operation, wanted.input, state.context
        )
        request_id = (b"x-request-id", state.context.request_id.encode())
        return Reply(200, envelope.encode(), [JSON, request_id])

    async def _batch(self, state: RequestState) -> Reply:
        pipeline = self._pipeline
        pipeline.take_slot(state)
        wanted = await self._read(state, Batch)
        pipeline.start_work(state)
        results = await pipeline.front.batch(wanted.calls, state.context, state.caller)
        return json_reply({"results": results})

    async def _subscribe(self, state: RequestState) -> None:
        wanted = await self._read(state, Called, as_json=("input",))
        spec = state.spec = self._pipeline.front.find(wanted.operation, state.identity)
        await serve_events(self._pipeline, state, spec, wanted.input)

    async def _read(
        self,
        state: RequestState,
        kind: type[T],
        *,
        many: tuple[str, ...] = (),
        as_json: tuple[str, ...] = (),
    ) -> T:
        """What a request asks for, in its query or its body.

        Raises:
            CallError: `VALIDATION_ERROR` naming the place that is wrong.
        """
        is_query = state.scope["method"] == "GET"
        asked = (
            self._query(state.scope["query_string"], many, as_json)
            if is_query
            else await self._pipeline.read_json(state)
        )
        try:
            return msgspec.convert({} if asked is None else asked, kind, strict=not is_query)
        except msgspec.ValidationError as error:
            raise CallError(ErrorCode.VALIDATION_ERROR, f"Invalid request: {error}") from None

    def _query(
        self, query: bytes, many: tuple[str, ...], as_json: tuple[str, ...]
    ) -> dict[str, Any]:
        limits = self._pipeline.front.limits
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
                values[name] = decode_json(text, limits) if name in as_json else text
        return values
