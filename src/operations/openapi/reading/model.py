"""A common model of an operation for all versions of OpenAPI, and the naming of operations.

`OpenAPI3Reader` and `Swagger2Reader` create the model; all other modules use only `Model`. Its values contain only JSON
and each other, so they cannot form cycles, and the garbage collector can skip them.

Rule 1: a name consists of `[A-Za-z0-9_.-]`.
Rule 2: names do not depend on the order of paths or methods.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import msgspec

from operations.base.errors import DocumentError
from operations.base.json.values import is_object, list_of, object_of, text_of
from operations.base.types import JSONObject
from operations.io.http.client import is_header_value
from operations.openapi.reading import media
from operations.openapi.reading.references import References

Place = Literal["path", "query", "header", "cookie"]

METHODS = ("get", "put", "post", "patch", "delete", "head", "options", "trace", "query")
"""The HTTP methods of operations, as spelled in documents."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A parameter in the path, the query, a header or a cookie."""

    name: str
    place: Place
    required: bool = False
    description: str = ""
    deprecated: bool = False

    schema: Any = True
    """The unconverted schema."""

    style: str = "simple"
    explode: bool = False
    allow_reserved: bool = False

    media_type: str | None = None
    """Set if the parameter has `content`: it is serialised as this media type, and `style` is ignored."""

    encoding: JSONObject = {}
    """The encoding of each property, if it is a form."""

    def described(self, schema: JSONObject, argument: str | None = None) -> JSONObject:
        """Return a schema with this parameter's description, for an argument that may have another name."""
        notes: JSONObject = {}
        if self.description:
            notes["description"] = self.description
        if self.deprecated:
            notes["deprecated"] = True
        if argument not in (None, self.name):
            text = notes.get("description") or schema.get("description") or ""
            notes["description"] = (
                f"{text} Sent as the {self.place} parameter {self.name!r}.".strip()
            )
        return {**schema, **notes} if notes else schema


class Media(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One representation of a body."""

    media_type: str
    schema: Any = True

    item_schema: Any = None
    """OpenAPI 3.2: the schema of one item of a stream, a list of parts or a sequence."""

    encoding: JSONObject = {}
    """The encoding of each property in a form."""

    prefix_encoding: tuple[Any, ...] = ()
    """3.2: the encodings of the first parts of a list."""

    item_encoding: JSONObject = {}
    """3.2: the encoding of the other parts."""

    part_headers: dict[str, tuple[Parameter, ...]] = {}
    """The headers of each part of a multipart body, by property."""


class Body(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The body of a request, in every declared representation."""

    required: bool = False
    description: str = ""
    media: tuple[Media, ...] = ()


class Response(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One declared response."""

    status: str
    """Three digits, `4XX` or `default`."""

    media: tuple[Media, ...] = ()

    @property
    def is_file(self) -> bool:
        """Whether this is a successful response that may be neither JSON nor text."""
        kinds = [offered.media_type for offered in self.media]
        return (self.status[:1] == "2" or self.status == "default") and not all(
            media.is_json(kind) or media.is_text(kind) or media.is_sequence(kind) for kind in kinds
        )


class Model(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The complete model of one operation."""

    parameters: tuple[Parameter, ...] = ()
    body: Body | None = None
    responses: tuple[Response, ...] = ()


def _rank(offered: Media) -> int:
    kind = offered.media_type
    if media.is_json(kind):
        if media.essence(kind) == "application/json" and ";" not in kind:
            return 0
        if media.essence(kind) == "application/merge-patch+json":
            return 1
        return 3 if media.is_json_patch(kind) else 2
    for rank, test in (
        (4, media.is_multipart),
        (5, media.is_form),
        (7, media.is_text),
        (8, media.is_range),
    ):
        if test(kind):
            return rank
    return 6


def ranked(offered: Iterable[Media]) -> list[Media]:
    """Return the representations in order of preference: JSON first, then forms, then the rest."""
    return sorted(offered, key=_rank)


def best(offered: Iterable[Media]) -> Media | None:
    """Return the preferred representation; the first of equals."""
    return min(offered, key=_rank, default=None)


_STYLES: dict[str, frozenset[str]] = {
    "path": frozenset({"simple", "label", "matrix"}),
    "query": frozenset({"form", "spaceDelimited", "pipeDelimited", "deepObject"}),
    "header": frozenset({"simple"}),
    "cookie": frozenset({"form", "cookie"}),
}
_UNNAMED = ("body", "querystring")
"""The places of parameters whose names are not sent."""

_ANNOTATIONS = {"title", "description", "example", "examples", "deprecated"}
_DEFAULT_STYLE = {"path": "simple", "query": "form", "header": "simple", "cookie": "form"}


class OpenAPI3Reader:
    """Reads operations of one document into the model: OpenAPI 3.0, 3.1 and 3.2."""

    # Tuples, because a malformed document may have a value here that is not hashable.
    _places: tuple[str, ...] = ("path", "query", "header", "cookie", "querystring")

    def __init__(self, references: References, document: JSONObject) -> None:
        self._references = references
        self._document = document

    def read_model(self, item: JSONObject, operation: JSONObject) -> Model:
        """Return the model of `operation` of the path `item`.

        Raises:
            DocumentError: If a part of it cannot be understood.
        """
        merged: dict[tuple[str, str], JSONObject] = {}
        # Parameters of the operation replace those of the path item.
        for node in (*list_of(item.get("parameters")), *list_of(operation.get("parameters"))):
            found = self._references.follow(node)
            if "$ref" in node and type(node.get("description")) is str:
                # From 3.1 on, the description beside a reference takes precedence.
                found = {**found, "description": node["description"]}
            problem = self.check_parameter(found)
            if problem:
                raise DocumentError(problem)
            # There is one body or whole query, with any name, and header names are case-insensitive.
            name = "" if found["in"] in _UNNAMED else found["name"]
            merged[found["in"], name.lower() if found["in"] == "header" else name] = found
        return self._model(list(merged.values()), operation)

    def read_responses(self, operation: JSONObject) -> tuple[Response, ...]:
        """Return the declared responses; skip invalid ones."""
        result: list[Response] = []
        for key, entry in object_of(operation.get("responses")).items():
            status = str(key)
            if status.startswith("x-"):
                continue
            node = self._references.find(entry)
            if node is None:
                continue
            result.append(Response(status=status, media=self._offered(node, operation)))
        return tuple(result)

    def _model(self, parameters: list[JSONObject], operation: JSONObject) -> Model:
        node, body = operation.get("requestBody"), None
        if node is not None:
            found = self._references.follow(node)
            body = Body(
                required=found.get("required") is True,
                description=text_of(found.get("description")),
                media=self._media(found),
            )
        return Model(
            parameters=tuple(map(self._parameter, parameters)),
            body=body,
            responses=self.read_responses(operation),
        )

    def check_parameter(self, node: JSONObject) -> str | None:
        """Return the problem of a parameter; None if it has none."""
        name, place = node.get("name"), node.get("in")
        is_known = place in self._places
        if type(name) is not str and not (is_known and place in _UNNAMED):
            return "a parameter has no name"
        return None if is_known else f"the parameter {name!r} is in no known place: {place!r}"

    def _parameter(self, node: JSONObject) -> Parameter:
        whole_query = node["in"] == "querystring"
        place = cast("Place", "query" if whole_query else node["in"])
        style, explode = self._style(node, place)
        media_type: str | None = None
        schema, encoding = node.get("schema", True), JSONObject()
        for media_type, entry in self._references.object_at(node.get("content")).items():  # noqa: B007 - the first one is kept
            content = self._references.object_at(entry)
            schema = content.get("schema", True)
            encoding = self._references.object_at(content.get("encoding"))
            break
        return Parameter(
            name=node["name"] if type(node.get("name")) is str else node["in"],
            place=place,
            required=node.get("required") is True or place == "path",
            description=text_of(node.get("description")),
            deprecated=node.get("deprecated") is True,
            schema=schema,
            style="querystring" if whole_query else style,
            explode=explode,
            # Before 3.2, it applies only to a query.
            allow_reserved=node.get("allowReserved") is True
            and (place == "query" or text_of(self._document.get("openapi")) >= "3.2"),
            media_type=media_type,
            encoding=encoding,
        )

    def _style(self, node: JSONObject, place: Place) -> tuple[str, bool]:
        """Return the style of a parameter, and whether it explodes."""
        style, explode = text_of(node.get("style")), node.get("explode")
        if style not in _STYLES[place]:
            style = _DEFAULT_STYLE[place]
        is_default = style in {"form", "cookie", "deepObject"}
        return style, explode if isinstance(explode, bool) else is_default

    def _offered(self, response: JSONObject, operation: JSONObject) -> tuple[Media, ...]:
        return self._media(response)

    def _media(self, node: JSONObject) -> tuple[Media, ...]:
        result: list[Media] = []
        for key, entry in self._references.object_at(node.get("content")).items():
            media_type = str(key)
            if not is_header_value(media_type):
                continue
            # 3.2 lets a media type be a reference, and streams describe one item.
            content = self._references.find(entry) if isinstance(entry, dict) else {}
            if content is None:
                continue
            encoding = self._references.object_at(content.get("encoding"))
            kind = media.intended(media_type)
            schema = content.get("schema", True)
            if encoding and media.is_multipart(kind):
                schema = self._with_files(schema, encoding)
            result.append(
                Media(
                    media_type=kind,
                    schema=schema,
                    item_schema=content.get("itemSchema"),
                    encoding=encoding,
                    prefix_encoding=tuple(list_of(content.get("prefixEncoding"))),
                    item_encoding=object_of(content.get("itemEncoding")),
                    part_headers={
                        name: headers
                        for name, node in encoding.items()
                        if (headers := tuple(self._part_headers(self._references.object_at(node))))
                    },
                )
            )
        return tuple(result)

    def _with_files(self, schema: Any, encoding: JSONObject) -> Any:
        """Return the schema of a form, in which parts that only the encoding describes are files."""
        form = self._references.object_at(schema)
        parts = self._references.object_at(form.get("properties"))
        files: JSONObject = {}
        for name, node in parts.items():
            kinds = text_of(self._references.object_at(encoding.get(name)).get("contentType"))
            found = self._references.value_at(node)
            is_declared = found is True or is_object(found)
            if not is_declared or not any(map(media.is_binary, kinds.split(","))):
                continue
            part = object_of(found)
            if part.keys() <= _ANNOTATIONS:
                files[name] = {**part, "format": "binary"}
            elif part.get("type") == "array":
                item = self._references.object_at(part.get("items"))
                if item.keys() <= _ANNOTATIONS:
                    files[name] = {**part, "items": {**item, "format": "binary"}}
        return {**form, "properties": {**parts, **files}} if files else schema

    def _part_headers(self, encoding: JSONObject) -> Iterator[Parameter]:
        """Yield the headers of one part; skip invalid ones."""
        for name, node in self._references.object_at(encoding.get("headers")).items():
            # Content-Type has its own field, and Content-Disposition contains the name of the part.
            found = self._references.find(node)
            if found is not None and name.lower() not in {"content-type", "content-disposition"}:
                yield self._parameter({**found, "name": name, "in": "header"})

    def security_schemes(self) -> JSONObject:
        """Return the security schemes by name."""
        references = self._references
        components = references.object_at(self._document.get("components"))
        schemes = references.object_at(components.get("securitySchemes"))
        found = {name: references.find(node) for name, node in schemes.items()}
        return {name: scheme for name, scheme in found.items() if scheme is not None}

    def server_url(
        self, item: JSONObject, operation: JSONObject, variables: Mapping[str, str]
    ) -> str:
        """Return the first server address of an operation; variables without a value stay in place."""
        references = self._references
        for holder in (operation, item, self._document):
            for server in map(references.object_at, references.list_at(holder.get("servers"))):
                defaults = {
                    name: str(variable["default"])
                    for name, variable in references.object_at(server.get("variables")).items()
                    if is_object(variable) and "default" in variable
                }
                url = server.get("url")
                if type(url) is str:
                    for name, chosen in {**defaults, **variables}.items():
                        url = url.replace(f"{{{name}}}", str(chosen))
                    return url or "/"
        return "/"


_FORM = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"

_SEPARATORS = {
    "csv": ("form", False),
    "ssv": ("spaceDelimited", False),
    "tsv": ("tabDelimited", False),
    "pipes": ("pipeDelimited", False),
    "multi": ("form", True),
}
"""The style of each `collectionFormat`, and whether it explodes."""

_NOT_SCHEMA = frozenset(
    {"name", "in", "required", "description", "collectionFormat", "allowEmptyValue"}
)


class Swagger2Reader(OpenAPI3Reader):
    """Reads Swagger 2.0, as far as it differs."""

    # 2.0 has no cookies, but generators such as aiohttp-apispec write them.
    _places = ("path", "query", "header", "cookie", "body", "formData")

    def _model(self, parameters: list[JSONObject], operation: JSONObject) -> Model:
        others = [each for each in parameters if each["in"] not in {"body", "formData"}]
        return Model(
            parameters=tuple(
                self._parameter({**node, "schema": _schema(node), "content": None})
                for node in others
            ),
            body=_swagger_body(parameters, self._media_types(operation, "consumes")),
            responses=self.read_responses(operation),
        )

    def _offered(self, response: JSONObject, operation: JSONObject) -> tuple[Media, ...]:
        if "schema" not in response:
            return ()
        types = self._media_types(operation, "produces") or ["application/json"]
        return tuple(Media(media_type=kind, schema=response["schema"]) for kind in types)

    def _style(self, node: JSONObject, place: Place) -> tuple[str, bool]:
        style, explode = _separator(node)
        if place == "cookie":
            return "form", False
        if place == "query":
            return style, explode
        return "simple" if style == "form" else style, False

    def server_url(
        self, item: JSONObject, operation: JSONObject, variables: Mapping[str, str]
    ) -> str:
        """Return the address from `host`, `basePath` and `schemes`; without a host it is relative."""
        host = text_of(self._document.get("host")).strip("/")
        base = text_of(self._document.get("basePath")) or "/"
        if not base.startswith("/"):
            base = "/" + base
        if not host or "://" in host:
            return host + base
        declared = list_of(operation.get("schemes") or self._document.get("schemes"))
        schemes = [text_of(scheme).lower() for scheme in declared]
        is_plain = "http" in schemes and "https" not in schemes
        return f"{'http' if is_plain else 'https'}://{host}{base}"

    def security_schemes(self) -> JSONObject:
        """Return `securityDefinitions` in the form of 3.x."""
        result: JSONObject = {}
        for name, node in object_of(self._document.get("securityDefinitions")).items():
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

    def _media_types(self, operation: JSONObject, key: str) -> list[str]:
        own = operation.get(key)
        return [
            media.intended(text)
            for item in list_of(own if own is not None else self._document.get(key))
            if (text := text_of(item)) and is_header_value(text)
        ]


def _schema(node: JSONObject) -> Any:
    """Return the schema of a Swagger 2.0 parameter, whose schema keywords are in the parameter itself."""
    if isinstance(node.get("schema"), dict):
        return node["schema"]
    return {key: value for key, value in node.items() if key not in _NOT_SCHEMA}


def _swagger_body(nodes: list[JSONObject], consumes: list[str]) -> Body | None:
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
    style, explode = _separator(node)
    return {"style": style, "explode": explode}


def _separator(node: JSONObject) -> tuple[str, bool]:
    """Return the style of a Swagger 2.0 parameter, and whether it explodes."""
    return _SEPARATORS.get(text_of(node.get("collectionFormat")), ("form", False))


MAX_NAME = 240
"""The longest name of an operation; longer names end in a digest."""

_NOT_WORD = re.compile(r"\W")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def operation_names(operations: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a unique name for each `(wanted name, method, path)`, in order.

    This is the wanted name (an `operationId`) with unsafe characters replaced, if it is unique. Otherwise the name is
    derived from method and path; if that is not unique either, a digest is added.
    """
    entries = list(operations)
    wanted = [safe_identifier(name) or path_name(method, path) for name, method, path in entries]
    if len(set(wanted)) == len(entries):
        return wanted
    counts = Counter(wanted)
    taken = {name for name, count in counts.items() if count == 1}
    again = {
        index: path_name(method, path)
        for index, (_, method, path) in enumerate(entries)
        if counts[wanted[index]] > 1
    }
    counts = Counter(again.values())
    for index, name in again.items():
        if counts[name] > 1 or name in taken:
            _, method, path = entries[index]
            name = _with_digest(name, f"{method} {path}")  # noqa: PLW2901 - the name is what is refined
        wanted[index] = name
    return wanted


def short_names(operations: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return the wanted name of each `(wanted name, method, path)`, without the path and method at its end.

    FastAPI adds them by default. A name that another operation would also have stays as it is.
    """
    entries = list(operations)
    short = [_without_path(*entry) for entry in entries]
    counts = Counter(short)
    return [
        name if counts[name] == 1 else wanted
        for name, (wanted, _, _) in zip(short, entries, strict=True)
    ]


def _without_path(name: str, method: str, path: str) -> str:
    """Return `list_users` for `list_users_v1_users_get`, the name of `GET /api/v1/users`."""
    start = name.removesuffix(f"_{method.lower()}")
    if start == name:
        return name
    # Behind a proxy, the document may have a prefix that FastAPI does not know.
    for match in re.finditer("/", path):
        ending = _NOT_WORD.sub("_", path[match.start() :])
        if start.endswith(ending) and len(start) > len(ending):
            return start.removesuffix(ending)
    return name


def safe_identifier(text: str) -> str:
    """Return `text` with every run of unsafe characters replaced by one underscore; empty if nothing is left."""
    if _SAFE.fullmatch(text) and len(text) <= MAX_NAME:
        return text
    name = _UNSAFE.sub("_", text).lstrip(".-").strip("_")
    return name if len(name) <= MAX_NAME else _with_digest(name, text)


def path_name(method: str, path: str) -> str:
    """Return `get_users_id_posts` for `GET /users/{id}/posts`."""
    return safe_identifier(f"{method.lower()}_{path.strip('/')}".rstrip("_"))


def _with_digest(name: str, text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{name[: MAX_NAME - 11]}_{digest}"
