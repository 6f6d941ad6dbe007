"""Values in a NATS key-value bucket, shared by several hubs and changed by compare-and-set."""

from typing import Any

from nats.js.api import KeyValueConfig
from nats.js.errors import BadRequestError, BucketNotFoundError, KeyNotFoundError

from operations.errors import NotSentError

_IDLE_SECONDS = 5.0
"""Seconds after which the server forgets a reader of values that has stopped."""


class NatsValues:
    """The values of a prefix, in a bucket of JetStream that is created when it is first used.

    Args:
        client: The connection.
        prefix: The prefix of all subjects.
        replicas: How many servers keep the bucket.
    """

    poll_seconds = 5.0

    def __init__(self, client: Any, prefix: str, replicas: int) -> None:
        name = f"{prefix}_authority".replace(".", "_")
        self._client = client
        self._settings = KeyValueConfig(bucket=name, history=1, replicas=replicas)
        self._bucket: Any = None

    async def _open(self) -> Any:
        if not self._client.is_connected:
            # The library would wait for its time limit.
            raise NotSentError("NATS cannot be reached")
        if self._bucket is None:
            stream = self._client.jetstream()
            try:
                self._bucket = await stream.key_value(self._settings.bucket)
            except BucketNotFoundError:
                self._bucket = await stream.create_key_value(self._settings)
        return self._bucket

    async def get(self, key: str) -> bytes | None:
        """Return a value."""
        try:
            value: bytes = (await (await self._open()).get(key)).value
        except KeyNotFoundError:
            return None
        return value

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a value."""
        bucket = await self._open()
        try:
            if old is None:
                await bucket.create(key, new)
                return True
            held = await bucket.get(key)
            if held.value != old:
                return False
            if new is None:
                await bucket.delete(key, last=held.revision)
            else:
                await bucket.update(key, new, last=held.revision)
        except (KeyNotFoundError, BadRequestError):
            # It was removed, or changed meanwhile.
            return False
        return True

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table."""
        bucket, found = await self._open(), dict[str, bytes]()
        options = {"ignore_deletes": True, "inactive_threshold": _IDLE_SECONDS}
        watcher = await bucket.watch(f"{table}.*", **options)
        # The watcher goes on with later changes: None comes after the present values.
        while (entry := await watcher.updates()) is not None:
            found[entry.key] = entry.value
        await watcher.stop()
        return found
