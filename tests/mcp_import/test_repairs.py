"""Repairs of malformed messages: only listings and handshakes are repaired."""

from copy import deepcopy
from typing import Any

import pytest
from mcp_types import InitializeResult, jsonrpc_message_adapter
from tests.limits import time_limit
from tests.mcp_import.support import nothing_left_behind, raw

from operations import CallError, OperationRegistry
from operations.mcp import connect_mcp
from operations.mcp.shared.repairs import checked, mended, read_message, repaired

FAULTY = r'{"tools": [{"name": "a", "v": "\ud800"}], "x": "\ud800"}'


@pytest.mark.parametrize(
    "result",
    [
        f'{{"content": [], "structuredContent": {FAULTY}}}',
        f'{{"structuredContent": {FAULTY}}}',
        f'{{"other": {FAULTY}}}',
        r'{"tools": [], "content": [{"type": "text", "text": "\ud800"}]}',
    ],
)
async def test_a_result_of_a_call_is_not_repaired(result: str) -> None:
    registry = OperationRegistry()
    with time_limit(20), nothing_left_behind():
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


@pytest.mark.parametrize(
    ("result", "is_repaired"),
    [
        (FAULTY, True),
        (r'{"protocolVersion": "2025-11-25", "instructions": "\ud800"}', True),
        (r'{"content": [{"type": "text", "text": "\ud800"}], "tools": []}', False),
        (r'{"contents": [{"uri": "a:b", "text": "\ud800"}]}', False),
        (r'{"messages": [{"role": "user", "content": "\ud800"}]}', False),
        (r'{"completion": {"values": ["\ud800"]}}', False),
    ],
)
async def test_only_listings_and_handshakes_are_repaired(result: str, is_repaired: bool) -> None:
    message = f'{{"jsonrpc": "2.0", "id": 7, "result": {result}}}'.encode()

    found = await checked(message)

    assert (found != message) is is_repaired
    assert await repaired(message) == found
    if is_repaired:
        read_message(found)


@pytest.mark.requirement("R13")
def test_a_handshake_with_too_many_faults_is_not_repaired() -> None:
    result: dict[str, Any] = {
        "capabilities": {"experimental": dict.fromkeys(map(str, range(1_000)), 7)}
    }

    assert mended(deepcopy(result), InitializeResult) == result
