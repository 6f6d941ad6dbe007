"""JetStream: queues that store requests, and dead letters.

Such a queue stores requests until a worker starts them: a work queue with its own subjects.

Rule 1: a worker removes a request from the stream when it starts it, and runs it after the confirmation. If the worker
        dies before that, the next worker gets the request. Replayable requests are acknowledged, which is faster.
        Other requests are deleted by their number, which succeeds for one worker only: a consumer that was created
        again delivers requests that workers have already received, and confirms every acknowledgement.
Rule 2: the stream drops duplicate keys, so a request can be published again until the stream confirms it, but only to
        the same stream: its successor does not have the keys.
Rule 3: the server's clock determines the age of a request; expired requests do not run.
Rule 4: an existing stream is used unchanged; a deleted stream or consumer is created again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from nats.errors import Error
from nats.js.api import ConsumerConfig, RetentionPolicy, StreamConfig
from nats.js.errors import (
    APIError,
    BadRequestError,
    NoStreamResponseError,
    NotFoundError,
    ServiceUnavailableError,
)

from operations.base.errors import NotSentError, QueueFullError, TransportError
from operations.base.logs import LogThrottle
from operations.base.tasks import cancel_tasks
from operations.pubsub.base import Consumer, Delivery, QueueState, StoredLetter
from operations.pubsub.config import NatsConfig
from operations.pubsub.delivery import IDLE, BatchSize, BrokerClock, deliver
from operations.pubsub.nats.client import NATS_ERRORS, ReconnectingClient, sender_of, subject_of

logger = logging.getLogger("operations")

_WAIT = 2.0
"""Seconds that a fetch waits for requests, and therefore the longest time that stopping takes."""

_LATE = 1.0
"""Seconds after the end of a fetch in which the server must report it."""

_FETCH_ENDED = "408"
"""The status with which the server ends a fetch."""

_ACKNOWLEDGE = 10.0
"""Seconds after which an unacknowledged request is delivered to another worker."""

_CONFIRM = 2.0
"""Seconds for the stream to confirm a request or an acknowledgement, before it is sent again."""

_ANSWER = 5.0
"""Seconds for JetStream to respond to any other request."""

_RETRY_SECONDS = 30.0
"""Seconds for which requests and acknowledgements are retried; electing a leader takes up to ten."""

_REMEMBER = 120.0
"""Seconds for which a new stream stores a key."""

_KEEP = 3600.0
"""Seconds that a request is stored."""

_COUNTED = 0.5
"""Seconds for which the counters of a consumer are cached."""

_RETRY = 0.2
"""Seconds between attempts, and before a deleted stream is created again: a stream that is created while the server is
still deleting its predecessor never stores anything."""

_NAME_IN_USE = 10058
_NO_MESSAGE = {10043, 10057}
_TEMPORARY = {10008, 10009}
_FULL = {10023, 10028, 10047, 10077}
"""Error codes of JetStream; the temporary ones are those of a cluster without a leader. A stream is full by its own
limits, or by the memory or storage of the account or server."""

_MAX_LETTERS = 1000
"""The number of stored dead letters of each queue."""

NO_JETSTREAM = "needs JetStream, which the server does not run, or not for this account: start it with nats-server -js"
_SILENT = (
    "JetStream does not respond. If the server restricts permissions, queue='jetstream' needs additional ones: see "
    "Permissions in docs/calls.md"
)


_UNCONFIRMED = (
    "JetStream does not confirm that it stores requests: a disk of its servers may be full"
)


class _NoJetStreamError(TransportError):
    """No server of the account runs JetStream."""


@contextmanager
def _transport_errors() -> Generator[None]:
    """Convert errors of JetStream to transport errors, except `NotFoundError`."""
    try:
        yield
    except NotFoundError:
        raise
    except (*NATS_ERRORS, TimeoutError, ValueError) as error:
        raise TransportError(f"JetStream: {error}") from error


class JetStream:
    """The queues and the dead letters of one prefix, each in one stream."""

    def __init__(self, client: ReconnectingClient, config: NatsConfig) -> None:
        self.client = client
        self._config = config
        self.prefix = config.prefix
        self._js: Any = client.jetstream(timeout=_ANSWER)  # pyright: ignore[reportUnknownMemberType]
        # With a short timeout for dead letters: without permission there is no response.
        self._quick_js: Any = client.jetstream(timeout=_CONFIRM)  # pyright: ignore[reportUnknownMemberType]
        self._stream = stream_name(f"{config.prefix}_durable")
        self._letters_stream = stream_name(f"{config.prefix}_aside")
        self._repeat_for = 0.0
        self.problem = ""
        """Why requests are not stored now; empty if they are."""
        self._created: datetime | None = None
        """When the stream was created; a stream that was created again does not have the keys of its predecessor."""
        self._counters: dict[str, tuple[float, _Counters]] = {}
        self._opening: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self.inboxes: set[str] = set()
        """The inboxes of the readers."""

    async def open(self) -> None:
        """Find the stream of the prefix or create it, with retries while a cluster elects a leader.

        Raises:
            TransportError: If the server has no JetStream, or the stream cannot be created.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.connect_timeout
        while True:
            try:
                stream = await self._find_or_create()
                break
            except TimeoutError as error:
                if loop.time() >= end:
                    raise TransportError(_SILENT) from error
            except Error as error:
                code = getattr(error, "err_code", None)
                # Without a code, no server of the account has responded.
                if isinstance(error, ServiceUnavailableError) and code is None:
                    raise _NoJetStreamError(f"queue='jetstream' {NO_JETSTREAM}") from error
                if loop.time() >= end or code not in _TEMPORARY:
                    reason = getattr(error, "description", None) or error
                    raise TransportError(f"JetStream: {reason}") from error
            await asyncio.sleep(_RETRY)
        self._stream, self._created = stream.config.name, stream.created
        if stream.config.deny_delete:
            name = self._stream
            raise TransportError(
                f"the stream {name} denies deletions, with which workers start requests"
            )
        window = float(stream.config.duplicate_window or 0)
        self._repeat_for = max(0.0, min(_RETRY_SECONDS, window - 2 * _CONFIRM))

    async def _find(self) -> Any:
        """Return the description of the stream, which may have another name; None if there is none."""
        try:
            return await self._js.stream_info(self._stream)
        except NotFoundError:
            pass
        try:
            name = await self._js.find_stream_name_by_subject(f"{self.prefix}.durable.>")
            return await self._js.stream_info(name)
        except NotFoundError:
            return None

    async def _find_or_create(self) -> Any:
        stream = await self._find()
        if stream is not None:
            return stream
        config = StreamConfig(
            name=self._stream,
            subjects=[f"{self.prefix}.durable.>"],
            retention=RetentionPolicy.WORK_QUEUE,
            duplicate_window=_REMEMBER,
            max_age=_KEEP,
            num_replicas=self._config.replicas,
        )
        try:
            return await self._js.add_stream(config)
        except BadRequestError as error:
            if error.err_code == _NAME_IN_USE and (stream := await self._find()) is not None:
                # Another client has created it.
                return stream
            raise

    async def is_waiting(self, queue: str, receipt: str) -> bool:
        """Return whether no worker has removed a request from the stream, which happens when it starts.

        The counters of the stream and its consumer show this without access to the requests of others.

        Raises:
            TransportError: If JetStream does not respond.
        """
        now = asyncio.get_running_loop().time()
        asked_at, counters = self._counters.get(queue, (float("-inf"), None))
        if counters is None or now - asked_at > _COUNTED:
            # One query for all waiting calls: cached counters only report a request as waiting for longer.
            counters = await self._count(queue)
            self._counters[queue] = now, counters
        number = int(receipt)
        if not counters.first <= number <= counters.last:
            # The stream was purged or created again.
            return False
        info = counters.consumer
        # Without a consumer, no worker has received the request.
        return info is None or bool(
            number > info.delivered.stream_seq
            or (info.num_ack_pending and number > info.ack_floor.stream_seq)
        )

    async def _count(self, queue: str) -> "_Counters":
        with _transport_errors():
            try:
                state = (await self._js.stream_info(self._stream)).state
            except NotFoundError:
                # The stream was deleted, including its requests.
                return _Counters(1, 0, None)
            try:
                info = await self._js.consumer_info(self._stream, _consumer_name(queue))
            except NotFoundError:
                info = None
            return _Counters(state.first_seq, state.last_seq, info)

    async def state(self, queue: str) -> QueueState:
        """Return the number of waiting requests, the age of the oldest, and the number of dead letters.

        Raises:
            TransportError: If JetStream does not respond.
        """
        oldest, count = 0.0, 0
        with _transport_errors():
            described = await self.describe(queue)
            waiting = described.num_pending + described.num_ack_pending
            if waiting and described.ts is not None:
                with suppress(NotFoundError):
                    first = await self._js.get_msg(
                        self._stream, seq=1, subject=self._subjects_of(queue), next=True
                    )
                    oldest = max(0.0, (described.ts - first.time).total_seconds())
            with suppress(NotFoundError):
                info = await self._quick_js.stream_info(
                    self._letters_stream, subjects_filter=self.letters_of(queue)
                )
                subjects: dict[str, int] = info.state.subjects or {}
                count = sum(subjects.values())
        return QueueState(waiting=waiting, oldest=oldest, dead_letters=count)

    async def describe(self, queue: str) -> "_ConsumerInfo":
        """Return the description of a consumer with the server time, which the library drops."""
        address = f"$JS.API.CONSUMER.INFO.{self._stream}.{_consumer_name(queue)}"
        answer = await self.client.request(address, b"", timeout=_WAIT)
        return msgspec.json.decode(answer.data, type=_ConsumerInfo)

    def _subjects_of(self, queue: str) -> str:
        """Return the subjects of a queue, for all clients."""
        return subject_of(f"{self.prefix}.durable", queue) + ".*"

    async def enqueue(self, subject: str, body: bytes, key: str) -> str:
        """Store a request; return its sequence number when the stream has confirmed it.

        While a server is being replaced, the request is published again with the same key, which the stream stores
        once.

        Raises:
            QueueFullError: If the stream has reached a limit.
            NotSentError: If it was not stored.
            TransportError: If it is unknown whether the request was stored.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._repeat_for
        failed: type[TransportError] = NotSentError
        failure: Exception
        created = self._created
        while True:
            try:
                stored = await self._js.publish(
                    subject, body, timeout=_CONFIRM, headers={"Nats-Msg-Id": key}
                )
                self.problem = ""
                return str(stored.seq)
            except TimeoutError as error:
                failed, failure = TransportError, error
                if self.client.is_connected:
                    self.problem = _UNCONFIRMED
            except NoStreamResponseError as error:
                failure = error
            except Error as error:
                code = getattr(error, "err_code", None)
                if code in _FULL and failed is NotSentError:
                    reason = getattr(error, "description", None) or error
                    raise QueueFullError(f"the stream is full: {reason}") from error
                if code not in _TEMPORARY:
                    raise failed(f"JetStream: {error}") from error
                failure = error
            if loop.time() >= end:
                reason = str(failure) or "no response"
                raise failed(f"JetStream did not store a request: {reason}") from failure
            await asyncio.sleep(_RETRY)
            if not isinstance(failure, APIError):
                await self._open_again(failed)
            if failed is TransportError and await self._was_replaced(created):
                # A worker may have received the request from the stream before.
                reason = "the stream was deleted while it stored a request, which may have run"
                raise TransportError(f"JetStream: {reason}") from failure

    async def _was_replaced(self, created: datetime | None) -> bool:
        """Return whether the stream is another one than the one created at this time; wait for a response."""
        while True:
            try:
                return bool((await self._quick_js.stream_info(self._stream)).created != created)
            except NotFoundError:
                return True
            except (*NATS_ERRORS, TimeoutError) as error:
                logger.debug("%s: %r", self._stream, error)
                await asyncio.sleep(_RETRY)

    async def _open_again(self, failed: type[TransportError]) -> None:
        """Find or create the stream in the background, once for all requests that need it.

        The stream was deleted, or has no leader; in the latter case the next attempt to publish may be faster. A
        deleted stream causes a timeout instead of an error if another client has subscribed to its subjects.
        """
        if self._opening is None:
            self._opening = asyncio.Task(self.open())
            self._opening.add_done_callback(self._opened)
        opening = self._opening
        await asyncio.wait({opening}, timeout=_RETRY)
        error = opening.exception() if opening.done() else None
        if isinstance(error, _NoJetStreamError):
            raise failed(str(error)) from error

    def _opened(self, opening: "asyncio.Task[None]") -> None:
        self._opening = None
        error = None if opening.cancelled() else opening.exception()
        if error is not None:
            logger.debug("%s: %s", self._stream, error)

    async def aclose(self) -> None:
        """Stop the background tasks."""
        await cancel_tasks(self._opening, self._keeping)

    async def consume(self, queue: str, consumer: Consumer) -> "StoredReader":
        """Consume requests, which are distributed among all consumers, and create the stream of dead letters."""
        await self._keep_letters()
        try:
            with _transport_errors():
                await self.prepare(queue)
                arrivals: Any = await self.client.subscribe(self.client.new_inbox())  # pyright: ignore[reportUnknownMemberType]
        except NotFoundError as error:
            raise TransportError(f"JetStream: {error}") from error
        return StoredReader(self, queue, arrivals, consumer)

    async def delete(self, number: int) -> bool:
        """Delete a request; return False if the stream does not have it.

        Raises:
            TimeoutError: If there is no response.
            APIError: If JetStream rejects the request.
        """
        address = f"$JS.API.STREAM.MSG.DELETE.{self._stream}"
        body = msgspec.json.encode({"seq": number, "no_erase": True})
        answer = await self.client.request(address, body, timeout=_CONFIRM)
        deleted = msgspec.json.decode(answer.data, type=_Deleted)
        if deleted.error is None:
            return deleted.success
        if deleted.error.err_code in _NO_MESSAGE:
            return False
        code = deleted.error.err_code
        raise APIError(
            code=deleted.error.code, err_code=code, description=deleted.error.description
        )

    async def request(self, queue: str, count: int, wait: float, inbox: str) -> None:
        """Let the server send up to `count` requests to `inbox` within `wait` seconds, then a status message."""
        address = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{_consumer_name(queue)}"
        body = msgspec.json.encode({"batch": count, "expires": int(wait * 1e9)})
        await self.client.publish(address, body, inbox)

    async def restored(self) -> None:
        """End the fetches of all readers, which the server may have lost together with the connection."""
        for inbox in tuple(self.inboxes):
            await self.client.publish(inbox, headers={"Status": _FETCH_ENDED})

    async def prepare(self, queue: str) -> None:
        """Create the consumer of a queue, and the stream, if they do not exist."""
        name = _consumer_name(queue)
        try:
            await self._js.consumer_info(self._stream, name)
        except NotFoundError:
            await self.open()
            config = ConsumerConfig(
                name=name,
                durable_name=name,
                filter_subject=self._subjects_of(queue),
                ack_wait=_ACKNOWLEDGE,
            )
            await self._js.add_consumer(self._stream, config)

    # ---------------------------------------------------------------------------------------- dead letters

    def letters_of(self, queue: str) -> str:
        """Return the subjects of the dead letters of all clients."""
        return f"{self.prefix}.aside.{queue}.*"

    async def _keep_letters(self) -> None:
        """Create the stream of dead letters, if this client has the permission."""
        if self._keeping is None:
            self._keeping = asyncio.Task(self._create_letters())
        # With a short timeout, because without permission there is no response.
        await asyncio.wait({self._keeping}, timeout=_CONFIRM / 2)

    async def _create_letters(self) -> None:
        config = StreamConfig(
            name=self._letters_stream,
            subjects=[f"{self.prefix}.aside.>"],
            max_msgs_per_subject=_MAX_LETTERS,
            num_replicas=self._config.replicas,
        )
        try:
            try:
                await self._quick_js.stream_info(self._letters_stream)
            except NotFoundError:
                await self._quick_js.add_stream(config)
        except (*NATS_ERRORS, TimeoutError) as error:
            prefix = self.prefix
            logger.warning("JetStream does not store dead letters of %s: %s", prefix, error)

    async def letters(self, queue: str, limit: int, letter: str = "") -> list[StoredLetter]:
        """Return the newest dead letters, or one."""
        found: deque[StoredLetter] = deque(maxlen=limit)
        number, subject = _number(letter) if letter else 1, self.letters_of(queue)
        with suppress(NotFoundError), _transport_errors():
            while number:
                stored = await self._quick_js.get_msg(
                    self._letters_stream, seq=number, subject=subject, next=True
                )
                if letter and str(stored.seq) != letter:
                    break
                stored_at = int(stored.time.timestamp() * 1000)
                body = stored.data or b""
                found.appendleft(StoredLetter(id=str(stored.seq), body=body, stored_at=stored_at))
                number = 0 if letter else stored.seq + 1
        return list(found)

    async def remove(self, queue: str, letter: str) -> bool:
        """Remove a dead letter; return False if it does not exist."""
        if not _number(letter) or not await self.letters(queue, 1, letter):
            return False
        with suppress(NotFoundError), _transport_errors():
            return bool(await self._quick_js.delete_msg(self._letters_stream, int(letter)))
        return False


def stream_name(text: str) -> str:
    """Return the name of a stream, consumer or bucket, which must not contain dots."""
    return text.replace(".", "_")


def _consumer_name(queue: str) -> str:
    return stream_name(f"workers_{queue}")


def _number(letter: str) -> int:
    """Return the number of a message; 0 if the text is not a number."""
    return int(letter) if letter.isascii() and letter.isdigit() and len(letter) < 20 else 0


class _ConsumerInfo(msgspec.Struct):
    """The parts of a consumer's description that are used."""

    ts: datetime | None = None
    num_pending: int = 0
    num_ack_pending: int = 0


class _Counters(NamedTuple):
    """The numbers of the first and last request of the stream, and the consumer of a queue, if it exists."""

    first: int
    last: int
    consumer: Any


class _APIFailure(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Deleted(msgspec.Struct):
    """The response to a deletion."""

    success: bool = False
    error: _APIFailure | None = None


class StoredReader:
    """Reads a queue until it is closed."""

    def __init__(self, jetstream: JetStream, queue: str, arrivals: Any, consumer: Consumer) -> None:
        self._jetstream = jetstream
        self._queue = queue
        self._arrivals = arrivals
        self._consumer = consumer
        self._batch = BatchSize(consumer.capacity)
        self._loop = asyncio.get_running_loop()
        self._clock = BrokerClock(self._time)
        self._failures = LogThrottle()
        self._closing = False
        jetstream.inboxes.add(arrivals.subject)
        self._task = jetstream.client.start(self._run())

    async def aclose(self) -> None:
        """Stop between two fetches; requests that were fetched are delivered."""
        self._closing = True
        if not self._batch.is_full:
            await asyncio.wait({self._task}, timeout=_WAIT + _LATE + 1)
        await cancel_tasks(self._task)
        self._jetstream.inboxes.discard(self._arrivals.subject)
        with suppress(Error, TimeoutError):
            while self._arrivals.pending_msgs:
                message = await self._arrivals.next_msg()
                if message.reply:
                    # It arrived too late; another worker gets it at once.
                    await message.nak()
            await self._arrivals.unsubscribe()

    async def _run(self) -> None:
        while not self._closing:
            count = await self._batch.room()
            try:
                await self._deliver(await self._fetch(count))
            except Exception as error:  # noqa: BLE001 - no message may stop the reader
                await self._recover(error)

    async def _deliver(self, messages: list[Any]) -> None:
        if not messages:
            self._batch.reset()
            return
        stamps = [each.metadata.timestamp.timestamp() for each in messages]
        ages = await self._clock.ages(stamps)
        began = self._loop.time()
        for message, age in zip(messages, ages, strict=True):
            claim = _MessageClaim(message, self._batch, began, self._jetstream)
            sender = sender_of(self._jetstream.prefix, message.subject.encode())
            deliver(self._consumer, Delivery(message.data, "", age, claim, sender))
        await self._batch.begun(len(messages), began)

    async def _fetch(self, count: int) -> list[Any]:
        """Return up to `count` requests.

        The server ends the fetch, because a request that arrived after the end would be delayed until the server
        delivers it to another worker.

        Raises:
            Error: If the consumer does not exist.
        """
        # A fetch that waits requests only one message, so that a burst is distributed among all idle workers.
        wait = IDLE if self._batch.is_hot else _WAIT
        await self._jetstream.request(self._queue, count, wait, self._arrivals.subject)
        messages: list[Any] = []
        while len(messages) < count:
            try:
                message = await self._arrivals.next_msg(timeout=wait + _LATE)
            except TimeoutError:
                # The connection or the consumer may have been lost.
                break
            headers: dict[str, str] = message.headers or {}
            if message.reply:
                messages.append(message)
            elif headers.get("Status") == _FETCH_ENDED or messages:
                break
            else:
                APIError.from_msg(message)
        return messages

    async def _recover(self, error: Exception) -> None:
        """Create the consumer and the stream again if they were deleted; the connection may also be lost."""
        logger.debug("JetStream: %r", error)
        await asyncio.sleep(_RETRY)
        try:
            await self._jetstream.prepare(self._queue)
        except (Error, TimeoutError, TransportError) as failure:
            level = self._failures.level()
            logger.log(level, "requests cannot be fetched from JetStream: %s", failure)

    async def _time(self) -> float | None:
        """Return the time of the server, which determines the age of requests."""
        try:
            now = (await self._jetstream.describe(self._queue)).ts
        except (Error, TimeoutError, ValueError) as error:
            logger.debug("the time of the server is unknown: %s", error)
            return None
        return None if now is None else now.timestamp()


class _MessageClaim:
    """A fetched request that is not acknowledged yet."""

    is_fresh = False
    is_disputed = False

    def __init__(
        self, message: Any, batch: BatchSize, fetched_at: float, jetstream: JetStream
    ) -> None:
        self._message = message
        self._batch = batch
        self._fetched_at = fetched_at
        self._jetstream = jetstream

    def remove(self) -> None:
        """Acknowledge the request in the background."""
        self._jetstream.client.start(self.acquire(alone=False))

    async def acquire(self, *, alone: bool) -> bool:
        """Remove the request from the stream; return False if another worker has it or will have it.

        A cluster that loses its leader may have removed the request, or may deliver it to another worker. The removal
        is repeated until it is confirmed. If the request is gone by then, its caller must confirm which worker starts
        it.
        """
        loop = asyncio.get_running_loop()
        async with self._batch.claim(alone=alone):
            if loop.time() - self._fetched_at > _ACKNOWLEDGE / 2:
                # The server may be about to deliver it to another worker.
                return False
            end = loop.time() + _RETRY_SECONDS
            while True:
                try:
                    if not alone:
                        await self._message.ack_sync(timeout=_CONFIRM)
                        return True
                    is_ours = await self._delete()
                except (Error, TimeoutError) as error:
                    if loop.time() > end:
                        logger.debug("a request could not be removed: %s", error)
                        return False
                    self.is_disputed = True
                else:
                    # If an earlier attempt had no response, it may have been this worker that deleted the request.
                    self.is_disputed = self.is_disputed and not is_ours
                    return is_ours or self.is_disputed
                await asyncio.sleep(_RETRY)

    async def _delete(self) -> bool:
        is_ours = await self._jetstream.delete(self._message.metadata.sequence.stream)
        # The consumer would deliver no more than its limit of unacknowledged requests.
        await self._message.ack()
        return is_ours
