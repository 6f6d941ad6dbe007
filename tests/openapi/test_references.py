"""References in any part of a document, in one file or thousands, and unresolved references."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.limits import processor_limit, scaled
from tests.openapi.serving import document, serving

from operations import OperationRegistry
from operations.base.errors import DocumentError
from operations.openapi import (
    HTTPServiceConfig,
    OpenAPIService,
    from_openapi,
    from_openapi_file,
    from_openapi_url,
)

CONFIG = HTTPServiceConfig(namespace="api")

SPLIT: dict[str, str] = {
    "openapi.yaml": """
        openapi: 3.0.3
        info: {title: Shop, version: 1.0.0, description: {$ref: texts.yaml#/intro}}
        servers: {$ref: servers.yaml}
        paths: {$ref: paths/all.yaml}
        components: {$ref: components.yaml}
    """,
    "texts.yaml": "{intro: A shop, list: List the items}",
    "servers.yaml": "[{$ref: 'server.yaml'}]",
    "server.yaml": "{url: 'SERVER'}",
    "paths/all.yaml": """
        /items/{id}: {$ref: items.yaml}
        /orders:
          post: {$ref: orders.yaml#/create}
    """,
    "paths/items.yaml": """
        parameters: {$ref: '../parameters.yaml#/shared'}
        get:
          operationId: getItem
          description: {$ref: ../texts.yaml#/list}
          parameters:
            - {$ref: '../parameters.yaml#/paging'}
            - {name: own, in: query, schema: {type: string}}
          responses: {$ref: '../responses.yaml#/item'}
    """,
    "paths/orders.yaml": """
        create:
          operationId: createOrder
          requestBody:
            content: {$ref: '../content.yaml#/order'}
          responses: {$ref: '../responses.yaml#/item'}
    """,
    "parameters.yaml": """
        shared: [{name: id, in: path, required: true, schema: {type: integer}}]
        paging:
          - {name: page, in: query, schema: {type: integer}}
          - {$ref: '#/limit'}
        limit: {name: limit, in: query, schema: {type: integer}}
    """,
    "responses.yaml": """
        item:
          '200': {description: ok, content: {$ref: 'content.yaml#/item'}}
          '404': {$ref: '#/missing'}
        missing: {description: Not there}
    """,
    "content.yaml": """
        item: {application/json: {schema: {$ref: '../shop/openapi.yaml#/components/schemas/Item'}}}
        order: {application/json: {schema: {$ref: 'schemas/order.yaml'}}}
    """,
    "components.yaml": "{schemas: {$ref: schemas/index.yaml}}",
    "schemas/index.yaml": "{Item: {$ref: item.yaml}}",
    "schemas/item.yaml": """
        type: object
        properties: {$ref: 'item-properties.yaml'}
        required: {$ref: 'item-required.yaml'}
    """,
    "schemas/item-properties.yaml": """
        id: {type: integer}
        name: {type: string}
        parent: {$ref: '../openapi.yaml#/components/schemas/Item'}
    """,
    "schemas/item-required.yaml": "[id]",
    "schemas/order.yaml": """
        type: object
        properties: {item: {$ref: '../components.yaml#/schemas/Item'}, count: {type: integer}}
        required: [item]
    """,
}


def written(folder: Path, server: str = "http://127.0.0.1:1") -> Path:
    """Write the split document; returns its path."""
    for name, text in SPLIT.items():
        path = folder / "shop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("SERVER", server))
    return folder / "shop" / "openapi.yaml"


def specs_of(service: OpenAPIService) -> dict[str, Any]:
    return {operation.spec.name: operation.spec for operation in service}


async def test_a_reference_may_replace_any_part_of_a_document(tmp_path: Path) -> None:
    seen: list[tuple[str, str, bytes]] = []

    async def respond(request: web.Request) -> web.Response:
        seen.append((request.method, request.path_qs, await request.read()))
        return web.json_response({"id": 7, "name": "pen"})

    async with (
        serving(respond) as url,
        OperationRegistry() as registry,
        await from_openapi_file(
            written(tmp_path, url), HTTPServiceConfig(namespace="api", allowed_hosts=(url,))
        ) as service,
    ):
        registry.register_all(service)
        specs = specs_of(service)
        assert service.problems == []
        assert specs.keys() == {"getItem", "createOrder"}
        assert specs["getItem"].description == "List the items"
        inputs = specs["getItem"].input_schema.document
        assert set(inputs["properties"]) == {"id", "page", "limit", "own"}
        assert [error.http_status for error in specs["getItem"].error_schemas] == [404]
        item = await registry.execute("api.getItem", {"id": 7, "page": 1, "limit": 2})
        await registry.execute("api.createOrder", {"body": {"item": {"id": 7}, "count": 1}})

    assert item.data == {"id": 7, "name": "pen"}
    assert seen == [
        ("GET", "/items/7?page=1&limit=2", b""),
        ("POST", "/orders", b'{"item":{"id":7},"count":1}'),
    ]


def _files(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "api.json"


def _returning(schema: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return document(responses={"200": {"description": "ok", "content": content}})


async def test_a_document_may_refer_to_itself_by_its_file_name(tmp_path: Path) -> None:
    doc = _returning({"$ref": "api.json#/components/schemas/A"})
    doc["components"] = {"schemas": {"A": {"type": "integer"}}}
    service = await from_openapi_file(_files(tmp_path, api=doc), CONFIG)

    assert service.problems == []
    assert next(iter(service)).spec.output_schema.check(1)
    assert not next(iter(service)).spec.output_schema.check("1")


async def test_anchors_belong_to_their_file(tmp_path: Path) -> None:
    named = {"properties": {"a": {"$ref": "#name"}, "b": {"$ref": "other.json#name"}}}
    here = {**named, "$defs": {"x": {"$anchor": "name", "type": "integer"}}}
    there = {"$defs": {"x": {"$anchor": "name", "type": "boolean"}}}
    doc = _returning({"$ref": "part.json"})
    path = _files(tmp_path, api=doc, part=here, other=there)
    service = await from_openapi_file(path, CONFIG)

    assert service.problems == []
    schema = next(iter(service)).spec.output_schema
    assert schema.check({"a": 1, "b": True})
    assert not schema.check({"a": True})
    assert not schema.check({"b": 1})


async def test_files_and_schemas_may_be_named_by_their_own_uris(tmp_path: Path) -> None:
    own = "https://example.org"
    doc = _returning(
        {
            "properties": {
                "file": {"$ref": "shared.json#/components/schemas/A"},
                "self": {"$ref": f"{own}/shared#/components/schemas/B"},
                "id": {"$ref": f"{own}/task"},
                "part": {"$ref": f"{own}/task#/properties/done"},
                "anchor": {"$ref": f"{own}/task#name"},
                "root": {"$ref": f"{own}/api#/components/schemas/R"},
            }
        }
    )
    doc |= {"$self": f"{own}/api", "components": {"schemas": {"R": {"type": "string"}}}}
    task = {
        "$id": f"{own}/task",
        "properties": {"done": {"type": "boolean"}, "name": {"$anchor": "name", "type": "string"}},
    }
    shared = {
        "$self": f"{own}/shared",
        "components": {
            "schemas": {
                "A": {"type": "integer"},
                "B": {"$ref": f"{own}/shared#/components/schemas/A"},
                "Task": task,
            }
        },
    }
    service = await from_openapi_file(_files(tmp_path, api=doc, shared=shared), CONFIG)

    assert service.problems == []
    schema = next(iter(service)).spec.output_schema
    good = {"file": 1, "self": 2, "id": {"done": True}, "part": False, "anchor": "a", "root": "b"}
    assert schema.check(good)
    for name in good:
        assert not schema.check({name: {"done": 1}}), name


@pytest.mark.parametrize("name", ["A B", "A%20B"])
def test_a_reference_by_self_may_be_encoded_or_not(name: str) -> None:
    own = "https://example.org/api"
    doc = _returning({"$ref": f"{own}#/components/schemas/A%20B"})
    doc |= {"$self": own, "components": {"schemas": {name: {"type": "integer"}}}}
    service = from_openapi(doc, CONFIG)

    assert service.problems == []
    assert not next(iter(service)).spec.output_schema.check("text")


@pytest.mark.parametrize("fragment", ["name", "/name", "a/name"])
async def test_an_unresolved_part_of_a_file_is_reported(tmp_path: Path, fragment: str) -> None:
    doc = _returning({"$ref": f"part.json#{fragment}"})
    service = await from_openapi_file(_files(tmp_path, api=doc, part={}), CONFIG)

    (problem,) = service.problems
    wanted = repr(fragment.removeprefix("/"))
    assert problem.reason == f"its $ref cannot be resolved: {wanted} is not in 'part.json'"


async def test_references_within_one_file_may_replace_any_part() -> None:
    doc: Any = {
        "openapi": "3.1.0",
        "info": {"title": "t", "version": "1"},
        "paths": {"$ref": "#/x-parts/paths"},
        "x-parts": {
            "paths": {"/a": {"get": {"$ref": "#/x-parts/get"}}},
            "get": {"operationId": "a", "parameters": {"$ref": "#/x-parts/list"}, "responses": {}},
            "list": [{"name": "q", "in": "query"}],
        },
    }
    service = from_openapi(doc, CONFIG)
    (spec,) = specs_of(service).values()
    assert spec.name == "a"
    assert set(spec.input_schema.document["properties"]) == {"q"}
    assert service.problems == []


async def test_definitions_are_named_the_same_on_every_machine(tmp_path: Path) -> None:
    one = written(tmp_path / "one")
    two = tmp_path / "other" / "deep"
    shutil.copytree(one.parent, two / "shop")

    async def respond(request: web.Request) -> web.Response:
        return web.Response(body=(one.parent / request.path.removeprefix("/shop/")).read_bytes())

    async with serving(respond) as url:
        services = [
            await from_openapi_file(one, CONFIG),
            await from_openapi_file(two / "shop" / "openapi.yaml", CONFIG),
            await from_openapi_url(f"{url}/shop/openapi.yaml", CONFIG),
        ]
    written_out = [
        {
            name: (spec.input_schema.document, spec.output_schema.document)
            for name, spec in specs_of(service).items()
        }
        for service in services
    ]
    assert written_out[0] == written_out[1] == written_out[2]
    assert str(tmp_path) not in json.dumps(written_out)
    names = written_out[0]["getItem"][1]["$defs"]
    assert {name.partition("_")[0] for name in names} == {"Item", "item"}


def large(folder: Path, count: int) -> Path:
    """Write a document whose every path, response and schema is a file of its own."""
    for name in ("paths", "responses", "schemas"):
        (folder / name).mkdir(parents=True)
    paths: list[str] = []
    for index in range(count):
        paths.append(f"  /r{index}: {{$ref: paths/r{index}.yaml}}\n")
        (folder / f"paths/r{index}.yaml").write_text(
            f"get:\n  operationId: get{index}\n  responses:\n"
            f"    '200': {{$ref: ../responses/r{index}.yaml}}\n"
        )
        (folder / f"responses/r{index}.yaml").write_text(
            "description: ok\ncontent:\n  application/json:\n"
            f"    schema: {{$ref: ../schemas/s{index}.yaml}}\n"
        )
        (folder / f"schemas/s{index}.yaml").write_text(
            "type: object\nproperties:\n  id: {type: integer}\n"
            f"  next: {{$ref: s{(index + 1) % count}.yaml}}\n"
        )
    root = folder / "openapi.yaml"
    root.write_text("openapi: 3.0.0\ninfo: {title: t, version: '1'}\npaths:\n" + "".join(paths))
    return root


async def test_a_document_may_span_thousands_of_files(tmp_path: Path) -> None:
    root = large(tmp_path, 400)
    service = await from_openapi_file(root, CONFIG)
    assert len(service) == 400
    assert service.problems == []
    schema: Any = specs_of(service)["get7"].output_schema.document
    assert len(schema["$defs"]) == 400

    limited = HTTPServiceConfig(namespace="api", max_document_files=1200)
    with pytest.raises(DocumentError, match="more than 1200 files: set max_document_files"):
        await from_openapi_file(root, limited)


async def test_files_are_fetched_in_parallel(tmp_path: Path) -> None:
    root = large(tmp_path, 8)
    waiting = 0
    together = asyncio.Event()

    async def respond(request: web.Request) -> web.Response:
        nonlocal waiting
        if request.path.startswith("/paths/"):
            waiting += 1
            if waiting == 8:
                together.set()
            # Answered only once all eight were asked for.
            await asyncio.wait_for(together.wait(), scaled(60))
        return web.Response(body=(root.parent / request.path[1:]).read_bytes())

    async with serving(respond) as url:
        service = await from_openapi_url(f"{url}/openapi.yaml", CONFIG)
    assert len(service) == 8
    assert service.problems == []


def test_references_that_form_a_cycle_are_reported() -> None:
    ref = "#/components/schemas/"
    schemas = {
        "A": {"$ref": f"{ref}B"},
        "B": {"$ref": f"{ref}A", "description": "The same as A."},
        "User": {"$ref": f"{ref}A"},
        "Tree": {"properties": {"child": {"$ref": f"{ref}Tree"}}},
    }
    content = {"application/json": {"schema": {"$ref": f"{ref}User"}}}
    responses = {"200": {"description": "ok", "content": content}}
    service = from_openapi(document(responses=responses, components={"schemas": schemas}), CONFIG)
    (operation,) = service
    assert operation.spec.output_schema.check({"anything": 1})
    assert {problem.where: problem.is_skipped for problem in service.problems} == {
        f"{ref}A": False,
        f"{ref}B": False,
    }
    assert all("form a cycle" in problem.reason for problem in service.problems)


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_schemas_that_contain_each_other_accept_any_value(keyword: str) -> None:
    ref = "#/components/schemas/"
    schemas = {"A": {keyword: [{"$ref": f"{ref}B"}]}, "B": {keyword: [{"$ref": f"{ref}A"}]}}
    content = {"application/json": {"schema": {"$ref": f"{ref}A"}}}
    responses = {"200": {"description": "ok", "content": content}}
    body = {"content": content, "required": True}
    (operation,) = from_openapi(
        document(responses=responses, requestBody=body, components={"schemas": schemas}), CONFIG
    )
    assert operation.spec.output_schema.document == {
        "$ref": "#/$defs/A",
        "$defs": {"A": True, "B": True},
    }
    assert operation.spec.input_schema.check({"body": {"anything": 1}})
    # The rest of the input is still checked.
    assert not operation.spec.input_schema.check({})


async def test_every_unresolved_reference_is_reported(tmp_path: Path) -> None:
    schema = {
        "properties": {
            "gone": {"$ref": "gone.yaml#/Pet"},
            "again": {"$ref": "gone.yaml#/Pet"},
            "broken": {"$ref": "broken.yaml"},
            "outside": {"$ref": "../secret.yaml"},
            "there": {"$ref": "there.yaml#/no"},
            "own": {"$ref": "#/components/schemas/No"},
            "fine": {"$ref": "there.yaml#/yes"},
            "default": {"$ref": "#/components/schemas/Default"},
            "quoted": {"default": {"$ref": "#/data"}, "example": {"$ref": "#/data"}},
        }
    }
    doc = document("/t", "post", requestBody={"content": {"application/json": {"schema": schema}}})
    (tmp_path / "openapi.json").write_text(json.dumps(doc))
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "there.yaml").write_text("yes: {type: string}")
    service = await from_openapi_file(tmp_path / "openapi.json", CONFIG)

    place = "#/paths/~1t/post/requestBody/content/application~1json/schema/properties/"
    found = {problem.where.removeprefix(place): problem.reason for problem in service.problems}
    assert found.keys() == {"gone", "broken", "outside", "there", "own", "default"}
    assert "gone.yaml cannot be read: No such file or directory (and 1 more)" in found["gone"]
    assert "broken.yaml: not YAML" in found["broken"]
    assert "'../secret.yaml' is not in this document" in found["outside"]
    assert "'no' is not in 'there.yaml'" in found["there"]
    assert str(tmp_path) not in str(service.problems)
    assert not any(problem.is_skipped for problem in service.problems)


@pytest.mark.requirement("R13")
@pytest.mark.parametrize("ref", ["\0", "%00.yaml", "http://[::1", "//[x", "%ff.yaml", "a" * 5000])
async def test_a_reference_that_no_file_can_have_affects_only_its_user(
    ref: str, tmp_path: Path
) -> None:
    given = document(responses={"200": {"description": "ok"}}, parameters=[{"$ref": ref}])
    given["paths"]["/other"] = {"get": {"operationId": "other", "responses": {}}}
    text = json.dumps(given)
    (tmp_path / "openapi.json").write_text(text)

    async def respond(request: web.Request) -> web.Response:
        is_document = request.path == "/openapi.json"
        return web.Response(text=text if is_document else "", status=200 if is_document else 404)

    async with serving(respond) as url:
        services = [
            await from_openapi_file(tmp_path / "openapi.json", CONFIG),
            await from_openapi_url(f"{url}/openapi.json", CONFIG),
        ]
    for service in services:
        assert "api.other" in [operation.spec.id for operation in service]
        assert service.problems


async def test_a_missing_file_at_an_address_is_reported() -> None:
    doc = document()
    doc["paths"]["/more"] = {"$ref": "more.json"}

    async def respond(request: web.Request) -> web.Response:
        return web.json_response(doc) if "openapi" in request.path else web.Response(status=404)

    async with serving(respond) as url:
        service = await from_openapi_url(f"{url}/openapi.json", CONFIG)
    assert [problem.where for problem in service.problems] == ["/more", "#/paths/~1more"]
    assert all("more.json responded with HTTP 404" in each.reason for each in service.problems)


def test_a_document_with_only_webhooks_is_reported() -> None:
    hook: Any = {"post": {"responses": {}}}
    doc: Any = {"openapi": "3.1.0", "info": {}, "webhooks": {"paid": hook, "sent": hook}}
    (problem,) = from_openapi(doc, CONFIG).problems
    assert problem.where == "webhooks"
    assert "2 webhooks and no paths" in problem.reason
    assert not problem.is_skipped


def test_a_reference_with_a_long_pointer_affects_only_its_users() -> None:
    paths: dict[str, Any] = {
        "/long": {"$ref": "#/" + "a/" * 20_000},
        "/a": {"get": {"responses": {}}},
    }
    service = from_openapi(document() | {"paths": paths}, CONFIG)

    assert [operation.spec.meta["path"] for operation in service] == ["/a"]
    assert [problem.where for problem in service.problems][:1] == ["/long"]


@pytest.mark.requirement("R67")
def test_parts_that_thousands_of_operations_share_are_examined_once() -> None:
    types: dict[str, Any] = {f"application/x{number}": {} for number in range(5_000)}
    operation: dict[str, Any] = {
        "description": "é" * 300_000,
        "responses": {"200": {"description": "", "content": types}},
    }
    paths = {f"/{number}": {"$ref": "#/x-shared"} for number in range(5_000)}
    with processor_limit(5):
        service = from_openapi(
            document() | {"paths": paths, "x-shared": {"get": operation}}, CONFIG
        )

    assert len(service) == 5_000


def test_references_that_form_a_cycle_affect_only_their_users() -> None:
    doc = document()
    doc["paths"]["/a"] = {"$ref": "#/paths/~1b"}
    doc["paths"]["/b"] = {"$ref": "#/paths/~1a/x"}
    doc["paths"]["/c"] = {"get": {"$ref": "#/paths/~1c/get"}}
    service = from_openapi(doc, CONFIG)
    assert [operation.spec.name for operation in service] == ["call"]
    assert {problem.where for problem in service.problems if problem.is_skipped} == {
        "/a",
        "/b",
        "GET /c",
    }


def test_an_operation_without_a_description_is_described_by_its_request() -> None:
    (operation,) = from_openapi(document("/a/{b}", "post"), CONFIG)
    assert operation.spec.description == "POST /a/{b}"
