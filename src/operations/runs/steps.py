"""The steps of a run: named by content, and never begun before what earlier attempts have recorded.

    charge.card#3f...#0    operation, digest of its parent and its canonical input, number among equal calls

Rule 1: a name does not depend on the position of a call: handlers make calls at the same time and in any order.
Rule 2: a call that certainly never began gives its number back, so that its repetition has the same name.
Rule 3: a new mutation begins only when every recorded mutation of the same operation was asked for again. Otherwise its
        input may have changed since the last attempt, as with a random id, and it would run twice.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from hashlib import sha256
from heapq import heappop, heappush
from typing import Any, Final

from operations.base.json.values import as_json, canonical
from operations.runs.records import MARKED, MUTATION, ONCE, Step
from operations.runs.texts import enforce_storable

DIVERGENCE_SECONDS: Final = 2.0
"""How long a new mutation waits until the recorded ones have been asked for."""


class StepNames:
    """Gives names to the steps of one attempt."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._returned = defaultdict[str, list[int]](list)

    def take(self, parent: str, operation: str, input: Any) -> str:
        """Return the name of a call.

        Args:
            parent: The name of the step that makes it.
            operation: The called operation.
            input: Its input.

        Raises:
            JSONValueError: If the input is not JSON.
            CallError: `VALIDATION_ERROR` if the name of the operation or the step cannot be stored.
        """
        enforce_storable(operation, "name")
        text = canonical([parent, as_json(input)])
        stem = f"{operation}#{sha256(text).hexdigest()[:32]}"
        if self._returned.get(stem):
            return f"{stem}#{heappop(self._returned[stem])}"
        number = self._next.get(stem, 0)
        self._next[stem] = number + 1
        return f"{stem}#{number}"

    def give_back(self, name: str) -> None:
        """Return the name of a call that never began."""
        stem, _, number = name.rpartition("#")
        heappush(self._returned[stem], int(number))


class RecordedSteps:
    """The steps that earlier attempts have recorded, and which of them were asked for again."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = {step.name: step for step in steps}
        self._unasked = defaultdict[str, set[str]](set)
        self._children = defaultdict[str, list[Step]](list)
        self._asked = asyncio.Event()
        for step in self._steps.values():
            self._children[step.parent].append(step)
            if step.kind in (*MARKED, MUTATION):
                self._unasked[step.operation].add(step.name)

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, name: str) -> Step | None:
        """Return a step; None if it is not recorded."""
        return self._steps.get(name)

    def begun_once(self) -> Step | None:
        """Return a call that may run only once, and began without a recorded outcome."""
        for step in self._steps.values():
            if step.kind == ONCE and not step.is_recorded:
                return step
        return None

    def ask(self, step: Step) -> None:
        """Note that a step was asked for, and with it those that its handler made."""
        if not self._unasked:
            return
        names = self._unasked.get(step.operation)
        if names is not None:
            names.discard(step.name)
            if not names:
                del self._unasked[step.operation]
                self._asked.set()
        if step.is_recorded:
            for child in self._children.get(step.name, ()):
                self.ask(child)

    async def all_asked(self, operation: str) -> bool:
        """Wait until all recorded mutations of an operation were asked for; return False if they were not in time."""
        if operation not in self._unasked:
            return True
        try:
            async with asyncio.timeout(DIVERGENCE_SECONDS):
                while operation in self._unasked:
                    self._asked.clear()
                    await self._asked.wait()
        except TimeoutError:
            return False
        return True
