"""Sign in from a browser: a credential is shown once, and a cookie stands for it from then on.

`EventSource` and WebSockets in a browser cannot send an Authorization header, and keys must not appear in URLs.

Rule 1: the cookie contains 256 random bits and nothing else; the identity is kept here. Scripts cannot read it
        (HttpOnly), and browsers do not send it for pages of other sites (SameSite=Strict).
Rule 2: a session ends after a time, when its credential expires or is revoked, on sign-out, and with the process.
Rule 3: browsers send cookies to every port of a host, so the name contains the port: two servers do not share it.
"""

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import sha256
from secrets import token_urlsafe
from time import monotonic
from typing import Any

from starlette.requests import HTTPConnection

from operations.access import Identity
from operations.front.http import CREDENTIAL
from operations.front.identity import Credential, CredentialError, resolved
from operations.front.timing import Scope
from operations.server.identity import IdentityResolver

COOKIE = "operations_session"

BY_COOKIE = "operations.by_cookie"
"""Set in the scope of a request whose sender is known only by a session."""

_MOST = 10_000
"""Open sessions; the oldest end first."""


class Sessions:
    """The open sessions.

    Args:
        seconds: How long a session lasts.
    """

    def __init__(self, seconds: float = 8 * 3600) -> None:
        self.seconds = seconds
        self._open: OrderedDict[bytes, tuple[Credential, float]] = OrderedDict()

    def sign_in(self, credential: Credential) -> str:
        """Begin a session; return the value of the cookie."""
        secret = token_urlsafe(32)
        # Kept as a digest: a lookup then reveals nothing about how much of a guess was right.
        self._open[_digest(secret)] = (credential, monotonic() + self.seconds)
        if len(self._open) > _MOST:
            self._open.popitem(last=False)
        return secret

    def sign_out(self, scope: Scope) -> None:
        """End the session of a request, if it has one."""
        secret = _secret(scope)
        if secret is not None:
            self._open.pop(_digest(secret), None)

    async def find(self, scope: Scope) -> Identity | None:
        """Return who signed in.

        Raises:
            CredentialError: If the session has ended.
        """
        secret = _secret(scope)
        if secret is None:
            return None
        digest = _digest(secret)
        credential, ends = self._open.get(digest, (None, 0.0))
        if credential is None or monotonic() > ends or not await credential.is_valid():
            self._open.pop(digest, None)
            # Scripts cannot delete the cookie of a session that has ended, so the response does.
            raise CredentialError(
                "a session that has ended", headers=[(b"set-cookie", self.cookie("", scope))]
            )
        scope[BY_COOKIE] = True
        scope[CREDENTIAL] = credential
        return credential.identity

    def cookie(self, value: str, scope: Scope) -> bytes:
        """Return the Set-Cookie header that begins a session, or ends it if the value is empty."""
        age = int(self.seconds) if value else 0
        path = scope.get("root_path") or "/"
        text = (
            f"{cookie_name(scope)}={value}; Max-Age={age}; Path={path}; HttpOnly; SameSite=Strict"
        )
        return (text + "; Secure" if scope.get("scheme") in ("https", "wss") else text).encode()


class SessionResolver:
    """Resolves a credential or, if a request shows none, the cookie of a session."""

    def __init__(self, resolver: IdentityResolver, sessions: Sessions) -> None:
        self._resolver = resolver
        self._sessions = sessions

    async def __call__(self, scope: Scope) -> Identity | None:
        """Return the identity behind a request."""
        identity = await resolved(self._resolver(HTTPConnection(scope)))
        return identity if identity is not None else await self._sessions.find(scope)


def cookie_name(scope: Mapping[str, Any]) -> str:
    """Return the name of this server's cookie."""
    server = scope.get("server") or ("", None)
    return f"{COOKIE}_{server[1]}" if server[1] is not None else COOKIE


def _secret(scope: Scope) -> str | None:
    if not any(name == b"cookie" for name, _ in scope["headers"]):
        return None
    return HTTPConnection(scope).cookies.get(cookie_name(scope))


def _digest(secret: str) -> bytes:
    return sha256(secret.encode(errors="replace")).digest()
