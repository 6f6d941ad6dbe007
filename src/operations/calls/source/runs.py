"""The runs that the workers of a group keep, for their clients.

Rule 1: waiting for a run is a query that is repeated, so that it survives the loss of a worker.
Rule 2: the time limit of a request ends a wait, never the run.
"""

import asyncio
from time import monotonic
from typing import Any, Final, Protocol, TypeVar

import msgspec

from operations.base.errors import CallError, ErrorCode
from operations.base.types import JSONObject
from operations.calls.serving.runs import MAX_WAIT
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.registry.runs import RunPage, RunState, RunStep, StartOptions

T = TypeVar("T")

_SECONDS: Final = 10.0
"""Seconds that a request has in addition to its wait."""

_STARTS: Final = 5
"""How often a start with a key is sent."""

_PATIENCE: Final = 60.0
"""Seconds for which the workers may be unavailable while a client waits for a run."""

_PAUSE: Final = 0.5
"""Seconds until a wait that failed is repeated."""


class Calls(Protocol):
    """Calls the workers of a group."""

    async def call(
        self,
        operation_id: str,
        input: Any = None,
        context: OperationContext | None = None,
        *,
        timeout: float | None = None,
        replayable: bool | None = None,
    ) -> ResponseEnvelope[Any]:
        """Run an operation on one worker."""
        ...


class RemoteRuns:
    """The runs of a group, as `Run` needs them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def start(
        self, operation_id: str, input: Any, context: OperationContext, options: StartOptions
    ) -> RunState:
        """Start a run, and return its state once it is stored."""
        given = {
            name: value
            for name, value in msgspec.structs.asdict(options).items()
            if value != getattr(_DEFAULTS, name)
        }
        asked = {"id": operation_id, "input": input, "secrets": True, **given}
        sends = _STARTS if options.key is not None else 1
        while True:
            sends -= 1
            try:
                envelope = await self._calls.call("run.start", asked, context, replayable=False)
            except CallError as error:
                # Without a key, the run that may have been started would be started twice.
                if error.code != ErrorCode.UNAVAILABLE or not sends or context.remaining <= _PAUSE:
                    raise
                await asyncio.sleep(_PAUSE)
            else:
                return _state(envelope.data)

    async def state(self, run_id: str, context: OperationContext) -> RunState:
        """Return the present state of a run."""
        return await self._state("run.get", {"run": run_id}, context)

    async def steps(self, run_id: str, context: OperationContext) -> list[RunStep]:
        """Return the recorded steps."""
        envelope = await self._calls.call("run.steps", {"run": run_id}, context, replayable=True)
        return _read(envelope.data, list[RunStep])

    async def changed(self, run_id: str, revision: int, context: OperationContext) -> RunState:
        """Return the state as soon as its revision is later than this one."""
        wait = {"run": run_id, "after": revision, "wait": MAX_WAIT}
        failed_at: float | None = None
        while True:
            try:
                state = await self._state("run.get", wait, context, MAX_WAIT + _SECONDS)
            except CallError as error:
                failed_at = monotonic() if failed_at is None else failed_at
                may_work = error.retryable or error.code == ErrorCode.TIMEOUT
                if not may_work or monotonic() - failed_at > _PATIENCE or context.remaining <= 0:
                    raise
                await asyncio.sleep(_PAUSE)
                continue
            failed_at = None
            if state.revision > revision or state.is_final:
                return state

    async def page(
        self,
        context: OperationContext,
        *,
        status: str | None,
        operation: str | None,
        limit: int,
        after: str | None,
    ) -> RunPage:
        """List the runs that the caller may see."""
        asked: JSONObject = {"limit": limit}
        for name, value in (("status", status), ("operation", operation), ("after", after)):
            if value is not None:
                asked[name] = value
        envelope = await self._calls.call("run.list", asked, context, replayable=True)
        return _read(envelope.data, RunPage)

    async def cancel(self, run_id: str, context: OperationContext) -> RunState:
        """Cancel a run."""
        return await self._state("run.cancel", {"run": run_id}, context)

    async def answer(self, run_id: str, key: str, value: Any, context: OperationContext) -> bool:
        """Answer a question of a run; return False if it is not outstanding."""
        given = {"run": run_id, "key": key, "answer": value}
        envelope = await self._calls.call("run.answer", given, context, replayable=True)
        return envelope.data is True

    async def signal(self, run_id: str, name: str, value: Any, context: OperationContext) -> None:
        """Send a signal to a run."""
        given = {"run": run_id, "name": name, "value": value}
        await self._calls.call("run.signal", given, context, replayable=False)

    async def retry(
        self, run_id: str, context: OperationContext, *, ran: Any, not_run: bool
    ) -> RunState:
        """Run a failed, cancelled or unknown run again."""
        decision: JSONObject = {} if ran is msgspec.UNSET else {"ran": ran}
        if not_run:
            decision["notRun"] = True
        given = {"run": run_id, "decision": decision, "secrets": True}
        envelope = await self._calls.call("run.retry", given, context, replayable=False)
        return _state(envelope.data)

    async def _state(
        self, verb: str, given: JSONObject, context: OperationContext, timeout: float | None = None
    ) -> RunState:
        asked = {**given, "secrets": True}
        envelope = await self._calls.call(verb, asked, context, timeout=timeout, replayable=True)
        return _state(envelope.data)


_DEFAULTS = StartOptions()


def _state(data: Any) -> RunState:
    return _read(data, RunState)


def _read(data: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(data, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CallError(ErrorCode.UNKNOWN_ERROR, f"the run is malformed: {error}") from error
