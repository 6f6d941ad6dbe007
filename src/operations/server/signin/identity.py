"""Resolve the identity of an HTTP request: API keys, cookies of browser sessions, and combinations.

A browser sends a credential once and receives a session cookie, because `EventSource` and WebSockets cannot send an
Authorization header, and keys must not appear in URLs.

Rule 1: an identity comes only from a verified credential of the request.
Rule 2: an exception rejects the request. A request without a credential has no identity, and can call only operations
        without access requirements.
Rule 3: the server stores only the SHA-256 of a key, from which a key of 256 random bits cannot be recovered. Digests
        are compared in constant time.
Rule 4: a cookie contains only 256 random bits; the server stores the identity. Scripts cannot read the cookie
        (HttpOnly), and browsers do not send it for pages of other sites (SameSite=Strict).
Rule 5: a session ends after a time, when its credential expires or is revoked, on sign-out, and with the process.
Rule 6: browsers send cookies to every port of a host. The name of the cookie contains the port, so that two servers on
        one host do not share it.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from secrets import token_urlsafe
from time import monotonic
from typing import Any, Protocol, cast

import msgspec
from starlette.requests import HTTPConnection

from operations.base.errors import CallError, ErrorCode
from operations.contract.access import Identity
from operations.front.credentials import Credential, CredentialError, CredentialResolver, resolved
from operations.front.request import CREDENTIAL
from operations.front.timing import Scope


class IdentityResolver(Protocol):
    """Identifies the caller of a request or WebSocket."""

    def __call__(
        self, connection: HTTPConnection, /
    ) -> Identity | Awaitable[Identity | None] | None:
        """Return the identity, or None if the request has no credential of a kind that this resolver supports.

        May be a coroutine function.

        Raises:
            Exception: Any exception rejects the request.
        """
        ...


def any_of(*resolvers: IdentityResolver) -> IdentityResolver:
    """Return a resolver that tries several resolvers and returns the first identity found.

    A credential that one resolver rejects may be valid for another. The request is rejected if no resolver accepts the
    credential and at least one rejects it.

    Raises:
        TypeError: If one of them cannot be called.
    """
    for each in resolvers:
        if not callable(each):
            raise TypeError(
                "identity takes functions of a request, such as APIKeys({hash_key(key): identity}),"
                f" not a value of type {type(each).__name__}"
            )

    async def resolve(connection: HTTPConnection) -> Identity | None:
        problem: Exception | None = None
        for resolver in resolvers:
            try:
                identity = await resolved(resolver(connection))
            except Exception as error:  # noqa: BLE001 - raised unless another accepts
                problem = error
                continue
            if identity is not None:
                return identity
        if problem is not None:
            raise problem
        return None

    return resolve


def bearer_token(connection: HTTPConnection) -> str | None:
    """Return the token of `Authorization: Bearer`, if there is one.

    Raises:
        CredentialError: If there are two such headers.
    """
    held = header(connection, b"authorization")
    if held is None:
        return None
    scheme, _, token = held.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def header(connection: HTTPConnection, name: bytes) -> str | None:
    """Return the only value of a header that contains a credential.

    Raises:
        CredentialError: If there are several values, because a proxy may have checked a different one.
    """
    values = [value for key, value in connection.scope["headers"] if key == name]
    if not values:
        return None
    if len(values) > 1:
        raise CredentialError(f"more than one {name.decode()} header")
    return cast("bytes", values[0]).decode("latin-1")


HEADER = b"x-api-key"

_LOOK_AGAIN = 1.0
"""Seconds between two checks whether the key file has changed."""

_MAX_KEY = 1024

_OTHER_SCHEMES = frozenset({"basic", "bearer", "digest", "negotiate"})
"""Authorization schemes that a resolver checks, or that a proxy may have checked and forwarded."""


def new_key() -> str:
    """Return a new key of 256 random bits."""
    return token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return the SHA-256 of a key in hex, the form in which a server stores it."""
    return sha256(key.encode(errors="replace")).hexdigest()


class APIKeys:
    """Resolves `Authorization: Bearer KEY` and `X-API-Key: KEY`.

    Args:
        keys: Identities by the hash of their key (`hash_key`), or a function that returns the identity for a hash,
            which may be a coroutine function.
    """

    def __init__(
        self,
        keys: Mapping[str, Identity]
        | Callable[[str], "Identity | Awaitable[Identity | None] | None"],
    ) -> None:
        self._find = keys if callable(keys) else _by_hash(keys).get

    @classmethod
    def from_file(cls, path: str | Path) -> "APIKeys":
        """Return the keys of a JSON file: `{"SHA-256 of the key": {"id": ..., "scopes": [...], "resources": {...}}}`.

        The file is read again when it changes, so that a key can be revoked at once. If the file can no longer be read,
        every key is rejected.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If its content has another form.
        """
        return cls(_KeysFile(Path(path)).find)

    async def __call__(self, connection: HTTPConnection) -> Identity | None:
        """Return the identity for the key of a request; None if it has no key.

        Raises:
            CredentialError: If the key is unknown.
        """
        key = bearer_token(connection) or header(connection, HEADER)
        if not key:
            return None
        if len(key) > _MAX_KEY:
            raise CredentialError("a key that is too long")
        identity = await resolved(self._find(hash_key(key)))
        if identity is None:
            raise CredentialError("an unknown key")
        return identity


def credential_resolver(resolve: CredentialResolver) -> IdentityResolver:
    """Return a request resolver that uses a credential resolver, such as `Grants.resolve`.

    The credential is in `Authorization: Bearer` or `X-API-Key`.
    """

    async def resolver(connection: HTTPConnection) -> Identity | None:
        credential = bearer_token(connection) or header(connection, HEADER)
        return await resolved(resolve(credential)) if credential else None

    return resolver


def _by_hash(keys: Mapping[str, Identity]) -> dict[str, Identity]:
    """Return the identities by hash in lower case. The timing of a lookup by hash reveals nothing about a key."""
    for digest, identity in keys.items():
        if len(digest) != 64 or not set(digest.lower()) <= set("0123456789abcdef"):
            # The value is not shown, because it may be the key itself.
            raise ValueError(f"the key of {identity.id!r} is not hashed: use hash_key(key)")
    return {digest.lower(): identity for digest, identity in keys.items()}


class _KeysFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._identities: dict[str, Identity] = {}
        self._next_look = 0.0
        self._refresh()

    def find(self, digest: str) -> Identity | None:
        if monotonic() >= self._next_look:
            self._refresh()
        return self._identities.get(digest)

    def _refresh(self) -> None:
        stat = self._path.stat()
        now = (stat.st_mtime_ns, stat.st_size)
        if now != self._seen:
            keys = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Identity])
            self._identities, self._seen = _by_hash(keys), now
        self._next_look = monotonic() + _LOOK_AGAIN


COOKIE = "operations_session"

BY_COOKIE = "operations.by_cookie"
"""Scope key of requests that are identified only by a session cookie."""

_MOST = 10_000
"""The largest number of open sessions; the oldest end first."""


class Sessions:
    """The open sessions.

    Args:
        seconds: The lifetime of a session.
    """

    def __init__(self, seconds: float = 8 * 3600) -> None:
        self.seconds = seconds
        self.is_offered = True
        """Whether sessions can begin; False if the next request may reach another process."""
        self._open: OrderedDict[bytes, tuple[Credential, float]] = OrderedDict()

    def sign_in(self, credential: Credential) -> str:
        """Begin a session; return the value of the cookie.

        Raises:
            CallError: `UNAVAILABLE` if sessions are not offered.
        """
        if not self.is_offered:
            message = "This server has several processes and no sessions: send the credential with every request"
            raise CallError(ErrorCode.UNAVAILABLE, message, retryable=False)
        secret = token_urlsafe(32)
        # Stored as a digest, so that the timing of a lookup reveals nothing about the value.
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
        """Return the identity of a session.

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
            # Scripts cannot delete the cookie of an ended session, so the response deletes it.
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
    """Resolves a credential or, if a request has none, the cookie of a session."""

    def __init__(self, resolver: IdentityResolver, sessions: Sessions) -> None:
        self._resolver = resolver
        self._sessions = sessions

    async def __call__(self, scope: Scope) -> Identity | None:
        """Return the identity of a request.

        Raises:
            CredentialError: If the session has ended, or no resolver supports the kind of credential.
        """
        connection = HTTPConnection(scope)
        identity = await resolved(self._resolver(connection))
        if identity is None:
            identity = await self._sessions.find(scope)
        if identity is None:
            _enforce_scheme(connection)
        return identity


def _enforce_scheme(connection: HTTPConnection) -> None:
    """Reject a key without a scheme, and a scheme without a key, instead of serving the request as anonymous."""
    held = header(connection, b"authorization")
    if held is None:
        return
    scheme, _, rest = held.partition(" ")
    if not rest.strip() or scheme.lower() not in _OTHER_SCHEMES:
        raise CredentialError(
            "an Authorization header that is not `Bearer KEY`",
            advice="Send the header `Authorization: Bearer KEY`, with the word Bearer, or `X-API-Key: KEY`",
        )


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
