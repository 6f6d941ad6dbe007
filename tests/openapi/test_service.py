"""Documents become operations: specs, rules, problems, and calls through a registry."""

import asyncio
import datetime
import gc
import re
import threading
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from aiohttp import web
from tests.limits import time_limit
from tests.openapi.echo import Echo
from tests.openapi.serving import document, imported, serving

from operations import (
    AccessControl,
    CallError,
    ErrorCode,
    Identity,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
)
from operations.base.errors import DocumentError
from operations.openapi import (
    HTTPRequest,
    HTTPServiceConfig,
    LinkPaging,
    OperationOutline,
    Select,
    from_openapi,
    from_openapi_url,
)

CONFIG = HTTPServiceConfig(namespace="api")
OK = {"200": {"description": "ok"}}


def spec_of(doc: dict[str, Any], **config: Any) -> OperationSpec:
    (operation,) = from_openapi(doc, HTTPServiceConfig(namespace="api", **config))
    return operation.spec


def many(*entries: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for method, path, operation in entries:
        paths.setdefault(path, {})[method] = {"responses": OK, **operation}
    return {"openapi": "3.0.3", "info": {"title": "t", "version": "2.1"}, "paths": paths}


def test_a_spec_has_the_content_of_the_document() -> None:
    doc = document(
        "/pets/{id}", summary="Show", description="Shows a pet.", tags=["pets", 7], deprecated=True
    )
    spec = spec_of(doc)
    assert spec.id == "api.call"
    assert (spec.version, spec.title, spec.description, spec.tags) == (
        "1",
        "Show",
        "Shows a pet.",
        ("pets",),
    )
    assert spec.meta == {
        "method": "GET",
        "path": "/pets/{id}",
        "source": "test",
        "deprecated": True,
    }
    assert OperationSpec.decode(spec.encode()) == spec


@pytest.mark.parametrize(
    ("method", "kind", "idempotent"),
    [
        ("get", OperationType.QUERY, False),
        ("head", OperationType.QUERY, False),
        ("options", OperationType.QUERY, False),
        ("trace", OperationType.QUERY, False),
        ("query", OperationType.QUERY, False),
        ("post", OperationType.MUTATION, False),
        ("patch", OperationType.MUTATION, False),
        ("put", OperationType.MUTATION, True),
        ("delete", OperationType.MUTATION, True),
    ],
)
def test_the_method_determines_the_type(method: str, kind: OperationType, idempotent: bool) -> None:
    spec = spec_of(document("/x", method))
    assert (spec.type, spec.idempotent) == (kind, idempotent)


def test_methods_without_a_field_of_their_own_are_operations_too() -> None:
    doc = {
        "openapi": "3.2.0",
        "paths": {"/x": {"additionalOperations": {"COPY": {"responses": OK}}}},
    }
    assert spec_of(doc).meta["method"] == "COPY"


def test_malformed_responses_are_declared_errors() -> None:
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/E"}}}}
    doc = document(
        responses={**OK, "404": {"description": "gone", **body}, "4XX": {"$ref": "#/components/responses/Bad"},
                   "default": {"description": "?"}, "x-note": {}},
        components={"schemas": {"E": {"type": "object"}}, "responses": {"Bad": {"description": "bad", **body}}},
    )  # fmt: skip
    errors = {error.code: error for error in spec_of(doc).error_schemas}
    assert {code: (e.description, e.http_status) for code, e in errors.items()} == {
        "HTTP_404": ("gone", 404),
        "HTTP_4XX": ("bad", None),
        "HTTP_ERROR": ("?", None),
    }
    for code in ("HTTP_404", "HTTP_4XX"):
        assert errors[code].schema.check({"body": {}})
        assert not errors[code].schema.check({"body": 1})


A, B, X, NULL = {"const": "a"}, {"const": "b"}, {"const": "x"}, {"type": "null"}


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        ({"200": "a"}, A),
        ({"201": "b", "200": "a"}, {"anyOf": [A, B]}),
        ({"201": "a", "200": "a"}, A),
        ({"2XX": "x", "204": None}, {"anyOf": [NULL, X]}),
        ({"200": "a", "202": None}, {"anyOf": [A, NULL]}),
        ({"200": "a", "302": "b", "404": "x", "default": "d"}, A),
        ({"204": None}, NULL),
        ({"200": None}, {}),
        ({"default": "d"}, {}),
        ({"404": "e"}, {}),
    ],
)
def test_the_output_is_the_union_of_the_successful_responses(
    responses: dict[str, Any], expected: Any
) -> None:
    nodes = {
        status: {
            "description": "",
            **({"content": {"application/json": {"schema": {"const": word}}}} if word else {}),
        }
        for status, word in responses.items()
    }
    assert spec_of(document(responses=nodes)).output_schema.document == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"text/plain": "t", "application/hal+json": "h"}, {"const": "h"}),
        ({"application/xml": "x", "application/json": "j"}, {"const": "j"}),
        ({"text/csv": "t"}, {"type": "string"}),
        ({"application/xml": "x"}, {"type": "string"}),
        (
            {"image/png; q=1": "p"},
            {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"},
        ),
        ({"*/*": "a"}, {}),
    ],
)
def test_json_is_preferred_and_other_data_is_not_described_as_json(
    content: Any, expected: Any
) -> None:
    media = {kind: {"schema": {"const": word}} for kind, word in content.items()}
    doc = document(responses={"200": {"description": "", "content": media}})
    assert spec_of(doc).output_schema.document == expected


def test_links_are_carried_in_the_meta() -> None:
    links = {"next": {"operationId": "call"}}
    doc = document(responses={"200": {"description": "", "links": links}})
    assert spec_of(doc).meta["links"] == links


def test_the_input_is_closed_and_has_its_required_names() -> None:
    doc = document(
        "/x/{id}",
        "post",
        parameters=[
            {"name": "q", "in": "query", "description": "search", "deprecated": True, "schema": {"default": 1}}
        ],
        requestBody={"required": True, "description": "a thing", "content": {"application/json": {}}},
    )  # fmt: skip
    assert spec_of(doc).input_schema.document == {
        "type": "object",
        "properties": {
            "q": {"default": 1, "description": "search", "deprecated": True},
            "id": {"type": "string"},
            "body": {"description": "a thing"},
        },
        "required": ["id", "body"],
        "additionalProperties": False,
    }


def test_an_operations_parameter_overrides_its_paths() -> None:
    doc = document("/x", parameters=[{"name": "Q", "in": "header", "schema": {"type": "integer"}}])
    shared = [
        {"name": "q", "in": "header", "schema": {"type": "string"}},
        {"name": "r", "in": "query"},
    ]
    doc["paths"]["/x"]["parameters"] = shared
    schema: Any = spec_of(doc).input_schema.document
    assert schema["properties"] == {"Q": {"type": "integer"}, "r": {}}


async def test_a_body_can_be_flattened(echo: Echo) -> None:
    echo.seen.clear()
    base = {
        "type": "object",
        "properties": {"id": {"type": "integer", "readOnly": True}},
        "required": ["id"],
    }
    thing = {
        "allOf": [base, {"properties": {"name": {"type": "string"}, "q": {}}, "required": ["name"]}]
    }
    doc = document(
        "/x",
        "post",
        parameters=[{"name": "q", "in": "query", "schema": {"type": "string"}}],
        requestBody={"required": True, "content": {"application/json": {"schema": thing}}},
    )
    schema: Any = spec_of(doc, flatten_body=True).input_schema.document
    assert set(schema["properties"]) == {"q_query", "name", "q"}
    assert schema["required"] == ["name"]
    async with imported(doc, base_url=echo.url, flatten_body=True) as registry:
        await registry.execute("api.call", {"q_query": "x", "name": "n", "q": None})
    assert echo.seen[0].target == "/x?q=x"
    assert echo.seen[0].json == {"name": "n", "q": None}


PETS = many(
    ("get", "/pets", {"operationId": "listPets", "tags": ["pets"]}),
    ("post", "/pets", {"operationId": "addPet", "tags": ["pets", "write"]}),
    ("get", "/users/me", {"operationId": "me", "tags": ["users"], "deprecated": True}),
)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, ["listPets", "addPet", "me"]),
        ({"include": Select(tags=("pets",))}, ["listPets", "addPet"]),
        ({"include": Select(tags=("pets",), methods=("get",))}, ["listPets"]),
        ({"exclude": Select(paths=("/users/*",))}, ["listPets", "addPet"]),
        ({"exclude": lambda outline: outline.deprecated}, ["listPets", "addPet"]),
        ({"rename": {"listPets": "list"}}, ["list", "addPet", "me"]),
        ({"rename": lambda o: f"{o.method}-{o.name}"}, ["GET-listPets", "POST-addPet", "GET-me"]),
    ],
)
def test_rules_choose_and_rename(rules: dict[str, Any], expected: list[str]) -> None:
    service = from_openapi(PETS, HTTPServiceConfig(namespace="api", **rules))
    assert [operation.spec.name for operation in service] == expected
    assert len(service) == len(expected)


@pytest.mark.parametrize("method", ["LINK", "propfind", "PROPPATCH", "REPORT", "M-SEARCH"])
def test_a_rule_can_select_any_method(method: str) -> None:
    operations = {method: {"responses": OK}, "COPY": {"responses": OK}}
    doc = {"openapi": "3.2.0", "paths": {"/x": {"additionalOperations": operations}}}
    include = Select(methods=(method,))
    (operation,) = from_openapi(doc, HTTPServiceConfig(namespace="api", include=include))
    assert operation.spec.meta["method"] == method.upper()


@pytest.mark.parametrize("method", ["GETT", "DELET", "PSOT", "a method", ""])
def test_an_invalid_method_is_rejected(method: str) -> None:
    with pytest.raises(ValueError, match="HTTP methods"):
        Select(methods=(method,))


def test_an_invalid_name_is_rejected() -> None:
    with pytest.raises(ValueError, match="cannot be renamed"):
        from_openapi(PETS, HTTPServiceConfig(namespace="api", rename={"me": "é"}))


@pytest.mark.parametrize("key", ["rename", "pagination"])
def test_a_rule_for_an_unknown_operation_is_reported(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    rule = {"listPet": "list" if key == "rename" else LinkPaging()}
    from_openapi(PETS, HTTPServiceConfig.from_entry({"namespace": "api", key: rule}))

    assert f"api: {key} names 'listPet', which is not an operation" in caplog.text
    assert 'Did you mean "listPets"?' in caplog.text


async def test_access_is_one_rule_or_one_for_each(echo: Echo) -> None:
    def rule(outline: OperationOutline) -> AccessControl:
        return AccessControl(["pets:write"]) if outline.method == "POST" else AccessControl()

    async with imported(PETS, base_url=echo.url, access=rule) as registry:
        await registry.execute("api.listPets", {})
        with pytest.raises(CallError) as caught:
            await registry.execute("api.addPet", {})
        assert caught.value.code == ErrorCode.ACCESS_DENIED
        context = OperationContext(identity=Identity("a", ["pets:write"]))
        await registry.execute("api.addPet", {}, context)
    assert spec_of(document(), access=AccessControl(["x"])).access_control == AccessControl(["x"])


async def test_imported_operations_are_called_from_others(echo: Echo) -> None:
    async with imported(PETS, base_url=echo.url) as registry:

        @registry.operation("local.both")
        async def both(context: OperationContext) -> list[str]:
            first = await context.env.api.listPets({})
            second = await context.env["api"]["addPet"]({})
            return [first.data["method"], second.data["method"]]

        assert (await registry.execute("local.both", {})).data == ["GET", "POST"]


def test_an_invalid_part_skips_its_operation_and_is_reported() -> None:
    doc = many(("get", "/good", {}))
    doc["paths"] |= {
        "/list": {"get": {"parameters": {}}},
        "/text": {"get": "no"},
        "/parameter": {"get": {"parameters": ["no"]}, "post": {"responses": OK}},
        "/nameless": {"get": {"parameters": [{"in": "query"}]}},
        "/nowhere": {"get": {"parameters": [{"name": "a", "in": "moon"}]}},
        "/dangling": {"get": {"parameters": [{"$ref": "#/components/parameters/None"}]}},
        "/shared": {"parameters": [7], "get": {}, "put": {}},
        "/path": 7,
        "/gone": {"$ref": "#/paths/nowhere"},
        "x-note": {},
    }
    service = from_openapi(doc, CONFIG)
    assert [operation.spec.name for operation in service] == ["get_good", "post_parameter"]
    assert [problem.where for problem in service.problems] == [
        "GET /list", "GET /text", "GET /parameter", "GET /nameless", "GET /nowhere", "GET /dangling", "GET /shared",
        "PUT /shared", "/path", "/gone", "#/paths/~1dangling/get/parameters/0", "#/paths/~1gone",
    ]  # fmt: skip
    assert all(problem.reason for problem in service.problems)
    assert all(problem.is_skipped for problem in service.problems[:-2])


@pytest.mark.parametrize("value", [True, 5, [], {}, [{}], "x"], ids=repr)
@pytest.mark.parametrize(
    "part",
    [
        lambda value: {"parameters": [{"name": "a", "in": value}]},
        lambda value: {"parameters": [{"$ref": "#/components/parameters/P"}]},
        lambda value: {"parameters": [{"$ref": value}]},
        lambda value: {"responses": {"$ref": value}},
        lambda value: {"requestBody": {"$ref": value}},
        lambda value: {"$ref": value},
    ],
)
def test_a_part_of_another_type_skips_its_operation_and_is_reported(
    part: Callable[[Any], Any], value: Any
) -> None:
    doc = many(("post", "/good", {}), ("post", "/bad", part(value)))
    doc["components"] = {"parameters": {"P": {"name": "p", "in": value}}}
    service = from_openapi(doc, CONFIG)
    assert [operation.spec.name for operation in service] == ["post_good"]
    assert [problem.where for problem in service.problems if problem.is_skipped] == ["POST /bad"]


@pytest.mark.parametrize("value", [True, 5, [], {}, [{}], "x", [[]]], ids=repr)
@pytest.mark.parametrize(
    ("responses", "is_reported"),
    [
        (lambda value: value, True),
        (lambda value: {"200": value}, True),
        (lambda value: {"200": {"content": value}}, False),
        (lambda value: {"200": {"content": {"application/json": value}}}, False),
        (lambda value: {"200": {"links": value}}, False),
        (lambda value: {"404": value}, True),
        (lambda value: {"404": {"content": value}}, False),
    ],
)
def test_an_invalid_response_is_reported_and_invalid_parts_of_it_are_ignored(
    responses: Callable[[Any], Any], is_reported: bool, value: Any
) -> None:
    reference = {"404": {"$ref": "#/components/responses/E"}}
    doc = many(("get", "/a", {"responses": reference}), ("get", "/b", {}))
    doc["paths"]["/b"]["get"]["responses"] = responses(value)
    doc["components"] = {"responses": {"E": {"description": "gone"}}}
    service = from_openapi(doc, CONFIG)
    assert [operation.spec.name for operation in service] == ["get_a", "get_b"]
    for operation in service:
        operation.spec.output_schema.compile()
    reported = [] if value == {} or not is_reported else ["GET /b"]
    assert [problem.where for problem in service.problems] == reported
    assert all("not an object" in problem.reason for problem in service.problems)
    assert not any(problem.is_skipped for problem in service.problems)


@pytest.mark.parametrize("value", [True, 5, [], {"$ref": 5}], ids=repr)
@pytest.mark.parametrize("status", ["200", "404"])
def test_a_reference_to_an_invalid_response_is_reported_once(status: str, value: Any) -> None:
    response = {status: {"$ref": "#/components/responses/E"}}
    doc = many(("get", "/a", {"responses": response}), ("get", "/b", {"responses": response}))
    doc["components"] = {"responses": {"E": value}}
    (problem,) = from_openapi(doc, CONFIG).problems
    assert problem.where == "GET /a"
    assert f"its response {status} (#/components/responses/E)" in problem.reason


@pytest.mark.parametrize(
    "item", [{"additionalOperations": True}, {"additionalOperations": []}, {"$ref": 5}]
)
def test_a_malformed_path_is_reported(item: Any) -> None:
    doc = many(("get", "/good", {}))
    doc["paths"]["/bad"] = item
    service = from_openapi(doc, CONFIG)
    assert [operation.spec.name for operation in service] == ["get_good"]
    assert [problem.where for problem in service.problems] == ["/bad"]


def test_a_path_item_can_be_a_reference() -> None:
    doc = many()
    doc["components"] = {"pathItems": {"P": {"get": {"operationId": "p", "responses": OK}}}}
    doc["paths"]["/p"] = {"$ref": "#/components/pathItems/P"}
    assert spec_of(doc).name == "p"


@pytest.mark.parametrize(
    ("places", "config", "expected"),
    [
        ({"document": ["{scheme}://host.example/{v}"]}, {}, "https://host.example/v1/x"),
        (
            {"document": ["https://{v}.example"]},
            {"server_variables": {"v": "eu"}},
            "https://eu.example/x",
        ),
        (
            {"document": ["https://a.example"], "path": ["https://b.example/p/"]},
            {},
            "https://b.example/p/x",
        ),
        (
            {"path": ["https://b.example"], "operation": ["https://c.example"]},
            {},
            "https://c.example/x",
        ),
        (
            {"operation": ["https://c.example"]},
            {"base_url": "https://d.example/v2/"},
            "https://d.example/v2/x",
        ),
    ],
)
async def test_the_nearest_server_is_called_by_default(
    places: dict[str, list[str]], config: dict[str, Any], expected: str
) -> None:
    variables = {"scheme": {"default": "https"}, "v": {"default": "v1"}}
    doc = document("/x")
    holders = {"document": doc, "path": doc["paths"]["/x"], "operation": doc["paths"]["/x"]["get"]}
    for place, urls in places.items():
        holders[place]["servers"] = [{"url": url, "variables": variables} for url in urls]
    transport = Recording()
    async with imported(doc, transport=transport, **config) as registry:
        await registry.execute("api.call", {})
    assert transport.sent[0].url == expected


@pytest.mark.parametrize(
    ("fields", "config", "expected"),
    [
        ({}, {}, ["api.own", "api.plain"]),
        ({"servers": []}, {}, ["api.own", "api.plain"]),
        ({"servers": [{"url": "/v1"}]}, {}, ["api.own", "api.plain"]),
        ({"servers": [{"url": "https://{zone}.example.com"}]}, {}, ["api.own", "api.plain"]),
        (
            {"servers": [{"url": "https://{zone}.example.com"}]},
            {"server_variables": {"zone": "eu"}},
            ["api.own"],
        ),
        ({"servers": [{"url": "https://example.com"}]}, {}, ["api.own"]),
        ({}, {"base_url": "https://example.com"}, []),
    ],
)
def test_operations_without_an_address_are_known(
    fields: dict[str, Any], config: dict[str, Any], expected: list[str]
) -> None:
    doc = many(
        ("get", "/own", {"operationId": "own", "servers": [{"url": "/elsewhere"}]}),
        ("get", "/plain", {"operationId": "plain"}),
        ("get", "/far", {"operationId": "far", "servers": [{"url": "https://far.example"}]}),
    )

    service = from_openapi(doc | fields, HTTPServiceConfig(namespace="api", **config))

    assert service.unaddressed == expected


async def test_a_call_without_an_address_raises_with_advice() -> None:
    async with imported(document()) as registry:
        with pytest.raises(CallError, match="base_url"):
            await registry.execute("api.call", {})


class Answered:
    """A hand-made response."""

    status = 200
    reason = "OK"

    def __init__(self) -> None:
        self.headers = {"content-type": "application/json"}

    async def chunks(self) -> AsyncGenerator[bytes]:
        yield b'{"ok":'
        yield b"true}"


class Recording:
    """A transport with another HTTP client instead of aiohttp."""

    def __init__(self) -> None:
        self.sent: list[HTTPRequest] = []
        self.is_closed = False

    @asynccontextmanager
    async def send(self, request: HTTPRequest) -> AsyncGenerator[Answered]:
        self.sent.append(request)
        yield Answered()

    async def aclose(self) -> None:
        self.is_closed = True


async def test_a_custom_transport_is_used_and_not_closed() -> None:
    transport = Recording()
    async with imported(document(), base_url="https://x.example", transport=transport) as registry:
        assert (await registry.execute("api.call", {})).data == {"ok": True}
    assert not transport.is_closed


@pytest.mark.requirement("R03")
async def test_a_fake_transport_never_gets_a_header_with_a_line_break() -> None:
    transport = Recording()
    parameters = [{"name": "X-Note", "in": "header", "schema": {"type": "string"}}]
    doc = document(parameters=parameters)
    async with imported(doc, base_url="https://x.example", transport=transport) as registry:
        with pytest.raises(CallError):
            await registry.execute("api.call", {"X-Note": "a\r\nb: c"})
    assert transport.sent == []


@pytest.mark.requirement("R03")
async def test_a_documents_media_types_cannot_add_a_header() -> None:
    transport = Recording()
    evil = {"application/json\r\nX-Evil: 1": {"schema": {"type": "object"}}}
    doc = document(
        "/x",
        "post",
        requestBody={"content": evil},
        responses={"200": {"description": "", "content": evil}},
        security=[{"key": []}],
        components={"securitySchemes": {"key": {"type": "apiKey", "in": "cookie", "name": "a;b\r\nc"}}},
    )  # fmt: skip
    credentials = {"key": "k"}
    async with imported(
        doc, base_url="https://x.example", transport=transport, credentials=credentials
    ) as registry:
        await registry.execute("api.call", {"body": {}})
    for name, value in transport.sent[0].headers.items():
        assert "\r" not in name + value
    assert transport.sent[0].headers["Cookie"] == "a%3Bb%0D%0Ac=k"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"base_url": "api.example.com"}, "base_url"),
        ({"base_url": "https://user:pass@api.example.com"}, "base_url"),
        ({"allowed_hosts": "api.example.com"}, "allowed_hosts"),
        ({"headers": {"X": "a\nb"}}, "headers"),
        ({"headers": {"X Y": "a"}}, "headers"),
        ({"auth": {"type": "bearer", "token": ["pass"]}}, "auth.token"),
    ],
)
@pytest.mark.requirement("R16")
def test_an_invalid_configuration_is_reported_with_its_part(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        from_openapi(document(), HTTPServiceConfig(namespace="api", **config))
    assert "pass" not in str(caught.value)


def test_a_service_can_be_used_in_another_event_loop(echo: Echo) -> None:
    service = from_openapi(document(), HTTPServiceConfig(namespace="api", base_url=echo.url))

    async def call() -> Any:
        try:
            return (await OperationRegistry(list(service)).execute("api.call", {})).data["method"]
        finally:
            await service.aclose()

    assert [asyncio.run(call()), asyncio.run(call())] == ["GET", "GET"]


@contextmanager
def leaving_open() -> Iterator[None]:
    """Leave sockets open in loops that are over; each causes a ResourceWarning whenever it is collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def test_a_service_left_open_in_a_closed_loop_logs_nothing(
    echo: Echo, caplog: pytest.LogCaptureFixture
) -> None:
    service = from_openapi(document(), HTTPServiceConfig(namespace="api", base_url=echo.url))
    registry = OperationRegistry(list(service))

    async def call() -> Any:
        return (await registry.execute("api.call", {})).data["method"]

    with leaving_open():
        assert [asyncio.run(call()) for _ in range(3)] == ["GET"] * 3
        asyncio.run(service.aclose())
    assert caplog.text == ""


async def test_a_service_can_be_used_in_two_event_loops_at_once(echo: Echo) -> None:
    service = from_openapi(document(), HTTPServiceConfig(namespace="api", base_url=echo.url))
    registry = OperationRegistry(list(service))

    async def call() -> None:
        for _ in range(10):
            await asyncio.gather(*(registry.execute("api.call", {}) for _ in range(3)))

    with leaving_open():
        async with service:
            await asyncio.gather(call(), asyncio.to_thread(asyncio.run, call()))


async def test_closing_closes_connections_of_another_loop(echo: Echo) -> None:
    service = from_openapi(document(), HTTPServiceConfig(namespace="api", base_url=echo.url))
    registry = OperationRegistry(list(service))
    called, closed = asyncio.Event(), threading.Event()
    here = asyncio.get_running_loop()

    async def elsewhere() -> None:
        await registry.execute("api.call", {})
        here.call_soon_threadsafe(called.set)
        while not closed.is_set():
            await asyncio.sleep(0.005)

    other = asyncio.create_task(asyncio.to_thread(asyncio.run, elsewhere()))
    await called.wait()
    with time_limit(20):
        await service.aclose()
        closed.set()
        await other


async def test_paths_with_a_query_or_a_fragment_are_sent_as_they_mean(echo: Echo) -> None:
    echo.seen.clear()
    doc = many(("get", "/a?fixed=1", {"operationId": "q"}), ("get", "/a#two", {"operationId": "f"}))
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute("api.q", {})
        await registry.execute("api.f", {})
    assert [seen.target for seen in echo.seen] == ["/a?fixed=1", "/a"]


async def test_a_template_in_the_query_keeps_the_rest_of_the_query(echo: Echo) -> None:
    echo.seen.clear()
    parameters = [{"name": "id", "in": "query", "schema": {"type": "integer"}}]
    doc = many(("get", "/a?kind=x y&id={id}", {"operationId": "q", "parameters": parameters}))
    async with imported(doc, base_url=f"{echo.url}/v1?version=2#top") as registry:
        await registry.execute("api.q", {"id": 1})
    assert echo.seen[0].target == "/v1/a?version=2&kind=x%20y&id=1"


async def test_a_path_parameter_in_the_query_of_a_template_is_sent_there(echo: Echo) -> None:
    echo.seen.clear()
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in ("id", "term")
    ]
    doc = many(("get", "/a/{id}?q={term}", {"operationId": "q", "parameters": parameters}))
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute("api.q", {"id": "1", "q": "a&b"})
        with pytest.raises(CallError, match="/q is required"):
            await registry.execute("api.q", {"id": "1"})
    assert [seen.target for seen in echo.seen] == ["/a/1?q=a%26b"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a?q={from},{to}&k=1", "/a?k=1&q=1,2%26%3D"),
        ("/a?{from}&{to}=x", "/a?1&2%26%3D=x"),
        ("/a/{from}?range={from}-{to}", "/a/1?range=1-2%26%3D"),
    ],
)
async def test_path_parameters_fill_parts_of_the_query(
    echo: Echo, path: str, expected: str
) -> None:
    echo.seen.clear()
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in ("from", "to")
    ]
    doc = many(("get", path, {"operationId": "q", "parameters": parameters}))
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute("api.q", {"from": "1", "to": "2&="})
        with pytest.raises(CallError, match="/to is required"):
            await registry.execute("api.q", {"from": "1"})
    assert [seen.target for seen in echo.seen] == [expected]


@pytest.mark.parametrize(
    ("path", "also", "expected"),
    [("/a/{id}?q={id}", [], "/a/1"), ("/a?id={id}", [{"name": "id", "in": "query"}], "/a?id=1")],
)
async def test_a_parameter_with_a_place_of_its_own_keeps_it(
    echo: Echo, path: str, also: list[dict[str, Any]], expected: str
) -> None:
    echo.seen.clear()
    declared = {"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}
    doc = many(("get", path, {"operationId": "q", "parameters": [declared, *also]}))
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute("api.q", {"id": 1})
    assert [seen.target for seen in echo.seen] == [expected]


@pytest.mark.parametrize(
    ("url", "variables", "expected"),
    [
        ("https://{name}.example/v1", {}, None),
        ("https://{name}.example/v1", {"name": "eu"}, "https://eu.example/v1/x"),
        ("https://b\u00fccher.example/a b", {}, "https://xn--bcher-kva.example/a%20b/x"),
        ("HTTPS://A.example:443/v1", {}, "https://a.example/v1/x"),
    ],
)
async def test_a_server_needs_values_and_has_one_spelling(
    url: str, variables: dict[str, str], expected: str | None
) -> None:
    transport = Recording()
    doc = document("/x", servers=[{"url": url, "variables": {"name": {}}}])
    async with imported(doc, transport=transport, server_variables=variables) as registry:
        if expected is None:
            with pytest.raises(CallError, match="server_variables"):
                await registry.execute("api.call", {})
            assert transport.sent == []
        else:
            await registry.execute("api.call", {})
            assert transport.sent[0].url == expected


@pytest.mark.parametrize(("own", "expected"), [(None, "/v1/x"), ("..", "/x"), ("", "/x")])
async def test_a_relative_server_is_resolved_against_the_address_of_the_document(
    own: str | None, expected: str
) -> None:
    doc = document("/x", servers=[{"url": "../v1"}])
    if own is not None:
        doc["paths"]["/x"]["get"]["servers"] = [{"url": own}]

    async def respond(request: web.Request) -> web.Response:
        return web.json_response(doc | {"at": request.path})

    async with serving(respond) as url:
        service = await from_openapi_url(
            f"{url}/docs/openapi.json", HTTPServiceConfig(namespace="api")
        )
        async with service:
            envelope = await OperationRegistry(list(service)).execute("api.call", {})
    assert envelope.data["at"] == expected


@pytest.mark.requirement("R13")
async def test_keys_that_are_not_text_cost_only_their_own_part() -> None:
    response = {
        "description": "",
        "headers": {None: {}},
        "content": {5: {"schema": {"type": "string"}}, "application/json": {"schema": {}}},
    }
    doc = document("/x", responses={200: response}, components={"schemas": {404: {}}})
    doc["servers"] = [{"url": "https://{1}.example", "variables": {1: {"default": "eu"}}}]
    transport = Recording()
    async with imported(doc, transport=transport, pagination="document") as registry:
        await registry.execute("api.call", {})
    assert transport.sent[0].url == "https://eu.example/x"


@pytest.mark.parametrize(("location", "shown"), [("/new.json", "/new.json"), ("http://[x", "[x")])
async def test_a_document_that_has_moved_is_reported_with_its_address(
    location: str, shown: str
) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(status=301, headers={"Location": location})

    async with serving(respond) as url:
        with pytest.raises(DocumentError, match=re.escape(f"{shown} instead")):
            await from_openapi_url(f"{url}/old.json", HTTPServiceConfig(namespace="api"))


async def test_a_malformed_server_in_a_document_is_no_address() -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response(document(servers=[{"url": "http://[x"}]))

    async with serving(respond) as url:
        service = await from_openapi_url(f"{url}/openapi.json", HTTPServiceConfig(namespace="api"))
        async with service:
            with pytest.raises(CallError, match="There is no address to send this to"):
                await OperationRegistry(list(service)).execute("api.call", {})


async def test_an_unknown_name_is_reported_as_missing() -> None:
    async with imported(document(), base_url="http://nobody.invalid", retries=0) as registry:
        with pytest.raises(CallError, match="no such host") as caught:
            await registry.execute("api.call", {})
    assert caught.value.code == ErrorCode.UNAVAILABLE


def test_the_description_beside_a_reference_takes_precedence() -> None:
    doc = document(
        parameters=[{"$ref": "#/components/parameters/Q", "description": "here"}],
        components={"parameters": {"Q": {"name": "q", "in": "query", "description": "there"}}},
    )
    schema: Any = spec_of(doc).input_schema.document
    assert schema["properties"]["q"]["description"] == "here"


def test_cyclic_references_skip_only_their_operation() -> None:
    loop = {"$ref": "#/components/parameters/A"}
    doc = many(
        ("get", "/a", {"operationId": "a", "parameters": [loop]}),
        ("get", "/b", {"operationId": "b", "responses": {"200": {"$ref": "#/components/responses/R"}}}),
    )  # fmt: skip
    doc["components"] = {"parameters": {"A": loop}}
    doc["components"]["responses"] = {"R": {"$ref": "#/components/responses/R"}}
    service = from_openapi(doc, CONFIG)
    assert [operation.spec.name for operation in service] == ["b"]
    assert service.problems[0].where == "GET /a"


def test_a_body_with_a_broken_reference_skips_only_its_operation() -> None:
    loop = {"$ref": "#/components/requestBodies/A"}
    doc = many(
        ("post", "/a", {"requestBody": loop}),
        ("post", "/b", {"requestBody": {"$ref": "#/nowhere"}}),
        ("post", "/c", {"requestBody": 7}),
        ("post", "/d", {"requestBody": {"content": {"text/csv": {"$ref": "#/nowhere"}}}}),
        ("post", "/e", {"requestBody": None}),
    )
    doc["components"] = {"requestBodies": {"A": loop}}
    service = from_openapi(doc, CONFIG)
    assert [operation.spec.meta["path"] for operation in service] == ["/d", "/e"]
    assert [problem.where for problem in service.problems] == [
        "POST /a",
        "POST /b",
        "POST /c",
        "#/paths/~1a/post/requestBody",
        "#/paths/~1b/post/requestBody",
    ]
    assert "(and 1 more)" in service.problems[-1].reason
    for operation in service:
        operation.spec.input_schema.compile()


def test_methods_are_found_however_they_are_written() -> None:
    doc = many(("GET", "/a", {}), ("get", "/b", {"operationId": "b"}), ("GET", "/b", {}))
    doc["paths"]["/c"] = {"additionalOperations": {"M-SEARCH": {}, "no method": {}}}
    service = from_openapi(doc, CONFIG)
    methods = [(operation.spec.meta["method"], operation.spec.name) for operation in service]
    assert methods == [("GET", "get_a"), ("GET", "b"), ("M-SEARCH", "m-search_c")]
    assert [problem.where for problem in service.problems] == ["NO METHOD /c"]


def test_a_document_can_refer_to_itself_by_its_own_name() -> None:
    reference = {"$ref": "https://x.example/api#/components/schemas/Pet"}
    media = {"application/json": {"schema": reference}}
    doc = {
        **document(responses={"200": {"description": "", "content": media}}),
        "openapi": "3.2.0",
        "$self": "https://x.example/api",
        "components": {"schemas": {"Pet": {"type": "object"}}},
    }
    assert spec_of(doc).output_schema.document == {
        "$ref": "#/$defs/Pet",
        "$defs": {"Pet": {"type": "object"}},
    }


def test_a_document_decoded_by_another_reader_is_imported() -> None:
    day = datetime.date(2020, 1, 1)
    body = {
        "content": {
            "application/json": {"schema": {"properties": {1: {"default": day, "enum": [day]}}}}
        }
    }
    responses: dict[Any, Any] = {200: {"description": "", **body}, 404: {"description": "gone"}}
    spec = spec_of({"openapi": "3.0.0", "paths": {"/x": {"get": {"responses": responses}}}})
    expected = {"properties": {"1": {"default": "2020-01-01", "enum": ["2020-01-01"]}}}
    assert spec.output_schema.document == expected
    assert [error.http_status for error in spec.error_schemas] == [404]
