"""Bodies and parameters at their edges: odd values, bytes in process, other media types."""

import json
import zlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tests.openapi.echo import Echo
from tests.openapi.serving import document, imported

from operations import CallError, ErrorCode
from operations.io.http.decoding import decoded
from operations.openapi.reading.model import Media, Parameter
from operations.openapi.reading.references import References
from operations.openapi.reading.schemas import SchemaConverter
from operations.openapi.source.bodies import Payload, write_body
from operations.openapi.source.parameters import (
    header_value,
    path_value,
    percent_reserved,
    query_pairs,
)

CHROMADB = Path(__file__).parent / "chromadb.json"
"""An excerpt of the document that ChromaDB serves."""

FORM = "application/x-www-form-urlencoded"
SCHEMAS = SchemaConverter(References({}), ref_siblings=True)


def written(kind: str, value: Any, *, is_bytes: bool = False, **media: Any) -> Payload:
    return write_body(Media(media_type=kind, **media), value, SCHEMAS, is_bytes=is_bytes)


def content_of(kind: str, value: Any, **media: Any) -> bytes:
    content = written(kind, value, **media).content
    assert isinstance(content, bytes)
    return content


@pytest.mark.parametrize(
    ("kind", "value", "is_bytes", "expected"),
    [
        ("application/*+json", {"a": 1}, False, Payload(b'{"a":1}', "application/json")),
        ("*/*", {"a": 1}, False, Payload(b'{"a":1}', "application/json")),
        ("*/*", b"\0", False, Payload(b"\0", "application/octet-stream")),
        ("image/*", "AAE", True, Payload(b"\0\1", "application/octet-stream")),
        (
            "image/*",
            {"content": "AAE=", "contentType": "image/gif"},
            True,
            Payload(b"\0\1", "image/gif"),
        ),
        ("application/zip", bytearray(b"zip"), True, Payload(b"zip", "application/zip")),
        ("application/pdf", {"text": "x"}, True, Payload(b"x", "application/pdf")),
        ("application/jsonl", [1, {"a": 2}], False, Payload(b'1\n{"a":2}\n', "application/jsonl")),
        (
            "application/json-seq",
            [1, 2],
            False,
            Payload(b"\x1e1\n\x1e2\n", "application/json-seq"),
        ),
        (
            "text/plain; charset=latin-1",
            "é",
            False,
            Payload(b"\xe9", "text/plain; charset=latin-1"),
        ),
        (
            "text/plain; charset=ascii",
            "é",
            False,
            Payload("é".encode(), "text/plain; charset=utf-8"),
        ),
        ("text/plain", 7, False, Payload(b"7", "text/plain")),
        (
            "application/x-www-form-urlencoded",
            "a=1",
            False,
            Payload(b"a=1", "application/x-www-form-urlencoded"),
        ),
        (
            "application/x-www-form-urlencoded",
            {"a": None, "b": b"\0"},
            False,
            Payload(b"a=&b=AA%3D%3D", "application/x-www-form-urlencoded"),
        ),
    ],
)
def test_a_body_is_encoded_according_to_its_media_type(
    kind: str, value: Any, is_bytes: bool, expected: Payload
) -> None:
    assert written(kind, value, is_bytes=is_bytes) == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("application/octet-stream", "not base64!"),
        ("application/octet-stream", 7),
        ("application/x-www-form-urlencoded", [1]),
        ("multipart/form-data", "x"),
    ],
)
def test_a_value_that_cannot_be_written_is_rejected(kind: str, value: Any) -> None:
    with pytest.raises(CallError) as caught:
        written(kind, value, is_bytes=True)
    assert caught.value.code == ErrorCode.VALIDATION_ERROR


def test_an_invalid_file_is_rejected() -> None:
    schema = {"properties": {"f": {"type": "string", "format": "binary"}}}
    for value in (7, {}, {"filename": "x"}):
        with pytest.raises(CallError):
            written("multipart/form-data", {"f": value}, schema=schema)


@pytest.mark.requirement("R03")
def test_no_name_or_type_of_a_file_ends_its_header() -> None:
    hostile = 'a"\r\nX-Evil: 1\r\n\r\nb'
    file = {"text": "x", "filename": hostile, "contentType": 'a; b="c"'}
    schema = {"properties": {hostile: {"type": "string", "format": "binary"}}}
    content = content_of("multipart/form-data", {hostile: file}, schema=schema)
    head = content.partition(b"\r\n\r\n")[0]
    assert head.count(b"\r\n") == 2
    assert b"X-Evil: 1\r\n" not in content

    file["contentType"] = hostile
    with pytest.raises(CallError, match="may not contain control characters"):
        written("multipart/form-data", {hostile: file}, schema=schema)


def test_a_field_declared_as_json_is_json_for_every_value() -> None:
    encoding = {"a": {"contentType": "application/json"}}
    for kind, expected in (
        ("application/x-www-form-urlencoded", b"a=%22x%22&b=x"),
        ("multipart/form-data", b'\r\n\r\n"x"\r\n'),
    ):
        value = {"a": "x", "b": "x", "c": []}
        assert expected in content_of(kind, value, encoding=encoding)


def test_a_part_can_be_bytes_or_declared_json() -> None:
    content = content_of(
        "multipart/form-data",
        {"a": b"\0", "b": [1]},
        encoding={"b": {"contentType": "application/json"}},
    )
    assert b'name="a"; filename="a"\r\nContent-Type: application/octet-stream\r\n\r\n\0' in content
    assert b"Content-Type: application/json\r\n\r\n[1]" in content


@pytest.mark.parametrize(
    ("parameter", "value", "expected"),
    [
        ({"style": "form", "explode": True}, [], []),
        ({"style": "form", "explode": True}, {}, []),
        ({"style": "form", "explode": False}, [], ["p="]),
        ({"style": "form", "explode": True}, None, ["p="]),
        ({"style": "form", "explode": False}, ["a", None, "b"], ["p=a,,b"]),
        ({"style": "form", "explode": True}, [{"a": 1}], ["p=%7B%22a%22%3A1%7D"]),
        # As Spring reads a `Pageable`.
        (
            {"style": "form", "explode": True},
            {"n": 1, "s": ["a", 2], "e": []},
            ["n=1", "s=a", "s=2"],
        ),
        ({"style": "form", "explode": True}, {"o": {"x": 1}}, ["o=%7B%22x%22%3A1%7D"]),
        ({"style": "deepObject"}, [{"a": 1}, 2], ["p%5B0%5D%5Ba%5D=1", "p%5B1%5D=2"]),
        ({"style": "deepObject"}, "x", ["p=x"]),
        # Servers read `p=` as text; a field of a form is sent, because some APIs clear a value with it.
        ({"style": "deepObject"}, {}, []),
        ({"style": "deepObject"}, {"a": [], "b": {}}, ["p%5Ba%5D=", "p%5Bb%5D="]),
        ({"style": "form", "media_type": "application/json"}, "x", ["p=%22x%22"]),
        ({"style": "form", "media_type": "text/plain"}, "x y", ["p=x%20y"]),
        ({"style": "pipeDelimited", "explode": True}, ["a", "b"], ["p=a", "p=b"]),
    ],
)
def test_query_edge_cases(parameter: dict[str, Any], value: Any, expected: list[str]) -> None:
    assert query_pairs(Parameter(name="p", place="query", **parameter), value) == expected


@pytest.mark.parametrize(
    ("kind", "value", "encoding", "expected"),
    [
        ("application/json", {"a": 1}, {}, "%7B%22a%22%3A1%7D"),
        ("application/jsonpath", "$.a[0]", {}, "%24.a%5B0%5D"),
        (FORM, {"a": [1, 2]}, {}, "a=1&a=2"),
        # The example of the specification.
        (FORM, {"foo": "a + b", "bar": True}, {}, "foo=a+%2B+b&bar=true"),
        (FORM, {"o": {"x": 1}}, {}, "o=%7B%22x%22%3A1%7D"),
        (
            FORM,
            {"a": [1, 2], "o": {"x": 1}},
            {"a": {"explode": False}, "o": {"style": "deepObject"}},
            "a=1,2&o%5Bx%5D=1",
        ),
    ],
)
async def test_the_whole_query_is_one_parameter(
    kind: str, value: Any, encoding: Any, expected: str, echo: Echo
) -> None:
    content = {kind: {"schema": {}, "encoding": encoding}}
    doc = document(parameters=[{"name": "q", "in": "querystring", "content": content}])
    echo.seen.clear()
    async with imported({**doc, "openapi": "3.2.0"}, base_url=echo.url) as registry:
        await registry.execute("api.call", {"q": value})
    assert [seen.query for seen in echo.seen] == [expected]


async def test_a_whole_query_needs_no_name(echo: Echo) -> None:
    content: Any = {FORM: {"schema": {"type": "object"}}}
    doc = document(parameters=[{"in": "querystring", "content": content}])
    echo.seen.clear()
    async with imported({**doc, "openapi": "3.2.0"}, base_url=echo.url) as registry:
        await registry.execute("api.call", {"querystring": {"a": "b"}})
    assert [seen.query for seen in echo.seen] == ["a=b"]


def test_parameters_with_content_are_sent_in_every_location() -> None:
    where: Any = {"name": "p", "media_type": "application/json"}
    assert path_value(Parameter(place="path", **where), {"a": 1}) == "%7B%22a%22%3A1%7D"
    assert header_value(Parameter(place="header", **where), {"a": 1}) == '{"a":1}'


def test_reserved_characters_are_kept_except_those_that_change_the_query() -> None:
    assert percent_reserved("a/b:c?d[e]@!$'()*,;=") == "a/b:c?d[e]@!$'()*,;="
    assert percent_reserved("a&b#c+d e") == "a%26b%23c%2Bd%20e"
    assert percent_reserved("%20 %zz 100%") == "%20%20%25zz%20100%25"


class _Response:
    """A response whose body comes in pieces."""

    status, reason = 200, "OK"

    def __init__(self, coding: str, *pieces: bytes) -> None:
        self.headers = {"content-encoding": coding}
        self._pieces = pieces

    async def chunks(self) -> AsyncGenerator[bytes]:
        for piece in self._pieces:
            yield piece


@pytest.mark.parametrize(
    ("coding", "content"),
    [("br", b"x"), ("gzip", b"no gzip"), ("gzip, gzip", b""), ("deflate", b"\xff\xff")],
)
async def test_content_codings_that_were_not_requested_are_errors(
    coding: str, content: bytes
) -> None:
    with pytest.raises(CallError) as caught:
        async for _ in decoded(_Response(coding, content)):
            pass
    assert caught.value.code == ErrorCode.EXECUTION_ERROR


async def test_raw_deflate_is_decoded() -> None:
    packer = zlib.compressobj(wbits=-15)
    content = packer.compress(b"x" * 100_000) + packer.flush()
    halves = _Response("deflate", content[:5], content[5:])
    assert b"".join([piece async for piece in decoded(halves)]) == b"x" * 100_000


@pytest.mark.parametrize(
    ("kind", "value", "content", "sent"),
    [
        ("application/json; charset=utf-16", {"a": "é"}, '{"a":"é"}', "application/json"),
        ("application/json; charset=UTF-8", {"a": "é"}, '{"a":"é"}', None),
        ("application/json; charset=no; v=2", "é", '"é"', "application/json; v=2"),
        ("application/x-ndjson; charset=utf-16", ["é"], '"é"\n', "application/x-ndjson"),
        (f"{FORM}; charset=utf8", {"é": "é &"}, "%C3%A9=%C3%A9+%26", None),
    ],
)
def test_json_and_forms_in_utf8_are_sent_in_utf8(
    kind: str, value: Any, content: str, sent: str | None
) -> None:
    assert written(kind, value) == Payload(content.encode(), sent or kind)


@pytest.mark.parametrize(
    ("charset", "content", "is_kept"),
    [
        ("latin-1", b"%E9=%E9+%26&list=%E9&list=x", True),
        ("utf-8", b"%C3%A9=%C3%A9+%26&list=%C3%A9&list=x", True),
        ("ascii", b"%C3%A9=%C3%A9+%26&list=%C3%A9&list=x", False),
        ("utf-16", b"%C3%A9=%C3%A9+%26&list=%C3%A9&list=x", False),
        ("unknown", b"%C3%A9=%C3%A9+%26&list=%C3%A9&list=x", False),
    ],
)
def test_a_form_is_sent_in_the_charset_of_its_content_type(
    charset: str, content: bytes, is_kept: bool
) -> None:
    kind = f"{FORM}; charset={charset}"
    sent = written(kind, {"é": "é &", "list": ["é", "x"]})
    assert sent == Payload(content, kind if is_kept else FORM)


@pytest.mark.parametrize(
    ("kind", "value", "content"),
    [
        ("text/plain; charset=utf-16", "é", "é".encode("utf-16")),
        ("text/plain; charset=no", "é", "é".encode()),
        ("application/json; charset=utf-8", {"a": "é"}, '{"a":"é"}'.encode()),
    ],
)
def test_a_part_is_sent_in_the_charset_of_its_content_type(
    kind: str, value: Any, content: bytes
) -> None:
    body = content_of("multipart/form-data", {"p": value}, encoding={"p": {"contentType": kind}})
    head, _, rest = body.partition(b"\r\n\r\n")
    assert rest.startswith(content + b"\r\n--")
    sent = head.partition(b"Content-Type: ")[2].decode()
    assert sent == ("text/plain; charset=utf-8" if kind.endswith("=no") else kind)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "byte"},
        {"type": "string", "format": "base64"},
        {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"},
    ],
)
@pytest.mark.parametrize("value", ["-_8", b"\xfb\xff", {"content": "+/8="}])
def test_a_body_that_its_schema_declares_as_base64_is_sent_as_base64(
    schema: dict[str, Any], value: Any
) -> None:
    payload = written("image/png", value, is_bytes=True, schema=schema)
    assert payload == Payload(b"+/8=", "image/png")


def test_a_body_that_its_schema_declares_as_base64url_is_sent_in_its_alphabet() -> None:
    schema = {"type": "string", "contentEncoding": "base64url"}
    payload = written("image/png", "+/8=", is_bytes=True, schema=schema)
    assert payload == Payload(b"-_8=", "image/png")


async def test_an_empty_list_in_a_cookie_is_not_sent(echo: Echo) -> None:
    cookies = [{"name": name, "in": "cookie", "schema": {"type": "array"}} for name in "ab"]
    async with imported(document(parameters=cookies), base_url=echo.url) as registry:
        await registry.execute("api.call", {"a": [], "b": [1]})
        assert echo.seen[-1].header("cookie") == "b=1"
        await registry.execute("api.call", {"a": [], "b": []})
        assert echo.seen[-1].header("cookie") is None


@pytest.mark.requirement("R27")
async def test_a_body_that_matches_several_members_of_a_one_of_is_sent(echo: Echo) -> None:
    """ChromaDB declares `oneOf: [integer, number]` in its own document, and accepts 1."""
    doc = json.loads(CHROMADB.read_text())
    metadata = {"integer": 1, "number": 1.5, "text": "a", "list": [1, 2]}
    where = {"tenant": "default", "database": "default"}
    echo.seen.clear()
    async with imported(doc, base_url=echo.url) as registry:
        given = {**where, "body": {"name": "papers", "metadata": metadata}}
        await registry.execute("api.create_collection", given)
        with pytest.raises(CallError) as caught:
            given = {**where, "body": {"name": "papers", "metadata": {"x": {"y": 1}}}}
            await registry.execute("api.create_collection", given)

    assert [json.loads(seen.body)["metadata"] for seen in echo.seen] == [metadata]
    assert caught.value.code == ErrorCode.VALIDATION_ERROR
