"""Every HTTP entry point takes the same steps in the same order: identify, place, admit, read, run."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from tests.server.asgi import Client
from tests.support import first_done

from operations import Identity, OperationRegistry
from operations.server import APIKeys, Limits, create_app, hash_key

JSON = {"content-type": "application/json"}
KEY = {"x-api-key": "ann"}
LARGE = b'"' + b"x" * 200 + b'"'

CALLS = {
    "operation": "/test/run",
    "gateway call": "/call",
    "gateway search": "/search",
    "gateway schema": "/schema",
    "gateway batch": "/batch",
    "mcp": "/mcp",
}
STREAMS = {"stream": "/test/count", "gateway stream": "/subscribe"}


def app(limits: Limits, release: asyncio.Event) -> Client:
    registry = OperationRegistry()

    @registry.operation("test.run")
    async def run(text: str = "") -> str:
        return text

    @registry.operation("test.wait")
    async def wait() -> None:
        await release.wait()

    @registry.operation("test.count")
    async def count() -> AsyncGenerator[int]:
        yield 1
        await release.wait()

    keys = APIKeys({hash_key("ann"): Identity("ann")})
    return Client(create_app(registry, limits=limits, identity=keys, mcp=True))


async def status(client: Client, path: str, **headers: str) -> int:
    sent = {**JSON, "accept": "application/json, text/event-stream", **KEY, **headers}
    return (await client.request("POST", path, body=LARGE, headers=sent)).status


@pytest.mark.parametrize("path", [*CALLS.values(), *STREAMS.values()], ids=[*CALLS, *STREAMS])
async def test_who_asks_is_known_before_anything_is_taken_or_read(path: str) -> None:
    client = app(Limits(body_bytes=100, rate_per_caller=1, burst=1), asyncio.Event())

    for _ in range(3):
        assert await status(client, path, **{"x-api-key": "wrong"}) == 401
    # Nothing was spent, and now the body is read.
    assert await status(client, path) == 413
    assert await status(client, path) == 429


@pytest.mark.requirement("R39")
@pytest.mark.parametrize("path", CALLS.values(), ids=CALLS)
async def test_a_call_takes_a_slot_before_its_body_is_read(path: str) -> None:
    release = asyncio.Event()
    client = app(Limits(body_bytes=100, calls=1), release)
    both = [asyncio.create_task(client.post("/test/wait", headers=KEY)) for _ in range(2)]
    (rejected,), (waiting,) = await first_done(both, 1)

    assert rejected.result().status == 429
    assert await status(client, path) == 429
    assert (await client.get("/operations", headers=KEY)).status == 200, "pages take none"
    release.set()
    assert (await waiting).status == 200
    assert await status(client, path) == 413


@pytest.mark.requirement("R39")
@pytest.mark.parametrize("path", STREAMS.values(), ids=STREAMS)
async def test_a_stream_takes_a_slot_before_its_body_is_read(path: str) -> None:
    release = asyncio.Event()
    client = app(Limits(body_bytes=100, streams=1), release)
    both = [asyncio.create_task(client.get("/test/count", headers=KEY)) for _ in range(2)]
    (rejected,), (open_,) = await first_done(both, 1)

    assert rejected.result().status == 429
    assert await status(client, path) == 429
    release.set()
    assert (await open_).status == 200
    assert await status(client, path) == 413


@pytest.mark.parametrize("path", ["/operations", "/openapi.json", "/session", "/runs/x", "/none"])
async def test_a_wrong_credential_hides_which_methods_and_paths_there_are(path: str) -> None:
    client = app(Limits(), asyncio.Event())

    for method in ("GET", "POST", "PUT"):
        answer = await client.request(method, path, headers={"x-api-key": "wrong"})
        assert answer.status == 401


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_probes_need_no_step(path: str) -> None:
    client = app(Limits(rate_per_caller=1, burst=1), asyncio.Event())

    for _ in range(5):
        assert (await client.get(path, headers={"x-api-key": "wrong"})).status == 200
