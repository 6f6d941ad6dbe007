"""Reads one operation of an OpenAPI 3.0, 3.1 or 3.2 document."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from operations._json import is_object, list_of, object_of, text_of
from operations.errors import DocumentError
from operations.openapi.reading.media import intended
from operations.openapi.reading.model import Body, Media, Model, Parameter, Place, Response
from operations.openapi.reading.references import References
from operations.openapi.transport import is_header_value
from operations.types import JSONObject

PLACES = frozenset({"path", "query", "header", "cookie"})
STYLES: dict[str, frozenset[str]] = {
    "path": frozenset({"simple", "label", "matrix"}),
    "query": frozenset({"form", "spaceDelimited", "pipeDelimited", "deepObject"}),
    "header": frozenset({"simple"}),
    "cookie": frozenset({"form", "cookie"}),
}
DEFAULT_STYLE = {"path": "simple", "query": "form", "header": "simple", "cookie": "form"}


def read_model(references: References, item: JSONObject, operation: JSONObject) -> Model:
    """Return the model of `operation` of the path `item`.

    Raises:
        DocumentError: If a part of it cannot be understood.
    """
    merged: dict[tuple[str, str], Parameter] = {}
    for node in (*list_of(item.get("parameters")), *list_of(operation.get("parameters"))):
        found = references.follow(node)
        if "$ref" in node and type(node.get("description")) is str:
            # From 3.1 on, the description beside a reference takes precedence.
            found = {**found, "description": node["description"]}
        parameter = _parameter(references, found)
        # Header names are the same in any case, and the operation's own parameters come last.
        name = parameter.name.lower() if parameter.place == "header" else parameter.name
        merged[parameter.place, name] = parameter
    body = operation.get("requestBody")
    return Model(
        parameters=tuple(merged.values()),
        body=_body(references, references.follow(body)) if body is not None else None,
        responses=read_responses(references, operation),
    )


def check_parameter(node: JSONObject) -> str | None:
    """Return the problem of a parameter; None if it has none."""
    if type(node.get("name")) is not str:
        return "a parameter has no name"
    # 3.2 adds `querystring`, which stands for the whole query.
    if node.get("in") not in PLACES and node.get("in") != "querystring":
        return f"the parameter {node['name']!r} is in no known place: {node.get('in')!r}"
    return None


def _parameter(references: References, node: JSONObject) -> Parameter:
    problem = check_parameter(node)
    if problem:
        raise DocumentError(problem)
    whole_query = node["in"] == "querystring"
    place = cast("Place", "query" if whole_query else node["in"])
    style = text_of(node.get("style"))
    if style not in STYLES[place]:
        style = DEFAULT_STYLE[place]
    explode = node.get("explode")
    media_type: str | None = None
    schema = node.get("schema", True)
    for media_type, media in references.object_at(node.get("content")).items():  # noqa: B007 - the first one is kept
        schema = references.object_at(media).get("schema", True)
        break
    return Parameter(
        name=node["name"],
        place=place,
        required=node.get("required") is True or place == "path",
        description=text_of(node.get("description")),
        deprecated=node.get("deprecated") is True,
        schema=schema,
        style="querystring" if whole_query else style,
        explode=explode if isinstance(explode, bool) else style in {"form", "cookie", "deepObject"},
        allow_reserved=node.get("allowReserved") is True,
        media_type=media_type,
    )


def _body(references: References, node: JSONObject) -> Body:
    return Body(
        required=node.get("required") is True,
        description=text_of(node.get("description")),
        media=_media(references, node),
    )


def _media(references: References, node: JSONObject) -> tuple[Media, ...]:
    result: list[Media] = []
    for media_type, entry in references.object_at(node.get("content")).items():
        if not is_header_value(media_type):
            continue
        # 3.2 lets a media type be a reference, and streams describe one item.
        try:
            media = references.follow(entry) if isinstance(entry, dict) else {}
        except DocumentError:
            continue
        encoding = references.object_at(media.get("encoding"))
        result.append(
            Media(
                media_type=intended(media_type),
                schema=media.get("schema", True),
                item_schema=media.get("itemSchema"),
                encoding=encoding,
                prefix_encoding=tuple(list_of(media.get("prefixEncoding"))),
                item_encoding=object_of(media.get("itemEncoding")),
                part_headers={
                    name: headers
                    for name, node in encoding.items()
                    if (headers := tuple(_part_headers(references, references.object_at(node))))
                },
            )
        )
    return tuple(result)


def _part_headers(references: References, encoding: JSONObject) -> Iterator[Parameter]:
    """Yield the headers of one part; one that cannot be read costs only itself."""
    for name, node in references.object_at(encoding.get("headers")).items():
        # The type has a field of its own, and the disposition holds the part's name.
        if name.lower() in {"content-type", "content-disposition"}:
            continue
        try:
            yield _parameter(references, {**references.follow(node), "name": name, "in": "header"})
        except DocumentError:
            continue


def read_responses(references: References, operation: JSONObject) -> tuple[Response, ...]:
    """Return the declared responses; those that cannot be read are left out."""
    result: list[Response] = []
    for key, entry in object_of(operation.get("responses")).items():
        status = str(key)
        if status.startswith("x-"):
            continue
        try:
            result.append(_response(references, status, references.follow(entry)))
        except DocumentError:
            continue
    return tuple(result)


def _response(references: References, status: str, node: JSONObject) -> Response:
    return Response(
        status=status,
        description=text_of(node.get("description")),
        media=_media(references, node),
        links=references.object_at(node.get("links")),
    )


def server_urls(references: References, nodes: Any, variables: Mapping[str, str]) -> list[str]:
    """Return the addresses of a list of servers; variables without a value are left in place."""
    urls: list[str] = []
    for node in references.list_at(nodes):
        server = references.object_at(node)
        defaults = {
            name: str(variable["default"])
            for name, variable in references.object_at(server.get("variables")).items()
            if is_object(variable) and "default" in variable
        }
        url = text_of(server.get("url"))
        for name, chosen in {**defaults, **variables}.items():
            url = url.replace("{" + name + "}", str(chosen))
        if url:
            urls.append(url)
    return urls
