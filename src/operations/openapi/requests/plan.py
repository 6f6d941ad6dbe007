"""How one operation's arguments become a request: worked out once, when the operation is first used."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from operations._json import object_of, pointer
from operations.errors import CallError, ErrorCode
from operations.openapi.exchange.client import Draft
from operations.openapi.headers import enforce_header, enforce_unowned, is_owned, name_key
from operations.openapi.reading import media
from operations.openapi.reading.expected import is_sequence, whole_schema
from operations.openapi.reading.keywords import FILE_SCHEMA, as_object, is_file
from operations.openapi.reading.model import Media, Model, Parameter
from operations.openapi.reading.names import argument_names, unused_name
from operations.openapi.reading.schemas import Direction, SchemaConverter, SchemaDraft
from operations.openapi.requests.bodies import write_body
from operations.openapi.requests.multipart import NO_VALUE, PART_HEADERS, fixed_value
from operations.openapi.requests.paths import (
    enforce_argument,
    enforce_segments,
    literal,
    refusal,
    split_template,
    template_names,
)
from operations.openapi.requests.styles import cookie_text, header_value, path_value, query_pairs
from operations.types import JSONObject, JSONSchema

BODY = "body"
"""The argument that holds the body."""

_BASE64: JSONObject = {"type": "string", "contentEncoding": "base64"}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an operation, and the parameter it fills."""

    name: str
    parameter: Parameter


class Plan:
    """How to call one operation.

    Args:
        path: The path's template.
        model: What the document says.
        schemas: Converts the document's schemas.
        owned: The keys of what configuration sets and no argument may (`name_key`).
        flatten: Whether the body's properties are arguments of their own.
    """

    def __init__(
        self,
        path: str,
        model: Model,
        schemas: SchemaConverter,
        *,
        owned: frozenset[tuple[str, str]],
        flatten: bool,
    ) -> None:
        self._schemas = schemas
        self._model = model
        self._owned = owned
        template, _, literal_query = path.partition("#")[0].partition("?")
        self._template = template if template.startswith("/") else "/" + template
        self._pieces = split_template(self._template)
        # What a template in the query stands for is a query parameter anyway.
        self.literal_query = [literal(p) for p in literal_query.split("&") if p and "{" not in p]
        self.media = media.best(model.body.media) if model.body is not None else None
        if model.body is not None and self.media is None:
            self.media = Media(media_type="application/json")
        self._takes_bytes = self.media is not None and self._is_bytes(self.media)
        parameters = [p for p in _completed(template, model.parameters) if not _is_hidden(p, owned)]
        self._flat = self._flattened() if flatten else []
        reserved = self._flat or ([BODY] if self.media is not None else [])
        self._part_headers = ""
        if self.media is not None and self.media.part_headers:
            self._part_headers = unused_name(PART_HEADERS, reserved)
            reserved = [*reserved, self._part_headers]
        names = argument_names([(p.name, p.place) for p in parameters], reserved)
        self.arguments = [Argument(n, p) for n, p in zip(names, parameters, strict=True)]
        self._by_path_name = {
            a.parameter.name: a for a in self.arguments if a.parameter.place == "path"
        }
        self._rest = [a for a in self.arguments if a.parameter.place != "path"]

    @property
    def direction(self) -> Direction:
        """How the input's schemas are to be read."""
        chosen = self.media
        return (
            Direction.REQUEST
            if chosen is None or media.is_json(chosen.media_type)
            else Direction.UPLOAD
        )

    def input_schema(self) -> JSONSchema:
        """The schema of all arguments."""
        draft = self._schemas.draft(self.direction)
        properties: JSONObject = {}
        required: list[str] = []
        for argument in self.arguments:
            parameter = argument.parameter
            properties[argument.name] = _described(
                as_object(draft.convert(parameter.schema)), parameter, argument.name
            )
            if parameter.required:
                required.append(argument.name)
        body = self._model.body
        if self._flat and self.media is not None:
            whole = object_of(draft.convert(self._schemas.flattened(self.media.schema)))
            properties.update(object_of(whole.get("properties")))
            if body is not None and body.required:
                required += [name for name in whole.get("required", []) if name in self._flat]
        elif self.media is not None and body is not None:
            described = draft.convert(whole_schema(self.media))
            schema = as_object(self._body_schema(described, self.media))
            if body.description and "description" not in schema:
                schema = {**schema, "description": body.description}
            properties[BODY] = schema
            if body.required:
                required.append(BODY)
        if self._part_headers and self.media is not None:
            schema, is_required = self._part_headers_schema(draft, self.media)
            properties[self._part_headers] = schema
            if is_required and body is not None and body.required:
                required.append(self._part_headers)
        return draft.close(_closed(properties, required))

    def _part_headers_schema(self, draft: SchemaDraft, chosen: Media) -> tuple[JSONObject, bool]:
        """The schema of all parts' headers, and whether there must be some."""
        flat = self._schemas.flattened(chosen.schema)
        properties: JSONObject = {}
        needed: list[str] = []
        for part, headers in chosen.part_headers.items():
            own = {
                h.name: _described(as_object(draft.convert(h.schema)), h, h.name) for h in headers
            }
            required = [
                header.name
                for header in headers
                if header.required and fixed_value(header, self._schemas) is NO_VALUE
            ]
            schema = _closed(own, required)
            if self._schemas.resolve(flat["properties"].get(part)).get("type") == "array":
                # One set for every item, or one for each.
                schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
            properties[part] = schema
            if required and part in flat["required"]:
                needed.append(part)
        said = "Headers of the body's parts: by part, then by header."
        return {"description": said, **_closed(properties, needed)}, bool(needed)

    def _body_schema(self, converted: JSONSchema, chosen: Media) -> JSONSchema:
        kind = chosen.media_type
        if media.is_json(kind) or media.is_form(kind) or media.is_multipart(kind):
            return converted
        if is_sequence(chosen):
            return converted
        if self._takes_bytes:
            # Of several types the caller may say which it is.
            return FILE_SCHEMA if media.is_range(kind) else _BASE64
        if media.is_text(kind):
            # An object schema for XML describes the tree; what we take is its text.
            is_string = object_of(converted).get("type") == "string"
            return (
                converted
                if is_string
                else {"type": "string", "description": f"Text of type {kind}."}
            )
        return converted

    def _is_bytes(self, chosen: Media) -> bool:
        kind = chosen.media_type
        if media.is_text(kind):
            return False
        if media.is_range(kind):
            schema = self._schemas.resolve(chosen.schema)
            return chosen.schema is True or is_file(schema)
        return True

    def _flattened(self) -> list[str]:
        """The names of the body's properties, if it is a plain object of them."""
        chosen = self.media
        if chosen is None or not (
            media.is_json(chosen.media_type)
            or media.is_form(chosen.media_type)
            or media.is_multipart(chosen.media_type)
        ):
            return []
        schema = self._schemas.resolve(chosen.schema)
        if not schema.keys().isdisjoint({"oneOf", "anyOf", "not", "if"}):
            return []
        return list(self._schemas.flattened(chosen.schema)["properties"])

    def draft(self, method: str, base: str, arguments: JSONObject, accept: str) -> Draft:
        """The request that these arguments make.

        Raises:
            CallError: `VALIDATION_ERROR` if an argument cannot stand where it belongs.
        """
        draft = Draft(
            method=method, base=base, path=self._path(arguments), headers={"Accept": accept}
        )
        draft.query.extend(self.literal_query)
        for argument in self._rest:
            if argument.name not in arguments:
                continue
            parameter, value = argument.parameter, arguments[argument.name]
            if parameter.place == "query":
                pairs = query_pairs(parameter, value)
                if self._owned:
                    enforce_unowned(argument.name, "query", pairs, self._owned)
                draft.query.extend(pairs)
            elif parameter.place == "header":
                text = header_value(parameter, value)
                enforce_header(parameter.name, text)
                draft.headers[parameter.name] = text
            else:
                cookie = cookie_text(parameter, value)
                if self._owned:
                    enforce_unowned(argument.name, "cookie", [cookie], self._owned)
                draft.cookies.append(cookie)
        self._add_body(draft, arguments)
        return draft

    def _add_body(self, draft: Draft, arguments: JSONObject) -> None:
        if self.media is None:
            return
        if self._flat:
            value: Any = {name: arguments[name] for name in self._flat if name in arguments}
            if not value and not (self._model.body is not None and self._model.body.required):
                return
        elif BODY in arguments:
            value = arguments[BODY]
        else:
            return
        payload = write_body(
            self.media,
            value,
            self._schemas,
            is_bytes=self._takes_bytes,
            part_headers=object_of(arguments.get(self._part_headers)),
        )
        draft.body = payload.content
        draft.headers["Content-Type"] = payload.content_type

    def _path(self, arguments: JSONObject) -> str:
        pieces = self._pieces
        if len(pieces) == 1:
            return pieces[0]
        out = [pieces[0]]
        for index in range(1, len(pieces), 2):
            argument = self._by_path_name.get(pieces[index])
            if argument is None or argument.name not in arguments:
                raise _missing(argument.name if argument is not None else pieces[index])
            value = arguments[argument.name]
            enforce_argument(argument.name, value)
            filled = path_value(argument.parameter, value)
            if not filled:
                raise refusal(argument.name, "an empty value")
            out += (filled, pieces[index + 1])
        path = "".join(out)
        enforce_segments(path, self._template)
        return path


def _completed(path: str, parameters: Sequence[Parameter]) -> list[Parameter]:
    """The parameters, path ones as the template has them: those it lacks are dropped, those it adds are strings."""
    names = template_names(path)
    known = {p.name for p in parameters if p.place == "path"}
    added = [
        Parameter(name=name, place="path", required=True, schema={"type": "string"})
        for name in names
        if name not in known
    ]
    return [p for p in parameters if p.place != "path" or p.name in names] + added


def _is_hidden(parameter: Parameter, owned: frozenset[tuple[str, str]]) -> bool:
    """Return whether no argument may fill this parameter, because the client or configuration does."""
    if parameter.place == "header" and is_owned(parameter.name):
        return True
    return name_key(parameter.place, parameter.name) in owned


def _closed(properties: JSONObject, required: list[str]) -> JSONObject:
    schema: JSONObject = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return {**schema, "required": required} if required else schema


def _described(schema: JSONObject, parameter: Parameter, argument: str) -> JSONObject:
    notes: JSONObject = {}
    if parameter.description:
        notes["description"] = parameter.description
    if parameter.deprecated:
        notes["deprecated"] = True
    if argument != parameter.name:
        said = notes.get("description") or schema.get("description") or ""
        where = f"Sent as the {parameter.place} parameter {parameter.name!r}."
        notes["description"] = f"{said} {where}".strip()
    return {**schema, **notes} if notes else schema


def _missing(name: str) -> CallError:
    message = f"The path argument {name!r} is missing."
    return CallError(
        ErrorCode.VALIDATION_ERROR,
        message,
        {"errors": [{"path": pointer(name), "message": message, "keyword": "required"}]},
    )
