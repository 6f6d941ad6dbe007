"""Codes with which a person signs in at another device, such as a phone.

Rule 1: a code is valid for two minutes and for one session, which it begins: it is no credential for calls.
Rule 2: there is one code at a time; a new one replaces it.
"""

from collections.abc import Callable
from hmac import compare_digest
from secrets import choice
from time import monotonic

from starlette.requests import HTTPConnection

from operations.contract.access import Identity
from operations.front.credentials import CredentialError
from operations.front.messages import route_path
from operations.server.signin.identity import bearer_token

CODE_SECONDS = 120.0
"""Seconds for which a one-use code is valid."""

_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
"""Without those that look alike."""

_USED = "operations.code"
"""Scope key of the request that has used a code; its session checks it again and again."""


class OneTimeCodes:
    """Resolves the current code in `POST /session`.

    Args:
        identity: Who signs in.
        on_use: Called when a code was used.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        identity: Identity,
        on_use: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._identity, self._on_use, self._clock = identity, on_use, clock
        self._code: str | None = None
        self._ends = 0.0

    def new(self) -> str:
        """Return a new code of 40 random bits, such as `K7QF-2MXA`; the server slows down guesses."""
        self._code = "".join(choice(_LETTERS) for _ in range(8))
        self._ends = self._clock() + CODE_SECONDS
        return f"{self._code[:4]}-{self._code[4:]}"

    def __call__(self, connection: HTTPConnection) -> Identity | None:
        """Return the identity of a request with the code, or of the session that it has begun.

        Raises:
            CredentialError: If the request has another credential, or the code has ended.
        """
        scope = connection.scope
        used: object = scope.get(_USED)
        if used is self:
            return self._identity
        token = bearer_token(connection)
        if token is None:
            return None
        given = token.replace("-", "").upper()
        is_open = self._code is not None and self._clock() < self._ends
        if not is_open or not compare_digest(given.encode(), (self._code or "").encode()):
            raise CredentialError("no current code", advice="Ask for a new code.")
        if (scope["method"], route_path(scope)) != ("POST", "/session"):
            raise CredentialError("a code outside of POST /session")
        self._code = None
        scope[_USED] = self
        self._on_use()
        return self._identity
