"""Administration of NATS: the state of queues, dead letters, service discovery, and the values that several hubs share.

Rule 1: dead letters are kept by JetStream if queues are durable. Elsewhere they are published to the subject
        `<prefix>.aside.<queue>.<client>`, for subscribers.
Rule 2: discovery (`$SRV.PING`, `INFO` and `STATS`) reports the group, its version and counts, but no operation names.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.errors import Error
from nats.js.api import KeyValueConfig, StreamConfig
from nats.js.errors import (
    BadRequestError,
    BucketNotFoundError,
    InvalidKeyError,
    KeyNotFoundError,
    NotFoundError,
)
from nats.micro.service import (
    EndpointInfo,
    EndpointStats,
    ServiceInfo,
    ServicePing,
    ServiceStats,
    ServiceVerb,
    control_subject,
)

from operations.errors import NotSentError, TransportError
from operations.pubsub.base import QueueState, StoredLetter, Subscription, WorkerStats
from operations.pubsub.nats.queues import DurableQueues

logger = logging.getLogger("operations")

_ERRORS = (Error, OSError, EOFError, TimeoutError)

_SECONDS = 2.0
"""Time for an answer of JetStream; without permission there is none."""

_MAX_LETTERS = 1000
"""Dead letters that are kept of each queue."""

_VERSION = re.compile(r"\d+\.\d+\.\d+([-+][0-9A-Za-z.+-]+)?", re.ASCII)

_ENDPOINT, _QUEUE_GROUP = "calls", "workers"


class NatsAdmin:
    """The operator's side of one client of a NATS server.

    Args:
        client: The connection.
        prefix: The prefix of all subjects.
        subject_of: Returns the subjects of a queue, of all clients.
        refusal_of: Subscribes, and returns the server's error; empty if there is none.

    Attributes:
        durable: The durable queues, if there are any.
    """

    def __init__(
        self,
        client: Client,
        prefix: str,
        subject_of: Callable[[str], str],
        refusal_of: Callable[[Iterable[str], Callable[[], Awaitable[Any]]], Awaitable[str]],
    ) -> None:
        self.durable: DurableQueues | None = None
        self._nats = client
        self._prefix = prefix
        self._subject_of = subject_of
        self._refusal_of = refusal_of
        self._stream = f"{prefix}_aside".replace(".", "_")
        self._keeping: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ queues and dead letters

    @property
    def _js(self) -> Any:
        return self._nats.jetstream(timeout=_SECONDS)  # pyright: ignore[reportUnknownMemberType]

    def _letters_subject(self, queue: str) -> str:
        """Return the subjects of the dead letters of all clients."""
        return f"{self._prefix}.aside.{queue}.*"

    async def keep_letters(self) -> None:
        """Let JetStream keep dead letters from now on, if this client may ask for it."""
        if self._keeping is None:
            self._keeping = asyncio.get_running_loop().create_task(self._keep_letters())
        # Not for long: without permission there is no answer.
        await asyncio.wait({self._keeping}, timeout=_SECONDS / 2)

    async def _keep_letters(self) -> None:
        config = StreamConfig(
            name=self._stream,
            subjects=[f"{self._prefix}.aside.>"],
            max_msgs_per_subject=_MAX_LETTERS,
            num_replicas=self.durable.replicas if self.durable is not None else None,
        )
        try:
            try:
                await self._js.stream_info(self._stream)
            except NotFoundError:
                await self._js.add_stream(config)
        except _ERRORS as error:
            logger.warning("JetStream does not keep dead letters of %s: %s", self._prefix, error)

    async def aclose(self) -> None:
        """Stop the background tasks."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})

    async def state(self, queue: str) -> QueueState:
        """Return the state of a durable queue; nothing is known of others."""
        if self.durable is None:
            return QueueState()
        subject = self._letters_subject(queue)
        state, count = await self.durable.state(queue), 0
        try:
            info = await self._js.stream_info(self._stream, subjects_filter=subject)
            subjects: dict[str, int] = info.state.subjects or {}
            count = sum(subjects.values())
        except NotFoundError:
            pass
        except _ERRORS as error:
            raise TransportError(f"JetStream: {error}") from error
        return msgspec.structs.replace(state, dead_letters=count)

    async def letters(self, queue: str, limit: int, letter: str = "") -> list[StoredLetter]:
        """Return the newest messages of the stream of dead letters, or one."""
        if self.durable is None:
            raise TransportError(
                f"NATS keeps dead letters with durable=True only; subscribe to {self._letters_subject(queue)}"
            )
        found: deque[StoredLetter] = deque(maxlen=limit)
        number = _number(letter) if letter else 1
        with suppress(NotFoundError):
            while number:
                stored = await self._get(number, self._letters_subject(queue))
                if letter and stored.id != letter:
                    break
                found.appendleft(stored)
                number = 0 if letter else int(stored.id) + 1
        return list(found)

    async def _get(self, number: int, subject: str) -> StoredLetter:
        """Return the message with this number, or the next one of a subject."""
        try:
            stored = await self._js.get_msg(self._stream, seq=number, subject=subject, next=True)
        except NotFoundError:
            raise
        except _ERRORS as error:
            raise TransportError(f"JetStream: {error}") from error
        return StoredLetter(
            id=str(stored.seq),
            body=stored.data or b"",
            stored_at=int(stored.time.timestamp() * 1000),
        )

    async def remove(self, queue: str, letter: str) -> bool:
        """Delete a message of the stream of dead letters."""
        if not _number(letter) or not await self.letters(queue, 1, letter):
            return False
        try:
            return bool(await self._js.delete_msg(self._stream, int(letter)))
        except NotFoundError:
            return False
        except _ERRORS as error:
            raise TransportError(f"JetStream: {error}") from error

    # ------------------------------------------------------------ service discovery

    async def advertise(self, queue: str, stats: Callable[[], WorkerStats]) -> Subscription | None:
        """Answer `$SRV` requests for a worker of a group, if the server allows it."""
        service = _Service(queue, self._subject_of(queue), stats)
        subjects = list(service.subjects())
        async with AsyncExitStack() as undo:

            async def answer(message: Any) -> None:
                # An answer to one of our own addresses would disturb its owner.
                if message.reply and not message.reply.startswith(f"{self._prefix}."):
                    verb = message.subject.split(".")[1]
                    await self._nats.publish(message.reply, service.answer(ServiceVerb(verb)))

            async def subscribe() -> None:
                for subject in subjects:
                    subscription = await self._nats.subscribe(subject, cb=answer)  # pyright: ignore[reportUnknownMemberType]
                    undo.push_async_callback(_unsubscribe, subscription)

            refusal = await self._refusal_of(subjects, subscribe)
            if refusal:
                logger.info("the service discovery of NATS is not used: %s", refusal)
                return None
            return undo.pop_all()


class _Service:
    """A worker in the service discovery of NATS."""

    def __init__(self, group: str, subject: str, stats: Callable[[], WorkerStats]) -> None:
        # Names in the discovery have no dots.
        self._name = group.replace(".", "_").replace("$", "_").replace("=", "_")
        self._id = token_hex(11)
        self._subject = subject
        self._stats = stats

    def subjects(self) -> Iterable[str]:
        """Yield the subjects of all requests that concern this worker."""
        for verb in ServiceVerb:
            yield control_subject(verb, None, None)
            yield control_subject(verb, self._name, None)
            yield control_subject(verb, self._name, self._id)

    def answer(self, verb: ServiceVerb) -> bytes:
        """Return the answer to a request."""
        stats = self._stats()
        version = stats.version if _VERSION.fullmatch(stats.version) else "0.0.0"
        known: dict[str, Any] = {"name": self._name, "id": self._id, "version": version}
        endpoint: dict[str, Any] = {
            "name": _ENDPOINT,
            "subject": self._subject,
            "queue_group": _QUEUE_GROUP,
        }
        shown: ServicePing | ServiceInfo | ServiceStats
        if verb is ServiceVerb.PING:
            shown = ServicePing(**known, metadata={})
        elif verb is ServiceVerb.INFO:
            shown = ServiceInfo(
                **known,
                description="A group of operations workers",
                endpoints=[EndpointInfo(**endpoint)],
            )
        else:
            nanoseconds = int(stats.seconds * 1e9)
            shown = ServiceStats(
                **known,
                started=datetime.fromtimestamp(stats.started_at / 1000, UTC),
                endpoints=[
                    EndpointStats(
                        **endpoint,
                        num_requests=stats.finished,
                        num_errors=stats.failed,
                        processing_time=nanoseconds,
                        average_processing_time=nanoseconds // max(1, stats.finished),
                        data={
                            "running": stats.running,
                            "waiting": stats.waiting,
                            "refused": stats.refused,
                            "queue_time": int(stats.queue_seconds * 1e9),
                        },
                    )
                ],
            )
        return msgspec.json.encode(shown.to_dict())


def _number(letter: str) -> int:
    """Return the number of a message; 0 if the text is not a number."""
    return int(letter) if letter.isascii() and letter.isdigit() and len(letter) < 20 else 0


async def _unsubscribe(subscription: Any) -> None:
    with suppress(*_ERRORS):
        await subscription.unsubscribe()


_IDLE_SECONDS = 5.0
"""Seconds after which the server forgets a reader of values that has stopped."""


class NatsValues:
    """The values of a prefix, in a bucket of JetStream that is created when it is first used.

    Args:
        client: The connection.
        prefix: The prefix of all subjects.
        replicas: How many servers keep the bucket.
    """

    poll_seconds = 5.0

    def __init__(self, client: Any, prefix: str, replicas: int) -> None:
        name = f"{prefix}_authority".replace(".", "_")
        self._client = client
        self._settings = KeyValueConfig(bucket=name, history=1, replicas=replicas)
        self._bucket: Any = None

    async def _open(self) -> Any:
        if not self._client.is_connected:
            # The library would wait for its time limit.
            raise NotSentError("NATS cannot be reached")
        if self._bucket is None:
            stream = self._client.jetstream()
            try:
                self._bucket = await stream.key_value(self._settings.bucket)
            except BucketNotFoundError:
                self._bucket = await stream.create_key_value(self._settings)
        return self._bucket

    async def get(self, key: str) -> bytes | None:
        """Return a value."""
        try:
            value: bytes = (await (await self._open()).get(key)).value
        except (KeyNotFoundError, InvalidKeyError):
            return None
        return value

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a value."""
        bucket = await self._open()
        try:
            if old is None:
                await bucket.create(key, new)
                return True
            held = await bucket.get(key)
            if held.value != old:
                return False
            if new is None:
                await bucket.delete(key, last=held.revision)
            else:
                await bucket.update(key, new, last=held.revision)
        except (KeyNotFoundError, BadRequestError):
            # It was removed, or changed meanwhile.
            return False
        return True

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table."""
        bucket, found = await self._open(), dict[str, bytes]()
        options = {"ignore_deletes": True, "inactive_threshold": _IDLE_SECONDS}
        watcher = await bucket.watch(f"{table}.*", **options)
        # The watcher goes on with later changes: None comes after the present values.
        while (entry := await watcher.updates()) is not None:
            found[entry.key] = entry.value
        await watcher.stop()
        return found
