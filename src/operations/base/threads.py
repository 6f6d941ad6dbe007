"""The threads that run blocking functions."""

import asyncio
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from operations.base.errors import (
    CallError,
    ErrorCode,
)
from operations.base.loops import in_thread_of, run_on
from operations.base.text import counted

_IDLE_SECONDS = 10.0
"""How long a thread waits for more work before it ends."""


class _Job:
    """One function call that runs in a thread."""

    def __init__(self, pool: "ThreadPool", function: Callable[[], Any]) -> None:
        self._pool = pool
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self._result: Any = None
        self._error: BaseException | None = None
        self.finished = False
        self.left = False
        self.is_over = self.is_lent = False
        """Whether nothing waits for the job any more, and whether its place is lent to others."""

    def run(self) -> None:
        """Run the function and store its result or error. Called in the thread."""
        try:
            self._result = in_thread_of(self._wait, self._function)
        except (StopIteration, GeneratorExit) as stop:
            # A future does not accept StopIteration, and a GeneratorExit would close the coroutine that awaits it.
            self._error = RuntimeError(f"the handler raised {stop!r}")
        except BaseException as raised:  # noqa: BLE001 - it is raised in the awaiting task
            self._error = raised

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the event loop, and wait for it. Called in the thread."""
        return run_on(self._loop, self._lent(coroutine))

    async def _lent(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Await a coroutine while another job may have the place of this one, or both could wait for ever."""
        places = self._pool.places()
        is_lent = self.is_lent = not self.is_over
        if is_lent:
            places.give()
        try:
            return await coroutine
        finally:
            if is_lent and not self.is_over:
                self.is_lent = False
                await places.take_back()

    def hand_over(self) -> None:
        """Pass the outcome to the event loop. Called in the thread."""
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop is closed, so no task waits for the result.
            self._pool.abandoned -= self.left

    def _deliver(self) -> None:
        self.finished = True
        if self.left:
            self._pool.abandoned -= 1
        elif self.future.cancelled():
            # The caller was cancelled in this iteration of the event loop.
            pass
        elif self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._result)


class _Places:
    """The places of one event loop for running functions.

    A function that had lent its place continues at once, so that more than `limit` may run for a moment.
    """

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)
        self._owed = 0

    async def take(self) -> None:
        await self._free.acquire()

    async def take_back(self) -> None:
        if self._free.locked():
            self._owed += 1
        else:
            await self._free.acquire()

    def give(self) -> None:
        if self._owed:
            self._owed -= 1
        else:
            self._free.release()


class ThreadPool:
    """Runs at most `limit` functions concurrently, each in a thread.

    Attributes:
        abandoned: The number of running functions whose caller was cancelled.
    """

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, _Places] = WeakKeyDictionary()
        self._idle: deque[SimpleQueue[_Job | None]] = deque()
        self.abandoned = 0
        _pools.add(self)

    def places(self) -> _Places:
        """Return the places of the running event loop: a semaphore belongs to one, and a registry may outlive it."""
        loop = asyncio.get_running_loop()
        found = self._places.get(loop)
        if found is None:
            found = self._places[loop] = _Places(self._limit)
        return found

    async def run(
        self, function: Callable[..., Any], *args: Any, on_abandon: Callable[[], None] | None = None
    ) -> Any:
        """Return the result of `function(*args)`, computed in a thread with the context variables of this task.

        If the caller is cancelled, it does not wait for the thread, which continues; `on_abandon` is then called.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the number of abandoned threads has reached the limit.
        """
        places = self.places()
        await places.take()
        job: _Job | None = None
        try:
            if self.abandoned >= self._limit:
                raise CallError(
                    ErrorCode.RESOURCE_EXHAUSTED,
                    f"no thread is free: {counted(self.abandoned, 'handler')} still at work, without a caller",
                )
            context = copy_context()
            job = _Job(self, lambda: context.run(function, *args))
            self._start(job)
            try:
                return await job.future
            except asyncio.CancelledError:
                if job.future.cancelled() and not job.finished:
                    job.left = True
                    self.abandoned += 1
                    if on_abandon is not None:
                        on_abandon()
                raise
        finally:
            if job is not None:
                job.is_over = True
            if job is None or not job.is_lent:
                places.give()

    def close(self) -> None:
        """End idle threads. Other threads end with their function, and new work starts new threads."""
        while self._idle:
            self._idle.popleft().put(None)

    def forget_threads(self) -> None:
        """Start new threads from now on: a forked process has none of the threads of its parent."""
        self._idle.clear()
        self.abandoned = 0

    def _start(self, job: _Job) -> None:
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue[_Job | None]()
            threading.Thread(
                target=self._work, args=(inbox,), name="operations handler", daemon=True
            ).start()
        inbox.put(job)

    def _work(self, inbox: "SimpleQueue[_Job | None]") -> None:
        while True:
            try:
                job = inbox.get(timeout=_IDLE_SECONDS)
            except Empty:
                try:
                    self._idle.remove(inbox)
                except ValueError:
                    # Another thread has just claimed this one and sends it a job.
                    job = inbox.get()
                else:
                    return
            if job is None:
                return
            job.run()
            # Marked idle before the result is delivered, so that the waiting task can reuse this thread.
            self._idle.append(inbox)
            job.hand_over()
            del job


_pools: WeakSet[ThreadPool] = WeakSet()


def _forget_all_threads() -> None:
    for pool in _pools:
        pool.forget_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all_threads)


def is_blocking(handler: Callable[..., Any]) -> bool:
    """Return whether `handler` is an ordinary function, which must run in a thread."""
    return not any(
        is_kind(candidate)
        for candidate in (handler, getattr(handler, "__call__", None))  # noqa: B004 - its kind is the question
        for is_kind in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    )
