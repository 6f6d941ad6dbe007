"""Record the tool calls of an agent and their nested calls as a tree."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from operations._json import JSONValueError, to_json
from operations.observe import CallEvent, CallFinished, CallStarted
from operations.types import JSONObject


class Step(msgspec.Struct, kw_only=True, rename="camel", omit_defaults=True):
    """One call."""

    operation_id: str
    request_id: str

    input: Any = None
    """The arguments of a tool call; the arguments of nested calls are not recorded."""

    outcome: str = "pending"
    """`pending`, `success`, or the code of the error."""

    duration: float | None = None
    """Seconds; None while the call runs."""

    changes: dict[str, int] | None = None
    """How many values of the input and the result were changed, by kind."""

    steps: list["Step"] = []
    """The calls that this one made."""


class Transcript:
    """The steps of an agent, oldest first. Iterate over it, print it, or write `to_json()` to a file.

    Args:
        limit: How many tool calls are kept; the oldest are dropped first.
    """

    def __init__(self, limit: int = 1_000) -> None:
        self._steps: deque[Step] = deque(maxlen=limit)
        self._running: dict[str, Step] = {}

    def __iter__(self) -> Iterator[Step]:
        return iter(tuple(self._steps))

    def __len__(self) -> int:
        return len(self._steps)

    def __str__(self) -> str:
        return "\n".join(line for step in self for line in _lines(step, 0))

    def to_json(self) -> list[JSONObject]:
        """Return the steps as JSON."""
        return [msgspec.to_builtins(step) for step in self]

    def begin(self, operation_id: str, request_id: str, input: Any) -> Step:
        """Record a tool call."""
        try:
            shown = to_json(input)
        except JSONValueError as error:
            shown = f"not JSON: {error}"
        step = Step(operation_id=operation_id, request_id=request_id, input=shown)
        self._steps.append(step)
        self._running[request_id] = step
        return step

    def end(self, step: Step, duration: float) -> None:
        """Record the end of a tool call."""
        step.duration = duration
        self._forget(step)

    def observe(self, event: CallEvent) -> None:
        """Record the calls that running tool calls make; all other events are ignored."""
        if isinstance(event, CallStarted):
            parent = self._running.get(event.parent_request_id or "")
            if parent is not None and event.request_id not in self._running:
                step = Step(operation_id=event.operation_id, request_id=event.request_id)
                parent.steps.append(step)
                self._running[event.request_id] = step
        elif isinstance(event, CallFinished):
            found = self._running.get(event.request_id)
            if found is not None:
                found.outcome = event.code or "success"
                found.duration, found.changes = event.duration, event.changes

    def _forget(self, step: Step) -> None:
        self._running.pop(step.request_id, None)
        for each in step.steps:
            self._forget(each)


def _lines(step: Step, depth: int) -> Iterator[str]:
    took = "" if step.duration is None else f" {step.duration * 1000:.1f} ms"
    given = "" if step.input is None else f" {msgspec.json.encode(step.input).decode()}"
    yield f"{'  ' * depth}{step.operation_id}{given}: {step.outcome}{took}"
    for each in step.steps:
        yield from _lines(each, depth + 1)
