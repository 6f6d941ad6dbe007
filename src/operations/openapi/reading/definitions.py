"""The unconverted schemas of one document: targets of references, properties, parts."""

from functools import cached_property
from typing import Any

from operations.base.json.references import reference_of
from operations.base.json.values import is_object, list_of, object_of
from operations.base.types import JSONObject
from operations.openapi.reading.keywords import declared_types
from operations.openapi.reading.references import References
from operations.openapi.reading.subtypes import UNIONS, Subtypes

MAX_PARTS = 200
"""The largest number of `allOf` parts of one schema, including nested parts, that are searched for properties."""

CLOSING = ("additionalProperties", "unevaluatedProperties")
"""Keywords for properties that a schema does not declare."""


class Definitions:
    """The unconverted schemas of one document.

    Args:
        references: The document's references.
        ref_siblings: Whether keywords beside a `$ref` are used (from 3.1 on), or ignored as in 3.0 and 2.0.

    Attributes:
        references: The document's references.
        ref_siblings: As the argument.
    """

    def __init__(self, references: References, *, ref_siblings: bool) -> None:
        self.references = references
        self.ref_siblings = ref_siblings

    @cached_property
    def subtypes(self) -> Subtypes:
        """The inheritance between the document's schemas."""
        return Subtypes(self.references)

    def resolve(self, schema: Any) -> JSONObject:
        """Return `schema` with its `$ref`s resolved; empty if the target is not an object."""
        return self.references.object_at(schema)

    def value(self, node: JSONObject) -> Any:
        """Return `node`, or its target if it is a reference; None if the target does not exist."""
        return self.references.value_at(node)

    def properties(self, schema: Any) -> JSONObject:
        """Return the properties of an object schema, including those of its `allOf` parts."""
        result: JSONObject = {}
        for part in reversed(self.parts(self.resolve(schema))):
            result.update(self.references.object_at(part.get("properties")))
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
                        waiting += self.references.list_at(part.get(union))
            waiting += [ref for ref in self.subtypes_of(each) if ref not in waiting]
        return list(found.values())

    def declarations(self, schema: Any, name: str) -> list[Any]:
        """Return the schemas of the property `name` in all variants of `schema` that have it."""
        properties = [
            self.references.object_at(part.get("properties")) for part in self.variants(schema)
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
        found = None if ref is None else self.references.located(ref)
        return [] if found is None else self.subtype_refs(found[0])

    def parts(self, schema: JSONObject) -> list[JSONObject]:
        """Return `schema` and its `allOf` parts at any depth, without duplicates."""
        parts = [schema]
        seen = {id(schema)}
        for part in parts:
            for inner in self.references.list_at(part.get("allOf")):
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
            [_basic_types(self.resolve(part)) for part in self.references.list_at(schema.get(key))]
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
            for name, item in self.references.object_at(part.get("properties")).items()
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

    def subtype_refs(self, pointer: str) -> list[JSONObject]:
        """Return references to the subtypes of the base at `pointer`."""
        return [{"$ref": f"#{subtype}"} for subtype in self.subtypes.of(pointer)]

    def is_circle(self, target: Any) -> bool:
        """Return whether `target` is a reference to itself, directly or indirectly."""
        return isinstance(target, dict) and self.references.find(target) is None


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
