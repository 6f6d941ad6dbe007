"""Whole HTTP responses, and paths below a mount point."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from operations.access import Identity
from operations.errors import CallError
from operations.front.http_errors import Header, RequestError
from operations.front.public_errors import public_wire, status_of
from operations.front.timing import Message, Scope, Send
from operations.specs import OperationSpec

JSON: Final[Header] = (b"content-type", b"application/json")
SAFE: Final[tuple[Header, ...]] = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
)
"""On every response: results are for their caller only, and browsers must not guess their type."""

_RETRY: Final[Header] = (b"retry-after", b"1")
_CHUNK: Final = 256 * 1024


@dataclass(slots=True)
class Reply:
    """A whole response."""

    status: int
    body: bytes
    headers: list[Header]

    async def send(self, send: Send, *, in_parts: bool = False) -> None:
        """Send it; with `in_parts`, return only when the client has read nearly all of it."""
        headers = [*self.headers, *SAFE, (b"content-length", b"%d" % len(self.body))]
        if self.status == 304:
            # There it would be the length of the body that is not sent.
            headers.pop()
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        if in_parts:
            await send_parts(send, self.body)
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.body", "body": self.body})


async def send_parts(send: Send, body: bytes) -> None:
    """Send a large part of a response body: a server waits before each part until the client has read on."""
    for start in range(0, len(body), _CHUNK):
        part = body[start : start + _CHUNK]
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def reject_handshake(reply: Reply, scope: Scope, send: Send) -> None:
    """Answer a WebSocket handshake with an HTTP response; a server that cannot do so sends 403."""
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1008})
        return

    async def deny(message: Message) -> None:
        await send({**message, "type": "websocket." + message["type"]})

    await reply.send(deny)


def json_reply(value: Any, *, status: int = 200, headers: Iterable[Header] = ()) -> Reply:
    """Return a value as a JSON response."""
    return Reply(status, msgspec.json.encode(value), [JSON, *headers])


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
        headers.append(_RETRY)
    elif status == 401:
        headers.append(challenge)
    return json_reply(public_wire(error, request_id, expose=expose), status=status, headers=headers)


def route_path(scope: Mapping[str, Any]) -> str:
    """Return the path below the place where the application is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path
