"""Values of a response that cannot be represented, and the limits of a response's JSON."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from aiohttp import web
from tests.openapi.serving import Handler, document, imported, serving

from operations import CallError, ErrorCode
from operations.openapi import HTTPServiceConfig
from operations.server import create_app

JSON = "application/json"


def responding(content: bytes, kind: str = JSON) -> Handler:
    async def respond(_request: web.Request) -> web.Response:
        return web.Response(body=content, headers={"Content-Type": kind})

    return respond


def described(schema: dict[str, Any], kind: str = JSON) -> dict[str, Any]:
    content = {kind: {"schema": schema}}
    return document(responses={"200": {"description": "ok", "content": content}})


ITEMS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "name": {"type": "string"}},
        "additionalProperties": True,
    },
}

SURROGATE = "contained a lone surrogate"
TOO_LARGE = "was a number that is too large"


@pytest.mark.requirement("R28", "R52")
@pytest.mark.parametrize(
    ("content", "data", "mismatches"),
    [
        (b'[{"id": 1, "name": "a\\ud83d"}, {"id": 2, "name": "b"}]',
         [{"id": 1, "name": "a\ufffd"}, {"id": 2, "name": "b"}], {"/0/name": (1, SURROGATE)}),
        (b'[{"id": 1, "name": "\\udc00a"}, {"id": 2, "name": "\\ud800"}]',
         [{"id": 1, "name": "\ufffda"}, {"id": 2, "name": "\ufffd"}],
         {"/0/name": (2, SURROGATE)}),
        (b'[{"id": 1, "x\\ud800": 1}]', [{"id": 1, "x\ufffd": 1}], {"/0/x?": (1, SURROGATE)}),
        (b'[{"name": "\xed\xa0\xbd"}]', [{"name": "\ufffd"}], {"/0/name": (1, SURROGATE)}),
        (b'[{"name": "\xed\xa0\xbd\xed\xb8\x80"}]', [{"name": "\U0001f600"}], {}),
        (b'[{"id": 1, "rate": 1e400}, {"id": 2, "rate": -1e400}]',
         [{"id": 1, "rate": None}, {"id": 2, "rate": None}], {"/0/rate": (2, TOO_LARGE)}),
        (b'[{"more": ' + b"9" * 5000 + b"}]", [{"more": None}], {"/0/more": (1, TOO_LARGE)}),
        (b'[{"name": "\\ud83d\\ude00", "rate": 1e308}]',
         [{"name": "\U0001f600", "rate": 1e308}], {}),
    ],
)  # fmt: skip
async def test_a_value_that_cannot_be_represented_costs_that_value_only(
    content: bytes, data: Any, mismatches: dict[str, tuple[int, str]]
) -> None:
    async with (
        serving(responding(content)) as url,
        imported(described(ITEMS), base_url=url) as registry,
    ):
        envelope = await registry.execute("api.call", {})

    assert envelope.data == data
    changes = {change.path: change for change in envelope.meta.changes}
    assert changes.keys() == mismatches.keys()
    for path, (count, message) in mismatches.items():
        assert (changes[path].kind, changes[path].count) == ("mismatch", count)
        assert changes[path].message.startswith(message)


@pytest.mark.parametrize(
    "content", [b"[NaN]", b"[Infinity]", b'["\\ud800"', b'["\\ud800",]', b"[1e]"]
)
async def test_text_that_is_not_json_is_rejected(content: bytes) -> None:
    async with (
        serving(responding(content)) as url,
        imported(described(ITEMS), base_url=url) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})
    assert caught.value.code == ErrorCode.EXECUTION_ERROR


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("text/event-stream", b'data: {"id": "\\ud800"}\n\ndata: {"id": "b"}\n\n'),
        ("application/jsonl", b'{"id": "\\ud800"}\n{"id": "b"}\n'),
    ],
)
async def test_an_item_of_a_stream_loses_only_the_value(kind: str, content: bytes) -> None:
    schema = {"type": "object", "properties": {"id": {"type": "string"}}}
    doc = described({"type": "array", "items": schema} if kind.endswith("jsonl") else schema, kind)
    async with (
        serving(responding(content, kind)) as url,
        imported(doc, base_url=url) as registry,
    ):
        items = [item async for item in registry.subscribe("api.call", {})]

    assert [item.data for item in items] == [{"id": "\ufffd"}, {"id": "b"}]
    assert [[change.path for change in item.meta.changes] for item in items] == [["/id"], []]


async def test_a_text_that_looks_like_a_large_number_stays_text() -> None:
    async with (
        serving(responding(b"1e400", "text/plain")) as url,
        imported(described({"type": "string"}), base_url=url) as registry,
    ):
        envelope = await registry.execute("api.call", {})
    assert (envelope.data, envelope.meta.changes) == ("1e400", ())


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


TREE = {"$ref": "#/components/schemas/Tree"}
TREES = {"Tree": {"type": "object", "properties": {"a": {"anyOf": [TREE, {"type": "integer"}]}}}}


@pytest.mark.requirement("R20")
async def test_the_depth_of_responses_is_set_per_service() -> None:
    content = nested(64)
    depth: Callable[[Any], int] = lambda value: 1 + depth(value["a"]) if value != 1 else 0  # noqa: E731
    doc = {**described(TREE), "components": {"schemas": TREES}}

    async def respond(_request: web.Request) -> web.Response:
        return web.Response(body=content, content_type=JSON)

    async with (
        serving(respond) as url,
        imported(doc, base_url=url, max_response_depth=500) as registry,
        imported(doc, base_url=url) as other,
    ):
        assert (await registry.execute("api.call", {})).meta.changes == ()
        await other.execute("api.call", {})
        for levels in (65, 500):
            content = nested(levels)
            envelope = await registry.execute("api.call", {})
            assert depth(envelope.data) == levels
            (change,) = envelope.meta.changes
            assert (change.kind, change.path) == ("mismatch", "")
            assert change.message.startswith("is not normalised")
            with pytest.raises(CallError) as caught:
                await other.execute("api.call", {})
            assert "is nested too deeply" in caught.value.message
        transport = httpx.ASGITransport(create_app(registry))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            served = await client.post("/call", json={"operation": "api.call", "input": {}})
        content = nested(501)
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})
    assert served.status_code == 200, served.text
    assert depth(served.json()["data"]) == 500
    assert caught.value.code == ErrorCode.EXECUTION_ERROR
    with pytest.raises(ValueError, match="max_response_depth"):
        HTTPServiceConfig.from_entry({"namespace": "a", "max_response_depth": 501})


@pytest.mark.requirement("R55")
async def test_the_number_of_values_follows_the_largest_response() -> None:
    """opencode's list of providers has more than 250,000 values."""
    content = b"[" + b"1," * 299_999 + b"1]"
    async with (
        serving(responding(content)) as url,
        imported(document(), base_url=url) as registry,
        imported(document(), base_url=url, max_response_bytes=1 << 20) as small,
    ):
        assert len((await registry.execute("api.call", {})).data) == 300_000
        with pytest.raises(CallError) as caught:
            await small.execute("api.call", {})
    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert HTTPServiceConfig(namespace="a").response_values == 2_097_152
