"""Values that are handed over within one process, as if they had been written and read.

Rule 1: what is handed over is a copy. Whoever gave it may go on to change theirs.
Rule 2: what would be refused by a broker's caller is refused here, with the same words.
Rule 3: what is too large to be carried is too large here too: the size is that of the JSON.
"""

from typing import Any

import msgspec

from operations._json import MAX_DEPTH
from operations.schema.guard import guard

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_pack = msgspec.msgpack.Encoder().encode

_STRETCH = 8
"""How many times longer than MessagePack JSON can be: a control character takes six, and has a neighbour."""

_SCALARS: frozenset[type] = frozenset({bool, type(None)})

_LONGEST = 1 << 64
"""Integers below this are written in a few digits."""


class _UnusualError(Exception):
    """Something that the quick way does not know."""


def snapshot(value: Any, limit: int) -> tuple[Any, int]:
    """A copy of `value` in JSON builtins, and its size as `size_of` gives it.

    Raises:
        ValueError, TypeError, RecursionError: If it is not JSON.
    """
    try:
        return _copy(value, MAX_DEPTH), size_of(value, limit)
    except _UnusualError:
        guard(value)
        text = _encode(value)
        return _decode(text), len(text)


def _copy(value: Any, room: int) -> Any:
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict:
        if room <= 0:
            raise _UnusualError
        room -= 1
        result: dict[str, Any] = {}
        for key, item in value.items():
            if type(key) is not str or not key.isascii():
                raise _UnusualError
            # Most items are plain text, which spares a call.
            result[key] = item if type(item) is str and item.isascii() else _copy(item, room)
        return result
    if kind is str:
        if not value.isascii():
            raise _UnusualError
        return value
    if kind in _SCALARS:
        return value
    if kind is int:
        if not -_LONGEST < value < _LONGEST:
            raise _UnusualError
        return value
    if kind is list:
        if room <= 0:
            raise _UnusualError
        room -= 1
        return [_copy(item, room) for item in value]
    # The difference is 0 for every number and NaN for NaN and both infinities.
    if kind is float and value - value == 0:
        return value
    raise _UnusualError


def size_of(value: Any, limit: int) -> int:
    """The bytes of `value` as JSON, or as base64 if it is bytes; about that many where `limit` is far away.

    Raises:
        ValueError, TypeError: If it is not JSON.
    """
    if type(value) is bytes:
        return (len(value) + 2) // 3 * 4
    try:
        size = len(_pack(value))
    except OverflowError:
        size = limit
    # Packed is quicker, and at most so much shorter.
    return size if size * _STRETCH < limit else len(_encode(value))
