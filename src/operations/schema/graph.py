"""Where the references of a document lead, found out before any data comes.

Rule 1: references that come back to the same value without having consumed any of it are an error.
Rule 2: alternatives multiply where they nest; a document that multiplies them beyond a bound is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from operations._json import MAX_DEPTH
from operations.errors import SchemaError
from operations.schema.dialects import (
    DEFINITIONS,
    IN_PLACE,
    IN_PLACE_LISTS,
    IN_PLACE_MAPS,
)
from operations.schema.kinds import is_array
from operations.schema.references import Document, Site
from operations.types import JSONObject

MAX_ALTERNATIVES = 10_000
"""How many schemas may meet along one path into the data. Each costs about 25 ns."""

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
    """The schemas one schema leads to.

    Attributes:
        here: Meet the same value: by reference, and by `allOf`, `not`, `if` and the like.
        one_each: Meet parts of the value, each part one of these at most.
        shared: Meet parts of the value, each part possibly all of these.
        by_keyword: All of them, by the keyword that holds them.
        unknown: Whether a reference leads where only the validator can follow.
    """

    __slots__ = ("by_keyword", "here", "one_each", "shared", "unknown")

    def __init__(self, document: Document, site: Site) -> None:
        targets = [target for _, target in document.references(site)]
        self.unknown = None in targets
        self.here = [target for target in targets if target is not None]
        self.one_each: list[Site] = []
        self.shared: list[Site] = []
        self.by_keyword: dict[str, list[Site]] = {"$ref": list(self.here)}
        tuple_items = isinstance(document.keywords(site).get("items"), list)
        for keyword, edge in document.below(site):
            self.by_keyword.setdefault(keyword, []).append(edge)
            if keyword in _HERE:
                self.here.append(edge)
            elif keyword in _ONE_EACH or (keyword == "items" and tuple_items):
                self.one_each.append(edge)
            elif keyword not in DEFINITIONS:
                self.shared.append(edge)


class _Graph:
    """All edges of a document. Most schemas are leaves, and have none."""

    def __init__(self, document: Document) -> None:
        self.root = document.root
        self.sites = document.sites
        self._edges = {
            site.pointer: _Edges(document, site)
            for site in document.sites
            if document.below(site) or any(document.references(site))
        }

    def edges(self, site: Site) -> _Edges | None:
        """The edges of `site`; None for a leaf."""
        return self._edges.get(site.pointer)

    def here(self, site: Site) -> list[Site]:
        """The schemas that meet the same value as `site`."""
        near = self._edges.get(site.pointer)
        return near.here if near else []


def examine(document: Document) -> Verdict:
    """Follow every reference once and see where they lead.

    Raises:
        SchemaError: For a loop that consumes no data, or too many nested alternatives.
    """
    graph = _Graph(document)
    _refuse_idle_loops(graph)
    order, recursive = _reachable(graph)
    _refuse_explosions(order, graph)
    if recursive:
        return Verdict(recursive=True, closed=False)
    depths: dict[str, int | None] = {}
    for site in order:
        depths[site.pointer] = _seen_depth(document, site, graph.edges(site), depths)
    depth = depths[""]
    return Verdict(recursive=False, closed=depth is not None and depth <= MAX_DEPTH)


def _refuse_idle_loops(graph: _Graph) -> None:
    done: set[str] = set()
    for start in graph.sites:
        path: list[str] = []
        on_path: set[str] = set()
        stack: list[Site | None] = [start] if graph.here(start) else []
        while stack:
            site = stack.pop()
            if site is None:
                left = path.pop()
                on_path.discard(left)
                done.add(left)
            elif site.pointer in on_path:
                raise SchemaError(
                    f"{site.pointer or 'the schema'}: refers to itself without consuming any data"
                )
            elif site.pointer not in done:
                path.append(site.pointer)
                on_path.add(site.pointer)
                stack.append(None)
                stack.extend(graph.here(site))


def _reachable(graph: _Graph) -> tuple[list[Site], bool]:
    """Every schema the root leads to, those it needs before itself; and whether any needs itself."""
    order: list[Site] = []
    finished: dict[str, bool] = {}
    recursive = False
    stack: list[tuple[Site, bool]] = [(graph.root, False)]
    while stack:
        site, leaving = stack.pop()
        if leaving:
            finished[site.pointer] = True
            order.append(site)
        elif site.pointer in finished:
            recursive = recursive or not finished[site.pointer]
        else:
            near = graph.edges(site)
            finished[site.pointer] = near is None
            if near is None:
                order.append(site)
                continue
            # What only the validator can follow may well lead back: assume the worst.
            recursive = recursive or near.unknown
            stack.append((site, True))
            stack.extend((edge, False) for edge in (*near.here, *near.one_each, *near.shared))
    return order, recursive


def _refuse_explosions(order: list[Site], graph: _Graph) -> None:
    """Count, for every schema, how many meet along one path into the data.

    A reference back counts once: the validator remembers its verdict there.
    """
    costs: dict[str, int] = {}
    for site in order:
        near = graph.edges(site)
        if near is None:
            continue
        cost = 1 + _total(near.here, costs) + _total(near.shared, costs)
        cost += max((costs.get(edge.pointer, 1) for edge in near.one_each), default=0)
        if cost > MAX_ALTERNATIVES:
            raise SchemaError(
                f"{site.pointer or 'the schema'}: too many alternatives nest here "
                f"(more than {MAX_ALTERNATIVES:,})"
            )
        costs[site.pointer] = cost


def _total(sites: Iterable[Site], costs: dict[str, int]) -> int:
    return sum(costs.get(site.pointer, 1) for site in sites)


def _seen_depth(
    document: Document, site: Site, near: _Edges | None, depths: dict[str, int | None]
) -> int | None:
    """How many levels of data the validator looks at before it accepts; None if parts may pass unseen."""
    if isinstance(site.schema, bool):
        return None if site.schema else 0
    found = [_own_depth(document.keywords(site), near, depths)]
    # What one of these has looked at is looked at.
    found += [depths[edge.pointer] for edge in _of(near, "$ref", "allOf")]
    for keyword in ("anyOf", "oneOf"):
        if members := _of(near, keyword):
            found.append(_deepest(depths[edge.pointer] for edge in members))
    return max((depth for depth in found if depth is not None), default=None)


def _own_depth(
    schema: JSONObject, near: _Edges | None, depths: dict[str, int | None]
) -> int | None:
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    if is_array(named):
        # What is accepted equals one of these.
        return None if any(isinstance(member, (dict, list)) for member in named) else 0
    types = schema.get("type")
    names: set[Any] = set(types if is_array(types) else [types])
    if not names or not names <= _TYPES:
        return None
    parts: list[Site] = []
    if "object" in names:
        if "additionalProperties" not in schema:
            return None
        parts += _of(near, "properties", "patternProperties", "additionalProperties")
    if "array" in names:
        if not isinstance(schema.get("items"), (dict, bool)):
            return None
        parts += _of(near, "prefixItems", "items")
    if not parts:
        return 0
    inside = _deepest(depths[part.pointer] for part in parts)
    return None if inside is None else inside + 1


def _of(near: _Edges | None, *keywords: str) -> list[Site]:
    if near is None:
        return []
    return [edge for keyword in keywords for edge in near.by_keyword.get(keyword, ())]


def _deepest(depths: Iterable[int | None]) -> int | None:
    known = list(depths)
    return None if None in known else max(depth for depth in known if depth is not None)
