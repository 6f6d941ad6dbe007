"""Runs: calls with a life of their own. What a registry needs of a store of runs, and the handle that callers hold.

    queued -> working <-> input_required -> completed | failed | cancelled | unknown

Rule 1: a registry knows no journal: `operations.runs` implements `RunStore`.
Rule 2: a run that a caller may not see does not exist for it: the error is that of an unknown id.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from enum import StrEnum
from math import inf
from time import monotonic
from typing import Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from operations.base.errors import CallError, ErrorCode, timed_out
from operations.base.json.secrets import masked
from operations.base.json.values import MASK, object_of
from operations.base.text import shortened
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.registry.plan import CallPlan


class RunStatus(StrEnum):
    """The states of a run. The last four are final."""

    QUEUED = "queued"
    WORKING = "working"
    INPUT_REQUIRED = "input_required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


FINAL: Final = frozenset(
    {RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.UNKNOWN}
)
"""The states that never change, except by `retry`."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that a run waits for."""

    key: str
    """The name for the answer, unique for the life of the run."""

    kind: str
    """`elicit`, `sample`, `approval` or `signal`."""

    request: Any = None
    """What is asked: `{message, schema}`, the request for a completion, or the id of the approval."""


class RunState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run at one moment. Times are in milliseconds since the epoch."""

    id: str
    operation: str
    status: RunStatus
    created: int
    updated: int
    attempt: int
    owner: str | None = None
    """The account of the caller that started it; None for the operator and anonymous callers."""

    expires: int | None = None
    """When the run is removed; None while it is live."""

    progress: Any = None
    message: str | None = None
    waiting: tuple[Waiting, ...] = ()
    result: Any = None
    """The envelope of a completed run, in its wire form."""

    error: Any = None
    """The error of a run that ended in another way, in its wire form."""

    secrets: tuple[str, ...] = ()
    """The places of values in `result` or `error` that the contract of the operation marks as secret."""

    revision: int = 0
    """Counts the changes, so that a watcher misses none."""

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        return self.status in FINAL

    def masked(self) -> "RunState":
        """Return the state for lists and pages, in which secrets are masked."""
        if not self.secrets:
            return self
        result, error = object_of(self.result), object_of(self.error)
        if result:
            result = masked(result, [f"/data{place}" for place in self.secrets])
            meta = object_of(result.get("meta"))
            # They repeat the data.
            repeated = {"content": [{"type": "text", "text": MASK}], "structuredContent": MASK}
            result["meta"] = {name: repeated.get(name, value) for name, value in meta.items()}
        if "details" in error:
            error = {**error, "details": masked(error["details"], self.secrets)}
        return replace(self, result=result or None, error=error or None, secrets=())

    def envelope(self) -> ResponseEnvelope[Any]:
        """Return the result of a run that has ended.

        Raises:
            CallError: The error of the run.
        """
        if self.status is RunStatus.COMPLETED:
            return ResponseEnvelope.from_wire(self.result)
        raise self.failure()

    def failure(self) -> CallError:
        """Return the error of a run that has ended without a result."""
        wire: Any = self.error or {}
        error = CallError.from_wire(wire)
        error.unexpected = wire.get("unexpected") is True
        if error.unexpected:
            error.operation_id = self.operation
        return error


class RunStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A recorded step of a run, without its input and result. Times are in milliseconds since the epoch."""

    name: str
    parent: str
    """The step that has made it; `.` for the call of the run itself, and empty for that call."""

    operation: str
    """The called operation; `step:NAME` for a function, `sleep`, `elicit`, `sample`, `signal:NAME` or `approval`."""

    begun: int
    ended: int | None = None
    """When its outcome was recorded; None while it is not known."""

    once: bool = False
    """Whether it may run only once."""

    error: Any = None
    """Its error in wire form, if it failed."""

    answered_by: str | None = None
    """Who has approved or answered it."""


class RunPage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Some of the runs that a caller may see, the newest first. They have neither result nor error details."""

    runs: list[RunState]

    next: str | None = None
    """The `after` of the next page; None on the last page."""


class StartOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is started; see `OperationRegistry.start`."""

    key: str | None = None
    delay: float = 0
    at: float | None = None
    priority: int = 100
    lane: str | None = None
    retention: float | None = None


class RunAccess(Protocol):
    """Reads and changes runs that exist: a store of this process, or the workers of a group."""

    async def state(self, run_id: str, context: OperationContext) -> RunState:
        """Return the present state.

        Raises:
            CallError: `RUN_NOT_FOUND`.
        """
        ...

    async def steps(self, run_id: str, context: OperationContext) -> list[RunStep]:
        """Return the recorded steps.

        Raises:
            CallError: `RUN_NOT_FOUND`.
        """
        ...

    async def changed(self, run_id: str, revision: int, context: OperationContext) -> RunState:
        """Return the state as soon as its revision is later than this one."""
        ...

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
        ...

    async def cancel(self, run_id: str, context: OperationContext) -> RunState:
        """Cancel a run. No error and no change if it has ended."""
        ...

    async def answer(self, run_id: str, key: str, value: Any, context: OperationContext) -> bool:
        """Answer a question of a run; return False if it is not outstanding."""
        ...

    async def signal(self, run_id: str, name: str, value: Any, context: OperationContext) -> None:
        """Send a signal to a run."""
        ...

    async def retry(
        self, run_id: str, context: OperationContext, *, ran: Any, not_run: bool
    ) -> RunState:
        """Run a failed, cancelled or unknown run again."""
        ...


class RunStore(RunAccess, Protocol):
    """Keeps runs and runs them; `operations.runs.Runs` implements it."""

    def attach(self, registry: Any) -> None:
        """Run the operations of this registry."""
        ...

    async def open(self) -> None:
        """Begin to run what is queued, also runs that another process has left. Does nothing in a client."""
        ...

    async def open_when_up(self) -> None:
        """Open it as `open` does; if its server is down, go on without, and try again."""
        ...

    @property
    def was_opened(self) -> bool:
        """Whether it could be opened since the start."""
        ...

    async def result_page(
        self, run_id: str, number: int, context: OperationContext
    ) -> tuple[str, bytes] | None:
        """Return the operation of a run and a page of its result; None if the caller may not see it."""
        ...

    async def works(self) -> bool:
        """Return whether the store can be written."""
        ...

    async def counts(self) -> dict[str, int]:
        """Return the number of live and `unknown` runs, and the age of the `oldest` ready one in milliseconds."""
        ...

    def totals(self) -> dict[str, int]:
        """Return the number of attempts of this process, and of the runs that ended in it by status."""
        ...

    async def aclose(self) -> None:
        """Hand over the runs that do not end within the grace, and close the store."""
        ...

    async def start(
        self, plan: CallPlan, value: Any, context: OperationContext, options: StartOptions
    ) -> RunState:
        """Store a run, whose access and input were checked; return after the commit."""
        ...


class Run:
    """A handle for a run.

    Args:
        store: The store that keeps the run.
        state: Its present state.
        context: The caller.

    Attributes:
        state: The last state that this handle has read.
    """

    def __init__(self, store: RunAccess, state: RunState, context: OperationContext) -> None:
        self._store, self._context = store, context
        self.state = state

    @property
    def id(self) -> str:
        """128 random bits in hex."""
        return self.state.id

    @property
    def status(self) -> RunStatus:
        """The status when the state was last read."""
        return self.state.status

    async def refresh(self) -> RunState:
        """Read the present state and return it."""
        self.state = await self._store.state(self.id, self._context)
        return self.state

    async def steps(self) -> list[RunStep]:
        """Return the recorded steps in the order in which they began. A completed run has none without `keep_steps`."""
        return await self._store.steps(self.id, self._context)

    async def result(self, timeout: float | None = None) -> ResponseEnvelope[Any]:
        """Wait until the run has ended, and return its result. A timeout ends the wait, not the run.

        Raises:
            CallError: The error of the run; `TIMEOUT` if it does not end in time.
        """
        try:
            async with asyncio.timeout(None if timeout is None or timeout == inf else timeout):
                async for _ in self.watch():
                    pass
        except TimeoutError:
            raise timed_out(f"the run {self.id}", timeout, "end") from None
        return self.state.envelope()

    async def wait(self, seconds: float) -> RunState:
        """Return the state after at most this time; earlier if the run ends."""
        ends = monotonic() + seconds
        if not self.state.is_final:
            with suppress(CallError):
                await self.result(ends - monotonic())
        return self.state

    async def watch(self) -> AsyncGenerator[RunState]:
        """Yield the present state, then every change; end with the final state."""
        yield self.state
        while not self.state.is_final:
            self.state = await self._store.changed(self.id, self.state.revision, self._context)
            yield self.state

    async def cancel(self) -> None:
        """Cancel the run. It may end first; then its result stays."""
        self.state = await self._store.cancel(self.id, self._context)

    async def answer(self, key: str, value: Any) -> bool:
        """Answer a question of the run; the first answer wins. Return False if the question is not outstanding."""
        return await self._store.answer(self.id, key, value, self._context)

    async def signal(self, name: str, value: Any = None) -> None:
        """Send a signal, which `context.wait_for` returns; it may come before the run waits for it.

        Raises:
            CallError: `RUN_ENDED`.
        """
        await self._store.signal(self.id, name, value, self._context)

    async def retry(self, *, ran: Any = msgspec.UNSET, not_run: bool = False) -> None:
        """Run a failed or cancelled run again: recorded results stay, recorded errors are removed.

        Args:
            ran: For an unknown run: the result of the call whose outcome is unknown.
            not_run: For an unknown run: that call did not run, and may run now.

        Raises:
            CallError: `VALIDATION_ERROR` if the run has not ended in this way, or the decision is missing.
        """
        self.state = await self._store.retry(self.id, self._context, ran=ran, not_run=not_run)


def run_not_found(run_id: str) -> CallError:
    """Return the error for a run that is unknown, expired or not visible to the caller."""
    # Callers may ask for any text.
    shown = shortened(run_id.encode("utf-8", "replace").decode(), 64)
    return CallError(ErrorCode.RUN_NOT_FOUND, f"There is no run {shown!r}", {"run": shown})


def no_store() -> CallError:
    """Return the error of a registry without a store of runs."""
    message = (
        "This server keeps no runs: give the registry a store, OperationRegistry(runs=Runs(...))"
    )
    return CallError(ErrorCode.UNAVAILABLE, message, retryable=False)
