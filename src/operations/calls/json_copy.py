"""Values that are handed over within one process, as if they had been written and read.

Rule 1: what is handed over is a copy. Whoever gave it may go on to change theirs.
Rule 2: what would be refused by a broker's caller is refused here, with the same words.
Rule 3: what is too large to be carried is too large here too: the size is that of the JSON.
"""

from typing import Any

import msgspec

from operations._json import MAX_DEPTH, as_json, count_values
from operations.errors import TooLargeError

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_pack = msgspec.msgpack.Encoder().encode

_STRETCH = 8
"""How many bytes of JSON one of what is counted can become: a control character takes six, and has its quotes."""

_SCALARS: frozenset[type] = frozenset({bool, type(None)})

_LONGEST = 1 << 64
"""Integers below this are written in a few digits."""


class _UnusualError(Exception):
    """Something that the quick way does not know."""


def snapshot(value: Any, limit: int, max_values: int) -> Any:
    """A copy of `value` in JSON builtins.

    Raises:
        TooLargeError: If it takes more than `limit` bytes or holds more than `max_values` values.
        ValueError, TypeError, RecursionError: If it is not JSON.
    """
    meter = [0]
    try:
        copy = _copy(value, MAX_DEPTH, meter)
    except _UnusualError:
        copy = _decode(_encode(as_json(value)))
        meter[0] = limit
    if meter[0] * _STRETCH > limit:
        enforce_size(len(_encode(copy)), limit)
    # Each value turns the meter on by at least one.
    if meter[0] > max_values:
        enforce_count(copy, max_values)
    return copy


def _copy(value: Any, room: int, meter: list[int]) -> Any:
    """A copy of `value`; `meter` is turned on by at least an eighth of the bytes that it takes."""
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict:
        if room <= 0:
            raise _UnusualError
        room -= 1
        length = 1
        result: dict[str, Any] = {}
        for key, item in value.items():
            if type(key) is not str or not key.isascii():
                raise _UnusualError
            length += len(key) + 1
            # What most items are, which spares a call.
            if type(item) is str and item.isascii():
                length += len(item)
                result[key] = item
            else:
                result[key] = _copy(item, room, meter)
        meter[0] += length
        return result
    if kind is list:
        if room <= 0:
            raise _UnusualError
        room -= 1
        meter[0] += 1
        return [_copy(item, room, meter) for item in value]
    if kind is str:
        if not value.isascii():
            raise _UnusualError
        meter[0] += len(value) + 1
        return value
    if kind in _SCALARS:
        meter[0] += 1
        return value
    meter[0] += 3
    if kind is int and -_LONGEST < value < _LONGEST:
        return value
    # The difference is 0 for every number and NaN for NaN and both infinities.
    if kind is float and value - value == 0:
        return value
    raise _UnusualError


def size_of(value: Any, limit: int, max_values: int) -> int:
    """The bytes of `value` as JSON, or as base64 if it is bytes; about that many where `limit` is far away.

    Raises:
        TooLargeError: If it holds more than `max_values` values.
        ValueError, TypeError: If it is not JSON.
    """
    if type(value) is bytes:
        return (len(value) + 2) // 3 * 4
    try:
        size = len(_pack(value))
    except OverflowError:
        size = limit
    # Each value takes at least one byte.
    if size > max_values:
        enforce_count(value, max_values)
    # Packed is quicker, and never that much shorter.
    return size if size * _STRETCH < limit else len(_encode(value))


def enforce_count(value: Any, max_values: int) -> None:
    """Raise an error for data with more than `max_values` values.

    Raises:
        TooLargeError: Naming the limit.
    """
    if count_values(value, max_values) > max_values:
        raise TooLargeError(f"holds more than {max_values:,} values")


def enforce_size(size: int, limit: int) -> None:
    """Refuse what is too large to be carried.

    Raises:
        TooLargeError: Saying so.
    """
    if size > limit:
        raise TooLargeError(f"{size} bytes are more than the {limit} allowed")
