"""Schemas of any OpenAPI version as JSON Schema 2020-12 documents that carry what they refer to.

A converted schema holds only the definitions it reaches, as `$defs`. Definitions are converted once per
document and direction and shared, so that thousands of operations cost what they use.

Rule 1: what a document says wrongly (a `minLength` of "3", a `required` of true) is corrected or left out; it
        never makes the rest of the schema unusable.
Rule 2: nothing is converted before somebody asks.
"""

import hashlib
import logging
import re
from enum import StrEnum
from typing import Any

from operations._json import is_list, is_object, list_of, object_of
from operations.errors import DocumentError
from operations.openapi.reading.keywords import (
    FILE_SCHEMA,
    apply_exclusive,
    as_object,
    count_of,
    data_of,
    dependent_names,
    discriminated,
    is_file,
    names_of,
    number_of,
    put,
    type_of,
    with_null,
)
from operations.openapi.reading.references import References
from operations.types import JSONObject, JSONSchema

MAX_DEPTH = 100
"""How deep one definition may nest; what is deeper may be anything."""

MAX_PARTS = 200
"""How many `allOf` parts of one schema, nested ones included, are searched for properties."""

_LOGGER = logging.getLogger("operations")


class Direction(StrEnum):
    """Which way the data goes: it decides what `readOnly`, `writeOnly` and binary strings mean."""

    REQUEST = "request"
    UPLOAD = "upload"
    """A request that is not JSON: binary strings are files."""
    RESPONSE = "response"


_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_MARK = {
    Direction.REQUEST: "readOnly",
    Direction.UPLOAD: "readOnly",
    Direction.RESPONSE: "writeOnly",
}
_TEXT = frozenset(
    {"title", "description", "pattern", "format", "contentEncoding", "contentMediaType"}
)
_ANY = frozenset({"default", "const"})
_FLAGS = frozenset({"uniqueItems", "deprecated", "readOnly", "writeOnly"})
_NUMBERS = frozenset({"maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum", "multipleOf"})
_COUNTS = frozenset(
    {
        "maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties",
        "maxContains", "minContains",
    }
)  # fmt: skip
_SCHEMA = frozenset(
    {
        "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
        "unevaluatedItems", "unevaluatedProperties", "contentSchema",
    }
)  # fmt: skip
_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "prefixItems"})
_SCHEMA_MAPS = frozenset({"patternProperties", "dependentSchemas"})


class _Definition:
    """One definition: where it stands, and once asked for, its conversion and what that refers to."""

    __slots__ = ("name", "refs", "schema", "target")

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target
        self.schema: JSONSchema | None = None
        self.refs: set[str] = set()


class SchemaConverter:
    """Converts the schemas of one document.

    Args:
        references: The document's references.
        ref_siblings: Whether keywords beside a `$ref` count (from 3.1 on), or are ignored as 3.0 and 2.0 say.
    """

    def __init__(self, references: References, *, ref_siblings: bool) -> None:
        self._references = references
        self._ref_siblings = ref_siblings
        self._definitions: dict[tuple[Direction, str], _Definition] = {}
        self._broken: set[str] = set()

    def build(self, schema: Any, direction: Direction) -> JSONSchema:
        """`schema` as a document of its own."""
        return self.draft(direction).finish(schema)

    def draft(self, direction: Direction) -> "SchemaDraft":
        """A document to be composed of several schemas."""
        return SchemaDraft(self, direction)

    def resolve(self, schema: Any) -> JSONObject:
        """The object schema behind any `$ref`s of `schema`; empty where there is none."""
        try:
            return self._references.follow(schema)
        except DocumentError:
            return {}

    def properties(self, schema: Any) -> JSONObject:
        """The raw properties of an object schema, those of its `allOf` parts included."""
        result: JSONObject = {}
        for part in reversed(self._parts(self.resolve(schema))):
            result.update(object_of(part.get("properties")))
        return result

    def flattened(self, schema: Any) -> JSONObject:
        """An object schema with the properties and requirements of its `allOf` parts as its own."""
        parts = self._parts(self.resolve(schema))
        return {
            "type": "object",
            "properties": self.properties(schema),
            "required": [name for part in parts for name in list_of(part.get("required"))],
        }

    def _parts(self, schema: JSONObject) -> list[JSONObject]:
        """`schema` and its `allOf` parts, however they nest, each once."""
        parts = [schema]
        seen = {id(schema)}
        for part in parts:
            for inner in list_of(part.get("allOf")):
                found = self.resolve(inner)
                if id(found) not in seen and len(parts) < MAX_PARTS:
                    seen.add(id(found))
                    parts.append(found)
        return parts

    def definition(self, ref: str, direction: Direction) -> tuple[str, str] | None:
        """The key and the name of the definition `ref` leads to; None where it leads nowhere."""
        try:
            pointer, target = self._references.locate(ref)
        except DocumentError as error:
            if ref not in self._broken:
                self._broken.add(ref)
                _LOGGER.warning("A schema's reference is taken to allow anything: %s", error)
            return None
        known = self._definitions.get((direction, pointer))
        if known is None:
            known = self._definitions[direction, pointer] = _Definition(
                _definition_name(pointer), target
            )
        return pointer, known.name

    def converted(self, pointer: str, direction: Direction) -> tuple[str, JSONSchema, set[str]]:
        """Name, schema and references of the definition that `definition` returned this key for."""
        found = self._definitions[direction, pointer]
        if found.schema is None:
            found.schema = True
            if not self._is_circle(found.target):
                found.schema = _Conversion(self, direction, found.refs).convert(found.target)
        return found.name, found.schema, found.refs

    def hidden(self, schema: JSONObject, mark: str) -> frozenset[str]:
        """The properties of `schema` and its `allOf` parts that do not travel in this direction."""
        return frozenset(
            name
            for part in self._parts(schema)
            for name, item in object_of(part.get("properties")).items()
            if self._is_marked(item, mark)
        )

    def _is_marked(self, item: Any, mark: str) -> bool:
        if not is_object(item):
            return False
        return item.get(mark) is True or ("$ref" in item and self.resolve(item).get(mark) is True)

    def keeps_siblings(self) -> bool:
        """Whether keywords beside a `$ref` count."""
        return self._ref_siblings

    def _is_circle(self, target: Any) -> bool:
        """Whether `target` is a reference that leads back to itself without ever saying anything."""
        try:
            self._references.follow(target)
        except DocumentError:
            return isinstance(target, dict)
        return False


class SchemaDraft:
    """One self-contained schema in the making."""

    def __init__(self, converter: SchemaConverter, direction: Direction) -> None:
        self._converter = converter
        self._direction = direction
        self._refs: set[str] = set()

    def convert(self, schema: Any) -> JSONSchema:
        """`schema`, its references pointing into the draft's `$defs`."""
        return _Conversion(self._converter, self._direction, self._refs).convert(schema)

    def finish(self, schema: Any) -> JSONSchema:
        """`schema` converted, with every definition the draft reaches."""
        return self.close(self.convert(schema))

    def close(self, root: JSONSchema) -> JSONSchema:
        """`root`, already converted, with every definition the draft reaches."""
        if not self._refs or not isinstance(root, dict):
            return root
        definitions: JSONObject = {}
        waiting, seen = sorted(self._refs, reverse=True), set(self._refs)
        while waiting:
            name, schema, refs = self._converter.converted(waiting.pop(), self._direction)
            definitions[name] = schema
            new = sorted(refs - seen, reverse=True)
            seen.update(new)
            waiting.extend(new)
        return {**root, "$defs": definitions}


def _definition_name(pointer: str) -> str:
    """A name for the definition at `pointer`: its own where that is safe, and the same in every run."""
    *_, parent, name = ("", *pointer.split("/"))
    safe = _UNSAFE.sub("_", name).strip("_") or "schema"
    if safe == name and parent in {"schemas", "definitions", "$defs"} and pointer.count("/") <= 3:
        return safe
    return f"{safe[:60]}_{hashlib.sha256(pointer.encode()).hexdigest()[:8]}"


class _Conversion:
    """Converts one definition, noting what it refers to."""

    __slots__ = ("_converter", "_direction", "_mark", "_refs")

    def __init__(self, converter: SchemaConverter, direction: Direction, refs: set[str]) -> None:
        self._converter = converter
        self._direction = direction
        self._mark = _MARK[direction]
        self._refs = refs

    def convert(
        self, schema: Any, depth: int = 0, hidden: frozenset[str] = frozenset()
    ) -> JSONSchema:
        """`schema` in 2020-12; True for what is no schema.

        Args:
            schema: What the document holds.
            depth: How deep inside its definition this is.
            hidden: Properties that a schema around this one hides.
        """
        if type(schema) is bool:
            return schema
        if not is_object(schema) or depth > MAX_DEPTH:
            return True
        ref = schema.get("$ref")
        if type(ref) is str:
            return self._reference(schema, ref, depth, hidden)
        if self._direction is Direction.UPLOAD and is_file(schema):
            described = schema.get("description")
            return {**FILE_SCHEMA, "description": described} if described else FILE_SCHEMA
        result = self._keywords(schema, depth, hidden)
        return with_null(result) if schema.get("nullable") is True else result

    def _reference(
        self, schema: JSONObject, ref: str, depth: int, hidden: frozenset[str]
    ) -> JSONSchema:
        found = self._converter.definition(ref, self._direction)
        if found is None:
            result: JSONObject = {}
        else:
            pointer, name = found
            self._refs.add(pointer)
            result = {"$ref": f"#/$defs/{name}"}
        if len(schema) == 1:
            return result
        if self._converter.keeps_siblings():
            others = {key: item for key, item in schema.items() if key != "$ref"}
            result = {**self._keywords(others, depth, hidden), **result}
        elif isinstance(description := schema.get("description"), str):
            result["description"] = description
        return with_null(result) if schema.get("nullable") is True else result

    def _keywords(self, schema: JSONObject, depth: int, hidden: frozenset[str]) -> JSONObject:
        if "properties" in schema or "allOf" in schema:
            hidden = hidden | self._converter.hidden(schema, self._mark)
        below = depth + 1
        out: JSONObject = {}
        for key, value in schema.items():
            if key in _TEXT:
                if type(value) is str:
                    out[key] = value
            elif key == "type":
                put(out, "type", type_of(value))
            elif key == "properties":
                if is_object(value):
                    out[key] = {
                        str(name): self.convert(item, below)
                        for name, item in value.items()
                        if name not in hidden
                    }
            elif key == "items":
                self._items(schema, value, below, out)
            elif key in _SCHEMA:
                if is_object(value) or type(value) is bool:
                    out[key] = self.convert(value, below)
            elif key == "allOf":
                if is_list(value) and value:
                    out[key] = [self.convert(item, below, hidden) for item in value]
            elif key in _SCHEMA_LISTS:
                if is_list(value) and value:
                    # Where a property tells the members apart, that more than one fits is no fault.
                    told = key == "oneOf" and "discriminator" in schema and "anyOf" not in schema
                    out["anyOf" if told else key] = [self.convert(item, below) for item in value]
            elif key in _SCHEMA_MAPS:
                if is_object(value):
                    out[key] = {name: self.convert(item, below) for name, item in value.items()}
            elif key == "enum":
                if is_list(value) and value:
                    put(out, key, data_of(value))
            elif key == "required":
                put(out, key, names_of(value, hidden))
            elif key in _NUMBERS:
                put(out, key, number_of(value))
            elif key in _COUNTS:
                put(out, key, count_of(value))
            elif key in _ANY:
                if value is None or (value := data_of(value)) is not None:
                    out[key] = value
            elif key in _FLAGS:
                if type(value) is bool:
                    out[key] = value
            elif key == "example":
                if "examples" not in schema:
                    put(out, "examples", data_of([value]))
            elif key == "examples":
                if is_list(value):
                    put(out, key, data_of(value))
            elif key == "$dynamicRef":
                if type(value) is str:
                    out.update(as_object(self._reference({"$ref": value}, value, depth, hidden)))
            elif key == "dependentRequired":
                put(out, key, dependent_names(value))
            elif key == "dependencies":
                self._dependencies(value, below, out)
        apply_exclusive(schema, out)
        if "discriminator" in schema:
            put(out, "description", discriminated(schema, out.get("description", "")))
        if out.get("multipleOf", 1) <= 0:
            del out["multipleOf"]
        return out

    def _items(self, schema: JSONObject, value: Any, depth: int, out: JSONObject) -> None:
        """`items`: a schema, or before 2020-12 a list of them with `additionalItems` for the rest."""
        if is_list(value):
            if value:
                out["prefixItems"] = [self.convert(item, depth) for item in value]
            if "additionalItems" in schema:
                out["items"] = self.convert(schema["additionalItems"], depth)
        else:
            out["items"] = self.convert(value, depth)

    def _dependencies(self, value: Any, depth: int, out: JSONObject) -> None:
        """`dependencies` of earlier drafts: names and schemas in one keyword."""
        if not is_object(value):
            return
        names = {key: item for key, item in value.items() if is_list(item)}
        schemas = {key: self.convert(item, depth) for key, item in value.items() if is_object(item)}
        put(out, "dependentRequired", dependent_names(names) or None)
        put(out, "dependentSchemas", schemas or None)
