"""A response that a document offers as JSON and as a stream: an operation for each."""

import gc
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from tests.openapi.serving import document, imported, serving
from tests.openapi.test_corpus import SHARED, needs_documents

from operations import CallError, OperationRegistry, OperationType
from operations.openapi import (
    HTTPServiceConfig,
    LinkPaging,
    from_openapi,
    from_openapi_file,
)
from operations.schema import Schema

JSON, SSE, NDJSON = "application/json", "text/event-stream", "application/x-ndjson"
WHOLE = {"type": "object", "properties": {"text": {"type": "string"}}}
CHUNK = {"type": "object", "properties": {"delta": {"type": "string"}}}


def chat(stream: Any = None, kind: str = SSE) -> dict[str, Any]:
    properties: dict[str, Any] = {"prompt": {"type": "string"}}
    if stream is not None:
        properties["stream"] = stream
    schema = {"type": "object", "properties": properties}
    content = {JSON: {"schema": WHOLE}, kind: {"schema": CHUNK}}
    return document(
        "/chat",
        "post",
        requestBody={"required": True, "content": {JSON: {"schema": schema}}},
        responses={"200": {"description": "", "content": content}},
    )


class Chat:
    """A server that streams if it is asked to, as chat completions are served."""

    def __init__(self, kind: str = SSE) -> None:
        self.kind = kind
        self.bodies: list[Any] = []
        self.accepted: list[str] = []
        self.always: str | None = None

    async def respond(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.accepted.append(request.headers["Accept"])
        kind = self.always or (self.kind if body.get("stream") else JSON)
        if kind == JSON:
            return web.json_response({"text": "ab", "undeclared": 1})
        chunks = [{"delta": "a", "undeclared": 1}, {"delta": "b"}]
        lines = [json.dumps(chunk) for chunk in chunks]
        text = "\n".join(lines)
        if kind == SSE:
            text = "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]"))
        return web.Response(text=text, content_type=kind)


@asynccontextmanager
async def talking(doc: Any, server: Chat, **config: Any) -> AsyncGenerator[OperationRegistry]:
    async with serving(server.respond) as url, imported(doc, base_url=url, **config) as registry:
        yield registry


async def items(registry: OperationRegistry, name: str, arguments: Any) -> list[Any]:
    return [envelope.data async for envelope in registry.subscribe(name, arguments)]


@pytest.mark.parametrize("kind", [SSE, NDJSON, "application/jsonl"])
async def test_a_response_in_both_kinds_is_two_operations(kind: str) -> None:
    server = Chat(kind)
    async with talking(chat({"type": "boolean"}, kind), server) as registry:
        types = {operation.spec.id: operation.spec.type for operation in registry}
        assert types == {
            "api.call": OperationType.MUTATION,
            "api.call.stream": OperationType.SUBSCRIPTION,
        }
        whole = await registry.execute("api.call", {"body": {"prompt": "x"}})
        assert whole.data == {"text": "ab"}
        parts = await items(registry, "api.call.stream", {"body": {"prompt": "x"}})
        assert parts == [{"delta": "a"}, {"delta": "b"}]

    assert server.bodies == [{"prompt": "x"}, {"prompt": "x", "stream": True}]
    assert server.accepted == [JSON, f"{kind}, application/json;q=0.5"]


def test_each_operation_describes_its_own_data() -> None:
    service = from_openapi(chat(), HTTPServiceConfig(namespace="api"))
    whole, stream = (operation.spec for operation in service)
    assert whole.output_schema.document == WHOLE
    assert stream.output_schema.document == CHUNK
    assert whole.input_schema == stream.input_schema


async def test_a_response_of_the_other_kind_is_delivered() -> None:
    server = Chat()
    async with talking(chat(), server) as registry:
        server.always = SSE
        whole = await registry.execute("api.call", {"body": {}})
        assert whole.data == [{"delta": "a"}, {"delta": "b"}]
        server.always = NDJSON
        whole = await registry.execute("api.call", {"body": {}})
        assert whole.data == [{"delta": "a"}, {"delta": "b"}]
        parts = await items(registry, "api.call.stream", {"body": {}})
        assert parts == [{"delta": "a"}, {"delta": "b"}]
        server.always = JSON
        assert await items(registry, "api.call.stream", {"body": {}}) == [{"text": "ab"}]


@pytest.mark.parametrize("kind", [SSE, NDJSON])
async def test_an_empty_response_of_the_other_kind_has_no_items(kind: str) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return web.Response(content_type=kind)

    async with serving(respond) as url, imported(chat(kind=kind), base_url=url) as registry:
        assert (await registry.execute("api.call", {"body": {}})).data == []
        assert await items(registry, "api.call.stream", {"body": {}}) == []


@pytest.mark.parametrize(
    ("declared", "sent"),
    [
        ({"type": "boolean", "default": False}, [{}, {"stream": True}]),
        ({"type": "boolean", "default": True}, [{"stream": False}, {"stream": True}]),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, [{}, {"stream": True}]),
        ({"type": "string"}, [{}, {}]),
        (None, [{}, {}]),
    ],
)
async def test_the_stream_is_asked_for_as_the_document_declares(declared: Any, sent: Any) -> None:
    server = Chat()
    async with talking(chat(declared), server) as registry:
        await registry.execute("api.call", {"body": {}})
        await items(registry, "api.call.stream", {"body": {}})
    assert server.bodies == sent


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("kind", ["own", "reference", "part"])
async def test_a_required_stream_property_need_not_be_given(kind: str, flatten: bool) -> None:
    server = Chat()
    doc = chat({"type": "boolean"})
    content = doc["paths"]["/chat"]["post"]["requestBody"]["content"][JSON]
    content["schema"]["required"] = ["stream", "prompt"]
    if kind != "own":
        doc["components"] = {"schemas": {"Chat": content["schema"]}}
        reference = {"$ref": "#/components/schemas/Chat"}
        content["schema"] = reference if kind == "reference" else {"allOf": [reference]}
    arguments: dict[str, Any] = {"prompt": "x"}
    async with talking(doc, server, flatten_body=flatten) as registry:
        body = arguments if flatten else {"body": arguments}
        await registry.execute("api.call", body)
        assert await items(registry, "api.call.stream", body) == [{"delta": "a"}, {"delta": "b"}]
        with pytest.raises(CallError, match="prompt"):
            await registry.execute("api.call", {} if flatten else {"body": {}})
    assert server.bodies == [{"prompt": "x", "stream": False}, {"prompt": "x", "stream": True}]


async def test_a_required_stream_property_with_one_value_is_set_if_it_fits() -> None:
    server = Chat()
    doc = chat({"type": "boolean", "enum": [True]})
    schema = doc["paths"]["/chat"]["post"]["requestBody"]["content"][JSON]["schema"]
    schema["required"] = ["stream"]
    async with talking(doc, server) as registry:
        await items(registry, "api.call.stream", {"body": {}})
        with pytest.raises(CallError, match="stream"):
            await registry.execute("api.call", {"body": {}})
    assert server.bodies == [{"stream": True}]


async def test_the_stream_is_requested_even_against_the_input() -> None:
    server = Chat()
    async with talking(chat({"type": "boolean"}), server) as registry:
        await items(registry, "api.call.stream", {"body": {"stream": False}})
        listed = await registry.execute("api.call", {"body": {"stream": True}})
    assert server.bodies == [{"stream": True}, {"stream": True}]
    assert listed.data == [{"delta": "a"}, {"delta": "b"}]


@pytest.mark.parametrize("required", [False, True])
async def test_a_query_parameter_can_ask_for_the_stream(required: bool) -> None:
    queries: list[str] = []

    async def respond(request: web.Request) -> web.Response:
        queries.append(request.query_string)
        return web.json_response({})

    content: dict[str, Any] = {JSON: {}, SSE: {}}
    stream = {"name": "stream", "in": "query", "schema": {"type": "boolean"}, "required": required}
    doc = document(parameters=[stream], responses={"200": {"description": "", "content": content}})
    async with serving(respond) as url, imported(doc, base_url=url) as registry:
        await registry.execute("api.call", {})
        await items(registry, "api.call.stream", {})
    assert queries == ["stream=false" if required else "", "stream=true"]


def names(doc: Any, **config: Any) -> list[str]:
    return [o.spec.name for o in from_openapi(doc, HTTPServiceConfig(namespace="api", **config))]


def test_rules_apply_to_both_operations() -> None:
    assert names(chat(), rename={"call": "chat"}) == ["chat", "chat.stream"]
    assert names(chat(), exclude=lambda outline: outline.name.endswith(".stream")) == ["call"]
    assert names(chat(), exclude=lambda outline: outline.name == "call") == []


def test_a_name_that_the_document_uses_itself_is_not_taken() -> None:
    doc = chat()
    doc["paths"]["/other"] = {"get": {"operationId": "call.stream", "responses": {}}}
    assert names(doc) == ["call", "call.stream_", "call.stream"]


@pytest.mark.requirement("R52")
@pytest.mark.parametrize("policy", ["cast", "create"])
async def test_a_line_that_is_not_json_is_passed_on_as_text_and_marked(policy: Any) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(text='{"delta": "a"}\nno json\n{"delta": "b"}\n', content_type=NDJSON)

    async with serving(respond) as url:
        service = from_openapi(chat(kind=NDJSON), HTTPServiceConfig(namespace="api", base_url=url))
        async with OperationRegistry(output=policy) as registry:
            registry.register_all(service)
            stream = registry.subscribe("api.call.stream", {"body": {}})
            items = [envelope async for envelope in stream]

    assert [item.data for item in items] == [{"delta": "a"}, "no json", {"delta": "b"}]
    assert [[change.kind for change in item.meta.changes] for item in items] == [
        [], ["mismatch"], [],
    ]  # fmt: skip


@needs_documents
async def test_an_operation_of_a_real_document_is_streamed_and_executed() -> None:
    bodies: list[Any] = []
    chunk = {
        "id": "1", "created": 1, "model": "m", "system_fingerprint": "f",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}}],
    }  # fmt: skip

    async def respond(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type=SSE)

    path = SHARED / "openapi" / "huggingface__tgi.json"
    message = {"role": "user", "content": "x"}
    async with serving(respond) as url, OperationRegistry() as registry:
        config = HTTPServiceConfig(namespace="tgi", base_url=url)
        registry.register_all(await from_openapi_file(path, config))
        arguments = {"body": {"messages": [message]}}
        parts = await items(registry, "tgi.chat_completions.stream", arguments)
    assert bodies == [{"messages": [message], "stream": True}]
    assert parts == [chunk]


def test_a_new_name_of_another_operation_is_not_used_for_a_stream_or_its_pages() -> None:
    doc = chat()
    doc["paths"]["/chat"] = {"get": doc["paths"]["/chat"]["post"]}
    del doc["paths"]["/chat"]["get"]["requestBody"]
    doc["paths"]["/a"] = {"get": {"operationId": "a", "responses": {}}}
    doc["paths"]["/b"] = {"get": {"operationId": "b", "responses": {}}}
    found = names(
        doc,
        rename={"call": "chat", "a": "chat.stream", "b": "chat.pages"},
        pagination={"call": LinkPaging()},
    )
    assert found == ["chat", "chat.stream_", "chat.pages_", "chat.stream", "chat.pages"]


async def test_media_types_of_callers_are_not_stored() -> None:
    either = {
        "anyOf": [
            {"type": "object", "properties": {"stream": {"type": "boolean"}}},
            {"type": "object", "properties": {"prompt": {"type": "string"}}},
        ]
    }
    doc = chat()
    doc["paths"]["/chat"]["post"]["requestBody"]["content"] = {
        JSON: {"schema": either},
        "application/*+json": {"schema": either},
    }
    server = Chat()
    async with talking(doc, server) as registry:

        async def call(number: int) -> None:
            arguments = {"body": {"prompt": "x"}, "content_type": f"application/x{number}+json"}
            assert await items(registry, "api.call.stream", arguments)

        def schemas() -> int:
            gc.collect()
            return sum(isinstance(each, Schema) for each in gc.get_objects())

        await call(0)
        before = schemas()
        for number in range(1, 30):
            await call(number)
        assert schemas() == before
    assert server.bodies[-1] == {"prompt": "x", "stream": True}
