"""The requests that must arrive at a server when operations of a document are called: one table for all libraries.
`test_conformance.py` tests this project with it, and `benchmarks/openapi_conformance.py` tests other libraries.
A case names values by the place they belong to, so that each library can be given them under its own names.
"""

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.openapi.echo import Seen

from operations.openapi.source.parameters import argument_names

STYLES = Path(__file__).parents[3] / "shared" / "param-styles.json"
NOTHING: Any = object()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation, the values it is called with, and what must arrive."""

    id: str
    group: str
    operation: dict[str, Any]
    check: Callable[[Seen, bool], None]
    """Raises AssertionError; the flag asks for the exact spelling rather than the same meaning."""

    path: str = "/things"
    method: str = "get"
    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    """By `(place, name)`."""

    body: Any = NOTHING
    document: dict[str, Any] = field(default_factory=dict)
    """More fields of the document; with `swagger` it is a 2.0 one."""

    credentials: dict[str, Any] = field(default_factory=dict)

    def whole(self, url: str) -> dict[str, Any]:
        """The document."""
        operation = {
            "operationId": "call",
            "responses": {"200": {"description": "ok"}},
            **self.operation,
        }
        paths = {self.path: {self.method: operation}}
        info = {"title": "conformance", "version": "1"}
        if "swagger" in self.document:
            host = url.partition("://")[2]
            return {
                "info": info,
                "host": host,
                "schemes": ["http"],
                "paths": paths,
                **self.document,
            }
        servers = [{"url": url}]
        return {
            "openapi": "3.1.0",
            "info": info,
            "servers": servers,
            "paths": paths,
            **self.document,
        }


def arguments(case: Case) -> dict[str, object]:
    """The case's values under the names this project gives them."""
    reserved = [] if case.body is NOTHING else ["body"]
    names = argument_names([(name, place) for place, name in case.values], reserved)
    given = dict(zip(names, case.values.values(), strict=True))
    return given if case.body is NOTHING else {**given, "body": case.body}


def parameter(place: str, name: str, schema: Any, **more: Any) -> dict[str, Any]:
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, "schema": schema, **required, **more}


# ---- what must arrive


def _same(text: str, expected: str, exact: bool) -> bool:
    return text == expected if exact else unquote(text) == unquote(expected)


def target(path: str, query: str = "") -> Callable[[Seen, bool], None]:
    def check(seen: Seen, exact: bool) -> None:
        assert _same(seen.path, path, exact), seen.target
        # Servers read a plus sign in a query as a space.
        got = seen.query if exact else seen.query.replace("+", "%20")
        assert _same(got, query, exact), seen.target

    return check


def header(name: str, value: str | None, exact_only: bool = False) -> Callable[[Seen, bool], None]:
    def check(seen: Seen, exact: bool) -> None:
        got = seen.header(name)
        if got is None or value is None:
            assert got == value, got
        else:
            assert _same(got, value, exact), got

    return check


def json_body(value: Any, kind: str = "application/json") -> Callable[[Seen, bool], None]:
    def check(seen: Seen, exact: bool) -> None:
        assert seen.json == value
        assert (seen.header("content-type") or "").partition(";")[0] == kind

    return check


def form_body(*pairs: tuple[str, str]) -> Callable[[Seen, bool], None]:
    def check(seen: Seen, exact: bool) -> None:
        assert seen.form == list(pairs), seen.form
        kind = (seen.header("content-type") or "").partition(";")[0]
        assert kind == "application/x-www-form-urlencoded", kind

    return check


def raw_body(content: bytes, kind: str) -> Callable[[Seen, bool], None]:
    def check(seen: Seen, exact: bool) -> None:
        assert seen.body == content, seen.body
        assert (seen.header("content-type") or "").partition(";")[0] == kind

    return check


def part_body(*expected: dict[str, Any]) -> Callable[[Seen, bool], None]:
    def check(seen: Seen, exact: bool) -> None:
        parts = seen.parts
        assert len(parts) == len(expected), parts
        for part, wanted in zip(parts, expected, strict=True):
            for key, value in wanted.items():
                if key == "json":
                    got = json.loads(part["content"])
                elif key.startswith("header "):
                    got = part["headers"].get(key.removeprefix("header "))
                else:
                    got = part[key]
                assert got == value, (key, part)

    return check


def both(*checks: Callable[[Seen, bool], None]) -> Callable[[Seen, bool], None]:
    def check(seen: Seen, exact: bool) -> None:
        for one in checks:
            one(seen, exact)

    return check


# ---- the table


def style_cases() -> Iterator[Case]:
    """Every cell of the style table of the specification, for every location that it applies to."""
    if not STYLES.exists():
        return
    schemas = {
        "undefined": {"type": "string"},
        "string": {"type": "string"},
        "array": {"type": "array", "items": {"type": "string"}},
        "object": {"type": "object", "additionalProperties": {"type": "integer"}},
    }
    for cell in json.loads(STYLES.read_bytes())["cases_3_1_2"]:
        for place in cell["locations"]:
            kind, expected, name = cell["kind"], cell["expected"], cell["name"]
            # A path that would lose a segment, or end in a dot segment, is refused instead: R01.
            if kind == "undefined" and place == "path" and cell["style"] != "matrix":
                continue
            checks = {
                "path": target(f"/x/{expected}/y"),
                "query": target("/things", expected),
                "header": header("color", expected),
                "cookie": header("cookie", expected),
            }
            yield Case(
                id=f"{place}-{cell['style']}-{kind}-{'explode' if cell['explode'] else 'plain'}",
                group="styles",
                path="/x/{color}/y" if place == "path" else "/things",
                operation={
                    "parameters": [
                        parameter(
                            place,
                            name,
                            schemas[kind],
                            style=cell["style"],
                            explode=cell["explode"],
                        )
                    ]
                },
                values={(place, name): cell.get("value", "")},
                check=checks[place],
            )


def collection_cases() -> Iterator[Case]:
    """Swagger 2.0's collection formats."""
    for kind, query in {
        "csv": "tags=a,b",
        "ssv": "tags=a%20b",
        "tsv": "tags=a%09b",
        "pipes": "tags=a%7Cb",
        "multi": "tags=a&tags=b",
    }.items():
        yield Case(
            id=f"swagger-{kind}",
            group="swagger 2.0",
            document={"swagger": "2.0"},
            operation={
                "parameters": [
                    {
                        "name": "tags",
                        "in": "query",
                        "type": "array",
                        "items": {"type": "string"},
                        "collectionFormat": kind,
                    }
                ]
            },
            values={("query", "tags"): ["a", "b"]},
            check=target("/things", query),
        )


def _query(name: str, schema: Any, value: Any, expected: str, **more: Any) -> Case:
    return Case(
        id=f"query-{name}",
        group="parameters",
        operation={"parameters": [parameter("query", name, schema, **more)]},
        values={("query", name): value},
        check=target("/things", expected),
    )


def _body(id_: str, content: dict[str, Any], value: Any, check: Any, **more: Any) -> Case:
    for media in content.values():
        if media.get("schema") is OBJECT and isinstance(value, dict):
            # Some libraries offer only the properties a schema names.
            media["schema"] = {**OBJECT, "properties": {name: {} for name in value}}
    return Case(
        id=id_,
        group="bodies",
        method="post",
        operation={"requestBody": {"required": True, "content": content}},
        body=value,
        check=check,
        **more,
    )


def _secured(id_: str, scheme: dict[str, Any], credential: Any, check: Any) -> Case:
    return Case(
        id=id_,
        group="security",
        operation={},
        document={
            "components": {"securitySchemes": {"key": scheme}},
            "security": [{"key": []}],
        },
        credentials={"key": credential},
        check=check,
    )


OBJECT: dict[str, Any] = {"type": "object"}
STRING = {"type": "string"}
FILE = {"type": "string", "format": "binary"}
PNG = b"\x89PNG\r\n\x1a\n\x00\xff"

CASES: list[Case] = [
    *style_cases(),
    *collection_cases(),
    # parameters
    _query("deep", OBJECT, {"a": {"b": 1, "c": "x y"}}, "deep%5Ba%5D%5Bb%5D=1&deep%5Ba%5D%5Bc%5D=x%20y",
           style="deepObject", explode=True),
    _query("list", OBJECT, {"a": ["x", "y"]}, "list%5Ba%5D%5B%5D=x&list%5Ba%5D%5B%5D=y", style="deepObject"),
    _query("zero", {"type": "integer"}, 0, "zero=0"),
    _query("off", {"type": "boolean"}, False, "off=false"),
    _query("empty", STRING, "", "empty="),
    _query("spaces", STRING, "a b&c=d/é", "spaces=a%20b%26c%3Dd%2F%C3%A9"),
    _query("commas", {"type": "array", "items": STRING}, ["a,b", "c"], "commas=a%2Cb,c", explode=False),
    _query("reserved", STRING, "a/b:c?d", "reserved=a/b:c?d", allowReserved=True),
    _query("weird[name]", STRING, "x", "weird%5Bname%5D=x"),
    Case(
        id="query-content-json",
        group="parameters",
        operation={
            "parameters": [
                {"name": "filter", "in": "query", "content": {"application/json": {"schema": OBJECT}}}
            ]
        },
        values={("query", "filter"): {"a": [1]}},
        check=target("/things", "filter=%7B%22a%22%3A%5B1%5D%7D"),
    ),
    Case(
        id="optional-is-left-out",
        group="parameters",
        operation={"parameters": [parameter("query", "a", STRING), parameter("query", "b", STRING)]},
        values={("query", "b"): "x"},
        check=target("/things", "b=x"),
    ),
    Case(
        id="same-name-in-path-and-query",
        group="parameters",
        path="/things/{id}",
        operation={"parameters": [parameter("path", "id", STRING), parameter("query", "id", STRING)]},
        values={("path", "id"): "p", ("query", "id"): "q"},
        check=target("/things/p", "id=q"),
    ),
    Case(
        id="path-slash-is-data",
        group="parameters",
        path="/things/{id}/x",
        operation={"parameters": [parameter("path", "id", STRING)]},
        values={("path", "id"): "a/b?c#d"},
        check=lambda seen, _: _assert_target(seen, "/things/a%2Fb%3Fc%23d/x"),
    ),
    Case(
        id="path-level-parameter-overridden",
        group="parameters",
        path="/things/{id}",
        operation={"parameters": [parameter("path", "id", {"type": "integer"})]},
        values={("path", "id"): 7},
        check=target("/things/7"),
    ),
    Case(
        id="parameter-by-reference",
        group="parameters",
        operation={"parameters": [{"$ref": "#/components/parameters/Page"}]},
        document={"components": {"parameters": {"Page": parameter("query", "page", {"type": "integer"})}}},
        values={("query", "page"): 2},
        check=target("/things", "page=2"),
    ),
    # bodies
    _body("json", {"application/json": {"schema": OBJECT}}, {"a": None, "b": [0, False, ""]},
          json_body({"a": None, "b": [0, False, ""]})),
    _body("json-list", {"application/json": {"schema": {"type": "array"}}}, [1, {"a": 2}], json_body([1, {"a": 2}])),
    _body("json-string", {"application/json": {"schema": STRING}}, "x", json_body("x")),
    _body("json-merge-patch", {"application/merge-patch+json": {"schema": OBJECT}}, {"a": None},
          json_body({"a": None}, "application/merge-patch+json")),
    _body("form", {"application/x-www-form-urlencoded": {"schema": OBJECT}},
          {"a": "x y", "b": [1, 2], "c": True, "d": "é&="},
          form_body(("a", "x y"), ("b", "1"), ("b", "2"), ("c", "true"), ("d", "é&="))),
    _body("form-deep-object",
          {"application/x-www-form-urlencoded": {
              "schema": OBJECT, "encoding": {"meta": {"style": "deepObject", "explode": True}}}},
          {"meta": {"k": "v", "n": {"m": 1}}}, form_body(("meta[k]", "v"), ("meta[n][m]", "1"))),
    _body("form-csv",
          {"application/x-www-form-urlencoded": {"schema": OBJECT, "encoding": {"ids": {"explode": False}}}},
          {"ids": [1, 2]}, form_body(("ids", "1,2"))),
    _body("form-object-as-json", {"application/x-www-form-urlencoded": {"schema": OBJECT}},
          {"o": {"a": 1}}, form_body(("o", '{"a":1}'))),
    _body("multipart",
          {"multipart/form-data": {"schema": {"type": "object", "properties": {
              "note": STRING, "count": {"type": "integer"}, "meta": OBJECT, "file": FILE}}}},
          {"note": "hi", "count": 2, "meta": {"a": 1},
           "file": {"filename": 'a".png', "contentType": "image/png", "content": base64.b64encode(PNG).decode()}},
          part_body({"name": "note", "content": b"hi", "filename": None}, {"name": "count", "content": b"2"},
                    {"name": "meta", "json": {"a": 1}, "type": "application/json"},
                    {"name": "file", "content": PNG, "filename": "a%22.png", "type": "image/png"})),
    _body("multipart-files",
          {"multipart/form-data": {"schema": {"type": "object", "properties": {
              "files": {"type": "array", "items": FILE}}}}},
          {"files": [base64.b64encode(PNG).decode(), base64.b64encode(b"two").decode()]},
          part_body({"name": "files", "content": PNG}, {"name": "files", "content": b"two"})),
    _body("multipart-encoding",
          {"multipart/form-data": {
              "schema": {"type": "object", "properties": {"avatar": FILE, "data": STRING}},
              "encoding": {"avatar": {"contentType": "image/png, image/jpeg"}, "data": {"contentType": "text/csv"}}}},
          {"avatar": base64.b64encode(PNG).decode(), "data": "a,b"},
          part_body({"name": "avatar", "content": PNG, "type": "image/png"},
                    {"name": "data", "content": b"a,b", "type": "text/csv"})),
    _body("multipart-style",
          {"multipart/form-data": {
              "schema": {"type": "object", "properties": {"tags": {"type": "array", "items": STRING}, "meta": OBJECT}},
              "encoding": {"tags": {"explode": False}, "meta": {"style": "deepObject", "explode": True}}}},
          {"tags": ["a", "b"], "meta": {"k": {"n": 1}}},
          part_body({"name": "tags", "content": b"a,b"}, {"name": "meta[k][n]", "content": b"1"})),
    _body("multipart-fixed-header",
          {"multipart/form-data": {
              "schema": {"type": "object", "properties": {"note": STRING}},
              "encoding": {"note": {"headers": {"X-Kind": {"required": True, "schema": {"const": "memo"}}}}}}},
          {"note": "hi"}, part_body({"name": "note", "content": b"hi", "header x-kind": "memo"})),
    _body("text", {"text/plain": {"schema": STRING}}, "héllo", raw_body("héllo".encode(), "text/plain")),
    _body("xml", {"application/xml": {"schema": OBJECT}}, "<a>1</a>", raw_body(b"<a>1</a>", "application/xml")),
    _body("bytes", {"application/octet-stream": {"schema": FILE}}, base64.b64encode(PNG).decode(),
          raw_body(PNG, "application/octet-stream")),
    _body("image", {"image/png": {}}, base64.b64encode(PNG).decode(), raw_body(PNG, "image/png")),
    _body("json-preferred", {"application/xml": {"schema": OBJECT}, "application/json": {"schema": OBJECT}},
          {"a": 1}, json_body({"a": 1})),
    _body("body-by-reference", {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}, {"a": 1},
          json_body({"a": 1}), document={"components": {"schemas": {"Thing": OBJECT}}}),
    # security
    _secured("api-key-header", {"type": "apiKey", "in": "header", "name": "X-Key"}, "k3y", header("x-key", "k3y")),
    _secured("api-key-query", {"type": "apiKey", "in": "query", "name": "key"}, "k3y", target("/things", "key=k3y")),
    _secured("api-key-cookie", {"type": "apiKey", "in": "cookie", "name": "sid"}, "k3y", header("cookie", "sid=k3y")),
    _secured("basic", {"type": "http", "scheme": "basic"}, ("user", "pass"),
             header("authorization", "Basic " + base64.b64encode(b"user:pass").decode())),
    _secured("bearer", {"type": "http", "scheme": "bearer"}, "t0ken", header("authorization", "Bearer t0ken")),
    # methods
    *(
        Case(
            id=f"method-{method}",
            group="methods",
            method=method,
            operation={},
            check=lambda seen, _, method=method: _assert_method(seen, method.upper()),  # type: ignore[misc]
        )
        for method in ("get", "put", "post", "patch", "delete", "head", "options", "trace", "query")
    ),
    # Swagger 2.0
    Case(
        id="swagger-base-path",
        group="swagger 2.0",
        document={"swagger": "2.0", "basePath": "/v2"},
        operation={"parameters": [{"name": "q", "in": "query", "type": "integer"}]},
        values={("query", "q"): 1},
        check=target("/v2/things", "q=1"),
    ),
    Case(
        id="swagger-body",
        group="swagger 2.0",
        method="post",
        document={"swagger": "2.0", "consumes": ["application/json"]},
        operation={"parameters": [{"name": "thing", "in": "body", "required": True, "schema": OBJECT}]},
        body={"a": 1},
        check=json_body({"a": 1}),
    ),
    Case(
        id="swagger-form",
        group="swagger 2.0",
        method="post",
        document={"swagger": "2.0"},
        operation={
            "consumes": ["application/x-www-form-urlencoded"],
            "parameters": [
                {"name": "a", "in": "formData", "type": "string"},
                {"name": "b", "in": "formData", "type": "array", "items": STRING, "collectionFormat": "multi"},
            ],
        },
        body={"a": "x", "b": ["1", "2"]},
        check=form_body(("a", "x"), ("b", "1"), ("b", "2")),
    ),
    Case(
        id="swagger-file",
        group="swagger 2.0",
        method="post",
        document={"swagger": "2.0"},
        operation={
            "consumes": ["multipart/form-data"],
            "parameters": [
                {"name": "file", "in": "formData", "type": "file"},
                {"name": "note", "in": "formData", "type": "string"},
            ],
        },
        body={"file": base64.b64encode(PNG).decode(), "note": "n"},
        check=part_body({"name": "file", "content": PNG}, {"name": "note", "content": b"n"}),
    ),
    Case(
        id="swagger-file-with-lists",
        group="swagger 2.0",
        method="post",
        document={"swagger": "2.0"},
        operation={
            "consumes": ["multipart/form-data"],
            "parameters": [
                {"name": "file", "in": "formData", "type": "file"},
                {"name": "ids", "in": "formData", "type": "array", "items": {"type": "integer"}},
                {"name": "tags", "in": "formData", "type": "array", "items": STRING, "collectionFormat": "multi"},
            ],
        },
        body={"file": base64.b64encode(PNG).decode(), "ids": [1, 2], "tags": ["a", "b"]},
        check=part_body({"name": "file", "content": PNG}, {"name": "ids", "content": b"1,2"},
                        {"name": "tags", "content": b"a"}, {"name": "tags", "content": b"b"}),
    ),
]  # fmt: skip


def _assert_target(seen: Seen, expected: str) -> None:
    assert seen.target == expected, seen.target


def _assert_method(seen: Seen, method: str) -> None:
    assert seen.method == method
