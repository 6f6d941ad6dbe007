"""The command line as a door: progress, log messages and questions of a call reach the person at the terminal."""

from collections.abc import Generator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from operations.cli.outline import Outline
from operations.cli.prompts import ask_for_missing
from operations.cli.render import Screen, encoded, plain
from operations.context import Door
from operations.types import JSONObject


@contextmanager
def terminal_door(screen: Screen, title: str) -> Generator[Door]:
    """What a call may send back while it runs, shown for the length of a `with` block."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        console=screen.err,
        transient=True,
        disable=not screen.err.is_terminal or screen.json,
    )
    bar = progress.add_task(plain(title), total=None, visible=False)

    async def show(done: float, total: float | None, message: str | None) -> None:
        progress.start()
        progress.update(
            bar, completed=done, total=total, description=plain(message or title), visible=True
        )
        # At once: a handler that reports and then computes leaves no time for a refresh.
        progress.refresh()

    async def log(level: str, data: object) -> None:
        text = data if isinstance(data, str) else encoded(data)
        screen.note(f"{level}: {text}", "yellow" if level in _LOUD else "dim")

    async def elicit(message: str, schema: JSONObject) -> JSONObject:
        progress.stop()
        screen.note(message, "bold")
        try:
            content = ask_for_missing({}, Outline(schema), screen)
        except KeyboardInterrupt:
            return {"action": "cancel"}
        return {"action": "accept", "content": content}

    try:
        yield Door(progress=show, log=log, elicit=elicit if screen.can_ask else None)
    finally:
        progress.stop()


_LOUD = frozenset({"warning", "error", "critical", "alert", "emergency"})
