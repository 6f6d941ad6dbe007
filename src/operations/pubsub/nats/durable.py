"""Requests that wait for a worker: a JetStream work queue instead of a plain subject.

Rule 1: a request is acknowledged before it is run, so that it is never run twice; a worker that dies before it
        acknowledges leaves it to the next one.
Rule 2: the stream drops a key it has seen before, whichever worker the first one went to.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nats.aio.client import Client
from nats.errors import Error
from nats.js.api import ConsumerConfig, RetentionPolicy, StreamConfig
from nats.js.errors import ServiceUnavailableError

from operations.errors import NotSentError, TransportError
from operations.pubsub.base import Receiver

logger = logging.getLogger("operations")

_BATCH = 64
_WAIT = 2.0
"""Seconds a fetch waits for requests, which is also how long stopping takes at most."""

_ACKNOWLEDGE = 10.0
"""Seconds until a request that nobody acknowledged goes to the next worker."""

_REMEMBER = 120.0
"""Seconds a key is remembered."""

_KEEP = 3600.0
"""Seconds a request waits for a worker."""

_NO_JETSTREAM = (
    "durable=True needs JetStream, and the server runs without it, or not for this account: start it with "
    "nats-server -js"
)
_SILENT = (
    "JetStream does not answer. Where the server has permissions, durable=True needs more of them: "
    "see Permissions in docs/calls.md"
)


class DurableQueues:
    """The queues of one prefix, in one JetStream stream."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._js: Any = client.jetstream()  # pyright: ignore[reportUnknownMemberType]
        self._subjects = f"{prefix}.queue.>"
        self._stream = f"{prefix}_queue".replace(".", "_")

    async def open(self) -> None:
        """Make the stream, if it is not there.

        Raises:
            TransportError: If the server has no JetStream, or another stream is in the way.
        """
        config = StreamConfig(
            name=self._stream,
            subjects=[self._subjects],
            retention=RetentionPolicy.WORK_QUEUE,
            duplicate_window=_REMEMBER,
            max_age=_KEEP,
        )
        try:
            await self._js.add_stream(config)
        except ServiceUnavailableError as error:
            raise TransportError(_NO_JETSTREAM) from error
        except TimeoutError as error:
            raise TransportError(_SILENT) from error
        except Error as error:
            raise TransportError(f"JetStream: {error}") from error

    async def put(self, subject: str, body: bytes, key: str, wait: float) -> None:
        """Store a request; returns when the server has it.

        Raises:
            NotSentError: If the server refused it.
            TransportError: If it may or may not have been stored.
        """
        try:
            await self._js.publish(
                subject, body, timeout=max(wait, 1.0), headers={"Nats-Msg-Id": key}
            )
        except TimeoutError as error:
            raise TransportError("JetStream did not confirm a request") from error
        except Error as error:
            raise NotSentError(f"JetStream: {error}") from error

    async def take(
        self, subject: str, queue: str, receiver: Receiver, capacity: Callable[[], int]
    ) -> "DurableTaking":
        """Take requests in turn with everyone else who does."""
        try:
            consumer = await self._js.pull_subscribe(
                subject,
                durable=f"workers_{queue}".replace(".", "_"),
                stream=self._stream,
                config=ConsumerConfig(ack_wait=_ACKNOWLEDGE),
            )
        except (Error, TimeoutError) as error:
            raise TransportError(f"JetStream: {error}") from error
        return DurableTaking(consumer, receiver, capacity)


class DurableTaking:
    """A receiver at a durable queue, until closed."""

    def __init__(self, consumer: Any, receiver: Receiver, capacity: Callable[[], int]) -> None:
        self._consumer = consumer
        self._receiver = receiver
        self._capacity = capacity
        self._closing = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Stop between two fetches; what was fetched is delivered."""
        self._closing = True
        await asyncio.wait({self._task}, timeout=_WAIT + 1)
        self._task.cancel()
        await asyncio.wait({self._task})
        with suppress(Error, TimeoutError):
            await self._consumer.unsubscribe()

    async def _run(self) -> None:
        while not self._closing:
            count = max(1, min(_BATCH, self._capacity()))
            try:
                messages = await self._consumer.fetch(count, timeout=_WAIT)
            except TimeoutError:
                continue
            except Error as error:
                logger.debug("JetStream: %s", error)
                await asyncio.sleep(0.2)
                continue
            await asyncio.gather(*map(self._deliver, messages))

    async def _deliver(self, message: Any) -> None:
        try:
            await message.ack_sync()
        except (Error, TimeoutError) as error:
            # Not ours, then: it goes to the next worker.
            logger.debug("a request could not be acknowledged: %s", error)
        else:
            self._receiver.receive(message.data, "")
