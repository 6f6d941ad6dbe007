"""Operations that show and control the sources of a hub. Sources are added and removed by editing the file alone."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from time import time
from typing import Any

import msgspec

from operations.errors import CallError, ErrorCode
from operations.functions import operation
from operations.hub.hub import Hub
from operations.hub.reload import reload
from operations.hub.source import Source
from operations.hub.supervisor import Supervisor
from operations.result_pages import NEXT
from operations.types import JSONObject

SCOPE = "hub:operate"
"""What a caller needs for these operations."""


_WATCH_SECONDS = 0.5
"""Time between two looks at the sources for a caller that follows them."""


class SourceReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A source of the hub."""

    name: str
    kind: str

    state: str
    """`connecting`, `connected`, `disconnected` or `disabled`."""

    operations: int
    """How many operations it offers."""

    problem: str | None = None
    """Why it cannot be called now."""

    next_attempt: int | None = None
    """When it is connected again, in Unix ms."""


def report(source: Source) -> SourceReport:
    """Return what an operator sees of a source."""
    now, opens_at = asyncio.get_running_loop().time(), source.next_attempt
    return SourceReport(
        name=source.name,
        kind=source.kind,
        state=source.state,
        operations=len(source.operations),
        problem=source.problem,
        # Tenths of a second: the two clocks must not make two reports differ.
        next_attempt=None if opens_at is None else 100 * round(10 * (time() + opens_at - now)),
    )


def control_operations(hub: Hub, *, is_up: Callable[[], bool]) -> list[Any]:
    """Return the operations that control a hub, for callers with the scope `hub:operate`.

    Args:
        hub: The hub.
        is_up: Returns whether it is not shutting down.
    """

    def find(name: str) -> Supervisor:
        try:
            return hub.supervisor(name)
        except KeyError:
            names = ", ".join(source.name for source in hub.sources)
            message = f"There is no source {name!r}; there are: {names}"
            raise CallError(ErrorCode.VALIDATION_ERROR, message) from None

    async def change(name: str, action: Callable[[Supervisor], Awaitable[None]]) -> SourceReport:
        supervisor = find(name)
        await action(supervisor)
        return report(supervisor.source)

    @operation("hub.sources", type="query", scopes=[SCOPE])
    async def sources() -> list[SourceReport]:
        """List the sources of this hub and their states."""
        return [report(source) for source in hub.sources]

    @operation("hub.watch", scopes=[SCOPE])
    async def watch() -> AsyncGenerator[list[SourceReport]]:
        """Report the sources of this hub and their states now, and again whenever one changes."""
        sent: list[SourceReport] | None = None
        # It must not keep the server from shutting down.
        while is_up():
            found = [report(source) for source in hub.sources]
            if found != sent:
                sent = found
                yield found
            await asyncio.sleep(_WATCH_SECONDS)

    @operation("hub.retry", scopes=[SCOPE])
    async def retry(source: str) -> SourceReport:
        """Connect to a source again now.

        Args:
            source: Its name, or `kind:name`.
        """
        return await change(source, Supervisor.open_again)

    @operation("hub.enable", scopes=[SCOPE])
    async def enable(source: str) -> SourceReport:
        """Connect to a source that was disabled; a restart follows the file again.

        Args:
            source: Its name, or `kind:name`.
        """
        return await change(source, Supervisor.open_again)

    @operation("hub.disable", scopes=[SCOPE])
    async def disable(source: str) -> SourceReport:
        """Close a source and remove its operations, until it is enabled or the hub is restarted.

        Args:
            source: Its name, or `kind:name`.
        """
        return await change(source, Supervisor.disable)

    @operation("hub.reload", scopes=[SCOPE])
    async def read_again() -> list[SourceReport]:
        """Read the config file again."""
        await reload(hub)
        hub.reload_others()
        return [report(source) for source in hub.sources]

    if hub.file.config.serve.processes > 1:
        # The others would change the sources of one process alone.
        return [sources, watch, read_again]
    return [sources, watch, retry, enable, disable, read_again]


def readiness(hub: Hub) -> bool | JSONObject:
    """Return whether a hub can serve anything, and the names of the sources that are not connected."""
    absent = [source.name for source in hub.absent()]
    if not absent:
        return True
    # These are always registered.
    own = ("hub", "approvals")
    is_useless = all(spec.namespace in own or spec.id == NEXT for spec in hub.registry.specs())
    return {"status": "unavailable" if is_useless else "degraded", "disconnected": absent}
