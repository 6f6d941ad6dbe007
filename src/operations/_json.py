"""Define which values are JSON, convert Python values to it, and decode JSON text within bounds.

Rule 1: JSON is `dict` with `str` keys, `list`, `str`, `int`, `float`, `bool`, `None`, exactly.
Rule 2: NaN, infinities, lone surrogates and nesting beyond a bound are not JSON, at any depth.
Rule 3: a value has the same JSON form in every place: as input and output, in the process and on the wire. Its form
        depends on its type only: a `Decimal` is always text.
Rule 4: JSON text from outside is decoded by `decode_json`, or by a typed decoder after `enforce_bounds`: its bytes,
        values and depth are checked before anything is built.
"""

import dataclasses
import gc
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, ValuesView
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import singledispatch
from ipaddress import IPv4Address, IPv6Address
from itertools import accumulate
from os import PathLike, fspath
from typing import Any, Literal, TypeGuard, TypeVar, cast
from uuid import UUID

import msgspec

from operations.types import JSONObject

ValueT = TypeVar("ValueT")

MAX_DEPTH = 64
"""How deep data may nest. A recursive validator given deeper data can exhaust the stack."""

MAX_REQUEST_VALUES = 100_000
"""How many values a request or an event may hold by default."""

MAX_RESPONSE_VALUES = 250_000
"""How many values a response of another service may hold by default."""

MAX_DOCUMENT_VALUES = 2_000_000
"""How many values a document may hold that describes an API or an operation."""

WRAPPING_DEPTH = 8
"""How many levels a message may add around the data it carries."""

MAX_DOCUMENT_DEPTH = 500
"""How deep a document may nest that describes an API or an operation."""

MAX_MESSAGE_DEPTH = MAX_DEPTH + WRAPPING_DEPTH
"""How deep a message may nest: its data and the envelope around it."""

MAX_DIGITS = sys.int_info.default_max_str_digits
TOO_LONG = 10**MAX_DIGITS
TOO_LOW = -TOO_LONG
"""The first integer that Python does not write as digits, because that takes quadratic time."""

_PLAIN = frozenset({bool, type(None)})
_PLAIN_ITEMS = _PLAIN | {str, int}


class JSONValueError(ValueError):
    """Raised for a value that is not JSON and cannot be converted to it.

    Attributes:
        path: JSON pointer to the place; empty for the value itself.
        reason: A phrase that begins with a verb: "is a set, which is not JSON".
    """

    def __init__(self, reason: str, path: str = "") -> None:
        # A path must not carry the lone surrogate that it reports.
        self.path = path if path.isascii() else path.encode(errors="replace").decode()
        self.reason = reason
        super().__init__(f"{self.path or 'the value'} {reason}")


class JSONLimitError(JSONValueError):
    """Raised for JSON text that exceeds a limit.

    Attributes:
        limit: Which one.
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


def escape(token: str) -> str:
    """Return `token` escaped for a JSON pointer."""
    return token.replace("~", "~0").replace("/", "~1")


def unescape(token: str) -> str:
    """Return a token of a JSON pointer without its escapes."""
    return token.replace("~1", "/").replace("~0", "~")


def as_json(value: Any, max_depth: int = MAX_DEPTH) -> Any:
    """Return `value` itself if it consists of JSON types only, otherwise its copy by `to_json`.

    Raises:
        JSONValueError: If some part is not JSON and cannot be converted to it.
    """
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict:
        for key, item in value.items():
            # Most objects hold scalars only: skip a call.
            if type(item) not in _PLAIN_ITEMS or type(key) is not str:
                if not _is_plain(value, max_depth):
                    return to_json(value, max_depth)
                break
    elif not _is_plain(value, max_depth):
        return to_json(value, max_depth)
    try:
        # In C: raises for lone surrogates and for integers of more than 64 bits.
        _write(value, _written)
    except (OverflowError, UnicodeEncodeError):
        return to_json(value, max_depth)
    return value


_write = msgspec.msgpack.Encoder().encode_into
_written = bytearray()


def _is_plain(value: Any, max_depth: int) -> bool:
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
        if type(item) not in _PLAIN_ITEMS and not _is_plain(item, max_depth - 1):
            return False
    return True


def to_json(value: Any, max_depth: int = MAX_DEPTH) -> Any:
    """Return `value` as fresh JSON builtins.

    Beyond the builtins it converts mappings, sequences, sets, enums, dates and times, UUIDs, decimals (to text),
    paths, IP addresses, bytes (to base64), dataclasses, msgspec structs, attrs classes and pydantic models.
    Keys may be anything that becomes a string or an integer, unless two become the same.

    Raises:
        JSONValueError: If some part is not JSON and cannot be converted to it.
    """
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict:
        if max_depth <= 0:
            raise JSONValueError(_TOO_DEEP)
        result: dict[str, Any] = {}
        for key, item in value.items():
            name = key if type(key) is str and key.isascii() else _key(key)
            kind = type(item)  # pyright: ignore[reportUnknownVariableType]
            # Most items are scalars: skip a call.
            if (
                (kind is str and item.isascii())
                or kind in _PLAIN
                or (kind is int and TOO_LOW < item < TOO_LONG)
            ):
                result[name] = item
                continue
            try:
                result[name] = to_json(item, max_depth - 1)
            except JSONValueError as error:
                raise JSONValueError(error.reason, pointer(name) + error.path) from None
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
        items: list[Any] = []
        for index, item in enumerate(value):
            if type(item) is str and item.isascii():
                items.append(item)
                continue
            try:
                items.append(to_json(item, max_depth - 1))
            except JSONValueError as error:
                raise JSONValueError(error.reason, pointer(index) + error.path) from None
        return items
    if kind is float:
        # The difference is 0 for every number and NaN for NaN and both infinities.
        if value - value != 0:
            raise JSONValueError(f"is {value}, which is not a JSON number")
        return value
    return to_json(lift(value), max_depth)


_TOO_DEEP = f"is nested too deeply: data may have {MAX_DEPTH} levels"


def lift(value: Any) -> Any:
    """Return `value` as one of the JSON types; the values inside it stay unconverted.

    Raises:
        JSONValueError: If it cannot be converted.
    """
    if type(value) in _JSON_TYPES:
        return value
    try:
        lifted = value.value if isinstance(value, Enum) else _spell(value)
    except JSONValueError:
        raise
    except Exception as error:
        # The error's text stays in the chain: it may contain secrets.
        reason = f"is {_named(value)} that cannot be written as JSON ({type(error).__name__})"
        raise JSONValueError(reason) from error
    # An enum's value may need lifting itself.
    return lift(lifted)


_JSON_TYPES = frozenset({dict, list, str, int, float, bool, type(None)})


@singledispatch
def _spell(value: Any) -> Any:
    """Return the JSON form of a value by its class. Here: classes known by their attributes."""
    cls: Any = value.__class__
    if hasattr(cls, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
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
    """Return the object or array that msgspec would write: encoded names, tag, without unset fields."""
    config = value.__struct_config__
    names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    items = {encoded: getattr(value, name) for encoded, name in names}
    if config.array_like:
        return [*items.values()] if config.tag is None else [config.tag, *items.values()]
    if config.omit_defaults:
        # msgspec decides which values equal their defaults; the hook keeps it from failing at other types.
        kept = msgspec.to_builtins(value, str_keys=True, enc_hook=id)
        items = {name: item for name, item in items.items() if name in kept}
    tag = {} if config.tag is None else {config.tag_field: config.tag}
    return tag | {name: item for name, item in items.items() if item is not msgspec.UNSET}


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise JSONValueError("contains a lone surrogate, which is not valid Unicode") from None
    return value


def _key(key: Any) -> str:
    """Return an object's key as text."""
    if type(key) is not bool and key is not None:
        lifted = lift(key)
        if type(lifted) is str:
            return _text(lifted)
        if type(lifted) is int:
            return _digits(lifted)
    raise JSONValueError(f"has {_named(key)} as key, which is not a string")


def _digits(key: int) -> str:
    try:
        return str(key)
    except ValueError:
        raise JSONValueError(f"has a key of more than {MAX_DIGITS} digits") from None


def canonical(value: Any) -> bytes:
    """Return JSON text with sorted keys and no spaces: equal values give equal bytes."""
    return msgspec.json.encode(value, order="sorted")


_LEAVES = frozenset({str, int, float, bool, type(None)})


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
        waiting += [each for each in inner if type(each) not in _LEAVES]
    return count


# ------------------------------------------------------------ decoding

LARGE = 64 * 1024
"""Bytes of JSON that may build so many objects that the garbage collector runs several times."""


def build_from(decode: Callable[[bytes], ValueT], raw: bytes) -> ValueT:
    """Decode with a decoder of msgspec.

    The garbage collector waits meanwhile if the text is large: nothing that is being built is garbage, and visiting it
    again and again takes several times as long as building it.
    """
    if len(raw) < LARGE or not gc.isenabled():
        return decode(raw)
    gc.disable()
    try:
        return decode(raw)
    finally:
        gc.enable()


def decode_json(
    raw: bytes | str,
    *,
    max_values: int,
    max_bytes: int | None = None,
    max_depth: int = MAX_MESSAGE_DEPTH,
) -> Any:
    """Return the value in a JSON text from outside. Of duplicate keys, the last one wins.

    Raises:
        JSONLimitError: If it is larger, longer or deeper than allowed; nothing was built then.
        JSONValueError: If it is not JSON.
    """
    if isinstance(raw, str):
        try:
            raw = raw.encode()
        except UnicodeEncodeError:
            raise JSONValueError("contains a lone surrogate, which is not valid Unicode") from None
    enforce_bounds(raw, max_values=max_values, max_bytes=max_bytes, max_depth=max_depth)
    try:
        return build_from(_decode, raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JSONValueError(f"is not JSON: {error}") from None
    except RecursionError:
        raise JSONLimitError("is nested too deeply", "depth") from None


_decode = msgspec.json.Decoder().decode


def enforce_bounds(
    raw: bytes,
    *,
    max_values: int,
    max_bytes: int | None = None,
    max_depth: int = MAX_MESSAGE_DEPTH,
) -> None:
    """Raise an error for a JSON text that is too large to be decoded. Malformed text may pass.

    Raises:
        JSONLimitError: If it has more than `max_bytes` bytes, `max_values` values or `max_depth` levels.
    """
    if max_bytes is not None and len(raw) > max_bytes:
        raise JSONLimitError(f"is larger than {max_bytes:,} bytes", "bytes")
    if len(raw) > _HUGE:
        _enforce_in_slices(raw, max_values, max_depth)
        return
    # A value takes at least one byte and a separator.
    may_have_many = len(raw) >= 2 * max_values
    if len(raw) < 2 * max_depth and not may_have_many:
        return
    # Brackets inside strings count too, so these are upper bounds: they may accept, but not reject.
    containers = raw.count(b"[") + raw.count(b"{")
    may_have_many = may_have_many and containers + raw.count(b",") >= max_values
    if not may_have_many and containers <= max_depth:
        return
    raw = _without_escapes(raw)
    if may_have_many:
        _enforce_count(raw, max_values)
    if containers > max_depth:
        _enforce_depth(raw, max_depth)


_HUGE = 8 * 1024 * 1024
"""Bytes that are not scanned in one piece, so that other threads have their turn in between."""


def _enforce_in_slices(raw: bytes, max_values: int, max_depth: int) -> None:
    """Check a long text a slice at a time: beyond a limit, the rest of it costs nothing."""
    count, depth, inside, opened, start = 1, 0, 0, b"", 0
    while start < len(raw):
        part = raw[start : start + _SLICE * 4]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            # An escaped character stays in one slice with its backslash.
            part = raw[start : start + len(part) + 1]
        start += len(part)
        text, inside = _outside_strings(_without_escapes(part), inside)
        text = opened + text
        opened = text[-1:] if text[-1:] in (b"[", b"{") else b""
        text = text[: len(text) - len(opened)]
        openings = text.count(b"[") + text.count(b"{")
        count += text.count(b",") + openings - text.count(b"[]") - text.count(b"{}")
        if count > max_values:
            raise JSONLimitError(f"holds more than {max_values:,} values", "values")
        if depth + openings > max_depth:
            steps = text.translate(_BRACKETS, _NOT_BRACKETS)
            if max(accumulate(memoryview(steps).cast("b"), initial=depth)) > max_depth:
                raise JSONLimitError(f"is nested too deeply: more than {max_depth} levels", "depth")
        depth += openings - text.count(b"]") - text.count(b"}")


def _outside_strings(raw: bytes, inside: int) -> tuple[bytes, int]:
    """Return a text without spaces and with one letter for each string, and whether it ends inside a string."""
    parts = raw.split(b'"')
    # Strings, which are every other part, become one letter each.
    text = b"s".join(parts[inside::2])
    if inside:
        text = b"s" + text
    is_open = (inside + len(parts)) % 2 == 0
    if is_open:
        text += b"s"
    return text.translate(None, _SPACE), int(is_open)


def _without_escapes(raw: bytes) -> bytes:
    """Return `raw` without escaped quotes, so that every quote begins or ends a string."""
    if b"\\" not in raw:
        return raw
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"")


_SLICE = 1 << 18
_SPACE = b" \t\n\r"


def _enforce_count(raw: bytes, max_values: int) -> None:
    """Count exactly, a slice at a time: beyond the limit, the rest of the text costs nothing."""
    count, inside, opened = 1, 0, b""
    for start in range(0, len(raw), _SLICE):
        text, inside = _outside_strings(raw[start : start + _SLICE], inside)
        text = opened + text
        # An opening bracket at the end waits for the next slice, which shows whether the container is empty.
        opened = text[-1:] if text[-1:] in (b"[", b"{") else b""
        text = text[: len(text) - len(opened)]
        count += text.count(b",") + text.count(b"[") + text.count(b"{")
        count -= text.count(b"[]") + text.count(b"{}")
        if count > max_values:
            raise JSONLimitError(f"holds more than {max_values:,} values", "values")


_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_FEW_LEVELS = 8


def _enforce_depth(raw: bytes, max_depth: int) -> None:
    """Measure the depth exactly, from the quotes and brackets alone."""
    # Removing adjacent quotes does not change on which side of a string anything else is.
    structure = raw.translate(None, _NOT_STRUCTURE).replace(b'""', b"")
    steps = b"".join(structure.split(b'"')[::2]).translate(_BRACKETS)
    left = steps
    for _ in range(min(max_depth, _FEW_LEVELS)):
        # Each pass removes the innermost containers: few texts have more left after these.
        left = left.replace(b"\x01\xff", b"")
        if not left:
            return
    if max(accumulate(memoryview(steps).cast("b")), default=0) > max_depth:
        raise JSONLimitError(f"is nested too deeply: more than {max_depth} levels", "depth")
