"""The form of a model provider in a package of its own: calls are written as lines."""

from typing import Any

from operations.agents import Outcome, ToolCall, ToolDefinition, ToolLimits


class Lines:
    """Tools, calls and results as lines."""

    limits = ToolLimits(longest_description=80, most_tools=8)

    def write(self, tool: ToolDefinition) -> dict[str, Any]:
        """Return a tool."""
        return {"line": f"{tool.name}({', '.join(tool.schema['properties'])})"}

    def read_call(self, raw: Any) -> ToolCall | None:
        """Return a tool call; None if it is in another form."""
        if not isinstance(raw, str):
            return None
        name, _, arguments = raw.partition(" ")
        return ToolCall(name, arguments)

    def write_result(self, call: ToolCall, outcome: Outcome) -> dict[str, Any]:
        """Return the message with the result of a call."""
        return {"line": f"{call.name} = {outcome.text}"}


FORMAT = Lines()
