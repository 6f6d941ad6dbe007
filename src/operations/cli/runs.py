"""`operations runs`: list, show, watch, cancel, answer and retry runs.

Rule 1: the commands are clients of the store: they never work on runs, and take none over.
Rule 2: Ctrl-C ends a command and leaves its run alone.
Rule 3: what changes a run is recorded in the sinks of the config, as every entry point does.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, asynccontextmanager
from typing import Annotated, Any

import msgspec
from cyclopts import App, CycloptsError, Parameter

from operations.base.text import printable
from operations.cli.options import (
    DEFAULTS,
    POSITIVE,
    Common,
    ExitCode,
    Screen,
    command,
    encoded,
    exit_code_of,
    local_time,
)
from operations.contract.context import OperationContext
from operations.hub.opening import runs_of
from operations.hub.recording import opened_sinks
from operations.registry.registry import OperationRegistry
from operations.registry.runs import RunState, RunStatus

runs_app = App(name="runs", help="See, cancel, answer and retry calls that run on their own.")

_OPERATOR = OperationContext(trusted=True)


@asynccontextmanager
async def _opened(common: Common, *, changes: bool = False) -> AsyncGenerator[OperationRegistry]:
    """Open the store of the config as a client, with its sinks if the command changes runs."""
    file = common.load()
    runs = runs_of(file)
    if runs is None:
        raise file.error("there is no [runs]: add the table with a url.")
    with ExitStack() as stack:
        sinks = stack.enter_context(opened_sinks(file, logging.INFO)) if changes else {}
        async with aclosing(OperationRegistry(runs=runs)) as registry:
            for sink in sinks.values():
                registry.record(sink)
            await runs.connect()
            yield registry


@runs_app.command(name="list")
@command
async def list_runs(
    *,
    status: str | None = None,
    operation: str | None = None,
    limit: Annotated[int, POSITIVE] = 50,
    after: str | None = None,
    common: Common = DEFAULTS,
) -> None:
    """List runs, the newest first.

    Args:
        status: Only runs in this state: queued, working, input_required, completed, failed, cancelled, unknown.
        operation: Only runs of this operation.
        limit: The number of runs, at most 100.
        after: The `next` of the page before.
        common: Options of every command.
    """
    screen = common.screen()
    async with _opened(common) as registry:
        page = await registry.runs(
            _OPERATOR, status=status, operation=operation, limit=limit, after=after
        )
    if screen.json:
        screen.value(msgspec.to_builtins(page))
        return
    screen.rows(
        ("id", "status", "operation", "started", "owner"),
        [
            (each.id, each.status, printable(each.operation), _time(each.created), _owner(each))
            for each in page.runs
        ],
    )
    if page.next is not None:
        screen.note(f"more: operations runs list --after {page.next}")


@runs_app.command
@command
async def show(run_id: str, /, *, common: Common = DEFAULTS) -> None:
    """Show the state of a run, and what it waits for.

    Args:
        run_id: The id of the run.
        common: Options of every command.
    """
    async with _opened(common) as registry:
        run = await registry.run(run_id, _OPERATOR)
    _show(run.state, common.screen())


@runs_app.command
@command
async def watch(run_id: str, /, *, common: Common = DEFAULTS) -> int:
    """Print every change of a run until it ends. The exit code is that of the call.

    Args:
        run_id: The id of the run.
        common: Options of every command.
    """
    screen = common.screen()
    async with _opened(common) as registry:
        run = await registry.run(run_id, _OPERATOR)
        async for state in run.watch():
            if screen.json:
                screen.item(msgspec.to_builtins(state.masked()))
            else:
                screen.write(_line(state))
    return _exit_code(run.state)


@runs_app.command
@command
async def result(
    run_id: str,
    /,
    *,
    timeout: Annotated[float | None, POSITIVE] = None,
    common: Common = DEFAULTS,
) -> int:
    """Wait until a run has ended, and print its result. The exit code is that of the call.

    Args:
        run_id: The id of the run.
        timeout: Seconds to wait; by default until it has ended.
        common: Options of every command.
    """
    async with _opened(common) as registry:
        run = await registry.run(run_id, _OPERATOR)
        envelope = await run.result(timeout)
    envelope.raise_for_error()
    is_wire = isinstance(envelope.data, bytes)
    common.screen().value(envelope.to_wire() if is_wire else envelope.data)
    return ExitCode.DONE


@runs_app.command
@command
async def cancel(run_id: str, /, *, common: Common = DEFAULTS) -> None:
    """Cancel a run.

    Args:
        run_id: The id of the run.
        common: Options of every command.
    """
    async with _opened(common, changes=True) as registry:
        run = await registry.run(run_id, _OPERATOR)
        await run.cancel()
    _show(run.state, common.screen())


@runs_app.command
@command
async def answer(run_id: str, key: str, value: str, /, *, common: Common = DEFAULTS) -> int:
    """Answer a question of a run: `{"action": "accept", "content": {...}}`, or `decline` or `cancel` as action.

    Args:
        run_id: The id of the run.
        key: The key of the question; `operations runs show` prints it.
        value: The answer, as JSON.
        common: Options of every command.
    """
    async with _opened(common, changes=True) as registry:
        run = await registry.run(run_id, _OPERATOR)
        if await run.answer(key, _json(value, "the answer")):
            return ExitCode.DONE
    common.screen().failed(
        "this question is not outstanding: it was answered, or the run has ended"
    )
    return ExitCode.FAILED


@runs_app.command
@command
async def signal(
    run_id: str, name: str, value: str = "null", /, *, common: Common = DEFAULTS
) -> None:
    """Send a signal to a run.

    Args:
        run_id: The id of the run.
        name: The name of the signal.
        value: Its value, as JSON.
        common: Options of every command.
    """
    async with _opened(common, changes=True) as registry:
        await (await registry.run(run_id, _OPERATOR)).signal(name, _json(value, "the value"))


@runs_app.command
@command
async def retry(
    run_id: str,
    /,
    *,
    ran: str | None = None,
    not_run: Annotated[bool, Parameter(negative="")] = False,
    common: Common = DEFAULTS,
) -> None:
    """Run a failed or cancelled run again. An unknown run needs a decision: --ran JSON or --not-run.

    Args:
        run_id: The id of the run.
        ran: The call whose outcome is unknown has run: its result, as JSON.
        not_run: That call has not run, and may run now.
        common: Options of every command.
    """
    async with _opened(common, changes=True) as registry:
        run = await registry.run(run_id, _OPERATOR)
        given: Any = msgspec.UNSET if ran is None else _json(ran, "--ran")
        await run.retry(ran=given, not_run=not_run)
    _show(run.state, common.screen())


def _json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise CycloptsError(msg=f"{what} is not JSON: {error}") from None


def _exit_code(state: RunState) -> int:
    if state.status is RunStatus.COMPLETED:
        return ExitCode.DONE
    return exit_code_of(state.failure().code)


def _time(milliseconds: int) -> str:
    return local_time(milliseconds).isoformat(timespec="seconds")


def _owner(state: RunState) -> str:
    return printable(state.owner or "")


def _line(state: RunState) -> str:
    """Return a state on one line."""
    parts = [_time(state.updated), str(state.status)]
    if state.progress is not None:
        parts.append(encoded(state.progress))
    if state.message:
        parts.append(printable(state.message))
    parts += [f"waits for {each.kind}" for each in state.waiting]
    if state.status not in (RunStatus.COMPLETED, RunStatus.QUEUED) and state.error is not None:
        parts.append(printable(str(state.failure())))
    return "  ".join(parts)


def _show(state: RunState, screen: Screen) -> None:
    state = state.masked()
    if screen.json:
        screen.value(msgspec.to_builtins(state))
        return
    facts = [
        ("run", state.id),
        ("operation", state.operation),
        ("status", state.status),
        ("owner", _owner(state) or "the operator"),
        ("started", _time(state.created)),
        ("changed", _time(state.updated)),
        ("attempt", str(state.attempt)),
    ]
    if state.expires is not None:
        facts.append(("kept until", _time(state.expires)))
    if state.message:
        facts.append(("message", state.message))
    for each in state.waiting:
        facts += [("waits for", each.kind), ("key", each.key), ("question", encoded(each.request))]
    if state.error is not None:
        facts.append(("error", str(state.failure())))
    for name, value in facts:
        screen.line((f"{name:<12}", "dim"), (printable(str(value)), ""))
    if state.result is not None:
        screen.result(state.result.get("data"))
