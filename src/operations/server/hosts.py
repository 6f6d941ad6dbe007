"""Which names this server answers to, and which pages may talk to it.

A page somewhere on the web can make a browser send requests to a server on the visitor's own machine, or point a
name of its own at it (DNS rebinding). Host and Origin tell; both are looked at before anything else.

Rule 1: a Host that is not ours is 421. An Origin that is neither ours nor allowed is 403, and so is what a page
        elsewhere embeds, for which browsers send no Origin (`Sec-Fetch-Site`). Neither: no page, nothing to ask.
Rule 2: probes are exempt: whoever checks our health knows us by address, and learns nothing.
"""

from collections.abc import Awaitable, Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from operations.errors import ErrorCode
from operations.server.faults import RequestError
from operations.server.replies import error_reply

LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")

_FETCH: Final = frozenset({b"sec-fetch-dest", b"sec-fetch-mode", b"sec-fetch-site"})
"""What browsers say of a request that they send no Origin with."""

PROBES: Final = frozenset({"/healthz", "/readyz"})


class HostGuard:
    """ASGI middleware: lets through what is addressed to us, from nowhere or from pages that may.

    Args:
        app: What is guarded.
        hosts: Names we answer to, without ports, or with one to insist on it; `*` for any.
        origins: `scheme://host[:port]` of pages that may talk to us, beside our own.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        # Few names are ever used; what was found right stays right.
        self._known: set[bytes] = set()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve, or refuse."""
        fault = self._judge(scope) if scope["type"] in ("http", "websocket") else None
        if fault is None:
            return self._app(scope, receive, send)
        if scope["type"] == "websocket":
            # Closing before accepting is how ASGI refuses a handshake (403).
            return send({"type": "websocket.close", "code": 1008})
        return error_reply(fault, "-").send(send)

    def _judge(self, scope: Scope) -> RequestError | None:
        host = origin = None
        count = 0
        fetch: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
                count += 1
            elif name == b"origin":
                # Two origins are no origin of ours.
                origin = value if origin is None else b"null"
            elif name in _FETCH:
                fetch[name] = value
        if scope["path"] in PROBES:
            return None
        if host is None or count != 1 or not self._is_ours(host):
            return RequestError(
                421, ErrorCode.ACCESS_DENIED, "This server does not answer to that Host"
            )
        if (
            not self._may_talk(origin, host)
            if origin is not None
            else fetch and _is_embedded(fetch)
        ):
            return RequestError(
                403, ErrorCode.ACCESS_DENIED, "Pages of that Origin may not talk to this server"
            )
        return None

    def _is_ours(self, host: bytes) -> bool:
        if host in self._known:
            return True
        name = host.decode("latin-1").lower()
        is_ours = "*" in self._hosts or name in self._hosts or _without_port(name) in self._hosts
        if is_ours and len(self._known) < 64:
            self._known.add(host)
        return is_ours

    def _may_talk(self, origin: bytes, host: bytes) -> bool:
        text = origin.decode("latin-1").lower()
        if text in self._origins:
            return True
        try:
            there = urlsplit(text)
        except ValueError:
            return False
        # Behind a proxy that ends TLS we do not know our own scheme: the name and port decide.
        return there.scheme in ("http", "https") and there.netloc == host.decode("latin-1").lower()


def _is_embedded(fetch: dict[bytes, bytes]) -> bool:
    """Whether a page elsewhere has what is asked for in it, as an image or a frame, say. A link leads here openly."""
    if fetch.get(b"sec-fetch-site") not in (b"cross-site", b"same-site"):
        return False
    return (fetch.get(b"sec-fetch-mode"), fetch.get(b"sec-fetch-dest")) != (
        b"navigate",
        b"document",
    )


def _without_port(name: str) -> str:
    """A host without its port; what is no host with a port stays as it is, and matches nothing."""
    head, colon, port = name.rpartition(":")
    return head if colon and port.isdecimal() and (":" not in head or head.endswith("]")) else name
