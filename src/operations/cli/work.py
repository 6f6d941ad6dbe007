"""`operations work` runs a worker on a broker; `operations workers` shows workers, their queue and dead letters."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from socket import gethostname
from time import time
from typing import Annotated

from cyclopts import App, Parameter, validators
from msgspec import to_builtins

from operations.base.errors import OperationsError
from operations.base.tasks import shutdown_event
from operations.base.text import counted, suggestion
from operations.base.types import JSONObject
from operations.calls import CallServer, serve_calls
from operations.calls.kind import BrokerEntry, connect_broker, worker_config
from operations.calls.serving.jobs import WorkerConfig
from operations.calls.source.monitoring import GroupMonitor, GroupReport, monitor_group
from operations.calls.source.remote import RemoteConfig
from operations.cli.options import (
    DEFAULTS,
    PORT,
    POSITIVE,
    Common,
    ExitCode,
    Screen,
    command,
    encoded,
    local_time,
    open_session,
    reporting_sources,
    settle,
)
from operations.config import ConfigFile
from operations.config.model import WorkEntry
from operations.hub import Hub, SourceFilter
from operations.hub.journal import writing_logs
from operations.hub.place import HubPlace
from operations.hub.reloading import following
from operations.hub.source import limits_of


@command
async def work(
    broker: str | None = None,
    /,
    *,
    concurrency: Annotated[int | None, POSITIVE] = None,
    grace: Annotated[float | None, Parameter(validator=validators.Number(gte=0))] = None,
    name: str | None = None,
    host: str | None = None,
    port: Annotated[int | None, PORT] = None,
    common: Common = DEFAULTS,
) -> None:
    """Serve all operations to callers on a broker until Ctrl-C; running calls are finished first.

    Args:
        broker: The name of the broker in [brokers]; optional if there is only one.
        concurrency: The number of concurrent calls, instead of the config's number.
        grace: Seconds that running calls have to finish at the end, instead of the config's number.
        name: The name of this worker in reports, instead of the config's; by default its machine and process.
        host: The address for health and metrics, instead of the address in [work].
        port: The port for health and metrics; 0 selects a free port. Without it and without [work], they are not
            served.
        common: Options of every command.
    """
    file = common.load()
    screen = common.screen(file)
    chosen, entry = chosen_broker(broker, file)
    group = worker_config(entry, HubPlace(file)).group
    given = {"concurrency": concurrency, "grace": grace, "name": name}
    options = file.options(WorkerConfig, entry)
    options |= {key: value for key, value in given.items() if value is not None}
    options["limits"] = limits_of(file)
    options["name"] = options.get("name") or f"{gethostname()}-{os.getpid()}"
    # A worker that imported the operations of its own group would call itself.
    others = SourceFilter(without=f"broker:{chosen}")
    with writing_logs(file, verbose=common.verbose):
        async with (
            open_session(common, screen, others, file=file, wait=False) as hub,
            connect_broker(entry, HubPlace(file)) as target,
        ):
            hub.serve_authority()
            authority = hub.registry.authority
            async with (
                serve_calls(hub.registry, target, **options, resolve=hub.access.resolve) as worker,
                following(hub, {f"broker:{chosen}": lambda: target.is_connected}),
                _shown(hub, worker, host, port) as url,
                reporting_sources(hub, screen),
            ):
                hub.on_reload.append(lambda: worker.limit(limits_of(hub.file)))
                with shutdown_event() as shutdown:
                    authority.approvals.is_up = lambda: not shutdown.is_set()
                    await settle(hub, screen, common)
                    _announce(screen, hub.offered, chosen, group, entry.url, url)
                    await shutdown.wait()
                screen.note("finishing running calls ...")
                # Calls that wait for approval end.
                authority.store.wake()
                # `/readyz` reports this.
                await worker.aclose()


def _announce(
    screen: Screen, count: int, broker: str, group: str, broker_url: str, health_url: str | None
) -> None:
    """Print what the worker serves, and the address of its health and metrics."""
    if screen.json:
        served: JSONObject = {"broker": broker, "group": group, "operations": count}
        screen.item(served if health_url is None else {**served, "url": health_url})
        return
    screen.write(f"serving {counted(count, 'operation')} to group {group} on {broker_url}")
    if health_url is not None:
        screen.write(f"health and metrics at {health_url}")
    screen.note("press Ctrl-C to stop")
    screen.out.file.flush()


@asynccontextmanager
async def _shown(
    hub: Hub, worker: CallServer, host: str | None, port: int | None
) -> AsyncGenerator[str | None]:
    """Serve the health and metrics of a worker for the duration of an `async with` block; yield the address, if any."""
    entry = hub.file.config.work
    if entry is None and host is None and port is None:
        yield None
        return
    from operations.hub import app as serving  # noqa: PLC0415 - needs an extra

    config = serving.listen_config(hub.file, host, port, entry or WorkEntry())
    async with monitor_group(worker.target, worker.group) as monitor:
        app = serving.build_worker_app(hub, worker, monitor, config.host)
        async with serving.listening(app, config, "work") as url:
            yield url


def chosen_broker(name: str | None, file: ConfigFile) -> tuple[str, BrokerEntry]:
    """Return a broker of a config by name; without a name, the only broker.

    Raises:
        OperationsError: If there is no such broker, or several without a name.
    """
    brokers = {key: entry for key, entry in file.config.tables("brokers").items() if entry.enabled}
    if name is None and len(brokers) == 1:
        (name,) = brokers
    if name is None:
        if brokers:
            raise OperationsError(f"name one of the brokers: {', '.join(brokers)}")
        raise OperationsError("the config has no broker: add [brokers.main] with its url")
    if name not in brokers:
        raise OperationsError(
            f"there is no broker {name} in the config.{suggestion(name, brokers)}"
        )
    return name, brokers[name]


# ------------------------------------------------------------ workers

workers_app = App(name="workers", help="Show the workers of a broker, and handle dead letters.")


@workers_app.default
@command
async def show(*, broker: str | None = None, common: Common = DEFAULTS) -> int:
    """Show the connected workers, the running and waiting calls, and the number of dead letters.

    Args:
        broker: The name of the broker in [brokers]; optional if there is only one.
        common: Options of every command.
    """
    screen = common.screen()
    async with _monitored(broker, common) as (monitor, _):
        report = await monitor.look()
    _show(report, screen)
    return ExitCode.DONE if report.workers or report.silent else ExitCode.UNAVAILABLE


@workers_app.command
@command
async def letters(
    letter: str | None = None, /, *, broker: str | None = None, common: Common = DEFAULTS
) -> None:
    """List the dead letters: requests that were abandoned because every worker that started one was lost.

    They were stored without the credentials of their callers.

    Args:
        letter: The id of a dead letter, to show only this one.
        broker: The name of the broker in [brokers]; optional if there is only one.
        common: Options of every command.
    """
    screen = common.screen()
    async with _monitored(broker, common) as (monitor, _):
        if letter is not None:
            screen.value(to_builtins(await monitor.letter(letter)))
            return
        found = await monitor.letters()
    if screen.json:
        screen.value([to_builtins(each) for each in found])
        return
    screen.rows(
        ("id", "operation", "stored", "input"),
        (
            (
                each.id,
                each.operation,
                f"{local_time(each.stored_at):%Y-%m-%d %H:%M:%S}",
                encoded(each.input),
            )
            for each in found
        ),
    )
    if not found:
        screen.note("no dead letters")


@workers_app.command
@command
async def replay(
    letter: str,
    /,
    *,
    broker: str | None = None,
    timeout: Annotated[float | None, POSITIVE] = None,
    common: Common = DEFAULTS,
) -> None:
    """Call the operation of a dead letter once more, and remove the letter if that succeeds.

    The call has the `credential` of the broker in the config. It may crash another worker.

    Args:
        letter: The id of the dead letter.
        broker: The name of the broker in [brokers]; optional if there is only one.
        timeout: The time limit of the call in seconds.
        common: Options of every command.
    """
    async with _monitored(broker, common) as (monitor, credential):
        envelope = await monitor.replay(letter, credential=credential, timeout=timeout)
    common.screen().value(envelope.data)


@workers_app.command
@command
async def drop(letter: str, /, *, broker: str | None = None, common: Common = DEFAULTS) -> None:
    """Remove a dead letter.

    Args:
        letter: The id of the dead letter.
        broker: The name of the broker in [brokers]; optional if there is only one.
        common: Options of every command.
    """
    async with _monitored(broker, common) as (monitor, _):
        await monitor.remove(letter)
    common.screen().note("removed")


@asynccontextmanager
async def _monitored(
    broker: str | None, common: Common
) -> AsyncGenerator[tuple[GroupMonitor, str | None]]:
    """Connect to the group of a broker; yield its monitor and the credential of the config for its workers."""
    file = common.load()
    _, entry = chosen_broker(broker, file)
    credential = file.options(RemoteConfig, entry).get("credential")
    group = worker_config(entry, HubPlace(file)).group
    async with (
        connect_broker(entry, HubPlace(file)) as target,
        monitor_group(target, group) as monitor,
    ):
        yield monitor, credential


def _show(report: GroupReport, screen: Screen) -> None:
    if screen.json:
        screen.value(to_builtins(report))
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


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 2:
        return f"{max(0, seconds):.0f} s"
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.0f} h"
