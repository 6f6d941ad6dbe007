"""An event target on Redis.

queue     a stream of each client, with one consumer group: one entry, one worker. The script that adds an entry first
          checks that a worker reads the queue and how many requests wait in it, and drops a key it has seen before.
          Workers load it, so that clients need no permission to run scripts of their own.
mailbox   a stream that its owner creates and reads. Unlike Pub/Sub it keeps messages while the reader
          reconnects; messages to an owner that has left are dropped, because its stream is deleted.
topic     a Pub/Sub channel
control   a Pub/Sub channel of each client
presence  every reader also subscribes to a channel of the same name; the server counts the subscribers, and
          notices a killed process at once.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha1
from secrets import token_hex
from typing import Any

from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from operations._text import enforce_lists
from operations.errors import (
    NoReceiverError,
    NotSentError,
    QueueFullError,
    TooLargeError,
    TransportError,
)
from operations.pubsub.base import (
    NOT_PRIVATE,
    Consumer,
    EventTarget,
    LoopAffinity,
    Receiver,
)
from operations.pubsub.config import ANY_CLIENT, RedisConfig, enforce_client
from operations.pubsub.redis.admin import RedisAdmin, RedisValues
from operations.pubsub.redis.channels import Channels
from operations.pubsub.redis.connection import Connector, PipelinedConnection, WrongServerError
from operations.pubsub.redis.readers import MailboxReader, QueueReader
from operations.pubsub.signing import signed
from operations.types import options_of

logger = logging.getLogger("operations")

_PUT = """
local limit, seconds, each_key, marks = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local workers = redis.call('PUBSUB', 'NUMSUB', KEYS[1])[2]
if workers == 0 then return -1 end
local ids = {}
local each = redis.call('GET', each_key)
if each then limit = math.min(limit, workers * each) end
if redis.call('XLEN', KEYS[1]) >= limit then return -2 end
for i = 5, #ARGV, 2 do
  local id = ''
  if redis.call('SET', marks .. ARGV[i], '', 'NX', 'EX', seconds) then
    id = redis.call('XADD', KEYS[1], '*', 'e', ARGV[i + 1])
  end
  ids[#ids + 1] = id
end
return ids
"""

_PUT_SHA = sha1(_PUT.encode(), usedforsecurity=False).hexdigest()

_NO_WORKER, _FULL = -1, -2

_MAILBOX_LENGTH = 250_000
"""Messages that a mailbox keeps, for about a thousand subscriptions whose readers pause."""

_MARK_SECONDS = 30
"""How long a key is remembered across the group: the default time of a call."""

_BATCH_BYTES = 256 * 1024
"""Requests that are added by one script. Redis does nothing else meanwhile."""

_SEND_WAIT = 3.0
"""Seconds that a reply waits for a connection that is being restored."""


_WRONG_SERVER_PAUSE = 0.1
"""Seconds until a request is sent again that a replica has rejected."""


class RedisTarget(EventTarget):
    """A client of a Redis server. Created by `connect_redis`."""

    def __init__(
        self,
        connector: Connector,
        *,
        client: str,
        clients: Collection[str],
        trusted: bool,
        max_bytes: int,
        max_values: int,
        max_backlog: int,
    ) -> None:
        self._affinity = LoopAffinity()
        self.trusted = trusted
        self.max_bytes = max_bytes
        self.max_values = max_values
        self._prefix = connector.prefix
        self._client = client
        self._clients = tuple(dict.fromkeys(clients))
        for name in (client, *self._clients):
            enforce_client(name)
        self._max_backlog = max_backlog
        self._link = PipelinedConnection(connector, self._lost, self._restored)
        self._wiring = (connector, self._lost, self._restored, self._link)
        self._channels = Channels(*self._wiring, sender_of=self._sender_of)
        self._receivers: list[Receiver] = []
        self._batches: dict[str, _Batch] = {}
        self._readers: set[MailboxReader | QueueReader] = set()
        self._mended = asyncio.Event()
        self.admin = RedisAdmin(self._link, self._clients, self._queue, self._dead_letters)
        self.values = RedisValues(self._link, self._prefix)

    async def open(self) -> None:
        """Connect.

        Raises:
            TransportError: If Redis cannot be reached.
        """
        await self._link.open()
        await self._channels.open()

    async def aclose(self) -> None:
        """Close every subscription and disconnect."""
        self._affinity.is_closed = True
        for reader in tuple(self._readers):
            await reader.aclose()
        await self._channels.stop()
        await self._link.aclose()

    async def check_privacy(self) -> None:
        """Make sure that Redis keeps this client from the mailboxes and requests of others.

        Raises:
            TransportError: If it does not.
        """
        other = token_hex(8)
        box, queue = f"{self._prefix}box:{other}:{token_hex(16)}", self._queue("any", other)
        for command in (
            ("XADD", box, "NOMKSTREAM", "*", "e", b""),
            ("XREAD", "COUNT", 1, "STREAMS", box, "0"),
            ("XADD", queue, "NOMKSTREAM", "*", "e", b""),
            ("XREAD", "COUNT", 1, "STREAMS", queue, "0"),
            ("PUBLISH", f"{self.control(other)}:{other}", b""),
            ("EVAL", "return 1", 0),
        ):
            try:
                await self._link.request(*command)
            except NoPermissionError:
                continue
            except ResponseError as error:
                raise TransportError(f"Redis: {error}") from error
            raise TransportError(NOT_PRIVATE)

    @property
    def is_connected(self) -> bool:
        """Whether Redis can be reached now, over every connection that this client has."""
        return (
            self._link.is_up
            and self._channels.is_up
            and all(reader.is_up for reader in self._readers)
        )

    async def _ready(self, wait: float) -> None:
        """Wait until all readers are connected: a reply to a mailbox that is not restored yet is lost."""
        try:
            async with asyncio.timeout(wait):
                while not self.is_connected:
                    self._mended.clear()
                    await self._mended.wait()
        except TimeoutError:
            raise NotSentError("Redis cannot be reached") from None

    def _lost(self, reason: str) -> None:
        for receiver in tuple(self._receivers):
            receiver.lost(reason)

    def _restored(self) -> None:
        """Note a restored connection; the client is restored when all are."""
        if self.is_connected:
            self._mended.set()
            for receiver in tuple(self._receivers):
                receiver.restored()

    async def _stop(self, reader: MailboxReader | QueueReader) -> None:
        self._readers.discard(reader)
        # It may be the one that was waited for.
        self._mended.set()
        await reader.aclose()

    # ---------------------------------------------------------------------------------------- addresses

    def mailbox(self) -> str:
        """A new private address, under this client's name."""
        return f"{self._prefix}box:{self._client}:{token_hex(16)}"

    def topic(self, name: str) -> str:
        """The public address called `name`."""
        return f"{self._prefix}topic:{name}"

    def control(self, name: str) -> str:
        """The address of the workers called `name`. Each client sends to a channel of its own."""
        return f"{self._prefix}control:{name}"

    def _queue(self, group: str, client: str) -> str:
        return f"{self._prefix}queue:{group}:{client}"

    def _backlog(self, group: str, client: str) -> str:
        """The key of the number of requests that may wait for each worker."""
        return f"{self._prefix}limit:{client}:{group}"

    def _space(self, client: str) -> str:
        """The start of every mailbox of a client."""
        return f"{self._prefix}box:{client}:"

    def _sender_of(self, channel: str) -> str:
        is_control = channel.startswith(f"{self._prefix}control:")
        return self._space(channel.rpartition(":")[2]) if is_control else ""

    # ---------------------------------------------------------------------------------------- mailboxes

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> AsyncExitStack:
        """Listen at `addresses`."""
        enforce_lists(addresses=addresses)
        self._affinity.enforce()
        boxes = [address for address in addresses if self._is_mailbox(address)]
        async with AsyncExitStack() as undo:
            if boxes:
                reader = MailboxReader(*self._wiring, boxes=boxes, receiver=receiver)
                await self._start(reader, undo)
            self._receivers.append(receiver)
            undo.callback(self._receivers.remove, receiver)
            for address in addresses:
                is_topic = address.startswith(f"{self._prefix}topic:")
                await self._subscribe(address, receiver if is_topic else None, undo)
                if address.startswith(f"{self._prefix}control:"):
                    # Operators may use the name of the workers.
                    for client in dict.fromkeys((*self._clients, self._client)):
                        await self._subscribe(f"{address}:{client}", receiver, undo)
            return undo.pop_all()

    async def _subscribe(
        self, channel: str, receiver: Receiver | None, undo: AsyncExitStack
    ) -> None:
        """Subscribe to a channel; without a receiver, only to be counted there."""
        await self._channels.subscribe(channel, receiver)
        undo.push_async_callback(self._channels.unsubscribe, channel, receiver)

    async def _start(self, reader: MailboxReader | QueueReader, undo: AsyncExitStack) -> None:
        self._readers.add(reader)
        undo.push_async_callback(self._stop, reader)
        await reader.open()

    def _is_mailbox(self, address: str) -> bool:
        return address.startswith(f"{self._prefix}box:")

    async def send(self, address: str, body: bytes) -> None:
        """Send to a mailbox, topic or control address of this prefix, and to nothing else."""
        if len(body) > self.max_bytes:
            raise TooLargeError(f"{len(body)} bytes are more than {self.max_bytes}")
        await self._link.ready(_SEND_WAIT)
        if self._is_mailbox(address):
            # Without MKSTREAM: a message to an owner that has left must not create its stream again.
            await self._link.post(
                *("XADD", address, "NOMKSTREAM", "MAXLEN", "~", _MAILBOX_LENGTH, "*", "e", body),
                size=len(body),
            )
        elif address.startswith(f"{self._prefix}topic:"):
            await self._link.post("PUBLISH", address, body, size=len(body))
        elif address.startswith(f"{self._prefix}control:"):
            channel = f"{address}:{self._client}"
            await self._link.post("PUBLISH", channel, body, size=len(body))
        else:
            raise NotSentError(f"{address!r} is not an address of this prefix")

    async def is_present(self, address: str) -> bool:
        """Return whether there is a listener at `address`."""
        return bool(await self.count_present(address))

    async def count_present(self, address: str) -> int | None:
        """Return the number of listeners at `address`."""
        try:
            _, count = await self._link.request("PUBSUB", "NUMSUB", address)
        except ResponseError as error:
            raise TransportError(str(error)) from error
        return int(count)

    # ---------------------------------------------------------------------------------------- queues

    async def consume(self, queue: str, consumer: Consumer) -> AsyncExitStack:
        """Take from the queues of the given clients, in turn with the rest of the group."""
        self._affinity.enforce()
        queues = {self._queue(queue, client): self._space(client) for client in self._clients}
        reader = QueueReader(*self._wiring, queues=queues, put=_PUT, consumer=consumer)
        async with AsyncExitStack() as undo:
            await self._start(reader, undo)
            for client in self._clients if consumer.backlog is not None else ():
                await self._link.post("SET", self._backlog(queue, client), consumer.backlog)
            for name in queues:
                # After it ends, no entry is read, and the entries already read are delivered.
                await self._subscribe(name, None, undo)
            return undo.pop_all()

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float
    ) -> str:
        """Add `body` to the queue's stream, together with all requests of this turn of the loop."""
        if len(body) > self.max_bytes:
            raise TooLargeError(f"{len(body)} bytes are more than {self.max_bytes}")
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + wait
        while True:
            if not self.is_connected:
                await self._ready(ends_at - loop.time())
            try:
                answer = await self._add(queue, key, body)
            except WrongServerError:
                # The link connects again, perhaps to the server that has taken over.
                if loop.time() + _WRONG_SERVER_PAUSE > ends_at:
                    raise
                await asyncio.sleep(_WRONG_SERVER_PAUSE)
            else:
                break
        if answer == _NO_WORKER:
            named = f"; on Redis they name their clients: clients=[{self._client!r}]"
            hint = "" if self._client == ANY_CLIENT else named
            raise NoReceiverError(f"no worker serves the group {queue!r}{hint}")
        if answer == _FULL:
            raise QueueFullError(f"too many requests wait for {queue!r} already")
        return str(answer, "ascii")

    async def _add(self, queue: str, key: str, body: bytes) -> Any:
        """Return the id of the new entry, or `_NO_WORKER` or `_FULL`."""
        batch = self._batches.get(queue)
        if batch is None or batch.size > _BATCH_BYTES:
            batch = self._batches[queue] = _Batch()
            asyncio.get_running_loop().call_soon(self._flush, queue, batch)
        return await batch.add(key, body)

    def _flush(self, queue: str, batch: "_Batch") -> None:
        if self._batches.get(queue) is batch:
            del self._batches[queue]
        batch.task = asyncio.get_running_loop().create_task(self._submit(queue, batch))

    async def _submit(self, queue: str, batch: "_Batch") -> None:
        client = self._client
        command = (
            *(1, self._queue(queue, client), self._max_backlog, _MARK_SECONDS),
            *(self._backlog(queue, client), f"{self._prefix}seen:{client}:{queue}:"),
            *batch.arguments,
        )
        try:
            answer = await self._put(command, batch.size)
        except ResponseError as error:
            batch.fail(NotSentError(f"Redis refused the request: {error}"))
        except TransportError as error:
            batch.fail(error)
        else:
            batch.succeed(answer)

    async def _put(self, arguments: tuple[Any, ...], size: int) -> Any:
        try:
            return await self._link.request("EVALSHA", _PUT_SHA, *arguments, size=size)
        except NoScriptError:
            pass
        try:
            return await self._link.request("EVAL", _PUT, *arguments, size=size)
        except NoPermissionError:
            # Workers load the script before they take anything.
            return _NO_WORKER

    async def is_waiting(self, queue: str, receipt: str) -> bool:
        """Return whether an entry is in the queue: it is removed when a worker begins it."""
        if not receipt:
            return False
        name = self._queue(queue, self._client)
        try:
            return bool(await self._link.request("XRANGE", name, receipt, receipt))
        except ResponseError as error:
            raise TransportError(str(error)) from error

    def _dead_letters(self, queue: str, client: str) -> str:
        return f"{self._prefix}aside:{queue}:{client}"

    async def dead_letter(self, queue: str, body: bytes) -> None:
        """Keep a poisonous request in the stream `aside:` of its group and client, the last thousand of them."""
        name = self._dead_letters(queue, self._client)
        await self._link.post(*("XADD", name, "MAXLEN", "~", 1000, "*", "e", body), size=len(body))


class _Batch:
    """Requests that are added to one queue in one turn of the event loop."""

    def __init__(self) -> None:
        self.arguments: list[Any] = []
        self.size = 0
        self.task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        # One for each request, because a task that is cancelled cancels the future that it awaits.
        self._waiting: list[asyncio.Future[Any]] = []

    def add(self, key: str, body: bytes) -> "asyncio.Future[Any]":
        """Add a request; return the future of its entry id, or of `_NO_WORKER` or `_FULL`."""
        self.arguments += (key, body)
        self.size += len(body)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append(future)
        return future

    def succeed(self, answer: Any) -> None:
        answers = [answer] * len(self._waiting) if isinstance(answer, int) else answer
        for future, entry_id in zip(self._waiting, answers, strict=True):
            if not future.done():
                future.set_result(entry_id)

    def fail(self, error: TransportError) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_exception(error)


@options_of(RedisConfig)
@asynccontextmanager
async def connect_redis(config: RedisConfig) -> AsyncGenerator[EventTarget]:
    """Connect to Redis for the length of an `async with` block; lost connections are restored.

    Call it as `connect_redis(url, **options)`, with the fields of `RedisConfig`.

    Raises:
        TransportError: If the address cannot be read, Redis cannot be reached now, or is not private although it
            should be.
        ValueError: If the secret is too short to be one.
    """
    connector = Connector(
        config.address,
        config.connect_timeout,
        f"operations-{config.client}",
        prefix=config.prefix,
        tls=config.tls_files,
    )
    target = RedisTarget(
        connector,
        client=config.client,
        clients=config.clients,
        trusted=config.trusted,
        max_bytes=config.max_bytes,
        max_values=config.max_values,
        max_backlog=config.max_backlog,
    )
    signing = signed(target, config.secret)
    try:
        await target.open()
        if config.private:
            await target.check_privacy()
        yield signing
    finally:
        await target.aclose()
