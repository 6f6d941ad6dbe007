"""The common parts of all commands: options, opening the config, output and exit codes.

Rule 1: commands raise errors; this module converts them to a message for people or JSON for scripts, and an exit code.
Rule 2: a traceback is printed only with --verbose.
Rule 3: results are written to standard output, all other text to standard error.
Rule 4: with `--json` both contain JSON. Otherwise output is coloured and formatted on a terminal, and plain lines in a
        pipe.
Rule 5: text from other parties (descriptions, results, messages) is printed without markup, and with control and other
        invisible characters escaped.
"""

import asyncio
import inspect
import logging
import os
import shlex
import sys
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import IntEnum
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeAlias, TypeVar

import msgspec
from cyclopts import CycloptsError, Parameter, validators
from cyclopts.completion import CompletionContext
from rich.cells import cell_len, set_cell_size
from rich.color import ColorSystem
from rich.console import Console, RenderableType
from rich.highlighter import JSONHighlighter
from rich.style import Style
from rich.text import Text

from operations.base.errors import CallError, ErrorCode, OperationsError, TransportError, with_code
from operations.base.json.values import is_list, is_object, list_of, object_of, to_json
from operations.base.tasks import cancel_tasks, exit_on_termination
from operations.base.text import counted, printable, visible, visible_json
from operations.base.types import JSONObject
from operations.config import (
    FILE_NAME,
    ConfigError,
    ConfigFile,
    enforce_trusted,
    find_config,
    load_config,
)
from operations.contract.specs import OperationSpec, describable
from operations.hub import ALL, Hub, Source, SourceFilter, open_hub
from operations.hub.journal import recall_ids, recall_operations, remember_operations
from operations.recorder.logs import LogConfig, LogFormatter
from operations.schema.outline import Outline

T = TypeVar("T")

_TOLD = frozenset({ErrorCode.OPERATION_NOT_FOUND, ErrorCode.TIMEOUT})
"""Errors whose message contains their details."""

STYLES = {"query": "green", "mutation": "yellow", "subscription": "magenta"}
"""The colour of each type of operation."""

SHOWN = 20
"""The number of lines of a report that are printed without --verbose."""

Overflow: TypeAlias = Literal["wrap", "cut", "keep"]

_LAST = datetime(9999, 12, 30, tzinfo=UTC).timestamp()

_WIDE = 100_000
"""The width of output that is not a terminal."""

_LONG_TEXT = 400
_LONG_LIST = 50
"""The characters of a text, and the items of a list, that a result on a terminal shows without --verbose."""

_READABLE = 24
"""The width below which the last column of a table is hard to read."""


def first_line(text: str) -> str:
    """Return the first line, escaped for a terminal."""
    return printable(text.strip().partition("\n")[0].strip())


def styled(*parts: tuple[str, str]) -> Text:
    """Return the parts of one line, each with its style and escaped for a terminal."""
    return Text.assemble(*((printable(text), style) for text, style in parts))


def local_time(milliseconds: float) -> datetime:
    """Return a time since the epoch in the local zone; a time beyond the calendar as the end of the calendar."""
    return datetime.fromtimestamp(min(milliseconds / 1000, _LAST), UTC).astimezone()


def enforce_writable(path: Path) -> None:
    """Raise an error if an output cannot be written: found out at the end, the result would be lost.

    Raises:
        OperationsError: With the reason.
    """
    is_writable = os.access(path if path.exists() else path.parent, os.W_OK)
    if path.is_dir() or not is_writable:
        reason = "is a folder" if path.is_dir() else "cannot be written"
        raise OperationsError(f"{path} {reason}: choose another --output")


def _fitted(cell: str, width: int) -> str:
    """Return a cell padded to the width of its column, or shortened with an ellipsis."""
    cut = cell if cell_len(cell) <= width else set_cell_size(cell, width - 1) + "…"
    return set_cell_size(cut, width)


def encoded(value: Any, *, indent: int = 0) -> str:
    """Return `value` as JSON text."""
    text = msgspec.json.encode(to_json(value))
    return (msgspec.json.format(text, indent=indent) if indent else text).decode()


def folded(value: Any) -> Any:
    """Return a JSON value whose long texts and lists are replaced by their beginning and their length."""
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        return f"{value[: _LONG_TEXT // 2]}... ({counted(len(value), 'character')})"
    if is_list(value):
        items: list[Any] = [folded(each) for each in value[:_LONG_LIST]]
        return (
            items if len(value) <= _LONG_LIST else [*items, f"... ({counted(len(value), 'item')})"]
        )
    if is_object(value):
        return {key: folded(each) for key, each in value.items()}
    return value


class Screen:
    """The two streams of one command."""

    def __init__(self, *, json: bool = False, verbose: bool = False) -> None:
        self.json = json
        self.verbose = verbose
        self.log: logging.Logger | None = None
        """Receives notes and warnings, if `[log] json` requires that standard error is only JSON."""
        self.out = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self.err = Console(file=sys.stderr, highlight=False, markup=False, emoji=False)
        if not self.out.is_terminal:
            # A pipe has no width limit, but rich would truncate a tree.
            self.out.width = _WIDE

    @property
    def is_terminal(self) -> bool:
        """Whether results go to a terminal."""
        return self.out.is_terminal and not self.json

    @property
    def can_ask(self) -> bool:
        """Whether a person can answer questions."""
        return sys.stdin.isatty() and self.err.is_terminal and not self.json

    # ------------------------------------------------------------ results

    def value(self, value: Any) -> None:
        """Write one formatted JSON value."""
        self._print(encoded(value, indent=2))

    def result(self, value: Any) -> None:
        """Write the result of a call as `value` does, but fold long values on a terminal, unless --verbose."""
        whole = to_json(value)
        shown = folded(whole) if self.is_terminal and not self.verbose else whole
        self.value(shown)
        if shown != whole:
            self.note("long values are folded; --verbose shows all")

    def item(self, value: Any) -> None:
        """Write an item of a stream at once, as JSON on one line."""
        self._print(encoded(value))
        sys.stdout.flush()

    def _print(self, text: str) -> None:
        # Escaped in pipes as well, which often end at a terminal; the value is the same.
        text = visible_json(text)
        if self.is_terminal:
            self.out.print(JSONHighlighter()(text), soft_wrap=True)
        else:
            self.write(text)

    def write(self, text: str) -> None:
        """Print a line of text unchanged."""
        sys.stdout.write(text + "\n")

    def write_bytes(self, data: bytes) -> None:
        """Write bytes unchanged."""
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def line(self, *parts: tuple[str, str], overflow: Overflow = "wrap") -> None:
        """Print one line of parts, each with its style."""
        self.show(styled(*parts), overflow=overflow)

    def show(self, part: RenderableType, *, overflow: Overflow = "wrap") -> None:
        """Print formatted output.

        Args:
            part: The output.
            overflow: What happens at the width of a terminal: lines are wrapped, truncated, or kept to be copied.
        """
        if overflow == "cut" and self.is_terminal:
            self.out.print(part, no_wrap=True, overflow="ellipsis")
        else:
            self.out.print(part, soft_wrap=overflow == "keep" or not self.is_terminal)

    def rows(
        self,
        headings: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        optional: Collection[str] = (),
    ) -> None:
        """Print a table on a terminal, or tab-separated lines in a pipe.

        If the terminal is too narrow, the last column is shortened, or has a line of its own below each row.

        Args:
            headings: The headings of the columns.
            rows: The cells; a type of operation has its colour.
            optional: The columns to leave out if the terminal leaves too little room for the last column.
        """
        clean = [[printable(cell.replace("\t", " ")) for cell in row] for row in rows]
        if not self.is_terminal:
            for row in clean:
                self.write("\t".join(row))
            return
        # Formatted here, because a rich table takes seconds for thousands of rows.
        columns = list(zip(headings, *clean, strict=True))
        widths = [max(map(cell_len, column)) for column in columns]
        if self._room(widths) < min(widths[-1], _READABLE):
            kept = [number for number, name in enumerate(headings) if name not in optional]
            columns, widths = [columns[each] for each in kept], [widths[each] for each in kept]
        room = self._room(widths)
        is_folded = room < min(widths[-1], _READABLE)
        widths[-1] = max(10, self.out.width - 2) if is_folded else min(widths[-1], room)
        colours = None if self.out.no_color else ColorSystem.STANDARD
        for number, texts in enumerate(zip(*columns, strict=True)):
            cells = [
                Style.parse(STYLES.get(cell, "") if number else "dim").render(
                    _fitted(cell, width), color_system=colours
                )
                for cell, width in zip(texts, widths, strict=True)
            ]
            first, last = "  ".join(cells[:-1]), cells[-1].rstrip()
            if not is_folded:
                self.write(f"{first}  {last}".rstrip() if len(cells) > 1 else last)
            elif number:
                self.write(first.rstrip())
                if last:
                    self.write(f"  {last}")
        sys.stdout.flush()

    def _room(self, widths: Sequence[int]) -> int:
        """Return the width that a terminal leaves for the last of some columns."""
        return self.out.width - sum(widths[:-1]) - 2 * len(widths) + 2

    def some(self, items: Sequence[T], limit: int = SHOWN, *, verbose: bool) -> Iterator[T]:
        """Yield the first items, or all if `verbose`, and then print how many are left out."""
        shown = items if verbose else items[:limit]
        yield from shown
        if len(shown) < len(items):
            self.note(f"  ... and {len(items) - len(shown)} more; --verbose shows all")

    # ------------------------------------------------------------ errors and warnings

    def note(self, text: str, style: str = "dim") -> None:
        """Print a note on standard error."""
        if self.log is not None:
            self.log.info("%s", text)
        elif self.json:
            self._complain({"note": {"message": text.strip()}})
        else:
            self.err.print(Text(visible(text), style), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning on standard error; the command continues."""
        if self.log is not None:
            self.log.warning("%s", text)
        elif self.json:
            self._complain({"warning": {"message": text}})
        else:
            self.note(f"warning: {text}", "yellow")

    def failed(self, message: str) -> None:
        """Print the error of a command."""
        if self.json:
            self._complain({"error": {"code": "FAILED", "message": message}})
        else:
            self.note(f"error: {message}", "red")

    def config_failed(self, error: ConfigError) -> None:
        """Print all errors of the config."""
        if self.json:
            details = {"issues": [asdict(issue) for issue in error.issues]}
            self._complain({"error": {"code": "CONFIG", "message": str(error), "details": details}})
            return
        for issue in error.issues:
            self.note(str(issue), "red")

    def call_failed(self, error: CallError) -> None:
        """Print the error of a call: code, message, and useful details."""
        if self.json:
            self._complain({"error": error.to_wire()})
            return
        # The text of a server that does not start is a report without the code.
        text = (
            str(error) if str(error).startswith(error.code) else with_code(error.code, str(error))
        ).removeprefix(error.code)
        self.err.print(
            styled((error.code, "bold red")).append(visible(text), "red"), soft_wrap=True
        )
        details: Any = error.to_wire().get("details")
        if error.code == ErrorCode.VALIDATION_ERROR:
            issues = list(map(object_of, list_of(object_of(details).get("errors"))))
            # Details that were printed above are not repeated.
            is_repeated = len(issues) == 1 and str(issues[0].get("message")) in error.message
            for issue in () if is_repeated else issues:
                self.note(f"  {issue.get('path') or '(input)'} {issue.get('message')}", "red")
        elif details is not None and error.code not in _TOLD:
            self.note(encoded(details, indent=2), "dim")

    def traceback(self) -> None:
        """Print the traceback of the current exception."""
        self.err.print_exception(width=None)

    def _complain(self, value: JSONObject) -> None:
        sys.stderr.write(visible_json(encoded(value)) + "\n")


class ExitCode(IntEnum):
    """The exit codes of commands, which are stable for scripts."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    CONFIG = 3
    NOT_FOUND = 4
    DENIED = 5
    INVALID = 6
    TIMED_OUT = 7
    UNAVAILABLE = 8
    NEEDS_APPROVAL = 9
    INTERRUPTED = 130


_BY_ERROR: dict[str, ExitCode] = {
    ErrorCode.OPERATION_NOT_FOUND: ExitCode.NOT_FOUND,
    ErrorCode.ACCESS_DENIED: ExitCode.DENIED,
    ErrorCode.VALIDATION_ERROR: ExitCode.INVALID,
    ErrorCode.TIMEOUT: ExitCode.TIMED_OUT,
    ErrorCode.UNAVAILABLE: ExitCode.UNAVAILABLE,
    ErrorCode.APPROVAL_REQUIRED: ExitCode.NEEDS_APPROVAL,
    ErrorCode.ABORTED: ExitCode.INTERRUPTED,
}


def exit_code_of(code: str) -> ExitCode:
    """Return the exit code for an error code; 1 for domain codes."""
    return _BY_ERROR.get(code, ExitCode.FAILED)


P = ParamSpec("P")

PORT = Parameter(alias="-p", validator=validators.Number(gte=0, lte=65535))
"""The settings of the option `--port`."""

POSITIVE = Parameter(validator=validators.Number(gt=0))
"""The settings of a number of seconds, calls or lines."""


@Parameter(name="*", group="For every command")
@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command.

    Attributes:
        config: The config file; by default the nearest operations.toml.
        json: Print JSON, for scripts.
        verbose: Print more details, and show tracebacks.
        trust: Use the config even if another user owns it. A config can run programs as you.
    """

    config: Annotated[Path | None, Parameter(alias="-c")] = None
    json: Annotated[bool, Parameter(alias="-j", negative="")] = False
    verbose: Annotated[bool, Parameter(alias="-v", negative="")] = False
    trust: Annotated[bool, Parameter(negative="")] = False

    @property
    def hints(self) -> str:
        """The options that select the same config in a suggested command, with a leading space."""
        return "" if self.config is None else f" --config {shlex.quote(str(self.config))}"

    def screen(self, file: ConfigFile | None = None) -> Screen:
        """Return the screen for results and errors; with a file, for a command that writes its logs."""
        screen = Screen(json=self.json, verbose=self.verbose)
        if file is not None and file.config.log.options.get("json") and not self.verbose:
            screen.log = logging.getLogger("operations.cli")
        return screen

    def load(self, *, required: bool = True) -> ConfigFile:
        """Return the config of this command.

        Raises:
            ConfigError: If the config has errors; if it is missing and `required`; or if it was found by search and
                belongs to another user.
        """
        path = self.config or find_config(Path.cwd())
        if path is None and not required:
            return ConfigFile()
        if path is not None and self.config is None and not self.trust:
            enforce_trusted(path)
        return load_config(path or Path(FILE_NAME))


DEFAULTS = Common()


def of_file(common: Common, file: Path | None) -> Common:
    """Return the options of a command whose first argument may name the config, or a Python file.

    Raises:
        OperationsError: If it is named twice.
    """
    if file is None:
        return common
    if common.config is not None:
        raise OperationsError(f"name either {file} or --config {common.config}, not both")
    return replace(common, config=file)


def complete_ids(_context: object) -> list[str]:
    """Return the stored ids of the config for the current folder, for shell completion."""
    with suppress(ConfigError, OSError):
        return recall_ids(DEFAULTS.load(required=False))
    return []


def complete_input(context: CompletionContext) -> list[str]:
    """Return the arguments that the operation before the cursor takes, for shell completion.

    These are `key=` for each property that is not given yet, and after the sign `key=value` for each allowed value.
    """
    operation_id = context["operation_id"].raw or ""
    with suppress(ConfigError, OSError):
        known = recall_operations(DEFAULTS.load(required=False)).get(operation_id, ())
        if "=" in context.incomplete:
            return [each for each in known if not each.endswith("=")]
        given = {each.partition("=")[0] for each in context["input"].raw_tokens}
        return [each for each in known if each.endswith("=") and each[:-1] not in given]
    return []


_ABANDON_SECONDS = 1.0
"""Seconds that cancelled tasks have to end."""


def command(function: Callable[P, Coroutine[Any, Any, int | None]]) -> Callable[P, int]:
    """Turn a coroutine function into a command, whose exceptions become a message and an exit code."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        common = kwargs.get("common", DEFAULTS)
        if not isinstance(common, Common):
            raise TypeError("a command takes its common options as `common`")
        return asyncio.run(_run(function(*args, **kwargs), common))

    run.__doc__ = _reflowed(function.__doc__ or "")
    return run


async def _run(function: Coroutine[Any, Any, int | None], common: Common) -> int:
    """Run a command; return its exit code."""
    level = logging.DEBUG if common.verbose else logging.ERROR
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(LogConfig(json=common.json)))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("operations").setLevel(level)
    screen = common.screen()
    try:
        with exit_on_termination():
            return await function or ExitCode.DONE
    except CallError as error:
        if common.verbose and error.unexpected:
            screen.traceback()
        screen.call_failed(error)
        return exit_code_of(error.code)
    except ConfigError as error:
        screen.config_failed(error)
        return ExitCode.CONFIG
    except (BrokenPipeError, CycloptsError):
        raise
    except Exception as error:  # noqa: BLE001 - a person cannot do anything with a traceback
        if common.verbose:
            screen.traceback()
        message = str(error) or type(error).__name__
        if isinstance(error, FileNotFoundError) and not _has_folder():
            message = "the current folder does not exist any more: change to another one"
        if not isinstance(error, (OperationsError, OSError)):
            hint = "" if common.verbose else "; --verbose shows where"
            message = f"this is a defect: {type(error).__name__}: {error}{hint}"
        screen.failed(message)
        return ExitCode.UNAVAILABLE if isinstance(error, TransportError) else ExitCode.FAILED
    finally:
        await _abandon_tasks()


def _has_folder() -> bool:
    try:
        return Path.cwd().exists()
    except FileNotFoundError:
        return False


async def _abandon_tasks() -> None:
    """Cancel the remaining tasks, and leave those that ignore it: `asyncio.run` would wait for them forever."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, running = await asyncio.wait(tasks, timeout=_ABANDON_SECONDS)
        for task in running:
            # The loop would report that it is destroyed.
            asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
            asyncio._unregister_task(task)  # noqa: SLF001 - documented for runners of tasks


def _reflowed(docstring: str) -> str:
    """Return a docstring with one line per paragraph: help keeps line breaks, and terminals differ in width."""
    text, section, arguments = inspect.cleandoc(docstring).partition("\n\nArgs:\n")
    return "\n\n".join(" ".join(each.split()) for each in text.split("\n\n")) + section + arguments


# ------------------------------------------------------------ opening the config

_MAX_WORDS = 100
"""The number of properties of an input, and of values of each, that a shell completes."""

_SETTLE_SECONDS = 3.0
"""Seconds that `serve` and `work` wait for sources before they report missing ones; they accept calls meanwhile."""


@asynccontextmanager
async def open_session(
    common: Common,
    screen: Screen,
    wanted: SourceFilter = ALL,
    *,
    file: ConfigFile | None = None,
    wait: bool = True,
    works: bool = False,
    develops: bool = False,
) -> AsyncGenerator[Hub]:
    """Open the hub of a command for the duration of an `async with` block.

    Args:
        common: The config and the verbosity.
        screen: Receives the reports.
        wanted: The sources to open.
        file: The config of a server, which is already loaded.
        wait: Whether to wait for the sources, and report those that cannot be opened.
        works: Whether to work on runs, as a server does.
        develops: Whether changed modules are imported again.

    Raises:
        ConfigError: If the config is missing or wrong.
    """
    if file is not None and _is_quiet(file, common):
        # Commands report their sources, but not a trace that a server cannot write.
        logging.getLogger("operations.recorder.graph").setLevel(logging.WARNING)
    opened = open_hub(
        file or common.load(), wanted, wait=30 if wait else 0, works=works, develops=develops
    )
    busy = screen.err.is_terminal and not screen.json
    async with AsyncExitStack() as stack:
        with screen.err.status("opening sources ...") if busy else nullcontext():
            hub = await stack.enter_async_context(opened)
        if wait:
            await _report_sources(hub, screen, common, wanted)
        yield hub


@asynccontextmanager
async def reporting_sources(
    hub: Hub, screen: Screen, then: Callable[[], object] = lambda: None
) -> AsyncGenerator[None]:
    """Print each source when it connects, and the total when all have, during an `async with` block.

    Args:
        hub: The hub of the sources.
        screen: Receives the report.
        then: Called after each report of a source.
    """

    async def report() -> None:
        async with aclosing(hub.connected()) as connected:
            async for source in connected:
                words = f"{counted(len(source.operations), 'operation')}, {source.seconds:.1f} s"
                screen.note(f"{source.full_name} connected, {words}")
                then()
        if len(hub.sources) > 1:
            screen.note(f"all sources are connected: {counted(hub.offered, 'operation')}")

    task = asyncio.Task(report())
    try:
        yield
    finally:
        await cancel_tasks(task)


async def settle(hub: Hub, screen: Screen, common: Common) -> None:
    """Wait briefly for the sources of a running hub, and report those that are not connected yet."""
    await hub.settled(_SETTLE_SECONDS)
    await _report_sources(hub, screen, common)
    if _is_quiet(hub.file, common):
        # Without `[log]`, also log events that resolve a warning, such as a source that is connected again.
        logging.getLogger("operations.hub").setLevel(logging.INFO)


async def _report_sources(
    hub: Hub, screen: Screen, common: Common, wanted: SourceFilter = ALL
) -> None:
    """Report the problems of a hub's sources, and store its operations for shell completion."""
    operation = wanted.operation
    # The following error reports why the requested source is missing.
    reported = (
        None if operation is None or operation in hub.registry else operation.partition(".")[0]
    )
    for absent in hub.absent():
        if absent.name != reported:
            screen.warn(f"{absent.label} is not available: {absent.problem}")
    if wanted.is_all and not hub.absent():
        for pattern in sorted(hub.tools.unmatched):
            screen.warn(f'[tools."{pattern}"] matches no operation')
    for source in hub.sources:
        _report_parts(source, screen, common)
    before: dict[str, list[str]] = {}
    if wanted.is_all and hub.absent():
        # Keep the ids of disconnected sources, to distinguish them from unknown ids.
        before = recall_operations(hub.file)
    if _is_quiet(hub.file, common):
        # From here on, log warnings: they concern calls and sources, and are not reported in another way.
        logging.getLogger("operations").setLevel(logging.WARNING)
    if wanted.is_all:
        # Logs those that cannot be listed; in a thread, because building many schemas takes long.
        specs = hub.registry.specs()
        listed = await asyncio.to_thread(
            lambda: {spec.id: [*argument_words(spec)] for spec in describable(specs)}
        )
        known: dict[str, list[str]] = {spec.id: [] for spec in specs}
        remember_operations(hub.file, {**known, **before, **listed})


def argument_words(spec: OperationSpec) -> Iterator[str]:
    """Yield the arguments of a call for shell completion: `key=`, and `key=value` for each of a few allowed values."""
    for name, outline in islice(Outline.of(spec.input_schema).properties.items(), _MAX_WORDS):
        places = (outline, *outline.members, outline.items)
        choices = [choice for place in places for choice in place.choices if choice is not None]
        if not choices and any("boolean" in place.types for place in places):
            choices = [True, False]
        texts = [each if isinstance(each, str) else encoded(each) for each in choices]
        for word in dict.fromkeys([f"{name}=", *(f"{name}={text}" for text in texts[:_MAX_WORDS])]):
            if word.isprintable():
                yield word


def _report_parts(source: Source, screen: Screen, common: Common) -> None:
    """Report the parts of a source that cannot be used."""
    if not source.is_enabled:
        screen.note(f"{source.label} is disabled")
    for part in source.warnings:
        screen.warn(f"{source.label}: {part.where} {part.reason}")
    if source.kind == "local" or common.verbose:
        for skipped in source.skipped:
            screen.warn(f"{source.label}: skipped {skipped.where}: {skipped.reason}")
    elif source.skipped:
        screen.note(
            f"{source.label}: {counted(len(source.skipped), 'part')} cannot be used;"
            f" `operations import {source.name}{common.hints}` shows the reason"
        )


def _is_quiet(file: ConfigFile, common: Common) -> bool:
    """Return whether neither the command line nor `[log]` configures logging."""
    return not common.verbose and not file.config.log.options
