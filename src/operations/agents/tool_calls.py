"""Read the tool calls of model providers, and write their result messages.

    OpenAI, chat         {"id", "function": {"name", "arguments": "..."}}     -> {"role": "tool", ...}
    OpenAI, responses    {"type": "function_call", "call_id", ...}            -> {"type": "function_call_output", ...}
    Anthropic            {"type": "tool_use", "id", "name", "input"}          -> {"type": "tool_result", ...}
    LangChain            {"type": "tool_call", "id", "name", "args"}          -> {"role": "tool", ...}
    Gemini               {"name", "args", "id"?}, or a part that contains it  -> {"function_response": {...}}

Calls may be objects of the provider's package or plain dicts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from operations._json import MAX_REQUEST_VALUES, decode_json
from operations.errors import CallError, ErrorCode
from operations.types import JSONObject


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a tool call: JSON data, or an error."""

    data: Any = None
    error: JSONObject | None = None

    @property
    def text(self) -> str:
        """The outcome for the model: a text unchanged, everything else as JSON."""
        if self.error is not None:
            return msgspec.json.encode({"error": self.error}).decode()
        return self.data if isinstance(self.data, str) else msgspec.json.encode(self.data).decode()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's request to run a tool."""

    name: str
    arguments: Any
    """An object, or its JSON text."""

    reply: Callable[[Outcome], JSONObject]
    """Returns the provider's result message."""


def read_arguments(name: str, arguments: Any) -> JSONObject:
    """Return the arguments of a tool call, given as an object or as its JSON text.

    Raises:
        CallError: `VALIDATION_ERROR` if they are not a JSON object.
    """
    if isinstance(arguments, (str, bytes)):
        try:
            arguments = decode_json(arguments or b"{}", max_values=MAX_REQUEST_VALUES)
        except ValueError as error:
            reason = f"The arguments of {name} are not JSON: {error}"
            raise CallError(ErrorCode.VALIDATION_ERROR, reason) from error
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return dict(cast("Mapping[str, Any]", arguments))
    raise CallError(ErrorCode.VALIDATION_ERROR, f"The arguments of {name} must be an object")


def read_call(call: Any) -> ToolCall:
    """Read a tool call in the form of any provider.

    Raises:
        TypeError: If `call` is not one.
    """
    function = _get(call, "function")
    if _get(function, "name"):
        return _openai_chat(call, function)
    kind = _get(call, "type")
    if kind == "function_call":
        return _openai_responses(call)
    if kind == "tool_use":
        return _anthropic(call)
    if kind == "tool_call":
        return _langchain(call)
    part = _get(call, "function_call") or _get(call, "functionCall")
    if part is None and _get(call, "args", ...) is not ...:
        part = call
    if _get(part, "name"):
        return _gemini(part)
    raise TypeError(f"{call!r} is not a tool call of a known provider")


def _get(value: Any, name: str, default: Any = None) -> Any:
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value).get(name, default)
    return getattr(value, name, default)


def _openai_chat(call: Any, function: Any) -> ToolCall:
    def reply(outcome: Outcome) -> JSONObject:
        return {"role": "tool", "tool_call_id": _get(call, "id"), "content": outcome.text}

    return ToolCall(_get(function, "name"), _get(function, "arguments"), reply)


def _openai_responses(call: Any) -> ToolCall:
    def reply(outcome: Outcome) -> JSONObject:
        return {
            "type": "function_call_output",
            "call_id": _get(call, "call_id"),
            "output": outcome.text,
        }

    return ToolCall(_get(call, "name"), _get(call, "arguments"), reply)


def _anthropic(call: Any) -> ToolCall:
    def reply(outcome: Outcome) -> JSONObject:
        return {
            "type": "tool_result",
            "tool_use_id": _get(call, "id"),
            "content": outcome.text,
            "is_error": outcome.error is not None,
        }

    return ToolCall(_get(call, "name"), _get(call, "input"), reply)


def _langchain(call: Any) -> ToolCall:
    def reply(outcome: Outcome) -> JSONObject:
        return {
            "role": "tool",
            "name": _get(call, "name"),
            "tool_call_id": _get(call, "id"),
            "content": outcome.text,
            "status": "success" if outcome.error is None else "error",
        }

    return ToolCall(_get(call, "name"), _get(call, "args"), reply)


def _gemini(call: Any) -> ToolCall:
    def reply(outcome: Outcome) -> JSONObject:
        key, value = ("result", outcome.data) if outcome.error is None else ("error", outcome.error)
        response: JSONObject = {"name": _get(call, "name"), "response": {key: value}}
        if _get(call, "id") is not None:
            response["id"] = _get(call, "id")
        return {"function_response": response}

    return ToolCall(_get(call, "name"), _get(call, "args"), reply)
