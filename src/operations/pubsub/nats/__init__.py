"""An event target on NATS.

    queue     a subject for each client. Workers subscribe to the subjects of all clients in one queue group; without
              workers, the server responds at once. Each consumer also has its own subjects, among which a caller that
              knows them distributes its requests
    mailbox   its own subject; the token after it is the id of the request
    topic     a subject
    control   a subject for each client
    presence  a ping to the subject: the server responds if there is no listener

`jetstream` has the durable queues. They have separate subjects, and their workers also consume the plain ones. To
switch to durable queues without lost or repeated requests, switch the workers first, then the callers.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import lru_cache, partial
from importlib.util import find_spec
from random import Random
from secrets import token_hex
from typing import Any

from operations._resilience import LogThrottle
from operations._text import enforce_lists
from operations.errors import MissingExtraError, NotSentError, TransportError

if find_spec("nats") is None:
    raise MissingExtraError("operations.pubsub.nats", extra="nats")

from nats.errors import NoRespondersError

from operations.pubsub.base import (
    Consumer,
    Delivery,
    EventTarget,
    LoopAffinity,
    QueueState,
    Receiver,
    StoredLetter,
    Subscription,
    WorkerStats,
    shielded,
    wait_until,
)
from operations.pubsub.config import (
    ANY_CLIENT,
    NOT_PRIVATE,
    NatsConfig,
    connect_failure,
    enforce_address,
    enforce_client,
)
from operations.pubsub.nats.client import (
    NATS_ERRORS,
    SUBJECT,
    MessageHandler,
    ReconnectingClient,
    sender_of,
    subject_of,
)
from operations.pubsub.nats.jetstream import JetStream
from operations.pubsub.nats.values import NatsValues
from operations.pubsub.signing import signed
from operations.types import options_of

__all__ = ["NatsConfig", "NatsTarget", "connect_nats"]

logger = logging.getLogger("operations")

_NAME = re.compile(rb"[0-9a-f]{32}")
"""Matches the name of a consumer."""

_PING_SECONDS = 0.3
"""Seconds to wait for the response to a ping; without a response the listener counts as present, but busy."""

_HEADER_BYTES = 256
"""Bytes reserved for the headers of a request in JetStream."""

_SEND_WAIT = 3.0
"""Seconds that a reply waits for a connection that is being restored."""

_MAX_KNOWN = 4096
"""The number of addresses and subjects that are cached, because a worker replies to the same callers repeatedly."""

_MAX_CONSUMERS = 1000
"""The largest number of known consumers of one plain queue."""

_ASK_EVERY, _ASK_SOON = 5.0, 1.0
"""Seconds between two queries for the consumers of a plain queue while requests are sent to it. The second value is
used while fewer than two consumers are known, because a new consumer receives no requests until it is known."""


_random = Random()  # noqa: S311 - it only distributes requests


class _Consumers:
    """The known consumers of a plain queue; each request goes to one with the fewest open requests of this caller.

    The server would select a random consumer for every request: with 64 requests for 8 workers, some worker gets about
    14, and a worker that hangs gets as many as the others. The caller would also not know which consumer to ask about a
    request that may be lost.

    Attributes:
        subject: The subject for which the server selects a consumer.
        inbox: The subject to which they send their names; empty before the first question.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.inbox = ""
        self._seen_at: dict[str, float] = {}
        # Also counts requests to consumers that are not known at the moment.
        self._open: Counter[str] = Counter()
        self._asked_at = float("-inf")
        self._loop = asyncio.get_running_loop()

    def is_due(self) -> bool:
        """Return whether to query the consumers now, and record the query."""
        now = self._loop.time()
        if now - self._asked_at < (_ASK_EVERY if len(self._seen_at) > 1 else _ASK_SOON):
            return False
        # Consumers that did not respond to the last query are blocked or disconnected.
        for name, seen_at in tuple(self._seen_at.items()):
            if seen_at < self._asked_at:
                self.remove(name)
        self._asked_at = now
        return True

    def on_reply(self, name: str) -> None:
        """Add a consumer that responded."""
        if len(self._seen_at) < _MAX_CONSUMERS:
            self._seen_at[name] = self._loop.time()

    def forget(self) -> None:
        """Query again before the next request, because the connection is new."""
        self._seen_at.clear()
        self._asked_at = float("-inf")

    def remove(self, name: str) -> None:
        """Remove a disconnected consumer."""
        self._seen_at.pop(name, None)

    def next(self) -> str:
        """Return the consumer for the next request; empty if the server should select one."""
        if not self._seen_at:
            return ""
        counts = {name: self._open.get(name, 0) for name in self._seen_at}
        fewest = min(counts.values())
        name = _random.choice([name for name, count in counts.items() if count == fewest])
        self._open[name] += 1
        return name

    def release(self, name: str) -> None:
        """Subtract a request that has ended."""
        self._open[name] -= 1
        if self._open[name] <= 0:
            del self._open[name]


class NatsTarget(EventTarget):
    """A client of a NATS server. Created by `connect_nats`."""

    def __init__(self, config: NatsConfig) -> None:
        self._affinity = LoopAffinity()
        self._losses = LogThrottle()
        self.trusted = config.trusted
        self.max_bytes = 1024 * 1024
        self.max_values = config.max_values
        self.durable, self.names_consumer = config.durable, not config.durable
        self._prefix = config.prefix
        self._client = config.client
        enforce_client(self._client)
        self._control_space, self._box_space = f"{self._prefix}.control.", f"{self._prefix}.box."
        self._subject = lru_cache(_MAX_KNOWN)(self._look_up)
        self._sender_of = lru_cache(_MAX_KNOWN)(partial(sender_of, self._prefix))
        self._boxes = subject_of(f"{self._prefix}.box", self._client)
        self._nats = ReconnectingClient()
        self._jetstream = JetStream(self._nats, config) if self.durable else None
        self._receivers: list[Receiver] = []
        self._consumers: dict[str, _Consumers] = {}
        self._connected = asyncio.Event()
        self.values = NatsValues(self._nats, self._prefix, config.replicas)

    async def open(self, config: NatsConfig) -> None:
        """Connect.

        Raises:
            TransportError: If the address is malformed, or NATS cannot be reached or rejects the client.
        """
        servers = [server.strip() for server in config.url.split(",")]
        servers = [server if "://" in server else f"nats://{server}" for server in servers]
        for server in servers:
            enforce_address(server, ("nats", "tls", "ws", "wss"))
        try:
            async with asyncio.timeout(config.connect_timeout):
                await self._nats.connect(
                    servers,
                    error_cb=self._nats.on_error,
                    disconnected_cb=self._on_lost,
                    reconnected_cb=self._on_restored,
                    reconnect_to_server_handler=self._nats.next_server,
                    max_reconnect_attempts=-1,
                    connect_timeout=2,
                    inbox_prefix=self._boxes,
                    # Our own errors are already handled.
                    skip_subject_validation=True,
                    **config.login,
                )
        except (TransportError, *NATS_ERRORS, TimeoutError) as error:
            # A timeout has no text, but the failure of the last attempt has.
            failure = connect_failure(error) or connect_failure(self._nats.last_error)
            hosts = ", ".join(f"{each.hostname}:{each.port}" for each in self._nats.servers)
            where = f" at {hosts}" if hosts else ""
            reason = failure or f"no response for {config.connect_timeout:g} seconds"
            raise TransportError(f"NATS cannot be reached{where}: {reason}") from error
        self._note_limit()
        self._connected.set()
        if self._jetstream is not None:
            await self._jetstream.open()

    @shielded
    async def aclose(self) -> None:
        """Flush and disconnect."""
        self._affinity.is_closed = True
        try:
            if self._jetstream is not None:
                await self._jetstream.aclose()
            with suppress(*NATS_ERRORS):
                if self._nats.is_connected:
                    await self._nats.flush(timeout=2)
        finally:
            # If the address could not be parsed, nats-py cannot close the client either.
            with suppress(*NATS_ERRORS, AssertionError):
                await self._nats.close()

    # ---------------------------------------------------------------------------------------- connection

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached now, and the receivers know it."""
        # The library is connected a moment before it calls `_on_restored`.
        return self._nats.is_connected and self._connected.is_set()

    async def _on_lost(self) -> None:
        if self._connected.is_set() and not self._affinity.is_closed:
            logger.log(self._losses.level(), "the connection to NATS was lost")
        self._connected.clear()
        for receiver in tuple(self._receivers):
            receiver.lost("the connection to NATS was lost")

    async def _on_restored(self) -> None:
        self._nats.backoff.reset()
        self._note_limit()
        self._connected.set()
        for consumers in self._consumers.values():
            consumers.forget()
        for receiver in tuple(self._receivers):
            receiver.restored()

    def _note_limit(self) -> None:
        """Store the largest message that the server accepts, which includes headers."""
        self.max_bytes = self._nats.max_payload - (_HEADER_BYTES if self.durable else 0)

    async def _ready(self, wait: float) -> None:
        if not self._connected.is_set():
            self._affinity.enforce()
            await wait_until(self._connected, wait, "NATS cannot be reached")

    async def check_privacy(self) -> None:
        """Raise an error unless the server blocks this client from the mailboxes and requests of other clients.

        Raises:
            TransportError: If it does not.
        """
        other, name = token_hex(8), token_hex(16)
        kinds = ("queue", "to", "control")
        spaces = (f"box.{other}.{name}", *(f"{kind}.{name}.{other}" for kind in kinds))
        for subject in (f"{self._prefix}.{space}" for space in spaces):
            for attempt in (
                partial(self._nats.subscribe, subject),  # pyright: ignore[reportUnknownMemberType]
                partial(self._nats.publish, subject, b""),
            ):
                if not await self._nats.refusal([subject], attempt):
                    raise TransportError(NOT_PRIVATE)

    # ---------------------------------------------------------------------------------------- addresses

    def mailbox(self) -> str:
        """Return a new private address under this client's name."""
        return f"{self._boxes}.{token_hex(16)}"

    def topic(self, name: str) -> str:
        """Return the public address called `name`.

        Raises:
            TransportError: If it cannot be part of a subject.
        """
        return subject_of(f"{self._prefix}.topic", name)

    def control(self, name: str) -> str:
        """Return the address of the workers called `name`. Each client sends to its own subject.

        Raises:
            TransportError: If it cannot be part of a subject.
        """
        return subject_of(f"{self._prefix}.control", name)

    def _queue(self, name: str, kind: str = "queue") -> str:
        return subject_of(f"{self._prefix}.{kind}", name)

    def _all_of(self, queue: str, kind: str = "queue") -> str:
        """Return the subjects of a queue for all clients."""
        return f"{self._queue(queue, kind)}.*"

    def _look_up(self, address: str) -> str:
        """Return the subject for messages to `address`, which may come from an attacker.

        Raises:
            NotSentError: If it is neither an address of this prefix nor an inbox of a plain NATS client, or not a valid
                subject. The server closes the connection of a client that publishes to an invalid subject.
        """
        if SUBJECT.fullmatch(address) is not None:
            if address.startswith(self._box_space):
                return f"{address}._"
            if address.startswith(self._control_space):
                return f"{address}.{self._client}"
            if address.startswith((f"{self._prefix}.topic.", "_INBOX.")):
                return address
        raise NotSentError(f"{address[:100]!r} is not an address of this prefix")

    # ---------------------------------------------------------------------------------------- mailboxes

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> AsyncExitStack:
        """Listen at `addresses`."""
        enforce_lists(addresses=addresses)
        self._affinity.enforce()
        async with AsyncExitStack() as undo:

            async def subscribe() -> None:
                for address in dict.fromkeys(addresses):
                    handle, on_empty = self._handlers(address, receiver)
                    await self._nats.subscribe_to(
                        self._listening_subject(address), handle, undo, on_empty=on_empty
                    )

            await self._nats.confirm(map(self._listening_subject, addresses), subscribe)
            self._receivers.append(receiver)
            undo.callback(self._receivers.remove, receiver)
            return undo.pop_all()

    def _listening_subject(self, address: str) -> str:
        """Return the subjects for messages to an address."""
        if address.startswith(self._box_space):
            return f"{address}.>"
        return f"{address}.*" if address.startswith(self._control_space) else address

    def _handlers(
        self, address: str, receiver: Receiver
    ) -> tuple[MessageHandler, Callable[[Any], Awaitable[None]]]:
        """Return the handlers of messages, and of those without a body: pings, and reports of undelivered requests."""
        is_control = address.startswith(self._control_space)

        def handle(body: bytes, _: str, subject: str) -> None:
            sender = self._sender_of(subject) if is_control else ""
            receiver.receive(Delivery(body, sender=sender))

        async def on_empty(message: Any) -> None:
            if message.reply:
                # A ping, which a client may send only with its own reply address.
                if not is_control or message.reply.startswith(self._sender_of(message.subject)):
                    await self._nats.publish(message.reply)
            elif message.headers and message.headers.get("Status") == "503":
                key, _, consumer = message.subject[len(address) + 1 :].partition("=")
                if consumer:
                    for consumers in self._consumers.values():
                        consumers.remove(consumer)
                receiver.undelivered(key, bool(consumer))

        return handle, on_empty

    async def send(self, address: str, body: bytes) -> None:
        """Publish to a mailbox, topic or control address of this prefix, or to the inbox of a plain NATS client."""
        subject = self._subject(address)
        if not self._connected.is_set():
            await self._ready(_SEND_WAIT)
        await self._nats.publish_now(subject, body)

    async def is_present(self, address: str) -> bool:
        """Return whether a process listens at `address`.

        If there is none, the server responds; a busy one may not respond.
        """
        await self._ready(0)
        try:
            await self._nats.request(self._subject(address), b"", timeout=_PING_SECONDS)
        except NoRespondersError:
            return False
        except TimeoutError:
            return True
        except NATS_ERRORS as error:
            raise TransportError(f"NATS: {error}") from error
        return True

    # ---------------------------------------------------------------------------------------- queues

    async def consume(self, queue: str, consumer: Consumer) -> Subscription:
        """Consume from `queue`.

        The server distributes plain requests one by one; `capacity` applies to durable requests.
        """
        self._affinity.enforce()

        def receive_request(body: bytes, reply: str, subject: str) -> None:
            sender = self._sender_of(subject)
            if reply.startswith(self._box_space):
                # The last token is the id of the request.
                reply = reply.rpartition(".")[0]
            elif sender == f"{self._box_space}{ANY_CLIENT}." and reply.startswith("_INBOX."):
                # A plain NATS client, which has no mailboxes.
                sender = "_INBOX."
            consumer.receive(Delivery(body, reply, sender=sender))

        name = consumer.name or token_hex(16)
        subject, roll_call = self._all_of(queue), self._all_of(queue, "who")
        own = f"{self._prefix}.to.{name}.*"

        def answer_roll_call(_: bytes, inbox: str, subject: str) -> None:
            if inbox.startswith(self._sender_of(subject)) and SUBJECT.fullmatch(inbox):
                self._nats.start(self._answer(inbox, name))

        async with AsyncExitStack() as undo:

            async def subscribe() -> None:
                await self._nats.subscribe_to(subject, receive_request, undo, queue="workers")
                await self._nats.subscribe_to(own, receive_request, undo)
                await self._nats.subscribe_to(roll_call, answer_roll_call, undo)

            await self._nats.confirm([subject, own, roll_call], subscribe)
            if self._jetstream is not None:
                reader = await self._jetstream.consume(queue, consumer)
                undo.push_async_callback(reader.aclose)
            return undo.pop_all()

    async def _answer(self, inbox: str, name: str) -> None:
        """Send the name of a consumer to a caller."""
        with suppress(TransportError):
            await self._nats.publish_now(inbox, name.encode())

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float
    ) -> str:
        """Publish to the queue's subject. If it has no subscriber, the server sends an empty message to `reply_to`."""
        if not self._connected.is_set():
            await self._ready(wait)
        if self._jetstream is not None:
            subject = f"{self._queue(queue, 'durable')}.{self._client}"
            # Includes the secret part of the mailbox, because all clients of a stream share message ids.
            key = f"{key}.{reply_to.rpartition('.')[2]}"
            return await self._jetstream.enqueue(subject, body, key)
        consumers = self._consumers.get(queue)
        if consumers is None:
            consumers = self._consumers[queue] = _Consumers(f"{self._queue(queue)}.{self._client}")
        if consumers.is_due():
            await self._query_consumers(queue, consumers)
        subject, consumer = consumers.subject, consumers.next()
        if consumer:
            subject, key = f"{self._prefix}.to.{consumer}.{self._client}", f"{key}={consumer}"
        try:
            await self._nats.publish_now(subject, body, f"{reply_to}.{key}" if reply_to else "")
        except BaseException:
            consumers.release(consumer)
            raise
        return f"{self._control_space}{consumer}" if consumer else ""

    def release(self, queue: str, consumer: str) -> None:
        """Subtract a request that has ended from the open requests of its consumer."""
        self._consumers[queue].release(consumer[len(self._control_space) :])

    async def _query_consumers(self, queue: str, consumers: _Consumers) -> None:
        """Query the consumers of a queue; their names arrive later."""
        try:
            if not consumers.inbox:
                consumers.inbox = self.mailbox()

                async def on_reply(message: Any) -> None:
                    if _NAME.fullmatch(message.data):
                        consumers.on_reply(message.data.decode())

                await self._nats.subscribe(consumers.inbox, cb=on_reply)  # pyright: ignore[reportUnknownMemberType]
            subject = f"{self._queue(queue, 'who')}.{self._client}"
            await self._nats.publish(subject, b"1", consumers.inbox)
        except NATS_ERRORS as error:
            logger.debug("the consumers of %s cannot be asked: %s", queue, error)

    async def is_waiting(self, queue: str, receipt: str) -> bool:
        """Return whether a durable queue still has a request."""
        return self._jetstream is not None and await self._jetstream.is_waiting(queue, receipt)

    async def dead_letter(self, queue: str, body: bytes) -> None:
        """Publish a request that crashed its workers to the subject `aside` of its group and client."""
        await self._nats.publish_now(f"{self._queue(queue, 'aside')}.{self._client}", body)

    # ---------------------------------------------------------------------------------------- administration

    async def advertise(self, queue: str, stats: Callable[[], WorkerStats]) -> Subscription | None:
        """Register in the service discovery of NATS, if the server allows it."""
        return await self._nats.advertise(queue, self._all_of(queue), stats, self._prefix)

    async def state(self, queue: str) -> QueueState:
        """Return the state of a durable queue; the state of other queues is unknown."""
        return QueueState() if self._jetstream is None else await self._jetstream.state(queue)

    async def letters(self, queue: str, limit: int, letter: str = "") -> list[StoredLetter]:
        """Return the newest dead letters, or one. They are stored only if queues are durable."""
        if self._jetstream is None:
            raise TransportError(
                "NATS keeps dead letters with durable=True only; "
                f"subscribe to {self._all_of(queue, 'aside')}"
            )
        return await self._jetstream.letters(queue, limit, letter)

    async def remove(self, queue: str, letter: str) -> bool:
        """Remove a dead letter."""
        return self._jetstream is not None and await self._jetstream.remove(queue, letter)


@options_of(NatsConfig)
@asynccontextmanager
async def connect_nats(config: NatsConfig) -> AsyncGenerator[EventTarget]:
    """Connect to NATS for the duration of an `async with` block; lost connections are restored.

    Call it as `connect_nats(url, **options)`, with the fields of `NatsConfig`.

    Raises:
        TransportError: If the address, prefix or client is not valid, NATS cannot be reached, or the check of `private`
            fails.
        ValueError: If the secret is too short.
    """
    target = NatsTarget(config)
    signing = signed(target, config.secret)
    async with aclosing(target):
        await target.open(config)
        if config.private:
            await target.check_privacy()
        yield signing
