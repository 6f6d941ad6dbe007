"""Define which values are JSON, and convert Python values to it.

`_decoding` reads JSON text, and `_objects` converts objects faster.

Rule 1: JSON is `dict` with `str` keys, `list`, `str`, `int`, `float`, `bool`, `None`, exactly.
Rule 2: NaN, infinities, lone surrogates and nesting beyond a bound are not JSON, at any depth.
Rule 3: a value has the same JSON form in every place: as input and output, in the process and on the wire. Its form
        depends on its type only: a `Decimal` is always text.
Rule 4: a value that becomes part of a path contains no dot segment, under any number of encodings.
"""

import dataclasses
import re
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, ValuesView
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import singledispatch
from ipaddress import IPv4Address, IPv6Address
from os import PathLike, fspath
from typing import Any, Final, Literal, TypeAlias, TypeGuard, cast
from urllib.parse import unquote
from uuid import UUID

import msgspec

from operations.base.text import shortened
from operations.base.types import JSONObject
from operations.base.work import CONVERTED, SMALL, BudgetSpentError, InlineWork, Work

MAX_DEPTH = 64
"""How deep data may nest. A recursive validator given deeper data can exhaust the stack."""

MAX_REQUEST_VALUES = 100_000
"""How many values a request or an event may hold by default."""

MAX_RESPONSE_VALUES = 250_000
"""How many values a response of another service may hold by default."""

MAX_DOCUMENT_VALUES = 2_000_000
"""How many values a document that describes an API or an operation may hold."""

WRAPPING_DEPTH = 8
"""How many levels a message may add around the data it carries."""

MAX_DOCUMENT_DEPTH = 500
"""How deep a document that describes an API or an operation may nest."""

MAX_MESSAGE_DEPTH = MAX_DEPTH + WRAPPING_DEPTH
"""How deep a message may nest: its data and the envelope around it."""

MAX_DIGITS = sys.int_info.default_max_str_digits
TOO_LONG = 10**MAX_DIGITS
TOO_LOW = -TOO_LONG
"""The first integer that Python does not write as digits, because that takes quadratic time."""

SCALARS: frozenset[type] = frozenset({str, int, float, bool, type(None)})
JSON_TYPES = SCALARS | {dict, list}
"""The exact types of JSON values."""

_MAX_ENCODINGS: Final = 8
"""The largest number of nested percent-encodings that are decoded; paths with more are rejected."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DOT_SEGMENT = re.compile(r"(?:\A|[/\\])\s*\.\.?\s*(?:[;/\\]|\Z)")
"""A segment `.` or `..`. Some servers truncate a segment at `;` before they resolve dot segments."""

_PLAIN = frozenset({bool, type(None)})
_PLAIN_ITEMS = _PLAIN | {str, int}


class JSONValueError(ValueError):
    """Raised for a value that is not JSON and cannot be converted to it.

    Attributes:
        path: JSON pointer to the place; empty for the value itself.
        reason: A phrase that begins with a verb: "is a set, which is not JSON".
    """

    def __init__(self, reason: str, path: str = "") -> None:
        # The path may contain the lone surrogate that is being reported: escape it.
        self.path = path if path.isascii() else path.encode(errors="replace").decode()
        self.reason = reason
        super().__init__(f"{self.path or 'the value'} {reason}")


class JSONLimitError(JSONValueError):
    """Raised for JSON text that exceeds a limit.

    Attributes:
        limit: The limit that was exceeded.
    """

    def __init__(self, reason: str, limit: Literal["bytes", "values", "depth"]) -> None:
        super().__init__(reason)
        self.limit = limit


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
    """Return one reference token of a JSON pointer, with its slash, escaped."""
    return f"/{token}" if isinstance(token, int) else "/" + escape(token)


MAX_NAME = 400
"""Characters of a property name that messages show and caches store. A third party may choose names of any length."""


def short_pointer(token: str | int) -> str:
    """Return a token as `pointer` does, for a message: a long name is cut, because each issue below it repeats it."""
    return pointer(token if isinstance(token, int) else shortened(token, MAX_NAME))


Path: TypeAlias = tuple[Any, ...]
"""A path as nested tuples, last token first: `(token, (token, ()))`. Converted to text only if needed."""


def pointer_to(path: Path) -> str:
    """Return a path as a JSON pointer, for a message."""
    tokens: list[str] = []
    while path:
        tokens.append(short_pointer(path[0]))
        path = path[1]
    return "".join(reversed(tokens))


def escape(token: str) -> str:
    """Return `token` escaped for a JSON pointer."""
    return token.replace("~", "~0").replace("/", "~1")


def unescape(token: str) -> str:
    """Return a token of a JSON pointer without its escapes."""
    return token.replace("~1", "/").replace("~0", "~")


def with_texts(value: Any, change: Callable[[str], Any], *, names: bool = False) -> Any:
    """Return a JSON value with every text in it changed; with `names`, the names of properties too."""
    if isinstance(value, str):
        return change(value)
    if is_list(value):
        return [with_texts(item, change, names=names) for item in value]
    if is_object(value):
        return {
            change(name) if names else name: with_texts(item, change, names=names)
            for name, item in value.items()
        }
    return value


def nests_within(value: Any, max_depth: int) -> bool:
    """Return whether a decoded JSON value has at most `max_depth` levels. Checking the text would take longer."""
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict:
        value = value.values()
    elif kind is not list:
        return True
    if max_depth <= 0:
        return False
    for item in value:
        kind = type(item)  # pyright: ignore[reportUnknownVariableType]
        if (kind is dict or kind is list) and not nests_within(item, max_depth - 1):
            return False
    return True


def as_json(value: Any, max_depth: int = MAX_DEPTH) -> Any:
    """Return `value` itself if it consists of JSON types only, otherwise its copy by `to_json`.

    Raises:
        JSONValueError: If some part is not JSON and cannot be converted to it.
    """
    if not is_plain(value, max_depth):
        return to_json(value, max_depth)
    try:
        # Runs in C; raises for lone surrogates and for integers of more than 64 bits.
        _write(value)
    except (OverflowError, UnicodeEncodeError):
        return to_json(value, max_depth)
    return value


_write = msgspec.msgpack.Encoder().encode


def is_plain(value: Any, max_depth: int) -> bool:
    """Return whether `value` has exactly the types of JSON and no more than `max_depth` levels."""
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict:
        for key in value:
            if type(key) is not str:
                return False
        items: Iterable[Any] = value.values()
    elif kind is list:
        items = value
    else:
        return kind in _PLAIN_ITEMS or (kind is float and value - value == 0)
    if max_depth <= 0:
        return False
    for item in items:  # noqa: SIM110 - a generator takes twice as long
        if type(item) not in _PLAIN_ITEMS and not is_plain(item, max_depth - 1):
            return False
    return True


def to_json(
    value: Any, max_depth: int = MAX_DEPTH, work: Work | None = None, units: int = CONVERTED
) -> Any:
    """Return `value` as fresh JSON builtins.

    Beyond the builtins it converts mappings, sequences, sets, enums, dates and times, UUIDs, decimals (to text),
    paths, IP addresses, bytes (to base64), dataclasses, msgspec structs, attrs classes and pydantic models.
    Keys may be of any type that converts to a string or an integer, unless two keys become equal.

    Args:
        value: The value.
        max_depth: The largest number of levels.
        work: The budget; by default unlimited.
        units: The units of work for each value.

    Raises:
        BudgetSpentError: If the budget is spent.
        JSONValueError: If some part is not JSON and cannot be converted to it.
    """
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict:
        if max_depth <= 0:
            raise JSONValueError(_TOO_DEEP)
        if work is not None:
            # As `Work.spend`, without the call.
            work.left -= (len(value) + 1) * units
            if work.left < 0 or work.is_stopped:
                raise BudgetSpentError
        result: dict[str, Any] = {}
        for key, item in value.items():
            name = key if type(key) is str and key.isascii() else _key(key)
            kind = type(item)  # pyright: ignore[reportUnknownVariableType]
            # Most items are scalars, which need no recursive call.
            if (
                (kind is str and item.isascii())
                or kind in _PLAIN
                or (kind is int and TOO_LOW < item < TOO_LONG)
            ):
                result[name] = item
                continue
            try:
                result[name] = to_json(item, max_depth - 1, work, units)
            except JSONValueError as error:
                raise JSONValueError(error.reason, short_pointer(name) + error.path) from None
        if len(result) != len(value):
            raise JSONValueError("has two keys that are the same in JSON")
        return result
    if kind in _PLAIN:
        return value
    if kind is str:
        return value if value.isascii() else _text(value)
    if kind is int:
        if not TOO_LOW < value < TOO_LONG:
            raise JSONValueError(f"is an integer of more than {MAX_DIGITS} digits")
        return value
    if kind is list:
        if max_depth <= 0:
            raise JSONValueError(_TOO_DEEP)
        if work is not None:
            # As `Work.spend`, without the call.
            work.left -= (len(value) + 1) * units
            if work.left < 0 or work.is_stopped:
                raise BudgetSpentError
        items: list[Any] = []
        for index, item in enumerate(value):
            if type(item) is str and item.isascii():
                items.append(item)
                continue
            try:
                items.append(to_json(item, max_depth - 1, work, units))
            except JSONValueError as error:
                raise JSONValueError(error.reason, pointer(index) + error.path) from None
        return items
    if kind is float:
        # The difference is 0 for every number and NaN for NaN and both infinities.
        if value - value != 0:
            raise JSONValueError(f"is {value}, which is not a JSON number")
        return value
    return to_json(lift(value), max_depth, work, units)


def to_json_within(value: Any, work: Work | None = None) -> Any:
    """Return `value` as fresh JSON builtins, within a budget; by default that of the event loop.

    Raises:
        BudgetSpentError: If the budget is spent.
        JSONValueError: If some part is not JSON and cannot be converted to it.
    """
    if work is None:
        # Most values are small, which is known sooner in C than by counting.
        try:
            if len(_write(value)) <= SMALL:
                return to_json(value)
        except Exception:  # noqa: BLE001, S110 - it contains objects, which `to_json` converts or rejects
            pass
        work = InlineWork()
    return to_json(value, MAX_DEPTH, work)


LONE_SURROGATE = "contains a lone surrogate, which is not valid Unicode"
_TOO_DEEP = f"is nested too deeply: data may have {MAX_DEPTH} levels"


def lift(value: Any) -> Any:
    """Return `value` as one of the JSON types; the values inside it stay unconverted.

    Raises:
        JSONValueError: If it cannot be converted.
    """
    if type(value) in JSON_TYPES:
        return value
    try:
        lifted = value.value if isinstance(value, Enum) else _spell(value)
    except JSONValueError:
        raise
    except Exception as error:
        # The text of the original error may contain secrets: only the exception chain has it.
        reason = f"is {_named(value)} that cannot be written as JSON ({type(error).__name__})"
        raise JSONValueError(reason) from error
    # The value of an enum may need conversion too.
    return lift(lifted)


@singledispatch
def _spell(value: Any) -> Any:
    """Return the JSON form of a value by its class.

    This default handles classes that are recognised by their attributes.
    """
    cls: Any = value.__class__
    if hasattr(cls, "__pydantic_serializer__"):
        return cls.__pydantic_serializer__.to_python(value, mode="json", by_alias=True)
    if dataclasses.is_dataclass(cls):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(cls)}
    if hasattr(cls, "__attrs_attrs__"):
        return {field.name: getattr(value, field.name) for field in cls.__attrs_attrs__}
    raise JSONValueError(f"is {_named(value)}, which is not JSON")


def _named(value: object) -> str:
    noun = type(value).__name__
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


# Subclasses of builtins become the builtin, without their own conversions.
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
    """Return the object or array that msgspec would write: with encoded names and the tag, without unset fields."""
    config = value.__struct_config__
    names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    items = {encoded: getattr(value, name) for encoded, name in names}
    if config.array_like:
        return [*items.values()] if config.tag is None else [config.tag, *items.values()]
    if config.omit_defaults:
        # msgspec omits values that equal their defaults; the hook keeps it from failing on types that it does not know.
        kept = msgspec.to_builtins(value, str_keys=True, enc_hook=id)
        items = {name: item for name, item in items.items() if name in kept}
    tag = {} if config.tag is None else {config.tag_field: config.tag}
    return tag | {name: item for name, item in items.items() if item is not msgspec.UNSET}


MASK = "**********"
"""The JSON form of pydantic's secrets."""


def reject_masked(plain: Any, value: Any) -> None:
    """Raise `JSONValueError` if a secret in `value` is masked in `plain`, its JSON form.

    A result may have a masked secret, but a function must not receive the mask in place of its argument.
    """
    path = _path_of_mask(plain)
    if path is not None and _holds_secret(value):
        raise JSONValueError("is a secret, which JSON masks; pass its text", path)


def _path_of_mask(plain: Any) -> str | None:
    if plain == MASK:
        return ""
    parts = plain.items() if is_object(plain) else enumerate(list_of(plain))
    for token, item in parts:
        path = _path_of_mask(item)
        if path is not None:
            return short_pointer(token) + path
    return None


def _holds_secret(value: Any) -> bool:
    cls: Any = value.__class__
    return hasattr(cls, "get_secret_value") or any(map(_holds_secret, _parts_of(value)))


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, (Mapping, list, tuple, Set)):
        return value.values() if isinstance(value, Mapping) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    cls: Any = value.__class__
    for attribute in ("__struct_fields__", "model_fields", "__dataclass_fields__"):
        if hasattr(cls, attribute):
            return [getattr(value, name, None) for name in getattr(cls, attribute)]
    return [getattr(value, field.name, None) for field in getattr(cls, "__attrs_attrs__", ())]


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise JSONValueError(LONE_SURROGATE) from None
    return value


def _key(key: Any) -> str:
    """Return an object's key as text."""
    if type(key) is not bool and key is not None:
        lifted = lift(key)
        if type(lifted) is str:
            return _text(lifted)
        if type(lifted) is int:
            return str(to_json(lifted))
    raise JSONValueError(f"has {_named(key)} as key, which is not a string")


def canonical(value: Any) -> bytes:
    """Return JSON text with sorted keys and no spaces: equal values give equal bytes."""
    return msgspec.json.encode(value, order="sorted")


def count_values(value: Any, most: int) -> int:
    """Return the number of JSON values in `value`, itself included; stop counting beyond `most`."""
    count = 1
    waiting: list[Any] = [value]
    for held in waiting:
        if isinstance(held, dict):
            inner: Iterable[Any] = cast("JSONObject", held).values()
        elif isinstance(held, (list, tuple)):
            inner = cast("list[Any]", held)
        else:
            continue
        count += len(held)  # pyright: ignore[reportUnknownArgumentType]
        if count > most:
            break
        # The list grows during the loop, so that nested values are visited as well.
        waiting += [each for each in inner if type(each) not in SCALARS]
    return count


def unsafe_in_path(text: str) -> str:
    """Return what a path may not contain under any number of encodings; "" if `text` contains none of it."""
    for _ in range(_MAX_ENCODINGS):
        if _CONTROL.search(text):
            return "control characters"
        if _DOT_SEGMENT.search(text):
            return "a dot segment"
        decoded = unquote(text, errors="replace")
        if decoded == text:
            return ""
        text = decoded
    return "too many layers of encoding"
