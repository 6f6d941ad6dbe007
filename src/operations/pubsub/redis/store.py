"""A store on the connection of a Redis target."""

from typing import Any

from operations.pubsub.redis.connection import PipelinedConnection

_SWAP = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1])
else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
return 1
"""
"""Values are never empty, so that an empty text stands for no value."""


class RedisValues:
    """The values of a prefix, which change by compare-and-set: one hash for each table.

    Args:
        link: The connection.
        prefix: The prefix of the keys of all tables.
    """

    poll_seconds = 5.0

    def __init__(self, link: PipelinedConnection, prefix: str) -> None:
        self._link = link
        self._prefix = prefix

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
