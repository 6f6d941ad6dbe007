"""Find the HTTP proxy for a request to another server.

Rule 1: a proxy that the operator configured is used for all requests. The environment is read only if the operator
        allows it.
Rule 2: a request to a host that a third party names uses no proxy, because a proxy resolves names itself and could
        reach private addresses. The callers of this module enforce it.
"""

import re
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies

from operations.errors import CallError, ErrorCode

_ADDRESS = re.compile(
    r"https?://([^/?#\s\[\]]*@)?([^/?#\s\[\]@:]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?/?"
)
"""Without characters that a password must encode: parsers take the text before them for the host, and name it."""

_EXAMPLE = "http://proxy.example.com:3128, with %2F for a slash in a password"
_LOGIN_REQUIRED = 407

PROXY_LOGIN: Final = "write the user and the password of the proxy into its address"
"""Advice for status 407."""


def enforce_proxy(proxy: str | None) -> None:
    """Raise `ValueError` unless a proxy has a valid address."""
    if proxy is not None and not _ADDRESS.fullmatch(proxy):
        raise ValueError(f"proxy must be a URL such as {_EXAMPLE}")


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
