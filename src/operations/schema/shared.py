"""Read and compile the definitions that many documents share once for all of them.

An imported API has hundreds of operations over the same definitions, most of which refer to one another. jsonschema-rs
shares nothing between validators: one for each operation would compile all of them every time.

Rule 1: definitions are compiled in pages: one validator with a root property for each, which checks `{name: value}`.
Rule 2: a reference that leaves a page, or a document, becomes a keyword that asks the page of its target. So compiling
        one page takes a bounded time, and a page is compiled when data first needs it.
Rule 3: a document that cannot share (identifiers, other dialects, a refused definition) is compiled alone.
Rule 4: circles of references that consume no part of a value are an error; long chains of references, and alternatives
        that multiply beyond a limit, are refused before any data arrives (`Graph`).
"""

import logging
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, MutableMapping
from threading import RLock
from typing import Any, Final, TypeAlias, cast
from urllib.parse import quote, unquote

from operations._json import escape, is_list, object_of, unescape
from operations._references import reference_of
from operations.errors import SchemaError
from operations.schema.patterns import bound_patterns, compile_schema, measured
from operations.schema.references import (
    DEFINED,
    DEFINITIONS,
    DRAFT_2020_12,
    IN_PLACE,
    IN_PLACE_LISTS,
    IN_PLACE_MAPS,
    REFERENCES,
    Document,
    Site,
    is_annotation,
    rewritten,
    schemas_in,
)
from operations.types import JSONObject, JSONSchema

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
    """The graph of a document's references, each followed once.

    It runs before the document is compiled, because compiling a rejected document might never end.

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
        """Whether the references of any schema are recursive."""
        return bool(self._recursive)

    @property
    def recursive(self) -> bool:
        """Whether its references are recursive, so that validation is as deep as the data."""
        return self.is_recursive(self._document.root.pointer)

    def is_recursive(self, place: str) -> bool:
        """Return whether the references of a schema are recursive."""
        return place in self._recursive or (
            self._shared is not None and self._shared.is_recursive(place)
        )

    def _ordered(self, starts: Iterable[str], graph: dict[str, _Edges]) -> list[str]:
        """Return every new schema with edges that `starts` lead to, those that it needs before itself.

        Records those with recursive references.
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
                # References that only the validator can follow may be recursive: assume that they are.
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


_logger = logging.getLogger("operations")

PAGE_SIZE = 2_000
"""How many schemas one page holds, unless a single definition has more.

Compiling takes about 7 µs for each and holds the interpreter, so a page blocks the event loop for 15 ms. Checks of
lists take as long with pages of 500 schemas as with pages of 5,000.
"""

_SHARED: Final = "operations:shared"
"""The keyword that replaces a reference to another page."""

_IDENTIFIED = frozenset({"$id", "$anchor", "$dynamicAnchor", "$schema"})
_UNEVALUATED = frozenset({"unevaluatedProperties", "unevaluatedItems"})

Accepts: TypeAlias = Callable[[Any], bool]
"""Whether a JSON value is valid."""


class SharedDefinitions:
    """The definitions of many documents, by name. Safe to use from several threads.

    Attributes:
        document: One document that has them all.
        graph: Where its references lead.
        fancy: Whether some pattern needs the back-tracking engine.
        caches: What others keep with the definitions.
        max_plans: How many plans may be made for them and the documents that use them.
    """

    max_plans = 50_000

    def __init__(self) -> None:
        self.caches: dict[str, Any] = {}
        self.document = Document({"$defs": {}})
        self.graph = Graph(self.document)
        self.document.forget()
        self.fancy = False
        self._lock = RLock()
        self._given: JSONObject = {}
        self._entered = 0
        self._refused: set[str] = set()
        self._dropped: list[str] = []
        self._needs: dict[str, set[str]] = {}
        self._sizes: dict[str, int] = {}
        self._whole: set[str] = set()
        """Definitions that must be compiled together with all that they refer to."""
        self._pages: dict[str, Accepts] = {}
        """By the name of a definition: the validator of its page."""

        self._accepts: dict[str, Accepts] = {}
        """By the place of a schema: its test, made when it is first needed."""

        self._keywords = {_SHARED: _keyword(self)}

    def adopt(self, document: JSONObject) -> JSONObject:
        """Take in the definitions of `document`; returns it without them.

        Raises:
            SchemaError: If it cannot share: it has a definition of a known name that is another object, or one that
                was refused.
        """
        definitions: JSONObject = document["$defs"]
        with self._lock:
            fresh: JSONObject = {}
            for name, schema in definitions.items():
                if name not in self._given:
                    fresh[name] = schema
                elif self._given[name] is not schema or name in self._refused:
                    raise SchemaError(f"the definition {name!r} cannot be shared")
            if fresh:
                self._given |= fresh
                try:
                    self._define(fresh)
                except BaseException:
                    self._refused |= fresh.keys()
                    raise
        return {key: value for key, value in document.items() if key != "$defs"}

    @property
    def recursive(self) -> bool:
        """Whether its references are recursive, so that validation is as deep as the data."""
        return self.graph.has_circles

    def take_dropped(self) -> list[str]:
        """Return the patterns that were left out since the last time, with their places."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        return dropped

    def _define(self, definitions: JSONObject) -> None:
        copies = cast("JSONObject", measured({"$defs": definitions}))["$defs"]
        sites = self.document.define(copies)
        patterns = bound_patterns(sites, drop=True)
        self.fancy = self.fancy or patterns.fancy
        self._dropped += patterns.dropped
        for name in definitions:
            self._needs[name] = set()
            self._sizes[name] = 0
        for site in sites:
            owner = _owner(site.pointer)
            self._sizes[owner] += 1
            enforce_shareable(site)
            if isinstance(site.schema, dict):
                if not _UNEVALUATED.isdisjoint(site.schema):
                    self._whole.add(owner)
                for _, target in self.document.references(site):
                    if target is None:
                        raise SchemaError(f"{site.pointer}: refers to nothing")
                    self._needs[owner].add(_owner(target.pointer))
        self.graph.add(sites, [DEFINED + escape(name) for name in definitions])
        self.document.forget()

    def enter(self, schema: JSONSchema) -> Document:
        """Return a schema, without definitions of its own, as a document that uses the shared ones.

        Raises:
            SchemaError: If it cannot share, or is beyond a limit.
        """
        with self._lock:
            self._entered += 1
            document = Document(schema, self.document, f"/documents/{self._entered}")
            for site in document.sites:
                enforce_shareable(site)
                for _, target in document.references(site):
                    if target is None:
                        raise SchemaError(f"{site.pointer}: refers to nothing")
                    # Compiled now: a definition that cannot be used is to be found before data comes.
                    self._accepts_at(target)
        return document

    def accepts_at(self, sites: tuple[Site, ...]) -> Accepts:
        """Return the test whether a JSON value is valid for all of `sites`: definitions, or schemas that entered."""
        tests = [self._accepts.get(site.pointer) or self._accepts_at(site) for site in sites]
        if len(tests) == 1:
            return tests[0]
        return lambda value: all(accepts(value) for accepts in tests)

    def _accepts_at(self, site: Site) -> Accepts:
        with self._lock:
            found = self._accepts.get(site.pointer)
            if found is None:
                name = _owner(site.pointer)
                if site.pointer != DEFINED + escape(name):
                    found = self._compile(site)
                else:
                    if name not in self._pages:
                        self._compile_page(name)
                    found = _keyed(self._pages[name], name)
                self._accepts[site.pointer] = found
        return found

    def accepts(self, reference: str) -> Accepts:
        """Return the test whether a JSON value is valid for the schema that a reference leads to."""
        site = self.document.resolve(reference)
        if site is None:
            raise SchemaError(f"{reference!r} refers to nothing")
        return self._accepts_at(site)

    def _compile(self, site: Site) -> Accepts:
        """Compile a schema that refers to definitions."""
        schema = site.schema
        targets = self.document.references(site)
        if targets and all(key == "$ref" or is_annotation(key) for key in object_of(schema)):
            return self._accepts_at(cast("Site", targets[0][1]))
        needed = set[str]()
        schemas = list(schemas_in(schema))
        if any(not _UNEVALUATED.isdisjoint(each) for each in schemas):
            # The evaluated properties of a reference count here, so it must be part of the same validator.
            for each in schemas:
                if (ref := reference_of(each)) is not None:
                    needed |= self._closure(_name_in(ref))
        found = _cut(schema, needed)
        if needed and isinstance(found, dict):
            found = {**found, "$defs": self._definitions(needed)}
        return compile_schema(found, DRAFT_2020_12, fancy=self.fancy, keywords=self._keywords)

    def _compile_page(self, name: str) -> None:
        """Compile a definition and those near it that have not been compiled yet."""
        names = self._near(name)
        refs = {each: {"$ref": f"#{quote(DEFINED + escape(each))}"} for each in names}
        page = {"$defs": self._definitions(names), "properties": refs}
        try:
            is_valid = compile_schema(
                page, DRAFT_2020_12, fancy=self.fancy, keywords=self._keywords
            )
        except SchemaError:
            self._refused |= names
            raise
        for each in names:
            self._pages.setdefault(each, is_valid)

    def _definitions(self, names: set[str]) -> JSONObject:
        """Return definitions, their references to others cut."""
        held: JSONObject = cast("JSONObject", self.document.root.schema)["$defs"]
        return {
            name: held[name] if self._needs[name] <= names else _cut(held[name], names)
            for name in sorted(names)
        }

    def _near(self, start: str) -> set[str]:
        """Return the names of the definitions to compile with `start`: the nearest, as many as a page holds."""
        names: set[str] = set()
        size = 0
        waiting = deque([start])
        while waiting:
            name = waiting.popleft()
            if name in names:
                continue
            together = self._closure(name) if name in self._whole else {name}
            new = together - names
            added = sum(self._sizes[each] for each in new)
            if name != start and (name in self._pages or size + added > PAGE_SIZE):
                continue
            names |= new
            size += added
            for each in sorted(new):
                waiting.extend(sorted(self._needs[each]))
        return names

    def _closure(self, start: str) -> set[str]:
        """Return `start` and every definition it leads to."""
        found = {start}
        waiting = [start]
        while waiting:
            new = self._needs[waiting.pop()] - found
            found |= new
            waiting += new
        return found


def enforce_shareable(site: Site) -> None:
    """Raise unless the meaning of a schema is independent of the place of the shared definitions.

    Raises:
        SchemaError: If it has an identifier, an older dialect's keyword, or a reference to anything but a definition.
    """
    schema = site.schema
    if isinstance(schema, bool):
        return
    if not _IDENTIFIED.isdisjoint(schema) or is_list(schema.get("items")):
        raise SchemaError(f"{site.pointer}: means something only in its document")
    for keyword in REFERENCES:
        ref = schema.get(keyword)
        if ref is not None and not (
            keyword == "$ref" and isinstance(ref, str) and ref.startswith("#" + DEFINED)
        ):
            raise SchemaError(f"{site.pointer}: refers to something else than a definition")


def _keyword(shared: SharedDefinitions) -> type[Any]:
    class SharedReference:
        """A reference to a definition on another page, which is compiled when data first gets there."""

        def __init__(
            self, parent_schema: dict[str, Any], value: Any, schema_path: list[str | int]
        ) -> None:
            self._reference: str = value
            self._accepts: Accepts | None = None

        def validate(self, instance: Any) -> None:
            if self._accepts is None:
                self._accepts = self._find()
            if not self._accepts(instance):
                raise ValueError

        def _find(self) -> Accepts:
            try:
                return shared.accepts(self._reference)
            except SchemaError as error:
                _logger.warning("A schema cannot be used and counts as unknown: %s", error)
                return lambda _value: True

    return SharedReference


def _keyed(is_valid: Accepts, name: str) -> Accepts:
    def accepts(value: Any) -> bool:
        return is_valid({name: value})

    return accepts


def _cut(schema: JSONSchema, names: set[str]) -> JSONSchema:
    """Return a copy of `schema` in which references to definitions other than `names` are our own keywords."""

    def change(copy: JSONObject) -> None:
        ref = copy.get("$ref")
        if isinstance(ref, str) and _name_in(ref) not in names:
            del copy["$ref"]
            copy[_SHARED] = ref

    return rewritten(schema, change)


def _owner(pointer: str) -> str:
    """Return the name of the definition that a place is in."""
    return unescape(pointer.removeprefix(DEFINED).partition("/")[0])


def _name_in(ref: str) -> str:
    """Return the name of the definition that a reference leads to."""
    return _owner(unquote(ref[1:]))
