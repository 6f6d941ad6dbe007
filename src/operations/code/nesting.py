"""Saved scripts that scripts call: what they share, so that nesting multiplies no limit.

    script (level 0) -> saved script (level 1) -> saved script (level 2) -> ...

Rule 1: the calls of all levels count together.
Rule 2: each level has places of its own: a script waits for places of deeper levels only, so that no two scripts wait
        for each other.
"""

import asyncio
from contextvars import ContextVar
from typing import Final

from operations.code.config import CodeLimits

MAX_LEVELS: Final = 4
"""The largest number of scripts that are nested in each other, with the outermost one."""


class Tree:
    """A script that no other script has called, with all saved scripts below it.

    Args:
        limits: The limits of the script.

    Attributes:
        is_spent: Whether one of them wanted to make more calls than the limit.
    """

    def __init__(self, limits: CodeLimits) -> None:
        self.is_spent = False
        self._left = limits.calls
        self._places = [asyncio.Semaphore(limits.concurrent) for _ in range(MAX_LEVELS)]

    def count_call(self) -> None:
        """Count a call that one of the scripts makes."""
        self._left -= 1
        self.is_spent = self.is_spent or self._left < 0

    def places(self, level: int) -> asyncio.Semaphore:
        """Return the places for calls that the scripts of a level make at the same time."""
        return self._places[level]


class Nesting:
    """The place of one script in its tree."""

    def __init__(self, tree: Tree, level: int) -> None:
        self.tree, self.level = tree, level

    def inner(self) -> "Nesting | None":
        """Return the place of a saved script that this one calls; None if it would be nested too deeply."""
        return Nesting(self.tree, self.level + 1) if self.level + 1 < MAX_LEVELS else None


calling: ContextVar[Nesting | None] = ContextVar("operations_code_calling", default=None)
"""The script whose call is running in this task."""
