"""The lease of an executor, renewed by a thread of its own: a handler that blocks the event loop keeps its runs.

Rule 1: the time of a lease is that of the database.
Rule 2: an executor that could not renew in time stops its runs before another one may take them over; it reads the time
        that is left, because this thread may be waiting for the database.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from operations.base.logs import LogThrottle
from operations.contract.context import new_request_id
from operations.runs.database import Connection, Database
from operations.runs.journal import Journal
from operations.runs.notes import Notes

logger = logging.getLogger("operations")

_NEWS_SECONDS: Final = 0.1
"""The longest wait for news, so that the thread ends soon."""

_CLEAN_SECONDS: Final = 30.0
"""Seconds between two searches for expired runs."""


class Keeper:
    """Keeps the lease of this process, notices what others do, and takes over the runs of those that are gone.

    Args:
        database: The database.
        journal: The statements.
        ttl: Seconds for which a lease is valid.
        on_news: Called in the thread with the ids of runs that have changed.
        on_ready: Called in the thread when runs were taken over.
        on_lease: Called in the thread when the lease is lost (False) or there is a new one (True).
        executes: Whether this process has a lease; otherwise it only receives news.
        notes: Told when transactions begin and are committed.

    Attributes:
        holder: The name of the executor while it has a lease; None without one.
    """

    def __init__(
        self,
        database: Database,
        journal: Journal,
        ttl: float,
        *,
        on_news: Callable[[Sequence[str]], None],
        on_ready: Callable[[], None],
        on_lease: Callable[[bool], None],
        executes: bool,
        notes: Notes,
    ) -> None:
        self._notes = notes
        self._database, self._journal, self._ttl = database, journal, ttl
        self._on_news, self._on_ready, self._on_lease = on_news, on_ready, on_lease
        self._executes = executes
        self.holder: str | None = None
        self._renewed_at = 0.0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._failures = LogThrottle()
        self._news_failures = LogThrottle()

    def open(self, connection: Connection) -> None:
        """Obtain the lease with a connection of the caller's thread."""
        if self._executes:
            self._renew(connection)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(
            target=self._work, name="operations runs lease", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it. The lease stays until `Journal.leave`."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def is_valid(self) -> bool:
        """Whether other processes certainly respect the lease for a while."""
        return self.remaining > 0

    @property
    def remaining(self) -> float:
        """The seconds for which the lease is certainly valid, unless it is renewed."""
        if self.holder is None:
            return 0.0
        return self._renewed_at + self._margin - monotonic()

    @property
    def _margin(self) -> float:
        return self._ttl - min(2.0, self._ttl / 4)

    def _work(self) -> None:
        connection: Connection | None = None
        news: Connection | None = None
        every = self._ttl * 0.3
        cleaned_at = monotonic()
        while not self._stopped.is_set():
            try:
                if news is None:
                    news = self._database.connect(writes=False)
                changed = news.news(min(_NEWS_SECONDS, every / 2))
                if changed and not self._stopped.is_set():
                    self._on_news(changed)
            except Exception as error:  # noqa: BLE001 - the database may fail in any way
                logger.log(self._news_failures.level(), "no news of runs: %r", error)
                _close(news)
                news = None
                self._stopped.wait(_NEWS_SECONDS)
            if not self._executes or self._stopped.is_set():
                continue
            if monotonic() - self._renewed_at >= every or self.holder is None:
                try:
                    if connection is None:
                        connection = self._database.connect()
                    self._renew(connection)
                    self._take_over(connection)
                    if monotonic() - cleaned_at > _CLEAN_SECONDS:
                        cleaned_at = monotonic()
                        self._clean(connection)
                except Exception as error:  # noqa: BLE001 - as above
                    logger.log(
                        self._failures.level(), "the lease of the runs is not renewed: %r", error
                    )
                    _close(connection)
                    connection = None
                    self._stopped.wait(_NEWS_SECONDS)
            if self.holder is not None and not self.is_valid:
                self._lose()
        _close(news)
        _close(connection)

    def _renew(self, connection: Connection) -> None:
        """Renew the lease, or obtain a new one if there is none, or another process has taken over the runs."""
        began = monotonic()
        holder, is_new = self.holder, self.holder is None
        holder = holder or new_request_id()
        connection.begin(writes=True)
        try:
            kept = self._journal.renew(connection, holder, int(self._ttl * 1000), new=is_new)
            connection.commit()
        except BaseException:
            connection.rollback()
            raise
        if not kept:
            self._lose()
            self._renew(connection)
            return
        self._renewed_at = began
        if is_new:
            self.holder = holder
            self._on_lease(True)

    def _lose(self) -> None:
        self.holder = None
        self._on_lease(False)

    def _take_over(self, connection: Connection) -> None:
        connection.begin(writes=False)
        try:
            is_over = self._journal.has_dead(connection)
        finally:
            connection.rollback()
        if not is_over:
            return
        connection.begin(writes=True)
        try:
            taken = self._journal.take_over(connection)
            connection.commit()
        except BaseException:
            connection.rollback()
            raise
        logger.warning("%d runs of a process that is gone are continued", taken)
        self._on_ready()

    def _clean(self, connection: Connection) -> None:
        for clean in (self._journal.end_unanswered, self._journal.remove_expired):
            while True:
                self._notes.begin(connection)
                connection.begin(writes=True)
                try:
                    done = clean(connection)
                    connection.commit()
                    self._notes.committed(connection)
                except BaseException:
                    connection.rollback()
                    raise
                if not done:
                    break


def _close(connection: Connection | None) -> None:
    if connection is not None:
        connection.close()
