"""Check the ids and the metadata of requests that other processes send."""

import msgspec

from operations.calls.events import RequestPayload

MAX_METADATA = 16 * 1024
"""Bytes of JSON. Nested calls inherit metadata, and pass it on to other processes."""


def check_request(request: RequestPayload) -> str | None:
    """Return what is wrong with the ids or the metadata of a request from another process; None if nothing is."""
    request_id, parent = request.request_id, request.parent_request_id
    if not _is_id(request_id):
        return "requestId must consist of visible ASCII characters"
    if parent is not None:
        if not _is_id(parent):
            return "parentRequestId must consist of visible ASCII characters"
        if parent == request_id:
            return "parentRequestId must be the id of another call"
    if not request.metadata:
        return None
    for name in ("traceparent", "tracestate"):
        value = request.metadata.get(name, "")
        if not (isinstance(value, str) and value.isascii() and value.isprintable()):
            return f"metadata.{name} must be printable ASCII text"
    if len(msgspec.json.encode(request.metadata)) > MAX_METADATA:
        return f"metadata must have at most {MAX_METADATA} bytes"
    return None


def _is_id(text: str) -> bool:
    return text != "" and text.isascii() and text.isprintable() and " " not in text
