"""How many files of the package a call runs through: a reader follows the same path."""

import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from aiohttp import web
from tests.mcp_serving.support import MODERN_META, modern_headers
from tests.openapi.serving import document, imported, serving
from tests.server.asgi import Client
from tests.servers import RedisServer, running

import operations
from operations import OperationRegistry
from operations.calls import PendingRequestMap, serve_calls
from operations.pubsub.redis import connect_redis
from operations.server import create_app

PACKAGE = str(Path(operations.__file__).parent) + "/"


def adding() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("math.add", type="query")
    async def add(a: int, b: int) -> int:
        return a + b

    return registry


async def files_of(call: Callable[[], Awaitable[Any]]) -> set[str]:
    """The files that run for a call, once everything is prepared."""
    for _ in range(2):
        await call()
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            found.add(name.removeprefix(PACKAGE))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        await call()
    finally:
        sys.setprofile(before)
    return found


async def test_a_local_call_runs_through_four_files() -> None:
    registry = adding()

    found = await files_of(lambda: registry.execute("math.add", {"a": 1, "b": 2}))

    assert len(found) <= 4, sorted(found)


async def test_an_http_request_runs_through_twelve_files() -> None:
    client = Client(create_app(adding()))

    async def call() -> None:
        assert (await client.post("/math/add", {"a": 1, "b": 2})).json == 3

    found = await files_of(call)
    assert len(found) <= 12, sorted(found)


async def test_an_http_request_with_a_query_runs_through_twelve_files() -> None:
    client = Client(create_app(adding()))

    async def call() -> None:
        assert (await client.get("/math/add?a=1&b=2")).json == 3

    found = await files_of(call)
    assert len(found) <= 12, sorted(found)


PET: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["id"],
}
RESPONSES = {"200": {"description": "ok", "content": {"application/json": {"schema": PET}}}}


async def pet(request: web.Request) -> web.Response:
    return web.json_response({"id": 7, "tags": ["cat"]})


def parameter(name: str, place: str, kind: str) -> dict[str, Any]:
    schema = {"type": kind, "items": {"type": "string"}} if kind == "array" else {"type": kind}
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


@pytest.mark.parametrize("config", [{}, {"auth": {"type": "bearer", "token": "secret-token"}}])
@pytest.mark.parametrize("kind", ["integer", "array"])
async def test_an_imported_get_runs_through_ten_files(kind: str, config: dict[str, Any]) -> None:
    parameters = [
        parameter("id", "path", "integer"),
        parameter("name", "query", "string"),
        parameter("more", "query", kind),
    ]
    given = {"id": 7, "name": "a b", "more": 3 if kind == "integer" else ["a", "b"]}
    doc = document("/pets/{id}", parameters=parameters, responses=RESPONSES)
    async with serving(pet) as url, imported(doc, base_url=url, **config) as registry:

        async def call() -> None:
            assert (await registry.execute("api.call", given)).data["id"] == 7

        found = await files_of(call)
    assert len(found) <= 10, sorted(found)


@pytest.mark.parametrize("declared", [{}, {"content": {"application/json": {}}}])
async def test_an_imported_get_without_a_schema_runs_through_ten_files(
    declared: dict[str, Any],
) -> None:
    parameters = [parameter("id", "path", "integer"), parameter("name", "query", "string")]
    responses = {"200": {"description": "ok", **declared}}
    doc = document("/pets/{id}", parameters=parameters, responses=responses)
    async with serving(pet) as url, imported(doc, base_url=url) as registry:

        async def call() -> None:
            assert (await registry.execute("api.call", {"id": 7, "name": "a"})).data["id"] == 7

        found = await files_of(call)
    assert len(found) <= 10, sorted(found)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"credentials": {"key": "secret-key"}},
        {"credentials": {"bearer": "secret-token"}, "headers": {"X-App": "mine"}},
        {"auth": {"type": "apiKey", "header_name": "X-Key", "token": "secret-key"}},
    ],
)
async def test_an_imported_post_runs_through_ten_files(config: dict[str, Any]) -> None:
    body = {"type": "object", "properties": {"owner": {"type": "object"}, **PET["properties"]}}
    doc = document(
        "/shops/{shop}/pets",
        "post",
        parameters=[parameter("shop", "path", "string")],
        requestBody={"required": True, "content": {"application/json": {"schema": body}}},
        responses=RESPONSES,
        security=[{name: []} for name in config.get("credentials", {})],
        components={
            "securitySchemes": {
                "key": {"type": "apiKey", "in": "header", "name": "X-Key"},
                "bearer": {"type": "http", "scheme": "bearer"},
            }
        },
    )
    given = {"shop": "a/b", "body": {"id": 7, "tags": ["cat"], "owner": {"name": "Ann"}}}
    async with serving(pet) as url, imported(doc, base_url=url, **config) as registry:

        async def call() -> None:
            assert (await registry.execute("api.call", given)).data["id"] == 7

        found = await files_of(call)
    assert len(found) <= 10, sorted(found)


async def test_a_call_of_an_mcp_tool_runs_through_twenty_one_files() -> None:
    app = create_app(adding(), mcp=True)
    client = Client(app)
    params = {"name": "math__add", "arguments": {"a": 1, "b": 2}, "_meta": MODERN_META}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    headers = modern_headers("tools/call", "math__add")

    async def call() -> None:
        response = await client.post("/mcp", message, headers=headers)
        assert response.json["result"]["structuredContent"] == 3

    async with app.router.lifespan_context(app):
        found = await files_of(call)
    assert len(found) <= 21, sorted(found)


async def test_a_call_over_redis_runs_through_fourteen_files() -> None:
    """Count the files of the caller and the worker in most calls: during some, a heartbeat is sent."""
    with running(RedisServer()) as server:
        async with (
            connect_redis(server.url) as near,
            connect_redis(server.url) as far,
            serve_calls(adding(), far),
            PendingRequestMap(near) as calls,
        ):
            paths = [
                frozenset(await files_of(lambda: calls.call("math.add", {"a": 1, "b": 2})))
                for _ in range(20)
            ]

    [(usual, _)] = Counter(paths).most_common(1)
    assert len(usual) <= 14, sorted(usual)
