"""Build what the front needs from a config: its limits, and the callers of `[access]`."""

from hashlib import sha256

from operations.access import Identity
from operations.config import ConfigFile
from operations.front.identity import CredentialResolver
from operations.front.limits import Limits


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


def credential_resolver(file: ConfigFile) -> CredentialResolver:
    """Who a credential inside a call belongs to.

    Raises:
        ConfigError: If a key is not where the config says.
    """
    callers = callers_by_hash(file)
    # Found by its hash: how long that takes tells nothing about a key.
    return lambda credential: callers.get(sha256(credential.encode()).hexdigest())
