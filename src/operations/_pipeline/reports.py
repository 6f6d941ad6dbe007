"""What observers are told of a call."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from operations._pipeline.plan import PipelineHost, Plan
from operations.context import CLOSED, OperationContext
from operations.envelopes import MCPResponseMeta, ResponseEnvelope
from operations.errors import CallError, ErrorCode
from operations.observe import CallFinished, CallStarted, CallYielded, add_counts, now

_APART = 10
"""Milliseconds by which a channel's timer may be ahead of the clock."""


def report_refusal(
    host: PipelineHost, operation_id: str, context: OperationContext, error: CallError
) -> None:
    """Report and count a call that never came as far as a plan."""
    if host.observed or host.counters is not None:
        report_start(host, operation_id, context)(error)


def report_start(
    host: PipelineHost, operation_id: str, context: OperationContext
) -> Callable[[BaseException | ResponseEnvelope[Any] | None], None]:
    """Report and count the start of a call; the returned function does so for its end: an error, a result, or None."""
    series = None if host.counters is None else host.counters.of(operation_id)
    if series is not None:
        series.started += 1
    began = perf_counter()
    if host.observed:
        _notify_start(host, operation_id, context)

    def finished(end: BaseException | ResponseEnvelope[Any] | None) -> None:
        duration = perf_counter() - began
        code = code_of(end, context)
        changes = None if end is None or isinstance(end, BaseException) else changed(end)
        if series is not None:
            is_timed = series.times_all or context.channel is not CLOSED
            series.finish(code, duration if is_timed else None)
            series.add_changes(changes)
        if host.observed:
            _notify_end(host, operation_id, context, code, duration, changes)

    return finished


def _notify_start(host: PipelineHost, operation_id: str, context: OperationContext) -> None:
    host.notify(
        CallStarted(
            request_id=context.request_id,
            operation_id=operation_id,
            timestamp=now(),
            parent_request_id=context.parent_request_id,
            identity_id=context.identity.id if context.identity is not None else None,
            authority=context.authority_id,
            traceparent=context.metadata.get("traceparent"),
            queued=context.channel.queued,
        )
    )


def _notify_end(
    host: PipelineHost,
    operation_id: str,
    context: OperationContext,
    code: str | None,
    duration: float,
    changes: dict[str, int] | None,
) -> None:
    host.notify(
        CallFinished(
            request_id=context.request_id,
            operation_id=operation_id,
            timestamp=now(),
            parent_request_id=context.parent_request_id,
            identity_id=context.identity.id if context.identity is not None else None,
            authority=context.authority_id,
            code=code,
            duration=duration,
            changes=changes,
        )
    )


def code_of(
    end: BaseException | ResponseEnvelope[Any] | None, context: OperationContext
) -> str | None:
    """Return the error code of a call's end; None for success."""
    if isinstance(end, BaseException):
        return end.code if isinstance(end, CallError) else _code_of_end(context)
    if end is not None and isinstance(end.meta, MCPResponseMeta) and end.meta.is_error:
        return str(ErrorCode.EXECUTION_ERROR)
    return None


def _code_of_end(context: OperationContext) -> str:
    """Why a call was cancelled: a channel that keeps the deadline does so when it is over."""
    deadline = context.deadline if context.limit is None else context.limit.deadline
    is_over = deadline is not None and now() >= deadline - _APART
    return str(ErrorCode.TIMEOUT if is_over else ErrorCode.ABORTED)


def changed(envelope: ResponseEnvelope[Any]) -> dict[str, int] | None:
    """Return how many values of a result normalisation changed, by kind; None for none."""
    changes = envelope.meta.changes
    if not changes:
        return None
    kinds: dict[str, int] = {}
    for change in changes:
        add_counts(kinds, {change.kind: change.count})
    return kinds


def report_item(
    plan: Plan, context: OperationContext, index: int, item: ResponseEnvelope[Any]
) -> None:
    """Report and count an item of a subscription."""
    changes = changed(item)
    if plan.series is not None:
        plan.series.items += 1
        plan.series.add_changes(changes)
    if plan.host.observed:
        plan.host.notify(
            CallYielded(
                request_id=context.request_id,
                operation_id=plan.id,
                timestamp=now(),
                index=index,
                changes=changes,
            )
        )
