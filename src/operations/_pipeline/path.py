"""The path of a query or mutation.

`invoke` runs a call without deadline, middleware or observers, with little overhead. `run` adds those.
"""

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from copy import copy
from time import perf_counter, time
from types import CoroutineType
from typing import Any, NoReturn, cast

from msgspec import msgpack

from operations._json import JSONValueError, as_json
from operations._pipeline.lenient import convert_input
from operations._pipeline.outcome import ENVELOPES, CallSeries, Envelope, is_large, of_middleware
from operations._pipeline.plan import Call, Next, PipelineHost, Plan
from operations.access import AccessDeniedError, access_denied
from operations.context import CLOSED, OperationContext
from operations.envelopes import LocalResponseMeta, MCPResponseMeta, ResponseEnvelope, add_changes
from operations.errors import CallError, ErrorCode, map_error, timed_out, timeout_error
from operations.observe import CallFinished, CallStarted, CallYielded, add_counts, now
from operations.schema import Change, validate_or_raise

_pack = msgpack.Encoder().encode

_LONG_AGO = 1e11
"""A time in 1973, in milliseconds since the epoch. An earlier deadline was probably given in seconds."""

GRACE = 0.05
"""Seconds that a cancelled handler has to clean up before its caller stops waiting."""


def enter(plan: Plan, context: OperationContext) -> None:
    """Raise an error unless the caller, or the calling operation, may call this operation. Uses no budget."""
    if plan.is_inner or has_authority(plan, context):
        return
    permits, identity = plan.permits, context.identity
    grant = None if identity is None else identity.grant
    is_covered = grant is None or not plan.operation.needs_grant or grant.covers(plan.id)
    if not is_covered or (permits is not None and not permits(identity)):
        raise access_denied(plan.id)


def has_authority(plan: Plan, context: OperationContext) -> bool:
    """Return whether the access of the caller need not be checked."""
    if context.trusted:
        return True
    # The authority is valid for one operation: a handler that forwards its own context gains no other access.
    return context.authority is not None and context.authority[1] == plan.id


async def guard(plan: Plan, value: Any, context: OperationContext) -> tuple[Any, OperationContext]:
    """Make the checks that depend on the final input; return the input and the context for the handler.

    Raises:
        CallError: `ACCESS_DENIED`, `APPROVAL_REQUIRED`, `RESOURCE_EXHAUSTED` if a budget is exhausted, or `UNAVAILABLE`
            if the store cannot be read.
    """
    if plan.is_inner:
        return value, context
    identity, permits_input = context.identity, plan.permits_input
    grant = None if identity is None or not plan.operation.needs_grant else identity.grant
    try:
        if not has_authority(plan, context):
            if permits_input is not None and not permits_input(identity, value):
                raise access_denied(plan.id)
            if grant is not None and not grant.accepts(plan.id, value):
                raise access_denied(plan.id)
        if plan.admits or (grant is not None and grant.is_limited):
            value = await plan.host.authority.admit(plan.operation, plan.digest, value, context)
    except BaseException as error:
        ledger = plan.host.authority.ledger
        if ledger is not None:
            ledger.end(plan.id, context, code_of(error, context) or "", rejected=True)
        raise
    return value, context if context.reach is plan.reach else context.changed(reach=plan.reach)


async def authorize(plan: Plan, value: Any, context: OperationContext) -> None:
    """Check a call as `invoke` does, without running it.

    Raises:
        CallError: As the call would.
    """
    enter(plan, context)
    plan, value = admit(plan, value, context)
    await guard(plan, value, context)


async def _guarded(plan: Plan, value: Any, context: OperationContext) -> Any:
    value, inner = await guard(plan, value, context)
    with recorded(plan, context):
        result = plan.handler(value, inner)
        return await result if inspect.isawaitable(result) else result


@contextmanager
def recorded(plan: Plan, context: OperationContext) -> Generator[None]:
    """Record how a handler ended, if there is a ledger."""
    ledger = None if plan.is_inner else plan.host.authority.ledger
    if ledger is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        left = isinstance(error, GeneratorExit)
        ledger.end(plan.id, context, "ok" if left else code_of(error, context) or "")
        raise
    ledger.end(plan.id, context, "ok")


def admit(plan: Plan, value: Any, context: OperationContext) -> tuple[Plan, Any]:
    """Return the plan to run and the validated input as plain JSON.

    Missing input becomes an empty object if that is valid.

    The input of a lenient call may be converted; its plan then adds the changes to the result.

    Raises:
        CallError: `VALIDATION_ERROR`, with the path and reason of every failure.
    """
    files = plan.operation.files
    held = None if files is None else files.hold(value)
    if held is not None:
        value = held.value
    try:
        plain = as_json(value)
        if plan.accepts(plain):
            return plan, plain if held is None else held.restore(plain)
        if plain is None and plan.accepts({}):
            return plan, {}
        if context.lenient:
            converted = convert_input(plan.spec.input_schema.compile(), plain)
            if converted is not None:
                plain = converted.value
                plan = _noting(plan, converted.changes)
                return plan, plain if held is None else held.restore(plain)
    except JSONValueError:
        pass  # reported below with its path
    validate_or_raise(plan.spec.input_schema, value, subject=f"input of {plan.id}")
    raise CallError(ErrorCode.VALIDATION_ERROR, f"Invalid input of {plan.id}: it is not JSON")


def _noting(plan: Plan, changes: Sequence[Change]) -> Plan:
    """Return a plan for one call that adds `changes` to its first envelope."""
    noting, finish, waiting = copy(plan), plan.finish, [changes]

    def noted(result: Any) -> Envelope:
        envelope = finish(result)
        if not waiting:
            return envelope
        return ResponseEnvelope(envelope.data, add_changes(envelope.meta, waiting.pop()))

    noting.finish = noted
    return noting


async def invoke(
    plan: Plan, value: Any, context: OperationContext, series: CallSeries | None = None
) -> Envelope:
    """Run a query or mutation, return its envelope, and count it in `series`."""
    began = 0.0
    if series is not None:
        series.started += 1
        if series.times_all or context.channel is not CLOSED:
            began = perf_counter()
    try:
        # Check access before validation, so that a caller without access learns nothing about the input.
        permits, identity = plan.permits, context.identity
        grant = None if identity is None else identity.grant
        if grant is not None or (
            permits is not None and not context.trusted and not permits(identity)
        ):
            enter(plan, context)
        flat = plan.flat
        if flat is None:
            plan, value = admit(plan, value, context)
        else:
            try:
                # Validate and convert to plain JSON in C, which removes unknown properties.
                plain = flat(_pack(value))
                if len(plain) == len(value):
                    value = plain
                else:
                    plan, value = admit(plan, value, context)
            except CallError:
                raise
            except Exception:  # noqa: BLE001 - the general way explains any error
                plan, value = admit(plan, value, context)
        if (
            plan.is_plain
            and context.reach is None
            and (grant is None or (not grant.is_limited and grant.accepts(plan.id, value)))
        ):
            result: Any = plan.handler(value, context)
        else:
            result = _guarded(plan, value, context)
        # A plain function that does not block may return a result or an awaitable.
        if type(result) is CoroutineType or inspect.isawaitable(result):
            result = await result  # pyright: ignore[reportUnknownVariableType]
        if type(result) in ENVELOPES and is_large(result):  # pyright: ignore[reportUnknownArgumentType]
            envelope = await asyncio.to_thread(plan.finish, result)
        else:
            envelope = plan.finish(result)
        if series is not None:
            meta = envelope.meta
            if type(meta) is not LocalResponseMeta or meta.changes:
                _count(series, envelope, context, began)
            elif began:
                series.finish(None, perf_counter() - began)
            else:
                series.untimed += 1
    except BaseException as error:  # noqa: BLE001 - rule 2
        failure = error
    else:
        return envelope
    try:
        fail(plan, context, failure)
    except BaseException as error:
        if series is not None:
            series.finish(code_of(error, context), perf_counter() - began if began else None)
        raise
    finally:
        del failure  # it refers to this frame


def _count(series: CallSeries, envelope: Envelope, context: OperationContext, began: float) -> None:
    series.finish(code_of(envelope, context), perf_counter() - began if began else None)
    if envelope.meta.changes:
        series.add_changes(changed(envelope))


def fail(plan: Plan, context: OperationContext, error: BaseException) -> NoReturn:
    """Raise the `CallError` for `error`.

    Called outside the `except` block, so that the error is not chained to itself.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error
    cancellation = _cancellation(error)
    if cancellation is not None:
        context.abort_nested()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # Also if the handler's cleanup raised another exception.
            raise cancellation
    if isinstance(error, AccessDeniedError) and error.operation_id != plan.id:
        raise access_denied(plan.id, nested=True) from error
    if isinstance(error, CallError):
        raise error
    if isinstance(error, asyncio.CancelledError):
        # The caller did not cancel: the handler awaited a task that was cancelled.
        raise CallError(ErrorCode.ABORTED, f"{plan.id} was cancelled from within") from error
    if isinstance(error, JSONValueError):
        raise CallError(
            ErrorCode.EXECUTION_ERROR,
            f"{plan.id} returned a value that is not JSON: {error}",
            {"path": error.path, "reason": error.reason},
        ) from error
    raise map_error(error, plan.spec.error_schemas) from error


def _cancellation(error: BaseException | None) -> asyncio.CancelledError | None:
    """Return `error`, or the exception that it was raised from, if that is a cancellation not caused by the caller."""
    seen = {id(sys.exception())}
    while error is not None and id(error) not in seen:
        if isinstance(error, asyncio.CancelledError):
            return error
        seen.add(id(error))
        error = error.__context__
    return None


async def run(plan: Plan, value: Any, context: OperationContext) -> Envelope:
    """Run `invoke` with observers, the deadline and middleware."""
    host = plan.host
    path: Coroutine[Any, Any, Envelope] = (
        _through(plan, value, context) if host.middleware else invoke(plan, value, context)
    )
    if context.deadline is not None and context.must_be_timed:
        path = _timed(context.deadline, path, plan, context)
    if not host.observed and host.counters is None:
        return await path
    finished = report_start(host, plan.id, context)
    try:
        envelope = await path
    except BaseException as error:
        finished(error)
        raise
    finished(envelope)
    return envelope


async def _through(plan: Plan, value: Any, context: OperationContext) -> Envelope:
    """Run the middleware, outermost first, if the caller has access."""
    enter(plan, context)

    def step(index: int) -> Next:
        async def call_next(call: Call) -> Envelope:
            if index == len(plan.host.middleware):
                return await invoke(plan, call.input, call.context)
            return of_middleware(await plan.host.middleware[index](call, step(index + 1)))

        return call_next

    try:
        return await step(0)(Call(plan.spec, value, context))
    except BaseException as error:  # noqa: BLE001 - rule 2
        failure = error
    try:
        fail(plan, context, failure)
    finally:
        del failure  # it refers to this frame


async def _timed(
    deadline: float, path: Coroutine[Any, Any, Envelope], plan: Plan, context: OperationContext
) -> Envelope:
    """Run the path in its own task, so that it can be abandoned at the deadline."""
    limit = context.limit
    seconds = deadline / 1000 - time() if limit is None else limit.remaining
    if seconds <= 0:
        path.close()
        hint = "" if deadline > _LONG_AGO else "; a deadline is in milliseconds since the epoch"
        message = f"{plan.id} was not started: its time had run out{hint}"
        raise timeout_error(message, deadline)
    task = asyncio.create_task(path)
    return cast("Envelope", await before(deadline, seconds, task, task, plan, context))


async def before(
    deadline: float,
    seconds: float,
    result: "asyncio.Future[Any]",
    work: "asyncio.Task[Any]",
    plan: Plan,
    context: OperationContext,
) -> Any:
    """Await the result of `work`, or raise `TIMEOUT` at the deadline even if the work ignores cancellation.

    `seconds` is the time limit of the whole call, for the message.
    """
    loop = asyncio.get_running_loop()
    # Like asyncio.wait with FIRST_COMPLETED and a timeout, at half the cost.
    woken: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    limit = context.limit
    left = deadline / 1000 - time() if limit is None else limit.remaining
    timer = loop.call_later(max(0, left), wake)
    work.add_done_callback(wake)
    if result is not work:
        result.add_done_callback(wake)
    try:
        await woken
        while limit is not None and not (result.done() or work.done()) and limit.remaining > 0:
            # The deadline was extended.
            woken = loop.create_future()
            timer = loop.call_later(limit.remaining, wake)
            await woken
    except asyncio.CancelledError:
        await stop(work, plan, context)
        raise
    finally:
        timer.cancel()
        work.remove_done_callback(wake)
    if result.done() and not result.cancelled():
        return result.result()
    if work.done():
        # Cancelled neither by this function nor by the caller.
        raise CallError(ErrorCode.ABORTED, f"{plan.id} was cancelled from within")
    await stop(work, plan, context)
    raise timed_out(plan.id, seconds, deadline=deadline)


async def stop(work: "asyncio.Task[Any]", plan: Plan, context: OperationContext) -> None:
    """Cancel `work` and its nested calls. Wait briefly; the registry tracks work that is still running."""
    if not work.cancelling():
        # Cancel only once: a second cancellation would interrupt the cleanup.
        work.cancel()
    context.abort_nested()
    plan.host.keep(work)
    await asyncio.wait({work}, timeout=GRACE)


# ------------------------------------------------------------ reports to observers

_APART = 10
"""Tolerance in milliseconds between the timer of a channel and the clock."""


def report_refusal(
    host: PipelineHost, operation_id: str, context: OperationContext, error: CallError
) -> None:
    """Report and count a call that failed before it was prepared."""
    if host.observed or host.counters is not None:
        report_start(host, operation_id, context)(error)


def report_start(
    host: PipelineHost, operation_id: str, context: OperationContext
) -> Callable[[BaseException | ResponseEnvelope[Any] | None], None]:
    """Report and count the start of a call.

    Call the returned function at its end, with the error, the result, or None.
    """
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
    """Return the error code for the outcome of a call; None for success."""
    if isinstance(end, BaseException):
        return end.code if isinstance(end, CallError) else _code_of_end(context)
    if end is not None and isinstance(end.meta, MCPResponseMeta) and end.meta.is_error:
        return str(ErrorCode.EXECUTION_ERROR)
    return None


def _code_of_end(context: OperationContext) -> str:
    """Return the code for a cancelled call: `TIMEOUT` if its channel cancelled it at the deadline."""
    deadline = context.deadline if context.limit is None else context.limit.deadline
    is_over = deadline is not None and now() >= deadline - _APART
    return str(ErrorCode.TIMEOUT if is_over else ErrorCode.ABORTED)


def changed(envelope: ResponseEnvelope[Any]) -> dict[str, int] | None:
    """Return the number of values in a result that normalisation changed, by kind; None if it changed none."""
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
