"""Making sure that a value is JSON before a validator that looks at some of it only.

jsonschema-rs reads lazily: NaN, lone surrogates and any depth pass wherever the schema does not look, and a
recursive schema follows deep data until the stack ends. `guard` looks everywhere first.

Rule 1: what jsonschema-rs itself takes for JSON counts here too (tuples, enums by their value, decimals,
subclasses of dict and list), so that a verdict does not depend on whether the guard was needed.
"""

from decimal import Decimal
from enum import Enum
from typing import Any

from operations._json import MAX_DEPTH, MAX_DIGITS, TOO_LONG, TOO_LOW, JSONValueError, pointer

_PLAIN = frozenset({bool, type(None)})


def guard(value: Any, room: int = MAX_DEPTH) -> None:
    """Let through what is JSON all the way down.

    Raises:
        JSONValueError: With the place and the reason, if some part is not, or nests deeper than `room`.
    """
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict:
        _guard_object(value, room)
    elif kind in _PLAIN:
        return
    elif kind is int:
        if not TOO_LOW < value < TOO_LONG:
            raise JSONValueError(f"is an integer of more than {MAX_DIGITS} digits")
    elif kind is str:
        if not value.isascii():
            _guard_text(value)
    elif kind is list or kind is tuple:
        _guard_array(value, room)
    elif kind is float:
        # The difference is 0 for every number and NaN for NaN and both infinities.
        if value - value != 0:
            raise JSONValueError(f"is {value}, which is not a JSON number")
    else:
        _guard_other(value, room)


def _guard_text(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise JSONValueError("holds a lone surrogate, which is not valid Unicode") from None


def _guard_object(value: dict[Any, Any], room: int) -> None:
    if room <= 0:
        raise JSONValueError(f"is nested deeper than {MAX_DEPTH} levels")
    for key, item in value.items():
        if type(key) is not str and not (isinstance(key, str) and isinstance(key, Enum)):
            raise JSONValueError(f"has a key that is no string but {type(key).__name__}")
        try:
            if not key.isascii():
                _guard_text(key)
            # What most items are, which spares a call.
            kind = type(item)  # pyright: ignore[reportUnknownVariableType]
            if kind is dict:
                _guard_object(item, room - 1)
            elif kind is not str or not item.isascii():
                guard(item, room - 1)
        except JSONValueError as error:
            raise JSONValueError(error.reason, pointer(_shown(key)) + error.path) from None


def _guard_array(value: list[Any] | tuple[Any, ...], room: int) -> None:
    if room <= 0:
        raise JSONValueError(f"is nested deeper than {MAX_DEPTH} levels")
    for index, item in enumerate(value):
        try:
            guard(item, room - 1)
        except JSONValueError as error:
            raise JSONValueError(error.reason, pointer(index) + error.path) from None


def _guard_other(value: Any, room: int) -> None:
    if isinstance(value, Enum):
        guard(value.value, room - 1)
    elif isinstance(value, dict):
        _guard_object(value, room)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, list):
        _guard_array(value, room)  # pyright: ignore[reportUnknownArgumentType]
    elif type(value) is not Decimal or not value.is_finite():
        raise JSONValueError(f"is {_article(type(value).__name__)}, which is not JSON")


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _shown(key: str) -> str:
    """`key` as it can be printed: a path must not carry the surrogate it reports."""
    return str.__str__(key).encode(errors="replace").decode()
