"""Responses: data by media type, errors with their bodies, limits, retries, time."""

import asyncio
import base64
import gc
import gzip
import json
import re
import time
import zlib
from typing import Any

import pytest
from aiohttp import web
from tests.limits import time_limit
from tests.openapi.serving import document, imported, serving, writing

from operations import CallError, ErrorCode, OperationContext, OperationRegistry
from operations.base.retry import retry_after
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.tools import ToolConfig, configure_tools


def responding(content: bytes, content_type: str | None, status: int = 200, **headers: str) -> Any:
    async def respond(request: web.Request) -> web.Response:
        extra = {name.replace("_", "-"): value for name, value in headers.items()}
        response = web.Response(body=content, status=status, headers=extra)
        if content_type is None:
            response.headers["Content-Type"] = ""
        else:
            response.headers["Content-Type"] = content_type
        return response

    return respond


BARE = {"200": {"description": "ok"}}
SCHEMALESS = document(responses=BARE)


@pytest.mark.parametrize(
    ("content", "content_type", "data"),
    [
        (b'{"a":[1,null]}', "application/json", {"a": [1, None]}),
        (b'{"a":1}', "application/problem+json; charset=utf-8", {"a": 1}),
        (b'{"a":1}', "Application/JSON", {"a": 1}),
        ('{"a":"é"}'.encode("latin-1"), "application/json; charset=iso-8859-1", {"a": "é"}),
        ('{"a":"é"}'.encode("utf-16"), "application/json", {"a": "é"}),
        ('{"a":"é"}'.encode("utf-16-le"), "application/json", {"a": "é"}),
        (b'\xef\xbb\xbf{"a":1}', "application/json", {"a": 1}),
        (b"123456789012345678901234567890", "application/json", 123456789012345678901234567890),
        (b"null", "application/json", None),
        ("héllo".encode(), "text/plain; charset=utf-8", "héllo"),
        ("héllo".encode("latin-1"), "text/plain; charset=latin-1", "héllo"),
        (b"<a/>", "application/xml", "<a/>"),
        (b"\x89PNG\0", "image/png", b"\x89PNG\0"),
        (b"\0\1", "application/octet-stream", b"\0\1"),
        (b"anything", None, b"anything"),
        (b"", "application/json", None),
    ],
)
async def test_data_has_the_form_of_the_media_type(
    content: bytes, content_type: str | None, data: Any
) -> None:
    async with (
        serving(responding(content, content_type)) as url,
        imported(SCHEMALESS, base_url=url) as registry,
    ):
        envelope = await registry.execute("api.call", {})

    assert envelope.data == data
    assert envelope.meta.source == "http"
    assert envelope.meta.status_code == 200


@pytest.mark.requirement("R52")
@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8"])
async def test_json_that_is_not_unicode_is_an_error_not_other_text(content_type: str) -> None:
    async with (
        serving(responding(b'{"a":"\xff"}', content_type)) as url,
        imported(SCHEMALESS, base_url=url) as registry,
    ):
        with pytest.raises(CallError, match="is not JSON"):
            await registry.execute("api.call", {})


async def test_an_envelope_has_status_headers_and_content_type() -> None:
    async def respond(request: web.Request) -> web.Response:
        response = web.json_response({"a": 1}, status=201)
        response.headers.add("X-Many", "a")
        response.headers.add("X-Many", "b")
        return response

    async with serving(respond) as url, imported(SCHEMALESS, base_url=url) as registry:
        meta: Any = (await registry.execute("api.call", {})).meta

    assert meta.status_code == 201
    assert meta.headers["x-many"] == "a, b"
    assert meta.content_type == "application/json; charset=utf-8"


async def test_responses_without_content_and_head_return_none() -> None:
    async def respond(request: web.Request) -> web.Response:
        if request.method == "HEAD":
            return web.Response(
                headers={"Content-Type": "application/json", "Content-Length": "10"}
            )
        return web.Response(status=204)

    async with serving(respond) as url:
        for method in ("delete", "head"):
            doc = document("/thing", method, responses=BARE)
            async with imported(doc, base_url=url) as registry:
                assert (await registry.execute("api.call", {})).data is None


async def test_json_with_another_content_type_is_decoded_if_json_is_declared() -> None:
    for kind in ("text/plain", "text/html", None):
        async with (
            serving(responding(b'{"a":1}', kind)) as url,
            imported(document(), base_url=url) as registry,
        ):
            assert (await registry.execute("api.call", {})).data == {"a": 1}


@pytest.mark.parametrize("kind", ["application/json", "text/html"])
async def test_invalid_json_is_an_error(kind: str) -> None:
    async with (
        serving(responding(b"<html>sign in</html>", kind)) as url,
        imported(document(), base_url=url) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.EXECUTION_ERROR


@pytest.mark.requirement("R28")
@pytest.mark.parametrize("content", [b"NaN", b'{"a":Infinity}', b"[" * 100_000, b"{"])
async def test_input_that_is_not_json_is_rejected(content: bytes) -> None:
    async with (
        serving(responding(content, "application/json")) as url,
        imported(SCHEMALESS, base_url=url) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.EXECUTION_ERROR


async def test_an_error_status_is_raised_with_the_response_in_its_details() -> None:
    content = json.dumps({"reason": "gone"}).encode()
    async with (
        serving(responding(content, "application/problem+json", 404, X_Trace="t1")) as url,
        imported(SCHEMALESS, base_url=url) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    error = caught.value
    assert (error.code, error.message) == (ErrorCode.EXECUTION_ERROR, "HTTP 404: Not Found")
    assert error.details["statusCode"] == 404
    assert error.details["headers"]["x-trace"] == "t1"
    assert error.details["contentType"] == "application/problem+json"
    assert error.details["body"] == {"reason": "gone"}
    assert not error.retryable


@pytest.mark.requirement("R17")
async def test_an_errors_body_is_capped() -> None:
    async with (
        serving(responding(b"x" * 200_000, "text/plain", 400)) as url,
        imported(SCHEMALESS, base_url=url) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert len(caught.value.details["body"]) == 64 << 10
    assert caught.value.details["truncated"] is True


@pytest.mark.requirement("R16")
async def test_an_error_can_be_encoded_and_shows_no_credential() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 400 \xff s3cret-key\r\nContent-Type: text/plain; charset=unicode_escape; a=s3cret-key"
        writer.write(head + b"\r\nContent-Length: 6\r\n\r\n\\udcff")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with (
        server,
        imported(
            SCHEMALESS, base_url=url, auth={"type": "bearer", "token": "s3cret-key"}
        ) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    error = json.dumps([caught.value.message, caught.value.details], ensure_ascii=False)
    assert "s3cret-key" not in error.encode().decode()
    assert caught.value.details["body"] == "\\udcff"


async def test_bytes_in_an_error_are_base64() -> None:
    async with (
        serving(responding(b"\x00\xff", "application/pdf", 400)) as url,
        imported(SCHEMALESS, base_url=url) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert caught.value.details["body"] == "AP8="
    assert caught.value.details["encoding"] == "base64"


@pytest.mark.parametrize(
    ("coding", "encode"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("identity", bytes),
        ("identity, gzip", gzip.compress),
    ],
)
async def test_content_codings_are_decoded(coding: str, encode: Any) -> None:
    content = json.dumps(["x" * 300_000]).encode()
    async with (
        serving(responding(encode(content), "application/json", Content_Encoding=coding)) as url,
        imported(SCHEMALESS, base_url=url) as registry,
    ):
        assert (await registry.execute("api.call", {})).data == ["x" * 300_000]


async def test_a_gzip_file_may_have_several_members() -> None:
    parts = gzip.compress(b'["a",') + gzip.compress(b'"b"]') + bytes(8)
    async with (
        serving(responding(parts, "application/json", Content_Encoding="gzip")) as url,
        imported(SCHEMALESS, base_url=url) as registry,
    ):
        assert (await registry.execute("api.call", {})).data == ["a", "b"]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_truncated_compressed_response_is_an_error(coding: str) -> None:
    whole = (gzip if coding == "gzip" else zlib).compress(b"some text" * 1000)
    async with (
        serving(responding(whole[:-20], "text/plain", Content_Encoding=coding)) as url,
        imported(SCHEMALESS, base_url=url) as registry,
    ):
        with pytest.raises(CallError, match="incomplete"):
            await registry.execute("api.call", {})


async def received(
    body: bytes, kind: str, content: dict[str, Any] | None = None, **headers: str
) -> Any:
    """Return the data of a call whose response is `body`, declared as `content`."""
    doc = SCHEMALESS
    if content is not None:
        doc = document(responses={"200": {"description": "ok", "content": content}})
    async with (
        serving(responding(body, kind, 200, **headers)) as url,
        imported(doc, base_url=url) as registry,
    ):
        return (await registry.execute("api.call", {})).data


async def test_an_empty_compressed_body_is_empty() -> None:
    assert await received(b"", "application/json", Content_Encoding="gzip") is None


@pytest.mark.parametrize(
    ("kind", "declared", "encoding"),
    [
        ("application/xml", "windows-1251", "windows-1251"),
        ("text/xml", "shift_jis", "shift_jis"),
        ("application/atom+xml", "iso-8859-5", "iso-8859-5"),
        ("application/xml; charset=utf-8", "windows-1251", "utf-8"),
    ],
)
async def test_xml_is_read_in_the_encoding_that_it_declares(
    kind: str, declared: str, encoding: str
) -> None:
    text = f"<?xml version='1.0' encoding='{declared}'?><a>\u043f</a>"
    assert await received(text.encode(encoding), kind) == text


@pytest.mark.parametrize(
    ("charset", "encoding", "text"),
    [
        ("gb2312", "gbk", "\u9555"),
        ("Shift_JIS", "cp932", "\u2460"),
        ("EUC-KR", "cp949", "\ub620"),
    ],
)
async def test_a_charset_may_be_named_after_a_part_of_it(
    charset: str, encoding: str, text: str
) -> None:
    for kind, content in (("text/plain", text), ("application/json", f'"{text}"')):
        assert await received(content.encode(encoding), f"{kind}; charset={charset}") == text


async def test_a_form_in_a_response_is_text() -> None:
    kind = "application/x-www-form-urlencoded"
    responses = {"200": {"description": "", "content": {kind: {"schema": {"type": "object"}}}}}
    async with serving(responding(b"a=1&b=%C3%A9", kind)) as url:
        for doc in (SCHEMALESS, document(responses=responses)):
            async with imported(doc, base_url=url) as registry:
                assert (await registry.execute("api.call", {})).data == "a=1&b=%C3%A9"


@pytest.mark.parametrize("charset", ["undefined", "idna", "no-such", "hex", "utf-8"])
async def test_an_unknown_charset_loses_characters_but_not_the_response(charset: str) -> None:
    kind = f"text/plain; charset={charset}"
    async with (
        serving(responding(b"a\xff.b", kind)) as url,
        imported(SCHEMALESS, base_url=url) as registry,
    ):
        assert (await registry.execute("api.call", {})).data == "a\ufffd.b"


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("application/jsonl", b'{"n":1}\n\n{"n":"2"}'),
        ("application/json-seq", b'\x1e{"n":1}\n\x1e{"n":2}\n'),
        ("application/json-seq", b'\x1e{"n":1}\r\n\x1e{"n":2}'),
        ("application/json-seq", b'\x1e{\n  "n": 1\n}\n\x1e{\r\n  "n": 2\r\n}\r\n'),
    ],
)  # fmt: skip
async def test_a_sequence_is_a_stream_of_its_items(kind: str, content: bytes) -> None:
    item = {"type": "object", "properties": {"n": {"type": "integer"}}}
    responses = {"200": {"description": "", "content": {kind: {"itemSchema": item}}}}
    doc = {**document(responses=responses), "openapi": "3.2.0"}
    async with serving(responding(content, kind)) as url:
        async with imported(doc, base_url=url) as registry:
            items = [envelope.data async for envelope in registry.subscribe("api.call", {})]
            assert items == [{"n": 1}, {"n": 2}]
        async with imported(SCHEMALESS, base_url=url) as registry:
            assert (await registry.execute("api.call", {})).data == content.decode()


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        ("application/octet-stream", b'{"a":1}', {"a": 1}),
        ("binary/octet-stream", b"no json", b"no json"),
        ("application/json, text/plain", b'{"a":1}', {"a": 1}),
        (";;=", b'{"a":1}', {"a": 1}),
        ("image/png", b"1", b"1"),
    ],
)
async def test_declared_json_is_read_without_a_content_type(
    kind: str, content: bytes, expected: Any
) -> None:
    async with (
        serving(responding(content, kind)) as url,
        imported(document(), base_url=url) as registry,
    ):
        assert (await registry.execute("api.call", {})).data == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 200 + b"]" * 200, "is nested too deeply"),
        (b'{"a":1', "is not JSON: "),
    ],
)
async def test_the_error_for_an_unusable_response_names_the_reason(
    content: bytes, reason: str
) -> None:
    async with (
        serving(responding(content, "application/json")) as url,
        imported(document(), base_url=url) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert caught.value.message.startswith(f"The response (application/json) {reason}")


@pytest.mark.requirement("R16")
async def test_an_unexpected_response_is_in_the_details() -> None:
    async def respond(request: web.Request) -> web.Response:
        text = f"<h1>Sign in</h1> {request.headers['X-API-Key']}"
        return web.Response(text=text, content_type="text/html")

    auth = {"type": "apiKey", "token": "CANARY"}
    async with serving(respond) as url, imported(document(), base_url=url, auth=auth) as registry:
        with pytest.raises(CallError, match=r"\(text/html\) is not JSON: .* \(byte 0\)") as caught:
            await registry.execute("api.call", {})
    assert caught.value.details["statusCode"] == 200
    assert caught.value.details["body"] == "<h1>Sign in</h1> ***"


async def test_closing_a_service_ends_its_calls_and_opens_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arrived, over = asyncio.Event(), asyncio.Event()
    count = 0

    async def respond(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        arrived.set()
        await over.wait()
        return web.json_response({})

    async with serving(respond) as url:
        service = from_openapi(document(), HTTPServiceConfig(namespace="api", base_url=url))
        call = asyncio.create_task(OperationRegistry(list(service)).execute("api.call", {}))
        await arrived.wait()
        await service.aclose()
        with time_limit(20), pytest.raises(CallError) as caught:
            await call
        over.set()
    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert count == 1
    gc.collect()
    assert "Unclosed" not in caplog.text


async def test_a_large_body_is_sent_in_chunks_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response(len(await request.read()))

    doc = document("/thing", "post", requestBody={"content": {"application/octet-stream": {}}})
    content = base64.b64encode(bytes(3 << 20)).decode()
    async with serving(respond) as url, imported(doc, base_url=url) as registry:
        assert (await registry.execute("api.call", {"body": content})).data == 3 << 20
    assert [warning for warning in recwarn if "large body" in str(warning.message)] == []


@pytest.mark.requirement("R18")
async def test_a_decompression_bomb_is_rejected_while_it_expands() -> None:
    bomb = gzip.compress(bytes(256 << 20), 9)
    assert len(bomb) < 300_000
    async with (
        serving(responding(bomb, "application/json", Content_Encoding="gzip")) as url,
        imported(SCHEMALESS, base_url=url, max_response_bytes=1 << 20) as registry,
    ):
        before = _resident()
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert _resident() - before < (1 << 20) + (16 << 20)


def _resident() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123 - a file of the kernel
        return int(file.read().split()[1]) * 4096


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_large_response_or_request_is_rejected(chunked: bool) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        if not chunked:
            return web.Response(body=bytes(2000))
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(20):
            await response.write(bytes(100))
        return response

    doc = document("/thing", "post", requestBody={"content": {"text/plain": {}}})
    async with (
        serving(respond) as url,
        imported(doc, base_url=url, max_response_bytes=1000, max_request_bytes=1000) as registry,
    ):
        for arguments in ({}, {"body": "x" * 1001}):
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", arguments)
            assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


async def test_an_expired_deadline_is_a_timeout() -> None:
    released = asyncio.Event()

    async def respond(request: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    async with serving(respond) as url:
        async with imported(SCHEMALESS, base_url=url, timeout=0.5) as registry:
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", {})
            assert caught.value.code == ErrorCode.TIMEOUT
            expected = rf"GET {re.escape(url)} did not respond within 0\.\d+ s"
            assert re.fullmatch(expected, caught.value.message)
        async with imported(SCHEMALESS, base_url=url) as registry:
            context = OperationContext(deadline=time.time() * 1000 + 100)
            with time_limit(20), pytest.raises(CallError) as caught:
                await registry.execute("api.call", {}, context)
            assert caught.value.code == ErrorCode.TIMEOUT
        released.set()


@pytest.mark.parametrize("sends_head", [False, True])
async def test_a_time_limit_covers_the_head_and_the_body(sends_head: bool) -> None:
    begun, released = asyncio.Event(), asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "2"})
        if sends_head:
            await response.prepare(request)
        begun.set()
        await released.wait()
        return response

    async with serving(respond) as url:
        async with imported(SCHEMALESS, base_url=url, timeout=0.1) as registry:
            calls = [registry.execute("api.call", {}) for _ in range(3)]
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, CallError)
                assert result.code == ErrorCode.TIMEOUT
        begun.clear()
        async with imported(SCHEMALESS, base_url=url, timeout=60) as registry:
            task = asyncio.create_task(registry.execute("api.call", {}))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        released.set()


async def test_a_refused_connection_is_unavailable(unused_port: int) -> None:
    async with imported(
        SCHEMALESS, base_url=f"http://127.0.0.1:{unused_port}", retries=0
    ) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert caught.value.retryable


async def test_a_lost_connection_is_unavailable() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"x")
        assert request.transport is not None
        request.transport.close()
        return response

    async with serving(respond) as url, imported(SCHEMALESS, base_url=url, retries=0) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.UNAVAILABLE


async def test_cancelling_a_call_closes_its_request() -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def respond(request: web.Request) -> web.Response:
        arrived.set()
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.005)
        left.set()
        return web.Response()

    async with serving(respond) as url, imported(SCHEMALESS, base_url=url) as registry:
        call = asyncio.create_task(registry.execute("api.call", {}))
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with time_limit(20):
            await left.wait()


@pytest.mark.parametrize(
    ("status", "headers", "options", "unsafe"),
    [
        (429, {"Retry-After": "0"}, {}, 3),
        (429, {}, {}, 1),
        (502, {"Retry-After": "0"}, {}, 1),
        (503, {"Retry-After": "0"}, {}, 1),
        (503, {"Retry-After": "0"}, {"retry_refused": True}, 3),
        (503, {}, {"retry_refused": True}, 3),
        (504, {"Retry-After": "0"}, {"retry_refused": True}, 1),
    ],
)
@pytest.mark.parametrize("method", ["get", "put", "post", "patch"])
async def test_only_repeatable_requests_are_repeated(
    status: int, headers: dict[str, str], options: dict[str, Any], unsafe: int, method: str
) -> None:
    count = 0
    expected = 3 if method in {"get", "put"} else unsafe

    async def respond(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return web.Response(status=status, headers=headers)

    async with (
        serving(respond) as url,
        imported(document("/thing", method), base_url=url, timeout=10, **options) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})
    assert count == expected
    # A request that may have been processed must not be sent again, unless it is repeatable.
    assert caught.value.retryable is (expected == 3 or status == 429)


async def test_a_repeated_request_can_succeed() -> None:
    statuses = [503, 200]

    async def respond(request: web.Request) -> web.Response:
        return web.json_response({}, status=statuses.pop(0))

    async with serving(respond) as url, imported(document(), base_url=url) as registry:
        assert (await registry.execute("api.call", {})).data == {}


async def test_retry_after_beyond_the_calls_time_is_not_waited_for() -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(status=503, headers={"Retry-After": "3600"})

    async with serving(respond) as url, imported(document(), base_url=url) as registry:
        with time_limit(20), pytest.raises(CallError):
            await registry.execute("api.call", {})


async def test_a_post_waits_as_long_as_a_429_asks_for_but_not_beyond_its_deadline() -> None:
    arrived: list[float] = []
    after = "60"

    async def respond(request: web.Request) -> web.Response:
        arrived.append(time.time())
        return web.Response(status=429 if len(arrived) < 2 else 200, headers={"Retry-After": after})

    async with (
        serving(respond) as url,
        imported(document("/thing", "post"), base_url=url) as registry,
    ):
        soon = OperationContext(deadline=(time.time() + 30) * 1000)
        with time_limit(20), pytest.raises(CallError) as caught:
            await registry.execute("api.call", {}, soon)
        assert caught.value.details["statusCode"] == 429
        arrived.clear()
        after = "1"
        await registry.execute("api.call", {})

    assert len(arrived) == 2
    assert arrived[1] - arrived[0] >= 1


def seconds_of(text: str, **headers: str) -> float:
    return retry_after({"retry-after": text, **headers})


def test_retry_after_is_a_number_or_a_date() -> None:
    assert seconds_of("7") == 7
    assert seconds_of("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert seconds_of("Wed, 21 Oct 2999 07:28:00 GMT") > 10**9
    assert seconds_of("Wed, 21 Oct 2999 07:28:00") > 10**9
    assert seconds_of("soon") == 0
    assert seconds_of("Wed, 21 Oct 2015 07:28:00 +99999999999999999999") == 0
    assert seconds_of("") == 0
    assert retry_after({}) == 0


def test_a_date_in_retry_after_counts_from_the_date_of_the_response() -> None:
    after = "Wed, 21 Oct 2015 07:28:07 GMT"
    assert seconds_of(after, date="Wed, 21 Oct 2015 07:28:00 GMT") == 7
    assert seconds_of(after, date="Wed, 21 Oct 2015 08:28:00 GMT") == 0
    assert seconds_of(after, date="yesterday") == 0


async def test_a_declared_redirect_is_a_response() -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "https://elsewhere.example/file"})

    doc = document(responses={"302": {"description": "found"}})
    async with serving(respond) as url, imported(doc, base_url=url) as registry:
        meta: Any = (await registry.execute("api.call", {})).meta

    assert meta.status_code == 302
    assert meta.headers["location"] == "https://elsewhere.example/file"


async def test_responses_are_normalised_to_the_declared_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "d": {"default": 1}},
        "required": ["n", "d"],
    }
    responses = {"200": {"description": "", "content": {"application/json": {"schema": schema}}}}
    async with (
        serving(responding(b'{"n":"7","extra":true}', "application/json")) as url,
        imported(document(responses=responses), base_url=url) as registry,
    ):
        assert (await registry.execute("api.call", {})).data == {"n": 7, "d": 1}


GOOD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.requirement("R13")
@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\0\xff\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        HEAD,
        HEAD + b"Content-Length: -1\r\n\r\n{}",
        HEAD + b"Content-Length: 10\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}",
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc",
        HEAD + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
        HEAD + b"Bad Header: \x01\r\n\r\n",
        # Versions of aiohttp before 3.13.4 accept any number of headers and trailers.
        HEAD + b"Content-Length: 2\r\n" + b"X: y\r\n" * 50_000 + b"\r\n{}",
        HEAD
        + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        + b"X: y\r\n" * 50_000
        + b"\r\n",
    ],
    ids=range(14),
)
async def test_a_response_that_is_not_http_is_an_error_and_the_next_call_works(
    garbage: bytes,
) -> None:
    answers = [garbage, GOOD]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        # A POST, because a repeatable request would be sent again and succeed.
        doc = document("/thing", "post", responses=BARE)
        async with imported(doc, base_url=url, timeout=10) as registry:
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", {})
            assert caught.value.code in {ErrorCode.UNAVAILABLE, ErrorCode.EXECUTION_ERROR}
            assert (await registry.execute("api.call", {})).data == {}


@pytest.mark.parametrize(("method", "retryable"), [("get", True), ("post", False)])
async def test_a_request_that_may_have_arrived_is_not_retryable(
    method: str, retryable: bool
) -> None:
    async def respond(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with (
        serving(respond) as url,
        imported(document("/thing", method), base_url=url, retries=0) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})
    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert caught.value.retryable is retryable


async def test_an_error_shows_whether_the_request_may_have_arrived() -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        # The request was processed; the redirect to its result cannot be followed.
        server.close()
        writer.write(b"HTTP/1.1 303 See Other\r\nLocation: /done\r\nContent-Length: 0\r\n")
        writer.write(b"Connection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(redirect, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    doc = document("/orders", "post")
    options = {"base_url": f"http://127.0.0.1:{port}", "retries": 0, "follow_redirects": True}
    async with imported(doc, **options) as registry:
        configure_tools(registry, {"api.*": ToolConfig(retry=2)})
        counters, _ = registry.count_calls()
        with time_limit(20), pytest.raises(CallError) as redirected:
            await registry.execute("api.call", {})
        retries = counters.of("api.call").retries
        with time_limit(20), pytest.raises(CallError) as refused:
            await registry.execute("api.call", {})

    assert (redirected.value.code, redirected.value.begun, retries) == ("UNAVAILABLE", None, 0)
    assert (refused.value.code, refused.value.begun) == ("UNAVAILABLE", False)
    assert counters.of("api.call").retries == 2


@pytest.mark.parametrize(
    ("content", "data"),
    [(b"iVBORw0KGgo=", b"\x89PNG\r\n\x1a\n"), (b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\n")],
)
async def test_a_response_that_its_schema_declares_as_base64_is_its_bytes(
    content: bytes, data: bytes
) -> None:
    """Some servers send the bytes themselves."""
    schema = {"type": "string", "contentEncoding": "base64"}
    assert await received(content, "image/png", {"image/png": {"schema": schema}}) == data


@pytest.mark.parametrize("follow", [False, True])
async def test_only_the_redirects_that_a_document_declares_are_responses(follow: bool) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/thing":
            return web.Response(status=302, headers={"Location": "/other"})
        return web.json_response({"ok": True})

    doc = document(responses={**BARE, "304": {"description": "not modified"}})
    async with (
        serving(answer) as url,
        imported(doc, base_url=url, follow_redirects=follow) as registry,
    ):
        if follow:
            assert (await registry.execute("api.call", {})).data == {"ok": True}
        else:
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", {})
            assert caught.value.details["statusCode"] == 302


@pytest.mark.parametrize("name", ["UTF-8", "none", "aws-chunked", "binary, gzip"])
async def test_a_content_encoding_that_is_no_coding_is_ignored(name: str) -> None:
    content = gzip.compress(b"[1]") if "gzip" in name else b"[1]"
    assert await received(content, "application/json", Content_Encoding=name) == [1]


@pytest.mark.parametrize(
    ("content", "coding", "options"),
    [
        (b"[1]", "br", {}),
        (b"[1]", "gzip", {}),
        (gzip.compress(b"[1]", mtime=0)[:-4], "gzip", {}),
        (b"[1]", "", {"max_response_bytes": 2}),
    ],
)
async def test_the_error_for_a_body_that_cannot_be_read_has_the_status(
    content: bytes, coding: str, options: dict[str, int]
) -> None:
    """Otherwise the caller does not know that the server has processed the request."""
    handler = responding(content, "application/json", 201, Content_Encoding=coding)
    async with serving(handler) as url, imported(SCHEMALESS, base_url=url, **options) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})
    assert caught.value.details["statusCode"] == 201
    assert caught.value.details["contentType"] == "application/json"


@pytest.mark.parametrize("schema", [{"type": "string"}, {}, {"type": ["string", "object"]}])
async def test_text_is_accepted_for_json_if_the_schema_allows_it(schema: dict[str, Any]) -> None:
    """Frameworks declare JSON for handlers that return text."""
    declared = {"application/json": {"schema": schema}}
    assert await received(b"all good\n", "text/plain", declared) == "all good\n"
    assert await received(b'"quoted"', "text/plain", declared) == "quoted"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"$ref": "#/components/schemas/Version"},
        {"allOf": [{"$ref": "#/components/schemas/Version"}, {"description": "The release."}]},
        {"anyOf": [{"$ref": "#/components/schemas/Version"}, {"type": "null"}]},
        {"oneOf": [{"$ref": "#/components/schemas/Version"}, {"type": "object"}]},
        {"type": ["string", "null"]},
        {"type": "string", "nullable": True},
        {"$ref": "#/components/schemas/Version", "nullable": True},
        {"enum": ["1.9", "1.10"]},
        {"const": "1.10"},
    ],
)
async def test_text_for_a_declared_string_is_not_a_number(schema: dict[str, Any]) -> None:
    declared = {"200": {"description": "ok", "content": {"application/json": {"schema": schema}}}}
    doc = document(responses=declared, components={"schemas": {"Version": {"type": "string"}}})
    handler = responding(b"1.10", "text/plain")
    async with serving(handler) as url, imported(doc, base_url=url) as registry:
        assert (await registry.execute("api.call", {})).data == "1.10"


async def test_text_is_read_as_json_unless_a_string_is_declared() -> None:
    assert await received(b"1.10", "text/plain", {"application/json": {}}) == 1.1
    either = {"application/json": {"schema": {"type": ["string", "null"]}}}
    assert await received(b"null", "text/plain", either) is None


async def test_text_that_the_schema_does_not_allow_is_an_error() -> None:
    declared = {"application/json": {"schema": {"type": "object"}}}
    with pytest.raises(CallError):
        await received(b"all good", "text/plain", declared)


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 204 No Content\r\nContent-Length: 6\r\n\r\nsecret",
        b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\nsecret",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}secret",
    ],
)
async def test_data_after_a_response_is_named_as_the_cause(response: bytes) -> None:
    async with writing(response) as url, imported(document(), base_url=url) as registry:
        with time_limit(20), pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.EXECUTION_ERROR
    assert "longer than its Content-Length" in caught.value.message
    assert "secret" not in str(caught.value.message)
