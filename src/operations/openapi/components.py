"""Schemas of many operations in one document: shared definitions stand once, under `components/schemas`.

Rule 1: what two schemas define alike, down to everything it refers to, stands once; what they define differently under
        one name gets a number.
Rule 2: only what is referred to is kept.
Rule 3: a schema that OpenAPI 3.1 cannot hold as it is (another dialect, identifiers, dynamic or foreign
        references) is not bent: `place` says so, and the extension carries it whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from operations._json import canonical
from operations.schema.kinds import is_array, is_object
from operations.schema.reading.dialects import DRAFT_2020_12, named_dialect, subschemas
from operations.types import JSONObject, JSONSchema

PREFIX = "#/components/schemas/"

_DEFINITION = re.compile(r"#/(?:\$defs|definitions)/([^/]+)")
_BOUND = frozenset({
    "$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor", "$recursiveRef", "$vocabulary",
})  # fmt: skip
"""Keywords that mean something only inside the document they stand in."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_LOCAL = re.compile(r"#(/|$)")
_HOPS = 32
"""How many references in a row are followed before they count as a circle."""

_HOLDERS = ("$defs", "definitions")
_PENDING: JSONObject = {}


@dataclass(frozen=True, slots=True)
class _Component:
    """A schema that has been placed, and where its references went."""

    name: str
    targets: dict[str, str]
    """For each part it refers to, the component that part became."""


class Components:
    """The shared schemas of one document, as they are found."""

    def __init__(self) -> None:
        self.schemas: JSONObject = {}
        self._known: dict[tuple[str, bytes], list[_Component]] = {}

    def place(self, schema: JSONSchema, title: str) -> tuple[JSONSchema, dict[str, str]] | None:
        """`schema` as it can stand in the document, its definitions moved to the components.

        Args:
            schema: A JSON Schema document.
            title: What to call it where it refers to itself.

        Returns:
            The schema, and for each component that did not come from `#/$defs/` and its own name, the pointer it
            came from. None where the document cannot hold it.
        """
        if isinstance(schema, bool):
            # Some tools know schemas only as objects.
            return ({} if schema else {"not": {}}), {}
        if not _is_holdable(schema):
            return None
        source = _Source(schema)
        names = self._names(source, title)

        def moved(reference: str) -> str:
            part = source.part_of(reference)
            return PREFIX + names[part] + reference[len(part) :]

        for part, name in names.items():
            if self.schemas[name] is _PENDING:
                self.schemas[name] = rewritten(source.held(part), moved)
        came_from = {name: part for part, name in names.items() if part != f"#/$defs/{name}"}
        if "#" in names:
            return {"$ref": PREFIX + names["#"]}, came_from
        return rewritten(source.held("#"), moved), came_from

    def _names(self, source: "_Source", title: str) -> dict[str, str]:
        """A component for every part that is referred to: one that says the same, or a new one."""
        keys = {
            part: (part if part != "#" else title, canonical(source.held(part)))
            for part in source.used
        }
        alike = {part: list(self._known.get(key, ())) for part, key in keys.items()}
        # Alike means: the same text, and references to what is alike in turn. What fails drops out, and may
        # take others with it, until nothing changes.
        changed = True
        while changed:
            changed = False
            for candidates in alike.values():
                for candidate in tuple(candidates):
                    if any(
                        all(name != other.name for other in alike[target])
                        for target, name in candidate.targets.items()
                    ):
                        candidates.remove(candidate)
                        changed = True
        names = {part: candidates[0].name for part, candidates in alike.items() if candidates}
        for part in source.used:
            if part not in names:
                names[part] = self._fresh(part, title)
        for part, key in keys.items():
            if not alike[part]:
                targets = {target: names[target] for target in source.refers(part)}
                self._known.setdefault(key, []).append(_Component(names[part], targets))
        return names

    def _fresh(self, part: str, title: str) -> str:
        wanted = _UNSAFE.sub("_", title if part == "#" else _unescaped(part.rpartition("/")[2]))
        name, number = wanted, 1
        while name in self.schemas:
            number += 1
            name = f"{wanted}_{number}"
        # Taken from now on; `place` fills it.
        self.schemas[name] = _PENDING
        return name


class _Source:
    """One schema document, seen as parts that refer to each other: its definitions, and the rest (`#`)."""

    def __init__(self, root: JSONObject) -> None:
        self._root = root
        self._rest = {
            key: value for key, value in root.items() if key not in (*_HOLDERS, "$schema")
        }
        self._targets: dict[str, tuple[str, ...]] = {}
        self.used = sorted(self._reach(self.refers("#")))
        """The parts that some reference leads to."""

    def held(self, part: str) -> JSONObject:
        """The schema of a part."""
        if part == "#":
            return self._rest
        _, holder, name = part.split("/")
        held = self._root[holder][_unescaped(name)]
        return {} if held is True else {"not": {}} if held is False else held

    def part_of(self, reference: str) -> str:
        """The part that a reference leads into."""
        match = _DEFINITION.match(reference)
        return match.group() if match else "#"

    def _reach(self, parts: Iterable[str]) -> set[str]:
        """These parts and all that they refer to, directly or not."""
        reached = set(parts)
        waiting = list(reached)
        while waiting:
            for target in self.refers(waiting.pop()):
                if target not in reached:
                    reached.add(target)
                    waiting.append(target)
        return reached

    def refers(self, part: str) -> tuple[str, ...]:
        """The parts that a part refers to."""
        if part not in self._targets:
            found = dict.fromkeys(map(self.part_of, _references(self.held(part))))
            self._targets[part] = tuple(found)
        return self._targets[part]


def rewritten(schema: JSONObject, move: Callable[[str], str]) -> JSONObject:
    """A copy of `schema` with every `$ref` changed by `move`."""
    copy: JSONObject = {}
    for keyword, held in schema.items():
        copy[keyword] = move(held) if keyword == "$ref" and isinstance(held, str) else held
    copied: set[str] = set()
    for keyword, token, inner in subschemas(schema):
        if token is None:
            copy[keyword] = _moved(inner, move)
            continue
        if keyword not in copied:
            copied.add(keyword)
            copy[keyword] = schema[keyword].copy()
        copy[keyword][token] = _moved(inner, move)
    return copy


def _moved(schema: JSONSchema, move: Callable[[str], str]) -> JSONSchema:
    return schema if isinstance(schema, bool) else rewritten(schema, move)


def _is_holdable(schema: JSONObject) -> bool:
    if named_dialect(schema) not in (None, DRAFT_2020_12):
        return False
    references = 0
    for part in _schemas(schema):
        if not _BOUND.isdisjoint(part) or isinstance(part.get("items"), list):
            return False
        reference = part.get("$ref")
        if reference is not None:
            references += 1
            if not _leads_somewhere(reference, schema):
                return False
    # Where a `$ref` is data (in a default, as a property's name), many tools would follow it all the same.
    return references == _count_references(schema)


def _count_references(value: Any) -> int:
    if is_object(value):
        return ("$ref" in value) + sum(map(_count_references, value.values()))
    return sum(map(_count_references, value)) if is_array(value) else 0


def _leads_somewhere(reference: Any, root: JSONObject) -> bool:
    """Whether a reference ends at a schema of this document, and not in a circle."""
    for _ in range(_HOPS):
        if not isinstance(reference, str) or not _LOCAL.match(reference) or "%" in reference:
            return False
        held: Any = _target(reference, root)
        # A path to the holder of definitions is no schema's.
        if reference in {"#/$defs", "#/definitions"}:
            return False
        if not is_object(held) or "$ref" not in held:
            return isinstance(held, (dict, bool))
        reference = held["$ref"]
    return False


def _target(reference: str, root: JSONObject) -> Any:
    held: Any = root
    for token in reference.split("/")[1:]:
        name = _unescaped(token)
        if is_object(held) and name in held:
            held = held[name]
        elif is_array(held) and name.isdecimal() and int(name) < len(held):
            held = held[int(name)]
        else:
            return None
    return held


def _references(schema: JSONObject) -> Iterable[str]:
    for part in _schemas(schema):
        reference = part.get("$ref")
        if isinstance(reference, str):
            yield reference


def _schemas(schema: JSONObject) -> Iterator[JSONObject]:
    """A schema and every schema inside it."""
    waiting: list[JSONObject] = [schema]
    while waiting:
        current = waiting.pop()
        yield current
        waiting += [held for _, _, held in subschemas(current) if not isinstance(held, bool)]


def _unescaped(token: str) -> str:
    return token.replace("~1", "/").replace("~0", "~")
