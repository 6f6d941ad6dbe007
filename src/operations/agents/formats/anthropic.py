"""The form of Anthropic's messages.

{"type": "tool_use", "id", "name", "input"}   -> {"type": "tool_result", ...}
"""

from typing import Any

from operations.agents.formats.contract import (
    Block,
    Outcome,
    ToolCall,
    ToolDefinition,
    ToolLimits,
    described,
    member,
    name_in,
)
from operations.base.types import JSONObject


class Anthropic:
    """The form of Anthropic's messages."""

    limits = ToolLimits(longest_description=100_000, most_tools=10_000)

    def write(self, tool: ToolDefinition) -> JSONObject:
        """Return a tool."""
        return described(tool, "input_schema")

    def read_call(self, raw: Any) -> ToolCall | None:
        """Return a tool call; None if it is in another form."""
        if member(raw, "type") != "tool_use":
            return None
        return ToolCall(name_in(raw), member(raw, "input"), member(raw, "id"), takes_images=True)

    def write_result(self, call: ToolCall, outcome: Outcome) -> JSONObject:
        """Return the block with the result of a call."""
        return {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": outcome.content(_block),
            "is_error": outcome.error is not None,
        }


def _block(block: Block) -> JSONObject:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    source = {"type": "base64", "media_type": block.media_type, "data": block.data}
    return {"type": "image", "source": source}


FORMAT = Anthropic()
