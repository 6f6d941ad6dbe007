"""A store on the connection of a NATS target."""

import asyncio
from typing import Any

import msgspec
from nats.js.api import KeyValueConfig
from nats.js.errors import (
    BadRequestError,
    BucketNotFoundError,
    InvalidKeyError,
    KeyNotFoundError,
    ServiceUnavailableError,
)

from operations.base.errors import NotSentError, TransportError
from operations.pubsub.nats.jetstream import NO_JETSTREAM, stream_name

_READS = 64
"""The number of values that are read at the same time."""

_MAX_SUBJECTS = 100_000
"""The number of subjects after which the server continues its list on another page."""


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
        self._keys, self._stream = f"$KV.{name}.", f"KV_{name}"
        self._bucket: Any = None

    async def _open(self) -> Any:
        if not self._client.is_connected:
            # The library would wait until its timeout.
            raise NotSentError("NATS cannot be reached")
        if self._bucket is None:
            stream = self._client.jetstream()
            try:
                bucket = await stream.key_value(self._settings.bucket)
            except BucketNotFoundError:
                bucket = await stream.create_key_value(self._settings)
            except ServiceUnavailableError as error:
                lacks = f"a store on NATS {NO_JETSTREAM}" if error.err_code is None else str(error)
                raise TransportError(lacks) from error
            if (await bucket.status()).ttl:
                name = self._settings.bucket
                raise TransportError(f"the bucket {name} would lose revocations: remove its TTL")
            self._bucket = bucket
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
                await self._remove(key, held.revision)
            else:
                await bucket.update(key, new, last=held.revision)
        except (KeyNotFoundError, BadRequestError):
            # The value was removed or changed by another client.
            return False
        return True

    async def _remove(self, key: str, revision: int) -> None:
        """Remove a value, and the marker of its removal, which would stay forever."""
        subject = f"{self._keys}{key}"
        headers = {"KV-Operation": "DEL", "Nats-Expected-Last-Subject-Sequence": str(revision)}
        marker = await self._client.jetstream().publish(subject, headers=headers)
        purge = msgspec.json.encode({"filter": subject, "seq": marker.seq + 1})
        # Without permission the marker stays, and is no value.
        address = f"$JS.API.STREAM.PURGE.{self._stream}"
        await self._client.publish(address, purge, reply=self._client.new_inbox())

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table."""
        await self._open()
        # Not with a watcher of the library, which can miss values that the server has just sent.
        stream = await self._client.jetstream().stream_info(self._stream, f"{self._keys}{table}.*")
        keys = [subject.removeprefix(self._keys) for subject in stream.state.subjects or ()]
        if len(keys) >= _MAX_SUBJECTS:
            raise TransportError(f"the store on NATS has too many values in {table}")
        found: list[bytes | None] = []
        for start in range(0, len(keys), _READS):
            found += await asyncio.gather(*map(self.get, keys[start : start + _READS]))
        # A value may have been removed meanwhile.
        return {key: value for key, value in zip(keys, found, strict=True) if value is not None}
