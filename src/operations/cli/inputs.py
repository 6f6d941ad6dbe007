"""Read the input of a call from the command line.

    call ID '{"a": 1}'        JSON                     call ID a=1 b.c=x       typed by the schema
    call ID @file.json        a file of JSON           call ID a:='[1, 2]'     a value as JSON
    call ID -                 JSON from the pipe       call ID a=@file         a value from a file

Rule 1: the input has the same limits as a network request, which are checked before it is decoded.
Rule 2: a value is converted to the type of its schema. The call itself validates it, as for every caller.
"""

import os
import re
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from operations._decoding import decode_json
from operations._folders import expanded
from operations._json import (
    WRAPPING_DEPTH,
    JSONLimitError,
    JSONValueError,
    count_values,
    is_list,
    is_object,
    kind_of,
    pointer,
)
from operations.errors import CallError, invalid_argument
from operations.front.limits import Limits
from operations.front.public_errors import too_large
from operations.schema.outline import Outline
from operations.types import JSONObject

_PAIR = re.compile(r"(?P<key>[^=:{\[\"][^=:{\"]*?)(?P<sign>:=|=)(?P<value>.*)", re.DOTALL)
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_BINARY = frozenset({"binary", "byte", "base64"})


def read_input(arguments: Sequence[str], outline: Outline, limits: Limits) -> Any:
    """Return the input for the arguments of a call.

    Raises:
        CallError: `VALIDATION_ERROR` if the arguments do not match the types of the schema; `RESOURCE_EXHAUSTED` if
            they exceed a limit.
    """
    if not arguments:
        return {} if _takes_object(outline) else None
    for argument in arguments:
        if argument.startswith("--") and "=" not in argument:
            raise _unreadable(
                repr(argument), "is not an option of call; see operations call --help"
            )
    pairs = [_PAIR.fullmatch(argument) for argument in arguments]
    if len(arguments) == 1 and (pairs[0] is None or arguments[0].startswith("@")):
        return _whole(arguments[0], limits)
    value: JSONObject = {}
    for argument, pair in zip(arguments, pairs, strict=True):
        if pair is None:
            raise _unreadable(f"{argument!r}", "is neither key=value nor the only argument")
        keys = _keys(pair["key"], outline)
        _put(value, keys, pair["sign"], pair["value"], outline, limits)
    if count_values(value, limits.values) > limits.values:
        raise too_large(f"The input contains more than {limits.values:,} values")
    return value


def put_file(
    value: Any, pair: str, outline: Outline, warn: Callable[[str], None], *, is_streamed: bool
) -> None:
    """Put a file into an input.

    Args:
        value: The input.
        pair: `key=FILE`; the key may have dots, and a repeated key makes a list.
        outline: The schema of the input.
        warn: Receives a warning if the argument does not declare that it is bytes.
        is_streamed: Whether the operation reads the file itself; otherwise the input contains its bytes.

    Raises:
        CallError: `VALIDATION_ERROR` if the argument is not `key=FILE`, or the file cannot be read.
    """
    key, sign, name = pair.partition("=")
    keys = _keys(key, outline)
    if not sign or not key or not name:
        raise _unreadable(f"{pair!r}", "is not key=FILE")
    place = _parent(value, keys)
    file: Any = expanded(name) if is_streamed else _file(name, keys)
    outline = _at(keys, outline)
    items = _binary_items(outline)
    if not is_streamed and items is None and not _is_binary(outline):
        warn(f"{key} is not a file, so {name} is sent in base64; write {key}=@{name} to send text")
    if keys[-1] in place:
        before = place[keys[-1]]
        file = [*before, file] if is_list(before) else [before, file]
    elif items is not None and not _is_binary(outline):
        file = [file]
    place[keys[-1]] = file


def typed(text: str, outline: Outline) -> Any:
    """Convert a value to the type of its schema; return the text if that fails, for validation to report."""
    types = outline.types
    for choice in outline.choices:
        if text == (choice if isinstance(choice, str) else msgspec.json.encode(choice).decode()):
            return choice
    if set(types) == {"string"}:
        return text
    if text.lower() in _WORDS and "boolean" in types:
        return _WORDS[text.lower()]
    if "array" in types and not text.lstrip().startswith("["):
        items = next((each for each in _items(outline) if each.schema), Outline({}))
        return [typed(text, items)]
    try:
        value = msgspec.json.decode(os.fsencode(text))
    except msgspec.DecodeError:
        return text
    if isinstance(value, str) or not _fits(value, types):
        # JSON of an unexpected type is treated as text.
        return text if "string" in types else value
    return value


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = kind_of(value)
    return not types or kind in types or (kind == "integer" and "number" in types)


def _takes_object(outline: Outline) -> bool:
    return "object" in outline.types or bool(outline.properties)


def _whole(argument: str, limits: Limits) -> Any:
    """Return the whole input: JSON, a file, or standard input."""
    if argument == "-":
        return _json(sys.stdin.buffer.read(limits.body_bytes + 1), "standard input", limits)
    if argument.startswith("@"):
        return _json(_file(argument[1:]), argument[1:], limits)
    return _json(os.fsencode(argument), "the input", limits)


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
        return expanded(path).read_bytes()
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror}", keys) from None


def _put(
    value: JSONObject, keys: list[str], sign: str, text: str, outline: Outline, limits: Limits
) -> None:
    """Set one key, which may name a nested property; a repeated key adds to a list."""
    value, last = _parent(value, keys), keys[-1]
    found = _value(sign, text, _at(keys, outline), keys, limits)
    if last in value:
        if not isinstance(value[last], list):
            raise _unreadable(".".join(keys), "is given twice", keys)
        value[last] += found if isinstance(found, list) else [found]
    else:
        value[last] = found


def _keys(name: str, outline: Outline) -> list[str]:
    """Return the keys of a property, which is nested if its name has dots, unless the schema declares that name."""
    keys = name.split(".")
    is_declared = keys[0] not in outline.properties and name in outline.properties
    return [name] if is_declared else keys


def _at(keys: Sequence[str], outline: Outline) -> Outline:
    """Return the schema of a nested property; an empty schema if it is not declared."""
    for key in keys:
        # The object may be one of several alternatives, such as null.
        objects = (outline, *outline.members)
        rest = (each.inner(each.schema.get("additionalProperties")) for each in objects)
        values = (*(each.properties.get(key) for each in objects), *rest)
        outline = next((each for each in values if each is not None and each.schema), Outline({}))
    return outline


def _parent(value: Any, keys: Sequence[str]) -> JSONObject:
    """Return the object in an input that contains the last key; missing objects are added."""
    for key in keys[:-1]:
        value = value.setdefault(key, {}) if is_object(value) else None
    if not is_object(value):
        raise _unreadable(".".join(keys), "is not in an object", keys)
    return value


def _value(sign: str, text: str, outline: Outline, keys: list[str], limits: Limits) -> Any:
    name = ".".join(keys)
    if sign == ":=":
        return _json(os.fsencode(text), name, limits, keys)
    if not text.startswith("@") or len(text) == 1:
        return typed(text, outline)
    data = _file(text[1:], keys)
    if _is_binary(outline):
        encoded_data = b64encode(data).decode("ascii")
        if not any({"content", "filename"} <= each.properties.keys() for each in outline.members):
            return encoded_data
        return {"content": encoded_data, "filename": Path(text[1:]).name}
    items = _binary_items(outline)
    if items is not None:
        return [_value(sign, text, items, keys, limits)]
    try:
        return typed(data.decode(), outline)
    except UnicodeDecodeError:
        return b64encode(data).decode("ascii")


def _is_binary(outline: Outline) -> bool:
    """Return whether a value can be bytes in base64, alone or as one of several alternatives."""
    forms = {
        each.schema.get(key)
        for each in (outline, *outline.members)
        for key in ("contentEncoding", "format")
    }
    return not forms.isdisjoint(_BINARY)


def _binary_items(outline: Outline) -> Outline | None:
    """Return the schema of a list's items, if they can be bytes in base64."""
    return next(filter(_is_binary, _items(outline)), None)


def _items(outline: Outline) -> Iterator[Outline]:
    """Return the schemas of the items, if a value can be a list, alone or as one of several alternatives."""
    return (each.items for each in (outline, *outline.members))


def _unreadable(what: str, reason: str, keys: Sequence[str] = ()) -> CallError:
    """Return an error about `what`, located at `keys` of the input, or about the whole input."""
    return invalid_argument("".join(map(pointer, keys)), reason, "input", subject=what)
