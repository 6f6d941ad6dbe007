"""The interface of event targets, and what the clients of brokers have in common.

    mailbox   `send` reaches the one client that listens at a private address
    topic     `send` reaches every client that listens at a public address
    control   a topic for workers, on which the broker guarantees the sender of a message
    queue     `enqueue` reaches exactly one consumer of a queue; the broker guarantees the sender as well
    presence  `is_present` checks with the broker whether a receiver listens at an address

Rule 1: a message is the JSON text of one event. Transports do not decode it, except that some read its `type`.
Rule 2: delivery is at most once. A transport never repeats a message that may have arrived.
Rule 3: a transport reconnects automatically and restores its subscriptions and consumers.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec

from operations.base.errors import NotSentError, TransportError
from operations.base.logs import LogThrottle
from operations.contract.access import Identity
from operations.pubsub.config import BrokerConfig, enforce_client

logger = logging.getLogger("operations")

PUT_TYPE = "call.requested"
"""The type of the events in queues. All other events are sent to mailboxes and topics."""


class EventFrame(msgspec.Struct):
    """The parts of an event that a transport needs; the payload is not decoded, because it may have any size."""

    type: str = ""
    payload: msgspec.Raw = msgspec.Raw(b"{}")


decode_frame = msgspec.json.Decoder(EventFrame).decode


class Claim(Protocol):
    """A message that the broker stores until a consumer starts it. Until then another consumer may claim it.

    Attributes:
        is_fresh: Whether no other consumer can have it yet.
        is_disputed: Whether another consumer may have removed it, although `acquire` has returned True.
    """

    is_fresh: bool
    is_disputed: bool

    def remove(self) -> None:
        """Remove the message from the queue without waiting for the broker."""
        ...

    async def acquire(self, *, alone: bool) -> bool:
        """Remove the message from the queue; return False if another consumer has it, or may have it.

        Args:
            alone: Wait until earlier messages have started. If one of them crashes the process, other consumers can
                then claim this message.
        """
        ...


class Delivery(msgspec.Struct, frozen=True):
    """A received message.

    Attributes:
        body: The message.
        reply_to: The mailbox for replies, or empty.
        age: Seconds that it waited at the broker, if the broker stores messages; 0 for a few milliseconds. A negative
            age is not known.
        claim: Removes it from its queue, if the broker stores it until it starts.
        sender: The common prefix of all mailboxes of its sender, guaranteed by the broker. Empty if there is only one
            client, or if the sender is not known.
    """

    body: bytes
    reply_to: str = ""
    age: float = 0.0
    claim: Claim | None = None
    sender: str = ""


class Receiver(Protocol):
    """Receives messages. Its methods run on the event loop, return at once and never raise.

    By default, only messages are processed.
    """

    def receive(self, delivery: Delivery) -> None:
        """Process a message."""
        ...

    def undelivered(self, key: str, worker: str = "") -> None:
        """Handle a message that found no consumer.

        Args:
            key: The key of the message.
            worker: The consumer that it was sent to, which has left; there may be others.
        """
        return

    def lost(self, reason: str) -> None:
        """Handle a lost connection. The transport reconnects automatically."""
        return

    def restored(self) -> None:
        """Handle the restored connection, with all its subscriptions."""
        return


class Consumer(Receiver, Protocol):
    """Receives the messages of a queue."""

    @property
    def backlog(self) -> int | None:
        """The number of messages per consumer that may wait at a broker that stores messages; None for no limit."""
        ...

    def capacity(self) -> int:
        """Return the number of messages that this process can start now.

        A broker that stores messages delivers no more.
        """
        ...


class Subscription(Protocol):
    """A listener or consumer, until it is closed."""

    async def aclose(self) -> None:
        """Unsubscribe. Messages that have reached this process are delivered before this returns."""
        ...


ShortText: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a queue at a broker; None for unknown values."""

    waiting: int | None = None
    """The number of messages that no consumer has started."""

    oldest: float | None = None
    """Seconds that the oldest waiting message has waited; 0 if there is none."""

    dead_letters: int | None = None


class StoredLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter at a broker."""

    id: str
    body: bytes

    stored_at: int
    """Milliseconds since the epoch, by the clock of the broker."""


class WorkerStats(msgspec.Struct, kw_only=True, rename="camel", omit_defaults=True):
    """Counters of a worker since it started. They contain no operations, callers or inputs."""

    name: ShortText = ""
    version: ShortText = ""

    started_at: int = 0
    """Milliseconds since the epoch."""

    concurrency: int = 0
    """The largest number of concurrent calls."""

    running: int = 0

    waiting: int = 0
    """Calls that wait for a slot in the worker."""

    finished: int = 0
    """Calls that ended, also with an error."""

    failed: int = 0
    """Calls that ended with an error."""

    refused: int = 0
    """Calls that were rejected before they started."""

    seconds: float = 0.0
    """The total run time of finished calls, in seconds."""

    queue_seconds: float = 0.0
    """The total time that calls waited at the broker and in the worker before they started, in seconds."""

    leaving: bool = False
    """Whether the worker has stopped accepting calls."""


class EventTarget(Protocol):
    """Transports events over one connection to a broker or to a peer, or within this process.

    The contract suite in `tests/pubsub/test_contract.py` tests every implementation.

    Attributes:
        trusted: Whether the `identity` inside events is used.
        identity: The identity of the peer, if a connection has exactly one and it is authenticated.
        max_bytes: The largest message in bytes.
        max_values: The largest number of JSON values in a message, in either direction.
        direct: Whether the connection is the peer itself, so that losing it loses every call made over it.
        reconnects: Whether a lost connection is restored.
        broadcasts_replies: Whether a reply without an address may be sent to all callers of a group: within one
            process, to one peer, or if replies are not private anyway. False if replies need the caller's mailbox.
        stores_requests: Whether requests wait at the broker until there is a worker, and a started request is never
            delivered again.
        values: Values at the broker that several processes share (`authority.store.Values`); None if not supported.
        chooses_worker: Whether a caller chooses the worker of each request; otherwise the broker does.
        is_connected: Whether the other end can be reached now.
    """

    trusted: bool
    max_bytes: int
    max_values: int
    identity: Identity | None = None
    direct: bool = False
    reconnects: bool = True
    broadcasts_replies: bool = False
    stores_requests: bool = False
    values: Any = None
    chooses_worker: bool = False

    @property
    def problem(self) -> str:
        """Why the broker does not store requests now; empty if it does."""
        return ""

    @property
    def is_connected(self) -> bool:
        """Whether the other end can be reached now."""
        ...

    def mailbox(self) -> str:
        """Return a new private address that cannot be guessed."""
        ...

    def topic(self, name: str) -> str:
        """Return the public address called `name`, on which workers send announcements to their callers.

        By default, and for `control`, there is one address for everything.
        """
        return self.mailbox()

    def control(self, name: str) -> str:
        """Return the address that all workers of the group `name` share. Messages to it arrive with their sender."""
        return self.mailbox()

    def is_worker(self, address: str) -> bool:
        """Return whether an address that a message claims is that of one worker; always true by default."""
        return True

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> Subscription:
        """Subscribe to mailboxes, topics and control addresses. Messages that are sent after this returns arrive.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        ...

    async def send(self, address: str, body: bytes) -> None:
        """Send a message to all listeners at `address`; without a listener it is dropped.

        Waits for space in the output buffer, not for delivery.

        Raises:
            TransportError: If the message was not, or may not have been, sent.
        """
        ...

    async def consume(self, queue: str, consumer: Consumer) -> Subscription:
        """Receive messages from `queue`, which are distributed among all consumers.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        ...

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float, worker: str = ""
    ) -> str:
        """Send a message to one of the consumers of `queue`, or to a specific one.

        Args:
            queue: The name of the queue.
            body: The message.
            key: Identifies the message; the broker may drop another message with the same key.
            reply_to: The mailbox for replies, and for the notification that there is no consumer.
            wait: Seconds to wait for a connection while there is none.
            worker: The address of the consumer; by default the target or the broker chooses one.

        Returns:
            A receipt for `is_waiting`, or an empty string.

        Raises:
            NoReceiverError: If the broker reports that it has no consumer.
            QueueFullError: If too many messages wait in the queue.
            NotSentError: If the message certainly was not delivered.
            TransportError: If it is unknown whether the message was delivered.
        """
        ...

    async def is_present(self, address: str) -> bool:
        """Return whether a process listens at `address`, even if it is busy; False for a malformed address.

        Raises:
            TransportError: If that cannot be known now.
        """
        return bool(await self.count_present(address))

    async def count_present(self, address: str) -> int | None:
        """Return the number of processes that listen at `address`; None, the default, if it is not counted.

        Raises:
            TransportError: If that cannot be known now.
        """
        return None

    async def is_waiting(self, queue: str, receipt: str) -> bool:
        """Return whether the broker still has a message that no consumer has started; False by default.

        Raises:
            TransportError: If that cannot be known now.
        """
        return False

    async def withdraw(self, queue: str, receipt: str) -> None:
        """Remove a message whose sender does not wait any more, if no consumer has started it; by default ignored."""
        return

    async def dead_letter(self, queue: str, body: bytes) -> None:
        """Store a message that crashed every worker which received it, for an operator; by default it is dropped."""
        return

    # ---------------------------------------------------------------------------------------- administration

    async def advertise(self, queue: str, stats: Callable[[], WorkerStats]) -> Subscription | None:
        """Register a consumer in the service discovery of the broker; return None, the default, if there is none.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        return None

    async def state(self, queue: str) -> QueueState:
        """Return the state of a queue; unknown by default.

        Raises:
            TransportError: If that cannot be known now.
        """
        return QueueState()

    async def letters(self, queue: str, limit: int, letter: str = "") -> list[StoredLetter]:
        """Return the newest dead letters, or the one with this id.

        Raises:
            TransportError: If the broker cannot be reached, or, by default, because it does not store dead letters.
        """
        raise TransportError("this broker does not store dead letters")

    async def remove(self, queue: str, letter: str) -> bool:
        """Remove a dead letter; return False if it does not exist.

        Raises:
            TransportError: If the broker cannot be reached.
        """
        return False


def usable(target: EventTarget) -> EventTarget:
    """Return `target` if it is an event target.

    Raises:
        TypeError: If it is not an event target, or a connector that was not opened with `async with`.
    """
    if hasattr(target, "mailbox"):
        return target
    if hasattr(target, "__aenter__"):
        raise TypeError("the target is not open: async with connect_...(...) as target")
    raise TypeError(
        f"{target!r} is not an event target: use connect_redis, connect_nats or the like"
    )


def enforce_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Raise `NotSentError` unless this is the running event loop."""
    if asyncio.get_running_loop() is not loop:
        raise NotSentError("the connection belongs to another event loop: connect on this one")


async def wait_until(connected: asyncio.Event, seconds: float | None, failure: str) -> None:
    """Wait for a connection that is being restored; raise `NotSentError(failure)` if that takes too long."""
    try:
        async with asyncio.timeout(seconds):
            await connected.wait()
    except TimeoutError:
        raise NotSentError(failure) from None


SEND_SECONDS = 3.0
"""Seconds that a reply waits for a connection that is being restored."""


class BrokerTarget(EventTarget):
    """A client of a broker, which belongs to one event loop.

    Args:
        config: The settings of the connection.
        broker: The name of the broker, for messages.

    Attributes:
        client: The name of this client.
        receivers: Notified when the connection is lost and restored.
        connected: Set while the broker can be reached.
        is_closed: Whether the connection was closed.
    """

    def __init__(self, config: BrokerConfig, broker: str) -> None:
        enforce_client(config.client)
        self.client = config.client
        self.trusted, self.max_values = config.trusted, config.max_values
        self.receivers: list[Receiver] = []
        self.connected = asyncio.Event()
        self.is_closed = False
        self._broker = broker
        self._losses = LogThrottle()
        self._loop = asyncio.get_running_loop()

    @property
    def is_connected(self) -> bool:
        """Whether the broker can be reached now."""
        return self.connected.is_set()

    def enforce_usable(self) -> None:
        """Raise an error unless the connection can be used on the running event loop.

        Raises:
            NotSentError: If the connection is closed, or belongs to another loop.
        """
        if self.is_closed:
            raise NotSentError("the connection was closed: connect again")
        enforce_loop(self._loop)

    async def ready(self, wait: float = SEND_SECONDS) -> None:
        """Wait until the connection is restored; raise `NotSentError` if that takes too long."""
        if not self.connected.is_set():
            self.enforce_usable()
            await wait_until(self.connected, wait, f"{self._broker} cannot be reached")

    def notify(self, receiver: Receiver, undo: AsyncExitStack) -> None:
        """Report changes of the connection to `receiver` until `undo` is closed."""
        self.receivers.append(receiver)
        undo.callback(self.receivers.remove, receiver)

    def lost(self, reason: str) -> None:
        """Report that the connection was lost."""
        logger.log(self._losses.level(), reason)
        for receiver in tuple(self.receivers):
            receiver.lost(reason)

    def restored(self) -> None:
        """Report that the connection was restored."""
        for receiver in tuple(self.receivers):
            receiver.restored()
