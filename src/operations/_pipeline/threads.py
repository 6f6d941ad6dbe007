"""Run `def` handlers in a bounded pool of daemon threads that a caller can abandon.

In the standard pools, a handler that never returns keeps its slot for ever and prevents the interpreter from exiting.
Here a cancelled caller gives its slot back at once; the thread counts as abandoned until it returns, and the number of
abandoned threads is limited as well.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

from operations._text import counted
from operations.errors import CallError, ErrorCode

_IDLE_SECONDS = 10.0
"""How long a thread waits for more work before it ends."""


class _Job:
    """One function call on its way through a thread."""

    __slots__ = (
        "_error",
        "_function",
        "_loop",
        "_pool",
        "_result",
        "finished",
        "future",
        "left",
    )

    def __init__(self, pool: "ThreadPool", function: Callable[[], Any]) -> None:
        self._pool = pool
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self._result: Any = None
        self._error: BaseException | None = None
        self.finished = False
        self.left = False

    def run(self) -> None:
        """In the thread: run the function and keep its result or error."""
        try:
            self._result = self._function()
        except StopIteration as stop:
            # A future cannot carry StopIteration.
            self._error = RuntimeError(f"the handler raised {stop!r}")
        except BaseException as raised:  # noqa: BLE001 - it is raised in the awaiting task
            self._error = raised

    def hand_over(self) -> None:
        """In the thread: pass the outcome to the event loop."""
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
            # The caller was cancelled in the same turn of the loop, and has yet to notice.
            pass
        elif self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._result)


class ThreadPool:
    """At most `limit` functions at a time, each in a thread.

    Attributes:
        abandoned: Functions that still run although their caller has left.
    """

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )
        self._idle: deque[SimpleQueue[_Job | None]] = deque()
        self.abandoned = 0

    async def run(
        self, function: Callable[..., Any], *args: Any, on_abandon: Callable[[], None] | None = None
    ) -> Any:
        """Return the result of `function(*args)`, computed in a thread with the context variables of this task.

        A caller that is cancelled leaves at once; `on_abandon` is then called, and the thread runs on.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if as many threads as the limit allows were abandoned.
        """
        # A semaphore belongs to the loop it was first waited for in; a registry may outlive its loop.
        async with self._slots.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self._limit)
        ):
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

    def close(self) -> None:
        """Let idle threads end. Running ones end with their function; new work starts new threads."""
        while self._idle:
            self._idle.popleft().put(None)

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
                    # Claimed at this very moment: a job is on its way.
                    job = inbox.get()
                else:
                    return
            if job is None:
                return
            job.run()
            # Idle before the result is delivered, so that the waiting task finds this thread free.
            self._idle.append(inbox)
            job.hand_over()
            del job
