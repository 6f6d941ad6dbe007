"""Where the references of a document lead, found out before any data comes.

Rule 1: references that come back to the same value without having consumed any of it are an error.
Rule 2: a long chain of references is refused: whoever follows it needs a stack as deep.
Rule 3: alternatives multiply where they nest; a document that multiplies them beyond a bound is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from operations._json import MAX_DEPTH, is_list
from operations.errors import SchemaError
from operations.schema.reading.dialects import (
    DEFINITIONS,
    IN_PLACE,
    IN_PLACE_LISTS,
    IN_PLACE_MAPS,
)
from operations.schema.reading.references import Document, Site
from operations.types import JSONObject

MAX_ALTERNATIVES = 10_000
"""How many schemas may meet along one path into the data. Each costs about 25 ns."""

MAX_CHAIN = 64
"""How many schemas may lead to one another without consuming any data."""

_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_HERE = frozenset({*IN_PLACE, *IN_PLACE_LISTS, *IN_PLACE_MAPS})
_ONE_EACH = frozenset({"properties", "prefixItems"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known about a document before any data comes."""

    recursive: bool
    """Whether following its references can go round in a circle, as deep as the data goes."""

    closed: bool
    """Whether a validator looks at every part of a value it accepts, so that no guard is needed."""


class _Edges:
    """The schemas one schema leads to, by their places.

    Attributes:
        here: Meet the same value: by reference, and by `allOf`, `not`, `if` and the like.
        one_each: Meet parts of the value, each part one of these at most.
        shared: Meet parts of the value, each part possibly all of these.
        unknown: Whether a reference leads where only the validator can follow.
    """

    __slots__ = ("_below", "_targets", "here", "one_each", "shared", "unknown")

    def __init__(
        self,
        below: list[tuple[str, Site]],
        targets: list[tuple[str, Site | None]],
        *,
        old_tuple: bool,
    ) -> None:
        self._below = below
        self._targets = [target.pointer for _, target in targets if target is not None]
        self.unknown = len(self._targets) < len(targets)
        self.here = self._targets.copy()
        self.one_each: list[str] = []
        self.shared: list[str] = []
        for keyword, edge in below:
            if keyword in _ONE_EACH or (old_tuple and keyword == "items"):
                self.one_each.append(edge.pointer)
            elif keyword in _HERE:
                self.here.append(edge.pointer)
            elif keyword not in DEFINITIONS:
                self.shared.append(edge.pointer)

    def under(self, *keywords: str) -> list[str]:
        """Those that some keywords hold; `$ref` stands for every reference."""
        found = self._targets if "$ref" in keywords else []
        return found + [edge.pointer for keyword, edge in self._below if keyword in keywords]


_EdgeMap: TypeAlias = dict[str, _Edges]
"""Edges by the place of the schema. Most schemas are leaves, and have none."""

_LEAF = _Edges([], [], old_tuple=False)


class Graph:
    """Where the references of a document lead: every one is followed once.

    It is made before the document is compiled, which what it refuses could keep busy for ever.

    Raises:
        SchemaError: For a loop that consumes no data, a long chain, or too many nested alternatives.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self._edges = _edges(document)
        _refuse_idle_loops(self._edges)
        self._order, self._recursive = _reachable(self._edges)
        _refuse_explosions(self._order, self._edges)

    def verdict(self) -> Verdict:
        """What is known about the document, which has to be a valid one."""
        if self._recursive:
            return Verdict(recursive=True, closed=False)
        depth = _seen_depths(self._document, self._edges, self._order)
        return Verdict(recursive=False, closed=depth is not None and depth <= MAX_DEPTH)


def _edges(document: Document) -> _EdgeMap:
    """The edges of every schema that has any."""
    graph: _EdgeMap = {}
    for site in document.sites:
        below, targets = document.below(site), document.references(site)
        if below or targets:
            old_tuple = isinstance(document.keywords(site).get("items"), list)
            graph[site.pointer] = _Edges(below, targets, old_tuple=old_tuple)
    return graph


def _refuse_idle_loops(graph: _EdgeMap) -> None:
    here = {place: edges.here for place, edges in graph.items() if edges.here}
    done: set[str] = set()
    for start in here:
        path: list[str] = []
        on_path: set[str] = set()
        stack: list[str | None] = [start]
        while stack:
            place = stack.pop()
            if place is None:
                left = path.pop()
                on_path.discard(left)
                done.add(left)
            elif place in on_path:
                raise SchemaError(
                    f"{place or 'the schema'}: refers to itself without consuming any data"
                )
            elif place not in done and place in here:
                if len(path) >= MAX_CHAIN:
                    raise SchemaError(
                        f"{path[0] or 'the schema'}: leads to more than {MAX_CHAIN} schemas in a row "
                        "that all meet the same value"
                    )
                path.append(place)
                on_path.add(place)
                stack.append(None)
                stack += here[place]


def _reachable(graph: _EdgeMap) -> tuple[list[str], bool]:
    """Every schema with edges that the root leads to, those it needs before itself; and whether any needs itself."""
    order: list[str] = []
    finished: dict[str, bool] = {}
    recursive = False
    stack: list[tuple[str, bool]] = [("", False)]
    while stack:
        place, leaving = stack.pop()
        if leaving:
            finished[place] = True
            order.append(place)
        elif place in finished:
            recursive = recursive or not finished[place]
        elif place in graph:
            near = graph[place]
            finished[place] = False
            # What only the validator can follow may well lead back: assume the worst.
            recursive = recursive or near.unknown
            stack.append((place, True))
            stack += [(edge, False) for edge in (*near.here, *near.one_each, *near.shared)]
    return order, recursive


def _refuse_explosions(order: list[str], graph: _EdgeMap) -> None:
    """Count, for every schema, how many meet along one path into the data.

    A reference back counts once: the validator remembers its verdict there.
    """
    costs: dict[str, int] = {}
    for place in order:
        near = graph[place]
        cost = 1 + sum([costs.get(edge, 1) for edge in (*near.here, *near.shared)])
        cost += max([costs.get(edge, 1) for edge in near.one_each], default=0)
        if cost > MAX_ALTERNATIVES:
            raise SchemaError(
                f"{place or 'the schema'}: too many alternatives nest here "
                f"(more than {MAX_ALTERNATIVES:,})"
            )
        costs[place] = cost


def _seen_depths(document: Document, graph: _EdgeMap, order: list[str]) -> int | None:
    """How many levels of data the validator looks at before it accepts; None if parts may pass unseen."""
    depths: dict[str, int | None] = {}
    leaves = [site for site in document.sites if site.pointer not in graph]
    sites = {site.pointer: site for site in document.sites}
    for site in (*leaves, *(sites[place] for place in order)):
        depths[site.pointer] = _seen_depth(document, site, graph.get(site.pointer, _LEAF), depths)
    return depths[""]


def _seen_depth(
    document: Document, site: Site, near: _Edges, depths: dict[str, int | None]
) -> int | None:
    if isinstance(site.schema, bool):
        return None if site.schema else 0
    found = [_own_depth(document.keywords(site), near, depths)]
    # What one of these has looked at is looked at.
    found += [depths[edge] for edge in near.under("$ref", "allOf")]
    for keyword in ("anyOf", "oneOf"):
        if members := near.under(keyword):
            found.append(_deepest(depths[edge] for edge in members))
    return max((depth for depth in found if depth is not None), default=None)


def _own_depth(schema: JSONObject, near: _Edges, depths: dict[str, int | None]) -> int | None:
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    if is_list(named):
        # What is accepted equals one of these.
        return None if any(isinstance(member, (dict, list)) for member in named) else 0
    types = schema.get("type")
    names: set[Any] = set(types if is_list(types) else [types])
    if not names or not names <= _TYPES:
        return None
    parts: list[str] = []
    if "object" in names:
        if "additionalProperties" not in schema:
            return None
        parts += near.under("properties", "patternProperties", "additionalProperties")
    if "array" in names:
        if not isinstance(schema.get("items"), (dict, bool)):
            return None
        parts += near.under("prefixItems", "items")
    if not parts:
        return 0
    inside = _deepest(depths[part] for part in parts)
    return None if inside is None else inside + 1


def _deepest(depths: Iterable[int | None]) -> int | None:
    known = list(depths)
    return None if None in known else max(depth for depth in known if depth is not None)
