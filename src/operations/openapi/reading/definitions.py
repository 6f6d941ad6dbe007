"""The unconverted schemas of one document: targets of references, properties, names.

Rule: a union never contains a schema that contains the union: subtypes refer to the base without its subtypes (its own
part).
"""

import hashlib
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import Any

from operations.base.errors import DocumentError
from operations.base.json.references import objects_in, reference_of
from operations.base.json.values import is_list, is_object, list_of, object_of, unescape
from operations.base.types import JSONObject, JSONSchema
from operations.io.files import FilesRoot
from operations.openapi.reading.keywords import (
    FILE_SCHEMA,
    ROOTED_FILE_SCHEMA,
    declared_types,
    is_file,
)
from operations.openapi.reading.references import BUNDLED, References
from operations.openapi.reading.subtypes import UNIONS, Subtypes
from operations.schema import SharedDefinitions

MAX_PARTS = 200
"""The largest number of `allOf` parts of one schema, including nested parts, that are searched for properties."""

CLOSING = ("additionalProperties", "unevaluatedProperties")
"""Keywords for properties that a schema does not declare."""

_COMPOSED = frozenset({"allOf", *UNIONS})
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

    is_checked: bool = False
    """Whether the conversion was searched for cycles."""

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

    def property(self, schema: Any, name: str) -> Any:
        """Return the schema of a property, also if only alternatives or `additionalProperties` describe it."""
        own = self.properties(schema)
        if name in own:
            return own[name]
        declared = self.declarations(schema, name)
        if not declared:
            others = [part.get("additionalProperties") for part in self.variants(schema)]
            declared = [each for each in others if is_object(each)]
        return {"anyOf": declared} if declared else None

    def holds_files(self, field: JSONObject, value: Any) -> bool:
        """Return whether a form's field of this schema is a file or a list of files."""
        items: list[Any] = (value or [{}]) if is_list(value) else []
        return is_file(field) or any(
            is_file(self.field(field.get("items"), item)) for item in items
        )

    def field(self, schema: Any, value: Any) -> JSONObject:
        """Return the schema of a form's field, or the part or alternative that describes `value` as a file or a list.

        Args:
            schema: The schema of the field.
            value: The field. If it may be a file or text, a string is text.
        """
        node = self.resolve(schema)
        if node.keys().isdisjoint(_COMPOSED):
            return node
        found = self.variants(schema)
        if is_list(value):
            return next((part for part in found if "items" in part), node)
        is_text = type(value) is str and any(
            part.get("type") == "string" and not is_file(part) for part in found
        )
        return node if is_text else next(filter(is_file, found), node)

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
            waiting += [ref for ref in self.subtypes_of(each) if ref not in waiting]
        return list(found.values())

    def declarations(self, schema: Any, name: str) -> list[Any]:
        """Return the schemas of the property `name` in all variants of `schema` that have it."""
        properties = [
            self._references.object_at(part.get("properties")) for part in self.variants(schema)
        ]
        return [each[name] for each in properties if name in each]

    def without_required(self, schema: Any, name: str) -> Any:
        """Return an object schema, with its `allOf` parts inlined, that does not require the property `name`."""
        own, *others = [
            {
                **{key: value for key, value in part.items() if key != "allOf"},
                "required": [each for each in list_of(part.get("required")) if each != name],
            }
            for part in self.parts(self.resolve(schema))
        ]
        return {**own, "allOf": others} if others else own

    def subtypes_of(self, schema: Any) -> list[JSONObject]:
        """Return references to the subtypes of the base that `schema` refers to; empty if it is no such reference."""
        ref = reference_of(schema)
        found = None if ref is None else self._references.located(ref)
        return [] if found is None else self._subtype_refs(found[0])

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

    def closing(self, schema: JSONObject) -> list[Any]:
        """Return the schemas of undeclared properties, if an `allOf` part of `schema` applies its own to another part.

        Such a part would reject the properties of the others. The list is empty if there is none.
        """
        parts = self.parts(schema)
        closed = [part for part in parts if is_closed(part)]
        if not closed or len(parts) == 1:
            return []
        names = {name for part in parts for name in object_of(part.get("properties"))}
        if not any(
            not part.get("patternProperties") and names - object_of(part.get("properties")).keys()
            for part in closed
        ):
            return []
        return [part[key] for part in closed for key in CLOSING if closes(part.get(key))]

    def contradicts_type(self, schema: JSONObject) -> bool:
        """Return whether an `allOf` part, or every member of a union, has other types than `schema` itself."""
        own = _basic_types(schema)
        parts = [
            [_basic_types(self.resolve(part)) for part in self._references.list_at(schema.get(key))]
            for key in ("allOf", *UNIONS)
        ]
        # An unknown type is empty and contradicts nothing.
        all_of, *unions = [[bool(types) and own.isdisjoint(types) for types in p] for p in parts]
        return any(all_of) or any(members and all(members) for members in unions)

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

    def allows_boolean(self, schema: Any, value: bool) -> bool:
        """Return whether `schema` describes a boolean, which may be nullable, and allows `value`."""
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
        is_used = self._references.has(f"{pointer.rpartition('/')[0]}/{name}")
        return f"{name}_{_digest(pointer)}" if is_used else name

    def _has_files(self, pointer: str, target: Any) -> bool:
        """Return whether a schema, or a schema that it refers to, describes a file."""
        if pointer in self._without_files:
            return False
        seen = {pointer}
        waiting: list[Any] = [target, *self._subtype_refs(pointer)]
        for node in chain.from_iterable(map(objects_in, waiting)):
            if is_file(node):
                return True
            ref = reference_of(node)
            found = None if ref is None else self._references.located(ref)
            if found is not None and found[0] not in seen and found[0] not in self._without_files:
                seen.add(found[0])
                waiting += (found[1], *self._subtype_refs(found[0]))
        self._without_files |= seen
        return False

    def _subtype_refs(self, pointer: str) -> list[JSONObject]:
        return [{"$ref": f"#{subtype}"} for subtype in self.subtypes.of(pointer)]

    def is_circle(self, target: Any) -> bool:
        """Return whether `target` is a reference to itself, directly or indirectly."""
        return isinstance(target, dict) and self._references.find(target) is None


def _basic_types(schema: JSONObject) -> set[str]:
    """Return the declared types of `schema`, in which an integer is a number."""
    kinds = declared_types(schema.get("type"))
    types = {kinds} if type(kinds) is str else set(list_of(kinds))
    return {"number" if kind == "integer" else kind for kind in types}


def is_closed(schema: JSONObject) -> bool:
    """Return whether `schema` forbids or restricts properties that it does not declare."""
    return any(closes(schema.get(key)) for key in CLOSING)


def closes(value: Any) -> bool:
    """Return whether the value of a keyword in `CLOSING` restricts properties."""
    return value is False or (is_object(value) and bool(value))


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
