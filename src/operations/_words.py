"""Words that messages share."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggestion(given: str, known: Iterable[str]) -> str:
    """A sentence for what was probably meant, with a space before it; empty where nothing is near."""
    near = get_close_matches(given, list(known), n=1, cutoff=0.6)
    return f' Did you mean "{near[0]}"?' if near else ""


def counted(number: int, noun: str) -> str:
    """`1 operation`, `2 operations`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
