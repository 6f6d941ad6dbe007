"""Those that wait for changes of runs: one look at the journal for all of them, whatever their number.

Rule 1: a watcher registers before it reads the state, so that it misses no change.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from operations.base.errors import CallError
from operations.base.tasks import start_task
from operations.store.state import Signal


class Watchers:
    """The watchers of this process, in any event loop.

    Args:
        read: Returns the revisions of runs.
    """

    def __init__(self, read: Callable[[Sequence[str]], Awaitable[dict[str, int]]]) -> None:
        self._read = read
        self._watched = defaultdict[str, dict[Signal, int]](dict)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_looking = self._looks_again = False

    @contextmanager
    def watching(self, run_id: str, revision: int) -> Generator[Signal]:
        """Yield a signal that is set when a run may have a later revision."""
        signal = Signal()
        self._watched[run_id][signal] = revision
        try:
            yield signal
        finally:
            watchers = self._watched.get(run_id, {})
            watchers.pop(signal, None)
            if not watchers:
                self._watched.pop(run_id, None)

    def wake(self, run_ids: Iterable[str]) -> None:
        """Wake the watchers of these runs."""
        for run_id in run_ids:
            for signal in tuple(self._watched.get(run_id, ())):
                signal.set()

    def wake_all(self) -> None:
        """Wake all watchers."""
        self.wake(tuple(self._watched))

    def look(self) -> None:
        """Wake the watchers of runs that have changed in the journal. Called in the event loop of the executor."""
        self._looks_again = True
        if not self._is_looking and self._watched:
            self._is_looking = True
            start_task(self._tasks, self._look())

    async def _look(self) -> None:
        try:
            while self._looks_again:
                self._looks_again = False
                revisions = await self._read(tuple(self._watched))
                for run_id, signals in tuple(self._watched.items()):
                    # A run that is not there any more has changed as well.
                    revision = revisions.get(run_id)
                    if any(revision is None or revision > known for known in signals.values()):
                        self.wake([run_id])
        except CallError:
            # The store does not work; the next change is noticed.
            return
        finally:
            self._is_looking = False
