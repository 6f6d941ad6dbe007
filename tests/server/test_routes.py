"""One path per operation."""

import asyncio
import gzip
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.server.asgi import Client

from operations import (
    AccessControl,
    CallError,
    ErrorCode,
    ErrorDefinition,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    http_envelope,
    mcp_envelope,
)
from operations.contract.envelopes import TextContent
from operations.server import APIKeys, create_app, hash_key
from operations.server.http11.running import running

KEYS = APIKeys(
    {hash_key("k-alice"): Identity("alice", ["write"]), hash_key("k-bob"): Identity("bob")}
)
ALICE, BOB = {"authorization": "Bearer k-alice"}, {"x-api-key": "k-bob"}


def serving(handler: Callable[..., Any], **fields: Any) -> Client:
    """An app with one operation, `test.run`."""
    options = fields.pop("app", {})
    fields.setdefault("type", OperationType.MUTATION)
    spec = OperationSpec(name="run", namespace="test", **fields)
    return Client(create_app(OperationRegistry([Operation(spec, handler)]), **options))


async def echo(input: Any, context: OperationContext) -> Any:
    return {"input": input}


QUERY: dict[str, Any] = {
    "type": OperationType.QUERY,
    "input_schema": {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "name": {"type": "string"},
            "on": {"type": "boolean"},
            "size": {"type": ["number", "null"]},
            "either": {"anyOf": [{"type": "integer", "minimum": 10}, {"type": "string"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "numbers": {"type": "array", "items": {"$ref": "#/$defs/number"}},
            "maybe": {
                "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/number"}}, {"type": "null"}]
            },
            "where": {"type": "object"},
            "any": {},
        },
        "additionalProperties": False,
        "$defs": {"number": {"type": "integer"}},
    },
}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", {}),
        ("id=7", {"id": 7}),
        ("id=-7", {"id": -7}),
        ("id=123456789012345678901234567890", {"id": 123456789012345678901234567890}),
        ("id=7.0", {"id": 7.0}),
        ("name=7", {"name": "7"}),
        ("name=true", {"name": "true"}),
        ("name=", {"name": ""}),
        ("name=a+b%26c%C3%A9", {"name": "a b&cé"}),
        ("on=true", {"on": True}),
        ("on=false", {"on": False}),
        ("size=1.5e3", {"size": 1500.0}),
        ("either=12", {"either": 12}),
        ("either=3", {"either": "3"}),
        ("either=x", {"either": "x"}),
        ("tags=a", {"tags": ["a"]}),
        ("tags=a&tags=1", {"tags": ["a", "1"]}),
        ("numbers=1&numbers=2", {"numbers": [1, 2]}),
        ("maybe=1&maybe=2", {"maybe": [1, 2]}),
        ("maybe=1", {"maybe": [1]}),
        ('where={"a":[1]}', {"where": {"a": [1]}}),
        ("any=5", {"any": 5}),
        ("any=word", {"any": "word"}),
    ],
)
async def test_query_parameters_are_typed_by_the_schema(query: str, expected: Any) -> None:
    response = await serving(echo, **QUERY).get(f"/test/run?{query}")

    assert (response.status, response.json) == (200, {"input": expected})


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ("id=false", "/id"),
        ("id=", "/id"),
        ("id=1&id=2", "/id"),
        ("id=0x10", "/id"),
        ("id=NaN", "/id"),
        ("id=1e999", "/id"),
        ("on=1", "/on"),
        ("on=True", "/on"),
        ("size=null", "/size"),
        ("where=[1", "/where"),
        ("where=1&where=2", "/where"),
        ("numbers=1&numbers=x", "/numbers/1"),
        ("unknown=1", "/unknown"),
    ],
)
async def test_query_parameters_that_do_not_match_are_rejected_by_name(
    query: str, path: str
) -> None:
    response = await serving(echo, **QUERY).get(f"/test/run?{query}")

    assert (response.status, response.json["code"]) == (422, "VALIDATION_ERROR")
    assert response.json["details"]["errors"][0]["path"] == path


@pytest.mark.parametrize("query", ["id=%ff", "name=%ed%a0%80", "&".join(["tags=a"] * 1001)])
async def test_a_query_that_cannot_be_read_is_malformed(query: str) -> None:
    assert (await serving(echo, **QUERY).get(f"/test/run?{query}")).status == 400


async def test_an_absent_parameter_stands_for_null() -> None:
    nullable = {"type": ["integer", "null"]}
    properties = {"a": nullable, "b": {"type": ["array", "null"], "items": {"type": "integer"}}}
    schema = {"type": "object", "properties": {**properties, "c": nullable}, "required": ["a", "b"]}
    client = serving(echo, type=OperationType.QUERY, input_schema=schema)

    assert (await client.get("/test/run")).json == {"input": {"a": None, "b": None}}
    assert (await client.get("/test/run?a=1&b=2")).json == {"input": {"a": 1, "b": [2]}}
    path = (await client.get("/openapi.json")).json["paths"]["/test/run"]
    assert {each["name"]: each["required"] for each in path["get"]["parameters"]} == {
        "a": False,
        "b": False,
        "c": False,
    }


async def test_an_input_that_is_not_a_plain_object_travels_whole() -> None:
    client = serving(echo, type=OperationType.QUERY, input_schema={"type": "array"})

    assert (await client.get("/test/run?input=[1,2]")).json == {"input": [1, 2]}
    assert (await client.get("/test/run?input=7")).status == 422
    assert (await client.get("/test/run?id=7")).status == 422
    assert (await client.get("/test/run")).status == 422


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [
        ("query", {"GET", "HEAD", "POST"}),
        ("mutation", {"POST"}),
        ("subscription", {"GET", "POST"}),
    ],
)
async def test_each_type_has_its_methods(kind: str, allowed: set[str]) -> None:
    async def items(input: Any, context: OperationContext) -> AsyncIterator[int]:
        yield 1

    client = serving(items if kind == "subscription" else echo, type=kind)
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "X"):
        response = await client.request(method, "/test/run")

        assert response.status == (200 if method in allowed else 405)
        if method not in allowed:
            assert {m.strip() for m in response.headers["allow"].split(",")} == allowed


@pytest.mark.requirement("R28")
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"a": 1', 400),
        (b"{'a': 1}", 400),
        (b'{"a": 1} x', 400),
        (b'{"a": 1,}', 400),
        (b'{"a": NaN}', 400),
        (b'{"a": Infinity}', 400),
        (b'{"a": 1e999}', 400),
        (b'{"a": "\\ud800"}', 400),
        (b'{"a": "\xed\xa0\x80"}', 400),
        (b'{"a": "\xff"}', 400),
        (b"9" * 5000, 400),
        (b"\xef\xbb\xbf{}", 400),
        (b"[" * 100_000, 400),
        (b"[" * 65 + b"]" * 65, 422),
        (b"[" * 63 + b"]" * 63, 200),
        (b'{"a": 1, "a": 2}', 200),
        (b'{"a": 123456789012345678901234567890}', 200),
        (b'"\\u0000"', 200),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_json_edge_cases(body: bytes, status: int) -> None:
    client = serving(echo)

    response = await client.request(
        "POST", "/test/run", body=body, headers={"content-type": "application/json"}
    )

    assert response.status == status
    assert response.headers["content-type"] == "application/json"
    if body.startswith(b'{"a": 1, "a"'):
        assert response.json["input"] == {"a": 2}
    if b"1234567890123" in body:
        assert response.json["input"] == {"a": 123456789012345678901234567890}
    assert (await client.post("/test/run", json={"good": 1})).status == 200


async def test_null_is_a_value_and_not_the_absence_of_input() -> None:
    closed = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    client = serving(echo, input_schema=closed)

    assert (await client.post("/test/run")).json == {"input": {}}
    assert (await client.post("/test/run", json=None)).status == 422
    assert (await serving(echo).post("/test/run", json=None)).json == {"input": None}
    closed["required"] = ["a"]
    assert (await serving(echo, input_schema=closed).post("/test/run", json=None)).status == 422


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip, identity"}, 415),
        ({"content-type": "application/json", "content-encoding": "Identity,identity"}, 200),
        ({"content-type": "application/json", "content-length": "x"}, 400),
    ],
)
async def test_a_body_must_have_the_media_type_of_json(
    headers: dict[str, str], status: int
) -> None:
    response = await serving(echo).request("POST", "/test/run", body=b"{}", headers=headers)

    assert response.status == status


async def test_every_content_encoding_header_counts() -> None:
    body = gzip.compress(b"{}")
    lines = (
        "POST /test/run HTTP/1.1", "Host: 127.0.0.1", "Connection: close", f"Content-Length: {len(body)}",
        "Content-Type: application/json", "Content-Encoding: gzip", "Content-Encoding: identity", "", "",
    )  # fmt: skip
    async with running(serving(echo).app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write("\r\n".join(lines).encode() + body)
        status = await reader.readline()
        writer.close()

    assert status.startswith(b"HTTP/1.1 415 ")


# ------------------------------------------------------------ what comes back


@pytest.mark.parametrize(
    ("result", "content_type", "body"),
    [
        ({"a": [1, None]}, "application/json", b'{"a":[1,null]}'),
        (None, "application/json", b"null"),
        ("text", "application/json", b'"text"'),
        (b"\x00\xff", "application/octet-stream", b"\x00\xff"),
        (
            http_envelope(b"<svg/>", status_code=201, headers={}, content_type="image/svg+xml"),
            "image/svg+xml",
            b"<svg/>",
        ),
        (
            http_envelope(b"x", status_code=200, headers={}, content_type="a\r\nset-cookie: x=1"),
            "application/octet-stream",
            b"x",
        ),
        (
            http_envelope({"id": 1}, status_code=201, headers={}, content_type="text/html"),
            "application/json",
            b'{"id":1}',
        ),
    ],
)
async def test_the_content_depends_on_the_envelope(
    result: Any, content_type: str, body: bytes
) -> None:
    async def give(input: Any, context: OperationContext) -> Any:
        return result

    response = await serving(give).post("/test/run")

    assert (response.status, response.headers["content-type"]) == (200, content_type)
    assert response.body == body
    assert response.headers["x-content-type-options"] == "nosniff"
    assert ("content-security-policy" in response.headers) == (content_type != "application/json")


async def test_meta_comes_in_a_header_on_request() -> None:
    async def give(input: Any, context: OperationContext) -> Any:
        return http_envelope(
            1, status_code=201, headers={"x": "é" * input["n"]}, content_type="application/json"
        )

    client = serving(give)
    wanted = {"operations-meta": "true"}

    assert "operations-meta" not in (await client.post("/test/run", json={"n": 1})).headers
    small = await client.post("/test/run", json={"n": 1}, headers=wanted)
    large = await client.post("/test/run", json={"n": 5000}, headers=wanted)
    assert small.headers["operations-meta"].isascii()
    assert '"statusCode":201' in small.headers["operations-meta"]
    assert large.headers["operations-meta"] == '{"source":"http","omitted":true}'


async def test_the_error_result_of_a_tool_is_an_error() -> None:
    async def tool(input: Any, context: OperationContext) -> Any:
        return mcp_envelope(None, is_error=True, content=[TextContent(text="no luck")])

    response = await serving(tool).post("/test/run")

    assert (response.status, response.json["code"]) == (500, "EXECUTION_ERROR")
    assert response.json["message"] == "no luck"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("OPERATION_NOT_FOUND", 404),
        ("ACCESS_DENIED", 401),
        ("VALIDATION_ERROR", 422),
        ("TIMEOUT", 504),
        ("ABORTED", 500),
        ("EXECUTION_ERROR", 500),
        ("UNKNOWN_ERROR", 500),
        ("UNAVAILABLE", 503),
        ("RESOURCE_EXHAUSTED", 429),
        ("TEAPOT", 418),
        ("QUIET", 500),
        ("ODD", 500),
        ("UNDECLARED", 500),
    ],
)
async def test_the_status_comes_from_one_table(code: str, status: int) -> None:
    async def fail(input: Any, context: OperationContext) -> Any:
        raise CallError(code, "because", {"why": 1})

    declared = [
        ErrorDefinition("TEAPOT", http_status=418),
        ErrorDefinition("QUIET"),
        ErrorDefinition("ODD", http_status=200),
    ]
    response = await serving(fail, error_schemas=declared).post("/test/run")

    assert response.status == status
    expected = {"code": code, "message": "because", "details": {"why": 1}}
    assert response.json.items() >= expected.items()
    assert response.json["requestId"] == response.headers["x-request-id"]
    assert ("retry-after" in response.headers) == (status in (429, 503))


@pytest.mark.parametrize("pause", [10**400, 1e300])
async def test_an_error_may_ask_for_a_pause_of_any_length(pause: float) -> None:
    async def fail(input: Any, context: OperationContext) -> Any:
        raise CallError(ErrorCode.UNAVAILABLE, "because", {"retryAfterMs": pause})

    response = await serving(fail).post("/test/run")

    assert response.status == 503
    assert response.headers["retry-after"] == "999999999"


@pytest.mark.parametrize(
    ("upstream", "status"),
    [(404, 404), (409, 409), (401, 500), (407, 500), (410, 500), ("404", 500)],
)
async def test_an_imported_apis_error_has_the_status_its_document_declares(
    upstream: Any, status: int
) -> None:
    async def fail(input: Any, context: OperationContext) -> Any:
        raise CallError("EXECUTION_ERROR", f"HTTP {upstream}", {"statusCode": upstream, "body": 1})

    declared = [ErrorDefinition(f"HTTP_{code}", http_status=code) for code in (401, 404, 407, 409)]
    client = serving(fail, error_schemas=declared)
    response = await client.post("/test/run")
    document = (await client.get("/openapi.json")).json

    assert (response.status, response.json["code"]) == (status, "EXECUTION_ERROR")
    assert "www-authenticate" not in response.headers
    schema = document["paths"]["/test/run"]["post"]["responses"]["409"]["content"]
    declared_form, others = schema["application/json"]["schema"]["anyOf"]
    code = declared_form["properties"]["code"]
    assert others == {"$ref": "#/components/schemas/Error"}
    assert code == {"enum": ["HTTP_409", "EXECUTION_ERROR"]}


@pytest.mark.requirement("R17", "R16")
async def test_an_unexpected_exception_shows_its_code_and_the_request_id_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(input: Any, context: OperationContext) -> Any:
        raise RuntimeError("password=CANARY")

    with caplog.at_level(logging.ERROR):
        response = await serving(fail).post("/test/run")

    assert response.status == 500
    assert response.json["code"] == "EXECUTION_ERROR"
    assert b"CANARY" not in response.body
    assert b"RuntimeError" not in response.body
    assert response.json["requestId"] in response.json["message"]
    assert "CANARY" in caplog.text
    assert f"request {response.json['requestId']} failed in test.run" in caplog.text

    exposed = await serving(fail, app={"expose_errors": True}).post("/test/run")
    assert exposed.json["message"] == "RuntimeError: password=CANARY"


@pytest.mark.requirement("R17")
async def test_details_are_capped() -> None:
    async def fail(input: Any, context: OperationContext) -> Any:
        raise CallError("EXECUTION_ERROR", "HTTP 500", {"body": "x" * 100_000})

    response = await serving(fail).post("/test/run")

    assert len(response.body) < 1000
    assert "omitted" in response.json["details"]


# ------------------------------------------------------------ who, and until when


@pytest.mark.requirement("R07")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (BOB, 403),
        (ALICE, 200),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Basic k-alice"}, 401),
        ({"x-api-key": "k-alic"}, 401),
    ],
)
async def test_access_depends_on_the_credential(headers: dict[str, str], status: int) -> None:
    ran: list[str | None] = []

    async def run(input: Any, context: OperationContext) -> None:
        ran.append(context.identity.id if context.identity else None)

    client = serving(
        run,
        access_control=AccessControl(["write"]),
        app={"identity": KEYS, "scopes_supported": ["write"]},
    )

    response = await client.post("/test/run", headers=headers)

    assert response.status == status
    assert ran == (["alice"] if status == 200 else [])
    assert ("www-authenticate" in response.headers) == (status in (401, 403))


@pytest.mark.requirement("R09")
async def test_an_identity_in_a_request_is_ignored() -> None:
    options = {"identity": KEYS, "scopes_supported": ["write"]}
    client = serving(echo, access_control=AccessControl(["write"]), app=options)

    for headers in ({"x-identity": "alice"}, {"x-forwarded-user": "alice"}):
        body = {"identity": {"id": "alice", "scopes": ["write"]}, "trusted": True}
        assert (await client.post("/test/run", json=body, headers=headers)).status == 401
        wanted = {"operation": "test.run", "input": {}}
        assert (await client.post("/call", json=wanted, headers=headers)).status == 401
        assert (await client.post("/call", json={**wanted, **body}, headers=headers)).status == 422


@pytest.mark.requirement("R12")
async def test_a_call_has_a_deadline_and_a_request_may_choose_it() -> None:
    deadlines: list[float | None] = []

    async def wait(input: Any, context: OperationContext) -> None:
        deadlines.append(context.deadline)
        await asyncio.Event().wait()

    client = serving(wait, app={"timeout": 1})

    assert (await client.post("/test/run")).status == 504
    assert (await client.post("/test/run", headers={"operations-timeout": "500"})).status == 504
    assert (await client.post("/test/run", headers={"operations-timeout": "soon"})).status == 400
    assert len(deadlines) == 2
    assert None not in deadlines


# ------------------------------------------------------------ paths


@pytest.mark.parametrize(
    "target",
    [
        "/test",
        "/test/",
        "/test/run/",
        "//test/run",
        "/test//run",
        "/TEST/run",
        "/test/Run",
        "/test%2Frun",
        "/test/%72un",
        "/test/run%00",
        "/test/run%2e",
        "/./test/run",
        "/test/../test/run",
        "/test/.",
        "/test/..",
        "/test.run",
        "/test.x/run",
        "/test/run;x=1",
        "/" + "a" * 5000,
        "/\u202e",
    ],
)
async def test_a_path_has_one_spelling(target: str) -> None:
    ran: list[int] = []

    async def run(input: Any, context: OperationContext) -> None:
        ran.append(1)

    response = await serving(run).post(target)

    assert (response.status, ran) == (404, [])
    assert response.json["code"] == "OPERATION_NOT_FOUND"


async def test_a_dotted_name_is_one_segment_unless_it_is_only_dots() -> None:
    registry = OperationRegistry()
    for name in ("a.b", ".."):
        spec = OperationSpec(name=name, namespace="ns", type=OperationType.QUERY)
        registry.register(Operation(spec, echo))
    client = Client(create_app(registry))

    assert (await client.get("/ns/a.b")).status == 200
    assert (await client.get("/ns.a/b")).status == 404
    assert (await client.get("/ns/..")).status == 404
    assert (await client.post("/call", json={"operation": "ns..."})).status == 200


async def test_operations_come_and_go_with_the_registry() -> None:
    registry = OperationRegistry()
    client = Client(create_app(registry))
    assert (await client.get("/late/comer")).status == 404

    spec = OperationSpec(name="comer", namespace="late", type=OperationType.QUERY)
    registry.register(Operation(spec, echo))
    assert (await client.get("/late/comer")).status == 200

    registry.unregister("late.comer")
    assert (await client.get("/late/comer")).status == 404


async def test_an_app_below_a_prefix_finds_its_paths() -> None:
    client = serving(echo)

    response = await client.request("POST", "/api/test/run", root_path="/api")
    document = await client.request("GET", "/api/openapi.json", root_path="/api")

    assert response.status == 200
    assert document.json["servers"] == [{"url": "/api"}]
