"""An event target within one process and one event loop. Messages are JSON texts, as on every other target."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from secrets import token_hex

from operations.base.errors import NoReceiverError, NotSentError
from operations.base.json.values import MAX_REQUEST_VALUES
from operations.pubsub.base import Consumer, Delivery, EventTarget, Receiver
from operations.pubsub.delivery import BoundedSet

_MAX_SEEN = 40_000
"""The number of stored keys, which prevent that a request is delivered twice."""


class MemoryTarget(EventTarget):
    """Connects callers and workers of one process. Trusted by default, because only code in this process can send.

    Args:
        trusted: Use the `identity` inside events.
        max_bytes: The largest event.
        max_values: How many JSON values an event may hold.
    """

    def __init__(
        self,
        *,
        trusted: bool = True,
        max_bytes: int = 64 * 1024 * 1024,
        max_values: int = MAX_REQUEST_VALUES,
    ) -> None:
        self.trusted = trusted
        self.max_bytes = max_bytes
        self.max_values = max_values
        self.broadcasts_replies = True
        self._listeners: dict[str, list[Receiver]] = {}
        self._consumers: dict[str, list[Receiver]] = {}
        self._seen = BoundedSet(_MAX_SEEN)
        self._turn = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_connected(self) -> bool:
        """Always true: there is no connection."""
        return True

    def mailbox(self) -> str:
        """Return a new private address."""
        return f"box.{token_hex(16)}"

    def topic(self, name: str) -> str:
        """Return the public address called `name`."""
        return f"topic.{name}"

    def control(self, name: str) -> str:
        """Return the address that all workers of the group `name` share."""
        return f"control.{name}"

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> AsyncExitStack:
        """Listen at `addresses`."""
        return self._register(self._listeners, addresses, receiver)

    async def consume(self, queue: str, consumer: Consumer) -> AsyncExitStack:
        """Receive requests, which are distributed among the consumers one by one; `capacity` is not used."""
        return self._register(self._consumers, (queue,), consumer)

    def _register(
        self, table: dict[str, list[Receiver]], names: Sequence[str], receiver: Receiver
    ) -> AsyncExitStack:
        """Add a receiver. Lists are replaced instead of modified, because a list may be in use."""
        self._enter_loop()

        def remove(name: str) -> None:
            table[name] = [other for other in table[name] if other is not receiver]
            if not table[name]:
                del table[name]

        undo = AsyncExitStack()
        for name in names:
            table[name] = [*table.get(name, ()), receiver]
            undo.callback(remove, name)
        return undo

    async def send(self, address: str, body: bytes) -> None:
        """Deliver `body` to the listeners."""
        for receiver in self._listeners.get(address, ()):
            receiver.receive(Delivery(body))

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float, worker: str = ""
    ) -> str:
        """Deliver `body` to one consumer; drop it if its key was already used.

        Raises:
            NoReceiverError: If `queue` has no consumer.
            NotSentError: If the target belongs to another event loop.
        """
        if self._loop is not asyncio.get_running_loop():
            self._enter_loop()
        if worker:
            await self.send(worker, body)
            return ""
        consumers = self._consumers.get(queue)
        if not consumers:
            raise NoReceiverError(
                f"no worker serves the group {queue!r}; start a worker, or check the group"
            )
        if self._seen.add(key):
            self._turn += 1
            consumers[self._turn % len(consumers)].receive(Delivery(body, reply_to))
        return ""

    async def count_present(self, address: str) -> int | None:
        """Return the number of listeners at `address`."""
        return len(self._listeners.get(address, ()))

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
        elif self._loop is not loop:
            raise NotSentError("a MemoryTarget belongs to one event loop, and this is another one")
