"""Run operations that have no handler here at a remote."""

from collections.abc import AsyncIterator
from typing import Any, Protocol, cast

from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import operation_not_found
from operations.specs import OperationHandler, OperationSpec, OperationType, SubscriptionHandler


class Remote(Protocol):
    """Another place, where an operation without a handler here can run."""

    async def call(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> ResponseEnvelope[Any]:
        """Run a query or mutation there.

        Raises:
            CallError: As the operation gave it, or `UNAVAILABLE`.
        """
        ...

    def subscribe(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> AsyncIterator[ResponseEnvelope[Any]]:
        """Open a subscription there."""
        ...


def forward(spec: OperationSpec, remote: Remote | None) -> OperationHandler | SubscriptionHandler:
    """Return a handler for an operation that has none here: it calls the remote, if there is one."""
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
