"""Events over NATS.

queue     a subject of each client. Workers subscribe to those of all clients and share a queue group; the server
          answers at once when there are none. Each consumer has subjects of its own, too: a caller that knows them
          takes turns
mailbox   a subject of its own; the token after it names the request a message is about
topic     a subject
control   a subject of each client
presence  a ping to the subject: the server answers if there is no listener

Durable queues are in `queues`. They have subjects of their own, and their workers consume the plain ones, too: workers
can be switched to durable queues first, and callers then, without a request that is lost or runs twice.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import lru_cache, partial
from secrets import token_hex
from typing import Any

from nats.errors import Error, MaxPayloadError, NoRespondersError

from operations._text import enforce_lists
from operations.errors import NotSentError, TooLargeError, TransportError
from operations.pubsub.base import (
    NOT_PERMITTED,
    NOT_PRIVATE,
    Consumer,
    Delivery,
    EventTarget,
    LogThrottle,
    LoopAffinity,
    Receiver,
    Subscription,
)
from operations.pubsub.config import ANY_CLIENT, NatsConfig, enforce_address, enforce_client
from operations.pubsub.nats.admin import NatsAdmin, NatsValues
from operations.pubsub.nats.client import ReconnectingClient, Take
from operations.pubsub.nats.queues import Consumers, DurableQueues
from operations.pubsub.signing import signed
from operations.types import options_of

logger = logging.getLogger("operations")

_NATS_ERRORS = (Error, OSError, EOFError)

_SUBJECT = re.compile(r"[\w\-$=]{1,128}(\.[\w\-$=]{1,128}){0,15}", re.ASCII)
"""An address without wild cards, much shorter than the longest line that a server reads."""

_NAME = re.compile(rb"[0-9a-f]{32}")
"""The name of a consumer."""

_REFUSED = re.compile(r'permissions violation for \w+ to "([^"]+)"')
"""The server's error about a subject that this client may not use; the library lowers its case."""

_PING_SECONDS = 0.3
"""How long a present but busy listener may take before it counts as present anyway."""

_HEADER_BYTES = 256
"""The room for the headers of a request that JetStream stores."""

_SEND_WAIT = 3.0
"""Seconds an answer waits for a connection that is being restored."""

_MAX_KNOWN = 4096
"""Addresses whose subjects are remembered: a worker answers the same callers again and again."""


class NatsTarget(EventTarget):
    """One client of a NATS server. Made by `connect_nats`."""

    def __init__(
        self,
        *,
        prefix: str,
        client: str,
        trusted: bool,
        durable: bool,
        replicas: int,
        max_values: int,
    ) -> None:
        self._affinity = LoopAffinity()
        self.trusted = trusted
        self.max_bytes = 1024 * 1024
        self.max_values = max_values
        self.durable, self.names_consumer = durable, not durable
        self._prefix = prefix
        enforce_client(client)
        self._client = client
        self._box_space = f"{prefix}.box."
        self._control_space = f"{prefix}.control."
        self._subject = lru_cache(_MAX_KNOWN)(self._look_up)
        self._boxes = _subject_of(f"{prefix}.box", client)
        self._anyone = f"{prefix}.box.{ANY_CLIENT}."
        self._nats = ReconnectingClient()
        self._durable: DurableQueues | None = None
        self._replicas = replicas
        self._receivers: list[Receiver] = []
        self._consumers: dict[str, Consumers] = {}
        self._inboxes: dict[str, str] = {}
        self._draining: set[asyncio.Future[None]] = set()
        self._violations = LogThrottle()
        self._arriving: dict[str, asyncio.Future[str]] = {}
        self._connected = asyncio.Event()
        self.admin = self._admin = NatsAdmin(self._nats, prefix, self._all_of, self._refusal)
        self.values = NatsValues(self._nats, prefix, replicas)

    async def open(self, url: str, options: dict[str, Any], connect_timeout: float) -> None:
        """Connect.

        Raises:
            TransportError: If the address cannot be read, NATS cannot be reached, or refuses us.
        """
        servers = [_with_scheme(server.strip()) for server in url.split(",")]
        for server in servers:
            enforce_address(server, ("nats", "tls", "ws", "wss"))
        try:
            async with asyncio.timeout(connect_timeout):
                await self._nats.connect(
                    servers,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_lost,
                    reconnected_cb=self._on_restored,
                    reconnect_to_server_handler=self._nats.next_server,
                    max_reconnect_attempts=-1,
                    connect_timeout=2,
                    inbox_prefix=self._boxes,
                    # Ours are looked at where they come from.
                    skip_subject_validation=True,
                    **options,
                )
        except (TransportError, *_NATS_ERRORS, TimeoutError) as error:
            # A timeout has no text; the failure of the last attempt has.
            reason = str(error) or str(self._nats.last_error or "") or "no answer"
            hosts = ", ".join(f"{each.hostname}:{each.port}" for each in self._nats.servers)
            # If the address could not be parsed, nats-py cannot close the client either.
            with suppress(*_NATS_ERRORS, AssertionError):
                await self._nats.close()
            where = f" at {hosts}" if hosts else ""
            raise TransportError(f"NATS cannot be reached{where}: {reason}") from error
        self._note_limit()
        self._connected.set()
        if self.durable:
            subjects_of = partial(self._all_of, kind="durable")
            self._durable = DurableQueues(
                self._nats, self._prefix, subjects_of, self._replicas, connect_timeout
            )
            self._admin.durable = self._durable
            try:
                await self._durable.open()
            except TransportError:
                await self.aclose()
                raise

    async def aclose(self) -> None:
        """Flush and disconnect."""
        self._affinity.is_closed = True
        await self._admin.aclose()
        if self._durable is not None:
            self._durable.close()
        with suppress(*_NATS_ERRORS):
            if self._nats.is_connected:
                await self._nats.flush(timeout=2)
        with suppress(*_NATS_ERRORS):
            await self._nats.close()
        for task in tuple(self._draining):
            task.cancel()

    # ---------------------------------------------------------------------------------------- connection

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached now."""
        return self._nats.is_connected

    async def _on_error(self, error: Exception) -> None:
        refused = _REFUSED.search(str(error))
        if refused is None:
            logger.debug("NATS: %s", error)
        elif (arrival := self._arriving.get(refused[1])) is None:
            level = self._violations.level()
            logger.log(level, "NATS reported a %s: %s", refused[0], NOT_PERMITTED)
        elif not arrival.done():
            arrival.set_result(refused[0])

    async def _on_lost(self) -> None:
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
        """Note the largest message that the server accepts: it counts headers, too."""
        self.max_bytes = self._nats.max_payload - (_HEADER_BYTES if self.durable else 0)

    async def _ready(self, wait: float) -> None:
        if self._nats.is_connected:
            return
        try:
            async with asyncio.timeout(wait):
                await self._connected.wait()
        except TimeoutError:
            raise NotSentError("NATS cannot be reached") from None

    async def check_privacy(self) -> None:
        """Make sure that the server keeps this client from the mailboxes and requests of others.

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
                if not await self._refusal([subject], attempt):
                    raise TransportError(NOT_PRIVATE)

    # ---------------------------------------------------------------------------------------- addresses

    def mailbox(self) -> str:
        """A new private address, under this client's name."""
        return f"{self._boxes}.{token_hex(16)}"

    def topic(self, name: str) -> str:
        """The public address called `name`.

        Raises:
            TransportError: If it cannot be part of a subject.
        """
        return _subject_of(f"{self._prefix}.topic", name)

    def control(self, name: str) -> str:
        """The address of the workers called `name`. Each client sends to a subject of its own.

        Raises:
            TransportError: If it cannot be part of a subject.
        """
        return _subject_of(f"{self._prefix}.control", name)

    def _queue(self, name: str, kind: str = "queue") -> str:
        return _subject_of(f"{self._prefix}.{kind}", name)

    def _all_of(self, queue: str, kind: str = "queue") -> str:
        """Return the subjects of a queue for all clients."""
        return f"{self._queue(queue, kind)}.*"

    def _sender_of(self, subject: str) -> str:
        """Return the start of every mailbox of the client that a subject belongs to, which is its last token."""
        return f"{self._box_space}{subject.rpartition('.')[2]}."

    def _is_mailbox(self, address: str) -> bool:
        return address.startswith(self._box_space)

    def _look_up(self, address: str) -> str:
        """Return the subject for messages to `address`. The address may come from an attacker.

        Raises:
            NotSentError: If it is neither ours nor an inbox of a plain NATS client, or no subject at all: the
                server closes the connection of a client that publishes to an invalid subject.
        """
        if _SUBJECT.fullmatch(address) is not None:
            if self._is_mailbox(address):
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
        subjects = {self._heard_at(address): address for address in addresses}

        def take(body: bytes, _: str, __: str) -> None:
            receiver.receive(Delivery(body))

        def take_control(body: bytes, _: str, subject: str) -> None:
            receiver.receive(Delivery(body, sender=self._sender_of(subject)))

        async with AsyncExitStack() as undo:

            async def subscribe() -> None:
                for subject, address in subjects.items():
                    is_control = address.startswith(self._control_space)
                    taking = take_control if is_control else take
                    heed = self._heed(address, receiver)
                    await self._subscribe(subject, taking, undo, heed=heed)

            await self._arrive(subjects, subscribe)
            self._receivers.append(receiver)
            undo.callback(self._receivers.remove, receiver)
            return undo.pop_all()

    def _heard_at(self, address: str) -> str:
        """Return the subjects at which messages to an address arrive."""
        if self._is_mailbox(address):
            return f"{address}.>"
        return f"{address}.*" if address.startswith(self._control_space) else address

    def _heed(self, address: str, receiver: Receiver) -> Callable[[Any], Awaitable[None]]:
        """Return the handler of empty messages to a mailbox: pings, and reports of undelivered requests."""
        is_control = address.startswith(self._control_space)

        async def heed(message: Any) -> None:
            if message.reply:
                # A ping; clients may send it only on their own behalf.
                if not is_control or message.reply.startswith(self._sender_of(message.subject)):
                    await self._nats.publish(message.reply)
            elif message.headers and message.headers.get("Status") == "503":
                key, _, consumer = message.subject[len(address) + 1 :].partition("=")
                if consumer:
                    for consumers in self._consumers.values():
                        consumers.gone(consumer)
                receiver.undelivered(key, bool(consumer))

        return heed

    async def send(self, address: str, body: bytes) -> None:
        """Publish to a mailbox, topic or control address of this prefix, or to the inbox of a plain NATS client."""
        subject = self._subject(address)
        if not self._nats.is_connected:
            await self._ready(_SEND_WAIT)
        await self._publish(subject, body, "")

    async def _publish(self, subject: str, body: bytes, reply: str) -> None:
        try:
            await self._nats.publish_now(subject, body, reply)
        except MaxPayloadError as error:
            raise TooLargeError(f"{len(body)} bytes are more than {self.max_bytes}") from error
        except _NATS_ERRORS as error:
            raise TransportError(f"NATS: {error}") from error

    async def is_present(self, address: str) -> bool:
        """Return whether a process listens at `address`. If none does, the server answers; a busy one may not."""
        await self._ready(0)
        try:
            await self._nats.request(self._subject(address), b"", timeout=_PING_SECONDS)
        except NoRespondersError:
            return False
        except TimeoutError:
            return True
        except _NATS_ERRORS as error:
            raise TransportError(f"NATS: {error}") from error
        return True

    # ---------------------------------------------------------------------------------------- queues

    async def consume(self, queue: str, consumer: Consumer) -> Subscription:
        """Take from `queue`. The server distributes plain requests one by one; `capacity` is for durable ones."""
        self._affinity.enforce()

        def pick(body: bytes, reply: str, subject: str) -> None:
            sender = self._sender_of(subject)
            if self._is_mailbox(reply):
                # The last token names the request.
                reply = reply.rpartition(".")[0]
            elif sender == self._anyone and reply.startswith("_INBOX."):
                # A plain client, which has no mailboxes.
                sender = "_INBOX."
            consumer.receive(Delivery(body, reply, sender=sender))

        name = consumer.name or token_hex(16)
        subject, roll_call = self._all_of(queue), self._all_of(queue, "who")
        own = f"{self._prefix}.to.{name}.*"

        def present(_: bytes, inbox: str, subject: str) -> None:
            if inbox.startswith(self._sender_of(subject)) and _SUBJECT.fullmatch(inbox):
                answering = asyncio.ensure_future(self._answer(inbox, name))
                self._draining.add(answering)
                answering.add_done_callback(self._draining.discard)

        async with AsyncExitStack() as undo:

            async def subscribe() -> None:
                await self._subscribe(subject, pick, undo, queue="workers")
                await self._subscribe(own, pick, undo)
                await self._subscribe(roll_call, present, undo)

            await self._arrive([subject, own, roll_call], subscribe)
            if self._durable is not None:
                await self._admin.keep_letters()
                taking = await self._durable.consume(queue, consumer, self._sender_of)
                undo.push_async_callback(taking.aclose)
            return undo.pop_all()

    async def _answer(self, inbox: str, name: str) -> None:
        """Send the name of a consumer to a caller."""
        with suppress(TransportError):
            await self._publish(inbox, name.encode(), "")

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float
    ) -> str:
        """Publish to the queue's subject. If it has no subscriber, the server sends an empty message to `reply_to`."""
        if not self._nats.is_connected:
            await self._ready(wait)
        if self._durable is not None:
            subject = f"{self._queue(queue, 'durable')}.{self._client}"
            # With the secret part of the mailbox: ids of messages are shared by all clients of a stream.
            key = f"{key}.{reply_to.rpartition('.')[2]}"
            return await self._durable.enqueue(subject, body, key)
        consumers = self._consumers.get(queue)
        if consumers is None:
            consumers = self._consumers[queue] = Consumers(f"{self._queue(queue)}.{self._client}")
        if consumers.is_due():
            await self._ask_for(queue, consumers)
        subject, consumer = consumers.subject, consumers.next()
        if consumer:
            subject, key = f"{self._prefix}.to.{consumer}.{self._client}", f"{key}={consumer}"
        await self._publish(subject, body, f"{reply_to}.{key}" if reply_to else "")
        return f"{self._control_space}{consumer}" if consumer else ""

    async def _ask_for(self, queue: str, consumers: Consumers) -> None:
        """Ask the consumers of a queue for their names, which arrive later."""
        inbox = self._inboxes.get(queue)
        try:
            if inbox is None:
                inbox = self._inboxes[queue] = self.mailbox()

                async def on_reply(message: Any) -> None:
                    if _NAME.fullmatch(message.data):
                        consumers.on_reply(message.data.decode())

                await self._nats.subscribe(inbox, cb=on_reply)  # pyright: ignore[reportUnknownMemberType]
            await self._nats.publish(f"{self._queue(queue, 'who')}.{self._client}", b"1", inbox)
        except _NATS_ERRORS as error:
            logger.debug("the consumers of %s cannot be asked: %s", queue, error)

    async def is_waiting(self, queue: str, receipt: str) -> bool:
        """Return whether a durable queue still has a request."""
        return self._durable is not None and await self._durable.is_waiting(queue, receipt)

    async def dead_letter(self, queue: str, body: bytes) -> None:
        """Publish a poisonous request to the subject `aside` of its group and client."""
        await self._publish(f"{self._queue(queue, 'aside')}.{self._client}", body, "")

    # ---------------------------------------------------------------------------------------- subscribing

    async def _subscribe(
        self,
        subject: str,
        take: Take,
        undo: AsyncExitStack,
        *,
        queue: str = "",
        heed: Callable[[Any], Awaitable[None]] | None = None,
    ) -> None:
        """Subscribe. `take` gets the messages; `heed`, if given, those without a body."""

        async def deliver(message: Any) -> None:
            if message.data or heed is None:
                take(message.data, message.reply, message.subject)
            else:
                await heed(message)

        try:
            subscription = await self._nats.subscribe(subject, queue=queue, cb=deliver)  # pyright: ignore[reportUnknownMemberType]
        except _NATS_ERRORS as error:
            raise TransportError(f"NATS: {error}") from error
        ended = self._nats.take_at_once(subscription, take)
        undo.push_async_callback(self._unsubscribe, subscription, ended)

    async def _unsubscribe(self, subscription: Any, ended: Callable[[], object]) -> None:
        """Unsubscribe, and deliver the messages that have arrived."""
        # Never cancelled: when the answer to a cancelled flush comes, the client gives up its connection.
        draining = asyncio.ensure_future(self._drained(subscription, ended))
        self._draining.add(draining)
        draining.add_done_callback(self._draining.discard)
        await asyncio.wait({draining}, timeout=2)

    async def _drained(self, subscription: Any, ended: Callable[[], object]) -> None:
        with suppress(*_NATS_ERRORS):
            await subscription.drain()
        ended()

    async def _arrive(self, subjects: Iterable[str], act: Callable[[], Awaitable[Any]]) -> None:
        """Do something to `subjects` and wait until the server has seen it.

        Raises:
            TransportError: If it does not answer, or does not allow it.
        """
        refusal = await self._refusal(subjects, act)
        if refusal:
            raise TransportError(f"NATS reported a {refusal}: {NOT_PERMITTED}")

    async def _refusal(self, subjects: Iterable[str], act: Callable[[], Awaitable[Any]]) -> str:
        """Return the server's error about doing something to `subjects`; empty once it is done.

        A flush is not enough: its PING overtakes earlier messages. A message does not.
        """
        mark = f"{self._boxes}.{token_hex(16)}"
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # In the words of the server, and as the library reads them.
        awaited = [subject.lower() for subject in (mark, *subjects)]
        self._arriving.update(dict.fromkeys(awaited, outcome))

        async def arrived(_: Any) -> None:
            if not outcome.done():
                outcome.set_result("")

        try:
            await act()
            echo = await self._nats.subscribe(mark, cb=arrived)  # pyright: ignore[reportUnknownMemberType]
            try:
                await self._nats.publish(mark, b"1")
                async with asyncio.timeout(5):
                    refusal = await outcome
            finally:
                await echo.unsubscribe()
        except TimeoutError:
            raise TransportError("NATS does not answer") from None
        except _NATS_ERRORS as error:
            raise TransportError(f"NATS: {error}") from error
        finally:
            for subject in awaited:
                self._arriving.pop(subject, None)
        return refusal


def _subject_of(space: str, name: str) -> str:
    """Return the subject of a name.

    Raises:
        TransportError: If there can be none: the server would close the connection, or take it for a pattern.
    """
    subject = f"{space}.{name}"
    if _SUBJECT.fullmatch(subject) is None:
        raise TransportError(
            f"{subject!r} is no NATS subject: prefix, group and client are words of A-Z, a-z, 0-9, '_', '-', '$' "
            "and '=', with dots between them"
        )
    return subject


def _with_scheme(server: str) -> str:
    """A host alone, as the library takes it too."""
    return server if "://" in server else f"nats://{server}"


@options_of(NatsConfig)
@asynccontextmanager
async def connect_nats(config: NatsConfig) -> AsyncGenerator[EventTarget]:
    """Connect to NATS for the length of an `async with` block; lost connections are restored.

    Call it as `connect_nats(url, **options)`, with the fields of `NatsConfig`.

    Raises:
        TransportError: If the address cannot be read, NATS cannot be reached now, is not private although it should
            be, or cannot have subjects with this prefix or client.
        ValueError: If the secret is too short to be one.
    """
    target = NatsTarget(
        prefix=config.prefix,
        client=config.client,
        trusted=config.trusted,
        durable=config.durable,
        replicas=config.replicas,
        max_values=config.max_values,
    )
    signing = signed(target, config.secret)
    await target.open(config.url, config.login, config.connect_timeout)
    try:
        if config.private:
            await target.check_privacy()
        yield signing
    finally:
        await target.aclose()
