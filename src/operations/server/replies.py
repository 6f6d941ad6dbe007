"""Envelopes as HTTP responses."""

import json
from typing import Any

import msgspec

from operations.envelopes import HTTPResponseMeta, ResponseEnvelope, ResponseMeta
from operations.front.http_errors import Header
from operations.front.replies import JSON, Reply
from operations.openapi.exporting.export import BINARY
from operations.types import JSONObject

MAX_META = 7 * 1024
"""Bytes of an envelope's meta in a header. Common clients read header lines of at most 8 KiB."""

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
    if envelope.meta.changes_count:
        headers.append((b"operations-changes", str(envelope.meta.changes_count).encode()))
    if with_meta:
        headers.append((b"operations-meta", _meta_text(envelope.meta)))
    if isinstance(data, bytes):
        headers[0] = (b"content-type", _media_type(envelope))
        headers.append(_SANDBOX)
        return Reply(200, data, headers)
    return Reply(200, msgspec.json.encode(data), headers)


def _media_type(envelope: ResponseEnvelope[Any]) -> bytes:
    kind = envelope.meta.content_type if isinstance(envelope.meta, HTTPResponseMeta) else ""
    is_writable = kind.isascii() and kind.isprintable()
    return (kind if kind and is_writable else BINARY).encode()


def _meta_text(meta: ResponseMeta) -> bytes:
    """Return as much of `meta` as fits a header: all of it, its changes, or their number."""
    whole: JSONObject = msgspec.to_builtins(meta)
    changes = {key: whole[key] for key in ("changes", "changesCount") if key in whole}
    source = {"source": meta.source, "omitted": True}
    count = {"changesCount": meta.changes_count} if changes else {}
    # Headers are ASCII, and JSON can escape everything else.
    texts = (json.dumps(part, separators=(",", ":")) for part in (whole, source | changes))
    fitting = (text for text in texts if len(text) <= MAX_META)
    return next(fitting, json.dumps(source | count, separators=(",", ":"))).encode()
