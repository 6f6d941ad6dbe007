"""Decide by Host and Origin which requests a server accepts. Every entry point uses these rules.

Rule 1: an unknown Host is 421. An Origin that is neither ours nor allowed is 403, and so is a request that a page
        elsewhere embeds, for which browsers send no Origin (`Sec-Fetch-Site`). Other programs send neither header.
"""

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")

_FETCH: Final = frozenset({b"sec-fetch-dest", b"sec-fetch-mode", b"sec-fetch-site"})
"""Headers by which browsers describe a request without Origin."""

_CHECKED: Final = _FETCH | {b"host", b"origin"}


class HostError(NamedTuple):
    """Why a request is rejected."""

    status: int
    message: str


_UNKNOWN_HOST: Final = HostError(421, "This server does not answer to that Host")
_FOREIGN_PAGE: Final = HostError(403, "Pages of that Origin may not use this server")


class HostRules:
    """The names that a server answers to, and the web pages that may use it.

    Args:
        hosts: Names we answer to, without a port, or with one to require it; `*` for any.
        origins: `scheme://host[:port]` of pages that may use us, besides our own.
    """

    def __init__(self, hosts: Collection[str], origins: Collection[str] = ()) -> None:
        self._hosts = frozenset(_bracketed(host.lower()) for host in hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        # Few names are ever used, and a name that was accepted stays accepted.
        self._known: set[bytes] = set()

    def check(
        self, headers: Iterable[tuple[bytes, bytes]]
    ) -> tuple[HostError | None, bytes | None]:
        """Return why a request is rejected, or else the origin of the foreign page that sends it.

        Args:
            headers: Of the request, with names in lower case.
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
                # Two origins are none of ours.
                origin = value.strip() if origin is None else b"null"
            else:
                fetch[name] = value
        if host is None or count != 1 or not self._is_ours(host):
            return _UNKNOWN_HOST, None
        if origin is not None:
            if origin.decode("latin-1").lower() in self._origins:
                return None, origin
            if _is_same(origin, host):
                return None, None
        elif not fetch or not _is_embedded(fetch):
            return None, None
        return _FOREIGN_PAGE, None

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
