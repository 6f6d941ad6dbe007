"""Administration of a Redis server: the state of queues, dead letters, and the values that several hubs share."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from operations.errors import TransportError
from operations.pubsub.base import QueueState, StoredLetter, WorkerStats
from operations.pubsub.config import ANY_CLIENT
from operations.pubsub.redis.connection import PipelinedConnection

_WAIT = 3.0
"""Seconds to wait for a connection that is being restored."""

_ENTRY = re.compile(r"\d{1,20}-\d{1,20}", re.ASCII)
"""The id of an entry of a stream."""


class RedisAdmin:
    """Administration of the queues of a Redis server.

    Args:
        link: Carries the commands.
        clients: The clients whose queues are seen.
        queue: Returns the key of a queue of a client.
        dead_letters: Returns the key of its dead letters.
    """

    def __init__(
        self,
        link: PipelinedConnection,
        clients: Sequence[str],
        queue: Callable[[str, str], str],
        dead_letters: Callable[[str, str], str],
    ) -> None:
        self._link = link
        self._clients = clients
        self._queue = queue
        self._dead_letters = dead_letters

    async def advertise(self, queue: str, stats: Callable[[], WorkerStats]) -> None:
        """Do nothing: Redis has no service discovery."""

    async def _ask(self, *command: Any) -> Any:
        await self._link.ready(_WAIT)
        try:
            return await self._link.request(*command)
        except ResponseError as error:
            raise TransportError(f"Redis: {error}") from error

    async def state(self, queue: str) -> QueueState:
        """Return the length of the streams of all clients, and the age of their first entry."""
        names = [self._queue(queue, client) for client in self._clients]
        letters = [self._dead_letters(queue, client) for client in self._clients]
        clock, *answers = await asyncio.gather(
            self._ask("TIME"),
            *(self._ask("XLEN", name) for name in (*names, *letters)),
            *(self._ask("XRANGE", name, "-", "+", "COUNT", 1) for name in names),
        )
        count = len(names)
        first = [_milliseconds(found[0][0]) for found in answers[2 * count :] if found]
        age = int(clock[0]) + int(clock[1]) / 1e6 - min(first) / 1000 if first else 0.0
        return QueueState(
            waiting=sum(answers[:count]),
            oldest=max(0.0, age),
            dead_letters=sum(answers[count : 2 * count]),
        )

    async def letters(self, queue: str, limit: int, letter: str = "") -> list[StoredLetter]:
        """Return the newest entries of the streams of dead letters, or one. The id of a letter names its client."""
        wanted = [(client, "+", "-") for client in self._clients]
        if letter:
            entry, _, client = letter.partition("@")
            is_known = (
                _ENTRY.fullmatch(entry) is not None and (client or ANY_CLIENT) in self._clients
            )
            wanted = [(client or ANY_CLIENT, entry, entry)] if is_known else []
        found = [
            StoredLetter(
                id=entry.decode() + ("" if client == ANY_CLIENT else f"@{client}"),
                body=fields[1],
                stored_at=_milliseconds(entry),
            )
            for client, end, start in wanted
            for entry, fields in await self._ask(
                *("XREVRANGE", self._dead_letters(queue, client), end, start, "COUNT", limit)
            )
        ]
        return sorted(found, key=lambda each: each.stored_at, reverse=True)[:limit]

    async def remove(self, queue: str, letter: str) -> bool:
        """Delete an entry of a stream of dead letters."""
        entry, _, client = letter.partition("@")
        if _ENTRY.fullmatch(entry) is None:
            return False
        name = self._dead_letters(queue, client or ANY_CLIENT)
        return bool(await self._ask("XDEL", name, entry))


def _milliseconds(entry: bytes) -> int:
    """Return when an entry was added, in milliseconds since the epoch."""
    return int(entry.partition(b"-")[0])


_SWAP = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1])
else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
return 1
"""
"""No value is empty: an empty text stands for none."""


class RedisValues:
    """The values of a prefix, which change by compare-and-set: one hash for each table.

    Args:
        link: The connection.
        prefix: The prefix of every key.
    """

    poll_seconds = 5.0

    def __init__(self, link: PipelinedConnection, prefix: str) -> None:
        self._link = link
        self._prefix = f"{prefix}authority:"

    async def get(self, key: str) -> bytes | None:
        """Return a value."""
        table, _, name = key.partition(".")
        value: bytes | None = await self._link.request("HGET", self._prefix + table, name)
        return value

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a value."""
        table, _, name = key.partition(".")
        given = name, old or b"", new or b""
        return bool(await self._link.request("EVAL", _SWAP, 1, self._prefix + table, *given))

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table."""
        flat: list[Any] = await self._link.request("HGETALL", self._prefix + table)
        names = (f"{table}.{name.decode()}" for name in flat[::2])
        return dict(zip(names, flat[1::2], strict=True))
