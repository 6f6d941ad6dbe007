"""Subscriptions as server-sent events, from a real server to real clients."""

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.limits import time_limit
from tests.server.asgi import Client
from tests.server.sse import events_of

from operations import (
    AccessControl,
    CallError,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
)
from operations.openapi import HTTPServiceConfig, from_openapi_url
from operations.server import APIKeys, Limits, create_app, hash_key
from operations.server.http11.running import running


def serving(handler: Any, **options: Any) -> Any:
    spec = OperationSpec(
        name="items",
        namespace="test",
        type=OperationType.SUBSCRIPTION,
        input_schema=options.pop("input_schema", {}),
        output_schema=options.pop("output_schema", {}),
        meta=options.pop("meta", {}),
        access_control=options.pop("access_control", AccessControl()),
    )
    return create_app(OperationRegistry([Operation(spec, handler)]), **options)


@asynccontextmanager
async def streaming(app: Any) -> AsyncGenerator[aiohttp.ClientResponse]:
    """The stream of a running app."""
    async with (
        running(app) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/test/items") as response,
    ):
        yield response


class Watched:
    """A handler that records its start and end."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, input: Any, context: OperationContext) -> AsyncIterator[int]:
        self.began.set()
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            self.ended.set()


async def test_a_stream_whose_handler_cancels_itself_ends_with_an_error() -> None:
    async def items(input: Any, context: OperationContext) -> AsyncIterator[int]:
        yield 1
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async with streaming(serving(items)) as response:
        events = [event async for event in events_of(response)]

    assert [event.event for event in events] == ["message", "error"]
    assert events[1].json["code"] == "ABORTED"


async def test_items_arrive_at_once_and_the_end_is_an_event() -> None:
    step = asyncio.Event()

    async def items(input: Any, context: OperationContext) -> AsyncIterator[Any]:
        yield {"text": "two\nlines", "é": None}
        await step.wait()
        yield [1]

    with time_limit(20):
        async with streaming(serving(items)) as response:
            events = events_of(response)
            first = await anext(events)
            step.set()
            rest = [event async for event in events]

    assert response.headers["content-type"] == "text/event-stream"
    assert (first.event, first.json) == ("message", {"text": "two\nlines", "é": None})
    assert [(event.event, event.json) for event in rest] == [("message", [1]), ("complete", {})]


async def test_changes_of_an_item_are_comments_and_reach_an_importer() -> None:
    async def items(input: Any, context: OperationContext) -> AsyncIterator[Any]:
        yield {"id": 1, "secret": "x"}
        yield {"id": 2}

    app = serving(items, output_schema={"properties": {"id": {}}, "additionalProperties": False})
    with time_limit(20):
        async with running(app) as url:
            async with aiohttp.ClientSession() as session:
                address = f"{url}/test/items"
                plain = await (await session.get(address)).text()
                meta = {"Operations-Meta": "true"}
                whole = await (await session.get(address, headers=meta)).text()
            config = HTTPServiceConfig(namespace="test", restore=True)
            async with await from_openapi_url(f"{url}/openapi.json", config) as service:
                registry = OperationRegistry(service)
                envelopes = [each async for each in registry.subscribe("test.items")]

    assert plain.startswith(': operations-changes 1\ndata: {"id":1}\n\ndata: {"id":2}\n\n')
    assert whole.startswith(': operations-meta {"source":"local","operationId":"test.items",')
    assert [envelope.data for envelope in envelopes] == [{"id": 1}, {"id": 2}]
    assert [[change.path for change in each.meta.changes] for each in envelopes] == [
        ["/secret"],
        [],
    ]


async def test_items_of_text_and_bytes_are_restored_by_an_importer() -> None:
    registry = OperationRegistry()

    @registry.operation("s.text")
    async def text() -> AsyncIterator[str]:
        for item in ("a", '{"x": 1}', "", "1"):
            yield item

    @registry.operation("s.bytes")
    async def content() -> AsyncIterator[bytes]:
        yield b"\0\xff"

    @registry.operation("s.any")
    async def anything() -> AsyncIterator[Any]:
        for item in ("AP8=", b"\0\xff", None, 1):
            yield item

    with time_limit(20):
        async with running(create_app(registry)) as url:
            config = HTTPServiceConfig(namespace="s", restore=True)
            async with await from_openapi_url(f"{url}/openapi.json", config) as service:
                there = OperationRegistry(service)
                for spec in registry.specs():
                    expected = [item.data async for item in registry.subscribe(spec.id)]
                    assert [item.data async for item in there.subscribe(spec.id)] == expected


async def test_the_head_comes_before_the_first_item() -> None:
    async def items(input: Any, context: OperationContext) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield 1

    with time_limit(20):
        async with streaming(serving(items)) as response:
            assert response.status == 200


@pytest.mark.requirement("R17")
async def test_an_error_during_a_stream_is_an_event() -> None:
    async def items(input: Any, context: OperationContext) -> AsyncIterator[Any]:
        yield 1
        if input["declared"]:
            raise CallError("GONE", "it is gone", {"id": 1})
        raise RuntimeError("CANARY")

    client = Client(serving(items))

    declared = await client.post("/test/items", json={"declared": True})
    other = await client.post("/test/items", json={"declared": False})

    assert (
        b'event: error\ndata: {"code":"GONE","message":"it is gone","details":{"id":1}'
        in declared.body
    )
    assert b"complete" not in declared.body
    assert b"EXECUTION_ERROR" in other.body
    assert b"CANARY" not in other.body


async def test_an_error_at_once_is_a_status() -> None:
    async def items(input: Any, context: OperationContext) -> AsyncIterator[Any]:
        if input != "fine":
            raise CallError("UNAVAILABLE", "not now")
        yield 1

    client = Client(serving(items, access_control=AccessControl(["x"])))
    assert (await client.get("/test/items")).status == 404

    client = Client(serving(items))
    assert (await client.post("/test/items", json=0)).status == 503
    assert (await client.post("/test/items", json="fine")).status == 200


@pytest.mark.requirement("R31")
async def test_the_handler_ends_when_the_client_leaves_a_stream() -> None:
    handler = Watched()

    with time_limit(20):
        async with running(serving(handler)) as url, aiohttp.ClientSession() as session:
            response = await session.get(f"{url}/test/items")
            await anext(events_of(response))
            response.close()
            with time_limit(20):
                await handler.ended.wait()


@pytest.mark.requirement("R31")
async def test_the_handler_ends_when_the_client_leaves_a_call() -> None:
    registry = OperationRegistry()
    began, ended = asyncio.Event(), asyncio.Event()

    @registry.operation("test.wait")
    async def wait() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    app = create_app(registry)
    with time_limit(20):
        async with running(app) as url, aiohttp.ClientSession() as session:
            for path, body in (
                ("/test/wait", None),
                ("/call", {"operation": "test.wait"}),
                ("/batch", {"calls": [{"operation": "test.wait"}]}),
            ):
                began.clear()
                ended.clear()
                request = asyncio.create_task(session.post(url + path, json=body))
                await began.wait()
                request.cancel()
                with time_limit(20):
                    await ended.wait()
            async with session.get(f"{url}/healthz") as response:
                assert response.status == 200

    assert app.state.pipeline.front.calls.total == 0


async def test_a_handler_that_never_awaits_blocks_no_other_call() -> None:
    ended = asyncio.Event()

    async def flood(input: Any, context: OperationContext) -> AsyncIterator[int]:
        number = 0
        try:
            while True:
                number += 1
                yield number
        finally:
            ended.set()

    with time_limit(20):
        async with running(serving(flood)) as url, aiohttp.ClientSession() as session:
            response = await session.get(f"{url}/test/items")
            async with session.get(f"{url}/healthz") as health:
                assert health.status == 200
            response.close()
            await ended.wait()


@pytest.mark.requirement("R33")
async def test_a_slow_client_slows_the_handler() -> None:
    given = 0
    ended = asyncio.Event()

    async def items(input: Any, context: OperationContext) -> AsyncIterator[str]:
        nonlocal given
        try:
            while True:
                given += 1
                yield "x" * 100_000
        finally:
            ended.set()

    with time_limit(20):
        async with running(serving(items)) as url, aiohttp.ClientSession() as session:
            response = await session.get(f"{url}/test/items")
            last = -1
            while last != given:
                last = given
                await asyncio.sleep(0.2)
            response.close()
            await ended.wait()

    # The buffers of two sockets and two libraries; far less than the handler could yield.
    assert given < 200


async def test_idle_streams_send_comments() -> None:
    app = serving(Watched(), heartbeat=0.02)

    with time_limit(20):
        async with streaming(app) as response:
            text = b""
            while b": alive\n\n: alive\n\n" not in text:
                text += await response.content.readany()

    assert text.startswith(b"data: 1\n\n")


# ------------------------------------------------------------ taking up again


async def counting(input: Any, context: OperationContext) -> AsyncIterator[Any]:
    for number in range(input.get("after", 0) + 1, 5):
        yield {"id": number, "caller": context.identity.id if context.identity else None}


RESUMABLE: dict[str, Any] = {
    "meta": {"resume": {"input": "after", "id": "id"}},
    "input_schema": {"type": "object", "properties": {"after": {"type": "integer"}}},
}


async def test_a_resumable_stream_is_resumed() -> None:
    client = Client(serving(counting, **RESUMABLE))

    whole = await client.get("/test/items")
    rest = await client.get("/test/items", headers={"last-event-id": "3"})
    explicit = await client.get("/test/items?after=4", headers={"last-event-id": "1"})
    odd = await client.get("/test/items", headers={"last-event-id": "x"})

    assert whole.body.startswith(b'id: 1\ndata: {"id":1')
    assert rest.body.startswith(b'id: 4\ndata: {"id":4')
    assert explicit.body.startswith(b"event: complete")
    assert odd.status == 422


async def test_a_stream_that_cannot_be_resumed_has_no_ids() -> None:
    client = Client(serving(counting))

    response = await client.post("/test/items", json={}, headers={"last-event-id": "3"})

    assert b"id: " not in response.body
    assert response.body.startswith(b'data: {"id":1')


@pytest.mark.requirement("R11")
async def test_an_event_id_of_another_caller_reveals_none_of_its_events() -> None:
    keys = APIKeys({hash_key(name): Identity(name) for name in ("alice", "bob")})
    client = Client(serving(counting, identity=keys, **RESUMABLE))
    await client.get("/test/items", headers={"x-api-key": "alice"})

    response = await client.get("/test/items", headers={"x-api-key": "bob", "last-event-id": "2"})

    assert b'"caller":"bob"' in response.body
    assert b"alice" not in response.body


@pytest.mark.requirement("R39")
async def test_streams_are_bounded_for_each_caller() -> None:
    handler = Watched()
    app = serving(handler, limits=Limits(streams_per_caller=2))

    with time_limit(20):
        async with running(app) as url, aiohttp.ClientSession() as session:
            opened = [await session.get(f"{url}/test/items") for _ in range(2)]
            async with session.get(f"{url}/test/items") as refused:
                assert refused.status == 429
            opened[0].close()
            await handler.ended.wait()
            while app.state.pipeline.front.streams.total > 1:
                await asyncio.sleep(0.01)
            async with session.get(f"{url}/test/items") as again:
                assert again.status == 200
            opened[1].close()


async def test_many_streams_leave_nothing_behind() -> None:
    app = serving(Watched())

    with time_limit(30):
        async with running(app) as url:
            before = len(asyncio.all_tasks())
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                opened = await asyncio.gather(
                    *(session.get(f"{url}/test/items") for _ in range(200))
                )
                assert app.state.pipeline.front.streams.total == 200
                for response in opened:
                    response.close()
            while app.state.pipeline.front.streams.total:
                await asyncio.sleep(0.01)
            gc.collect()
            while len(asyncio.all_tasks()) > before:
                await asyncio.sleep(0.01)
