"""Values that cross between a script and its calls: JSON and bytes, nothing else."""

from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Final

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import MAX_DEPTH
from operations.code.sandbox import ClassProxy

_MAX_VALUES: Final = 200_000
"""The largest number of values in one argument or result."""


def to_plain(value: Any, what: str) -> Any:
    """Return a value of a script as JSON values and bytes.

    Dates become text, decimals numbers if that loses nothing, dataclasses objects, tuples and sets lists.

    Raises:
        CallError: `VALIDATION_ERROR` if it contains any other value.
    """
    return _Converter(what).convert(value, 0)


class _Converter:
    def __init__(self, what: str) -> None:
        self._what = what
        self._left = _MAX_VALUES

    def convert(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            raise self._error("is nested too deeply" if self._left >= 0 else "has too many values")
        # By exact type: a subclass could behave in another way.
        given: object = value
        kind = type(given)
        if value is None or kind in (str, int, float, bool, bytes):
            return value
        if kind is dict:
            return {self._key(key): self.convert(each, depth + 1) for key, each in value.items()}
        if kind in (list, tuple):
            return [self.convert(each, depth + 1) for each in value]
        if kind in (set, frozenset):
            return sorted((self.convert(each, depth + 1) for each in value), key=repr)
        if kind in (datetime, date, time):
            return value.isoformat()
        if kind is Decimal:
            number = float(value) if value.is_finite() else None
            return number if number is not None and Decimal(repr(number)) == value else str(value)
        if kind is ClassProxy and value.is_dataclass:
            return self.convert(value.attributes, depth)
        if isinstance(given, tuple):
            return [self.convert(each, depth + 1) for each in value]
        name = value.name if kind is ClassProxy else kind.__name__
        raise self._error(f"contains a {name}, which is not JSON")

    def _key(self, key: Any) -> str:
        if type(key) is str:
            return key
        if type(key) in (int, float, bool) or key is None:
            return str(key)
        raise self._error(f"has a key that is a {type(key).__name__}, not text")

    def _error(self, reason: str) -> CallError:
        return CallError(ErrorCode.VALIDATION_ERROR, f"{self._what} {reason}", begun=False)
