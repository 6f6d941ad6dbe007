"""Questions to the person at the terminal: the required values that were not given.

Rule 1: questions go to standard error, so that a result can still go into a file.
Rule 2: Ctrl-C and Ctrl-D end the question and the command.
"""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from getpass import getpass
from typing import Any, cast

from rich.text import Text

from operations.cli.inputs import typed
from operations.cli.render import Screen, first_line, plain
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
