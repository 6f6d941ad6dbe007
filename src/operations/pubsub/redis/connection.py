"""Connections to Redis: to one server, the master that Sentinel names, or a shard of a cluster.

Rule 1: every connect, with its handshake and the lookup of the server, has a time limit.
Rule 2: in a cluster, all keys of a prefix carry one hash tag. They are on one shard, and so is the presence of clients.
Rule 3: the commands of many tasks are written together, once per turn of the event loop; replies arrive in order.
Rule 4: when a connection breaks, its pending commands fail, and it reconnects with jitter. A connection without a reply
        to a pending command is broken (half-open connections).
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from ssl import SSLError
from typing import Any, cast

import hiredis
from redis.asyncio import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from operations._resilience import Backoff
from operations.errors import NotSentError, TransportError
from operations.pubsub.base import NOT_PERMITTED, LogThrottle
from operations.pubsub.config import read_redis_address

logger = logging.getLogger("operations")

SILENCE = 12.0
"""Seconds without a reply after which a connection is closed."""

_READ_TIMEOUT = SILENCE
"""The same for one command on a connection that is not shared; blocking reads are shorter."""

CONNECTION_ERRORS = (RedisError, OSError, EOFError, asyncio.IncompleteReadError)

pack_command: Callable[[tuple[Any, ...]], bytes] = cast("Any", hiredis).pack_command
"""Return the bytes of a command. redis-py packs it in Python, which takes ten times as long."""

_MAX_HOPS = 3
"""Number of cluster nodes that are asked for the owner of a slot."""


class Connector:
    """Opens connections to the current address of a Redis server.

    Args:
        url: The address: `redis://`, `rediss://`, `unix://`, or with several hosts `redis+sentinel://` and
            `redis+cluster://` (and `rediss+...`).
        timeout: Seconds for a connection, with its handshake.
        name: The name of the connections, which the server lists.
        prefix: The prefix of every key.
        tls: Files of certificates, as redis-py takes them.

    Attributes:
        prefix: The prefix of every key; in a cluster with a hash tag, which decides on the shard.
        followers: Called when a connection leads to another server than the last one.

    Raises:
        TransportError: If the address cannot be read.
    """

    def __init__(
        self,
        url: str,
        timeout: float,
        name: str = "operations",
        *,
        prefix: str = "",
        tls: dict[str, str] | None = None,
    ) -> None:
        self.timeout = timeout
        self.followers: set[Callable[[], None]] = set()
        self._server = ("", 0)
        self._address = read_redis_address(url)
        is_tagged = "{" in prefix or self._address.kind != "cluster"
        self.prefix = prefix if is_tagged else f"{{{prefix.rstrip(':')}}}:"
        # RESP2, because replies are not converted to maps. No retries, because only
        # we know which commands may be sent twice.
        with suppress(TypeError, ValueError, RedisError):
            pool: Any = ConnectionPool.from_url(  # pyright: ignore[reportUnknownMemberType]
                self._address.url,
                protocol=2,
                client_name=name,
                socket_timeout=None,
                socket_connect_timeout=timeout,
                **(tls or {}),
            )
            # Only now are its options read.
            pool.make_connection()
            self._pool = pool
            return
        raise TransportError(
            "the address cannot be read: it has an option that redis-py does not take"
        )

    async def connect(self) -> Any:
        """Open a connection.

        Raises:
            TransportError: If Redis cannot be reached, rejects us, or does not answer in time.
        """
        try:
            # The library limits the connect, but not the handshake.
            async with asyncio.timeout(self.timeout):
                connection = await self._find()
        except (*CONNECTION_ERRORS, TimeoutError) as error:
            reason = str(error) or f"no answer for {self.timeout:g} seconds"
            raise TransportError(f"Redis cannot be reached: {reason}") from error
        server = str(getattr(connection, "host", "")), int(getattr(connection, "port", 0))
        if server != self._server:
            self._server = server
            for follow in tuple(self.followers):
                follow()
        return connection

    async def _find(self) -> Any:
        address = self._address
        if not address.kind:
            return await self._open({})
        failure: Exception | None = None
        for host, port in address.servers:
            try:
                async with asyncio.timeout(self.timeout / len(address.servers)):
                    if address.kind == "sentinel":
                        return await self._open_master(host, port)
                    return await self._open_shard(host, port)
            except (TransportError, *CONNECTION_ERRORS, TimeoutError) as error:
                failure = error
        raise TransportError(str(failure) or "no answer") from failure

    async def _open_master(self, host: str, port: int) -> Any:
        login = {"username": None, "password": None, **self._address.sentinel_login}
        sentinel = await self._open({"host": host, "port": port, "db": 0, **login})
        try:
            service = self._address.service
            answer = await ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
        finally:
            await sentinel.disconnect(nowait=True)
        if not answer:
            raise TransportError(f"Sentinel knows no master {self._address.service!r}")
        connection = await self._open({"host": answer[0].decode(), "port": int(answer[1])})
        try:
            # Sentinel may not have noticed yet that it is a replica now.
            role = await ask(connection, "ROLE")
        except TransportError as error:
            # Clients with few permissions find out when they write.
            if not isinstance(error.__cause__, NoPermissionError):
                await connection.disconnect(nowait=True)
                raise
        else:
            if role[0] != b"master":
                await connection.disconnect(nowait=True)
                raise TransportError("the master is being replaced")
        return connection

    async def _open_shard(self, host: str, port: int) -> Any:
        """Open a connection to the node that itself claims the slot of the prefix: others may not know it yet."""
        slot = key_slot(self.prefix.encode())
        for _ in range(_MAX_HOPS):
            node = await self._open({"host": host, "port": port})
            owner = ("", 0)
            try:
                await _enforce_version(node)
                shards = await ask(node, "CLUSTER", "SLOTS")
                masters = [master for first, last, master, *_ in shards if first <= slot <= last]
                if not masters:
                    raise TransportError("no node of the cluster has the slot of the prefix")
                # A node that does not know its own address leaves it out.
                owner = (masters[0][0].decode() or host, masters[0][1])
                if owner == (host, port):
                    return node
            finally:
                if owner != (host, port):
                    await node.disconnect(nowait=True)
            host, port = owner
        raise TransportError("the nodes of the cluster do not agree on the slot of the prefix")

    async def _open(self, changed: dict[str, Any]) -> Any:
        pool = self._pool
        connection = pool.connection_class(**{**pool.connection_kwargs, **changed})
        connection.retry.update_retries(0)
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection


async def _enforce_version(node: Any) -> None:
    """Raise an error if a node of a cluster is older than Redis 7.

    Raises:
        TransportError: If it is.
    """
    try:
        answer: list[Any] = await ask(node, "HELLO")
    except ResponseError:
        answer = []
    except TransportError as error:
        if isinstance(error.__cause__, NoPermissionError):
            # Its version cannot be known.
            return
        raise
    known = dict(zip(answer[::2], answer[1::2], strict=False))
    version = known.get(b"version", b"5 or older").decode()
    if int(version.partition(".")[0].partition(" ")[0]) < 7:
        raise _UnsupportedServerError(
            f"a Redis Cluster needs version 7 or newer, and this one has {version}"
        )


class _UnsupportedServerError(TransportError):
    """The server cannot be used at all."""


def _is_final(error: BaseException | None) -> bool:
    """Return whether an attempt to connect failed for a reason that the next one cannot change."""
    final = (_UnsupportedServerError, AuthenticationError, NoPermissionError, SSLError)
    while error is not None:
        if isinstance(error, final):
            return True
        if isinstance(error, ResponseError) and not is_wrong_server(error):
            return True
        error = error.__cause__ or error.__context__
    return False


class WrongServerError(NotSentError):
    """No server carried out a command: it is a replica, loads its data, or has lost the shard or the connection."""


def is_wrong_server(error: Exception) -> bool:
    """Return whether a server rejects commands that another server, or the same one later, carries out."""
    return isinstance(error, (BusyLoadingError, ReadOnlyError, AskError, ClusterError)) or any(
        word in str(error) for word in ("READONLY", "LOADING", "MASTERDOWN")
    )


async def ask(connection: Any, *command: Any) -> Any:
    """Send one command on an unshared connection, and read its reply.

    Raises:
        TransportError: If the connection breaks or stays silent, or Redis does not permit it.
        redis.ResponseError: As Redis gave it.
    """
    try:
        await connection.send_command(*command)
    except CONNECTION_ERRORS as error:
        raise TransportError(f"Redis: {error}") from error
    return await read_answer(connection, command)


async def read_answer(connection: Any, command: tuple[Any, ...]) -> Any:
    """Read the reply to a command.

    Raises:
        TransportError: As `ask`.
        redis.ResponseError: As Redis gave it.
    """
    try:
        # The library's own timeout returns None, and the late reply would be taken for that of the next command.
        async with asyncio.timeout(_READ_TIMEOUT):
            return await connection.read_response()
    except NoPermissionError as error:
        raise TransportError(f"Redis refused {shown(command)}: {NOT_PERMITTED}") from error
    except ResponseError as error:
        if is_wrong_server(error):
            raise TransportError(f"Redis: {error}") from error
        raise
    except (*CONNECTION_ERRORS, TimeoutError) as error:
        reason = str(error) or f"no answer for {_READ_TIMEOUT:g} seconds"
        raise TransportError(f"Redis: {reason}") from error


def shown(command: tuple[Any, ...]) -> str:
    """The command and its key, or the first two words of it: never a message."""
    return " ".join(str(word) for word in command[:2])


KEEPALIVE = 5.0
"""Seconds between heartbeats."""

_PIECE = 256 * 1024
"""The largest single write in bytes."""

MAX_BUFFERED = 8 * 1024 * 1024
"""Unwritten bytes above which senders wait."""


class ReconnectingConnection(ABC):
    """Works on a connection, and on the next one when that breaks.

    Args:
        connector: Opens the connections.
        lost: Called when a connection breaks.
        restored: Called when the next one is there.
        after: If given, wait for it before connecting again: of the connections of a client that lost them all, one
            tries, and the others follow.
    """

    def __init__(
        self,
        connector: Connector,
        lost: Callable[[str], None],
        restored: Callable[[], None],
        after: "PipelinedConnection | None" = None,
    ) -> None:
        self._connector = connector
        self._lost = lost
        self._restored = restored
        self._after = after
        self._up = asyncio.Event()
        self._backoff = Backoff()
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether it is connected now."""
        return self._up.is_set()

    async def open(self) -> None:
        """Connect, and stay connected until it is closed. A server that is not there yet gets the whole time.

        Raises:
            TransportError: If that fails; then nothing goes on in the background.
        """
        self._task = self._loop.create_task(self._run())
        seconds = self._connector.timeout
        try:
            async with asyncio.timeout(seconds):
                await self._opened
        except TimeoutError:
            await self.stop()
            if self._failure is not None:
                reason = f"{self._failure} (tried again and again for {seconds:g} seconds)"
            else:
                reason = f"Redis cannot be reached: no answer for {seconds:g} seconds"
            raise TransportError(reason) from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Disconnect."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _run(self) -> None:
        while True:
            try:
                await self._live()
            except (TransportError, *CONNECTION_ERRORS) as error:
                self._failure = error
                if self._opened.done():
                    if self._backoff.attempt == 0:
                        logger.warning("the connection to Redis was lost: %s", error)
                    self._lost(f"the connection to Redis was lost: {error}")
                elif _is_final(error):
                    self._opened.set_exception(TransportError(str(error)))
                    return
            except Exception as error:
                # Reconnect after any error: no other task would notice it.
                logger.exception("reading from Redis failed")
                self._lost(f"reading from Redis failed: {error}")
            else:
                return
            await asyncio.sleep(self._backoff.pause())
            if self._after is not None:
                await self._after.ready(None)

    async def _live(self) -> None:
        connection = await self._connector.connect()
        try:
            await self._prepare(connection)
            self._up.set()
            self._backoff.reset()
            if self._opened.done():
                self._restored()
            else:
                self._opened.set_result(None)
            await self._work(connection)
        finally:
            self._up.clear()
            # Before the first await, because closing may cancel this.
            self._broken()
            await connection.disconnect(nowait=True)

    @abstractmethod
    async def _prepare(self, connection: Any) -> None:
        """Do what a new connection needs before it counts as one."""

    @abstractmethod
    async def _work(self, connection: Any) -> None:
        """Use the connection until it breaks, or until there is no more to do."""

    def _broken(self) -> None:  # noqa: B027 - few have anything to clean up
        """Clean up after a connection."""


class PipelinedConnection(ReconnectingConnection):
    """Commands of many tasks over one connection."""

    def __init__(
        self, connector: Connector, lost: Callable[[str], None], restored: Callable[[], None]
    ) -> None:
        super().__init__(connector, lost, restored)
        self._outbox: list[tuple[tuple[Any, ...], asyncio.Future[Any] | None, int]] = []
        self._outbox_bytes = 0
        self._waiting: deque[asyncio.Future[Any] | tuple[Any, ...]] = deque()
        self._refusals = LogThrottle()
        self._heard_at = 0.0
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()

    async def aclose(self) -> None:
        """Write pending commands, and disconnect."""
        if self._up.is_set() and self._outbox:
            self._wake.set()
            await asyncio.wait({asyncio.ensure_future(self._drained.wait())}, timeout=1)
        await self.stop()

    async def ready(self, wait: float | None) -> None:
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

    async def post(self, *command: Any, size: int = 0) -> None:
        """Send a command and ignore its reply."""
        await self._add(command, None, size)

    async def _add(
        self, command: tuple[Any, ...], future: "asyncio.Future[Any] | None", size: int
    ) -> None:
        if self._outbox_bytes > MAX_BUFFERED:
            await self._drained.wait()
        if not self._up.is_set():
            raise WrongServerError("Redis cannot be reached")
        self._outbox.append((command, future, size))
        self._outbox_bytes += size
        self._drained.clear()
        self._wake.set()

    async def _prepare(self, connection: Any) -> None:
        # A server that loads its data accepts connections, but no commands.
        await ask(connection, "PING")
        self._heard_at = self._loop.time()

    async def _work(self, connection: Any) -> None:
        works = (self._write, self._read, self._keep_alive)
        tasks = [self._loop.create_task(work(connection)) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            self._up.clear()
            self._broken()
            await asyncio.gather(*tasks, return_exceptions=True)

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
        while True:
            try:
                answer = await connection.read_response()
            except (ResponseError, BusyLoadingError) as error:
                self._settle(error)
                if is_wrong_server(error):
                    raise TransportError(str(error)) from error
            else:
                self._settle(answer)
            self._heard_at = self._loop.time()

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
        while True:
            await asyncio.sleep(KEEPALIVE)
            if self._loop.time() - self._heard_at > SILENCE:
                raise TransportError(f"no answer for {SILENCE:g} seconds")
            await self.post("PING")

    def _broken(self) -> None:
        """Fail all pending commands."""
        unsent, self._outbox = self._outbox, []
        self._outbox_bytes = 0
        self._drained.set()
        for waiting in self._waiting:
            if isinstance(waiting, asyncio.Future) and not waiting.done():
                waiting.set_exception(TransportError("the connection to Redis was lost"))
        self._waiting.clear()
        for _, future, _ in unsent:
            if future is not None and not future.done():
                future.set_exception(WrongServerError("the connection to Redis was lost"))
