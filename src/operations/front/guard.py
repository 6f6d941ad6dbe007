"""Requests for other hosts are rejected before anything reads them."""

from collections.abc import Awaitable, Collection
from typing import Final

from operations.base.errors import ErrorCode
from operations.front.messages import (
    OWN_SERVER,
    PROBES,
    Reply,
    reject_handshake,
    rejection,
    route_path,
)
from operations.front.public_errors import CLOSE, Header, RequestError
from operations.front.timing import App, Message, Receive, Scope, Send
from operations.io.guard import HostRules

_EXPOSED: Final = (
    "mcp-protocol-version, mcp-session-id, operations-changes, operations-meta, retry-after, "
    "www-authenticate, x-request-id"
)
_ACCEPTED: Final = (
    "accept, authorization, content-type, last-event-id, mcp-method, mcp-name, mcp-protocol-version, "
    "mcp-session-id, operations-meta, operations-timeout, traceparent, tracestate, x-api-key"
)
_PREFLIGHT: Final[list[Header]] = [
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-allow-headers", _ACCEPTED.encode()),
    (b"access-control-max-age", b"600"),
]


_CHUNKED: Final = RequestError(
    411, ErrorCode.VALIDATION_ERROR, "Send a Content-Length instead of chunks", headers=[CLOSE]
)


def _is_test_client(scope: Scope) -> bool:
    """Return whether a request comes from Starlette's `TestClient` in this process, whose host is `testserver`.

    No real connection has this address, because it is not an IP address.
    """
    return tuple(scope.get("client") or ()) == ("testclient", 50000)


class HostGuard:
    """ASGI middleware that accepts only requests for known hosts, from programs or from pages of allowed origins.

    Args:
        app: The guarded application.
        hosts: Accepted host names, with a port to require that port; `*` accepts any.
        origins: `scheme://host[:port]` of other pages that may use the server.
    """

    def __init__(self, app: App, hosts: Collection[str], origins: Collection[str] = ()) -> None:
        self._app = app
        self._rules = HostRules(hosts, origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve or reject a request."""
        if scope["type"] not in ("http", "websocket"):
            return self._app(scope, receive, send)
        is_probe = scope["path"].endswith("z") and route_path(scope) in PROBES
        headers = scope["headers"]
        if OWN_SERVER not in scope and any(name == b"transfer-encoding" for name, _ in headers):
            return rejection(_CHUNKED, scope).send(send)
        error, page = self._rules.check(headers, is_probe=is_probe)
        if error is not None and not (error.status == 421 and _is_test_client(scope)):
            rejected = RequestError(error.status, ErrorCode.ACCESS_DENIED, error.message)
            reply = rejection(rejected, scope)
            if scope["type"] == "websocket":
                return reject_handshake(reply, scope, send)
            return reply.send(send)
        if page is None or scope["type"] == "websocket":
            return self._app(scope, receive, send)
        return self._for_page(page, scope, receive, send)

    async def _for_page(self, origin: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request of a page of an allowed origin, with CORS headers."""
        cors: list[Header] = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and any(
            name == b"access-control-request-method" for name, _ in scope["headers"]
        ):
            await Reply(200, b"", [*cors, *_PREFLIGHT]).send(send)
            return
        cors.append((b"access-control-expose-headers", _EXPOSED.encode()))

        async def readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *cors]}
            await send(message)

        await self._app(scope, receive, readable)
