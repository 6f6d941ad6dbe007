"""Texts and numbers that a journal can store.

Rule 1: a value of a caller or a handler never fails a transaction: that would look as if the store did not work, and an
        attempt that meets it would be made again and again.
"""

from typing import Final

from operations.base.errors import invalid_argument

MAX_NAME: Final = 512
"""The largest number of characters in a name: names are in indexes, whose rows have at most 2,700 bytes."""

MAX_SECONDS: Final = 10**10
"""The longest time that a run waits: three centuries."""

_MAX_INTEGER: Final = 2**63 - 1


def is_storable(name: str) -> bool:
    """Return whether a name can be stored: not too long, and Unicode that each database accepts."""
    return len(name) <= MAX_NAME and cleaned(name) == name


def enforce_storable(name: str, argument: str) -> None:
    """Reject a name that cannot be stored.

    Raises:
        CallError: `VALIDATION_ERROR`.
    """
    if not is_storable(name):
        message = f"must have at most {MAX_NAME} characters, all of them valid Unicode without NUL"
        raise invalid_argument(f"/{argument}", message, "pattern", subject=argument)


def enforce_integer(value: int, argument: str) -> None:
    """Reject a number that is no integer of a database.

    Raises:
        CallError: `VALIDATION_ERROR`.
    """
    if not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        raise invalid_argument(f"/{argument}", "is too large", "maximum", subject=argument)


def milliseconds(seconds: float, argument: str) -> int:
    """Return a time in milliseconds, at least 0.

    Raises:
        CallError: `VALIDATION_ERROR` if it is not finite, or too long.
    """
    # The comparison is false for NaN.
    if not seconds <= MAX_SECONDS:
        message = f"must be a number of at most {MAX_SECONDS} seconds"
        raise invalid_argument(f"/{argument}", message, "maximum", subject=argument)
    return int(max(0.0, seconds) * 1000)


def cleaned(text: str) -> str:
    """Return a text for people, without the characters that cannot be stored."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")
