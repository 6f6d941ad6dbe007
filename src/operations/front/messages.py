"""HTTP messages: access log, Host and Origin checks, request bodies and JSON within limits, and responses.

A page of any web site can make a browser send requests to a server on the visitor's machine, or resolve its own host
name to that server (DNS rebinding). The Host and Origin headers reveal this; `HostGuard` checks both first.

Rule 1: a limit is checked before the work: the number of bytes while they arrive, the number of values before decoding.
Rule 2: probes are exempt from the Host check, because they use the IP address; their responses contain no secrets.
Rule 3: allowed origins may read responses (CORS), at every entry point.
Rule 4: a chunked request is rejected (411) under a server that may append trailers to its headers.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import msgspec

from operations.base.errors import CallError
from operations.base.json import decoding as _decoding
from operations.base.json.decoding import enforce_bounds
from operations.base.json.values import WRAPPING_DEPTH, JSONLimitError, JSONValueError
from operations.base.retry import wanted_pause
from operations.base.types import JSONObject
from operations.contract.access import Identity
from operations.contract.context import new_request_id
from operations.contract.envelopes import (
    HTTPResponseMeta,
    MCPResponseMeta,
    ResponseEnvelope,
    ResponseMeta,
)
from operations.contract.specs import OperationSpec
from operations.front.limits import Limits
from operations.front.public_errors import (
    CLOSE,
    ClientDisconnectedError,
    Header,
    RequestError,
    malformed,
    public_wire,
    status_of,
    too_large,
    unsupported,
)
from operations.front.timing import Message, Receive, Scope, Send


async def read_body(
    scope: Scope, receive: Receive, headers: Mapping[bytes, bytes], limits: Limits
) -> bytes:
    """Return the body of a request. The caller sets a timeout.

    Raises:
        RequestError: 413 as soon as the body exceeds the limit, 400 for a malformed length, 415 for a compressed body.
        ClientDisconnectedError: If the client disconnected before the end of the body.
    """
    length = headers.get(b"content-length")
    if length is not None:
        if not length.isdigit():
            raise malformed("Content-Length is not a number")
        if len(length) > 18 or int(length) > limits.body_bytes:
            raise too_large(f"The body is larger than {limits.body_bytes} bytes", headers=[CLOSE])
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limits.body_bytes:
            raise too_large(f"The body is larger than {limits.body_bytes} bytes", headers=[CLOSE])
        chunks.append(chunk)
        if not message.get("more_body", False):
            break
    if size and b"content-encoding" in headers and _is_coded(scope):
        raise unsupported("Send the body without Content-Encoding")
    return b"".join(chunks) if len(chunks) > 1 else chunk


def _is_coded(scope: Scope) -> bool:
    """Return whether a `Content-Encoding` header names a coding; there may be several, and each may be a list."""
    values = (value for name, value in scope["headers"] if name == b"content-encoding")
    codings = (one.strip().lower() for value in values for one in value.split(b","))
    return any(one not in (b"", b"identity") for one in codings)


def matches_tag(condition: bytes, tag: bytes) -> bool:
    """Return whether an `If-None-Match` header contains `tag`, in strong or weak form, or `*`."""
    tags = [one.strip().removeprefix(b"W/") for one in condition.split(b",")]
    return tag in tags or tags == [b"*"]


def check_json_body(headers: Mapping[bytes, bytes]) -> None:
    """Reject a body that is not declared as JSON.

    Raises:
        RequestError: 415.
    """
    kind = headers.get(b"content-type", b"")
    if kind != b"application/json" and not _is_json(kind):
        # A page of another site can send form content types freely, but needs a preflight request for this one.
        raise unsupported("Send the body as application/json")


def enforce_body_bounds(body: bytes, limits: Limits) -> None:
    """Reject JSON with too many values or too deep nesting, without decoding it.

    Raises:
        RequestError: 413 for too many values, 400 for too deep nesting.
    """
    try:
        enforce_bounds(body, max_values=limits.values, max_depth=limits.depth + WRAPPING_DEPTH)
    except JSONLimitError as error:
        raise _request_error(error) from None


def decode_body(body: bytes | str, limits: Limits) -> Any:
    """Return the value of a JSON text.

    Raises:
        RequestError: 400 if it is not JSON or nested too deeply, 413 if it has too many values.
    """
    try:
        return _decoding.decode_json(
            body, max_values=limits.values, max_depth=limits.depth + WRAPPING_DEPTH
        )
    except JSONValueError as error:
        raise _request_error(error) from None


def _request_error(error: JSONValueError) -> RequestError:
    if isinstance(error, JSONLimitError) and error.limit == "values":
        return too_large(f"The body {error.reason}")
    return malformed(f"The body {error.reason}")


def _is_json(content_type: bytes) -> bool:
    essence = content_type.partition(b";")[0].strip().lower()
    return essence == b"application/json" or (
        essence.startswith(b"application/") and essence.endswith(b"+json")
    )


JSON: Final[Header] = (b"content-type", b"application/json")
SAFE: Final[tuple[Header, ...]] = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
)
"""Headers of every response: results must not be cached, and browsers must not guess their type."""

EVENT_STREAM: Final[tuple[Header, ...]] = (
    (b"content-type", b"text/event-stream"),
    # Proxies must neither buffer events nor compress them: HAProxy would send the end of each one with the next.
    (b"x-accel-buffering", b"no"),
    (b"cache-control", b"no-store, no-transform"),
    *SAFE[1:],
)

_MAX_META: Final = 7 * 1024
"""The largest meta of an envelope in a header, in bytes. Common clients read header lines of at most 8 KiB."""

_SANDBOX: Final[Header] = (b"content-security-policy", b"sandbox; default-src 'none'")
"""Prevents content of third parties from running as a page of this origin."""

_CHUNK: Final = 256 * 1024


@dataclass(slots=True)
class Reply:
    """A complete response."""

    status: int
    body: bytes
    headers: list[Header]

    async def send(self, send: Send, *, in_parts: bool = False) -> None:
        """Send the response; with `in_parts`, return only when the client has read nearly all of it."""
        headers = [(b"content-length", b"%d" % len(self.body)), *self.headers, *SAFE]
        if self.status in (204, 304):
            # Omitted, because the response has no body.
            del headers[0]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        if in_parts:
            await send_parts(send, self.body)
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.body", "body": self.body})


async def send_parts(send: Send, body: bytes) -> None:
    """Send a large response body in parts; the server waits before each part until the client has read more."""
    for start in range(0, len(body), _CHUNK):
        part = body[start : start + _CHUNK]
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def reject_handshake(reply: Reply, scope: Scope, send: Send) -> None:
    """Reject a WebSocket handshake with an HTTP response; a server that does not support this sends 403."""
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1008})
        return

    async def deny(message: Message) -> None:
        await send({**message, "type": "websocket." + message["type"]})

    await reply.send(deny)


def json_reply(value: Any, *, status: int = 200, headers: Iterable[Header] = ()) -> Reply:
    """Return a value as a JSON response."""
    return Reply(status, msgspec.json.encode(value), [JSON, *headers])


def result_reply(envelope: ResponseEnvelope[Any], request_id: str, *, with_meta: bool) -> Reply:
    """Return the data of an envelope as a response: bytes with their content type, other data as JSON.

    Raises:
        CallError: If the envelope holds the error result of an MCP tool.
    """
    if isinstance(envelope.meta, MCPResponseMeta):
        envelope.raise_for_error()
    data = envelope.data
    headers = [JSON, (b"x-request-id", request_id.encode())]
    if envelope.meta.changes_count:
        headers.append((b"operations-changes", str(envelope.meta.changes_count).encode()))
    if with_meta:
        headers.append((b"operations-meta", meta_text(envelope.meta)))
    if isinstance(data, bytes):
        headers[0] = (b"content-type", _media_type(envelope))
        headers.append(_SANDBOX)
        return Reply(200, data, headers)
    return Reply(200, msgspec.json.encode(data), headers)


def _media_type(envelope: ResponseEnvelope[Any]) -> bytes:
    kind = envelope.meta.content_type if isinstance(envelope.meta, HTTPResponseMeta) else ""
    is_writable = kind.isascii() and kind.isprintable()
    return (kind if kind and is_writable else "application/octet-stream").encode()


def meta_text(meta: ResponseMeta, **more: str) -> bytes:
    """Return the part of `meta` that fits into a header: all of it, its changes, or their number; and `more`."""
    whole: JSONObject = msgspec.to_builtins(meta)
    changes = {key: whole[key] for key in ("changes", "changesCount") if key in whole}
    whole |= more
    source = {"source": meta.source, "omitted": True, **more}
    count = {"changesCount": meta.changes_count} if changes else {}
    # Headers are ASCII; JSON escapes other characters.
    texts = (json.dumps(part, separators=(",", ":")) for part in (whole, source | changes))
    fitting = (text for text in texts if len(text) <= _MAX_META)
    return next(fitting, json.dumps(source | count, separators=(",", ":"))).encode()


def error_reply(
    error: CallError,
    request_id: str,
    *,
    identity: Identity | None = None,
    spec: OperationSpec | None = None,
    expose: bool = False,
    challenge: Header = (b"www-authenticate", b"Bearer"),
) -> Reply:
    """Return an error as a response."""
    status = status_of(error, identity, spec)
    headers: list[Header] = [(b"x-request-id", request_id.encode())]
    if isinstance(error, RequestError):
        headers.extend(error.headers)
    elif status in (429, 503):
        seconds = max(1, ceil(wanted_pause(error.details)))
        headers.append((b"retry-after", b"%d" % seconds))
    elif status == 401:
        headers.append(challenge)
    return json_reply(public_wire(error, request_id, expose=expose), status=status, headers=headers)


def rejection(error: CallError, scope: Scope) -> Reply:
    """Return the response to a request that is rejected before it has a context."""
    request_id = scope[REQUEST_ID] = new_request_id()
    return error_reply(error, request_id)


def route_path(scope: Mapping[str, Any]) -> str:
    """Return the path relative to the mount point of the application."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


OWN_SERVER: Final = "operations.own_server"
"""Scope key set by the server of this package, which never appends trailers to the headers."""

REQUEST_ID: Final = "operations.request_id"
"""Scope key of the request id, for the access log."""

PROBES: Final = frozenset({"/healthz", "/readyz"})
"""The largest number of characters of a path in the log."""
