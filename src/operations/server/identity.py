"""Resolvers of identities from HTTP requests.

Rule 1: an identity comes from a verified credential of the request, never from what the request says about itself.
Rule 2: an exception rejects the request. A request without a credential has no identity, which is enough for
        operations that require nothing.
"""

from collections.abc import Awaitable
from typing import Protocol, cast

from starlette.requests import HTTPConnection

from operations.access import Identity
from operations.front.identity import CredentialError, resolved


class IdentityResolver(Protocol):
    """Finds out who sends a request or opens a WebSocket."""

    def __call__(
        self, connection: HTTPConnection, /
    ) -> Identity | Awaitable[Identity | None] | None:
        """Return the identity, or None if the request has no credential of the kind this resolver knows.

        May be a coroutine function.

        Raises:
            Exception: Any exception rejects the request.
        """
        ...


def any_of(*resolvers: IdentityResolver) -> IdentityResolver:
    """Return a resolver that tries several, and returns the first identity that one finds.

    A credential that one rejects may be valid for another; the request is rejected if one rejects and none accepts.
    """

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
        CredentialError: If there are several: a proxy may have checked another one.
    """
    values = [value for key, value in connection.scope["headers"] if key == name]
    if not values:
        return None
    if len(values) > 1:
        raise CredentialError(f"more than one {name.decode()} header")
    return cast("bytes", values[0]).decode("latin-1")
