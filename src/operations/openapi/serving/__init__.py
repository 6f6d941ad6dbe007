"""`to_openapi` describes the HTTP API of a registry as an OpenAPI 3.1 document.

Rule 1: the document describes exactly the API of `operations.server`; both use `QueryArguments` for queries.
Rule 2: the same operations give the same document, independently of their order of registration.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec

from operations.base.errors import HTTP_STATUS, ErrorCode
from operations.base.json.values import is_list, is_object, object_of
from operations.base.text import enforce_lists, first_sentence, numbered_name
from operations.base.types import JSONObject, JSONSchema
from operations.contract.specs import ErrorDefinition, OperationSpec, OperationType, describable
from operations.front.public_errors import declared_status
from operations.openapi.reading.media import EVENT_STREAM
from operations.openapi.serving.components import (
    AUTHORITY,
    ERROR,
    KEY,
    PLACED,
    Components,
    Exported,
    event_schema,
    has_definitions,
    merged_name,
)
from operations.openapi.serving.query_arguments import (
    ParameterForm,
    QueryArguments,
    QueryParameter,
    may_be_empty,
)
from operations.openapi.serving.runs import ACCEPTED, RUN_SCHEMAS, run_paths
from operations.schema import Schema
from operations.schema.references import DEFINITIONS

_LOGGER = logging.getLogger("operations")
JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"

BEARER: Final[Mapping[str, JSONObject]] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key or a token."}
}
"""The default security scheme."""

_ERROR: JSONObject = {
    "type": "object",
    "description": "Why a call failed.",
    "required": ["code", "message"],
    "properties": {
        "code": {"type": "string"},
        "message": {"type": "string"},
        "details": {},
        "retryable": {"type": "boolean"},
        "requestId": {"type": "string"},
    },
}
_SHARED: Mapping[int, tuple[str, str]] = {
    400: ("Malformed", "The request is malformed."),
    401: ("Unauthenticated", "No credential was sent, or it is not valid."),
    403: ("Denied", "The caller has no access."),
    422: ("Invalid", "The input does not match its schema; `details.errors` has every path."),
}
_MANY = 3
"""A response becomes a component if at least this many operations share it."""

_MAX_SUMMARY: Final = 120

_FAILED = "The call failed: a limit, a timeout, or an error of the operation."


def to_openapi(
    registry: Iterable[Any],
    *,
    title: str = "operations",
    version: str = "1.0.0",
    description: str | None = None,
    server_url: str = "/",
    security_schemes: Mapping[str, JSONObject] = BEARER,
    durable: Collection[str] | None = None,
) -> JSONObject:
    """Return an OpenAPI document for operations as `operations.server` serves them.

    A `default` that does not match its type is omitted, and so is an operation whose schema cannot be built, with a
    warning on the logger `operations`.

    Args:
        registry: A registry, or any operations or specs.
        title: The title of the API.
        version: The version of the API.
        description: The description of the API.
        server_url: The address of the API; by default that of the document.
        security_schemes: OpenAPI security schemes by name, each of which is sufficient.
        durable: The ids of the durable operations of a server that keeps runs, so that the document has its paths for
            runs; by default those of a registry with a store of runs.

    Raises:
        ValueError: If `durable` is one string.
    """
    enforce_lists(durable=durable)
    items = list(registry)
    specs: list[OperationSpec] = [getattr(item, "spec", item) for item in items]
    if durable is None and getattr(registry, "run_store", None) is not None:
        durable = [item.spec.id for item in items if item.durable]
    shown = sorted(filter(has_path, describable(specs)), key=lambda spec: spec.id)
    builder = _Builder(security_schemes, durable)
    paths: JSONObject = {
        f"/{spec.namespace}/{spec.name}": builder.path_item(spec) for spec in shown
    }
    runs: JSONObject = {}
    if durable is not None:
        # A run of an operation that is open needs no credential.
        secured: list[JSONObject] = [{name: []} for name in security_schemes]
        runs = run_paths([{}, *secured] if builder.is_secured else [])
    _name_operations([*paths.values(), *runs.values()])
    if builder.components.repaired:
        _LOGGER.warning(
            "Omitted from the exported document: defaults that do not match their type, in %s",
            ", ".join(builder.components.repaired),
        )
    info: JSONObject = {"title": title, "version": version}
    if description:
        info["description"] = description
    components: JSONObject = {
        "schemas": {
            "Error": _ERROR,
            **dict(sorted(builder.components.schemas.items())),
        },
        "responses": {
            name: _error_response(text, ERROR)
            for name, text in (*_SHARED.values(), ("Failed", _FAILED))
            if name in builder.responses
        },
    }
    _share_responses(paths, components["responses"])
    if builder.is_secured:
        components["securitySchemes"] = dict(security_schemes)
    return {
        "openapi": "3.1.0",
        "info": info,
        "servers": [{"url": server_url}],
        # Operations that are open need no credential. Linters require that documents state it.
        "security": [],
        "tags": [
            {"name": name} for name in dict.fromkeys([*_tags(paths), *(["runs"] if runs else [])])
        ],
        "paths": paths | runs,
        "components": components if paths or runs else {},
    }


def _name_operations(items: list[JSONObject]) -> None:
    """Add a hash to operation ids that become the function name of another one in generated clients."""
    taken: set[str] = set()
    for method in ("post", "get"):
        for operation in [item[method] for item in items if method in item]:
            wanted: str = operation["operationId"]
            if merged_name(wanted) in taken:
                # Not a number, which would change when an operation is added before this one.
                operation["operationId"] = f"{wanted}_{sha256(wanted.encode()).hexdigest()[:8]}"
            taken.add(merged_name(operation["operationId"]))


def _tags(paths: JSONObject) -> list[str]:
    """Return the tags of all operations, in the order of their first use; linters require their declaration."""
    lists: Iterator[list[str]] = (item["post"]["tags"] for item in paths.values())
    return list(dict.fromkeys(chain.from_iterable(lists)))


def _share_responses(paths: JSONObject, shared: JSONObject) -> None:
    """Move error responses that many operations share to the components."""
    found: dict[bytes, list[tuple[JSONObject, str]]] = {}
    for item in paths.values():
        # The GET of the same path has the same responses.
        responses: JSONObject = item["post"]["responses"]
        for status, response in responses.items():
            if status not in ("200", "202") and "$ref" not in response:
                found.setdefault(msgspec.json.encode(response), []).append((responses, status))
    for places in found.values():
        if len(places) < _MANY:
            continue
        holder, status = places[0]
        name = numbered_name(f"Status{status}", shared)
        shared[name] = holder[status]
        for responses, each in places:
            responses[each] = {"$ref": f"#/components/responses/{name}"}


def has_path(spec: OperationSpec) -> bool:
    """Return whether an operation has a path; a name of only dots would be a relative path segment."""
    return spec.name.strip(".") != ""


class _DeclaredError(NamedTuple):
    """An error that an operation declares."""

    wire: JSONObject
    """The error in the extension."""

    status: int
    description: str

    body: JSONObject
    """The schema of the response."""


class _Builder:
    """Writes operation objects and collects their shared parts."""

    def __init__(
        self, security_schemes: Mapping[str, JSONObject], durable: Collection[str] | None
    ) -> None:
        # We choose the names.
        self.components = Components({"Error": _ERROR, **({} if durable is None else RUN_SCHEMAS)})
        self._durable = frozenset(durable or ())
        self.is_secured = False
        self.responses = {"Failed"}
        self._schemes = security_schemes

    def path_item(self, spec: OperationSpec) -> JSONObject:
        """Return the methods of one operation."""
        main = self._main(spec)
        item: JSONObject = {"post": main}
        if spec.type is not OperationType.MUTATION:
            beside = {
                key: value
                for key, value in main.items()
                if key not in ("requestBody", KEY, "operationId")
            }
            beside["operationId"] = f"{spec.id}.get"
            parameters = self._parameters(spec)
            if parameters:
                beside["parameters"] = parameters
            beside[KEY] = {"id": spec.id, "sameAs": "post"}
            item = {"get": beside, "post": main}
        return item

    def _main(self, spec: OperationSpec) -> JSONObject:
        came_from: dict[str, str] = {}
        input_schema, whole_input = self._placed(spec.input_schema, f"{spec.id}.input", came_from)
        binary, rest = "", spec.output_schema
        if spec.type is not OperationType.SUBSCRIPTION:
            binary, rest = _without_bytes(spec.output_schema)
        output_schema, whole_output = self._placed(rest, f"{spec.id}.output", came_from)
        if binary:
            whole_output = spec.output_schema.document
        if output_schema == {"type": "null"}:
            # Generators of clients fail for a result of this type.
            output_schema, whole_output = {"const": None}, whole_output or output_schema
        operation: JSONObject = {"operationId": spec.id, "summary": spec.title or _summary(spec)}
        if spec.description:
            operation["description"] = spec.description
        # Generators of clients write one module or class for each first tag.
        operation["tags"] = list(dict.fromkeys((spec.namespace, *spec.tags)))
        if spec.meta.get("deprecated") is True:
            operation["deprecated"] = True
        operation["requestBody"] = {
            "required": not may_be_empty(spec.input_schema),
            "content": {JSON: {"schema": input_schema}},
        }
        errors = [self._declared_error(spec, error, came_from) for error in spec.error_schemas]
        operation["responses"] = {
            "200": _result(spec, output_schema, binary),
            **({"202": ACCEPTED} if spec.id in self._durable else {}),
            **self._error_responses(spec, errors),
        }
        if not spec.access_control.is_open and self._schemes:
            self.is_secured = True
            scopes = [*spec.access_control.required_scopes]
            operation["security"] = [{name: scopes} for name in self._schemes]
        if spec.authority:
            operation[AUTHORITY] = True
        operation[KEY] = msgspec.to_builtins(
            Exported(
                id=spec.id,
                type=spec.type,
                version=spec.version,
                idempotent=spec.idempotent,
                tags=spec.tags if spec.namespace in spec.tags else None,
                untitled=not spec.title,
                errors=tuple(error.wire for error in errors),
                components=dict(sorted(came_from.items())),
                input_schema=whole_input,
                output_schema=whole_output,
            )
        )
        return operation

    def _placed(
        self, schema: Schema, title: str, came_from: dict[str, str]
    ) -> tuple[JSONSchema, JSONSchema | None]:
        """Return a schema for the document, and the original schema if the document cannot express it."""
        placed = self.components.place(schema.document, title)
        if placed is None:
            return {}, schema.document
        came_from.update(placed[1])
        return placed[0], None

    def _parameters(self, spec: OperationSpec) -> list[JSONObject]:
        arguments = QueryArguments(spec.input_schema)
        root = object_of(spec.input_schema.document)
        held = {key: root[key] for key in DEFINITIONS if key in root}
        return [self._parameter(spec, parameter, held) for parameter in arguments.parameters]

    def _parameter(
        self, spec: OperationSpec, parameter: QueryParameter, held: JSONObject
    ) -> JSONObject:
        schema = parameter.schema
        if isinstance(schema, dict) and (
            parameter.shape is not ParameterForm.JSON or schema.get("default", ...) is None
        ):
            schema = _without_null(schema)
        if parameter.shape is ParameterForm.LIST and isinstance(schema, dict):
            schema = _sendable_list(schema)
        placed = self.components.place(
            {**held, **schema} if isinstance(schema, dict) else schema,
            f"{spec.id}.{parameter.name}",
        )
        shown = placed[0] if placed is not None else {}
        written: JSONObject = {
            "name": parameter.name,
            "in": "query",
            "required": parameter.required,
        }
        if isinstance(shown, dict) and isinstance(shown.get("description"), str):
            written["description"] = shown["description"]
        if parameter.shape is ParameterForm.JSON:
            # Of a parameter with `content`, some generators of clients make nothing, and others fail.
            written.setdefault("description", "As JSON.")
            written["schema"] = {
                "type": "string",
                "contentMediaType": JSON,
                "contentSchema": shown,
            }
        else:
            written["schema"] = shown
            if parameter.shape is ParameterForm.LIST:
                # The default, which some generators of clients do not know.
                written["explode"] = True
        return written

    def _declared_error(
        self, spec: OperationSpec, error: ErrorDefinition, came_from: dict[str, str]
    ) -> _DeclaredError:
        placed = self.components.place(error.schema.document, f"{spec.id}.{error.code}")
        wire = error.to_wire()
        if placed is not None and has_definitions(error.schema.document):
            # Errors often share definitions, which should not be repeated for every operation.
            came_from.update(placed[1])
            wire |= {"schema": placed[0], PLACED: True}
        status = declared_status(error.http_status)
        body: JSONObject = {
            "type": "object",
            "required": ["code", "message"],
            "properties": {
                "code": _code_schema(error.code, status),
                "message": {"type": "string"},
                "details": placed[0] if placed is not None else {},
            },
        }
        return _DeclaredError(wire, status, error.description or error.code, body)

    def _error_responses(self, spec: OperationSpec, errors: list[_DeclaredError]) -> JSONObject:
        """Return the declared errors, and those that every operation may have, by status."""
        always = {400, 401, 422} if spec.access_control.is_open else {400, 401, 403, 422}
        responses: JSONObject = {}
        for status in sorted({*always, *(error.status for error in errors)}):
            declared = [error for error in errors if error.status == status]
            if not declared:
                name, _ = _SHARED[status]
                self.responses.add(name)
                responses[str(status)] = {"$ref": f"#/components/responses/{name}"}
                continue
            bodies = [error.body for error in declared]
            if status in always or status in HTTP_STATUS.values() or status == 500:
                # The status may also be used for errors that are not declared.
                bodies.append(ERROR)
            about = " ".join(error.description for error in declared)
            responses[str(status)] = _error_response(
                about, bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
            )
        responses["default"] = {"$ref": "#/components/responses/Failed"}
        return responses


def _code_schema(code: str, status: int) -> JSONObject:
    """Return the schema of the code in an error body.

    Errors of an imported API have the general code of HTTP errors.
    """
    if code == f"HTTP_{status}":
        return {"enum": [code, str(ErrorCode.EXECUTION_ERROR)]}
    return {"const": code}


def _without_bytes(schema: Schema) -> tuple[str, Schema]:
    """Return the media type of binary results (empty if there are none), and the schema of the other results."""
    root = object_of(schema.document)
    if schema.is_binary:
        return root.get("contentMediaType", BINARY), Schema(False)
    for keyword in ("anyOf", "oneOf"):
        listed = root.get(keyword)
        parts = [object_of(each) for each in listed] if is_list(listed) else []
        binary = [part for part in parts if part.get("contentEncoding") == "base64"]
        others = [part for part in parts if part not in binary]
        if binary and others:
            rest = (
                others[0]
                if root.keys() == {keyword} and len(others) == 1
                else {**root, keyword: others}
            )
            return binary[0].get("contentMediaType", BINARY), Schema(rest)
    return "", schema


def _summary(spec: OperationSpec) -> str:
    """Return the first sentence of a description, or the id of the operation: linters require a summary."""
    sentence = first_sentence(spec.description, _MAX_SUMMARY)
    return (sentence if sentence.endswith("...") else sentence.removesuffix(".")) or spec.id


def _result(spec: OperationSpec, schema: JSONSchema, binary: str) -> JSONObject:
    if spec.type is OperationType.SUBSCRIPTION:
        return {
            "description": "An event per item, its data as JSON; then `event: complete`, or `event: error`.",
            "content": {EVENT_STREAM: {"schema": event_schema(schema)}},
        }
    content: JSONObject = {}
    if binary:
        # Bytes are sent unencoded. Generators of clients drop a result without a schema.
        content[binary] = {"schema": {"type": "string", "format": "binary"}}
    if not spec.output_schema.is_binary:
        content[JSON] = {"schema": schema}
    return {"description": "The result.", "content": content}


def _error_response(description: str, schema: JSONSchema) -> JSONObject:
    return {"description": description, "content": {JSON: {"schema": schema}}}


def _sendable_list(schema: JSONObject) -> JSONObject:
    """Return the lists that a query can express: not an empty one, which has no parameter, and without nulls."""
    schema = {**schema, "minItems": max(1, schema.get("minItems", 1))}
    if schema.get("default") == []:
        del schema["default"]
    if isinstance(schema.get("items"), dict):
        schema["items"] = _without_null(schema["items"])
    return schema


def _without_null(schema: JSONObject) -> JSONObject:
    """Return the part of a schema that a query can express, without null, which is an absent parameter."""
    if "default" in schema and schema["default"] is None:
        schema = {key: value for key, value in schema.items() if key != "default"}
    for keyword, null in _NULLS.items():
        listed: Any = schema.get(keyword)
        kept: list[Any] = [each for each in listed if each != null] if is_list(listed) else []
        if len(kept) == 1 and keyword == "type":
            schema = {**schema, "type": kept[0]}
        elif len(kept) == 1 and is_object(kept[0]) and keyword != "enum":
            rest = {key: value for key, value in schema.items() if key != keyword}
            schema = {**kept[0], **rest}
        elif kept:
            schema = {**schema, keyword: kept}
    return schema


_NULLS: Final[Mapping[str, Any]] = {
    "enum": None,
    "type": "null",
    "anyOf": {"type": "null"},
    "oneOf": {"type": "null"},
}
"""The form of null in each keyword that lists alternatives."""
