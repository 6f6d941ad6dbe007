"""The forms of OpenAI.

chat        {"id", "function": {"name", "arguments": "..."}}     -> {"role": "tool", ...}
responses   {"type": "function_call", "call_id", ...}            -> {"type": "function_call_output", ...}
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

_LIMITS = ToolLimits(longest_description=1024, most_tools=128)


class OpenAIChat:
    """The form of chat completions, and of the APIs that follow them."""

    limits = _LIMITS

    def write(self, tool: ToolDefinition) -> JSONObject:
        """Return a tool."""
        return {"type": "function", "function": described(tool, "parameters")}

    def read_call(self, raw: Any) -> ToolCall | None:
        """Return a tool call; None if it is in another form."""
        function = member(raw, "function")
        if not member(function, "name"):
            return None
        return ToolCall(name_in(function), member(function, "arguments"), member(raw, "id"))

    def write_result(self, call: ToolCall, outcome: Outcome) -> JSONObject:
        """Return the message with the result of a call."""
        return {"role": "tool", "tool_call_id": call.id, "content": outcome.text}


class OpenAIResponses:
    """The form of the responses API."""

    limits = _LIMITS

    def write(self, tool: ToolDefinition) -> JSONObject:
        """Return a tool."""
        return {"type": "function", **described(tool, "parameters"), "strict": False}

    def read_call(self, raw: Any) -> ToolCall | None:
        """Return a tool call; None if it is in another form."""
        if member(raw, "type") != "function_call":
            return None
        call_id = member(raw, "call_id")
        return ToolCall(name_in(raw), member(raw, "arguments"), call_id, takes_images=True)

    def write_result(self, call: ToolCall, outcome: Outcome) -> JSONObject:
        """Return the item with the result of a call."""
        output = outcome.content(_block)
        return {"type": "function_call_output", "call_id": call.id, "output": output}


def _block(block: Block) -> JSONObject:
    if isinstance(block, str):
        return {"type": "input_text", "text": block}
    return {"type": "input_image", "image_url": block.url, "detail": "auto"}


CHAT = OpenAIChat()
RESPONSES = OpenAIResponses()
