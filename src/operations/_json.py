"""What counts as JSON here, and how Python values become it.

Rule 1: JSON is `dict` with `str` keys, `list`, `str`, `int`, `float`, `bool` and `None`, of exactly these types.
Rule 2: NaN, infinities, lone surrogates and nesting beyond a bound are not JSON, wherever they stand.
"""

from collections.abc import Callable, Mapping, Set
from enum import Enum
from os import PathLike, fspath
from typing import Any

import msgspec

MAX_DEPTH = 64
"""How deep data may nest. A recursive validator given deeper data can exhaust the stack."""

_PLAIN = frozenset({int, bool, type(None)})


class JSONValueError(ValueError):
    """A value is not JSON and cannot become it.

    Attributes:
        path: JSON pointer to the place; empty for the value itself.
        reason: What is wrong there.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path or 'the value'}: {reason}")
        self.path = path
        self.reason = reason


def pointer(token: str | int) -> str:
    """One reference token of a JSON pointer, with its slash, escaped."""
    return f"/{token}" if isinstance(token, int) else "/" + escape(token)


def escape(token: str) -> str:
    """`token` as it stands in a JSON pointer."""
    return token.replace("~", "~0").replace("/", "~1")


def to_json(value: Any, max_depth: int = MAX_DEPTH) -> Any:
    """`value` as fresh JSON builtins.

    Beyond the builtins it understands mappings, tuples, sets, enums, dates, UUIDs, decimals, paths, bytes
    (as base64), dataclasses, msgspec structs, attrs classes and pydantic models.

    Raises:
        JSONValueError: If some part is not JSON and cannot become it.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is str:
        return value if value.isascii() else _text(value)
    if kind is dict:
        if max_depth <= 0:
            raise JSONValueError("nested too deeply")
        result: dict[str, Any] = {}
        for key, item in value.items():
            name = key if type(key) is str and key.isascii() else _key(key)
            try:
                result[name] = to_json(item, max_depth - 1)
            except JSONValueError as error:
                raise JSONValueError(error.reason, pointer(name) + error.path) from None
        return result
    if kind is list:
        if max_depth <= 0:
            raise JSONValueError("nested too deeply")
        items: list[Any] = []
        for index, item in enumerate(value):
            try:
                items.append(to_json(item, max_depth - 1))
            except JSONValueError as error:
                raise JSONValueError(error.reason, pointer(index) + error.path) from None
        return items
    if kind is float:
        # The difference is 0 for every number and NaN for NaN and both infinities.
        if value - value != 0:
            raise JSONValueError(f"{value} is not a JSON number")
        return value
    return to_json(lift(value), max_depth)


def lift(value: Any) -> Any:
    """`value`, not of a JSON type itself, as one that is; what it holds may still need lifting.

    Raises:
        JSONValueError: If there is no way.
    """
    if isinstance(value, Enum):
        return value.value
    # Subclasses of the builtins lose what makes them special.
    for base in (str, bool, int, float):
        if isinstance(value, base):
            return base.__new__(base, value) if base is not str else str.__str__(value)
    if isinstance(value, Mapping):
        return dict(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(value, (list, tuple, Set)):
        return list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_foreign)
    except JSONValueError:
        raise
    except RecursionError:
        raise JSONValueError("nested too deeply") from None
    except Exception as error:
        raise JSONValueError(f"{type(value).__name__} cannot be written as JSON: {error}") from None


def _foreign(value: Any) -> Any:
    """The hook for types msgspec does not know."""
    dump: Callable[..., Any] | None = getattr(type(value), "model_dump", None)
    if dump is not None:
        return dump(value, mode="json", by_alias=True)
    if isinstance(value, PathLike):
        return fspath(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    raise JSONValueError(f"{type(value).__name__} is not JSON")


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise JSONValueError("text with a lone surrogate is not valid Unicode") from None
    return value


def _key(key: Any) -> str:
    if isinstance(key, Enum):
        key = key.value
    if isinstance(key, str):
        return _text(str.__str__(key))
    if isinstance(key, int) and not isinstance(key, bool):
        return str(int(key))
    raise JSONValueError(f"an object's key must be a string, not {type(key).__name__}")


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values, in whatever order, give equal bytes."""
    return msgspec.json.encode(value, order="sorted")
