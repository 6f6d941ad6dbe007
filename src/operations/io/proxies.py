"""How HTTP clients connect to other servers: through which proxy, and with which certificates.

Rule 1: a proxy that the operator configured is used for all requests. The environment is read only if the operator
        allows it.
Rule 2: a request to a host that a third party names uses no proxy, because a proxy resolves names itself and could
        reach private addresses. The callers of this module enforce it.
Rule 3: the certificate of the client is presented only to hosts that may receive credentials.
"""

import os
import re
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from operations.base.errors import CallError, ErrorCode
from operations.base.types import WRITTEN

_ADDRESS = re.compile(
    r"https?://([^/?#\s\[\]]*@)?([^/?#\s\[\]@:]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?/?"
)
"""Without characters that a password must encode: parsers take the text before them for the host, and name it."""

_EXAMPLE = "http://proxy.example.com:3128, with %2F for a slash in a password"
_LOGIN_REQUIRED = 407

PROXY_LOGIN: Final = "write the user and the password of the proxy into its address"
"""Advice for status 407."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """How to connect to an HTTP server."""

    proxy: str | None = field(default=None, repr=False, metadata={WRITTEN: True})
    """The URL of an HTTP proxy, `http://[user:password@]host:port`.

    Hosts that only the other side names (in its document, or for OAuth) are called directly, because a proxy resolves
    names itself and could reach private addresses. Add such a host to `allowed_hosts` to call it through the proxy.
    """

    trust_env: bool = False
    """Read proxies from the environment (`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`)."""

    ca_file: str | Path | None = None
    """A PEM file with the trusted certificate authorities, instead of the system's."""

    client_certificate: str | Path | None = None
    """A PEM file with the certificate to present to hosts that may receive credentials, and its key."""

    client_key: str | Path | None = None
    """A PEM file with the private key, if it is not in the file of `client_certificate`."""

    def enforce_connection(self) -> None:
        """Raise `ValueError` unless the proxy has a valid address and the files can be used."""
        if self.proxy is not None and not _ADDRESS.fullmatch(self.proxy):
            raise ValueError(f"proxy must be a URL such as {_EXAMPLE}")
        if self.client_key is not None and self.client_certificate is None:
            raise ValueError("client_key is set without client_certificate")
        self.tls_context(presents_certificate=True)

    def tls_context(self, *, presents_certificate: bool) -> ssl.SSLContext | None:
        """Return the settings for a TLS connection, or None for the defaults.

        Raises:
            ValueError: If a file cannot be used.
        """
        certificate = self.client_certificate if presents_certificate else None
        if self.ca_file is None and certificate is None:
            return None
        option, file = "ca_file", self.ca_file
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if certificate is not None:
                option, file = "client_certificate", certificate
                # An encrypted key must raise an error instead of asking for a password at the terminal.
                context.load_cert_chain(certificate, self.client_key, password=lambda: "")
        except OSError as error:
            reason = error.strerror or type(error).__name__
            if isinstance(error, ssl.SSLError):
                reason = "it is not a valid PEM file, or certificate and key do not belong together"
            raise ValueError(f"{option} {str(file)!r} cannot be used: {reason}") from error
        return context


def shown_proxy(proxy: str) -> str:
    """Return the name of a proxy for messages: its address without the login."""
    parts = urlsplit(proxy)
    return f"the proxy {parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def proxy_status(status: int) -> str:
    """Return the reason of a proxy that does not open a connection, and what to do."""
    reason = f"it rejected the connection with HTTP status {status}"
    return f"{reason}: {PROXY_LOGIN}" if status == _LOGIN_REQUIRED else reason


class Proxies:
    """The proxies of a client.

    Args:
        proxy: The URL of the proxy for all requests.
        trust_env: Whether to use the proxies of the environment (`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`)
            if `proxy` is None.

    Attributes:
        is_used: Whether any request may use a proxy.
    """

    def __init__(self, proxy: str | None, *, trust_env: bool) -> None:
        self._found = getproxies() if trust_env and proxy is None else {}
        if proxy is not None:
            self._found = {"all": proxy}
        self.is_used = bool(self._found)

    def find_for(self, url: str) -> str | None:
        """As `find`, for a URL."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return self.find(parts.scheme, parts.hostname or "", port)

    def find(self, scheme: str, host: str, port: int | None) -> str | None:
        """Return the URL of the proxy for a request to a host; None if it is sent directly.

        Raises:
            CallError: `UNAVAILABLE` if the environment names a proxy of another kind, or its address is not valid.
        """
        found = self._found.get(scheme) or self._found.get("all")
        if not found or _is_direct(host.lower(), port, self._found.get("no", "")):
            return None
        kind, mark, _ = found.partition("://")
        proxy = found if mark else f"http://{found}"
        if not _ADDRESS.fullmatch(proxy):
            is_known = kind in ("http", "https") or not mark
            reason = (
                f"write {_EXAMPLE}" if is_known else f"{kind}:// is not supported, only http://"
            )
            message = f"The proxy of the environment cannot be used: {reason}"
            raise CallError(ErrorCode.UNAVAILABLE, message, retryable=False, begun=False)
        return proxy


_VARIABLES: Final = {"ws": ("ws", "socks", "https", "http"), "wss": ("wss", "socks", "https")}
"""The kinds of proxies for a scheme, the preferred one first (RFC 6455, 4.1)."""


def usual_proxy(url: str) -> str | None:
    """Return the proxy of the environment for a URL, as most programs choose it: without `ALL_PROXY`."""
    found, parts = getproxies(), urlsplit(url)
    port = parts.port or (443 if parts.scheme in ("https", "wss") else 80)
    host = (parts.hostname or "").lower()
    # Some operating systems have exceptions of their own.
    if _is_direct(host, port, found.get("no", "")) or proxy_bypass(f"{host}:{port}"):
        return None
    kinds = _VARIABLES.get(parts.scheme, (parts.scheme,))
    kind = next((kind for kind in kinds if kind in found), "")
    # Operating systems name a SOCKS proxy as if it were an HTTP proxy.
    return found[kind].replace("http://", "socks5h://") if kind == "socks" else found.get(kind)


def _is_direct(host: str, port: int | None, exceptions: str) -> bool:
    """Return whether NO_PROXY contains a host, a parent domain, a network of its address, or `*`."""
    for entry in exceptions.lower().split(","):
        name = entry.strip()
        if name == "*":
            return True
        if "/" in name:
            with suppress(ValueError):
                if ip_address(host) in ip_network(name, strict=False):
                    return True
        name = name.removeprefix("*").lstrip(".")
        if name and (name in {host, f"[{host}]", f"{host}:{port}"} or host.endswith(f".{name}")):
            return True
    return False


def reason_of(error: OSError) -> str:
    """Return why a connection failed, without its address."""
    # The text of asyncio only repeats the address. Errors of TLS have numbers of their own.
    if error.strerror and "Connect call failed" not in error.strerror:
        return error.strerror
    return str(error) if error.errno is None else os.strerror(error.errno)


def tls_reason(text: str, authority: str, certificate: str, plain: str = "") -> str:
    """Return why TLS failed, and what to do.

    Args:
        text: The text of OpenSSL.
        authority: The option that names certificate authorities.
        certificate: The option that names the certificate of the client.
        plain: The scheme of addresses without TLS.
    """
    # Without the number of a line in the source of OpenSSL.
    text = text.partition(" (_ssl.c")[0].rstrip(".")
    if "issuer certificate" in text or re.search("self.signed", text):
        return f"{text}; if its authority is private, set {authority}"
    if "CERTIFICATE_REQUIRED" in text:
        return f"{text}; set {certificate}"
    if plain and ("WRONG_VERSION_NUMBER" in text or "record layer failure" in text):
        return f"{text}; if the port does not use TLS, write {plain}"
    return text
