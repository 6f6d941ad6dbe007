"""JSON Schema in the subset of OpenAPI 3.0: a keyword that cannot be expressed is omitted, and reported."""

from typing import Any

from operations.agents.formats.contract import Report
from operations.base.types import JSONObject
from operations.schema.outline import Outline

_PLAIN = frozenset({
    "description", "title", "default", "example", "nullable", "minimum", "maximum", "minLength", "maxLength",
    "pattern", "minItems", "maxItems", "minProperties", "maxProperties",
})  # fmt: skip
"""Keywords of OpenAPI 3.0 that are copied unchanged."""

_SILENT = frozenset({
    "$schema", "$id", "$defs", "definitions", "$comment", "examples", "deprecated", "readOnly", "writeOnly",
    "contentEncoding", "contentMediaType",
})  # fmt: skip
"""Keywords that do not affect validation, so their loss is not reported; the same applies to those that begin with
`x-`."""

_FORMATS = {
    "number": {"float", "double"},
    "integer": {"int32", "int64"},
    "string": {"date-time", "enum"},
}
_DEEPEST = 12


class PlainSchemas:
    """Converts JSON Schema to the subset of OpenAPI 3.0."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def convert(self, outline: Outline, path: str, depth: int) -> JSONObject:
        """Return the schema at `path`, converted."""
        if outline.is_recursive or depth > _DEEPEST:
            self._report(path, "refers to itself: its content is omitted")
            return {"type": "object", "description": outline.description or "As above."}
        schema = outline.schema
        plain: JSONObject = {key: schema[key] for key in schema if key in _PLAIN}
        self._type(outline, plain, path)
        self._values(outline, plain, path)
        self._format(schema, plain, path)
        if outline.properties:
            plain["properties"] = {
                name: self.convert(inner, f"{path}/properties/{name}", depth + 1)
                for name, inner in outline.properties.items()
            }
            required = [name for name in outline.required if name in plain["properties"]]
            if required:
                plain["required"] = required
        if plain.get("type") == "array":
            plain["items"] = self.convert(outline.items, f"{path}/items", depth + 1)
        self._alternatives(outline, plain, path, depth)
        known = _PLAIN | _SILENT | _READ
        for keyword in schema:
            if keyword not in known and not keyword.startswith("x-"):
                self._report(f"{path}/{keyword}", "is not supported: omitted")
        return plain

    def _type(self, outline: Outline, plain: JSONObject, path: str) -> None:
        named = sorted(outline.types - {"null"})
        if "null" in outline.types:
            plain["nullable"] = True
        if len(named) == 1:
            plain["type"] = named[0]
        elif len(named) > 1 and not outline.members:
            plain["anyOf"] = [{"type": name} for name in named]
        elif not named and not outline.members:
            self._report(path, "has no type: treated as a string")
            plain["type"] = "string"

    def _values(self, outline: Outline, plain: JSONObject, path: str) -> None:
        choices = [choice for choice in outline.choices if choice is not None]
        if not choices:
            return
        if all(isinstance(choice, str) for choice in choices):
            plain["type"], plain["enum"] = "string", choices
        else:
            self._report(f"{path}/enum", "contains values other than strings: omitted")

    def _format(self, schema: JSONObject, plain: JSONObject, path: str) -> None:
        form: Any = schema.get("format")
        if form is None:
            return
        if form in _FORMATS.get(str(plain.get("type")), ()):
            plain["format"] = form
        else:
            self._report(f"{path}/format", f"{form} is not supported: omitted")

    def _alternatives(self, outline: Outline, plain: JSONObject, path: str, depth: int) -> None:
        members = [member for member in outline.members if set(member.types) != {"null"}]
        if not members or outline.choices:
            return
        word = "anyOf" if "anyOf" in outline.schema else "oneOf"
        inner = [
            self.convert(member, f"{path}/{word}/{number}", depth + 1)
            for number, member in enumerate(members)
        ]
        if len(inner) == 1:
            plain |= inner[0] | {key: value for key, value in plain.items() if key != "type"}
            return
        plain.pop("type", None)
        plain["anyOf"] = inner
        if word == "oneOf":
            self._report(f"{path}/oneOf", "is converted to anyOf, which accepts several matches")


_READ = frozenset({
    "type", "enum", "const", "format", "properties", "required", "items", "anyOf", "oneOf", "allOf", "$ref",
})  # fmt: skip
"""Keywords that have their own conversion."""
