"""Values in a NATS key-value bucket, shared by several hubs and changed by compare-and-set."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

import nats
from nats.js.api import KeyValueConfig
from nats.js.errors import (
    BucketNotFoundError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoKeysError,
)

from operations.pubsub.config import NatsConfig


class NatsStore:
    """Values in a bucket of JetStream.

    Args:
        bucket: The bucket.
        publish: Announces a change to all processes.
    """

    is_shared = True
    poll_seconds = 5.0

    def __init__(self, bucket: Any, publish: Callable[[], Awaitable[None]]) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._bucket = bucket
        self._publish = publish

    async def announce(self) -> None:
        """Call the listeners of all processes."""
        await self._publish()

    async def get(self, key: str) -> tuple[bytes | None, int]:
        """Return a value and its revision."""
        try:
            entry = await self._bucket.get(key)
        except KeyNotFoundError:
            return None, 0
        return entry.value or b"", entry.revision

    async def put(self, key: str, value: bytes, revision: int) -> bool:
        """Set a value if its revision is still this one."""
        try:
            if revision:
                await self._bucket.update(key, value, last=revision)
            else:
                await self._bucket.create(key, value)
        except KeyWrongLastSequenceError:
            return False
        return True

    async def delete(self, key: str) -> None:
        """Remove a value."""
        with suppress(KeyNotFoundError):
            await self._bucket.delete(key)

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table, by name."""
        prefix, found = f"{table}/", dict[str, bytes]()
        try:
            keys: list[str] = await self._bucket.keys()
        except NoKeysError:
            return found
        for key in keys:
            if key.startswith(prefix):
                value, revision = await self.get(key)
                if value is not None and revision:
                    found[key.removeprefix(prefix)] = value
        return found


@asynccontextmanager
async def open_nats_store(config: NatsConfig) -> AsyncGenerator[NatsStore]:
    """Yield a store in the NATS server of a config; JetStream must be enabled.

    Raises:
        nats.errors.Error: If the server cannot be reached.
    """
    client = await cast("Any", nats).connect(
        config.url.split(","), connect_timeout=int(config.connect_timeout) or 1, **config.login
    )
    try:
        stream, name = client.jetstream(), f"{config.prefix}_authority".replace(".", "_")
        try:
            bucket = await stream.key_value(name)
        except BucketNotFoundError:
            settings = KeyValueConfig(bucket=name, history=1, replicas=config.replicas)
            bucket = await stream.create_key_value(settings)
        store = NatsStore(bucket, partial(client.publish, f"{name}.news"))

        async def announced(_: Any) -> None:
            for each in store.listeners:
                each()

        await client.subscribe(f"{name}.news", cb=announced)
        await client.flush()
        yield store
    finally:
        await client.close()
