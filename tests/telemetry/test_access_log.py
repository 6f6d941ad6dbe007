import logging

import msgspec
import pytest
from tests.server.asgi import Client

from operations import Identity, OperationRegistry
from operations.server import APIKeys, create_app, hash_key


async def test_each_request_is_one_line_of_json(
    registry: OperationRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    @registry.operation("test.run", type="query")
    async def run(word: str) -> str:
        return word

    client = Client(create_app(registry, identity=APIKeys({hash_key("k"): Identity("alice")})))

    with caplog.at_level(logging.INFO, "operations.access"):
        found = await client.get("/test/run?word=CANARY", headers={"x-api-key": "k"})
        await client.get("/" + "a" * 1000)

    first, second = (msgspec.json.decode(record.getMessage()) for record in caplog.records)
    assert (
        first.items()
        >= {
            "method": "GET",
            "path": "/test/run",
            "status": 200,
            "bytes": 8,
            "caller": "alice",
            "requestId": found.headers["x-request-id"],
            "client": "127.0.0.1",
        }.items()
    )
    assert (second["status"], len(second["path"])) == (404, 200)
    assert "CANARY" not in caplog.text


async def test_no_record_is_built_without_a_listener(
    registry: OperationRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "operations.access"):
        assert (await Client(create_app(registry)).get("/healthz")).status == 200

    assert caplog.records == []
