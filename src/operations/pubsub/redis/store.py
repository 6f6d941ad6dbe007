"""Values in Redis that change by compare-and-set: approvals, budgets and revocations that several hubs share."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from operations.pubsub.config import RedisConfig

_PUT = """
local held = redis.call('HGET', KEYS[1], ARGV[1])
local revision = held and tonumber(string.match(held, '^(%d+):')) or 0
if revision ~= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], (revision + 1) .. ':' .. ARGV[3])
return 1
"""


class RedisStore:
    """Values in Redis: one hash for each table, with the revision before each value.

    Args:
        client: A connection, which returns bytes.
        prefix: The prefix of every key.
    """

    is_shared = True
    poll_seconds = 5.0

    def __init__(self, client: Any, prefix: str) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._client = client
        self._prefix = prefix

    async def announce(self) -> None:
        """Call the listeners of all processes."""
        await self._client.publish(f"{self._prefix}news", b"")

    async def follow(self, news: Any) -> None:
        """Call the listeners whenever a process announces a change, until cancelled."""
        while True:
            try:
                if await news.get_message(timeout=None):
                    for each in self.listeners:
                        each()
            except (RedisError, OSError):
                # It connects again by itself; `poll_seconds` bridges the gap.
                await asyncio.sleep(1)

    async def get(self, key: str) -> tuple[bytes | None, int]:
        """Return a value and its revision."""
        held: bytes | None = await self._client.hget(*self._place(key))
        if held is None:
            return None, 0
        revision, _, value = held.partition(b":")
        return value, int(revision)

    async def put(self, key: str, value: bytes, revision: int) -> bool:
        """Set a value if its revision is still this one."""
        table, name = self._place(key)
        return bool(await self._client.eval(_PUT, 1, table, name, revision, value))

    async def delete(self, key: str) -> None:
        """Remove a value."""
        await self._client.hdel(*self._place(key))

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table, by name."""
        held = cast("dict[bytes, bytes]", await self._client.hgetall(f"{self._prefix}{table}"))
        return {name.decode(): value.partition(b":")[2] for name, value in held.items()}

    def _place(self, key: str) -> tuple[str, str]:
        table, _, name = key.partition("/")
        return f"{self._prefix}{table}", name


@asynccontextmanager
async def open_redis_store(config: RedisConfig) -> AsyncGenerator[RedisStore]:
    """Yield a store in the Redis server of a config.

    Raises:
        redis.RedisError: If the server cannot be reached.
    """
    seconds = config.connect_timeout
    client: Any = Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
        config.address, socket_timeout=seconds, socket_connect_timeout=seconds
    )
    async with client:
        await client.ping()
        prefix = f"{config.prefix}authority:"
        store = RedisStore(client, prefix)
        async with client.pubsub(ignore_subscribe_messages=True) as news:
            await news.subscribe(f"{prefix}news")
            following = asyncio.create_task(store.follow(news), name="changes of the store")
            try:
                yield store
            finally:
                following.cancel()
                await asyncio.wait({following})
