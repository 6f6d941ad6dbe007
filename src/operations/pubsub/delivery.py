"""Deliver messages once, with their age, in batches that a worker can start; store recent ids and last replies."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from time import monotonic

from operations.base.errors import TooLargeError
from operations.base.logs import LogThrottle
from operations.pubsub.base import Delivery, Receiver

logger = logging.getLogger("operations")

_broken = LogThrottle()


def enforce_size(body: bytes, max_bytes: int) -> None:
    """Raise `TooLargeError` if a message is too large."""
    if len(body) > max_bytes:
        raise TooLargeError(f"{len(body)} bytes are more than {max_bytes}")


def deliver(receiver: Receiver, delivery: Delivery) -> None:
    """Pass a message to its receiver. A failure is logged, so that the next messages arrive."""
    try:
        receiver.receive(delivery)
    except Exception:
        logger.log(_broken.level(), "a message could not be processed", exc_info=True)
        if delivery.claim is not None:
            delivery.claim.remove()


_MAX_BATCH = 64
"""The largest number of requests in one read of a worker."""

_PROMPT = 0.005
"""If a whole batch starts within this many seconds, the next batch is larger."""

_BLOCKED = 0.02
"""If it takes longer than this many seconds to start a batch, and `_CLAIM` for each request that is removed from its
queue first, a handler counts as blocking."""

_CLAIM = 0.002
"""The longest time in seconds to remove a single request from its queue."""

_FULL_POLLS = (0.0, 0.0, 0.0, 0.001, 0.002)
"""Pauses between checks for a free slot; the longest is `_FULL_POLL`."""

_FULL_POLL = 0.005

IDLE = 0.02
"""Seconds without a request after which a worker counts as idle."""


class BatchSize:
    """Decides how many requests a worker reads from the broker at once.

    A request that was read cannot go to another worker, so a worker reads only requests that it can start at once. The
    size starts at 1, doubles while whole batches start promptly, and returns to 1 when the worker was idle or a handler
    blocked the event loop.

    Args:
        capacity: Returns the number of requests that can start now.
    """

    def __init__(self, capacity: Callable[[], int]) -> None:
        self._capacity = capacity
        self._size = 1
        self._loop = asyncio.get_running_loop()
        self.is_full = False
        """Whether the worker has no free slot, so that it is not reading."""
        self._line = asyncio.Lock()
        """Held while a single message is started. The lock is fair, so messages start in order."""
        self._claiming = 0
        self._claimed = asyncio.Event()
        self._first_claimed_at = float("inf")

    @property
    def is_hot(self) -> bool:
        """Whether requests have arrived recently."""
        return self._size > 1

    async def room(self) -> int:
        """Return the size of the next batch; wait while the worker is full."""
        self.is_full = True
        pauses = iter(_FULL_POLLS)
        while (free := self._capacity()) <= 0:  # noqa: ASYNC110 - an event per call would cost every call more
            await asyncio.sleep(next(pauses, _FULL_POLL))
        self.is_full = False
        return min(free, self._size)

    def reset(self) -> None:
        """Reset the size, because no request has arrived for some time."""
        self._size = 1

    @asynccontextmanager
    async def claim(self, *, alone: bool) -> AsyncGenerator[None]:
        """Return a context in which a request is removed from its queue; the request starts when the context ends.

        Args:
            alone: Wait until the earlier requests of the batch have started.
        """
        self._claiming += 1
        try:
            async with self._line if alone else nullcontext():
                yield
        finally:
            self._claiming -= 1
            self._first_claimed_at = min(self._first_claimed_at, self._loop.time())
            if not self._claiming:
                self._claimed.set()

    async def begun(self, count: int, since: float) -> None:
        """Wait until a batch of `count` requests that was delivered after `since` has started; adapt the size.

        The next read must not be sent earlier, because a handler that blocks the loop would delay its requests.
        """
        # A request starts in the iteration of the event loop after its delivery, unless the broker must confirm first
        # that it was removed from the queue.
        for _ in range(2):
            await asyncio.sleep(0)
        spent = self._loop.time() - since
        tolerated = _BLOCKED
        if self._claiming:
            self._first_claimed_at = float("inf")
            self._claimed.clear()
            await self._claimed.wait()
            # The first round trip does not count, because the worker is free in that time.
            spent += self._loop.time() - self._first_claimed_at
            tolerated += count * _CLAIM
        if spent > tolerated:
            self._size = 1
        elif count >= self._size and spent < _PROMPT:
            self._size = min(2 * self._size, _MAX_BATCH)


_SHORT_AGE = 0.01
"""Waiting times at a broker up to this many seconds are reported as 0."""

_SUSPECT = 0.5
"""Before a message counts as older than this many seconds, or as sent later than now by as many, the clocks are
compared again, unless that was done within this time, or within `_SHARE` times the time that it takes."""

_SHARE = 10

_COMPARE = 60.0
"""Seconds between two comparisons of the clocks."""

UNKNOWN_AGE = -1.0


class BrokerClock:
    """Measures how long messages have waited at a broker, by its clock and the monotonic clock of the loop.

    The clock of a broker may be set at any time, and another server with another clock may take over.

    Args:
        read: Returns the time of the broker in seconds; None if it is not known.
    """

    def __init__(self, read: Callable[[], Awaitable[float | None]]) -> None:
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._ahead: float | None = None
        self._compared_at = float("-inf")
        self._took = 0.0

    async def compare(self) -> None:
        """Compare the clocks."""
        before = self._loop.time()
        there = await self._read()
        now = self._compared_at = self._loop.time()
        self._took = now - before
        if there is not None:
            self._ahead = there - (before + now) / 2

    async def ages(self, sent_at: Sequence[float]) -> list[float]:
        """Return how long messages have waited, given the times at which the broker received them.

        The age of a message that the broker seems to have received later than now is `UNKNOWN_AGE`.
        """
        ages = self._ages(sent_at)
        passed = self._loop.time() - self._compared_at
        is_suspect = min(ages) < 0 or max(ages) > _SUSPECT
        if passed > (max(_SUSPECT, _SHARE * self._took) if is_suspect else _COMPARE):
            await self.compare()
            ages = self._ages(sent_at)
        return ages

    def _ages(self, sent_at: Sequence[float]) -> list[float]:
        if self._ahead is None:
            return [UNKNOWN_AGE] * len(sent_at)
        now = self._loop.time() + self._ahead
        ages = [now - each for each in sent_at]
        return [
            age if age > _SHORT_AGE else 0.0 if age > -_SUSPECT else UNKNOWN_AGE for age in ages
        ]


class BoundedSet:
    """A set of limited size with a newer and an older half. When the newer half is full, the older half is dropped.

    Dropping single names would be slower, because a dict whose first keys were removed must be scanned.

    Attributes:
        complete_since: The set contains all names that were added after this time, by `monotonic`.
    """

    __slots__ = ("_began_at", "_newer", "_older", "_size", "complete_since")

    def __init__(self, size: int) -> None:
        self._size = size
        self._began_at = float("-inf")
        self.complete_since = float("-inf")
        self._newer: set[str] = set()
        self._older: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._newer or name in self._older

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def add(self, name: str) -> bool:
        """Add `name`; return False if the set already contains it."""
        newer = self._newer
        if name in newer or name in self._older:
            return False
        newer.add(name)
        if len(newer) >= self._size:
            self._older, self._newer = newer, set()
            self.complete_since, self._began_at = self._began_at, monotonic()
        return True

    def discard(self, name: str) -> None:
        """Remove `name`."""
        self._newer.discard(name)
        self._older.discard(name)


MAX_IDS = 20_000
MAX_BYTES = 8 * 1024 * 1024

WEIGHT = 320
"""The memory overhead of a cached reply in bytes: its id, its receiver and the table entries."""


class Recent:
    """Stores recent request ids, and the last replies of requests that have ended.

    Args:
        max_ids: The least number of stored ids.
        max_bytes: The size limit of the cached replies. They are stored in two halves; when the newer half is full, the
            older half is dropped.
    """

    def __init__(self, max_ids: int = MAX_IDS, max_bytes: int = MAX_BYTES) -> None:
        self._ids = BoundedSet(max_ids)
        self._newer: dict[str, tuple[bytes, str]] = {}
        self._older: dict[str, tuple[bytes, str]] = {}
        self._half = self._left = max_bytes // 2
        self._fenced: BoundedSet | None = None
        self.forget = self._ids.discard
        """Remove the id of a request that was rejected without running, so that it may be sent again."""

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, request_id: str, resends: int = 0) -> bool:
        """Store the id of a request; return False if it was already stored, or this copy of it was fenced."""
        if self._fenced is not None and f"{request_id} {resends}" in self._fenced:
            return False
        return self._ids.add(request_id)

    def fence(self, request_id: str, resends: int) -> None:
        """Reject one copy of a request when it arrives."""
        self._fenced = self._fenced or BoundedSet(MAX_IDS)
        self._fenced.add(f"{request_id} {resends}")

    def never_had(self, request_id: str, age: float) -> bool:
        """Return whether the request has certainly not arrived in the last `age` seconds."""
        return request_id not in self._ids and monotonic() - age > self._ids.complete_since

    def finish(self, request_id: str, body: bytes, reply_to: str) -> None:
        """Cache the last reply of a call, unless it is larger than a quarter of the limit."""
        weight = len(body) + len(reply_to) + WEIGHT
        if weight > self._half // 2:
            return
        if weight > self._left:
            self._older, self._newer = self._newer, {}
            self._left = self._half
        self._left -= weight
        self._newer[request_id] = (body, reply_to)

    def last_reply(self, request_id: str, reply_to: str) -> bytes | None:
        """Return the cached last reply of an ended call if it was sent to this receiver; None if it is not cached."""
        cached = self._newer.get(request_id) or self._older.get(request_id)
        return cached[0] if cached is not None and cached[1] == reply_to else None
