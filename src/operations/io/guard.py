"""Whom we may serve: the hosts and origins that a request may name."""

import ipaddress
import socket
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}
"""Socket options, in seconds and as a number of packets, with which the operating system notices within 20 seconds that
the host at the other end is lost. macOS has another name for the first one."""


# ------------------------------------------------------------ requests to us

LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")

_FETCH: Final = frozenset({b"sec-fetch-dest", b"sec-fetch-mode", b"sec-fetch-site"})
"""Headers with which browsers describe a request that has no Origin."""

_CHECKED: Final = _FETCH | {b"host", b"origin"}


class HostError(NamedTuple):
    """The reason for rejecting a request."""

    status: int
    message: str


_UNKNOWN_HOST: Final = HostError(
    421, "This server does not accept that Host: its operator can add it to allowed_hosts"
)
_FOREIGN_PAGE: Final = HostError(
    403,
    "Pages of that Origin may not use this server: its operator can add it to allowed_origins",
)


class HostRules:
    """The host names that a server accepts, and the web pages that may use it.

    Args:
        hosts: Accepted host names, with a port to require that port; `*` accepts any.
        origins: `scheme://host[:port]` of other pages that may use the server.
    """

    def __init__(self, hosts: Collection[str], origins: Collection[str] = ()) -> None:
        self._hosts = frozenset(_bracketed(host.lower()) for host in hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        # Accepted names are cached: there are few of them, and they stay valid.
        self._known: set[bytes] = set()

    def check(
        self, headers: Iterable[tuple[bytes, bytes]], *, is_probe: bool = False
    ) -> tuple[HostError | None, bytes | None]:
        """Return the reason to reject a request; otherwise the origin of the page of another site that sent it, if any.

        Args:
            headers: The headers of the request, with names in lower case.
            is_probe: Whether to accept any IP address, or no Host, as load balancers send them. A foreign host name is
                still rejected, because a web page may have resolved it to this machine.
        """
        host = origin = None
        count = 0
        fetch: dict[bytes, bytes] = {}
        for name, value in headers:
            if name not in _CHECKED:
                continue
            if name == b"host":
                # Not every server strips white space around a value.
                host = value.strip()
                count += 1
            elif name == b"origin":
                # Two origins match none of ours.
                origin = value.strip() if origin is None else b"null"
            else:
                fetch[name] = value
        if host is None and is_probe:
            host = b""
        elif host is None or count != 1 or not self._is_ours(host, is_probe):
            return _UNKNOWN_HOST, None
        if origin is not None:
            if origin.decode("latin-1").lower() in self._origins:
                return None, origin
            if _is_same(origin, host):
                return None, None
        elif not fetch or not _is_embedded(fetch):
            return None, None
        return _FOREIGN_PAGE, None

    def _is_ours(self, host: bytes, is_probe: bool) -> bool:
        if host in self._known or (is_probe and _is_address(host)):
            return True
        name = host.decode("latin-1").lower()
        is_ours = "*" in self._hosts or name in self._hosts or _without_port(name) in self._hosts
        if is_ours and len(self._known) < 64:
            self._known.add(host)
        return is_ours


def _is_address(host: bytes) -> bool:
    """Return whether a Host is an IP address, with or without a port."""
    name = _without_port(host.decode("latin-1"))
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_same(origin: bytes, host: bytes) -> bool:
    """Return whether a page comes from this server.

    Compares name and port only: behind a TLS proxy our scheme is unknown.
    """
    try:
        there = urlsplit(origin.decode("latin-1").lower())
    except ValueError:
        return False
    return there.scheme in ("http", "https") and there.netloc == host.decode("latin-1").lower()


def _is_embedded(fetch: dict[bytes, bytes]) -> bool:
    """Return whether a page of another site embeds the response, for example as an image.

    Following a link is allowed.
    """
    if fetch.get(b"sec-fetch-site") not in (b"cross-site", b"same-site"):
        return False
    return (fetch.get(b"sec-fetch-mode"), fetch.get(b"sec-fetch-dest")) != (
        b"navigate",
        b"document",
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def _without_port(name: str) -> str:
    """Return a host without its port. A malformed value is returned unchanged and matches no host."""
    head, colon, port = name.rpartition(":")
    return head if colon and port.isdecimal() and (":" not in head or head.endswith("]")) else name


def notice_lost_hosts(opened: socket.socket) -> None:
    """End a connection whose other host is lost; of a listening socket, the connections that it accepts."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
