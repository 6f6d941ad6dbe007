"""One attempt of a run: its root call, its steps, and how it ends.

    prepared -> root call, with steps -> ended | released | lost

Rule 1: an outcome is recorded before the handler sees it.
Rule 2: the handler cannot catch the end of its attempt: the end is stored first, its task is then cancelled, and no
        step that it asks for afterwards begins or returns.
Rule 3: an attempt that has lost its run writes nothing more.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec

from operations.base.errors import (
    CallError,
    ErrorCode,
    map_error,
    operation_not_found,
    timeout_error,
)
from operations.base.json.values import JSONValueError, object_of, to_json
from operations.base.logs import LogThrottle
from operations.base.tasks import start_task
from operations.base.types import JSONObject
from operations.contract.access import Identity
from operations.contract.channel import CallerChannel
from operations.contract.context import Caller as Calls
from operations.contract.context import OperationContext, ReadStream
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import Operation, OperationType
from operations.registry.runs import Run, RunState, RunStatus
from operations.runs.callers import enforce_current
from operations.runs.database import Connection
from operations.runs.journal import Journal, Limits, cancelled_error
from operations.runs.outcomes import (
    described,
    error_bytes,
    error_wire,
    failed,
    outcome_unknown,
    recorded_error,
    recorded_value,
)
from operations.runs.records import (
    ABANDONED,
    DURABLE,
    KEYED,
    MARKED,
    MUTATION,
    ONCE,
    QUERY,
    ROOT,
    SLEEP,
    Attempt,
    Caller,
    End,
    Question,
    Step,
)
from operations.runs.scopes import PendingCall
from operations.runs.secrecy import error_places, error_with_places, result_places, with_places
from operations.runs.steps import RecordedSteps, StepNames
from operations.runs.texts import cleaned, milliseconds
from operations.runs.writer import RunStoreError

logger = logging.getLogger("operations")

T = TypeVar("T")

CLEANUP_SECONDS: Final = 5.0
"""How long a cancelled handler may clean up."""

_ABSENT_MILLISECONDS: Final = 5_000
"""The time until a run is tried again whose operation is not available, or whose caller cannot be checked."""

_PROGRESS_SECONDS: Final = 0.2
"""Seconds between two writes of the progress of a run."""

_RETRY_SECONDS: Final = 0.2
"""Seconds between two attempts to write to a store that does not work."""

_UNWINDING_SECONDS: Final = 0.1
"""Seconds between two looks at a handler that cleans up after a timeout."""


class Host(Protocol):
    """What an attempt needs of the store of runs."""

    journal: Journal
    limits: Limits
    registry: Any

    def write(self, job: Callable[[Connection], T]) -> "asyncio.Future[T]":
        """Run a job that writes."""
        ...

    def read(self, job: Callable[[Connection], T]) -> "asyncio.Future[T]":
        """Run a job that reads."""
        ...

    async def caller_of(self, attempt: Attempt) -> tuple[Caller, Identity | None]:
        """Return the caller of today."""
        ...

    def handle(self, state: RunState, context: OperationContext) -> Run:
        """Return a handle for a run."""
        ...

    def digest_of(self, operation: Operation) -> str:
        """Return the digest of a contract."""
        ...

    park_seconds: float

    @property
    def holds_lease(self) -> bool:
        """Whether no other process may take over the attempts of this one."""
        ...

    def unreleased(self, run_id: str, fence: int) -> None:
        """Release an attempt as soon as the store works again."""
        ...

    def lend(self, slots: int) -> None:
        """Give up a slot, or take it again (-1)."""
        ...

    async def slot(self) -> None:
        """Wait for a slot, which the caller takes at once."""
        ...

    def watch_approvals(self) -> None:
        """Notice when approvals are answered that runs wait for."""
        ...


class Session:
    """An attempt of a run.

    Args:
        host: The store of runs.
        attempt: What was claimed.
        steps: What earlier attempts have recorded.
        context: The context of the caller, if it has just started the run; else it is resolved again.
    """

    def __init__(
        self,
        host: Host,
        attempt: Attempt,
        steps: list[Step],
        context: OperationContext | None = None,
    ) -> None:
        self.host, self.attempt = host, attempt
        self.recorded = RecordedSteps(steps)
        self.names = StepNames()
        self.identity: Identity | None = None
        self.task: asyncio.Task[None] | None = None
        self._given = context
        self._context: OperationContext | None = None
        self._resolving: asyncio.Task[tuple[Caller, Identity | None]] | None = None
        self._root: asyncio.Task[ResponseEnvelope[Any]] | None = None
        self._over = asyncio.Event()
        self._closed = ""
        """Why no step may begin; empty while they may."""
        self._cancelled = self._is_leaving = False
        self._count = len(steps)
        self._begun: dict[str, Step] = {}
        """The calls with a marker that are running."""
        self._settled = asyncio.Event()
        """Set when none of them runs any more."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pages: Sequence[bytes] = ()
        self._progress: tuple[Any, str | None] | None = None
        self._operation: Operation | None = None
        self._working = self._waiting = 0
        """The steps that run, and the things that the run waits for."""
        self._wakes: dict[str, float] = {}
        """When sleeps end, by the clock of the event loop."""
        self._is_idle = False
        self._idle_since = self._idle_seconds = 0.0
        self._parking: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._regain_lock = asyncio.Lock()
        self._regaining = 0
        """The branches that go on when there is a slot."""
        self._failures = LogThrottle()

    # ------------------------------------------------------------ the attempt

    async def work(self) -> None:
        """Make the attempt, and end or release the run."""
        try:
            end = await self._prepare()
            if end is None and self._cancelled and not self._closed:
                end = self._cancelled_end()
            if end is None and not self._closed:
                end = await self._call_root()
        except RunStoreError:
            self.close("the store of runs does not work")
            self.host.unreleased(self.attempt.id, self.attempt.fence)
            end = None
        except CallError as error:
            end = self._failed(error)
        if end is not None:
            await self._end(end)
        self.close("the attempt has ended")
        self._change()

    async def _prepare(self) -> End | None:
        """Check that the attempt may be made, and by whom; return how the run ends if not."""
        attempt, host = self.attempt, self.host
        if attempt.cancelled_by is not None:
            return self._cancelled_end()
        if (step := self.recorded.begun_once()) is not None:
            return End(RunStatus.UNKNOWN, error=outcome_unknown(step).to_wire())
        if attempt.crashes >= host.limits.max_attempts:
            message = f"The process of the run ended {attempt.crashes} times"
            return failed(CallError(ErrorCode.EXECUTION_ERROR, message))
        operation = host.registry.get(attempt.operation)
        if operation is None:
            namespace = attempt.operation.partition(".")[0]
            if host.registry.is_absent(namespace) or host.registry.awaits_sources():
                # Its source is not connected now.
                await self._postpone("its operation is not available now")
                return None
            return failed(operation_not_found(attempt.operation))
        if host.digest_of(operation) != attempt.digest:
            message = f"The contract of {attempt.operation} has changed since the run was started"
            return failed(CallError(ErrorCode.OPERATION_CHANGED, message))
        self._operation = operation
        if self._given is not None:
            self.identity = self._given.identity
            base = self._given
        else:
            self._resolving = asyncio.Task(host.caller_of(attempt))
            try:
                caller, self.identity = await self._resolving
            except asyncio.CancelledError:
                if not self._is_interrupted:
                    raise
                return None
            except Exception as error:
                if isinstance(error, CallError) and error.code != ErrorCode.UNAVAILABLE:
                    raise
                # Whether it may continue is not known now, so it neither continues nor fails.
                logger.warning("the caller of the run %s cannot be checked: %r", attempt.id, error)
                await self._postpone("its caller cannot be checked now")
                return None
            base = OperationContext(
                identity=self.identity,
                trusted=caller.trusted,
                lenient=caller.lenient,
                whole=caller.whole,
                authority=caller.authority,
                metadata=caller.metadata,
            )
        self._context = OperationContext(
            identity=self.identity,
            trusted=base.trusted,
            lenient=base.lenient,
            whole=base.whole,
            authority=base.authority,
            metadata=base.metadata,
            channel=self._channel(base.channel),
            registry=host.registry,
        )
        return None

    async def _postpone(self, reason: str) -> None:
        """Queue the run again after some seconds."""
        attempt, journal = self.attempt, self.host.journal
        self.close(reason)
        await self.host.write(
            lambda db: journal.release(
                db, attempt.id, attempt.fence, db.now() + _ABSENT_MILLISECONDS
            )
        )

    def _cancelled_end(self) -> End:
        step = self.recorded.begun_once()
        unfinished = [*self._begun.values()] or ([] if step is None else [step])
        begun = [(each.operation, each.name, each.begun) for each in unfinished]
        return End(RunStatus.CANCELLED, error=cancelled_error(begun).to_wire())

    def _channel(self, given: CallerChannel) -> CallerChannel:
        """Return the channel of the run. The first attempt knows more of the caller."""
        return CallerChannel(
            progress=self._report,
            elicit=self._elicit,
            sample=self._sample,
            meta=given.meta,
            session=given.session,
            serves_anonymous=given.serves_anonymous,
        )

    async def _call_root(self) -> End | None:
        """Run the root call to its end; return how the run ends, or None if the attempt ends without that."""
        attempt = self.attempt
        value = msgspec.json.decode(attempt.input)
        root = self._root = asyncio.Task(self._run_root(value))
        root.add_done_callback(lambda _: self._over.set())
        try:
            await self._over.wait()
        except asyncio.CancelledError:
            root.cancel()
            raise
        if not root.done():
            # The handler ignores its cancellation; nothing that it does is recorded.
            self.host.registry.keep(root)
        return self._outcome(root)

    async def _run_root(self, value: Any) -> ResponseEnvelope[Any]:
        attempt, context = self.attempt, cast("OperationContext", self._context)
        # Any other operation is a step that runs, also while it asks.
        is_durable = self._operation is not None and bool(self._operation.durable)
        with self._occupied():
            while True:
                scope = PendingCall(self, ROOT, "", attempt.operation)
                try:
                    with self._delegated() if is_durable else nullcontext():
                        call = self.host.registry.execute(
                            attempt.operation, value, context.changed(scope=scope)
                        )
                        return cast("ResponseEnvelope[Any]", await call)
                except CallError as error:
                    if not scope.needs_approval(error):
                        raise
                    await self._wait_for_approval(ROOT, error)

    def _outcome(self, root: "asyncio.Task[ResponseEnvelope[Any]]") -> End | None:
        is_returned = root.done() and not root.cancelled()
        if self._closed:
            if is_returned:
                root.exception()
            return None
        self._closed = "the run has ended"
        if is_returned and root.exception() is None:
            return self._completed(root.result())
        if self._cancelled:
            return self._cancelled_end()
        error = root.exception() if is_returned else None
        if isinstance(error, CallError):
            return self._failed(error)
        if error is not None:
            return self._failed(map_error(error))
        return failed(CallError(ErrorCode.ABORTED, "The run was cancelled, but not by its caller"))

    def _completed(self, envelope: ResponseEnvelope[Any]) -> End:
        remedy = "set max_bytes of the operation, so that it has pages, or return a reference"
        try:
            data = self._encoded(envelope.encode, remedy)
        except CallError as error:
            return failed(error)
        operation = cast("Operation", self._operation)
        places = result_places(operation, envelope.data, is_page=bool(self._pages))
        return End(RunStatus.COMPLETED, with_places(data, places), pages=self._pages)

    def _failed(self, error: CallError) -> End:
        wire = error_with_places(error_wire(error), error_places(self._operation, error))
        return End(RunStatus.FAILED, error=wire)

    async def _end(self, end: End) -> None:
        self.close("the run has ended")
        attempt, journal, last = self.attempt, self.host.journal, self._progress

        def store(db: Connection) -> RunState | None:
            if last is not None:
                value, message = last
                data = msgspec.json.encode(value)
                journal.report(db, attempt.id, attempt.fence, data, message)
            return journal.end(db, attempt.id, attempt.fence, end)

        try:
            state = await self._written(store)
        except RunStoreError:
            # The outcome of the root call may be lost with it: the next attempt decides.
            self.host.unreleased(attempt.id, attempt.fence)
            return
        if state is None:
            logger.warning("the run %s was taken over: its end here is not stored", attempt.id)

    # ------------------------------------------------------------ ending it from outside

    def close(self, reason: str) -> None:
        """Let no further step begin or return."""
        self._closed = self._closed or reason
        self._settled.set()
        for task in self._tasks:
            task.cancel()

    def stop(self, reason: str) -> bool:
        """End the attempt without a final state: cancel its handler, which cannot record anything any more.

        Returns:
            False if the attempt has ended already.
        """
        if self._closed:
            return False
        self.close(reason)
        self._interrupt()
        return True

    def cancel(self) -> None:
        """Cancel the run: its handler may clean up, and make calls for it."""
        if not self._cancelled and not self._closed:
            self._cancelled = True
            self._interrupt()

    @property
    def is_cancelled(self) -> bool:
        """Whether the run was cancelled."""
        return self._cancelled

    @property
    def _is_interrupted(self) -> bool:
        """Whether the attempt was interrupted, and not the task that makes it."""
        task = asyncio.current_task()
        return (bool(self._closed) or self._cancelled) and not (task and task.cancelling())

    def _interrupt(self) -> None:
        for task in (self._resolving, self._root):
            if task is not None:
                task.cancel()
        asyncio.get_running_loop().call_later(CLEANUP_SECONDS, self._over.set)

    def hand_over(self) -> None:
        """End the attempt before its next step, because the process ends; a call that is running may end first."""
        self._is_leaving = True
        self._start_parking()

    async def _written(self, job: Callable[[Connection], T]) -> T:
        """Write for this attempt, again while the store does not work and nobody else may take over the run.

        A job may run twice: its outcome may be unknown. Both times it is that of the same attempt.

        Raises:
            RunStoreError: If the lease ends before the store, and a strict sink, work.
        """
        while True:
            try:
                return await self.host.write(job)
            except CallError as error:
                if error.code != ErrorCode.UNAVAILABLE:
                    raise
                if not isinstance(error, RunStoreError):
                    level = self._failures.level()
                    logger.log(
                        level, "the run %s waits for its records: %r", self.attempt.id, error
                    )
                if not self.host.holds_lease:
                    raise RunStoreError from error
            await asyncio.sleep(_RETRY_SECONDS)

    async def _store(self, job: Callable[[Connection], T]) -> T:
        """Write for this attempt; end it if the store does not work."""
        try:
            return await self._written(job)
        except RunStoreError:
            self.host.unreleased(self.attempt.id, self.attempt.fence)
            self.stop("the store of runs does not work")
            await self.never()
            raise

    async def _kept(self, job: Callable[[Connection], int]) -> int:
        """Write for this attempt; end it if it is lost."""
        kept = await self._store(job)
        if not kept:
            await self._lost()
        return kept

    async def never(self) -> Any:
        """Wait until the task is cancelled. A handler that catches that, and asks for more, waits again."""
        await asyncio.sleep(CLEANUP_SECONDS)
        raise asyncio.CancelledError

    async def _enforce_open(self, *, new: bool = False) -> None:
        """Let the handler go on, unless its attempt has ended, or ends before the next step."""
        if new and self._is_leaving and not self._cancelled:
            while self._begun and not self._closed:
                self._settled.clear()
                await self._settled.wait()
            self.stop("the process ends")
        if self._closed:
            # A handler that makes calls after its end has ignored its cancellation, or cleans up with calls.
            self._over.set()
            await self.never()

    # ------------------------------------------------------------ steps

    async def call(
        self, parent: str, registry: Calls, operation_id: str, input: Any, child: OperationContext
    ) -> ResponseEnvelope[Any]:
        """Return the recorded result of a nested call, or make it and record its result.

        Raises:
            CallError: The recorded error, or that of the call.
        """
        await self._regain()
        with self._occupied():
            return await self._call_as_step(parent, registry, operation_id, input, child)

    async def _call_as_step(
        self, parent: str, registry: Calls, operation_id: str, input: Any, child: OperationContext
    ) -> ResponseEnvelope[Any]:
        await self._enforce_open()
        name = self._named(parent, operation_id, input)
        step = self.recorded.get(name)
        if step is not None:
            self.recorded.ask(step)
            if step.is_recorded:
                return self._replayed(step, child)
        await self._enforce_new(operation_id, name)
        await self._enforce_open(new=True)
        while True:
            scope = PendingCall(self, name, parent, operation_id)
            try:
                return await self._call(scope, registry, operation_id, input, child)
            except CallError as error:
                if not scope.needs_approval(error):
                    raise
                await self._wait_for_approval(name, error)

    def _named(self, parent: str, operation_id: str, input: Any) -> str:
        """Return the name of the step that a nested call is.

        Raises:
            CallError: `VALIDATION_ERROR` if its input is not JSON.
        """
        try:
            return self.names.take(parent, operation_id, input)
        except JSONValueError:
            # The call is rejected before its handler; or it has files, which cannot be recorded.
            message = f"A call of {operation_id} in a run needs an input that is JSON"
            raise CallError(ErrorCode.VALIDATION_ERROR, message) from None

    async def _call(
        self,
        scope: PendingCall,
        registry: Calls,
        operation_id: str,
        input: Any,
        child: OperationContext,
    ) -> ResponseEnvelope[Any]:
        """Make a call and record its result."""
        known = registry.get_spec(operation_id)
        is_durable = bool(known and getattr(self.host.registry.get(operation_id), "durable", False))
        try:
            # What a durable operation does are steps of their own.
            with self._delegated() if is_durable else nullcontext():
                envelope = await registry.execute(operation_id, input, child.changed(scope=scope))
        except CallError as error:
            await self._enforce_open()
            if scope.needs_approval(error):
                pass
            elif error.begun is False:
                await self._forget(scope.record)
                self._count -= 1
                self.names.give_back(scope.record.name)
            else:
                await self._record(scope.record, None, error)
            raise
        except asyncio.CancelledError:
            self._abandon(scope.record)
            raise
        await self._enforce_open()
        try:
            data = self._encoded(envelope.encode)
        except CallError as error:
            await self._record(scope.record, None, error)
            raise
        await self._record(scope.record, data, None)
        return envelope

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
        """Return what was recorded of a nested subscription, or open it, read it and record the result.

        Raises:
            CallError: The recorded error, or that of the subscription.
        """
        await self._regain()
        with self._occupied():
            return await self._read_as_step(
                parent, registry, operation_id, input, child, read, bounds
            )

    async def _read_as_step(
        self,
        parent: str,
        registry: Calls,
        operation_id: str,
        input: Any,
        child: OperationContext,
        read: ReadStream,
        bounds: JSONObject,
    ) -> Any:
        await self._enforce_open()
        name = self._named(parent, operation_id, [input, bounds])
        if (found := self.recorded.get(name)) is not None:
            self.recorded.ask(found)
            if found.is_recorded:
                return recorded_value(found)
        await self._enforce_new(operation_id, name)
        await self._enforce_open(new=True)
        step = Step(name, parent, operation_id, QUERY, 0, 0, None, None, None)
        while True:
            scope = PendingCall(self, name, parent, operation_id)
            stream = registry.subscribe(operation_id, input, child.changed(scope=scope))
            try:
                return await self._run_step(step, operation_id, partial(read, stream), scope)
            except CallError as error:
                if not scope.needs_approval(error):
                    raise
                await self._wait_for_approval(name, error)

    async def step(self, parent: str, name: str, function: Callable[[], Any], *, once: bool) -> Any:
        """Return the recorded result of a function, or run it and record its result."""
        await self._regain()
        with self._occupied():
            return await self._run_as_step(parent, name, function, once=once)

    async def _run_as_step(
        self, parent: str, name: str, function: Callable[[], Any], *, once: bool
    ) -> Any:
        await self._enforce_open()
        operation = f"step:{name}"
        full = self.names.take(parent, operation, None)
        found = self.recorded.get(full)
        if found is not None:
            self.recorded.ask(found)
            if found.is_recorded:
                return recorded_value(found)
        await self._enforce_new(operation, full)
        await self._enforce_open(new=True)
        step = Step(full, parent, operation, ONCE if once else QUERY, 0, 0, None, None, None)
        return await self._run_step(step, name, function)

    async def _run_step(
        self,
        step: Step,
        name: str,
        function: Callable[[], Any],
        scope: PendingCall | None = None,
    ) -> Any:
        """Run a function, and record its result or its error, unless it waits for the approval of a call."""
        if step.kind == ONCE:
            await self._mark(step)
        try:
            result = function()
            result = to_json(await result if inspect.isawaitable(result) else result)
            data = self._encoded(lambda: msgspec.json.encode(result))
        except Exception as error:
            await self._enforce_open()
            if scope is not None and scope.needs_approval(error):
                raise
            found_error = described(name, error)
            await self._record(step, None, found_error)
            if found_error is error:
                raise
            raise found_error from error
        except asyncio.CancelledError:
            self._abandon(step)
            raise
        await self._enforce_open()
        await self._record(step, data, None)
        return result

    async def fail_step(self, parent: str, name: str, error: CallError, *, once: bool) -> None:
        """Replace the recorded result of the first step with this name."""
        await self._enforce_open()
        attempt, journal = self.attempt, self.host.journal
        operation = f"step:{name}"
        full = StepNames().take(parent, operation, None)
        step = Step(full, parent, operation, ONCE if once else QUERY, 0, 0, None, None, None)
        if not once or error.code != ErrorCode.OUTCOME_UNKNOWN:
            await self._record(step, None, error)
            return
        await self._kept(lambda db: journal.begin_step(db, attempt.id, attempt.fence, step))
        await self._end_now(End(RunStatus.UNKNOWN, error=error.to_wire()))

    async def _enforce_new(self, operation: str, name: str) -> None:
        """Check that a new step may begin: its run has room for it, and its caller is still valid.

        Raises:
            CallError: `RESOURCE_EXHAUSTED`, `ACCESS_DENIED`, or `UNAVAILABLE` if revocations cannot be read. The name
                of the step is free again.
        """
        try:
            if self.identity is not None:
                await enforce_current(self.identity, operation)
            self._take_room()
        except CallError:
            self.names.give_back(name)
            raise

    def _take_room(self) -> None:
        """Count a new step.

        Raises:
            CallError: `RESOURCE_EXHAUSTED`.
        """
        if self._count >= self.host.limits.steps:
            message = f"A run has at most {self.host.limits.steps} steps"
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message, retryable=False)
        self._count += 1

    async def begin(self, name: str, parent: str, operation: Operation) -> Step:
        """Commit the marker of a call whose handler begins now, if it needs one; return the step."""
        await self._enforce_open()
        spec, operation_id = operation.spec, operation.spec.id
        kind = ONCE
        if operation.durable:
            kind = DURABLE
        elif spec.replayable:
            kind = QUERY if spec.type is OperationType.QUERY else MUTATION
        elif operation.keyed or spec.keyed:
            kind = KEYED
        found = self.recorded.get(name)
        if kind == ONCE and found is not None and found.kind == KEYED and not found.is_recorded:
            await self._unrepeatable(found)
        step = Step(name, parent, operation_id, kind, 0, 0, None, None, None)
        if (
            name != ROOT
            and kind in (*MARKED, MUTATION)
            and not await self.recorded.all_asked(operation_id)
        ):
            await self._diverged(operation_id)
        await self._enforce_open()
        if kind in MARKED or (name == ROOT and self._spends_once and not self.is_admitted):
            await self._mark(step)
        return step

    async def _unrepeatable(self, found: Step) -> None:
        """End the run: a call was begun with a key that its service recognised then, and does not recognise now."""
        attempt, journal = self.attempt, self.host.journal
        marker = replace(found, kind=ONCE)
        await self._kept(lambda db: journal.begin_step(db, attempt.id, attempt.fence, marker))
        await self._end_now(End(RunStatus.UNKNOWN, error=outcome_unknown(found).to_wire()))

    @property
    def is_admitted(self) -> bool:
        """Whether an earlier attempt has spent the approval and the budget of the root call."""
        return self.recorded.get(ROOT) is not None

    @property
    def _spends_once(self) -> bool:
        """Whether the root call has spent an approval or a budget."""
        grant = None if self.identity is None else self.identity.grant
        has_rule = self._operation is not None and self._operation.approve is not None
        return has_rule or (grant is not None and grant.is_limited)

    async def _mark(self, step: Step) -> None:
        attempt, journal = self.attempt, self.host.journal
        if step.kind in MARKED:
            self._begun[step.name] = step
        begun = await self._kept(lambda db: journal.begin_step(db, attempt.id, attempt.fence, step))
        if step.name in self._begun:
            self._begun[step.name] = replace(step, begun=begun)
        await self._enforce_open()

    def _unmark(self, step: Step) -> bool:
        is_marked = self._begun.pop(step.name, None) is not None
        if not self._begun:
            self._settled.set()
        return is_marked

    async def _record(self, step: Step, result: bytes | None, error: CallError | None) -> None:
        attempt, journal = self.attempt, self.host.journal
        operation = None if error is None else self.host.registry.get(step.operation)
        failure = None if error is None else error_bytes(error, operation)
        await self._kept(
            lambda db: journal.end_step(db, attempt.id, attempt.fence, step, result, failure)
        )
        self._unmark(step)
        await self._enforce_open()

    async def _forget(self, step: Step) -> None:
        attempt, journal = self.attempt, self.host.journal
        if self._unmark(step):
            await self._kept(
                lambda db: journal.remove_step(db, attempt.id, attempt.fence, step.name)
            )

    def _abandon(self, step: Step) -> None:
        """Record that the handler itself has cancelled a call, as by a timeout, so that no attempt repeats it."""
        if not self._closed and not self._cancelled:
            self._start(self._record_abandoned(step))

    async def _record_abandoned(self, step: Step) -> None:
        await asyncio.sleep(0)
        while self._root is not None and self._root.cancelling():  # noqa: ASYNC110 - no event tells
            # A timeout in the task of the handler is over when its block is left, the end of the process never.
            await asyncio.sleep(_UNWINDING_SECONDS)
        error = CallError(ErrorCode.ABORTED, f"{step.operation} was cancelled by the run")
        kind = ABANDONED if step.kind == ONCE else step.kind
        await self._record(replace(step, kind=kind), None, error)

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        start_task(self._tasks, work)

    def _replayed(self, step: Step, child: OperationContext) -> ResponseEnvelope[Any]:
        if step.error is not None:
            error = recorded_error(step.error)
            error.parent_request_id = child.parent_request_id
            raise error
        return ResponseEnvelope.decode(step.result or b"")

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.attempt.id

    @property
    def max_bytes(self) -> int:
        """The largest result that is stored whole."""
        return self.host.limits.result_bytes

    def keep(self, pages: Sequence[bytes]) -> None:
        """Store these pages of the result when the run completes."""
        self._pages = pages

    def _encoded(
        self, encode: Callable[[], bytes], remedy: str = "return a reference to it"
    ) -> bytes:
        """Return a result as JSON.

        Raises:
            CallError: `EXECUTION_ERROR` if it is not JSON or too large.
        """
        most = self.host.limits.result_bytes
        try:
            data = encode()
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            message = f"The result is not JSON: {error}"
            raise CallError(ErrorCode.EXECUTION_ERROR, message) from error
        if len(data) > most:
            message = f"The result has {len(data)} bytes, and a run stores at most {most}: {remedy}"
            raise CallError(ErrorCode.EXECUTION_ERROR, message)
        return data

    async def _diverged(self, operation_id: str) -> None:
        message = (
            f"This attempt calls {operation_id} with another input than the last one: record random values and times "
            "with context.step"
        )
        error = CallError(ErrorCode.RUN_DIVERGED, message, {"operation": operation_id})
        await self._end_now(End(RunStatus.UNKNOWN, error=error.to_wire()))

    async def _end_now(self, end: End) -> None:
        """Store the end of the run, and let the handler neither notice nor prevent it."""
        attempt, journal = self.attempt, self.host.journal
        await self._store(lambda db: journal.end(db, attempt.id, attempt.fence, end))
        self.stop("the run has ended")
        await self.never()

    # ------------------------------------------------------------ waiting

    def _change(self, *, working: int = 0, waiting: int = 0) -> None:
        """Note what the run does. An attempt that only waits gives up its slot at once, and ends after a while."""
        self._working += working
        self._waiting += waiting
        is_idle = self._waiting > 0 and self._working == 0 and not self._closed
        if is_idle == self._is_idle:
            return
        self._is_idle = is_idle
        if is_idle:
            self._idle_since = monotonic()
        else:
            self._idle_seconds += monotonic() - self._idle_since
        self.host.lend(1 if is_idle else -1)
        if self._parking is not None:
            self._parking.cancel()
            self._parking = None
        if is_idle:
            loop = asyncio.get_running_loop()
            delay = 0.0 if self._is_leaving else self.host.park_seconds
            self._parking = loop.call_later(delay, self._start_parking)

    @contextmanager
    def _occupied(self) -> Generator[None]:
        """Note that the run does something, also before and after a step or a wait, as writing to the store."""
        self._change(working=1)
        try:
            yield
        finally:
            self._change(working=-1)

    @contextmanager
    def _delegated(self) -> Generator[None]:
        """Note that only the steps of a nested operation do something."""
        self._change(working=-1)
        try:
            yield
        finally:
            self._change(working=1)

    async def _regain(self) -> None:
        """Wait for a slot if the attempt has only waited; the caller notes at once what it goes on with."""
        self._regaining += 1
        try:
            async with self._regain_lock:
                if self._is_idle:
                    await self.host.slot()
        finally:
            self._regaining -= 1

    @property
    def waited(self) -> float:
        """The seconds for which the attempt has only waited."""
        return self._idle_seconds + (monotonic() - self._idle_since if self._is_idle else 0.0)

    def _start_parking(self) -> None:
        if not self._is_idle or self._closed or self._cancelled:
            return
        if self._is_leaving:
            # Another process finds out what the run waits for: a branch of it may do what is no step.
            self.stop("the process ends")
        else:
            self._start(self._park())

    async def _park(self) -> None:
        """End an attempt that only waits. An answer, or the end of a sleep, queues the run again."""
        if not self._is_idle or self._closed or self._cancelled:
            # Something has happened since.
            return
        attempt, journal = self.attempt, self.host.journal
        now = asyncio.get_running_loop().time()
        wakes = [max(0, int((at - now) * 1000)) for at in self._wakes.values()]
        wakes += [0] * bool(self._regaining)
        # From here on, nothing is recorded: what comes meanwhile is in the journal.
        self._closed = "the run waits"
        try:
            await self._written(lambda db: journal.park(db, attempt.id, attempt.fence, wakes))
        except (RunStoreError, asyncio.CancelledError):
            # Nothing happens if it is parked.
            self.host.unreleased(attempt.id, attempt.fence)
        self._interrupt()

    def tell(self) -> None:
        """Notice that the run may have an answer."""
        if self._waiting:
            self._news.set()
            self._news = asyncio.Event()

    async def sleep(self, parent: str, seconds: float) -> None:
        """Sleep until a recorded time.

        Raises:
            CallError: `VALIDATION_ERROR`.
        """
        with self._occupied():
            await self._sleep(parent, seconds)

    async def _sleep(self, parent: str, seconds: float) -> None:
        await self._enforce_open()
        duration = milliseconds(seconds, "seconds")
        name = self.names.take(parent, SLEEP, None)
        if self.recorded.get(name) is None:
            self._take_room()
        step = Step(name, parent, SLEEP, SLEEP, 0, 0, None, None, None)
        attempt, journal = self.attempt, self.host.journal
        left = await self._store(
            lambda db: journal.sleep(db, attempt.id, attempt.fence, step, duration)
        )
        if left is None:
            await self._lost()
        ends = asyncio.get_running_loop().time() + cast("int", left) / 1000
        self._wakes[name] = ends
        self._change(working=-1, waiting=1)
        try:
            await asyncio.sleep(cast("int", left) / 1000)
            await self._regain()
        finally:
            self._change(working=1, waiting=-1)
            del self._wakes[name]
        await self._enforce_open()

    async def wait_for(self, parent: str, name: str, timeout: float | None) -> Any:
        """Wait for a signal; return its value.

        Raises:
            CallError: `TIMEOUT`, or `VALIDATION_ERROR`.
        """
        request = {"name": name}
        limit = None if timeout is None or timeout == inf else milliseconds(timeout, "timeout")
        with self._occupied():
            answer = await self._question(parent, "signal", request, f"signal:{name}", name, limit)
        return msgspec.json.decode(answer)

    async def _elicit(self, message: str, schema: Any) -> Any:
        request = {"message": message, "schema": schema}
        with self._occupied():
            answer = await self._question(ROOT, "elicit", request, "elicit", None, None)
        return msgspec.json.decode(answer)

    async def _sample(self, request: Any) -> Any:
        with self._occupied():
            answer = await self._question(ROOT, "sample", request, "sample", None, None)
        return msgspec.json.decode(answer)

    async def _question(
        self,
        parent: str,
        kind: str,
        request: Any,
        operation: str,
        signal: str | None,
        timeout: int | None,
    ) -> bytes:
        """Ask, wait for the answer, record it, and return it as JSON."""
        await self._enforce_open()
        name = self.names.take(parent, operation, request)
        found = self.recorded.get(name)
        if found is not None and found.is_recorded:
            if found.error is not None:
                raise recorded_error(found.error)
            return found.result or b"null"
        self._take_room()
        step = Step(name, parent, operation, QUERY, 0, 0, None, None, None)
        attempt, journal = self.attempt, self.host.journal
        question = Question(name, kind, msgspec.json.encode(request))
        failure: CallError | None = None
        answer: bytes | None = None
        while failure is None and answer is None:
            news = self._news
            asked = await self._store(
                lambda db: journal.ask(db, attempt.id, attempt.fence, question, signal, timeout)
            )
            if asked is None:
                await self._lost()
                raise AssertionError
            answer = asked.answer
            if answer is None and asked.left == 0:
                failure = timeout_error(f"There was no {kind} {signal or name} in time")
            elif answer is None:
                await self._wait(news, None if asked.left is None else asked.left / 1000)
        data = None if failure is None else error_bytes(failure)
        await self._kept(
            lambda db: journal.close_question(
                db, attempt.id, attempt.fence, name, step, answer, data
            )
        )
        await self._enforce_open()
        if failure is not None:
            raise failure
        return answer or b"null"

    async def _wait(self, news: asyncio.Event, seconds: float | None) -> None:
        """Wait for news of the run, at most this long. The run may end its attempt meanwhile."""
        self._change(working=-1, waiting=1)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await news.wait()
            await self._regain()
        finally:
            self._change(working=1, waiting=-1)
        await self._enforce_open()

    async def _wait_for_approval(self, name: str, error: CallError) -> None:
        """Wait until a person has answered the request for approval of a call that has not begun."""
        attempt, journal = self.attempt, self.host.journal
        details = object_of(error.details)
        key = f"approval:{name}"
        question = Question(key, "approval", msgspec.json.encode(details))
        news = self._news
        asked = await self._store(
            lambda db: journal.ask(db, attempt.id, attempt.fence, question, None, None)
        )
        if asked is None:
            await self._lost()
        elif asked.left == 0:
            failure = timeout_error("The run waited too long for an approval")
            await self._end_now(failed(failure))
        self.host.watch_approvals()
        await self._wait(news, None)
        await self._kept(
            lambda db: journal.close_question(db, attempt.id, attempt.fence, key, None, None, None)
        )
        await self._enforce_open()

    async def _lost(self) -> None:
        self.stop("another process has taken over the run")
        await self.never()

    # ------------------------------------------------------------ progress

    async def _report(self, progress: float, total: float | None, message: str | None) -> None:
        """Store the progress, the last value at most five times a second."""
        is_waiting = self._progress is not None
        value: dict[str, Any] = {"progress": progress}
        if total is not None:
            value["total"] = total
        self._progress = value, None if message is None else cleaned(message)
        if not is_waiting and not self._closed:
            self._start(self._store_progress())

    async def _store_progress(self) -> None:
        attempt, journal = self.attempt, self.host.journal
        while self._progress is not None and not self._closed:
            value, message = self._progress
            data = msgspec.json.encode(value)
            with suppress(RunStoreError):
                # The next value may be stored.
                await self.host.write(
                    lambda db, data=data, message=message: journal.report(  # type: ignore[misc]
                        db, attempt.id, attempt.fence, data, message
                    )
                )
            await asyncio.sleep(_PROGRESS_SECONDS)
            if self._progress == (value, message):
                self._progress = None

    def handle(self) -> Run:
        """Return the handle of the run, for its own handler."""
        attempt = self.attempt
        state = RunState(
            id=attempt.id,
            operation=attempt.operation,
            status=RunStatus.WORKING,
            created=attempt.created,
            updated=attempt.created,
            attempt=attempt.number,
            revision=attempt.revision,
        )
        return self.host.handle(state, OperationContext(trusted=True))
