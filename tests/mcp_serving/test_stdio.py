import sys

import pytest
from mcp import Client, StdioServerParameters
from tests.conftest import PROJECT
from tests.mcp_serving.support import ERAS, error_of, tool_names


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
