"""The slots of a worker, and the calls that wait for them.

Rule 1: calls start in the order of their arrival, except suspects, which run alone.
Rule 2: subscriptions have slots, but do not delay suspects.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from sys import maxsize

from operations.base.concurrency import ConcurrencyLimiter, Slot
from operations.base.errors import CallError, ErrorCode
from operations.base.text import counted
from operations.calls.serving.jobs import Job, WorkerConfig
from operations.calls.suspects import SuspectJobs

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""The largest total size of the requests that wait for a slot, in bytes."""


class AdmissionQueue:
    """The slots of one worker, and the calls that wait for them.

    Args:
        config: The limits of the worker: `concurrency`, `max_waiting` and `per_principal`.

    Attributes:
        start: Starts a call; returns False if the call has already ended. Set by the runner.
        running: The number of calls that have a slot.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.start: Callable[[Job], bool] = lambda _: False
        self._slots, self._places = config.concurrency, config.max_waiting
        self._callers: ConcurrencyLimiter | None = None
        if (limit := config.per_principal) is not None:
            self._callers = ConcurrencyLimiter("calls on this worker", maxsize, limit)
        self._line: OrderedDict[Job, None] = OrderedDict()
        self._line_bytes = 0
        self._suspects = SuspectJobs(self._proceed)
        self.running = 0
        self._subscriptions = 0

    @property
    def waiting(self) -> int:
        """The number of waiting calls."""
        return len(self._line) + len(self._suspects.waiting)

    @property
    def free(self) -> int:
        """The number of calls that can start now."""
        return 0 if self._suspects.holds else self._slots - self.running

    def offer(self, job: Job) -> None:
        """Start a call or add it to the queue.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if there are too many calls, in total or of this caller.
        """
        if self._callers is not None:
            self.count(job, job.principal)
        if not job.is_suspect and self.free > 0:
            self._begin(job)
        elif self.waiting < self._places and self._line_bytes + job.size <= MAX_WAITING_BYTES:
            self._line_bytes += job.size
            if job.is_suspect:
                self._suspects.add(job)
                self._proceed()
            else:
                self._line[job] = None
        else:
            self._forget(job)
            reason = (
                f"{counted(self.running, 'call')} running and {self.waiting} waiting on this worker"
            )
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, reason, retryable=True)

    def _begin(self, job: Job) -> None:
        """Start a call, if it has not ended while it waited."""
        if self.start(job):
            self.running += 1
            self._subscriptions += job.is_stream
        else:
            self._suspects.done(job)
            self._forget(job)

    def count(self, job: Job, principal: str) -> None:
        """Count a call for its caller; errors are raised as by `offer`."""
        if self._callers is not None and principal not in job.counted:
            job.counted = {**job.counted, principal: self._callers.enter(principal)}

    def done(self, job: Job) -> None:
        """Pass the slot of an ended call to the next call."""
        if job.counted:
            self._forget(job)
        self._suspects.done(job)
        if job.is_lent:
            job.is_lent = False
        else:
            self._leave(job)

    @contextmanager
    def lent(self, job: Job, *slots: Slot) -> Generator[None]:
        """Release the slots of a call that waits for a person, then take them again, even beyond the limits."""
        with ExitStack() as stack:
            if job.task is None or job.is_lent:
                # A task that the handler started has outlived the call, or another one waits too.
                yield
                return
            for slot in (*job.counted.values(), *slots):
                stack.enter_context(slot.lent())
            job.is_lent = True
            self._suspects.done(job)
            self._leave(job)
            try:
                yield
            finally:
                if job.is_lent:
                    job.is_lent = False
                    self.running += 1
                    self._subscriptions += job.is_stream

    def _leave(self, job: Job) -> None:
        """Pass the slot of a call to the next one."""
        self.running -= 1
        self._subscriptions -= job.is_stream
        self._proceed()

    def _proceed(self) -> None:
        """Start the waiting calls that may start now."""
        while self.running == self._subscriptions and self.running < self._slots:
            suspect = self._suspects.take()
            if suspect is None:
                break
            self._line_bytes -= suspect.size
            self._begin(suspect)
        while self._line and self.free > 0:
            following, _ = self._line.popitem(last=False)
            self._line_bytes -= following.size
            self._begin(following)

    def withdraw(self, job: Job) -> None:
        """Remove a call that has ended while it waited."""
        if job in self._line:
            del self._line[job]
        elif job in self._suspects.waiting:
            self._suspects.withdraw(job)
        else:
            return
        self._line_bytes -= job.size
        self._forget(job)
        self._proceed()

    def _forget(self, job: Job) -> None:
        for slot in job.counted.values():
            slot.release()
