"""Read YAML 1.2 as JSON, with the scalars of the core schema only.

Rule 1: `no`, `12:30` and `2020-01-01` are strings; tags never create Python objects.
Rule 2: `ryaml` rejects duplicate keys and nesting beyond 128. It copies the target of each alias, so the number of
        values and their memory are limited before, with each alias counted as its target.
Rule 3: an integer beyond 64 bits, which `ryaml` rejects too, is read as a float.
"""

import re
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import msgspec

from operations.base.errors import DocumentError, MissingExtraError
from operations.base.json.values import MAX_DOCUMENT_VALUES, is_list, is_object, with_texts
from operations.openapi.reading.memory import MemoryBudget

try:
    import yaml
    from ryaml import InvalidYamlError, loads  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateImportUsage]
except ModuleNotFoundError as error:
    raise MissingExtraError("Reading YAML", extra="openapi") from error

_BREAKS = "\x85\u2028\u2029"
"""Characters that end a line in YAML 1.1 and are ordinary text in YAML 1.2."""

_MAX_DEPTH = 128

_LONG_INTEGER = re.compile(r"[-+]?[1-9][0-9]{18,}|0o[0-7]{21,400}|0x[0-9a-fA-F]{16,400}")


def decode_yaml(text: str, memory: MemoryBudget) -> Any:
    """Return `text` as JSON builtins; keys are strings, merge keys (`<<`) are merged.

    Args:
        text: The text.
        memory: The memory that its value may take.

    Raises:
        DocumentError: If it is not one YAML document, has a duplicate key, or expands too much by aliases.
    """
    breaks = [mark for mark in _BREAKS if mark in text]
    if not breaks:
        return _decode(text, memory)
    # `ryaml` implements YAML 1.1, in which these characters end a line.
    unused = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)
    stand_ins = dict(zip(breaks, unused, strict=False))
    stand_in = text.translate({ord(mark): other for mark, other in stand_ins.items()})
    decoded = _decode(stand_in, memory)
    back = {ord(other): mark for mark, other in stand_ins.items()}
    return with_texts(decoded, lambda each: each.translate(back), names=True)


_SEPARATORS = "\n\r,:[{-?"
"""Every YAML node but the first comes after one of these."""


_ANCHOR = re.compile(r"&(?<![^\s\[{,:?-]&)[^\s\[\]{},]")
_OPENING = re.compile(r"[\[{](?<![^\s\[{,:?-].)")
"""May begin an anchor, or a list or mapping in flow style."""

_MANY = 1_000
"""`ryaml` reads nested flow style and tag directives in quadratic time, which does not matter below this number."""


_SCALAR = 240
_MAPPING = 440
"""The memory in bytes that `ryaml` takes for a short scalar and for a mapping, while it converts them."""


def _enforce_bounds(text: str, memory: MemoryBudget) -> None:
    """Raise an error for a text that `ryaml` would read slowly, or expand to too many values or too much memory.

    `ryaml` limits the number of aliases, but not the size of their values. The events are read only if there may be too
    many, because they are slower than `ryaml`.
    """
    if text.count("%TAG") > _MANY:
        raise DocumentError(f"contains more than {_MANY:,} tag directives")
    values = 1 + sum(map(text.count, _SEPARATORS))
    weight = _SCALAR * values + _MAPPING * text.count("{") + 2 * sys.getsizeof(text)
    is_long = values >= MAX_DOCUMENT_VALUES or not memory.has(weight)
    has_aliases = "*" in text and _ANCHOR.search(text) is not None
    openings = islice(_OPENING.finditer(text), _MANY)
    if is_long or has_aliases or sum(1 for _ in openings) == _MANY:
        weight = _expanded(_events(text), memory)
    memory.spend(weight)


def _expanded(events: Iterable[Any], memory: MemoryBudget) -> int:
    """Return the memory in bytes for the document of these events, with each alias as large as its target.

    Raises:
        DocumentError: If it nests too deeply, has too many values, or needs more memory than is left.
    """
    count = weight = 0
    sizes: dict[str | None, tuple[int, int]] = {}
    unfinished: list[tuple[str | None, int, int]] = []
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            values, size = sizes.get(event.anchor, (0, 0))
            count += values
            weight += size
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values, size = unfinished.pop()
            if anchor:
                sizes[anchor] = count - values, weight - size
        elif isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                unfinished.append((event.anchor, count, weight))
                weight += _MAPPING
            else:
                # Once in UTF-8, and once as the text of Python, whose characters may take four bytes each.
                text: str = event.value
                size = _SCALAR + len(text) + sys.getsizeof(text)
                weight += size
                if event.anchor:
                    sizes[event.anchor] = 1, size
            count += 1
        if len(unfinished) > _MAX_DEPTH:
            raise DocumentError("nested too deeply")
        # Keys are nodes too.
        if count > 2 * MAX_DOCUMENT_VALUES:
            raise DocumentError(f"contains more than {MAX_DOCUMENT_VALUES:,} values")
        if not memory.has(weight):
            break
    return weight


def _events(text: str) -> Iterable[Any]:
    parse: Callable[..., Iterable[Any]] = yaml.parse  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    try:
        yield from parse(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise DocumentError(f"not YAML: {' '.join(str(error).split())}") from None


def _decode(text: str, memory: MemoryBudget) -> Any:
    _enforce_bounds(text, memory)
    try:
        try:
            found = loads(text)
        except InvalidYamlError:
            if _LONG_INTEGER.search(text) is None:
                raise
            found = loads(_widened(text))
    except DocumentError:
        raise
    except (InvalidYamlError, ValueError) as error:
        raise DocumentError(f"not YAML: {' '.join(str(error).split())}") from None
    return _plain(found, {})


def _widened(text: str) -> str:
    """Return `text` with integers beyond 64 bits as floats, and as text if they are keys."""
    # The positions of events do not count a byte order mark.
    text, pieces, end = text.removeprefix("\ufeff"), list[str](), 0
    for event in _events(text):
        if not isinstance(event, yaml.ScalarEvent) or not event.implicit[0]:
            continue
        number: str = event.value
        if _LONG_INTEGER.fullmatch(number) is None or event.end_mark is None:
            continue
        before, end = text[end : event.end_mark.index - len(number)], event.end_mark.index
        if number.startswith("0"):
            number = str(int(number, 0))
        if len(number) > 40 or not -(2**63) <= int(number) < 2**64:
            number = f'"{number}"' if text.startswith(":", end) else f"{number}.0"
        pieces += before, number
    return "".join(pieces) + text[end:]


def _plain(value: Any, texts: dict[str, str]) -> Any:
    """Return a result of `ryaml` with string keys, with merge keys applied and without NaN.

    It is modified in place, and equal texts become one. `ryaml` limits the depth.
    """
    if type(value) is str:
        return texts.setdefault(value, value)
    if is_object(value):
        if any(type(key) is not str for key in value):
            value = {key if type(key) is str else _key(key): item for key, item in value.items()}
        for key, item in value.items():
            value[key] = _plain(item, texts)
        return _merged(value) if "<<" in value else value
    if is_list(value):
        for index, item in enumerate(value):
            value[index] = _plain(item, texts)
        return value
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
