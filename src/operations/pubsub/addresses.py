"""Addresses of brokers and peers. They hold logins, so that nothing that is said of them may quote them.

The libraries do quote them, or the part they stumbled over, which is the password where that holds a slash. So they get
none that they cannot read.
"""

from collections.abc import Collection
from urllib.parse import unquote, urlsplit

from operations.errors import TransportError


def enforce_address(url: str, schemes: Collection[str], *, needs_host: bool = True) -> None:
    """Make sure that a library can read `url`.

    Raises:
        TransportError: Naming what is wrong with it, and nothing of it.
    """
    flaw = _flaw(url, schemes, needs_host)
    # Not while an exception is handled that quotes the address: it would hang on to this one.
    if flaw:
        raise TransportError(f"the address cannot be read: {flaw}")


def _flaw(url: str, schemes: Collection[str], needs_host: bool) -> str:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
    except ValueError:
        return "its host is malformed"
    if parts.scheme not in schemes:
        return "it does not start with " + " or ".join(f"{scheme}://" for scheme in schemes)
    try:
        _ = parts.port
    except ValueError:
        return (
            "its port is no number up to 65535; "
            "in a user name or password, / ? # @ : , are written %2F %3F %23 %40 %3A %2C"
        )
    if needs_host and not host:
        return "it names no host"
    try:
        unquote(parts.netloc, errors="strict")
    except UnicodeError:
        return "its user name or password is not UTF-8"
    return ""
