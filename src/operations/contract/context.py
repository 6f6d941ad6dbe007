"""The context of a call: its caller, its deadline, and access to other operations.

Rule 1: a context is frozen. A nested call gets a child context: a new id, the id of this call as parent, the same
        caller, at most the same deadline, and the authority of the operation only for calls that the operation
        declared.
Rule 2: expensive fields (the request id, `env`) are created when they are first read.
"""

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from math import inf
from time import monotonic, time
from typing import (
    Any,
    Concatenate,
    Final,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)
from weakref import WeakSet

import msgspec

from operations.base.errors import CallError, ErrorCode, operation_not_found
from operations.base.loops import BlockingIterator, waits_for
from operations.base.patterns import Patterns
from operations.base.text import enforce_lists, printable
from operations.base.time_limit import TimeLimit
from operations.base.types import JSONObject
from operations.contract.access import AccessControl, Identity, check_access
from operations.contract.channel import CLOSED, NOTHING, CallerChannel
from operations.contract.envelopes import ResponseEnvelope, ResponseMeta
from operations.schema import CheckedInput

logger = logging.getLogger("operations")

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")


class Listed(Protocol):
    """The parts of a spec that decide whether an operation may be called."""

    @property
    def id(self) -> str:
        """The operation's id."""
        ...

    @property
    def access_control(self) -> AccessControl:
        """The access that a call requires."""
        ...

    @property
    def authority(self) -> bool:
        """Whether it administers authority."""
        ...


class Caller(Protocol):
    """Runs operations by id: a registry."""

    def execute(
        self, operation_id: str, input: Any = None, context: "OperationContext | None" = None
    ) -> Awaitable[ResponseEnvelope[Any]]:
        """Run a query or mutation."""
        ...

    def subscribe(
        self, operation_id: str, input: Any = None, context: "OperationContext | None" = None
    ) -> "Stream":
        """Open a subscription."""
        ...

    def authorize(
        self, operation_id: str, input: Any, context: "OperationContext | None" = None
    ) -> Awaitable[Any]:
        """Check a call that another operation makes on behalf of the caller; return the input for it."""
        ...

    def specs(self) -> Iterable[Listed]:
        """Return the specs of all operations."""
        ...

    def get_spec(self, operation_id: str) -> Listed | None:
        """Return the spec of an operation; None if it is not registered."""
        ...

    async def call_by(
        self, execute: "Execute", function: object, /, *arguments: Any, **named: Any
    ) -> Any:
        """Run the operation of a function that is marked with `@operation`; return its typed result."""
        ...


def may_call(spec: Listed, context: "OperationContext") -> bool:
    """Return whether a caller may call an operation, and may therefore see it."""
    return context.trusted or check_access(
        spec.access_control, context.identity, spec.id, authority=spec.authority
    )


Execute: TypeAlias = Callable[[str, JSONObject], Awaitable[ResponseEnvelope[Any]]]
"""Runs an operation by its id, with this input."""


class Abortable(Protocol):
    """A nested call or subscription."""

    def abort(self) -> None:
        """End it: tasks that wait for it receive `ABORTED`."""
        ...


class Stream(Abortable, Protocol):
    """The envelopes of a subscription."""

    def __aiter__(self) -> AsyncIterator[ResponseEnvelope[Any]]:
        """Return the stream itself."""
        ...

    async def __anext__(self) -> ResponseEnvelope[Any]:
        """Return the next envelope."""
        ...


class Reach(msgspec.Struct, frozen=True, eq=False):
    """The calls that the handler of an operation may make on the authority of the operation."""

    operation_id: str
    patterns: Patterns

    def covers(self, operation_id: str, registry: Caller | None) -> bool:
        """Return whether the handler may call an operation of `registry` on the authority of its own operation.

        A pattern allows neither an operation that administers authority, nor one that is not registered, because a
        remote may administer authority with it.
        """
        if operation_id in self.patterns.ids:
            return True
        if registry is None or not self.patterns.cover(operation_id):
            return False
        spec = registry.get_spec(operation_id)
        return spec is not None and not spec.authority


ReadStream: TypeAlias = Callable[[Stream], Awaitable[Any]]
"""Reads a subscription to the end that its reader chooses; returns a JSON value."""


class ResultKeeper(Protocol):
    """Keeps the pages of the result of a run, with the run."""

    @property
    def run_id(self) -> str:
        """The id of the run."""
        ...

    @property
    def max_bytes(self) -> int:
        """The largest result that is stored whole."""
        ...

    def keep(self, pages: Sequence[bytes]) -> None:
        """Store these pages when the run completes."""
        ...


class RunScope(Protocol):
    """The run that a call belongs to: records the steps of its handler, so that none is repeated after a crash."""

    @property
    def run(self) -> Any:
        """The handle of the run."""
        ...

    @property
    def run_id(self) -> str:
        """The id of the run."""
        ...

    @property
    def step_name(self) -> str:
        """The name of the step that the call is, or is part of; `.` for the call of the run itself."""
        ...

    @property
    def key(self) -> str | None:
        """Names the call in all attempts of the run; None for a part of a step, of which there may be several."""
        ...

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1 on."""
        ...

    @property
    def is_admitted(self) -> bool:
        """Whether an earlier attempt of the run has spent the approval and the budget of this call."""
        ...

    @property
    def result_keeper(self) -> ResultKeeper | None:
        """Keeps the pages of the result; None unless this is the call of the run itself."""
        ...

    @property
    def waited(self) -> float:
        """The seconds for which this attempt has only waited for people, signals or a time."""
        ...

    @property
    def is_cancelled(self) -> bool:
        """Whether the run was cancelled; if not, a cancelled handler continues in another attempt."""
        ...

    async def begin(self, operation: Any) -> "RunScope":
        """Commit that the handler of an operation begins; return the scope for the handler."""
        ...

    async def call(
        self, registry: Caller, operation_id: str, input: Any, child: "OperationContext"
    ) -> ResponseEnvelope[Any]:
        """Make a nested call as a step: return the recorded result, or run the call and record its result."""
        ...

    def begin_stream(self) -> None:
        """Note that the handler of a subscription begins."""
        ...

    async def read(
        self,
        registry: Caller,
        operation_id: str,
        input: Any,
        child: "OperationContext",
        read: ReadStream,
        bounds: JSONObject,
    ) -> Any:
        """Read a nested subscription as a step: return the recorded result, or read it and record the result.

        Args:
            registry: The registry of the operation.
            operation_id: The subscription.
            input: Its input.
            child: The context of the nested call.
            read: Reads it. Called again if a person has to approve the subscription first.
            bounds: What `read` depends on: with the input, it names the step.
        """
        ...

    async def step(self, name: str, function: Callable[[], Any], *, once: bool) -> Any:
        """Return the recorded result of a function, or run it and record its result."""
        ...

    async def fail_step(self, name: str, error: CallError, *, once: bool) -> None:
        """Record that the only step of this name has failed after all, because what it began elsewhere has.

        As for any failed step, only a retry runs it again. If it may run only `once` and its outcome is not known
        (`OUTCOME_UNKNOWN`), the run ends `unknown`.
        """
        ...

    async def sleep(self, seconds: float) -> None:
        """Sleep until a recorded time."""
        ...

    async def wait_for(self, name: str, timeout: float | None) -> Any:
        """Wait for a signal."""
        ...


_BATCH = 256
_unused_ids: list[str] = []


def new_request_id() -> str:
    """Return 128 random bits in hex. Ids are generated in batches, because a system call for each is slow."""
    try:
        return _unused_ids.pop()
    except IndexError:
        text = os.urandom(16 * _BATCH).hex()
        # Another thread may have emptied the batch.
        _unused_ids.extend(text[start : start + 32] for start in range(32, 32 * _BATCH, 32))
        return text[:32]


if sys.platform != "win32":
    # A forked child must not use the ids of its parent.
    os.register_at_fork(after_in_child=_unused_ids.clear)


_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "notice": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "alert": logging.CRITICAL,
    "emergency": logging.CRITICAL,
}


MAX_NESTED: Final = 50
"""The largest number of calls that a call is nested in: each takes about six levels of Python's stack, of 1,000."""


class OperationContext(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True):
    """The call that a handler serves: its caller, deadline and parent."""

    request_id: str = ""
    """128 random bits in hex, created when first read, unless the caller sent an id."""

    parent_request_id: str | None = None
    identity: Identity | None = None

    trusted: bool = False
    """Skip the access check. Only code in this process can set it; it is never sent to another process."""

    lenient: bool = False
    """Convert an input that its schema rejects, if no information is lost; `meta.changes` reports it with kind `input`.
    Set by entry points whose callers are models. Nested calls do not inherit it, and it is never sent to another
    process."""

    whole: bool = False
    """Return large results whole, not in pages (`max_bytes`): for nested calls and the command line. Never sent to
    another process."""

    depth: int = 0
    """The number of calls in this process that this one is nested in. Never sent to another process."""

    metadata: Mapping[str, Any] = NOTHING

    deadline: float | None = None
    """Milliseconds since the epoch; None for no deadline."""

    channel: CallerChannel = CLOSED

    limit: TimeLimit | None = None
    """The time limit of the entry point, if it can be extended; `deadline` is then the end without extensions."""

    authority: tuple[str, str] | None = None
    """The operation on whose authority this call runs, and the called operation, whose access is not checked again.
    None if the call runs as the caller. Set by `child`; never sent to another process."""

    reach: Reach | None = None
    """The calls that the handler may make on its own authority. Set by the pipeline, on a copy."""

    checked: CheckedInput | str | None = None
    """The input that rules have checked, as the handler receives it: set by the pipeline, on a copy, for that handler
    only. Before that, the digest of its form if another process has checked it and forwards the call."""

    key: str | None = None
    """Names the step of a run that this call is: the same in all attempts, and at the worker that runs it. Send it to
    systems that run requests with the same key once. None for calls that are no step."""

    scope: RunScope | None = None
    """The run that the call belongs to; None outside of runs. Never sent to another process."""

    claim: JSONObject | None = None
    """What the author of the call, such as a script, claims about its reason, with `by`: shown beside a request for
    approval and never used to decide. Nested calls inherit it; never sent to another process."""

    registry: Caller | None = None
    """Runs nested calls. The registry that runs the handler sets it on a copy. Set it yourself only in the context of a
    single call."""

    env: "OperationEnv" = cast("OperationEnv", None)
    """Nested calls: `context.env.namespace.name(input)`."""

    _nested: "WeakSet[Abortable] | None" = None
    """The nested calls and subscriptions that are running."""

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`: a context has the rights and the channel of one call in this process."""
        raise TypeError(
            "an OperationContext cannot be pickled: it has the rights, the deadline and the channel of one call in this"
            " process. Send what the other process needs, such as identity.id, and create a context there"
        )

    @property
    def must_be_timed(self) -> bool:
        """Whether there is a deadline that the entry point does not enforce."""
        if self.limit is not None and self.limit.is_kept:
            return False
        # Not compared by size, because the clock may have been set since the entry point read it.
        return self.deadline is not None and self.deadline != self.channel.deadline

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; infinite without one. Setting the clock during a served call has no effect."""
        if self.limit is not None:
            return self.limit.remaining
        deadline, channel = self.deadline, self.channel
        if deadline is None:
            return inf
        if channel.ends_at is not None and deadline == channel.deadline:
            return channel.ends_at - monotonic()
        return deadline / 1000 - time()

    @property
    def authority_id(self) -> str | None:
        """The operation on whose authority the call runs; None if it runs as the caller."""
        if self.authority is not None:
            return self.authority[0]
        grant = None if self.identity is None else self.identity.grant
        # A hub names it in the grant of a call that it forwards.
        return None if grant is None or grant.origin is None else grant.origin.authority

    def child(self, operation_id: str, registry: Caller | None = None) -> "OperationContext":
        """Return the context of a nested call, with this call's identity and remaining time.

        The nested call runs on the authority of the current operation if that declared it in `calls`, else as the
        caller.

        Args:
            operation_id: The called operation.
            registry: Its registry, if it is not that of the current operation.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if calls are nested too deeply.
        """
        if self.depth >= MAX_NESTED:
            message = f"{operation_id} was not started: calls are nested in {MAX_NESTED} others"
            error = CallError(ErrorCode.RESOURCE_EXHAUSTED, message)
            error.operation_id = operation_id
            raise error
        reach = self.reach
        return OperationContext(
            depth=self.depth + 1,
            parent_request_id=self.request_id,
            identity=self.identity,
            trusted=self.trusted,
            authority=(reach.operation_id, operation_id)
            if reach is not None and reach.covers(operation_id, registry or self.registry)
            else None,
            whole=True,
            metadata=self.metadata,
            deadline=self.deadline if self.limit is None else self.limit.deadline,
            channel=self.channel,
            limit=self.limit,
            claim=self.claim,
            registry=self.registry,
        )

    @property
    def run(self) -> Any:
        """The run that this call belongs to; None if it belongs to none."""
        return None if self.scope is None else self.scope.run

    async def step(self, name: str, function: Callable[[], Any], *, once: bool = False) -> Any:
        """Run a function, and record its result in the run, so that a later attempt does not run it again.

        Outside of a run, and in operations that are not `durable`, it only runs the function.

        Args:
            name: The name of the step; equal names are numbered.
            function: A function without parameters, or a coroutine function, that returns a JSON value.
            once: Whether the function must never run twice: if an attempt ends while it runs, the run ends `unknown`.
                Otherwise it may run again if no result was recorded.

        Raises:
            CallError: `EXECUTION_ERROR` if the result is not JSON, or is too large.
        """
        if self.scope is not None:
            return await self.nest(self.scope.step(name, function, once=once))
        result = function()
        return await result if inspect.isawaitable(result) else result

    async def sleep(self, seconds: float) -> None:
        """Sleep. In a run, the end is recorded, so that a later attempt sleeps only for the rest."""
        await self.answered(
            asyncio.sleep(seconds) if self.scope is None else self.nest(self.scope.sleep(seconds))
        )

    async def wait_for(self, name: str, timeout: float | None = None) -> Any:
        """Wait until the run receives a signal (`run.signal(name, value)`), and return its value.

        Raises:
            CallError: `TIMEOUT` after this many seconds; `UNAVAILABLE` if the operation is not `durable`, or runs
                outside of a run.
        """
        if self.scope is None:
            raise _unavailable("wait for a signal", "the call is no run")
        return await self.answered(self.nest(self.scope.wait_for(name, timeout)))

    def with_metadata(self, **more: Any) -> "OperationContext":
        """Return a copy with more metadata. Aborting either context aborts the nested calls of both."""
        return self.changed(metadata={**self.metadata, **more})

    def changed(self, **fields: Any) -> "OperationContext":
        """Return a copy with other fields. Aborting either context aborts the nested calls of both."""
        self._under_way()  # so that both contexts share it
        return msgspec.structs.replace(
            self, request_id=self.request_id, env=cast("OperationEnv", None), **fields
        )

    @overload
    async def call(
        self,
        function: "Callable[Concatenate[OperationContext, P], Awaitable[T]]",
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T: ...
    @overload
    async def call(
        self,
        function: "Callable[Concatenate[OperationContext, P], T]",
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T: ...
    @overload
    async def call(
        self, function: "Callable[[A, OperationContext], Awaitable[T]]", first: A, /
    ) -> T: ...
    @overload
    async def call(
        self, function: "Callable[[A, B, OperationContext], Awaitable[T]]", first: A, second: B, /
    ) -> T: ...
    @overload
    async def call(self, function: "Callable[[A, OperationContext], T]", first: A, /) -> T: ...
    @overload
    async def call(
        self, function: "Callable[[A, B, OperationContext], T]", first: A, second: B, /
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
        """Run the operation of a function that is marked with `@operation`, as part of this call.

        Type checkers check the arguments. For a function with a parameter `context` they require `context=context`; the
        nested call has a context of its own.

        Returns:
            The result, as the type that the function is annotated with.

        Raises:
            CallError: As `registry.execute`; `EXECUTION_ERROR` if the result does not match the annotation.
            TypeError: If the function is not marked, or does not take the arguments.
        """
        named.pop("context", None)
        if self.registry is None:
            raise _unavailable("call other operations", "its context belongs to no registry")
        return await self.registry.call_by(self.env.run, function, *arguments, **named)

    async def progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        """Report progress to the caller. Ignored if the channel does not support it."""
        if self.limit is not None:
            self.limit.restart()
        if self.channel.progress is not None:
            await self.channel.progress(progress, total, message)
        # A handler that only reports would otherwise block the event loop, and never notice its cancellation.
        await asyncio.sleep(0)

    async def log(self, level: str, data: Any, logger_name: str | None = None) -> None:
        """Send a log message to the caller, or to the `operations` logger if the channel does not support this."""
        if self.channel.log is not None:
            await self.channel.log(level, data, logger_name)
        else:
            logger.log(
                _LEVELS.get(level, logging.INFO), "%s: %s", self.request_id, printable(str(data))
            )
        await asyncio.sleep(0)

    async def elicit(self, message: str, schema: JSONObject) -> JSONObject:
        """Ask the person behind the call for values that match `schema`.

        Returns:
            `{"action": "accept", "content": {...}}` with the values, or `{"action": "decline"}` or
            `{"action": "cancel"}` if the person gives none.

        Raises:
            CallError: `UNAVAILABLE` if the channel does not support questions.
        """
        if self.channel.elicit is None:
            raise _unavailable("ask for input")
        return await self.answered(self.channel.elicit(message, schema))

    async def sample(self, request: JSONObject) -> JSONObject:
        """Ask the caller's model for a completion.

        Args:
            request: The parameters of `sampling/createMessage` of MCP: `{"messages": [...], "maxTokens": ...}`.

        Returns:
            The result of that request: `{"role": ..., "content": ..., "model": ...}`.

        Raises:
            CallError: `UNAVAILABLE` if the channel does not support sampling.
        """
        if self.channel.sample is None:
            raise _unavailable("use the client's model")
        return await self.answered(self.channel.sample(request))

    async def answered(self, question: Awaitable[T]) -> T:
        """Await the answer to a question, with the time limit of the entry point stopped."""
        if self.limit is None:
            return await question
        with self.limit.paused():
            return await question

    async def nest(self, call: Awaitable[T]) -> T:
        """Await a nested call, in any task. Aborting this call aborts it."""
        waiting = _Waiting()
        nested = self._under_way()
        nested.add(waiting)
        try:
            return await waiting.wait(call)
        finally:
            nested.discard(waiting)

    def hold(self, stream: "Abortable") -> None:
        """Register a nested subscription. Aborting this call aborts it."""
        self._under_way().add(stream)

    def abort_nested(self) -> None:
        """End the nested calls and subscriptions. Tasks that wait for them receive `ABORTED`."""
        if self._nested:
            for each in tuple(self._nested):
                each.abort()

    def _under_way(self) -> "WeakSet[Abortable]":
        nested = self._nested
        if nested is None:
            # Set in a frozen struct, because most calls make no nested ones: a set costs a fifth of such a call.
            nested = WeakSet[Abortable]()
            msgspec.structs.force_setattr(self, "_nested", nested)
        return nested


class _Waiting:
    """A task that waits for a nested call.

    A task that was created for the nested call is cancelled. Any other task receives `ABORTED` and continues.
    """

    __slots__ = ("__weakref__", "_aborted", "_task")

    def __init__(self) -> None:
        self._task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._aborted = False

    async def wait(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except asyncio.CancelledError:
            if self._aborted and self._task.cancelling() == 1 and not self._is_for_the_call:
                raise CallError(ErrorCode.ABORTED, "the parent call has ended") from None
            raise
        finally:
            if self._aborted and not self._is_for_the_call:
                self._task.uncancel()

    @property
    def _is_for_the_call(self) -> bool:
        code = getattr(self._task.get_coro(), "cr_code", None)
        return code is OperationEnv.run.__code__

    def abort(self) -> None:
        if not self._aborted and self._task is not asyncio.current_task():
            self._aborted = True
            self._task.cancel()


def _unavailable(what: str, why: str = "the client does not support it") -> CallError:
    message = f"The operation cannot {what}: {why}"
    return CallError(ErrorCode.UNAVAILABLE, message, retryable=False)


class PendingEnvelope(Coroutine[Any, Any, ResponseEnvelope[Any]]):
    """The type of a nested call: the envelope itself in a `def` handler, elsewhere a coroutine that returns it."""

    data: Any
    """The result, in a `def` handler."""

    meta: ResponseMeta
    """The metadata, in a `def` handler."""


class PendingStream(Stream, Protocol):
    """The envelopes of a nested subscription."""

    def __iter__(self) -> Iterator[ResponseEnvelope[Any]]:
        """Return the envelopes, in a `def` handler."""
        ...

    async def aclose(self) -> None:
        """End the subscription, in an `async def` handler."""
        ...

    def close(self) -> None:
        """End the subscription, in a `def` handler."""
        ...


class OperationEnv:
    """Every operation as a function, for use inside a handler.

    `env.namespace.name(input)`, or `env["namespace"]["name"](input)` if a name is not an identifier, or
    `env.call("namespace.name", input)`. Each returns the envelope, or raises `CallError`. Await it, unless the handler
    is a `def` function.

    Iteration, `len()`, `in` and `dir()` cover the namespaces with at least one operation that the caller may call.
    `key in env` is True if `env[key]` is such an operation or contains one.
    """

    __slots__ = ("_allowed", "_context", "_registry")

    def __init__(
        self,
        registry: Caller | None,
        context: OperationContext,
        allowed_namespaces: Collection[str] | None = None,
    ) -> None:
        self._registry = registry
        self._context = context
        enforce_lists(allowed_namespaces=allowed_namespaces)
        self._allowed = allowed_namespaces

    def __getattr__(self, namespace: str) -> "OperationPath":
        if namespace.startswith("__"):
            raise AttributeError(namespace)
        return OperationPath(self, namespace)

    def __getitem__(self, namespace: str) -> "OperationPath":
        return OperationPath(self, namespace)

    def __iter__(self) -> Iterator[str]:
        return iter(_heads(self.operation_ids()))

    def __len__(self) -> int:
        return len(_heads(self.operation_ids()))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and any(
            known == key or known.startswith(key + ".") for known in self.operation_ids()
        )

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self]

    def operation_ids(self) -> Iterator[str]:
        """Yield the ids of the operations that may be called here."""
        if self._registry is None:
            return
        context = self._context
        for spec in self._registry.specs():
            if self._allows(spec.id) and (
                context.trusted
                or (context.reach is not None and context.reach.covers(spec.id, self._registry))
                or may_call(spec, context)
            ):
                yield spec.id

    def call(self, operation_id: str, input: Any = None) -> "PendingEnvelope":
        """Run an operation as part of this call. In a `def` handler, return its envelope; elsewhere, await it."""
        call, wait = self.run(operation_id, input), waits_for()
        return cast("PendingEnvelope", call if wait is None else wait(call))

    async def run(self, operation_id: str, input: Any = None) -> ResponseEnvelope[Any]:
        """Run an operation as part of this call, and await its envelope, in any handler."""
        registry, context = self._admit(operation_id), self._context
        child = context.child(operation_id, registry)
        if context.scope is not None:
            return await context.nest(context.scope.call(registry, operation_id, input, child))
        return await context.nest(registry.execute(operation_id, input, child))

    def subscribe(self, operation_id: str, input: Any = None) -> "PendingStream":
        """Open a subscription as part of this call, for `for` in a `def` handler, and `async for` elsewhere."""
        registry = self._admit(operation_id)
        child = self._context.child(operation_id, registry)
        items = registry.subscribe(operation_id, input, child)
        self._context.hold(items)
        wait = waits_for()
        found: Any = items if wait is None else BlockingIterator(wait, lambda: items)
        return cast("PendingStream", found)

    def _admit(self, operation_id: str) -> Caller:
        if self._registry is None or not self._allows(operation_id):
            reason = f"No operation {operation_id!r} can be called here"
            error = operation_not_found(operation_id, reason)
            error.operation_id = operation_id
            raise error
        return self._registry

    def _allows(self, operation_id: str) -> bool:
        return self._allowed is None or operation_id.split(".", 1)[0] in self._allowed


class OperationPath:
    """A namespace, or an operation in it; calling it runs the operation.

    Iteration and `len()` cover the names below this path of operations that the caller may call; `key in path` is True
    if `path[key]` is such an operation or contains one.
    """

    __slots__ = ("_env", "_id")

    def __init__(self, env: OperationEnv, operation_id: str) -> None:
        self._env = env
        self._id = operation_id

    def __getattr__(self, name: str) -> "OperationPath":
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> "OperationPath":
        return OperationPath(self._env, f"{self._id}.{name}")

    def __iter__(self) -> Iterator[str]:
        prefix = self._id + "."
        return (
            known.removeprefix(prefix)
            for known in self._env.operation_ids()
            if known.startswith(prefix)
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        # An operation has no names below it, but must be true.
        return True

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and f"{self._id}.{key}" in self._env

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *_heads(self)]

    def __call__(self, input: Any = None) -> "PendingEnvelope":
        """Run the operation as part of the current call. Await it, unless the handler is a `def` function."""
        return self._env.call(self._id, input)

    def __repr__(self) -> str:
        return f"<operation {self._id}>"


def _heads(names: Iterable[str]) -> list[str]:
    """Return the distinct first parts of the names."""
    return list(dict.fromkeys(name.split(".", 1)[0] for name in names))


def _made_when_read(field: str, make: Callable[[OperationContext], Any], *, keep: bool) -> None:
    """Make `field` of the struct lazy: fill it when it is read and still empty."""
    slot: Any = OperationContext.__dict__[field]

    def read(context: OperationContext) -> Any:
        value = slot.__get__(context)
        # Compare with None: an env without operations is false.
        if value is None or value == "":
            value = make(context)
            if keep:
                slot.__set__(context, value)
        return value

    setattr(OperationContext, field, property(read, doc=field))


_made_when_read("request_id", lambda _: new_request_id(), keep=True)
# Not stored: a copy of the context for another caller would then call as this caller.
_made_when_read("env", lambda context: OperationEnv(context.registry, context), keep=False)


NO_CALL: Final = OperationContext()
"""The context of requests to a source outside of calls, such as connecting and listing."""
