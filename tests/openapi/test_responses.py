"""Which schema describes a response: the one declared for its status and media type, and no other."""

from typing import Any

import pytest
from aiohttp import web
from tests.openapi.serving import document, imported, serving
from tests.openapi.test_corpus import SHARED, needs_documents

from operations import CallError, ErrorCode, OperationRegistry
from operations.openapi import HTTPServiceConfig, from_openapi, from_openapi_file


def answering(status: int, data: Any = None, kind: str = "application/json") -> Any:
    async def respond(request: web.Request) -> web.Response:
        if data is None:
            return web.Response(status=status)
        if isinstance(data, str):
            return web.Response(status=status, text=data, content_type=kind)
        return web.json_response(data, status=status, content_type=kind)

    return respond


def objects(**properties: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties),
    }


def response(schema: Any = None, kind: str = "application/json") -> dict[str, Any]:
    content = {} if schema is None else {"content": {kind: {"schema": schema}}}
    return {"description": "", **content}


JOB: dict[str, Any] = {
    "200": response(
        {
            "type": "object",
            "required": ["id", "status"],
            "properties": {"id": {"type": "string"}, "status": {"enum": ["CANCELED", "DONE"]}},
        }
    ),
    "202": response(objects(jobId="string")),
    "204": response(),
}


async def envelope_of(responses: Any, handler: Any, method: str = "get") -> Any:
    doc = document("/thing", method, responses=responses)
    async with serving(handler) as url, imported(doc, base_url=url) as registry:
        return await registry.execute("api.call", {})


async def data_of(responses: Any, handler: Any, method: str = "get") -> Any:
    return (await envelope_of(responses, handler, method)).data


@pytest.mark.parametrize(
    ("status", "sent"),
    [(200, {"id": "1", "status": "DONE"}), (202, {"jobId": "j1"}), (204, None)],
)
async def test_data_is_normalised_by_the_schema_of_its_status(status: int, sent: Any) -> None:
    envelope = await envelope_of(JOB, answering(status, sent))
    assert envelope.data == sent
    assert envelope.meta.changes == ()
    if sent:
        envelope = await envelope_of(JOB, answering(status, {**sent, "undeclared": 1}))
        assert envelope.data == sent
        assert [(c.kind, c.path) for c in envelope.meta.changes] == [("stripped", "/undeclared")]


async def test_missing_values_are_reported_and_not_invented() -> None:
    envelope = await envelope_of(JOB, answering(200, {"id": "1"}))
    assert envelope.data == {"id": "1"}
    assert [change.kind for change in envelope.meta.changes] == ["mismatch"]


async def test_properties_stay_in_the_order_of_the_server() -> None:
    number = {"type": "integer"}
    schema = {"type": "object", "properties": {"a": number, "b": number, "c": number}}
    responses = {"200": {"description": "", "content": {"application/json": {"schema": schema}}}}
    text = '{"c": 1, "undeclared": 2, "a": 3, "b": 4}'
    data = await data_of(responses, answering(200, text, "application/json"))
    assert list(data) == ["c", "a", "b"]


async def test_an_exact_status_comes_before_its_range() -> None:
    responses = {"2XX": response(objects(a="string")), "201": response(objects(b="string"))}
    assert await data_of(responses, answering(201, {"a": "x", "b": "y"})) == {"b": "y"}
    assert await data_of(responses, answering(200, {"a": "x", "b": "y"})) == {"a": "x"}


@pytest.mark.parametrize(
    "responses",
    [
        {"default": response(objects(code="integer"))},
        {"201": response(objects(id="integer"))},
        {"200": response()},
        {},
    ],
)
async def test_a_response_that_is_not_described_stays_unchanged(responses: Any) -> None:
    sent = {"items": [1, 2], "id": "x"}
    assert await data_of(responses, answering(200, sent)) == sent


async def test_head_and_redirects_have_no_invented_data() -> None:
    responses = {"200": response(objects(id="integer")), "302": response()}
    assert await data_of(responses, answering(200), "head") is None
    assert await data_of(responses, answering(302)) is None


async def test_a_declared_redirect_is_described_by_its_own_schema() -> None:
    responses = {"200": response(objects(id="integer")), "3XX": response(objects(to="string"))}
    assert await data_of(responses, answering(301, {"to": "/b", "x": 1})) == {"to": "/b"}


async def test_the_media_type_decides_between_two_schemas_of_one_status() -> None:
    content = {
        "application/json": {"schema": objects(a="string")},
        "application/vnd.b+json": {"schema": objects(b="string")},
        "text/plain": {"schema": {"type": "string"}},
    }
    responses = {"200": {"description": "", "content": content}}
    both = {"a": "x", "b": "y"}
    assert await data_of(responses, answering(200, both)) == {"a": "x"}
    assert await data_of(responses, answering(200, both, "application/vnd.b+json")) == {"b": "y"}
    assert await data_of(responses, answering(200, both, "application/vnd.c+json")) == {"a": "x"}
    assert await data_of(responses, answering(200, '{"a": 1}', "text/plain")) == '{"a": 1}'
    assert await data_of(responses, answering(200, "<b/>", "application/xml")) == "<b/>"


async def test_an_empty_body_is_empty_text_only_if_text_is_declared() -> None:
    text = {"200": response({"type": "string"}, "text/plain")}
    assert await data_of(text, answering(200, "", "text/plain")) == ""
    assert await data_of({"200": response()}, answering(200, "", "text/plain")) is None


@pytest.mark.parametrize("kind", ["object", ["object"], ["object", "null"]])
async def test_a_range_of_media_types_describes_json(kind: Any) -> None:
    responses = {"200": response({**objects(a="string"), "type": kind}, "*/*")}
    assert await data_of(responses, answering(200, {"a": "x", "b": 1})) == {"a": "x"}
    assert await data_of(responses, answering(200, "text", "text/plain")) == "text"


def output_of(responses: Any, method: str = "get") -> Any:
    doc = document("/thing", method, responses=responses)
    service = from_openapi(doc, HTTPServiceConfig(namespace="api"))
    return next(iter(service)).spec.output_schema.document


def test_the_output_is_an_object_if_every_response_is() -> None:
    two = {"200": response(objects(a="string")), "201": response(objects(b="string"))}
    assert output_of(two) == {
        "type": "object",
        "anyOf": [objects(a="string"), objects(b="string")],
    }
    assert "type" not in output_of(JOB)
    assert {"type": "null"} in output_of(JOB)["anyOf"]


def test_the_output_of_head_is_null() -> None:
    assert output_of({"200": response(objects(a="string"))}, "head") == {"type": "null"}


@needs_documents
async def test_each_response_of_a_real_document_arrives_by_its_own_schema() -> None:
    """GitHub: 200 is a list of repositories' statistics, 202 an empty object, 204 nothing."""
    path = SHARED / "openapi" / "octokit__api.github.com.json"
    statistics = {"total": 1, "week": 2, "days": [0, 1, 2, 3, 4, 5, 6]}
    answers: list[tuple[int, Any]] = [(200, [statistics]), (202, {}), (204, None)]

    async def respond(request: web.Request) -> web.Response:
        status, data = answers[int(request.headers["X-Case"])]
        return await answering(status, data)(request)  # type: ignore[no-any-return]

    async with serving(respond) as url:
        for case, (status, data) in enumerate(answers):
            config = HTTPServiceConfig(
                namespace="api",
                base_url=url,
                headers={"X-Case": str(case)},
                include=lambda outline: outline.name == "repos_get-commit-activity-stats",
            )
            async with OperationRegistry() as registry:
                registry.register_all(await from_openapi_file(path, config))
                envelope: Any = await registry.execute(
                    "api.repos_get-commit-activity-stats", {"owner": "o", "repo": "r"}
                )
            assert envelope.meta.status_code == status
            assert envelope.data == data


ITEMS = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["id"],
        "properties": {
            "id": {"type": "integer"},
            "kind": {"enum": ["a", "b"]},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "owner": {"type": ["string", "null"], "default": None},
        },
    },
}
CLEAN = b'[{"owner": null, "id": 1, "kind": "a", "score": 0.5, "tags": ["x"]}]'
TEXTS = [
    CLEAN,
    b"[]",
    b" [ ] ",
    b'[{"id": 1, "owner": "x"}]',
    b'[{"id": 1}]',
    b'[{"id": 1.0, "owner": null}]',
    b'[{"id": "1", "owner": null}]',
    b'[{"id": 1, "owner": null, "more": 1}]',
    b'[{"id": 1, "owner": null, "kind": "c"}]',
    b'[{"id": 1, "owner": null, "score": 5}]',
    b'[{"id": 1, "owner": null, "id": 2}]',
    b'[{"id": 123456789012345678901234567890, "owner": null}]',
    b'[{"id": 1, "owner": "\\u00e9\xc3\xa9"}]',
    b"\xef\xbb\xbf" + CLEAN,
    CLEAN.decode().encode("utf-16"),
    b"null",
    b"{}",
    b"[[[[]]]]",
    CLEAN[:-1],
    CLEAN + b"]",
    b'[{"id": 1, "owner": NaN}]',
    b'[{"id": 1, "owner": "\xff"}]',
]


async def test_the_quick_check_of_a_text_changes_no_result() -> None:
    """From the second clean response on, a text is checked before it is decoded: compare with a fresh import."""
    sent = CLEAN

    async def respond(request: web.Request) -> web.Response:
        return web.Response(body=sent, content_type="application/json")

    async def result(registry: OperationRegistry) -> Any:
        try:
            envelope = await registry.execute("api.call", {})
        except CallError as error:
            return error.code, error.message
        return repr(envelope.data), envelope.meta.changes

    doc = document(responses={"200": response(ITEMS)})
    async with serving(respond) as url, imported(doc, base_url=url) as used:
        await result(used)
        [operation] = used.specs()
        check = operation.output_schema.check_text
        assert check is not None
        check(CLEAN)
        for sent in TEXTS:
            async with imported(doc, base_url=url) as fresh:
                expected = await result(fresh)
            assert await result(used) == expected, sent


async def test_a_valid_text_with_too_many_values_is_rejected() -> None:
    sent = CLEAN

    async def respond(request: web.Request) -> web.Response:
        return web.Response(body=sent, content_type="application/json")

    doc = document(responses={"200": response(ITEMS)})
    async with (
        serving(respond) as url,
        imported(doc, base_url=url, max_response_values=50) as registry,
    ):
        await registry.execute("api.call", {})
        sent = b"[" + b",".join([CLEAN[1:-1]] * 10) + b"]"
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})
    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
