"""Reads one operation of a Swagger 2.0 document into the same model."""

from typing import Any, cast

from operations._json import list_of, object_of, text_of
from operations.errors import DocumentError
from operations.openapi.reading.media import intended
from operations.openapi.reading.model import Body, Media, Model, Parameter, Place, Response
from operations.openapi.reading.references import References
from operations.openapi.transport import is_header_value
from operations.types import JSONObject

_PLACES = frozenset({"path", "query", "header", "body", "formData"})
_FORM = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"

_SEPARATORS = {
    "csv": ("form", False),
    "ssv": ("spaceDelimited", False),
    "tsv": ("tabDelimited", False),
    "pipes": ("pipeDelimited", False),
    "multi": ("form", True),
}
"""Each `collectionFormat` as a style and whether it explodes."""

_NOT_SCHEMA = frozenset(
    {"name", "in", "required", "description", "collectionFormat", "allowEmptyValue"}
)


def read_model(
    references: References, document: JSONObject, item: JSONObject, operation: JSONObject
) -> Model:
    """Return the model of `operation` of the path `item`.

    Raises:
        DocumentError: If a part of it cannot be understood.
    """
    merged: dict[tuple[str, str], JSONObject] = {}
    for node in (*list_of(item.get("parameters")), *list_of(operation.get("parameters"))):
        found = references.follow(node)
        problem = check_parameter(found)
        if problem:
            raise DocumentError(problem)
        # There is one body, whatever it is called, and header names are the same in any case.
        name = "" if found["in"] == "body" else found["name"]
        merged[found["in"], name.lower() if found["in"] == "header" else name] = found
    nodes = list(merged.values())
    consumes = _media_types(document, operation, "consumes")
    return Model(
        parameters=tuple(_parameter(n) for n in nodes if n["in"] not in {"body", "formData"}),
        body=_body(nodes, consumes),
        responses=read_responses(references, document, operation),
    )


def check_parameter(node: JSONObject) -> str | None:
    """Return the problem of a parameter; None if it has none."""
    if type(node.get("name")) is not str and node.get("in") != "body":
        return "a parameter has no name"
    if node.get("in") not in _PLACES:
        return f"the parameter {node.get('name')!r} is in no known place: {node.get('in')!r}"
    return None


def _media_types(document: JSONObject, operation: JSONObject, key: str) -> list[str]:
    own = operation.get(key)
    return [
        intended(text)
        for item in list_of(own if own is not None else document.get(key))
        if (text := text_of(item)) and is_header_value(text)
    ]


def _schema(node: JSONObject) -> Any:
    """Return the schema of a parameter that is itself written as a schema."""
    if isinstance(node.get("schema"), dict):
        return node["schema"]
    return {key: value for key, value in node.items() if key not in _NOT_SCHEMA}


def _parameter(node: JSONObject) -> Parameter:
    place = cast("Place", node["in"])
    style, explode = _SEPARATORS.get(text_of(node.get("collectionFormat")), ("form", False))
    if place != "query":
        explode = False
        style = "simple" if style == "form" else style
    return Parameter(
        name=node["name"],
        place=place,
        required=node.get("required") is True or place == "path",
        description=text_of(node.get("description")),
        schema=_schema(node),
        style=style,
        explode=explode,
    )


def _body(nodes: list[JSONObject], consumes: list[str]) -> Body | None:
    bodies = [node for node in nodes if node["in"] == "body"]
    if bodies:
        node = bodies[-1]
        types = [kind for kind in consumes if kind not in {_FORM, _MULTIPART}] or [
            "application/json"
        ]
        schema = node.get("schema", True)
        return Body(
            required=node.get("required") is True,
            description=text_of(node.get("description")),
            media=tuple(Media(media_type=kind, schema=schema) for kind in types),
        )
    fields = [node for node in nodes if node["in"] == "formData"]
    if not fields:
        return None
    required = [node["name"] for node in fields if node.get("required") is True]
    has_files = any(node.get("type") == "file" for node in fields)
    kinds = [kind for kind in (_FORM, _MULTIPART) if kind in consumes] or [_FORM]
    form: JSONObject = {
        "type": "object",
        "properties": {node["name"]: _field(node) for node in fields},
        "required": required,
        "additionalProperties": False,
    }
    encoding: JSONObject = {node["name"]: _encoding(node) for node in fields}
    return Body(
        required=bool(required),
        media=tuple(
            Media(media_type=kind, schema=form, encoding=encoding)
            for kind in ([_MULTIPART] if has_files else kinds)
        ),
    )


def _field(node: JSONObject) -> JSONObject:
    schema = object_of(_schema(node))
    description = text_of(node.get("description"))
    return {**schema, "description": description} if description else schema


def _encoding(node: JSONObject) -> JSONObject:
    if node.get("type") != "array":
        return {}
    style, explode = _SEPARATORS.get(text_of(node.get("collectionFormat")), ("form", False))
    return {"style": style, "explode": explode}


def read_responses(
    references: References, document: JSONObject, operation: JSONObject
) -> tuple[Response, ...]:
    """Return the declared responses; those that cannot be read are left out."""
    produces = _media_types(document, operation, "produces")
    result: list[Response] = []
    for key, entry in object_of(operation.get("responses")).items():
        status = str(key)
        if status.startswith("x-"):
            continue
        try:
            node = references.follow(entry)
        except DocumentError:
            continue
        media: tuple[Media, ...] = ()
        if "schema" in node:
            types = produces or ["application/json"]
            media = tuple(Media(media_type=kind, schema=node["schema"]) for kind in types)
        result.append(
            Response(status=status, description=text_of(node.get("description")), media=media)
        )
    return tuple(result)


def server_urls(document: JSONObject, operation: JSONObject) -> list[str]:
    """Return the addresses that `host`, `basePath` and `schemes` make; without a host they are relative."""
    host = text_of(document.get("host")).strip("/")
    base = text_of(document.get("basePath")) or "/"
    if not base.startswith("/"):
        base = "/" + base
    if not host:
        return [base]
    if "://" in host:
        return [host + base]
    schemes = [
        text_of(s).lower() for s in list_of(operation.get("schemes") or document.get("schemes"))
    ]
    usable = [scheme for scheme in schemes if scheme in {"https", "http"}]
    return [f"{scheme}://{host}{base}" for scheme in sorted(usable or ["https"], reverse=True)]


def security_schemes(document: JSONObject) -> JSONObject:
    """Return `securityDefinitions` as 3.x spells them."""
    result: JSONObject = {}
    for name, node in object_of(document.get("securityDefinitions")).items():
        scheme = object_of(node)
        if scheme.get("type") == "basic":
            scheme = {"type": "http", "scheme": "basic"}
        elif scheme.get("type") == "oauth2":
            flow = {
                "application": "clientCredentials",
                "accessCode": "authorizationCode",
            }.get(text_of(scheme.get("flow")), text_of(scheme.get("flow")))
            scheme = {"type": "oauth2", "flows": {flow: scheme}}
        result[name] = scheme
    return result
