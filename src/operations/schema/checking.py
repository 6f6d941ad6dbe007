"""The verdict on a value: jsonschema-rs, bounded and offline.

Rule 1: formats are annotations. Nothing is fetched. Regular expressions are bounded (`patterns`).
Rule 2: jsonschema-rs sees plain JSON only. It reads lazily, accepts more types than JSON has, and follows a
        recursive schema into data of any depth.
"""

from collections.abc import Callable
from sys import float_info
from typing import Annotated, Any, NotRequired, TypedDict

import jsonschema_rs
import msgspec

from operations._json import as_json, is_object, list_of, object_of
from operations.schema.patterns import bound_patterns, compile_schema, measured
from operations.schema.references import Document, Site, is_annotation
from operations.schema.shared import Graph, SharedDefinitions
from operations.types import JSONObject, JSONSchema


class Checker:
    """Validators for a document and for the schemas inside it.

    Attributes:
        document: A copy of the document as compiled, its patterns bounded.
        flat: Decodes a valid object of scalars from MessagePack, without unknown properties, and raises for anything
            else; None for other schemas. It may reject a valid object, such as one with 1.0 as integer.
        recursive: Whether its references are recursive, so that validation is as deep as the data.
        accepts: Whether a value, already known to be JSON, is valid.
        dropped: Patterns that were left out, with their places.
        caches: What others keep with the document.
        max_plans: How many plans may be made for it.

    Args:
        root: The document.
        drop_patterns: Leave out patterns that cannot be run safely, instead of raising.
        shared: Definitions to use instead of the document's own, which are added to them.

    Raises:
        SchemaError: If the document is not a JSON Schema or beyond a limit; the message names the place.
    """

    __slots__ = (
        "_accepts",
        "_fancy",
        "_registry",
        "_shared",
        "accepts",
        "caches",
        "document",
        "dropped",
        "flat",
        "recursive",
    )

    def __init__(
        self,
        root: JSONSchema,
        *,
        drop_patterns: bool = False,
        shared: SharedDefinitions | None = None,
    ) -> None:
        self._shared = shared
        if shared is not None and isinstance(root, dict):
            self.document = shared.enter(measured(shared.adopt(root)))
        else:
            self.document = Document(measured(root))
        patterns = bound_patterns(self.document.sites, drop=drop_patterns)
        self.dropped = patterns.dropped
        self._fancy = patterns.fancy
        self._registry: jsonschema_rs.Registry | None = None
        self.caches: dict[str, Any] = {}
        self._accepts: dict[tuple[str, ...], Callable[[Any], bool]] = {}
        root_schema = self.document.root.schema
        if not isinstance(root_schema, bool) and self.document.dialect.id_keyword in root_schema:
            # As others see it from here: a relative one would be taken relative to itself.
            root_schema[self.document.dialect.id_keyword] = self.document.uri
        self.recursive = Graph(self.document, shared.graph if shared else None).recursive
        if shared is None:
            self.accepts = self._build(root_schema)
        else:
            self.dropped += shared.take_dropped()
            shared.fancy = shared.fancy or patterns.fancy
            self.accepts = shared.accepts_at((self.document.root,))
        self.flat = _flat_decoder(root_schema)
        self.document.forget()

    max_plans = 5_000

    @property
    def scope(self) -> "Checker | SharedDefinitions":
        """The owner of the document's plans: itself, or the definitions that it shares."""
        return self if self._shared is None else self._shared

    def is_valid(self, value: Any) -> bool:
        """Return whether any value is valid, once it is converted to JSON.

        Raises:
            JSONValueError: If it cannot be converted.
        """
        return self.accepts(as_json(value))

    def accepts_at(self, sites: tuple[Site, ...]) -> Callable[[Any], bool]:
        """Return whether a value, already known to be JSON, is valid for all of `sites`."""
        key = tuple(site.pointer for site in sites)
        if self._shared is not None:
            return self._shared.accepts_at(sites)
        found = self._accepts.get(key)
        if found is None:
            targets: list[JSONObject] = [{"$ref": self.document.address(site)} for site in sites]
            found = self._accepts[key] = self._build({"allOf": targets} if targets else True)
        return found

    def _build(self, schema: JSONSchema) -> Callable[[Any], bool]:
        dialect = self.document.dialect
        if self._registry is None and schema is not self.document.root.schema:
            self._registry = jsonschema_rs.Registry(
                [(self.document.uri, self.document.root.schema)], draft=dialect.draft
            )
        return compile_schema(schema, dialect, fancy=self._fancy, registry=self._registry)


_SCALARS: dict[Any, Any] = {
    "string": str,
    "integer": int,
    "number": int | Annotated[float, msgspec.Meta(ge=-float_info.max, le=float_info.max)],
    "boolean": bool,
    "null": type(None),
}
_FLAT = frozenset({"type", "properties", "required", "additionalProperties"})


def _flat_decoder(schema: JSONSchema) -> Callable[[bytes], JSONObject] | None:
    """Return a decoder that validates as it reads, if the schema is a closed object of scalars."""
    if (
        isinstance(schema, bool)
        or schema.get("type") != "object"
        or schema.get("additionalProperties") is not False
        or not all(keyword in _FLAT or is_annotation(keyword) for keyword in schema)
    ):
        return None
    fields: dict[str, Any] = {}
    required = list_of(schema.get("required"))
    for name, part in object_of(schema.get("properties")).items():
        kind = _SCALARS.get(part["type"]) if is_object(part) and _is_typed(part) else None
        if kind is None:
            return None
        fields[name] = kind if name in required else NotRequired[kind]
    if not fields.keys() >= set(required):
        return None
    return msgspec.msgpack.Decoder(TypedDict("Flat", fields)).decode  # type: ignore[operator]


def _is_typed(schema: JSONObject) -> bool:
    """Return whether a schema has one type and no other restriction."""
    return isinstance(schema.get("type"), str) and all(
        keyword == "type" or is_annotation(keyword) for keyword in schema
    )
