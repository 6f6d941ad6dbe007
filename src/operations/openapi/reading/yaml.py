"""Read YAML 1.2 as JSON, with the scalars of the core schema only.

Rule 1: `no`, `12:30` and `2020-01-01` are strings; tags never create Python objects.
Rule 2: `ryaml` rejects duplicate keys and nesting beyond 128. The size of expanded aliases is limited before.
Rule 3: an integer beyond 64 bits, which `ryaml` rejects too, is read as a float.
"""

import re
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import msgspec

from operations._json import MAX_DOCUMENT_VALUES, is_list, is_object, with_texts
from operations.errors import DocumentError, MissingExtraError

try:
    import yaml
    from ryaml import InvalidYamlError, loads  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateImportUsage]
except ModuleNotFoundError as error:
    raise MissingExtraError("Reading YAML", extra="openapi") from error

_BREAKS = "\x85\u2028\u2029"
"""Characters that end a line in YAML 1.1 and are ordinary text in YAML 1.2."""

_MAX_DEPTH = 128

_LONG_INTEGER = re.compile(r"[-+]?[1-9][0-9]{18,}|0o[0-7]{21,400}|0x[0-9a-fA-F]{16,400}")


def decode_yaml(text: str) -> Any:
    """Return `text` as JSON builtins; keys are strings, merge keys (`<<`) are merged.

    Raises:
        DocumentError: If it is not one YAML document, has a duplicate key, or expands too much by aliases.
    """
    breaks = [mark for mark in _BREAKS if mark in text]
    if not breaks:
        return _decode(text)
    # `ryaml` implements YAML 1.1, in which these characters end a line.
    unused = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)
    stand_ins = dict(zip(breaks, unused, strict=False))
    decoded = _decode(text.translate({ord(mark): other for mark, other in stand_ins.items()}))
    back = {ord(other): mark for mark, other in stand_ins.items()}
    return with_texts(decoded, lambda each: each.translate(back), names=True)


_SEPARATORS = "\n\r,:[{-?"
"""Every YAML node but the first comes after one of these."""


_ANCHOR = re.compile(r"&(?<![^\s\[{,:?-]&)[^\s\[\]{},]")
_OPENING = re.compile(r"[\[{](?<![^\s\[{,:?-].)")
"""May begin an anchor, or a list or mapping in flow style."""

_MANY = 1_000
"""`ryaml` reads nested flow style and tag directives in quadratic time, which does not matter below this number."""


def _enforce_bounds(text: str) -> None:
    """Raise an error for a text that `ryaml` would read slowly, or expand to too many values.

    `ryaml` limits the number of aliases, but not the size of their values. The events are read only if there may be too
    many, because they are slower than `ryaml`.
    """
    if text.count("%TAG") > _MANY:
        raise DocumentError(f"contains more than {_MANY:,} tag directives")
    is_long = sum(map(text.count, _SEPARATORS)) >= MAX_DOCUMENT_VALUES
    has_aliases = "*" in text and _ANCHOR.search(text) is not None
    openings = islice(_OPENING.finditer(text), _MANY)
    if is_long or has_aliases or sum(1 for _ in openings) == _MANY:
        _enforce_expanded(_events(text))


def _enforce_expanded(events: Iterable[Any]) -> None:
    """Raise an error if the document of these events nests too deeply, or has too many values with its aliases."""
    count = 0
    sizes: dict[str | None, int] = {}
    unfinished: list[tuple[str | None, int]] = []
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = unfinished.pop()
            if anchor:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                unfinished.append((event.anchor, count))
            elif event.anchor:
                sizes[event.anchor] = 1
            count += 1
        if len(unfinished) > _MAX_DEPTH:
            raise DocumentError("nested too deeply")
        # Keys are nodes too.
        if count > 2 * MAX_DOCUMENT_VALUES:
            raise DocumentError(f"contains more than {MAX_DOCUMENT_VALUES:,} values")


def _events(text: str) -> Iterable[Any]:
    parse: Callable[..., Iterable[Any]] = yaml.parse  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    try:
        yield from parse(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise DocumentError(f"not YAML: {' '.join(str(error).split())}") from None


def _decode(text: str) -> Any:
    _enforce_bounds(text)
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
    return _plain(found)


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
