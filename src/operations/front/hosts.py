"""Check which names this server answers to, and which web pages may use it.

A page on any web site can make a browser send requests to a server on the visitor's own machine, or point a name of
its own at it (DNS rebinding). The Host and Origin headers reveal this; `HostRules` checks both before anything else.

Trailers of a chunked request could forge both: some servers append them to its headers. Under a server that is not
known to drop them, a chunked request is rejected (411).

Rule 1: probes are exempt: they use our address and learn nothing.
Rule 2: allowed origins may read responses (CORS), at every entry point.
"""

from collections.abc import Awaitable, Collection
from typing import Final

from operations._host_rules import HostRules
from operations.errors import ErrorCode
from operations.front.messages import Reply, error_reply, reject_handshake, route_path
from operations.front.public_errors import CLOSE, Header, RequestError
from operations.front.timing import App, Message, Receive, Scope, Send

DROPS_TRAILERS: Final = "operations.drops_trailers"
"""Scope key of requests of a server whose headers never contain trailers."""

PROBES: Final = frozenset({"/healthz", "/readyz"})

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


class HostGuard:
    """ASGI middleware that passes on requests for us, from programs or from allowed pages.

    Args:
        app: The guarded application.
        hosts: Names we answer to, without a port, or with one to require it; `*` for any.
        origins: `scheme://host[:port]` of pages that may use us, besides our own.
    """

    def __init__(self, app: App, hosts: Collection[str], origins: Collection[str] = ()) -> None:
        self._app = app
        self._rules = HostRules(hosts, origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve or reject a request."""
        if scope["type"] not in ("http", "websocket"):
            return self._app(scope, receive, send)
        if scope["path"].endswith("z") and route_path(scope) in PROBES:
            return self._app(scope, receive, send)
        headers = scope["headers"]
        if DROPS_TRAILERS not in scope and any(name == b"transfer-encoding" for name, _ in headers):
            return error_reply(_CHUNKED, "-").send(send)
        error, page = self._rules.check(headers)
        if error is not None:
            rejected = RequestError(error.status, ErrorCode.ACCESS_DENIED, error.message)
            reply = error_reply(rejected, "-")
            if scope["type"] == "websocket":
                return reject_handshake(reply, scope, send)
            return reply.send(send)
        if page is None or scope["type"] == "websocket":
            return self._app(scope, receive, send)
        return self._for_page(page, scope, receive, send)

    async def _for_page(self, origin: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a page of an allowed origin, which may then read the response."""
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
