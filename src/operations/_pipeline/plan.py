"""An operation prepared for calls, the registry that runs it, its counters, and the threads that run `def` handlers.

In the standard thread pools, a handler that never returns occupies its slot forever and prevents the interpreter from
exiting. Here the slot is released as soon as the caller is cancelled. The thread counts as abandoned until the handler
returns, and the number of abandoned threads is limited as well.
"""

import asyncio
import functools
import inspect
import logging
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Sequence,
)
from contextvars import copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from msgspec.json import encode

from operations._deadline import Alarm, alarm_in
from operations._patterns import Patterns
from operations._resilience import LogThrottle
from operations._text import counted, enforce_lists, printable
from operations.access import permission, resource_permission
from operations.authority import Authority
from operations.context import OperationContext, Reach
from operations.envelopes import ResponseEnvelope
from operations.errors import (
    CallError,
    ErrorCode,
    cancelled_elsewhere,
    retrieve_exception,
    timed_out,
)
from operations.observe import CallAbandoned, CallEvent, Observer, add_counts, notify, now
from operations.schema import Change
from operations.specs import (
    Operation,
    OperationSpec,
    OperationType,
    OutputPolicy,
    enforce_policy,
)

logger = logging.getLogger("operations")

Envelope: TypeAlias = ResponseEnvelope[Any]
Finisher: TypeAlias = Callable[[Any], Envelope]
"""Turns the result of a handler into the envelope for its caller."""

_GRACE = 0.05
"""Seconds that a cancelled handler has to clean up before its caller stops waiting."""

_IDLE_SECONDS = 10.0
"""How long a thread waits for more work before it ends."""


class _Job:
    """One function call that runs in a thread."""

    def __init__(self, pool: "ThreadPool", function: Callable[[], Any]) -> None:
        self._pool = pool
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self._result: Any = None
        self._error: BaseException | None = None
        self.finished = False
        self.left = False

    def run(self) -> None:
        """Run the function and store its result or error. Called in the thread."""
        try:
            self._result = self._function()
        except (StopIteration, GeneratorExit) as stop:
            # A future does not accept StopIteration, and a GeneratorExit would close the coroutine that awaits it.
            self._error = RuntimeError(f"the handler raised {stop!r}")
        except BaseException as raised:  # noqa: BLE001 - it is raised in the awaiting task
            self._error = raised

    def hand_over(self) -> None:
        """Pass the outcome to the event loop. Called in the thread."""
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop is closed, so no task waits for the result.
            self._pool.abandoned -= self.left

    def _deliver(self) -> None:
        self.finished = True
        if self.left:
            self._pool.abandoned -= 1
        elif self.future.cancelled():
            # The caller was cancelled in this iteration of the event loop.
            pass
        elif self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._result)


class ThreadPool:
    """Runs at most `limit` functions concurrently, each in a thread.

    Attributes:
        abandoned: The number of running functions whose caller was cancelled.
    """

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )
        self._idle: deque[SimpleQueue[_Job | None]] = deque()
        self.abandoned = 0
        _pools.add(self)

    async def run(
        self, function: Callable[..., Any], *args: Any, on_abandon: Callable[[], None] | None = None
    ) -> Any:
        """Return the result of `function(*args)`, computed in a thread with the context variables of this task.

        If the caller is cancelled, it does not wait for the thread, which continues; `on_abandon` is then called.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the number of abandoned threads has reached the limit.
        """
        # A semaphore is bound to one event loop, and a registry may outlive its loop.
        async with self._slots.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self._limit)
        ):
            if self.abandoned >= self._limit:
                raise CallError(
                    ErrorCode.RESOURCE_EXHAUSTED,
                    f"no thread is free: {counted(self.abandoned, 'handler')} still at work, without a caller",
                )
            context = copy_context()
            job = _Job(self, lambda: context.run(function, *args))
            self._start(job)
            try:
                return await job.future
            except asyncio.CancelledError:
                if job.future.cancelled() and not job.finished:
                    job.left = True
                    self.abandoned += 1
                    if on_abandon is not None:
                        on_abandon()
                raise

    def close(self) -> None:
        """End idle threads. Other threads end with their function, and new work starts new threads."""
        while self._idle:
            self._idle.popleft().put(None)

    def forget_threads(self) -> None:
        """Start new threads from now on: a forked process has none of the threads of its parent."""
        self._idle.clear()
        self.abandoned = 0

    def _start(self, job: _Job) -> None:
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue[_Job | None]()
            threading.Thread(
                target=self._work, args=(inbox,), name="operations handler", daemon=True
            ).start()
        inbox.put(job)

    def _work(self, inbox: "SimpleQueue[_Job | None]") -> None:
        while True:
            try:
                job = inbox.get(timeout=_IDLE_SECONDS)
            except Empty:
                try:
                    self._idle.remove(inbox)
                except ValueError:
                    # Another thread has just claimed this one and sends it a job.
                    job = inbox.get()
                else:
                    return
            if job is None:
                return
            job.run()
            # Marked idle before the result is delivered, so that the waiting task can reuse this thread.
            self._idle.append(inbox)
            job.hand_over()
            del job


_pools: WeakSet[ThreadPool] = WeakSet()


def _forget_all_threads() -> None:
    for pool in _pools:
        pool.forget_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all_threads)


BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram of durations, in seconds."""


UNKNOWN: Final = "(unknown)"
"""The series for all unregistered operations, because callers can send any number of unknown ids; and the code for all
further codes of an operation."""

MAX_CODES: Final = 100
"""The largest number of error codes that are counted separately for one operation; a remote one may send any code."""

MAX_REMOVED: Final = 1_000
"""The largest number of removed operations whose counters are stored."""


class CallSeries:
    """The counters of one operation, several times faster than an observer.

    Attributes:
        times_all: Whether all calls are timed, or only those from entry points.
        started: Calls that started.
        untimed: Calls that succeeded and were not timed.
        codes: Other calls that ended, by error code; an empty code is success.
        changes: Values of results that normalisation changed, by kind.
        items: Items of subscriptions.
        abandoned: Handlers that were still running after their call had ended.
        retries: Attempts of a call after the first.
        seconds: Total duration of the timed calls that ended.
        buckets: Timed calls by duration; see `BUCKETS`.
    """

    def __init__(self, *, times_all: bool) -> None:
        self.times_all = times_all
        self.started = 0
        self.untimed = 0
        self.codes: dict[str, int] = {}
        self.changes: dict[str, int] = {}
        self.items = 0
        self.abandoned = 0
        self.retries = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BUCKETS) + 1)

    def finish(self, code: str | None, seconds: float | None) -> None:
        """Count the end of a call; its duration is None if it was not timed."""
        name = code or ""
        if name and name not in self.codes and len(self.codes) >= MAX_CODES:
            name = UNKNOWN
        self.codes[name] = self.codes.get(name, 0) + 1
        if seconds is not None:
            self.seconds += seconds
            self.buckets[bisect_left(BUCKETS, seconds)] += 1

    def add_changes(self, changes: dict[str, int] | None) -> None:
        """Count the changes of a result, by kind."""
        if changes is not None:
            add_counts(self.changes, changes)

    @property
    def running(self) -> int:
        """Calls that have not ended."""
        return self.started - self.untimed - sum(self.codes.values())


class CallCounters:
    """Counts the calls of a registry.

    Args:
        known: The operations that are counted by name.
    """

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._series: dict[str, CallSeries] = {}
        self._times_all = False

    @property
    def times_all(self) -> bool:
        """Whether calls from code in this process are timed, and not only those from entry points."""
        return self._times_all

    @times_all.setter
    def times_all(self, value: bool) -> None:
        self._times_all = value
        for series in self._series.values():
            series.times_all = value

    def of(self, operation_id: str) -> CallSeries:
        """Return the counters of an operation."""
        series = self._series.get(operation_id)
        if series is None:
            if len(self._series) > len(self._known) + MAX_REMOVED:
                self._forget_removed()
            name = operation_id if operation_id in self._known else UNKNOWN
            series = self._series.setdefault(name, CallSeries(times_all=self._times_all))
        return series

    def _forget_removed(self) -> None:
        known = {*self._known, UNKNOWN}
        self._series = {name: each for name, each in self._series.items() if name in known}

    def __iter__(self) -> Iterator[tuple[str, CallSeries]]:
        return iter(sorted(self._series.items()))


@dataclass(frozen=True, slots=True)
class Call:
    """A call as middleware sees it. To change it, use `dataclasses.replace(call, input=...)`."""

    spec: OperationSpec
    input: Any
    context: OperationContext


Next: TypeAlias = Callable[[Call], Awaitable[Envelope]]
"""Runs the rest of a query or mutation."""

NextStream: TypeAlias = Callable[[Call], AsyncIterator[Envelope]]
"""Runs the rest of a subscription."""

Middleware: TypeAlias = Callable[[Call, Next], Awaitable[Envelope]]
"""Wraps a query or mutation: `async def m(call, next): return await next(call)`."""

StreamMiddleware: TypeAlias = Callable[[Call, NextStream], AsyncIterator[Envelope]]
"""Wraps a subscription: an async generator over `next(call)`."""


class PipelineHost:
    """The state that all calls of a registry share.

    Attributes:
        output: The default output policy.
        calls: Patterns of operations that handlers may call on the authority of their operation, unless it declares
            its own.
        authority: Stores budgets and approvals.
        threads: Runs `def` handlers.
        middleware: Wraps queries and mutations, the outermost first.
        stream_middleware: Wraps subscriptions.
        counters: Set while calls are counted.
    """

    def __init__(
        self,
        *,
        output: OutputPolicy | None,
        max_threads: int,
        calls: Collection[str],
        authority: Authority | None,
    ) -> None:
        enforce_policy(output)
        enforce_lists(calls=calls)
        self.output: OutputPolicy = output or "cast"
        self.calls = tuple(calls)
        self.authority = authority or Authority()
        self.threads = ThreadPool(max_threads)
        self.middleware: tuple[Middleware, ...] = ()
        self.stream_middleware: tuple[StreamMiddleware, ...] = ()
        self.counters: CallCounters | None = None
        self._observers: list[Observer] = []
        self._observer_failures: dict[int, LogThrottle] = {}
        self._left_behind: set[asyncio.Task[Any]] = set()

    @property
    def observed(self) -> bool:
        """Whether there are observers."""
        return bool(self._observers)

    def notify(self, event: CallEvent) -> None:
        """Send an event to the observers."""
        notify(tuple(self._observers), event, self._observer_failures)

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Keep a reference to a cancelled task until it ends, and retrieve its exception."""
        self._left_behind.add(task)
        task.add_done_callback(self._left_behind.discard)
        task.add_done_callback(retrieve_exception)

    async def stop(self, work: "asyncio.Task[Any]", context: OperationContext) -> None:
        """Cancel `work` and its nested calls. Wait briefly; `keep` tracks work that is still running."""
        if not work.cancelling():
            # Cancel only once: a second cancellation would interrupt the cleanup.
            work.cancel()
        context.abort_nested()
        self.keep(work)
        await asyncio.wait({work}, timeout=_GRACE)


class ChangeLog:
    """Logs the first change of each kind to the results of one operation; `meta.changes` has all of them."""

    def __init__(self, operation_id: str) -> None:
        self._operation_id = operation_id
        self._logged: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been logged."""
        return not self._logged

    def note(self, changes: Sequence[Change]) -> None:
        """Log changes of kinds that have not been logged yet."""
        for change in changes:
            if change.kind not in self._logged:
                self._logged.add(change.kind)
                logger.warning(
                    "%s: %s: %s %s. More of this kind is not logged: see meta.changes",
                    self._operation_id,
                    "a result does not match its output schema"
                    if change.kind == "mismatch"
                    else f"part of a result was {change.kind}",
                    # Property names may come from a third party: escape line breaks, so that they cannot forge a log
                    # line.
                    printable(change.path) or "(root)",
                    printable(change.message),
                )


class CallPlan:
    """An operation prepared for calls, with its compiled schemas and access check.

    Args:
        operation: The operation.
        host: The registry that runs it.
        finish: Turns a result into the envelope for the caller.
        log: Logs changes of results, once of each kind.
        is_inner: Whether another plan with the same id has already checked the caller.
    """

    def __init__(
        self,
        operation: Operation,
        host: PipelineHost,
        finish: Finisher,
        log: ChangeLog,
        *,
        is_inner: bool = False,
    ) -> None:
        spec = operation.spec
        self.is_inner = is_inner
        self.operation = operation
        self.spec = spec
        self.id = spec.id
        self.host = host
        self.permits = None if spec.access_control.is_open else permission(spec.access_control)
        self.permits_input = resource_permission(spec.access_control)
        calls = host.calls if operation.calls is None else tuple(operation.calls)
        self.is_typed = operation.reader is not None
        self.reach = Reach(self.id, Patterns(calls)) if calls else None
        self.admits = not is_inner and (
            operation.approve is not None or host.authority.ledger is not None
        )
        self.is_plain = self.permits_input is None and self.reach is None and not self.admits
        self.accepts: Callable[[Any], bool] = _accepts_any
        # Rejects inputs with files, which `admit` replaces before it validates the input.
        self.flat: Callable[[bytes], Any] | None = None
        if operation.input != "off":
            compiled = spec.input_schema.compile()
            self.accepts, self.flat = compiled.accepts, compiled.flat
        self.finish = finish
        self.log = log
        self.handler = self._runnable()
        self.series = None if host.counters is None else host.counters.of(self.id)

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the contract."""
        return self.spec.digest

    @functools.cached_property
    def _has_defaults(self) -> bool:
        return b'"default":' in encode(self.spec.input_schema.document)

    def completed(self, value: Any) -> Any:
        """Return an input with the defaults of everything that it omits; `value` itself if there are none."""
        return self.spec.completed(value) if self._has_defaults else value

    def converts(self, context: OperationContext) -> bool:
        """Return whether an input of this caller that is not valid may be converted."""
        policy = self.operation.input
        return context.lenient if policy is None else policy == "convert"

    def _runnable(self) -> Callable[[Any, OperationContext], Any]:
        handler = self.operation.handler
        blocking = self.operation.blocking
        if blocking is None:
            blocking = is_blocking(handler)
        if not blocking or self.spec.type is OperationType.SUBSCRIPTION:
            return handler
        host = self.host

        async def in_thread(value: Any, context: OperationContext) -> Any:
            def abandoned() -> None:
                if self.series is not None:
                    self.series.abandoned += 1
                logger.warning(
                    "%s: the caller disconnected, but the handler's thread continues", self.id
                )
                host.notify(
                    CallAbandoned(
                        request_id=context.request_id, operation_id=self.id, timestamp=now()
                    )
                )

            result = await host.threads.run(handler, value, context, on_abandon=abandoned)
            # A plain function may return an awaitable.
            return await result if inspect.isawaitable(result) else result

        return in_thread


def _accepts_any(value: Any) -> bool:
    """Accept any input. A missing one is replaced by an empty object, which handlers of imported operations expect."""
    return value is not None


def alarm_of(context: OperationContext, seconds: float) -> Alarm:
    """Return an alarm for the deadline of a call, which ends in this many seconds unless its limit is extended."""
    limit = context.limit
    if limit is None:
        return alarm_in(seconds)
    return alarm_in(limit.next_check, lambda: limit.next_check if limit.remaining > 0 else 0.0)


async def within(
    seconds: float,
    plan: CallPlan,
    context: OperationContext,
    function: Callable[..., Coroutine[Any, Any, Any]],
    *args: Any,
) -> Any:
    """Await `function(*args)` in its own task, or raise `TIMEOUT` at the deadline even if it ignores cancellation.

    `seconds` is the time limit of the whole call.
    """
    alarm = alarm_of(context, seconds)
    task = asyncio.Task(_ringing(alarm, function, *args))
    # As `before`, which would be another coroutine for nearly every call of an entry point.
    try:
        await alarm.woken
    except asyncio.CancelledError:
        await plan.host.stop(task, context)
        raise
    finally:
        alarm.remove()
    if task.done() and not task.cancelled():
        return task.result()
    raise await _missed(seconds, task, plan, context)


async def _ringing(
    alarm: Alarm, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any
) -> Any:
    """Await `function(*args)` and ring the alarm in the same step, which saves an iteration of the event loop."""
    try:
        return await function(*args)
    finally:
        alarm.ring()


async def before(
    alarm: Alarm,
    seconds: float,
    result: "asyncio.Future[Any]",
    work: "asyncio.Task[Any]",
    plan: CallPlan,
    context: OperationContext,
) -> Any:
    """Await a result of `work`, which rings the alarm, or raise `TIMEOUT` at the deadline; see `within`."""
    try:
        await alarm.woken
    except asyncio.CancelledError:
        await plan.host.stop(work, context)
        raise
    finally:
        alarm.remove()
    if result.done() and not result.cancelled():
        return result.result()
    raise await _missed(seconds, work, plan, context)


async def _missed(
    seconds: float, work: "asyncio.Task[Any]", plan: CallPlan, context: OperationContext
) -> CallError:
    """Cancel work that has no result at its deadline; return the error for its caller."""
    if work.done():
        # Cancelled neither by this function nor by the caller.
        return cancelled_elsewhere(plan.id)
    await plan.host.stop(work, context)
    return timed_out(plan.id, seconds, deadline=context.deadline, operation_id=plan.id)


def is_blocking(handler: Callable[..., Any]) -> bool:
    """Return whether `handler` is an ordinary function, which must run in a thread."""
    return not any(
        is_kind(candidate)
        for candidate in (handler, getattr(handler, "__call__", None))  # noqa: B004 - its kind is the question
        for is_kind in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    )
