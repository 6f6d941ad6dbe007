"""The form of LangChain's messages; its models accept tools in the form of OpenAI.

{"type": "tool_call", "id", "name", "args"}   -> {"role": "tool", ...}
"""

from typing import Any

from operations.agents.formats.contract import (
    Outcome,
    ToolCall,
    ToolDefinition,
    ToolLimits,
    member,
    name_in,
)
from operations.agents.formats.openai import CHAT
from operations.base.types import JSONObject


class LangChain:
    """The form of LangChain's messages."""

    limits = ToolLimits(longest_description=100_000, most_tools=10_000)

    def write(self, tool: ToolDefinition) -> JSONObject:
        """Return a tool, as `bind_tools` takes it."""
        return CHAT.write(tool)

    def read_call(self, raw: Any) -> ToolCall | None:
        """Return a tool call; None if it is in another form."""
        if member(raw, "type") != "tool_call":
            return None
        # Not every model behind LangChain accepts images in the result of a tool.
        return ToolCall(name_in(raw), member(raw, "args"), member(raw, "id"))

    def write_result(self, call: ToolCall, outcome: Outcome) -> JSONObject:
        """Return the message with the result of a call."""
        return {
            "role": "tool",
            "name": call.name,
            "tool_call_id": call.id,
            "content": outcome.text,
            "status": "success" if outcome.error is None else "error",
        }


FORMAT = LangChain()
