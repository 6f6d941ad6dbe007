"""Envelopes as HTTP responses."""

import json
from typing import Any

import msgspec

from operations.envelopes import HTTPResponseMeta, ResponseEnvelope
from operations.front.http_errors import Header
from operations.front.replies import JSON, Reply
from operations.openapi.exporting.export import BINARY

MAX_META = 4 * 1024
"""Bytes of an envelope's meta in a header."""

_SANDBOX: Header = (b"content-security-policy", b"sandbox; default-src 'none'")
"""Bytes of a third party must not act as a page of this origin."""


def result_reply(envelope: ResponseEnvelope[Any], request_id: str, *, with_meta: bool) -> Reply:
    """Return an envelope's data as a response: bytes with their content type, anything else as JSON.

    Raises:
        CallError: If the envelope holds the error result of an MCP tool.
    """
    envelope.raise_for_error()
    data = envelope.data
    headers = [JSON, (b"x-request-id", request_id.encode())]
    if with_meta:
        headers.append((b"operations-meta", _meta_text(envelope)))
    if isinstance(data, bytes):
        headers[0] = (b"content-type", _media_type(envelope))
        headers.append(_SANDBOX)
        return Reply(200, data, headers)
    return Reply(200, msgspec.json.encode(data), headers)


def _media_type(envelope: ResponseEnvelope[Any]) -> bytes:
    kind = envelope.meta.content_type if isinstance(envelope.meta, HTTPResponseMeta) else ""
    is_writable = kind.isascii() and kind.isprintable()
    return (kind if kind and is_writable else BINARY).encode()


def _meta_text(envelope: ResponseEnvelope[Any]) -> bytes:
    # Headers are ASCII, and JSON can escape everything else.
    text = json.dumps(msgspec.to_builtins(envelope.meta), separators=(",", ":"))
    if len(text) > MAX_META:
        text = json.dumps({"source": envelope.meta.source, "omitted": True})
    return text.encode()
