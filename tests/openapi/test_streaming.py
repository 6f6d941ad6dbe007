"""Event streams as subscriptions: events, reconnection, endings, and cancellation."""

import asyncio
import gc
from typing import Any

import anyio
import pytest
from aiohttp import web
from anyio.abc import SocketAttribute, SocketStream
from tests.limits import time_limit
from tests.openapi.serving import document, imported, serving, writing

from operations import CallError, ErrorCode, OperationRegistry, OperationType
from operations.openapi import HTTPServiceConfig, from_openapi

pytestmark = pytest.mark.timeout(120)


def streaming(method: str = "get", schema: Any = None, **more: Any) -> dict[str, Any]:
    media = {"schema": schema} if schema is not None else {}
    responses = {"200": {"description": "", "content": {"text/event-stream": media}}}
    return document("/events", method, responses=responses, **more)


async def begin(request: web.Request, **headers: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
    await response.prepare(request)
    return response


async def collected(doc: dict[str, Any], url: str, **config: Any) -> list[Any]:
    async with imported(doc, base_url=url, **config) as registry:
        return [envelope async for envelope in registry.subscribe("api.call", {})]


async def test_each_event_is_an_envelope_with_its_type_and_id() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept"].startswith("text/event-stream")
        response = await begin(request)
        await response.write(b'event: add\nid: 7\ndata: {"n": 1}\n\ndata: plain\n\n')
        return response

    async with serving(respond) as url:
        first, second = await collected(streaming("post"), url)

    assert (first.data, second.data) == ({"n": 1}, "plain")
    assert first.meta.headers["sse-event"] == "add"
    assert first.meta.headers["last-event-id"] == "7"
    assert second.meta.headers["sse-event"] == "message"
    assert first.meta.status_code == 200
    assert first.meta.content_type == "text/event-stream"


@pytest.mark.requirement("R55")
async def test_r55_other_tasks_run_during_a_flood_of_tiny_events() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(b"data: 1\n\n" * 20_000)
        return response

    turns = items = longest = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    async with serving(respond) as url, imported(streaming(), base_url=url) as registry:
        last = turns
        async for _ in registry.subscribe("api.call", {}):
            items = items + 1 if turns == last else 1
            last, longest = turns, max(longest, items)
    other.cancel()

    # Without turns in between, the events of each read of the socket would be delivered at once.
    assert longest <= 1000


def test_a_stream_is_a_subscription_in_every_version() -> None:
    swagger = {
        "swagger": "2.0",
        "produces": ["text/event-stream"],
        "paths": {"/e": {"get": {"operationId": "call", "responses": {"200": {}}}}},
    }
    for doc in (streaming(), swagger):
        (operation,) = from_openapi(doc, HTTPServiceConfig(namespace="api"))
        assert operation.spec.type is OperationType.SUBSCRIPTION


@pytest.mark.parametrize(
    "schema", [{"type": "string"}, {"type": ["string", "null"]}, {"allOf": [{"type": "string"}]}]
)
async def test_text_stays_text_if_text_is_declared(schema: dict[str, Any]) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(b"data: 1.10\n\n")
        return response

    async with serving(respond) as url:
        (only,) = await collected(streaming(schema=schema), url)
    assert only.data == "1.10"


@pytest.mark.parametrize("schema", [{"enum": ["a", "b"]}, {"type": "string", "enum": ["a", "b"]}])
async def test_declared_texts_may_be_quoted(schema: dict[str, Any]) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(b'data: "a"\n\ndata: b\n\n')
        return response

    async with serving(respond) as url:
        found = await collected(streaming(schema=schema), url)
    assert [(each.data, each.meta.changes) for each in found] == [("a", ()), ("b", ())]


async def test_an_item_schema_describes_the_data_of_an_event() -> None:
    item = {"properties": {"data": {"contentSchema": {"type": "object", "required": ["n"]}}}}
    content = {"text/event-stream": {"itemSchema": item}}
    doc = document(responses={"200": {"description": "", "content": content}})
    (operation,) = from_openapi(doc, HTTPServiceConfig(namespace="api"))
    assert operation.spec.output_schema.document == {"type": "object", "required": ["n"]}


PRICE = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


@pytest.mark.requirement("R52")
@pytest.mark.parametrize("policy", ["cast", "keep", "create", "warn"])
async def test_an_event_that_is_not_the_declared_json_is_text_and_marked(policy: Any) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(b'data: {"n": 1}\n\ndata\n\ndata: oops\n\ndata: {"n": 2}\n\n')
        return response

    async with serving(respond) as url:
        service = from_openapi(
            streaming(schema=PRICE), HTTPServiceConfig(namespace="api", base_url=url)
        )
        async with OperationRegistry(output=policy) as registry:
            registry.register_all(service)
            items = [item async for item in registry.subscribe("api.call", {})]

    assert [item.data for item in items] == [{"n": 1}, "oops", {"n": 2}]
    assert [[change.kind for change in item.meta.changes] for item in items] == [
        [], ["mismatch"], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "expected"),
    [({"type": "string"}, ["", "a"]), (None, ["", "a"]), (PRICE, ["a"]), ({"enum": ["a"]}, ["a"])],
    ids=["text", "unknown", "object", "enum"],
)
async def test_events_without_data_are_items_only_if_items_may_be_text(
    schema: Any, expected: list[str]
) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(b"data\n\ndata: a\n\n")
        return response

    async with serving(respond) as url:
        assert [e.data for e in await collected(streaming(schema=schema), url)] == expected


async def test_done_ends_a_stream() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(b"data: 1\n\ndata: [DONE]\n\ndata: 2\n\n")
        return response

    async with serving(respond) as url:
        assert [e.data for e in await collected(streaming(), url)] == [1]


async def test_a_lost_stream_is_resumed() -> None:
    last_ids: list[str | None] = []

    async def respond(request: web.Request) -> web.StreamResponse:
        last_ids.append(request.headers.get("Last-Event-ID"))
        response = await begin(request)
        if len(last_ids) == 1:
            await response.write(
                b"retry: 10\n\nid: 1\ndata: 1\n\nid: 2\ndata: 2\n\nid: 3\ndata: lost"
            )
            assert request.transport is not None
            request.transport.close()
        elif len(last_ids) == 2:
            await response.write(b"id: 3\ndata: 3\n\n")
        else:
            return web.Response(status=204)
        return response

    async with serving(respond) as url:
        events = await collected(streaming(), url)

    assert [event.data for event in events] == [1, 2, 3]
    assert last_ids == [None, "2", "3"]


@pytest.mark.requirement("F2")
@pytest.mark.parametrize("first", [0, 2], ids=["from the beginning", "from the last one"])
async def test_a_lost_stream_that_repeats_events_continues_at_its_position(first: int) -> None:
    count = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        response = await begin(request)
        for n in range(0 if count == 1 else first, 3 if count == 1 else 6):
            await response.write(f"retry: 1\nid: {n}\ndata: {n}\n\n".encode())
        if count == 1:
            await response.write(b"data: lost")
            assert request.transport is not None
            request.transport.close()
        return response

    async with serving(respond) as url:
        assert [e.data for e in await collected(streaming(), url)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.requirement("F2")
async def test_a_lost_stream_that_cannot_be_resumed_at_its_position_is_unavailable() -> None:
    count = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        response = await begin(request)
        await response.write(b"retry: 1\nid: 1\ndata: 1\n\n")
        if count == 1:
            await response.write(b"id: 2\ndata: 2\n\ndata: lost")
            assert request.transport is not None
            request.transport.close()
        return response

    items: list[Any] = []
    async with serving(respond) as url, imported(streaming(), base_url=url) as registry:
        with pytest.raises(CallError) as caught:
            async for envelope in registry.subscribe("api.call", {}):
                items.append(envelope.data)  # noqa: PERF401 - what came before the error counts
    assert items == [1, 2]
    assert caught.value.code == ErrorCode.UNAVAILABLE


async def test_a_lost_stream_that_restarts_repeats_no_item() -> None:
    count = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        response = await begin(request)
        numbers = range(3000 if count == 1 else 3002)
        await response.write("".join(f"retry: 1\nid: {n}\ndata: {n}\n\n" for n in numbers).encode())
        if count == 1:
            await response.write(b"data: lost")
            assert request.transport is not None
            request.transport.close()
        return response

    async with serving(respond) as url:
        assert [e.data for e in await collected(streaming(), url)] == list(range(3002))


async def test_a_stream_with_ids_that_begins_again_is_over() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(b"retry: 1\nid: 1\ndata: 1\n\nid: 2\ndata: 2\n\n")
        return response

    async with serving(respond) as url:
        assert [e.data for e in await collected(streaming(), url)] == [1, 2]


async def test_a_stream_without_ids_ends_when_it_is_closed() -> None:
    count = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        response = await begin(request)
        await response.write(b"data: 1\n\n")
        return response

    async with serving(respond) as url:
        assert len(await collected(streaming(), url)) == 1
    assert count == 1


async def test_a_mutations_stream_is_never_requested_twice() -> None:
    count = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        response = await begin(request)
        await response.write(b"id: 1\ndata: 1\n\n")
        assert request.transport is not None
        request.transport.close()
        return response

    async with serving(respond) as url:
        with pytest.raises(CallError) as caught:
            await collected(streaming("post"), url)
    assert count == 1
    assert caught.value.code == ErrorCode.UNAVAILABLE


async def test_a_server_that_does_not_return_is_unavailable() -> None:
    count = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        if count == 1:
            response = await begin(request)
            await response.write(b"retry: 1\nid: 1\ndata: 1\n\n")
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    items: list[Any] = []
    async with serving(respond) as url, imported(streaming(), base_url=url) as registry:
        with pytest.raises(CallError) as caught:
            async for envelope in registry.subscribe("api.call", {}):
                items.append(envelope.data)  # noqa: PERF401 - what came before the error counts
    assert items == [1]
    assert caught.value.code == ErrorCode.UNAVAILABLE


async def test_an_error_while_resuming_a_lost_stream_is_raised() -> None:
    count = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        if count > 1:
            return web.Response(status=401)
        response = await begin(request)
        await response.write(b"retry: 1\nid: 1\ndata: 1\n\ndata: lo")
        assert request.transport is not None
        request.transport.close()
        return response

    items: list[Any] = []
    async with serving(respond) as url, imported(streaming(), base_url=url) as registry:
        with pytest.raises(CallError) as caught:
            async for envelope in registry.subscribe("api.call", {}):
                items.append(envelope.data)  # noqa: PERF401 - what came before the error counts
    assert items == [1]
    assert caught.value.details["statusCode"] == 401


async def test_the_pauses_before_reconnecting_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.openapi.source.streaming.MAX_PAUSE", 0.02)
    count = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        response = await begin(request)
        if count == 1:
            await response.write(b"retry: 60000\nid: 1\ndata: 1\n\ndata: lo")
        assert request.transport is not None
        request.transport.close()
        return response

    async with serving(respond) as url, imported(streaming(), base_url=url, retries=14) as registry:
        with time_limit(30), pytest.raises(CallError) as caught:
            _ = [envelope async for envelope in registry.subscribe("api.call", {})]
    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert count > 14


@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize("status", [200, 503])
async def test_a_stream_is_requested_again_as_often_as_other_calls(
    has_begun: bool, status: int
) -> None:
    count = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        if status == 503 and (count > 1 or not has_begun):
            return web.Response(status=503, headers={"Retry-After": "0"})
        response = await begin(request)
        if count == 1 and has_begun:
            await response.write(b"retry: 1\nid: 1\ndata: 1\n\ndata: lo")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(respond) as url:
        with pytest.raises(CallError):
            await collected(streaming(), url, retries=2)
    assert count == 3


async def test_a_stream_without_a_response_is_not_requested_in_two_loops() -> None:
    count = 0

    async def accept(stream: SocketStream) -> None:
        nonlocal count
        count += 1
        await stream.aclose()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port: int = listener.extra(SocketAttribute.local_port)  # noqa: S610 - not Django
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, accept)
        with pytest.raises(CallError):
            await collected(streaming(), f"http://127.0.0.1:{port}", retries=1)
        tasks.cancel_scope.cancel()
    assert count == 2


async def test_a_stream_closed_after_its_end_has_ended() -> None:
    count = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        if count > 1:
            return web.Response(status=404)
        response = await begin(request)
        await response.write(b"retry: 1\nid: 1\ndata: 1\n\n")
        return response

    async with serving(respond) as url:
        assert [e.data for e in await collected(streaming(), url)] == [1]
    assert count == 2


async def test_a_lost_stream_without_ids_is_not_begun_again() -> None:
    count = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        response = await begin(request)
        await response.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.close()
        return response

    async with serving(respond) as url:
        with pytest.raises(CallError) as caught:
            await collected(streaming(), url)
    assert count == 1
    assert caught.value.code == ErrorCode.UNAVAILABLE


@pytest.mark.requirement("R12")
@pytest.mark.parametrize("where", ["before the head", "in an error", "in one answer"])
async def test_a_server_that_stops_responding_is_a_timeout(where: str) -> None:
    over = asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        if where == "before the head":
            await over.wait()
        response = web.StreamResponse(
            status=500 if where == "in an error" else 200, headers={"Content-Type": "text/plain"}
        )
        await response.prepare(request)
        await response.write(b"so")
        await over.wait()
        return response

    async with serving(respond) as url:
        try:
            with time_limit(20), pytest.raises(CallError) as caught:
                await collected(streaming(), url, timeout=1)
        finally:
            over.set()
    if where == "in an error":
        assert caught.value.details["body"] == "so"
        assert caught.value.details["truncated"] is True
    else:
        assert caught.value.code == ErrorCode.TIMEOUT


async def test_a_stream_follows_redirects_on_request() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        if request.path == "/events":
            return web.Response(status=307, headers={"Location": "/moved"})
        response = await begin(request)
        await response.write(b"data: 1\n\n")
        return response

    async with serving(respond) as url:
        assert [e.data for e in await collected(streaming(), url, follow_redirects=True)] == [1]
        with pytest.raises(CallError):
            await collected(streaming(), url)


async def test_an_error_response_is_raised() -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response({"why": "no"}, status=403)

    async with serving(respond) as url:
        with pytest.raises(CallError) as caught:
            await collected(streaming(), url)
    assert caught.value.details["body"] == {"why": "no"}


async def test_a_single_response_instead_of_a_stream_is_one_item() -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response({"a": 1})

    async with serving(respond) as url:
        assert [e.data for e in await collected(streaming(), url)] == [{"a": 1}]


@pytest.mark.requirement("R18")
async def test_an_endless_event_is_rejected() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        for _ in range(100):
            await response.write(b"data: " + b"x" * 1000 + b"\n")
        return response

    async with serving(respond) as url:
        with pytest.raises(CallError) as caught:
            await collected(streaming(), url, max_event_bytes=10_000)
    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("how", ["break", "cancel", "drop"])
async def test_the_connection_ends_when_the_consumer_stops(how: str) -> None:
    gone = asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        try:
            while True:
                await response.write(b"data: 1\n\n")
                await asyncio.sleep(0.005)
        except (ConnectionError, asyncio.CancelledError):
            gone.set()
            raise

    async with serving(respond) as url, imported(streaming(), base_url=url) as registry:
        started = asyncio.Event()

        async def consume() -> None:
            items = registry.subscribe("api.call", {})
            async for _ in items:
                started.set()
                if how == "break":
                    await items.aclose()
                    break
                if how == "drop":
                    break

        task = asyncio.create_task(consume())
        await started.wait()
        if how == "cancel":
            task.cancel()
        await asyncio.wait({task})
        gc.collect()
        with time_limit(20):
            await gone.wait()


@pytest.mark.requirement("R12")
@pytest.mark.parametrize("rest", [b"no size\r\n", b"1\r\nxyz", b"f" * 20 + b"\r\n"])
async def test_an_invalid_chunk_ends_a_stream_at_once(rest: bytes) -> None:
    received = asyncio.Event()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    async with (
        writing(head + b"\r\n9\r\ndata: 1\n\n\r\n", received, rest) as url,
        imported(streaming(), base_url=url) as registry,
    ):
        with time_limit(20), pytest.raises(CallError) as caught:
            async for envelope in registry.subscribe("api.call", {}):
                assert envelope.data == 1
                received.set()

    assert caught.value.code == ErrorCode.EXECUTION_ERROR
    assert "not valid HTTP" in caught.value.message


@pytest.mark.parametrize("kind", ["text/event-stream", "application/jsonl"])
async def test_a_stream_of_a_status_without_content_is_empty(kind: str) -> None:
    body = b"data: 1\n\n" if kind == "text/event-stream" else b"1\n"
    doc = streaming() if kind == "text/event-stream" else lines()

    async def respond(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=205, content_type=kind)

    async with serving(respond) as url:
        assert await collected(doc, url) == []


def lines(schema: Any = None, method: str = "get") -> dict[str, Any]:
    media = {} if schema is None else {"itemSchema": schema}
    content = {"application/jsonl": media}
    return document("/events", method, responses={"200": {"description": "", "content": content}})


async def begin_lines(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
    await response.prepare(request)
    return response


@pytest.mark.parametrize("schema", [None, {"type": "object"}, {"type": "string"}], ids=str)
@pytest.mark.parametrize("rest", [b'{"n": 2', b'"two', b"[1,"])
async def test_a_line_that_is_cut_off_ends_the_stream_with_an_error(
    rest: bytes, schema: Any
) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin_lines(request)
        await response.write(b'{"n": 1}\n' + rest)
        return response

    received: list[Any] = []
    async with serving(respond) as url, imported(lines(schema), base_url=url) as registry:
        with pytest.raises(CallError) as caught:
            async for envelope in registry.subscribe("api.call", {}):
                received += [envelope.data]

    assert received == [{"n": 1}]
    assert caught.value.code == ErrorCode.EXECUTION_ERROR
    assert caught.value.details == {"item": rest.decode()}


@pytest.mark.parametrize("end", [b"", b"\n", b"\n3\n"])
async def test_a_stream_of_lines_may_end_with_a_mark(end: bytes) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin_lines(request)
        await response.write(b'{"n": 1}\n[DONE]' + end)
        return response

    async with serving(respond) as url:
        items = await collected(lines(), url)

    assert [item.data for item in items] == [{"n": 1}]


@pytest.mark.parametrize(
    ("schema", "body", "expected"),
    [({"type": "string"}, b'"one"\ntwo', ["one", "two"]), (None, b"1\n12", [1, 12])],
)
async def test_the_last_line_needs_no_line_end(schema: Any, body: bytes, expected: Any) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin_lines(request)
        await response.write(body)
        return response

    async with serving(respond) as url:
        items = await collected(lines(schema), url)

    assert [item.data for item in items] == expected


async def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin_lines(request)
        for piece in (b"\xef", b"\xbb\xbf1", b"\n2\n"):
            await response.write(piece)
        return response

    async with serving(respond) as url:
        assert [item.data for item in await collected(lines(), url)] == [1, 2]


async def test_a_last_number_without_line_end_and_length_may_be_cut_off() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/jsonl\r\n"
    received: list[Any] = []
    async with (
        writing(head + b"\r\n1\n12", ends=True) as url,
        imported(lines(), base_url=url) as registry,
    ):
        with pytest.raises(CallError) as caught:
            async for envelope in registry.subscribe("api.call", {}):
                received += [envelope.data]

    assert received == [1]
    assert caught.value.code == ErrorCode.EXECUTION_ERROR
    assert caught.value.details == {"item": "12"}


@pytest.mark.parametrize("retries", [0, 2])
async def test_lines_of_a_lost_connection_do_not_look_like_an_empty_stream(retries: int) -> None:
    count = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        response = await begin_lines(request)
        await response.write(b'{"n"')
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(respond) as url:
        with pytest.raises(CallError) as caught:
            await collected(lines(), url, retries=retries)

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert count == 1 + retries


@pytest.mark.requirement("R16")
async def test_the_headers_of_a_stream_do_not_show_a_key() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = await begin(request, Seen=request.headers["Authorization"])
        await response.write(b"data: 1\n\n")
        return response

    async with serving(respond) as url:
        auth = {"type": "bearer", "token": "s3cret-key"}
        (envelope,) = await collected(streaming(), url, auth=auth)
    assert "s3cret" not in str(envelope.meta)
