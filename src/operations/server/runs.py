"""Runs over HTTP.

    POST /{namespace}/{name}            Prefer: respond-async[, wait=n], Idempotency-Key
    GET  /runs, /runs/{id}, /runs/{id}/result, /runs/{id}/events, /runs/{id}/steps
    POST /runs/{id}/cancel, /runs/{id}/answers/{key}, /runs/{id}/signals/{name}, /runs/{id}/retry

Rule 1: a call that is not answered in time is `202` with the state of its run, whose address is in `Location`.
Rule 2: a run that the caller may not see is the same 404 as an unknown one.
"""

from collections.abc import AsyncGenerator
from typing import Any, Final

import msgspec

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import is_object
from operations.base.types import JSONObject
from operations.contract.envelopes import ResponseEnvelope, local_envelope
from operations.contract.specs import Operation, OperationSpec, OperationType
from operations.front.messages import JSON, Reply, json_reply, matches_tag, result_reply, route_path
from operations.front.public_errors import (
    Header,
    malformed,
    not_found,
    wrong_method,
)
from operations.front.request import RequestState, Slots, Target
from operations.front.runs import shown as state_of
from operations.front.runs import shown_step
from operations.openapi.serving.query_arguments import QueryArguments
from operations.registry.runs import Run, RunState
from operations.schema import from_schema
from operations.server.entries import FixedPath, Page
from operations.server.events import serve_items

INLINE_SECONDS: Final = 10.0
"""Seconds that a call of a durable operation waits for its run, before the response is 202."""

_MAX_WAIT: Final = 60.0
"""The longest time that a client may wait for a run in one request."""

_ANSWER_SECONDS: Final = 0.1
"""Seconds of the time limit of a request that are left for its response."""


class Preference:
    """What the headers of a request say about its run."""

    def __init__(self, state: RequestState) -> None:
        parts = [
            part.strip().lower() for part in state.headers.get(b"prefer", b"").split(b",") if part
        ]
        self.is_async = b"respond-async" in parts
        self.wait: float | None = None
        for part in parts:
            name, _, value = part.partition(b"=")
            if name.strip() == b"wait" and value.strip().isdigit() and len(value) < 9:
                self.wait = min(float(value), _MAX_WAIT)
        key = state.headers.get(b"idempotency-key")
        self.key = None if key is None else key.decode("latin-1").strip().strip('"')
        self.applied = b", ".join(
            ([b"respond-async"] if self.is_async else [])
            + ([] if self.wait is None else [b"wait=%d" % self.wait])
        )


def may_be_run(state: RequestState, operation: Operation | None) -> bool:
    """Return whether a call is a run: its operation is durable, or its request asks for one."""
    if state.front.registry.run_store is None or operation is None:
        return False
    headers = state.headers
    return bool(operation.durable) or b"prefer" in headers or b"idempotency-key" in headers


async def call_run(
    state: RequestState, operation: Operation, value: Any
) -> ResponseEnvelope[Any] | Reply:
    """Make a call as a run; return its result, or the response if it is not answered in time.

    Raises:
        CallError: The error of the call.
    """
    asked = Preference(state)
    registry, context = state.front.registry, state.context
    if not (operation.durable or asked.is_async or asked.key is not None):
        return await registry.execute(operation.spec.id, value, context)
    run = await registry.start(operation.spec.id, value, context, key=asked.key)
    # The response is sent before the request ends.
    seconds = context.remaining - _ANSWER_SECONDS
    if asked.is_async:
        seconds = min(seconds, asked.wait or 0)
    elif operation.durable:
        seconds = min(seconds, INLINE_SECONDS if asked.wait is None else asked.wait)
    if seconds > 0:
        await run.wait(seconds)
    if run.state.is_final:
        return run.state.envelope()
    if operation.durable or asked.is_async:
        return _accepted(state, run, asked)
    return await run.result(_ANSWER_SECONDS)


def _accepted(state: RequestState, run: Run, asked: Preference) -> Reply:
    root: str = state.scope.get("root_path", "")
    headers: list[Header] = [
        (b"location", f"{root}/runs/{run.id}".encode()),
        (b"retry-after", b"1"),
        (b"x-request-id", state.context.request_id.encode()),
    ]
    if asked.applied:
        headers.append((b"preference-applied", asked.applied))
    return json_reply(shown(state, run.state), status=202, headers=headers)


def shown(state: RequestState, run: RunState) -> JSONObject:
    """Return a state as a caller sees it, without texts of unexpected exceptions."""
    return state_of(run, expose=state.front.expose_errors)


# ------------------------------------------------------------ the paths of runs


async def _list(state: RequestState) -> Reply:
    given = _query(state)
    page = await state.front.registry.runs(
        state.context,
        status=given.get("status"),
        operation=given.get("operation"),
        limit=given.get("limit", 50),
        after=given.get("after"),
    )
    reply: JSONObject = {"runs": [shown(state, run) for run in page.runs]}
    if page.next is not None:
        reply["next"] = page.next
    return json_reply(reply)


RUN_PATHS: dict[str, FixedPath] = {"/runs": Page(_list)}
"""The list of runs; `RUN_PATH` serves the paths below it."""


_PAGE = QueryArguments(
    from_schema(
        {
            "type": "object",
            "properties": {
                "status": {"type": "string"},
                "operation": {"type": "string"},
                "after": {"type": "string"},
                "limit": {"type": "integer"},
            },
        }
    )
)


def _query(state: RequestState) -> JSONObject:
    try:
        found: JSONObject = _PAGE.read(state.scope["query_string"])
    except ValueError as error:
        raise malformed(f"The query cannot be read: {error}") from None
    if not isinstance(found.get("limit", 50), int):
        raise malformed("limit is an integer")
    return found


_READS = ("", "result", "events", "steps")
_CHANGES = ("cancel", "answers", "signals", "retry")
_NAMED = ("answers", "signals")


class _RunPath:
    """Serves the paths below `/runs/`: `ID`, `ID/result`, `ID/events`, and those that change a run."""

    def place(self, state: RequestState) -> Target:
        """Return which slot the request takes: who waits takes one."""
        _, verb, _ = _parts(state)
        if verb == "events":
            return Target(slots=Slots.STREAMS)
        return Target(slots=Slots.CALLS) if Preference(state).wait else Target()

    async def read(self, state: RequestState) -> Any:
        """Return the body of a change.

        Raises:
            RequestError: 404 for an unknown path, 405 for a wrong method.
        """
        _, verb, name = _parts(state)
        is_read = verb in _READS
        is_known = is_read or verb in _CHANGES
        is_complete = bool(name) == (verb in _NAMED)
        if state.front.registry.run_store is None or not (is_known and is_complete):
            raise not_found()
        methods = ("GET", "HEAD") if is_read else ("POST",)
        if state.scope["method"] not in methods:
            raise wrong_method(methods)
        return None if is_read else await state.read_json()

    async def run(self, state: RequestState, asked: Any) -> Reply | None:
        """Read or change the run."""
        run_id, verb, name = _parts(state)
        run = await state.front.registry.run(run_id, state.context)
        if verb in _READS:
            return await _read_run(state, run, verb)
        return await _change_run(state, run, verb, name, asked)


RUN_PATH = _RunPath()


def _parts(state: RequestState) -> tuple[str, str, str]:
    """Return the id, the verb and the name in a path such as `/runs/ID/signals/NAME`."""
    _, _, rest = route_path(state.scope)[1:].partition("/")
    run_id, _, action = rest.partition("/")
    verb, _, name = action.partition("/")
    return run_id, verb, name


async def _read_run(state: RequestState, run: Run, verb: str) -> Reply | None:
    if verb == "events":
        await _serve_states(state, run)
        return None
    if verb == "steps":
        steps = [shown_step(step, expose=state.front.expose_errors) for step in await run.steps()]
        return json_reply({"steps": steps})
    asked = Preference(state)
    if asked.wait and not run.state.is_final:
        await run.wait(asked.wait)
    applied = [(b"preference-applied", asked.applied)] if asked.wait else []
    if verb == "result":
        if not run.state.is_final:
            return json_reply(shown(state, run.state), status=202, headers=[_RETRY, *applied])
        envelope = run.state.envelope()
        return result_reply(envelope, run.id, with_meta=b"operations-meta" in state.headers)
    tag = b'"%s-%d"' % (run.id.encode(), run.state.revision)
    if matches_tag(state.headers.get(b"if-none-match", b""), tag):
        return Reply(304, b"", [(b"etag", tag)])
    return json_reply(shown(state, run.state), headers=[(b"etag", tag), *applied])


_RETRY: Header = (b"retry-after", b"1")

_EVENTS = OperationSpec(
    name="events",
    namespace="runs",
    type=OperationType.SUBSCRIPTION,
    meta={"resume": {"input": "after", "id": "revision"}},
)
"""Describes the states of a run as a stream that can be resumed."""


async def _serve_states(state: RequestState, run: Run) -> None:
    last = state.headers.get(b"last-event-id", b"")
    seen = int(last) if last.isdigit() and len(last) < 16 else -1

    async def states() -> AsyncGenerator[ResponseEnvelope[Any]]:
        async for each in run.watch():
            # The same state has been sent before the client reconnected.
            if each.revision > seen or each.is_final:
                wire = {**shown(state, each), "revision": each.revision}
                yield local_envelope(wire, "runs.events")

    await serve_items(state, _EVENTS, states)


async def _change_run(state: RequestState, run: Run, verb: str, name: str, value: Any) -> Reply:
    if verb == "cancel":
        await run.cancel()
        return json_reply(shown(state, run.state), status=202)
    if verb == "retry":
        given: Any = {} if value is None else value
        if not is_object(given) or not set(given) <= {"ran", "notRun"}:
            raise malformed('The body is {}, {"ran": RESULT} or {"notRun": true}')
        await run.retry(ran=given.get("ran", msgspec.UNSET), not_run=given.get("notRun") is True)
        return json_reply(shown(state, run.state), status=202)
    if verb == "signals":
        await run.signal(name, value)
    elif not await run.answer(name, value):
        raise CallError(ErrorCode.RUN_ENDED, "This question is not outstanding")
    return Reply(204, b"", [JSON])
