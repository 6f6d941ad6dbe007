"""From what was typed to the input of a call.

    call ID '{"a": 1}'        JSON                     call ID a=1 b.c=x       typed by the schema
    call ID @file.json        a file of JSON           call ID a:='[1, 2]'     a value as JSON
    call ID -                 JSON from the pipe       call ID a=@file         a value from a file

Rule 1: the same limits apply to it as to a request over a network, before it is decoded.
Rule 2: a value is read as what its schema says. Whether it is valid is for the call to decide, as for every caller.
"""

import re
import sys
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from operations._json import (
    WRAPPING_DEPTH,
    JSONLimitError,
    JSONValueError,
    count_values,
    decode_json,
    is_list,
    is_object,
)
from operations.errors import CallError, ErrorCode
from operations.front.limits import Limits
from operations.front.public_errors import too_large
from operations.schema.outline import Outline
from operations.types import JSONObject

_PAIR = re.compile(r"(?P<key>[^=:{\[\"]+?)(?P<sign>:=|=)(?P<value>.*)", re.DOTALL)
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_BINARY = frozenset({"binary", "byte", "base64"})


def read_input(arguments: Sequence[str], outline: Outline, limits: Limits) -> Any:
    """Return the input that the arguments of a call stand for.

    Raises:
        CallError: `VALIDATION_ERROR`, if they cannot be read as what the schema says; `RESOURCE_EXHAUSTED` beyond a
            limit.
    """
    if not arguments:
        return {} if _takes_object(outline) else None
    pairs = [_PAIR.fullmatch(argument) for argument in arguments]
    if len(arguments) == 1 and (pairs[0] is None or arguments[0].startswith("@")):
        return _whole(arguments[0], limits)
    value: JSONObject = {}
    for argument, pair in zip(arguments, pairs, strict=True):
        if pair is None:
            raise _unreadable(f"{argument!r}", "is neither key=value nor the only argument")
        _put(value, pair["key"].split("."), pair["sign"], pair["value"], outline, limits)
    if count_values(value, limits.values) > limits.values:
        raise too_large(f"The input holds more than {limits.values:,} values")
    return value


def put_file(value: Any, pair: str, *, is_streamed: bool) -> None:
    """Put a file into an input.

    Args:
        value: The input.
        pair: `key=FILE`; the key may have dots, and a repeated key makes a list.
        is_streamed: Whether the operation reads the file itself; otherwise its bytes are put in.

    Raises:
        CallError: `VALIDATION_ERROR` if this is no such pair, or the file cannot be read.
    """
    key, sign, name = pair.partition("=")
    keys = key.split(".")
    if not sign or not key or not name:
        raise _unreadable(f"{pair!r}", "is not key=FILE")
    place: Any = value
    for each in (*keys[:-1], None):
        if not is_object(place):
            raise _unreadable(key, "is not in an object", keys)
        place = place if each is None else place.setdefault(each, {})
    file: Any = Path(name) if is_streamed else _file(name, keys)
    if keys[-1] in place:
        before = place[keys[-1]]
        file = [*before, file] if is_list(before) else [before, file]
    place[keys[-1]] = file


def typed(text: str, outline: Outline, name: str, keys: Sequence[str] = ()) -> Any:
    """One value, as its schema wants it.

    Args:
        text: What was typed.
        outline: Its schema.
        name: What to call it in a message.
        keys: Where it stands in the input.

    Raises:
        CallError: `VALIDATION_ERROR`, if `text` is nothing of the kind.
    """
    types = outline.types
    for choice in outline.choices:
        if text == (choice if isinstance(choice, str) else msgspec.json.encode(choice).decode()):
            return choice
    if set(types) == {"string"}:
        return text
    if text.lower() in _WORDS and "boolean" in types:
        return _WORDS[text.lower()]
    if "array" in types and not text.lstrip().startswith("["):
        return [typed(text, outline.items, name, keys)]
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        if not types or "string" in types:
            return text
        raise _unreadable(name, f"must be of type {outline.kind}", keys) from None
    if isinstance(value, str) or not _fits(value, types):
        # What looks like JSON, but is not of a type that is wanted, is the text that was typed.
        return text if "string" in types else value
    return value


def _fits(value: Any, types: frozenset[str]) -> bool:
    if not types:
        return True
    match value:
        case bool():
            return "boolean" in types
        case None:
            return "null" in types
        case int():
            return bool({"integer", "number"} & types)
        case float():
            return "number" in types
        case list():
            return "array" in types
        case _:
            return "object" in types


def _takes_object(outline: Outline) -> bool:
    return "object" in outline.types or bool(outline.properties)


def _whole(argument: str, limits: Limits) -> Any:
    """Return the whole input: JSON, a file, or standard input."""
    if argument == "-":
        return _json(sys.stdin.buffer.read(limits.body_bytes + 1), "standard input", limits)
    if argument.startswith("@"):
        return _json(_file(argument[1:]), argument[1:], limits)
    return _json(argument.encode(), "the input", limits)


def _json(text: bytes, what: str, limits: Limits, keys: Sequence[str] = ()) -> Any:
    try:
        return decode_json(
            text,
            max_bytes=limits.body_bytes,
            max_values=limits.values,
            max_depth=limits.depth + WRAPPING_DEPTH,
        )
    except JSONLimitError as error:
        if error.limit == "depth":
            raise _unreadable(what, error.reason, keys) from None
        raise too_large(f"{what} {error.reason}") from None
    except JSONValueError as error:
        plain = keys or text.lstrip()[:1] in (b"{", b"[")
        hint = "" if plain else "; for a single value write key=value"
        raise _unreadable(what, f"{error.reason}{hint}", keys) from None


def _file(path: str, keys: Sequence[str] = ()) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror}", keys) from None


def _put(
    value: JSONObject, keys: list[str], sign: str, text: str, outline: Outline, limits: Limits
) -> None:
    """Set one key, which may lead into objects, and repeat for lists."""
    name = ".".join(keys)
    if keys[0] not in outline.properties and name in outline.properties:
        keys = [name]
    for key in keys[:-1]:
        outline = outline.properties.get(key, Outline({}))
        inner = value.setdefault(key, {})
        if not isinstance(inner, dict):
            raise _unreadable(name, "goes into what was given as a value before", keys)
        value = cast("JSONObject", inner)
    last = keys[-1]
    wanted = outline.properties.get(last, Outline({}))
    found = _value(sign, text, wanted, keys, limits)
    if last in value:
        if not isinstance(value[last], list):
            raise _unreadable(name, "is given twice", keys)
        value[last] += found if isinstance(found, list) else [found]
    else:
        value[last] = found


def _value(sign: str, text: str, outline: Outline, keys: list[str], limits: Limits) -> Any:
    name = ".".join(keys)
    if sign == ":=":
        return _json(text.encode(), name, limits, keys)
    if not text.startswith("@") or len(text) == 1:
        return typed(text, outline, name, keys)
    data = _file(text[1:], keys)
    form = outline.schema.get("contentEncoding") or outline.schema.get("format")
    if form in _BINARY:
        return b64encode(data).decode("ascii")
    try:
        return typed(data.decode(), outline, name, keys)
    except UnicodeDecodeError:
        return b64encode(data).decode("ascii")


def _unreadable(what: str, reason: str, keys: Sequence[str] = ()) -> CallError:
    """An error about `what`, which stands at `keys` of the input, or is the whole of it."""
    path = "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in keys)
    fault = {"path": path, "message": reason, "keyword": "input"}
    return CallError(ErrorCode.VALIDATION_ERROR, f"{what} {reason}", {"errors": [fault]})
