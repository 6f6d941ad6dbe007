"""The gateway to a whole registry: `/search`, `/schema`, `/call`, `/batch` and `/subscribe`.

Rule: `operations.front.search` implements the gateway and runs as the caller; this module only translates HTTP.
"""

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from operations.front.messages import JSON, Reply, json_reply
from operations.front.public_errors import Header
from operations.front.request import RequestState, Slots, Target
from operations.front.search import Batch, OperationCall, SchemaRequest, Search
from operations.openapi.serving.query_arguments import QueryArguments
from operations.schema import Schema, schema_for, validate_or_raise
from operations.server.entries import FixedPath, enforce_method
from operations.server.events import serve_events
from operations.server.routes import read_query
from operations.server.runs import call_run, may_be_run

T = TypeVar("T", bound=msgspec.Struct)

_CALL = Target(slots=Slots.CALLS)
_STREAM = Target(slots=Slots.STREAMS)


class _Asked(Generic[T]):
    """A path whose arguments are in the query or the body.

    Args:
        kind: The arguments.
        answer: Serves them.
        methods: The methods.
        is_stream: Whether the response stays open.
    """

    is_open = is_probe = False

    def __init__(
        self,
        kind: type[T],
        answer: Callable[[RequestState, T], Awaitable[Reply | None]],
        *methods: str,
        is_stream: bool = False,
    ) -> None:
        self._kind = kind
        self._answer = answer
        self._methods = methods
        self._target = _STREAM if is_stream else _CALL

    def place(self, _state: RequestState) -> Target:
        """Return which slot the request takes."""
        return self._target

    async def read(self, state: RequestState) -> T:
        """Return the arguments; those of a call with the time limit of their operation.

        Raises:
            CallError: `VALIDATION_ERROR`, with the location of the error; or if the operation is unknown.
        """
        enforce_method(state, *self._methods)
        asked = await _read(state, self._kind)
        if isinstance(asked, OperationCall):
            state.call_operation(state.front.find(asked.operation, state.identity))
        return asked

    async def run(self, state: RequestState, asked: T) -> Reply | None:
        """Serve the request."""
        return await self._answer(state, asked)


async def _answer(state: RequestState, wanted: Search | SchemaRequest) -> Reply:
    return json_reply(await state.front.answer(wanted, state.context, state.caller))


async def _call(state: RequestState, wanted: OperationCall) -> Reply:
    registry = state.front.registry
    operation = registry.get(wanted.operation)
    if operation is not None and may_be_run(state, operation):
        answer = await call_run(state, operation, wanted.input)
        if isinstance(answer, Reply):
            return answer
        envelope = answer
    else:
        envelope = await registry.execute(wanted.operation, wanted.input, state.context)
    return Reply(200, envelope.encode(), [JSON, _request_id(state)])


async def _batch(state: RequestState, wanted: Batch) -> Reply:
    results = await state.front.answer(wanted, state.context, state.caller)
    return json_reply(results, headers=[_request_id(state)])


def _request_id(state: RequestState) -> Header:
    return b"x-request-id", state.context.request_id.encode()


async def _subscribe(state: RequestState, wanted: OperationCall) -> None:
    spec = state.spec or state.front.find(wanted.operation, state.identity)
    await serve_events(state, spec, wanted.input)


GATEWAY_PATHS: dict[str, FixedPath] = {
    "/search": _Asked(Search, _answer, "GET", "POST"),
    "/schema": _Asked(SchemaRequest, _answer, "GET", "POST"),
    "/call": _Asked(OperationCall, _call, "POST"),
    "/batch": _Asked(Batch, _batch, "POST"),
    "/subscribe": _Asked(OperationCall, _subscribe, "GET", "POST", is_stream=True),
}
"""The five paths of the gateway."""


async def _read(state: RequestState, kind: type[T]) -> T:
    schema, arguments = _form(kind)
    if state.scope["method"] == "POST":
        asked = await state.read_json()
    else:
        asked = read_query(arguments, state)
    given: Any = {} if asked is None else asked
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        validate_or_raise(schema, given, subject="request")
        # In JSON, 5.0 is an integer.
        return msgspec.convert(given, kind, strict=False)


@cache
def _form(kind: type[Any]) -> tuple[Schema, QueryArguments]:
    """Return the schema of the arguments of a request, and their form in a query."""
    schema = schema_for(kind)
    return schema, QueryArguments(schema)
