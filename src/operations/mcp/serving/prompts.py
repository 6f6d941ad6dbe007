"""What an operation gives as a prompt.

"text"                                                  one message of the user's
{"role": "assistant", "content": "text" or a block}     one message
[message or text, ...]                                  several
{"description": "...", "messages": [...]}               with a description
an MCP envelope                                         a message of the user's for each of its blocks
"""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from operations.envelopes import MCPResponseMeta, ResponseEnvelope
from operations.mcp.exported import is_imported, passed_meta
from operations.mcp.serving.results import text_block, text_of
from operations.specs import OperationSpec
from operations.types import JSONObject


def prompt_result(envelope: ResponseEnvelope[Any], spec: OperationSpec) -> JSONObject:
    """The `prompts/get` result of an envelope."""
    data, meta = envelope.data, envelope.meta
    description = "" if is_imported(spec) else spec.description
    if isinstance(data, dict) and isinstance(cast("JSONObject", data).get("messages"), list):
        document = cast("JSONObject", data)
        description = document.get("description") or description
        data = document["messages"]
    elif isinstance(meta, MCPResponseMeta):
        data = [{"role": "user", "content": block} for block in msgspec.to_builtins(meta.content)]
    messages = cast("Sequence[Any]", data if isinstance(data, list) else [data])
    result: JSONObject = {"messages": [_message(message) for message in messages]}
    if description:
        result["description"] = description
    passed = passed_meta(meta.meta) if isinstance(meta, MCPResponseMeta) else {}
    return {**result, "_meta": passed} if passed else result


def _message(value: Any) -> JSONObject:
    if isinstance(value, dict):
        message = cast("JSONObject", value)
        content = message.get("content")
        if isinstance(content, str):
            return {"role": message.get("role", "user"), "content": text_block(content)}
        if isinstance(content, dict):
            return {"role": message.get("role", "user"), "content": content}
    return {"role": "user", "content": text_block(text_of(value))}
