"""Connections to Redis: to one server, to a master that Sentinel manages, or to a shard of a cluster.

Rule 1: every connect, with its handshake and the lookup of the server, has a time limit.
Rule 2: in a cluster, all keys and presence channels of a prefix have the same hash tag, so that they are on one shard.
Rule 3: the commands of many tasks are written together, once per iteration of the event loop; replies arrive in order.
Rule 4: a connection that breaks, or leaves a command without a reply, fails its commands and reconnects with jitter.
"""

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeAlias, cast

import hiredis
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import BusyLoadingError, NoPermissionError, ResponseError

from operations.base.errors import TransportError
from operations.base.logs import LogThrottle
from operations.base.tasks import shielded
from operations.io.reconnect import ReconnectingTask
from operations.pubsub.base import BrokerTarget
from operations.pubsub.config import (
    NOT_PERMITTED,
    RedisConfig,
    connect_failure,
    read_redis_address,
    redis_tls_hint,
)
from operations.pubsub.redis.errors import (
    CONNECTION_ERRORS,
    UnsupportedServerError,
    WrongServerError,
    is_final,
    is_wrong_server,
    refusal,
    shown,
)

logger = logging.getLogger("operations")

KEEPALIVE = 5.0
"""Seconds between heartbeats."""

SILENCE = 12.0
"""Seconds without a reply after which a connection is closed."""
_READ_TIMEOUT = SILENCE  # for one command on an unshared connection; blocking reads are shorter

pack_command: Callable[[tuple[Any, ...]], bytes] = cast("Any", hiredis).pack_command
"""Encodes a command. redis-py encodes it in Python, which takes ten times as long."""

_MAX_HOPS = 3  # nodes of a cluster that are queried for the owner of a slot


class Connector:
    """Opens connections to the current address of a Redis server.

    Attributes:
        timeout: The time limit in seconds for connecting, including the handshake.
        prefix: The prefix of every key; in a cluster with a hash tag, which determines the shard.
        moved: Set, and replaced by another event, when a connection leads to another server than the last one.

    Raises:
        TransportError: If the address is malformed.
    """

    def __init__(self, config: RedisConfig) -> None:
        self.timeout = config.connect_timeout
        self.moved = asyncio.Event()
        self._server = ""
        self._address = read_redis_address(config.address)
        self.prefix = config.prefix
        if self._address.kind == "cluster" and "{" not in self.prefix:
            self.prefix = f"{{{self.prefix.rstrip(':')}}}:"
        files = config.tls_files
        # RESP2: no conversion to maps. No retries: only this package knows which commands may be repeated.
        with suppress(Exception):
            pool: Any = ConnectionPool.from_url(  # pyright: ignore[reportUnknownMemberType]
                self._address.url,
                protocol=2,
                client_name=f"operations-{config.client}",
                socket_timeout=None,
                socket_connect_timeout=self.timeout,
                retry=Retry(NoBackoff(), 0),
                **files,
            )
            # The options are validated only now.
            first, servers = pool.make_connection(), self._address.servers
            self._shown = ", ".join(f"{host}:{port}" for host, port in servers) or _server(first)
            self._pool = pool
            return
        raise TransportError(
            "the address cannot be read: it has an option that redis-py does not support"
        )

    async def connect(self) -> Any:
        """Open a connection.

        Raises:
            TransportError: If Redis cannot be reached, rejects the client, or does not respond in time.
        """
        try:
            # The library limits the connect, but not the handshake.
            async with asyncio.timeout(self.timeout):
                connection = await self._find()
        except (TransportError, *CONNECTION_ERRORS, TimeoutError) as error:
            raise TransportError(self.unreachable(error)) from error
        server = _server(connection)
        if server != self._server:
            self._server = server
            self.moved.set()
            self.moved = asyncio.Event()
        return connection

    def unreachable(self, error: BaseException | None = None) -> str:
        """Return the message for an attempt to connect that failed."""
        text = connect_failure(error).rstrip(".")
        reason = text or f"no response for {self.timeout:g} seconds"
        reason += redis_tls_hint(self._address.url.partition(":")[0], text)
        return f"Redis cannot be reached at {self._shown}: {reason}"

    async def _find(self) -> Any:
        address = self._address
        if not address.kind:
            return await self._open({})
        failure: Exception = TimeoutError()
        for host, port in address.servers:
            try:
                async with asyncio.timeout(self.timeout / len(address.servers)):
                    if address.kind == "sentinel":
                        return await self._open_master(host, port)
                    return await self._open_shard(host, port)
            except (TransportError, *CONNECTION_ERRORS, TimeoutError) as error:
                failure = error
        raise failure

    async def _open_master(self, host: str, port: int) -> Any:
        login = {"username": None, "password": None, **self._address.sentinel_login}
        sentinel = await self._open({"host": host, "port": port, "db": 0, **login})
        try:
            service = self._address.service
            answer = await ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
        finally:
            await sentinel.disconnect(nowait=True)
        if not answer:
            raise TransportError(f"Sentinel has no master called {self._address.service!r}")
        server = {"host": answer[0].decode(), "port": int(answer[1])}
        return await self._open(server, _enforce_master)

    async def _open_shard(self, host: str, port: int) -> Any:
        """Open a connection to the node that claims the slot of the prefix; other nodes may have outdated data."""
        slot = key_slot(self.prefix.encode())
        for _ in range(_MAX_HOPS):
            node = await self._open({"host": host, "port": port}, _enforce_version)
            owner = ("", 0)
            try:
                shards = await ask(node, "CLUSTER", "SLOTS")
                masters = [master for first, last, master, *_ in shards if first <= slot <= last]
                if not masters:
                    raise TransportError("no node of the cluster has the slot of the prefix")
                # A node that does not know its own address omits it.
                owner = (masters[0][0].decode() or host, masters[0][1])
                if owner == (host, port):
                    return node
            finally:
                if owner != (host, port):
                    await node.disconnect(nowait=True)
            host, port = owner
        raise TransportError("the nodes of the cluster do not agree on the slot of the prefix")

    async def _open(self, changed: dict[str, Any], *checks: Callable[[Any], Any]) -> Any:
        pool = self._pool
        connection = pool.connection_class(**{**pool.connection_kwargs, **changed})
        try:
            await connection.connect()
            for check in checks:
                await check(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection


def _server(connection: Any) -> str:
    """Return the host and port of a connection, or the path of its UNIX socket."""
    return getattr(connection, "path", "") or f"{connection.host}:{connection.port}"


async def _enforce_master(connection: Any) -> None:
    """Raise an error if a server is a replica now, which Sentinel may not have noticed yet."""
    role = await _ask_if_permitted(connection, "ROLE")
    if role is not None and role[0] != b"master":
        raise TransportError("the master is being replaced")


async def _enforce_version(node: Any) -> None:
    """Raise an error if a node of a cluster is older than Redis 7."""
    try:
        answer = await _ask_if_permitted(node, "HELLO") or ()
    except ResponseError:
        answer = (b"version", b"5 or older")
    # Other servers may report no version, or another kind of version.
    version = dict(zip(answer[::2], answer[1::2], strict=False)).get(b"version", b"").decode()
    major = re.match(r"\d+", version)
    if major is not None and int(major[0]) < 7:
        raise UnsupportedServerError(
            f"a Redis Cluster needs version 7 or newer, and this one has {version}"
        )


async def _ask_if_permitted(connection: Any, *command: Any) -> Any:
    """Return the reply to a command; None if this client may not send it."""
    try:
        return await ask(connection, *command)
    except TransportError as error:
        if isinstance(error.__cause__, NoPermissionError):
            return None
        raise


async def ask(connection: Any, *command: Any, is_sent: bool = False) -> Any:
    """Send one command on an unshared connection, unless it was sent already, and read its reply.

    Raises:
        TransportError: If the connection breaks, there is no reply, or Redis does not permit the command.
        ResponseError: If Redis rejects the command.
    """
    try:
        if not is_sent:
            await connection.send_command(*command)
        # The library's own timeout returns None, and a late reply would be used for the next command.
        async with asyncio.timeout(_READ_TIMEOUT):
            return await connection.read_response()
    except NoPermissionError as error:
        raise TransportError(f"Redis refused {shown(command)}: {NOT_PERMITTED}") from error
    except ResponseError as error:
        if is_wrong_server(error):
            raise TransportError(f"Redis: {refusal(error)}") from error
        raise
    except (*CONNECTION_ERRORS, TimeoutError) as error:
        reason = str(error) or f"no response for {_READ_TIMEOUT:g} seconds"
        raise TransportError(f"Redis: {reason}") from error


_PIECE = 256 * 1024
"""The largest single write in bytes."""

MAX_BUFFERED = 8 * 1024 * 1024
"""Senders wait while more bytes than this are unwritten."""


class RedisClient(BrokerTarget):
    """The connections of one client, which counts as connected only if all of them are open.

    Attributes:
        connections: The connection for commands, which is `link`, one for channels, and one for each reader.
    """

    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config, "Redis")
        self.max_bytes = config.max_bytes
        self.connector = Connector(config)
        self._is_lost = False
        self.connections: list[ReconnectingConnection] = []
        self.link = PipelinedConnection(self)

    async def open(self) -> None:
        """Connect. Errors are raised as by each connection."""
        for connection in tuple(self.connections):
            await connection.open()

    @shielded
    async def aclose(self) -> None:
        """Close every subscription and disconnect."""
        self.is_closed = True
        async with AsyncExitStack() as stack:
            for connection in self.connections:
                stack.push_async_callback(connection.aclose)

    def lost(self, reason: str) -> None:
        """Report that a connection is lost, usually together with the others."""
        self._is_lost = True
        super().lost(reason)

    def check(self) -> None:
        """Record whether all connections are open, when one of them was added, opened, lost or removed."""
        if not (
            self.link.up.is_set() and all(connection.up.is_set() for connection in self.connections)
        ):
            self.connected.clear()
            return
        self.connected.set()
        was_lost, self._is_lost = self._is_lost, False
        if was_lost:
            self.restored()


class ReconnectingConnection(ABC):
    """Runs on a connection, and reconnects when the connection breaks.

    If a client has lost all connections, `link` connects first, then the others.

    Attributes:
        up: Set while the connection is open.
    """

    def __init__(self, client: RedisClient) -> None:
        client.connections.append(self)
        self._client = client
        self.up = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._heard_at = 0.0
        self._was_up = False
        self._connecting = ReconnectingTask(
            self._connection,
            self._use,
            stable_after=0,
            is_final=lambda error: _is_expected(error) and is_final(error),
            on_failure=self._failed,
            after=self._await_link,
        )

    async def open(self) -> None:
        """Connect, with retries until the time limit, and stay connected until it is closed.

        Raises:
            TransportError: If connecting fails; no background task is left running.
        """
        self._client.check()
        try:
            await self._connecting.open(self._client.connector.timeout)
        except BaseException as error:
            await self.aclose()
            if not isinstance(error, Exception):
                raise
            reason = self._connecting.failure or self._client.connector.unreachable()
            raise TransportError(str(reason)) from None

    @shielded
    async def aclose(self) -> None:
        """Disconnect."""
        if self in self._client.connections:
            self._client.connections.remove(self)
            self._client.check()
        await self._connecting.aclose()

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[Any]:
        """Open a connection that is ready for use."""
        connection = await self._client.connector.connect()
        try:
            await self._prepare(connection)
            yield connection
        finally:
            # Called before the first await, because closing may cancel this task.
            self._end()
            await connection.disconnect(nowait=True)

    async def _use(self, connection: Any) -> None:
        self._heard_at = self._loop.time()
        self._was_up = True
        self.up.set()
        self._client.check()
        await self._work(connection)

    def _failed(self, error: Exception, _was_open: bool) -> None:
        """Report the loss of the connection, and every failed attempt after it."""
        if not _is_expected(error):
            logger.error("reading from Redis failed", exc_info=error)
            self._client.lost(f"reading from Redis failed: {error}")
        elif self._was_up:
            self._client.lost(f"the connection to Redis was lost: {error}")

    async def _await_link(self) -> None:
        if self is not self._client.link:
            await self._client.link.up.wait()

    def _end(self) -> None:
        """Record that the connection is not used any more."""
        self.up.clear()
        self._client.check()
        self._broken()

    @abstractmethod
    async def _prepare(self, connection: Any) -> None:
        """Prepare a new connection before it is used."""

    @abstractmethod
    async def _work(self, connection: Any) -> None:
        """Use the connection until it breaks or is no longer needed."""

    def _broken(self) -> None:  # noqa: B027 - few have anything to clean up
        """Clean up after a connection."""

    async def _keep_alive(self, send: Callable[..., Awaitable[None]]) -> None:
        """Ping until there is no reply."""
        while True:
            before = self._loop.time()
            await asyncio.sleep(KEEPALIVE)
            now = self._loop.time()
            # While the event loop was blocked, nothing was sent or read.
            self._heard_at = min(now, self._heard_at + now - before - KEEPALIVE)
            if now - self._heard_at > SILENCE:
                raise TransportError(f"no response for {SILENCE:g} seconds")
            await send("PING")

    async def _run_until_first(self, *works: Coroutine[Any, Any, object]) -> None:
        """Run coroutines until the first of them ends; raise its error."""
        tasks = [asyncio.Task(work, loop=self._loop) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            # Called before the first await, because a command would reopen a connection that the library has closed.
            self._end()
            await asyncio.gather(*tasks, return_exceptions=True)


def _is_expected(error: Exception) -> bool:
    """Return whether an error shows that a connection cannot be opened or was lost."""
    return isinstance(error, (TransportError, *CONNECTION_ERRORS))


_Waiting: TypeAlias = "asyncio.Future[Any] | tuple[Any, ...]"
"""The future of a reply; the start of a command whose reply is ignored, but logged if Redis rejects it."""


class PipelinedConnection(ReconnectingConnection):
    """Sends the commands of many tasks over one connection."""

    def __init__(self, client: RedisClient) -> None:
        super().__init__(client)
        self._outbox = bytearray()
        self._unsent: list[_Waiting] = []
        self._waiting: deque[_Waiting] = deque()
        self._refusals = LogThrottle()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()

    async def aclose(self) -> None:
        """Write pending commands, and disconnect."""
        try:
            if self.up.is_set() and self._outbox:
                self._wake.set()
                await asyncio.wait({asyncio.ensure_future(self._drained.wait())}, timeout=1)
        finally:
            await super().aclose()

    async def request(self, *command: Any) -> Any:
        """Send a command and return its reply.

        Raises:
            TransportError: If it is unknown whether Redis executed the command; `ResponseError` if Redis rejects it.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        await self._add(command, future)
        return await future

    async def post(self, *command: Any) -> None:
        """Send a command and ignore its reply."""
        await self._add(command, command[:2])

    async def _ping(self, command: str) -> None:
        # A ping would wait behind unwritten commands, and its missing reply would not be noticed.
        if not self._outbox:
            await self.post(command)

    async def _add(self, command: tuple[Any, ...], waiting: _Waiting) -> None:
        if len(self._outbox) > MAX_BUFFERED:
            await self._drained.wait()
        if not self.up.is_set():
            raise WrongServerError("Redis cannot be reached")
        if not self._wake.is_set():
            # Only for the first command of each write, because most commands follow another one.
            if asyncio.get_running_loop() is not self._loop:
                self._client.enforce_usable()
            self._wake.set()
        self._outbox += pack_command(command)
        self._unsent.append(waiting)
        self._drained.clear()

    async def _prepare(self, connection: Any) -> None:
        # A server that is loading its data accepts connections, but no commands.
        await ask(connection, "PING")

    async def _work(self, connection: Any) -> None:
        await self._run_until_first(
            self._write(connection), self._read(connection), self._keep_alive(self._ping)
        )

    async def _write(self, connection: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            # Wait one iteration of the event loop, so that all its commands are written together.
            await asyncio.sleep(0)
            packed, self._outbox = self._outbox, bytearray()
            self._waiting += self._unsent
            self._unsent = []
            self._drained.set()
            for start in range(0, len(packed), _PIECE):
                await connection.send_packed_command(bytes(packed[start : start + _PIECE]))

    async def _read(self, connection: Any) -> None:
        while True:
            try:
                answer = await connection.read_response()
            except (ResponseError, BusyLoadingError) as error:
                self._settle(error)
                if is_wrong_server(error):
                    raise TransportError(f"Redis: {refusal(error)}") from error
            else:
                self._settle(answer)
            self._heard_at = self._loop.time()

    def _settle(self, answer: Any) -> None:
        waiting = self._waiting.popleft()
        if isinstance(waiting, tuple):
            if isinstance(answer, Exception):
                reason = NOT_PERMITTED if isinstance(answer, NoPermissionError) else refusal(answer)
                level = self._refusals.level()
                logger.log(level, "Redis refused %s: %s", shown(waiting), reason)
        elif not waiting.done():
            if isinstance(answer, Exception):
                if is_wrong_server(answer):
                    answer = WrongServerError(f"Redis: {refusal(answer)}")
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)

    def _broken(self) -> None:
        """Fail all pending commands."""
        sent = [(waiting, TransportError) for waiting in self._waiting]
        unsent = [(waiting, WrongServerError) for waiting in self._unsent]
        self._waiting.clear()
        self._outbox, self._unsent = bytearray(), []
        self._drained.set()
        for waiting, error in (*sent, *unsent):
            if isinstance(waiting, asyncio.Future) and not waiting.done():
                waiting.set_exception(error("the connection to Redis was lost"))
