"""`operations workers`: the workers of a broker, their queue, and its dead letters."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from time import time
from typing import Annotated

from cyclopts import App, Parameter
from msgspec import to_builtins

from operations._text import counted
from operations.calls.config import RemoteConfig
from operations.calls.monitoring import DeadLetter, GroupMonitor, GroupReport, monitor_group
from operations.cli.options import DEFAULTS, Common, ExitCode, command
from operations.cli.render import Screen, encoded
from operations.cli.work import chosen_broker
from operations.hub.sources.broker import connect_broker, worker_config

app = App(name="workers", help="See the workers of a broker, and handle dead letters.")

_WATCH_SECONDS = 2.0


@app.default
@command
async def show(
    *,
    broker: str | None = None,
    watch: Annotated[bool, Parameter(alias="-w", negative="")] = False,
    common: Common = DEFAULTS,
) -> int:
    """Show the connected workers, the calls that run and wait, and the number of dead letters.

    Args:
        broker: Its name in [brokers]; may be left out where there is one.
        watch: Show them every two seconds, until Ctrl-C.
        common: What every command takes.
    """
    screen = common.screen()
    async with _monitored(broker, common) as (monitor, _):
        try:
            while True:
                report = await monitor.look()
                _show(report, screen, is_line=watch)
                if not watch:
                    break
                await asyncio.sleep(_WATCH_SECONDS)
        except asyncio.CancelledError:
            if not watch:
                raise
            return ExitCode.DONE
    return ExitCode.DONE if report.workers or report.silent else ExitCode.UNAVAILABLE


@app.command
@command
async def letters(*, broker: str | None = None, common: Common = DEFAULTS) -> None:
    """List the dead letters: requests that were given up because they cost every worker that began them.

    Args:
        broker: Its name in [brokers]; may be left out where there is one.
        common: What every command takes.
    """
    screen = common.screen()
    async with _monitored(broker, common) as (monitor, _):
        found = await monitor.letters()
    if screen.json:
        screen.value([to_builtins(each) for each in found])
        return
    rows = ((each.id, each.operation, _moment(each), encoded(each.input)) for each in found)
    screen.rows(("id", "operation", "stored", "input"), rows)
    if not found:
        screen.note("no dead letters")


@app.command
@command
async def letter(letter: str, /, *, broker: str | None = None, common: Common = DEFAULTS) -> None:
    """Show one dead letter. It was stored without the credential of its caller.

    Args:
        letter: Its id.
        broker: Its name in [brokers]; may be left out where there is one.
        common: What every command takes.
    """
    async with _monitored(broker, common) as (monitor, _):
        common.screen().value(to_builtins(await monitor.letter(letter)))


@app.command
@command
async def replay(
    letter: str,
    /,
    *,
    broker: str | None = None,
    timeout: float | None = None,
    common: Common = DEFAULTS,
) -> None:
    """Call the operation of a dead letter once more, and remove the letter if that succeeds.

    The call has the `credential` of the broker in the config. It may cost one more worker.

    Args:
        letter: Its id.
        broker: Its name in [brokers]; may be left out where there is one.
        timeout: Seconds that the call may take.
        common: What every command takes.
    """
    async with _monitored(broker, common) as (monitor, credential):
        envelope = await monitor.replay(letter, credential=credential, timeout=timeout)
    common.screen().value(envelope.data)


@app.command
@command
async def drop(letter: str, /, *, broker: str | None = None, common: Common = DEFAULTS) -> None:
    """Remove a dead letter.

    Args:
        letter: Its id.
        broker: Its name in [brokers]; may be left out where there is one.
        common: What every command takes.
    """
    async with _monitored(broker, common) as (monitor, _):
        await monitor.remove(letter)
    common.screen().note("removed")


@asynccontextmanager
async def _monitored(
    broker: str | None, common: Common
) -> AsyncGenerator[tuple[GroupMonitor, str | None]]:
    """The group of a broker, and the credential that the config has for its workers."""
    file = common.load()
    _, entry = chosen_broker(broker, file)
    credential = file.options(RemoteConfig, entry).get("credential")
    group = worker_config(entry, file).group
    async with connect_broker(entry, file) as target, monitor_group(target, group) as monitor:
        yield monitor, credential


def _show(report: GroupReport, screen: Screen, *, is_line: bool) -> None:
    if screen.json:
        (screen.item if is_line else screen.value)(to_builtins(report))
        return
    headings = ("worker", "version", "running", "waiting", "limit", "done", "failed", "mean", "up")
    screen.rows(
        headings,
        (
            (
                (each.name or each.worker[-8:]) + (" (leaving)" if each.leaving else ""),
                each.version,
                *map(str, (each.running, each.waiting, each.concurrency, each.finished)),
                str(each.failed),
                f"{1000 * each.seconds / each.finished:.0f} ms" if each.finished else "",
                _duration(time() - each.started_at / 1000),
            )
            for each in report.workers
        ),
    )
    parts = [counted(len(report.workers), "worker"), f"{report.running} running"]
    if report.silent:
        parts.insert(1, f"{report.silent} not responding")
    parts.append(f"{report.waiting} waiting" + (f" for {report.lag:.1f} s" if report.lag else ""))
    if report.dead_letters is not None:
        parts.append(counted(report.dead_letters, "dead letter"))
    is_bad = not report.workers or report.silent or report.dead_letters
    screen.note(f"group {report.group}: {', '.join(parts)}", "yellow" if is_bad else "dim")


def _moment(letter: DeadLetter) -> str:
    moment = datetime.fromtimestamp(letter.stored_at / 1000, UTC).astimezone()
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 2:
        return f"{max(0, seconds):.0f} s"
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.0f} h"
