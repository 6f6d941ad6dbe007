"""The time by which grants, approvals and credentials end.

Rule 1: an end is compared with real time, so that a wrong clock has no effect after it was corrected.
Rule 2: while the clock of the machine is more than a minute behind the time that has passed, everything that ends
        counts as over. Otherwise, setting the clock back would extend every grant.
Rule 3: decisions that outlast a wrong clock, such as a new end or the removal of a revocation, use `settled`. It
        ignores a step forward until the step has lasted for some minutes.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from operations.base.logs import LogThrottle

logger = logging.getLogger("operations")

TOLERATED: Final = 60.0
"""Seconds that the clock may be set back."""

SETTLED: Final = 300.0
"""Seconds after which a step forward counts as the real time, for example after a virtual machine was paused."""

_DRIFT: Final = 1e-4
"""Seconds per second by which a clock without correction may be wrong."""


def _elapsed() -> float:
    """Return the seconds since some moment, including those in which the machine was suspended."""
    # On Linux and macOS, `monotonic` stops meanwhile, and the real time would seem to step forward.
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        if hasattr(time, name):
            return time.clock_gettime(getattr(time, name))
    return time.monotonic()


class MachineClock:
    """The clock of the machine, compared with the time that has passed since the process started.

    Args:
        wall: Returns the real time in seconds since the epoch.
        elapsed: Returns seconds that pass at the same rate and are never set.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = _elapsed
    ) -> None:
        self._wall, self._elapsed = wall, elapsed
        self._started = elapsed()
        self._offset = wall() - self._started
        self._step = 0.0
        """Seconds by which the clock was set forward, and which count as real."""
        self._stepped_at: float | None = None
        """When a step that does not count yet was noticed."""
        self._logged = LogThrottle(elapsed)

    def now(self) -> int:
        """Return the real time in milliseconds since the epoch."""
        return int(self._wall() * 1000)

    def is_over(self, until: float | None) -> bool:
        """Return whether a time, in milliseconds since the epoch, has come; never for None.

        While the clock is behind, every time has come.
        """
        if until is None:
            return False
        wall, elapsed = self._wall(), self._elapsed()
        if wall - elapsed - self._offset - self._step > TOLERATED:
            self.settled()  # which logs the step
        # An int, so that a broken clock raises: no comparison with NaN is true.
        return int(wall * 1000) >= until or self._is_behind(wall, elapsed)

    def settled(self) -> int:
        """Return the time in milliseconds since the epoch, without a step forward that may not last."""
        wall, elapsed = self._wall(), self._elapsed()
        ahead = wall - elapsed - self._offset
        step = ahead - self._step
        if step <= TOLERATED:
            self._step, self._stepped_at = ahead, None
            return int(wall * 1000)
        if self._stepped_at is None:
            self._stepped_at = elapsed
        if elapsed - self._stepped_at >= SETTLED:
            self._step, self._stepped_at = ahead, None
            return int(wall * 1000)
        message = (
            "the clock of this machine was set forward by %d s: for %d s, "
            "new grants and approvals begin at the old time"
        )
        logger.log(self._logged.level(), message, step, SETTLED)
        return int((wall - step) * 1000)

    def _is_behind(self, wall: float, elapsed: float) -> bool:
        behind = elapsed + self._offset - wall
        if behind <= TOLERATED + _DRIFT * (elapsed - self._started):
            return False
        message = (
            "the clock of this machine was set back by %d s: "
            "credentials that expire are rejected until it has caught up, or this process restarts"
        )
        logger.log(self._logged.level(), message, behind)
        return True


machine = MachineClock()
"""The clock that every function of this module reads."""


def clock() -> int:
    """Return the real time in milliseconds since the epoch."""
    return machine.now()


def is_over(until: float | None) -> bool:
    """Return whether a time, in milliseconds since the epoch, has come; see `MachineClock.is_over`."""
    return machine.is_over(until)


def settled() -> int:
    """Return the time in milliseconds since the epoch for decisions that last; see `MachineClock.settled`."""
    return machine.settled()
