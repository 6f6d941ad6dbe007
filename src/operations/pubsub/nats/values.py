"""The values that several hubs share, in a bucket of JetStream."""

from typing import Any

from nats.js.api import KeyValueConfig
from nats.js.errors import (
    BadRequestError,
    BucketNotFoundError,
    InvalidKeyError,
    KeyNotFoundError,
    ServiceUnavailableError,
)

from operations.errors import NotSentError, TransportError
from operations.pubsub.nats.jetstream import NO_JETSTREAM, stream_name

_IDLE_SECONDS = 5.0
"""Seconds after which the server removes a reader of values that has stopped."""


class NatsValues:
    """The values of a prefix, in a bucket of JetStream that is created when it is first used.

    Args:
        client: The connection.
        prefix: The prefix of all subjects.
        replicas: The number of servers that store the bucket.
    """

    poll_seconds = 5.0

    def __init__(self, client: Any, prefix: str, replicas: int) -> None:
        name = stream_name(f"{prefix}_authority")
        self._client = client
        self._settings = KeyValueConfig(bucket=name, history=1, replicas=replicas)
        self._bucket: Any = None

    async def _open(self) -> Any:
        if not self._client.is_connected:
            # The library would wait until its timeout.
            raise NotSentError("NATS cannot be reached")
        if self._bucket is None:
            stream = self._client.jetstream()
            try:
                self._bucket = await stream.key_value(self._settings.bucket)
            except BucketNotFoundError:
                self._bucket = await stream.create_key_value(self._settings)
            except ServiceUnavailableError as error:
                lacks = f"a store on NATS {NO_JETSTREAM}" if error.err_code is None else str(error)
                raise TransportError(lacks) from error
        return self._bucket

    async def get(self, key: str) -> bytes | None:
        """Return a value."""
        try:
            value: bytes = (await (await self._open()).get(key)).value
        except (KeyNotFoundError, InvalidKeyError):
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
            # The value was removed or changed by another client.
            return False
        return True

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table."""
        bucket, found = await self._open(), dict[str, bytes]()
        options = {"ignore_deletes": True, "inactive_threshold": _IDLE_SECONDS}
        watcher = await bucket.watch(f"{table}.*", **options)
        # The watcher continues with later changes; None marks the end of the current values.
        while (entry := await watcher.updates()) is not None:
            found[entry.key] = entry.value
        await watcher.stop()
        return found
