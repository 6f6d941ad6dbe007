"""Running jobs in tasks, in as few as it takes.

A task for every call costs as much as a small call itself. Jobs that end in the very step in which they began share
one, for nobody can have noticed; a job that waits for something keeps the task it has.

Rule 1: a task whose job has waited ends with that job. Only what ran through leaves its task to the next.
Rule 2: what a handler does to its task, or to context variables, is not passed on. A task that anybody knows of by
        then, or has cancelled, renamed or hung a callback on, is not either: it is that job's, and ends with it.
Rule 3: a job that was answered before it began is not begun.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from sys import getrefcount
from typing import Any, Generic, Protocol, TypeVar, cast
from weakref import getweakrefcount

_BATCH = 64
"""Jobs that may run through in one step before others get their turn."""


class Runnable(Protocol):
    """What is needed of a job.

    Attributes:
        answered: Whether it is over already.
        task: Where it runs, while it does.
    """

    answered: bool
    task: "asyncio.Task[None] | None"


JobT = TypeVar("JobT", bound=Runnable)


class TaskPool(Generic[JobT]):
    """The tasks of one worker.

    Args:
        attend: Runs one job.
        done: Hears of every job that has ended.
        failed: Hears, after that, what it raised.

    Attributes:
        tasks: Those that are under way.
    """

    def __init__(
        self,
        attend: Callable[[JobT], Coroutine[Any, Any, None]],
        done: Callable[[JobT], None],
        failed: Callable[[JobT, BaseException], None],
    ) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._attend = attend
        self._done = done
        self._failed = failed
        self._ready: deque[JobT] = deque()
        self._turn = 0
        self._is_sweeping = False
        self._loop = asyncio.get_running_loop()
        # Not the context of whoever brings a job: over a broker there would be none.
        self._context = copy_context()

    def add(self, job: JobT) -> bool:
        """Run `job` in the next turn of the loop; False if it is over already."""
        if job.answered:
            return False
        self._ready.append(job)
        if not self._is_sweeping:
            self._sweep(1)
        return True

    def _sweep(self, count: int) -> None:
        self._is_sweeping = True
        for _ in range(count):
            task = self._loop.create_task(self._work(), context=self._context.copy())
            self.tasks.add(task)
            task.add_done_callback(self._left)
        # Comes right after their first step.
        self._loop.call_soon(self._look_after, count)

    def _look_after(self, count: int) -> None:
        """Whoever still works now is waiting: what is left needs others, and soon enough of them."""
        self._turn += 1
        if self._ready:
            self._sweep(min(len(self._ready), 2 * count))
        else:
            self._is_sweeping = False

    async def _work(self) -> None:
        ready, attend, done = self._ready, self._attend, self._done
        task = cast("asyncio.Task[None]", asyncio.current_task())
        context, turn, untouched = copy_context(), self._turn, None
        tells_all = hasattr(task, "_must_cancel") and hasattr(task, "_callbacks")
        for _ in range(_BATCH):
            if not ready:
                return
            # What a job can have done to its task. Written in one place, so that the count means the same each time.
            state = (
                getrefcount(task),
                getweakrefcount(task),
                task.cancelling(),
                task.get_name(),
                # These two are not in the interface of a task.
                getattr(task, "_must_cancel", None),
                len(getattr(task, "_callbacks", None) or ()),
            )
            if untouched is None:
                untouched = state
            elif state != untouched or copy_context() != context:
                return
            job = ready.popleft()
            if not job.answered:
                job.task = task
                try:
                    await attend(job)
                except GeneratorExit:
                    # The loop is gone, and with it everybody who could be told.
                    raise
                except BaseException as failure:
                    job.task = None
                    done(job)
                    self._failed(job, failure)
                    if isinstance(failure, Exception):
                        return
                    raise
                job.task = None
            done(job)
            if turn != self._turn or not tells_all:
                return

    def _left(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            # Reading it marks it as seen; what must end the process has gone its way already.
            task.exception()
