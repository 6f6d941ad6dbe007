"""Report calls: to observers and sinks, the counters, the log, and failures to the caller.

Rule 1: a call is reported when it starts and when it ends, also if it is rejected.
Rule 2: the caller sees no error of a nested call as if it were an error of its own call.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NoReturn, cast

from operations.base.errors import (
    CallError,
    ErrorCode,
    cancelled_elsewhere,
    json_details,
    map_error,
    nested_error,
)
from operations.base.json.values import JSONValueError
from operations.contract.channel import CLOSED
from operations.contract.context import OperationContext
from operations.contract.envelopes import MCPResponseMeta, ResponseEnvelope
from operations.contract.events import CallFinished, CallStarted, CallYielded, add_counts, now
from operations.contract.specs import OperationType
from operations.registry.counters import CallSeries
from operations.registry.middleware import Envelope
from operations.registry.plan import CallPlan
from operations.registry.services import CallServices

logger = logging.getLogger("operations")

_APART = 0.01
"""Tolerance in seconds between the timer of a channel and the clock."""


def report_refusal(
    services: CallServices, operation_id: str, context: OperationContext, error: CallError
) -> None:
    """Report and count a call that failed before it was prepared."""
    if services.observed or services.counters is not None:
        report_start(services, operation_id, context)(error)


def report_start(
    services: CallServices, operation_id: str, context: OperationContext
) -> Callable[[BaseException | ResponseEnvelope[Any] | None], None]:
    """Report and count the start of a call.

    Call the returned function at its end, with the error, the result, or None.
    """
    series = None if services.counters is None else services.counters.of(operation_id)
    if series is not None:
        series.started += 1
    began = perf_counter()
    if services.observed:
        identity, scope = context.identity, context.scope
        services.notify(
            CallStarted(
                **_facts(operation_id, context),
                grants=() if identity is None else identity.presented[1],
                traceparent=context.metadata.get("traceparent"),
                tracestate=context.metadata.get("tracestate"),
                queued=context.channel.queued,
                run=None if scope is None else scope.run_id,
                step=None if scope is None else scope.step_name,
                attempt=None if scope is None else scope.attempt,
            )
        )

    def finished(end: BaseException | ResponseEnvelope[Any] | None) -> None:
        duration = perf_counter() - began
        code = code_of(end, context)
        changes = None if end is None or isinstance(end, BaseException) else changed(end)
        if series is not None:
            is_timed = series.times_all or context.channel is not CLOSED
            series.finish(code, duration if is_timed else None)
            series.add_changes(changes)
        if services.observed:
            facts = _facts(operation_id, context)
            services.notify(CallFinished(**facts, code=code, duration=duration, changes=changes))

    return finished


def _facts(operation_id: str, context: OperationContext) -> dict[str, Any]:
    """Return the fields that the first and the last event of a call share."""
    identity = context.identity
    return {
        "request_id": context.request_id,
        "operation_id": operation_id,
        "timestamp": now(),
        "parent_request_id": context.parent_request_id,
        "identity_id": None if identity is None else identity.id,
        "issuer": None if identity is None else identity.issuer,
        "acting": () if identity is None else identity.presented[0],
        "authority": context.authority_id,
    }


def code_of(
    end: BaseException | ResponseEnvelope[Any] | None, context: OperationContext
) -> str | None:
    """Return the error code for the outcome of a call; None for success."""
    if isinstance(end, BaseException):
        return end.code if isinstance(end, CallError) else code_of_end(context)
    if end is not None and isinstance(end.meta, MCPResponseMeta) and end.meta.is_error:
        return str(ErrorCode.EXECUTION_ERROR)
    return None


def code_of_end(context: OperationContext) -> str:
    """Return the code for a cancelled call: `TIMEOUT` if its channel cancelled it at the deadline."""
    return str(ErrorCode.TIMEOUT if context.remaining <= _APART else ErrorCode.ABORTED)


def changed(envelope: ResponseEnvelope[Any]) -> dict[str, int] | None:
    """Return the number of values in a result that normalisation changed, by kind; None if it changed none."""
    kinds: dict[str, int] = {}
    for change in envelope.meta.changes:
        add_counts(kinds, {change.kind: change.count})
    return kinds or None


def report_item(
    plan: CallPlan, context: OperationContext, index: int, item: ResponseEnvelope[Any]
) -> None:
    """Report and count an item of a subscription."""
    changes = changed(item)
    if plan.series is not None:
        plan.series.items += 1
        plan.series.add_changes(changes)
    if plan.services.observed:
        plan.services.notify(
            CallYielded(
                request_id=context.request_id,
                operation_id=plan.id,
                timestamp=now(),
                index=index,
                changes=changes,
            )
        )


def fail(plan: CallPlan, context: OperationContext, error: BaseException) -> NoReturn:
    """Raise the `CallError` for `error`.

    Called outside the `except` block, so that the error is not chained to itself.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    if isinstance(error, GeneratorExit) and _is_closed(error):
        raise error
    cancellation = _cancellation(error)
    if cancellation is not None:
        context.abort_nested()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # Also if the handler's cleanup raised another exception.
            raise cancellation
    if isinstance(error, CallError):
        # Callers in this process see the same details as all others.
        error.details = json_details(error.details)
        outer = _outer_error(plan, context, error)
        error.parent_request_id = context.parent_request_id
        if outer is not None:
            raise outer from error
        raise error
    if isinstance(error, asyncio.CancelledError):
        # The caller did not cancel: the handler awaited a task that was cancelled.
        raise cancelled_elsewhere(plan.id) from error
    if isinstance(error, JSONValueError):
        raise CallError(
            ErrorCode.EXECUTION_ERROR,
            f"{plan.id} returned a value that is not JSON: {error}",
            {"path": error.path, "reason": error.reason},
        ) from error
    mapped = map_error(error, plan.spec.error_schemas)
    if mapped.unexpected:
        # For the log: the operation may be nested.
        mapped.operation_id = plan.id
    raise mapped from error


def _is_closed(error: GeneratorExit) -> bool:
    """Return whether `error` closes the coroutine of the call: its traceback then has no frame of a handler."""
    return error.__traceback__ is None or error.__traceback__.tb_next is None


def _outer_error(plan: CallPlan, context: OperationContext, error: CallError) -> CallError | None:
    """Return the error for the caller if `error` is that of a nested call; None if the caller may see it unchanged."""
    parent_id = error.parent_request_id
    is_nested = error.operation_id not in (None, plan.id) or (
        parent_id is not None and parent_id == context.request_id
    )
    return nested_error(plan.id, error) if is_nested else None


def _cancellation(error: BaseException | None) -> asyncio.CancelledError | None:
    """Return `error`, or the exception that it was raised from, if that is a cancellation not caused by the caller."""
    seen = {id(sys.exception())}
    while error is not None and id(error) not in seen:
        if isinstance(error, asyncio.CancelledError):
            return error
        seen.add(id(error))
        error = error.__context__
    return None


@contextmanager
def recorded(plan: CallPlan, context: OperationContext) -> Generator[list[Any]]:
    """Record how a handler ended, if a sink wants it. The block adds the result to the list that it receives."""
    recorder, results = plan.services.recorder, list[Any]()
    if plan.is_inner or not recorder.gates:
        yield results
        return
    try:
        yield results
    except BaseException as error:
        recorder.ended(plan.id, context, _outcome(plan, context, error))
        raise
    is_envelope = bool(results) and isinstance(results[0], ResponseEnvelope)
    end = cast("ResponseEnvelope[Any]", results[0]) if is_envelope else None
    recorder.ended(plan.id, context, code_of(end, context))


def _outcome(plan: CallPlan, context: OperationContext, error: BaseException) -> str | None:
    """Return the code that the caller receives for the exception of a handler."""
    if isinstance(error, GeneratorExit) and plan.spec.type is OperationType.SUBSCRIPTION:
        # The consumer left.
        return None
    if isinstance(error, CallError):
        error = _outer_error(plan, context, error) or error
    elif isinstance(error, (Exception, GeneratorExit)):
        error = map_error(error, plan.spec.error_schemas)
    return code_of(error, context) or ""


def count_end(
    series: CallSeries, envelope: Envelope, context: OperationContext, began: float
) -> None:
    """Count a call that ended with an error of its tool, or whose result was changed."""
    series.finish(code_of(envelope, context), perf_counter() - began if began else None)
    series.add_changes(changed(envelope))
