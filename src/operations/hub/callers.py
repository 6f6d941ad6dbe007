"""Build what the front needs from a config: its limits, and the callers of `[access]`."""

from collections.abc import Awaitable, Collection
from hashlib import sha256
from importlib import import_module
from typing import Any

from operations._grants import PREFIX
from operations.access import Identity
from operations.authority import Grants, Store
from operations.config import ConfigFile
from operations.front.config import JWTConfig
from operations.front.limits import Limits

_TOKENS = "operations.server.tokens"
"""Imported when the config has `[access.jwt]`: it has an extra of its own."""


def limits_of(file: ConfigFile) -> Limits:
    """Return the limits of a config, which are the same at every entry point.

    Raises:
        ConfigError: If a value is wrong.
    """
    return Limits(**file.options(Limits, file.config.limits))


def callers_by_hash(file: ConfigFile) -> dict[str, Identity]:
    """Everyone in `[access.keys]`, by the SHA-256 of the key they show.

    Raises:
        ConfigError: If a key is not where the config says.
    """
    found: dict[str, Identity] = {}
    for name, entry in file.config.access.keys.items():
        identity = Identity(name, **file.options(Identity, entry))
        if entry.sha256 is not None:
            found[entry.sha256.lower()] = identity
        elif entry.key is not None:
            found[sha256(file.secret(entry.key).encode()).hexdigest()] = identity
    return found


def can_sign_in(file: ConfigFile) -> bool:
    """Return whether a config names callers."""
    access = file.config.access
    return bool(access.keys) or access.jwt is not None or access.grants is not None


def serves_anonymous(file: ConfigFile) -> bool:
    """Return whether requests without a credential are served."""
    access = file.config.access
    return access.jwt is None if access.anonymous is None else access.anonymous


class Access:
    """The callers of `[access]`, which may change while a hub runs.

    Args:
        file: The config.
        store: Where revocations of grants are kept.

    Raises:
        ConfigError: If a key is not where the config says.
    """

    def __init__(self, file: ConfigFile, store: Store) -> None:
        entry, grants = file.config.access.jwt, file.config.access.grants
        self.keys = callers_by_hash(file)
        self.by_id = {identity.id: identity for identity in self.keys.values()}
        self.grants: Grants | None = None
        if grants is not None:
            try:
                self.grants = Grants(file.secret(grants.key), store=store, subjects=self.by_id.get)
            except ValueError as error:
                raise file.fault(str(error), "access.grants.key") from error
        self.tokens: Any = (
            None if entry is None else import_module(_TOKENS).JWTs(**file.options(JWTConfig, entry))
        )

    def become(self, other: "Access") -> None:
        """Use the callers of another version of the file."""
        self.keys, self.tokens, self.grants = other.keys, other.tokens, other.grants
        self.by_id = other.by_id

    def find(self, key_hash: str) -> Identity | None:
        """Return whose key has this SHA-256."""
        return self.keys.get(key_hash)

    def resolve(self, credential: str) -> "Identity | Awaitable[Identity | None] | None":
        """Return whose key or grant a credential inside a call is."""
        if self.grants is not None and credential.startswith(PREFIX):
            return self.grants.resolve(credential)
        # Found by its hash: how long that takes reveals nothing about a key.
        return self.keys.get(sha256(credential.encode()).hexdigest())

    async def grant(self, credential: str | None) -> Identity | None:
        """Return who acts with a grant; None for a credential of another kind.

        Raises:
            GrantError: If the grant is not valid.
        """
        if self.grants is None or credential is None:
            return None
        return await self.grants.resolve(credential)

    @staticmethod
    def anyone(name: str, scopes: Collection[str]) -> Identity:
        """Return a subject that is not in the file."""
        return Identity(name, scopes)

    def identify_token(self, request: Any) -> Any:
        """Return who sends an HTTP request with a signed token, or an awaitable of it."""
        return None if self.tokens is None else self.tokens(request)
