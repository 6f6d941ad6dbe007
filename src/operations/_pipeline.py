"""The one path a call takes, whichever door it came through.

    access -> validate -> handler -> detect | wrap -> normalise -> check

Rule 1: a step exists only here. `invoke` and `stream` differ in the middle step alone.
Rule 2: whatever goes wrong comes out as exactly one `CallError`; only `KeyboardInterrupt`, `SystemExit` and the
        caller's own cancellation pass through.
Rule 3: nothing changes in silence. A result that had to be repaired, or still does not fit, is logged with paths.
Rule 4: nothing here knows about transports, HTTP or MCP servers.

`invoke` is the path itself, lean enough for a call without deadline, middleware or observers to cost little more
than the handler. `run` puts those around it.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from time import perf_counter, time, time_ns
from typing import Any, NoReturn, Protocol, Self, TypeAlias, cast

import msgspec

from operations._json import JSONValueError, to_json
from operations._threads import ThreadPool
from operations.access import enforce_access
from operations.context import OperationContext
from operations.envelopes import (
    LocalResponseMeta,
    MCPResponseMeta,
    ResponseEnvelope,
    lift_envelope,
)
from operations.errors import CallError, ErrorCode, SchemaError, map_error
from operations.observe import (
    CallAbandoned,
    CallEvent,
    CallFinished,
    CallStarted,
    CallYielded,
)
from operations.schema import Repair, Schema, format_value_errors, validate_or_raise
from operations.specs import Operation, OperationSpec, OperationType, OutputPolicy

logger = logging.getLogger("operations")

GRACE = 0.05
"""Seconds a handler has to clean up after it was cancelled before its caller stops waiting for it."""

Envelope: TypeAlias = ResponseEnvelope[Any]


@dataclass(frozen=True, slots=True)
class Call:
    """What a middleware sees and may pass on changed: `dataclasses.replace(call, input=...)`."""

    spec: OperationSpec
    input: Any
    context: OperationContext


Next: TypeAlias = Callable[[Call], Awaitable[Envelope]]
NextStream: TypeAlias = Callable[[Call], AsyncIterator[Envelope]]
Middleware: TypeAlias = Callable[[Call, Next], Awaitable[Envelope]]
"""Around a query or mutation: `async def m(call, next): return await next(call)`."""

StreamMiddleware: TypeAlias = Callable[[Call, NextStream], AsyncIterator[Envelope]]
"""Around a subscription: an async generator over `next(call)`."""


class Surroundings(Protocol):
    """What the pipeline needs of the registry it runs in."""

    threads: ThreadPool
    output: OutputPolicy
    middleware: list[Middleware]
    stream_middleware: list[StreamMiddleware]

    @property
    def observed(self) -> bool:
        """Whether anybody wants events."""
        ...

    def notify(self, event: CallEvent) -> None:
        """Tell the observers."""
        ...

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Hold on to a cancelled task until it ends."""
        ...


# ------------------------------------------------------------------------------------------------ preparation


class Plan:
    """An operation made ready to run: schemas compiled, access looked at, handler kind known. Made once."""

    __slots__ = ("access", "around", "finish", "handler", "id", "is_valid", "operation", "spec")

    def __init__(self, operation: Operation, around: Surroundings) -> None:
        spec = operation.spec
        self.operation = operation
        self.spec = spec
        self.id = spec.id
        self.around = around
        self.access = None if spec.access_control.is_open else spec.access_control
        # Also where the schema says nothing: what is not JSON is refused all the same.
        self.is_valid = spec.input_schema.compile().is_valid
        self.finish = _finisher(spec, operation.output or around.output)
        self.handler = self._runnable()

    def _runnable(self) -> Callable[[Any, OperationContext], Any]:
        handler = self.operation.handler
        blocking = self.operation.blocking
        if blocking is None:
            blocking = is_blocking(handler)
        if not blocking or self.spec.type is OperationType.SUBSCRIPTION:
            return handler
        around = self.around

        async def in_thread(value: Any, context: OperationContext) -> Any:
            def abandoned() -> None:
                logger.warning("%s: the caller left, the handler's thread runs on", self.id)
                around.notify(
                    CallAbandoned(
                        request_id=context.request_id, operation_id=self.id, timestamp=_now()
                    )
                )

            result = await around.threads.run(handler, value, context, on_abandon=abandoned)
            # A plain function may hand over something to await.
            return await result if inspect.isawaitable(result) else result

        return in_thread


def is_blocking(handler: Callable[..., Any]) -> bool:
    """Whether `handler` is an ordinary function, which has to run in a thread."""
    target = inspect.unwrap(getattr(handler, "func", handler))
    return not any(
        is_kind(candidate)
        for candidate in (target, getattr(target, "__call__", None))  # noqa: B004 - its kind is the question
        for is_kind in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    )


# ------------------------------------------------------------------------------------------------ the way in


def _admit(plan: Plan, value: Any, context: OperationContext) -> Any:
    """Access, then validation: a caller that may not call learns nothing about the input.

    The value comes back as it is, but for none at all where an empty object would do.
    """
    if plan.access is not None and not context.trusted:
        enforce_access(plan.access, context.identity, operation_id=plan.id)
    try:
        if plan.is_valid(value):
            return value
    except ValueError:
        # Not JSON: explained below, with its place.
        pass
    if value is None and plan.is_valid({}):
        return {}
    return validate_or_raise(plan.spec.input_schema, value, subject=f"input of {plan.id}")


# ------------------------------------------------------------------------------------------------ the way out


Finisher: TypeAlias = Callable[[Any], Envelope]


def _finisher(spec: OperationSpec, policy: OutputPolicy) -> Finisher:
    """What turns a handler's result into the envelope its caller gets."""
    operation_id = spec.id
    normalise = _normaliser(spec, policy)
    is_known = not spec.output_schema.is_unknown and policy != "off"

    def finish(result: Any) -> Envelope:
        kind = type(result)
        if kind is ResponseEnvelope or (kind is dict and "meta" in result):
            envelope = lift_envelope(result)
            if envelope is not None:
                return _pass_on(envelope, normalise, is_known)
        data = result if kind is bytes else normalise(result)
        return ResponseEnvelope(
            data, LocalResponseMeta(operation_id=operation_id, timestamp=time_ns() // 1_000_000)
        )

    return finish


def _pass_on(envelope: Envelope, normalise: Callable[[Any], Any], is_known: bool) -> Envelope:
    """A handler's own envelope: the same meta, its data normalised where there is something to go by."""
    data, meta = envelope.data, envelope.meta
    if type(data) is bytes:
        return envelope
    if isinstance(meta, LocalResponseMeta):
        return ResponseEnvelope(normalise(data), meta)
    if not is_known:
        return envelope
    if isinstance(meta, MCPResponseMeta) and (meta.is_error or meta.structured_content is None):
        return envelope
    return ResponseEnvelope(normalise(data), meta)


def _normaliser(spec: OperationSpec, policy: OutputPolicy) -> Callable[[Any], Any]:
    """Makes a result JSON, and treats what does not fit the schema as `policy` says."""
    operation_id, schema = spec.id, spec.output_schema
    compiled = None if policy == "off" or schema.is_unknown else _compiled(operation_id, schema)
    if compiled is None:
        return to_json
    is_valid, cast_value = compiled.is_valid, compiled.normalise

    def fits(value: Any) -> bool:
        try:
            return is_valid(value)
        except ValueError:
            return False

    def repair(value: Any) -> Any:
        data, repairs = cast_value(value)
        if repairs is None:
            return data
        if repairs:
            _report_repairs(operation_id, repairs)
        if not fits(data):
            _report_misfit(operation_id, schema, data)
        return data

    def report(value: Any) -> Any:
        data = to_json(value)
        if not fits(data):
            _report_misfit(operation_id, schema, data)
        return data

    def refuse(value: Any) -> Any:
        data = to_json(value)
        if not fits(data):
            errors = schema.errors(data)
            raise CallError(
                ErrorCode.EXECUTION_ERROR,
                f"{operation_id} returned what its output schema does not allow",
                {"errors": [msgspec.to_builtins(error) for error in errors]},
            )
        return data

    return {"cast": repair, "warn": report, "strict": refuse}[policy]


def _compiled(operation_id: str, schema: Schema) -> Any:
    try:
        return schema.compile()
    except SchemaError as error:
        logger.warning("%s: the output schema is not used: %s", operation_id, error)
        return None


def _report_repairs(operation_id: str, repairs: Sequence[Repair]) -> None:
    logger.warning(
        "%s: the result was repaired to fit its schema:\n%s",
        operation_id,
        "\n".join(f"  {repair.path or '(root)'}: {repair.message}" for repair in repairs),
    )


def _report_misfit(operation_id: str, schema: Schema, data: Any) -> None:
    logger.warning(
        "%s: the result does not fit its schema:\n%s",
        operation_id,
        format_value_errors(schema.errors(data)),
    )


# ------------------------------------------------------------------------------------------------ the path


async def invoke(plan: Plan, value: Any, context: OperationContext) -> Envelope:
    """Run a query or mutation to its one envelope."""
    try:
        value = _admit(plan, value, context)
        return plan.finish(await plan.handler(value, context))
    except CallError:
        raise
    except BaseException as error:  # noqa: BLE001 - rule 2
        _fail(plan, context, error)


def _fail(plan: Plan, context: OperationContext, error: BaseException) -> NoReturn:
    """Raise the one error that stands for `error`."""
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error
    if isinstance(error, asyncio.CancelledError):
        context.abort_children()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise error
        # Not our caller's doing: the handler awaited something that was cancelled.
        raise CallError(ErrorCode.ABORTED, f"{plan.id} was cancelled from within") from error
    if isinstance(error, JSONValueError):
        raise CallError(
            ErrorCode.EXECUTION_ERROR,
            f"{plan.id} returned what is not JSON: {error}",
            {"path": error.path, "reason": error.reason},
        ) from error
    if isinstance(error, CallError):
        raise error
    raise map_error(error, plan.spec.error_schemas) from error


async def run(plan: Plan, value: Any, context: OperationContext) -> Envelope:
    """`invoke` with all that may stand around it: observers, the deadline, middleware."""
    around = plan.around
    path: Coroutine[Any, Any, Envelope] = (
        _through(plan, value, context) if around.middleware else invoke(plan, value, context)
    )
    if context.deadline is not None:
        path = _timed(context.deadline, path, plan, context)
    if not around.observed:
        return await path
    finished = _started(around, plan.id, context)
    try:
        envelope = await path
    except BaseException as error:
        finished(error)
        raise
    finished(None)
    return envelope


async def _through(plan: Plan, value: Any, context: OperationContext) -> Envelope:
    """The middleware, outermost first. A caller without access does not even reach them."""
    if plan.access is not None and not context.trusted:
        enforce_access(plan.access, context.identity, operation_id=plan.id)

    def step(index: int) -> Next:
        async def call_next(call: Call) -> Envelope:
            if index == len(plan.around.middleware):
                return await invoke(plan, call.input, call.context)
            result = await plan.around.middleware[index](call, step(index + 1))
            envelope = lift_envelope(result)
            if envelope is None:
                raise TypeError("a middleware returned something that is no envelope")
            return envelope

        return call_next

    try:
        return await step(0)(Call(plan.spec, value, context))
    except CallError:
        raise
    except BaseException as error:  # noqa: BLE001 - rule 2
        _fail(plan, context, error)


async def _timed(
    deadline: float, path: Coroutine[Any, Any, Envelope], plan: Plan, context: OperationContext
) -> Envelope:
    """The path in a task of its own, so that it can be left behind at the deadline."""
    if deadline / 1000 <= time():
        path.close()
        raise CallError(ErrorCode.TIMEOUT, f"{plan.id} was not started: its time had run out")
    task = asyncio.create_task(path)
    return cast("Envelope", await _before(deadline, task, task, plan, context))


async def _before(
    deadline: float,
    result: "asyncio.Future[Any]",
    work: "asyncio.Task[Any]",
    plan: Plan,
    context: OperationContext,
) -> Any:
    """`result`, which `work` is to bring, or `TIMEOUT` at the deadline even if the work ignores cancellation."""
    try:
        done, _ = await asyncio.wait({result}, timeout=max(0, deadline / 1000 - time()))
    except asyncio.CancelledError:
        await _stop(work, plan, context)
        raise
    if done:
        return result.result()
    await _stop(work, plan, context)
    raise CallError(ErrorCode.TIMEOUT, f"{plan.id} did not finish in time")


async def _stop(work: "asyncio.Task[Any]", plan: Plan, context: OperationContext) -> None:
    """Cancel `work` and its nested calls; give it a moment, and leave it to the registry if it needs more."""
    work.cancel()
    context.abort_children()
    plan.around.keep(work)
    await asyncio.wait({work}, timeout=GRACE)


# ------------------------------------------------------------------------------------------------ streams


async def stream(
    plan: Plan, value: Any, context: OperationContext
) -> AsyncGenerator[Envelope, None]:
    """A subscription with all that may stand around it: the same steps, once for every item."""
    around = plan.around
    items = (
        _stream_through(plan, value, context)
        if around.stream_middleware
        else _items(plan, value, context)
    )
    if context.deadline is not None:
        items = _timed_items(context.deadline, items, plan, context)
    finished = _started(around, plan.id, context) if around.observed else None
    failure: BaseException | None = None
    index = 0
    try:
        async for envelope in items:
            if finished is not None:
                _yielded(plan, context, index)
            index += 1
            yield envelope
    except GeneratorExit:
        # The consumer has had enough: an ordinary end.
        raise
    except BaseException as error:
        failure = error
        raise
    finally:
        context.abort_children()
        await _close(items)
        if finished is not None:
            finished(failure)


async def _items(
    plan: Plan, value: Any, context: OperationContext
) -> AsyncGenerator[Envelope, None]:
    iterator: AsyncIterator[Any] | None = None
    try:
        value = _admit(plan, value, context)
        opened = plan.handler(value, context)
        iterator = aiter(await opened if inspect.isawaitable(opened) else opened)
        while True:
            try:
                item = await anext(iterator)
            except StopAsyncIteration:
                return
            yield plan.finish(item)
    except (CallError, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - rule 2
        _fail(plan, context, error)
    finally:
        if iterator is not None:
            await _close(iterator)


async def _stream_through(
    plan: Plan, value: Any, context: OperationContext
) -> AsyncGenerator[Envelope, None]:
    """The stream middleware, outermost first."""
    if plan.access is not None and not context.trusted:
        enforce_access(plan.access, context.identity, operation_id=plan.id)

    def step(index: int) -> NextStream:
        def call_next(call: Call) -> AsyncIterator[Envelope]:
            if index == len(plan.around.stream_middleware):
                return _items(plan, call.input, call.context)
            return plan.around.stream_middleware[index](call, step(index + 1))

        return call_next

    items = step(0)(Call(plan.spec, value, context))
    try:
        async for item in items:
            envelope = lift_envelope(item)
            if envelope is None:
                raise TypeError("a middleware yielded something that is no envelope")
            yield envelope
    except (CallError, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - rule 2
        _fail(plan, context, error)
    finally:
        await _close(items)


async def _timed_items(
    deadline: float, items: AsyncGenerator[Envelope, None], plan: Plan, context: OperationContext
) -> AsyncGenerator[Envelope, None]:
    """The items, none later than the deadline.

    The whole stream runs in one task, because a handler may hold scopes open across its yields that belong to
    the task that opened them. It works on demand: the handler is never ahead of its consumer.
    """
    wanted: asyncio.Queue[asyncio.Future[Envelope]] = asyncio.Queue()

    async def work() -> None:
        while True:
            answer = await wanted.get()
            try:
                envelope = await anext(items)
            except StopAsyncIteration:
                answer.cancel()
                return
            except BaseException as error:
                if not answer.done():
                    answer.set_exception(error)
                raise
            answer.set_result(envelope)

    worker = asyncio.create_task(work())
    try:
        while True:
            answer: asyncio.Future[Envelope] = asyncio.get_running_loop().create_future()
            wanted.put_nowait(answer)
            try:
                yield cast("Envelope", await _before(deadline, answer, worker, plan, context))
            except asyncio.CancelledError:
                if answer.cancelled() and worker.done():
                    return
                raise
    finally:
        await _stop(worker, plan, context)
        await _close(items)


async def _close(iterator: Any) -> None:
    """End an async iterator that can be ended. One that is still busy, or fails, is not worth an error."""
    aclose = getattr(iterator, "aclose", None)
    if aclose is None:
        return
    try:
        await aclose()
    except (RuntimeError, StopAsyncIteration) as error:
        logger.debug("a stream did not close: %s", error)


# ------------------------------------------------------------------------------------------------ being seen


def _now() -> int:
    return time_ns() // 1_000_000


def report_refusal(
    around: Surroundings, operation_id: str, context: OperationContext, error: CallError
) -> None:
    """Report a call that never came as far as a plan."""
    if around.observed:
        _started(around, operation_id, context)(error)


def _started(
    around: Surroundings, operation_id: str, context: OperationContext
) -> Callable[[BaseException | None], None]:
    """Report the start of a call; the function given back reports its end."""
    identity_id = context.identity.id if context.identity is not None else None
    began = perf_counter()
    around.notify(
        CallStarted(
            request_id=context.request_id,
            operation_id=operation_id,
            timestamp=_now(),
            parent_request_id=context.parent_request_id,
            identity_id=identity_id,
        )
    )

    def finished(error: BaseException | None) -> None:
        code = None
        if error is not None:
            code = error.code if isinstance(error, CallError) else str(ErrorCode.ABORTED)
        around.notify(
            CallFinished(
                request_id=context.request_id,
                operation_id=operation_id,
                timestamp=_now(),
                parent_request_id=context.parent_request_id,
                identity_id=identity_id,
                code=code,
                duration=perf_counter() - began,
            )
        )

    return finished


def _yielded(plan: Plan, context: OperationContext, index: int) -> None:
    plan.around.notify(
        CallYielded(
            request_id=context.request_id, operation_id=plan.id, timestamp=_now(), index=index
        )
    )


class Subscription:
    """The envelopes of a subscription, one after another.

    Leaving the loop, `aclose` (from any task), cancelling the consumer or dropping the last reference all end
    the handler.
    """

    __slots__ = ("_closed", "_idle", "_items", "_reader")

    def __init__(self, items: AsyncGenerator[Envelope, None]) -> None:
        self._items = items
        self._reader: asyncio.Task[Any] | None = None
        self._idle = asyncio.Event()
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Envelope:
        if self._closed:
            raise StopAsyncIteration
        if self._reader is not None:
            raise RuntimeError("a subscription is read by one task at a time")
        reader = self._reader = cast("asyncio.Task[Any]", asyncio.current_task())
        self._idle.clear()
        try:
            return await anext(self._items)
        except asyncio.CancelledError:
            if self._closed and reader.uncancel() == 0:
                raise StopAsyncIteration from None
            raise
        finally:
            self._reader = None
            self._idle.set()

    async def aclose(self) -> None:
        """End the subscription and its handler; harmless when it has ended."""
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
            await self._idle.wait()
        await self._items.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()
