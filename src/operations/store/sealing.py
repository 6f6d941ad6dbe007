"""Values that are encrypted in the store that holds them (AES-SIV).

    1 byte: format | 16 bytes: tag | ciphertext

Rule 1: equal values under one key of the store are encrypted alike, because compare-and-set compares what is stored.
Rule 2: a value is bound to its key in the store, so that it cannot be moved to another one.
"""

from hashlib import sha512
from typing import Final

from operations.base.errors import MissingExtraError
from operations.store.contract import StoreError, Values

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV
except ImportError as error:  # pragma: no cover
    raise MissingExtraError("operations.store.sealing", extra="jwt") from error

LEAST_KEY: Final = 32
"""The smallest size of the key, in bytes."""

_FORMAT: Final = b"\x01"


class SealedValues:
    """Encrypts values before another backend stores them.

    Args:
        inner: The backend.
        key: At least 32 random bytes.

    Raises:
        ValueError: If the key is too short.
    """

    def __init__(self, inner: Values, key: bytes) -> None:
        if len(key) < LEAST_KEY:
            raise ValueError(f"the key of the store must have at least {LEAST_KEY} bytes")
        self.poll_seconds = inner.poll_seconds
        self._inner = inner
        self._cipher = AESSIV(sha512(b"operations store" + key).digest())

    async def get(self, key: str) -> bytes | None:
        """Return a value, decrypted."""
        held = await self._inner.get(key)
        return None if held is None else self._opened(key, held)

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a value."""
        return await self._inner.swap(key, self._sealed(key, old), self._sealed(key, new))

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table, decrypted."""
        return {
            key: self._opened(key, held) for key, held in (await self._inner.items(table)).items()
        }

    def _sealed(self, key: str, value: bytes | None) -> bytes | None:
        if value is None:
            return None
        # The cipher takes no empty text.
        return _FORMAT + self._cipher.encrypt(_FORMAT + value, [key.encode()])

    def _opened(self, key: str, held: bytes) -> bytes:
        try:
            if held[:1] == _FORMAT:
                return self._cipher.decrypt(held[1:], [key.encode()])[1:]
        except (InvalidTag, ValueError):
            pass
        raise StoreError(f"{key} was stored with another key, or without one")
