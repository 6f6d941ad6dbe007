import logging
import sys

import msgspec
import pytest
from tests.server.asgi import Client

from operations import Identity, OperationContext, OperationRegistry
from operations.server import APIKeys, create_app, hash_key
from operations.telemetry import LogConfig, LogFormatter


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


@pytest.mark.requirement("R47")
@pytest.mark.parametrize("as_json", [False, True])
def test_r47_a_formatted_record_has_no_invisible_characters(as_json: bool) -> None:
    try:
        raise ValueError("bad\x1b[31m\u202e")
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("x", logging.INFO, "", 1, "%s", ("a\x9b\u200bb\r",), error)

    text = LogFormatter(LogConfig(json=as_json)).format(record)

    assert text.replace("\n", "").isprintable()
    assert "31m" in text
    if as_json:
        assert msgspec.json.decode(text)["message"] == "a\x9b\u200bb\r"


@pytest.mark.requirement("R47")
async def test_r47_a_log_message_of_a_handler_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    await OperationContext().log("error", "done\nERROR forged\x1b[31m")

    assert caplog.messages[0].isprintable()
