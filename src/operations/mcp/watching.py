"""Watch resources of a server: one subscription at the server for each resource, however many watch it here.

Rule: after the connection was lost, the subscription is renewed, and a change is reported, because one may have been
      missed.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Final

from mcp import MCPError
from mcp.client.subscriptions import ResourceUpdated, SubscriptionLost, listen

from operations.errors import CallError, ErrorCode
from operations.mcp.connection import Connection
from operations.mcp.session import RelaySession

logger = logging.getLogger("operations.mcp")

MAX_WATCHED: Final = 1_000
"""Resources of one server that are watched at a time."""

_RENEW_SECONDS = 1.0


class ResourceWatches:
    """The resources of one server that are watched.

    Args:
        server: Its name.
        connection: The connection to it.
    """

    def __init__(self, server: str, connection: Connection) -> None:
        self._server = server
        self._connection = connection
        self._watched: dict[str, _Watched] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def watch(self, uri: str) -> AsyncGenerator[str]:
        """Yield the address of the resource as soon as it is watched, and then what changed: it, or a part of it.

        Raises:
            CallError: If the server refuses, or too many resources are watched.
        """
        watched = self._watched.get(uri)
        if watched is None:
            if len(self._watched) >= MAX_WATCHED:
                message = f"{MAX_WATCHED} resources of {self._server} are watched already"
                raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message)
            watched = self._watched[uri] = _Watched(uri, self._server, self._connection)
            self._tasks.add(watched.task)
            watched.task.add_done_callback(self._tasks.discard)
        changes = _Changes()
        watched.watchers.add(changes)
        try:
            await asyncio.shield(watched.is_subscribed)
            yield uri
            while True:
                for changed in await changes.next():
                    yield changed
        finally:
            watched.watchers.discard(changes)
            if not watched.watchers:
                if self._watched.get(uri) is watched:
                    del self._watched[uri]
                watched.task.cancel()

    def updated(self, uri: str) -> None:
        """Report a change that the server announced (up to 2025-11-25)."""
        for watched in self._watched.values():
            if uri == watched.uri or uri.startswith(watched.uri.rstrip("/") + "/"):
                watched.report(uri)

    async def aclose(self) -> None:
        """End all subscriptions."""
        for watched in self._watched.values():
            watched.task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))


class _Changes:
    """The changes that one watcher has not read yet; repetitions are dropped."""

    def __init__(self) -> None:
        self._unread: dict[str, None] = {}
        self._is_there = asyncio.Event()

    def add(self, uri: str) -> None:
        if len(self._unread) < MAX_WATCHED:
            self._unread[uri] = None
            self._is_there.set()

    async def next(self) -> list[str]:
        await self._is_there.wait()
        self._is_there.clear()
        unread, self._unread = list(self._unread), {}
        return unread


class _Watched:
    """One resource, for as long as it is watched."""

    def __init__(self, uri: str, server: str, connection: Connection) -> None:
        self.uri = uri
        self.watchers: set[_Changes] = set()
        self.is_subscribed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = server
        self._connection = connection
        self.task = asyncio.create_task(self._keep(), name=f"mcp {server} watches {uri}")

    def report(self, uri: str) -> None:
        for watcher in self.watchers:
            watcher.add(uri)

    async def _keep(self) -> None:
        # A server is not stopped while one of its resources is watched.
        self._connection.busy += 1
        try:
            await self._subscribe_again()
        finally:
            self._connection.busy -= 1

    async def _subscribe_again(self) -> None:
        while True:
            try:
                session = await self._connection.acquire()
                await (self._listen(session) if session.is_modern else self._subscribe(session))
            except (MCPError, CallError, SubscriptionLost, TimeoutError) as error:
                if not self.is_subscribed.done():
                    message = f"{self._server} does not report changes of this resource"
                    self.is_subscribed.set_exception(CallError(ErrorCode.UNAVAILABLE, message))
                    # Retrieved here as well: the watcher may have left.
                    self.is_subscribed.exception()
                    return
                logger.debug("%s: lost the changes of a resource: %s", self._server, error)
            await asyncio.sleep(_RENEW_SECONDS)

    async def _subscribe(self, session: RelaySession) -> None:
        await session.relay("resources/subscribe", {"uri": self.uri})
        self._subscribed()
        try:
            await session.finished.wait()
        except asyncio.CancelledError:
            if session.is_open:
                await _farewell(session, self.uri)
            raise

    async def _listen(self, session: RelaySession) -> None:
        async with listen(session, resource_subscriptions=[self.uri]) as changes:
            self._subscribed()
            async for change in changes:
                if isinstance(change, ResourceUpdated):
                    self.report(change.uri)

    def _subscribed(self) -> None:
        if self.is_subscribed.done():
            self.report(self.uri)
        else:
            self.is_subscribed.set_result(None)


async def _farewell(session: RelaySession, uri: str) -> None:
    try:
        async with asyncio.timeout(_RENEW_SECONDS):
            await session.relay("resources/unsubscribe", {"uri": uri})
    except (MCPError, TimeoutError):
        logger.debug("a subscription could not be ended", exc_info=True)
