"""The parts of a result that a caller asks for."""

from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, TypeAlias

from operations.base.json.values import is_list, is_object, unescape

_Path: TypeAlias = tuple[str, ...]
"""The tokens of a JSON pointer. An empty path keeps a whole value."""

_Paths: TypeAlias = tuple[_Path, ...]

_ABSENT: Final = object()


def paths_of(pointers: Collection[str]) -> _Paths:
    """Return JSON pointers as paths."""
    return tuple(tuple(map(unescape, pointer.split("/")[1:])) for pointer in pointers)


def select_paths(value: Any, paths: _Paths) -> Any:
    """Return the parts of a value at these paths; None if it has none."""
    found = _part(value, paths)
    return None if found is _ABSENT else found


def _part(value: Any, paths: _Paths) -> Any:
    """Return the parts of a value at these paths; `_ABSENT` if it is a text or number without such parts."""
    if () in paths:
        return value
    if is_object(value):
        return dict(_parts(value.items(), paths))
    if is_list(value):
        return [part for _, part in _parts(enumerate(value), paths)]
    return _ABSENT


def _parts(items: Iterable[tuple[Any, Any]], paths: _Paths) -> Iterator[tuple[Any, Any]]:
    """Yield the items or properties that have a part at one of the paths, each with its parts."""
    every, named = _by_token(paths)
    for key, value in items:
        below = every + named.get(str(key), ())
        if below and (part := _part(value, below)) is not _ABSENT:
            yield key, part


@lru_cache
def _by_token(paths: _Paths) -> tuple[_Paths, dict[str, _Paths]]:
    """Group the remaining paths by their first token: those after `*`, and those after each other token."""
    rests: dict[str, list[_Path]] = {}
    for first, *rest in paths:
        rests.setdefault(first, []).append(tuple(rest))
    named = {token: tuple(below) for token, below in rests.items()}
    return named.pop("*", ()), named
