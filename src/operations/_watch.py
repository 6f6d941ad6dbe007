"""Ending the task that serves a request: when its time is over, or when its client is gone.

One timer serves a whole request. A timer costs a microsecond where `asyncio.timeout` costs five and a task for
watching ten, and most requests are over before it goes off.

Rule 1: the task is cancelled, and whoever serves the request asks why. Work that will not be cancelled keeps nobody
        waiting: after a moment the answer is given without it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias, cast

Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's: gives what the client sends next, in the end that it left."""

PATIENCE: Final = 0.05
"""Seconds before anybody looks whether the client is still there."""

GRACE: Final = 0.05
"""Seconds that work has to end after it was cancelled."""

_MOST_AHEAD: Final = 64 * 1024
"""Bytes of a body that are kept while nobody knows who sends it."""

_NEVER = float("inf")


class Ahead:
    """What a client sends, looked at before anybody reads it: whether it has left can be known in no other way.

    Args:
        receive: The client's.
    """

    __slots__ = ("_kept", "_wire")

    def __init__(self, receive: Receive) -> None:
        self._wire = receive
        self._kept: deque[MutableMapping[str, Any]] = deque()

    async def look(self) -> MutableMapping[str, Any]:
        """What comes next, which stays to be read. Beyond a little of a body nobody looks."""
        if sum(len(message.get("body", b"")) for message in self._kept) > _MOST_AHEAD:
            await asyncio.get_running_loop().create_future()
        message = await self._wire()
        if message["type"] != "http.disconnect":
            self._kept.append(message)
        return message

    async def read(self) -> MutableMapping[str, Any]:
        """What comes next."""
        return self._kept.popleft() if self._kept else await self._wire()

    @property
    def receive(self) -> Receive:
        """How to read on."""
        return self.read if self._kept else self._wire


class Watch:
    """Over the task it is made in.

    watch.until(15)             # reading: the time counts
    watch.until(30, receive)    # working: the client counts as well
    watch.stop()

    Args:
        insist: Called when the time is over and the work did not end.
    """

    __slots__ = (
        "_due", "_insist", "_loop", "_over", "_rang", "_receive", "_sentry", "_task", "_timer", "is_late", "is_left",
        "is_reading",
    )  # fmt: skip

    def __init__(self, insist: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = cast("asyncio.Task[Any]", asyncio.current_task(self._loop))
        self._insist = insist
        self._timer: asyncio.TimerHandle | None = None
        self._sentry: asyncio.Task[None] | None = None
        self._receive: Receive | None = None
        self._due = self._over = _NEVER
        self._rang = False
        self.is_late = False
        """Whether the task was cancelled because its time was over."""
        self.is_left = False
        """Whether the task was cancelled because its client left."""
        self.is_reading = True
        """Whether the client is not looked for, because it is still being heard."""

    def until(self, seconds: float | None, receive: Receive | None = None) -> None:
        """Allow so much time from now on; with `receive`, only while the client is there."""
        now = self._loop.time()
        self._over = over = _NEVER if seconds is None else now + seconds
        self._receive = receive
        self.is_reading = receive is None
        due = min(over, now + PATIENCE)
        if self._timer is not None:
            if self._due <= due:
                # It goes off early enough, and then looks at what counts by then.
                return
            self._timer.cancel()
        self._set(due)

    def rest(self) -> None:
        """Allow any time and look for nobody, until the next `until`."""
        self._over = _NEVER
        self._receive = None
        if self._sentry is not None:
            self._sentry.cancel()
            self._sentry = None

    def stop(self) -> bool:
        """End the watch; whether somebody else, too, has cancelled the task."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sentry is not None:
            self._sentry.cancel()
        # What is called holds what holds the watch: cut here, none of it has to be collected.
        self._insist = self._receive = None
        if not self._rang:
            return False
        self._rang = False
        return self._task.uncancel() > 0

    def _set(self, due: float) -> None:
        self._due = due
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._loop.time() >= self._over:
            self.is_late = self._ring()
            if self.is_late and self._insist is not None:
                self._timer = self._loop.call_later(GRACE, self._insist)
            return
        if self._receive is not None and self._sentry is None:
            self._sentry = self._loop.create_task(self._stand(self._receive))
        if self._over != _NEVER:
            self._set(self._over)

    async def _stand(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.is_left = self._ring()

    def _ring(self) -> bool:
        """Cancel the task; False if that has been done already."""
        if self._rang:
            return False
        self._rang = True
        self._task.cancel()
        return True
