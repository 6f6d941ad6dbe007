"""Where the references of a document lead, found out before any data comes.

Rule 1: references that come back to the same value without having consumed any of it are an error.
Rule 2: a long chain of references is refused: whoever follows it needs a stack as deep.
Rule 3: alternatives multiply where they nest; a document that multiplies them beyond a bound is refused.
"""

from typing import TypeAlias

from operations.errors import SchemaError
from operations.schema.reading.dialects import (
    DEFINITIONS,
    IN_PLACE,
    IN_PLACE_LISTS,
    IN_PLACE_MAPS,
)
from operations.schema.reading.references import Document, Site

MAX_ALTERNATIVES = 10_000
"""How many schemas may meet along one path into the data. Each costs about 25 ns."""

MAX_CHAIN = 64
"""How many schemas may lead to one another without consuming any data."""

_HERE = frozenset({*IN_PLACE, *IN_PLACE_LISTS, *IN_PLACE_MAPS})
_ONE_EACH = frozenset({"properties", "prefixItems"})


class _Edges:
    """The schemas one schema leads to, by their places.

    Attributes:
        here: Meet the same value: by reference, and by `allOf`, `not`, `if` and the like.
        one_each: Meet parts of the value, each part one of these at most.
        shared: Meet parts of the value, each part possibly all of these.
        unknown: Whether a reference leads where only the validator can follow.
    """

    __slots__ = ("here", "one_each", "shared", "unknown")

    def __init__(
        self,
        below: list[tuple[str, Site]],
        targets: list[tuple[str, Site | None]],
        *,
        old_tuple: bool,
    ) -> None:
        self.here = [target.pointer for _, target in targets if target is not None]
        self.unknown = len(self.here) < len(targets)
        self.one_each: list[str] = []
        self.shared: list[str] = []
        for keyword, edge in below:
            if keyword in _ONE_EACH or (old_tuple and keyword == "items"):
                self.one_each.append(edge.pointer)
            elif keyword in _HERE:
                self.here.append(edge.pointer)
            elif keyword not in DEFINITIONS:
                self.shared.append(edge.pointer)


_EdgeMap: TypeAlias = dict[str, _Edges]
"""Edges by the place of the schema. Most schemas are leaves, and have none."""


class Graph:
    """Where the references of a document lead: every one is followed once.

    It is made before the document is compiled, which what it refuses could keep busy for ever.

    Attributes:
        recursive: Whether following the references can go round in a circle, as deep as the data goes.

    Raises:
        SchemaError: For a loop that consumes no data, a long chain, or too many nested alternatives.
    """

    def __init__(self, document: Document) -> None:
        edges = _edges(document)
        _refuse_idle_loops(edges)
        order, self.recursive = _reachable(edges)
        _refuse_explosions(order, edges)


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
