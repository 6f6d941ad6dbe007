"""Events within one process and one event loop, as JSON texts like on every other target."""

import asyncio
from collections.abc import Callable, Sequence
from secrets import token_hex

from operations._json import MAX_REQUEST_VALUES
from operations._text import enforce_lists
from operations.access import Identity
from operations.errors import NoReceiverError, NotSentError
from operations.pubsub.base import BoundedSet, Receiver

_MAX_SEEN = 40_000
"""Keys that are remembered, so that nothing is put twice."""


class MemoryTarget:
    """Callers and workers of one process. Trusted: whoever can send is our own code.

    Args:
        trusted: Believe the `identity` inside events.
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
        self.identity: Identity | None = None
        self.max_bytes = max_bytes
        self.max_values = max_values
        self.direct = False
        self.broadcasts_replies = True
        self.durable = False
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

    def control(self, name: str) -> str:
        """The address of the workers called `name`."""
        return f"control.{name}"

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
        """Deliver `body` to the listeners before this returns."""
        for receiver in self._listeners.get(address, ()):
            receiver.receive(body, "")

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float
    ) -> str:
        """Deliver `body` to one consumer before this returns; a key that was seen before is dropped.

        Raises:
            NoReceiverError: If nobody takes from `queue`.
            NotSentError: If the target is used from another event loop than the one it lives on.
        """
        if self._loop is not asyncio.get_running_loop():
            self._enter_loop()
        takers = self._takers.get(queue)
        if not takers:
            raise NoReceiverError(f"nobody takes from {queue!r}")
        if self._seen.add(key):
            self._turn += 1
            takers[self._turn % len(takers)].receive(body, reply_to)
        return ""

    async def is_present(self, address: str) -> bool:
        """Whether somebody listens at `address`."""
        return address in self._listeners

    async def count_present(self, address: str) -> int | None:
        """Return how many listen at `address`."""
        return len(self._listeners.get(address, ()))

    async def is_waiting(self, queue: str, receipt: str) -> bool:
        """Return False: no message is kept."""
        return False

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
