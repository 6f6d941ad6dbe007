"""Values that are encrypted in the store that holds them (AES-SIV).

    1 byte: format | 16 bytes: tag | ciphertext

Rule 1: equal values under one key of the store are encrypted alike, because compare-and-set compares what is stored.
Rule 2: the first key encrypts, and all keys decrypt, so that a key can be replaced while the store is used.
Rule 3: a value is bound to its key in the store, so that it cannot be moved to another one.
"""

from collections.abc import Sequence
from contextlib import suppress
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
        keys: Each of at least 32 random bytes.

    Raises:
        ValueError: If there is no key, or one is too short.
    """

    def __init__(self, inner: Values, keys: Sequence[bytes]) -> None:
        if not keys or any(len(key) < LEAST_KEY for key in keys):
            raise ValueError(f"the key of the store must have at least {LEAST_KEY} bytes")
        self.poll_seconds = inner.poll_seconds
        self._inner = inner
        self._ciphers = [AESSIV(sha512(b"operations store" + key).digest()) for key in keys]

    async def get(self, key: str) -> bytes | None:
        """Return a value, decrypted."""
        held = await self._inner.get(key)
        return None if held is None else self._opened(key, held)

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a value."""
        stored = self._sealed(key, new)
        for cipher in self._ciphers if old is not None else self._ciphers[:1]:
            # It is not known which key has encrypted the present value.
            if await self._inner.swap(key, self._sealed(key, old, cipher), stored):
                return True
        return False

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table, decrypted."""
        return {
            key: self._opened(key, held) for key, held in (await self._inner.items(table)).items()
        }

    def _sealed(self, key: str, value: bytes | None, cipher: AESSIV | None = None) -> bytes | None:
        if value is None:
            return None
        # The cipher takes no empty text.
        return _FORMAT + (cipher or self._ciphers[0]).encrypt(_FORMAT + value, [key.encode()])

    def _opened(self, key: str, held: bytes) -> bytes:
        for cipher in self._ciphers if held[:1] == _FORMAT else ():
            with suppress(InvalidTag, ValueError):
                return cipher.decrypt(held[1:], [key.encode()])[1:]
        raise StoreError(f"{key} was stored with another key, or without one")
