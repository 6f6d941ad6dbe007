"""An event target on NATS.

    queue     a subject for each client. Workers subscribe to the subjects of all clients in one queue group; without
              workers, the server responds at once. A caller that knows the workers sends each request to the control
              address of one of them
    mailbox   its own subject; the token after it is the id of the request
    topic     a subject
    control   a subject for each client
    presence  a ping to the subject: the server responds if there is no listener

`jetstream` has the queues that store requests. They have separate subjects, and their workers also consume the plain
ones. To switch to them without lost or repeated requests, switch the workers first, then the callers.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import lru_cache, partial
from importlib.util import find_spec
from secrets import token_hex
from weakref import WeakValueDictionary

from operations.base.errors import (
    MissingExtraError,
    NotPermittedError,
    NotSentError,
    TransportError,
)

if find_spec("nats") is None:
    raise MissingExtraError("operations.pubsub.nats", extra="nats")

from nats.errors import NoRespondersError

from operations.base.tasks import shielded
from operations.base.types import options_of
from operations.pubsub.base import (
    BrokerTarget,
    Consumer,
    Delivery,
    EventTarget,
    QueueState,
    Receiver,
    StoredLetter,
    Subscription,
    WorkerStats,
)
from operations.pubsub.config import (
    ANY_CLIENT,
    NOT_PERMITTED,
    NOT_PRIVATE,
    NatsConfig,
    connect_failure,
    enforce_address,
    is_worker_in,
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
from operations.pubsub.nats.store import NatsValues
from operations.pubsub.signing import signed

__all__ = ["NatsConfig", "NatsTarget", "connect_nats"]

_PING_SECONDS = 0.3
"""Seconds to wait for the response to a ping; without a response the listener counts as present, but busy."""

_LARGE = 1024 * 1024
"""Bytes of a message after which the next large one to the same address waits until it was read."""

_LARGE_SECONDS = 10.0
"""The longest time for this in seconds."""

_HEADER_BYTES = 256
"""Bytes reserved for the headers of a request in JetStream."""

_NO_LISTENER = b"NATS/1.0 503"
"""The headers with which the server returns a message that has no listener."""

_MAX_KNOWN = 4096
"""The number of addresses and subjects that are cached, because a worker replies to the same callers repeatedly."""


class NatsTarget(BrokerTarget):
    """A client of a NATS server. Created by `connect_nats`."""

    def __init__(self, config: NatsConfig) -> None:
        super().__init__(config, "NATS")
        self.max_bytes = 1024 * 1024
        self.stores_requests = config.queue == "jetstream"
        self.chooses_worker = not self.stores_requests
        self._prefix = config.prefix
        self._control_space, self._box_space = f"{self._prefix}.control.", f"{self._prefix}.box."
        self._subject = lru_cache(_MAX_KNOWN)(self._look_up)
        self._sender_of = lru_cache(_MAX_KNOWN)(partial(sender_of, self._prefix))
        self._boxes = subject_of(f"{self._prefix}.box", self.client)
        self._nats = ReconnectingClient()
        self._jetstream = JetStream(self._nats, config) if self.stores_requests else None
        self._permitted: set[str] = set()
        """The subjects to which the server has let this client publish."""
        self._publishing_first = asyncio.Lock()
        self._lines: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The locks of addresses to which large messages are being sent."""
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
            if self._nats.requires_certificate and config.cert_file is None and config.tls is None:
                reason += "; it requires a certificate of its clients: set cert_file and key_file"
            raise TransportError(f"NATS cannot be reached{where}: {reason}") from error
        self._note_limit()
        self.connected.set()
        if self._jetstream is not None:
            await self._jetstream.open()

    @shielded
    async def aclose(self) -> None:
        """Flush and disconnect."""
        self.is_closed = True
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
        return self._nats.is_connected and self.connected.is_set()

    @property
    def problem(self) -> str:
        """Why JetStream does not store requests now; empty if it does."""
        return "" if self._jetstream is None else self._jetstream.problem

    async def _on_lost(self) -> None:
        if self.connected.is_set() and not self.is_closed:
            self.lost("the connection to NATS was lost")
        self.connected.clear()

    async def _on_restored(self) -> None:
        self._nats.backoff.reset()
        self._note_limit()
        self.connected.set()
        self.restored()
        if self._jetstream is not None:
            with suppress(*NATS_ERRORS):
                await self._jetstream.restored()

    def _note_limit(self) -> None:
        """Store the largest message that the server accepts, which includes headers."""
        self.max_bytes = self._nats.max_payload - (_HEADER_BYTES if self.stores_requests else 0)

    async def check_privacy(self) -> None:
        """Raise an error unless the server blocks this client from the mailboxes and requests of other clients.

        Raises:
            TransportError: If it does not.
        """
        other, name = token_hex(8), token_hex(16)
        kinds = ("queue", "control")
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
        """Return the address that all workers of the group `name` share. Each client sends to its own subject.

        Raises:
            TransportError: If it cannot be part of a subject.
        """
        return subject_of(f"{self._prefix}.control", name)

    def is_worker(self, address: str) -> bool:
        """Return whether an address is that of one worker."""
        return is_worker_in(self._control_space, address)

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
                return f"{address}.{self.client}"
            if address.startswith((f"{self._prefix}.topic.", "_INBOX.")):
                return address
        raise NotSentError(f"{address[:100]!r} is not an address of this prefix")

    # ---------------------------------------------------------------------------------------- mailboxes

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> AsyncExitStack:
        """Listen at `addresses`."""
        self.enforce_usable()
        async with AsyncExitStack() as undo:

            async def subscribe() -> None:
                for address in dict.fromkeys(addresses):
                    subject, handle = (
                        self._listening_subject(address),
                        self._handler(address, receiver),
                    )
                    await self._nats.subscribe_to(subject, handle, undo)

            await self._nats.confirm(map(self._listening_subject, addresses), subscribe)
            self.notify(receiver, undo)
            return undo.pop_all()

    def _listening_subject(self, address: str) -> str:
        """Return the subjects for messages to an address."""
        if address.startswith(self._box_space):
            return f"{address}.>"
        return f"{address}.*" if address.startswith(self._control_space) else address

    def _handler(self, address: str, receiver: Receiver) -> MessageHandler:
        """Return the handler of messages at an address."""
        is_control = address.startswith(self._control_space)

        def handle(body: bytes, reply: bytes, subject: bytes, headers: bytes) -> None:
            sender = self._sender_of(subject) if is_control else ""
            if body:
                receiver.receive(Delivery(body, sender=sender))
            elif reply:
                # A ping, which a client may send only with its own reply address.
                if reply.startswith(sender.encode()):
                    self._nats.start(self._respond(reply.decode()))
            elif headers.startswith(_NO_LISTENER):
                key, _, name = subject.decode()[len(address) + 1 :].partition("=")
                receiver.undelivered(key, f"{self._control_space}{name}" if name else "")

        return handle

    async def _respond(self, subject: str) -> None:
        """Respond to a ping."""
        with suppress(TransportError):
            await self._nats.publish_now(subject, b"")

    async def send(self, address: str, body: bytes) -> None:
        """Publish to a mailbox, topic or control address of this prefix, or to the inbox of a plain NATS client."""
        subject = self._subject(address)
        await self.ready()
        if len(body) > _LARGE:
            await self._send_large(subject, body)
        else:
            await self._nats.publish_now(subject, body)

    async def _send_large(self, subject: str, body: bytes) -> None:
        """Publish a large message, and let the next one to this address wait until its client has read it.

        The server disconnects a client with too much unread data, which would lose all messages on their way to it.
        """
        line = self._lines.setdefault(subject, asyncio.Lock())
        async with line:
            await self._nats.publish_now(subject, body)
            with suppress(NoRespondersError, TimeoutError, *NATS_ERRORS):
                # The messages of a connection are read in order.
                await self._nats.request(subject, b"", timeout=_LARGE_SECONDS)

    async def is_present(self, address: str) -> bool:
        """Return whether a process listens at `address`.

        If there is none, the server responds; a busy one may not respond.
        """
        self.enforce_usable()
        await self.ready(0)
        try:
            subject = self._subject(address)
        except NotSentError:
            return False
        try:
            await self._nats.request(subject, b"", timeout=_PING_SECONDS)
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

        The server distributes plain requests one by one; `capacity` applies to JetStream.
        """
        self.enforce_usable()

        def receive_request(body: bytes, reply_to: bytes, subject: bytes, _: bytes) -> None:
            sender, reply = self._sender_of(subject), reply_to.decode()
            if reply.startswith(self._box_space):
                # The last token is the id of the request.
                reply = reply.rpartition(".")[0]
            elif sender == f"{self._box_space}{ANY_CLIENT}." and reply.startswith("_INBOX."):
                # A plain NATS client, which has no mailboxes.
                sender = "_INBOX."
            consumer.receive(Delivery(body, reply, sender=sender))

        subject = self._all_of(queue)
        async with AsyncExitStack() as undo:
            await self._nats.confirm(
                [subject],
                partial(self._nats.subscribe_to, subject, receive_request, undo, queue="workers"),
            )
            if self._jetstream is not None:
                reader = await self._jetstream.consume(queue, consumer)
                undo.push_async_callback(reader.aclose)
            return undo.pop_all()

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float, worker: str = ""
    ) -> str:
        """Publish to the subject of the queue or of a worker.

        If it has no subscriber, the server sends an empty message to `reply_to`.
        """
        await self.ready(wait)
        if worker:
            name = worker[len(self._control_space) :]
            await self._nats.publish_now(self._subject(worker), body, f"{reply_to}.{key}={name}")
            return ""
        if self._jetstream is not None:
            subject = f"{self._queue(queue, 'durable')}.{self.client}"
            # Includes the secret part of the mailbox, because all clients of a stream share message ids.
            key = f"{key}.{reply_to.rpartition('.')[2]}"
            return await self._jetstream.enqueue(subject, body, key)
        subject = f"{self._queue(queue)}.{self.client}"
        publish = partial(
            self._nats.publish_now, subject, body, f"{reply_to}.{key}" if reply_to else ""
        )
        await (publish() if subject in self._permitted else self._publish_first(subject, publish))
        return ""

    async def _publish_first(self, subject: str, publish: Callable[[], Awaitable[None]]) -> None:
        """Publish to a new subject, and wait until the server has processed it.

        The server drops a message that is not permitted, and its caller would wait until the timeout.
        """
        async with self._publishing_first:
            if subject in self._permitted:
                await publish()
                return
            try:
                refused = await self._nats.refusal([subject], publish)
            except TransportError:
                self._permitted.add(subject)
                raise
            if refused:
                raise NotPermittedError(f"NATS reported a {refused}: {NOT_PERMITTED}")
            self._permitted.add(subject)

    async def is_waiting(self, queue: str, receipt: str) -> bool:
        """Return whether JetStream still has a request."""
        return self._jetstream is not None and await self._jetstream.is_waiting(queue, receipt)

    async def dead_letter(self, queue: str, body: bytes) -> None:
        """Publish a request that crashed its workers to the subject `aside` of its group and client."""
        await self._nats.publish_now(f"{self._queue(queue, 'aside')}.{self.client}", body)

    # ---------------------------------------------------------------------------------------- administration

    async def advertise(self, queue: str, stats: Callable[[], WorkerStats]) -> Subscription | None:
        """Register in the service discovery of NATS, if the server allows it."""
        return await self._nats.advertise(queue, self._all_of(queue), stats, self._prefix)

    async def state(self, queue: str) -> QueueState:
        """Return the state of a queue in JetStream; the state of other queues is unknown."""
        return QueueState() if self._jetstream is None else await self._jetstream.state(queue)

    async def letters(self, queue: str, limit: int, letter: str = "") -> list[StoredLetter]:
        """Return the newest dead letters, or one. They are stored only in JetStream."""
        if self._jetstream is None:
            raise TransportError(
                "NATS keeps dead letters with queue='jetstream' only; "
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
