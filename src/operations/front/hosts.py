"""Check which names this server answers to, and which web pages may use it.

A page on any web site can make a browser send requests to a server on the visitor's own machine, or point a name of
its own at it (DNS rebinding). The Host and Origin headers reveal this; both are checked before anything else.

Rule 1: an unknown Host is 421. An Origin that is neither ours nor allowed is 403, and so is a request that a page
        elsewhere embeds, for which browsers send no Origin (`Sec-Fetch-Site`). Other programs send neither header.
Rule 2: probes are exempt: they use our address and learn nothing.
Rule 3: allowed origins may read responses (CORS), at every entry point.
"""

from collections.abc import Awaitable, Collection
from typing import Final
from urllib.parse import urlsplit

from operations.errors import ErrorCode
from operations.front.http_errors import Header, RequestError
from operations.front.replies import Reply, error_reply, route_path
from operations.front.timing import App, Message, Receive, Scope, Send

LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")

_FETCH: Final = frozenset({b"sec-fetch-dest", b"sec-fetch-mode", b"sec-fetch-site"})
"""Headers by which browsers describe a request without Origin."""

_CHECKED: Final = _FETCH | {b"host", b"origin"}

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


class HostGuard:
    """ASGI middleware that passes on requests for us, from programs or from allowed pages.

    Args:
        app: The guarded application.
        hosts: Names we answer to, without a port, or with one to require it; `*` for any.
        origins: `scheme://host[:port]` of pages that may use us, besides our own.
    """

    def __init__(self, app: App, hosts: Collection[str], origins: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = frozenset(_bracketed(host.lower()) for host in hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        # Few names are ever used, and a name that was accepted stays accepted.
        self._known: set[bytes] = set()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve or reject a request."""
        if scope["type"] not in ("http", "websocket"):
            return self._app(scope, receive, send)
        error, page = self._check(scope)
        if error is None and page is None:
            return self._app(scope, receive, send)
        if scope["type"] == "websocket":
            # Closing before accepting is how ASGI rejects a handshake (403).
            if error is not None:
                return send({"type": "websocket.close", "code": 1008})
            return self._app(scope, receive, send)
        if error is not None:
            return error_reply(error, "-").send(send)
        return self._for_page(page or b"", scope, receive, send)

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

    def _check(self, scope: Scope) -> tuple[RequestError | None, bytes | None]:
        """Return why a request is rejected, or else the origin of the foreign page that sends it."""
        host = origin = None
        count = 0
        fetch: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name not in _CHECKED:
                continue
            if name == b"host":
                # Not every server strips white space around a value.
                host = value.strip()
                count += 1
            elif name == b"origin":
                # Two origins are none of ours.
                origin = value.strip() if origin is None else b"null"
            else:
                fetch[name] = value
        if scope["path"].endswith("z") and route_path(scope) in PROBES:
            return None, None
        if host is None or count != 1 or not self._is_ours(host):
            message = "This server does not answer to that Host"
            return RequestError(421, ErrorCode.ACCESS_DENIED, message), None
        if origin is not None:
            if origin.decode("latin-1").lower() in self._origins:
                return None, origin
            if _is_same(origin, host):
                return None, None
        elif not fetch or not _is_embedded(fetch):
            return None, None
        message = "Pages of that Origin may not use this server"
        return RequestError(403, ErrorCode.ACCESS_DENIED, message), None

    def _is_ours(self, host: bytes) -> bool:
        if host in self._known:
            return True
        name = host.decode("latin-1").lower()
        is_ours = "*" in self._hosts or name in self._hosts or _without_port(name) in self._hosts
        if is_ours and len(self._known) < 64:
            self._known.add(host)
        return is_ours


def _is_same(origin: bytes, host: bytes) -> bool:
    """Return whether a page comes from this server, by name and port: behind a TLS proxy the own scheme is unknown."""
    try:
        there = urlsplit(origin.decode("latin-1").lower())
    except ValueError:
        return False
    return there.scheme in ("http", "https") and there.netloc == host.decode("latin-1").lower()


def _is_embedded(fetch: dict[bytes, bytes]) -> bool:
    """Return whether a page elsewhere embeds the response, for example as an image. Following a link is allowed."""
    if fetch.get(b"sec-fetch-site") not in (b"cross-site", b"same-site"):
        return False
    return (fetch.get(b"sec-fetch-mode"), fetch.get(b"sec-fetch-dest")) != (
        b"navigate",
        b"document",
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def _without_port(name: str) -> str:
    """Return a host without its port; anything else is returned unchanged and matches nothing."""
    head, colon, port = name.rpartition(":")
    return head if colon and port.isdecimal() and (":" not in head or head.endswith("]")) else name
