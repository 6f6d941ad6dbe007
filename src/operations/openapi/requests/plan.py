"""How one operation's arguments become a request: worked out once, when the operation is first used."""

from collections.abc import Sequence
from typing import Any

import msgspec

from operations._json import pointer
from operations.errors import CallError, ErrorCode
from operations.openapi.exchange.attempts import Draft
from operations.openapi.reading import media
from operations.openapi.reading.keywords import as_object, with_null
from operations.openapi.reading.model import Model, Parameter, Response, argument_names, unused_name
from operations.openapi.reading.schemas import Direction, SchemaConverter
from operations.openapi.requests.bodies import NO_VALUE, only_value
from operations.openapi.requests.body_plan import STREAM, BodyPlan, closed_object, described
from operations.openapi.requests.parameters import (
    cookie_text,
    enforce_argument,
    enforce_segments,
    header_value,
    literal,
    path_value,
    query_pairs,
    refusal,
    split_template,
    template_names,
)
from operations.openapi.transport import enforce_header, enforce_unowned, is_owned, name_key
from operations.types import JSONObject, JSONSchema

SAVE_TO = "save_to"
_SAVE_TO_SCHEMA: JSONObject = {
    "type": "string",
    "minLength": 1,
    "description": "Save the response to this new file, a relative path, instead of returning it.",
}


class Argument(msgspec.Struct, frozen=True, gc=False):
    """One argument of an operation, and the parameter it fills."""

    name: str
    parameter: Parameter

    drops_null: bool = False
    """Whether null means that the argument is absent: it is optional, and its schema rejects null."""

    only_value: Any = NO_VALUE
    """The value of a required argument that allows no other."""


class Plan:
    """How to call one operation.

    Args:
        path: The path's template.
        model: What the document says.
        schemas: Converts the document's schemas.
        owned: The keys of what configuration sets and no argument may (`name_key`).
        flatten: Whether the body's properties are arguments of their own.
        streams: Whether a stream is wanted, if the caller has a choice; None if not.
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
        self._schemas = schemas
        self._model = model
        self._owned = owned
        template, _, literal_query = path.partition("#")[0].partition("?")
        self._template = template if template.startswith("/") else "/" + template
        self._pieces = tuple(split_template(self._template))
        # What a template in the query stands for is a query parameter anyway.
        pieces = literal_query.split("&")
        self.literal_query = tuple(literal(p) for p in pieces if p and "{" not in p)
        self._body = (
            BodyPlan(model.body, schemas, flatten=flatten, streams=streams)
            if model.body is not None
            else None
        )
        parameters = [p for p in _completed(template, model.parameters) if not _is_hidden(p, owned)]
        reserved = self._body.arguments if self._body is not None else []
        names = argument_names([(p.name, p.place) for p in parameters], reserved)
        self.arguments = tuple(map(self._argument, names, parameters))
        self._only_values = {
            a.name: a.only_value for a in self.arguments if a.only_value is not NO_VALUE
        }
        self._forced: JSONObject = {}
        for argument in self.arguments:
            parameter = argument.parameter
            if streams is None or parameter.name != STREAM:
                continue
            if schemas.allows_boolean(parameter.schema, streams):
                is_default = schemas.resolve(parameter.schema).get("default") is True
                if streams:
                    self._forced[argument.name] = True
                elif is_default or parameter.required:
                    self._only_values[argument.name] = False
        self._by_path_name = {
            a.parameter.name: a for a in self.arguments if a.parameter.place == "path"
        }
        self._rest = tuple(a for a in self.arguments if a.parameter.place != "path")
        self.save_to = unused_name(SAVE_TO, [*names, *reserved])
        """The argument that names the file to save the response to."""

        self.takes_files = self._body is not None and self._body.takes_files
        """Whether a body that can hold files is declared."""

        self.returns_files = any(map(_is_file_response, model.responses))
        """Whether a response that is neither JSON nor text is declared."""

    def _argument(self, name: str, parameter: Parameter) -> Argument:
        if parameter.required:
            return Argument(name, parameter, only_value=only_value(parameter.schema, self._schemas))
        return Argument(name, parameter, drops_null=not self._schemas.allows_null(parameter.schema))

    def input_schema(self) -> JSONSchema:
        """Return the schema of all arguments."""
        draft = self._schemas.draft(Direction.REQUEST)
        properties: JSONObject = {}
        required: list[str] = []
        for argument in self.arguments:
            parameter = argument.parameter
            schema = as_object(draft.convert(parameter.schema))
            if argument.drops_null:
                schema = with_null(schema)
            if argument.only_value is not NO_VALUE:
                schema = {**schema, "default": argument.only_value}
            elif parameter.required and argument.name not in (*self._only_values, *self._forced):
                required.append(argument.name)
            properties[argument.name] = described(schema, parameter, argument.name)
        if self._body is not None:
            self._body.describe(draft, properties, required)
        if self.returns_files and self._schemas.files_root is not None:
            properties[self.save_to] = _SAVE_TO_SCHEMA
        return draft.close(closed_object(properties, required))

    def draft(self, method: str, base: str, arguments: JSONObject, accept: str) -> Draft:
        """Return the request for these arguments.

        Raises:
            CallError: `VALIDATION_ERROR` if an argument is not allowed in its position.
        """
        arguments = {**self._only_values, **arguments, **self._forced}
        draft = Draft(
            method=method, base=base, path=self._path(arguments), headers={"Accept": accept}
        )
        draft.query.extend(self.literal_query)
        for argument in self._rest:
            if argument.name not in arguments:
                continue
            parameter, value = argument.parameter, arguments[argument.name]
            if value is None and argument.drops_null:
                continue
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
        payload = self._body.payload(arguments) if self._body is not None else None
        if payload is not None:
            draft.body = payload.content
            draft.headers["Content-Type"] = payload.content_type
        return draft

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


def _is_file_response(response: Response) -> bool:
    is_good = response.status[:1] == "2" or response.status == "default"
    kinds = [offered.media_type for offered in response.media]
    return is_good and any(
        not media.is_json(kind) and not media.is_text(kind) and not media.is_sequence(kind)
        for kind in kinds
    )


def _completed(path: str, parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return the parameters; of path parameters those in the template, as strings if they are not declared."""
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


def _missing(name: str) -> CallError:
    message = f"The path argument {name!r} is missing."
    return CallError(
        ErrorCode.VALIDATION_ERROR,
        message,
        {"errors": [{"path": pointer(name), "message": message, "keyword": "required"}]},
    )
