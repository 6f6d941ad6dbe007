"""Requests that may have killed a worker: which of them a client sends, and when a worker starts them.

If a worker is killed, each of the requests that it ran may be the reason. From its second attempt on, such a suspect
runs alone, so that a request that kills its worker again kills no other one:

    the client   sends one suspect at a time, those with the fewest attempts first. All clients choose the same worker.
    the worker   starts it when its running calls have ended, and starts no other call before it has ended
    both         the worker starts it only if its caller confirms that (`call.offered`). An attempt that was not
                 confirmed does not count, because another request killed the worker.

Rule 1: subscriptions are not waited for, because they may never end.
Rule 2: a suspect delays the other calls of its worker for at most `HOLD_SECONDS`. Then they start for as long, because
        a running call may wait for one of them.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from operations.calls.protocol.states import PendingCall
from operations.calls.serving.jobs import Job

HOLD_SECONDS = 5.0
"""The longest time in seconds for which a suspect delays the other calls of its worker."""


class SuspectCalls:
    """The suspects of one client.

    Args:
        send: Sends a call.
        is_open: Returns whether a call has not ended.
    """

    def __init__(
        self, send: Callable[[PendingCall], object], is_open: Callable[[PendingCall], bool]
    ) -> None:
        self._send = send
        self._is_open = is_open
        self._line: list[tuple[int, int, PendingCall]] = []
        self._numbers = count()
        self._current: PendingCall | None = None

    def add(self, call: PendingCall) -> None:
        """Send a call when no other suspect is being tried."""
        heappush(self._line, (call.payload.attempt, next(self._numbers), call))
        call.is_held = True
        self.release(call)
        self._send_next()

    def release(self, call: PendingCall) -> None:
        """Record that a call has ended, or that its attempt has."""
        if self._current is call:
            self._current = None
            self._send_next()

    def _send_next(self) -> None:
        while self._current is None and self._line:
            _, _, call = heappop(self._line)
            call.is_held = False
            if self._is_open(call):
                self._current = call
                self._send(call)


class SuspectJobs:
    """The suspects of one worker, and whether its other calls must wait for them.

    Args:
        proceed: Starts the calls that may start now.

    Attributes:
        waiting: The suspects that have not started, in their order.
        holds: Whether other calls must not start now.
    """

    def __init__(self, proceed: Callable[[], object]) -> None:
        self._proceed = proceed
        self.waiting: OrderedDict[Job, None] = OrderedDict()
        self.holds = False
        self._current: Job | None = None
        self._turn: asyncio.TimerHandle | None = None

    def add(self, job: Job) -> None:
        """Add a suspect."""
        self.waiting[job] = None
        if self._turn is None:
            self._take_turns()

    def take(self) -> Job | None:
        """Return the suspect to start now, because no other call is running; None if there is none."""
        if self._current is None and self.waiting:
            self._current, _ = self.waiting.popitem(last=False)
            return self._current
        return None

    def withdraw(self, job: Job) -> None:
        """Remove a suspect that has ended while it waited."""
        self.waiting.pop(job, None)
        self._stop_if_over()

    def done(self, job: Job) -> None:
        """Record that a call has ended."""
        if self._current is job:
            self._current = None
            self._stop_if_over()

    def _take_turns(self) -> None:
        """Let either the suspects or the other calls start for some time."""
        self.holds = not self.holds
        self._turn = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._take_turns)
        if not self.holds:
            self._proceed()

    def _stop_if_over(self) -> None:
        if self._turn is not None and self._current is None and not self.waiting:
            self._turn.cancel()
            self._turn, self.holds = None, False
