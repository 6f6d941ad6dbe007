"""Report the changes of imported resources to the clients that subscribed to them.

Rule: a subscription runs as the caller that asked for it, and reports to that caller only.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

from mcp import MCPError
from mcp.server.subscriptions import InMemorySubscriptionBus, ServerEvent
from mcp_types import INTERNAL_ERROR

from operations.context import ENTRY, OperationContext
from operations.errors import CallError
from operations.mcp.serving.catalog import Resource
from operations.mcp.serving.service import Asker, Service


class JoinedBus(InMemorySubscriptionBus):
    """The events of one listener together with those of a shared bus."""

    def __init__(self, shared: InMemorySubscriptionBus) -> None:
        super().__init__()
        self._shared = shared

    def subscribe(self, listener: Callable[[ServerEvent], None]) -> Callable[[], None]:
        """Register a listener with both; return the function that removes it."""
        leave_own, leave_shared = super().subscribe(listener), self._shared.subscribe(listener)

        def leave() -> None:
            leave_own()
            leave_shared()

        return leave


def watcher_of(service: Service, resource: Resource, asker: Asker) -> str | None:
    """Return the id of the operation that watches a resource; None if the caller cannot watch it."""
    if resource.source is None:
        return None
    spec = service.registry.get_spec(f"{resource.source}.resources.watch")
    return spec.id if spec is not None and service.sees(spec, asker) else None


async def follow(
    service: Service,
    operation_id: str,
    uri: str,
    asker: Asker,
    report: Callable[[], Awaitable[None]],
) -> "asyncio.Task[None]":
    """Watch the resource at `uri` of a server; return the task, which lasts until it is cancelled.

    Raises:
        MCPError: If the server refuses.
    """
    is_active: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        context = OperationContext(identity=asker.identity, channel=ENTRY)
        changes = service.registry.subscribe(operation_id, {"uri": uri}, context)
        try:
            async with aclosing(changes):
                async for _ in changes:
                    if is_active.done():
                        await report()
                    else:
                        is_active.set_result(None)
        except CallError as error:
            if not is_active.done():
                is_active.set_exception(MCPError(INTERNAL_ERROR, error.message, error.to_wire()))

    task = asyncio.create_task(run())
    try:
        async with asyncio.timeout(asker.front.timeout):
            await asyncio.shield(is_active)
    except TimeoutError:
        task.cancel()
        raise MCPError(INTERNAL_ERROR, "the server did not confirm the subscription") from None
    except BaseException:
        task.cancel()
        raise
    return task


@asynccontextmanager
async def following(
    service: Service,
    operation_id: str,
    uri: str,
    asker: Asker,
    report: Callable[[], Awaitable[None]],
) -> AsyncGenerator[None]:
    """Watch the resource at `uri` during this block."""
    task = await follow(service, operation_id, uri, asker, report)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
