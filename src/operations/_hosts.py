"""Decide where requests may go, where credentials may go with them, and which requests a server accepts.

Rule 1: a host that the operator configured (`base_url`, `url`, `allowed_hosts`, the document's own address) may be any.
Rule 2: a host that a third party names (a document, an MCP server's OAuth metadata) must be public; the address
        that is connected to decides.
Rule 3: credentials go only to hosts of the first kind.
Rule 4: a server rejects an unknown Host (421), except an address that asks for its health. An Origin that is neither
        its own nor allowed is 403, and so is a request that a page elsewhere embeds, for which browsers send no Origin
        (`Sec-Fetch-Site`). Other programs send neither header. Every entry point uses these rules.
"""

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import quote, urlsplit

from operations.errors import CallError, ErrorCode

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = (
    ipaddress.IPv6Network("64:ff9b::/96"),
    ipaddress.IPv6Network("64:ff9b:1::/48"),
)
_EMBEDDED_LOW = (ipaddress.IPv6Network("::/96"), ipaddress.IPv6Network("::ffff:0:0:0/96"))
_RESERVED = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's host: a public number in private use
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata service is 192.0.0.192
        "192.88.99.0/24",  # 6to4 relays
        "3fff::/20",  # documentation
        "5f00::/16",  # segment routing
    )
)
"""Networks that some versions of `ipaddress` take for global."""

_LOCAL_NAMES = ("localhost", "local", "internal", "localdomain", "home.arpa")

# Deliberately narrower than the grammar: no user information, no backslash, nothing that two parsers of
# URLs could understand differently.
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s/?#\\@:\[\]]+)(?::(?P<port>[0-9]{1,5}))?(?=[/?#]|$)",
    re.IGNORECASE,
)
_PORTS = {"http": 80, "https": 443}
_URL_MARKS = "%/?:@!$&'()*+,;=-._~"
"""Characters of a path or a query that need not be encoded."""


class Origin(NamedTuple):
    """Scheme, host and port of a URL, in one spelling."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"


def origin_of(url: str) -> Origin:
    """Return the origin that a request to `url` goes to.

    Raises:
        ValueError: If it is not an absolute HTTP URL without user information.
    """
    match = _matched(url)
    scheme = match["scheme"].lower()
    host = match["host"].strip("[]").lower()
    if not host.isascii():
        host = host.encode("idna").decode()
    port = int(match["port"]) if match["port"] else _PORTS[scheme]
    if port > 65535:
        raise ValueError("no such port")
    return Origin(scheme, host, port)


def _matched(url: str) -> re.Match[str]:
    match = _URL.match(url)
    if match is None:
        raise ValueError("not an absolute http or https URL")
    return match


def normal_url(url: str) -> str:
    """Return `url` in the form for requests: its origin in one spelling, the rest encoded, no fragment.

    Raises:
        ValueError: If it is not an absolute HTTP URL without user information.
    """
    rest = url[_matched(url).end() :].partition("#")[0]
    return f"{origin_of(url)}{quote(rest, safe=_URL_MARKS)}"


def is_public(address: str) -> bool:
    """Return whether a numeric address, in any notation, belongs to the public Internet."""
    try:
        return _is_public(ipaddress.ip_address(address.partition("%")[0]))
    except ValueError:
        return False


def _is_public(address: Address) -> bool:
    if any(address in network for network in _RESERVED):
        return False
    if isinstance(address, ipaddress.IPv6Address):
        embedded = _embedded(address)
        if embedded is not None:
            return _is_public(embedded)
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address an IPv6 address carries: mapped, translated, tunnelled."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if any(address in network for network in (*_NAT64, *_EMBEDDED_LOW)):
        return low
    # ISATAP: an interface identifier that spells out an IPv4 address.
    if (int(address) >> 32) & 0xFFFFFFFF in {0x00005EFE, 0x02005EFE}:
        return low
    return None


def numeric_address(host: str) -> str | None:
    """The address that `host` writes in some numeric way (`127.1`, `0x7f000001`); None for a name."""
    host = host.strip("[]").rstrip(".")
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host)) if host[:1].isdigit() else None
    except OSError:
        return None


def enforce_public(host: str) -> None:
    """Reject a host that a third party named if it is known not to be public before it is resolved.

    Raises:
        CallError: With code `ACCESS_DENIED`, for a host that is clearly not public.
    """
    name = host.lower().strip("[]").rstrip(".")
    address = numeric_address(name)
    if address is not None:
        allowed = is_public(address)
    else:
        allowed = bool(name) and not name.endswith(tuple("." + local for local in _LOCAL_NAMES))
        allowed = allowed and name not in _LOCAL_NAMES
    if not allowed:
        raise not_public(host)


def not_public(host: str) -> CallError:
    """Return the error for an address that a third party may not name."""
    return CallError(
        ErrorCode.ACCESS_DENIED,
        f"{host!r} is not a public address, and only a document or a server names it."
        " To allow it, add it to allowed_hosts.",
    )


class TrustedHosts:
    """The hosts an operator named.

    Args:
        urls: Addresses whose origin (scheme, host and port) is trusted.
        hosts: `host`, `host:port` or an origin; a host alone is trusted on every port.
    """

    def __init__(self, urls: Iterable[str], hosts: Iterable[str] = ()) -> None:
        self._origins = {origin_of(url) for url in urls}
        self._hosts: set[tuple[str, int | None]] = set()
        for entry in hosts:
            if "://" in entry:
                self._origins.add(origin_of(entry))
            else:
                origin = origin_of(f"http://{entry}")
                has_port = re.search(r":[0-9]+$", entry) is not None
                self._hosts.add((origin.host, origin.port if has_port else None))

    def __contains__(self, origin: Origin) -> bool:
        return (
            origin in self._origins
            or (origin.host, None) in self._hosts
            or (origin.host, origin.port) in self._hosts
        )


# ------------------------------------------------------------ requests to us

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
        self, headers: Iterable[tuple[bytes, bytes]], *, is_probe: bool = False
    ) -> tuple[HostError | None, bytes | None]:
        """Return why a request is rejected, or else the origin of the foreign page that sends it.

        Args:
            headers: Of the request, with names in lower case.
            is_probe: Whether any address or no Host will do, as load balancers send them. The name of another server,
                which a web page may have directed to this machine, will not.
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
