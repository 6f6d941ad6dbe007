"""The operations that show a hub."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from time import time
from typing import Any

import msgspec

from operations.base.errors import CallError, ErrorCode, TransportError
from operations.base.types import JSONObject
from operations.calls.source.monitoring import DeadLetter, GroupMonitor, GroupReport
from operations.calls.source.remote import RemoteConfig
from operations.config import ConfigError
from operations.contract.context import OperationContext
from operations.contract.functions import operation
from operations.hub import Hub
from operations.hub.reloading import reload
from operations.hub.source import (
    Source,
    SourceState,
)
from operations.hub.supervisor import Supervisor
from operations.telemetry.metrics import group_metrics, source_metrics
from operations.tools.pages import NEXT

logger = logging.getLogger("operations.hub")
"""Seconds without a further change after which a file counts as completely written."""


# ------------------------------------------------------------ operations

SCOPE = "hub:operate"
"""The scope that a caller needs for these operations."""


SOURCES = "hub.sources"

_SOURCES_SECONDS = 0.5
"""Seconds between two checks of the sources for a subscriber."""


class SourceReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A source of the hub."""

    name: str
    kind: str

    state: str
    """`connecting`, `connected`, `failing` (connected, but all of its last calls failed), `disconnected` or
    `disabled`."""

    operations: int
    """The number of operations of the source."""

    problem: str | None = None
    """The reason why the source is not available, or why a connected source could not be opened again; None if there is
    no problem."""

    next_attempt: int | None = None
    """When the next connection attempt is made, in Unix ms."""


def report(source: Source, failing: Mapping[str, str]) -> SourceReport:
    """Return the operator's view of a source; `failing` are the sources whose calls all fail, with the reason."""
    now, opens_at = asyncio.get_running_loop().time(), source.next_attempt
    state, problem = source.state, source.problem
    if state is SourceState.CONNECTED and source.full_name in failing:
        state, problem = SourceState.FAILING, failing[source.full_name]
    if problem is None and source.failure is not None:
        problem = f"the previous connection is in use, because it cannot be opened again: {source.failure}"
    return SourceReport(
        name=source.name,
        kind=source.kind,
        state=state,
        operations=len(source.operations),
        problem=problem,
        # Rounded to tenths of a second, so that the difference of two clocks does not make equal reports differ.
        next_attempt=None if opens_at is None else 100 * round(10 * (time() + opens_at - now)),
    )


def reports(hub: Hub) -> list[SourceReport]:
    """Return the operator's view of all sources."""
    failing = hub.failing()
    return [report(source, failing) for source in hub.sources]


def control_operations(hub: Hub) -> list[Any]:
    """Return the operations that control a hub, for callers with the scope `hub:operate`."""

    async def change(name: str, action: Callable[[Supervisor], Awaitable[None]]) -> SourceReport:
        try:
            supervisor = hub.supervisor(name)
        except KeyError:
            names = ", ".join(source.full_name for source in hub.sources)
            message = f"{name!r} does not name one source; the sources are: {names}"
            raise CallError(ErrorCode.VALIDATION_ERROR, message) from None
        await action(supervisor)
        return report(supervisor.source, hub.failing())

    @operation(SOURCES, type="query", scopes=[SCOPE], authority=True)
    async def sources() -> list[SourceReport]:
        """List the sources of this hub and their states."""
        return reports(hub)

    @operation("hub.watch", scopes=[SCOPE], authority=True)
    async def watch() -> AsyncGenerator[list[SourceReport]]:
        """Return the sources of this hub and their states now, and again whenever one changes."""
        sent: list[SourceReport] | None = None
        # It must not keep the server from shutting down.
        while hub.is_up:
            found = reports(hub)
            if found != sent:
                sent = found
                yield found
            await asyncio.sleep(_SOURCES_SECONDS)

    @operation("hub.retry", scopes=[SCOPE], authority=True)
    async def retry(source: str) -> SourceReport:
        """Connect to a source again now.

        Args:
            source: Its name, or `kind:name`.
        """
        return await change(source, Supervisor.open_again)

    @operation("hub.enable", scopes=[SCOPE], authority=True)
    async def enable(source: str) -> SourceReport:
        """Connect to a disabled source, until the hub is restarted.

        Args:
            source: Its name, or `kind:name`.
        """
        return await change(source, Supervisor.open_again)

    @operation("hub.disable", scopes=[SCOPE], authority=True)
    async def disable(source: str) -> SourceReport:
        """Close a source and remove its operations, until it is enabled or the hub is restarted.

        Args:
            source: Its name, or `kind:name`.
        """
        return await change(source, Supervisor.disable)

    @operation("hub.reload", scopes=[SCOPE], authority=True)
    async def read_again() -> list[SourceReport]:
        """Read the config file again."""
        try:
            await reload(hub)
        except ConfigError as error:
            message = f"The config cannot be used, so the previous one stays in effect: {error}"
            raise CallError(ErrorCode.EXECUTION_ERROR, message) from None
        hub.reload_others()
        return reports(hub)

    if hub.file.config.serve.processes > 1:
        # The others would only change the sources of one process.
        return [sources, watch, read_again]
    return [sources, watch, retry, enable, disable, read_again]


async def readiness(hub: Hub) -> bool | JSONObject:
    """Return whether a hub has operations to serve, and the names of the sources that are not connected.

    A hub is not ready either while its sources connect for the first time: its operations are not complete.

    If they cannot be written, `state` stands for the store of grants and approvals, `runs` for the store of
    runs, and the name of its table for a sink. A development server adds why the files cannot be used, as `problem`.

    A hub whose stores could not be used since its start is not ready: its config may be wrong.
    """
    absent, store = [source.name for source in hub.absent()], hub.registry.authority.store
    unopened: list[str] = []
    if not await store.check():
        absent.append("state")
        if not store.has_worked:
            unopened.append("state")
    absent += [name for name, sink in hub.sinks.items() if not sink.check()]
    runs = hub.registry.run_store
    if runs is not None and not await runs.works():
        absent.append("runs")
        if not runs.was_opened:
            unopened.append("runs")
    if not absent:
        return True if hub.code is None else {"status": "ok", "problem": hub.problem}
    # These operations are always registered.
    own = ("hub", "approvals", "code", "runs")
    is_useless = hub.is_starting or all(
        spec.namespace in own or spec.id == NEXT for spec in hub.registry.specs()
    )
    found: JSONObject = {
        "status": "unavailable" if is_useless or unopened else "degraded",
        "disconnected": absent,
    }
    if unopened:
        names = " and ".join(f"[{name}]" for name in unopened)
        found["message"] = f"The store of {names} could not be used since the start: see the log"
    return found if hub.code is None else {**found, "problem": hub.problem}


# ------------------------------------------------------------ workers

WORKERS = "hub.workers"

_WORKERS_SECONDS = 2.0
"""Seconds between two reports of the workers to a subscriber."""


class BrokerReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A broker of the hub, and the workers on it."""

    broker: str

    problem: str | None = None
    """The reason why the state of the workers is unknown."""

    group: GroupReport | None = None


async def look_at_workers(hub: Hub) -> list[BrokerReport]:
    """Return the state of the workers of every broker."""
    return await asyncio.gather(*(_report(source) for source in _brokers(hub)))


def _brokers(hub: Hub) -> list[Source]:
    return [source for source in hub.sources if source.of.is_late and source.is_enabled]


async def _report(source: Source) -> BrokerReport:
    opened = source.opened
    if opened is None or opened.monitor is None:
        return BrokerReport(broker=source.name, problem=source.problem)
    try:
        return BrokerReport(broker=source.name, group=await opened.monitor.look())
    except TransportError as error:
        return BrokerReport(broker=source.name, problem=str(error))


async def collect_source_metrics(hub: Hub) -> bytes:
    """Return the states of the enabled sources, as metrics."""
    failing = hub.failing()
    return source_metrics(
        {each.full_name: report(each, failing).state for each in hub.sources if each.is_enabled}
    )


async def collect_group_metrics(hub: Hub) -> bytes:
    """Return the state of the worker groups, as metrics."""
    reports = await look_at_workers(hub)
    return group_metrics([each.group for each in reports if each.group is not None])


@contextmanager
def _monitor_of(hub: Hub, broker: str | None) -> Generator[tuple[str, GroupMonitor]]:
    """Yield the name and the workers of a broker; convert its connection errors to errors of the call.

    Raises:
        CallError: `VALIDATION_ERROR` unless `broker` names a connected broker, or there is only one.
    """
    brokers = _brokers(hub)
    known = ", ".join(source.name for source in brokers) or "none"
    if broker is None:
        if len(brokers) != 1:
            message = f"Name the broker: there are {len(brokers)} ({known})"
            raise CallError(ErrorCode.VALIDATION_ERROR, message)
        broker = brokers[0].name
    for source in brokers:
        if source.is_called(broker) and source.opened is not None and source.opened.monitor:
            try:
                yield source.name, source.opened.monitor
            except TransportError as error:
                raise CallError(ErrorCode.UNAVAILABLE, str(error)) from error
            return
    message = f"There is no connected broker {broker!r}; the brokers are: {known}"
    raise CallError(ErrorCode.VALIDATION_ERROR, message)


def worker_operations(hub: Hub) -> list[Any]:
    """Return the operations about the workers of a hub, for callers with the scope `hub:operate`."""

    @operation(WORKERS, type="query", scopes=[SCOPE], authority=True)
    async def workers() -> list[BrokerReport]:
        """Show the workers of each broker, the running and waiting calls, and the number of dead letters."""
        return await look_at_workers(hub)

    @operation("hub.watch_workers", scopes=[SCOPE], authority=True)
    async def watch_workers() -> AsyncGenerator[list[BrokerReport]]:
        """Show the workers of each broker now, and again every two seconds."""
        # It must not keep the server from shutting down.
        while hub.is_up:
            yield await look_at_workers(hub)
            await asyncio.sleep(_WORKERS_SECONDS)

    @operation("hub.dead_letters", type="query", scopes=[SCOPE], authority=True)
    async def dead_letters(broker: str | None = None) -> list[DeadLetter]:
        """List the newest dead letters: requests that were abandoned because every worker that started one was lost.

        Args:
            broker: The name of the broker, if there is more than one.
        """
        with _monitor_of(hub, broker) as (_, monitor):
            return await monitor.letters()

    @operation("hub.replay_letter", scopes=[SCOPE], authority=True)
    async def replay(letter: str, context: OperationContext, broker: str | None = None) -> Any:
        """Call the operation of a dead letter once more, and remove the letter if that succeeds.

        The call has the `credential` of the broker in the config. It may crash another worker. It needs the approval
        that the operation requires at this hub, and a grant of the caller must cover it.

        Args:
            letter: The id of the dead letter.
            context: The context of the operator.
            broker: The name of the broker, if there is more than one.
        """
        with _monitor_of(hub, broker) as (name, monitor):
            options = hub.file.options(RemoteConfig, hub.file.config.tables("brokers")[name])
            stored, namespace = await monitor.letter(letter), options.get("namespace")
            operation_id = f"{namespace}.{stored.operation}" if namespace else stored.operation
            identity = context.identity
            has_grant = identity is not None and identity.grant is not None
            if has_grant or hub.registry.registered(operation_id) is not None:
                # An operator needs no scope of the operation, because the call has the credential of the hub.
                whose = context if has_grant else context.changed(trusted=True)
                await hub.registry.authorize(operation_id, stored.input, whose)
            envelope = await monitor.replay(letter, credential=options.get("credential"))
            return envelope.data

    @operation("hub.drop_letter", scopes=[SCOPE], authority=True)
    async def drop(letter: str, broker: str | None = None) -> None:
        """Remove a dead letter.

        Args:
            letter: The id of the dead letter.
            broker: The name of the broker, if there is more than one.
        """
        with _monitor_of(hub, broker) as (_, monitor):
            await monitor.remove(letter)

    return [workers, watch_workers, dead_letters, replay, drop]
