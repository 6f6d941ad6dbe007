"""The operations with which callers follow their own runs, for clients that know no runs, such as models.

Rule 1: they show and change only the caller's own runs, also for callers that may manage those of others.
"""

from typing import Any

import msgspec
from msgspec.structs import replace

from operations.base.errors import CallError
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.contract.functions import operation
from operations.front.public_errors import public_wire
from operations.registry.registry import OperationRegistry
from operations.registry.runs import Run, RunState, RunStatus, RunStep

_MAX_WAIT = 20.0
"""The longest time that a call waits for a run, in seconds."""


def run_operations(registry: OperationRegistry) -> list[Any]:
    """Return the operations `runs.get`, `runs.list`, `runs.cancel` and `runs.answer`."""

    @operation("runs.get", type="query")
    async def get(
        run: str, context: OperationContext, wait: float = 0, secrets: bool = False
    ) -> JSONObject:
        """Return the state of one of your runs, with its result or error if it has ended.

        Args:
            run: The id of the run.
            context: The caller.
            wait: Seconds to wait for its end, at most 20.
            secrets: Return secrets in the result, which are masked otherwise.
        """
        found = await _own(run, context)
        seconds = min(wait, _MAX_WAIT, context.remaining - 1)
        if seconds > 0 and not found.state.is_final:
            await found.wait(seconds)
        return shown(found.state, secrets=secrets)

    @operation("runs.list", type="query")
    async def page(
        context: OperationContext,
        status: RunStatus | None = None,
        after: str | None = None,
        limit: int = 20,
    ) -> JSONObject:
        """List your runs, the newest first.

        Args:
            context: The caller.
            status: Only runs in this state.
            after: The `next` of the page before.
            limit: The number of runs, at most 100.
        """
        found = await registry.runs(_owner(context), status=status, after=after, limit=limit)
        listed: JSONObject = {"runs": [shown(state) for state in found.runs]}
        return listed if found.next is None else {**listed, "next": found.next}

    @operation("runs.cancel", idempotent=True)
    async def cancel(run: str, context: OperationContext) -> JSONObject:
        """Cancel one of your runs. If it ends first, its result stays.

        Args:
            run: The id of the run.
            context: The caller.
        """
        found = await _own(run, context)
        await found.cancel()
        return shown(found.state)

    @operation("runs.answer", idempotent=True)
    async def answer(run: str, key: str, answer: JSONObject, context: OperationContext) -> bool:
        """Answer a question of one of your runs; returns false if the question is not outstanding.

        Args:
            run: The id of the run.
            key: The key of the question, in `waiting` of the run.
            answer: `{"action": "accept", "content": {...}}`, or `{"action": "decline"}`.
            context: The caller.
        """
        return await (await _own(run, context)).answer(key, answer)

    async def _own(run_id: str, context: OperationContext) -> Run:
        return await registry.run(run_id, _owner(context))

    return [get, page, cancel, answer]


def _owner(context: OperationContext) -> OperationContext:
    """Return the context of a caller without the scopes for the runs of others."""
    identity = context.identity
    if identity is None:
        return context
    scopes = [scope for scope in identity.scopes if not scope.startswith("runs:")]
    return context.changed(identity=replace(identity, scopes=scopes))


def shown(state: RunState, *, expose: bool = False, secrets: bool = False) -> JSONObject:
    """Return a state as a caller sees it.

    Args:
        state: The state.
        expose: Whether it has the texts of unexpected exceptions.
        secrets: Whether secrets in its result are not masked.
    """
    state = state if secrets else state.masked()
    wire: JSONObject = msgspec.to_builtins(state)
    wire.pop("revision", None)
    if state.status is not RunStatus.COMPLETED and "error" in wire:
        wire["error"] = public_wire(state.failure(), state.id, expose=expose)
    return wire


def shown_step(step: RunStep, *, expose: bool = False) -> JSONObject:
    """Return a step as a caller sees it: without texts of unexpected exceptions, unless they are exposed."""
    wire: JSONObject = msgspec.to_builtins(step)
    if step.error is not None:
        error = CallError.from_wire(step.error)
        error.unexpected = step.error.get("unexpected") is True
        wire["error"] = public_wire(error, step.name, expose=expose)
    return wire
