"""The operations with which callers of a worker start and follow runs: `run.start`, `run.get` and others.

    run.start   {id, input, key, delay, ...}    store a run, return its state
    run.get     {run, after, wait}              its state; waits for a revision later than `after`
    run.watch   {run}                           a subscription: the present state, then every change
    run.list, run.steps, run.cancel, run.answer, run.signal, run.retry

Rule 1: a worker serves them if its registry has a store of runs. Workers of a group use the same store.
Rule 2: the owner of a run is the caller that the worker has identified; others learn nothing of it.
Rule 3: a result is part of the state, in the wire form of an envelope. Its secrets are masked unless `secrets` is set.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from operations.base.errors import CallError, ErrorCode
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.contract.functions import operation, validate_operation
from operations.front.runs import shown, shown_step
from operations.registry.registry import OperationRegistry
from operations.registry.runs import Run, RunState, RunStatus

REPLAYABLE_VERBS: Final = frozenset(
    {"run.get", "run.list", "run.steps", "run.cancel", "run.answer"}
)
"""Those that may run again if their worker is lost."""

MAX_WAIT: Final = 20.0
"""The longest time in seconds that `run.get` waits for a change."""

_REPLY_SECONDS: Final = 1.0
"""Seconds of the time limit of `run.get` that are left for its reply."""


def run_verbs(registry: OperationRegistry, *, expose: bool) -> list[Any]:
    """Return the operations for the runs of a registry; none if it has no store.

    Args:
        registry: The registry.
        expose: Whether callers see the texts of unexpected exceptions.
    """
    store = registry.run_store
    if store is None:
        return []

    def wire(state: RunState, secrets: bool = False) -> JSONObject:
        return {**shown(state, expose=expose, secrets=secrets), "revision": state.revision}

    async def find(run_id: str, context: OperationContext) -> Run:
        return await registry.run(run_id, _caller(context))

    # `id` is the name on the wire.
    @operation("run.start")
    async def start(
        id: str,
        context: OperationContext,
        input: Any = None,
        key: str | None = None,
        delay: float = 0,
        at: float | None = None,
        priority: int = 100,
        lane: str | None = None,
        retention: float | None = None,
        secrets: bool = False,
    ) -> JSONObject:
        """Start a run of a query or mutation; returns its state once it is stored.

        Args:
            id: The operation.
            context: The caller, who owns the run.
            input: The input of the operation.
            key: Names the run for this caller and operation: the same call with this key returns the same run.
            delay: Seconds until the run begins.
            at: When the run begins, in milliseconds since the epoch.
            priority: Runs with a lower number begin first.
            lane: The lane whose limit counts the run.
            retention: Seconds for which the run is kept after its end.
            secrets: Return secrets in its result, if the key names a run that has completed.
        """
        run = await registry.start(
            id,
            input,
            _caller(context),
            key=key,
            delay=delay,
            at=at,
            priority=priority,
            lane=lane,
            retention=retention,
        )
        return wire(run.state, secrets)

    @operation("run.get", type="query")
    async def get(
        run: str,
        context: OperationContext,
        after: int = -1,
        wait: float = 0,
        secrets: bool = False,
    ) -> JSONObject:
        """Return the state of a run, with its result or error if it has ended.

        Args:
            run: The id of the run.
            context: The caller.
            after: Wait until the state has a later revision, or the run has ended.
            wait: Seconds to wait, at most 20.
            secrets: Return secrets in the result, which are masked otherwise.
        """
        found = await find(run, context)
        seconds = min(wait, MAX_WAIT, context.remaining - _REPLY_SECONDS)
        if seconds > 0 and found.state.revision <= after and not found.state.is_final:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    return wire(await store.changed(run, after, _caller(context)), secrets)
        return wire(found.state, secrets)

    @operation("run.list", type="query")
    async def page(
        context: OperationContext,
        status: RunStatus | None = None,
        operation: str | None = None,
        after: str | None = None,
        limit: int = 50,
    ) -> JSONObject:
        """List the runs that the caller may see, the newest first.

        Args:
            context: The caller.
            status: Only runs in this state.
            operation: Only runs of this operation.
            after: The `next` of the page before.
            limit: The number of runs, at most 100.
        """
        found = await registry.runs(
            _caller(context),
            status=status,
            operation=operation,
            after=after,
            limit=limit,
        )
        listed: JSONObject = {"runs": [wire(state) for state in found.runs]}
        return listed if found.next is None else {**listed, "next": found.next}

    @operation("run.steps", type="query")
    async def steps(run: str, context: OperationContext) -> list[JSONObject]:
        """Return the recorded steps of a run, in the order in which they began.

        Args:
            run: The id of the run.
            context: The caller.
        """
        found = await find(run, context)
        return [shown_step(step, expose=expose) for step in await found.steps()]

    @operation("run.watch")
    async def watch(
        run: str, context: OperationContext, secrets: bool = False
    ) -> AsyncGenerator[JSONObject]:
        """Yield the present state of a run, then every change; end with the final state.

        Args:
            run: The id of the run.
            context: The caller.
            secrets: Return secrets in the result, which are masked otherwise.
        """
        found = await find(run, context)
        async for state in found.watch():
            yield wire(state, secrets)

    @operation("run.cancel", idempotent=True)
    async def cancel(run: str, context: OperationContext, secrets: bool = False) -> JSONObject:
        """Cancel a run. If it ends first, its result stays.

        Args:
            run: The id of the run.
            context: The caller.
            secrets: Return secrets in the result, which are masked otherwise.
        """
        found = await find(run, context)
        await found.cancel()
        return wire(found.state, secrets)

    @operation("run.answer", idempotent=True)
    async def answer(run: str, key: str, answer: Any, context: OperationContext) -> bool:
        """Answer a question of a run; returns false if the question is not outstanding.

        Args:
            run: The id of the run.
            key: The key of the question, in `waiting` of the run.
            answer: `{"action": "accept", "content": {...}}`, or `{"action": "decline"}`.
            context: The caller.
        """
        return await (await find(run, context)).answer(key, answer)

    @operation("run.signal")
    async def signal(run: str, name: str, context: OperationContext, value: Any = None) -> None:
        """Send a signal to a run.

        Args:
            run: The id of the run.
            name: The name of the signal.
            context: The caller.
            value: Its value.
        """
        await (await find(run, context)).signal(name, value)

    @operation("run.retry")
    async def retry(
        run: str,
        context: OperationContext,
        decision: JSONObject | None = None,
        secrets: bool = False,
    ) -> JSONObject:
        """Run a failed, cancelled or unknown run again.

        Args:
            run: The id of the run.
            context: The caller.
            decision: For an unknown run `{"ran": RESULT}` or `{"notRun": true}`.
            secrets: Return secrets in the result, which are masked otherwise.
        """
        given = decision or {}
        if not set(given) <= {"ran", "notRun"}:
            message = 'The decision is {"ran": RESULT} or {"notRun": true}'
            raise CallError(ErrorCode.VALIDATION_ERROR, message)
        found = await find(run, context)
        await found.retry(ran=given.get("ran", msgspec.UNSET), not_run=given.get("notRun") is True)
        return wire(found.state, secrets)

    verbs = [start, get, page, steps, watch, cancel, answer, signal, retry]
    # The grant of an agent covers the operation that it starts, as at every entry point.
    return [replace(validate_operation(verb), needs_grant=False) for verb in verbs]


def _caller(context: OperationContext) -> OperationContext:
    """Return the caller of a verb as the caller of the operation that it names."""
    return context.changed(registry=None, checked=None, reach=None)
