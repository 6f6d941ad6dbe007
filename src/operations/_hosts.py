"""Decide which hosts may receive requests and credentials, and which requests a server accepts.

Rule 1: a host that the operator configured (`base_url`, `url`, `allowed_hosts`, the document's own address) may have
        any address.
Rule 2: a host that a third party names (a document, an MCP server's OAuth metadata) must be public. This is checked for
        the address of the connection, not only for the name.
Rule 3: credentials are sent only to hosts that the operator configured.
Rule 4: a server rejects an unknown Host (421), except an IP address in a health check, and an Origin that is neither
        its own nor allowed (403). It also rejects a request that a page of another site embeds (403): browsers send no
        Origin for it, but `Sec-Fetch-Site`. Other programs send neither header. Every entry point uses these rules.
"""

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import quote, urljoin, urlsplit

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
"""Networks that some versions of `ipaddress` classify as global."""

_LOCAL_NAMES = ("localhost", "local", "internal", "localdomain", "home.arpa")

# Deliberately stricter than the grammar: no user information, no backslash, nothing that two URL parsers could
# interpret differently.
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s/?#\\@:\[\]]+)(?::(?P<port>[0-9]{1,5}))?(?=[/?#]|$)",
    re.IGNORECASE,
)
_PORTS = {"http": 80, "https": 443}
_URL_MARKS = "%/?:@!$&'()*+,;=-._~"
"""Characters of a path or a query that need not be encoded."""

_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}
"""Socket options, in seconds and as a number of packets, with which the operating system notices within 20 seconds that
the host at the other end is lost. macOS has another name for the first one."""


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
    """Return `url` in the form for requests: a normalised origin, the rest percent-encoded, no fragment.

    Raises:
        ValueError: If it is not an absolute HTTP URL without user information.
    """
    rest = url[_matched(url).end() :].partition("#")[0]
    return f"{origin_of(url)}{quote(rest, safe=_URL_MARKS)}"


def joined_url(base: str, url: str) -> str:
    """Return the address for a reference of a third party from `base`; a malformed reference unchanged."""
    try:
        return urljoin(base, url)
    except ValueError:
        return url


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
    """Return the IPv4 address that an IPv6 address embeds (mapped, translated or tunnelled), if any."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if any(address in network for network in (*_NAT64, *_EMBEDDED_LOW)):
        return low
    # ISATAP: the interface identifier contains an IPv4 address.
    if (int(address) >> 32) & 0xFFFFFFFF in {0x00005EFE, 0x02005EFE}:
        return low
    return None


def numeric_address(host: str) -> str | None:
    """Return the address if `host` is numeric in any notation (`127.1`, `0x7f000001`); None for a name."""
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
    """Reject a host that a third party named if it is clearly not public, without resolving it.

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
