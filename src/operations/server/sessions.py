"""Signing in from a browser: a credential is shown once, and a cookie stands for it from then on.

`EventSource` and WebSockets in a browser cannot send an Authorization header, and keys must not stand in addresses.

Rule 1: the cookie holds 256 random bits and nothing else; who it stands for is kept here. Scripts cannot read it
        (HttpOnly), and no other site's page makes the browser send it (SameSite=Strict).
Rule 2: sessions end: after a time, by signing out, or with the process.
"""

from collections import OrderedDict
from hashlib import sha256
from secrets import token_urlsafe
from time import monotonic

from starlette.requests import HTTPConnection

from operations.access import Identity
from operations.server.identity import CredentialError

COOKIE = "operations_session"

_MOST = 10_000
"""Sessions at a time; the oldest end first."""


class Sessions:
    """Who is signed in.

    Args:
        seconds: How long a session lasts.
    """

    def __init__(self, seconds: float = 8 * 3600) -> None:
        self.seconds = seconds
        self._open: OrderedDict[bytes, tuple[Identity, float]] = OrderedDict()

    def sign_in(self, identity: Identity) -> str:
        """Begin a session; what the cookie is to hold."""
        secret = token_urlsafe(32)
        # Kept as a digest: looking one up then tells nothing about how much of a guess was right.
        self._open[_digest(secret)] = (identity, monotonic() + self.seconds)
        if len(self._open) > _MOST:
            self._open.popitem(last=False)
        return secret

    def sign_out(self, connection: HTTPConnection) -> None:
        """End the session of a request, if it has one."""
        secret = connection.cookies.get(COOKIE)
        if secret is not None:
            self._open.pop(_digest(secret), None)

    def __call__(self, connection: HTTPConnection) -> Identity | None:
        """Who signed in; an `IdentityResolver`.

        Raises:
            CredentialError: If the session has ended.
        """
        secret = connection.cookies.get(COOKIE)
        if secret is None:
            return None
        identity, ends = self._open.get(_digest(secret), (None, 0.0))
        if identity is None or monotonic() > ends:
            raise CredentialError("a session that has ended")
        return identity

    def cookie(self, value: str, *, secure: bool) -> bytes:
        """The Set-Cookie header that begins a session, or ends it where the value is empty."""
        age = int(self.seconds) if value else 0
        text = f"{COOKIE}={value}; Max-Age={age}; Path=/; HttpOnly; SameSite=Strict"
        return (text + "; Secure" if secure else text).encode()


def _digest(secret: str) -> bytes:
    return sha256(secret.encode(errors="replace")).digest()
