"""Whom we may call: addresses, origins, and which of them are public."""

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias
from urllib.parse import quote, urljoin

from operations.base.errors import CallError, ErrorCode

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


def own_address() -> str | None:
    """Return the address at which other machines of the network reach this one; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing; it only selects the interface.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        found = str(probe.getsockname()[0])
    return None if ipaddress.ip_address(found).is_loopback else found


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
