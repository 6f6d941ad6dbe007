"""Control a running hub: read its config again, and list and control its sources, workers and dead letters.

Rule 1: the config is read again when its file changes, on SIGHUP, and on request. A faulty file is reported and
        ignored. Changes of sources, keys, secrets and limits lose no call. Changes that need a restart are reported.
Rule 2: sources can only be added and removed by editing the file.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from time import time
from typing import Any

import msgspec
from anyio import move_on_after

from operations._mcp_config import read_servers
from operations._tasks import cancel_tasks, receives_signals
from operations.calls.monitoring import DeadLetter, GroupMonitor, GroupReport
from operations.calls.remote import RemoteConfig
from operations.config import Config, ConfigError, ConfigFile, load_config, modified_at
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode, OperationsError, TransportError
from operations.functions import operation
from operations.hub import Hub, tools_of
from operations.hub.opening import Access, can_sign_in, serves_anonymous, sources_of
from operations.hub.source import (
    ListedServer,
    Source,
    file_times,
    fingerprint,
    limits_of,
    times_read,
)
from operations.hub.supervisor import Supervisor
from operations.result_pages import NEXT
from operations.telemetry import group_metrics, source_metrics
from operations.types import JSONObject

logger = logging.getLogger("operations.hub")

_POLL_SECONDS = 1.0
_SETTLE_SECONDS = 0.3
"""Seconds without a further change after which a file counts as completely written."""

_MAX_SETTLE_SECONDS = 10.0
"""Seconds after which a file that changes again and again is read all the same."""

_LIVE = frozenset({"openapi", "mcp", "mcp_json", "brokers", "access", "limits", "tools"})
"""The tables whose changes take effect at once; the others need a restart."""


async def reload(hub: Hub) -> None:
    """Read the config of a hub again, and apply it.

    Raises:
        ConfigError: If the file cannot be used; the hub is then unchanged.
    """
    async with hub.changing:
        if hub.file.path is not None:
            await _written(hub)
            await _apply(hub, hub.file.path)


async def _apply(hub: Hub, path: Path) -> None:
    hub.file_times = file_times(hub.file)
    old, new = hub.file, load_config(path)
    times = times_read(new)
    _enforce_listings(hub, new)
    limits, tools = limits_of(new), tools_of(new)
    access = Access(new, hub.registry.authority.store) if "access" in vars(hub) else None
    try:
        hub.tools.change(tools)
    except (OperationsError, ValueError) as error:
        raise new.error(str(error), "tools") from error
    # No step fails from here on.
    if access is not None:
        hub.access.become(access)
    for front in hub.fronts:
        front.configure(limits, timeout=new.config.limits.timeout)
        front.credentials.admit_anonymous(serves_anonymous(new))
    hub.file, hub.file_times = new, times
    # Before the sources, which may take seconds: a caller may have been removed.
    for apply in hub.on_reload:
        try:
            apply()
        except OperationsError as error:
            logger.warning("a part of the config could not be applied: %s", error)
    for source in hub.sources:
        if source.opened is not None:
            source.opened.configure(new)
    try:
        await _apply_sources(hub, old, new)
    except asyncio.CancelledError:
        # The caller was cancelled; the next reload, which follows soon, completes the work.
        hub.file, hub.file_times = old, dict.fromkeys(hub.file_times)
        raise
    _warn_of_ineffective(hub, old)
    logger.info("%s was read again", new.path)


def _warn_of_ineffective(hub: Hub, old: ConfigFile) -> None:
    """Log the changes that match no operation or need a restart."""
    new = hub.file
    added = new.config.tools.keys() - old.config.tools.keys()
    for pattern in sorted(added & hub.tools.unmatched) if not hub.absent() else ():
        logger.warning('[tools."%s"] matches no operation', pattern)
    stale = _stale(old.config, new.config)
    if can_sign_in(new) > can_sign_in(old):
        stale.append("access")
    if stale:
        logger.warning("restart to apply the changes of %s", ", ".join(stale))


def _enforce_listings(hub: Hub, file: ConfigFile) -> None:
    """Raise an error if an `mcp.json` whose servers are in use cannot be read."""
    entries = (each.entry for each in hub.sources if not each.is_unreadable)
    used = {each.path for each in entries if isinstance(each, ListedServer)}
    for path in used & set(file.config.mcp_json):
        try:
            read_servers(file.existing(path, "mcp_json"))
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise file.error(
                f"contains {path}, which cannot be used: {error}", "mcp_json"
            ) from error


def _stale(old: Config, new: Config) -> list[str]:
    """Return the tables and keys whose changes need a restart."""
    names = [each.name for each in fields(new) if each.name not in _LIVE]
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in names}
    servers = "access.authorization_servers"
    pairs[servers] = old.access.authorization_servers, new.access.authorization_servers
    pairs["limits.threads"] = old.limits.threads, new.limits.threads
    if (store := new.authority.broker) is not None and old.authority.broker == store:
        pairs[f"brokers.{store}"] = old.brokers[store], new.brokers[store]
    return [name for name, (before, now) in pairs.items() if before != now]


async def _apply_sources(hub: Hub, old: ConfigFile, new: ConfigFile) -> None:
    was_enabled = {_key(each): each.is_enabled for each in sources_of(old)}
    found = filter(hub.wanted.includes, sources_of(new))
    wanted = {_key(each): each for each in found if each.kind != "local"}
    for supervisor in list(hub.supervisors):
        known = supervisor.source
        if known.kind == "local":
            continue
        source = wanted.pop(_key(known), None)
        if source is None:
            await hub.remove(supervisor)
            continue
        is_new = was_enabled.get(_key(known)) != source.is_enabled
        # The operator's choice stays in effect until `enabled` changes in the file.
        is_wanted = source.is_enabled if is_new else known.is_enabled
        known.entry = source.entry
        if not is_wanted:
            await supervisor.disable()
        elif not known.is_enabled or fingerprint(source, new) != known.made_of:
            supervisor.request(is_changed=True)
    await hub.open(wanted.values(), 0)


def _key(source: Source) -> tuple[str, str, str]:
    path = source.entry.path if isinstance(source.entry, ListedServer) else ""
    return source.kind, source.name, path


@asynccontextmanager
async def following(
    hub: Hub, connections: Mapping[str, Callable[[], bool]] | None = None
) -> AsyncGenerator[None]:
    """Reload a hub when its file changes and on SIGHUP, and log lost sources, within an `async with` block.

    Args:
        hub: The hub.
        connections: Other connections whose loss is logged, by label: each returns whether it is connected.
    """
    again, loop = asyncio.Event(), asyncio.get_running_loop()
    task = asyncio.Task(_follow(hub, again, connections or {}), name="config changes")
    has_signals = receives_signals()
    if has_signals:
        with suppress(NotImplementedError):
            loop.add_signal_handler(signal.SIGHUP, again.set)
    try:
        yield
    finally:
        if has_signals:
            with suppress(NotImplementedError):
                loop.remove_signal_handler(signal.SIGHUP)
        await cancel_tasks(task)


def _log_changes(problems: Mapping[str, str | None], lost: frozenset[str]) -> frozenset[str]:
    """Log which sources were lost or came back since the last check; return those that are lost now."""
    for label, problem in problems.items():
        if problem is not None and label not in lost:
            logger.warning("%s is not available: %s", label, problem)
        elif problem is None and label in lost:
            logger.info("%s is connected again", label)
    return frozenset(label for label, problem in problems.items() if problem is not None)


def _times(hub: Hub) -> dict[Path, int | None]:
    return {path: modified_at(path) for path in hub.file_times}


async def _written(hub: Hub) -> None:
    """Wait until changed files are completely written, but not forever.

    An empty file, as many programs leave it for a moment, is a valid config.
    """
    before = hub.file_times
    with move_on_after(_MAX_SETTLE_SECONDS):
        while (times := _times(hub)) != before:
            before = times
            await asyncio.sleep(_SETTLE_SECONDS)


async def _follow(
    hub: Hub, again: asyncio.Event, connections: Mapping[str, Callable[[], bool]]
) -> None:
    lost = frozenset[str]()
    while True:
        with move_on_after(_POLL_SECONDS):
            await again.wait()
        # A supervisor logs why it could not open a source.
        problems = {each.label: each.problem for each in hub.sources if each.opened is not None}
        for label, is_connected in connections.items():
            problems[label] = None if is_connected() else "the connection was lost"
        lost = _log_changes(problems, lost)
        if not again.is_set() and _times(hub) == hub.file_times:
            continue
        again.clear()
        try:
            await reload(hub)
        except ConfigError as error:
            logger.warning(
                "the changed config cannot be used, so the previous one stays in effect: %s", error
            )
        except Exception:
            logger.exception("the config could not be read again")


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
    """`connecting`, `connected`, `disconnected` or `disabled`."""

    operations: int
    """The number of operations of the source."""

    problem: str | None = None
    """The reason why the source is not available, or why a connected source could not be opened again; None if there is
    no problem."""

    next_attempt: int | None = None
    """When the next connection attempt is made, in Unix ms."""


def report(source: Source) -> SourceReport:
    """Return the operator's view of a source."""
    now, opens_at = asyncio.get_running_loop().time(), source.next_attempt
    problem = source.problem
    if problem is None and source.failure is not None:
        problem = f"the previous connection is in use, because it cannot be opened again: {source.failure}"
    return SourceReport(
        name=source.name,
        kind=source.kind,
        state=source.state,
        operations=len(source.operations),
        problem=problem,
        # Rounded to tenths of a second, so that the difference of two clocks does not make equal reports differ.
        next_attempt=None if opens_at is None else 100 * round(10 * (time() + opens_at - now)),
    )


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
        return report(supervisor.source)

    @operation(SOURCES, type="query", scopes=[SCOPE], authority=True)
    async def sources() -> list[SourceReport]:
        """List the sources of this hub and their states."""
        return [report(source) for source in hub.sources]

    @operation("hub.watch", scopes=[SCOPE], authority=True)
    async def watch() -> AsyncGenerator[list[SourceReport]]:
        """Return the sources of this hub and their states now, and again whenever one changes."""
        sent: list[SourceReport] | None = None
        # It must not keep the server from shutting down.
        while hub.is_up:
            found = [report(source) for source in hub.sources]
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
        return [report(source) for source in hub.sources]

    if hub.file.config.serve.processes > 1:
        # The others would only change the sources of one process.
        return [sources, watch, read_again]
    return [sources, watch, retry, enable, disable, read_again]


async def readiness(hub: Hub) -> bool | JSONObject:
    """Return whether a hub has operations to serve, and the names of the sources that are not connected.

    A hub is not ready either while its sources connect for the first time: its operations are not complete.

    `authority` stands for the store of grants and approvals, and `ledger` for the ledger, if they cannot be written.
    """
    absent, authority = [source.name for source in hub.absent()], hub.registry.authority
    if not await authority.store.check():
        absent.append("authority")
    if authority.ledger is not None and not authority.ledger.check():
        absent.append("ledger")
    if not absent:
        return True
    # These operations are always registered.
    own = ("hub", "approvals")
    is_useless = hub.is_starting or all(
        spec.namespace in own or spec.id == NEXT for spec in hub.registry.specs()
    )
    return {"status": "unavailable" if is_useless else "degraded", "disconnected": absent}


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
    return [source for source in hub.sources if source.kind == "broker" and source.is_enabled]


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
    return source_metrics({each.full_name: each.state for each in hub.sources if each.is_enabled})


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
            options = hub.file.options(RemoteConfig, hub.file.config.brokers[name])
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
