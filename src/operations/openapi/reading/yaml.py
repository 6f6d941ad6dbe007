"""Read YAML 1.2 as JSON, with the scalars of the core schema only.

`ryaml` reads nearly every document and is fast. A document that it cannot represent (integers beyond 64 bit, nesting
beyond 128) is read again with PyYAML's event stream, which is slow and exact.

Rule 1: `no`, `12:30` and `2020-01-01` are strings; tags never create Python objects.
Rule 2: duplicate keys, and aliases that expand beyond a limit, are rejected.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from operations._json import MAX_DOCUMENT_DEPTH, MAX_DOCUMENT_VALUES, is_list, is_object
from operations.errors import DocumentError, MissingExtraError

try:
    import yaml
    from ryaml import InvalidYamlError, loads  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateImportUsage]
except ModuleNotFoundError as error:
    raise MissingExtraError("Reading YAML", extra="openapi") from error

MAX_ALIASED_NODES = 1_000_000
"""The largest number of values that all aliases together may expand to."""

_BREAKS = "\x85\u2028\u2029"
"""Characters that end a line in YAML 1.1 and are ordinary text in YAML 1.2."""

_INTEGER = re.compile(r"[-+]?[0-9]{1,4000}")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]{1,400}|0x[0-9a-fA-F]{1,400}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def decode_yaml(text: str) -> Any:
    """Return `text` as JSON builtins; keys are strings, merge keys (`<<`) are merged.

    Raises:
        DocumentError: If it is not one YAML document, has a duplicate key, or expands too much by aliases.
    """
    _enforce_count(text)
    breaks = [mark for mark in _BREAKS if mark in text]
    if not breaks:
        return _decode(text)
    # Both parsers implement YAML 1.1, in which these characters end a line.
    unused = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)
    stand_ins = dict(zip(breaks, unused, strict=False))
    decoded = _decode(text.translate({ord(mark): other for mark, other in stand_ins.items()}))
    return _translated(decoded, {ord(other): mark for mark, other in stand_ins.items()})


_SEPARATORS = "\n\r,:[{-?"
"""Every YAML node but the first comes after one of these."""


def _enforce_count(text: str) -> None:
    if sum(map(text.count, _SEPARATORS)) < MAX_DOCUMENT_VALUES:
        return
    count = 0
    for event in _events(text):
        count += isinstance(event, yaml.NodeEvent)
        # Keys are nodes too.
        if count > 2 * MAX_DOCUMENT_VALUES:
            raise DocumentError(f"holds more than {MAX_DOCUMENT_VALUES:,} values")


def _events(text: str) -> Iterable[Any]:
    parse: Callable[..., Iterable[Any]] = yaml.parse  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    try:
        yield from parse(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise DocumentError(f"not YAML: {' '.join(str(error).split())}") from None


def _decode(text: str) -> Any:
    try:
        return _plain(loads(text))
    except DocumentError:
        raise
    except (InvalidYamlError, ValueError):
        # Either not YAML, which the exact parser explains, or beyond the limits of the fast parser.
        return _Reader().read(text)


def _translated(value: Any, table: dict[int, str]) -> Any:
    if isinstance(value, str):
        return value.translate(table)
    if is_object(value):
        return {key.translate(table): _translated(item, table) for key, item in value.items()}
    return [_translated(item, table) for item in value] if is_list(value) else value


def _plain(value: Any) -> Any:
    """Return a result of `ryaml` with string keys, with merge keys applied and without NaN.

    `ryaml` limits the depth.
    """
    if is_object(value):
        result: dict[str, Any] = {}
        for key, item in value.items():
            result[key if type(key) is str else _key(key)] = _plain(item)
        return _merged(result) if "<<" in result else result
    if is_list(value):
        return [_plain(item) for item in value]
    if type(value) is float and value - value != 0:
        raise DocumentError(f"{value} is not a JSON number")
    return value


def _key(key: Any) -> str:
    """Return a key that YAML did not parse as text, in its JSON form."""
    if type(key) in {int, float, bool, type(None)}:
        return msgspec.json.encode(key).decode()
    raise DocumentError("a key is not a scalar")


def _merged(mapping: dict[str, Any]) -> dict[str, Any]:
    """Return `mapping` with the merge key `<<` applied; its own keys take precedence, then earlier merged mappings."""
    named = mapping["<<"]
    sources = named if is_list(named) else [named]
    result: dict[str, Any] = {}
    for source in reversed(sources):
        if not is_object(source):
            return mapping
        result.update(source)
    result.update((key, item) for key, item in mapping.items() if key != "<<")
    return result


class _Reader:
    """Builds JSON from PyYAML's events with an explicit stack instead of recursion."""

    def __init__(self) -> None:
        self._root: list[Any] = []
        self._stack: list[Any] = [self._root]
        self._keys: list[str | None] = [None]
        self._anchors: dict[str, Any] = {}
        self._sizes: dict[int, int] = {}
        self._names: list[str | None] = []
        self._aliased = 0

    def read(self, text: str) -> Any:
        for event in _events(text):
            self._take(event)
        if len(self._root) > 1:
            raise DocumentError("more than one YAML document")
        return self._root[0] if self._root else None

    def _take(self, event: Any) -> None:
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event)
            self._anchor(event.anchor, value)
            self._put(value)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            if len(self._stack) > MAX_DOCUMENT_DEPTH:
                raise DocumentError("nested too deeply")
            self._names.append(event.anchor)
            self._stack.append({} if isinstance(event, yaml.MappingStartEvent) else [])
            self._keys.append(None)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            value = self._stack.pop()
            self._keys.pop()
            if is_object(value) and "<<" in value:
                value = _merged(value)
            self._anchor(self._names.pop(), value)
            self._put(value)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise DocumentError(f"unknown alias *{event.anchor}")
            value = self._anchors[event.anchor]
            self._aliased += self._size(value)
            if self._aliased > MAX_ALIASED_NODES:
                raise DocumentError("aliases repeat too much")
            self._put(value)

    def _anchor(self, name: str | None, value: Any) -> None:
        # Only finished nodes are registered, because an alias to an unfinished node would be a cycle.
        if name:
            self._anchors[name] = value

    def _size(self, value: Any) -> int:
        """Return the number of values in `value`, with aliases expanded."""
        if not is_object(value) and not is_list(value):
            return 1
        known = self._sizes.get(id(value))
        if known is None:
            items: Iterable[Any] = value.values() if is_object(value) else value
            known = 1 + sum(self._size(item) for item in items)
            self._sizes[id(value)] = known
        return known

    def _put(self, value: Any) -> None:
        holder = self._stack[-1]
        if is_list(holder):
            holder.append(value)
        elif self._keys[-1] is None:
            key = value if isinstance(value, str) else _key(value)
            if key in holder:
                raise DocumentError(f"duplicate key {key!r}")
            self._keys[-1] = key
        else:
            holder[self._keys[-1]] = value
            self._keys[-1] = None


def _scalar(event: Any) -> Any:
    """Return a scalar by the core schema: quoted text is text, plain text may be a number, boolean or null."""
    text: str = event.value
    if not event.implicit[0]:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return text if len(text.lstrip("+-")) > 1 and text.lstrip("+-")[0] == "0" else int(text)
    if _OCTAL_OR_HEX.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        number = float(text)
        return number if number - number == 0 else text
    return text
