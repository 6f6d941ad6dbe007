"""Which operations of a worker may run again if the worker is lost, as its callers store it.

The list consists of fingerprints instead of ids, because callers must not learn the ids of operations that they may not
call, and because it is sent whole: 10,000 operations take 80 kB. It is an advice: a worker rejects a second attempt of
any other operation.
"""

from base64 import b64decode, b64encode
from bisect import bisect_left
from collections.abc import Iterable
from hashlib import sha256

_SIZE = 6
"""Bytes of a fingerprint. Two of 10,000 operations have the same one with a probability of 1 to 5 million."""


def _fingerprint(operation_id: str) -> bytes:
    return sha256(operation_id.encode("utf-8", "surrogatepass")).digest()[:_SIZE]


class ReplayableOperations:
    """The operations of one list.

    Args:
        text: The list, as `encode_list` writes it.

    Raises:
        ValueError: If it is malformed.
    """

    __slots__ = ("_fingerprints",)

    def __init__(self, text: str) -> None:
        # Kept as bytes: many callers store it, and read it only when a worker is lost.
        self._fingerprints = b64decode(text, validate=True)

    def __contains__(self, operation_id: str) -> bool:
        wanted = _fingerprint(operation_id)
        position = bisect_left(range(len(self)), wanted, key=self._at)
        return position < len(self) and self._at(position) == wanted

    def __len__(self) -> int:
        return len(self._fingerprints) // _SIZE

    def _at(self, position: int) -> bytes:
        return self._fingerprints[position * _SIZE : (position + 1) * _SIZE]


def encode_list(operation_ids: Iterable[str]) -> str:
    """Return the list of these operations."""
    return b64encode(b"".join(sorted(map(_fingerprint, operation_ids)))).decode()
