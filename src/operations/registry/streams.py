"""The path of a subscription: the same steps, once for every item."""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Self, cast

from operations.base.deadline import Alarm
from operations.base.errors import CallError, ErrorCode, timed_out
from operations.base.time_limit import TimeLimit
from operations.contract.context import OperationContext
from operations.registry.middleware import Call, Envelope, NextStream
from operations.registry.path import (
    admitted,
    enter,
    guard,
    of_middleware,
    to_envelope,
)
from operations.registry.plan import CallPlan
from operations.registry.reports import fail, recorded, report_item, report_start
from operations.registry.timing import alarm_of, before

logger = logging.getLogger("operations")

_CLOSE_SECONDS = 1.0
"""Seconds that a handler has to end when its subscription is closed from another task."""


async def stream(
    prepared: Callable[[], Awaitable[tuple[CallPlan, OperationContext]]], value: Any
) -> AsyncGenerator[Envelope, None]:
    """Run a subscription with observers, the deadline and middleware: the same steps for every item."""
    plan, context = await prepared()
    services = plan.services
    items = (
        _stream_through(plan, value, context)
        if services.stream_middleware
        else _items(plan, value, context)
    )
    if context.deadline is not None and context.must_be_timed:
        items = _timed_items(context.deadline, items, plan, context)
    is_reported = services.observed or services.counters is not None
    finished = report_start(services, plan.id, context) if is_reported else None
    failure: BaseException | None = None
    index = 0
    try:
        async for envelope in items:
            if finished is not None:
                report_item(plan, context, index, envelope)
            index += 1
            yield envelope
    except GeneratorExit:
        # The consumer stopped iterating, which is a normal end.
        raise
    except BaseException as error:
        failure = error
        raise
    finally:
        context.abort_nested()
        try:
            await _close(items)
        finally:
            if finished is not None:
                finished(failure)


async def _items(
    plan: CallPlan, value: Any, context: OperationContext
) -> AsyncGenerator[Envelope, None]:
    iterator: AsyncIterator[Any] | None = None
    failure: BaseException | None = None
    try:
        enter(plan, context)
        plan, value = await admitted(plan, value, context)
        value, inner = await guard(plan, value, context)
        with recorded(plan, context):
            if inner.scope is not None:
                inner.scope.begin_stream()
            try:
                opened = plan.handler(value, inner)
                opened = await opened if inspect.isawaitable(opened) else opened
                if not hasattr(opened, "__aiter__"):
                    kind = type(opened).__name__
                    raise TypeError(
                        f"the handler of {plan.id} returned no async iterator, but {kind}"
                    )
                iterator = aiter(opened)
            except GeneratorExit as error:
                fail(plan, context, error)
            while True:
                try:
                    item = await anext(iterator)
                except StopAsyncIteration:
                    return
                except GeneratorExit as error:
                    # The handler raised it: a consumer that leaves raises it at `yield`.
                    fail(plan, context, error)
                yield await to_envelope(plan, item)
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - `fail` raises it
        failure = error
    finally:
        if iterator is not None:
            await _close(iterator)
    _fail(plan, context, failure)


async def _stream_through(
    plan: CallPlan, value: Any, context: OperationContext
) -> AsyncGenerator[Envelope, None]:
    """Run the stream middleware, outermost first."""
    enter(plan, context)
    middleware = plan.services.stream_middleware

    def step(index: int) -> NextStream:
        def call_next(call: Call) -> AsyncIterator[Envelope]:
            if index == len(middleware):
                return _items(plan, call.input, call.context)
            return middleware[index](call, step(index + 1))

        return call_next

    items = step(0)(Call(plan.spec, value, context))
    failure: BaseException | None = None
    try:
        async for item in items:
            yield of_middleware(item)
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - `fail` raises it
        failure = error
    finally:
        await _close(items)
    _fail(plan, context, failure)


def _fail(plan: CallPlan, context: OperationContext, failure: BaseException | None) -> None:
    try:
        if failure is not None:
            fail(plan, context, failure)
    finally:
        del failure


async def _timed_items(
    deadline: float,
    items: AsyncGenerator[Envelope, None],
    plan: CallPlan,
    context: OperationContext,
) -> AsyncGenerator[Envelope, None]:
    """Yield the items until the deadline.

    The whole stream runs in one task, because a handler may hold cancel scopes open across yields, and these belong to
    the task that opened them. The handler runs only when the consumer requests an item.
    """
    wanted: asyncio.Queue[tuple[asyncio.Future[Envelope | None], Alarm]] = asyncio.Queue()

    async def work() -> None:
        try:
            while True:
                answer, alarm = await wanted.get()
                try:
                    answer.set_result(await anext(items, None))
                except CallError as error:
                    answer.set_exception(error)
                    answer.exception()  # otherwise asyncio logs it if the reader has left
                    return
                finally:
                    alarm.ring()
        finally:
            # Closed in this task: a handler must close its resources in the task that opened them.
            await _close(items)

    worker = asyncio.Task(work())
    limit = context.limit
    if limit is None:
        # Measured with the monotonic clock, because the wall clock may be set.
        limit = TimeLimit(None, deadline=deadline)
        context = context.changed(limit=limit)
    seconds = limit.remaining
    try:
        while True:
            if limit.remaining <= 0:
                raise timed_out(plan.id, seconds, deadline=deadline, operation_id=plan.id)
            answer: asyncio.Future[Envelope | None] = asyncio.get_running_loop().create_future()
            alarm = alarm_of(context, seconds)
            wanted.put_nowait((answer, alarm))
            worker.add_done_callback(alarm.ring)
            try:
                envelope = await before(alarm, seconds, answer, worker, plan, context)
            finally:
                worker.remove_done_callback(alarm.ring)
            if envelope is None:
                return
            yield envelope
    finally:
        await plan.services.stop(worker, context)


async def _close(iterator: Any) -> None:
    """Close an async iterator if it has `aclose`. Errors are only logged, because the result has been delivered."""
    aclose = getattr(iterator, "aclose", None)
    if aclose is None:
        return
    try:
        await aclose()
    except Exception as error:  # noqa: BLE001 - a handler's cleanup may fail in any way it likes
        logger.warning("a stream did not close cleanly: %r", error)
    except BaseExceptionGroup as group:
        # A task group that was open across a yield wraps the exception that closes it.
        if group.split((Exception, GeneratorExit))[1] is not None:
            raise


class Subscription:
    """The envelopes of a subscription, as an async iterator.

    The handler ends when the consumer leaves the loop, calls `aclose` (from any task), is cancelled, or drops the last
    reference.
    """

    __slots__ = (
        "__weakref__", "_aborted", "_cancelled", "_closed", "_closing", "_interrupted", "_items", "_left", "_reader",
    )  # fmt: skip

    def __init__(self, items: AsyncGenerator[Envelope, None]) -> None:
        self._items = items
        self._reader: asyncio.Task[Any] | None = None
        self._left = asyncio.Event()
        self._cancelled = 0
        self._interrupted = False
        self._aborted: asyncio.Task[None] | None = None
        self._closing = False
        self._closed = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Envelope:
        if self._closing or self._aborted is not None:
            raise self._end()
        if self._reader is not None:
            raise RuntimeError("a subscription is read by one task at a time")
        reader = self._reader = cast("asyncio.Task[Any]", asyncio.current_task())
        self._cancelled = reader.cancelling()
        self._left.clear()
        try:
            return await anext(self._items)
        except asyncio.CancelledError:
            if self._interrupted and reader.cancelling() == self._cancelled + 1:
                raise self._end() from None
            raise
        finally:
            if self._interrupted:
                # Undo the cancellation in every case: it was meant for the handler, not for the reader.
                self._interrupted = False
                reader.uncancel()
            self._reader = None
            self._left.set()

    def _end(self) -> Exception:
        if self._aborted is None:
            return StopAsyncIteration()
        return CallError(ErrorCode.ABORTED, "the parent call has ended")

    def abort(self) -> None:
        """Abort the subscription and its handler. The reader receives `ABORTED`."""
        if self._aborted is None and not self._closing:
            self._aborted = asyncio.Task(self.aclose())

    async def aclose(self) -> None:
        """End the subscription and its handler. Calling this again is harmless.

        A handler that ignores cancellation is abandoned after a second.
        """
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            if self._reader is not None:
                if self._reader.cancelling() == self._cancelled:
                    self._interrupted = True
                    self._reader.cancel()
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._left.wait()
            await _close(self._items)
        except TimeoutError:
            logger.warning("a subscription's handler ignores that it was closed")
        finally:
            self._closed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()
