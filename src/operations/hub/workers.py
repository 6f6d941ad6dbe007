"""Operations that show the workers of a hub's brokers to operators, and handle dead letters."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager
from typing import Any

import msgspec

from operations.calls.config import RemoteConfig
from operations.calls.monitoring import DeadLetter, GroupMonitor, GroupReport
from operations.errors import CallError, ErrorCode, TransportError
from operations.functions import operation
from operations.hub.controls import SCOPE
from operations.hub.hub import Hub
from operations.hub.source import Source
from operations.telemetry.metrics import group_metrics

WORKERS = "hub.workers"

_WATCH_SECONDS = 2.0
"""Time between two reports to a caller that follows the workers."""


class BrokerReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A broker of the hub, and the workers on it."""

    broker: str

    problem: str | None = None
    """Why nothing is known of its workers."""

    group: GroupReport | None = None


async def look_at_workers(hub: Hub) -> list[BrokerReport]:
    """Return what is known of the workers of every broker."""
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


async def collect_group_metrics(hub: Hub) -> bytes:
    """Return the state of the worker groups, as metrics."""
    reports = await look_at_workers(hub)
    return group_metrics([each.group for each in reports if each.group is not None])


def worker_operations(hub: Hub, *, is_up: Callable[[], bool]) -> list[Any]:
    """Return the operations about the workers of a hub, for callers with the scope `hub:operate`.

    Args:
        hub: The hub.
        is_up: Returns whether it is not shutting down.
    """
    if not hub.file.config.brokers:
        return []

    @contextmanager
    def found(broker: str) -> Generator[tuple[str, GroupMonitor]]:
        """The name and the workers of a broker; an error of its connection becomes that of the call."""
        for source in _brokers(hub):
            if source.is_called(broker) and source.opened is not None and source.opened.monitor:
                try:
                    yield source.name, source.opened.monitor
                except TransportError as error:
                    raise CallError(ErrorCode.UNAVAILABLE, str(error)) from error
                return
        known = ", ".join(source.name for source in _brokers(hub)) or "none"
        message = f"There is no connected broker {broker!r}; the brokers are: {known}"
        raise CallError(ErrorCode.VALIDATION_ERROR, message)

    @operation(WORKERS, type="query", scopes=[SCOPE])
    async def workers() -> list[BrokerReport]:
        """Show the workers of each broker, the calls that run and wait, and the number of dead letters."""
        return await look_at_workers(hub)

    @operation("hub.watch_workers", scopes=[SCOPE])
    async def watch_workers() -> AsyncGenerator[list[BrokerReport]]:
        """Show the workers of each broker now, and again every two seconds."""
        # It must not keep the server from shutting down.
        while is_up():
            yield await look_at_workers(hub)
            await asyncio.sleep(_WATCH_SECONDS)

    @operation("hub.dead_letters", type="query", scopes=[SCOPE])
    async def dead_letters(broker: str) -> list[DeadLetter]:
        """List the newest requests that were given up because they cost every worker that began them.

        Args:
            broker: The name of the broker.
        """
        with found(broker) as (_, monitor):
            return await monitor.letters()

    @operation("hub.replay", scopes=[SCOPE])
    async def replay(broker: str, letter: str) -> Any:
        """Call the operation of a dead letter once more, and remove the letter if that succeeds.

        The call has the `credential` of the broker in the config. It may cost one more worker.

        Args:
            broker: The name of the broker.
            letter: The id of the dead letter.
        """
        with found(broker) as (name, monitor):
            options = hub.file.options(RemoteConfig, hub.file.config.brokers[name])
            envelope = await monitor.replay(letter, credential=options.get("credential"))
            return envelope.data

    @operation("hub.drop", scopes=[SCOPE])
    async def drop(broker: str, letter: str) -> None:
        """Remove a dead letter.

        Args:
            broker: The name of the broker.
            letter: The id of the dead letter.
        """
        with found(broker) as (_, monitor):
            await monitor.remove(letter)

    return [workers, watch_workers, dead_letters, replay, drop]
