"""Draw request ids, and check those that other processes send.

Our own are 128 random bits in hex, drawn from the system's generator by the hundred: asking it once per call costs
more than the rest of making a request.
"""

import os

import msgspec

from operations.calls.events import RequestPayload

MAX_METADATA = 16 * 1024
"""Bytes of JSON. Nested calls inherit metadata, and pass it on to other processes."""

_BATCH = 256

_drawn: list[str] = []


def new_request_id() -> str:
    """An id nobody can guess."""
    if not _drawn:
        text = os.urandom(16 * _BATCH).hex()
        _drawn.extend(text[start : start + 32] for start in range(0, 32 * _BATCH, 32))
    return _drawn.pop()


# A forked child must not repeat what its parent says.
os.register_at_fork(after_in_child=_drawn.clear)


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
