"""What is known about an operation before its calls: the compiled form of its spec."""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, Protocol

from msgspec.json import encode

from operations.base.patterns import Patterns
from operations.base.threads import is_blocking
from operations.base.work import Work
from operations.contract.access import permission, resource_permission
from operations.contract.context import OperationContext, Reach
from operations.contract.events import CallAbandoned, now
from operations.contract.specs import Operation, OperationType
from operations.registry.middleware import Envelope
from operations.registry.services import CallServices, ChangeLog

logger = logging.getLogger("operations")


class Finisher(Protocol):
    """Turns the result of a handler into the envelope for its caller."""

    def __call__(self, result: Any, work: Work | None = None) -> Envelope:
        """Return the envelope.

        Args:
            result: The result.
            work: The budget; by default that of the event loop.

        Raises:
            BudgetSpentError: If the default budget does not suffice, or the result cannot even be converted to JSON.
        """
        ...


class Accepts(Protocol):
    """Tests whether a JSON value is a valid input, within a budget; `size` is that of `_size_of`, if it is known."""

    def __call__(self, value: Any, work: Work | None, size: int | None = None) -> bool:
        """Return whether it is valid."""
        ...


class CallPlan:
    """An operation prepared for calls, with its compiled schemas and access check.

    Args:
        operation: The operation.
        services: What all calls of the registry share.
        finish: Turns a result into the envelope for the caller.
        log: Logs changes of results, once of each kind.
        is_inner: Whether another plan with the same id has already checked the caller.
    """

    def __init__(
        self,
        operation: Operation,
        services: CallServices,
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
        self.services = services
        self.permits = None if spec.access_control.is_open else permission(spec.access_control)
        self.permits_input = resource_permission(spec.access_control)
        calls = services.calls if operation.calls is None else tuple(operation.calls)
        self.is_typed = operation.reader is not None
        self.reach = Reach(self.id, Patterns(calls)) if calls else None
        self.follow_sinks()
        self.accepts: Accepts = _accepts_any
        # Rejects inputs with files, which `admit` replaces before it validates the input.
        self.flat: Callable[[bytes], Any] | None = None
        if operation.input != "off":
            compiled = spec.input_schema.compile()
            self.accepts, self.flat = compiled.accepts_input, compiled.flat
        self.finish = finish
        self.log = log
        self.handler = self._runnable()
        self.series = None if services.counters is None else services.counters.of(self.id)

    def follow_sinks(self) -> None:
        """Find out whether calls are admitted one by one, which also depends on the sinks of the registry."""
        self.admits = not self.is_inner and (
            self.operation.approve is not None or bool(self.services.recorder.gates)
        )
        self.is_plain = self.permits_input is None and self.reach is None and not self.admits

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the contract."""
        return self.spec.digest

    @functools.cached_property
    def has_defaults(self) -> bool:
        """Whether the input schema declares defaults."""
        return b'"default":' in encode(self.spec.input_schema.document)

    def completed(self, value: Any, work: Work | None = None) -> Any:
        """Return an input with the defaults of everything that it omits; `value` itself if there are none.

        Raises:
            BudgetSpentError: If the budget does not suffice, by default that of the event loop.
        """
        return self.spec.completed(value, work) if self.has_defaults else value

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
        services = self.services

        async def in_thread(value: Any, context: OperationContext) -> Any:
            def abandoned() -> None:
                if self.series is not None:
                    self.series.abandoned += 1
                logger.warning(
                    "%s: the caller disconnected, but the handler's thread continues", self.id
                )
                services.notify(
                    CallAbandoned(
                        request_id=context.request_id, operation_id=self.id, timestamp=now()
                    )
                )

            result = await services.threads.run(handler, value, context, on_abandon=abandoned)
            # A plain function may return an awaitable.
            return await result if inspect.isawaitable(result) else result

        return in_thread


def _accepts_any(value: Any, work: Work | None, size: int | None = None) -> bool:
    """Accept any input. A missing one is replaced by an empty object, which handlers of imported operations expect."""
    return value is not None
