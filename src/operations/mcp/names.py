"""Find characters in names and texts of servers that cannot be seen."""

import unicodedata

_INVISIBLE = ("Cc", "Cf", "Cn", "Co", "Cs")


def hides_something(text: str) -> bool:
    """Whether `text` holds control, formatting (bidirectional, zero-width) or unassigned characters."""
    if text.isascii() and text.isprintable():
        return False
    return any(
        unicodedata.category(character) in _INVISIBLE
        for character in text
        if character not in "\t\n\r"
    )
