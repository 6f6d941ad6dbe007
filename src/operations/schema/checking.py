"""Validate values with jsonschema-rs: the validators of a document, with definitions that many documents may share.

An imported API has hundreds of operations that use the same definitions, most of which refer to one another.
jsonschema-rs cannot share definitions between validators, so that each operation would compile all of them.

Rule 1: formats are annotations. Nothing is fetched.
Rule 2: jsonschema-rs receives only plain JSON of limited depth, because it accepts types that are not JSON and recurses
        into data of any depth.
Rule 3: shared definitions are compiled in pages: one validator for many definitions, with a root property for each,
        which checks `{name: value}`. A reference to another page becomes a custom keyword that calls the validator of
        that page. Compiling one page takes a bounded time, and a page is compiled when data first needs it.
Rule 4: a document that cannot share (identifiers, other dialects, an invalid definition) is compiled separately.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Any, Final, TypeAlias, cast
from urllib.parse import quote, unquote

import jsonschema_rs

from operations.base.errors import SchemaError
from operations.base.json.references import reachable, reference_of
from operations.base.json.values import as_json, escape, is_list, object_of, unescape
from operations.base.text import printable
from operations.base.types import JSONObject, JSONSchema
from operations.schema.compiling import (
    BoundPatterns,
    ExplosionError,
    Graph,
    compile_schema,
    measured,
)
from operations.schema.references import (
    DEFINED,
    DRAFT_2020_12,
    REFERENCES,
    Document,
    Site,
    is_annotation,
    rewritten,
    schemas_in,
)

# ------------------------------------------------------------ shared definitions

_logger = logging.getLogger("operations")

PAGE_SIZE = 2_000
"""The number of schemas in one page, unless a single definition has more.

Compiling takes about 7 µs per schema and holds the GIL, so a full page blocks the event loop for 15 ms. Checks of
lists are equally fast with pages of 500 and of 5,000 schemas.
"""

_SHARED: Final = "operations:shared"
"""The keyword that replaces a reference to another page."""

_IDENTIFIED = frozenset({"$id", "$anchor", "$dynamicAnchor", "$schema"})
_UNEVALUATED = frozenset({"unevaluatedProperties", "unevaluatedItems"})

Accepts: TypeAlias = Callable[[Any], bool]
"""Returns whether a JSON value is valid."""


class SharedDefinitions:
    """The definitions of many documents, by name. Safe to use from several threads.

    Attributes:
        document: One document with all definitions.
        graph: The graph of its references.
        fancy: Whether a pattern needs the backtracking engine.
        caches: Data that other modules store with the definitions.
        max_plans: The largest number of plans for the definitions and the documents that use them.
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
        self._exploding: dict[str, str] = {}
        """The places in definitions with which no document can be compiled, by name."""

        self._dropped: list[str] = []
        self._needs: dict[str, set[str]] = {}
        self._sizes: dict[str, int] = {}
        self._whole: set[str] = set()
        """Definitions that must be compiled together with all definitions that they refer to."""
        self._pages: dict[str, Accepts] = {}
        """The validator of the page of each definition, by definition name."""

        self._accepts: dict[str, Accepts] = {}
        """The test of each schema, by place; created when first needed."""

        self._targets: dict[str, Accepts] = {}
        """The test of the target of each reference to another page."""

        self._keywords = {_SHARED: _keyword(self)}

    def adopt(self, document: JSONObject) -> JSONObject:
        """Add the definitions of `document`, and return the document without them.

        Raises:
            ExplosionError: If it cannot be compiled, also alone.
            SchemaError: If it cannot share, because a definition has the name of a different object, or was rejected
                before.
        """
        definitions: JSONObject = document["$defs"]
        with self._lock:
            fresh: JSONObject = {}
            refused: list[str] = []
            for name, schema in definitions.items():
                if name not in self._given:
                    fresh[name] = schema
                elif self._given[name] is schema and name in self._exploding:
                    raise ExplosionError(self._exploding[name])
                elif self._given[name] is not schema or name in self._refused:
                    refused.append(name)
            if refused:
                raise SchemaError(f"the definition {refused[0]!r} cannot be shared")
            if fresh:
                self._given |= fresh
                try:
                    self._define(fresh)
                except BaseException as error:
                    self._refused |= fresh.keys()
                    if isinstance(error, ExplosionError):
                        self._exploding[_owner(error.place)] = error.place
                    raise
        return {key: value for key, value in document.items() if key != "$defs"}

    @property
    def recursive(self) -> bool:
        """Whether its references are recursive, so that validation is as deep as the data."""
        return self.graph.has_circles

    def take_dropped(self) -> list[str]:
        """Return the patterns that were removed since the last call, with their locations."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        return dropped

    def _define(self, definitions: JSONObject) -> None:
        copies = cast("JSONObject", measured({"$defs": definitions}))["$defs"]
        sites = self.document.define(copies)
        patterns = BoundPatterns(sites, drop=True)
        self.fancy = self.fancy or patterns.fancy
        self._dropped += patterns.dropped
        for name in definitions:
            self._needs[name] = set()
            self._sizes[name] = 0
        for site in sites:
            owner = _owner(site.pointer)
            self._sizes[owner] += 1
            targets = shared_targets(self.document, site)
            self._needs[owner].update(_owner(target.pointer) for target in targets)
            if isinstance(site.schema, dict) and not _UNEVALUATED.isdisjoint(site.schema):
                self._whole.add(owner)
        self.graph.add(sites, [DEFINED + escape(name) for name in definitions])
        self.document.forget()

    def enter(self, schema: JSONSchema) -> Document:
        """Return a schema without its own definitions as a document that uses the shared definitions.

        Raises:
            SchemaError: If it cannot share, or exceeds a limit.
        """
        with self._lock:
            self._entered += 1
            document = Document(schema, self.document, f"/documents/{self._entered}")
            for site in document.sites:
                for target in shared_targets(document, site):
                    # Compiled now, to report an invalid definition before data arrives.
                    self._accepts_at(target)
        return document

    def accepts_at(self, sites: tuple[Site, ...]) -> Accepts:
        """Return the test whether a JSON value is valid for all `sites`: definitions, or schemas passed to `enter`."""
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
        """Return the test whether a JSON value is valid for the target of a reference.

        If the target cannot be compiled, any value is valid, with one warning.
        """
        found = self._targets.get(reference)
        if found is None:
            try:
                # Every reference was resolved when its definition was added.
                found = self._accepts_at(cast("Site", self.document.resolve(reference)))
            except SchemaError as error:
                found = _unusable(error)
            self._targets[reference] = found
        return found

    def _compile(self, site: Site) -> Accepts:
        """Compile a schema that refers to definitions."""
        schema = site.schema
        targets = self.document.references(site)
        if targets and all(key == "$ref" or is_annotation(key) for key in object_of(schema)):
            return self._accepts_at(cast("Site", targets[0][1]))
        needed = set[str]()
        schemas = list(schemas_in(schema))
        if any(not _UNEVALUATED.isdisjoint(each) for each in schemas):
            # `unevaluated*` depends on the properties that the target evaluates, so both must be in the same validator.
            for each in schemas:
                if (ref := reference_of(each)) is not None:
                    needed |= self._closure(_name_in(ref))
        found = _cut(schema, needed)
        if needed and isinstance(found, dict):
            found = {**found, "$defs": self._definitions(needed)}
        return compile_schema(found, DRAFT_2020_12, fancy=self.fancy, keywords=self._keywords)

    def _compile_page(self, name: str) -> None:
        """Compile a definition together with related definitions that are not compiled yet."""
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
        """Return definitions, with references to other pages replaced."""
        held: JSONObject = cast("JSONObject", self.document.root.schema)["$defs"]
        return {
            name: held[name] if self._needs[name] <= names else _cut(held[name], names)
            for name in sorted(names)
        }

    def _near(self, start: str) -> set[str]:
        """Return the names of the definitions to compile with `start`: the nearest ones, up to the size of a page."""
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
        """Return `start` and every definition that it refers to, directly or indirectly."""
        return reachable((start,), self._needs.__getitem__)


def shared_targets(document: Document, site: Site) -> list[Site]:
    """Return the definitions that a schema refers to.

    Raises:
        SchemaError: If the schema depends on its own document: it has an identifier, a keyword of an older dialect, or
            a reference to something else than a definition.
    """
    schema = site.schema
    if isinstance(schema, bool):
        return []
    if not _IDENTIFIED.isdisjoint(schema) or is_list(schema.get("items")):
        raise SchemaError(f"{site.pointer}: depends on its own document")
    for keyword in REFERENCES:
        ref = schema.get(keyword)
        if ref is not None and not (
            keyword == "$ref" and isinstance(ref, str) and ref.startswith("#" + DEFINED)
        ):
            raise SchemaError(f"{site.pointer}: refers to something else than a definition")
    targets = [target for _, target in document.references(site)]
    if None in targets:
        raise SchemaError(f"{site.pointer}: refers to nothing")
    return cast("list[Site]", targets)


def _keyword(shared: SharedDefinitions) -> type[Any]:
    # Weak, because the garbage collector does not see the references that validators of jsonschema-rs hold.
    owner = weakref.ref(shared)

    class SharedReference:
        """A reference to a definition on another page, which is compiled when data first reaches it."""

        def __init__(
            self, parent_schema: dict[str, Any], value: Any, schema_path: list[str | int]
        ) -> None:
            self._reference: str = value

        def validate(self, instance: Any) -> None:
            shared = owner()
            if shared is None or not shared.accepts(self._reference)(instance):
                raise ValueError

    return SharedReference


def _unusable(error: SchemaError) -> Accepts:
    """Return the test for a part that cannot be compiled: it accepts any value, with a warning."""
    _logger.warning(
        "A schema cannot be used and accepts any value instead: %s", printable(str(error))
    )
    return lambda _value: True


def _keyed(is_valid: Accepts, name: str) -> Accepts:
    def accepts(value: Any) -> bool:
        return is_valid({name: value})

    return accepts


def _cut(schema: JSONSchema, names: set[str]) -> JSONSchema:
    """Return a copy of `schema` with references to definitions other than `names` replaced by our own keyword."""

    def change(copy: JSONObject) -> None:
        ref = copy.get("$ref")
        if isinstance(ref, str) and _name_in(ref) not in names:
            del copy["$ref"]
            copy[_SHARED] = ref

    return rewritten(schema, change)


def _owner(pointer: str) -> str:
    """Return the name of the definition that contains a place."""
    return unescape(pointer.removeprefix(DEFINED).partition("/")[0])


def _name_in(ref: str) -> str:
    """Return the name of the definition that a reference refers to."""
    return _owner(unquote(ref[1:]))


# ------------------------------------------------------------ one document


class Checker:
    """Validators for a document and for the schemas inside it.

    Attributes:
        document: A copy of the compiled document, with bounded patterns.
        graph: The graph of its references.
        recursive: Whether its references are recursive, so that validation is as deep as the data.
        accepts: Returns whether a JSON value is valid.
        dropped: Patterns that were removed, with their locations.
        caches: Data that other modules store with the document.
        max_plans: The largest number of plans for the document.

    Args:
        root: The document.
        drop_patterns: Remove patterns that cannot be run safely, instead of raising an error.
        shared: Shared definitions to use; the document's own definitions are added to them.

    Raises:
        SchemaError: If the document is not a JSON Schema or exceeds a limit; the message names the location.
    """

    def __init__(
        self,
        root: JSONSchema,
        *,
        drop_patterns: bool = False,
        shared: SharedDefinitions | None = None,
    ) -> None:
        self._shared = shared
        if shared is not None and isinstance(root, dict):
            self.document = shared.enter(measured(shared.adopt(root)))
        else:
            self.document = Document(measured(root))
        patterns = BoundPatterns(self.document.sites, drop=drop_patterns)
        above = self.document.root.pointer
        self.dropped = [each.removeprefix(above) for each in patterns.dropped]
        self._fancy = patterns.fancy
        self._registry: jsonschema_rs.Registry | None = None
        self.caches: dict[str, Any] = {}
        self._accepts: dict[tuple[str, ...], Callable[[Any], bool]] = {}
        root_schema = self.document.root.schema
        if not isinstance(root_schema, bool) and self.document.dialect.id_keyword in root_schema:
            # As an absolute reference: a relative one would be resolved against itself.
            root_schema[self.document.dialect.id_keyword] = self.document.uri
        self.graph = Graph(self.document, shared.graph if shared else None)
        self.recursive = self.graph.is_recursive(above)
        if shared is None:
            self.accepts = self._build(root_schema)
        else:
            # The plans of all documents look up their costs there.
            shared.graph.include(self.graph)
            self.dropped += shared.take_dropped()
            shared.fancy = shared.fancy or patterns.fancy
            self.accepts = shared.accepts_at((self.document.root,))
        self.document.forget()

    max_plans = 5_000

    @property
    def scope(self) -> "Checker | SharedDefinitions":
        """The owner of the document's plans: this checker, or the shared definitions."""
        return self if self._shared is None else self._shared

    def is_valid(self, value: Any) -> bool:
        """Convert any value to JSON and return whether it is valid.

        Raises:
            JSONValueError: If it cannot be converted.
        """
        return self.accepts(as_json(value))

    def accepts_at(self, sites: tuple[Site, ...]) -> Accepts:
        """Return the test whether a JSON value is valid for all of `sites`; not used with shared definitions."""
        key = tuple(site.pointer for site in sites)
        found = self._accepts.get(key)
        if found is None:
            targets: list[JSONObject] = [{"$ref": self.document.address(site)} for site in sites]
            try:
                found = self._build({"allOf": targets} if targets else True)
            except SchemaError as error:
                # The validator of the whole document does not use this part, or not in the same dialect.
                found = _unusable(error)
            self._accepts[key] = found
        return found

    def _build(self, schema: JSONSchema) -> Callable[[Any], bool]:
        dialect = self.document.dialect
        if self._registry is None and schema is not self.document.root.schema:
            self._registry = jsonschema_rs.Registry(
                [(self.document.uri, self.document.root.schema)], draft=dialect.draft
            )
        return compile_schema(schema, dialect, fancy=self._fancy, registry=self._registry)
