"""Inputs whose schema in a document accepts no value: each can be given, and arrives correctly."""

from typing import Any

import pytest
from tests.openapi.echo import Echo, Seen
from tests.openapi.serving import document, imported
from tests.openapi.test_corpus import SHARED, needs_documents

from operations import CallError, ErrorCode, OperationRegistry
from operations.openapi import HTTPServiceConfig, from_openapi, from_openapi_file

CLOSED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "additionalProperties": False,
}


def parameter(name: str, place: str, schema: Any, **other: Any) -> dict[str, Any]:
    return {"name": name, "in": place, "schema": schema, **other}


async def sent(doc: dict[str, Any], echo: Echo, arguments: Any, **config: Any) -> Seen:
    async with imported(doc, base_url=echo.url, **config) as registry:
        await registry.execute("api.call", arguments)
    return echo.seen[-1]


@pytest.mark.parametrize("value", [1, "1"])
async def test_an_enum_of_numbers_in_a_string_can_be_given(echo: Echo, value: Any) -> None:
    doc = document(parameters=[parameter("p", "query", {"type": "string", "enum": [1, 2]})])
    assert (await sent(doc, echo, {"p": value})).query == "p=1"
    with pytest.raises(CallError):
        await sent(doc, echo, {"p": "3"})


@pytest.mark.parametrize("pattern", ["/^a+$/", "/^a+/", "/a+$/", "/^A+$/i"])
async def test_a_pattern_with_slashes_around_it_can_be_matched(echo: Echo, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    doc = document(parameters=[parameter("p", "query", schema)])
    assert (await sent(doc, echo, {"p": "aa"})).query == "p=aa"
    if not pattern.endswith("i"):
        with pytest.raises(CallError):
            await sent(doc, echo, {"p": "b"})


@pytest.mark.parametrize(("pattern", "text"), [("/a/", "/a/"), ("^/a$", "/a"), (r"/a\$/", "/a$/")])
async def test_a_pattern_that_contains_slashes_is_kept(echo: Echo, pattern: str, text: str) -> None:
    doc = document(parameters=[parameter("p", "query", {"type": "string", "pattern": pattern})])
    assert (await sent(doc, echo, {"p": text})).query
    with pytest.raises(CallError):
        await sent(doc, echo, {"p": "a"})


async def test_an_enum_for_the_items_of_an_array_can_be_given(echo: Echo) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "enum": ["a", "b"]}
    doc = document(parameters=[parameter("p", "query", schema)])
    assert (await sent(doc, echo, {"p": ["a", "b"]})).query == "p=a&p=b"
    with pytest.raises(CallError):
        await sent(doc, echo, {"p": ["c"]})


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
async def test_a_type_that_its_parts_contradict_is_ignored(echo: Echo, keyword: str) -> None:
    kind = {"type": "string", "enum": ["a", "b"]}
    schema = {"type": "object", keyword: [{"$ref": "#/components/schemas/Kind"}]}
    doc = document(
        parameters=[parameter("p", "query", schema)], components={"schemas": {"Kind": kind}}
    )
    assert (await sent(doc, echo, {"p": "a"})).query == "p=a"
    with pytest.raises(CallError):
        await sent(doc, echo, {"p": "c"})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "allOf": [{"type": "integer"}]},
        {"type": "integer", "anyOf": [{"type": "string"}, {"type": "number"}]},
        {"type": "integer", "allOf": [{"minimum": 1}]},
    ],
)
async def test_a_type_that_fits_its_parts_is_kept(echo: Echo, schema: Any) -> None:
    doc = document(parameters=[parameter("p", "query", schema)])
    assert (await sent(doc, echo, {"p": 1})).query == "p=1"
    with pytest.raises(CallError):
        await sent(doc, echo, {"p": "1"})


async def test_closed_parts_of_a_body_can_be_given_together(echo: Echo) -> None:
    other = {**CLOSED, "properties": {"b": {"type": "integer"}}}
    schema = {"allOf": [{"$ref": "#/components/schemas/A"}, other]}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    doc = document("/x", "post", requestBody=body, components={"schemas": {"A": CLOSED}})
    assert (await sent(doc, echo, {"body": {"a": "x", "b": 1}})).json == {"a": "x", "b": 1}
    with pytest.raises(CallError):
        await sent(doc, echo, {"body": {"a": "x", "c": 1}})


async def test_a_required_parameter_with_one_value_is_filled_in(echo: Echo) -> None:
    parameters = [
        parameter("v", "path", {"type": "string", "enum": ["v1"]}, required=True),
        parameter("Action", "query", {"type": "string", "enum": ["List"]}, required=True),
        parameter("X-Kind", "header", {"const": "json"}, required=True),
        parameter("optional", "query", {"type": "string", "enum": ["only"]}),
    ]
    doc = document("/{v}/x", parameters=parameters)
    seen = await sent(doc, echo, {})
    assert (seen.path, seen.query) == ("/v1/x", "Action=List")
    assert seen.header("X-Kind") == "json"

    service = from_openapi(doc, HTTPServiceConfig(namespace="api"))
    schema: Any = next(iter(service)).spec.input_schema.document
    assert "required" not in schema
    assert schema["properties"]["Action"]["default"] == "List"
    with pytest.raises(CallError):
        await sent(doc, echo, {"Action": "Other"})


@pytest.mark.parametrize(
    "schema", [{"type": "integer"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}]
)
@pytest.mark.parametrize("place", ["query", "header", "cookie"])
async def test_null_for_an_optional_parameter_means_absent(
    echo: Echo, place: str, schema: Any
) -> None:
    doc = document(parameters=[parameter("p", place, schema)])
    seen = await sent(doc, echo, {"p": None}, input="convert")
    assert seen.query == ""
    assert seen.header("p") is None
    assert seen.header("cookie") is None


async def test_an_optional_parameter_has_the_type_of_the_document(echo: Echo) -> None:
    doc = document(
        parameters=[
            parameter("limit", "query", {"type": "integer"}),
            parameter("after", "query", {"type": ["integer", "null"]}),
        ]
    )
    service = from_openapi(doc, HTTPServiceConfig(namespace="api"))
    schema: Any = next(iter(service)).spec.input_schema.document

    assert schema["properties"] == {
        "limit": {"type": "integer"},
        "after": {"type": ["integer", "null"]},
    }
    with pytest.raises(CallError, match="must be an integer, not null"):
        await sent(doc, echo, {"limit": None})
    assert (await sent(doc, echo, {"after": None})).query == ""


async def test_null_is_sent_if_the_schema_allows_it(echo: Echo) -> None:
    nullable = {"type": "string", "nullable": True, "default": "x"}
    doc = document(parameters=[parameter("p", "query", nullable)])
    doc["openapi"] = "3.0.3"
    assert (await sent(doc, echo, {"p": None})).query == "p="


async def test_an_empty_list_is_not_sent_as_a_list_of_one_empty_text(echo: Echo) -> None:
    items = {"type": "array", "items": {"type": "integer"}}
    doc = document(parameters=[parameter("p", "query", items)])
    assert (await sent(doc, echo, {"p": []})).query == ""


async def test_null_for_a_required_parameter_is_rejected(echo: Echo) -> None:
    doc = document(parameters=[parameter("p", "query", {"type": "integer"}, required=True)])
    with pytest.raises(CallError) as caught:
        await sent(doc, echo, {"p": None})
    assert caught.value.code == ErrorCode.VALIDATION_ERROR


@pytest.mark.parametrize("flatten", [False, True])
async def test_null_in_a_body_is_sent_or_rejected(echo: Echo, flatten: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": ["string", "null"]}, "b": {"type": "string"}},
    }
    body = {"required": True, "content": {"application/merge-patch+json": {"schema": schema}}}
    doc = document("/x", "patch", requestBody=body)
    given: Any = {"a": None}
    arguments = given if flatten else {"body": given}
    assert (await sent(doc, echo, arguments, flatten_body=flatten)).json == {"a": None}
    with pytest.raises(CallError):
        wrong: Any = {"b": None}
        await sent(doc, echo, wrong if flatten else {"body": wrong}, flatten_body=flatten)


AUTHORIZATION = parameter("Authorization", "header", {"type": "string"}, required=True)


def test_a_required_authorization_header_without_security_is_reported() -> None:
    doc = document(parameters=[AUTHORIZATION])
    doc["paths"]["/other"] = {"parameters": [AUTHORIZATION], "get": {"responses": {}}}
    (problem,) = from_openapi(doc, HTTPServiceConfig(namespace="api")).problems
    assert "set auth=" in problem.reason
    assert problem.where == "GET /thing and 1 more"
    assert not problem.is_skipped


def test_an_authorization_header_that_is_configured_or_declared_is_no_problem() -> None:
    doc = document(parameters=[AUTHORIZATION])
    for config in (
        HTTPServiceConfig(namespace="api", auth={"type": "bearer", "token": "x"}),
        HTTPServiceConfig(namespace="api", headers={"authorization": "x"}),
    ):
        assert from_openapi(doc, config).problems == []
    signed = document(parameters=[AUTHORIZATION], security=[{"key": []}])
    assert from_openapi(signed, HTTPServiceConfig(namespace="api")).problems == []


@needs_documents
async def test_real_documents_are_satisfiable(echo: Echo) -> None:
    config = HTTPServiceConfig(namespace="api", base_url=echo.url)

    async def call(name: str, operation: str, arguments: Any) -> Seen:
        async with OperationRegistry() as registry:
            registry.register_all(await from_openapi_file(SHARED / "openapi" / name, config))
            await registry.execute(f"api.{operation}", arguments)
        return echo.seen[-1]

    seen = await call("guru-amazonaws.com__sms-2016-10-24.yaml", "GetServers", {"body": {}})
    assert (
        seen.header(
            "x-amz-target",
        )
        == "AWSServerMigrationService_V2016_10_24.GetServers"
    )

    transcript = {"audio_url": "https://example.com/a.mp3", "speech_models": ["universal"]}
    seen = await call("assemblyai__openapi.json", "createTranscript", {"body": transcript})
    assert seen.json == transcript

    service = await from_openapi_file(SHARED / "openapi" / "deepgram__openapi.yaml", config)
    assert any("set auth=" in problem.reason for problem in service.problems)
