"""The subscriptions of a Redis client: its channels, mailboxes and queues.

Each reader has its own connection, because a blocking read delays every later command.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from hashlib import sha1
from secrets import token_hex
from typing import Any, TypeAlias

from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from operations.base.errors import TransportError
from operations.base.tasks import shielded
from operations.pubsub.base import Consumer, Delivery, Receiver
from operations.pubsub.config import NOT_PERMITTED
from operations.pubsub.delivery import IDLE, BatchSize, BrokerClock, deliver
from operations.pubsub.redis.connection import (
    SILENCE,
    ReconnectingConnection,
    RedisClient,
    ask,
    pack_command,
)
from operations.pubsub.redis.errors import CONNECTION_ERRORS, refusal

logger = logging.getLogger("operations")

_BLOCK = 2000
"""Milliseconds that a read blocks, and the interval at which an idle worker checks for abandoned entries."""

_HOT_BLOCK = int(IDLE * 1000)
"""Milliseconds that a read blocks while requests keep arriving."""

_CLAIM_EVERY = 0.5
"""Seconds between two checks for entries that a worker has read but not started."""

_CLAIM_AFTER = 200
"""Milliseconds after which another worker may claim such an entry."""

_FRESH = 0.1
"""Seconds after a read in which no other worker can have claimed its entries."""

_TIDY_EVERY = 30.0
"""Seconds between two comparisons of the clocks."""

_REMOVE_EVERY = 120.0
"""Seconds between two removals of consumers that have left."""

_TIDY_AFTER = 30_000
"""Milliseconds after which a consumer that does not read counts as lost."""

_LAST_ID = "18446744073709551615-18446744073709551615"
"""The largest id of an entry. A read of the entries after it only checks the permission to read."""

_MAILBOX_BATCH = 128
"""Messages in one read of a mailbox."""

_MAILBOX_BLOCK = 2000
"""Milliseconds that a read of a mailbox blocks, and after which a removed mailbox is created again."""

_MAILBOX_SECONDS = 120
"""Lifetime of a mailbox after the last heartbeat of its owner."""

_TRIM_EVERY = 256
"""Messages that are read between two clean-ups of a mailbox."""


class Channels(ReconnectingConnection):
    """The channels of a client: its topics, and the channels that show the presence of its listeners.

    Args:
        client: The client.
        kind: `P` to subscribe to patterns of channels, or empty.
        sender_of: Returns the sender of the messages on a channel, as in a `Delivery`.
    """

    def __init__(
        self, client: RedisClient, kind: str = "", sender_of: Callable[[str], str] = lambda _: ""
    ) -> None:
        super().__init__(client)
        self._kind = kind
        self._sender_of = sender_of
        self._receivers: dict[str, list[Receiver | None]] = {}
        self._confirmed: dict[str, asyncio.Event] = {}
        self._refused: set[str] = set()
        self._connection: Any = None
        self._moved = client.connector.moved

    async def subscribe(
        self, channels: Sequence[str], receiver: Receiver | None, undo: AsyncExitStack
    ) -> None:
        """Subscribe, and return when the server has confirmed it; without a receiver, only for presence.

        Raises:
            TransportError: If the server does not confirm it.
        """
        undo.push_async_callback(self._unsubscribe, channels, receiver)
        added = [channel for channel in channels if channel not in self._receivers]
        for channel in channels:
            self._receivers.setdefault(channel, []).append(receiver)
            self._confirmed.setdefault(channel, asyncio.Event())
        await self._post("SUBSCRIBE", added)
        for channel in channels:
            try:
                async with asyncio.timeout(SILENCE):
                    await self._confirmed[channel].wait()
            except TimeoutError:
                missing = [each for each in channels if not self._confirmed[each].is_set()]
                raise TransportError(
                    f"Redis did not confirm subscriptions: check that this user may subscribe to {', '.join(missing)}"
                ) from None
        if refused := self._refused.intersection(channels):
            names = ", ".join(sorted(refused))
            raise TransportError(f"Redis refused {self._kind}SUBSCRIBE {names}: {NOT_PERMITTED}")

    async def _unsubscribe(self, channels: Sequence[str], receiver: Receiver | None) -> None:
        for channel in channels:
            self._receivers[channel].remove(receiver)
        released = [channel for channel in {*channels} if not self._receivers[channel]]
        for channel in released:
            del self._receivers[channel], self._confirmed[channel]
            self._refused.discard(channel)
        await self._post("UNSUBSCRIBE", released)

    async def _post(self, command: str, channels: Iterable[str]) -> None:
        """Send a command; do nothing while disconnected, because the next connection subscribes to all channels."""
        words, connection = tuple(channels), self._connection
        # The library would reconnect.
        if words and connection is not None and connection.is_connected:
            # If the connection breaks now, the reader notices it and reconnects.
            with suppress(*CONNECTION_ERRORS):
                await connection.send_command(self._kind + command, *words)

    async def _prepare(self, connection: Any) -> None:
        self._moved = self._client.connector.moved
        self._connection = connection
        if self._receivers:
            await connection.send_command(f"{self._kind}SUBSCRIBE", *self._receivers)

    async def _work(self, connection: Any) -> None:
        # A server that was replaced by another master keeps the connections of subscribers.
        await self._run_until_first(
            self._read(connection), self._keep_alive(connection.send_command), self._moved.wait()
        )
        raise TransportError("another server has taken over")

    async def _read(self, connection: Any) -> None:
        while True:
            try:
                message = await connection.read_response()
            except NoPermissionError:
                # The server rejects a command as a whole, and does not name the channel.
                for channel, confirmed in self._confirmed.items():
                    if not confirmed.is_set():
                        self._refused.add(channel)
                        confirmed.set()
                raise
            self._heard_at = self._loop.time()
            # Without a subscription, the reply to PING is not a message.
            if isinstance(message, list):
                self._deliver(message)

    def _deliver(self, message: Any) -> None:
        kind, channel = message[0].decode().upper(), (message[1] or b"").decode()
        if kind == f"{self._kind}MESSAGE":
            for receiver in tuple(self._receivers.get(channel, ())):
                if receiver is not None:
                    deliver(receiver, Delivery(message[-1], sender=self._sender_of(channel)))
        elif kind == f"{self._kind}SUBSCRIBE" and channel in self._confirmed:
            self._refused.discard(channel)
            self._confirmed[channel].set()

    def _broken(self) -> None:
        self._connection = None


class MailboxReader(ReconnectingConnection):
    """Reads mailboxes."""

    def __init__(self, client: RedisClient, boxes: list[str], receiver: Receiver) -> None:
        super().__init__(client)
        self._link = client.link
        self._receiver = receiver
        self._positions: dict[str, bytes] = dict.fromkeys(boxes, b"")
        self._since_trim = 0

    @shielded
    async def aclose(self) -> None:
        """Stop reading, and delete the streams."""
        await super().aclose()
        if self._link.up.is_set():
            for box in self._positions:
                await self._link.post("DEL", box)

    async def _prepare(self, connection: Any) -> None:
        """Extend the lifetime of the streams, or create them; the empty entry is not a message."""
        for box in self._positions:
            if not await ask(connection, "EXPIRE", box, _MAILBOX_SECONDS):
                self._positions[box] = await ask(connection, "XADD", box, "*", "e", b"")
                await ask(connection, "EXPIRE", box, _MAILBOX_SECONDS)
                # Fails at once if this user may not read, so that no call waits for its reply.
                await ask(connection, "XREAD", "COUNT", 1, "STREAMS", box, "$")

    async def _work(self, connection: Any) -> None:
        renewed_at = self._loop.time()
        command = ("XREAD", "COUNT", _MAILBOX_BATCH, "BLOCK", _MAILBOX_BLOCK, "STREAMS")
        while True:
            answer = await ask(connection, *command, *self._positions, *self._positions.values())
            for box, entries in answer or ():
                self._deliver(box.decode(), entries)
            now = self._loop.time()
            # A flushed or evicted mailbox receives no messages, so check that it exists after a period without
            # messages.
            if not answer or now - renewed_at > _MAILBOX_SECONDS / 4:
                renewed_at = now
                await self._prepare(connection)
            elif self._since_trim >= _TRIM_EVERY:
                await self._trim()

    def _deliver(self, box: str, entries: list[Any]) -> None:
        for entry_id, fields in entries:
            self._positions[box] = entry_id
            if fields and fields[1]:
                deliver(self._receiver, Delivery(fields[1]))
                # Limit the memory of large messages.
                self._since_trim += 1 + len(fields[1]) // 4096

    async def _trim(self) -> None:
        self._since_trim = 0
        if self._link.up.is_set():
            for box, position in self._positions.items():
                await self._link.post("XTRIM", box, "MINID", position)


PUT = """
local limit, each_key, marks, key, seconds = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local workers = redis.call('PUBSUB', 'NUMSUB', KEYS[1])[2]
if workers == 0 then
  redis.call('SET', marks, '', 'EX', 1)
  return -1
end
local each = redis.call('GET', each_key)
if each then limit = math.min(limit, workers * each) end
if redis.call('XLEN', KEYS[1]) >= limit then return -2 end
if not redis.call('SET', marks .. key, '', 'NX', 'EX', seconds) then return '' end
return redis.call('XADD', KEYS[1], '*', 'e', ARGV[6])
"""
"""Adds a request to a queue, if a worker reads it and not too many wait in it; drops a key that it has seen before.

Without workers, a write fails if the server has become a replica, which the workers noticed earlier.
"""

PUT_SHA = sha1(PUT.encode(), usedforsecurity=False).hexdigest()

_READ = """
local found, left = {}, tonumber(ARGV[2])
local share = math.ceil(left / #KEYS)
for pass = 1, 2 do
  for i = 1, #KEYS do
    if left == 0 then return found end
    local count = pass == 1 and math.min(share, left) or left
    local answer = redis.call('XREADGROUP', 'GROUP', 'workers', ARGV[1], 'COUNT', count, 'STREAMS', KEYS[i], '>')
    if answer then
      found[#found + 1] = answer[1]
      left = left - #answer[1][2]
    end
  end
end
return found
"""
"""Reads a number of entries from several queues: first an equal share from each, then from any queue."""

_READ_SHA = sha1(_READ.encode(), usedforsecurity=False).hexdigest()

_TAKE_OVER = """
for i = 1, #KEYS do
  while true do
    local pending = redis.call('XPENDING', KEYS[i], 'workers', 'IDLE', ARGV[2], '-', '+', 1)[1]
    if not pending then break end
    local entries = redis.call('XCLAIM', KEYS[i], 'workers', ARGV[1], ARGV[2], pending[1])
    if entries[1] then return {{KEYS[i], entries}} end
    redis.call('XACK', KEYS[i], 'workers', pending[1])
  end
end
return {}
"""
"""Claims an entry that its worker has read but not started; skips entries that were removed from the queue."""

_TIDY = """
for i = 1, #KEYS do
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[i], 'workers')) do
    if consumer[4] == 0 and consumer[6] > tonumber(ARGV[1]) then
      redis.pcall('XGROUP', 'DELCONSUMER', KEYS[i], 'workers', consumer[2])
    end
  end
end
"""
"""Removes the consumers of workers that have left, when other workers have claimed their entries, if Redis has free
memory."""


class _EntryClaim:
    """An entry that was read from a queue, but not removed yet.

    Args:
        reader: The reader of the queue.
        queue: The queue.
        entry_id: The id of the entry.
        is_fresh: Whether no other worker can have claimed it.
        is_taken_over: Whether another worker has read it before. The request may be the reason why that worker died.
    """

    __slots__ = ("_entry_id", "_is_taken_over", "_queue", "_reader", "is_disputed", "is_fresh")

    def __init__(
        self,
        reader: "QueueReader",
        queue: bytes,
        entry_id: bytes,
        is_fresh: bool,
        is_taken_over: bool,
    ) -> None:
        self._reader = reader
        self._queue = queue
        self._entry_id = entry_id
        self._is_taken_over = is_taken_over
        self.is_fresh = is_fresh
        self.is_disputed = False

    def remove(self) -> None:
        """Remove the entry without waiting, at the latest together with the next entries."""
        self._reader.removed.setdefault(self._queue, []).append(self._entry_id)

    async def acquire(self, *, alone: bool) -> bool:
        """Remove the entry; return False if another worker has, or may have, removed it."""
        delete, acknowledge = _removal(self._queue, self._entry_id)
        link, batch = self._reader.link, self._reader.batch
        try:
            async with batch.claim(alone=alone or self._is_taken_over):
                is_ours: bool = await link.request(*delete) == 1
                await link.post(*acknowledge)
                return is_ours
        except (TransportError, ResponseError) as error:
            logger.debug("a request could not be claimed: %s", error)
            return False


class QueueReader(ReconnectingConnection):
    """Reads the queues of one or more clients, in rotation.

    An entry stays in the queue until the worker starts it. Until then another worker may claim it, for example if this
    worker was killed or its event loop is blocked. The worker that removes the entry runs it.

    Attributes:
        link: The connection for commands that remove one entry.
        batch: The number of entries to read.
        removed: The entries to remove together with the next entries, by queue.
    """

    def __init__(self, client: RedisClient, queues: Mapping[str, str], consumer: Consumer) -> None:
        super().__init__(client)
        self.link = client.link
        self._names = deque(queues)
        self._senders = {name.encode(): sender for name, sender in queues.items()}
        self._held: list[_Entry] = []
        self._is_idle = False
        """Whether the last read has waited in vain."""
        self._receiver = consumer
        self.batch = BatchSize(consumer.capacity)
        self._consumer = token_hex(8)
        self._client_id: Any = None
        self._closing = False
        self.removed: dict[bytes, list[bytes]] = {}
        self._clock: BrokerClock

    @shielded
    async def aclose(self) -> None:
        """Stop between two reads, so that no entry is read and then dropped."""
        self._closing = True
        try:
            if self.link.up.is_set() and self._client_id is not None and not self.batch.is_full:
                with suppress(TransportError, TimeoutError):
                    await self.link.post("CLIENT", "UNBLOCK", self._client_id)
                    async with asyncio.timeout(_BLOCK / 1000 + 1):
                        await self._connecting.idle.wait()
        finally:
            await super().aclose()

    async def _prepare(self, connection: Any) -> None:
        await self._load_scripts(connection)
        refused: ResponseError | None = None
        for name in self._names:
            try:
                await ask(connection, "XGROUP", "CREATE", name, "workers", "0", "MKSTREAM")
            except ResponseError as error:
                # Without free memory, Redis rejects the command even if the group exists.
                refused = refused if "BUSYGROUP" in str(error) else error
        # Fails at once if a group is missing or this user may not read, so that no request waits for this worker.
        names = self._names
        command = ("XREADGROUP", "GROUP", "workers", self._consumer, "COUNT", 1, "STREAMS", *names)
        try:
            await ask(connection, *command, *(_LAST_ID for _ in names))
        except ResponseError:
            if refused is None:
                raise
            raise TransportError(f"Redis: {refusal(refused)}") from refused

    async def _load_scripts(self, connection: Any) -> None:
        # Clients may run the script that adds requests, but not load it.
        for script in (PUT, _READ):
            await ask(connection, "SCRIPT", "LOAD", script)

    def _keys(self) -> tuple[Any, ...]:
        """Return the names of the queues as arguments of a script."""
        return (len(self._names), *self._names)

    async def _work(self, connection: Any) -> None:
        self._client_id = await ask(connection, "CLIENT", "ID")
        # Done before the first request, because the clocks of this worker and of a new server may differ.
        self._clock = BrokerClock(partial(_time, connection))
        await self._clock.compare()
        tidied_at = removed_at = claimed_at = float("-inf")
        while not self._closing:
            count = await self.batch.room()
            try:
                # Another worker may have claimed an entry of an earlier read.
                sent_at = float("-inf") if self._held else self._loop.time()
                entries = await self._next(connection, count)
                now = self._loop.time()
                if entries:
                    await self._deliver(connection, entries, sent_at)
                else:
                    self.batch.reset()
                self._is_idle = not entries
                if now - claimed_at > _CLAIM_EVERY:
                    claimed_at = now
                    await self._take_over(connection)
                if now - tidied_at > _TIDY_EVERY:
                    tidied_at = now
                    await self._clock.compare()
                    await self._load_scripts(connection)
                if now - removed_at > _REMOVE_EVERY:
                    removed_at = now
                    await ask(connection, "EVAL", _TIDY, *self._keys(), _TIDY_AFTER)
            except ResponseError as error:
                if "NOGROUP" not in str(error) and not isinstance(error, NoScriptError):
                    raise TransportError(f"Redis: {refusal(error)}") from error
                await self._prepare(connection)

    async def _next(self, connection: Any, count: int) -> "list[_Entry]":
        """Read up to `count` entries; wait for the first one, but only briefly while requests keep arriving.

        A read that waits returns only one entry, so that a burst is distributed among all idle workers.
        """
        names = self._names
        if not self._held and len(names) > 1 and not self._is_idle:
            # The count of a read applies to each stream; the script limits the total.
            names.rotate(-1)
            command = (_READ_SHA, *self._keys(), self._consumer, count)
            self._held = _entries(await ask(connection, "EVALSHA", *command))
        if not self._held:
            block = _HOT_BLOCK if self.batch.is_hot else _BLOCK
            answer = await ask(
                connection,
                *("XREADGROUP", "GROUP", "workers", self._consumer),
                *("COUNT", count if len(names) == 1 else 1),
                *("BLOCK", block, "STREAMS", *names, *(">" for _ in names)),
            )
            self._held = _entries(answer)
        # A read that did not have to wait may return one entry of each queue.
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    async def _take_over(self, connection: Any) -> None:
        """Claim entries that their worker did not start, because it was killed or its event loop is blocked.

        Entries are claimed one by one, because one of them may have killed the worker.
        """
        names = self._names
        # An entry is deleted when it starts, so that the queues of an idle group are empty.
        answer = await ask(
            connection, "XREAD", "COUNT", 1, "STREAMS", *names, *("0" for _ in names)
        )
        filled = [queue for queue, _ in answer or ()]
        command = ("EVAL", _TAKE_OVER, len(filled), *filled, self._consumer, _CLAIM_AFTER)
        while filled and not self._closing and await self.batch.room():
            entries = _entries(await ask(connection, *command))
            if not entries:
                return
            await self._deliver(connection, entries, None)

    async def _deliver(
        self, connection: Any, entries: "list[_Entry]", sent_at: float | None
    ) -> None:
        """Deliver entries that were read at `sent_at` or later, or taken over from another worker if it is None."""
        ages = await self._clock.ages([int(each[1].partition(b"-")[0]) / 1000 for each in entries])
        began = self._loop.time()
        is_taken_over = sent_at is None
        is_fresh = sent_at is not None and began - sent_at < _FRESH
        for (queue, entry_id, fields), age in zip(entries, ages, strict=True):
            claim = _EntryClaim(self, queue, entry_id, is_fresh, is_taken_over)
            if fields:
                deliver(self._receiver, Delivery(fields[1], "", age, claim, self._senders[queue]))
            else:
                claim.remove()
        removed, self.removed = self.removed, {}
        commands = [each for queue, ids in removed.items() for each in _removal(queue, *ids)]
        if commands:
            # Sent before the first entry starts, in the next iteration of the event loop.
            await connection.send_packed_command(b"".join(map(pack_command, commands)))
        await self.batch.begun(len(entries), began)
        for command in commands:
            await ask(connection, *command, is_sent=True)


async def _time(connection: Any) -> float:
    """Return the time of the server."""
    seconds, microseconds = await ask(connection, "TIME")
    return int(seconds) + int(microseconds) / 1e6


_Entry: TypeAlias = tuple[bytes, bytes, Any]
"""The queue of an entry, its id and its fields."""


def _entries(answer: Any) -> list[_Entry]:
    """Return the entries in the reply to a read."""
    return [
        (queue, entry_id, fields) for queue, entries in answer or () for entry_id, fields in entries
    ]


def _removal(queue: bytes, *ids: bytes) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    # Deleted before it is acknowledged: an acknowledged entry that is still in the stream would never be read again.
    return ("XDEL", queue, *ids), ("XACK", queue, "workers", *ids)
