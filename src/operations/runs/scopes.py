"""The scopes of the calls of a run: what a handler may do there, and what is recorded of it.

PendingCall -> HandlerScope     a durable operation: its calls are steps
-> InlineScope      any other operation: its calls are part of its step
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from operations.base.errors import CallError, ErrorCode
from operations.base.types import JSONObject
from operations.contract.context import Caller as Calls
from operations.contract.context import OperationContext, ReadStream, ResultKeeper, RunScope
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import Operation
from operations.registry.runs import Run
from operations.runs.records import QUERY, ROOT, Attempt, Step


class Steps(ResultKeeper, Protocol):
    """What a scope needs of the attempt of its run. `parent` is the step that asks."""

    attempt: Attempt

    @property
    def is_cancelled(self) -> bool:
        """Whether the run was cancelled."""
        ...

    @property
    def is_admitted(self) -> bool:
        """Whether an earlier attempt has spent the approval and the budget of the root call."""
        ...

    @property
    def waited(self) -> float:
        """The seconds for which the attempt has only waited."""
        ...

    def handle(self) -> Run:
        """Return the handle of the run."""
        ...

    async def begin(self, name: str, parent: str, operation: Operation) -> Step:
        """Commit the marker of a call whose handler begins now, if it needs one; return the step."""
        ...

    async def call(
        self, parent: str, registry: Calls, operation_id: str, input: Any, child: OperationContext
    ) -> ResponseEnvelope[Any]:
        """Make a nested call as a step."""
        ...

    async def read(
        self,
        parent: str,
        registry: Calls,
        operation_id: str,
        input: Any,
        child: OperationContext,
        read: ReadStream,
        bounds: JSONObject,
    ) -> Any:
        """Read a nested subscription as a step."""
        ...

    async def step(self, parent: str, name: str, function: Callable[[], Any], *, once: bool) -> Any:
        """Run a function as a step."""
        ...

    async def fail_step(self, parent: str, name: str, error: CallError, *, once: bool) -> None:
        """Replace the recorded result of a step by an error."""
        ...

    async def sleep(self, parent: str, seconds: float) -> None:
        """Sleep until a recorded time."""
        ...

    async def wait_for(self, parent: str, name: str, timeout: float | None) -> Any:
        """Wait for a signal."""
        ...


class _Scope:
    """Names the run and the step that a call belongs to.

    Args:
        session: The attempt.
        name: The name of the step.
        is_step: Whether the call is the step itself, not a part of it.
    """

    def __init__(self, session: Steps, name: str, *, is_step: bool = False) -> None:
        self._session, self.step_name = session, name
        self._is_step = is_step

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self._session.attempt.id

    @property
    def attempt(self) -> int:
        """The number of the attempt."""
        return self._session.attempt.number

    @property
    def key(self) -> str | None:
        """Names the call in all attempts; None for a part of a step."""
        return f"{self.run_id}:{self.step_name}" if self._is_step else None

    @property
    def result_keeper(self) -> ResultKeeper | None:
        """Keeps the pages of the result, if this is the call of the run itself."""
        return self._session if self._is_step and self.step_name == ROOT else None


class HandlerScope(_Scope):
    """The scope of the handler of a durable operation: what it calls is recorded."""

    is_admitted = False

    @property
    def is_cancelled(self) -> bool:
        """Whether the run was cancelled."""
        return self._session.is_cancelled

    @property
    def run(self) -> Run:
        """The handle of the run."""
        return self._session.handle()

    @property
    def waited(self) -> float:
        """The seconds for which the attempt has only waited."""
        return self._session.waited

    async def begin(self, operation: Operation) -> RunScope:
        """Reject a call with the context of the handler: it would not be recorded."""
        message = (
            f"Call {operation.spec.id} with context.env or context.call, so that the run records it"
        )
        raise CallError(ErrorCode.EXECUTION_ERROR, message, begun=False)

    async def call(
        self, registry: Calls, operation_id: str, input: Any, child: OperationContext
    ) -> ResponseEnvelope[Any]:
        """Make a nested call as a step."""
        return await self._session.call(self.step_name, registry, operation_id, input, child)

    def begin_stream(self) -> None:
        """Accept a subscription with the context of the handler: its items are not recorded."""

    async def read(
        self,
        registry: Calls,
        operation_id: str,
        input: Any,
        child: OperationContext,
        read: ReadStream,
        bounds: JSONObject,
    ) -> Any:
        """Read a nested subscription as a step."""
        return await self._session.read(
            self.step_name, registry, operation_id, input, child, read, bounds
        )

    async def step(self, name: str, function: Callable[[], Any], *, once: bool) -> Any:
        """Run a function as a step."""
        return await self._session.step(self.step_name, name, function, once=once)

    async def fail_step(self, name: str, error: CallError, *, once: bool) -> None:
        """Record that a step has failed after all."""
        await self._session.fail_step(self.step_name, name, error, once=once)

    async def sleep(self, seconds: float) -> None:
        """Sleep until a recorded time."""
        await self._session.sleep(self.step_name, seconds)

    async def wait_for(self, name: str, timeout: float | None) -> Any:
        """Wait for a signal."""
        return await self._session.wait_for(self.step_name, name, timeout)


class InlineScope(_Scope):
    """The scope of the handler of any other operation, which is one step: what it calls is part of that step."""

    @property
    def is_admitted(self) -> bool:
        """Return False: its nested calls spend their own approvals and budgets."""
        return False

    @property
    def is_cancelled(self) -> bool:
        """Whether the run was cancelled."""
        return self._session.is_cancelled

    @property
    def run(self) -> Run:
        """The handle of the run."""
        return self._session.handle()

    @property
    def waited(self) -> float:
        """The seconds for which the attempt has only waited."""
        return self._session.waited

    async def begin(self, operation: Operation) -> RunScope:
        """Return the scope of a part of the step."""
        return InlineScope(self._session, self.step_name)

    async def call(
        self, registry: Calls, operation_id: str, input: Any, child: OperationContext
    ) -> ResponseEnvelope[Any]:
        """Make a nested call, which is part of the step."""
        scope = InlineScope(self._session, self.step_name)
        return await registry.execute(operation_id, input, child.changed(scope=scope))

    def begin_stream(self) -> None:
        """Accept a subscription, which is part of the step."""

    async def read(
        self,
        registry: Calls,
        operation_id: str,
        input: Any,
        child: OperationContext,
        read: ReadStream,
        bounds: JSONObject,
    ) -> Any:
        """Read a nested subscription, which is part of the step."""
        scope = InlineScope(self._session, self.step_name)
        return await read(registry.subscribe(operation_id, input, child.changed(scope=scope)))

    async def step(self, name: str, function: Callable[[], Any], *, once: bool) -> Any:
        """Run a function, which is part of the step."""
        result = function()
        return await result if inspect.isawaitable(result) else result

    async def fail_step(self, name: str, error: CallError, *, once: bool) -> None:
        """Do nothing: the function was not recorded."""

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)

    async def wait_for(self, name: str, timeout: float | None) -> Any:
        """Reject the call: the step could not be continued by another process."""
        message = "Only an operation with durable=True can wait for a signal"
        raise CallError(ErrorCode.UNAVAILABLE, message, retryable=False)


class PendingCall(InlineScope):
    """The scope of a call until its handler begins: what its middleware calls is not recorded.

    The handler of a subscription keeps it: what it calls is a part of the step.
    """

    def __init__(self, session: Steps, name: str, parent: str, operation_id: str) -> None:
        super().__init__(session, name)
        self._parent = parent
        # If the call is rejected before its handler begins, its error is recorded without a marker.
        self.has_begun = False
        self.record = Step(name, parent, operation_id, QUERY, 0, 0, None, None, None)

    @property
    def is_admitted(self) -> bool:
        """Whether an earlier attempt has spent the approval and the budget."""
        return self.step_name == ROOT and self._session.is_admitted

    async def begin(self, operation: Operation) -> RunScope:
        """Commit the marker; return the scope of the handler."""
        self.has_begun = True
        self.record = await self._session.begin(self.step_name, self._parent, operation)
        if operation.durable:
            return HandlerScope(self._session, self.step_name, is_step=True)
        return InlineScope(self._session, self.step_name, is_step=True)

    def begin_stream(self) -> None:
        """Note that the handler of the subscription begins."""
        self.has_begun = True

    def needs_approval(self, error: Exception) -> bool:
        """Return whether the call has not begun because a person must approve it first."""
        is_asked = isinstance(error, CallError) and error.code == ErrorCode.APPROVAL_REQUIRED
        return is_asked and not self.has_begun
