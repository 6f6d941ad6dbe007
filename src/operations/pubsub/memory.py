"""Events within one process and one event loop: nothing to install, nothing to lose.

Nothing is written either: events are handed over as they are. What they carry is JSON all the same, and nobody else's
to change, so that what works here works over a broker.
"""

import asyncio
from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any

from operations._json import MAX_REQUEST_VALUES
from operations._text import enforce_lists
from operations.access import Identity
from operations.errors import NobodyThereError, NotSentError
from operations.pubsub.base import Local, Receiver
from operations.pubsub.bounded import BoundedSet

_MAX_SEEN = 40_000
"""Keys that are remembered, so that nothing is put twice."""


class MemoryTarget:
    """Callers and workers of one process. Trusted: whoever can send is our own code.

    Args:
        trusted: Believe the `identity` inside events.
        max_bytes: The largest input or result, as JSON.
        max_values: How many JSON values an input or a result may hold.
        as_text: Write events as JSON texts, as every other target does, for those who want to look at them.
    """

    def __init__(
        self,
        *,
        trusted: bool = True,
        max_bytes: int = 64 * 1024 * 1024,
        max_values: int = MAX_REQUEST_VALUES,
        as_text: bool = False,
    ) -> None:
        self.trusted = trusted
        self.identity: Identity | None = None
        self.max_bytes = max_bytes
        self.max_values = max_values
        self.direct = False
        self.broadcasts_replies = True
        self.local: Local | None = None if as_text else self
        self.aside: list[bytes] = []
        self._listeners: dict[str, list[Receiver]] = {}
        self._takers: dict[str, list[Receiver]] = {}
        self._seen = BoundedSet(_MAX_SEEN)
        self._turn = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_connected(self) -> bool:
        """Always: there is nothing in between."""
        return True

    def mailbox(self) -> str:
        """A new private address."""
        return f"box.{token_hex(16)}"

    def topic(self, name: str) -> str:
        """The public address called `name`."""
        return f"topic.{name}"

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> "_Registration":
        """Listen at `addresses`."""
        enforce_lists(addresses=addresses)
        self._enter_loop()
        return _Registration(self._listeners, addresses, receiver)

    async def consume(
        self,
        queue: str,
        receiver: Receiver,
        capacity: Callable[[], int],
        backlog: int | None = None,
    ) -> "_Registration":
        """Take turns with everyone else who takes from `queue`. Nothing is batched, so `capacity` is not asked."""
        self._enter_loop()
        return _Registration(self._takers, (queue,), receiver)

    async def send(self, address: str, body: bytes) -> None:
        """Hand `body` to the listeners before this returns."""
        self.publish_object(address, body)

    def publish_object(self, address: str, message: Any) -> None:
        """Hand `message` to the listeners."""
        for receiver in self._listeners.get(address, ()):
            receiver.receive(message, "")

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float
    ) -> None:
        """Hand `body` to one taker before this returns; a key that was seen before is dropped.

        Raises:
            NobodyThereError: If nobody takes from `queue`.
            NotSentError: If the target is used from another event loop than the one it lives on.
        """
        if self._loop is not asyncio.get_running_loop():
            self._enter_loop()
        if queue not in self._takers or self._seen.add(key):
            self.enqueue_object(queue, body, reply_to)

    def enqueue_object(self, queue: str, message: Any, reply_to: str) -> None:
        """Hand `message` to one taker."""
        takers = self._takers.get(queue)
        if not takers:
            raise NobodyThereError(f"nobody takes from {queue!r}")
        self._turn += 1
        takers[self._turn % len(takers)].receive(message, reply_to)

    async def is_present(self, address: str) -> bool:
        """Whether somebody listens at `address`."""
        return address in self._listeners

    async def dead_letter(self, queue: str, body: bytes) -> None:
        """Keep the message in `aside`, the last hundred of them."""
        self.aside.append(body)
        del self.aside[:-100]

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
        elif self._loop is not loop:
            raise NotSentError("a MemoryTarget belongs to one event loop, and this is another one")


class _Registration:
    """One receiver at some names, until closed.

    The lists are replaced and never altered: somebody may be going through one.
    """

    def __init__(
        self, table: dict[str, list[Receiver]], names: Sequence[str], receiver: Receiver
    ) -> None:
        self._table = table
        self._names = names
        self._receiver: Receiver | None = receiver
        for name in names:
            table[name] = [*table.get(name, ()), receiver]

    async def aclose(self) -> None:
        """Remove the receiver; closing twice is harmless."""
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        for name in self._names:
            remaining = [other for other in self._table[name] if other is not receiver]
            if remaining:
                self._table[name] = remaining
            else:
                del self._table[name]
