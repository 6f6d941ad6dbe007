"""Convert schemas of any OpenAPI version to self-contained JSON Schema 2020-12 documents.

A converted schema contains only the definitions that it refers to, as `$defs`. Definitions are converted once per
document and direction and shared, so that an import of thousands of operations converts only what is used.

Rule 1: a schema is converted when it is first used.
Rule 2: an incorrect keyword (a `minLength` of "3", a `required` of true) is corrected or omitted; it never makes the
        rest of the schema unusable.
Rule 3: a schema that accepts no value because its parts contradict each other is converted to its intended meaning.
Rule 4: in a request, `oneOf` becomes `anyOf`: documents declare `oneOf: [integer, number]`, and servers accept 1.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from operator import attrgetter
from typing import Any, NamedTuple

from operations.base.json.values import is_list, is_object, list_of, object_of
from operations.base.text import printable
from operations.base.types import JSONObject, JSONSchema
from operations.openapi.reading.definitions import CLOSING, Definitions, closes, is_closed
from operations.openapi.reading.file_fields import FileFields
from operations.openapi.reading.keywords import (
    apply_exclusive,
    as_object,
    count_of,
    data_of,
    declared_types,
    dependent_names,
    discriminated,
    is_file,
    names_of,
    number_of,
    put,
    repair_enum,
    repair_pattern,
    with_null,
)
from operations.openapi.reading.naming import Definition, Direction, NamedDefinitions
from operations.openapi.reading.references import References
from operations.openapi.reading.subtypes import UNIONS
from operations.schema import SharedDefinitions
from operations.schema.compiling import drop_invalid_patterns
from operations.schema.references import (
    ALL_TYPES,
    APPLIED,
    VARIANTS,
    possible_types,
    subschemas,
)

MAX_DEPTH = 100
"""The largest depth of a definition; deeper parts accept any value."""

_LOGGER = logging.getLogger("operations")

_MARK = {
    Direction.REQUEST: "readOnly",
    Direction.UPLOAD: "readOnly",
    Direction.RESPONSE: "writeOnly",
}
_ANY = frozenset({"default", "const"})
_CORRECTED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("title", "description", "pattern", "format", "contentEncoding", "contentMediaType"),
        lambda value: value if type(value) is str else None,
    ),
    **dict.fromkeys(
        ("uniqueItems", "deprecated", "readOnly", "writeOnly"),
        lambda value: value if type(value) is bool else None,
    ),
    **dict.fromkeys(
        ("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum", "multipleOf"), number_of
    ),
    **dict.fromkeys(
        (
            "maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties", "maxContains",
            "minContains",
        ),
        count_of,
    ),
    "type": declared_types,
    "dependentRequired": dependent_names,
    "enum": lambda value: data_of(value) if is_list(value) and value else None,
    "examples": lambda value: data_of(value) if is_list(value) else None,
}  # fmt: skip
"""How the values of keywords that hold no schema are corrected; None leaves the keyword out."""

_SCHEMA = frozenset(
    {
        "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
        "unevaluatedItems", "unevaluatedProperties", "contentSchema",
    }
)  # fmt: skip
_VALUES = _SCHEMA | _ANY | {"items", "example", "examples"}
"""Keywords whose value is a schema or data, so that a `$ref` in it does not replace the whole value."""

_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "prefixItems"})
_SCHEMA_MAPS = frozenset({"patternProperties", "dependentSchemas"})

__all__ = ["Direction", "SchemaConverter", "SchemaDraft"]

_NOT_NULL = ALL_TYPES - {"null"} | {"integer"}

MAX_SUBTYPES = 64
"""The largest number of subtypes in a union; a base with more subtypes allows additional properties instead."""


class _Position(NamedTuple):
    """The position of a schema inside its definition."""

    depth: int = 0

    hidden: frozenset[str] = frozenset()
    """Properties that an outer schema hides."""

    is_part: bool = False
    """Whether it is the definition itself or an `allOf` part of it."""

    is_opened: bool = False
    """Whether an outer schema forbids undeclared properties instead of this one."""


@dataclass(slots=True)
class SchemaDraft:
    """A self-contained schema that is being built: converts its parts and records the definitions they refer to."""

    converter: "SchemaConverter"
    direction: Direction

    refs: set[Definition] = field(default_factory=set[Definition])
    """Receives the definitions."""

    bases: frozenset[str] = frozenset()
    """Pointers of the bases that the schema extends."""

    _inlined: set[str] = field(default_factory=set[str])

    def convert(self, schema: Any, direction: Direction | None = None) -> JSONSchema:
        """Return `schema` in 2020-12, with references into the draft's `$defs`; True if it is not a schema."""
        if direction is not None and direction is not self.direction:
            return SchemaDraft(self.converter, direction, self.refs).convert(schema)
        return self._convert(schema, _Position(is_part=True))

    def close(self, root: JSONSchema) -> JSONSchema:
        """Return `root`, which is already converted, with every definition that the draft refers to."""
        if not self.refs or not isinstance(root, dict):
            return root
        used: list[Definition] = []
        order = attrgetter("name")
        waiting, seen = sorted(self.refs, key=order, reverse=True), set(self.refs)
        while waiting:
            definition = waiting.pop()
            self.converter.convert(definition)
            used.append(definition)
            new = sorted(definition.refs - seen, key=order, reverse=True)
            seen.update(new)
            waiting.extend(new)
        self.converter.open_cycles(used)
        return {**root, "$defs": {each.name: each.schema for each in used}}

    def _convert(self, schema: Any, at: _Position) -> JSONSchema:
        if type(schema) is bool:
            return schema
        if not is_object(schema) or at.depth > MAX_DEPTH:
            return True
        ref = schema.get("$ref")
        if type(ref) is str:
            return self._reference(schema, ref, at)
        if self.direction is Direction.UPLOAD and is_file(schema):
            described, result = schema.get("description"), self.converter.files.schema
            if described:
                result = {**result, "description": described}
            is_optional = schema.get("nullable") is True or "null" in list_of(schema.get("type"))
            return with_null(result) if is_optional else result
        result = self._keywords(schema, at)
        return with_null(result) if schema.get("nullable") is True else result

    def _reference(self, schema: JSONObject, ref: str, at: _Position) -> JSONSchema:
        found = self._found(ref, is_part=at.is_part)
        result: JSONObject = {}
        if found is not None:
            self.refs.add(found)
            result = found.ref
        if len(schema) == 1:
            return result
        if self.converter.definitions.ref_siblings:
            others = {key: item for key, item in schema.items() if key != "$ref"}
            result = {**self._keywords(others, at._replace(is_opened=False)), **result}
        elif isinstance(description := schema.get("description"), str):
            result["description"] = description
        return with_null(result) if schema.get("nullable") is True else result

    def _found(self, ref: str, *, is_part: bool) -> Definition | None:
        return self.converter.named.find(ref, self.direction, self.bases if is_part else ())

    def _part(self, item: Any, at: _Position) -> JSONSchema:
        """Convert an `allOf` part; a part that would forbid the properties of other parts is opened and inlined."""
        ref = object_of(item).get("$ref")
        if at.is_opened and type(ref) is str:
            found = self._found(ref, is_part=at.is_part)
            if found is not None and found.pointer not in self._inlined:
                target = self.converter.definitions.resolve(found.target)
                if any(map(is_closed, self.converter.definitions.parts(target))):
                    self._inlined.add(found.pointer)
                    try:
                        return self._convert(target, at)
                    finally:
                        self._inlined.discard(found.pointer)
        return self._convert(item, at)

    def _keywords(self, schema: JSONObject, at: _Position) -> JSONObject:
        """Convert the keywords of a schema; unknown keywords and invalid values are left out."""
        closing: list[Any] = []
        hidden, is_opened = at.hidden, at.is_opened
        if "properties" in schema or "allOf" in schema:
            hidden = hidden | self.converter.definitions.hidden(schema, _MARK[self.direction])
            closing = [] if is_opened else self.converter.definitions.closing(schema)
            is_opened = is_opened or bool(closing)
        below = _Position(at.depth + 1)
        out: JSONObject = {}
        for key, value in schema.items():
            if is_object(value) and "$ref" in value and key not in _VALUES:
                value = self.converter.definitions.value(value)  # noqa: PLW2901 - the same keyword, found
            if key in _CORRECTED:
                put(out, key, _CORRECTED[key](value))
            elif key == "required":
                put(out, key, names_of(value, hidden))
            elif key == "properties":
                if is_object(value):
                    shown = {name: item for name, item in value.items() if name not in hidden}
                    out[key] = self._map(shown, below)
            elif key == "allOf":
                if is_list(value) and value:
                    part = _Position(below.depth, hidden, at.is_part, is_opened)
                    out[key] = [self._part(item, part) for item in value]
            elif not (is_opened and key in CLOSING and closes(value)):
                self._keyword(schema, key, value, below, out)
        self._repair(schema, out)
        if closing:
            rest = [self._convert(each, below) for each in closing]
            single = rest[0] if len(rest) == 1 else {"allOf": rest}
            out["unevaluatedProperties"] = False if False in rest else single
        return out

    def _keyword(
        self, schema: JSONObject, key: str, value: Any, at: _Position, out: JSONObject
    ) -> None:
        """Convert a keyword whose meaning does not depend on the `allOf` around the schema."""
        if key in _SCHEMA:
            if is_object(value) or type(value) is bool:
                out[key] = self._convert(value, at)
        elif key in _SCHEMA_MAPS:
            if is_object(value):
                out[key] = self._map(value, at)
        elif key in _SCHEMA_LISTS:
            if is_list(value) and value:
                # A discriminator identifies the member, so several matching members are not an error.
                is_named = key == "oneOf" and "discriminator" in schema and "anyOf" not in schema
                out["anyOf" if is_named else key] = [self._convert(item, at) for item in value]
        elif key == "items":
            self._items(schema, value, at, out)
        elif key in _ANY:
            if value is None or (value := data_of(value)) is not None:
                out[key] = value
        elif key == "example":
            if "examples" not in schema:
                put(out, "examples", data_of([value]))
        elif key == "$dynamicRef" and type(value) is str:
            out.update(as_object(self._reference({"$ref": value}, value, at)))

    def _repair(self, schema: JSONObject, out: JSONObject) -> None:
        """Correct the converted keywords that contradict each other or that a validator would reject."""
        apply_exclusive(schema, out)
        repair_pattern(out)
        drop_invalid_patterns(out)
        if "discriminator" in schema:
            put(out, VARIANTS, self._variants(schema))
            put(out, "description", discriminated(schema, out.get("description", "")))
        if out.get("multipleOf", 1) <= 0:
            del out["multipleOf"]
        if "enum" in out:
            repair_enum(out)
        if "type" in out and self.converter.definitions.contradicts_type(schema):
            del out["type"]
        if "oneOf" in out and self.direction is not Direction.RESPONSE:
            union: JSONObject = {"anyOf": out.pop("oneOf")}
            out.update({"allOf": [*out.get("allOf", ()), union]} if "anyOf" in out else union)

    def _map(self, schemas: JSONObject, at: _Position) -> JSONObject:
        return {str(name): self._convert(item, at) for name, item in schemas.items()}

    def _variants(self, schema: JSONObject) -> JSONObject | None:
        """Return which member of a union a value names, for the normalisation of responses."""
        unions = [schema[union] for union in UNIONS if is_list(schema.get(union))]
        if self.direction is not Direction.RESPONSE or len(unions) != 1:
            return None
        refs = [object_of(item).get("$ref") for item in unions[0]]
        found = [self._found(ref, is_part=False) if type(ref) is str else None for ref in refs]
        pointers = ["" if each is None else each.pointer for each in found]
        return self.converter.definitions.subtypes.variants(schema["discriminator"], pointers)

    def _items(self, schema: JSONObject, value: Any, at: _Position, out: JSONObject) -> None:
        """Convert `items`: a schema or, before 2020-12, a list of schemas with `additionalItems` for the rest."""
        if is_list(value):
            if value:
                out["prefixItems"] = [self._convert(item, at) for item in value]
            if "additionalItems" in schema:
                out["items"] = self._convert(schema["additionalItems"], at)
        else:
            out["items"] = self._convert(value, at)


def _applied(schema: Any) -> Iterator[str]:
    """Yield the references to schemas that apply to the same value as `schema`."""
    waiting: list[Any] = [schema]
    for node in waiting:
        if is_object(node):
            if type(ref := node.get("$ref")) is str:
                yield ref
            waiting += [inner for keyword, _, inner in subschemas(node) if keyword in APPLIED]


def _on_cycles(edges: dict[Definition, set[Definition]]) -> list[Definition]:
    """Return the definitions on cycles, and on paths between cycles: the others are removed from both ends."""
    for _ in range(2):
        order, left = TopologicalSorter(edges), set(edges)
        with suppress(CycleError):
            order.prepare()
        while ready := order.get_ready():
            left.difference_update(ready)
            order.done(*ready)
        backward: dict[Definition, set[Definition]] = {
            each: set() for each in edges if each in left
        }
        for each in backward:
            for target in edges[each] & left:
                backward[target].add(each)
        edges = backward
    return list(edges)


class SchemaConverter:
    """Converts the schemas of one document.

    Args:
        references: The document's references.
        ref_siblings: Whether keywords beside a `$ref` are used (from 3.1 on), or ignored as in 3.0 and 2.0.

    Attributes:
        definitions: The unconverted schemas.
        files: Which of them describe files.
        named: The definitions that converted schemas refer to.
        requests: The definitions of inputs, compiled once for all operations.
        responses: The definitions of outputs and errors.
    """

    def __init__(self, references: References, *, ref_siblings: bool) -> None:
        self.definitions = Definitions(references, ref_siblings=ref_siblings)
        self.files = FileFields(self.definitions)
        self.named = NamedDefinitions(self.definitions, self.files)
        self.requests = SharedDefinitions()
        self.responses = SharedDefinitions()

    def draft(self, direction: Direction) -> SchemaDraft:
        """Return an empty document, to which several schemas can be added."""
        return SchemaDraft(self, direction)

    def allows_null(self, schema: Any) -> bool:
        """Return whether `schema` allows null."""
        node = self.definitions.resolve(schema)
        is_marked = "nullable" in node or "nullable" in object_of(schema)
        if type(node.get("type")) is str and node["type"] in _NOT_NULL and not is_marked:
            return False  # most schemas, without a conversion
        draft = self.draft(Direction.REQUEST)
        document = draft.close({"allOf": [draft.convert(schema)]})
        return "null" in possible_types(document, document)

    def convert(self, definition: Definition) -> JSONSchema:
        """Return the schema of a definition, converted once."""
        if definition.schema is None:
            definition.schema = True
            if not self.definitions.is_circle(definition.target):
                definition.schema = self._converted(definition)
        return definition.schema

    def open_cycles(self, definitions: Iterable[Definition]) -> None:
        """Let definitions that contain themselves, without descending into the value, accept any value.

        Args:
            definitions: Converted definitions, with all definitions that they refer to.
        """
        new = [each for each in definitions if not each.is_checked]
        named = {f"#/$defs/{each.name}": each for each in new}

        edges = {
            each: {named[ref] for ref in _applied(each.schema) if ref in named} for each in new
        }
        for each in _on_cycles(edges):
            text = "A schema contains itself and allows any value: #%s"
            _LOGGER.warning(text, printable(each.pointer))
            each.schema = True
        for each in new:
            each.is_checked = True

    def _converted(self, definition: Definition) -> JSONSchema:
        pointer, target, direction = definition.pointer, definition.target, definition.direction
        inheritance = self.definitions.subtypes
        subtypes = inheritance.of(pointer)
        if not subtypes or definition.is_own_part:
            bases = inheritance.bases(pointer)
            return SchemaDraft(self, direction, definition.refs, bases).convert(target)
        own = self.named.at(pointer, target, direction, is_own_part=True)
        if len(subtypes) > MAX_SUBTYPES:
            definition.refs.add(own)
            return {**own.ref, "additionalProperties": True}
        # The union already lists the subtypes of a subtype without a discriminator of its own.
        own_parts = set(filter(inheritance.is_intermediate, subtypes))
        found = [self.named.find(f"#{each}", direction, own_parts) for each in subtypes]
        members = [member for member in (*found, own) if member is not None]
        definition.refs.update(members)
        union: JSONObject = {"anyOf": [member.ref for member in members]}
        if direction is Direction.RESPONSE:
            tag = inheritance.discriminator(pointer)
            put(union, VARIANTS, inheritance.variants(tag, [each.pointer for each in members]))
        described = object_of(self.convert(own)).get("description")
        return {**union, "description": described} if described else union
