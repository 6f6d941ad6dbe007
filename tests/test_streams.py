"""Subscriptions: every item takes the same path, and the handler ends when the consumer stops in any way."""

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from time import time
from typing import Any

import pytest
from tests.limits import scaled, time_limit
from tests.support import single, soon

from operations import (
    AccessControl,
    Call,
    CallError,
    CallEvent,
    ErrorCode,
    OperationContext,
    OperationRegistry,
    OperationType,
    ResponseEnvelope,
    http_envelope,
    local_envelope,
    subscribe,
)
from operations.contract.events import CallFinished, CallStarted, CallYielded
from operations.registry.middleware import NextStream

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


class Source:
    """A subscription that records its start and end."""

    def __init__(self, *items: Any, endless: bool = False) -> None:
        self.items = items
        self.endless = endless
        self.waiting = asyncio.Event()
        self.closed = asyncio.Event()

    async def __call__(self, _input: Any, _context: OperationContext) -> AsyncIterator[Any]:
        try:
            for item in self.items:
                yield item
            if self.endless:
                self.waiting.set()
                await asyncio.Event().wait()
        finally:
            self.closed.set()


def streaming(handler: Any, **fields: Any) -> OperationRegistry:
    return single(handler, type=OperationType.SUBSCRIPTION, **fields)


async def collect(registry: OperationRegistry, *args: Any) -> list[Any]:
    return [envelope.data async for envelope in registry.subscribe("test.run", *args)]


async def error_of(registry: OperationRegistry, *args: Any) -> CallError:
    with pytest.raises(CallError) as caught:
        await collect(registry, *args)
    return caught.value


async def test_every_item_is_an_envelope_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    registry = streaming(Source({"n": 1, "x": 0}, {"n": "2"}), output_schema=NUMBER)

    envelopes = [envelope async for envelope in subscribe(registry, "test.run")]

    assert [envelope.data for envelope in envelopes] == [{"n": 1}, {"n": 2}]
    assert all(envelope.meta.source == "local" for envelope in envelopes)
    assert "/n" in caplog.text


async def test_yielded_envelopes_pass_through() -> None:
    item = http_envelope("x", status_code=200, headers={"event": "tick"}, content_type="")

    envelopes = [e async for e in streaming(Source(item)).subscribe("test.run")]

    assert envelopes == [item]


async def test_a_handler_may_be_a_coroutine_that_returns_an_iterator() -> None:
    async def handler(_input: Any, context: OperationContext) -> AsyncIterator[Any]:
        return Source(1, 2)(None, context)

    assert await collect(streaming(handler)) == [1, 2]


async def test_access_and_input_are_checked_when_the_stream_is_read() -> None:
    registry = streaming(
        Source(1), access_control=AccessControl(["x"]), input_schema={"type": "string"}
    )

    assert (await error_of(registry, "ok")).code == ErrorCode.ACCESS_DENIED
    trusted = OperationContext(trusted=True)
    assert (await error_of(registry, 7, trusted)).code == ErrorCode.VALIDATION_ERROR
    assert await collect(registry, "ok", trusted) == [1]


async def test_subscribing_to_another_type_raises_with_advice() -> None:
    async def handler(_input: Any, _context: OperationContext) -> int:
        return 1

    error = await error_of(single(handler))

    assert error.code == ErrorCode.VALIDATION_ERROR
    assert error.message.endswith(": use execute")
    with pytest.raises(CallError) as caught:
        await anext(OperationRegistry().subscribe("test.nope"))
    assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ValueError("boom"), ErrorCode.EXECUTION_ERROR),
        (CallError("CUSTOM", "mine"), "CUSTOM"),
        (asyncio.CancelledError(), ErrorCode.ABORTED),
    ],
)
async def test_a_failure_comes_after_the_items_before_it(raised: BaseException, code: str) -> None:
    async def handler(_input: Any, _context: OperationContext) -> AsyncIterator[int]:
        yield 1
        raise raised

    seen: list[Any] = []
    with pytest.raises(CallError) as caught:
        async for envelope in streaming(handler).subscribe("test.run"):
            seen.append(envelope.data)  # noqa: PERF401 - what came before the failure matters

    assert seen == [1]
    assert caught.value.code == code


async def test_an_item_that_is_not_json_ends_the_stream_with_an_error() -> None:
    assert (await error_of(streaming(Source(object())))).code == ErrorCode.EXECUTION_ERROR


async def test_a_handler_that_returns_no_iterator_is_an_error() -> None:
    # The annotation does not say it, so that it is found by the first call.
    async def handler(_input: Any, _context: OperationContext) -> Any:
        return 7

    assert (await error_of(streaming(handler))).code == ErrorCode.EXECUTION_ERROR


# ---------------------------------------------------------------------- leaving


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("deadline", [False, True])
async def test_leaving_the_loop_ends_the_handler(deadline: bool) -> None:
    """F22."""
    source = Source(1, 2, 3, endless=True)
    context = soon(60_000) if deadline else None
    stream = streaming(source).subscribe("test.run", None, context)

    async for envelope in stream:
        assert envelope.data == 1
        break
    del stream, envelope
    gc.collect()

    await asyncio.wait_for(source.closed.wait(), scaled(20))


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("deadline", [False, True])
async def test_a_stream_can_be_closed_from_another_task(deadline: bool) -> None:
    source = Source(1, endless=True)
    stream = streaming(source).subscribe("test.run", None, soon(60_000) if deadline else None)

    async def consume() -> list[Any]:
        return [envelope.data async for envelope in stream]

    consumer = asyncio.create_task(consume())
    await source.waiting.wait()
    await stream.aclose()

    assert await consumer == [1]
    assert source.closed.is_set()
    assert consumer.cancelling() == 0
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.requirement("R31")
@pytest.mark.parametrize("deadline", [False, True])
async def test_cancelling_the_consumer_ends_the_handler(deadline: bool) -> None:
    source = Source(endless=True)
    registry = streaming(source)
    consumer = asyncio.create_task(collect(registry, None, soon(60_000) if deadline else None))
    await source.waiting.wait()

    consumer.cancel()

    with pytest.raises(asyncio.CancelledError):
        await consumer
    await asyncio.wait_for(source.closed.wait(), scaled(20))
    await registry.aclose()


async def test_a_stream_is_a_context_manager() -> None:
    source = Source(1, endless=True)

    async with streaming(source).subscribe("test.run") as stream:
        assert (await anext(stream)).data == 1

    assert source.closed.is_set()


async def test_two_tasks_cannot_read_one_stream() -> None:
    source = Source(endless=True)
    async with streaming(source).subscribe("test.run") as stream:
        first = asyncio.create_task(anext(stream))
        await source.waiting.wait()
        with pytest.raises(RuntimeError, match="one task at a time"):
            await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await first


async def test_a_deadline_ends_a_stream_with_a_timeout() -> None:
    source = Source(1, endless=True)
    seen: list[Any] = []

    with pytest.raises(CallError) as caught:
        async for envelope in streaming(source).subscribe("test.run", None, soon(1000)):
            seen.append(envelope.data)  # noqa: PERF401

    assert (seen, caught.value.code) == ([1], ErrorCode.TIMEOUT)
    assert re.fullmatch(r"test\.run did not finish within (1|0\.\d+) s", caught.value.message)
    assert source.closed.is_set()


async def test_a_stream_with_a_deadline_runs_in_one_task_and_never_ahead() -> None:
    tasks: set[Any] = set()
    made: list[int] = []

    async def handler(_input: Any, _context: OperationContext) -> AsyncIterator[int]:
        async with asyncio.timeout(scaled(60)):
            for number in range(4):
                tasks.add(asyncio.current_task())
                made.append(number)
                yield number

    async for envelope in streaming(handler).subscribe("test.run", None, soon(60_000)):
        assert made[-1] == envelope.data

    assert len(tasks) == 1


async def test_an_error_within_the_deadline_is_raised() -> None:
    async def handler(_input: Any, _context: OperationContext) -> AsyncIterator[int]:
        yield 1
        raise ValueError("boom")

    error = await error_of(streaming(handler), None, soon(5000))
    assert error.code == ErrorCode.EXECUTION_ERROR


async def test_a_handler_that_cancels_its_own_task_does_not_cancel_its_consumer() -> None:
    async def handler(_input: Any, _context: OperationContext) -> AsyncIterator[int]:
        yield 1
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(0)

    assert (await error_of(streaming(handler), None, soon(5000))).code == ErrorCode.ABORTED


class Unclosable:
    """An iterator that cannot be closed, and one that fails to."""

    def __init__(self, close: Any = None) -> None:
        self.left = 2
        if close is not None:
            self.aclose = close

    def __aiter__(self) -> "Unclosable":
        return self

    async def __anext__(self) -> int:
        if not self.left:
            raise StopAsyncIteration
        self.left -= 1
        return self.left


async def test_an_iterator_need_not_be_closable() -> None:
    async def refuse() -> None:
        raise RuntimeError("busy")

    for iterator in (Unclosable(), Unclosable(refuse)):
        registry = streaming(lambda _input, _context, iterator=iterator: iterator)
        assert await collect(registry) == [1, 0]


# ---------------------------------------------------------------------- around it


async def test_stream_middleware_wraps_subscriptions() -> None:
    registry = streaming(Source(1, 2, 3))

    @registry.use
    async def every_other(call: Call, next: NextStream) -> AsyncIterator[ResponseEnvelope[Any]]:
        async for envelope in next(call):
            if envelope.data % 2:
                yield local_envelope(envelope.data * 10, call.spec.id)

    assert await collect(registry) == [10, 30]


async def test_stream_middleware_answers_with_envelopes_and_after_the_access_check() -> None:
    registry = streaming(Source(1), access_control=AccessControl(["x"]))

    class Wrong:
        async def __call__(self, call: Call, next: NextStream) -> AsyncIterator[Any]:
            yield 7

    registry.use(Wrong())

    assert (await error_of(registry)).code == ErrorCode.ACCESS_DENIED
    trusted = OperationContext(trusted=True)
    assert (await error_of(registry, None, trusted)).code == ErrorCode.EXECUTION_ERROR


async def test_observers_see_every_item_and_one_end() -> None:
    registry = streaming(Source(1, 2))
    events: list[CallEvent] = []
    registry.observe(events.append)

    await collect(registry)
    stream = registry.subscribe("test.run")
    await anext(stream)
    await stream.aclose()

    kinds = [type(event) for event in events]
    assert kinds == [
        *(CallStarted, CallYielded, CallYielded, CallFinished),
        *(CallStarted, CallYielded, CallFinished),
    ]
    assert [e.index for e in events if isinstance(e, CallYielded)] == [0, 1, 0]
    assert {e.code for e in events if isinstance(e, CallFinished)} == {None}


async def test_a_failing_stream_is_observed_with_its_code() -> None:
    registry = streaming(Source(object()))
    events: list[CallEvent] = []
    registry.observe(events.append)

    await error_of(registry)

    assert isinstance(events[-1], CallFinished)
    assert events[-1].code == ErrorCode.EXECUTION_ERROR


async def test_a_handler_can_subscribe_to_another_operation() -> None:
    registry = streaming(Source(1, 2))

    @registry.operation("test.sum", type="query")
    async def total(context: OperationContext) -> int:
        stream = context.env.subscribe("test.run")
        return sum([envelope.data async for envelope in stream])

    assert (await registry.execute("test.sum", {})).data == 3


# ---------------------------------------------------------------------- cleanup and failures


async def endless(_input: Any, _context: OperationContext) -> AsyncIterator[int]:
    while True:
        yield 1


@pytest.mark.requirement("F13")
@pytest.mark.parametrize(("step", "seconds"), [(3600, 60), (-3600, 0.5)])
async def test_a_stream_keeps_its_time_if_the_clock_is_set(
    step: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(_input: Any, _context: OperationContext) -> AsyncIterator[int]:
        yield 1
        for module in ("registry.plan", "registry.timing", "registry.streams", "base.time_limit"):
            set_clock = f"operations.{module}.time", lambda: time() + step
            monkeypatch.setattr(*set_clock, raising=False)
        yield 2
        if step < 0:
            await asyncio.Event().wait()
        yield 3

    stream, items = streaming(handler).subscribe("test.run", None, soon(seconds * 1000)), []
    with time_limit(20), suppress(CallError):
        async for envelope in stream:
            items.append(envelope.data)  # noqa: PERF401

    assert items == ([1, 2, 3] if step > 0 else [1, 2])


async def test_a_deadline_ends_a_stream_that_never_waits() -> None:
    assert (await error_of(streaming(endless), None, soon())).code == ErrorCode.TIMEOUT


async def test_an_expired_stream_is_not_started() -> None:
    source = Source(1)

    assert (await error_of(streaming(source), None, soon(-1))).code == ErrorCode.TIMEOUT
    assert not source.closed.is_set()


async def test_a_stream_with_a_deadline_is_cleaned_up_in_its_own_task() -> None:
    tasks: list[Any] = []

    async def handler(_input: Any, _context: OperationContext) -> AsyncIterator[int]:
        tasks.append(asyncio.current_task())
        try:
            yield 1
            yield 2
        finally:
            tasks.append(asyncio.current_task())

    stream = streaming(handler).subscribe("test.run", None, soon(60_000))
    await anext(stream)
    await stream.aclose()

    assert len(tasks) == 2
    assert tasks[0] is tasks[1]


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("swallow", [False, True])
async def test_closing_twice_at_once_never_cancels_the_consumer(swallow: bool) -> None:
    waiting = asyncio.Event()

    async def handler(_input: Any, _context: OperationContext) -> AsyncIterator[int]:
        yield 1
        try:
            waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            if not swallow:
                raise

    stream = streaming(handler).subscribe("test.run")

    async def consume() -> tuple[list[Any], int]:
        seen = [envelope.data async for envelope in stream]
        return seen, asyncio.current_task().cancelling()  # type: ignore[union-attr]

    consumer = asyncio.create_task(consume())
    await waiting.wait()
    await asyncio.gather(stream.aclose(), stream.aclose())

    assert await consumer == ([1], 0)


@pytest.mark.requirement("R33")
async def test_a_handler_that_ignores_cancellation_does_not_block_closing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waiting, release = asyncio.Event(), asyncio.Event()

    async def stubborn(_input: Any, _context: OperationContext) -> AsyncIterator[int]:
        while not release.is_set():
            waiting.set()
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        yield 1

    stream = streaming(stubborn).subscribe("test.run")
    consumer = asyncio.create_task(anext(stream))
    await waiting.wait()

    await asyncio.wait_for(stream.aclose(), scaled(20))

    assert "ignores" in caplog.text
    release.set()
    await asyncio.wait({consumer})


async def test_a_failing_cleanup_loses_neither_the_result_nor_the_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(_input: Any, _context: OperationContext) -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            raise ValueError("cleanup")

    registry = streaming(handler)
    events: list[CallEvent] = []
    registry.observe(events.append)
    stream = registry.subscribe("test.run")
    await anext(stream)

    await stream.aclose()

    assert isinstance(events[-1], CallFinished)
    assert "cleanup" in caplog.text


async def test_the_cleanup_of_a_nested_subscription_is_not_cut_short() -> None:
    registry = OperationRegistry()
    running, cleaned = asyncio.Event(), asyncio.Event()

    @registry.operation("test.ticks")
    async def ticks() -> AsyncIterator[int]:
        try:
            while True:
                await asyncio.sleep(0)
                running.set()
                yield 1
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            cleaned.set()

    @registry.operation("test.read")
    async def read(context: OperationContext) -> None:
        async for _ in context.env.subscribe("test.ticks"):
            pass

    with pytest.raises(CallError) as caught:
        await registry.execute("test.read", {}, soon(500))
    assert caught.value.code == ErrorCode.TIMEOUT
    await asyncio.wait_for(cleaned.wait(), scaled(20))

    for context in (None, soon(10_000)):
        running.clear()
        cleaned.clear()
        task = asyncio.create_task(registry.execute("test.read", {}, context))
        await running.wait()
        task.cancel()
        await asyncio.wait({task})
        await asyncio.wait_for(cleaned.wait(), scaled(20))


async def test_a_task_group_that_is_open_across_a_yield_closes_quietly() -> None:
    registry = OperationRegistry()
    ended = asyncio.Event()

    @registry.operation("test.grouped")
    async def grouped() -> AsyncIterator[int]:
        async def stay() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(stay())
            while True:
                await asyncio.sleep(0)
                yield 1

    async with registry.subscribe("test.grouped") as items:
        await anext(items)
    assert ended.is_set()


async def test_a_failure_after_the_caller_left_is_not_reported_as_lost() -> None:
    lost: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: lost.append(what))

    async def handler(_input: Any, _context: OperationContext) -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(0)
        raise ValueError("too late")

    for turns in range(12):
        items = single(handler, type=OperationType.SUBSCRIPTION).subscribe(
            "test.run", None, soon(5_000)
        )

        async def read(items: Any = items) -> None:
            async for _ in items:
                pass

        task = asyncio.create_task(read())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()
        del items, task
        gc.collect()
    assert lost == []
