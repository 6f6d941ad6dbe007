"""Names that are safe to show, to log and to route by, made from names that others chose."""

import re
import unicodedata

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST = 256


def safe_name(name: str) -> str:
    """`name` as the name of an operation: what is not a letter, digit, `_`, `-` or `.` becomes `_`.

    Raises:
        ValueError: If it is empty, too long, or holds characters that cannot be seen.
    """
    if not name or len(name) > _LONGEST:
        raise ValueError(f"its name has {len(name)} characters")
    if hides_something(name):
        raise ValueError("its name holds characters that cannot be seen")
    return _UNSAFE.sub("_", name)


def safe_namespace(name: str) -> str:
    """`name` as a namespace.

    Raises:
        ValueError: As `safe_name`.
    """
    return safe_name(name)[:128].replace(".", "_")


def hides_something(text: str) -> bool:
    """Whether `text` holds control, formatting (bidirectional, zero-width) or unassigned characters."""
    return (
        not text.isascii()
        and any(
            unicodedata.category(character) in ("Cc", "Cf", "Cn", "Co", "Cs") for character in text
        )
    ) or any(
        (character < " " and character not in "\t\n\r") or character == "\x7f" for character in text
    )
