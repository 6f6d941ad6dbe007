"""Cancelling the task that serves a request, for a reason of our own.

A timer costs a microsecond where `asyncio.timeout` costs five and a task for watching ten; most requests are over
before any of it is needed.
"""

import asyncio
from typing import Self

from starlette.types import Receive


class Alarm:
    """Cancels the current task if the block takes longer than `seconds`; then the block ends in silence.

    with Alarm(5) as alarm:
        return await something()
    # only reached when the alarm went off
    """

    __slots__ = ("_seconds", "_task", "_timer", "rang")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.rang = False

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._on_time)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        if self._timer is not None:
            self._timer.cancel()
        if not self.rang or self._task is None:
            return False
        # The cancellation was ours, and ends here, unless somebody else's came on top.
        return self._task.uncancel() == 0 and kind is asyncio.CancelledError

    def _on_time(self) -> None:
        self.ring()

    def ring(self) -> None:
        """Cancel the task now."""
        self.rang = True
        if self._task is not None:
            self._task.cancel()


class Departure(Alarm):
    """Cancels the current task when the client leaves; it looks after a moment only."""

    __slots__ = ("_receive", "_watcher")

    PATIENCE = 0.05

    def __init__(self, receive: Receive) -> None:
        super().__init__(self.PATIENCE)
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        if self._watcher is not None:
            self._watcher.cancel()
        return super().__exit__(kind, *rest)

    def _on_time(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.ring()
