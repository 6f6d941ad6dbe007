"""Which values of a document its schema marks as secret (`format: password`, `writeOnly`), and how they are masked.

Rule 1: if it is not certain that a value is no secret, it is masked: all members of a union count, and so does a
        reference that cannot be followed.
Rule 2: a place is a JSON pointer in which the token `~*` stands for every item or property, so that a list of secrets
        is one place. No pointer contains this token.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from operations.base.json.references import steps
from operations.base.json.values import MASK, escape, is_list, is_object

_EACH: Final = "~*"

_MAX_WORK: Final = 100_000
"""The largest number of values and schemas that are compared; beyond it, the whole document counts as secret."""

_MAX_PLACES: Final = 1_000
"""The largest number of places; beyond it, the whole document counts as secret."""

_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_UNIONS: Final = ("allOf", "anyOf", "oneOf")
_CONDITIONS: Final = ("if", "then", "else")
_OTHERS: Final = ("additionalProperties", "unevaluatedProperties")
_ITEMS: Final = ("items", "unevaluatedItems", "additionalItems", "contains")


def secret_places(schema: Any, value: Any) -> tuple[str, ...]:
    """Return the places of the values that a schema marks as secret."""
    search = _Search(schema)
    if not search.leads_to_secret(schema):
        return ()
    try:
        search.search(value)
    except _TooMuchWorkError:
        return ("",)
    return tuple(sorted(search.found))


def marks_secrets(schema: Any) -> bool:
    """Return whether a schema marks any value as secret."""
    return _Search(schema).leads_to_secret(schema)


def masked(value: Any, places: Iterable[str]) -> Any:
    """Return a copy of a document in which the values at these places are masked. A null is no secret."""
    tree: _Tree = {}
    for place in places:
        branch = tree
        for token in place.split("/")[1:]:
            branch = branch.setdefault(token, {})
        branch[""] = {}
    return _masked(value, [tree]) if tree else value


_Tree: TypeAlias = dict[str, Any]
"""The places by token. The token "" ends a place; that of an empty property name is written as `~`."""


def _masked(value: Any, trees: Sequence[_Tree]) -> Any:
    if any("" in tree for tree in trees):
        return None if value is None else MASK
    if is_object(value):
        return {key: _masked(item, _below(trees, _token(key))) for key, item in value.items()}
    if is_list(value):
        return [_masked(item, _below(trees, str(number))) for number, item in enumerate(value)]
    return value


def _below(trees: Sequence[_Tree], token: str) -> list[_Tree]:
    return [tree[each] for tree in trees for each in (token, _EACH) if each in tree]


def _token(key: str) -> str:
    return escape(key) or "~"


class _TooMuchWorkError(Exception):
    """The document is too large to be searched."""


class _Place:
    """What may apply to the values at one kind of place; the places below it are found once."""

    __slots__ = ("applying", "below", "is_secret", "longest", "named")

    def __init__(self, applying: list[Any]) -> None:
        self.applying = applying
        self.is_secret = any(map(_is_secret, applying))
        self.named = {name for each in applying for name in _table(each, "properties")}
        self.longest = max((len(_list(each, "prefixItems")) for each in applying), default=0)
        self.below: dict[str | int | None, _Place | None] = {}
        """The places of properties by name, of items by number, and of all other properties as None."""


class _Search:
    """Finds the places of secrets in one document.

    Args:
        root: The schema of the whole document, to which references are relative.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MAX_WORK
        self._leading: dict[int, bool] = {}
        self._known: dict[tuple[int, ...], _Place] = {}
        self.found: set[str] = set()

    def search(self, value: Any) -> None:
        """Search a document.

        Raises:
            _TooMuchWorkError: If it is too large.
        """
        place = self._place([self._root])
        if place is not None:
            self._visit(value, place, "")

    def _visit(self, value: Any, place: _Place, pointer: str) -> None:
        self._left -= 1
        if self._left < 0:
            raise _TooMuchWorkError
        if place.is_secret:
            self.found.add(pointer)
            if len(self.found) > _MAX_PLACES:
                raise _TooMuchWorkError
        elif is_object(value):
            for key, item in value.items():
                below = self._property(place, key)
                if below is not None:
                    self._visit(item, below, f"{pointer}/{_token(key)}")
        elif is_list(value):
            for number, item in enumerate(value):
                below = self._item(place, number)
                if below is not None:
                    token = str(number) if number < place.longest else _EACH
                    self._visit(item, below, f"{pointer}/{token}")

    def _property(self, place: _Place, key: str) -> _Place | None:
        name = key if key in place.named else None
        if name not in place.below:
            place.below[name] = self._place(_of_property(key, place.applying))
        return place.below[name]

    def _item(self, place: _Place, number: int) -> _Place | None:
        index = min(number, place.longest)
        if index not in place.below:
            place.below[index] = self._place(_of_item(index, place.applying))
        return place.below[index]

    def _place(self, schemas: Sequence[Any]) -> _Place | None:
        """Return the place to which these schemas apply; None if no secret can be at or below it."""
        leading = [each for each in schemas if self.leads_to_secret(each)]
        if not leading:
            return None
        key = tuple(map(id, leading))
        self._left -= len(leading)
        if key not in self._known:
            applying = list(self._applying(leading))
            self._left -= len(applying)
            self._known[key] = _Place(applying)
        return self._known[key]

    def _applying(self, schemas: Sequence[Any]) -> Iterator[Any]:
        """Yield the schemas that may apply to a value, with those that they refer to."""
        waiting, seen = list(schemas), set[int]()
        while waiting:
            schema = waiting.pop()
            if not is_object(schema) or id(schema) in seen:
                continue
            seen.add(id(schema))
            yield schema
            waiting += self._same(schema)

    def _same(self, schema: Any) -> Iterator[Any]:
        """Yield the schemas inside a schema that apply to the same value."""
        for name in _REFERENCES:
            if isinstance(schema.get(name), str):
                yield self._target(schema[name])
        for name in _UNIONS:
            yield from _list(schema, name)
        yield from (schema[name] for name in _CONDITIONS if name in schema)
        yield from _table(schema, "dependentSchemas").values()

    def _target(self, reference: str) -> Any:
        """Return the target of a reference; a secret if it cannot be found."""
        if reference == "#":
            return self._root
        found = steps(self._root, unquote(reference[1:])) if reference[:2] == "#/" else None
        return found[-1][1] if found else _SECRET

    def leads_to_secret(self, schema: Any) -> bool:
        """Return whether a secret can be at or below a value of this schema."""
        known = self._leading.get(id(schema))
        if known is None:
            known = self._leading[id(schema)] = any(map(_is_secret, self._reachable(schema)))
        return known

    def _reachable(self, schema: Any) -> Iterator[Any]:
        waiting, seen = [schema], set[int]()
        while waiting:
            each = waiting.pop()
            if not is_object(each) or id(each) in seen:
                continue
            seen.add(id(each))
            yield each
            waiting += self._same(each)
            for name in ("properties", "patternProperties"):
                waiting += _table(each, name).values()
            waiting += [each[name] for name in _OTHERS if name in each]
            waiting += _list(each, "prefixItems")
            for name in _ITEMS:
                waiting += _listed(each, name)


_SECRET: Final = {"writeOnly": True}


def _is_secret(schema: Any) -> bool:
    return schema.get("writeOnly") is True or schema.get("format") == "password"


def _of_property(key: str, applying: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for each in applying:
        # Which patterns match is not examined.
        found += _table(each, "patternProperties").values()
        named = _table(each, "properties")
        found += [named[key]] if key in named else [each[n] for n in _OTHERS if n in each]
    return found


def _of_item(number: int, applying: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for each in applying:
        found += _list(each, "prefixItems")[number : number + 1]
        found += [schema for name in _ITEMS for schema in _listed(each, name)]
    return found


def _listed(schema: Any, name: str) -> list[Any]:
    """Return the schemas of items, of which drafts before 2020-12 have a list."""
    found = schema.get(name)
    return list(found) if is_list(found) else [found]


def _list(schema: Any, name: str) -> list[Any]:
    found = schema.get(name)
    return found if is_list(found) else []


def _table(schema: Any, name: str) -> dict[str, Any]:
    found = schema.get(name)
    return found if is_object(found) else {}
