"""An event target on Redis.

queue     a stream and its consumer group: one entry, one worker. The script that adds an entry first checks
          that a worker reads the queue and how many requests wait in it, and drops a key it has seen before.
mailbox   a stream that its owner creates and reads. Unlike Pub/Sub it keeps what is sent while a reader
          reconnects; what is sent to an owner that is gone is dropped, for the stream is gone too.
topic     a Pub/Sub channel
presence  whoever listens or takes also subscribes to a channel of that name; the server counts them, and
          sees a killed process at once.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from secrets import token_hex
from typing import Any

from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from operations._text import enforce_lists
from operations.access import Identity
from operations.errors import (
    NobodyThereError,
    NotSentError,
    QueueFullError,
    TooLargeError,
    TransportError,
)
from operations.pubsub.base import (
    NOT_PRIVATE,
    EventTarget,
    LoopAffinity,
    QueueState,
    Receiver,
    StoredLetter,
    WorkerStats,
)
from operations.pubsub.config import RedisConfig
from operations.pubsub.redis.connection import PipelinedConnection
from operations.pubsub.redis.readers import Channels, MailboxReader, QueueReader
from operations.pubsub.redis.servers import Connector, WrongServerError, ask
from operations.pubsub.signing import signed
from operations.types import options_of

logger = logging.getLogger("operations")

_PUT = """
local limit, seconds, marks = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local workers = redis.call('PUBSUB', 'NUMSUB', KEYS[1])[2]
if workers == 0 then return -1 end
local ids = {}
local each = redis.call('GET', KEYS[2])
if each then limit = math.min(limit, workers * each) end
if redis.call('XLEN', KEYS[1]) >= limit then return -2 end
for i = 4, #ARGV, 2 do
  local id = ''
  if redis.call('SET', marks .. ARGV[i], '', 'NX', 'EX', seconds) then
    id = redis.call('XADD', KEYS[1], '*', 'e', ARGV[i + 1])
  end
  ids[#ids + 1] = id
end
return ids
"""

_NOBODY, _FULL = -1, -2

_ENTRY = re.compile(r"\d{1,20}-\d{1,20}", re.ASCII)
"""The id of an entry of a stream."""

_MAILBOX_LENGTH = 250_000
"""Messages that a mailbox keeps, for about a thousand subscriptions whose readers pause."""

_MARK_SECONDS = 30
"""How long a key is remembered across the group: the default time of a call."""

_SEND_WAIT = 3.0
"""Seconds an answer waits for a connection that is being restored."""


_WRONG_SERVER_PAUSE = 0.1
"""Seconds until a request is sent again that a replica has rejected."""


class RedisTarget:
    """One client of a Redis server. Made by `connect_redis`."""

    def __init__(
        self,
        connector: Connector,
        *,
        client: str,
        trusted: bool,
        max_bytes: int,
        max_values: int,
        max_backlog: int,
    ) -> None:
        self._affinity = LoopAffinity()
        self.trusted = trusted
        self.identity: Identity | None = None
        self.max_bytes = max_bytes
        self.max_values = max_values
        self.direct = False
        self.broadcasts_replies = False
        self._prefix = connector.prefix
        self._client = client
        self._max_backlog = max_backlog
        self._connector = connector
        self._script = ""
        self._link = PipelinedConnection(self._connector, self._prepare, self._lost, self._restored)
        self._wiring = (self._connector, self._link, self._lost, self._restored)
        self._channels = Channels(*self._wiring)
        self._receivers: list[Receiver] = []
        self._batches: dict[str, _Batch] = {}
        self._readers: set[MailboxReader | QueueReader] = set()
        self._mended = asyncio.Event()
        self.admin = RedisAdmin(self._link, self._queue, self._dead_letters)

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
        await self._channels.aclose()
        await self._link.aclose()
        await self._connector.aclose()

    async def check_privacy(self) -> None:
        """Make sure that Redis keeps this client from the mailboxes of others.

        Raises:
            TransportError: If it does not.
        """
        elsewhere = f"{self._prefix}box:{token_hex(8)}:{token_hex(16)}"
        for command in (
            ("XADD", elsewhere, "NOMKSTREAM", "*", "e", b""),
            ("XREAD", "COUNT", 1, "STREAMS", elsewhere, "0"),
        ):
            try:
                await self._link.request(*command)
            except NoPermissionError:
                continue
            except ResponseError as error:
                raise TransportError(f"Redis: {error}") from error
            raise TransportError(NOT_PRIVATE)

    async def _prepare(self, connection: Any) -> None:
        self._script = (await ask(connection, "SCRIPT", "LOAD", _PUT)).decode()

    @property
    def is_connected(self) -> bool:
        """Whether Redis can be reached now, over every connection that this client has."""
        return (
            self._link.is_up
            and self._channels.is_up
            and all(reader.is_up for reader in self._readers)
        )

    async def _ready(self, wait: float) -> None:
        """Wait until what is asked can be answered: an answer to a mailbox that is not back yet is lost."""
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
        """One of the connections is back; when all are, so is this client."""
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

    def _queue(self, name: str) -> str:
        return f"{self._prefix}queue:{name}"

    def _backlog(self, name: str) -> str:
        """The key of the number of requests that may wait for each worker."""
        return f"{self._prefix}queue:{name}:backlog"

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
                present = None if address in boxes else receiver
                await self._channels.subscribe(address, present)
                undo.push_async_callback(self._channels.unsubscribe, address, present)
            return undo.pop_all()

    async def _start(self, reader: MailboxReader | QueueReader, undo: AsyncExitStack) -> None:
        async def stop() -> None:
            self._readers.discard(reader)
            await reader.aclose()

        self._readers.add(reader)
        undo.push_async_callback(stop)
        await reader.open()

    def _is_mailbox(self, address: str) -> bool:
        return address.startswith(f"{self._prefix}box:")

    async def send(self, address: str, body: bytes) -> None:
        """Send to a mailbox or topic of this prefix, and to nothing else."""
        if len(body) > self.max_bytes:
            raise TooLargeError(f"{len(body)} bytes are more than {self.max_bytes}")
        await self._link.ready(_SEND_WAIT)
        if self._is_mailbox(address):
            # Without MKSTREAM: an owner that is gone gets nothing, and leaves nothing behind.
            await self._link.tell(
                *("XADD", address, "NOMKSTREAM", "MAXLEN", "~", _MAILBOX_LENGTH, "*", "e", body),
                size=len(body),
            )
        elif address.startswith(f"{self._prefix}topic:"):
            await self._link.tell("PUBLISH", address, body, size=len(body))
        else:
            raise NotSentError(f"{address!r} is no address of ours")

    async def is_present(self, address: str) -> bool:
        """Whether somebody listens at `address`."""
        return bool(await self.count_present(address))

    async def count_present(self, address: str) -> int | None:
        """Return how many listen at `address`."""
        try:
            _, count = await self._link.request("PUBSUB", "NUMSUB", address)
        except ResponseError as error:
            raise TransportError(str(error)) from error
        return int(count)

    # ---------------------------------------------------------------------------------------- queues

    async def consume(
        self,
        queue: str,
        receiver: Receiver,
        capacity: Callable[[], int],
        backlog: int | None = None,
    ) -> AsyncExitStack:
        """Take from `queue` in turn with the rest of its group."""
        self._affinity.enforce()
        name = self._queue(queue)
        reader = QueueReader(*self._wiring, name=name, receiver=receiver, capacity=capacity)
        async with AsyncExitStack() as undo:
            await self._start(reader, undo)
            if backlog is not None:
                await self._link.tell("SET", self._backlog(queue), backlog)
            await self._channels.subscribe(name, None)
            # Nothing more is put, and then what was taken is delivered.
            undo.push_async_callback(self._channels.unsubscribe, name, None)
            return undo.pop_all()

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float
    ) -> str:
        """Add `body` to the queue's stream, together with all that is put in this turn of the loop."""
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
        if answer == _NOBODY:
            raise NobodyThereError(f"no worker serves the group {queue!r}")
        if answer == _FULL:
            raise QueueFullError(f"too many requests wait for {queue!r} already")
        return str(answer, "ascii")

    async def _add(self, queue: str, key: str, body: bytes) -> Any:
        """Return the id of the new entry, or `_NOBODY` or `_FULL`."""
        batch = self._batches.get(queue)
        if batch is None or batch.size > self.max_bytes:
            batch = self._batches[queue] = _Batch()
            asyncio.get_running_loop().call_soon(self._flush, queue, batch)
        position = batch.add(key, body)
        answer = await asyncio.shield(batch.answer)
        return answer if isinstance(answer, int) else answer[position]

    def _flush(self, queue: str, batch: "_Batch") -> None:
        if self._batches.get(queue) is batch:
            del self._batches[queue]
        batch.task = asyncio.get_running_loop().create_task(self._submit(queue, batch))

    async def _submit(self, queue: str, batch: "_Batch") -> None:
        command = (
            self._script,
            *(2, self._queue(queue), self._backlog(queue), self._max_backlog, _MARK_SECONDS),
            *(f"{self._prefix}seen:", *batch.arguments),
        )
        try:
            try:
                answer = await self._link.request("EVALSHA", *command, size=batch.size)
            except NoScriptError:
                answer = await self._link.request("EVAL", _PUT, *command[1:], size=batch.size)
        except ResponseError as error:
            batch.fail(NotSentError(f"Redis refused the request: {error}"))
        except TransportError as error:
            batch.fail(error)
        else:
            batch.answer.set_result(answer)

    async def is_waiting(self, queue: str, receipt: str) -> bool:
        """Return whether an entry is in the queue: it is removed when a worker begins it."""
        if not receipt:
            return False
        milliseconds, _, number = receipt.partition("-")
        # Callers may read the queue by XREAD, which returns the entries behind an id.
        before = f"{milliseconds}-{int(number) - 1}"
        if number == "0":
            before = f"{int(milliseconds) - 1}-{2**64 - 1}"
        try:
            answer = await self._link.request(
                "XREAD", "COUNT", 1, "STREAMS", self._queue(queue), before
            )
        except ResponseError as error:
            raise TransportError(str(error)) from error
        return bool(answer) and answer[0][1][0][0].decode() == receipt

    def _dead_letters(self, queue: str) -> str:
        return f"{self._prefix}aside:{queue}"

    async def dead_letter(self, queue: str, body: bytes) -> None:
        """Keep a poisonous request in the stream `aside:` of its group, the last thousand of them."""
        await self._link.tell(
            *("XADD", self._dead_letters(queue), "MAXLEN", "~", 1000, "*", "e", body),
            size=len(body),
        )


class RedisAdmin:
    """What an operator sees of the queues of a Redis server.

    Args:
        link: Carries the commands.
        queue: Returns the key of a queue.
        dead_letters: Returns the key of its dead letters.
    """

    def __init__(
        self,
        link: PipelinedConnection,
        queue: Callable[[str], str],
        dead_letters: Callable[[str], str],
    ) -> None:
        self._link = link
        self._queue = queue
        self._dead_letters = dead_letters

    async def advertise(self, queue: str, stats: Callable[[], WorkerStats]) -> None:
        """Do nothing: Redis has no service discovery."""

    async def _ask(self, *command: Any) -> Any:
        await self._link.ready(_SEND_WAIT)
        try:
            return await self._link.request(*command)
        except ResponseError as error:
            raise TransportError(f"Redis: {error}") from error

    async def state(self, queue: str) -> QueueState:
        """Return the length of the queue's stream, and the age of its first entry."""
        name = self._queue(queue)
        length, first, clock, letters = await asyncio.gather(
            self._ask("XLEN", name),
            self._ask("XRANGE", name, "-", "+", "COUNT", 1),
            self._ask("TIME"),
            self._ask("XLEN", self._dead_letters(queue)),
        )
        age = (
            int(clock[0]) + int(clock[1]) / 1e6 - _milliseconds(first[0][0]) / 1000 if first else 0
        )
        return QueueState(waiting=length, oldest=max(0.0, age), dead_letters=letters)

    async def letters(self, queue: str, limit: int, letter: str = "") -> list[StoredLetter]:
        """Return the newest entries of the stream of dead letters, or one."""
        if letter and _ENTRY.fullmatch(letter) is None:
            return []
        found = await self._ask(
            *("XREVRANGE", self._dead_letters(queue), letter or "+", letter or "-", "COUNT", limit)
        )
        return [
            StoredLetter(id=entry.decode(), body=fields[1], stored_at=_milliseconds(entry))
            for entry, fields in found
        ]

    async def remove(self, queue: str, letter: str) -> bool:
        """Delete an entry of the stream of dead letters."""
        if _ENTRY.fullmatch(letter) is None:
            return False
        return bool(await self._ask("XDEL", self._dead_letters(queue), letter))


def _milliseconds(entry: bytes) -> int:
    """Return when an entry was added, in milliseconds since the epoch."""
    return int(entry.partition(b"-")[0])


class _Batch:
    """What is put into one queue in one turn of the event loop."""

    def __init__(self) -> None:
        self.arguments: list[Any] = []
        self.size = 0
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None

    def add(self, key: str, body: bytes) -> int:
        """Add a request; return its position."""
        self.arguments += (key, body)
        self.size += len(body)
        return len(self.arguments) // 2 - 1

    def fail(self, error: TransportError) -> None:
        self.answer.set_exception(error)
        # Whoever put something may have left; the failure is then nobody's business.
        self.answer.exception()


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
