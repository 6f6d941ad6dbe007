"""The registry: operations by id, and the two ways to call them.

Rule 1: every call, from any entry point, goes through `execute` or `subscribe`.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast, overload

from msgspec.structs import replace as with_fields

from operations.authority import Authority
from operations.base.errors import (
    CallError,
    ErrorCode,
    SchemaError,
    operation_not_found,
    unusable_schema,
)
from operations.base.json.values import JSONValueError
from operations.base.loops import Held
from operations.base.patterns import Patterns
from operations.base.tasks import enforce_asyncio
from operations.base.time_limit import TimeLimit
from operations.base.types import JSONObject
from operations.contract.context import Execute, OperationContext, OperationEnv, Reach
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.events import Observer
from operations.contract.functions import typed_function
from operations.contract.specs import Operation, OperationSpec, OperationType, OutputPolicy
from operations.registry.cache import PlanCache
from operations.registry.catalog import Registrable, Registrations
from operations.registry.counters import CallCounters
from operations.registry.middleware import Middleware, StreamMiddleware
from operations.registry.path import authorize, checked_input, invoke, permit, prepare, run, timed
from operations.registry.plan import CallPlan
from operations.registry.remotes import Remote, forward
from operations.registry.reports import report_refusal
from operations.registry.runs import Run, RunPage, RunStore, StartOptions, no_store
from operations.registry.streams import Subscription, stream
from operations.registry.sync import SyncRegistry
from operations.schema import CheckedInput, Schema, invalid_json, mismatch_error

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
MiddlewareT = TypeVar("MiddlewareT", bound=Middleware | StreamMiddleware)

logger = logging.getLogger("operations")

_LEFT_BEHIND_SECONDS = 1.0
"""Seconds that closing waits for cancelled handlers to end."""


class OperationRegistry(Registrations):
    """A set of operations, each callable by its id.

    `async with registry:` closes, at its end, every service whose operations were registered with
    `register_all`.

    Args:
        operations: The operations to register.
        remote: Runs calls of operations without a local handler.
        output: How results are normalised, unless the operation has its own policy; None means `cast`.
        max_threads: The number of `def` handlers that run at a time.
        calls: Default of `calls` for operations that declare none; `["*"]` trusts every nested call.
        authority: Stores budgets and approvals; by default in this process.
        runs: Keeps runs (`operations.runs.Runs`). `async with registry` then also runs what is queued.

    Attributes:
        run_store: The store of runs; None if there is none.
    """

    def __init__(
        self,
        operations: Iterable[Registrable] = (),
        *,
        remote: Remote | None = None,
        output: OutputPolicy | None = "cast",
        max_threads: int = 32,
        calls: Collection[str] = (),
        authority: Authority | None = None,
        runs: RunStore | None = None,
    ) -> None:
        super().__init__(
            remote, output=output, max_threads=max_threads, calls=calls, authority=authority
        )
        self._plans = PlanCache()
        self._recent = self._plans.recent
        self._streams = PlanCache()
        self._durable = PlanCache()
        """Plans that `execute` must not find, because the call may be a run."""
        self._counting: dict[object, bool] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop on which the registry was opened; None if it was not."""
        self.held: list[Held[Any]] = []
        """What `sync.enter` has opened."""
        self.run_store = runs
        self.register_all(operations)
        if runs is not None:
            runs.attach(self)

    # ------------------------------------------------------------ calling

    @property
    def sync(self) -> SyncRegistry:
        """The same calls without `await`, for scripts, notebooks and threads: `registry.sync.execute(...)`."""
        return SyncRegistry(self)

    def execute(
        self,
        operation_id: str,
        input: Any = None,
        context: OperationContext | None = None,
        *,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, ResponseEnvelope[Any]]:
        """Run a query or mutation; await the result.

        Args:
            operation_id: `namespace.name`.
            input: A JSON value, or Python values that can be converted to JSON.
            context: The caller; by default a call without identity.
            timeout: Seconds until the call ends with `TIMEOUT`, unless the context's deadline is earlier.

        Raises:
            CallError: When awaited, and nothing else: see `ErrorCode`.
        """
        if timeout is not None:
            context = _within(timeout, context)
        try:
            plan = self._recent.get(operation_id)
        except TypeError:  # unhashable, so not an operation id
            plan = None
        if plan is None:
            return self._execute_first(operation_id, input, context)
        if context is None:
            context = OperationContext(registry=self)
        elif type(context) is not OperationContext or context.registry is not self:
            context = self._adopt(context)
        if self._observers or self.middleware:
            return run(plan, input, context)
        if context.deadline is None or not context.must_be_timed:
            return invoke(plan, input, context, plan.series)
        if self.counters is None:
            return timed(plan, input, context)
        return run(plan, input, context)

    def subscribe(
        self, operation_id: str, input: Any = None, context: OperationContext | None = None
    ) -> Subscription:
        """Open a subscription: an async iterator of envelopes. Nothing happens before it is iterated.

        Raises:
            CallError: When iterated, and nothing else: see `ErrorCode`.
        """

        async def prepared() -> tuple[CallPlan, OperationContext]:
            adopted = self._adopt(context)
            known = isinstance(cast("Any", operation_id), str)
            plan = self._streams.find(operation_id) if known else None
            if plan is None:
                await self._compile_aside(operation_id)
                plan = self._prepare(operation_id, adopted, streaming=True)
            return plan, adopted

        return Subscription(stream(prepared, input))

    @overload
    async def call(
        self,
        function: Callable[Concatenate[OperationContext, P], Awaitable[T]],
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T: ...
    @overload
    async def call(
        self,
        function: Callable[Concatenate[OperationContext, P], T],
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T: ...
    @overload
    async def call(
        self,
        function: Callable[[A, OperationContext], Awaitable[T]],
        first: A,
        /,
        *,
        context: OperationContext | None = None,
    ) -> T: ...
    @overload
    async def call(
        self,
        function: Callable[[A, B, OperationContext], Awaitable[T]],
        first: A,
        second: B,
        /,
        *,
        context: OperationContext | None = None,
    ) -> T: ...
    @overload
    async def call(
        self,
        function: Callable[[A, OperationContext], T],
        first: A,
        /,
        *,
        context: OperationContext | None = None,
    ) -> T: ...
    @overload
    async def call(
        self,
        function: Callable[[A, B, OperationContext], T],
        first: A,
        second: B,
        /,
        *,
        context: OperationContext | None = None,
    ) -> T: ...
    @overload
    async def call(
        self, function: Callable[P, Awaitable[T]], /, *arguments: P.args, **named: P.kwargs
    ) -> T: ...
    @overload
    async def call(
        self, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs
    ) -> T: ...
    async def call(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Run the operation of a function that is marked with `@operation`, with access as in `execute`.

        Type checkers check the arguments. A function with a parameter `context` is given that of the call: pass the
        caller's context as `context`, or use `call_as`.

        Returns:
            The result, as the type that the function is annotated with.

        Raises:
            CallError: As `execute`; `EXECUTION_ERROR` if the result does not match the annotation.
            TypeError: If the function is not marked, or does not take the arguments.
        """
        context: OperationContext | None = named.pop("context", None)

        def execute(operation_id: str, input: JSONObject) -> Awaitable[ResponseEnvelope[Any]]:
            return self.execute(operation_id, input, context)

        return await self.call_by(execute, function, *arguments, **named)

    @overload
    async def call_as(
        self,
        context: OperationContext,
        function: Callable[Concatenate[OperationContext, P], Awaitable[T]],
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T: ...
    @overload
    async def call_as(
        self,
        context: OperationContext,
        function: Callable[Concatenate[OperationContext, P], T],
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T: ...
    @overload
    async def call_as(
        self,
        context: OperationContext,
        function: Callable[P, Awaitable[T]],
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T: ...
    @overload
    async def call_as(
        self,
        context: OperationContext,
        function: Callable[P, T],
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T: ...
    async def call_as(
        self,
        context: OperationContext,
        function: Callable[..., Any],
        /,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        """Run the operation of a marked function for a caller, as `call` does."""
        named.pop("context", None)
        return await self.call(function, *arguments, context=context, **named)

    async def call_by(
        self, execute: Execute, function: object, /, *arguments: Any, **named: Any
    ) -> Any:
        """As `call`; `execute` runs the operation, by the id that it has in this registry."""
        marked_id, signature = typed_function(function)
        operation_id = self.current_id(marked_id)
        try:
            given = signature.arguments(arguments, named)
        except JSONValueError as error:
            raise invalid_json(operation_id, error) from error
        except TypeError as error:
            raise TypeError(f"{operation_id}: {error}") from None
        known = self._operations.get(operation_id)
        registered = None if known is None else known.signature
        if registered is not None and registered.owner is not signature.owner:
            raise TypeError(
                f"{operation_id} is registered for another object: call its method, or use execute"
            )
        envelope = await execute(operation_id, given)
        data, issues = signature.typed_result(envelope.data)
        if issues:
            sentence = f"The result of {operation_id} does not match its annotation"
            raise mismatch_error(ErrorCode.EXECUTION_ERROR, sentence, issues)
        return with_fields(envelope, data=data) if signature.returns_envelope else data

    async def authorize(
        self, operation_id: str, input: Any, context: OperationContext | None = None
    ) -> Any:
        """Check access, input, grant, approval and budget of a call that another operation makes for the caller.

        Returns:
            The input for the call, converted if the caller's context is lenient.

        Raises:
            CallError: As the call would.
        """
        context = self._adopt(context)
        operation_id = self.current_id(operation_id)
        plan = await self._plan(operation_id, context)
        return await authorize(plan, input, context)

    async def checked_input(
        self, operation_id: str, input: Any, context: OperationContext | None = None
    ) -> CheckedInput:
        """Return what the handler of an operation would receive, without running it.

        For a process that forwards calls, and whose rules read the input.

        Raises:
            CallError: `ACCESS_DENIED`, `VALIDATION_ERROR` or `OPERATION_NOT_FOUND`, as a call would.
        """
        context = self._adopt(context)
        operation_id = self.current_id(operation_id)
        plan = (
            self._plans.find(operation_id)
            or self._durable.find(operation_id)
            or self._streams.find(operation_id)
        )
        if plan is None:
            await self._compile_aside(operation_id)
            known = self._operations.get(operation_id)
            streaming = known is not None and known.spec.type is OperationType.SUBSCRIPTION
            plan = self._prepare(operation_id, context, streaming=streaming)
        return await checked_input(plan, input, context)

    async def _execute_first(
        self, operation_id: str, input: Any, context: OperationContext | None
    ) -> ResponseEnvelope[Any]:
        context = self._adopt(context)
        plan = await self._plan(operation_id, context)
        if self.run_store is None or not plan.operation.durable or context.scope is not None:
            return await run(plan, input, context)
        handle = await self._start(plan, input, context, StartOptions())
        return await handle.result(context.remaining)

    async def _plan(self, operation_id: str, context: OperationContext) -> CallPlan:
        """Return the plan of a query or mutation, which is prepared at its first call."""
        known = isinstance(cast("Any", operation_id), str)
        plan = self._plans.find(operation_id) or self._durable.find(operation_id) if known else None
        if plan is None:
            enforce_asyncio()
            await self._compile_aside(operation_id)
            plan = self._prepare(operation_id, context)
        return plan

    # ------------------------------------------------------------ runs

    async def start(
        self,
        operation_id: str,
        input: Any = None,
        context: OperationContext | None = None,
        *,
        key: str | None = None,
        delay: float = 0,
        at: float | None = None,
        priority: int = 100,
        lane: str | None = None,
        retention: float | None = None,
    ) -> Run:
        """Start a run of a query or mutation, and return its handle once the run is stored.

        Access, grant and input are checked now, and again when the run begins or continues.

        Args:
            operation_id: `namespace.name`.
            input: A JSON value, or Python values that can be converted to JSON.
            context: The caller, who owns the run. A deadline does not end the run.
            key: Names the run for this caller and operation: the same call with this key returns the same run.
            delay: Seconds until the run begins.
            at: When the run begins, in milliseconds since the epoch; not together with `delay`.
            priority: Runs with a lower number begin first.
            lane: The lane whose limit (`lane_limit` of the operation) counts the run; by default the operation's id.
            retention: Seconds for which the run is kept after its end.

        Raises:
            CallError: As `execute`; `VALIDATION_ERROR` for a subscription, or for a key of a run with another input;
                `UNAVAILABLE` without a store; `RESOURCE_EXHAUSTED` if too many runs are live.
        """
        options = StartOptions(
            key=key, delay=delay, at=at, priority=priority, lane=lane, retention=retention
        )
        context = self._adopt(context)
        return await self._start(await self._plan(operation_id, context), input, context, options)

    async def _start(
        self, plan: CallPlan, input: Any, context: OperationContext, options: StartOptions
    ) -> Run:
        if self.run_store is None:
            raise no_store()
        try:
            value = await permit(plan, input, context)
        except CallError as error:
            report_refusal(self, plan.id, context, error)
            raise
        return Run(
            self.run_store, await self.run_store.start(plan, value, context, options), context
        )

    async def run(self, run_id: str, context: OperationContext | None = None) -> Run:
        """Return the handle of a run.

        Raises:
            CallError: `RUN_NOT_FOUND` if the run is unknown, has expired, or the caller may not see it.
        """
        context = self._adopt(context)
        if self.run_store is None:
            raise no_store()
        return Run(self.run_store, await self.run_store.state(run_id, context), context)

    async def runs(
        self,
        context: OperationContext | None = None,
        *,
        status: str | None = None,
        operation: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> RunPage:
        """List the runs that the caller may see, the newest first.

        Args:
            context: The caller.
            status: Only runs in this state.
            operation: Only runs of this operation.
            limit: The number of runs on the page, at most 100.
            after: The `next` of the page before.
        """
        context = self._adopt(context)
        if self.run_store is None:
            raise no_store()
        return await self.run_store.page(
            context, status=status, operation=operation, limit=limit, after=after
        )

    def _adopt(self, context: OperationContext | None) -> OperationContext:
        """Return the caller's context with this registry for nested calls.

        Each call without a request id gets a new one.
        """
        if context is None:
            return OperationContext(registry=self)
        if not isinstance(cast("object", context), OperationContext):
            raise TypeError(f"pass an OperationContext(identity=..., ...), not {context!r}")
        if context.registry is self:
            return context
        return with_fields(context, registry=self, env=cast("Any", None), _nested=None)

    async def _compile_aside(self, operation_id: Any) -> None:
        """Compile the schemas of an imported operation in a thread, because they may have hundreds of definitions."""
        known = self._operations.get(operation_id) if isinstance(operation_id, str) else None
        if known is not None:
            schemas = known.spec.input_schema, known.spec.output_schema
            slow = [schema for schema in schemas if schema.compiles_slowly]
            if slow:
                await asyncio.to_thread(_compile, slow)

    def _prepare(
        self, operation_id: str, context: OperationContext, *, streaming: bool = False
    ) -> CallPlan:
        """Prepare an operation at its first call; raise an error if it cannot be called."""
        try:
            if not isinstance(cast("Any", operation_id), str):
                is_function = callable(operation_id)
                operation_id = repr(operation_id)
                if is_function:
                    message = "An id is expected, not a function: use registry.call(function, ...)"
                    raise operation_not_found(operation_id, message)
            known = self._operations.get(operation_id)
            if known is None:
                # Not cached, because callers can send any number of unknown ids.
                unregistered = self._unregistered(operation_id, context, streaming=streaming)
                return prepare(unregistered, self)
            if (known.spec.type is OperationType.SUBSCRIPTION) != streaming:
                method = "execute" if streaming else "subscribe"
                reason = f"{operation_id} is a {known.spec.type}: use {method}"
                raise CallError(ErrorCode.VALIDATION_ERROR, reason)
            plans = self._streams if streaming else self._plans
            if known.durable and not streaming:
                plans = self._durable
            plan = prepare(known, self, log=plans.log(operation_id))
            plans.add(operation_id, plan)
        except CallError as error:
            error.operation_id = operation_id
            report_refusal(self, operation_id, context, error)
            raise
        except SchemaError as unusable:
            refusal = unusable_schema(operation_id, unusable, "the input schema")
            report_refusal(self, operation_id, context, refusal)
            raise refusal from unusable
        return plan

    def _unregistered(
        self, operation_id: str, context: OperationContext, *, streaming: bool
    ) -> Operation:
        """Return an operation for an unregistered id that calls the remote; the remote checks access."""
        if self._remote is not None:
            namespace, _, name = operation_id.partition(".")
            kind = OperationType.SUBSCRIPTION if streaming else OperationType.MUTATION
            with suppress(ValueError):
                # The remote may administer authority with it, so that no pattern allows it.
                spec = OperationSpec(namespace=namespace, name=name, type=kind, authority=True)
                # Nor is it known whether the remote converts the input.
                return forward(spec, self._remote, converts_input=True)
        raise self.not_found(operation_id, context)

    def covers(self, operation_id: str, called: str) -> bool:
        """Return whether the handler of an operation may call another one on the authority of its operation."""
        known = self._operations.get(operation_id)
        calls = self.calls if known is None or known.calls is None else tuple(known.calls)
        return known is not None and Reach(operation_id, Patterns(calls)).covers(called, self)

    # ------------------------------------------------------------ middleware and observers

    def use(self, middleware: MiddlewareT) -> MiddlewareT:
        """Add a middleware that wraps every call of its kind, and return it; the first one added is the outermost.

        `async def m(call, next)` wraps queries and mutations and returns an envelope; an async generator
        `async def m(call, next)` wraps subscriptions and yields envelopes.
        """
        if not callable(middleware):
            raise TypeError(f"{middleware!r} is not a middleware: it cannot be called")
        # The kind of a callable object is that of its method.
        candidates = (middleware, getattr(middleware, "__call__", None))  # noqa: B004
        if any(map(inspect.isasyncgenfunction, candidates)):
            self.stream_middleware += (cast("StreamMiddleware", middleware),)
        else:
            self.middleware += (cast("Middleware", middleware),)
        return middleware

    def remove_middleware(self, middleware: Middleware | StreamMiddleware) -> None:
        """Remove a middleware; calls that are running keep it."""
        self.middleware = tuple(m for m in self.middleware if m != middleware)
        self.stream_middleware = tuple(m for m in self.stream_middleware if m != middleware)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Send all call events to `observer`; call the returned function to stop."""
        if not callable(observer):
            raise TypeError(f"{observer!r} is not an observer: it cannot be called")
        self._observers.append(observer)

        def stop() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        return stop

    def count_calls(self, *, time_all: bool = True) -> tuple[CallCounters, Callable[[], None]]:
        """Count calls from now on; call the returned function to stop. Concurrent counts share the same counters.

        Counting adds much less cost to calls than an observer.

        Args:
            time_all: Whether to time all calls; False times only those from entry points.
        """
        counters = self.counters
        if counters is None:
            counters = self.counters = CallCounters(self._operations)
            self._set_series()
        token = object()
        self._counting[token] = time_all
        counters.times_all = any(self._counting.values())

        def stop() -> None:
            if self._counting.pop(token, None) is None:
                return
            counters.times_all = any(self._counting.values())
            if not self._counting:
                self.counters = None
                self._set_series()

        return counters, stop

    def _set_series(self) -> None:
        for plan in (*self._plans, *self._durable, *self._streams):
            plan.series = None if self.counters is None else self.counters.of(plan.id)

    # ------------------------------------------------------------ lifetime

    async def __aenter__(self) -> Self:
        enforce_asyncio()
        self.loop = asyncio.get_running_loop()
        if self.run_store is not None:
            await self.run_store.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def close_with(self, service: Any) -> None:
        """Let `aclose` close a service, which has a coroutine method `aclose`, too."""
        self._services.append(service)

    async def aclose(self) -> None:
        """Close the registered services and wait up to a second for cancelled handlers.

        Closing twice is harmless. If a service fails to close, the error is logged and the others are closed.
        """
        self.loop = None
        if self.run_store is not None:
            await self.run_store.aclose()
        services, self._services = self._services, []
        for service in reversed(services):
            try:
                if hasattr(service, "aclose"):
                    await service.aclose()
                else:
                    await service.__aexit__(None, None, None)
            except Exception:
                logger.exception("%r did not close cleanly", service)
        if self._left_behind:
            await asyncio.wait(tuple(self._left_behind), timeout=_LEFT_BEHIND_SECONDS)
        self.threads.close()

    def _forget(self, operation_ids: Collection[str]) -> None:
        super()._forget(operation_ids)
        for plans in (self._plans, self._durable, self._streams):
            plans.remove(operation_ids)


def _within(seconds: float, context: OperationContext | None) -> OperationContext:
    """Return the context with a deadline in `seconds`, unless its own deadline is earlier."""
    deadline = (time.time() + seconds) * 1000
    if context is None:
        return OperationContext(deadline=deadline)
    if context.limit is not None:
        limit = TimeLimit(None, deadline=deadline, outer=context.limit)
        return with_fields(context, deadline=limit.deadline, limit=limit)
    return context if context.remaining <= seconds else with_fields(context, deadline=deadline)


def subscribe(
    registry: OperationRegistry,
    operation_id: str,
    input: Any = None,
    context: OperationContext | None = None,
) -> Subscription:
    """Open a subscription, as `registry.subscribe(operation_id, input, context)` does."""
    return registry.subscribe(operation_id, input, context)


def _compile(schemas: list[Schema]) -> None:
    # Errors are reported when the operation is prepared.
    with suppress(Exception):
        for schema in schemas:
            schema.compile()


def build_env(
    registry: OperationRegistry,
    context: OperationContext,
    allowed_namespaces: Collection[str] | None = None,
) -> OperationEnv:
    """Return all operations of `registry` as functions that run as nested calls of `context`.

    Args:
        registry: Runs the calls.
        context: The parent call, whose identity and deadline they inherit.
        allowed_namespaces: The namespaces that can be called; None allows all.
    """
    return OperationEnv(registry, context, allowed_namespaces)
