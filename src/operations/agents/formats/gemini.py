"""The form of Gemini, whose schemas are the subset of OpenAPI 3.0: few keywords, no references, string enums.

{"name", "args", "id"?}, or a part that contains it   -> {"function_response": {...}}
"""

from typing import Any

from operations.agents.formats.contract import (
    Outcome,
    ToolCall,
    ToolDefinition,
    ToolLimits,
    described,
    member,
    name_in,
)
from operations.base.types import JSONObject


class Gemini:
    """The form of Gemini's function calls."""

    limits = ToolLimits(longest_description=100_000, most_tools=512, is_plain=True)

    def write(self, tool: ToolDefinition) -> JSONObject:
        """Return a function declaration."""
        return described(tool, "parameters")

    def read_call(self, raw: Any) -> ToolCall | None:
        """Return a function call; None if it is in another form."""
        part = member(raw, "function_call") or member(raw, "functionCall")
        if part is None and member(raw, "args", ...) is not ...:
            part = raw
        if not member(part, "name"):
            return None
        return ToolCall(name_in(part), member(part, "args"), member(part, "id"))

    def write_result(self, call: ToolCall, outcome: Outcome) -> JSONObject:
        """Return the part with the result of a call."""
        key, value = ("result", outcome.data) if outcome.error is None else ("error", outcome.error)
        response: JSONObject = {"name": call.name, "response": {key: value}}
        if call.id is not None:
            response["id"] = call.id
        return {"function_response": response}


FORMAT = Gemini()
