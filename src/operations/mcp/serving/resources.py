"""What reading a resource gives, and how text becomes an operation's input."""

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import msgspec

from operations._json import MAX_REQUEST_VALUES, JSONValueError, decode_json
from operations.envelopes import (
    HTTPResponseMeta,
    MCPResponseMeta,
    ResourceContent,
    ResponseEnvelope,
)
from operations.mcp.serving.catalog import properties_of
from operations.mcp.serving.results import sniffed, text_of
from operations.specs import OperationSpec
from operations.types import JSONObject


def resource_result(envelope: ResponseEnvelope[Any], uri: str, mime_type: str | None) -> JSONObject:
    """The `resources/read` result of an envelope: text, a blob, or the resources an MCP server gave."""
    data, meta = envelope.data, envelope.meta
    if isinstance(meta, MCPResponseMeta):
        passed_on = [
            msgspec.to_builtins(block.resource)
            for block in meta.content
            if isinstance(block, ResourceContent)
        ]
        if passed_on:
            return {"contents": passed_on}
    if mime_type is None and isinstance(meta, HTTPResponseMeta):
        mime_type = meta.content_type or None
    content: JSONObject = {"uri": uri}
    if isinstance(data, bytes):
        content["mimeType"] = mime_type or sniffed(data)
        content["blob"] = b64encode(data).decode("ascii")
    else:
        content["mimeType"] = mime_type or (
            "text/plain" if isinstance(data, str) else "application/json"
        )
        content["text"] = text_of(data)
    return {"contents": [content]}


def arguments_from_text(spec: OperationSpec, values: Mapping[str, Any]) -> JSONObject:
    """An input whose values came as text: what is to be no string is read as JSON, if it is that."""
    properties = properties_of(spec)
    return {name: _read(value, properties.get(name, {})) for name, value in values.items()}


def _read(value: Any, schema: JSONObject) -> Any:
    kind = schema.get("type")
    if not isinstance(value, str) or kind is None or kind == "string" or "string" in kind:
        return value
    try:
        return decode_json(value, max_values=MAX_REQUEST_VALUES)
    except JSONValueError:
        # The operation's own validation says what is wrong with it.
        return value
