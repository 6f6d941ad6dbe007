"""An event loop in a thread of its own, for code that has none: scripts, notebooks, threads and WSGI applications.

Rule 1: a process has one such thread. It starts with the first call, and closes before the interpreter ends.
Rule 2: what a coroutine opens, it closes in the same task, because a cancel scope belongs to its task.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from contextvars import copy_context
from typing import Any, Generic, Protocol, Self, TypeVar, cast
from weakref import WeakSet, finalize

T = TypeVar("T")

_CLOSE_SECONDS = 5.0
"""Seconds that tasks have to end when the loop closes."""


def run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the event loop of another thread with the context variables of this one; return its result.

    If the wait is interrupted, by Ctrl-C for example, the coroutine is cancelled.
    """
    future = _start(loop, coroutine)
    try:
        return future.result()
    except CancelledError:
        # As in a task, so that one `except` handles both.
        raise asyncio.CancelledError from None
    except BaseException:
        future.cancel()
        raise


def _start(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
    """Start a coroutine on the event loop of another thread."""
    future = Future[T]()

    def start() -> None:
        task = asyncio.Task(coroutine)

        def finish(_: object) -> None:
            if task.cancelled():
                future.cancel()
            elif (error := task.exception()) is not None:
                if not future.cancelled():
                    future.set_exception(error)
            elif not future.cancelled():
                future.set_result(task.result())

        def cancel(done: "Future[T]") -> None:
            if done.cancelled():
                _call(loop, task.cancel)

        task.add_done_callback(finish)
        future.add_done_callback(cancel)

    try:
        loop.call_soon_threadsafe(start, context=copy_context())
    except RuntimeError:
        coroutine.close()
        raise
    return future


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    # If the loop is closed, its tasks have ended.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


class Closable(Protocol):
    """Owns connections."""

    async def aclose(self) -> None:
        """Close them."""
        ...


class LoopThread:
    """An event loop in a daemon thread, which starts when it is first used.

    Attributes:
        guests: What is closed with the loop, unless it is dropped earlier: connections cannot close without a loop.
    """

    def __init__(self) -> None:
        self.guests: WeakSet[Closable] = WeakSet()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop."""
        with self._lock:
            if self._loop is None or self._loop.is_closed():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name="operations loop", daemon=True
                )
                self._thread.start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            # What was handed over last begins: tasks that close something.
            loop.run_until_complete(asyncio.sleep(0))
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSE_SECONDS))
            loop.run_until_complete(self._close_guests())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _close_guests(self) -> None:
        guests = list(self.guests)
        self.guests.clear()
        if guests:
            closing = [asyncio.ensure_future(each.aclose()) for each in guests]
            await asyncio.wait(closing, timeout=_CLOSE_SECONDS)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for its result.

        Raises:
            RuntimeError: If this is called on the loop itself, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("this code runs on the event loop: use await")
        return run_on(self.loop, coroutine)

    def close(self) -> None:
        """Cancel all tasks, and close the loop. It starts again if it is used later."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            _call(loop, loop.stop)
            thread.join(2 * _CLOSE_SECONDS)

    def forget(self) -> None:
        """Start another thread when the loop is used again: a forked process does not have the one of its parent."""
        self._lock = threading.Lock()
        self._loop = self._thread = None
        # Their connections belong to the parent.
        self.guests = WeakSet()


class Held(Generic[T]):
    """An asynchronous context manager that stays open on a loop, in a task of its own.

    Attributes:
        value: What `async with` has returned.
    """

    value: T

    def __init__(self, loop: LoopThread, opened: AbstractAsyncContextManager[T]) -> None:
        self._loop = loop
        self._leaving: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self.value = loop.run(self._open(opened))

    async def _open(self, opened: AbstractAsyncContextManager[T]) -> T:
        ready: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._leaving = leaving = asyncio.Event()

        async def hold() -> None:
            try:
                async with opened as value:
                    ready.set_result(value)
                    await leaving.wait()
            except BaseException as error:
                if ready.done():
                    raise
                ready.set_exception(error)

        self._task = asyncio.Task(hold())
        try:
            return await ready
        except BaseException:
            self._task.cancel()
            raise

    def close(self) -> None:
        """Leave the context manager; raises its error, if leaving fails."""
        task, leaving = self._task, self._leaving
        if task is None or leaving is None:
            return
        self._task = None

        async def leave() -> None:
            leaving.set()
            await task

        if not task.get_loop().is_closed():
            self._loop.run(leave())


class BlockingIterator(Generic[T]):
    """An asynchronous iterator as an ordinary one: each item is awaited on a loop, all by one task.

    Closing it, leaving its `with` block, or dropping it, ends the iterator.
    """

    def __init__(
        self,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        open_items: Callable[[], AsyncIterator[T]],
    ) -> None:
        self._run = run
        self._pump = _Pump(open_items)
        self._is_over = False
        finalize(self, self._pump.stop)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._is_over:
            raise StopIteration
        try:
            return cast("T", self._run(self._pump.next()))
        except StopAsyncIteration:
            self._is_over = True
            raise StopIteration from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the iterator."""
        if not self._is_over:
            self._is_over = True
            self._run(self._pump.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Pump(Generic[T]):
    """The task that reads an asynchronous iterator on request."""

    def __init__(self, open_items: Callable[[], AsyncIterator[T]]) -> None:
        self._open = open_items
        self._requests: asyncio.Queue[asyncio.Future[T]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def next(self) -> T:
        """Return the next item; raise `StopAsyncIteration` at the end."""
        if self._task is None:
            self._task = asyncio.Task(self._read())
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(answer)
        await asyncio.wait({answer, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise StopAsyncIteration
        error = answer.exception()
        if isinstance(error, _EndError):
            raise StopAsyncIteration
        return cast("T", answer.result())

    async def _read(self) -> None:
        async with aclosing(cast("Any", self._open())) as items:
            while True:
                answer = await self._requests.get()
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    # A future does not accept it.
                    answer.set_exception(_EndError())
                    return
                except Exception as error:  # noqa: BLE001 - it is raised where the item is awaited
                    answer.set_exception(error)
                    return
                if not answer.done():
                    answer.set_result(item)

    async def aclose(self) -> None:
        """End the task and the iterator."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def stop(self) -> None:
        """End the task, without waiting; from any thread."""
        if self._task is not None and not self._task.done():
            _call(self._task.get_loop(), self._task.cancel)


class _EndError(Exception):
    """The end of an iterator."""


shared_loop = LoopThread()
"""The loop of this process for all code without a loop."""

atexit.register(shared_loop.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shared_loop.forget)


# ------------------------------------------------------------ functions in threads of a pool

_current = threading.local()


def in_thread_of(run: Callable[[Coroutine[Any, Any, Any]], Any], function: Callable[[], T]) -> T:
    """Call a function in this thread of a pool, where `run` waits for coroutines of the pool's event loop."""
    _current.run = run
    try:
        return function()
    finally:
        _current.run = None


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread; None if there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def waits_for() -> Callable[[Coroutine[Any, Any, Any]], Any] | None:
    """Return what waits for a coroutine in this thread of a pool; None elsewhere, and while a loop runs in it."""
    run: Callable[[Coroutine[Any, Any, Any]], Any] | None = getattr(_current, "run", None)
    # A blocking function may run an event loop of its own.
    return None if run is None or running_loop() is not None else run
