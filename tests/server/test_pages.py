"""The document, metrics, probes, and mounted applications."""

import re
from typing import Any

import pytest
from openapi_spec_validator import validate
from tests.server.asgi import Client

from operations import Identity, OperationRegistry
from operations.base.errors import TransportError
from operations.pubsub.websocket import connect_websocket
from operations.server import APIKeys, create_app, hash_key
from operations.server.http11.running import running

ALICE = {"authorization": "Bearer k"}
KEYS = APIKeys({hash_key("k"): Identity("alice", ["secret"])})


def serving(**options: Any) -> tuple[Client, OperationRegistry]:
    registry = OperationRegistry()

    @registry.operation("open.get", type="query")
    async def get(id: int) -> int:
        return id

    @registry.operation("hidden.get", type="query", scopes=["secret"])
    async def hidden() -> int:
        return 42

    return Client(create_app(registry, identity=KEYS, **options)), registry


@pytest.mark.requirement("R07")
async def test_the_document_shows_operations_that_the_caller_may_call() -> None:
    client, registry = serving(title="Demo", version="2.0")

    anyone = (await client.get("/openapi.json")).json
    alice = (await client.get("/openapi.json", headers=ALICE)).json

    validate(alice)
    assert list(anyone["paths"]) == ["/open/get"]
    assert list(alice["paths"]) == ["/hidden/get", "/open/get"]
    assert alice["info"] == {"title": "Demo", "version": "2.0"}

    registry.unregister("open.get")
    assert (await client.get("/openapi.json")).json["paths"] == {}


@pytest.mark.requirement("R07")
async def test_metrics_show_operations_that_the_caller_may_call() -> None:
    client, _ = serving()
    await client.get("/open/get?id=1")
    await client.get("/open/get?id=x")
    await client.get("/hidden/get", headers=ALICE)
    await client.post("/call", json={"operation": "made.up"})

    anyone = (await client.get("/metrics")).body.decode()
    alice = await client.get("/metrics", headers=ALICE)

    assert 'operations_calls_total{operation="open.get",code=""} 1' in anyone
    assert 'operations_calls_total{operation="open.get",code="VALIDATION_ERROR"} 1' in anyone
    assert "hidden" not in anyone
    assert "made" not in anyone
    assert 'operations_calls_total{operation="hidden.get",code=""} 1' in alice.body.decode()
    assert alice.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("answer", [True, False, RuntimeError("no broker")])
async def test_readiness_comes_from_the_given_function(answer: Any) -> None:
    async def ready() -> bool:
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    client, _ = serving(ready=ready)

    response = await client.get("/readyz")

    assert response.status == (200 if answer is True else 503)
    assert (await client.get("/healthz")).status == 200


async def test_a_websocket_at_another_path_is_rejected() -> None:
    app = create_app(OperationRegistry(), websocket=True, console=True)
    async with running(app) as url:
        for path in ("", "/", "/wss"):
            with pytest.raises(
                TransportError, match="HTTP 404: check the credentials and the path"
            ):
                async with connect_websocket(url.replace("http", "ws") + path):
                    pass


async def test_without_other_parts_their_paths_are_empty() -> None:
    client, _ = serving()

    for target in ("/mcp", "/ws", "/"):
        assert (await client.get(target)).status == 404


@pytest.mark.parametrize("console", [True, False])
async def test_a_request_without_a_handshake_at_the_path_of_the_websocket_gets_426(
    console: bool,
) -> None:
    client, _ = serving(websocket=True, console=console)

    response = await client.get("/ws")

    assert (response.status, response.headers["upgrade"]) == (426, "websocket")
    assert "proxy must use HTTP/1.1 and pass on the headers Upgrade" in response.json["message"]


@pytest.mark.requirement("R07")
@pytest.mark.parametrize("console", [True, False])
async def test_a_wrong_credential_is_rejected_at_every_path_but_the_console(console: bool) -> None:
    client, _ = serving(console=console)
    wrong = {"x-api-key": "wrong"}

    for target in ("/open/get?id=1", "/hidden/get", "/made/up", "/nothing"):
        response = await client.get(target, headers=wrong)
        assert (response.status, response.json["code"]) == (401, "ACCESS_DENIED"), target
        assert "www-authenticate" in response.headers
    for target in ("/", "/~console/console.css"):
        status = (await client.get(target, headers=wrong)).status
        assert status == (200 if console else 401)
    assert (await client.get("/made/up", headers=ALICE)).status == 404


async def test_the_page_of_the_console_preloads_every_module() -> None:
    client, _ = serving(console=True)
    page = (await client.get("/")).body.decode()

    loaded = re.findall(r'rel="modulepreload" href="(~console/\w[\w-]*\.js)"', page)
    imported = {"~console/main.js"}
    for name in loaded:
        text = (await client.get(f"/{name}")).body.decode()
        imported |= {f"~console/{each}" for each in re.findall(r' from "\./(.+)"', text)}

    assert set(loaded) == imported
