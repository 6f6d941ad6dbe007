"""Who sends a request.

Rule 1: an identity comes from a verified credential of the request, never from what the request says about itself.
Rule 2: anything that goes wrong while finding out refuses the request. No credential at all is nobody, which is fine
        for operations that require nothing.
"""

import logging
from collections.abc import Awaitable
from typing import Protocol, cast

from starlette.requests import HTTPConnection

from operations._sign_ins import resolved
from operations.access import Identity
from operations.errors import OperationsError

logger = logging.getLogger("operations.server")


class CredentialError(OperationsError):
    """A credential was shown and does not hold. The text is for logs and never holds the credential."""


class IdentityResolver(Protocol):
    """Finds out who sends a request, or opens a WebSocket."""

    def __call__(
        self, connection: HTTPConnection, /
    ) -> Identity | Awaitable[Identity | None] | None:
        """The identity, or None where the request carries no credential of the kind this resolver knows.

        May be a coroutine function.

        Raises:
            Exception: Whatever it raises refuses the request.
        """
        ...


def any_of(*resolvers: IdentityResolver) -> IdentityResolver:
    """The first identity that one of several resolvers finds.

    A credential that one refuses may be another's; the request is refused when one refused and none vouched.
    """

    async def resolve(connection: HTTPConnection) -> Identity | None:
        refusal: Exception | None = None
        for resolver in resolvers:
            try:
                identity = await resolved(resolver(connection))
            except Exception as error:  # noqa: BLE001 - kept, and raised unless another vouches
                refusal = error
                continue
            if identity is not None:
                return identity
        if refusal is not None:
            raise refusal
        return None

    return resolve


def bearer_token(connection: HTTPConnection) -> str | None:
    """The token of `Authorization: Bearer`, if there is one.

    Raises:
        CredentialError: If there are two such headers.
    """
    held = header(connection, b"authorization")
    if held is None:
        return None
    scheme, _, token = held.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def header(connection: HTTPConnection, name: bytes) -> str | None:
    """The one value of a header that names the caller.

    Raises:
        CredentialError: If there are several: no telling which one a proxy looked at.
    """
    values = [value for key, value in connection.scope["headers"] if key == name]
    if not values:
        return None
    if len(values) > 1:
        raise CredentialError(f"more than one {name.decode()} header")
    return cast("bytes", values[0]).decode("latin-1")
