"""What a call gave, as the result of an MCP tool.

Rule 1: data goes out twice, as structured content and as text, for clients that read only one of them.
Rule 2: an error is a result too, so that the model can read it; one nobody declared says its code and the request's
        id, and its text stays here.
"""

from base64 import b64encode
from typing import Any, Final

import msgspec

from operations.envelopes import (
    HTTPResponseMeta,
    MCPResponseMeta,
    ResponseEnvelope,
    changes_to_wire,
)
from operations.errors import CallError
from operations.front.public_errors import public_error
from operations.mcp.exported import CHANGES_KEY, ERROR_KEY, passed_meta
from operations.mcp.restoring import DATA_KEY, RESULT
from operations.types import JSONObject

_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"ID3", "audio/mpeg"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
    (b"%PDF-", "application/pdf"),
)


def text_block(text: str) -> JSONObject:
    """A block of text."""
    return {"type": "text", "text": text}


def text_of(data: Any) -> str:
    """Data as a model reads it: a string as it is, all else as JSON."""
    return data if isinstance(data, str) else msgspec.json.encode(data).decode()


def tool_result(
    envelope: ResponseEnvelope[Any], *, boxed: bool, declared: bool, mime_type: str | None = None
) -> JSONObject:
    """The `tools/call` result of an envelope.

    Args:
        envelope: What the operation gave.
        boxed: Whether the client takes objects alone, and the operation gives other things too.
        declared: Whether the tool was listed with an output schema, which obliges it to structured content.
        mime_type: What bytes are, where nothing else says so.
    """
    result = _tool_result(envelope, boxed=boxed, declared=declared, mime_type=mime_type)
    if envelope.meta.changes:
        noted = {CHANGES_KEY: changes_to_wire(envelope.meta)}
        result["_meta"] = {**result.get("_meta", {}), **noted}
    return result


def _tool_result(
    envelope: ResponseEnvelope[Any], *, boxed: bool, declared: bool, mime_type: str | None
) -> JSONObject:
    data, meta = envelope.data, envelope.meta
    if isinstance(data, bytes):
        return {
            "content": [binary_block(data, mime_type or _content_type(envelope))],
            "_meta": {DATA_KEY: "bytes"},
        }
    if not isinstance(meta, MCPResponseMeta):
        result: JSONObject = {"content": [text_block(text_of(data))]}
        if data is None and not boxed:
            # The SDK takes a structured null for none at all, so a note has to tell them apart.
            return {**result, "_meta": {DATA_KEY: "null"}}
        return {**result, "structuredContent": _box(data, boxed)}
    result = {"content": msgspec.to_builtins(meta.content)}
    if meta.is_error:
        result["isError"] = True
        if meta.structured_content is not None:
            result |= _structured_error(meta.structured_content, declared=declared)
    elif meta.structured_content is not None or declared:
        # Not the structured content as it came: the data is what was made to fit the schema.
        result["structuredContent"] = _box(data, boxed)
    passed = passed_meta(meta.meta)
    if passed:
        result["_meta"] = {**passed, **result.get("_meta", {})}
    return result


def _box(data: Any, boxed: bool) -> Any:
    return {RESULT: data} if boxed else data


def error_result(error: CallError, request_id: str, *, expose: bool, declared: bool) -> JSONObject:
    """Return the `tools/call` result of an error.

    Args:
        error: The error.
        request_id: The id of the call.
        expose: Whether clients may read the text of unexpected errors.
        declared: Whether the tool was listed with an output schema. Some clients check the structured content of
            errors against it as well, so the error then is in `_meta`.
    """
    wire = public_error(error, request_id, expose=expose).to_wire()
    text = f"{wire['code']}: {wire['message']}"
    if "details" in wire:
        text = f"{text}\n{msgspec.json.encode(wire['details']).decode()}"
    result: JSONObject = {"content": [text_block(text)], "isError": True}
    return result | _structured_error(wire, declared=declared)


def _structured_error(wire: Any, *, declared: bool) -> JSONObject:
    return {"_meta": {ERROR_KEY: wire}} if declared else {"structuredContent": wire}


def binary_block(data: bytes, mime_type: str | None) -> JSONObject:
    """Bytes as an image, as sound, or as a blob."""
    mime_type = mime_type or sniffed(data)
    encoded = b64encode(data).decode("ascii")
    for kind in ("image", "audio"):
        if mime_type.startswith(f"{kind}/"):
            return {"type": kind, "data": encoded, "mimeType": mime_type}
    resource = {"uri": "operations:result", "mimeType": mime_type, "blob": encoded}
    return {"type": "resource", "resource": resource}


def sniffed(data: bytes) -> str:
    """What bytes look like by their beginning."""
    for beginning, mime_type in _MAGIC:
        if data.startswith(beginning):
            return mime_type
    if data[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(
            data[8:12], "application/octet-stream"
        )
    return "application/octet-stream"


def _content_type(envelope: ResponseEnvelope[Any]) -> str | None:
    if isinstance(envelope.meta, HTTPResponseMeta):
        return envelope.meta.content_type.partition(";")[0].strip().lower() or None
    return None
