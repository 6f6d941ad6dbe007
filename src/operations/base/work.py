"""The budget for the work on one value: its conversion to JSON, cast, check and explanation.

Rule 1: work is counted before it is done, in units of about 25 ns: the check of one value against one schema, or one
        byte that is encoded and decoded, in C. A step in Python is many units.
Rule 2: native code holds the interpreter lock, also in a thread, so one call of it may use `PIECE` units at most.
        Larger work is divided. If it cannot be divided, the budget counts as spent.
Rule 3: the event loop does up to `INLINE` units for one value. Work that needs more is done again in a thread, with the
        whole budget.
Rule 4: work that is stopped, because its call has ended, ends with the piece that it is in.
"""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

PIECE: Final = 400_000
"""The largest number of units of one native call: about 10 ms, 20 ms on a slow machine."""

INLINE: Final = 400_000
"""The largest number of units in the event loop for one value."""

SMALL: Final = 10_000
"""The number of units of a check so small that not even its steps in Python are counted: each value needs a few."""

EXPLAINED: Final = 2_000_000
"""The number of units to explain why an input is not valid: about 50 ms."""

BUDGET: Final = 40_000_000
"""The number of units for one value: about a second."""

STEP: Final = 40
"""The units of a step in Python, about a microsecond."""

CONVERTED: Final = 6
"""The units to convert one value to JSON."""

MADE: Final = 100
"""The units of a value that is filled in or created, so that few bytes do not become many objects."""


class BudgetSpentError(Exception):
    """The work on a value needs more than its budget, or was stopped."""


class Work:
    """Counts the work on one value.

    Attributes:
        left: The units that are left.
        is_stopped: Whether the work is abandoned; see `stop`.
    """

    # Defaults of the class, because an object is created for most results.
    left = BUDGET
    is_stopped = False
    _explanations: "tuple[Explanation, ...]" = ()

    def spend(self, units: int) -> None:
        """Count units of work, which follow.

        Raises:
            BudgetSpentError: If the budget does not suffice, or the work was stopped.
        """
        self.left -= units
        if self.left < 0 or self.is_stopped:
            raise BudgetSpentError

    def renew(self) -> None:
        """Begin again with the whole budget, to return the value unchanged. Work that was stopped stays stopped."""
        self.left = BUDGET

    def stop(self) -> None:
        """Make the work end soon, from another thread."""
        self.is_stopped = True
        for each in self._explanations:
            each.stop()

    def explaining(self) -> "Explanation":
        """Return a budget to explain why the value is not valid, which ends when this work is stopped."""
        found = Explanation()
        self._explanations = (*self._explanations, found)
        # Read afterwards, because another thread may stop this work now.
        found.is_stopped = self.is_stopped
        return found


_of_thread = threading.local()


@contextmanager
def working(work: Work) -> Generator[None]:
    """Let `checkpoint` end the block soon after `work` is stopped."""
    before = getattr(_of_thread, "work", None)
    _of_thread.work = work
    try:
        yield
    finally:
        _of_thread.work = before


def checkpoint() -> None:
    """End the current work in this thread if it was stopped.

    Raises:
        BudgetSpentError: If it was.
    """
    work: Work | None = getattr(_of_thread, "work", None)
    if work is not None and work.is_stopped:
        raise BudgetSpentError


class InlineWork(Work):
    """Work in the event loop."""

    left = INLINE


class FreeWork(Work):
    """Work that is known to be little."""

    left = sys.maxsize


class Explanation(Work):
    """Work to explain why an input is not valid."""

    left = EXPLAINED
