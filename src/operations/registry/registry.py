"""The registry: operations by id, and the two ways to call them.

Rule 1: every call, from any entry point, goes through `execute` or `subscribe`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, cast, overload

from msgspec.structs import replace as with_fields

from operations.authority import Authority
from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import JSONValueError
from operations.base.loops import Held
from operations.base.patterns import Patterns
from operations.base.tasks import enforce_asyncio
from operations.base.text import counted
from operations.base.threads import ThreadPool
from operations.base.time_limit import TimeLimit
from operations.base.types import JSONObject
from operations.contract.access import token_not_stored
from operations.contract.context import Execute, OperationContext, OperationEnv, Reach
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.events import CallEvent, Observer
from operations.contract.functions import (
    Function,
    OperationOptions,
    operation,
    operations_of,
    typed_function,
)
from operations.contract.specs import (
    Operation,
    OperationHandler,
    OperationSpec,
    OutputPolicy,
    SubscriptionHandler,
)
from operations.recorder.recorder import Recorder, Sink
from operations.registry.catalog import Catalog, Registrable
from operations.registry.counters import CallCounters, Counting
from operations.registry.middleware import Middleware, StreamMiddleware
from operations.registry.path import authorize, checked_input, invoke, permit, run, timed
from operations.registry.plan import CallPlan
from operations.registry.plans import Plans
from operations.registry.remotes import Remote
from operations.registry.reports import report_refusal
from operations.registry.runs import Run, RunPage, RunStore, StartOptions, no_store
from operations.registry.services import CallServices
from operations.registry.streams import Subscription, stream
from operations.registry.sync import SyncRegistry
from operations.schema import CheckedInput, invalid_json, mismatch_error

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
MiddlewareT = TypeVar("MiddlewareT", bound=Middleware | StreamMiddleware)

logger = logging.getLogger("operations")


class OperationRegistry:
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
        loop: The event loop on which the registry was opened; None if it was not.
        held: What `sync.enter` has opened.
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
        self._services = CallServices(
            output=output, max_threads=max_threads, calls=calls, authority=authority
        )
        self._catalog = Catalog(self._services, remote, forget=self._forget)
        self._plans = Plans(self._catalog, self._services)
        # `execute` reads this dictionary itself: a call to `Plans` would be measurable in the cost of a call.
        self._recent = self._plans.recent
        self._counting = Counting(self._catalog.ids, self._plans.count)
        self._to_close: list[Any] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.held: list[Held[Any]] = []
        self.sync = SyncRegistry(self)
        """The same calls without `await`, for scripts, notebooks and threads: `registry.sync.execute(...)`.

        No property, because the completion of notebooks does not run properties.
        """
        self.run_store = runs
        self.register_all(operations)
        if runs is not None:
            runs.attach(self)

    def _forget(self, operation_ids: Collection[str]) -> None:
        # A method, because the catalog is created before the plans, which read it.
        self._plans.forget(operation_ids)

    # ------------------------------------------------------------ calling

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
        services = self._services
        if services.observers or services.middleware:
            return run(plan, input, context)
        if context.deadline is None or not context.must_be_timed:
            return invoke(plan, input, context, plan.series)
        if services.counters is None:
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
            return await self._plans.of_stream(operation_id, adopted), adopted

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
        known = self._catalog.get(operation_id)
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
        plan = await self._plans.of_call(self.current_id(operation_id), context)
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
        plan = await self._plans.of_any(self.current_id(operation_id), context)
        return await checked_input(plan, input, context)

    async def _execute_first(
        self, operation_id: str, input: Any, context: OperationContext | None
    ) -> ResponseEnvelope[Any]:
        context = self._adopt(context)
        plan = await self._plans.of_call(operation_id, context)
        if self.run_store is None or not plan.operation.durable or context.scope is not None:
            return await run(plan, input, context)
        handle = await self._start(plan, input, context, StartOptions())
        return await handle.result(context.remaining)

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
        plan = await self._plans.of_call(operation_id, context)
        return await self._start(plan, input, context, options)

    async def _start(
        self, plan: CallPlan, input: Any, context: OperationContext, options: StartOptions
    ) -> Run:
        if self.run_store is None:
            raise no_store()
        try:
            value = await permit(plan, input, context)
            if plan.operation.needs_token:
                raise token_not_stored(plan.id)
        except CallError as error:
            report_refusal(self._services, plan.id, context, error)
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

    def covers(self, operation_id: str, called: str) -> bool:
        """Return whether the handler of an operation may call another one on the authority of its operation."""
        known = self._catalog.get(operation_id)
        calls = self.calls if known is None or known.calls is None else tuple(known.calls)
        return known is not None and Reach(operation_id, Patterns(calls)).covers(called, self)

    # ------------------------------------------------------------ the operations

    def register(self, operation: Registrable, replace: bool = False) -> Operation:
        """Add an operation, a function marked with `@operation`, or a spec without a handler.

        Raises:
            RegistrationError: If its id is taken and `replace` is not set, or the operation is not valid.
        """
        return self.register_all([operation], replace=replace)[0]

    def register_all(
        self,
        operations: Iterable[Registrable],
        *,
        replace: bool = False,
    ) -> list[Operation]:
        """Add every operation, or none of them.

        The registry closes a service (the result of `from_openapi` or `connect_mcp`) when it is closed itself. A
        service whose operations change has a method `attach(registry)`, which keeps the registry up to date.

        Raises:
            RegistrationError: As `register`; then nothing was added.
        """
        addition = self._catalog.checked(operations, replace=replace)
        attach = getattr(operations, "attach", None)
        if attach is not None:
            attach(self)
        added = self._catalog.add(addition)
        if hasattr(operations, "aclose") or hasattr(operations, "__aexit__"):
            self._to_close.append(operations)
        return added

    def register_object(self, service: object, *, replace: bool = False) -> list[Operation]:
        """Add every method of `service` that is marked with `@operation`, or none of them.

        Raises:
            RegistrationError: As `register`, and if no method is marked.
        """
        return self.register_all(operations_of(service), replace=replace)

    def register_spec(self, spec: OperationSpec, *, replace: bool = False) -> Operation:
        """Add a spec whose handler is registered later or runs remotely.

        Raises:
            RegistrationError: If its id is taken and `replace` is not set.
        """
        return self.register(spec, replace=replace)

    def register_handler(
        self,
        operation_id: str,
        handler: OperationHandler | SubscriptionHandler,
        *,
        replace: bool = False,
    ) -> Operation:
        """Set the handler of a registered spec.

        Raises:
            RegistrationError: If there is no such spec, or it has a handler and `replace` is not set.
        """
        complete = self._catalog.with_handler(operation_id, handler, replace=replace)
        return self.register(complete, replace=True)

    def operation(
        self, operation_id: str, **options: Unpack[OperationOptions]
    ) -> Callable[[Function], Function]:
        """Register a typed function: `@registry.operation("task.create", scopes=["task:write"])`.

        It takes the arguments of the module-level `operation`, and raises the exceptions of both.
        """
        mark = operation(operation_id, **options)

        def register(function: Function) -> Function:
            marked = mark(function)
            self.register(marked)
            return marked

        return register

    def unregister(self, operation_id: str) -> Operation:
        """Remove an operation. Running calls continue.

        Raises:
            KeyError: If there is no such operation.
        """
        return self._catalog.unregister(operation_id)

    def adapt(self, adapter: Callable[[Operation], Operation]) -> None:
        """Apply `adapter`, which may change and rename an operation, to all current and future operations."""
        self._catalog.adapt(adapter)

    def adapt_all(self) -> None:
        """Apply the adapters again after one has changed.

        If this raises `RegistrationError`, the registry is unchanged.
        """
        self._catalog.adapt_all()

    def imported(self, known: Operation) -> Operation | None:
        """Return an imported operation as it is registered: the application may have restricted it.

        Returns None if it is not registered, or other code has registered its own operation with this id.
        """
        return self._catalog.imported(known)

    def restricted(self, new: Operation, known: Operation | None = None) -> Operation:
        """Return an imported operation with the restrictions that the application added to its predecessor `known`.

        An operation that was removed has them too when it returns, so that a source cannot remove a restriction.
        """
        return self._catalog.restricted(new, known)

    def remove_imported(self, known: Operation) -> None:
        """Unregister an imported operation, unless other code has registered its own operation with this id."""
        self._catalog.remove_imported(known)

    def watch(self, watcher: Observer) -> Callable[[], None]:
        """Send every `RegistryChanged` event to `watcher`; call the returned function to stop.

        Unlike an observer, a watcher receives no call events and adds no cost to calls.
        """
        return self._catalog.watch(watcher)

    @property
    def revision(self) -> int:
        """The number of changes so far."""
        return self._catalog.revision

    def current_id(self, operation_id: str) -> str:
        """Return the current id of an operation that was registered with this id and may have been renamed."""
        return self._catalog.current_id(operation_id)

    def registered(self, operation_id: str) -> Operation | None:
        """Return the operation that was registered with this id, without the changes of adapters."""
        return self._catalog.registered(operation_id)

    def get(self, operation_id: str) -> Operation | None:
        """Return the operation with this id."""
        return self._catalog.get(operation_id)

    def get_by_name(self, namespace: str, name: str) -> Operation | None:
        """Return the operation with this name in this namespace."""
        return self._catalog.get(f"{namespace}.{name}")

    def get_spec(self, operation_id: str) -> OperationSpec | None:
        """Return the spec of this operation."""
        return self._catalog.get_spec(operation_id)

    def get_handler(self, operation_id: str) -> OperationHandler | SubscriptionHandler | None:
        """Return the handler of this operation; None if it has no local handler."""
        return self._catalog.get_handler(operation_id)

    def output_of(self, operation_id: str) -> OutputPolicy:
        """Return the output policy of this operation."""
        return self._catalog.output_of(operation_id)

    def specs(self) -> list[OperationSpec]:
        """Return all specs, in the order of registration."""
        return self._catalog.specs()

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._catalog)

    def __len__(self) -> int:
        return len(self._catalog)

    def __contains__(self, operation_id: object) -> bool:
        return operation_id in self._catalog.ids

    def __repr__(self) -> str:
        return f"<OperationRegistry of {counted(len(self), 'operation')}>"

    # ------------------------------------------------------------ operations elsewhere

    @property
    def remote(self) -> Remote | None:
        """Runs operations without a local handler."""
        return self._catalog.remote

    @property
    def has_remote(self) -> bool:
        """Whether calls of operations without a local handler go to a remote."""
        return self._catalog.remote is not None

    def follow_sources(
        self, *, is_absent: Callable[[str], object], awaits_any: Callable[[], bool]
    ) -> None:
        """Take into account that sources of operations may not be connected, as those of a hub.

        Args:
            is_absent: Returns whether the source of a namespace is not connected.
            awaits_any: Returns whether any source is not connected.
        """
        self._catalog.is_absent, self._catalog.awaits_sources = is_absent, awaits_any

    def is_absent(self, namespace: str) -> bool:
        """Return whether the source of a namespace is not connected, so that its operations may be missing."""
        return bool(self._catalog.is_absent(namespace))

    def awaits_sources(self) -> bool:
        """Return whether any source is not connected, so that more operations may follow."""
        return self._catalog.awaits_sources()

    def not_found(self, operation_id: str, context: OperationContext) -> CallError:
        """Return an `OPERATION_NOT_FOUND` error for an id, or `UNAVAILABLE` if its source is not connected.

        The error suggests a similar id, which is always an operation that the caller may call.
        """
        return self._catalog.not_found(operation_id, context)

    # ------------------------------------------------------------ what all calls share

    @property
    def output(self) -> OutputPolicy:
        """The default output policy."""
        return self._services.output

    @property
    def calls(self) -> tuple[str, ...]:
        """Patterns of operations that handlers may call on the authority of their operation, by default."""
        return self._services.calls

    @property
    def authority(self) -> Authority:
        """Stores budgets and approvals."""
        return self._services.authority

    @property
    def recorder(self) -> Recorder:
        """Hands what happens to sinks."""
        return self._services.recorder

    @property
    def threads(self) -> ThreadPool:
        """Runs `def` handlers."""
        return self._services.threads

    def use(self, middleware: MiddlewareT) -> MiddlewareT:
        """Add a middleware that wraps every call of its kind, and return it; the first one added is the outermost.

        `async def m(call, next)` wraps queries and mutations and returns an envelope; an async generator
        `async def m(call, next)` wraps subscriptions and yields envelopes.
        """
        self._services.use(middleware)
        return middleware

    def remove_middleware(self, middleware: Middleware | StreamMiddleware) -> None:
        """Remove a middleware; calls that are running keep it."""
        self._services.remove_middleware(middleware)

    @property
    def middleware(self) -> tuple[Middleware, ...]:
        """Wraps queries and mutations, the outermost first."""
        return self._services.middleware

    @property
    def stream_middleware(self) -> tuple[StreamMiddleware, ...]:
        """Wraps subscriptions, the outermost first."""
        return self._services.stream_middleware

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Send all call events to `observer`; call the returned function to stop."""
        return self._services.observe(observer)

    @property
    def observed(self) -> bool:
        """Whether there are observers."""
        return self._services.observed

    def notify(self, event: CallEvent) -> None:
        """Send an event to the observers."""
        self._services.notify(event)

    def record(self, sink: Sink) -> Callable[[], None]:
        """Hand the events that `sink` wants to it; call the returned function to stop, which does not close the sink.

        Raises:
            ValueError: If it wants events that do not exist, or is strict and wants none that it could reject.
        """
        remove = self._services.recorder.add(sink)

        def stop() -> None:
            remove()
            self._plans.follow_sinks()

        self._plans.follow_sinks()
        return stop

    def count_calls(self, *, time_all: bool = True) -> tuple[CallCounters, Callable[[], None]]:
        """Count calls from now on; call the returned function to stop. Concurrent counts share the same counters.

        Counting adds much less cost to calls than an observer.

        Args:
            time_all: Whether to time all calls; False times only those from entry points.
        """
        return self._counting.begin(time_all=time_all)

    @property
    def counters(self) -> CallCounters | None:
        """Set while calls are counted."""
        return self._services.counters

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Keep a reference to a cancelled task until it ends, and retrieve its exception."""
        self._services.keep(task)

    # ------------------------------------------------------------ lifetime

    async def __aenter__(self) -> Self:
        enforce_asyncio()
        self.loop = asyncio.get_running_loop()
        if self.run_store is not None:
            await self.run_store.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @property
    def has_services(self) -> bool:
        """Whether closing this registry closes services, such as an imported API."""
        return bool(self._to_close)

    def close_with(self, service: Any) -> None:
        """Let `aclose` close a service, which has a coroutine method `aclose`, too."""
        self._to_close.append(service)

    async def aclose(self) -> None:
        """Close the registered services and wait up to a second for cancelled handlers.

        Closing twice is harmless. If a service fails to close, the error is logged and the others are closed.
        """
        self.loop = None
        if self.run_store is not None:
            await self.run_store.aclose()
        to_close, self._to_close = self._to_close, []
        for service in reversed(to_close):
            try:
                if hasattr(service, "aclose"):
                    await service.aclose()
                else:
                    await service.__aexit__(None, None, None)
            except Exception:
                logger.exception("%r did not close cleanly", service)
        await self._services.aclose()


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
