"""Schemas of any OpenAPI version as JSON Schema 2020-12 documents that contain what they refer to.

A converted schema contains only the definitions it reaches, as `$defs`. Definitions are converted once per
document and direction and shared, so that thousands of operations cost what they use.

Rule: nothing is converted before it is used.
"""

from operator import attrgetter
from typing import Any

from operations._json import object_of
from operations.openapi.reading.conversion import Conversion
from operations.openapi.reading.definitions import Definition, Definitions, Direction
from operations.types import JSONObject, JSONSchema

__all__ = ["Direction", "SchemaConverter", "SchemaDraft"]


MAX_SUBTYPES = 64
"""How many subtypes a union lists; a base with more allows any other property instead."""


class SchemaConverter(Definitions):
    """Converts the schemas of one document."""

    def build(self, schema: Any, direction: Direction) -> JSONSchema:
        """Return `schema` as a document of its own."""
        return self.draft(direction).finish(schema)

    def draft(self, direction: Direction) -> "SchemaDraft":
        """Return an empty document, to be composed of several schemas."""
        return SchemaDraft(self, direction)

    def convert(self, definition: Definition) -> JSONSchema:
        """Return the schema of a definition, converted once."""
        if definition.schema is None:
            definition.schema = True
            if not self.is_circle(definition.target):
                definition.schema = self._converted(definition)
        return definition.schema

    def _converted(self, definition: Definition) -> JSONSchema:
        pointer, target, direction = definition.pointer, definition.target, definition.direction
        subtypes = self.subtypes.of(pointer)
        if not subtypes or definition.is_own_part:
            bases = self.subtypes.bases(pointer)
            return Conversion(self, direction, definition.refs, bases).convert(target)
        own = self.definition_at(pointer, target, direction, is_own_part=True)
        if len(subtypes) > MAX_SUBTYPES:
            definition.refs.add(own)
            return {**own.ref, "additionalProperties": True}
        found = [self.definition(f"#{subtype}", direction) for subtype in subtypes]
        members = [member for member in (*found, own) if member is not None]
        definition.refs.update(members)
        union: JSONObject = {"anyOf": [member.ref for member in members]}
        described = object_of(self.convert(own)).get("description")
        return {**union, "description": described} if described else union


class SchemaDraft:
    """One self-contained schema that is being composed."""

    def __init__(self, converter: SchemaConverter, direction: Direction) -> None:
        self._converter = converter
        self._direction = direction
        self._refs: set[Definition] = set()

    def convert(self, schema: Any, direction: Direction | None = None) -> JSONSchema:
        """Return `schema`, with references into the draft's `$defs`."""
        chosen = direction or self._direction
        return Conversion(self._converter, chosen, self._refs).convert(schema)

    def finish(self, schema: Any) -> JSONSchema:
        """Return `schema`, converted, with every definition that the draft reaches."""
        return self.close(self.convert(schema))

    def close(self, root: JSONSchema) -> JSONSchema:
        """Return `root`, already converted, with every definition that the draft reaches."""
        if not self._refs or not isinstance(root, dict):
            return root
        definitions: JSONObject = {}
        order = attrgetter("name")
        waiting, seen = sorted(self._refs, key=order, reverse=True), set(self._refs)
        while waiting:
            definition = waiting.pop()
            definitions[definition.name] = self._converter.convert(definition)
            new = sorted(definition.refs - seen, key=order, reverse=True)
            seen.update(new)
            waiting.extend(new)
        return {**root, "$defs": definitions}
