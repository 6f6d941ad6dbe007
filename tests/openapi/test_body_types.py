"""Bodies that a document offers in several media types, and media types that are misspelt."""

import base64
import copy
from typing import Any

import pytest
from tests.openapi.echo import Echo, Seen
from tests.openapi.serving import document, imported
from tests.openapi.test_corpus import SHARED, needs_documents

from operations import CallError, ErrorCode, OperationRegistry
from operations.openapi import HTTPServiceConfig, from_openapi, from_openapi_file
from operations.testing import FakeUpstream

PATCH = "application/json-patch+json"
MERGE = "application/merge-patch+json"
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
FILE = {"type": "string", "format": "binary"}


def offering(**content: Any) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": content}}


async def sent(doc: dict[str, Any], echo: Echo, arguments: Any, **config: Any) -> Seen:
    async with imported(doc, base_url=echo.url, **config) as registry:
        await registry.execute("api.call", arguments)
    return echo.seen[-1]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"a": 1}, MERGE),
        ([{"op": "remove", "path": "/a"}], PATCH),
        ("a: 1", "application/apply-patch+yaml; charset=utf-8"),
    ],
)
async def test_a_patch_is_sent_with_its_media_type(echo: Echo, body: Any, kind: str) -> None:
    patch = {"schema": {"type": "object"}}
    offered = {PATCH: patch, MERGE: patch, "application/apply-patch+yaml": patch}
    seen = await sent(document("/x", "patch", **offering(**offered)), echo, {"body": body})
    assert seen.header("content-type") == kind


@pytest.mark.parametrize("body", [[{"a": 1}, {"a": 2}], '{"a":1}\n{"a":2}\n'])
async def test_a_sequence_can_be_given_as_a_list_or_as_text(echo: Echo, body: Any) -> None:
    schema = {"type": "array", "items": OBJECT}
    doc = document("/x", "post", **offering(**{"application/x-ndjson": {"schema": schema}}))
    seen = await sent(doc, echo, {"body": body})
    assert seen.body == b'{"a":1}\n{"a":2}\n'


async def test_an_object_in_a_form_is_sent_as_the_json_type_of_several(echo: Echo) -> None:
    encoding = {"meta": {"contentType": "application/xml, application/vnd.x+json"}}
    schema = {"type": "object", "properties": {"meta": OBJECT}}
    doc = document(
        "/x", "post", **offering(**{MULTIPART: {"schema": schema, "encoding": encoding}})
    )
    (part,) = (await sent(doc, echo, {"body": {"meta": {"a": 1}}})).parts
    assert (part["type"], part["content"]) == ("application/vnd.x+json", b'{"a":1}')


@pytest.mark.parametrize("kind", ["application/json", FORM, MULTIPART])
async def test_the_caller_may_name_the_media_type(echo: Echo, kind: str) -> None:
    offered = {name: {"schema": OBJECT} for name in (FORM, "application/json", MULTIPART)}
    doc = document("/x", "post", **offering(**offered))
    seen = await sent(doc, echo, {"body": {"a": 1}, "content_type": kind})
    assert (seen.header("content-type") or "").startswith(kind)

    default = await sent(doc, echo, {"body": {"a": 1}})
    assert default.header("content-type") == "application/json"
    assert default.json == {"a": 1}


async def test_a_media_type_that_is_not_offered_is_rejected(echo: Echo) -> None:
    doc = document("/x", "post", **offering(**{"application/json": {}, "text/csv": {}}))
    with pytest.raises(CallError) as caught:
        await sent(doc, echo, {"body": "a,b", "content_type": "text/html"})
    assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_a_body_that_does_not_match_the_named_media_type_is_rejected(echo: Echo) -> None:
    offered = {"application/json": {"schema": OBJECT}, "text/csv": {"schema": {"type": "string"}}}
    doc = document("/x", "post", **offering(**offered))
    with pytest.raises(CallError) as caught:
        await sent(doc, echo, {"body": {"a": 1}, "content_type": "text/csv"})
    assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_a_media_type_of_an_offered_range_may_be_named(echo: Echo) -> None:
    doc = document("/x", "post", **offering(**{"application/json": {}, "image/*": {}}))
    arguments = {"body": base64.b64encode(b"\x89PNG").decode(), "content_type": "image/png"}
    seen = await sent(doc, echo, arguments)
    assert seen.header("content-type") == "image/png"
    assert seen.body == b"\x89PNG"


@pytest.mark.requirement("R03")
@pytest.mark.parametrize("kind", ["image/a\r\nX: 1", "image/\n", "image/a\0"], ids=repr)
async def test_a_named_media_type_cannot_add_a_header(kind: str) -> None:
    doc = document("/x", "post", **offering(**{"application/json": {}, "image/*": {}}))
    transport = FakeUpstream(doc)
    async with imported(doc, base_url="http://api.test", transport=transport) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {"body": "AAE=", "content_type": kind})

    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert transport.requests == []


async def test_files_are_sent_in_the_only_type_that_holds_them(echo: Echo) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "photo": FILE}}
    plain = {"type": "object", "properties": {"name": {"type": "string"}}}
    photo = {"content": base64.b64encode(b"\x89PNG").decode(), "filename": "a.png"}
    for other in (schema, plain):
        offered = {"application/json": {"schema": other}, MULTIPART: {"schema": schema}}
        doc = document("/x", "post", **offering(**offered))
        seen = await sent(doc, echo, {"body": {"name": "x", "photo": photo}})
        by_name = {part["name"]: part for part in seen.parts}
        assert by_name["photo"]["content"] == b"\x89PNG"
        assert by_name["photo"]["filename"] == "a.png"
        seen = await sent(doc, echo, {"body": {"name": "x"}})
        assert seen.header("content-type") == "application/json"


@pytest.mark.parametrize(
    ("offered", "kind"),
    [
        (["application/json", "application/octet-stream"], "application/octet-stream"),
        (["application/json", "text/csv", "image/png"], "image/png"),
        ([FORM, "application/json", "text/csv"], "text/csv"),
    ],
)
async def test_a_file_is_sent_as_the_type_that_can_hold_it(
    echo: Echo, offered: list[str], kind: str
) -> None:
    content = {each: {"schema": FILE} for each in offered}
    seen = await sent(document("/x", "post", **offering(**content)), echo, {"body": b"\xff"})
    assert (seen.header("content-type"), seen.body) == (kind, b"\xff")


async def test_files_inside_shared_definitions_are_files_only_in_forms(echo: Echo) -> None:
    offered = {
        kind: {"schema": {"$ref": "#/components/schemas/Upload"}}
        for kind in ("application/json", MULTIPART)
    }
    upload = {"type": "object", "properties": {"photo": FILE}, "required": ["photo"]}
    components = {"schemas": {"Upload": upload}}
    doc = document("/x", "post", **offering(**offered), components=components)
    service = from_openapi(doc, HTTPServiceConfig(namespace="api"))
    schema: Any = next(iter(service)).spec.input_schema.document
    assert schema["$defs"]["Upload"]["properties"]["photo"] == FILE
    assert "anyOf" in schema["$defs"]["Upload.upload"]["properties"]["photo"]


async def test_text_is_sent_as_the_first_type_of_text(echo: Echo) -> None:
    offered = {kind: {"schema": OBJECT} for kind in ("application/xml", "application/json")}
    seen = await sent(document("/x", "post", **offering(**offered)), echo, {"body": "<a>1</a>"})
    assert seen.header("content-type") == "application/xml; charset=utf-8"
    assert seen.body == b"<a>1</a>"


@pytest.mark.parametrize(
    ("text", "kind", "body"),
    [
        ("a, b", "text/plain; charset=utf-8", b"a, b"),
        ("aGk=", "application/octet-stream", b"hi"),
    ],
)
async def test_text_that_is_not_base64_is_sent_as_text(
    echo: Echo, text: str, kind: str, body: bytes
) -> None:
    offered = {
        each: {"schema": {"type": "string"}} for each in ("application/octet-stream", "text/plain")
    }
    seen = await sent(document("/x", "post", **offering(**offered)), echo, {"body": text})
    assert (seen.header("content-type"), seen.body) == (kind, body)


async def test_flattened_bodies_can_be_sent_in_every_type(echo: Echo) -> None:
    offered = {name: {"schema": OBJECT} for name in (FORM, "application/json")}
    doc = document("/x", "post", **offering(**offered))
    seen = await sent(doc, echo, {"a": 1, "content_type": FORM}, flatten_body=True)
    assert seen.form == [("a", "1")]


async def test_an_argument_of_the_same_name_keeps_it(echo: Echo) -> None:
    offered = {name: {"schema": OBJECT} for name in (FORM, "application/json")}
    parameters = [{"name": "content_type", "in": "query", "schema": {"type": "string"}}]
    doc = document("/x", "post", parameters=parameters, **offering(**offered))
    arguments = {"body": {"a": 1}, "content_type": FORM, "content_type_query": "q"}
    seen = await sent(doc, echo, arguments)
    assert seen.query == "content_type=q"
    assert seen.form == [("a", "1")]


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("application/form-data", MULTIPART),
        ("multipart/formdata", MULTIPART),
        ("form-data", MULTIPART),
        ("multipart/x-www-form-urlencoded", FORM),
        ("application/x-www-form-urlencode", FORM),
        ("application/x-www-form-url-encoded", FORM),
        ("json", "application/json"),
    ],
)
async def test_a_misspelt_media_type_is_read_as_intended_and_reported(
    echo: Echo, misspelt: str, meant: str
) -> None:
    doc = document("/x", "post", **offering(**{misspelt: {"schema": OBJECT}}))
    seen = await sent(doc, echo, {"body": {"a": 1}})
    assert (seen.header("content-type") or "").startswith(meant)

    service = from_openapi(doc, HTTPServiceConfig(namespace="api"))
    (problem,) = service.problems
    assert problem.where == "POST /x"
    assert meant in problem.reason
    assert not problem.is_skipped


@needs_documents
@pytest.mark.parametrize(
    "name", ["npmdir__kubernetes.io.json", "kubernetes__apis-scheduling.k8s.io-v1.json"]
)
async def test_every_patch_of_kubernetes_works(echo: Echo, name: str) -> None:
    strategic = "application/strategic-merge-patch+json"
    config = HTTPServiceConfig(namespace="api", base_url=echo.url)
    async with OperationRegistry() as registry:
        registry.register_all(await from_openapi_file(SHARED / "openapi" / name, config))
        patches = [o.spec for o in registry if o.spec.name.startswith("patch")]
        # All 98 would take half a minute.
        step = len(patches) // 8 + 1
        for spec in patches[::step]:
            properties: Any = spec.input_schema.document["properties"]  # type: ignore[index]
            place = {key: "x" for key in properties if "{" + key + "}" in spec.meta["path"]}
            change = {**place, "body": {"metadata": {"name": None}}}
            for arguments, kind in (
                (change, MERGE),
                ({**place, "body": [{"op": "remove", "path": "/metadata"}]}, PATCH),
                ({**change, "content_type": strategic}, strategic),
            ):
                await registry.execute(spec.id, arguments)
                assert echo.seen[-1].header("content-type") == kind
                assert echo.seen[-1].json == arguments["body"]
    assert patches


async def test_whole_floats_are_sent_as_integers_where_the_schema_requires_them(echo: Echo) -> None:
    """As a local function receives them: JSON does not distinguish 5.0 from 5, but many servers do."""
    integer = {"type": "integer"}
    part = {"type": "object", "properties": {"n": integer, "x": {"type": "number"}}}
    body = {
        "type": "object",
        "properties": {"list": {"type": "array", "items": {"anyOf": [part, integer]}}},
        "additionalProperties": integer,
    }
    parameters = [
        {"name": "id", "in": "path", "required": True, "schema": integer},
        {"name": "n", "in": "query", "schema": {"type": "array", "items": integer}},
        {"name": "x", "in": "query", "schema": {"type": "number"}},
        {"name": "h", "in": "header", "schema": integer},
        {"name": "c", "in": "cookie", "schema": {"type": ["integer", "null"]}},
    ]
    content = {"application/json": {"schema": body}}
    doc = document("/x/{id}", "post", **offering(**content), parameters=parameters)
    arguments = {
        "id": 5.0, "n": [1.0, 2], "x": 3.0, "h": -4.0, "c": 6.0,
        "body": {"list": [{"n": 7.0, "x": 8.0}, 9.0], "other": 10.0},
    }  # fmt: skip
    given = copy.deepcopy(arguments)
    seen = await sent(doc, echo, arguments)
    assert seen.target == "/x/5?n=1&n=2&x=3.0"
    assert (seen.header("h"), seen.header("cookie")) == ("-4", "c=6")
    assert seen.body == b'{"list":[{"n":7,"x":8.0},9],"other":10}'
    assert repr(arguments) == repr(given)


async def test_whole_floats_beside_a_file_are_sent_as_integers(echo: Echo) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "f": FILE}}
    doc = document("/x", "post", **offering(**{MULTIPART: {"schema": schema}}))
    parts = (await sent(doc, echo, {"body": {"n": 5.0, "f": b"\xff"}})).parts
    assert [part["content"] for part in parts] == [b"5", b"\xff"]
