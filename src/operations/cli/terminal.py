"""The person at the terminal: progress, log messages and questions of a call, and required values that are missing.

Rule 1: a bar is removed before anything else is written, so that a result starts on a line of its own. If standard
        error is not a terminal, progress is at most one line per second; with `--json` there is none.
Rule 2: questions go to standard error, so that a result can still go into a file.
Rule 3: Ctrl-C and Ctrl-D end the question and the command.
"""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from getpass import getpass
from time import monotonic
from typing import Any, cast

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.text import Text

from operations.cli.inputs import typed
from operations.cli.render import Screen, encoded, first_line, plain
from operations.context import CallerChannel
from operations.errors import CallError, SchemaError
from operations.schema import Schema
from operations.schema.outline import Outline
from operations.types import JSONObject


def ask_for_missing(value: Any, outline: Outline, screen: Screen, prefix: str = "") -> Any:
    """`value` with its missing required properties asked for; only objects have any."""
    if not isinstance(value, dict):
        return value
    given = cast("JSONObject", value)
    properties = outline.properties
    answers: JSONObject = {}
    for name in outline.required:
        inner = properties.get(name, Outline({}))
        if name not in given:
            answers[name] = ask(f"{prefix}{name}", inner, screen)
        elif inner.properties:
            answers[name] = ask_for_missing(given[name], inner, screen, f"{prefix}{name}.")
    return given | answers


def ask(name: str, outline: Outline, screen: Screen) -> Any:
    """One value, asked for until it fits its schema."""
    if outline.required and not outline.is_recursive:
        return ask_for_missing({}, outline, screen, f"{name}.")
    if outline.description:
        screen.note(f"  {first_line(outline.description)}")
    while True:
        answer = _answer(name, outline, screen)
        try:
            value = typed(answer, outline, name)
        except CallError as error:
            screen.note(f"  {error.message}", "red")
            continue
        faults = _faults(value, outline)
        if not faults:
            return value
        for fault in faults:
            screen.note(f"  {name}{fault.path} {fault.message}", "red")


def confirm(screen: Screen) -> bool:
    """Ask for yes or no; anything but yes is no.

    Raises:
        KeyboardInterrupt: On Ctrl-C, or at the end of the input.
    """
    screen.err.print(Text("y/N: ", style="bold"), end="")
    return _read(input).strip().lower() in ("y", "yes")


def _answer(name: str, outline: Outline, screen: Screen) -> str:
    line = Text(plain(name), style="bold")
    line.append(f" ({plain(outline.kind)})", style="dim")
    line.append(": ")
    screen.err.print(line, end="")
    if outline.schema.get("format") == "password":
        return _read(lambda: getpass(""))
    return _read(input)


def _read(read: Callable[[], str]) -> str:
    with _interruptible():
        try:
            return read()
        except EOFError:
            raise KeyboardInterrupt from None


@contextmanager
def _interruptible() -> Generator[None]:
    """Let Ctrl-C interrupt a question: an event loop only takes note of it, and goes on reading."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _faults(value: Any, outline: Outline) -> list[Any]:
    try:
        return list(Schema(outline.standalone).errors(value))
    except SchemaError:
        # The whole input is judged later in any case.
        return []


_LINE_SECONDS = 1.0
"""Between two lines of progress in a pipe."""

_LOUD = frozenset({"warning", "error", "critical", "alert", "emergency"})


@contextmanager
def terminal_channel(
    screen: Screen, title: str
) -> Generator[tuple[CallerChannel, Callable[[], None]]]:
    """Show reports and questions of a call for the length of a `with` block.

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
        """Print the progress, at most once per second."""
        now = monotonic()
        if self._screen.json or now < self._next:
            return
        self._next = now + _LINE_SECONDS
        share = f"{done:g}" if total is None else f"{done:g} of {total:g}"
        self._screen.note(f"{message or self._title}: {share}")
