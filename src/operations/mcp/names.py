"""Names that are safe to show, to log and to route by, made from names that others chose."""

import re
import unicodedata

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST = 256
_INVISIBLE = ("Cc", "Cf", "Cn", "Co", "Cs")


def safe_name(name: str) -> str:
    """`name` as the name of an operation: what is not a letter, digit, `_`, `-` or `.` becomes `_`.

    Raises:
        ValueError: If it is empty, too long, or holds characters that cannot be seen.
    """
    if not name or len(name) > _LONGEST:
        raise ValueError(f"its name has {len(name)} characters")
    if not name.isprintable():
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
    if text.isascii() and text.isprintable():
        return False
    return any(
        unicodedata.category(character) in _INVISIBLE
        for character in text
        if character not in "\t\n\r"
    )
