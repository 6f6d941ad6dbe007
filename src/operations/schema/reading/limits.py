"""The size a document may have: it is JSON, neither too large nor too deep."""

from typing import Any

from msgspec import to_builtins

from operations._json import JSONValueError, pointer
from operations.errors import SchemaError
from operations.types import JSONSchema

MAX_SCHEMA_DEPTH = 128
"""How deep the document itself may nest."""

MAX_SCHEMA_VALUES = 100_000
"""How many JSON values the document may hold."""

_SIMPLE = frozenset({bool, int, type(None)})


def measured(document: Any) -> JSONSchema:
    """A copy of a document that is JSON and not too large.

    Raises:
        SchemaError: Naming the place.
    """
    if not isinstance(document, (dict, bool)):
        raise SchemaError("a schema is an object, true or false")
    if _is_plain(document):
        copy: JSONSchema = to_builtins(document)
        return copy
    try:
        copy = _measured(document, MAX_SCHEMA_DEPTH, [MAX_SCHEMA_VALUES])
    except JSONValueError as error:
        raise SchemaError(f"{error.path or 'the schema'}: {error.reason}") from None
    return copy


def _is_plain(document: Any) -> bool:
    """Whether a quick look finds nothing that `_measured` would have to judge."""
    left = MAX_SCHEMA_VALUES
    level: list[Any] = [document]
    try:
        for _ in range(MAX_SCHEMA_DEPTH):
            left -= len(level)
            below: list[Any] = []
            for held in level:
                kind = type(held)  # pyright: ignore[reportUnknownVariableType]
                if kind is dict:
                    "".join(held).encode()
                    below += held.values()
                elif kind is list:
                    below += held
                elif kind is str:
                    held.encode()
                elif kind not in _SIMPLE:
                    return False
            if left < len(below):
                return False
            if not below:
                return True
            level = below
    except (TypeError, UnicodeEncodeError):
        pass
    return False


def _measured(value: Any, room: int, left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise JSONValueError(f"the document holds more than {MAX_SCHEMA_VALUES:,} values")
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict or kind is list:
        if room <= 0:
            raise JSONValueError(f"the document nests deeper than {MAX_SCHEMA_DEPTH} levels")
        return _parts(value, room - 1, left)
    if kind is str:
        _measure_text(value)
    elif kind is float:
        if value - value != 0:
            raise JSONValueError(f"{value} is not a JSON number")
    elif kind is not int and kind is not bool and value is not None:
        raise JSONValueError(f"{type(value).__name__} is not JSON")
    return value


def _parts(value: dict[Any, Any] | list[Any], room: int, left: list[int]) -> Any:
    copies: dict[str | int, Any] = {}
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for token, item in entries:
        if isinstance(value, dict):
            _measure_key(token)
        try:
            copies[token] = _measured(item, room, left)
        except JSONValueError as error:
            raise JSONValueError(error.reason, pointer(token) + error.path) from None
    return copies if isinstance(value, dict) else list(copies.values())


def _measure_key(key: Any) -> None:
    if type(key) is not str:
        raise JSONValueError(f"an object's key must be a string, not {type(key).__name__}")
    _measure_text(key)


def _measure_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise JSONValueError("text with a lone surrogate is not valid Unicode") from None
