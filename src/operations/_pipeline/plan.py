"""An operation prepared for calls, and the registry that runs it."""

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

from operations._grants import matcher
from operations._pipeline.outcome import Envelope, finisher
from operations._pipeline.threads import ThreadPool
from operations.access import permission, resource_permission
from operations.authority import Authority
from operations.context import OperationContext, Reach
from operations.envelopes import ResponseEnvelope
from operations.errors import operation_not_found
from operations.observe import CallAbandoned, CallCounters, CallEvent, now
from operations.specs import (
    Operation,
    OperationHandler,
    OperationSpec,
    OperationType,
    OutputPolicy,
    SubscriptionHandler,
)

logger = logging.getLogger("operations")


@dataclass(frozen=True, slots=True)
class Call:
    """A call as middleware sees it; pass on a changed one with `dataclasses.replace(call, input=...)`."""

    spec: OperationSpec
    input: Any
    context: OperationContext


Next: TypeAlias = Callable[[Call], Awaitable[Envelope]]
"""Runs the rest of a query or mutation."""

NextStream: TypeAlias = Callable[[Call], AsyncIterator[Envelope]]
"""Runs the rest of a subscription."""

Middleware: TypeAlias = Callable[[Call, Next], Awaitable[Envelope]]
"""Around a query or mutation: `async def m(call, next): return await next(call)`."""

StreamMiddleware: TypeAlias = Callable[[Call, NextStream], AsyncIterator[Envelope]]
"""Around a subscription: an async generator over `next(call)`."""


class PipelineHost(Protocol):
    """The registry, as the pipeline uses it."""

    threads: ThreadPool
    output: OutputPolicy
    middleware: list[Middleware]
    stream_middleware: list[StreamMiddleware]

    authority: Authority

    calls: tuple[str, ...]
    """Patterns of operations that handlers may call on the authority of their operation, unless it declares its own."""

    counters: CallCounters | None
    """Set while calls are counted."""

    @property
    def observed(self) -> bool:
        """Whether there are observers."""
        ...

    def notify(self, event: CallEvent) -> None:
        """Send an event to the observers."""
        ...

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Keep a reference to a cancelled task until it ends."""
        ...


class Plan:
    """An operation prepared for calls: schemas compiled, access check and kind of handler known.

    Args:
        operation: The operation.
        host: The registry that runs it.
        is_inner: Whether another plan with the same id ran all checks of the caller.
    """

    __slots__ = (
        "_digest",
        "accepts",
        "admits",
        "finish",
        "flat",
        "handler",
        "host",
        "id",
        "is_inner",
        "is_plain",
        "operation",
        "permits",
        "permits_input",
        "reach",
        "series",
        "spec",
    )

    def __init__(self, operation: Operation, host: PipelineHost, *, is_inner: bool = False) -> None:
        spec = operation.spec
        self.is_inner = is_inner
        self.operation = operation
        self.spec = spec
        self.id = spec.id
        self.host = host
        self.permits = None if spec.access_control.is_open else permission(spec.access_control)
        self.permits_input = resource_permission(spec.access_control)
        calls = host.calls if operation.calls is None else tuple(operation.calls)
        self.reach = Reach(self.id, matcher(calls)) if calls else None
        self.admits = not is_inner and (
            operation.approve is not None or host.authority.ledger is not None
        )
        self.is_plain = self.permits_input is None and self.reach is None and not self.admits
        self._digest: str | None = None
        compiled = spec.input_schema.compile()
        self.accepts, self.flat = compiled.accepts, compiled.flat
        self.finish = finisher(spec, operation.output or host.output)
        self.handler = self._runnable()
        self.series = None if host.counters is None else host.counters.of(self.id)

    @property
    def digest(self) -> str:
        """The digest of the contract."""
        if self._digest is None:
            self._digest = self.spec.digest
        return self._digest

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
                logger.warning("%s: the caller left, the handler's thread runs on", self.id)
                host.notify(
                    CallAbandoned(
                        request_id=context.request_id, operation_id=self.id, timestamp=now()
                    )
                )

            result = await host.threads.run(handler, value, context, on_abandon=abandoned)
            # A plain function may return an awaitable.
            return await result if inspect.isawaitable(result) else result

        return in_thread


def is_blocking(handler: Callable[..., Any]) -> bool:
    """Return whether `handler` is an ordinary function, which must run in a thread."""
    target = handler
    while isinstance(target, functools.partial):
        target = target.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return not any(
        is_kind(candidate)
        for candidate in (target, getattr(target, "__call__", None))  # noqa: B004 - its kind is the question
        for is_kind in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    )


class Remote(Protocol):
    """Runs operations that have no local handler."""

    async def call(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> ResponseEnvelope[Any]:
        """Run a query or mutation there.

        Raises:
            CallError: The operation's error, or `UNAVAILABLE`.
        """
        ...

    def subscribe(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> AsyncIterator[ResponseEnvelope[Any]]:
        """Open a subscription there."""
        ...


def forward(spec: OperationSpec, remote: Remote | None) -> OperationHandler | SubscriptionHandler:
    """Return a handler for an operation without a local one: it calls the remote, if there is one."""
    operation_id = spec.id

    async def nowhere(input: Any, context: OperationContext) -> Any:
        reason = f"{operation_id} has no handler here, and no remote"
        raise operation_not_found(operation_id, reason)

    async def call(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        return await cast("Remote", remote).call(operation_id, input, context)

    def subscribe(input: Any, context: OperationContext) -> AsyncIterator[ResponseEnvelope[Any]]:
        return cast("Remote", remote).subscribe(operation_id, input, context)

    if remote is None:
        return nowhere
    return subscribe if spec.type is OperationType.SUBSCRIPTION else call
