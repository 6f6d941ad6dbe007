"""Build what the front needs from a config: its limits, and the callers of `[access]`."""

from hashlib import sha256
from importlib import import_module
from typing import Any

from operations.access import Identity
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
    return bool(file.config.access.keys) or file.config.access.jwt is not None


def serves_anonymous(file: ConfigFile) -> bool:
    """Return whether requests without a credential are served."""
    access = file.config.access
    return access.jwt is None if access.anonymous is None else access.anonymous


class Access:
    """The callers of `[access]`, which may change while a hub runs.

    Raises:
        ConfigError: If a key is not where the config says.
    """

    def __init__(self, file: ConfigFile) -> None:
        entry = file.config.access.jwt
        self.keys = callers_by_hash(file)
        self.tokens: Any = (
            None if entry is None else import_module(_TOKENS).JWTs(**file.options(JWTConfig, entry))
        )

    def become(self, other: "Access") -> None:
        """Use the callers of another version of the file."""
        self.keys, self.tokens = other.keys, other.tokens

    def find(self, key_hash: str) -> Identity | None:
        """Return whose key has this SHA-256."""
        return self.keys.get(key_hash)

    def resolve(self, credential: str) -> Identity | None:
        """Return whose key a credential inside a call is."""
        # Found by its hash: how long that takes reveals nothing about a key.
        return self.keys.get(sha256(credential.encode()).hexdigest())

    def identify_token(self, request: Any) -> Any:
        """Return who sends an HTTP request with a signed token, or an awaitable of it."""
        return None if self.tokens is None else self.tokens(request)
