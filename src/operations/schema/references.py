"""Read a document in its dialect of JSON Schema, and resolve its references.

Rule 1: documents are never fetched; a reference can only refer to a place in the same document.
Rule 2: a schema is identified by its position (`Site.pointer`), so that a cycle of references returns to an equal site.
Rule 3: a document is read in the dialect that its `$schema` names, otherwise as 2020-12. A document without `$schema`
        in which `items` is a list (the older form of tuples) is read as 2019-09.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard, cast
from urllib.parse import quote, unquote, urldefrag, urljoin

import jsonschema_rs
import msgspec

from operations.base.errors import SchemaError
from operations.base.json.references import followed, steps
from operations.base.json.values import (
    escape,
    is_list,
    is_object,
    kind_of,
    list_of,
    pointer,
    text_of,
)
from operations.base.types import JSONObject, JSONSchema

IN_PLACE = ("not", "if", "then", "else")
"""Keywords with one schema that applies to the same value."""

IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
IN_PLACE_MAPS = ("dependentSchemas", "dependencies")
APPLIED = frozenset({*IN_PLACE, *IN_PLACE_LISTS, *IN_PLACE_MAPS})
"""Keywords whose schemas apply to the same value as the schema that contains them."""

PARTS = (
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "items",
    "additionalItems",
    "unevaluatedItems",
    "contains",
)
"""Keywords with one schema that applies to parts of the value."""

PART_LISTS = ("prefixItems", "items")
PART_MAPS = ("properties", "patternProperties")

DEFINITIONS = ("$defs", "definitions")
"""Keywords that contain schemas for references only."""

DEFINITION = re.compile(r"#/(?:\$defs|definitions)/[^/]+")
"""The beginning of a reference to a definition, or into one."""

ALL_TYPES = frozenset({"array", "boolean", "null", "number", "object", "string"})

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


_ANNOTATIONS = frozenset({
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$schema", "$vocabulary", "components",
    "contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description",
    "discriminator", "example", "examples", "externalDocs", "format", "id", "nullable", "readOnly", "title",
    "writeOnly", "xml",
})  # fmt: skip


VARIANTS = "x-variants"
"""Annotation of a union: `{"property": name, "members": {text: index}}`, the member that the text of a property names.

It does not restrict values: they may match another member, or have an unknown name."""


def is_annotation(keyword: str) -> bool:
    """Return whether `keyword` does not restrict values."""
    return keyword in _ANNOTATIONS or keyword.startswith("x-")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The rules of one revision of JSON Schema."""

    validator: type[jsonschema_rs.Validator]
    draft: int
    id_keyword: str = "$id"

    ref_stands_alone: bool = False
    """Whether keywords beside a `$ref` are ignored (up to draft 7)."""

    ignored: frozenset[str] = frozenset()
    """Keywords of other dialects, which this one ignores."""


_SINCE_2020 = frozenset({"$dynamicRef", "prefixItems"})
_SINCE_2019 = _SINCE_2020 | {
    "$recursiveRef", "dependentRequired", "dependentSchemas", "maxContains", "minContains", "unevaluatedItems",
    "unevaluatedProperties",
}  # fmt: skip
_SINCE_7 = _SINCE_2019 | {"else", "if", "then"}
_SINCE_6 = _SINCE_7 | {"const", "contains", "propertyNames"}

DRAFT_2020_12 = Dialect(
    jsonschema_rs.Draft202012Validator,
    jsonschema_rs.Draft202012,
    ignored=frozenset({"$recursiveRef", "additionalItems"}),
)
DRAFT_2019_09 = Dialect(
    jsonschema_rs.Draft201909Validator, jsonschema_rs.Draft201909, ignored=_SINCE_2020
)

_NAMED = {
    "json-schema.org/draft/2020-12/schema": DRAFT_2020_12,
    "json-schema.org/draft/2019-09/schema": DRAFT_2019_09,
    "json-schema.org/draft-07/schema": Dialect(
        jsonschema_rs.Draft7Validator,
        jsonschema_rs.Draft7,
        ref_stands_alone=True,
        ignored=_SINCE_2019,
    ),
    "json-schema.org/draft-06/schema": Dialect(
        jsonschema_rs.Draft6Validator,
        jsonschema_rs.Draft6,
        ref_stands_alone=True,
        ignored=_SINCE_7,
    ),
    "json-schema.org/draft-04/schema": Dialect(
        jsonschema_rs.Draft4Validator,
        jsonschema_rs.Draft4,
        id_keyword="id",
        ref_stands_alone=True,
        ignored=_SINCE_6,
    ),
}


def named_dialect(document: JSONSchema) -> Dialect | None:
    """Return the dialect that `document` names; None if it names no known dialect."""
    if isinstance(document, bool):
        return None
    name = document.get("$schema")
    if not isinstance(name, str):
        return None
    return _NAMED.get(name.split("://", 1)[-1].rstrip("#"))


def item_keywords(schema: JSONObject) -> tuple[str, str]:
    """Return the keywords for the first items and for the rest; up to 2019-09 they had other names."""
    if isinstance(schema.get("items"), list):
        return "items", "additionalItems"
    return "prefixItems", "items"


def subschemas(schema: JSONObject) -> Iterator[tuple[str, str | int | None, JSONSchema]]:
    """Yield every direct subschema of `schema`, with its keyword, and its name or index if it has one.

    Malformed parts are skipped; the meta-schema reports them.
    """
    for keyword, held in schema.items():
        shapes = _HOLDERS.get(keyword)
        if shapes is None:
            continue
        if is_list(held):
            if "list" in shapes:
                for index, member in enumerate(held):
                    if _is_schema(member):
                        yield keyword, index, member
        elif "one" in shapes:
            if _is_schema(held):
                yield keyword, None, held
        elif is_object(held):
            for name, member in held.items():
                if _is_schema(member):
                    yield keyword, name, member


def schemas_in(schema: JSONSchema) -> Iterator[JSONObject]:
    """Yield `schema` and every schema inside it that is an object."""
    waiting = [schema]
    while waiting:
        current = waiting.pop()
        if not isinstance(current, bool):
            yield current
            waiting += [inner for _, _, inner in subschemas(current)]


def rewritten(schema: JSONSchema, change: Callable[[JSONObject], None]) -> JSONSchema:
    """Return a copy of `schema` in which `change` was applied to every schema that is an object."""
    if isinstance(schema, bool):
        return schema
    copy = schema.copy()
    copied: set[str] = set()
    for keyword, token, inner in subschemas(schema):
        if token is None:
            copy[keyword] = rewritten(inner, change)
            continue
        if keyword not in copied:
            copied.add(keyword)
            copy[keyword] = schema[keyword].copy()
        copy[keyword][token] = rewritten(inner, change)
    change(copy)
    return copy


def arrays_without_items(schema: JSONSchema) -> list[JSONObject]:
    """Return the arrays in `schema` that have no `items`; none if `unevaluatedItems` may depend on that."""
    parts = list(schemas_in(schema))
    if any("unevaluatedItems" in part for part in parts):
        return []
    return [part for part in parts if "items" not in part and "array" in _listed_types(part)]


def with_items(schema: JSONSchema) -> JSONSchema:
    """Return `schema` with `items` in every array, which many clients of tools require; itself if none lacks it."""
    if not arrays_without_items(schema):
        return schema
    copy = rewritten(schema, lambda _: None)
    for part in arrays_without_items(copy):
        part["items"] = {}
    return copy


def _listed_types(schema: JSONObject) -> list[Any]:
    kind: Any = schema.get("type")
    return kind if is_list(kind) else [kind]


def _is_schema(value: Any) -> TypeGuard[JSONSchema]:
    return isinstance(value, (dict, bool))


_HOLDERS = {
    **dict.fromkeys((*IN_PLACE, *PARTS), frozenset({"one"})),
    **dict.fromkeys((*IN_PLACE_LISTS, *PART_LISTS), frozenset({"list"})),
    **dict.fromkeys((*IN_PLACE_MAPS, *PART_MAPS, *DEFINITIONS), frozenset({"map"})),
    "items": frozenset({"one", "list"}),
}


MAX_SUBSCHEMAS = 8_000
"""The largest number of schemas in one schema document. Compiling takes about 20 µs for each."""

_BASE = "http://schema.invalid/"
"""The base of relative identifiers. The name cannot exist (RFC 2606)."""


DEFINED = "/$defs/"
"""The location of definitions that documents share."""

_NAMING = frozenset({"$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"})
_REFERRING = frozenset(REFERENCES)


class Site(msgspec.Struct, frozen=True, gc=False):
    """One schema and its position.

    It contains only JSON, so it cannot be part of a cycle, and the garbage collector can skip the thousands of sites.
    """

    schema: JSONSchema

    pointer: str
    """JSON pointer from the document's root."""

    resource: str
    """Pointer of the nearest enclosing schema with its own identifier, which references are relative to."""


class Document:
    """A JSON Schema document and the map of its identifiers.

    Args:
        root: The document.
        shared: The document whose definitions (`#/$defs/...`) this document uses instead of its own. Both are in the
            newest dialect and have no identifiers.
        place: The prefix of the pointers of its schemas, which distinguishes them from those of other documents.

    Raises:
        SchemaError: If it contains too many schemas.
    """

    def __init__(self, root: JSONSchema, shared: "Document | None" = None, place: str = "") -> None:
        self._shared = shared
        self._place = place
        named = named_dialect(root)
        self._read(root, named or DRAFT_2020_12)
        if named is None and any(map(_is_old_tuple, self.sites)):
            self._read(root, DRAFT_2019_09)

    def _read(self, root: JSONSchema, dialect: Dialect) -> None:
        self.dialect = dialect
        self._resources: dict[str, str] = {"": _BASE}
        self._uris: dict[str, Site] = {}
        self._anchors: dict[tuple[str, str], Site] = {}
        self._dynamic: dict[str, int] = {}
        self._below: dict[str, list[tuple[str, Site]]] = {}
        self._resolved: dict[tuple[str, str, str], Site | None] = {}
        self._targets: dict[str, tuple[tuple[str, Site | None], ...]] = {}
        self.sites: list[Site] = []
        self.root = self._enter(Site(root, self._place, ""))
        self._uris[_BASE] = self.root
        referring = self._scan(self.root)
        # References may refer to places outside of keywords (`#/components/schemas/Pet`), which contain further
        # references.
        for site in referring:
            for _, target in self._look_up(site):
                if target is not None and not self._is_shared(target):
                    referring += self._scan(target)
        # The last pass may have added the target.
        self._resolved.clear()

    def define(self, definitions: JSONObject) -> list[Site]:
        """Add definitions, which may refer to one another and to known definitions; return the schemas in them."""
        cast("JSONObject", self.root.schema)["$defs"].update(definitions)
        for name, schema in definitions.items():
            self._scan(self._enter(Site(schema, f"{DEFINED}{escape(name)}", "")))
        return self.sites

    def forget(self) -> None:
        """Release the lists of schemas; from then on, schemas are found by keywords and references."""
        self.sites = []
        self._below = {}

    def _is_shared(self, site: Site) -> bool:
        return self._shared is not None and site.pointer.startswith(DEFINED)

    @property
    def uri(self) -> str:
        """The address of the whole document."""
        return self._resources[""]

    def address(self, site: Site) -> str:
        """Return an absolute reference to `site`."""
        return f"{self.uri}#{quote(site.pointer)}"

    def at(self, site: Site, *tokens: str | int) -> Site:
        """Return the schema below `site`."""
        schema: Any = site.schema
        for token in tokens:
            schema = schema[token]
        return self._enter(
            Site(schema, site.pointer + "".join(map(pointer, tokens)), site.resource)
        )

    def below(self, site: Site) -> list[tuple[str, Site]]:
        """Return the schemas directly inside `site`, each with the keyword that holds it."""
        return self._below[site.pointer]

    def references(self, site: Site) -> tuple[tuple[str, Site | None], ...]:
        """Return the keyword and the target of each reference at `site`.

        The target is None if it depends on the evaluation path (`$dynamicRef` with several anchors), or if it is not in
        this document: a meta-schema, or a broken reference, which the validator rejects.
        """
        found = self._targets.get(site.pointer)
        if found is None:
            if isinstance(site.schema, bool) or _REFERRING.isdisjoint(site.schema):
                return ()
            if self._shared is not None and self._is_shared(site):
                return self._shared.references(site)
            found = self._targets[site.pointer] = self._look_up(site)
        return found

    def _look_up(self, site: Site) -> tuple[tuple[str, Site | None], ...]:
        found: list[tuple[str, Site | None]] = []
        for keyword in REFERENCES:
            reference = cast("JSONObject", site.schema).get(keyword)
            if isinstance(reference, str) and keyword not in self.dialect.ignored:
                key = site.resource, keyword, reference
                if key not in self._resolved:
                    self._resolved[key] = self._resolve(*key)
                found.append((keyword, self._resolved[key]))
        return tuple(found)

    def keywords(self, site: Site) -> JSONObject:
        """Return the keywords of `site` in this dialect. Up to draft 7, `$ref` disables the others."""
        schema = site.schema
        if isinstance(schema, bool):
            return {} if schema else {"not": {}}
        if self.dialect.ref_stands_alone and isinstance(schema.get("$ref"), str):
            return {"$ref": schema["$ref"]}
        if not self.dialect.ignored.isdisjoint(schema):
            return {name: held for name, held in schema.items() if name not in self.dialect.ignored}
        return schema

    def _resolve(self, resource: str, keyword: str, reference: str) -> Site | None:
        if keyword == "$recursiveRef" and self._dynamic.get("", 0) > 1:
            return None
        if self._shared is not None and reference.startswith("#" + DEFINED):
            return self._shared.resolve(reference)
        base = self._resources[resource]
        if reference.startswith("#") and "#" not in base:
            address, fragment = base, reference[1:]
        else:
            address, fragment = urldefrag(_join(base, reference))
        start = self._uris.get(address)
        fragment = unquote(fragment)
        if start is None or (keyword == "$dynamicRef" and self._dynamic.get(fragment, 0) > 1):
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((start.pointer, fragment))
        return self._walk(start, fragment)

    def resolve(self, reference: str) -> Site | None:
        """Return the schema that a reference from the root of this document refers to."""
        return self._resolve("", "$ref", reference)

    def _walk(self, start: Site, fragment: str) -> Site | None:
        """Return the schema at a JSON pointer, with its innermost resource."""
        site, end = start, start.pointer
        passed = steps(start.schema, fragment)
        if passed is None:
            return None
        for place, held in passed:
            end = start.pointer + place
            if isinstance(held, bool) or is_object(held):
                site = self._enter(Site(held, end, site.resource))
        return site if site.pointer == end else None

    def _enter(self, site: Site) -> Site:
        """Return `site`; if it has an identifier, as a separate resource."""
        schema = site.schema
        if isinstance(schema, bool):
            return site
        identifier = schema.get(self.dialect.id_keyword)
        if not isinstance(identifier, str) or identifier.startswith("#"):
            return site
        if self.dialect.ref_stands_alone and "$ref" in schema and site.pointer:
            return site
        return Site(schema, site.pointer, site.pointer)

    def _scan(self, start: Site) -> list[Site]:
        """Record the identifiers of every schema at and below `start`; return the schemas with references."""
        stack, naming = [start], self.dialect.id_keyword
        referring: list[Site] = []
        while stack:
            site = stack.pop()
            schema, place, resource = site.schema, site.pointer, site.resource
            if place in self._below:
                continue
            below = self._below[place] = []
            self.sites.append(site)
            if len(self.sites) > MAX_SUBSCHEMAS:
                raise SchemaError(f"more than {MAX_SUBSCHEMAS:,} schemas in one document")
            if isinstance(schema, bool):
                continue
            if not _NAMING.isdisjoint(schema):
                self._note(site, schema)
            if not _REFERRING.isdisjoint(schema):
                referring.append(site)
            for keyword, token, inner in subschemas(self.keywords(site)):
                where = (
                    f"{place}/{keyword}" if token is None else f"{place}/{keyword}{pointer(token)}"
                )
                found = Site(inner, where, resource)
                if not isinstance(inner, bool) and naming in inner:
                    found = self._enter(found)
                below.append((keyword, found))
                stack.append(found)
        return referring

    def _note(self, site: Site, schema: JSONObject) -> None:
        identifier = schema.get(self.dialect.id_keyword)
        if site.resource == site.pointer and isinstance(identifier, str):
            outer = self._resources.get(self._outer(site.pointer), _BASE)
            uri = urldefrag(_join(outer, identifier)).url
            known = self._uris.get(uri)
            if known is not None and known.schema != schema:
                raise SchemaError(
                    f"{site.pointer}: another schema is called {identifier!r} already"
                )
            self._resources[site.pointer] = uri
            self._uris[uri] = site
        elif isinstance(identifier, str) and identifier.startswith("#"):
            # Up to draft 7 an identifier that is only a fragment is an anchor.
            self._anchors[site.resource, identifier[1:]] = site
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = schema.get(keyword)
            if isinstance(name, str):
                self._anchors[site.resource, name] = site
                if keyword == "$dynamicAnchor":
                    self._dynamic[name] = self._dynamic.get(name, 0) + 1
        if schema.get("$recursiveAnchor") is True:
            self._dynamic[""] = self._dynamic.get("", 0) + 1

    def _outer(self, place: str) -> str:
        """Return the enclosing resource of the resource at `place`."""
        while place:
            place = place.rpartition("/")[0]
            if place in self._resources:
                break
        return place


def _join(base: str, reference: str) -> str:
    """Resolve `reference` against `base`. `urljoin` does not support URNs.

    Raises:
        SchemaError: If it is malformed.
    """
    try:
        return base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError as error:
        raise SchemaError(f"{reference!r} is not a valid URI: {error}") from None


def _is_old_tuple(site: Site) -> bool:
    schema = site.schema
    return is_object(schema) and is_list(schema.get("items")) and "prefixItems" not in schema


_MAX_LEVELS, _MAX_READ = 16, 1000
"""How many levels of unions and references, and how many schemas, `possible_types` reads."""


def possible_types(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types that values of a schema may have; integers are numbers.

    It reads only keywords, because compiling is slow. The result may contain types of which no value is valid.

    Args:
        schema: A schema.
        root: The document that contains it.
    """
    return _read_types(schema, root, (), iter(range(_MAX_READ)))


def _read_types(
    schema: Any, root: Any, above: tuple[str, ...], budget: Iterator[int]
) -> frozenset[str]:
    here, passed = followed(schema, root)
    is_over = next(budget, None) is None or len(above) >= _MAX_LEVELS
    if is_over or "$ref" in here or not set(passed).isdisjoint(above):
        return ALL_TYPES
    types, named = ALL_TYPES, here.get("type")
    if named is not None:
        types &= _as_types(map(text_of, named if is_list(named) else [named]))
    if "const" in here:
        types &= _as_types([kind_of(here["const"])])
    if is_list(here.get("enum")):
        types &= _as_types(map(kind_of, here["enum"]))
    inner = (*above, *(passed or [""]))
    for keyword in IN_PLACE_LISTS:
        # One type cannot be restricted further.
        members = list_of(here.get(keyword)) if len(types) > 1 else []
        found = [_read_types(member, root, inner, budget) for member in members]
        if keyword == "allOf":
            types = types.intersection(*found)
        elif found:
            types &= frozenset[str]().union(*found)
    return types


def _as_types(names: Iterable[str]) -> frozenset[str]:
    return frozenset("number" if name == "integer" else name for name in names)
