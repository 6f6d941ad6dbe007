"""Describe many operations in one document: shared definitions under `components/schemas`, the rest in `x-operations`.

Rule 1: equal definitions, including everything they refer to, are written once; different ones of the same name get a
        number. Definitions without a reference are left out.
Rule 2: a `default` that is not of the type beside it is left out: client generators reject such documents.
Rule 3: a schema that OpenAPI 3.1 cannot express (another dialect, identifiers, dynamic or foreign references) is not
        changed: `x-operations` carries it whole.
Rule 4: `x-operations` carries only what OpenAPI cannot: `summary` is the title, `description` the description. The POST
        is the operation; the GET beside it names it (`{"id": ..., "sameAs": "post"}`).
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import Any, cast

import msgspec

from operations._json import canonical, is_list, is_object, unescape
from operations._references import objects_in, reachable, target_of
from operations.schema import Schema
from operations.schema.references import (
    DEFINITIONS,
    DRAFT_2020_12,
    named_dialect,
    rewritten,
    schemas_in,
)
from operations.schema.values import has_type
from operations.specs import ErrorDefinition, OperationType
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

_PENDING: JSONObject = {}
_ANYTHING: JSONObject = {}
_NOTHING: JSONObject = {"not": {}}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A definition, or a schema without its definitions, looked at once: importers share them among operations."""

    schema: JSONObject
    """Kept, so that its id stays its own."""

    digest: bytes
    """The digest of its canonical text, which is the same for equal schemas."""

    references: tuple[str, ...]

    parts: tuple[str, ...]
    """The parts of its document that it refers to."""

    is_plain: bool
    """Whether it means the same in any document of OpenAPI 3.1 that has what it refers to."""

    contradicts: bool
    """Whether it has a `default` that is not of its type."""


@dataclass(frozen=True, slots=True)
class _Component:
    """A schema that has been placed, and where its references went."""

    name: str
    targets: dict[str, str]
    """For each part it refers to, the component that part became."""


class Components:
    """The shared schemas of one document, as they are found.

    Attributes:
        schemas: The schemas by name.
        repaired: The titles of the schemas that had a `default` which is not of its type.
    """

    def __init__(self) -> None:
        self.repaired: dict[str, None] = {}
        self.schemas: JSONObject = {}
        self._known: dict[tuple[str, bytes], list[_Component]] = {}
        self._pieces: dict[int, _Piece] = {}

    def place(self, schema: JSONSchema, title: str) -> tuple[JSONSchema, dict[str, str]] | None:
        """Return `schema` for the document, with its definitions moved to the components.

        Args:
            schema: A JSON Schema document.
            title: The name to use where it refers to itself.

        Returns:
            The schema, and for each component that did not come from `#/$defs/` and its own name, the pointer it
            came from. None where the document cannot hold it.
        """
        if isinstance(schema, bool):
            # Some tools know schemas only as objects.
            return ({} if schema else {"not": {}}), {}
        source = _Source(schema, self._piece)
        if not source.is_holdable:
            return None
        names = self._names(source, title)

        def moved(reference: str) -> str:
            part = part_of(reference)
            return PREFIX + names[part] + reference[len(part) :]

        for part, name in names.items():
            if self.schemas[name] is _PENDING:
                self.schemas[name] = self._written(source.piece(part), moved, name)
        came_from = {name: part for part, name in names.items() if part != f"#/$defs/{name}"}
        if "#" in names:
            return {"$ref": PREFIX + names["#"]}, came_from
        return self._written(source.piece("#"), moved, title), came_from

    def _written(self, piece: _Piece, move: Callable[[str], str], title: str) -> JSONObject:
        written = with_references(piece.schema, move)
        if piece.contradicts:
            self.repaired[title] = None
            for part in schemas_in(written):
                if _contradicts(part):
                    del part["default"]
        return written

    def _names(self, source: "_Source", title: str) -> dict[str, str]:
        """Return a component for every part that is referred to: one that says the same, or a new one."""
        keys = {
            part: (part if part != "#" else title, source.piece(part).digest)
            for part in source.used
        }
        alike = {part: list(self._known.get(key, ())) for part, key in keys.items()}
        # Parts are equal if their texts and the parts they refer to are equal. A different one drops out, and may
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
                targets = {target: names[target] for target in source.piece(part).parts}
                self._known.setdefault(key, []).append(_Component(names[part], targets))
        return names

    def _piece(self, schema: JSONObject) -> _Piece:
        known = self._pieces.get(id(schema))
        if known is None:
            references = tuple(_references(schema))
            known = self._pieces[id(schema)] = _Piece(
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
        name, number = wanted, 1
        while name in self.schemas:
            number += 1
            name = f"{wanted}_{number}"
        # Taken from now on; `place` fills it.
        self.schemas[name] = _PENDING
        return name


class _Source:
    """One schema document, seen as parts that refer to each other: its definitions, and the rest (`#`)."""

    def __init__(self, root: JSONObject, piece: Callable[[JSONObject], _Piece]) -> None:
        self._root = root
        self._rest = {
            key: value for key, value in root.items() if key not in (*DEFINITIONS, "$schema")
        }
        self._look = piece
        self.is_holdable = self._is_holdable()
        """Whether an OpenAPI 3.1 document can hold it unchanged."""
        self.used: list[str] = []
        """The parts that some reference leads to."""
        if self.is_holdable:
            parts = reachable(self.piece("#").parts, lambda part: self.piece(part).parts)
            self.used = sorted(parts)

    def piece(self, part: str) -> _Piece:
        """Return the data about a part."""
        return self._look(self.held(part))

    def held(self, part: str) -> JSONObject:
        """Return the schema of a part."""
        if part == "#":
            return self._rest
        _, holder, name = part.split("/")
        return _as_object(self._root[holder][unescape(name)])

    def _is_holdable(self) -> bool:
        root = self._root
        if named_dialect(root) not in (None, DRAFT_2020_12):
            return False
        references: set[str] = set()
        definitions = (root[key].values() for key in DEFINITIONS if is_object(root.get(key)))
        held: Any
        for held in (self._rest, *chain.from_iterable(definitions)):
            piece = (
                self._look(_as_object(cast("JSONSchema", held)))
                if isinstance(held, (dict, bool))
                else None
            )
            if piece is None or not piece.is_plain:
                return False
            references.update(piece.references)
        return all(_leads_somewhere(reference, root) for reference in references)


def has_definitions(schema: JSONSchema) -> bool:
    """Return whether a schema holds others beside itself."""
    return not isinstance(schema, bool) and any(key in schema for key in DEFINITIONS)


def part_of(reference: str) -> str:
    """Return the part of its document that a reference leads into."""
    match = _DEFINITION.match(reference)
    return match.group() if match else "#"


def _as_object(schema: JSONSchema) -> JSONObject:
    """Return a schema as an object; the same object for the same schema."""
    return _ANYTHING if schema is True else _NOTHING if schema is False else schema


def with_references(schema: JSONObject, move: Callable[[str], str]) -> JSONObject:
    """Return a copy of `schema` with every `$ref` changed by `move`."""

    def change(copy: JSONObject) -> None:
        if isinstance(ref := copy.get("$ref"), str):
            copy["$ref"] = move(ref)

    return cast("JSONObject", rewritten(schema, change))


def _is_plain(schema: JSONObject, references: int) -> bool:
    for part in schemas_in(schema):
        if not _BOUND.isdisjoint(part) or isinstance(part.get("items"), list):
            return False
        if "$ref" in part and not isinstance(part["$ref"], str):
            return False
    # Many tools follow a `$ref` even if it is data (in a default, or as a property's name).
    return references == sum("$ref" in value for value in objects_in(schema))


def _contradicts(schema: JSONObject) -> bool:
    """Return whether the `default` of a schema is not of the type beside it."""
    if "default" not in schema or "type" not in schema:
        return False
    types: Any = schema["type"]
    names: list[Any] = types if is_list(types) else [types]
    return not any(has_type(schema["default"], name) for name in names)


def _leads_somewhere(reference: Any, root: JSONObject) -> bool:
    """Return whether a reference ends at a schema of this document, and not in a circle."""
    for _ in range(_HOPS):
        if not isinstance(reference, str) or not _LOCAL.match(reference) or "%" in reference:
            return False
        held: Any = target_of(reference, root)
        # A path to the container of definitions is not that of a schema.
        if reference in {"#/$defs", "#/definitions"}:
            return False
        if not is_object(held) or "$ref" not in held:
            return isinstance(held, (dict, bool))
        reference = held["$ref"]
    return False


def _references(schema: JSONObject) -> Iterable[str]:
    for part in schemas_in(schema):
        reference = part.get("$ref")
        if isinstance(reference, str):
            yield reference


KEY = "x-operations"

PLACED = "placed"
"""Set in an error whose schema refers to the document's components; another stands whole."""


class Exported(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The extension of one operation object."""

    id: str

    same_as: str | None = None
    """The method of the same path that is the operation itself; then the other fields are empty."""

    type: OperationType | None = None
    version: str = "1.0.0"
    idempotent: bool = False

    errors: tuple[JSONObject, ...] = ()
    """As `ErrorDefinition.to_wire` gives them, their schemas as the document holds them."""

    components: dict[str, str] = {}
    """The origin of components in the operation's own schemas, unless it was `#/$defs/` and their name."""

    input_schema: JSONSchema | None = None
    output_schema: JSONSchema | None = None
    """A schema that the document could not hold unchanged."""

    def error_schemas(self, components: JSONObject) -> tuple[ErrorDefinition, ...]:
        """Return the declared errors.

        Args:
            components: The document's `components/schemas`.

        Raises:
            ValueError: If they are none.
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
    """Return the `x-operations` of an operation object; None if it has none that can be read."""
    try:
        return msgspec.convert(operation.get(KEY), Exported)
    except msgspec.ValidationError:
        return None


def event_schema(item: JSONSchema) -> JSONObject:
    """Return one event of a stream whose items fit `item`: an item, the error that ended it, or its end."""
    return {"anyOf": [_event("message", item), _event("error", _ERROR), _event("complete", {})]}


def item_schema(event: JSONSchema) -> JSONSchema:
    """Return the schema of a stream's items, from what `event_schema` wrote; any other schema is returned unchanged."""
    shape: Any = event
    try:
        return cast("JSONSchema", shape["anyOf"][0]["properties"]["data"]["contentSchema"])
    except (KeyError, IndexError, TypeError):
        return event


_ERROR: JSONSchema = {"$ref": PREFIX + "Error"}


def _event(name: str, data: JSONSchema) -> JSONObject:
    return {
        "type": "object",
        "required": ["data"],
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
    """Return the schema that `Components.place` was given, but for definitions that nothing refers to.

    Args:
        schema: As in the document.
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

    restored = with_references(schema, back)
    if restored.get("$ref") == "#" and "$ref" in schema and len(schema) == 1:
        # The schema refers to itself, and so is a component: use its reference.
        name = cast("str", schema["$ref"]).removeprefix(PREFIX)
        restored = with_references(components[name], back)
    done: set[str] = set()
    while missing := used.keys() - done:
        for name in sorted(missing):
            done.add(name)
            place = used[name].split("/")
            if len(place) == 3:
                held: Any = with_references(components[name], back)
                token = unescape(place[2])
                restored.setdefault(place[1], {})[token] = held
    return restored
