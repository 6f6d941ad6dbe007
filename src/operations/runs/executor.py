"""The executor of a process: claims runs that are ready, as many as it has slots, and ends their attempts.

Rule 1: nothing is polled for a run: the executor wakes when a run becomes ready, a slot becomes free, or time comes.
Rule 2: without a valid lease it begins nothing, and stops what it has begun. It looks at the time itself, because the
        thread that renews the lease may be waiting for the database.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from operations.base.errors import CallError
from operations.base.tasks import cancel_tasks, start_task
from operations.contract.context import OperationContext
from operations.runs.records import Attempt, Step
from operations.runs.session import CLEANUP_SECONDS, Host, Session
from operations.runs.writer import RunStoreError

logger = logging.getLogger("operations")

_RETRY_SECONDS: Final = 0.2
"""Seconds between two attempts to use a store that does not work."""


class Lease(Protocol):
    """The lease of this process."""

    holder: str | None

    @property
    def is_valid(self) -> bool:
        """Whether other processes respect it."""
        ...

    @property
    def remaining(self) -> float:
        """The seconds for which they certainly do."""
        ...


class Executor:
    """Runs the attempts of one event loop.

    Args:
        host: The store of runs.
        lease: The lease.
        on_end: Called when an attempt has ended, with the id of its run.
    """

    def __init__(self, host: Host, lease: Lease, on_end: Callable[[str], None]) -> None:
        self._host, self._lease, self._on_end = host, lease, on_end
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[str, Session] = {}
        self._reserved = 0
        self._lent = 0
        self._resuming = deque[asyncio.Future[None]]()
        """Attempts that have only waited, and go on when there is a slot."""
        self._ready = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._lease_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unreleased: dict[str, int] = {}
        self._has_strays = False
        """Whether this process may hold runs without an attempt: a claim whose commit has failed may be stored."""
        self._awaits_lease = False
        """Whether it has looked for runs without a valid lease."""
        self._claiming: asyncio.Task[None] | None = None
        self.attempts = 0
        """The attempts that were begun."""
        self._is_open = True
        self._is_looking = self._looks_again = False

    def start(self) -> None:
        """Begin to claim runs."""
        self._claiming = start_task(self._tasks, self._claim_forever())
        self._check_lease()
        self.wake()

    def wake(self) -> None:
        """Look for runs that are ready, after those that wait for a slot to go on."""
        self._grant()
        self._ready.set()

    def wake_in(self, milliseconds: int) -> None:
        """Look for runs that are ready after this time, if not earlier."""
        at = self._loop.time() + milliseconds / 1000
        if self._timer is not None and not self._timer.cancelled():
            if self._timer.when() <= at and self._timer.when() > self._loop.time():
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self.wake)

    def lend(self, slots: int) -> None:
        """Give up the slot of an attempt that only waits, or take it again."""
        self._lent += slots
        if slots > 0:
            self.wake()

    async def slot(self) -> None:
        """Wait for a slot for an attempt that has only waited. The caller takes it at once (`lend`)."""
        if self._free > 0:
            return
        granted = self._loop.create_future()
        self._resuming.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                with suppress(ValueError):
                    self._resuming.remove(granted)
            else:
                self._reserved -= 1
                self._loop.call_soon(self.wake)
            raise
        self._reserved -= 1

    def _grant(self) -> None:
        """Give free slots to the attempts that go on, in the order in which they asked."""
        while self._resuming and self._free > 0:
            granted = self._resuming.popleft()
            if not granted.done():
                self._reserved += 1
                granted.set_result(None)

    @property
    def working(self) -> int:
        """The number of attempts that have a slot."""
        return len(self._sessions) - self._lent

    @property
    def _free(self) -> int:
        return self._host.limits.working - self.working - self._reserved

    # ------------------------------------------------------------ starting at once

    def reserve(self) -> str | None:
        """Reserve a slot for a run that is being started; return the holder, or None if it must wait in the queue."""
        if self._is_open and self._free > 0 and self._lease.is_valid:
            self._reserved += 1
            return self._lease.holder
        return None

    def unreserve(
        self, attempt: Attempt | None, context: OperationContext | None, *, failed: bool
    ) -> None:
        """Use the reserved slot for an attempt, or give it back.

        Args:
            attempt: The attempt, if there is one.
            context: The caller.
            failed: Whether the store did not work, so that the run may be stored or not.
        """
        self._reserved -= 1
        if attempt is not None and not self._is_open:
            # It is handed over with the lease.
            return
        if attempt is not None:
            self._begin(attempt, [], context)
            return
        if failed:
            self._has_strays = True
        self.wake()

    # ------------------------------------------------------------ claiming

    async def _claim_forever(self) -> None:
        while True:
            await self._ready.wait()
            self._ready.clear()
            try:
                await self._release_left()
                await self._claim()
            except CallError:
                # The store does not work, or a strict ledger.
                await asyncio.sleep(_RETRY_SECONDS)
                self.wake()

    async def _claim(self) -> None:
        more = True
        while more and self._is_open:
            holder, free = self._lease.holder, self._free
            if holder is None or not self._lease.is_valid:
                self._awaits_lease = True
                return
            is_ready, later = await self._host.read(self._host.journal.ready)
            if later is not None:
                self.wake_in(later)
            if not is_ready or free <= 0:
                return
            self._reserved += free
            try:
                claim = partial(self._host.journal.claim, holder=holder, most=free)
                attempts, later, more = await self._host.write(claim)
            except RunStoreError:
                self._has_strays = True
                raise
            finally:
                self._reserved -= free
                self._loop.call_soon(self._grant)
            for attempt, steps in attempts:
                self._begin(attempt, steps, None)
            if later is not None:
                self.wake_in(later)
            more = more and self._free > 0

    def _begin(self, attempt: Attempt, steps: list[Step], context: OperationContext | None) -> None:
        self.attempts += 1
        session = Session(self._host, attempt, steps, context)
        known = self._sessions.get(attempt.id)
        if known is not None:
            # This process has lost an attempt and claimed the run again.
            known.stop("the run was claimed again")
        self._sessions[attempt.id] = session
        session.task = start_task(self._tasks, self._work(session))

    async def _work(self, session: Session) -> None:
        try:
            await session.work()
        except Exception:
            logger.exception("an attempt of the run %s failed", session.attempt.id)
            self.unreleased(session.attempt.id, session.attempt.fence)
        finally:
            if self._sessions.get(session.attempt.id) is session:
                del self._sessions[session.attempt.id]
            self._on_end(session.attempt.id)
            self.wake()

    def unreleased(self, run_id: str, fence: int) -> None:
        """Release an attempt as soon as the store works."""
        self._unreleased[run_id] = max(fence, self._unreleased.get(run_id, 0))
        self._loop.call_later(_RETRY_SECONDS, self.wake)

    async def _release_left(self) -> None:
        for run_id, fence in tuple(self._unreleased.items()):
            session = self._sessions.get(run_id)
            if session is not None and session.attempt.fence == fence:
                continue  # its handler still cleans up
            release = partial(self._host.journal.release, run_id=run_id, fence=fence, wake=0)
            await self._host.write(release)
            if self._unreleased.get(run_id) == fence:
                del self._unreleased[run_id]
        if self._has_strays and (holder := self._lease.holder) is not None:
            await self._release_strays(holder)

    async def _release_strays(self, holder: str) -> None:
        """Release the runs that this process holds without an attempt."""
        held = await self._host.write(partial(self._host.journal.held, holder=holder))
        self._has_strays = False
        for run_id, fence in held:
            session = self._sessions.get(run_id)
            if session is None or session.attempt.fence != fence:
                self.unreleased(run_id, fence)

    # ------------------------------------------------------------ ending

    def look(self) -> None:
        """Cancel the attempts whose runs another process has cancelled, and tell those that wait of answers."""
        self._looks_again = True
        if self._sessions and not self._is_looking:
            self._is_looking = True
            start_task(self._tasks, self._look())

    async def _look(self) -> None:
        try:
            while self._looks_again and (holder := self._lease.holder) is not None:
                self._looks_again = False
                news = partial(self._host.journal.news, holder=holder)
                cancelled, answered = await self._host.read(news)
                for run_id in cancelled:
                    if (session := self._sessions.get(run_id)) is not None:
                        session.cancel()
                for run_id in answered:
                    if (session := self._sessions.get(run_id)) is not None:
                        session.tell()
        except RunStoreError:
            return
        finally:
            self._is_looking = False

    def session(self, run_id: str) -> Session | None:
        """Return the attempt of a run in this process."""
        return self._sessions.get(run_id)

    def stop_all(self, reason: str) -> None:
        """Stop every attempt, without final states."""
        for session in tuple(self._sessions.values()):
            session.stop(reason)

    def _check_lease(self) -> None:
        """Stop the attempts as soon as the lease is not valid."""
        left = self._lease.remaining
        if left <= 0:
            self.lose()
        elif self._awaits_lease:
            # It was renewed late, for the same holder.
            self._awaits_lease = False
            self.wake()
        pause = left if left > 0 else _RETRY_SECONDS
        self._lease_timer = self._loop.call_later(pause, self._check_lease)

    def lose(self) -> None:
        """Stop every attempt because of the lease, and release the runs that are still those of this process."""
        for session in tuple(self._sessions.values()):
            if session.stop("the lease of this process is over"):
                self.unreleased(session.attempt.id, session.attempt.fence)

    async def close(self, grace: float) -> None:
        """Begin nothing more, wait for the attempts at most this long, and stop the others."""
        self._is_open = False
        for timer in (self._timer, self._lease_timer):
            if timer is not None:
                timer.cancel()
        await cancel_tasks(self._claiming)
        for session in tuple(self._sessions.values()):
            session.hand_over()
        await self._wait(grace)
        self.stop_all("the process ends")
        await self._wait(CLEANUP_SECONDS + 1)
        await cancel_tasks(*self._tasks)

    async def _wait(self, seconds: float) -> None:
        tasks = [each.task for each in self._sessions.values() if each.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
