"""Share definitions of an exported document under `components/schemas`, and write the extension `x-operations`.

Rule 1: equal definitions, including everything they refer to, are written once; different definitions of the same name
        get a number. Unreferenced definitions are omitted.
        A whole schema with a title, such as a result, is also such a definition.
Rule 2: a `default` that does not match its `type` is omitted, because client generators reject such documents.
Rule 3: a schema that OpenAPI 3.1 cannot express (another dialect, identifiers, dynamic or external references) is
        included unchanged in `x-operations`.
Rule 4: subschemas are objects, because client generators reject `true` and `false`, except in `additionalProperties`
        and `unevaluatedProperties`. An array without `items` gets `_ANY_ITEM`, because client
        generators need a type for the items. A tuple gets the `items` of `_tuple_items`.
Rule 5: `x-operations` contains only what OpenAPI cannot express: the title is in `summary`, unless the operation is
        `untitled`, the description in `description`, and the tags follow the namespace in `tags`. The POST has the
        extension; the GET of the same path refers to it (`{"id": ..., "sameAs": "post"}`).
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import Any, cast

import msgspec

from operations.base.json.references import MAX_HOPS, objects_in, reachable, reference_of, target_of
from operations.base.json.values import canonical, is_list, is_object, object_of, text_of, unescape
from operations.base.text import numbered_name
from operations.base.types import JSONObject, JSONSchema
from operations.contract.specs import ErrorDefinition, OperationType
from operations.openapi.reading.media import EVENT_STREAM
from operations.schema import Schema
from operations.schema.references import (
    DEFINITION,
    DEFINITIONS,
    DRAFT_2020_12,
    arrays_without_items,
    named_dialect,
    rewritten,
    schemas_in,
    subschemas,
)
from operations.schema.values import has_type

PREFIX = "#/components/schemas/"
ERROR: JSONObject = {"$ref": PREFIX + "Error"}
"""The schema of the body of an error."""

_BOUND = frozenset({
    "$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor", "$recursiveRef", "$vocabulary",
})  # fmt: skip
"""Keywords whose meaning depends on the document that contains them."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*\Z")
_LOCAL = re.compile(r"#(/|$)")
_MAY_BE_BOOLEAN = frozenset({"additionalProperties", "unevaluatedProperties"})

_PENDING: JSONObject = {}
_ANYTHING: JSONObject = {}
_NOTHING: JSONObject = {"not": {}}
_ANY_ITEM: JSONObject = {"description": "Any value."}
"""The added `items`, which an import recognises and removes."""

_TUPLE = "x-operations-tuple"
"""Set in the `items` that a tuple has instead of its own, so that an import can restore these: a value of `_Items`."""


class _Items(StrEnum):
    """What a tuple had instead of the `items` of the document."""

    NONE = "none"
    """It had no `items`."""

    FALSE = "false"
    """Its `items` were false."""

    LIMITED = "limited"
    """Its `items` were false, and it had no `maxItems`."""


@dataclass(frozen=True, slots=True)
class _SchemaPart:
    """A definition, or a schema without its definitions. Each is examined once, because operations share them."""

    schema: JSONObject
    """A reference to the schema, so that its `id()` stays unique."""

    digest: bytes
    """The digest of its canonical text, which is the same for equal schemas."""

    references: tuple[str, ...]

    parts: tuple[str, ...]
    """The parts of its document that it refers to."""

    is_plain: bool
    """Whether it has the same meaning in any OpenAPI 3.1 document that contains the targets of its references."""

    contradicts: bool
    """Whether it has a `default` that does not match its type."""


@dataclass(frozen=True, slots=True)
class _Component:
    """A schema in the components, and the targets of its references."""

    name: str
    targets: dict[str, str]
    """The component of each part that the schema refers to."""


def merged_name(name: str) -> str:
    """Return the part of a name that the generators of clients keep: names with the same part would be one name."""
    return "".join(filter(str.isalnum, name)).lower()


class Components:
    """Collects the shared schemas of one document.

    Attributes:
        schemas: The schemas by name; at first those given.
        repaired: The titles of the schemas whose `default` did not match its type.
    """

    def __init__(self, schemas: JSONObject) -> None:
        self.repaired: dict[str, None] = {}
        self.schemas = dict(schemas)
        self._merged = set(map(merged_name, schemas))
        self._known: dict[tuple[str, bytes], list[_Component]] = {}
        self._pieces: dict[int, _SchemaPart] = {}

    def place(self, schema: JSONSchema, title: str) -> tuple[JSONSchema, dict[str, str]] | None:
        """Return `schema` for the document, with its definitions moved to the components.

        Args:
            schema: A JSON Schema document.
            title: The name to use if the schema refers to itself.

        Returns:
            The schema and, for each component whose origin is not `#/$defs/` and its own name, the pointer of the
            origin. None if the document cannot express the schema.
        """
        if isinstance(schema, bool):
            # Some tools support schemas only as objects.
            return ({} if schema else {"not": {}}), {}
        source = _SchemaDocument(schema, self._piece)
        if not source.is_holdable:
            return None
        names = self._names(source, title)

        def moved(reference: str) -> str:
            part = part_of(reference)
            return PREFIX + names[part] + reference[len(part) :]

        for part, name in names.items():
            if self.schemas[name] is _PENDING:
                self.schemas[name] = self._written(source, part, moved, name)
        came_from = {name: part for part, name in names.items() if part != f"#/$defs/{name}"}
        if "#" in names:
            return {"$ref": PREFIX + names["#"]}, came_from
        if source.whole is not None:
            # The title shows `restore_schema` that the original is not a reference.
            return {"$ref": PREFIX + names[source.whole], "title": schema["title"]}, came_from
        return self._written(source, "#", moved, title), came_from

    def _written(
        self, source: "_SchemaDocument", place: str, move: Callable[[str], str], title: str
    ) -> JSONObject:
        piece = source.piece(place)
        written = _rewritten(piece.schema, move, _as_object)
        if piece.contradicts:
            self.repaired[title] = None
            for part in schemas_in(written):
                if _contradicts(part):
                    del part["default"]
        for part in arrays_without_items(written):
            part["items"] = {**_ANY_ITEM} if not part.get("prefixItems") else _tuple_items(part)
        for part in schemas_in(written):
            if part.get("prefixItems") and part.get("items") == _NOTHING:
                part["items"] = _tuple_items(part)
        return written

    def _names(self, source: "_SchemaDocument", title: str) -> dict[str, str]:
        """Return a component for every referenced part: an equal existing one, or a new one."""
        keys = {
            part: (part if part != "#" else title, source.piece(part).digest)
            for part in source.used
        }
        alike = {part: list(self._known.get(key, ())) for part, key in keys.items()}
        # Parts are equal if their texts and the parts that they refer to are equal. Remove different parts, and the
        # parts that refer to them, until no more change.
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
                targets = {target: names[target] for target in source.piece(part).parts}
                self._known.setdefault(key, []).append(_Component(names[part], targets))
        return names

    def _piece(self, schema: JSONObject) -> _SchemaPart:
        known = self._pieces.get(id(schema))
        if known is None:
            references = tuple(_references(schema))
            known = self._pieces[id(schema)] = _SchemaPart(
                schema,
                sha256(canonical(schema)).digest(),
                references,
                tuple(dict.fromkeys(map(part_of, references))),
                _is_plain(schema, len(references)),
                any(map(_contradicts, schemas_in(schema))),
            )
        return known

    def _fresh(self, part: str, title: str) -> str:
        wanted = _UNSAFE.sub("_", title if part == "#" else unescape(part.rpartition("/")[2]))
        name = numbered_name(wanted, self._merged, form=merged_name)
        self._merged.add(merged_name(name))
        # Reserve the name; `place` sets the schema.
        self.schemas[name] = _PENDING
        return name


class _SchemaDocument:
    """A schema document as parts that refer to each other: its definitions, and the rest (`#`)."""

    def __init__(self, root: JSONObject, piece: Callable[[JSONObject], _SchemaPart]) -> None:
        self._root = root
        self._rest = {
            key: value for key, value in root.items() if key not in (*DEFINITIONS, "$schema")
        }
        self._look = piece
        self.is_holdable = self._is_holdable()
        """Whether an OpenAPI 3.1 document can contain it unchanged."""
        self.whole: str | None = None
        """The definition that the rest could be; None if it has no suitable title."""
        self.used: list[str] = []
        """The referenced parts."""
        if self.is_holdable:
            self.whole = self._named()
            first = self.piece("#").parts if self.whole is None else (self.whole,)
            self.used = sorted(reachable(first, lambda part: self.piece(part).parts))

    def piece(self, part: str) -> _SchemaPart:
        """Return the data about a part."""
        if part in ("#", self.whole):
            return self._look(self._rest)
        _, holder, name = part.split("/")
        return self._look(_as_object(self._root[holder][unescape(name)]))

    def _named(self) -> str | None:
        title: Any = self._rest.get("title")
        if "properties" not in self._rest or not isinstance(title, str) or not _NAME.match(title):
            return None
        if "#" in self.piece("#").parts or "definitions" in self._root:
            return None
        known: Any = self._root.get("$defs", {}).get(title, self._rest)
        return f"#/$defs/{title}" if known == self._rest else None

    def _is_holdable(self) -> bool:
        root = self._root
        if named_dialect(root) not in (None, DRAFT_2020_12):
            return False
        definitions = [object_of(root.get(key)).values() for key in DEFINITIONS]
        held = [self._rest, *chain.from_iterable(definitions)]
        if not all(isinstance(each, (dict, bool)) for each in held):
            return False
        pieces = [self._look(_as_object(each)) for each in held]
        references = {reference for piece in pieces for reference in piece.references}
        return all(piece.is_plain for piece in pieces) and all(
            _leads_somewhere(reference, root) for reference in references
        )


def has_definitions(schema: JSONSchema) -> bool:
    """Return whether a schema contains definitions."""
    return not isinstance(schema, bool) and any(key in schema for key in DEFINITIONS)


def part_of(reference: str) -> str:
    """Return the part of its document that a reference refers to."""
    match = DEFINITION.match(reference)
    return match.group() if match else "#"


def _as_object(schema: JSONSchema) -> JSONObject:
    """Return a schema as an object; the same object for the same schema."""
    return _ANYTHING if schema is True else _NOTHING if schema is False else schema


def _tuple_items(part: JSONObject) -> JSONObject:
    """Return `items` for a tuple that accepts no further item, or any; set the `maxItems` that the former needs.

    Linters require `items`. Generators of clients reject `false`, and take a schema for the type of one more item,
    unless it is a union. Of the unions, that of the tuple's own items gives the best type where tuples are lists.
    """
    prefix: list[JSONObject] = part["prefixItems"]
    limit: Any = part.get("maxItems")
    kind = _Items.NONE
    if part.get("items") == _NOTHING:
        kind = _Items.FALSE if isinstance(limit, int) and limit <= len(prefix) else _Items.LIMITED
        limit = part["maxItems"] = min(limit, len(prefix)) if kind is _Items.FALSE else len(prefix)
    is_closed = isinstance(limit, int) and limit <= len(prefix)
    # Copies of larger schemas would double the text of each level.
    is_brief = all(each.keys() <= {"$ref", "type", "format"} for each in prefix)
    members: list[JSONObject] = (
        [{**each} for each in prefix] if is_closed and is_brief else [{}, {}]
    )
    return {"anyOf": members if len(members) > 1 else members * 2, _TUPLE: kind.value}


def _restore_items(part: JSONObject) -> None:
    """Undo what `_written` changed in an array."""
    items: Any = part.get("items")
    if items == _ANY_ITEM:
        del part["items"]
    elif is_object(items) and "prefixItems" in part and _TUPLE in items:
        kind = items[_TUPLE]
        if kind == _Items.NONE:
            del part["items"]
        else:
            part["items"] = False
        if kind == _Items.LIMITED:
            part.pop("maxItems", None)


def _as_boolean(schema: JSONSchema) -> JSONSchema:
    """Return the schema for a result of `_as_object`, except that `true` stays an object."""
    return False if schema == _NOTHING else schema


def _rewritten(
    schema: JSONObject, move: Callable[[str], str], convert: Callable[[JSONSchema], JSONSchema]
) -> JSONObject:
    """Return a copy of `schema` with every `$ref` changed by `move`, and every subschema by `convert`."""
    known = dict.fromkeys(_references(schema))

    def change(copy: JSONObject) -> None:
        if isinstance(ref := copy.get("$ref"), str):
            copy["$ref"] = move(ref)
        if is_object(tag := copy.get("discriminator")) and is_object(tag.get("mapping")):
            # Tools resolve its targets, so one that is not in the document must be omitted.
            named: Iterable[tuple[str, Any]] = tag["mapping"].items()
            mapping = {value: move(ref) for value, ref in named if str(ref) in known}
            copy["discriminator"] = {**tag, "mapping": mapping}
        for keyword, token, inner in list(subschemas(copy)):
            if keyword not in _MAY_BE_BOOLEAN:
                holder: Any = copy if token is None else copy[keyword]
                holder[keyword if token is None else token] = convert(inner)

    return cast("JSONObject", rewritten(schema, change))


def _is_plain(schema: JSONObject, references: int) -> bool:
    for part in schemas_in(schema):
        if not _BOUND.isdisjoint(part) or isinstance(part.get("items"), list):
            return False
        if "$ref" in part and not isinstance(part["$ref"], str):
            return False
    # Many tools resolve a `$ref` even if it is data, such as in a default or as a property name.
    return references == sum("$ref" in value for value in objects_in(schema))


def _contradicts(schema: JSONObject) -> bool:
    """Return whether the `default` of a schema does not match its `type`."""
    if "default" not in schema or "type" not in schema:
        return False
    types: Any = schema["type"]
    names: list[Any] = types if is_list(types) else [types]
    return not any(has_type(schema["default"], name) for name in names)


def _leads_somewhere(reference: Any, root: JSONObject) -> bool:
    """Return whether a reference refers to a schema of this document, and not to a cycle."""
    for _ in range(MAX_HOPS):
        if not isinstance(reference, str) or not _LOCAL.match(reference) or "%" in reference:
            return False
        held: Any = target_of(reference, root)
        # A path to the container of definitions is not a schema.
        if reference in {"#/$defs", "#/definitions"}:
            return False
        if not is_object(held) or "$ref" not in held:
            return isinstance(held, (dict, bool))
        reference = held["$ref"]
    return False


def _references(schema: JSONObject) -> list[str]:
    return [ref for part in schemas_in(schema) if (ref := reference_of(part)) is not None]


KEY = "x-operations"

AUTHORITY = "x-operations-authority"
"""Set to true in an operation object that administers authority. Importers need no trust to believe it."""

PLACED = "placed"
"""Set in an error whose schema refers to the document's components; otherwise its schema is complete."""


class Exported(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The extension of one operation object."""

    id: str

    same_as: str | None = None
    """The method of the same path that has the extension; the other fields are then empty."""

    type: OperationType | None = None
    version: str = "1.0.0"
    idempotent: bool = False

    tags: tuple[str, ...] | None = None
    """The tags, if the namespace is one of them; otherwise they follow the namespace in the document."""

    untitled: bool = False
    """Whether the operation has no title, so that `summary` is the beginning of its description."""

    errors: tuple[JSONObject, ...] = ()
    """In the form of `ErrorDefinition.to_wire`, with schemas in the form of the document."""

    components: dict[str, str] = {}
    """The origin of components in the operation's own schemas, unless it is `#/$defs/` and their name."""

    input_schema: JSONSchema | None = None
    output_schema: JSONSchema | None = None
    """The output schema, if the document cannot contain it unchanged."""

    def own_tags(self, tags: tuple[str, ...]) -> tuple[str, ...]:
        """Return the tags of the operation, without the namespace before them.

        Args:
            tags: Those in the document.
        """
        if self.tags is not None:
            return self.tags
        namespace = self.id.partition(".")[0]
        return tags[1:] if tags[:1] == (namespace,) else tags

    def error_schemas(self, components: JSONObject) -> tuple[ErrorDefinition, ...]:
        """Return the declared errors.

        Args:
            components: The document's `components/schemas`.

        Raises:
            ValueError: If a declared error is malformed.
        """
        return tuple(self._error(error, components) for error in self.errors)

    def _error(self, error: JSONObject, components: JSONObject) -> ErrorDefinition:
        schema: Any = error.get("schema")
        if error.get(PLACED) is True and isinstance(schema, dict):
            restored = partial(
                restore_schema, cast("JSONObject", schema), components, self.components
            )
            error = {**error, "schema": True}
            found = ErrorDefinition.from_wire(error)
            return msgspec.structs.replace(found, schema=Schema(restored, lenient=True))
        return ErrorDefinition.from_wire(error)


def read_extension(operation: JSONObject) -> Exported | None:
    """Return the `x-operations` of an operation object; None if it is missing or malformed."""
    try:
        return msgspec.convert(operation.get(KEY), Exported)
    except msgspec.ValidationError:
        return None


def event_schema(item: JSONSchema) -> JSONObject:
    """Return the schema of a stream of `item`s, a text whose events are an item, an error, or the end.

    Generated clients try to decode a body as JSON if its schema is not a text.
    """
    events = [_event("message", item), _event("error", ERROR), _event("complete", {})]
    return {
        "type": "string",
        "contentMediaType": EVENT_STREAM,
        "contentSchema": {"anyOf": events},
    }


def item_schema(event: JSONSchema) -> JSONSchema:
    """Return the item schema in a result of `event_schema`; any other schema unchanged."""
    shape: Any = object_of(event).get("contentSchema", event)
    try:
        return cast("JSONSchema", shape["anyOf"][0]["properties"]["data"]["contentSchema"])
    except (KeyError, IndexError, TypeError):
        return event


def _event(name: str, data: JSONSchema) -> JSONObject:
    return {
        "type": "object",
        # An event without a name is a message.
        "required": ["data"] if name == "message" else ["event", "data"],
        "properties": {
            "event": {"const": name},
            "id": {"type": "string"},
            "data": {
                "type": "string",
                "contentMediaType": "application/json",
                "contentSchema": data,
            },
        },
    }


def restore_schema(
    schema: JSONSchema, components: JSONObject, came_from: dict[str, str]
) -> JSONSchema:
    """Return the original schema for a result of `Components.place`, without unreferenced definitions.

    Args:
        schema: The schema in the document.
        components: The document's `components/schemas`.
        came_from: The extension's `components`.
    """
    if isinstance(schema, bool):
        return schema
    used: dict[str, str] = {}

    def back(reference: str) -> str:
        if not reference.startswith(PREFIX):
            return reference
        name, slash, rest = reference.removeprefix(PREFIX).partition("/")
        used.setdefault(name, came_from.get(name, f"#/$defs/{name}"))
        return used[name] + slash + rest

    name = text_of(schema.get("$ref")).removeprefix(PREFIX)
    is_titled = schema.keys() == {"$ref", "title"}
    # A schema that refers to itself is a component.
    is_own = schema.keys() == {"$ref"} and came_from.get(name) == "#"
    is_component = (is_titled or is_own) and name in components
    restored = _rewritten(components[name] if is_component else schema, back, _as_boolean)
    done: set[str] = set()
    while missing := used.keys() - done:
        for name in sorted(missing):
            done.add(name)
            place = used[name].split("/")
            if len(place) == 3:
                held: Any = _rewritten(components[name], back, _as_boolean)
                token = unescape(place[2])
                restored.setdefault(place[1], {})[token] = held
    for part in schemas_in(restored):
        _restore_items(part)
    return restored
