"""`x-operations`: what an exported document says beyond OpenAPI, so that an import can restore what was exported.

It stands in every operation object of an export. The POST is the operation itself; the GET beside it is another way to
write the same call, and says only whose (`{"id": ..., "sameAs": "post"}`).

Rule 1: whatever OpenAPI itself can say is said there (`summary` is the title, `description` the description); the
        extension carries the rest.
"""

from functools import partial
from typing import Any, cast

import msgspec

from operations._json import unescape
from operations.openapi.exporting.components import PREFIX, rewritten
from operations.schema import Schema
from operations.specs import ErrorDefinition, OperationType
from operations.types import JSONObject, JSONSchema

KEY = "x-operations"

PLACED = "placed"
"""Set in an error whose schema refers to the document's components; another stands whole."""


class Exported(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The extension of one operation object."""

    id: str

    same_as: str | None = None
    """The method of the same path that is the operation itself; then nothing else is said here."""

    type: OperationType | None = None
    version: str = "1.0.0"
    idempotent: bool = False

    errors: tuple[JSONObject, ...] = ()
    """As `ErrorDefinition.to_wire` gives them, their schemas as the document holds them."""

    components: dict[str, str] = {}
    """Where components came from in the operation's own schemas, unless it was `#/$defs/` and their name."""

    input_schema: JSONSchema | None = None
    output_schema: JSONSchema | None = None
    """A schema that the document could not hold as it is."""

    def error_schemas(self, components: JSONObject) -> tuple[ErrorDefinition, ...]:
        """The declared errors.

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
            found = msgspec.convert(error, ErrorDefinition, dec_hook=_schema_from_wire)
            return msgspec.structs.replace(found, schema=Schema(restored, lenient=True))
        return msgspec.convert(error, ErrorDefinition, dec_hook=_schema_from_wire)


def read_extension(operation: JSONObject) -> Exported | None:
    """What an operation object says in `x-operations`; None where it says nothing that can be read."""
    try:
        return msgspec.convert(operation.get(KEY), Exported)
    except msgspec.ValidationError:
        return None


def event_schema(item: JSONSchema) -> JSONObject:
    """One event of a stream whose items fit `item`: an item, the error that ended it, or its end."""
    return {"anyOf": [_event("message", item), _event("error", _ERROR), _event("complete", {})]}


def item_schema(event: JSONSchema) -> JSONSchema:
    """The schema of a stream's items, from what `event_schema` wrote; anything else is returned as it is."""
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
    """The schema that `Components.place` was given, but for definitions that nothing refers to.

    Args:
        schema: As it stands in the document.
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

    restored = rewritten(schema, back)
    if restored.get("$ref") == "#" and "$ref" in schema and len(schema) == 1:
        # The schema refers to itself, and so is a component: its reference stands for it.
        name = cast("str", schema["$ref"]).removeprefix(PREFIX)
        restored = rewritten(components[name], back)
    done: set[str] = set()
    while missing := used.keys() - done:
        for name in sorted(missing):
            done.add(name)
            place = used[name].split("/")
            if len(place) == 3:
                held: Any = rewritten(components[name], back)
                token = unescape(place[2])
                restored.setdefault(place[1], {})[token] = held
    return restored


def _schema_from_wire(kind: type, value: Any) -> Any:
    if kind is Schema and isinstance(value, (dict, bool)):
        return Schema(cast("JSONSchema", value), lenient=True)
    raise ValueError(f"expected a JSON Schema, got {type(value).__name__}")
