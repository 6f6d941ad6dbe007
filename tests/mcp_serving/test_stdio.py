import asyncio
import json
import sys
from asyncio.subprocess import PIPE

import pytest
from mcp import Client, StdioServerParameters
from mcp_types import INTERNAL_ERROR, INVALID_REQUEST, PARSE_ERROR
from tests.conftest import PROJECT
from tests.limits import time_limit
from tests.mcp_serving.support import ERAS, error_of, tool_names

from operations.front.limits import Limits


@pytest.mark.parametrize("era", ERAS)
async def test_a_child_serves_its_parent_over_stdio_as_the_operator(era: str) -> None:
    child = StdioServerParameters(
        command=sys.executable, args=["-m", "tests.mcp_serving.stdio_server"], cwd=PROJECT
    )
    async with Client(child, mode=era) as client:
        assert "task__delete" in await tool_names(client)
        added = await client.call_tool("math__add", {"a": 1})
        failed = await client.call_tool("task__fail", {})

    assert added.content[0].text == "2"  # type: ignore[union-attr]
    assert error_of(failed)["code"] == "TASK_LOCKED"


LARGE = b"a" * Limits().body_bytes


@pytest.mark.requirement("R13")
async def test_a_malformed_request_is_answered_if_it_has_an_id() -> None:
    lines = {
        1: b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": []}',
        2: b'{"jsonrpc": "2.0", "id": 2, "method": 5}',
        3: b'{"jsonrpc": "1.0", "id": 3, "method": "ping"}',
        4: b'{"jsonrpc": "2.0", "id": 4, "method": "ping", "params": {"a": NaN}}',
        5: b'{"jsonrpc": "2.0", "id": 5, "method": "unknown"}',
        7: b'{"jsonrpc": "2.0", "id": 7}',
        8: b'{"jsonrpc": "2.0", "id": 8, "params": {"a": "%b"}, "method": "ping"}' % LARGE,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.mcp_serving.stdio_server",
        cwd=PROJECT, stdin=PIPE, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    others = b'[]\n\n \r\n{"jsonrpc": "2.0", "id": 6, "error": {"method"}}\n'
    with time_limit(60):
        process.stdin.write(others + b"\n".join(lines.values()) + b"\n")
        answers = [json.loads(await process.stdout.readline()) for _ in lines]
        process.stdin.close()
        _, logged = await process.communicate()

    assert logged.count(b"dropped an MCP message") == 2, "blank lines are ignored"
    codes = {each["id"]: each["error"]["code"] for each in answers}
    assert codes.keys() == lines.keys()
    assert [codes[number] for number in (1, 2, 3, 7)] == [INVALID_REQUEST] * 4
    assert codes[4] == PARSE_ERROR
    assert codes[8] == INTERNAL_ERROR
