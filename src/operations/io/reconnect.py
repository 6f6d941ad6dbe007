"""The loop that keeps a connection: connect, use it, and connect again after a pause.

Rule 1: one task opens, uses and closes each connection, because a cancel scope belongs to its task.
Rule 2: an error of the first attempt may be final. After the first connection every error leads to another attempt.
Rule 3: the pauses grow until a connection was open for `stable_after` seconds.
Rule 4: a connection that was closed on purpose is opened again only by `wake`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar, cast

from operations.base.errors import retrieve_exception
from operations.base.retry import Backoff

T = TypeVar("T")


def _never(_: Exception) -> bool:
    return False


def _ignore(_: Exception, _was_open: bool) -> None:
    """Report no failure."""


class ReconnectingTask(Generic[T]):
    """Keeps one connection until it is closed.

    Args:
        connect: Opens a connection for the duration of an `async with` block.
        use: Uses the connection; returns when it is not needed any more, and raises when it is lost.
        pauses: The pauses between attempts; by default those of a new `Backoff`. Its owner may reset it.
        stable_after: Seconds for which a connection must be open, so that its loss is not another failed attempt.
        is_final: Returns whether an error ends the task, if there was no connection yet.
        on_failure: Called with each error that leads to another attempt, and whether the connection was open.
            Must not raise.
        after: Awaited after each pause, before the next attempt.

    Attributes:
        failure: The error of the last attempt; None while the connection is open.
        next_attempt: When the next attempt is made, by the loop's clock; None unless it waits for one.
        idle: Set while the connection is not needed, because `use` has returned.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[T]],
        use: Callable[[T], Awaitable[None]],
        *,
        pauses: Backoff | None = None,
        stable_after: float = 2.0,
        is_final: Callable[[Exception], bool] = _never,
        on_failure: Callable[[Exception, bool], None] = _ignore,
        after: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.failure: Exception | None = None
        self.next_attempt: float | None = None
        self.idle = asyncio.Event()
        self._connect = connect
        self._use = use
        self._pauses = Backoff() if pauses is None else pauses
        self._stable_after = stable_after
        self._is_final = is_final
        self._on_failure = on_failure
        self._after = after
        self._is_open = self._is_attempting = self._is_abandoned = self._is_closing = False
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        # The task may be started by code that does not wait for the first connection.
        self._opened.add_done_callback(retrieve_exception)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the task was started, and is not closed."""
        return self._task is not None

    def start(self, *, name: str | None = None) -> None:
        """Start connecting, unless it is running; `name` names the task."""
        if self._task is None:
            self._task = asyncio.Task(self._run(), loop=self._loop, name=name)

    async def open(self, seconds: float | None = None) -> None:
        """Start, and wait for the first connection.

        Raises:
            TimeoutError: If there is none after `seconds`. The attempts continue until the task is closed.
            Exception: The error of an attempt, if it is final.
        """
        self.start()
        async with asyncio.timeout(seconds):
            # Shielded: a caller that stops waiting must not cancel the wait of others.
            await asyncio.shield(self._opened)

    def wake(self, *, abandon: bool = False) -> None:
        """Make the next attempt now, if there is no connection; `abandon` cancels an attempt that is being made."""
        self._woken.set()
        if abandon and self._is_attempting and not self._is_abandoned and self._task is not None:
            self._is_abandoned = True
            self._task.cancel()

    async def aclose(self) -> None:
        """Close the connection, and make no further attempts, until it is started again.

        Closing twice is harmless.
        """
        task = self._task
        if task is None:
            return
        if not self._is_closing:
            # Cancelled once, because a second time would interrupt the closing of the connection.
            self._is_closing = True
            task.cancel()
        await asyncio.wait({task})
        if self._task is task:
            self._task, self._is_closing = None, False

    async def _run(self) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        while True:
            # Cleared before the attempt: who wakes it meanwhile may need another one.
            self._woken.clear()
            self._is_attempting, self._is_abandoned = True, False
            try:
                await self._attempt(task)
            except asyncio.CancelledError:
                # The task itself may have been cancelled as well.
                if not self._is_abandoned or task.uncancel():
                    raise
            except Exception as error:  # noqa: BLE001 - rule 2: no other task would notice it
                was_open, self._is_open = self._is_open, False
                self._end_attempt(task)
                self.failure = error
                if not self._opened.done() and self._is_final(error):
                    self._opened.set_exception(error)
                    return
                await self._rest(error, was_open)
            else:
                self._is_open = False
                self.idle.set()
                try:
                    await self._woken.wait()
                finally:
                    self.idle.clear()

    def _end_attempt(self, task: "asyncio.Task[None]") -> None:
        if self._is_attempting and self._is_abandoned:
            # A library ignored that its attempt was cancelled.
            task.uncancel()
        self._is_attempting = self._is_abandoned = False

    async def _attempt(self, task: "asyncio.Task[None]") -> None:
        """Open a connection and use it until it ends."""
        async with self._connect() as connection:
            self._end_attempt(task)
            opened_at = self._loop.time()
            self._is_open, self.failure = True, None
            if not self._opened.done():
                self._opened.set_result(None)
            try:
                await self._use(connection)
            finally:
                if self._loop.time() - opened_at >= self._stable_after:
                    self._pauses.reset()

    async def _rest(self, error: Exception, was_open: bool) -> None:
        """Wait until the next attempt."""
        pause = self._pauses.pause()
        self.next_attempt = self._loop.time() + pause
        self._on_failure(error, was_open)
        try:
            async with asyncio.timeout(pause):
                await self._woken.wait()
        except TimeoutError:
            pass
        finally:
            self.next_attempt = None
        if self._after is not None:
            await self._after()
