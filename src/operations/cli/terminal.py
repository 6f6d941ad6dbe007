"""The command line as a channel: progress, log messages and questions of a call reach the person at the terminal.

Rule: a bar is taken away before anything else is written, so that a result stands on lines of its own. Where standard
      error is no terminal, progress is lines, one a second at most; with `--json` there is none.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import monotonic

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from operations.cli.prompts import ask_for_missing, confirm
from operations.cli.render import Screen, encoded, plain
from operations.context import CallerChannel
from operations.schema.outline import Outline
from operations.types import JSONObject

_LINE_SECONDS = 1.0
"""Between two lines of progress in a pipe."""

_LOUD = frozenset({"warning", "error", "critical", "alert", "emergency"})


@contextmanager
def terminal_channel(
    screen: Screen, title: str
) -> Generator[tuple[CallerChannel, Callable[[], None]]]:
    """What a call may send back while it runs, shown for the length of a `with` block.

    Gives the channel, and what is to be called before a result is printed.
    """
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
    lines = _Lines(screen, title)

    async def show(done: float, total: float | None, message: str | None) -> None:
        if progress.disable:
            lines.show(done, total, message)
            return
        progress.start()
        progress.update(
            bar, completed=done, total=total, description=plain(message or title), visible=True
        )
        # At once: a handler that reports and then computes leaves no time for a refresh.
        progress.refresh()

    async def log(level: str, data: object, name: str | None) -> None:
        text = data if isinstance(data, str) else encoded(data)
        prefix = level if name is None else f"{level}: {name}"
        screen.note(f"{prefix}: {text}", "yellow" if level in _LOUD else "dim")

    async def elicit(message: str, schema: JSONObject) -> JSONObject:
        progress.stop()
        screen.note(message, "bold")
        try:
            if not schema.get("properties"):
                # Nothing to fill in: a question of yes or no.
                is_yes = confirm(screen)
                return {"action": "accept" if is_yes else "decline", "content": {}}
            content = ask_for_missing({}, Outline(schema), screen)
        except KeyboardInterrupt:
            return {"action": "cancel"}
        return {"action": "accept", "content": content}

    try:
        channel = CallerChannel(progress=show, log=log, elicit=elicit if screen.can_ask else None)
        yield channel, progress.stop
    finally:
        progress.stop()


class _Lines:
    """Progress for a log: few lines, and the first at once."""

    def __init__(self, screen: Screen, title: str) -> None:
        self._screen = screen
        self._title = title
        self._next = 0.0

    def show(self, done: float, total: float | None, message: str | None) -> None:
        """Say how far it is, unless that was said just now."""
        now = monotonic()
        if self._screen.json or now < self._next:
            return
        self._next = now + _LINE_SECONDS
        share = f"{done:g}" if total is None else f"{done:g} of {total:g}"
        self._screen.note(f"{message or self._title}: {share}")
