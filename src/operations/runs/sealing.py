"""A journal whose inputs, results, steps, questions and callers are encrypted (AES-256-GCM).

    1 byte: format | 12 bytes: nonce | ciphertext and tag

Rule 1: what is stored as bytes is encrypted; names, times and states are not, because statements select by them.
Rule 2: the first key encrypts, and all keys decrypt, so that a key can be replaced while runs are live.
Rule 3: a value that was stored before there was a key is read as it is. JSON never begins with the byte of the format.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final

from operations.base.errors import MissingExtraError
from operations.runs.database import Connection, Database, Unreadable

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as error:  # pragma: no cover
    raise MissingExtraError("operations.runs.sealing", extra="jwt") from error

_FORMAT: Final = b"\x01"
_NONCE: Final = 12
_HEAD: Final = len(_FORMAT) + _NONCE


class Sealer:
    """Encrypts values with the first of several keys, and decrypts them with any.

    Args:
        keys: Each of at least 32 random bytes.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._ciphers = [AESGCM(sha256(b"operations runs" + key).digest()) for key in keys]

    def seal(self, data: bytes) -> bytes:
        """Return a value as it is stored."""
        nonce = os.urandom(_NONCE)
        return _FORMAT + nonce + self._ciphers[0].encrypt(nonce, data, None)

    def open(self, data: bytes) -> bytes | Unreadable:
        """Return a stored value, unless it was encrypted with another key, or changed."""
        if not data.startswith(_FORMAT):
            return data
        for cipher in self._ciphers:
            with suppress(InvalidTag):
                return cipher.decrypt(data[len(_FORMAT) : _HEAD], data[_HEAD:], None)
        return Unreadable()


class SealedConnection:
    """A connection that encrypts the bytes that it stores."""

    def __init__(self, inner: Connection, sealer: Sealer) -> None:
        self._inner, self._sealer = inner, sealer
        self.begin, self.commit, self.rollback = inner.begin, inner.commit, inner.rollback
        self.now, self.ticks, self.changed = inner.now, inner.ticks, inner.changed
        self.news, self.close = inner.news, inner.close

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended."""
        return self._inner.is_lost

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """Run a statement and return its rows, decrypted. A value that cannot be is `Unreadable`."""
        return [
            tuple(map(self._opened, row)) for row in self._inner.rows(sql, *self._sealed(values))
        ]

    def count(self, sql: str, *values: Any) -> int:
        """Run a statement and return the number of changed rows."""
        return self._inner.count(sql, *self._sealed(values))

    def _sealed(self, values: Sequence[Any]) -> list[Any]:
        return [self._sealer.seal(each) if isinstance(each, bytes) else each for each in values]

    def _opened(self, value: Any) -> Any:
        return self._sealer.open(value) if isinstance(value, bytes) else value


class SealedDatabase:
    """A database whose connections encrypt.

    Args:
        inner: The database.
        keys: Each of at least 32 random bytes; the first one encrypts.
    """

    def __init__(self, inner: Database, keys: Sequence[bytes]) -> None:
        self._inner, self._sealer = inner, Sealer(keys)
        self.name, self.is_remote = inner.name, inner.is_remote
        self.blob, self.lock, self.share = inner.blob, inner.lock, inner.share
        self.skip_locked, self.boot, self.lock_all = inner.skip_locked, inner.boot, inner.lock_all

    def connect(self, *, writes: bool = True) -> Connection:
        """Open a connection for the current thread."""
        return SealedConnection(self._inner.connect(writes=writes), self._sealer)
