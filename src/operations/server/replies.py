"""What goes back: envelopes and errors as HTTP responses.

Rule 1: the status comes from one table (`HTTP_STATUS`), from a declared error's own, or from the request's fault.
Rule 2: what nobody declared goes out as its code, a neutral sentence and the request id; its text stays in the logs.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from starlette.types import Send

from operations.access import Identity
from operations.envelopes import HTTPResponseMeta, ResponseEnvelope
from operations.errors import HTTP_STATUS, CallError, ErrorCode
from operations.openapi.exporting.export import BINARY, declared_status
from operations.outsiders import shown_error
from operations.server.faults import Header, RequestError
from operations.specs import OperationSpec
from operations.types import JSONObject

MAX_META = 4 * 1024
"""Bytes of an envelope's meta that fit into a header."""

JSON: Header = (b"content-type", b"application/json")
SAFE: tuple[Header, ...] = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
)
"""On every response: results are the caller's alone, and are what they say they are."""

_SANDBOX: Header = (b"content-security-policy", b"sandbox; default-src 'none'")
"""Bytes of a third party must not act as a page of this origin."""

_RETRY: Header = (b"retry-after", b"1")

_BETWEEN_US = frozenset({401, 407, 421})
"""What an API says about us who call it, not about who called us."""


@dataclass(slots=True)
class Reply:
    """A whole response."""

    status: int
    body: bytes
    headers: list[Header]

    async def send(self, send: Send) -> None:
        """Put it on the wire."""
        headers = [*self.headers, *SAFE]
        if self.status != 304:
            # There it would be the length of what is not sent.
            headers.append((b"content-length", str(len(self.body)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_reply(value: Any, *, status: int = 200, headers: Iterable[Header] = ()) -> Reply:
    """A value as JSON."""
    return Reply(status, msgspec.json.encode(value), [JSON, *headers])


def result_reply(envelope: ResponseEnvelope[Any], request_id: str, *, with_meta: bool) -> Reply:
    """An envelope's data by what it is: bytes with their content type, anything else as JSON.

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
    # A header holds ASCII, in which JSON can say everything.
    text = json.dumps(msgspec.to_builtins(envelope.meta), separators=(",", ":"))
    if len(text) > MAX_META:
        text = json.dumps({"source": envelope.meta.source, "omitted": True})
    return text.encode()


def status_of(error: CallError, identity: Identity | None, spec: OperationSpec | None) -> int:
    """The status that says what an error says."""
    if isinstance(error, RequestError):
        return error.status
    if error.code == ErrorCode.ACCESS_DENIED and identity is None:
        return 401
    relayed = _relayed_status(error)
    for declared in spec.error_schemas if spec is not None else ():
        if declared.code == error.code or (
            relayed is not None and declared.code == f"HTTP_{relayed}"
        ):
            return declared_status(declared.http_status)
    return HTTP_STATUS.get(error.code, 500)


def _relayed_status(error: CallError) -> int | None:
    """The status that an imported HTTP API answered with, where it says something to our caller, too."""
    details: Any = error.details
    if error.code != ErrorCode.EXECUTION_ERROR or not isinstance(details, dict):
        return None
    status: Any = cast("JSONObject", details).get("statusCode")
    return status if type(status) is int and status not in _BETWEEN_US else None


def error_wire(error: CallError, request_id: str, *, exposed: bool) -> JSONObject:
    """What outsiders see of an error: `{code, message, details?, retryable?, requestId}`."""
    wire = shown_error(error, request_id, expose=exposed).to_wire()
    wire["requestId"] = request_id
    return wire


def error_reply(
    error: CallError,
    request_id: str,
    *,
    identity: Identity | None = None,
    spec: OperationSpec | None = None,
    exposed: bool = False,
) -> Reply:
    """An error as a response."""
    status = status_of(error, identity, spec)
    headers: list[Header] = [(b"x-request-id", request_id.encode())]
    if isinstance(error, RequestError):
        headers.extend(error.headers)
    elif status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    elif status in (429, 503):
        headers.append(_RETRY)
    return json_reply(
        error_wire(error, request_id, exposed=exposed), status=status, headers=headers
    )
