"""What counts as JSON here, how Python values become it, and how to read JSON of unknown shape.

Rule 1: JSON is `dict` with `str` keys, `list`, `str`, `int`, `float`, `bool`, `None`, exactly.
Rule 2: NaN, infinities, lone surrogates and nesting beyond a bound are not JSON, wherever they are.
"""

import dataclasses
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence, Set, ValuesView
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import singledispatch
from ipaddress import IPv4Address, IPv6Address
from os import PathLike, fspath
from typing import Any, TypeGuard, cast
from uuid import UUID

import msgspec

from operations.types import JSONObject

MAX_DEPTH = 64
"""How deep data may nest. A recursive validator given deeper data can exhaust the stack."""

MAX_DIGITS = sys.int_info.default_max_str_digits
TOO_LONG = 10**MAX_DIGITS
TOO_LOW = -TOO_LONG
"""The first integer that Python does not write as digits, because that takes quadratic time."""

_PLAIN = frozenset({bool, type(None)})


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


def is_object(value: Any) -> TypeGuard[JSONObject]:
    """Return whether `value` is a dict."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Return whether `value` is a list."""
    return isinstance(value, list)


def object_of(value: Any) -> JSONObject:
    """Return `value` if it is an object, else an empty one."""
    return value if is_object(value) else {}


def list_of(value: Any) -> list[Any]:
    """Return `value` if it is a list, else an empty one."""
    return value if is_list(value) else []


def text_of(value: Any) -> str:
    """Return `value` if it is text, else an empty string."""
    return value if isinstance(value, str) else ""


def kind_of(value: object) -> str:
    """Return the JSON Schema type of a JSON value; every float is a number, also 1.0."""
    return _KINDS.get(type(value), "object")


_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def pointer(token: str | int) -> str:
    """One reference token of a JSON pointer, with its slash, escaped."""
    return f"/{token}" if isinstance(token, int) else "/" + escape(token)


def escape(token: str) -> str:
    """`token` as it stands in a JSON pointer."""
    return token.replace("~", "~0").replace("/", "~1")


def unescape(token: str) -> str:
    """What stands for `token` in a JSON pointer, as it is."""
    return token.replace("~1", "/").replace("~0", "~")


def to_json(value: Any, max_depth: int = MAX_DEPTH) -> Any:
    """`value` as fresh JSON builtins.

    Beyond the builtins it understands mappings, sequences, sets, enums, dates and times, UUIDs,
    decimals, paths, IP addresses, bytes (as base64), dataclasses, msgspec structs, attrs classes
    and pydantic models. Keys may be what becomes a string or an integer, if no two become the same.

    Raises:
        JSONValueError: If some part is not JSON and cannot become it.
    """
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict:
        if max_depth <= 0:
            raise JSONValueError("nested too deeply")
        result: dict[str, Any] = {}
        for key, item in value.items():
            name = key if type(key) is str and key.isascii() else _key(key)
            # What most items are, which spares a call.
            if type(item) is str and item.isascii():
                result[name] = item
                continue
            try:
                result[name] = to_json(item, max_depth - 1)
            except JSONValueError as error:
                raise JSONValueError(error.reason, pointer(name) + error.path) from None
        if len(result) != len(value):
            raise JSONValueError("two keys of the object are the same in JSON")
        return result
    if kind in _PLAIN:
        return value
    if kind is str:
        return value if value.isascii() else _text(value)
    if kind is int:
        if not TOO_LOW < value < TOO_LONG:
            raise JSONValueError(f"an integer is limited to {MAX_DIGITS} digits")
        return value
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
    """`value` as one of the JSON types; what it holds may still need lifting, and stays as it is.

    Raises:
        JSONValueError: If there is no way.
    """
    if type(value) in _JSON_TYPES:
        return value
    try:
        lifted = value.value if isinstance(value, Enum) else _spell(value)
    except JSONValueError:
        raise
    except Exception as error:
        # Its words stay in the chain: they may hold what no caller should read.
        reason = f"{type(value).__name__} cannot be written as JSON ({type(error).__name__})"
        raise JSONValueError(reason) from error
    # An enum's value may need lifting itself.
    return lift(lifted)


_JSON_TYPES = frozenset({dict, list, str, int, float, bool, type(None)})


@singledispatch
def _spell(value: Any) -> Any:
    """What a value is in JSON, by its class. Here: classes known by what they carry."""
    cls: Any = value.__class__
    if hasattr(cls, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    if hasattr(cls, "__pydantic_serializer__"):
        return cls.__pydantic_serializer__.to_python(value, mode="json", by_alias=True)
    if dataclasses.is_dataclass(cls):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(cls)}
    if hasattr(cls, "__attrs_attrs__"):
        return {field.name: getattr(value, field.name) for field in cls.__attrs_attrs__}
    raise JSONValueError(f"{cls.__name__} is not JSON")


# What makes a subclass of a builtin special is not JSON, nor are its own ideas of text and numbers.
_spell.register(str, str.__str__)
_spell.register(int, int.__int__)
_spell.register(float, float.__float__)


@_spell.register(bytes)
@_spell.register(bytearray)
@_spell.register(memoryview)
def _(value: bytes) -> str:
    return b64encode(value).decode("ascii")


@_spell.register(date)
@_spell.register(time)
def _(value: date | time) -> str:
    text = value.isoformat()
    return text.removesuffix("+00:00") + "Z" if text.endswith("+00:00") else text


@_spell.register
def _(value: timedelta) -> str:
    whole = timedelta(value.days, value.seconds, value.microseconds)
    return cast("str", msgspec.to_builtins(whole))


_spell.register(Decimal, str)
_spell.register(UUID, str)
_spell.register(IPv4Address, str)
_spell.register(IPv6Address, str)
_spell.register(PathLike, fspath)
_spell.register(Mapping, dict)
_spell.register(Sequence, list)
_spell.register(Set, list)
_spell.register(ValuesView, list)


@_spell.register
def _(value: msgspec.Struct) -> Any:
    """As msgspec writes it: its names, its tag, nothing for what is not set."""
    config = value.__struct_config__
    names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    items = {encoded: getattr(value, name) for encoded, name in names}
    if config.array_like:
        return [*items.values()] if config.tag is None else [config.tag, *items.values()]
    if config.omit_defaults:
        # Which defaults count as such is msgspec's to say; unknown types play no part in it.
        kept = msgspec.to_builtins(value, str_keys=True, enc_hook=id)
        items = {name: item for name, item in items.items() if name in kept}
    tag = {} if config.tag is None else {config.tag_field: config.tag}
    return tag | {name: item for name, item in items.items() if item is not msgspec.UNSET}


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise JSONValueError("text with a lone surrogate is not valid Unicode") from None
    return value


def _key(key: Any) -> str:
    """An object's key as text."""
    kind = type(key)  # pyright: ignore[reportUnknownVariableType]
    if kind is not bool and key is not None:
        key = lift(key)
        if type(key) is str:
            return _text(key)
        if type(key) is int:
            return _digits(key)
    raise JSONValueError(f"an object's key must be a string, not {kind.__name__}")


def _digits(key: int) -> str:
    try:
        return str(key)
    except ValueError:
        raise JSONValueError("an object's key has more digits than Python writes") from None


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values, in whatever order, give equal bytes."""
    return msgspec.json.encode(value, order="sorted")
