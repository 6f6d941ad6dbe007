"""Event targets on Redis: ours, and that of the original protocol.

    queue     a stream for each client, with one consumer group: each entry goes to one worker. A script adds entries.
              It checks that a worker reads the queue and that the queue is not full, and drops duplicate keys. Workers
              load the script, so that clients need no permission to load scripts.
    mailbox   a stream that its owner creates and reads. Unlike Pub/Sub it stores messages while the reader reconnects;
              messages to an owner that has left are dropped, because its stream is deleted.
    topic     a Pub/Sub channel
    control   a Pub/Sub channel for each client
    presence  every reader also subscribes to a channel of the same name; the server counts the subscribers, and notices
              a killed process at once.

In the original protocol the channel of an event is `prefix + type + ":" + id`; we send an empty id and accept any. All
subscribers receive all replies, so replies are not private. Every worker receives every request, so run only one
worker. A client subscribes only to channels it needs: Redis counts them, so a caller learns at once that there is no
worker.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from importlib.util import find_spec
from secrets import token_hex
from typing import Any

from operations.base.errors import (
    MissingExtraError,
    NoReceiverError,
    NotPermittedError,
    NotSentError,
    QueueFullError,
    TransportError,
)
from operations.base.json.values import MAX_REQUEST_VALUES

if find_spec("redis") is None:
    raise MissingExtraError("operations.pubsub.redis", extra="redis")

from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from operations.base.types import options_of
from operations.pubsub.base import (
    PUT_TYPE,
    Consumer,
    EventTarget,
    QueueState,
    Receiver,
    StoredLetter,
    decode_frame,
)
from operations.pubsub.config import (
    ANY_CLIENT,
    NOT_PERMITTED,
    NOT_PRIVATE,
    RedisConfig,
    enforce_client,
    is_worker_in,
)
from operations.pubsub.delivery import enforce_size
from operations.pubsub.redis.connection import RedisClient
from operations.pubsub.redis.errors import WrongServerError, refusal
from operations.pubsub.redis.store import RedisValues
from operations.pubsub.redis.subscriptions import (
    PUT,
    PUT_SHA,
    Channels,
    MailboxReader,
    QueueReader,
)
from operations.pubsub.signing import signed

__all__ = [
    "RedisConfig",
    "RedisInteropTarget",
    "RedisTarget",
    "connect_redis",
    "connect_redis_interop",
]

_NO_WORKER, _FULL = -1, -2

_MAILBOX_LENGTH = 250_000
"""The largest number of messages in a mailbox, enough for about a thousand subscriptions with slow readers."""

_MARK_SECONDS = 30
"""Seconds for which a key is stored, the default time limit of a call."""

_WRONG_SERVER_PAUSE = 0.1
"""Seconds until a request that a replica rejected is sent again."""

_ENTRY = re.compile(r"\d{1,20}-\d{1,20}", re.ASCII)
"""Matches the id of an entry of a stream."""


class RedisTarget(RedisClient):
    """A client of a Redis server. Created by `connect_redis`."""

    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config)
        self._prefix = self.connector.prefix
        self._clients = tuple(dict.fromkeys(config.clients))
        for name in self._clients:
            enforce_client(name)
        self._max_backlog = config.max_backlog
        self._channels = Channels(self, sender_of=self._sender_of)
        self.values = RedisValues(self.link, f"{self._prefix}authority:")

    async def check_privacy(self) -> None:
        """Raise an error unless Redis blocks this client from the mailboxes and requests of other clients.

        Raises:
            TransportError: If it does not.
        """
        other = token_hex(8)
        box, queue = self._space(other) + token_hex(16), self._queue("any", other)
        for command in (
            ("XADD", box, "NOMKSTREAM", "*", "e", b""),
            ("XREAD", "COUNT", 1, "STREAMS", box, "0"),
            ("XADD", queue, "NOMKSTREAM", "*", "e", b""),
            ("XREAD", "COUNT", 1, "STREAMS", queue, "0"),
            ("PUBLISH", f"{self.control(other)}:{other}", b""),
            ("EVAL", "return 1", 0),
        ):
            try:
                await self._ask(*command)
            except TransportError as error:
                if not isinstance(error.__cause__, NoPermissionError):
                    raise
            else:
                raise TransportError(NOT_PRIVATE)

    async def _ask(self, *command: Any) -> Any:
        """Return the reply to a command.

        Raises:
            TransportError: If Redis rejects it, or cannot be reached.
        """
        try:
            return await self.link.request(*command)
        except ResponseError as error:
            raise TransportError(f"Redis: {error}") from error

    # ---------------------------------------------------------------------------------------- addresses

    def mailbox(self) -> str:
        """Return a new private address under this client's name."""
        return self._space(self.client) + token_hex(16)

    def topic(self, name: str) -> str:
        """Return the public address called `name`."""
        return f"{self._prefix}topic:{name}"

    def control(self, name: str) -> str:
        """Return the address that all workers of the group `name` share. Each client sends to its own channel."""
        return f"{self._prefix}control:{name}"

    def is_worker(self, address: str) -> bool:
        """Return whether an address is that of one worker."""
        return is_worker_in(self.control(""), address)

    def _queue(self, group: str, client: str) -> str:
        return f"{self._prefix}queue:{group}:{client}"

    def _letters(self, group: str, client: str) -> str:
        return f"{self._prefix}aside:{group}:{client}"

    def _backlog(self, group: str, client: str) -> str:
        """Return the key of the number of requests that may wait for each worker."""
        return f"{self._prefix}limit:{client}:{group}"

    def _space(self, client: str) -> str:
        """Return the common prefix of all mailboxes of a client."""
        return f"{self._prefix}box:{client}:"

    def _sender_of(self, channel: str) -> str:
        return self._space(channel.rpartition(":")[2]) if self._is_control(channel) else ""

    # ---------------------------------------------------------------------------------------- mailboxes

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> AsyncExitStack:
        """Listen at `addresses`."""
        self.enforce_usable()
        boxes = [address for address in addresses if self._is_mailbox(address)]
        controls = [address for address in addresses if self._is_control(address)]
        channels = [address for address in addresses if address.startswith(f"{self._prefix}topic:")]
        # Operators may have the same name as the workers.
        senders = dict.fromkeys((*self._clients, self.client))
        channels += [f"{address}:{client}" for address in controls for client in senders]
        async with AsyncExitStack() as undo:
            if boxes:
                reader = MailboxReader(self, boxes, receiver)
                undo.push_async_callback(reader.aclose)
                await reader.open()
            self.notify(receiver, undo)
            await self._channels.subscribe([*boxes, *controls], None, undo)
            await self._channels.subscribe(channels, receiver, undo)
            return undo.pop_all()

    def _is_mailbox(self, address: str) -> bool:
        return address.startswith(f"{self._prefix}box:")

    def _is_control(self, address: str) -> bool:
        return address.startswith(f"{self._prefix}control:")

    async def send(self, address: str, body: bytes) -> None:
        """Send to a mailbox, topic or control address of this prefix."""
        enforce_size(body, self.max_bytes)
        # Replies can be sent while a connection that reads is being restored.
        if not self.link.up.is_set():
            await self.ready()
        if self._is_mailbox(address):
            # With NOMKSTREAM, because a message to an owner that has left must not create its stream again.
            words = ("NOMKSTREAM", "MAXLEN", "~", _MAILBOX_LENGTH, "*", "e")
            await self.link.post("XADD", address, *words, body)
        elif address.startswith(f"{self._prefix}topic:"):
            await self.link.post("PUBLISH", address, body)
        elif self._is_control(address):
            await self.link.post("PUBLISH", f"{address}:{self.client}", body)
        else:
            raise NotSentError(f"{address!r} is not an address of this prefix")

    async def count_present(self, address: str) -> int | None:
        """Return the number of listeners at `address`."""
        _, count = await self._ask("PUBSUB", "NUMSUB", address)
        return int(count)

    # ---------------------------------------------------------------------------------------- queues

    async def consume(self, queue: str, consumer: Consumer) -> AsyncExitStack:
        """Consume from the queues of the given clients, which the workers of the group share."""
        self.enforce_usable()
        queues = {self._queue(queue, client): self._space(client) for client in self._clients}
        reader = QueueReader(self, queues, consumer)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(reader.aclose)
            await reader.open()
            for client in self._clients if consumer.backlog is not None else ():
                await self.link.post("SET", self._backlog(queue, client), consumer.backlog)
            # After it ends, no entry is read, and the entries already read are delivered.
            await self._channels.subscribe(list(queues), None, undo)
            return undo.pop_all()

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float, worker: str = ""
    ) -> str:
        """Add `body` to the stream of the queue, or publish it to the channel of a worker."""
        if worker:
            return await self._send_to(worker, body, wait)
        enforce_size(body, self.max_bytes)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + wait
        while True:
            if not self.connected.is_set():
                await self.ready(ends_at - loop.time())
            try:
                answer = await self._put(queue, key, body)
            except ResponseError as error:
                reason = refusal(error)
                failed = NotPermittedError if reason == NOT_PERMITTED else NotSentError
                name = self._queue(queue, self.client)
                raise failed(f"Redis refused a request for {name}: {reason}") from error
            except WrongServerError:
                # The link reconnects, possibly to the new master.
                if loop.time() + _WRONG_SERVER_PAUSE > ends_at:
                    raise
                await asyncio.sleep(_WRONG_SERVER_PAUSE)
            else:
                break
        if answer == _NO_WORKER:
            named = f", and that workers serve this client: clients=[{self.client!r}]"
            hint = "" if self.client == ANY_CLIENT else named
            raise NoReceiverError(
                f"no worker serves the group {queue!r}; start a worker, or check the group{hint}"
            )
        if answer == _FULL:
            raise QueueFullError(f"too many requests are waiting for {queue!r}")
        return str(answer, "ascii")

    async def _send_to(self, worker: str, body: bytes, wait: float) -> str:
        # The reply of PUBLISH does not show whether the worker is there, because it does not count a worker that is
        # still subscribed to a former master, although that worker receives the message.
        await self.ready(wait)
        if not await self.is_present(worker):
            raise NoReceiverError("its worker left")
        await self.send(worker, body)
        return ""

    async def _put(self, queue: str, key: str, body: bytes) -> Any:
        """Return the id of the new entry, or `_NO_WORKER` or `_FULL`."""
        client = self.client
        arguments = (
            *(1, self._queue(queue, client), self._max_backlog, self._backlog(queue, client)),
            *(f"{self._prefix}seen:{client}:{queue}:", key, _MARK_SECONDS, body),
        )
        try:
            return await self.link.request("EVALSHA", PUT_SHA, *arguments)
        except NoScriptError:
            pass
        try:
            return await self.link.request("EVAL", PUT, *arguments)
        except NoPermissionError:
            # Workers load the script before they read requests.
            return _NO_WORKER

    async def is_waiting(self, queue: str, receipt: str) -> bool:
        """Return whether an entry is in the queue, from which a worker removes it when it starts."""
        if not receipt:
            return False
        name = self._queue(queue, self.client)
        return bool(await self._ask("XRANGE", name, receipt, receipt))

    async def withdraw(self, queue: str, receipt: str) -> None:
        """Delete an entry, which would count as waiting until a worker reads it."""
        await self.link.post("XDEL", self._queue(queue, self.client), receipt)

    async def dead_letter(self, queue: str, body: bytes) -> None:
        """Store a request that crashed its workers in the stream `aside:`, which keeps the last thousand."""
        name = self._letters(queue, self.client)
        await self.link.post("XADD", name, "MAXLEN", "~", 1000, "*", "e", body)

    # ---------------------------------------------------------------------------------------- administration

    async def state(self, queue: str) -> QueueState:
        """Return the length of the streams of all clients, and the age of their first entry."""
        await self.ready()
        names = [self._queue(queue, client) for client in self._clients]
        letters = [self._letters(queue, client) for client in self._clients]
        clock, *answers = await asyncio.gather(
            self._ask("TIME"),
            *(self._ask("XLEN", name) for name in (*names, *letters)),
            *(self._ask("XRANGE", name, "-", "+", "COUNT", 1) for name in names),
        )
        count = len(names)
        first = [_milliseconds(found[0][0]) for found in answers[2 * count :] if found]
        age = int(clock[0]) + int(clock[1]) / 1e6 - min(first) / 1000 if first else 0.0
        return QueueState(
            waiting=sum(answers[:count]),
            oldest=max(0.0, age),
            dead_letters=sum(answers[count : 2 * count]),
        )

    async def letters(self, queue: str, limit: int, letter: str = "") -> list[StoredLetter]:
        """Return the newest entries of the streams of dead letters, or one. The id of a letter contains its client."""
        await self.ready()
        wanted = [(client, "+", "-") for client in self._clients]
        if letter:
            entry, client = _parse_letter(letter)
            wanted = [(client, entry, entry)] if entry and client in self._clients else []
        found = [
            StoredLetter(
                id=entry.decode() + ("" if client == ANY_CLIENT else f"@{client}"),
                body=fields[1],
                stored_at=_milliseconds(entry),
            )
            for client, end, start in wanted
            for entry, fields in await self._ask(
                *("XREVRANGE", self._letters(queue, client), end, start, "COUNT", limit)
            )
        ]
        return sorted(found, key=lambda each: each.stored_at, reverse=True)[:limit]

    async def remove(self, queue: str, letter: str) -> bool:
        """Delete an entry of a stream of dead letters."""
        entry, client = _parse_letter(letter)
        if not entry:
            return False
        await self.ready()
        return bool(await self._ask("XDEL", self._letters(queue, client), entry))


def _parse_letter(letter: str) -> tuple[str, str]:
    """Return the entry and the client in the id of a dead letter; an empty entry if it is malformed."""
    entry, _, client = letter.partition("@")
    return entry if _ENTRY.fullmatch(entry) else "", client or ANY_CLIENT


def _milliseconds(entry: bytes) -> int:
    """Return when an entry was added, in milliseconds since the epoch."""
    return int(entry.partition(b"-")[0])


@options_of(RedisConfig)
@asynccontextmanager
async def connect_redis(config: RedisConfig) -> AsyncGenerator[EventTarget]:
    """Connect to Redis for the duration of an `async with` block; lost connections are restored.

    Call it as `connect_redis(url, **options)`, with the fields of `RedisConfig`.

    Raises:
        TransportError: If the address is malformed, Redis cannot be reached, or the check of `private` fails.
        ValueError: If the secret is too short.
    """
    target = RedisTarget(config)
    signing = signed(target, config.secret)
    async with aclosing(target):
        await target.open()
        if config.private:
            await target.check_privacy()
        yield signing


_REPLIES = (
    *("call.responded", "call.completed", "call.error", "call.aborted"),
    *("call.credit", "call.probed", "call.alive"),
)
"""The types of all events except requests."""


class RedisInteropTarget(RedisClient):
    """A client of the original protocol. Created by `connect_redis_interop`."""

    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config)
        self.broadcasts_replies = True
        self._prefix = config.prefix
        self._channels = Channels(self, "P")

    def mailbox(self) -> str:
        """Return an empty address, because the type of an event is its channel."""
        return ""

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> AsyncExitStack:
        """Receive all events except requests."""
        return await self._subscribe(_REPLIES, receiver)

    async def consume(self, queue: str, consumer: Consumer) -> AsyncExitStack:
        """Receive all requests."""
        return await self._subscribe((PUT_TYPE,), consumer)

    async def _subscribe(self, types: Sequence[str], receiver: Receiver) -> AsyncExitStack:
        async with AsyncExitStack() as undo:
            self.notify(receiver, undo)
            prefix = re.sub(r"([*?\[\]\\^])", r"\\\1", self._prefix)
            patterns = [f"{prefix}{kind}:*" for kind in types]
            await self._channels.subscribe(patterns, receiver, undo)
            return undo.pop_all()

    async def send(self, address: str, body: bytes) -> None:
        """Publish to all subscribers."""
        enforce_size(body, self.max_bytes)
        await self.ready()
        await self.link.post("PUBLISH", self._channel(body), body)

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float, worker: str = ""
    ) -> str:
        """Publish a request to all workers."""
        enforce_size(body, self.max_bytes)
        await self.ready(wait)
        if not await self.link.request("PUBLISH", self._channel(body), body):
            raise NoReceiverError("no worker subscribes to requests")
        return ""

    def _channel(self, body: bytes) -> str:
        return f"{self._prefix}{decode_frame(body).type}:"

    async def is_present(self, address: str) -> bool:
        """Return True, because the presence of a listener is unknown."""
        return True


@asynccontextmanager
async def connect_redis_interop(
    url: str = "redis://127.0.0.1:6379",
    *,
    prefix: str = "",
    trusted: bool = False,
    max_bytes: int = 16 * 1024 * 1024,
    max_values: int = MAX_REQUEST_VALUES,
    connect_timeout: float = 5,
) -> AsyncGenerator[RedisInteropTarget]:
    """Use the original protocol on Redis Pub/Sub during an `async with` block.

    Args:
        url: An address for redis-py.
        prefix: The prefix of every channel.
        trusted: Trust the `identity` inside events.
        max_bytes: The largest message.
        max_values: The largest number of JSON values in a message, in both directions. All clients should use the same
            limit.
        connect_timeout: The time limit in seconds for connecting, including the handshake.

    Raises:
        TransportError: If the address is malformed, or Redis cannot be reached.
    """
    config = RedisConfig(
        url,
        prefix=prefix,
        trusted=trusted,
        max_bytes=max_bytes,
        max_values=max_values,
        connect_timeout=connect_timeout,
    )
    async with aclosing(RedisInteropTarget(config)) as target:
        await target.open()
        yield target
