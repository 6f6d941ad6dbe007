"""The unconverted schemas of one document: targets of references, properties, inheritance, names.

Rule 1: only named schemas are subtypes. An inline `allOf` with a base only uses the base.
Rule 2: a union never contains a schema that contains the union: subtypes refer to the base without its subtypes (its
        own part).
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

from operations._json import escape, is_list, is_object, list_of, object_of, text_of, unescape
from operations._references import MAX_HOPS, reachable
from operations.errors import DocumentError
from operations.openapi.files import FilesRoot
from operations.openapi.reading.keywords import FILE_SCHEMA, ROOTED_FILE_SCHEMA, is_file
from operations.openapi.reading.references import BUNDLED, References
from operations.schema import SharedDefinitions
from operations.types import JSONObject, JSONSchema

UNIONS = ("oneOf", "anyOf")

_NOTES = frozenset(
    {"allOf", "title", "description", "nullable", "example", "examples", "deprecated"}
)
"""Keywords of a named schema that is only an alias of another schema."""


class Subtypes:
    """The inheritance between the schemas of one document, read when first needed.

    Args:
        references: The references of the document, with its other files bundled.
    """

    def __init__(self, references: References) -> None:
        self._references = references
        self._schemas = dict(_named_schemas(references.document))
        self._order = {pointer: index for index, pointer in enumerate(self._schemas)}
        self._bases: dict[str, frozenset[str]] = {}
        self._children: dict[str, list[str]] = {}
        for pointer, schema in self._schemas.items():
            bases = frozenset(self._targets(_parts(schema), "allOf")) - {pointer}
            if bases:
                self._bases[pointer] = bases
                for base in bases:
                    self._children.setdefault(base, []).append(pointer)
        self._declaring = self._find_declaring()
        self._subtypes = {
            pointer: found for pointer in self._declaring if (found := self._find_subtypes(pointer))
        }
        self._circular = {
            pointer
            for pointer in self._children
            if self._descendants(pointer).intersection(
                self._targets([object_of(self._schemas.get(pointer))], *UNIONS)
            )
        }

    def of(self, pointer: str) -> tuple[str, ...]:
        """Return the pointers of the schemas that extend the base at `pointer`; empty if it is not a base."""
        return self._subtypes.get(pointer, ())

    def discriminator(self, pointer: str) -> Any:
        """Return the discriminator of the base at `pointer`, its own or that of a schema that it extends."""
        return _discriminator(self._schemas[self._declaring[pointer]])

    def is_intermediate(self, pointer: str) -> bool:
        """Return whether the schema at `pointer` is a base that inherits its discriminator."""
        return pointer in self._subtypes and self._declaring[pointer] != pointer

    def variants(self, discriminator: Any, pointers: Sequence[str]) -> JSONObject | None:
        """Return the annotation `VARIANTS` of a union.

        Args:
            discriminator: The discriminator of the union.
            pointers: The pointers of the members; empty for a member that is not a reference.
        """
        # In Swagger 2.0 it is only the name of the property.
        is_name = type(discriminator) is str
        node = {"propertyName": discriminator} if is_name else object_of(discriminator)
        members = {_name(pointer): index for index, pointer in enumerate(pointers) if pointer}
        for tag, value in object_of(node.get("mapping")).items():
            target = text_of(value)
            pointer = self._pointer(target) or ""
            if target in members:
                members[str(tag)] = members[target]
            elif pointer in pointers:
                members[str(tag)] = pointers.index(pointer)
        name = node.get("propertyName")
        return {"property": name, "members": members} if type(name) is str and members else None

    def bases(self, pointer: str) -> frozenset[str]:
        """Return the pointers of the bases that the schema at `pointer` extends."""
        return frozenset(
            base
            for base in self._bases.get(pointer, ())
            if pointer in self._subtypes.get(base, ()) or base in self._circular
        )

    def _find_declaring(self) -> dict[str, str]:
        """Return which schema declares the discriminator of each base and of the schemas that extend it."""
        found = {
            pointer: pointer
            for pointer, schema in self._schemas.items()
            if _discriminator(schema) is not None
        }
        waiting = list(found)
        for base in waiting:
            for child in self._children.get(base, ()):
                if child not in found:
                    found[child] = found[base]
                    waiting.append(child)
        return found

    def _find_subtypes(self, base: str) -> tuple[str, ...]:
        schema = self._schemas[base]
        if any(union in schema for union in UNIONS):
            return ()
        mapped = self._mapped(self._declaring[base])
        found: dict[str, None] = {}
        waiting, seen = [base], {base}
        while waiting:
            for child in self._children.get(waiting.pop(), ()):
                if child in seen:
                    continue
                seen.add(child)
                if (
                    child in mapped
                    or child in self._children
                    or not _is_alias(self._schemas[child])
                ):
                    found[child] = None
                if self._declaring[child] != child:
                    waiting.append(child)
        if self._declaring[base] == base:
            inherited = self._descendants(base)
            for target in mapped:
                if target not in inherited and not self._contains(target, base):
                    found[target] = None
        return tuple(sorted(found, key=self._order.__getitem__))

    def _mapped(self, base: str) -> list[str]:
        """Return the pointers of the schemas that a base's discriminator names."""
        node = object_of(_discriminator(self._schemas[base]))
        folder = base.rpartition("/")[0]
        found: list[str] = []
        for value in object_of(node.get("mapping")).values():
            name = text_of(value)
            pointer = f"{folder}/{escape(name)}"
            if pointer not in self._schemas:
                pointer = self._pointer(name) or ""
            if pointer in self._schemas and pointer != base:
                found.append(pointer)
        return found

    def _descendants(self, base: str) -> set[str]:
        return reachable(self._children.get(base, ()), lambda each: self._children.get(each, ()))

    def _contains(self, pointer: str, wanted: str) -> bool:
        """Return whether every value of the schema at `pointer` is also a value of the schema at `wanted`."""

        def targets(each: str) -> Iterator[str]:
            return self._targets(_parts(self._schemas.get(each, {})), "allOf", *UNIONS)

        return wanted in reachable(targets(pointer), targets)

    def _targets(self, schemas: list[JSONObject], *keywords: str) -> Iterator[str]:
        """Yield the targets of the references in `keywords`."""
        for schema in schemas:
            for keyword in keywords:
                for item in list_of(schema.get(keyword)):
                    ref = object_of(item).get("$ref")
                    if type(ref) is str and (pointer := self._pointer(ref)):
                        yield pointer

    def _pointer(self, ref: str) -> str | None:
        try:
            return self._references.locate_final(ref)[0]
        except DocumentError:
            return None


def _named_schemas(document: JSONObject) -> Iterator[tuple[str, JSONObject]]:
    """Yield every named schema with its pointer."""
    files = object_of(document.get(BUNDLED))
    holders: list[tuple[str, Any]] = [("", document)]
    holders += [(f"/{BUNDLED}/{escape(name)}", file) for name, file in files.items()]
    for here, holder in holders:
        node = object_of(holder)
        if here and "allOf" in node:
            yield here, node
        folders = {
            f"{here}/components/schemas": object_of(node.get("components")).get("schemas"),
            f"{here}/definitions": node.get("definitions"),
            f"{here}/$defs": node.get("$defs"),
        }
        for folder, schemas in folders.items():
            for name, schema in object_of(schemas).items():
                if is_object(schema):
                    yield f"{folder}/{escape(name)}", schema


def _name(pointer: str) -> str:
    return unescape(pointer.rpartition("/")[2])


def _parts(schema: JSONObject) -> list[JSONObject]:
    """Return `schema` and the inline parts of its `allOf`."""
    parts = [schema]
    for part in parts:
        for item in list_of(part.get("allOf")):
            if is_object(item) and "$ref" not in item and len(parts) < MAX_HOPS:
                parts.append(item)
    return parts


def _discriminator(schema: JSONObject) -> Any:
    for part in _parts(schema):
        if "discriminator" in part:
            return part["discriminator"]
    return None


def _is_alias(schema: JSONObject) -> bool:
    """Return whether `schema` is only an alias of another schema."""
    parts = schema.get("allOf")
    return is_list(parts) and len(parts) == 1 and schema.keys() <= _NOTES


MAX_PARTS = 200
"""The largest number of `allOf` parts of one schema, including nested parts, that are searched for properties."""

_LOGGER = logging.getLogger("operations")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class Direction(StrEnum):
    """The direction of the data, which determines the meaning of `readOnly`, `writeOnly` and binary strings."""

    REQUEST = "request"
    UPLOAD = "upload"
    """A request that is not JSON: binary strings are files."""
    RESPONSE = "response"


@dataclass(slots=True, eq=False)
class Definition:
    """One definition: its position in the document and, once used, its conversion and the references in it."""

    name: str
    """Its name among the `$defs`."""

    pointer: str
    """Its position."""

    target: Any
    """The schema there, not converted."""

    direction: Direction

    is_own_part: bool
    """Whether this is a base without its subtypes, which the subtypes refer to."""

    schema: JSONSchema | None = None
    """The conversion; None until it is needed."""

    refs: "set[Definition]" = field(default_factory=set["Definition"])
    """The definitions that the conversion refers to."""

    @property
    def ref(self) -> JSONObject:
        """A reference to this definition."""
        return {"$ref": f"#/$defs/{self.name}"}


class Definitions:
    """The unconverted schemas of one document.

    Args:
        references: The document's references.
        ref_siblings: Whether keywords beside a `$ref` are used (from 3.1 on), or ignored as in 3.0 and 2.0.

    Attributes:
        requests: The definitions of inputs, compiled once for all operations.
        responses: The definitions of outputs and errors.
    """

    def __init__(self, references: References, *, ref_siblings: bool) -> None:
        self._references = references
        self.ref_siblings = ref_siblings
        self.files_root: FilesRoot | None = None
        """The folder in which a caller may name files to send."""

        self._definitions: dict[tuple[Direction, str, bool], Definition] = {}
        self._broken: set[str] = set()
        self.requests = SharedDefinitions()
        self.responses = SharedDefinitions()
        self._without_files: set[str] = set()

    @property
    def file_schema(self) -> JSONObject:
        """The schema of a file in an operation's input."""
        return FILE_SCHEMA if self.files_root is None else ROOTED_FILE_SCHEMA

    @cached_property
    def subtypes(self) -> Subtypes:
        """The inheritance between the document's schemas."""
        return Subtypes(self._references)

    def resolve(self, schema: Any) -> JSONObject:
        """Return `schema` with its `$ref`s resolved; empty if the target is not an object."""
        return self._references.object_at(schema)

    def value(self, node: JSONObject) -> Any:
        """Return `node`, or its target if it is a reference; None if the target does not exist."""
        return self._references.value_at(node)

    def properties(self, schema: Any) -> JSONObject:
        """Return the properties of an object schema, including those of its `allOf` parts."""
        result: JSONObject = {}
        for part in reversed(self.parts(self.resolve(schema))):
            result.update(self._references.object_at(part.get("properties")))
        return result

    def flattened(self, schema: Any) -> JSONObject:
        """Return an object schema merged with the properties and requirements of its `allOf` parts."""
        parts = self.parts(self.resolve(schema))
        return {
            "type": "object",
            "properties": self.properties(schema),
            "required": [name for part in parts for name in list_of(part.get("required"))],
        }

    def variants(self, schema: Any) -> list[JSONObject]:
        """Return `schema`, its `allOf` parts, and those of its union members and subtypes, without duplicates."""
        found: dict[int, JSONObject] = {}
        waiting = [schema]
        for each in waiting:
            for part in self.parts(self.resolve(each)):
                if id(part) not in found and len(found) < MAX_PARTS:
                    found[id(part)] = part
                    for union in UNIONS:
                        waiting += self._references.list_at(part.get(union))
            waiting += [ref for ref in self._subtypes_of(each) if ref not in waiting]
        return list(found.values())

    def declarations(self, schema: Any, name: str) -> list[Any]:
        """Return the schemas of the property `name` in all variants of `schema` that have it."""
        properties = [
            self._references.object_at(part.get("properties")) for part in self.variants(schema)
        ]
        return [each[name] for each in properties if name in each]

    def without_required(
        self,
        schema: Any,
        name: str,
        allows: Callable[[Any], bool],
        outer: Sequence[Any] = (),
        depth: int = 10,
    ) -> Any:
        """Return `schema`, or a copy that does not require the property `name`.

        Args:
            schema: An object schema, a union of those, or a base with subtypes.
            name: The property.
            allows: Returns whether the property may be omitted, given its schema. Other alternatives still require it.
            outer: Schemas of the property outside this schema.
            depth: The number of remaining levels.
        """
        declared = [*outer, *self.declarations(schema, name)]
        is_required = any(name in list_of(part.get("required")) for part in self.variants(schema))
        if depth == 0 or not is_required or not any(map(allows, declared)):
            return schema
        again = partial(self.without_required, name=name, allows=allows, depth=depth - 1)
        if subtypes := self._subtypes_of(schema):
            return {"anyOf": [again(self._inlined(ref)) for ref in (*subtypes, schema)]}
        copy = dict(self.resolve(schema))
        if "required" in copy:
            copy["required"] = [each for each in list_of(copy["required"]) if each != name]
        own = self.properties(schema).get(name)
        beside = list(outer) if own is None else [*outer, own]
        parts = [
            again(part, outer=declared) for part in self._references.list_at(copy.get("allOf"))
        ]
        for union in UNIONS:
            members = self._references.list_at(copy.pop(union, None))
            if members:
                # Without the requirement, a value may match several alternatives.
                parts.append({"anyOf": [again(member, outer=beside) for member in members]})
        return {**copy, "allOf": parts} if parts else copy

    def _inlined(self, ref: JSONObject) -> JSONObject:
        """Return an inline schema that is equivalent to a base's own part, or to a subtype with its bases."""
        skipped = {"allOf", "discriminator"}
        parts = self.parts(self.resolve(ref))
        return {"allOf": [{k: v for k, v in part.items() if k not in skipped} for part in parts]}

    def _subtypes_of(self, schema: Any) -> list[JSONObject]:
        """Return references to the subtypes of the base that `schema` refers to; empty if it is no such reference."""
        ref = object_of(schema).get("$ref")
        try:
            return self._subtype_refs(self._references.locate(ref)[0]) if type(ref) is str else []
        except DocumentError:
            return []

    def has_subtypes(self, schema: Any) -> bool:
        """Return whether `schema` is a reference to a base with subtypes."""
        return bool(self._subtypes_of(schema))

    def parts(self, schema: JSONObject) -> list[JSONObject]:
        """Return `schema` and its `allOf` parts at any depth, without duplicates."""
        parts = [schema]
        seen = {id(schema)}
        for part in parts:
            for inner in self._references.list_at(part.get("allOf")):
                found = self.resolve(inner)
                if id(found) not in seen and len(parts) < MAX_PARTS:
                    seen.add(id(found))
                    parts.append(found)
        return parts

    def has_closed_parts(self, schema: JSONObject) -> bool:
        """Return whether an `allOf` part of `schema` forbids properties of another part, so that no value matches."""
        parts = self.parts(schema)
        closed = [part for part in parts if is_closed(part)]
        if not closed or len(parts) == 1:
            return False
        names = {name for part in parts for name in object_of(part.get("properties"))}
        return any(
            not part.get("patternProperties") and names - object_of(part.get("properties")).keys()
            for part in closed
        )

    def hidden(self, schema: JSONObject, mark: str) -> frozenset[str]:
        """Return the properties of `schema` and its `allOf` parts that are not sent in this direction."""
        return frozenset(
            name
            for part in self.parts(schema)
            for name, item in self._references.object_at(part.get("properties")).items()
            if self._is_marked(item, mark)
        )

    def _is_marked(self, item: Any, mark: str) -> bool:
        if not is_object(item):
            return False
        return item.get(mark) is True or ("$ref" in item and self.resolve(item).get(mark) is True)

    def allows_null(self, schema: Any, depth: int = 10) -> bool:
        """Return whether `schema` allows null."""
        node = self.resolve(schema)
        if node.get("nullable") is True or object_of(schema).get("nullable") is True or depth == 0:
            return True
        kind = node.get("type")
        if kind is not None and kind != "null" and "null" not in list_of(kind):
            return False
        if "const" in node and node["const"] is not None:
            return False
        if is_list(node.get("enum")) and None not in node["enum"]:
            return False
        if not all(self.allows_null(part, depth - 1) for part in list_of(node.get("allOf"))):
            return False
        return all(
            any(self.allows_null(member, depth - 1) for member in list_of(node[union]))
            for union in ("anyOf", "oneOf")
            if list_of(node.get(union))
        )

    def allows_boolean(self, schema: Any, value: bool) -> bool:
        """Return whether `schema` describes a boolean, or null, and allows `value`."""
        node = self.resolve(schema)
        members = [*list_of(node.get("anyOf")), *list_of(node.get("oneOf"))]
        kinds = [kind := node.get("type"), *list_of(kind)]
        kinds += [self.resolve(member).get("type") for member in members]
        choices = list_of(node.get("enum"))
        if "boolean" not in kinds or (choices and value not in choices):
            return False
        return bool(node.get("const", value) is value)

    def definition(
        self, ref: str, direction: Direction, bases: Iterable[str] = ()
    ) -> Definition | None:
        """Return the definition that `ref` refers to; None if it does not exist.

        Args:
            ref: The reference.
            direction: The direction of the data.
            bases: Pointers of the bases to use without their subtypes.
        """
        try:
            pointer, target = self._references.locate(ref)
            if bases:
                pointer, target = self._references.locate_final(ref)
        except DocumentError as error:
            if ref not in self._broken:
                self._broken.add(ref)
                _LOGGER.warning(
                    "A reference in a schema cannot be resolved and allows any value: %s", error
                )
            return None
        return self.definition_at(pointer, target, direction, is_own_part=pointer in bases)

    def definition_at(
        self, pointer: str, target: Any, direction: Direction, *, is_own_part: bool
    ) -> Definition:
        """Return the definition of the schema `target`, which is at `pointer`."""
        if direction is Direction.UPLOAD and not self._has_files(pointer, target):
            direction = Direction.REQUEST
        known = self._definitions.get((direction, pointer, is_own_part))
        if known is None:
            name = _definition_name(pointer)
            if is_own_part:
                name = self._unused(f"{name}.base", pointer)
                # A base that lists its subtypes itself: the subtypes refer to the rest of the base.
                target = {key: item for key, item in target.items() if key not in UNIONS}
            if direction is Direction.UPLOAD:
                name = self._unused(f"{name}.upload", pointer)
            known = Definition(name, pointer, target, direction, is_own_part)
            self._definitions[direction, pointer, is_own_part] = known
        return known

    def _unused(self, name: str, pointer: str) -> str:
        """Return `name`, with a digest appended if the document has another schema of this name."""
        try:
            self._references.locate(f"#{pointer.rpartition('/')[0]}/{name}")
        except DocumentError:
            return name
        return f"{name}_{_digest(pointer)}"

    def _has_files(self, pointer: str, target: Any) -> bool:
        """Return whether a schema, or a schema that it refers to, describes a file."""
        if pointer in self._without_files:
            return False
        seen = {pointer}
        waiting: list[Any] = [target, *self._subtype_refs(pointer)]
        while waiting:
            node = waiting.pop()
            if is_object(node):
                if is_file(node):
                    return True
                ref = node.get("$ref")
                if type(ref) is str:
                    try:
                        place, found = self._references.locate(ref)
                    except DocumentError:
                        continue
                    if place not in seen and place not in self._without_files:
                        seen.add(place)
                        waiting += (found, *self._subtype_refs(place))
                waiting.extend(node.values())
            elif is_list(node):
                waiting.extend(node)
        self._without_files |= seen
        return False

    def _subtype_refs(self, pointer: str) -> list[JSONObject]:
        return [{"$ref": f"#{subtype}"} for subtype in self.subtypes.of(pointer)]

    def is_circle(self, target: Any) -> bool:
        """Return whether `target` is a reference to itself, directly or indirectly."""
        return isinstance(target, dict) and self._references.find(target) is None


def is_closed(schema: JSONObject) -> bool:
    """Return whether `schema` forbids properties that it does not declare."""
    closing = ("additionalProperties", "unevaluatedProperties")
    return any(schema.get(key) is False for key in closing)


def _definition_name(pointer: str) -> str:
    """Return a stable name for the definition at `pointer`: its own name if that is safe."""
    *_, parent, name = ("", *pointer.split("/"))
    if parent == BUNDLED:
        # A whole file: its name without folders and extension.
        name = unescape(name).rpartition("/")[2].partition(".")[0]
    safe = _UNSAFE.sub("_", name).strip("_") or "schema"
    if safe == name and parent in {"schemas", "definitions", "$defs"} and pointer.count("/") <= 3:
        return safe
    return f"{safe[:60]}_{_digest(pointer)}"


def _digest(pointer: str) -> str:
    return hashlib.sha256(pointer.encode()).hexdigest()[:8]
