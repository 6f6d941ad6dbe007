"""Reconnecting connections to Redis: one for the commands of many tasks, and one for Pub/Sub.

Rule 1: commands are written together, once per turn of the event loop; replies arrive in order.
Rule 2: when a connection breaks, its pending commands fail, and it reconnects with jitter.
Rule 3: a connection without a reply to a pending command is broken (half-open connections).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

from redis.exceptions import BusyLoadingError, NoPermissionError, ResponseError

from operations._resilience import Backoff
from operations.errors import NotSentError, TransportError
from operations.pubsub.base import NOT_PERMITTED, LogThrottle
from operations.pubsub.redis.servers import (
    CONNECTION_ERRORS,
    SILENCE,
    Connector,
    WrongServerError,
    ask,
    is_wrong_server,
    pack_command,
    shown,
)

logger = logging.getLogger("operations")

KEEPALIVE = 5.0
"""Seconds between heartbeats."""

_PIECE = 256 * 1024
"""The largest single write in bytes."""

MAX_BUFFERED = 8 * 1024 * 1024
"""Unwritten bytes above which senders wait."""


class ReconnectingTask:
    """A task that runs on a connection, and again on the next one when that breaks.

    Args:
        work: The coroutine function to run.
        lost: Called when the connection breaks.
        connector: Opens the connections.
        link: If given, wait for it before connecting again: of the connections of a client that lost them all, one
            tries, and the others follow.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[None]],
        lost: Callable[[str], None],
        connector: Connector,
        link: "PipelinedConnection | None" = None,
    ) -> None:
        self._opening = connector.timeout
        self._work = work
        self._lost = lost
        self._failure: BaseException | None = None
        self._link = link
        self.backoff = Backoff()
        self._task: asyncio.Task[None] | None = None

    async def start(self, ready: asyncio.Event) -> None:
        """Run in the background until `stop`; returns when it is `ready`.

        Raises:
            TransportError: If that takes too long; then nothing runs in the background.
        """
        self._task = asyncio.get_running_loop().create_task(self._run())
        try:
            async with asyncio.timeout(self._opening):
                await ready.wait()
        except TimeoutError:
            await self.stop()
            failure = self._failure
            if isinstance(failure, TransportError):
                raise failure from None
            reason = failure or f"no answer for {self._opening:g} seconds"
            raise TransportError(f"Redis cannot be reached: {reason}") from None
        except BaseException:
            await self.stop()
            raise

    async def _run(self) -> None:
        while True:
            try:
                await self._work()
            except (TransportError, *CONNECTION_ERRORS) as error:
                if self.backoff.attempt == 0:
                    logger.warning("the connection to Redis was lost: %s", error)
                self._failure = error
                self._lost(f"the connection to Redis was lost: {error}")
            except Exception as error:
                # Reconnect after any error: no other task would notice it.
                logger.exception("reading from Redis failed")
                self._lost(f"reading from Redis failed: {error}")
            else:
                return
            await asyncio.sleep(self.backoff.pause())
            if self._link is not None:
                await self._link.wait()

    async def stop(self) -> None:
        """Stop and wait until it has."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def ended(self) -> None:
        """Wait until the work ends by itself."""
        if self._task is not None:
            await asyncio.wait({self._task})


class PipelinedConnection:
    """Commands of many tasks over one connection."""

    def __init__(
        self,
        connector: Connector,
        lost: Callable[[str], None],
        restored: Callable[[], None],
    ) -> None:
        self._connector = connector
        self._restored = restored
        self._outbox: list[tuple[tuple[Any, ...], asyncio.Future[Any] | None, int]] = []
        self._outbox_bytes = 0
        self._waiting: deque[asyncio.Future[Any] | tuple[Any, ...]] = deque()
        self._refusals = LogThrottle()
        self._heard_at = 0.0
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._up = asyncio.Event()
        self._supervised = ReconnectingTask(self._live, lost, connector)

    @property
    def is_up(self) -> bool:
        """Whether commands can be sent now."""
        return self._up.is_set()

    async def open(self) -> None:
        """Connect for the first time, and stay connected.

        Raises:
            TransportError: If that fails; then nothing goes on in the background.
        """
        connection = await self._connector.connect()
        try:
            # A server that loads its data accepts connections, but no commands.
            await ask(connection, "PING")
        finally:
            await connection.disconnect()
        await self._supervised.start(self._up)

    async def aclose(self) -> None:
        """Write pending commands, and disconnect."""
        if self._up.is_set() and self._outbox:
            self._wake.set()
            await asyncio.wait({asyncio.ensure_future(self._drained.wait())}, timeout=1)
        await self._supervised.stop()

    async def wait(self) -> None:
        """Wait until commands can be sent, however long that takes."""
        await self._up.wait()

    async def ready(self, wait: float) -> None:
        """Wait until commands can be sent.

        Raises:
            NotSentError: If that takes longer than `wait` seconds.
        """
        if self._up.is_set():
            return
        try:
            async with asyncio.timeout(wait):
                await self._up.wait()
        except TimeoutError:
            raise NotSentError("Redis cannot be reached") from None

    async def request(self, *command: Any, size: int = 0) -> Any:
        """Send a command and return its reply.

        Raises:
            TransportError: If it is unknown whether Redis executed it.
            redis.ResponseError: As Redis gave it.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self._add(command, future, size)
        return await future

    async def tell(self, *command: Any, size: int = 0) -> None:
        """Send a command and ignore its reply."""
        await self._add(command, None, size)

    async def _add(
        self, command: tuple[Any, ...], future: "asyncio.Future[Any] | None", size: int
    ) -> None:
        if self._outbox_bytes > MAX_BUFFERED:
            await self._drained.wait()
        if not self._up.is_set():
            raise NotSentError("Redis cannot be reached")
        self._outbox.append((command, future, size))
        self._outbox_bytes += size
        self._drained.clear()
        self._wake.set()

    async def _live(self) -> None:
        """Keep the connection until it breaks."""
        connection = await self._connector.connect()
        tasks: list[asyncio.Task[None]] = []
        try:
            await ask(connection, "PING")
            loop = asyncio.get_running_loop()
            self._heard_at = loop.time()
            backoff = self._supervised.backoff
            is_first = backoff.attempt == 0
            backoff.reset()
            self._up.set()
            if not is_first:
                self._restored()
            tasks = [
                loop.create_task(work(connection))
                for work in (self._write, self._read, self._keep_alive)
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            self._up.clear()
            for task in tasks:
                task.cancel()
            # Before the first await, because closing may cancel this.
            self._fail_all()
            # Once broken, the next connection is a restored one.
            self._supervised.backoff.attempt = max(self._supervised.backoff.attempt, 1)
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                await connection.disconnect(nowait=True)

    async def _write(self, connection: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            # Wait one turn, so that all commands of this turn are written together.
            await asyncio.sleep(0)
            batch, self._outbox = self._outbox, []
            self._outbox_bytes = 0
            self._drained.set()
            if not batch:
                continue
            # The start of a command without a future is logged if Redis rejects it.
            self._waiting += [
                command[:2] if future is None else future for command, future, _ in batch
            ]
            packed: list[bytes] = []
            size = 0
            for command, _, _ in batch:
                packed.append(pack_command(command))
                size += len(packed[-1])
                if size > _PIECE:
                    await connection.send_packed_command(b"".join(packed))
                    packed, size = [], 0
            if packed:
                await connection.send_packed_command(b"".join(packed))

    async def _read(self, connection: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                answer = await connection.read_response()
            except (ResponseError, BusyLoadingError) as error:
                self._settle(error)
                if is_wrong_server(error):
                    raise TransportError(str(error)) from error
            else:
                self._settle(answer)
            self._heard_at = loop.time()

    def _settle(self, answer: Any) -> None:
        waiting = self._waiting.popleft()
        if isinstance(waiting, tuple):
            if isinstance(answer, Exception):
                reason = NOT_PERMITTED if isinstance(answer, NoPermissionError) else answer
                level = self._refusals.level()
                logger.log(level, "Redis refused %s: %s", shown(waiting), reason)
        elif not waiting.done():
            if isinstance(answer, Exception):
                if is_wrong_server(answer):
                    answer = WrongServerError(f"Redis: {answer}")
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)

    async def _keep_alive(self, connection: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(KEEPALIVE)
            if loop.time() - self._heard_at > SILENCE:
                raise TransportError(f"no answer for {SILENCE:g} seconds")
            await self.tell("PING")

    def _fail_all(self) -> None:
        unsent, self._outbox = self._outbox, []
        self._outbox_bytes = 0
        self._drained.set()
        for waiting in self._waiting:
            if isinstance(waiting, asyncio.Future) and not waiting.done():
                waiting.set_exception(TransportError("the connection to Redis was lost"))
        self._waiting.clear()
        for _, future, _ in unsent:
            if future is not None and not future.done():
                future.set_exception(NotSentError("the connection to Redis was lost"))


class PubSubConnection:
    """A reconnecting connection that only subscribes.

    Args:
        connector: Opens the connections.
        link: The connection of the same client for commands.
        wanted: Returns the command that subscribes a new connection to all channels; empty if there are none.
        deliver: Called with every message.
        lost: Called when the connection breaks.
        restored: Called when it is restored.
    """

    def __init__(
        self,
        connector: Connector,
        link: PipelinedConnection,
        *,
        wanted: Callable[[], Iterable[str]],
        deliver: Callable[[Any], None],
        lost: Callable[[str], None],
        restored: Callable[[], None],
    ) -> None:
        self._connector = connector
        self._wanted = wanted
        self._deliver = deliver
        self._restored = restored
        self._connection: Any = None
        self._leaving: asyncio.Future[None] | None = None
        self._heard_at = 0.0
        self._supervised = ReconnectingTask(self._live, lost, connector, link)
        self._ready = asyncio.Event()

    @property
    def is_up(self) -> bool:
        """Whether it is connected."""
        return self._connection is not None

    async def open(self) -> None:
        """Connect, and stay connected.

        Raises:
            TransportError: If that fails; then nothing goes on in the background.
        """
        await self._supervised.start(self._ready)

    async def aclose(self) -> None:
        """Disconnect."""
        await self._supervised.stop()

    def _follow(self) -> None:
        """Leave a server that another one has replaced: it keeps the connections of subscribers."""
        connection = self._connection
        if connection is not None:
            # Wakes the reader with an error.
            self._leaving = asyncio.ensure_future(connection.disconnect(nowait=True))

    async def tell(self, *command: str) -> None:
        """Send a command; do nothing while disconnected, because the next connection subscribes to all channels."""
        if self._connection is not None:
            # If it breaks now, the reader notices and reconnects.
            with suppress(*CONNECTION_ERRORS):
                await self._connection.send_command(*command)

    async def _live(self) -> None:
        connection = await self._connector.connect()
        self._connector.followers.add(self._follow)
        loop = asyncio.get_running_loop()
        keep_alive: asyncio.Task[None] | None = None
        try:
            command = tuple(self._wanted())
            if command:
                await connection.send_command(*command)
            self._connection = connection
            self._heard_at = loop.time()
            keep_alive = loop.create_task(self._keep_alive(connection))
            if self._ready.is_set():
                self._restored()
            self._ready.set()
            self._supervised.backoff.reset()
            while True:
                message = await connection.read_response()
                self._heard_at = loop.time()
                # Without a subscription, the reply to PING is not a message.
                if isinstance(message, list):
                    self._deliver(message)
        finally:
            self._connection = None
            self._connector.followers.discard(self._follow)
            if keep_alive is not None:
                keep_alive.cancel()
            await connection.disconnect(nowait=True)

    async def _keep_alive(self, connection: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(KEEPALIVE)
            if loop.time() - self._heard_at > SILENCE:
                # Wakes the reader with an error.
                await connection.disconnect(nowait=True)
                return
            await connection.send_command("PING")
