"""Multipart bodies: headers of parts, styles of fields, parts without names."""

from typing import Any

import pytest
from tests.openapi.echo import Echo
from tests.openapi.serving import document, imported

from operations import CallError, ErrorCode
from operations.openapi import HTTPServiceConfig, from_openapi

STRING = {"type": "string"}
FILE = {"type": "string", "format": "binary"}


def upload(
    properties: dict[str, Any],
    encoding: dict[str, Any] | None = None,
    *,
    required: tuple[str, ...] = (),
    **more: Any,
) -> dict[str, Any]:
    """A document whose one operation takes a form."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    content = {"multipart/form-data": {"schema": schema, "encoding": encoding or {}}}
    return document("/thing", "post", requestBody={"required": True, "content": content}, **more)


async def parts(doc: dict[str, Any], echo: Echo, **arguments: Any) -> list[dict[str, Any]]:
    echo.seen.clear()
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute("api.call", arguments)
    (seen,) = echo.seen
    return seen.parts


async def refused(doc: dict[str, Any], echo: Echo, **arguments: Any) -> CallError:
    echo.seen.clear()
    async with imported(doc, base_url=echo.url) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", arguments)
    assert echo.seen == []
    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    return caught.value


def with_headers(
    properties: dict[str, Any], headers: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """A document with headers of the part `file`."""
    return upload(properties, {"file": {"headers": headers}}, **more)


async def test_headers_of_a_part_are_an_argument(echo: Echo) -> None:
    headers = {
        "X-Rate": {"schema": {"type": "integer"}},
        "X-Tags": {"schema": {"type": "array", "items": STRING}},
        "X-Meta": {"content": {"application/json": {"schema": {"type": "object"}}}},
        "X-Other": {"schema": STRING},
    }
    given = {"X-Rate": 7, "X-Tags": ["a", "b"], "X-Meta": {"k": 1}}
    (part,) = await parts(
        with_headers({"file": FILE}, headers),
        echo,
        body={"file": "AAE="},
        part_headers={"file": given},
    )

    assert part["content"] == b"\0\1"
    assert part["headers"] == {
        "content-disposition": 'form-data; name="file"; filename="file"',
        "content-type": "application/octet-stream",
        "x-rate": "7",
        "x-tags": "a,b",
        "x-meta": '{"k":1}',
    }


async def test_headers_of_a_part_are_checked_like_other_arguments(echo: Echo) -> None:
    doc = with_headers({"file": STRING}, {"X-Rate": {"schema": {"type": "integer"}}})
    wrongs: list[Any] = [{"file": {"X-Rate": "x"}}, {"file": {"X-Nope": 1}}, {"nope": {}}, 7]
    for wrong in wrongs:
        await refused(doc, echo, body={"file": "x"}, part_headers=wrong)


@pytest.mark.parametrize("schema", [{"const": "a"}, {"enum": ["a"]}, {"default": "a"}])
async def test_a_required_header_with_a_value_of_its_own_needs_no_argument(
    schema: Any, echo: Echo
) -> None:
    doc = with_headers({"file": STRING}, {"X-Kind": {"required": True, "schema": schema}})
    (part,) = await parts(doc, echo, body={"file": "x"})
    assert part["headers"]["x-kind"] == "a"


async def test_no_header_is_invented(echo: Echo) -> None:
    headers = {
        "X-Optional": {"schema": {"const": "a"}},
        "X-Example": {"schema": {"type": "string", "example": "a"}, "example": "b"},
    }
    (part,) = await parts(with_headers({"file": STRING}, headers), echo, body={"file": "x"})
    assert set(part["headers"]) == {"content-disposition"}


async def test_a_required_header_must_be_given_with_its_part(echo: Echo) -> None:
    headers = {"X-Sum": {"required": True, "schema": STRING}}
    doc = with_headers({"file": STRING, "note": STRING}, headers)
    (part,) = await parts(doc, echo, body={"note": "x"})
    assert part["name"] == "note"
    error = await refused(doc, echo, body={"file": "x"})
    assert error.details["errors"][0]["path"] == "/part_headers/file/X-Sum"
    assert "part_headers" in error.message


def test_a_required_header_of_a_required_part_is_in_the_schema() -> None:
    doc = with_headers(
        {"file": STRING}, {"X-Sum": {"required": True, "schema": STRING}}, required=("file",)
    )
    (operation,) = from_openapi(doc, HTTPServiceConfig(namespace="api"))
    schema: Any = operation.spec.input_schema.document
    assert schema["required"] == ["body", "part_headers"]
    assert schema["properties"]["part_headers"]["required"] == ["file"]


async def test_every_item_of_a_list_can_have_headers_of_its_own(echo: Echo) -> None:
    doc = with_headers({"file": {"type": "array", "items": FILE}}, {"X-Sum": {"schema": STRING}})
    body = {"file": ["AAE=", "AAI="]}
    given = {"file": [{"X-Sum": "one"}, {"X-Sum": "two"}]}
    both = await parts(doc, echo, body=body, part_headers=given)
    assert [part["headers"]["x-sum"] for part in both] == ["one", "two"]
    both = await parts(doc, echo, body=body, part_headers={"file": {"X-Sum": "same"}})
    assert [part["headers"]["x-sum"] for part in both] == ["same", "same"]


async def test_declared_headers_may_be_references_and_broken_ones_are_skipped(
    echo: Echo,
) -> None:
    headers = {
        "X-Sum": {"$ref": "#/components/headers/Sum"},
        "X-Gone": {"$ref": "#/components/headers/Gone"},
        "Content-Type": {"schema": {"const": "text/evil"}, "required": True},
        "Content-Disposition": {"schema": {"const": "attachment"}, "required": True},
    }
    doc = with_headers(
        {"file": STRING}, headers, components={"headers": {"Sum": {"schema": {"type": "integer"}}}}
    )
    (part,) = await parts(doc, echo, body={"file": "x"}, part_headers={"file": {"X-Sum": 3}})
    assert part["headers"] == {"content-disposition": 'form-data; name="file"', "x-sum": "3"}


@pytest.mark.requirement("R03")
async def test_no_header_of_a_part_can_add_a_line(echo: Echo) -> None:
    doc = with_headers({"file": STRING}, {"X-Note": {"schema": STRING}})
    for hostile in ("a\r\nX-Evil: 1", "a\nb", "a\0b"):
        given = {"file": {"X-Note": hostile}}
        await refused(doc, echo, body={"file": "x"}, part_headers=given)


async def test_a_transfer_encoding_is_declared_and_applied(echo: Echo) -> None:
    headers = {"Content-Transfer-Encoding": {"required": True, "schema": {"enum": ["base64"]}}}
    (part,) = await parts(with_headers({"file": FILE}, headers), echo, body={"file": "AAE="})
    assert part["headers"]["content-transfer-encoding"] == "base64"
    assert part["content"] == b"\0\1"  # the reader takes it off again
    assert b"AAE=" in echo.seen[0].body


async def test_the_argument_is_renamed_if_the_document_uses_its_name(echo: Echo) -> None:
    doc = with_headers(
        {"file": STRING, "part_headers": STRING},
        {"X-Sum": {"schema": STRING}},
        parameters=[{"name": "part_headers_", "in": "query", "schema": STRING}],
    )
    echo.seen.clear()
    async with imported(doc, base_url=echo.url, flatten_body=True) as registry:
        await registry.execute(
            "api.call",
            {
                "file": "x",
                "part_headers": "y",
                "part_headers_": {"file": {"X-Sum": "1"}},
                "part_headers__query": "q",
            },
        )
    (seen,) = echo.seen
    assert seen.query == "part_headers_=q"
    assert [(p["name"], p["headers"].get("x-sum")) for p in seen.parts] == [
        ("file", "1"),
        ("part_headers", None),
    ]


async def test_a_style_does_not_convert_files_to_text(echo: Echo) -> None:
    encoding = {"file": {"style": "form", "explode": True}}
    doc = upload({"file": {"type": "array", "items": FILE}}, encoding)
    both = await parts(doc, echo, body={"file": ["AAE=", "AAI="]})
    assert [part["content"] for part in both] == [b"\0\1", b"\0\2"]


async def test_parts_can_be_distinguished_by_their_place(echo: Echo) -> None:
    echo.seen.clear()
    media = {
        "schema": {"type": "array", "prefixItems": [{"type": "object"}], "items": FILE},
        "prefixEncoding": [{}],
        "itemEncoding": {"contentType": "image/png"},
    }
    body = {"required": True, "content": {"multipart/mixed": media}}
    doc = document("/thing", "post", requestBody=body)
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute("api.call", {"body": [{"a": 1}, "AAE=", "AAI="]})

    (seen,) = echo.seen
    assert (seen.header("content-type") or "").startswith("multipart/mixed; boundary=")
    first, *rest = seen.body.split(b"\r\n--")
    assert first.endswith(b'Content-Type: application/json\r\n\r\n{"a":1}')
    assert rest[0].endswith(b"Content-Type: image/png\r\n\r\n\0\1")
    assert b"Content-Disposition" not in seen.body


@pytest.mark.requirement("R03")
async def test_a_body_of_several_types_can_name_its_type(echo: Echo) -> None:
    echo.seen.clear()
    doc = document("/thing", "put", requestBody={"content": {"image/*": {}}})
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute(
            "api.call", {"body": {"content": "AAE=", "contentType": "image/gif"}}
        )
        with pytest.raises(CallError) as caught:
            await registry.execute(
                "api.call", {"body": {"content": "AAE=", "contentType": "a\r\nX-Evil: 1"}}
            )

    (seen,) = echo.seen
    assert (seen.header("content-type"), seen.body) == ("image/gif", b"\0\1")
    assert caught.value.code == ErrorCode.VALIDATION_ERROR


@pytest.mark.requirement("R03")
async def test_the_type_of_a_part_keeps_its_quotes_and_cannot_end_its_header(echo: Echo) -> None:
    echo.seen.clear()
    file = {"text": "hi", "filename": "a.txt"}
    async with imported(upload({"file": FILE}), base_url=echo.url) as registry:
        kind = 'text/plain; charset="utf-8"'
        await registry.execute("api.call", {"body": {"file": {**file, "contentType": kind}}})
        with pytest.raises(CallError) as caught:
            kind = "text/plain\r\nX-Evil: 1"
            await registry.execute("api.call", {"body": {"file": {**file, "contentType": kind}}})

    (seen,) = echo.seen
    assert b'Content-Type: text/plain; charset="utf-8"\r\n' in seen.body
    assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_a_file_in_a_url_encoded_form_is_sent_as_its_content(echo: Echo) -> None:
    schema = {
        "type": "object",
        "properties": {"file": FILE, "more": {"type": "array", "items": FILE}, "note": STRING},
    }
    body = {"content": {"application/x-www-form-urlencoded": {"schema": schema}}}
    echo.seen.clear()
    async with imported(document("/t", "post", requestBody=body), base_url=echo.url) as registry:
        given = {"file": {"content": "AP8m", "filename": "a.bin"}, "more": ["YQ==", "Yg=="]}
        await registry.execute("api.call", {"body": {**given, "note": "x y"}})
    (seen,) = echo.seen
    assert seen.body == b"file=%00%FF%26&more=a&more=b&note=x+y"


NULL = {"type": "null"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"], "format": "binary"},
        {"anyOf": [FILE, NULL]},
        {"oneOf": [NULL, {"type": "string", "contentMediaType": "application/octet-stream"}]},
        {"anyOf": [FILE, {"type": "array", "items": FILE}]},
        {"allOf": [FILE], "description": "A photo."},
        {"$ref": "#/components/schemas/Optional"},
    ],
)
async def test_a_file_is_recognised_in_a_union(schema: dict[str, Any], echo: Echo) -> None:
    named = {"schemas": {"Optional": {"anyOf": [FILE, NULL]}}}
    doc = upload({"file": schema}, components=named)
    for value in ("AAE=", b"\0\1", {"content": "AAE=", "filename": "file"}):
        (part,) = await parts(doc, echo, body={"file": value})
        assert (part["content"], part["filename"]) == (b"\0\1", "file")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["array", "null"], "items": FILE},
        {"anyOf": [{"type": "array", "items": FILE}, NULL]},
        {"anyOf": [FILE, {"type": "array", "items": {"anyOf": [FILE, NULL]}}]},
    ],
)
async def test_files_are_recognised_in_an_optional_list(schema: dict[str, Any], echo: Echo) -> None:
    found = await parts(upload({"file": schema}), echo, body={"file": ["AAE=", "AAI="]})
    assert [(part["content"], part["filename"]) for part in found] == [
        (b"\0\1", "file"),
        (b"\0\2", "file"),
    ]


@pytest.mark.parametrize(
    "schema", [{"type": ["string", "null"], "format": "binary"}, {**FILE, "nullable": True}]
)
async def test_an_optional_file_may_be_null(schema: dict[str, Any], echo: Echo) -> None:
    assert await parts(upload({"file": schema}), echo, body={"file": None}) == []
    doc = upload({"file": schema}, required=("file",))
    (part,) = await parts(doc, echo, body={"file": None})
    assert (part["content"], part["filename"]) == (b"", None)


@pytest.mark.parametrize("kind", ["multipart/form-data", "application/x-www-form-urlencoded"])
async def test_null_for_an_optional_field_means_absent(kind: str, echo: Echo) -> None:
    null = {"type": ["integer", "null"]}
    schema = {
        "type": "object",
        "properties": {"a": null, "b": null, "c": {**null, "default": 1}, "d": null},
        "required": ["b"],
    }
    media = {"schema": schema, "encoding": {"d": {"contentType": "application/json"}}}
    doc = document("/thing", "post", requestBody={"content": {kind: media}})
    echo.seen.clear()
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute("api.call", {"body": dict.fromkeys("abcde")})
    (seen,) = echo.seen
    if kind.startswith("multipart"):
        sent = [(part["name"], part["content"].decode()) for part in seen.parts]
    else:
        sent = seen.form
    assert sent == [("b", ""), ("c", ""), ("d", "null"), ("e", "")]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": FILE},
        {"type": "object", "additionalProperties": {"anyOf": [FILE, NULL]}},
        {
            "oneOf": [
                {"type": "object", "properties": {"file": FILE}, "required": ["file"]},
                {"type": "object", "properties": {"url": STRING}, "required": ["url"]},
            ]
        },
        {"$ref": "#/components/schemas/Either"},
    ],
)
async def test_a_file_is_recognised_in_every_form(schema: dict[str, Any], echo: Echo) -> None:
    plain = {"type": "object", "properties": {"url": STRING}, "required": ["url"]}
    either = {"anyOf": [plain, {"type": "object", "properties": {"file": FILE}}]}
    doc = document(
        "/thing",
        "post",
        requestBody={"content": {"multipart/form-data": {"schema": schema}}},
        components={"schemas": {"Either": either}},
    )
    (part,) = await parts(doc, echo, body={"file": "AAE="})
    assert (part["content"], part["filename"]) == (b"\0\1", "file")


@pytest.mark.parametrize("is_named", [False, True])
async def test_a_part_of_any_type_is_a_file_if_its_encoding_is_binary(
    is_named: bool, echo: Echo
) -> None:
    properties: dict[str, Any] = {
        "title": {},
        "note": {},
        "photo": {"description": "A photo."},
        "all": {"type": "array", "items": {}},
    }
    form = {"type": "object", "properties": properties}
    encoding = {
        "photo": {"contentType": "image/png, image/jpeg"},
        "all": {"contentType": "*/*"},
        "note": {"contentType": "text/plain"},
    }
    schema = {"$ref": "#/components/schemas/Form"} if is_named else form
    content = {"multipart/form-data": {"schema": schema, "encoding": encoding}}
    doc = document("/thing", "post", requestBody={"content": content})
    doc["components"] = {"schemas": {"Form": form}}
    body = {
        "title": "aGk=",
        "note": "aGk=",
        "photo": {"content": "aGk=", "filename": "a.png"},
        "all": ["aGk=", {"text": "hi", "filename": "b"}],
    }
    sent = await parts(doc, echo, body=body)

    found = [(part["name"], part["filename"], part["content"]) for part in sent]
    assert found == [
        ("title", None, b"aGk="),
        ("note", None, b"aGk="),
        ("photo", "a.png", b"hi"),
        ("all", "all", b"hi"),
        ("all", "b", b"hi"),
    ]


async def test_a_forbidden_part_is_not_a_file(echo: Echo) -> None:
    form = {"type": "object", "properties": {"old": False, "photo": True}}
    encoding = {name: {"contentType": "image/png"} for name in ("old", "photo")}
    content = {"multipart/form-data": {"schema": form, "encoding": encoding}}
    doc = document("/thing", "post", requestBody={"content": content})
    (part,) = await parts(doc, echo, body={"photo": "aGk="})
    assert (part["name"], part["content"]) == ("photo", b"hi")
    with pytest.raises(CallError) as caught:
        await parts(doc, echo, body={"old": "aGk="})
    assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_text_stays_text_where_a_file_is_possible(echo: Echo) -> None:
    doc = upload({"file": {"anyOf": [STRING, FILE]}})
    (part,) = await parts(doc, echo, body={"file": "AAE="})
    assert (part["content"], part["filename"]) == (b"AAE=", None)


@pytest.mark.parametrize("kind", ["multipart/form-data", "application/x-www-form-urlencoded"])
async def test_text_that_contains_json_is_not_a_file(kind: str, echo: Echo) -> None:
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": {}}
    schema = {"type": "object", "properties": {"data": text}}
    body = {"content": {kind: {"schema": schema}}}
    doc = document("/thing", "post", requestBody=body)
    echo.seen.clear()
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute("api.call", {"body": {"data": '{"a": 1}'}})
    (seen,) = echo.seen
    if kind.startswith("multipart"):
        assert [part["content"] for part in seen.parts] == [b'{"a": 1}']
    else:
        assert seen.form == [("data", '{"a": 1}')]


async def test_a_form_with_an_optional_file_is_preferred_to_json(echo: Echo) -> None:
    def form(file: dict[str, Any]) -> dict[str, Any]:
        return {"schema": {"type": "object", "properties": {"file": file}}}

    content = {
        "application/json": {"schema": {"type": "object", "properties": {"url": STRING}}},
        "multipart/form-data": form({"anyOf": [FILE, NULL]}),
    }
    doc = document("/thing", "post", requestBody={"content": content})
    (part,) = await parts(doc, echo, body={"file": "AAE="})
    assert part["content"] == b"\0\1"


@pytest.mark.parametrize("schema", [STRING, FILE])
@pytest.mark.parametrize("field", ["photo", "photos", "title"])
async def test_a_file_of_this_process_is_sent_in_a_form_and_not_in_json(
    schema: dict[str, Any], field: str, echo: Echo
) -> None:
    def described(photo: dict[str, Any]) -> dict[str, Any]:
        photos = {"type": "array", "items": photo}
        properties = {"photo": photo, "photos": photos, "title": STRING}
        return {"schema": {"type": "object", "properties": properties}}

    content = {"application/json": described(schema), "multipart/form-data": described(FILE)}
    doc = document("/thing", "post", requestBody={"content": content})
    (part,) = await parts(doc, echo, body={field: [b"hi"] if field == "photos" else b"hi"})

    assert part["content"] == b"hi"


@pytest.mark.parametrize(
    "malformed", [{"type": [{}]}, {"type": [[]]}, {"format": []}, {"format": {}}], ids=str
)
async def test_a_malformed_keyword_does_not_make_its_operation_unusable(
    malformed: dict[str, Any], echo: Echo
) -> None:
    (part,) = await parts(upload({"file": malformed}), echo, body={"file": "x"})
    assert part["content"] == b"x"

    octets = {"application/octet-stream": {"schema": malformed}}
    doc = document(
        "/thing",
        "post",
        requestBody={"content": octets},
        responses={"200": {"description": "", "content": octets}},
    )
    async with imported(doc, base_url=echo.url) as registry:
        await registry.execute("api.call", {"body": b"hi"})


async def test_an_object_with_the_content_of_a_file_is_a_file_if_nothing_else_is_declared(
    echo: Echo,
) -> None:
    file = {"content": b"\0\1", "filename": "a.bin", "contentType": "image/png"}
    declared = {"type": "object", "properties": {"content": STRING}}
    doc = upload({"file": {"description": "Anything."}, "files": {}, "json": declared})
    body = {"file": file, "files": [file], "json": {"content": b"\0\1"}, "more": file}
    found = await parts(doc, echo, body={**body, "text": {"content": "AAE=", "filename": "a"}})
    as_file = (b"\0\1", "a.bin", "image/png")
    assert [(p["name"], p["content"], p["filename"], p["type"]) for p in found] == [
        ("file", *as_file),
        ("files", *as_file),
        ("json", b'{"content":"AAE="}', None, "application/json"),
        ("more", *as_file),
        ("text", b'{"content":"AAE=","filename":"a"}', None, "application/json"),
    ]
