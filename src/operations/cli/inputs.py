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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from operations.base.errors import CallError, invalid_argument
from operations.base.files import expanded
from operations.base.json.decoding import decode_json
from operations.base.json.values import (
    WRAPPING_DEPTH,
    JSONLimitError,
    JSONValueError,
    count_values,
    is_object,
    kind_of,
    pointer,
)
from operations.base.types import JSONObject
from operations.front.limits import Limits
from operations.front.public_errors import too_large
from operations.schema.outline import Outline

_PAIR = re.compile(r"(?P<key>[^=:{\[\"][^=:{\"]*?)(?P<sign>:=|=)(?P<value>.*)", re.DOTALL)
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_BINARY = frozenset({"binary", "byte", "base64"})

_MAX_INLINE = 256 * 1024
"""The size in bytes of the largest file whose content is part of the input of an operation that accepts files."""


def read_input(
    arguments: Sequence[str], outline: Outline, limits: Limits, *, streams_files: bool = False
) -> Any:
    """Return the input for the arguments of a call.

    Args:
        arguments: The arguments.
        outline: The schema of the input.
        limits: The limits on sizes.
        streams_files: Whether the operation reads files itself, so that the input contains the paths of large ones.

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
        reader = _Reader(pair["sign"], keys, limits, streams_files)
        _put(value, keys, reader.value(pair["value"], _at(keys, outline)))
    if count_values(value, limits.values) > limits.values:
        raise too_large(f"The input contains more than {limits.values:,} values")
    return value


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
        return _json(_file(expanded(argument[1:])), argument[1:], limits)
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


def _file(path: Path, keys: Sequence[str] = ()) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(str(path), f"cannot be read: {error.strerror}", keys) from None


def _is_large(path: Path) -> bool:
    """Return whether a file is too large to be part of an input; False if it cannot be read."""
    with suppress(OSError):
        return path.is_file() and path.stat().st_size > _MAX_INLINE
    return False


def _put(value: JSONObject, keys: list[str], found: Any) -> None:
    """Set one key, which may name a nested property; a repeated key adds to a list."""
    value, last = _parent(value, keys), keys[-1]
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


class _Reader(NamedTuple):
    """Reads the value of one key."""

    sign: str
    keys: Sequence[str]
    limits: Limits
    streams_files: bool

    def value(self, text: str, outline: Outline) -> Any:
        """Return the value in the text of an argument, or in the file that it names."""
        if self.sign == ":=":
            return _json(os.fsencode(text), ".".join(self.keys), self.limits, self.keys)
        if not text.startswith("@") or len(text) == 1:
            return typed(text, outline)
        is_binary = _is_binary(outline)
        items = next(filter(_is_binary, _items(outline)), None)
        if items is not None and not is_binary:
            return [self.value(text, items)]
        path = expanded(text[1:])
        # The content of a small file is in the input, so that the call can be approved.
        if self.streams_files and is_binary and _is_large(path):
            return path
        data = _file(path, self.keys)
        if is_binary:
            content = b64encode(data).decode("ascii")
            if any({"content", "filename"} <= each.properties.keys() for each in outline.members):
                return {"content": content, "filename": path.name}
            return content
        try:
            return typed(data.decode(), outline)
        except UnicodeDecodeError:
            # A part of a form may be a file whose schema is that of a text.
            return path if self.streams_files else b64encode(data).decode("ascii")


def _is_binary(outline: Outline) -> bool:
    """Return whether a value can be bytes in base64, alone or as one of several alternatives."""
    forms = {
        each.schema.get(key)
        for each in (outline, *outline.members)
        for key in ("contentEncoding", "format")
    }
    return not forms.isdisjoint(_BINARY)


def _items(outline: Outline) -> Iterator[Outline]:
    """Return the schemas of the items, if a value can be a list, alone or as one of several alternatives."""
    return (each.items for each in (outline, *outline.members))


def _unreadable(what: str, reason: str, keys: Sequence[str] = ()) -> CallError:
    """Return an error about `what`, located at `keys` of the input, or about the whole input."""
    return invalid_argument("".join(map(pointer, keys)), reason, "input", subject=what)
