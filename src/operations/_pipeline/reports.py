"""What observers are told of a call."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from operations._pipeline.plan import Plan, Surroundings
from operations.context import OperationContext
from operations.envelopes import MCPResponseMeta, ResponseEnvelope
from operations.errors import CallError, ErrorCode
from operations.observe import CallFinished, CallStarted, CallYielded, now

_APART = 10
"""Milliseconds by which a door's timer may be ahead of the clock."""


def report_refusal(
    around: Surroundings, operation_id: str, context: OperationContext, error: CallError
) -> None:
    """Report a call that never came as far as a plan."""
    if around.observed:
        report_start(around, operation_id, context)(error)


def report_start(
    around: Surroundings, operation_id: str, context: OperationContext
) -> Callable[[BaseException | ResponseEnvelope[Any] | None], None]:
    """Report the start of a call; the function given back reports its end: an error, a result, or neither."""
    identity_id = context.identity.id if context.identity is not None else None
    request_id = context.request_id
    began = perf_counter()
    around.notify(
        CallStarted(
            request_id=request_id,
            operation_id=operation_id,
            timestamp=now(),
            parent_request_id=context.parent_request_id,
            identity_id=identity_id,
            traceparent=context.metadata.get("traceparent"),
        )
    )

    def finished(end: BaseException | ResponseEnvelope[Any] | None) -> None:
        code = None
        if isinstance(end, BaseException):
            code = end.code if isinstance(end, CallError) else _code_of_end(context)
        elif end is not None and isinstance(end.meta, MCPResponseMeta) and end.meta.is_error:
            code = str(ErrorCode.EXECUTION_ERROR)
        around.notify(
            CallFinished(
                request_id=request_id,
                operation_id=operation_id,
                timestamp=now(),
                parent_request_id=context.parent_request_id,
                identity_id=identity_id,
                code=code,
                duration=perf_counter() - began,
            )
        )

    return finished


def _code_of_end(context: OperationContext) -> str:
    """Why a call was cancelled: a door that keeps the deadline does so when it is over."""
    is_over = context.deadline is not None and now() >= context.deadline - _APART
    return str(ErrorCode.TIMEOUT if is_over else ErrorCode.ABORTED)


def report_item(plan: Plan, context: OperationContext, index: int) -> None:
    plan.around.notify(
        CallYielded(
            request_id=context.request_id, operation_id=plan.id, timestamp=now(), index=index
        )
    )
