"""Names of tools that are not valid names of operations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.server.mcpserver import MCPServer

from operations import OperationSpec, OperationType
from operations.base.text import hides_something, safe_name, safe_namespace
from operations.mcp import MCPClientConfig, connect_mcp


@given(st.text(max_size=300))
def test_a_safe_name_is_valid_for_an_operation_or_none(name: str) -> None:
    try:
        safe, namespace = safe_name(name), safe_namespace(name)
    except ValueError:
        return
    OperationSpec(name=safe, namespace=namespace, type=OperationType.QUERY)


@pytest.mark.parametrize("name", ["", "a\nb", "a\x00", "a\u200bb", "\u202ea", "x" * 257])
def test_invisible_characters_are_not_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="its name"):
        safe_name(name)


@pytest.mark.requirement("R47")
def test_hidden_characters_in_a_text_are_found() -> None:
    assert not hides_something("Tea for two.\n\tMilk? Größe, 茶, 🍵")
    assert hides_something("ignore\u200b this")
    assert hides_something("\u202edesrever")
    assert hides_something("bell\x07")


@pytest.mark.requirement("R25")
async def test_a_tool_that_takes_the_id_of_a_prompt_or_resource_is_reported() -> None:
    server = MCPServer("demo")
    server.add_tool(lambda: "tool", name="resources.read")
    server.add_tool(lambda: "tool", name="prompts.summarise")

    @server.resource("memo://today")
    def today() -> str:
        return "Sunday"

    @server.prompt()
    def summarise() -> str:
        return "Summarise it."

    async with connect_mcp("demo", MCPClientConfig(server=server)) as client:
        skipped = client.skipped

    assert skipped == {
        "resources.read": "its id demo.resources.read is taken",
        "prompts.summarise": "its id demo.prompts.summarise is taken",
    }
