"""Calls that end with their deadline."""

import asyncio
from collections.abc import (
    Callable,
    Coroutine,
)
from typing import Any

from operations.base.deadline import Alarm, alarm_in
from operations.base.errors import (
    CallError,
    cancelled_elsewhere,
    timed_out,
)
from operations.contract.context import OperationContext
from operations.registry.plan import CallPlan


def alarm_of(context: OperationContext, seconds: float) -> Alarm:
    """Return an alarm for the deadline of a call, which ends in this many seconds unless its limit is extended."""
    limit = context.limit
    if limit is None:
        return alarm_in(seconds)
    return alarm_in(limit.next_check, lambda: limit.next_check if limit.remaining > 0 else 0.0)


async def within(
    seconds: float,
    plan: CallPlan,
    context: OperationContext,
    function: Callable[..., Coroutine[Any, Any, Any]],
    *args: Any,
) -> Any:
    """Await `function(*args)` in its own task, or raise `TIMEOUT` at the deadline even if it ignores cancellation.

    `seconds` is the time limit of the whole call.
    """
    alarm = alarm_of(context, seconds)
    task = asyncio.Task(_ringing(alarm, function, *args))
    # As `before`, which would be another coroutine for nearly every call of an entry point.
    try:
        await alarm.woken
    except asyncio.CancelledError:
        await plan.services.stop(task, context)
        raise
    finally:
        alarm.remove()
    if task.done() and not task.cancelled():
        return task.result()
    raise await _missed(seconds, task, plan, context)


async def _ringing(
    alarm: Alarm, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any
) -> Any:
    """Await `function(*args)` and ring the alarm in the same step, which saves an iteration of the event loop."""
    try:
        return await function(*args)
    finally:
        alarm.ring()


async def before(
    alarm: Alarm,
    seconds: float,
    result: "asyncio.Future[Any]",
    work: "asyncio.Task[Any]",
    plan: CallPlan,
    context: OperationContext,
) -> Any:
    """Await a result of `work`, which rings the alarm, or raise `TIMEOUT` at the deadline; see `within`."""
    try:
        await alarm.woken
    except asyncio.CancelledError:
        await plan.services.stop(work, context)
        raise
    finally:
        alarm.remove()
    if result.done() and not result.cancelled():
        return result.result()
    raise await _missed(seconds, work, plan, context)


async def _missed(
    seconds: float, work: "asyncio.Task[Any]", plan: CallPlan, context: OperationContext
) -> CallError:
    """Cancel work that has no result at its deadline; return the error for its caller."""
    if work.done():
        # Cancelled neither by this function nor by the caller.
        return cancelled_elsewhere(plan.id)
    await plan.services.stop(work, context)
    return timed_out(plan.id, seconds, deadline=context.deadline, operation_id=plan.id)
