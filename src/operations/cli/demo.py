"""`operations demo`: a small task tracker, called in every way, with the envelopes shown."""

import sys
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, replace
from typing import Any, TextIO

import msgspec

from operations.access import Identity
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError
from operations.registry import OperationRegistry
from operations.specs import ErrorDefinition


@dataclass(frozen=True)
class Task:
    """Something to do."""

    id: int
    title: str
    done: bool = False


def build_tracker() -> OperationRegistry:
    """A registry with a query, two mutations and a subscription over a few tasks."""
    registry = OperationRegistry()
    tasks = {1: Task(1, "Read the README")}
    not_found = ErrorDefinition("TASK_NOT_FOUND", "No task has this id.", http_status=404)

    @registry.operation("task.get", type="query", errors=[not_found])
    async def get(id: int) -> Task:
        """One task by its id."""
        if id not in tasks:
            raise CallError("TASK_NOT_FOUND", f"there is no task {id}", {"id": id})
        return tasks[id]

    @registry.operation("task.create")
    async def create(title: str) -> Task:
        """Add a task."""
        task = Task(len(tasks) + 1, title)
        tasks[task.id] = task
        return task

    @registry.operation("task.finish", scopes=["task:write"], errors=[not_found])
    async def finish(id: int, context: OperationContext) -> Task:
        """Mark a task as done."""
        found = await context.env.task.get({"id": id})
        done = replace(Task(**found.data), done=True)
        tasks[id] = done
        return done

    @registry.operation("task.watch")
    async def watch(count: int = 2) -> AsyncIterator[Task]:
        """Tasks, one after another."""
        for task in list(tasks.values())[:count]:
            yield task

    return registry


async def demo(out: TextIO = sys.stdout) -> None:
    """Call the tracker in every way there is and show what comes back."""
    registry = build_tracker()
    show = _Printer(out)
    alice = OperationContext(identity=Identity("alice", ["task:write"]))

    show.title(
        f"A registry of {len(registry)} operations. Every call gives an envelope: data and meta."
    )
    await show.call(
        "a query", 'execute("task.get", {"id": 1})', registry.execute("task.get", {"id": 1})
    )
    await show.call(
        "a mutation",
        'execute("task.create", {"title": "Write a handler"})',
        registry.execute("task.create", {"title": "Write a handler"}),
    )
    await show.call(
        "a nested call: task.finish asks task.get through context.env",
        'execute("task.finish", {"id": 2}, as_alice)',
        registry.execute("task.finish", {"id": 2}, alice),
    )
    await show.stream(
        "a subscription: one envelope per item",
        'async for envelope in subscribe("task.watch")',
        registry.subscribe("task.watch"),
    )
    show.title("What goes wrong is always a CallError: code, message and details.")
    await show.call(
        "input that does not fit its schema",
        'execute("task.create", {"title": 7, "urgent": true})',
        registry.execute("task.create", {"title": 7, "urgent": True}),
    )
    await show.call(
        "a caller without the scope task:write",
        'execute("task.finish", {"id": 1})',
        registry.execute("task.finish", {"id": 1}),
    )
    await show.call(
        "an error the operation declares",
        'execute("task.get", {"id": 99})',
        registry.execute("task.get", {"id": 99}),
    )
    show.title("Next: docs/registry.md")


class _Printer:
    """Calls and what they gave, with colour where a person is looking."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._colour = out.isatty()

    def title(self, text: str) -> None:
        self._line(f"\n{text}", "1")

    async def call(self, what: str, code: str, call: Awaitable[ResponseEnvelope[Any]]) -> None:
        self._asked(what, code)
        try:
            self._answered((await call).to_wire())
        except CallError as error:
            self._failed(error)

    async def stream(
        self, what: str, code: str, items: AsyncIterator[ResponseEnvelope[Any]]
    ) -> None:
        self._asked(what, code)
        async for envelope in items:
            self._answered(envelope.to_wire())

    def _asked(self, what: str, code: str) -> None:
        self._line(f"\n# {what}", "2")
        self._line(f"> {code}", "36")

    def _answered(self, wire: Any) -> None:
        self._line(f"  {msgspec.json.encode(wire).decode()}", "32")

    def _failed(self, error: CallError) -> None:
        self._line(f"  CallError {msgspec.json.encode(error.to_wire()).decode()}", "31")

    def _line(self, text: str, style: str) -> None:
        print(f"\033[{style}m{text}\033[0m" if self._colour else text, file=self._out)
