"""Operations by id, and the two ways to call them.

Rule 1: whoever calls, however the call came in, it goes through `execute` or `subscribe`.
Rule 2: a registration that fails leaves nothing behind.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace as replaced
from typing import Any, Self, Unpack, cast, overload

from msgspec.structs import replace as with_fields

from operations._pipeline import (
    Middleware,
    Plan,
    Remote,
    StreamMiddleware,
    Subscription,
    forward,
    invoke,
    report_refusal,
    run,
    stream,
)
from operations._text import counted, suggestion
from operations._threads import ThreadPool
from operations.access import check_access
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import (
    CallError,
    ErrorCode,
    RegistrationError,
    SchemaError,
    operation_not_found,
)
from operations.observe import CallCounters, CallEvent, Observer, RegistryChanged, notify
from operations.schema import Schema
from operations.specs import (
    Function,
    Operation,
    OperationHandler,
    OperationOptions,
    OperationSpec,
    OperationType,
    OutputPolicy,
    SubscriptionHandler,
    enforce_policy,
    operation,
    validate_operation,
)

logger = logging.getLogger("operations")

_LEFT_BEHIND_SECONDS = 1.0
"""How long closing waits for cancelled handlers that have not ended yet."""


class OperationRegistry:
    """A set of operations, each callable by its id.

    `async with registry:` closes, at its end, every service whose operations were registered with
    `register_all`.

    Args:
        operations: What to register at once.
        remote: Where calls go that have no handler here.
        output: What happens to results that do not fit their schema, unless the operation says otherwise. None
            means `cast`, the default.
        max_threads: How many `def` handlers run at a time.
    """

    def __init__(
        self,
        operations: Iterable[Operation] = (),
        *,
        remote: Remote | None = None,
        output: OutputPolicy | None = "cast",
        max_threads: int = 32,
    ) -> None:
        enforce_policy(output)
        self.output: OutputPolicy = output or "cast"
        self.threads = ThreadPool(max_threads)
        self.middleware: list[Middleware] = []
        self.stream_middleware: list[StreamMiddleware] = []
        self.revision = 0
        """Counts the changes to what is registered."""
        self._remote = remote
        self._operations: dict[str, Operation] = {}
        self._elsewhere: set[str] = set()
        self._adapters: list[Callable[[Operation], Operation]] = []
        self._given: dict[str, tuple[Operation, str]] = {}
        """What adapters changed, by the id it was registered with: the original, and the id that it has here."""
        self._plans: dict[str, Plan] = {}
        self._streams: dict[str, Plan] = {}
        self._observers: list[Observer] = []
        self._watchers: list[Observer] = []
        self.counters: CallCounters | None = None
        self._counting: dict[object, bool] = {}
        self._services: list[Any] = []
        self._left_behind: set[asyncio.Task[Any]] = set()
        # Whether a call without a deadline needs nothing around it.
        self._plain = True
        self.register_all(operations)

    # ------------------------------------------------------------ registering

    def register(
        self, operation: Operation | OperationSpec | Callable[..., Any], *, replace: bool = False
    ) -> Operation:
        """Add an operation, a function marked by `@operation`, or a contract whose handler is elsewhere.

        Raises:
            RegistrationError: If its id is taken and `replace` is not set, or it cannot work.
        """
        return self.register_all([operation], replace=replace)[0]

    def register_all(
        self,
        operations: Iterable[Operation | OperationSpec | Callable[..., Any]],
        *,
        replace: bool = False,
    ) -> list[Operation]:
        """Add every operation, or none of them.

        A service (what `from_openapi` or `connect_mcp` give) is closed with the registry. One whose operations
        come and go has `attach(registry)`, and is told where to keep them up to date.

        Raises:
            RegistrationError: As `register`; then nothing was added.
        """
        added: dict[str, Operation] = {}
        originals: list[tuple[Operation, Operation]] = []
        elsewhere: set[str] = set()
        for candidate in operations:
            if isinstance(candidate, OperationSpec):
                candidate = Operation(candidate, forward(candidate, self._remote))  # noqa: PLW2901
                elsewhere.add(candidate.spec.id)
            given = validate_operation(candidate)
            ready = self._adapted(given)
            operation_id = ready.spec.id
            if ready is not given:
                originals.append((given, ready))
            is_taken = operation_id in self._operations and not (
                replace and operation_id in (given.spec.id, self.current_id(given.spec.id))
            )
            if operation_id in added or is_taken:
                raise RegistrationError(
                    f"{operation_id} is registered already: rename it, or pass replace=True"
                )
            added[operation_id] = ready
        attach = getattr(operations, "attach", None)
        if attach is not None:
            attach(self)
        for operation_id, ready in added.items():
            self._put(operation_id, ready)
        for given, ready in originals:
            self._given[given.spec.id] = given, ready.spec.id
        self._elsewhere |= set(map(self.current_id, elsewhere))
        if hasattr(operations, "aclose") or hasattr(operations, "__aexit__"):
            self._services.append(operations)
        return list(added.values())

    def register_spec(self, spec: OperationSpec, *, replace: bool = False) -> Operation:
        """Add a contract whose handler comes later, or is the remote's.

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
        """Give a registered spec its handler.

        Raises:
            RegistrationError: If there is no such spec, or it has a handler and `replace` is not set.
        """
        known = self.registered(operation_id)
        if known is None:
            raise RegistrationError(f"{operation_id} has no spec here: register_spec it first")
        if self.current_id(operation_id) not in self._elsewhere and not replace:
            raise RegistrationError(f"{operation_id} has a handler already: pass replace=True")
        return self.register(replaced(known, handler=handler, blocking=None), replace=True)

    def unregister(self, operation_id: str) -> Operation:
        """Take an operation away. Calls that run go on.

        Raises:
            KeyError: If there is no such operation.
        """
        operation_id = self.current_id(operation_id)
        removed = self._operations.pop(operation_id)
        self._given = {key: each for key, each in self._given.items() if each[1] != operation_id}
        self._forget(operation_id)
        self._tell(RegistryChanged(operation_id=operation_id, change="removed"))
        return removed

    def operation(
        self, operation_id: str = "", **options: Unpack[OperationOptions]
    ) -> Callable[[Function], Function]:
        """Register a typed function: `@registry.operation("task.create", scopes=["task:write"])`.

        Takes what the module-level `operation` takes, and raises what it and `register` raise.
        """
        mark = operation(operation_id, **options)

        def register(function: Function) -> Function:
            self.register(mark(function))
            return function

        return register

    def adapt(self, adapter: Callable[[Operation], Operation]) -> None:
        """Let `adapter` change, and rename, every operation that is or will be registered (see `operations.tools`)."""
        self._adapters.append(adapter)
        self.adapt_all()

    def adapt_all(self) -> None:
        """Change every operation again, because an adapter has changed. `RegistrationError`: nothing has."""
        given = {**self._operations, **{here: each for each, here in self._given.values()}}
        ready = {key: self._adapted(each) for key, each in given.items()}
        last = {each.spec.id: key for key, each in ready.items()}
        for twice in (each.spec.id for key, each in ready.items() if last[each.spec.id] != key):
            raise RegistrationError(f"two operations would be called {twice}")
        changed = [key for key, each in ready.items() if each is not self._operations[key]]
        candidates = [given[key].spec if key in self._elsewhere else given[key] for key in changed]
        for key in changed:
            self.unregister(key)
        self.register_all(candidates)

    def _adapted(self, operation: Operation) -> Operation:
        for adapter in self._adapters:
            operation = adapter(operation)
        return operation

    # ------------------------------------------------------------ looking

    def current_id(self, operation_id: str) -> str:
        """Return the id that an operation has, which may have been renamed since it was registered."""
        return self._given.get(operation_id, (None, operation_id))[1]

    def registered(self, operation_id: str) -> Operation | None:
        """Return the operation that was registered with this id, as it was before it was adapted."""
        found = self._given.get(operation_id)
        return self._operations.get(operation_id) if found is None else found[0]

    def get(self, operation_id: str) -> Operation | None:
        """The operation with this id."""
        return self._operations.get(operation_id)

    def output_of(self, operation_id: str) -> OutputPolicy:
        """Return how the results of this operation are normalised."""
        known = self._operations.get(operation_id)
        return self.output if known is None else known.output or self.output

    def get_by_name(self, namespace: str, name: str) -> Operation | None:
        """The operation with this name in this namespace."""
        return self._operations.get(f"{namespace}.{name}")

    def get_spec(self, operation_id: str) -> OperationSpec | None:
        """The contract of this operation."""
        known = self._operations.get(operation_id)
        return known.spec if known is not None else None

    def get_handler(self, operation_id: str) -> OperationHandler | SubscriptionHandler | None:
        """The handler of this operation; None where it would run elsewhere."""
        known = self._operations.get(operation_id)
        return known.handler if known is not None and operation_id not in self._elsewhere else None

    def specs(self) -> list[OperationSpec]:
        """Every contract, in the order of registration."""
        return [known.spec for known in self._operations.values()]

    def not_found(self, operation_id: str, context: OperationContext) -> CallError:
        """Return the `OPERATION_NOT_FOUND` for an id; it names the operation that the caller probably meant.

        Operations that the caller may not call are never named.
        """
        visible = (
            spec.id
            for spec in self.specs()
            if spec.id != operation_id
            and (context.trusted or check_access(spec.access_control, context.identity))
        )
        message = f"There is no operation {operation_id!r}.{suggestion(operation_id, visible)}"
        return operation_not_found(operation_id, message.removesuffix("."))

    def __iter__(self) -> Iterator[Operation]:
        return iter(tuple(self._operations.values()))

    def __len__(self) -> int:
        return len(self._operations)

    def __contains__(self, operation_id: object) -> bool:
        return operation_id in self._operations

    def __repr__(self) -> str:
        return f"<OperationRegistry of {counted(len(self), 'operation')}>"

    # ------------------------------------------------------------ calling

    def execute(
        self, operation_id: str, input: Any = None, context: OperationContext | None = None
    ) -> Coroutine[Any, Any, ResponseEnvelope[Any]]:
        """Run a query or mutation; await the result.

        Raises:
            CallError: When awaited, and nothing else: see `ErrorCode`.
        """
        try:
            plan = self._plans.get(operation_id)
        except TypeError:  # whatever this is, it is no id
            plan = None
        if plan is None:
            return self._execute_first(operation_id, input, context)
        if context is None:
            context = OperationContext(registry=self)
        elif type(context) is not OperationContext or context.registry is not self:
            context = self._adopt(context)
        if self._plain and (context.deadline is None or not context.must_be_timed):
            return invoke(plan, input, context, plan.series)
        return run(plan, input, context)

    def subscribe(
        self, operation_id: str, input: Any = None, context: OperationContext | None = None
    ) -> Subscription:
        """Open a subscription: an async iterator of envelopes. Nothing happens before it is iterated.

        Raises:
            CallError: When iterated, and nothing else: see `ErrorCode`.
        """
        return Subscription(self._stream(operation_id, input, context))

    async def _execute_first(
        self, operation_id: str, input: Any, context: OperationContext | None
    ) -> ResponseEnvelope[Any]:
        context = self._adopt(context)
        await self._compile_aside(operation_id)
        plan = self._prepare(operation_id, context, self._plans, streaming=False)
        return await run(plan, input, context)

    async def _stream(
        self, operation_id: str, input: Any, context: OperationContext | None
    ) -> AsyncGenerator[ResponseEnvelope[Any], None]:
        context = self._adopt(context)
        plan = (
            self._streams.get(operation_id) if isinstance(cast("Any", operation_id), str) else None
        )
        if plan is None:
            await self._compile_aside(operation_id)
            plan = self._prepare(operation_id, context, self._streams, streaming=True)
        items = stream(plan, input, context)
        try:
            async for envelope in items:
                yield envelope
        finally:
            await items.aclose()

    def _adopt(self, context: OperationContext | None) -> OperationContext:
        """The caller's context with nested calls coming here; its request id is settled first."""
        if context is None:
            return OperationContext(registry=self)
        if not isinstance(cast("object", context), OperationContext):
            raise TypeError(f"pass an OperationContext(identity=..., ...), not {context!r}")
        if context.registry is self:
            return context
        request_id, env = context.request_id, cast("Any", None)
        return with_fields(context, request_id=request_id, registry=self, env=env, _nested=None)

    async def _compile_aside(self, operation_id: Any) -> None:
        """Compile the schemas of an imported operation in a thread: they may have hundreds of definitions."""
        known = self._operations.get(operation_id) if isinstance(operation_id, str) else None
        if known is not None:
            schemas = known.spec.input_schema, known.spec.output_schema
            slow = [schema for schema in schemas if schema.compiles_slowly]
            if slow:
                await asyncio.to_thread(_compile, slow)

    def _prepare(
        self,
        operation_id: str,
        context: OperationContext,
        plans: dict[str, Plan],
        *,
        streaming: bool,
    ) -> Plan:
        """Make an operation ready at its first call, and say so where it cannot be called."""
        try:
            if not isinstance(cast("Any", operation_id), str):
                operation_id = repr(operation_id)
            known = self._operations.get(operation_id)
            if known is None:
                # Not kept: ids come from outside, and there is no end to them.
                return Plan(self._unregistered(operation_id, context, streaming=streaming), self)
            if (known.spec.type is OperationType.SUBSCRIPTION) != streaming:
                verb = (
                    "call or execute it, for its one result"
                    if streaming
                    else "subscribe to it, for its many results"
                )
                raise CallError(
                    ErrorCode.VALIDATION_ERROR, f"{operation_id} is a {known.spec.type}: {verb}"
                )
            plan = plans[operation_id] = Plan(known, self)
        except CallError as error:
            report_refusal(self, operation_id, context, error)
            raise
        except SchemaError as unusable:
            refusal = CallError(
                ErrorCode.EXECUTION_ERROR,
                f"the input schema of {operation_id} is unusable: {unusable}",
            )
            report_refusal(self, operation_id, context, refusal)
            raise refusal from unusable
        return plan

    def _unregistered(
        self, operation_id: str, context: OperationContext, *, streaming: bool
    ) -> Operation:
        """What nobody registered: perhaps the remote knows it, and judges it there."""
        if self._remote is not None:
            namespace, _, name = operation_id.partition(".")
            kind = OperationType.SUBSCRIPTION if streaming else OperationType.MUTATION
            with suppress(ValueError):
                spec = OperationSpec(namespace=namespace, name=name, type=kind)
                return Operation(spec, forward(spec, self._remote))
        raise self.not_found(operation_id, context)

    # ------------------------------------------------------------ around calls

    @overload
    def use(self, middleware: Middleware) -> Middleware: ...
    @overload
    def use(self, middleware: StreamMiddleware) -> StreamMiddleware: ...
    def use(self, middleware: Any) -> Any:
        """Put a middleware around every call of its kind; the first one added is the outermost.

        `async def m(call, next)` stands around queries and mutations and gives an envelope; an async generator
        `async def m(call, next)` stands around subscriptions and yields envelopes.
        """
        if not callable(middleware):
            raise TypeError(f"{middleware!r} is no middleware: it cannot be called")
        if inspect.isasyncgenfunction(middleware) or inspect.isasyncgenfunction(
            getattr(middleware, "__call__", None)  # noqa: B004 - its kind is the question
        ):
            self.stream_middleware.append(cast("StreamMiddleware", middleware))
        else:
            self.middleware.append(cast("Middleware", middleware))
        self._plain = False
        return middleware

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Let `observer` follow every call event; call what this returns to stop."""
        if not callable(observer):
            raise TypeError(f"{observer!r} is no observer: it cannot be called")
        self._observers.append(observer)
        self._plain = False

        def stop() -> None:
            if observer in self._observers:
                self._observers.remove(observer)
            self._plain = not self._observers and not self.middleware

        return stop

    def watch(self, watcher: Observer) -> Callable[[], None]:
        """Let `watcher` hear of every `RegistryChanged`, and of no call; call what this returns to stop.

        Unlike an observer, it costs calls nothing.
        """
        self._watchers.append(watcher)

        def stop() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return stop

    def count_calls(self, *, time_all: bool = True) -> tuple[CallCounters, Callable[[], None]]:
        """Count calls from now on; call the function to stop. All that count at the same time share the counters.

        Unlike an observer, counting costs calls little.

        Args:
            time_all: Whether to time calls from code in this process too, and not only those from entry points.
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
        for plan in (*self._plans.values(), *self._streams.values()):
            plan.series = None if self.counters is None else self.counters.of(plan.id)

    @property
    def observed(self) -> bool:
        """Whether anybody follows the calls."""
        return bool(self._observers)

    def notify(self, event: CallEvent) -> None:
        """Tell the observers."""
        notify(tuple(self._observers), event)

    # ------------------------------------------------------------ lifetime

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Hold on to a cancelled task until it ends, so that it is neither lost nor complained about."""
        self._left_behind.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._left_behind.discard(task)
        if not task.cancelled():
            # Reading it marks it as seen: its caller has had its answer.
            task.exception()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the services registered here and wait a moment for handlers that are being cancelled.

        Closing twice is harmless. A service that fails to close is logged and keeps no other from closing.
        """
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

    # ------------------------------------------------------------ bookkeeping

    def _put(self, operation_id: str, ready: Operation) -> None:
        known = operation_id in self._operations
        self._operations[operation_id] = ready
        self._forget(operation_id)
        if self._observers or self._watchers:
            self._tell(
                RegistryChanged(operation_id=operation_id, change="replaced" if known else "added")
            )

    def _tell(self, change: RegistryChanged) -> None:
        notify((*self._observers, *self._watchers), change)

    def _forget(self, operation_id: str) -> None:
        self.revision += 1
        self._plans.pop(operation_id, None)
        self._streams.pop(operation_id, None)
        self._elsewhere.discard(operation_id)


def subscribe(
    registry: OperationRegistry,
    operation_id: str,
    input: Any = None,
    context: OperationContext | None = None,
) -> Subscription:
    """`registry.subscribe(operation_id, input, context)`."""
    return registry.subscribe(operation_id, input, context)


def _compile(schemas: list[Schema]) -> None:
    # Whatever is wrong with one is said when the operation is prepared.
    with suppress(Exception):
        for schema in schemas:
            schema.compile()
