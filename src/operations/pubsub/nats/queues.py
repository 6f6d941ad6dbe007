"""Queues on NATS: the consumers of a plain one, and durable ones in JetStream.

A durable queue lets requests wait for a worker: a JetStream work queue with subjects of its own.

Rule 1: a request is acknowledged when it begins, and runs only once that is confirmed; a worker that dies before
        leaves it to the next one.
Rule 2: the stream drops a key it has seen before, so a request is published again until the stream confirms it.
Rule 3: the server's clock decides on the age of a request; expired requests do not run.
Rule 4: a stream that exists is used unchanged; a stream or a consumer that was deleted is created again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from datetime import datetime
from secrets import SystemRandom
from time import time
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.errors import Error
from nats.js.api import ConsumerConfig, RetentionPolicy, StreamConfig
from nats.js.errors import (
    BadRequestError,
    NoStreamResponseError,
    NotFoundError,
    ServiceUnavailableError,
)

from operations.errors import NotSentError, TransportError
from operations.pubsub.base import (
    IDLE,
    BatchSize,
    Consumer,
    Delivery,
    LogThrottle,
    QueueState,
    deliver,
)

logger = logging.getLogger("operations")

_WAIT = 2.0
"""Seconds a fetch waits for requests, which is also how long stopping takes at most."""

_ACKNOWLEDGE = 10.0
"""Seconds until a request that was not acknowledged goes to the next worker."""

_CONFIRM = 2.0
"""Seconds for the stream to confirm a request or an acknowledgement, before it is sent again."""

_ANSWER = 5.0
"""Seconds for JetStream to answer anything else."""

_PATIENCE = 30.0
"""Seconds for which requests and acknowledgements are sent again: electing a leader takes up to ten."""

_REMEMBER = 120.0
"""Seconds for which a new stream remembers a key."""

_KEEP = 3600.0
"""Seconds a request waits for a worker."""

_COUNTED = 0.5
"""Seconds for which the counters of a consumer are used."""

_COMPARE = 60.0
"""Seconds between two comparisons with the server's clock."""

_RETRY = 0.2
"""Seconds between attempts."""

_NO_CONSUMER, _NAME_IN_USE = 10014, 10058
_TEMPORARY = {10008, 10009}
"""Codes of JetStream; the temporary ones are those of a cluster without a leader."""

_MAX_CONSUMERS = 1000
"""Consumers of one plain queue that are remembered."""

_NO_JETSTREAM = (
    "durable=True needs JetStream, and the server runs without it, or not for this account: start it with "
    "nats-server -js"
)
_SILENT = (
    "JetStream does not answer. Where the server has permissions, durable=True needs more of them: "
    "see Permissions in docs/calls.md"
)


class _NoJetStreamError(TransportError):
    """No server of the account runs JetStream."""


_ASK_EVERY, _ASK_SOON = 5.0, 1.0
"""Seconds between two questions for the consumers of a plain queue, while requests are sent to it: the second one while
fewer than two are known, because one that has just come gets no requests before it is known."""


class Consumers:
    """The consumers of a plain queue, among which a caller spreads its requests evenly.

    The server would pick one at random for every request: of 64 requests for 8 workers, some worker gets about 14. The
    caller would also not know which one to ask for a request that may be lost.

    Args:
        subject: The subject on which the server picks one.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._seen_at: dict[str, float] = {}
        self._round: list[str] = []
        self._asked_at = float("-inf")
        self._loop = asyncio.get_running_loop()

    def is_due(self) -> bool:
        """Return whether the consumers should be asked for now; then note that they are."""
        now = self._loop.time()
        if now - self._asked_at < (_ASK_EVERY if len(self._seen_at) > 1 else _ASK_SOON):
            return False
        # Consumers that did not answer the last question are blocked or gone.
        for name, seen_at in tuple(self._seen_at.items()):
            if seen_at < self._asked_at:
                del self._seen_at[name]
        self._asked_at = now
        return True

    def on_reply(self, name: str) -> None:
        """Note that a consumer is there."""
        if len(self._seen_at) < _MAX_CONSUMERS:
            self._seen_at[name] = self._loop.time()

    def forget(self) -> None:
        """Ask again before the next request: the connection is a new one."""
        self._seen_at.clear()
        self._asked_at = float("-inf")

    def gone(self, name: str) -> None:
        """Forget a consumer that has left."""
        self._seen_at.pop(name, None)

    def next(self) -> str:
        """Return the consumer of the next request; empty if the server is to pick one."""
        while self._round:
            name = self._round.pop()
            if name in self._seen_at:
                return name
        if not self._seen_at:
            return ""
        # In another order each time, so that no pattern of requests meets the same consumer.
        self._round = list(self._seen_at)
        SystemRandom().shuffle(self._round)
        return self._round.pop()


class DurableQueues:
    """The queues of one prefix, in one JetStream stream.

    Args:
        client: The connection.
        prefix: The prefix of the subjects.
        subjects_of: Returns the subjects of a queue, for all clients.
        replicas: The number of servers that keep a stream which is created here.
        patience: Seconds for which a cluster without a leader is asked again when a client starts.
    """

    def __init__(
        self,
        client: Client,
        prefix: str,
        subjects_of: Callable[[str], str],
        replicas: int,
        patience: float,
    ) -> None:
        self._patience = patience
        self._nats = client
        self._js: Any = client.jetstream(timeout=_ANSWER)  # pyright: ignore[reportUnknownMemberType]
        self._subjects = f"{prefix}.durable.>"
        self._stream = f"{prefix}_durable".replace(".", "_")
        self._subjects_of = subjects_of
        self.replicas = replicas
        self._repeat_for = 0.0
        self._counters: dict[str, tuple[float, Any]] = {}
        self._opening: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Find the stream of the prefix, or create it. An existing stream is not changed.

        Raises:
            TransportError: If the server has no JetStream, or the stream cannot be created.
        """
        try:
            stream = await self._patiently(self._find_or_create)
        except TimeoutError as error:
            raise TransportError(_SILENT) from error
        except ServiceUnavailableError as error:
            # Without a code, no server of the account has answered.
            if error.err_code is None:
                raise _NoJetStreamError(_NO_JETSTREAM) from error
            raise TransportError(f"JetStream: {error.description}") from error
        except Error as error:
            raise TransportError(f"JetStream: {error}") from error
        self._stream = stream.config.name
        window = float(stream.config.duplicate_window or 0)
        self._repeat_for = max(0.0, min(_PATIENCE, window - 2 * _CONFIRM))

    async def _patiently(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of `work`, which is repeated while a cluster elects a leader."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._patience
        while True:
            try:
                return await work()
            except (Error, TimeoutError) as error:
                is_temporary = getattr(error, "err_code", None) in _TEMPORARY
                if loop.time() >= end or not (is_temporary or isinstance(error, TimeoutError)):
                    raise
            await asyncio.sleep(_RETRY)

    async def _find_or_create(self) -> Any:
        return await self._find() or await self._create()

    async def _find(self) -> Any:
        """Return the description of the stream, which the operator may call otherwise; None if there is none."""
        try:
            return await self._js.stream_info(self._stream)
        except NotFoundError:
            pass
        try:
            name = await self._js.find_stream_name_by_subject(self._subjects)
            return await self._js.stream_info(name)
        except NotFoundError:
            return None

    async def _create(self) -> Any:
        config = StreamConfig(
            name=self._stream,
            subjects=[self._subjects],
            retention=RetentionPolicy.WORK_QUEUE,
            duplicate_window=_REMEMBER,
            max_age=_KEEP,
            num_replicas=self.replicas,
        )
        try:
            return await self._js.add_stream(config)
        except BadRequestError as error:
            if error.err_code == _NAME_IN_USE and (stream := await self._find()) is not None:
                # Another client was faster.
                return stream
            raise

    async def is_waiting(self, queue: str, receipt: str) -> bool:
        """Return whether no worker has acknowledged a request, which it does when it begins.

        The counters of the consumer show this without access to the requests of others.

        Raises:
            TransportError: If JetStream does not answer.
        """
        now = asyncio.get_running_loop().time()
        asked_at, info = self._counters.get(queue, (float("-inf"), None))
        if now - asked_at > _COUNTED:
            # One question for all calls that wait: old counters only report a request as waiting for longer.
            try:
                info = await self._js.consumer_info(self._stream, _consumer_name(queue))
            except NotFoundError as error:
                if error.err_code != _NO_CONSUMER:
                    # The stream was deleted, and the request with it.
                    return False
                info = None
            except (Error, TimeoutError) as error:
                raise TransportError(f"JetStream: {error}") from error
            self._counters[queue] = now, info
        number = int(receipt)
        # Without a consumer, no worker has taken anything.
        return info is None or bool(
            number > info.delivered.stream_seq
            or (info.num_ack_pending and number > info.ack_floor.stream_seq)
        )

    async def state(self, queue: str) -> QueueState:
        """Return how many requests wait, and how long the first of them has.

        Raises:
            TransportError: If JetStream does not answer.
        """
        address = f"$JS.API.CONSUMER.INFO.{self._stream}.{_consumer_name(queue)}"
        try:
            answer = await self._nats.request(address, b"", timeout=_WAIT)
            described = msgspec.json.decode(answer.data, type=_ConsumerInfo)
            waiting = described.num_pending + described.num_ack_pending
            oldest = 0.0
            if waiting and described.ts is not None:
                with suppress(NotFoundError):
                    first = await self._js.get_msg(
                        self._stream, seq=1, subject=self._subjects_of(queue), next=True
                    )
                    oldest = max(0.0, (described.ts - first.time).total_seconds())
        except (Error, TimeoutError, ValueError) as error:
            raise TransportError(f"JetStream: {error}") from error
        return QueueState(waiting=waiting, oldest=oldest)

    async def enqueue(self, subject: str, body: bytes, key: str) -> str:
        """Store a request; return its sequence number when the stream has it.

        While a server is being replaced, the request is published again under its key: the stream stores a key once.

        Raises:
            NotSentError: If it was not stored.
            TransportError: If it may or may not have been stored.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._repeat_for
        failed: type[TransportError] = NotSentError
        failure: Exception
        while True:
            try:
                stored = await self._js.publish(
                    subject, body, timeout=_CONFIRM, headers={"Nats-Msg-Id": key}
                )
                return str(stored.seq)
            except TimeoutError as error:
                failed, failure = TransportError, error
            except NoStreamResponseError as error:
                failure = error
                if loop.time() < end:
                    await self._open_again(failed)
            except Error as error:
                failure = error
                if getattr(error, "err_code", None) not in _TEMPORARY:
                    raise failed(f"JetStream: {error}") from error
            if loop.time() >= end:
                reason = str(failure) or "no answer"
                raise failed(f"JetStream did not store a request: {reason}") from failure
            await asyncio.sleep(_RETRY)

    async def _open_again(self, failed: type[TransportError]) -> None:
        """Find or create the stream in the background, once for all requests that miss it.

        It was deleted, or it has no leader now: then the next attempt to publish may be faster.
        """
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self.open())
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

    def close(self) -> None:
        """Stop looking for the stream."""
        if self._opening is not None:
            self._opening.cancel()

    async def consume(
        self, queue: str, consumer: Consumer, sender_of: Callable[[str], str]
    ) -> "DurableTaking":
        """Consume requests in turn with all other consumers."""
        name = _consumer_name(queue)

        async def prepare() -> None:
            """Make the consumer, and the stream, where they are not there."""
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

        async def clock() -> float:
            """Return the time at the server; ours if it does not send one."""
            address = f"$JS.API.CONSUMER.INFO.{self._stream}.{name}"
            answer = await self._nats.request(address, b"", timeout=_WAIT)
            now = msgspec.json.decode(answer.data, type=_ConsumerInfo).ts
            return time() if now is None else now.timestamp()

        try:
            await prepare()
            pull = await self._js.pull_subscribe_bind(durable=name, stream=self._stream)
        except (Error, TimeoutError) as error:
            raise TransportError(f"JetStream: {error}") from error
        return DurableTaking(pull, prepare, clock, consumer, sender_of)


def _consumer_name(queue: str) -> str:
    return f"workers_{queue}".replace(".", "_")


class _ConsumerInfo(msgspec.Struct):
    """The parts of a consumer's description that are used."""

    ts: datetime | None = None
    num_pending: int = 0
    num_ack_pending: int = 0


class DurableTaking:
    """A receiver at a durable queue, until closed."""

    def __init__(
        self,
        pull: Any,
        prepare: Callable[[], Awaitable[None]],
        clock: Callable[[], Awaitable[float]],
        consumer: Consumer,
        sender_of: Callable[[str], str],
    ) -> None:
        self._sender_of = sender_of
        self._pull = pull
        self._prepare = prepare
        self._clock = clock
        self._consumer = consumer
        self._batch = BatchSize(consumer.capacity)
        self._loop = asyncio.get_running_loop()
        self._ahead = 0.0
        self._compared_at = float("-inf")
        self._failures = LogThrottle()
        self._closing = self._is_full = False
        self._task = self._loop.create_task(self._run())

    async def aclose(self) -> None:
        """Stop between two fetches; requests that were fetched are delivered."""
        self._closing = True
        if not self._is_full:
            await asyncio.wait({self._task}, timeout=_WAIT + 1)
        self._task.cancel()
        await asyncio.wait({self._task})
        with suppress(Error, TimeoutError):
            await self._pull.unsubscribe()

    async def _run(self) -> None:
        while not self._closing:
            self._is_full = True
            count = await self._batch.room()
            self._is_full = False
            try:
                # A fetch that waits for long is for one request, so that a burst goes to all idle workers.
                wait = IDLE if self._batch.is_hot else _WAIT
                messages = await self._pull.fetch(count, timeout=wait)
            except TimeoutError:
                self._batch.reset()
                continue
            except Error as error:
                await self._recover(error)
                continue
            await self._compare_clocks()
            began = self._loop.time()
            for message in messages:
                age = began + self._ahead - message.metadata.timestamp.timestamp()
                claim = _MessageClaim(message, self._batch.taking, began)
                sender = self._sender_of(message.subject)
                deliver(self._consumer, Delivery(message.data, "", max(age, 0.0), claim, sender))
            await self._batch.begun(len(messages), began)

    async def _recover(self, error: Error) -> None:
        """Create the consumer and the stream again if they were deleted; the connection may also be lost."""
        logger.debug("JetStream: %s", error)
        try:
            await self._prepare()
        except (Error, TimeoutError, TransportError) as failure:
            level = self._failures.level()
            logger.log(level, "requests cannot be taken from JetStream: %s", failure)
        await asyncio.sleep(_RETRY)

    async def _compare_clocks(self) -> None:
        """Measure the difference to the server's clock, which determines the age of requests."""
        before = self._loop.time()
        if before - self._compared_at < _COMPARE:
            return
        try:
            now = await self._clock()
        except (Error, TimeoutError, ValueError) as error:
            logger.debug("the time of the server is unknown: %s", error)
            now = time()
        self._compared_at = self._loop.time()
        self._ahead = now - (before + self._compared_at) / 2


class _MessageClaim:
    """A request that was fetched and is not acknowledged yet."""

    is_fresh = False

    def __init__(self, message: Any, taking: asyncio.Lock, fetched_at: float) -> None:
        self._message = message
        self._taking = taking
        self._fetched_at = fetched_at
        self._removing: asyncio.Task[bool] | None = None

    def remove(self) -> None:
        """Acknowledge the request without waiting."""
        self._removing = asyncio.get_running_loop().create_task(self.take(alone=False))

    async def take(self, *, alone: bool) -> bool:
        """Acknowledge the request; return False if it goes to the next worker.

        A consumer that loses its leader may have the acknowledgement, or give the request to another worker meanwhile.
        It is repeated until it is confirmed; then the request is so old that its caller decides which worker begins it.
        """
        loop = asyncio.get_running_loop()
        async with self._taking if alone else nullcontext():
            if loop.time() - self._fetched_at > _ACKNOWLEDGE / 2:
                # The server may be about to give it to another worker.
                return False
            end = loop.time() + _PATIENCE
            while True:
                try:
                    await self._message.ack_sync(timeout=_CONFIRM)
                except (Error, TimeoutError) as error:
                    if loop.time() > end:
                        logger.debug("a request could not be acknowledged: %s", error)
                        return False
                else:
                    return True
                await asyncio.sleep(_RETRY)
