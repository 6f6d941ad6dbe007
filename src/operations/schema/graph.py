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
    subschemas,
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


@dataclass(frozen=True, slots=True)
class _Edges:
    """The schemas one schema leads to."""

    here: list[Site]
    """Meet the same value: by reference, and by `allOf`, `not`, `if` and the like."""

    one_each: list[Site]
    """Meet parts of the value, each part one of these at most."""

    shared: list[Site]
    """Meet parts of the value, each part possibly all of these."""

    by_keyword: dict[str, list[Site]]

    unknown: bool
    """Whether a reference leads where only the validator can follow."""


def examine(document: Document) -> Verdict:
    """Follow every reference once and see where they lead.

    Raises:
        SchemaError: For a loop that consumes no data, or too many nested alternatives.
    """
    edges = {site.pointer: _edges(document, site) for site in document.sites}
    _refuse_idle_loops(document.sites, edges)
    order, recursive = _reachable(document.root, edges)
    _refuse_explosions(order, edges)
    if recursive:
        return Verdict(recursive=True, closed=False)
    depths: dict[str, int | None] = {}
    for site in order:
        depths[site.pointer] = _seen_depth(document, site, edges[site.pointer], depths)
    depth = depths[""]
    return Verdict(recursive=False, closed=depth is not None and depth <= MAX_DEPTH)


def _edges(document: Document, site: Site) -> _Edges:
    targets = [target for _, target in document.references(site)]
    by_keyword: dict[str, list[Site]] = {"$ref": [target for target in targets if target]}
    one_each: list[Site] = []
    shared: list[Site] = []
    here = list(by_keyword["$ref"])
    for tokens, _ in subschemas(document.keywords(site)):
        keyword = str(tokens[0])
        if keyword in DEFINITIONS or isinstance(site.schema, bool):
            continue
        edge = document.at(site, *tokens)
        by_keyword.setdefault(keyword, []).append(edge)
        if keyword in _HERE:
            here.append(edge)
        elif keyword in _ONE_EACH or (keyword == "items" and len(tokens) > 1):
            one_each.append(edge)
        else:
            shared.append(edge)
    return _Edges(here, one_each, shared, by_keyword, unknown=None in targets)


def _refuse_idle_loops(sites: list[Site], edges: dict[str, _Edges]) -> None:
    done: set[str] = set()
    for start in sites:
        path: list[str] = []
        on_path: set[str] = set()
        stack: list[str | None] = [start.pointer]
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
            elif place not in done:
                path.append(place)
                on_path.add(place)
                stack.append(None)
                stack.extend(edge.pointer for edge in edges[place].here)


def _reachable(root: Site, edges: dict[str, _Edges]) -> tuple[list[Site], bool]:
    """Every schema the root leads to, those it needs before itself; and whether any needs itself."""
    order: list[Site] = []
    finished: dict[str, bool] = {}
    recursive = False
    stack: list[tuple[Site, bool]] = [(root, False)]
    while stack:
        site, leaving = stack.pop()
        if leaving:
            finished[site.pointer] = True
            order.append(site)
        elif site.pointer in finished:
            recursive = recursive or not finished[site.pointer]
        else:
            finished[site.pointer] = False
            near = edges[site.pointer]
            # What only the validator can follow may well lead back: assume the worst.
            recursive = recursive or near.unknown
            stack.append((site, True))
            stack.extend((edge, False) for edge in (*near.here, *near.one_each, *near.shared))
    return order, recursive


def _refuse_explosions(order: list[Site], edges: dict[str, _Edges]) -> None:
    """Count, for every schema, how many meet along one path into the data.

    A reference back counts once: the validator remembers its verdict there.
    """
    costs: dict[str, int] = {}
    for site in order:
        near = edges[site.pointer]
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
    document: Document, site: Site, near: _Edges, depths: dict[str, int | None]
) -> int | None:
    """How many levels of data the validator looks at before it accepts; None if parts may pass unseen."""
    if isinstance(site.schema, bool):
        return None if site.schema else 0
    found = [_own_depth(document.keywords(site), near, depths)]
    # What one of these has looked at is looked at.
    found += [depths[edge.pointer] for edge in _of(near, "$ref", "allOf")]
    for keyword in ("anyOf", "oneOf"):
        if members := near.by_keyword.get(keyword):
            found.append(_deepest(depths[edge.pointer] for edge in members))
    return max((depth for depth in found if depth is not None), default=None)


def _own_depth(schema: JSONObject, near: _Edges, depths: dict[str, int | None]) -> int | None:
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


def _of(near: _Edges, *keywords: str) -> list[Site]:
    return [edge for keyword in keywords for edge in near.by_keyword.get(keyword, ())]


def _deepest(depths: Iterable[int | None]) -> int | None:
    known = list(depths)
    return None if None in known else max(depth for depth in known if depth is not None)
