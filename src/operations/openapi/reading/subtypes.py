"""The inheritance between the schemas of one document.

Rule: only named schemas are subtypes. An inline `allOf` with a base only uses the base.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from operations.base.errors import DocumentError
from operations.base.json.references import MAX_HOPS, reachable
from operations.base.json.values import (
    escape,
    is_list,
    is_object,
    list_of,
    object_of,
    text_of,
    unescape,
)
from operations.base.types import JSONObject
from operations.openapi.reading.references import BUNDLED, References

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
        # Hundreds of schemas may inherit one discriminator with hundreds of names.
        self._named = {base: self._mapped(base) for base in {*self._declaring.values()}}
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
        mapped = self._named[self._declaring[base]]
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
        return tuple(sorted(found, key=self._order.__getitem__))

    def _mapped(self, base: str) -> frozenset[str]:
        """Return the pointers of the schemas that a base's discriminator names."""
        node = object_of(_discriminator(self._schemas[base]))
        folder = base.rpartition("/")[0]
        found: set[str] = set()
        for value in object_of(node.get("mapping")).values():
            name = text_of(value)
            pointer = f"{folder}/{escape(name)}"
            if pointer not in self._schemas:
                pointer = self._pointer(name) or ""
            if pointer in self._schemas and pointer != base:
                found.add(pointer)
        return frozenset(found)

    def _descendants(self, base: str) -> set[str]:
        return reachable(self._children.get(base, ()), lambda each: self._children.get(each, ()))

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
                    yield f"{folder}/{escape(str(name))}", schema


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
