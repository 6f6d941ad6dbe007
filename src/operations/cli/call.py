"""`operations call` and `operations trace`: make one call or follow a subscription, and show the tree of recent calls.

Rule 1: the progress bar is removed before other output, so that a result starts on its own line. If standard error is
        not a terminal, progress is not printed.
Rule 2: questions go to standard error, so that the result can be redirected to a file.
Rule 3: Ctrl-C and Ctrl-D at a question about missing input end the command. At a question of a handler they cancel
        the question, and the handler continues.
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from getpass import getpass
from pathlib import Path
from time import time
from typing import Annotated, Any

import msgspec
from cyclopts import CycloptsError, Parameter
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from operations.base.errors import CallError, SchemaError
from operations.base.json.values import is_object
from operations.base.tasks import receives_signals
from operations.base.text import counted, printable
from operations.base.types import JSONObject
from operations.cli.inputs import read_input, typed
from operations.cli.lookup import caller
from operations.cli.options import (
    DEFAULTS,
    POSITIVE,
    Common,
    ExitCode,
    Screen,
    command,
    complete_ids,
    complete_input,
    encoded,
    enforce_writable,
    exit_code_of,
    first_line,
    local_time,
    open_session,
    styled,
)
from operations.contract.channel import CallerChannel
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import OperationType
from operations.front.config import ServerConfig
from operations.front.front import Front
from operations.front.limits import call_seconds, caller_key
from operations.front.public_errors import public_error
from operations.hub import Hub, SourceFilter
from operations.hub.journal import journal_path, read_journal
from operations.hub.source import limits_of
from operations.recorder.graph import spans
from operations.registry.streams import Subscription
from operations.schema import Schema
from operations.schema.outline import Outline


@command
async def call(
    operation_id: Annotated[str, Parameter(completer=complete_ids)],
    /,
    *input: Annotated[str, Parameter(allow_leading_hyphen=True, completer=complete_input)],
    envelope: Annotated[bool, Parameter(alias="-e", negative="")] = False,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    timeout: Annotated[float | None, POSITIVE] = None,
    count: Annotated[int | None, POSITIVE] = None,
    as_: Annotated[str | None, Parameter(name="--as")] = None,
    detach: Annotated[bool, Parameter(negative="")] = False,
    key: str | None = None,
    common: Common = DEFAULTS,
) -> int | None:
    """Call an operation and print its data. Items of a subscription are printed line by line, until Ctrl-C.

    The input is JSON, @FILE, - for standard input, or key=value pairs, which are converted according to the operation's
    schema: `a.b=1` sets a property of an object, a repeated key makes a list, `key:=JSON` is parsed as JSON, and
    `key=@FILE` reads a file, which is streamed if the operation takes files. On a terminal, the command asks for
    missing required values.

    Args:
        operation_id: The id of the operation, `namespace.name`.
        input: The input of the call.
        envelope: Print the whole envelope: data and metadata.
        output: Write the data to this file instead; bytes unchanged. A download from an API is streamed to the file.
        timeout: Seconds to wait; by default the timeout of the config, and no limit for a subscription.
        count: End a subscription after this many items.
        as_: A caller of [access.keys], or a grant; `anonymous` for no identity. Default: operator (full access).
        detach: Start a run, print its id and end; a server with the same [runs] works on it.
        key: With --detach: the same call with the same key is the same run.
        common: Options of every command.
    """
    return await make_call(
        operation_id,
        *input,
        envelope=envelope,
        output=output,
        timeout=timeout,
        count=count,
        as_=as_,
        detach=detach,
        key=key,
        common=common,
    )


async def make_call(
    operation_id: str,
    /,
    *input: str,
    envelope: bool = False,
    output: Path | None = None,
    timeout: float | None = None,
    count: int | None = None,
    as_: str | None = None,
    detach: bool = False,
    key: str | None = None,
    common: Common = DEFAULTS,
) -> int | None:
    """Make a call; return its exit code. The parameters are those of `call`."""
    screen = common.screen()
    async with open_session(common, screen, SourceFilter(operation=operation_id)) as hub:
        front = _front_of(hub)
        context = await caller(hub, as_)
        spec = hub.spec(operation_id)
        if not context.trusted:
            front.enforce_visible(spec, context.identity)
        is_stream = spec.type is OperationType.SUBSCRIPTION
        if count is not None and not is_stream:
            what = f"{operation_id} is a {spec.type.value}"
            raise CycloptsError(msg=f"--count applies only to subscriptions; {what}")
        if output is not None:
            enforce_writable(output)
        operation = hub.registry.get(operation_id)
        files = None if operation is None else operation.files
        outline = Outline.of(spec.input_schema)
        streams_files = files is not None and files.takes_files
        value = read_input(input, outline, front.limits, streams_files=streams_files)
        if screen.can_ask:
            value = ask_for_missing(value, outline, screen)
        is_transfer = streams_files and any("=@" in each for each in input)
        if output is not None and not envelope and files is not None and files.returns_files:
            # The service writes the file itself, so nothing is left to write here.
            value, output, is_transfer = {**value, files.save_to: output}, None, True
        if timeout is None and not (is_stream or is_transfer):
            # A large file needs no total time limit; the service ends a transfer that makes no progress.
            timeout = call_seconds(operation, front.timeout)
        terminal = _Terminal(screen, operation_id)
        with (
            front.admit(caller_key(context.identity, "terminal"), is_stream=is_stream),
            terminal.channel() as channel,
        ):
            context = context.changed(
                deadline=None if timeout is None else (time() + timeout) * 1000,
                channel=channel,
                # Return the whole result, because a later command cannot use a cursor.
                whole=True,
                registry=hub.registry,
            )
            printer = _Printer(screen, terminal, envelope, output)
            with _public_errors(context, front, screen, common):
                if detach or key is not None:
                    if not detach:
                        raise CycloptsError(msg="--key applies only to runs: add --detach")
                    run = await hub.registry.start(
                        operation_id, value, context.changed(deadline=None), key=key
                    )
                    screen.value({"id": run.id}) if screen.json else screen.write(run.id)
                    return ExitCode.DONE
                if is_stream:
                    items = hub.registry.subscribe(operation_id, value, context)
                    return await printer.follow(items, count)
                return printer.result(await hub.registry.execute(operation_id, value, context))


@contextmanager
def _public_errors(
    context: OperationContext, front: Front, screen: Screen, common: Common
) -> Generator[None]:
    """Raise the error of a call as its caller may see it."""
    try:
        yield
    except CallError as error:
        expose = context.trusted or front.expose_errors
        public = public_error(error, context.request_id, expose=expose, log=common.verbose)
        if error.unexpected and not (expose or common.verbose or common.json):
            screen.note("this caller does not see the cause; --verbose prints it", "dim")
        raise public from error


def _front_of(hub: Hub) -> Front:
    """Return the front for calls of the operator, with the limits and rules of `operations serve`."""
    file = hub.file
    options = file.options(ServerConfig, file.config.serve)
    options |= {"limits": limits_of(file), "timeout": file.config.limits.timeout}
    return Front(hub.registry, ServerConfig(**options))


@dataclass(frozen=True, slots=True)
class _Printer:
    """Prints the results of a call."""

    _screen: Screen
    _terminal: "_Terminal"
    _whole: bool
    _file: Path | None

    def result(self, envelope: ResponseEnvelope[Any]) -> int:
        """Print one result; return the exit code, which is not 0 for an error result of an MCP tool."""
        self._terminal.clear()
        code = ExitCode.DONE
        try:
            envelope.raise_for_error()
        except CallError as error:
            code = exit_code_of(error.code)
            if not self._whole:
                raise
        if self._file is not None:
            self._file.write_bytes(self._bytes(envelope))
            self._screen.note(f"written to {self._file}")
        elif isinstance(envelope.data, bytes) and not self._whole and not self._screen.json:
            self._raw(envelope.data)
        else:
            self._screen.result(self._json(envelope))
        return code

    async def follow(self, items: Subscription, count: int | None) -> int:
        """Print the items of a subscription until it ends, or until Ctrl-C, which is a normal end."""
        if self._file is not None:
            self._file.write_bytes(b"")  # each item is appended
        with suppress(asyncio.CancelledError):
            async with aclosing(items):
                async for envelope in items:
                    self._item(envelope)
                    if count is not None and (count := count - 1) <= 0:
                        break
        return ExitCode.DONE

    def _item(self, envelope: ResponseEnvelope[Any]) -> None:
        self._terminal.clear()
        if self._file is not None:
            with self._file.open("ab") as file:
                file.write(self._bytes(envelope) + b"\n")
        else:
            self._screen.item(self._json(envelope))

    def _json(self, envelope: ResponseEnvelope[Any]) -> Any:
        is_wire = self._whole or isinstance(envelope.data, bytes)
        return envelope.to_wire() if is_wire else envelope.data

    def _bytes(self, envelope: ResponseEnvelope[Any]) -> bytes:
        if isinstance(envelope.data, bytes) and not self._whole:
            return envelope.data
        return msgspec.json.encode(self._json(envelope))

    def _raw(self, data: bytes) -> None:
        if sys.stdout.isatty():
            size = counted(len(data), "byte")
            self._screen.note(f"{size}; use --output FILE, or --envelope for base64")
        else:
            self._screen.write_bytes(data)


def ask_for_missing(value: Any, outline: Outline, screen: Screen, prefix: str = "") -> Any:
    """Ask for the missing required properties of `value`, if it is an object, and return it with them."""
    if not is_object(value):
        return value
    properties = outline.properties
    answers: JSONObject = {}
    for name in outline.required:
        inner = properties.get(name, Outline({}))
        if name not in value:
            answers[name] = ask(f"{prefix}{name}", inner, screen)
        elif inner.properties:
            answers[name] = ask_for_missing(value[name], inner, screen, f"{prefix}{name}.")
    return value | answers


def ask(name: str, outline: Outline, screen: Screen) -> Any:
    """Ask for one value until it matches its schema."""
    if outline.required and not outline.is_recursive:
        return ask_for_missing({}, outline, screen, f"{name}.")
    if outline.description:
        screen.note(f"  {first_line(outline.description)}")
    while True:
        value = typed(_answer(name, outline, screen), outline)
        issues = _issues(value, outline)
        if not issues:
            return value
        for issue in issues:
            screen.note(f"  {name}{issue.path} {issue.message}", "red")


def confirm(screen: Screen) -> bool:
    """Ask for yes or no; every answer except yes counts as no.

    Raises:
        KeyboardInterrupt: On Ctrl-C, or at the end of the input.
    """
    screen.err.print(styled(("y/N: ", "bold")), end="")
    return read_answer(input).strip().lower() in ("y", "yes")


def _answer(name: str, outline: Outline, screen: Screen) -> str:
    screen.err.print(styled((name, "bold"), (f" ({outline.kind})", "dim"), (": ", "")), end="")
    if outline.schema.get("format") == "password":
        return read_answer(lambda: getpass(""))
    return read_answer(input)


def read_answer(read: Callable[[], str]) -> str:
    """Read an answer. Ctrl-C interrupts it; the event loop would only record it and continue reading."""
    is_main = receives_signals()
    before = signal.signal(signal.SIGINT, signal.default_int_handler) if is_main else None
    try:
        return read()
    except EOFError:
        raise KeyboardInterrupt from None
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _issues(value: Any, outline: Outline) -> list[Any]:
    try:
        return list(Schema(outline.standalone).errors(value))
    except SchemaError:
        # The whole input is validated later anyway.
        return []


_LOUD = frozenset({"warning", "error", "critical", "alert", "emergency"})


class _Terminal:
    """Shows the progress, log messages and questions of one call."""

    def __init__(self, screen: Screen, title: str) -> None:
        self._screen = screen
        self._title = title
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            console=screen.err,
            transient=True,
            disable=not screen.err.is_terminal or screen.json,
        )
        self._bar = self._progress.add_task(printable(title), total=None, visible=False)

    @contextmanager
    def channel(self) -> Generator[CallerChannel]:
        """Connect a call to the terminal for the duration of a `with` block."""
        elicit = self._elicit if self._screen.can_ask else None
        try:
            yield CallerChannel(progress=self._show, log=self._log, elicit=elicit)
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove the progress bar, so that other output can be printed."""
        self._progress.stop()

    async def _show(self, done: float, total: float | None, message: str | None) -> None:
        title, progress = printable(message or self._title), self._progress
        progress.start()
        progress.update(self._bar, completed=done, total=total, description=title, visible=True)
        # Refresh at once, because a handler that computes after its report blocks the automatic refresh.
        progress.refresh()

    async def _log(self, level: str, data: object, name: str | None) -> None:
        text = data if isinstance(data, str) else encoded(data)
        prefix = level if name is None else f"{level}: {name}"
        self._screen.note(f"{printable(prefix)}: {text}", "yellow" if level in _LOUD else "dim")

    async def _elicit(self, message: str, schema: JSONObject) -> JSONObject:
        self.clear()
        self._screen.note(message, "bold")
        try:
            if not schema.get("properties"):
                # Without properties it is a yes-or-no question.
                is_yes = confirm(self._screen)
                return {"action": "accept" if is_yes else "decline", "content": {}}
            content = ask_for_missing({}, Outline(schema), self._screen)
        except KeyboardInterrupt:
            return {"action": "cancel"}
        return {"action": "accept", "content": content}


# ------------------------------------------------------------ operations trace


@command
async def trace(
    id: str | None = None,
    /,
    *,
    limit: Annotated[int, Parameter(alias="-n"), POSITIVE] = 20,
    failed: Annotated[bool, Parameter(negative="")] = False,
    common: Common = DEFAULTS,
) -> None:
    """Show recent calls as a tree: caller, operation, nested calls, duration and outcome.

    Shows calls of `call`, `serve` and `work` with this config. Arguments and results are not recorded. With
    `--verbose`, each call has its request id and the grants that its caller presented.

    Args:
        id: Show only calls whose root is this operation, or the call with this request id.
        limit: The number of recorded calls, the newest last.
        failed: Show only calls that failed or have a failed nested call.
        common: Options of every command.
    """
    screen = common.screen()
    path = journal_path(common.load(required=False))
    roots = [
        root
        for root in spans(read_journal(path))
        if (id is None or root.record.operation_id == id or root.has_request(id))
        and (not failed or root.has_failed)
    ]
    if screen.json:
        screen.value([root.to_json() for root in roots[-limit:]])
        return
    for root in roots[-limit:]:
        first, *nested = root.lines(ids=common.verbose)
        began, caller_id = local_time(root.record.started_at), root.record.identity_id
        through = f", through {' and '.join(root.record.acting)}" if root.record.acting else ""
        by = "" if caller_id is None else f"  by {caller_id}{through}"
        screen.line((f"{began:%H:%M:%S}  ", "dim"), (first, ""), (by, "dim"))
        for line in nested:
            screen.line((line, ""))
    if not roots and screen.is_terminal:
        screen.note(f"no {'such ' if id or failed else ''}calls are recorded in {path}")
