"""MCP results and envelopes: content blocks in, data out. Shared by both directions; knows no connection.

Rule 1: nothing is lost. A block of an unknown type becomes a text block that holds its JSON.
Rule 2: structured content is the data, unless it is null; then the blocks are. If the operation declares an output
        schema, JSON in the only text block takes the place of structured content and is normalised like it.
"""

from collections.abc import Iterable
from typing import Any, cast

import msgspec

from operations._json import MAX_RESPONSE_VALUES, JSONValueError, decode_json, object_of, to_json
from operations.envelopes import (
    MCPContentBlock,
    ResponseEnvelope,
    TextContent,
    content_block,
    mcp_envelope,
    read_changes,
)
from operations.mcp.exported import CHANGES_KEY, ERROR_KEY
from operations.schema import Schema
from operations.types import JSONObject


def map_content_blocks(blocks: Iterable[Any]) -> list[MCPContentBlock]:
    """Content blocks of the SDK, or as on the wire, as our own."""
    return [content_block(_plain(block)) for block in blocks]


def _plain(block: Any) -> Any:
    dump = getattr(block, "model_dump", None)
    return dump(by_alias=True, mode="json", exclude_none=True) if dump is not None else block


def content_to_wire(blocks: Iterable[MCPContentBlock]) -> list[JSONObject]:
    """Our blocks as JSON in the protocol's names."""
    return cast("list[JSONObject]", msgspec.to_builtins(list(blocks)))


def tool_envelope(result: JSONObject, output_schema: Schema) -> ResponseEnvelope[Any]:
    """The envelope of a `tools/call` result. An error result is an envelope like any other.

    Raises:
        JSONValueError: If the result holds what is not JSON (NaN, too deep a nesting).
    """
    listed: Any = result.get("content")
    blocks = map_content_blocks(cast("list[object]", listed)) if isinstance(listed, list) else []
    is_error = result.get("isError") is True
    structured = to_json(result.get("structuredContent"))
    meta: Any = result.get("_meta")
    if is_error and structured is None:
        structured = to_json(object_of(meta).get(ERROR_KEY))
    data = structured
    if structured is None:
        data = content_to_wire(blocks)
        if not is_error and not output_schema.is_unknown:
            data = _json_in(blocks, data)
    envelope = mcp_envelope(
        data,
        is_error=is_error,
        content=blocks,
        structured_content=structured,
        meta=to_json(meta) if isinstance(meta, dict) else None,
    )
    return read_changes(envelope, object_of(meta).get(CHANGES_KEY))


def _json_in(blocks: list[MCPContentBlock], otherwise: Any) -> Any:
    """Return the JSON value in the only text block; `otherwise` if there is none."""
    texts = [block.text for block in blocks if isinstance(block, TextContent)]
    if len(texts) != 1:
        return otherwise
    try:
        return to_json(decode_json(texts[0], max_values=MAX_RESPONSE_VALUES))
    except JSONValueError:
        return otherwise


def resource_envelope(result: JSONObject) -> ResponseEnvelope[Any]:
    """The envelope of a `resources/read` result: its contents, also as `resource` blocks."""
    contents = _objects(result.get("contents"))
    blocks = [content_block({"type": "resource", "resource": item}) for item in contents]
    return mcp_envelope(contents, is_error=False, content=blocks, meta=result.get("_meta"))


def prompt_envelope(result: JSONObject) -> ResponseEnvelope[Any]:
    """The envelope of a `prompts/get` result: description and messages; their blocks in the meta."""
    messages = _objects(result.get("messages"))
    data: JSONObject = {"messages": messages}
    if isinstance(result.get("description"), str):
        data["description"] = result["description"]
    blocks = map_content_blocks(message.get("content") for message in messages)
    return mcp_envelope(data, is_error=False, content=blocks, meta=result.get("_meta"))


def completion_envelope(result: JSONObject) -> ResponseEnvelope[Any]:
    """Return the envelope of a `completion/complete` result: its values, and whether there are more."""
    return mcp_envelope(to_json(result.get("completion")), is_error=False, content=[])


def listing_envelope(items: list[JSONObject]) -> ResponseEnvelope[Any]:
    """The envelope of a listing."""
    return mcp_envelope(to_json(items), is_error=False, content=[])


def _objects(value: Any) -> list[JSONObject]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [to_json(item) for item in items if isinstance(item, dict)]
