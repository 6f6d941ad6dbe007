"""The path of a query or mutation, from its input to the caller's envelope.

`invoke` runs a call without deadline, middleware or observers, with little overhead. `run` adds those. `finisher`
turns the result into an envelope.

Rule 1: a value is an envelope only if it is a `ResponseEnvelope`. A mapping of the same shape is data.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from math import inf
from time import perf_counter, time, time_ns
from types import CoroutineType
from typing import Any, Final, cast

import msgspec
from msgspec.structs import replace

from operations.base.errors import CallError, ErrorCode, SchemaError, forward_error, timeout_error
from operations.base.json.objects import without_objects
from operations.base.json.values import (
    JSON_TYPES,
    MAX_DEPTH,
    TOO_LONG,
    JSONValueError,
    as_json,
    count_values,
    is_plain,
    nests_within,
    object_of,
    reject_masked,
    to_json,
    to_json_within,
)
from operations.base.text import printable
from operations.base.time_limit import TimeLimit
from operations.base.work import INLINE, BudgetSpentError, InlineWork, Work
from operations.contract.access import access_denied, has_delegated_authority
from operations.contract.channel import CLOSED
from operations.contract.context import OperationContext, RunScope
from operations.contract.envelopes import (
    MAX_CHANGES,
    DescribedEnvelope,
    LocalResponseMeta,
    MCPResponseMeta,
    ResponseEnvelope,
    TextContent,
    add_changes,
    local_envelope,
)
from operations.contract.specs import Operation, OperationSpec, OperationType, OutputPolicy
from operations.registry.checks import (
    completion,
    permits_form,
    permits_input,
    read_input,
    reads_input,
)
from operations.registry.counters import CallSeries
from operations.registry.lenient import convert_input, noting
from operations.registry.middleware import Call, Envelope, Next
from operations.registry.plan import CallPlan, Finisher
from operations.registry.reports import code_of, count_end, fail, recorded, report_start
from operations.registry.services import CallServices, ChangeLog
from operations.registry.timing import within
from operations.schema import (
    Change,
    CheckedInput,
    CompiledSchema,
    Normalise,
    Schema,
    ValidationIssue,
    as_json_within,
    invalid_json,
    mismatch_error,
    within_budget,
)

logger = logging.getLogger("operations")

_pack = msgspec.msgpack.Encoder().encode

_LONG = 50_000
"""An input of more bytes is validated in a thread: it may have as many values, each of which takes a step in Python."""

_LONG_AGO = 1e11
"""A time in 1973, in milliseconds since the epoch. An earlier deadline was probably given in seconds."""


class _Later:
    """The scope of a call that is only checked: it spends its approval and budget when it runs."""

    run = None
    is_admitted = True
    waited = 0.0


LATER: Final = cast("RunScope", _Later())


def enter(plan: CallPlan, context: OperationContext) -> None:
    """Raise an error unless the caller, or the calling operation, may call this operation. Uses no budget."""
    try:
        permits, identity = plan.permits, context.identity
        grant = None if identity is None else identity.grant
        is_covered = (
            grant is None
            or not plan.operation.needs_grant
            or grant.covers(plan.id, authority=plan.spec.authority)
        )
        is_permitted = (
            (is_covered and (permits is None or permits(identity)))
            or plan.is_inner
            or has_authority(plan, context)
        )
    except Exception as error:
        raise _denied(plan) from error
    if not is_permitted:
        raise _denied(plan)


def _denied(plan: CallPlan) -> CallError:
    error = access_denied(plan.id)
    error.operation_id = plan.id
    return error


def has_authority(plan: CallPlan, context: OperationContext) -> bool:
    """Return whether the access of the caller need not be checked."""
    if context.trusted:
        return True
    # The authority is valid for one operation: a handler that forwards its own context gains no other access.
    if context.authority is not None and context.authority[1] == plan.id:
        return True
    spec = plan.spec
    return has_delegated_authority(
        spec.access_control, context.identity, spec.id, authority=spec.authority
    )


async def guard(
    plan: CallPlan, value: Any, context: OperationContext
) -> tuple[Any, OperationContext]:
    """Make the checks that depend on the final input; return the input and the context for the handler.

    Raises:
        CallError: `ACCESS_DENIED`, `APPROVAL_REQUIRED`, `RESOURCE_EXHAUSTED` if a budget is exhausted, or `UNAVAILABLE`
            if the store cannot be read.
    """
    if plan.is_inner:
        return value, context
    identity, checked = context.identity, None
    grant = None if identity is None or not plan.operation.needs_grant else identity.grant
    try:
        as_caller = not has_authority(plan, context)
        complete = await completion(plan, grant, value, as_caller=as_caller)
        if as_caller and not permits_form(plan, grant, context, value, complete):
            raise _denied(plan)
        if reads_input(plan, grant, context, as_caller=as_caller):
            checked = await read_input(plan, value, context)
            value, form = checked.input, checked.form
            if as_caller and not permits_input(plan, grant, context, checked):
                raise _denied(plan)
            if isinstance(context.checked, str) and (
                form is None or form.digest != context.checked
            ):
                raise _denied(plan)
        # A grant may be revoked after its token was resolved, while a call or an agent runs.
        issuer = None if grant is None or not as_caller else grant.issuer
        if grant is not None and issuer is not None and await issuer.is_revoked(grant):
            raise _denied(plan)
        is_new = context.scope is None or not context.scope.is_admitted
        if is_new and (plan.admits or (grant is not None and grant.is_limited)):
            authority, recorder = plan.services.authority, plan.services.recorder
            value, used = await authority.admit(
                plan.operation, plan.digest, value, context, checked, complete
            )
            if recorder.gates:
                recorder.admitted(plan.id, value, context, used)
    except BaseException as error:
        recorder = plan.services.recorder
        if recorder.gates:
            recorder.rejected(plan.id, context, code_of(error, context) or "")
        raise
    # The next process checks and counts a forwarded call as the call that the grant covers.
    further = grant if grant is None or plan.operation.forwards else grant.further
    if identity is not None and further is not grant:
        context = context.changed(identity=replace(identity, grant=further))
    if context.reach is not plan.reach or context.checked is not checked:
        context = context.changed(reach=plan.reach, checked=checked)
    return value, context


async def authorize(plan: CallPlan, value: Any, context: OperationContext) -> Any:
    """Check a call as `invoke` does, without running it; return the input for its handler.

    Raises:
        CallError: As the call would.
    """
    try:
        enter(plan, context)
        plan, value = await admitted(plan, value, context)
        value, _ = await guard(plan, value, context)
    except CallError as error:
        forward_error(error)
        raise
    return value


async def permit(plan: CallPlan, value: Any, context: OperationContext) -> Any:
    """Check access, input and grant of a call that runs later; return its input. Uses no approval and no budget.

    Raises:
        CallError: As the call would.
    """
    enter(plan, context)
    plan, value = await admitted(plan, value, context)
    await guard(plan, value, context.changed(scope=LATER))
    return value


async def checked_input(plan: CallPlan, value: Any, context: OperationContext) -> CheckedInput:
    """Return what the handler would receive in a call, for the rules of a process that forwards it; run nothing.

    Raises:
        CallError: `ACCESS_DENIED` or `VALIDATION_ERROR`, as the call would.
    """
    enter(plan, context)
    plan, value = await admitted(plan, value, context)
    identity = context.identity
    grant = None if identity is None or not plan.operation.needs_grant else identity.grant
    is_permitted = has_authority(plan, context)
    if not is_permitted:
        complete = await completion(plan, grant, value, as_caller=True)
        if not permits_form(plan, grant, context, value, complete):
            raise _denied(plan)
    return await read_input(plan, value, context)


async def _guarded(plan: CallPlan, value: Any, context: OperationContext) -> Any:
    value, inner = await guard(plan, value, context)
    with recorded(plan, context) as results:
        if inner.scope is not None and not plan.is_inner:
            scope = await inner.scope.begin(plan.operation)
            inner = inner.changed(scope=scope, key=scope.key)
        result = plan.handler(value, inner)
        results.append(await result if inspect.isawaitable(result) else result)
    return results[0]


async def admitted(plan: CallPlan, value: Any, context: OperationContext) -> tuple[CallPlan, Any]:
    """Return the plan and the input as `admit` does: in a thread if validating the input needs much work.

    Raises:
        CallError: As `admit`; also if that needs more than the budget.
    """
    try:
        return admit(plan, value, context)
    except BudgetSpentError:
        return await _admit_in_thread(plan, value, context)


async def _admit_in_thread(
    plan: CallPlan, value: Any, context: OperationContext
) -> tuple[CallPlan, Any]:
    work = Work()
    try:
        return await asyncio.to_thread(admit, plan, value, context, work)
    except BudgetSpentError:
        issue = ValidationIssue("", "takes too much work to be validated", "budget")
        error = mismatch_error(ErrorCode.VALIDATION_ERROR, f"Invalid input of {plan.id}", [issue])
        error.operation_id = plan.id
        raise error from None
    finally:
        work.stop()


def admit(
    plan: CallPlan, value: Any, context: OperationContext, work: Work | None = None
) -> tuple[CallPlan, Any]:
    """Return the plan to run and the validated input as plain JSON.

    Missing input becomes an empty object if that is valid.
    An input that is not valid may be converted; the plan then adds the changes to the result.

    Args:
        plan: The operation.
        value: The input.
        context: The context of the call.
        work: The budget; by default that of the event loop.

    Raises:
        BudgetSpentError: If the budget does not suffice, or the event loop would need too long.
        CallError: `VALIDATION_ERROR`, with the path and reason of every failure.
    """
    size = _size_of(value)
    if work is None and (count_values(value, _LONG) if size is None else size) > _LONG:
        raise BudgetSpentError
    files = plan.operation.files
    held = None if files is None else files.hold(value)
    if held is not None:
        value, size = held.value, None
    failure: JSONValueError | None = None
    try:
        decoded = context.channel.decoded
        # Middleware may have changed the input.
        is_decoded = decoded and decoded.pop() is value and not plan.services.middleware
        if (
            nests_within(value, MAX_DEPTH)
            if is_decoded
            else size is not None and is_plain(value, MAX_DEPTH)
        ):
            plain = value
        else:
            plain, size = as_json(value), None
        if plain is not value:
            reject_masked(plain, value)
        is_accepted = plan.accepts(plain, work, size)
        if not is_accepted and plain is None and plan.accepts({}, work):
            return plan, {}
        if not is_accepted and plan.converts(context):
            converted = convert_input(plan.spec.input_schema.compile(), plain, work)
            if converted is not None:
                plain, plan, is_accepted = converted.value, noting(plan, converted.changes), True
        if is_accepted:
            return plan, plain if held is None else held.restore(plain)
    except JSONValueError as error:
        failure = error  # reported below, with its path
    schema = plan.spec.input_schema
    if value is None and object_of(schema.document).get("type") == "object":
        # Name the required properties.
        value = {}
    try:
        issues = schema.compile().errors(value, None if work is None else work.explaining())
        if issues:
            raise mismatch_error(ErrorCode.VALIDATION_ERROR, f"Invalid input of {plan.id}", issues)
        raise invalid_json(plan.id, failure or JSONValueError("is not JSON"))
    except CallError as error:
        error.operation_id = plan.id
        raise


def _size_of(value: Any) -> int | None:
    """Return an upper bound of the number of values in an input; None if it cannot be encoded.

    A value that can be encoded has no lone surrogates and no integers of more than 64 bits.
    """
    try:
        return len(_pack(value))
    except Exception:  # noqa: BLE001 - values that are not JSON are reported later
        return None


async def invoke(
    plan: CallPlan, value: Any, context: OperationContext, series: CallSeries | None = None
) -> Envelope:
    """Run a query or mutation, return its envelope, and count it in `series`."""
    began = 0.0
    if series is not None:
        series.started += 1
        if series.times_all or context.channel is not CLOSED:
            began = perf_counter()
    try:
        # Check access before validation, so that a caller without access learns nothing about the input.
        permits, identity, grant = plan.permits, context.identity, None
        try:
            grant = None if identity is None else identity.grant
            is_permitted = grant is None and (
                permits is None or context.trusted or permits(identity)
            )
        except Exception:  # noqa: BLE001 - `enter` raises the error
            is_permitted = False
        if not is_permitted:
            enter(plan, context)
        plain: Any = None
        is_whole = False
        if plan.flat is not None:
            try:
                # Validate and convert to plain JSON in C, which removes unknown properties.
                plain = plan.flat(_pack(value))
                is_whole = len(plain) == len(value)
            except Exception:  # noqa: BLE001, S110 - the general way explains any error
                pass
        if is_whole:
            value = plain
        else:
            try:
                plan, value = admit(plan, value, context)
            except BudgetSpentError:
                plan, value = await _admit_in_thread(plan, value, context)
        if (
            plan.is_plain
            and context.reach is None
            and context.checked is None
            and context.scope is None
            and (
                grant is None
                or (
                    not (plan.is_typed and grant.rules(plan.id).accepts)
                    and grant.is_enough(
                        plan.id, value, plan.completed, authority=plan.spec.authority
                    )
                )
            )
        ):
            result: Any = plan.handler(value, context)
        else:
            result = _guarded(plan, value, context)
        # A plain function that does not block may return a result or an awaitable.
        if type(result) is CoroutineType or inspect.isawaitable(result):
            result = await result  # pyright: ignore[reportUnknownVariableType]
        # As `to_envelope`, which would be another coroutine for every call.
        if type(result) is DescribedEnvelope and _is_large(result):  # pyright: ignore[reportUnknownArgumentType]
            envelope = await _finish_in_thread(plan, result)
        else:
            try:
                envelope = plan.finish(result)
            except BudgetSpentError:
                envelope = await _finish_in_thread(plan, result)
        if series is not None:
            meta = envelope.meta
            if type(meta) is not LocalResponseMeta or meta.changes:
                count_end(series, envelope, context, began)
            elif began:
                series.finish(None, perf_counter() - began)
            else:
                series.untimed += 1
    except BaseException as error:  # noqa: BLE001 - `fail` raises it
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


def run(plan: CallPlan, value: Any, context: OperationContext) -> Coroutine[Any, Any, Envelope]:
    """Run `invoke` with observers, the deadline and middleware."""
    services = plan.services
    if not services.observed and services.counters is None:
        return _run(plan, value, context)
    return _reported(plan, value, context)


def _run(plan: CallPlan, value: Any, context: OperationContext) -> Coroutine[Any, Any, Envelope]:
    if context.deadline is not None and context.must_be_timed:
        return timed(plan, value, context)
    return (_through if plan.services.middleware else invoke)(plan, value, context)


async def _reported(plan: CallPlan, value: Any, context: OperationContext) -> Envelope:
    finished = report_start(plan.services, plan.id, context)
    try:
        envelope = await _run(plan, value, context)
    except BaseException as error:
        finished(error)
        raise
    finished(envelope)
    return envelope


async def _through(plan: CallPlan, value: Any, context: OperationContext) -> Envelope:
    """Run the middleware, outermost first, if the caller has access."""
    enter(plan, context)
    middleware = plan.services.middleware

    def step(index: int) -> Next:
        async def call_next(call: Call) -> Envelope:
            if index == len(middleware):
                return await invoke(plan, call.input, call.context)
            return of_middleware(await middleware[index](call, step(index + 1)))

        return call_next

    try:
        return await step(0)(Call(plan.spec, value, context))
    except BaseException as error:  # noqa: BLE001 - `fail` raises it
        failure = error
    try:
        fail(plan, context, failure)
    finally:
        del failure  # it refers to this frame


async def timed(plan: CallPlan, value: Any, context: OperationContext) -> Envelope:
    """Run `invoke` with the deadline and middleware."""
    seconds = context.remaining
    if seconds != seconds:
        error = CallError(ErrorCode.VALIDATION_ERROR, f"{plan.id}: the deadline must be a number")
        error.operation_id = plan.id
        raise error
    if seconds <= 0:
        deadline = cast("float", context.deadline)
        hint = "" if deadline > _LONG_AGO else "; a deadline is in milliseconds since the epoch"
        message = f"{plan.id} was not started: its time had run out{hint}"
        raise timeout_error(message, deadline, operation_id=plan.id)
    path = _through if plan.services.middleware else invoke
    return cast("Envelope", await within(seconds, plan, context, path, plan, value, context))


def prepare(
    operation: Operation,
    services: CallServices,
    *,
    is_inner: bool = False,
    log: ChangeLog | None = None,
) -> CallPlan:
    """Return an operation ready for calls.

    Args:
        operation: The operation.
        services: What all calls of the registry share.
        is_inner: Whether another plan with the same id has already checked the caller.
        log: The log of its earlier plan.

    Raises:
        SchemaError: If its input schema cannot be used.
    """
    log = log or ChangeLog(operation.spec.id)
    finish = finisher(operation.spec, operation.output or services.output, log)
    plan = CallPlan(operation, services, finish, log, is_inner=is_inner)
    is_stream = operation.spec.type is OperationType.SUBSCRIPTION
    if operation.timeout is not None and not is_inner and not is_stream:
        plan.handler = _limited(plan, plan.handler, operation.timeout)
    return plan


def _limited(
    plan: CallPlan, handler: Callable[[Any, OperationContext], Any], seconds: float
) -> Callable[[Any, OperationContext], Any]:
    """Return a handler that ends after the operation's own time limit, which a caller can shorten but not extend."""

    async def call(value: Any, context: OperationContext) -> Any:
        result = handler(value, context)
        return await result if inspect.isawaitable(result) else result

    async def call_within(value: Any, context: OperationContext) -> Any:
        outer, own, given = context.limit, context.deadline, inf
        if outer is not None:
            own, given = None, outer.remaining
        elif own is not None:
            given = context.remaining
            if given <= seconds:
                # The caller's own deadline ends the call.
                return await call(value, context)
            # The clock may have been set since.
            own = (time() + given) * 1000
        limit = TimeLimit(seconds, deadline=own, outer=outer)
        context = context.changed(deadline=limit.deadline, limit=limit)
        return await within(min(seconds, given), plan, context, call, value, context)

    return call_within


_BITS = TOO_LONG.bit_length()

_ANY_BUT_TEXT = Schema({"type": ["object", "array", "number", "boolean", "null"]})
"""The schema of a JSON response that was declared without a schema: text is then a mismatch."""


def finisher(spec: OperationSpec, policy: OutputPolicy, log: ChangeLog) -> Finisher:
    """Return the function that turns a handler's result into the caller's envelope."""
    operation_id = spec.id
    compiled = None if policy == "off" else _compiled(operation_id, spec.output_schema)
    normalise = _normalise(operation_id, compiled, policy)
    certain = frozenset[type]() if compiled is None else compiled.certain
    containers = frozenset({dict}) if compiled is None else compiled.plan.open_containers

    def finish(result: Any, work: Work | None = None) -> Envelope:
        kind = type(result)  # pyright: ignore[reportUnknownVariableType]
        changes = None
        if kind in certain and (kind is not int or result.bit_length() < _BITS):
            data = result
        elif kind in containers:
            data = to_json_within(result, work)
        else:
            if kind is int:
                to_json(result)  # rejected if it has too many digits
            elif kind not in JSON_TYPES:
                if kind is DescribedEnvelope:
                    return _finish_described(result, operation_id, policy, log, work)
                if isinstance(result, ResponseEnvelope):
                    return pass_on(result, work)  # pyright: ignore[reportUnknownArgumentType]
                if isinstance(result, (bytes, bytearray, memoryview)):
                    return local_envelope(bytes(cast("bytes", result)), operation_id)
            data, changes = (
                normalise(result, None) if work is None else within_budget(normalise, result, work)
            )
        timestamp = time_ns() // 1_000_000
        if changes is None:
            # `local_envelope`, inlined: this is the last step of nearly every call.
            meta = LocalResponseMeta(operation_id=operation_id, timestamp=timestamp)
        else:
            log.note(changes)
            # As `add_changes`, without those of earlier hops.
            meta = LocalResponseMeta(
                operation_id=operation_id,
                timestamp=timestamp,
                changes=tuple(changes[:MAX_CHANGES]),
                changes_count=sum([change.count for change in changes]),
            )
        return ResponseEnvelope(data, meta)

    def pass_on(envelope: Envelope, work: Work | None) -> Envelope:
        """Return a handler's own envelope with its meta; normalise its data if there is a schema."""
        if isinstance(envelope.data, (bytes, bytearray, memoryview)) or (
            not isinstance(envelope.meta, LocalResponseMeta)
            and (compiled is None or _is_not_described(envelope))
        ):
            return proper(envelope, work)
        return _normalised(envelope, normalise, log, work)

    return finish


async def to_envelope(plan: CallPlan, result: Any) -> Envelope:
    """Turn the result of a handler into an envelope: in a thread if it needs much work.

    Raises:
        CallError: `RESOURCE_EXHAUSTED` if the result is too large to be converted to JSON.
    """
    if type(result) is not DescribedEnvelope or not _is_large(result):  # pyright: ignore[reportUnknownArgumentType]
        with suppress(BudgetSpentError):
            return plan.finish(result)
    return await _finish_in_thread(plan, result)


def _is_large(envelope: DescribedEnvelope[Any]) -> bool:
    """Return whether normalising the result of a service takes too long for the event loop."""
    if envelope.is_clean:
        return False
    schema, size = envelope.schema, envelope.size
    return (schema is not None and schema.casts_slowly) or (size is not None and size > INLINE)


async def _finish_in_thread(plan: CallPlan, result: Any) -> Envelope:
    """Turn a result that needs much work into an envelope, within the whole budget; stop when the caller leaves.

    Raises:
        CallError: `RESOURCE_EXHAUSTED` if the result is too large to be converted to JSON.
    """
    work = Work()
    try:
        return await asyncio.to_thread(plan.finish, result, work)
    except BudgetSpentError:
        message = f"{plan.id}: the result is too large to be converted to JSON"
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message) from None
    finally:
        work.stop()


def _finish_described(
    envelope: DescribedEnvelope[Any],
    operation_id: str,
    policy: OutputPolicy,
    log: ChangeLog,
    work: Work | None,
) -> Envelope:
    """Return a handler's envelope, normalised with its own schema."""
    plain, schema = ResponseEnvelope(envelope.data, envelope.meta), envelope.schema
    if envelope.is_clean:
        return plain
    if envelope.is_raw and (schema is None or schema.is_unknown):
        schema = _ANY_BUT_TEXT
    if schema is None or type(plain.data) is bytes:
        return proper(plain, work)
    if schema.casts_slowly:
        schema.begin_casts()
    # No policy replaces text that was received instead of JSON.
    used: OutputPolicy = "cast" if envelope.is_raw and policy == "create" else policy
    compiled = None if used == "off" else _compiled(operation_id, schema)
    if compiled is None:
        return proper(plain, work)
    return _normalised(plain, _normalise(operation_id, compiled, used), log, work)


def _normalised(
    envelope: Envelope, normalise: Normalise, log: ChangeLog, work: Work | None
) -> Envelope:
    """Return an envelope with its data normalised, and the changes added to its meta."""
    data, changes = (
        normalise(envelope.data, None)
        if work is None
        else within_budget(normalise, envelope.data, work)
    )
    if changes is None:
        return ResponseEnvelope(data, envelope.meta)
    log.note(changes)
    return ResponseEnvelope(data, add_changes(envelope.meta, changes))


def _is_not_described(envelope: Envelope) -> bool:
    """Return whether the output schema does not apply, because the data is an MCP error, text or content blocks."""
    meta = envelope.meta
    if not isinstance(meta, MCPResponseMeta):
        return False
    if meta.is_error or meta.structured_content is not None:
        return meta.is_error
    # If the only text block contains JSON, the adapter has decoded it, and the schema applies.
    texts = [block.text for block in meta.content if isinstance(block, TextContent)]
    plain = (texts[0], msgspec.to_builtins(meta.content)) if len(texts) == 1 else ()
    return not plain or envelope.data in plain


def of_middleware(result: object) -> Envelope:
    """Return the checked result of a middleware.

    Raises:
        TypeError: If it is not a `ResponseEnvelope`.
    """
    if not isinstance(result, ResponseEnvelope):
        raise TypeError(f"a middleware must return an envelope, not {type(result).__name__}")
    return proper(result)  # pyright: ignore[reportUnknownArgumentType]


def proper(envelope: Envelope, work: Work | None = None) -> Envelope:
    """Return an envelope that user code created, with its data converted to JSON or bytes.

    Raises:
        BudgetSpentError: If that takes more than the budget.
    """
    data: Any = envelope.data
    if type(data) is bytes:
        return envelope
    if isinstance(data, (bytes, bytearray, memoryview)):
        return ResponseEnvelope(bytes(cast("bytes", data)), envelope.meta)
    plain = as_json_within(data, work or InlineWork())
    return envelope if plain is data else ResponseEnvelope(plain, envelope.meta)


def _normalise(
    operation_id: str,
    compiled: CompiledSchema | None,
    policy: OutputPolicy,
) -> Normalise:
    """Return the function that converts a result to JSON and applies `policy`."""
    if compiled is None:
        return _convert
    if policy == "cast" or policy == "keep" or policy == "create":
        return compiled.normaliser(policy)

    def warn(value: Any, work: Work | None = None) -> tuple[Any, list[Change] | None]:
        work = work or InlineWork()
        data, _ = _convert(value, work)
        return data, None if compiled.fits(data, work) else compiled.mismatches(data, work)

    def refuse(value: Any, work: Work | None = None) -> tuple[Any, list[Change] | None]:
        is_last, work = work is not None, work or InlineWork()
        data, _ = _convert(value, work)
        try:
            issues = [] if compiled.fits(data, work) else compiled.errors(data)
        except BudgetSpentError:
            if not is_last:
                raise
            issues = [ValidationIssue("", "was not checked: budget", "budget")]
        if issues:
            raise CallError(
                ErrorCode.EXECUTION_ERROR,
                f"{operation_id} returned a result that does not match its output schema",
                {"errors": msgspec.to_builtins(issues)},
            )
        return data, None

    return refuse if policy == "strict" else warn


def _convert(value: Any, work: Work | None = None) -> tuple[Any, None]:
    """Convert a result to JSON, without a schema."""
    return to_json_within(without_objects(value, work), work), None


def _compiled(operation_id: str, schema: Schema) -> CompiledSchema | None:
    """Return the compiled schema; None if it is unknown or cannot be used."""
    try:
        return None if schema.is_unknown else schema.compile()
    except SchemaError as error:
        logger.warning("%s: the output schema is not used: %s", operation_id, printable(str(error)))
        return None
