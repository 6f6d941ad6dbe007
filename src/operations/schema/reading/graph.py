"""Where the references of a document lead, found out before any data comes.

Rule 1: references that come back to the same value without having consumed any of it are an error.
Rule 2: a long chain of references is refused: whoever follows it needs a stack as deep.
Rule 3: alternatives multiply where they nest; a document that multiplies them beyond a bound is refused.
"""

from collections import ChainMap
from collections.abc import Iterable, MutableMapping

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
        targets: tuple[tuple[str, Site | None], ...],
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


class Graph:
    """Where the references of a document lead: every one is followed once.

    It is made before the document is compiled, which what it refuses could keep busy for ever.

    Args:
        document: The document.
        shared: The graph of the definitions that it shares with others.

    Raises:
        SchemaError: For a loop that consumes no data, a long chain, or too many nested alternatives.
    """

    def __init__(self, document: Document, shared: "Graph | None" = None) -> None:
        self._document = document
        self._shared = shared
        self.costs: MutableMapping[str, int] = {} if shared is None else ChainMap({}, shared.costs)
        """For each schema, how many meet along one path into the data. Those of shared ones are not written here."""
        self._recursive: set[str] = set()
        self.add(document.sites, [document.root.pointer])

    def add(self, sites: list[Site], starts: Iterable[str]) -> None:
        """Take in more schemas of the document.

        Args:
            sites: The schemas; they may lead to one another and to those that are known.
            starts: The places of those that data is checked against.
        """
        document = self._document
        fresh: dict[str, _Edges] = {}
        for site in sites:
            below, targets = document.below(site), document.references(site)
            if below or targets:
                old_tuple = isinstance(document.keywords(site).get("items"), list)
                fresh[site.pointer] = _Edges(below, targets, old_tuple=old_tuple)
        _refuse_idle_loops(fresh)
        self._refuse_explosions(self._ordered(starts, fresh), fresh)

    @property
    def has_circles(self) -> bool:
        """Whether the references of any schema can go round in a circle."""
        return bool(self._recursive)

    @property
    def recursive(self) -> bool:
        """Whether following the references can go round in a circle, as deep as the data goes."""
        return self.is_recursive(self._document.root.pointer)

    def is_recursive(self, place: str) -> bool:
        """Return whether following the references of a schema can go round in a circle."""
        return place in self._recursive or (
            self._shared is not None and self._shared.is_recursive(place)
        )

    def _ordered(self, starts: Iterable[str], graph: dict[str, _Edges]) -> list[str]:
        """Return every new schema with edges that `starts` lead to, those that it needs before itself.

        Notes those whose references can go round in a circle.
        """
        known = self.costs
        order: list[str] = []
        finished: dict[str, bool] = {}
        stack: list[tuple[str, bool]] = [(start, False) for start in starts]
        while stack:
            place, leaving = stack.pop()
            if leaving:
                near = graph[place]
                edges = (*near.here, *near.one_each, *near.shared)
                # What only the validator can follow may well lead back: assume the worst.
                if near.unknown or any(
                    finished.get(edge) is False or self.is_recursive(edge) for edge in edges
                ):
                    self._recursive.add(place)
                finished[place] = True
                order.append(place)
            elif place not in finished and place not in known and place in graph:
                near = graph[place]
                finished[place] = False
                stack.append((place, True))
                stack += [(edge, False) for edge in (*near.here, *near.one_each, *near.shared)]
        return order

    def _refuse_explosions(self, order: list[str], graph: dict[str, _Edges]) -> None:
        """Count, for every schema, how many meet along one path into the data.

        A reference back counts once: the validator remembers its verdict there.
        """
        costs = self.costs
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


def _refuse_idle_loops(graph: dict[str, _Edges]) -> None:
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
