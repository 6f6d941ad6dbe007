"""Callers that show an API key.

Rule 1: a key is never kept: its SHA-256 is. A key of 256 random bits cannot be guessed from that.
Rule 2: digests are compared in constant time.
"""

import hmac
import inspect
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from secrets import token_urlsafe
from time import monotonic

import msgspec
from starlette.requests import HTTPConnection

from operations.access import Identity
from operations.front.identity import CredentialError
from operations.server.identity import bearer_token, header

HEADER = b"x-api-key"

_BUCKET = 8
"""Hex digits of a digest by which keys are found; the rest is compared in constant time."""

_LOOK_AGAIN = 1.0
"""Seconds between looks at whether a file of keys has changed."""

_MAX_KEY = 1024


def new_key() -> str:
    """A key nobody can guess: 256 random bits."""
    return token_urlsafe(32)


def hash_key(key: str) -> str:
    """What to keep of a key: its SHA-256 in hex."""
    return sha256(key.encode(errors="replace")).hexdigest()


class APIKeys:
    """Resolves `Authorization: Bearer KEY` and `X-API-Key: KEY`.

    Args:
        keys: Identities by the hash of their key (`hash_key`), or what finds one for a hash and may be a
            coroutine function.
    """

    def __init__(
        self,
        keys: Mapping[str, Identity]
        | Callable[[str], "Identity | Awaitable[Identity | None] | None"],
    ) -> None:
        self._find = keys if callable(keys) else _Table(keys).find

    @classmethod
    def from_file(cls, path: str | Path) -> "APIKeys":
        """Keys of a JSON file: `{"SHA-256 of the key": {"id": ..., "scopes": [...], "resources": {...}}}`.

        The file is read again when it changes, so that a key can be withdrawn at once. One that cannot be read any
        more refuses everybody.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it holds something else.
        """
        return cls(_File(Path(path)).find)

    def __call__(
        self, connection: HTTPConnection
    ) -> "Identity | Awaitable[Identity | None] | None":
        """Whose key the request shows.

        Raises:
            CredentialError: If it is nobody's.
        """
        key = bearer_token(connection) or header(connection, HEADER)
        if not key:
            return None
        if len(key) > _MAX_KEY:
            raise CredentialError("a key that is too long")
        found = self._find(hash_key(key))
        return _later(found) if inspect.isawaitable(found) else _somebody(found)


async def _later(found: Awaitable[Identity | None]) -> Identity:
    return _somebody(await found)


def _somebody(identity: Identity | None) -> Identity:
    if identity is None:
        raise CredentialError("an unknown key")
    return identity


class _Table:
    def __init__(self, keys: Mapping[str, Identity]) -> None:
        self._buckets: dict[str, list[tuple[str, Identity]]] = {}
        for digest, identity in keys.items():
            if len(digest) != 64 or not set(digest.lower()) <= set("0123456789abcdef"):
                # Not shown: it may well be the key itself.
                raise ValueError(f"the key of {identity.id!r} is not hashed: use hash_key(key)")
            bucket = self._buckets.setdefault(digest[:_BUCKET].lower(), [])
            bucket.append((digest.lower(), identity))

    def find(self, digest: str) -> Identity | None:
        found = None
        for known, identity in self._buckets.get(digest[:_BUCKET], ()):
            if hmac.compare_digest(known, digest):
                found = identity
        return found


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._table = _Table({})
        self._next_look = 0.0
        self._refresh()

    def find(self, digest: str) -> Identity | None:
        if monotonic() >= self._next_look:
            self._refresh()
        return self._table.find(digest)

    def _refresh(self) -> None:
        stat = self._path.stat()
        now = (stat.st_mtime_ns, stat.st_size)
        if now != self._seen:
            table = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Identity])
            self._table, self._seen = _Table(table), now
        self._next_look = monotonic() + _LOOK_AGAIN
