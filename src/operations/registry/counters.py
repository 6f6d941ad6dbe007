"""How many calls there were, by operation and result, and how long they took."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from typing import Final

from operations.contract.events import add_counts

BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram of durations, in seconds."""


UNKNOWN: Final = "(unknown)"
"""The series for all unregistered operations, because callers can send any number of unknown ids; and the code for all
further codes of an operation."""

MAX_CODES: Final = 100
"""The largest number of error codes that are counted separately for one operation; a remote one may send any code."""

MAX_REMOVED: Final = 1_000
"""The largest number of removed operations whose counters are stored."""


class CallSeries:
    """The counters of one operation, several times faster than an observer.

    Attributes:
        times_all: Whether all calls are timed, or only those from entry points.
        started: Calls that started.
        untimed: Calls that succeeded and were not timed.
        codes: Other calls that ended, by error code; an empty code is success.
        changes: Values of results that normalisation changed, by kind.
        items: Items of subscriptions.
        abandoned: Handlers that were still running after their call had ended.
        retries: Attempts of a call after the first.
        seconds: Total duration of the timed calls that ended.
        buckets: Timed calls by duration; see `BUCKETS`.
    """

    def __init__(self, *, times_all: bool) -> None:
        self.times_all = times_all
        self.started = 0
        self.untimed = 0
        self.codes: dict[str, int] = {}
        self.changes: dict[str, int] = {}
        self.items = 0
        self.abandoned = 0
        self.retries = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BUCKETS) + 1)

    def finish(self, code: str | None, seconds: float | None) -> None:
        """Count the end of a call; its duration is None if it was not timed."""
        name = code or ""
        if name and name not in self.codes and len(self.codes) >= MAX_CODES:
            name = UNKNOWN
        self.codes[name] = self.codes.get(name, 0) + 1
        if seconds is not None:
            self.seconds += seconds
            self.buckets[bisect_left(BUCKETS, seconds)] += 1

    def add_changes(self, changes: dict[str, int] | None) -> None:
        """Count the changes of a result, by kind."""
        if changes is not None:
            add_counts(self.changes, changes)

    @property
    def running(self) -> int:
        """Calls that have not ended."""
        return self.started - self.untimed - sum(self.codes.values())


class CallCounters:
    """Counts the calls of a registry.

    Args:
        known: The operations that are counted by name.
    """

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._series: dict[str, CallSeries] = {}
        self._times_all = False

    @property
    def times_all(self) -> bool:
        """Whether calls from code in this process are timed, and not only those from entry points."""
        return self._times_all

    @times_all.setter
    def times_all(self, value: bool) -> None:
        self._times_all = value
        for series in self._series.values():
            series.times_all = value

    def of(self, operation_id: str) -> CallSeries:
        """Return the counters of an operation."""
        series = self._series.get(operation_id)
        if series is None:
            if len(self._series) > len(self._known) + MAX_REMOVED:
                self._forget_removed()
            name = operation_id if operation_id in self._known else UNKNOWN
            series = self._series.setdefault(name, CallSeries(times_all=self._times_all))
        return series

    def _forget_removed(self) -> None:
        known = {*self._known, UNKNOWN}
        self._series = {name: each for name, each in self._series.items() if name in known}

    def __iter__(self) -> Iterator[tuple[str, CallSeries]]:
        return iter(sorted(self._series.items()))


class Counting:
    """Counts the calls of a registry for as long as at least one user needs the counts.

    Args:
        known: The operations that are counted by name.
        use: Receives the counters when counting begins, and None when it ends.
    """

    def __init__(self, known: Collection[str], use: Callable[[CallCounters | None], None]) -> None:
        self._known, self._use = known, use
        self._counters: CallCounters | None = None
        self._users: dict[object, bool] = {}
        """Whether each user needs the time of all calls."""

    def begin(self, *, time_all: bool) -> tuple[CallCounters, Callable[[], None]]:
        """Count calls from now on; call the returned function to stop."""
        counters = self._counters
        if counters is None:
            counters = self._counters = CallCounters(self._known)
            self._use(counters)
        user = object()
        self._users[user] = time_all
        counters.times_all = any(self._users.values())

        def stop() -> None:
            if self._users.pop(user, None) is None:
                return
            counters.times_all = any(self._users.values())
            if not self._users:
                self._counters = None
                self._use(None)

        return counters, stop
