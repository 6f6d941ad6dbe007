"""`operations call`: one call, or one subscription until it ends or Ctrl-C."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from time import time
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter, validators

from operations._text import counted
from operations.cli.inputs import put_file, read_input
from operations.cli.lookup import caller
from operations.cli.options import DEFAULTS, Common, ExitCode, command, exit_code_of
from operations.cli.render import Screen
from operations.cli.session import open_front, open_session
from operations.cli.terminal import ask_for_missing, terminal_channel
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError
from operations.front.identity import caller_key
from operations.front.public_errors import public_error
from operations.hub.hub import Hub, SourceFilter
from operations.hub.journal import complete_ids
from operations.schema.outline import Outline
from operations.specs import OperationSpec, OperationType


@command
async def call(
    operation_id: Annotated[str, Parameter(completer=complete_ids)],
    /,
    *input: Annotated[str, Parameter(allow_leading_hyphen=True)],
    envelope: Annotated[bool, Parameter(alias="-e", negative="")] = False,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    upload: Annotated[tuple[str, ...], Parameter(alias="-u", negative="")] = (),
    timeout: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    count: Annotated[int | None, Parameter(validator=validators.Number(gt=0))] = None,
    as_: Annotated[str | None, Parameter(name="--as")] = None,
    common: Common = DEFAULTS,
) -> int | None:
    """Call an operation and print its data. A subscription is followed, line by line, until Ctrl-C.

    The input is JSON, @FILE, - for standard input, or key=value pairs, read as what the operation's schema says:
    `a.b=1` goes into an object, a repeated key makes a list, `key:=JSON` is taken as JSON, `key=@FILE` is read from a
    file. On a terminal, required values that are missing are asked for.

    Args:
        operation_id: Its id, `namespace.name`.
        input: The input of the call.
        envelope: Print the whole envelope: data and metadata.
        output: Write the data to this file instead; bytes as they are. A file from an API is saved while it arrives.
        upload: `key=FILE`: send this file as the value of `key`, while it is read. May be repeated.
        timeout: Seconds to wait; by default the timeout of the config, and no limit for a subscription.
        count: End a subscription after this many items.
        as_: A caller of [access.keys], or a grant; `anonymous` for no identity. Default: operator (full access).
        common: Options of every command.
    """
    screen = common.screen()
    async with open_session(common, screen, SourceFilter(operation=operation_id)) as hub:
        front = open_front(hub)
        who = await caller(hub, as_)
        spec = hub.spec(operation_id)
        if not who.trusted:
            front.enforce_visible(spec, who.identity)
        outline = Outline.of(spec.input_schema)
        value = read_input(input, outline, front.limits)
        operation = hub.registry.get(operation_id)
        files = None if operation is None else operation.files
        for each in upload:
            put_file(value, each, is_streamed=files is not None)
        saves = output is not None and files is not None and files.returns_files and not envelope
        if screen.can_ask:
            value = ask_for_missing(value, outline, screen)
        is_stream = spec.type is OperationType.SUBSCRIPTION
        # A large file takes its time; the service ends a transfer that makes no progress.
        has_default = not (is_stream or upload or saves)
        seconds = front.timeout_of(spec) if timeout is None and has_default else timeout
        deadline = None if seconds is None else (time() + seconds) * 1000
        with (
            front.admit(caller_key(who.identity, "terminal"), is_stream=is_stream),
            terminal_channel(screen, operation_id) as (channel, clear),
        ):
            context = front.context(
                who.identity,
                deadline=deadline,
                channel=channel,
                trusted=who.trusted,
                whole=True,
            )
            if saves and files is not None:
                value = {**value, files.save_to: output}
            printer = _Printer(screen, clear, whole=envelope, file=None if saves else output)
            try:
                if is_stream:
                    return await _follow(hub, spec, value, context, printer, count)
                return printer.result(await hub.registry.execute(operation_id, value, context))
            except CallError as error:
                expose = who.trusted or front.expose_errors
                public = public_error(error, context.request_id, expose=expose, log=common.verbose)
                raise public from error


async def _follow(
    hub: Hub,
    spec: OperationSpec,
    value: Any,
    context: OperationContext,
    printer: "_Printer",
    count: int | None,
) -> int:
    """Print the items of a subscription. Ctrl-C is how one ends it, and no failure."""
    items = hub.registry.subscribe(spec.id, value, context)
    try:
        async for envelope in items:
            printer.item(envelope)
            if count is not None and (count := count - 1) <= 0:
                break
    except asyncio.CancelledError:
        return ExitCode.DONE
    finally:
        await items.aclose()
    return ExitCode.DONE


class _Printer:
    """Prints the results of a call; `clear` makes room for each."""

    def __init__(
        self, screen: Screen, clear: Callable[[], None], *, whole: bool, file: Path | None
    ) -> None:
        self._screen = screen
        self._clear = clear
        self._whole = whole
        self._file = file

    def result(self, envelope: ResponseEnvelope[Any]) -> int:
        """Print one result; return the exit code, which is not 0 for a tool's error."""
        self._clear()
        failure: CallError | None = None
        try:
            envelope.raise_for_error()
        except CallError as error:
            failure = error
            if not self._whole:
                raise
        if self._file is not None:
            self._file.write_bytes(self._bytes(envelope))
            self._screen.note(f"written to {self._file}")
        elif isinstance(envelope.data, bytes) and not self._whole:
            self._raw(envelope.data)
        else:
            self._screen.value(envelope.to_wire() if self._whole else envelope.data)
        return ExitCode.DONE if failure is None else exit_code_of(failure.code)

    def item(self, envelope: ResponseEnvelope[Any]) -> None:
        """Print one item of a stream."""
        self._clear()
        if self._file is not None:
            with self._file.open("ab") as file:
                file.write(self._bytes(envelope) + b"\n")
        elif self._whole or isinstance(envelope.data, bytes):
            self._screen.item(envelope.to_wire())
        else:
            self._screen.item(envelope.data)

    def _bytes(self, envelope: ResponseEnvelope[Any]) -> bytes:
        if self._whole:
            return envelope.encode()
        return (
            envelope.data
            if isinstance(envelope.data, bytes)
            else msgspec.json.encode(envelope.data)
        )

    def _raw(self, data: bytes) -> None:
        if sys.stdout.isatty() or self._screen.json:
            self._screen.note(
                f"{counted(len(data), 'byte')}; use --output FILE, or --envelope for base64"
            )
        else:
            self._screen.write_bytes(data)
