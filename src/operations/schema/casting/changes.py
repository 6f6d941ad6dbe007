"""Report the changes of a cast by comparing its input with its result.

Rule 1: every difference is reported here. The passes that make the changes do not report them.
Rule 2: there is one entry per kind of change and schema location: all items of an array, or values of a map, share one.
"""

from collections.abc import Iterable
from itertools import chain
from operator import itemgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from operations.base.json.values import (
    JSON_TYPES,
    MAX_NAME,
    SCALARS,
    Path,
    count_values,
    is_list,
    is_object,
    kind_of,
    lift,
    pointer_to,
    short_pointer,
    to_json,
    unescape,
)
from operations.base.text import counted, shortened
from operations.base.types import Count
from operations.base.work import PIECE, STEP, Work
from operations.schema.casting.structs import enforce_few
from operations.schema.casting.typed import names_of
from operations.schema.explain import NONE_KNOWN, Known, ValidationIssue
from operations.schema.members import Place
from operations.schema.values import conversions, convert_all, same, shown

ChangeKind: TypeAlias = Literal[
    "stripped", "filled", "converted", "created", "replaced", "mismatch", "input", "address"
]
"""The kinds of changes to a value, most of them by normalisation:

- `stripped`: removed properties that the schema does not declare
- `filled`: added declared defaults
- `converted`: converted values to another type without loss
- `created`: added required values without a declared default (policy `create`)
- `replaced`: replaced a value that does not match (policy `create`)
- `mismatch`: left a value that does not match the schema unchanged
- `input`: changed the input of the call
- `address`: wrote the address of a view or skill of an imported server as clients use it
"""

MAX_MESSAGE = 200
"""Characters of a change's message."""

MAX_PATH = 400
"""Characters of a change's path: property names come from third parties."""


class Change(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """One kind of change at one location of the schema, for all values that it affected."""

    path: Annotated[str, msgspec.Meta(max_length=MAX_PATH)]
    """JSON pointer to the first affected value; empty for the whole value."""

    kind: ChangeKind

    count: Count = 1
    """Number of affected values."""

    message: Annotated[str, msgspec.Meta(max_length=MAX_MESSAGE)] = ""
    """Describes the first affected value, as a phrase that follows the path."""


class CastResult(NamedTuple):
    """A normalised value and its changes."""

    value: Any

    changes: list[Change]
    """Every change, mismatches first."""


_MAX_NAMES = 100
"""The number of undeclared names of one location with their own entry; the others share one entry."""

_MAX_REPORTS = 100
"""The number of cached reports of one place, for lists with the same length and names."""

_MAX_STORED = 500
"""The characters of the names in the longest path whose report is stored."""

_CONTAINERS = frozenset({dict, list})
_OBJECTS = frozenset({dict})
_LEAST_ROWS = 8
"""The number of objects in a list from which they are compared property by property, which runs in C."""

_TEXT = frozenset({str})
_ENTRY = 4
"""The units of work to compare one property or item."""


class Changes:
    """Collects the changes to one value.

    Args:
        root: The location of the value.
        work: The budget.
        creates: Whether the policy creates values, so that an added value may differ from the declared default.
        known: The parts of the result that were stripped and filled only.
    """

    def __init__(
        self, root: Place, work: Work, *, creates: bool = False, known: Known = NONE_KNOWN
    ) -> None:
        self._root = root
        self._work = work
        self._known = known
        self._creates = creates
        self._found: _Found = {}
        self._more: dict[_Key, int] = {}
        self._names: dict[Place | None, int] = {}
        self._shapes: dict[tuple[Place | None, Any, Any], list[Any]] = {}

    def listed(self) -> list[Change]:
        """Return the changes, mismatches first."""
        return sorted(self._found.values(), key=lambda change: change.kind != "mismatch")

    def compare(self, before: Any, after: Any) -> "Changes":
        """Add the differences."""
        self._compare(self._root, before, after, (), (None, None))
        return self._counted()

    def compare_names(self, before: Any, after: Any) -> "Changes":
        """Add the properties that were stripped or filled, for values without other differences."""
        self._shape(self._root, before, after, ())
        return self._counted()

    def _counted(self) -> "Changes":
        for (place, _, _), (count, path, first, result) in self._shapes.items():
            self.add_properties(place, first, result, pointer_to(path), count)
        for key, count in self._more.items():
            known = self._found[key]
            self._found[key] = msgspec.structs.replace(known, count=known.count + count)
        return self

    def add_mismatches(self, issues: Iterable[ValidationIssue], value: Any) -> "Changes":
        """Add the parts of `value` that do not match the schema."""
        for issue in issues:
            self._work.spend(10 * STEP)
            here: Any = value
            place: Place | None = self._root
            location: _Location = None, None
            for token in map(unescape, issue.path.split("/")[1:]):
                location = _location(place, None if is_list(here) else token)
                if is_list(here):
                    place = place and place.item(int(token))
                    here = here[int(token)]
                else:
                    place = place and place.child(token)
                    here = here.get(token) if is_object(here) else None
            self._add("mismatch", location, issue.path, issue.message)
        return self

    def _shape(self, place: Place | None, before: Any, after: Any, path: Path) -> None:
        """Compare the property names of objects in which properties may have been stripped or filled."""
        if place is None or place.is_open:
            return
        self._work.spend(2 * STEP)
        if type(before) not in JSON_TYPES:
            before = lift(before)
        if is_list(after):
            items = place.items
            if not after or not place.holds_objects:
                return
            self._work.spend(len(after) * _ENTRY)
            uniform = items and _uniform(items, before, after)
            if uniform:
                self._merge(uniform.changes(len(before), path))
            else:
                for index, item in enumerate(after):
                    self._shape(place.item(index), before[index], item, (index, path))
        elif is_object(after):
            self._names_of(place, before, after, path)
            nested = place.nested
            if nested is None:
                nested = [(name, place.child(name)) for name in after]
            for name, child in nested:
                if name in before and type(after.get(name)) in _CONTAINERS:
                    self._shape(child, before[name], after[name], (name, path))

    def _names_of(self, place: Place | None, before: Any, after: Any, path: Path) -> None:
        """Record the names of an object before and after.

        Most objects of one place have the same names, and are counted together.
        """
        self._work.spend((len(before) + len(after)) * _ENTRY)
        if before.keys() == after.keys():
            return
        key = place, tuple(before), tuple(after)
        known = self._shapes.get(key)
        if known is not None:
            known[0] += 1
        else:
            self._shapes[key] = [1, path, _plain(before), after]

    def add_properties(
        self, place: Place | None, before: Any, after: Any, path: str, count: int
    ) -> "_Found":
        """Add the properties that `count` objects lost or gained, described by the first object."""
        for name in before:
            if name not in after:
                has_entry = ("stripped", place, name) in self._found
                if not has_entry and (known := self._names.get(place, 0)) < _MAX_NAMES:
                    self._names[place] = known + 1
                    has_entry = True
                own = name if has_entry else None
                self._add(
                    "stripped", (place, own), path + short_pointer(name), "is not declared", count
                )
        for name in after:
            if name not in before:
                child = place and place.child(name)
                declared = not self._creates or (child is not None and child.has_default)
                kind: ChangeKind = "filled" if declared else "created"
                words = f"was absent and is now {shown(after[name])}"
                self._add(kind, _location(place, name), path + short_pointer(name), words, count)
        return self._found

    def _compare(
        self, place: Place | None, before: Any, after: Any, path: Path, location: "_Location"
    ) -> None:
        """Compare everything."""
        if before is after:
            return
        self._work.spend(2 * STEP)
        known = self._known.get(id(after))
        if known is not None:
            if known.differs:
                self._shape(place, before, after, path)
            return
        before = _plain(before)
        if is_object(before) and is_object(after):
            self._names_of(place, before, after, path)
            for name, item in before.items():
                if name in after:
                    result = after[name]
                    if type(item) is type(result) and type(item) in SCALARS and item == result:
                        continue
                    child = place and place.child(name)
                    here = _location(place, name)
                    self._compare(child, item, result, (name, path), here)
        elif is_list(before) and is_list(after):
            self._items(place, before, after, path, location)
        elif type(before) is not type(after) or not same(before, after):
            self._scalar(before, after, path, location)

    def _items(
        self,
        place: Place | None,
        before: list[Any],
        after: list[Any],
        path: Path,
        location: "_Location",
    ) -> None:
        here = place, None
        self._work.spend(len(before) * _ENTRY)
        moved = len(after) < len(before) and place is not None and place.is_unique
        both = 0 if moved else min(len(before), len(after))
        indices: Iterable[int] = range(both)
        if self._known:
            found = enumerate(map(self._known.get, map(id, after[:both])))
            indices = [index for index, valid in found if valid is None or valid.differs]
        indices = [*indices]
        items = place and place.items
        if items is None or not self._compare_columns(items, before, after, path, indices):
            for index in indices:
                item = place and place.item(index)
                self._compare(item, before[index], after[index], (index, path), here)
        if len(after) < len(before):
            words = f"was cut from {len(before)} to {counted(len(after), 'item')}"
            self._add("replaced", location, pointer_to(path), words)
        for index in range(len(before), len(after)):
            words = f"was absent and is now {shown(after[index])}"
            self._add("created", here, pointer_to((index, path)), words)

    def _compare_columns(
        self, place: Place, before: list[Any], after: list[Any], path: Path, indices: list[int]
    ) -> bool:
        """Compare the objects at `indices` property by property, if all of them have the same names."""
        first = before[indices[0]] if len(indices) >= _LEAST_ROWS else None
        names = names_of([before[index] for index in indices]) if type(first) is dict else None
        results = [after[index] for index in indices]
        after_names = names_of(results) if names else None
        if not names or not after_names:
            return False
        objects = [before[index] for index in indices]
        self._work.spend(len(names) * len(objects) * _ENTRY)
        if names != after_names:
            key = place, names, after_names
            known = self._shapes.setdefault(key, [0, (indices[0], path), first, results[0]])
            known[0] += len(indices)
        for name in names:
            if name not in after_names:
                continue
            column = list(map(itemgetter(name), objects))
            result = list(map(itemgetter(name), results))
            if _is_same(column, result):
                continue
            child, here = place.child(name), _location(place, name)
            if _are_conversions(column, result):
                first, last = column[0], result[0]
                where = pointer_to((name, (indices[0], path)))
                words = f"was converted from {kind_of(first)} to {kind_of(last)}"
                self._add("converted", here, where, words, len(column))
                continue
            for index, item, changed in zip(indices, column, result, strict=True):
                if type(item) is type(changed) and type(item) in SCALARS and item == changed:
                    continue
                self._compare(child, item, changed, (name, (index, path)), here)
        return True

    def _scalar(self, before: Any, after: Any, path: Path, location: "_Location") -> None:
        if type(before) not in _CONTAINERS and _is_conversion(before, after):
            key: _Key = ("converted", *location)
            if key in self._found:
                # Most conversions are those of one property in many items.
                self._more[key] = self._more.get(key, 0) + 1
                return
            words = f"was converted from {kind_of(before)} to {kind_of(after)}"
            self._add("converted", location, pointer_to(path), words)
        else:
            words = f"was {kind_of(before)} and is now {shown(after)}"
            self._add("replaced", location, pointer_to(path), words)

    def _merge(self, found: "_Found") -> None:
        for (kind, place, name), change in found.items():
            self._add(kind, (place, name), change.path, change.message, change.count)

    def _add(
        self, kind: ChangeKind, location: "_Location", path: str, message: str, count: int = 1
    ) -> None:
        found = self._found
        key = (kind, *location)
        known = found.get(key)
        if known is None:
            found[key] = Change(
                shortened(path, MAX_PATH), kind, count, shortened(message, MAX_MESSAGE)
            )
        else:
            found[key] = Change(known.path, kind, known.count + count, known.message)


def _is_same(before: list[Any], after: list[Any]) -> bool:
    """Return whether two lists of values are known to be the same; `==` alone does not distinguish 1, 1.0 and true."""
    kinds = list(map(type, before))
    if before != after or kinds != list(map(type, after)):
        return False
    if kinds[0] is list and kinds.count(list) == len(kinds):
        kinds = list(map(type, chain.from_iterable(before)))
        return _TEXT.issuperset(kinds)
    return SCALARS.issuperset(kinds)


def _are_conversions(before: list[Any], after: list[Any]) -> bool:
    kinds = set(map(type, before)), set(map(type, after))
    if len(kinds[0]) != 1 or len(kinds[1]) != 1 or kinds[0] == kinds[1]:
        return False
    given: object = after[0]
    kind = type(given)
    return convert_all(before, kind) == after


def _is_short(path: Path) -> bool:
    length = 0
    while path:
        name, path = path
        length += len(name) if isinstance(name, str) else 1
    return length <= _MAX_STORED


class Uniform:
    """Flat objects with the same property names, as in most lists.

    Args:
        place: The place of the objects.
        before: One of the objects.
        after: The result for that object.
    """

    __slots__ = (
        "_after",
        "_before",
        "_filled",
        "_filled_size",
        "_optional",
        "_place",
        "_reports",
        "_size",
    )

    def __init__(self, place: Place, before: dict[str, Any], after: dict[str, Any]) -> None:
        (plan,) = place.objects
        # The others exist in the value: the result is valid, and they have no default that could have been filled.
        optional = [
            name
            for name in before
            if name not in plan.required
            or (child := place.child(name)) is None
            or child.has_default
        ]
        self._optional = itemgetter(*optional) if optional else None
        self._place = place
        self._before = dict.fromkeys(_plain(before))
        self._filled = [(name, to_json(after[name])) for name in after if name not in self._before]
        self._after = dict.fromkeys(after) | dict(self._filled)
        self._filled_size = sum(count_values(default, PIECE) for _, default in self._filled)
        self._size = {len(before)}
        self._reports: dict[tuple[int, Path], _Found] = {}

    def describes(self, objects: list[Any]) -> bool:
        """Return whether each of the objects has exactly these names."""
        try:
            if set(map(len, objects)) != self._size or not _OBJECTS.issuperset(map(type, objects)):
                return False
            if self._optional is not None:
                list(map(self._optional, objects))
        except (KeyError, TypeError):
            return False
        return True

    def fill(self, objects: list[dict[str, Any]]) -> None:
        """Add the declared defaults that are missing in objects with these names."""
        enforce_few(len(objects) * self._filled_size)
        for name, default in self._filled:
            if type(default) in SCALARS:
                for item in objects:
                    item[name] = default
            else:
                for item in objects:
                    item[name] = to_json(default)

    def changes(self, count: int, path: Path = ()) -> "_Found":
        """Return the changes to a list of `count` objects at `path`."""
        found = self._reports.get((count, path))
        if found is None:
            first = pointer_to((0, path))
            # As large as the schema and the names of one object, and cached.
            within = Changes(self._place, Work())
            found = within.add_properties(self._place, self._before, self._after, first, count)
            # Names of a value may be long, and each in another value another one.
            if len(self._reports) < _MAX_REPORTS and _is_short(path):
                self._reports[count, path] = found
        return found

    def report(
        self, before: list[Any], _after: list[Any], _work: Work | None = None
    ) -> list[Change]:
        """Return the changes to a list that is the whole value."""
        return list(self.changes(len(before)).values())


def _uniform(place: Place, before: list[Any], after: list[Any]) -> Uniform | None:
    """Return the shared property names of the objects in a list; None if they differ."""
    if not place.is_flat or not is_object(before[0]):
        return None
    names = tuple(before[0])
    if any(len(str(name)) > MAX_NAME for name in names):
        return None
    known: Uniform | None = place.reports.get(names)
    if known is None:
        if len(place.reports) >= _MAX_REPORTS:
            place.reports.clear()
        known = place.reports[names] = Uniform(place, before[0], after[0])
    return known if known.describes(before) else None


_Key: TypeAlias = tuple[ChangeKind, Place | None, str | None]
_Found: TypeAlias = dict[_Key, Change]
_Location: TypeAlias = tuple[Place | None, str | None]
"""A location in a schema: a property of a place, or its items or undeclared properties."""


def _location(place: Place | None, name: str | None) -> _Location:
    declared = place is not None and name is not None and place.declares(name)
    return place, name if declared else None


def _is_conversion(before: Any, after: Any) -> bool:
    if type(before) is float and type(after) is int:
        return same(before, after)
    found = list(conversions(before, (kind_of(after),)))
    return any(type(each) is type(after) and each == after for each in found)


def _plain(value: Any) -> Any:
    """Return `value` as a JSON type with plain keys."""
    if type(value) not in JSON_TYPES:
        value = lift(value)
    if is_object(value) and not _TEXT.issuperset(map(type, value)):
        names: Iterable[str] = to_json(dict.fromkeys(value))
        return dict(zip(names, value.values(), strict=True))
    return value
