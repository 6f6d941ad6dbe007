"""Plan how the arguments of an operation become a request. A plan is created when the operation is first used.

Rule 1: the caller may choose the media type of the body. By default it is the first matching one in order of
        preference.
Rule 2: a file is sent in a media type that supports files, such as multipart.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import msgspec

from operations.base.errors import invalid_argument
from operations.base.json.values import is_list, is_object, object_of, pointer
from operations.base.types import JSONObject, JSONSchema
from operations.io.files import is_file_value
from operations.io.http.client import (
    Draft,
    enforce_header,
    enforce_unowned,
    is_owned,
    merged_headers,
    name_key,
)
from operations.openapi.reading import media
from operations.openapi.reading.expected import describes_items, whole_schema
from operations.openapi.reading.keywords import (
    BASE64,
    any_of,
    as_object,
    closed_object,
    is_file,
)
from operations.openapi.reading.model import Body, Media, Model, Parameter, ranked
from operations.openapi.reading.schemas import Direction, SchemaConverter, SchemaDraft
from operations.openapi.source.bodies import (
    NO_VALUE,
    PART_HEADERS,
    Payload,
    fixed_value,
    is_base64,
    only_value,
    whole_query,
    without_files,
    write_body,
)
from operations.openapi.source.parameters import (
    PathTemplate,
    argument_names,
    cookie_text,
    header_value,
    path_argument,
    query_pairs,
    unused_name,
)
from operations.schema import Schema, validate_or_raise

BODY = "body"
"""The argument for the body."""

CONTENT_TYPE = "content_type"
"""The argument for the media type of the body, if the document declares several."""

STREAM = "stream"
"""The property or parameter that requests a stream, if the document declares it as a boolean."""

_PATCH: JSONObject = {
    "description": "A JSON Patch: the changes in their order.",
    "type": "array",
    "items": {"type": "object", "required": ["op", "path"]},
}


class BodyPlan:
    """Converts the arguments of an operation to a body.

    Args:
        body: The declared body.
        schemas: Converts the document's schemas.
        flatten: Whether the properties of the body are separate arguments.
        streams: Whether to request a stream, if the API supports both; None if there is no choice.

    Attributes:
        flat: The names of these properties; empty if the body is one argument.
        arguments: The names of all arguments that belong to the body.
        takes_files: Whether a declared media type supports files.
    """

    def __init__(
        self, body: Body, schemas: SchemaConverter, *, flatten: bool, streams: bool | None = None
    ) -> None:
        self._body = body
        self._schemas, self._definitions, self._files = schemas, schemas.definitions, schemas.files
        self._streams = streams
        offered = [m for m in body.media if "/" in m.media_type] or list(body.media)
        self._media = ranked(offered) or [Media(media_type="application/json")]
        self._requires_stream = False
        self._stream_schemas: dict[str, list[Any]] = {}
        """The schemas of the property `stream` that allow the required value, by media type."""

        if streams is not None:
            self._media = [self._without_stream(m) for m in self._media]
        self.flat = self._flattened() if flatten else []
        self.arguments = self.flat or [BODY]
        self._content_type = self._part_headers = ""
        if len(self._media) > 1:
            self._content_type = self._reserved(CONTENT_TYPE)
        if any(m.part_headers for m in self._media):
            self._part_headers = self._reserved(PART_HEADERS)
        # JSON cannot contain files, so its values need not be searched.
        self.takes_files = any(
            not media.is_json(kind := m.media_type)
            and (media.is_multipart(kind) or media.is_form(kind) or self._is_bytes(m))
            for m in self._media
        )
        self._is_uniform = all(m.schema == self._media[0].schema for m in self._media)
        self._is_json = len(self._media) == 1 and media.is_utf8_json(self._media[0].media_type)
        self._checks: dict[str, Schema] = {}

    def _reserved(self, wanted: str) -> str:
        name = unused_name(wanted, self.arguments)
        self.arguments = [*self.arguments, name]
        return name

    def describe(self, draft: SchemaDraft, properties: JSONObject, required: list[str]) -> None:
        """Add the arguments of the body to an input schema."""
        body = self._body
        if self.flat:
            first = self._media[0]
            whole = object_of(
                draft.convert(self._definitions.flattened(first.schema), _direction(first))
            )
            properties.update(object_of(whole.get("properties")))
            if body.required:
                required += [name for name in whole.get("required", []) if name in self.flat]
        else:
            schema = any_of(m for offered in self._media for m in self._members(draft, offered))
            if body.description and "description" not in schema:
                schema = {**schema, "description": body.description}
            properties[BODY] = schema
            if body.required:
                required.append(BODY)
        if self._content_type:
            properties[self._content_type] = self._content_type_schema()
        if self._part_headers:
            schema, is_required = self._part_headers_schema(draft)
            properties[self._part_headers] = schema
            if is_required and body.required:
                required.append(self._part_headers)

    def payload(self, arguments: JSONObject) -> Payload | None:
        """Return the body for `arguments`; None if there is none.

        Raises:
            CallError: `VALIDATION_ERROR` if the body cannot be sent in the media type that the caller chose.
        """
        if self.flat:
            value: Any = {name: arguments[name] for name in self.flat if name in arguments}
            if not value and not self._body.required:
                return None
        elif BODY in arguments:
            value = arguments[BODY]
        else:
            return None
        wanted = arguments.get(self._content_type) if self._content_type else None
        chosen = self._chosen(value, wanted)
        if self._streams is not None and is_object(value):
            value = self._with_stream(value, chosen)
        if wanted is not None and fnmatchcase(wanted.lower(), chosen.media_type.lower()):
            enforce_header("Content-Type", wanted)
            chosen = msgspec.structs.replace(chosen, media_type=wanted)
        if self._is_json:
            return Payload(msgspec.json.encode(value), chosen.media_type)
        return write_body(
            chosen,
            value,
            self._schemas,
            is_bytes=self._is_bytes(chosen),
            part_headers=object_of(arguments.get(self._part_headers)),
        )

    def _without_stream(self, offered: Media) -> Media:
        """Return a media type without the requirement of the property `stream`, if this plan sets it."""
        form = self._definitions.flattened(offered.schema)
        declared = form["properties"].get(STREAM)
        is_ours = STREAM in form["required"] and self._definitions.allows_boolean(
            declared, bool(self._streams)
        )
        if not is_ours or self._definitions.subtypes_of(offered.schema):
            return offered
        self._requires_stream = True
        schema = self._definitions.without_required(offered.schema, STREAM)
        return msgspec.structs.replace(offered, schema=schema)

    def _with_stream(self, value: JSONObject, chosen: Media) -> JSONObject:
        """Return a body with the property `stream` set, if the document declares it."""
        wanted = bool(self._streams)
        known = self._stream_schemas.get(chosen.media_type)
        if known is None:
            found = self._definitions.declarations(chosen.schema, STREAM)
            known = [each for each in found if self._definitions.allows_boolean(each, wanted)]
            self._stream_schemas[chosen.media_type] = known
        is_default = any(self._definitions.resolve(each).get("default") is True for each in known)
        is_needed = wanted or (STREAM not in value and (self._requires_stream or is_default))
        if not known or not is_needed:
            return value
        asking = {**value, STREAM: wanted}
        if STREAM in self._definitions.properties(chosen.schema):
            return asking
        # Only some alternatives have the property.
        return asking if self._check(chosen).check(without_files(asking)) else value

    def _chosen(self, value: Any, wanted: Any) -> Media:
        """Return the media type of the document for `value`, which may be a pattern."""
        if wanted is not None:
            for offered in self._media:
                if fnmatchcase(wanted.lower(), offered.media_type.lower()):
                    subject = f"body of type {wanted}"
                    validate_or_raise(self._check(offered), without_files(value), subject=subject)
                    return offered
        if len(self._media) == 1:
            return self._media[0]
        if is_file_value(value):
            raw = [m for m in self._media if not media.takes_objects(m.media_type)] or self._media
            return next((m for m in raw if self._is_bytes(m)), raw[0])
        for offered in self._media:
            if media.is_multipart(offered.media_type) and self._is_upload(offered, value):
                return offered
        return next((m for m in self._media if self._fits(m, value)), self._media[0])

    def _fits(self, offered: Media, value: Any) -> bool:
        kind = offered.media_type
        if media.is_json_patch(kind) and not is_list(value) and self._patches:
            return False
        if self._is_uniform and is_object(value) and media.takes_objects(kind):
            return True
        if isinstance(value, str) and self._is_bytes(offered) and not media.takes_objects(kind):
            return is_base64(value)
        return self._check(offered).check(without_files(value))

    def _is_upload(self, form: Media, value: Any) -> bool:
        """Return whether `value` contains a file that only a form supports."""
        if without_files(value) != value:
            return True
        if not is_object(value):
            return False
        others = [m for m in self._media if m is not form and media.is_json(m.media_type)]
        return any(
            all(self._is_file_field(m, name, item) is not False for m in others)
            for name, item in value.items()
            if self._is_file_field(form, name, item)
        )

    def _is_file_field(self, offered: Media, name: str, value: Any) -> bool | None:
        """Return whether a field is a file or a list of files; None if it is not declared."""
        schema = self._definitions.property(offered.schema, name)
        if schema is None:
            return None
        return self._files.holds_files(self._files.field(schema, value), value)

    def _check(self, offered: Media) -> Schema:
        """Return the compiled schema of a body of this media type."""
        known = self._checks.get(offered.media_type)
        if known is None:
            known = Schema(
                partial(self._alone, offered), lenient=True, shared=self._schemas.requests
            )
            self._checks[offered.media_type] = known
        return known

    def _alone(self, offered: Media) -> JSONSchema:
        draft = self._schemas.draft(_direction(offered))
        return draft.close(any_of(self._members(draft, offered)))

    def _members(self, draft: SchemaDraft, offered: Media) -> Iterator[JSONObject]:
        """Yield the schemas of the bodies for one media type."""
        kind = offered.media_type
        converted = draft.convert(whole_schema(offered), _direction(offered))
        if media.takes_objects(kind) or describes_items(offered):
            yield as_object(converted)
            if media.is_json_patch(kind) and self._patches:
                node = self._definitions.resolve(offered.schema)
                if node.get("type") == "object":
                    # Kubernetes: one schema for patches of every kind.
                    yield _PATCH
        elif self._is_bytes(offered):
            # The caller may choose one of several types.
            is_named = media.is_range(kind) or self._files.root is not None
            yield self._files.schema if is_named else BASE64
        elif media.is_text(kind):
            # An object schema for XML describes the document tree, but the argument is its text.
            is_string = object_of(converted).get("type") == "string"
            described = {"type": "string", "description": f"Text of type {kind}."}
            yield as_object(converted) if is_string else described
            if media.is_sequence(kind) and object_of(converted).get("type") == "array":
                yield as_object(converted)
            if len(self._media) > 1 and media.is_yaml(kind) and not is_string:
                # JSON is valid YAML.
                yield as_object(converted)
        else:
            yield as_object(converted)

    @property
    def _patches(self) -> bool:
        """Whether a body is really a JSON Patch; some frameworks declare that type for every JSON body."""
        return not any(media.is_plain_json(m.media_type) for m in self._media)

    def _content_type_schema(self) -> JSONObject:
        kinds = [m.media_type for m in self._media]
        schema: JSONObject = {
            "type": "string",
            "description": "The media type of the body; by default one that matches the body.",
        }
        if any(map(media.is_range, kinds)):
            return {**schema, "examples": kinds}
        return {**schema, "enum": kinds}

    def _part_headers_schema(self, draft: SchemaDraft) -> tuple[JSONObject, bool]:
        """Return the schema of the headers of all parts, and whether any is required."""
        chosen = next(m for m in self._media if m.part_headers)
        flat = self._definitions.flattened(chosen.schema)
        properties: JSONObject = {}
        needed: list[str] = []
        for part, headers in chosen.part_headers.items():
            own = {
                header.name: header.described(as_object(draft.convert(header.schema)))
                for header in headers
            }
            required = [
                header.name
                for header in headers
                if header.required and fixed_value(header, self._definitions) is NO_VALUE
            ]
            schema = closed_object(own, required)
            if self._definitions.resolve(flat["properties"].get(part)).get("type") == "array":
                # One set of headers for all items, or one for each.
                schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
            properties[part] = schema
            if required and part in flat["required"]:
                needed.append(part)
        text = "Headers of the body's parts: by part, then by header."
        schema = {"description": text, **closed_object(properties, needed)}
        return schema, bool(needed) and len(self._media) == 1

    def _is_bytes(self, offered: Media) -> bool:
        """Return whether strings of this type are base64 of the sent bytes."""
        kind = offered.media_type
        if media.is_text(kind):
            return False
        if media.is_range(kind):
            return offered.schema is True or is_file(self._definitions.resolve(offered.schema))
        return True

    def _flattened(self) -> list[str]:
        """Return the names of the body's properties, if it is a plain object."""
        first = self._media[0]
        if not media.takes_objects(first.media_type):
            return []
        schema = self._definitions.resolve(first.schema)
        is_union = not schema.keys().isdisjoint({"oneOf", "anyOf", "not", "if"})
        if is_union or self._definitions.subtypes_of(first.schema):
            return []
        return list(self._definitions.flattened(first.schema)["properties"])


def _direction(offered: Media) -> Direction:
    """Return the direction of the schemas of a media type."""
    return Direction.REQUEST if media.is_json(offered.media_type) else Direction.UPLOAD


SAVE_TO = "save_to"
_SAVE_TO_SCHEMA: JSONObject = {
    "type": "string",
    "minLength": 1,
    "description": "Save the response to this new file, a relative path, instead of returning it.",
}


class Argument(msgspec.Struct, frozen=True, gc=False):
    """One argument of an operation, and its parameter."""

    name: str
    parameter: Parameter

    drops_null: bool = False
    """Whether null means that the argument is absent: it is optional, and null replaces no other default."""

    only_value: Any = NO_VALUE
    """The only allowed value of a required argument."""


class RequestPlan:
    """Converts the arguments of one operation to a request.

    Args:
        path: The path's template.
        model: The model of the operation.
        schemas: Converts the document's schemas.
        owned: The keys of names that configuration sets and arguments must not set (`name_key`).
        flatten: Whether the properties of the body are separate arguments.
        streams: Whether to request a stream, if the API supports both; None if there is no choice.
    """

    def __init__(
        self,
        path: str,
        model: Model,
        schemas: SchemaConverter,
        *,
        owned: frozenset[tuple[str, str]],
        flatten: bool,
        streams: bool | None = None,
    ) -> None:
        self._schemas, self._definitions, self._files = schemas, schemas.definitions, schemas.files
        self._model = model
        self._owned = owned
        self._template = PathTemplate(path, model.parameters)
        self.literal_query = self._template.literals
        self._body = (
            BodyPlan(model.body, schemas, flatten=flatten, streams=streams)
            if model.body is not None
            else None
        )
        parameters = [p for p in self._template.parameters if not _is_hidden(p, owned)]
        reserved = self._body.arguments if self._body is not None else []
        names = argument_names([(p.name, p.place) for p in parameters], reserved)
        self.arguments = tuple(map(self._argument, names, parameters))
        self._only_values = {
            a.name: a.only_value for a in self.arguments if a.only_value is not NO_VALUE
        }
        self._forced: JSONObject = {}
        if streams is not None:
            self._choose_response(streams=streams)
        self._by_path_name = {
            a.parameter.name: a for a in self.arguments if a.parameter.place == "path"
        }
        self._rest = tuple(a for a in self.arguments if a.parameter.place != "path")
        self.save_to = unused_name(SAVE_TO, [*names, *reserved])
        """The argument that names the file to save the response to."""

        self.takes_files = self._body is not None and self._body.takes_files
        """Whether a declared body supports files."""

        self.returns_files = any(response.is_file for response in model.responses)
        """Whether a response that is neither JSON nor text is declared."""

    def _choose_response(self, *, streams: bool) -> None:
        """Set the argument `stream` of an API that responds with a stream or with JSON, as the argument requests."""
        for argument in self.arguments:
            parameter, schema = argument.parameter, argument.parameter.schema
            if parameter.name != STREAM or not self._definitions.allows_boolean(schema, streams):
                continue
            is_default = self._definitions.resolve(schema).get("default") is True
            if streams:
                self._forced[argument.name] = True
            elif is_default or parameter.required:
                self._only_values[argument.name] = False

    def _argument(self, name: str, parameter: Parameter) -> Argument:
        if parameter.required:
            return Argument(
                name, parameter, only_value=only_value(parameter.schema, self._definitions)
            )
        allows_null = self._schemas.allows_null(parameter.schema)
        has_default = object_of(parameter.schema).get("default") is not None
        return Argument(name, parameter, drops_null=not (allows_null and has_default))

    def input_schema(self) -> JSONSchema:
        """Return the schema of all arguments."""
        draft = self._schemas.draft(Direction.REQUEST)
        properties: JSONObject = {}
        required: list[str] = []
        for argument in self.arguments:
            parameter = argument.parameter
            schema = as_object(draft.convert(parameter.schema))
            if argument.only_value is not NO_VALUE:
                schema = {**schema, "default": argument.only_value}
            elif parameter.required and argument.name not in (*self._only_values, *self._forced):
                required.append(argument.name)
            properties[argument.name] = parameter.described(schema, argument.name)
        if self._body is not None:
            self._body.describe(draft, properties, required)
        if self.returns_files and self._files.root is not None:
            properties[self.save_to] = _SAVE_TO_SCHEMA
        return draft.close(closed_object(properties, required))

    def draft(
        self, method: str, base: str, arguments: JSONObject, headers: dict[str, str]
    ) -> Draft:
        """Return the request for these arguments, with `headers` beside those of the arguments.

        Raises:
            CallError: `VALIDATION_ERROR` if an argument is not allowed in its position.
        """
        arguments = {**self._only_values, **arguments, **self._forced}
        path, query = self._template.literal, [*self.literal_query]
        if path is None:
            path, filled = self._template.fill(partial(self._path_value, arguments))
            query += filled
        draft = Draft(method=method, base=base, path=path, query=query, headers={**headers})
        for argument in self._rest:
            if argument.name not in arguments:
                continue
            value = arguments[argument.name]
            if value is not None or not argument.drops_null:
                self._add(draft, argument, value)
        payload = self._body.payload(arguments) if self._body is not None else None
        if payload is not None:
            draft.body = payload.content
            draft.headers["Content-Type"] = payload.content_type
        return draft

    def _add(self, draft: Draft, argument: Argument, value: Any) -> None:
        """Add an argument to the query, the headers or the cookies of a request."""
        parameter = argument.parameter
        if parameter.place == "query":
            is_whole = parameter.style == "querystring"
            pairs = (
                [whole_query(parameter, value, self._schemas)]
                if is_whole
                else query_pairs(parameter, value)
            )
            # `_is_hidden` has excluded the parameters whose own names configuration sets.
            is_free = is_whole or parameter.allow_reserved or type(value) is dict
            if self._owned and is_free:
                enforce_unowned(argument.name, "query", pairs, self._owned)
            draft.query.extend(pairs)
        elif parameter.place == "header":
            header = {parameter.name: header_value(parameter, value)}
            draft.headers = merged_headers(draft.headers, header)
        else:
            cookie = cookie_text(parameter, value)
            if self._owned:
                enforce_unowned(argument.name, "cookie", [cookie], self._owned)
            # An empty exploded list has no pairs.
            if cookie:
                draft.cookies.append(cookie)

    def _path_value(self, arguments: JSONObject, name: str) -> str:
        """Return the encoded value of the path parameter `name`."""
        argument = self._by_path_name.get(name)
        if argument is None or argument.name not in arguments:
            name = argument.name if argument is not None else name
            message = f"The path argument {name!r} is missing."
            raise invalid_argument(pointer(name), message, "required")
        return path_argument(argument.name, argument.parameter, arguments[argument.name])


def _is_hidden(parameter: Parameter, owned: frozenset[tuple[str, str]]) -> bool:
    """Return whether the client or configuration sets this parameter, so that it is not an argument."""
    if parameter.place == "header" and is_owned(parameter.name):
        return True
    return name_key(parameter.place, parameter.name) in owned
