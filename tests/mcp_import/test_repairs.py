"""Repairs of malformed messages: only listings and handshakes are repaired, in one pass."""

import json
import threading
from typing import Any

import anyio
import pytest
from mcp_types import jsonrpc_message_adapter
from tests.mcp_import.support import nothing_left_behind, raw

from operations import CallError, OperationRegistry
from operations._json import as_json
from operations.mcp import connect_mcp, repairs
from operations.mcp.repairs import Repairs, read_message

FAULTY = r'{"tools": [{"name": "a", "v": "\ud800"}], "x": "\ud800"}'


@pytest.mark.parametrize(
    "result",
    [
        f'{{"content": [], "structuredContent": {FAULTY}}}',
        f'{{"structuredContent": {FAULTY}}}',
        f'{{"other": {FAULTY}}}',
        FAULTY,
        r'{"tools": [], "content": [{"type": "text", "text": "\ud800"}]}',
    ],
)
async def test_a_result_of_a_call_is_not_repaired(result: str) -> None:
    registry = OperationRegistry()
    with anyio.fail_after(20), nothing_left_behind():
        async with connect_mcp("raw", raw("result", "tools/call", result)) as client:
            registry.register_all(client)
            with pytest.raises(CallError) as caught:
                await registry.execute("raw.pid", {})

    assert caught.value.message == "raw sent a response that the protocol does not allow"


@pytest.mark.parametrize(
    "text",
    [
        '{"jsonrpc": "2.0", "id": 1, "result": {"tools": [{"name": "a", "n": 1.0}], "nextCursor": null}}',
        '{"jsonrpc": "2.0", "id": "1", "error": {"code": -32601, "message": "no", "data": [1e400]}}',
        '{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {"a": 123456789012345678901234567890}}',
        '{"jsonrpc": "2.0", "method": "notifications/message", "params": {"x": NaN, "x": -Infinity}}',
        '{"jsonrpc": "2.0", "id": 1.0, "result": {}}',
        '{"jsonrpc": "2.0", "id": 1.5, "result": {}}',
        '{"jsonrpc": "2.0", "id": true, "result": {}}',
        '{"jsonrpc": "2.0", "id": null, "error": {"code": "1", "message": "no"}}',
        '{"jsonrpc": "2.0", "id": null, "error": {"code": 1, "message": "no"}}',
        '{"jsonrpc": "1.0", "id": 1, "result": {}}',
        '{"jsonrpc": "2.0", "id": 1, "result": {"x": ' + "[" * 300 + "]" * 300 + "}}",
        '{"jsonrpc": "2.0", "id": 1, "result": {"x": 1' + "0" * 5000 + "}}",
        r'{"jsonrpc": "2.0", "id": 1, "result": {"x": "\ud800"}}',
        '[{"jsonrpc": "2.0", "id": 1, "result": {}}]',
        '{"jsonrpc": "2.0", "id": 1',
        "",
    ],
)  # fmt: skip
def test_a_message_is_read_as_the_sdk_reads_it(text: str) -> None:
    try:
        expected = repr(jsonrpc_message_adapter.validate_json(text, by_name=False))
    except ValueError:
        with pytest.raises(ValueError, match=r".+"):
            read_message(text.encode())
    else:
        assert repr(read_message(text.encode())) == expected


@pytest.mark.parametrize("order", ["id first", "id last"])
@pytest.mark.parametrize(
    ("method", "is_repaired"),
    [
        ("tools/list", True),
        ("initialize", True),
        ("tools/call", False),
        ("resources/read", False),
        ("prompts/get", False),
        ("completion/complete", False),
    ],
)
async def test_only_responses_to_listings_and_handshakes_are_repaired(
    method: str, is_repaired: bool, order: str
) -> None:
    result = f'"result": {FAULTY}'
    parts = ['"id": 7', '"jsonrpc": "2.0"', result]
    message = f"{{{', '.join(parts if order == 'id first' else parts[::-1])}}}".encode()
    sent = Repairs()
    sent.sent(method, 7)
    sent.sent("tools/list", 8)

    repaired = await sent.checked(message)

    assert (repaired != message) is is_repaired
    assert await sent.repaired(message) == repaired


@pytest.mark.parametrize(("size", "in_thread"), [(10, False), (1_000_000, True)])
async def test_only_a_large_listing_is_repaired_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, size: int, in_thread: bool
) -> None:
    threads: set[bool] = set()

    def recording(value: Any) -> Any:
        threads.add(threading.current_thread() is not threading.main_thread())
        return as_json(value)

    monkeypatch.setattr(repairs, "as_json", recording)
    sent = Repairs()
    sent.sent("tools/list", 1)
    tool = json.dumps({"name": "a", "description": "x" * size, "surrogate": "\ud800"})
    await sent.repaired(f'{{"id": 1, "result": {{"tools": [{tool}]}}}}'.encode())

    assert threads == {in_thread}


async def test_each_value_of_a_listing_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []

    def recording(value: Any) -> Any:
        checked.append(value)
        return as_json(value)

    monkeypatch.setattr(repairs, "as_json", recording)
    result = r'{"tools": [], "a": {"b": {"c": {"kept": "unique", "faulty": "\ud800"}}}}'
    sent = Repairs()
    sent.sent("tools/list", 1)
    repaired = await sent.repaired(f'{{"id": 1, "result": {result}}}'.encode())

    assert json.loads(repaired)["result"] == {"tools": [], "a": {"b": {"c": {"kept": "unique"}}}}
    assert len([value for value in checked if "unique" in json.dumps(value)]) == 1
