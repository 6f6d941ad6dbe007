"""A thread that runs transactions on one connection, several callers in one commit.

Rule 1: a job is a function of the connection. It changes nothing else, because it runs again if another job of the same
        transaction fails.
Rule 2: a result is delivered after the commit. A caller that is cancelled meanwhile does not undo its job.
"""

import asyncio
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from operations.base.errors import CallError, ErrorCode, TransportError, retrieve_exception
from operations.base.logs import LogThrottle
from operations.runs.database import Connection
from operations.runs.notes import Notes

logger = logging.getLogger("operations")

T = TypeVar("T")

_TRIES: Final = 3
"""How often a transaction is made whose connection ends before it is committed."""

_MOST: Final = 256
"""The largest number of jobs in one transaction."""


class RunStoreError(CallError):
    """The store of runs does not work."""

    def __init__(self, message: str = "The store of runs cannot be used now") -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message)


class RunKeyError(RunStoreError):
    """The store of runs is encrypted with another key than that of this process."""


class _Job:
    __slots__ = ("error", "function", "future", "loop", "result")

    def __init__(self, function: Callable[[Connection], Any]) -> None:
        self.function = function
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.future.add_done_callback(retrieve_exception)
        self.result: Any = None
        self.error: BaseException | None = None


class TransactionThread:
    """Runs jobs in transactions, in the order in which they were given.

    Args:
        name: The name of the thread.
        connect: Opens the connection.
        writes: Whether the jobs write.
        notes: Told when transactions begin and are committed.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Connection],
        *,
        writes: bool,
        notes: Notes | None = None,
    ) -> None:
        self._notes = notes
        self._name, self._connect, self._writes = name, connect, writes
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._starting = threading.Lock()
        self._failures = LogThrottle()
        self.works = True
        """Whether the last transaction could be made."""

    def run(self, function: Callable[[Connection], T]) -> "asyncio.Future[T]":
        """Run a job; await its result.

        Raises:
            RunStoreError: When awaited, if the store does not work.
            CallError: When awaited, if the job raises it.
        """
        if self._thread is None:
            self._start()
        if self._process != os.getpid():
            raise RunStoreError(
                "This process was forked from one that used the store of runs: open a new one"
            )
        job = _Job(function)
        self._jobs.put(job)
        return job.future

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._process = os.getpid()
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread after the jobs that it has, and wait for it."""
        thread, self._thread = self._thread, None
        if thread is not None and self._process == os.getpid():
            self._jobs.put(None)
            thread.join()

    def _work(self) -> None:
        connection: Connection | None = None
        is_open = True
        while is_open:
            jobs: list[_Job] = []
            first = self._jobs.get()
            while True:
                if first is None:
                    is_open = False
                    break
                jobs.append(first)
                if len(jobs) >= _MOST:
                    break
                try:
                    first = self._jobs.get_nowait()
                except Empty:
                    break
            if jobs:
                connection = self._transact(connection, jobs)
                _deliver(jobs)
        if connection is not None:
            connection.close()

    def _transact(
        self, connection: Connection | None, jobs: list[_Job], tries: int = _TRIES
    ) -> Connection | None:
        """Run the jobs in one transaction; each in its own if one of them fails."""
        try:
            if connection is None:
                connection = self._connect()
            if self._notes is not None:
                self._notes.begin(connection)
            connection.begin(writes=self._writes)
            for job in jobs:
                job.result = job.function(connection)
            connection.commit()
            if self._notes is not None:
                self._notes.committed(connection)
        except Exception as error:  # noqa: BLE001 - each caller receives it
            # Whether the jobs are stored is not known: they must not run again.
            is_unknown = isinstance(error, TransportError)
            if connection is not None:
                connection.rollback()
            if tries > 1 and connection is not None and connection.is_lost and not is_unknown:
                # Nothing is stored: the server may have been restarted since the last transaction.
                connection.close()
                return self._transact(None, jobs, tries - 1)
            if tries > 1 and connection is not None and _is_deadlock(error):
                # Nothing is stored, and the other transaction goes on.
                return self._transact(connection, jobs, tries - 1)
            if len(jobs) > 1 and connection is not None and not is_unknown:
                for job in jobs:
                    connection = self._transact(connection, [job])
                return connection
            is_answer = isinstance(error, CallError) and not isinstance(error, RunStoreError)
            if connection is not None and _is_invalid(error):
                message = f"A value cannot be stored or read: {error}"
                error = CallError(ErrorCode.EXECUTION_ERROR, message, retryable=False)
                is_answer = True
            if is_answer:
                for job in jobs:
                    job.error = error
                return connection
            self.works = False
            logger.log(self._failures.level(), "the store of runs does not work: %r", error)
            for job in jobs:
                job.error = RunStoreError()
                job.error.__cause__ = error
            if connection is not None:
                connection.close()
            return None
        self.works = True
        return connection


def _is_invalid(error: Exception) -> bool:
    """Return whether a value of the job is wrong, and not the database: no repetition would help."""
    # Each driver has its own DataError.
    return isinstance(error, (TypeError, ValueError, OverflowError)) or (
        type(error).__name__ == "DataError"
    )


def _is_deadlock(error: Exception) -> bool:
    """Return whether the database has undone the transaction so that another one can go on."""
    # As above, of PostgreSQL only.
    return type(error).__name__ == "DeadlockDetected"


def _deliver(jobs: list[_Job]) -> None:
    by_loop = defaultdict[asyncio.AbstractEventLoop, list[_Job]](list)
    for job in jobs:
        by_loop[job.loop].append(job)
    for loop, done in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_results, done)
        except RuntimeError:
            # The loop is closed: no task waits.
            continue


def _set_results(jobs: list[_Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
