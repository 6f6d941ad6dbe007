"""Text helpers that all messages share: suggestions, counts, escaping, secrets."""

import re
from collections.abc import Container, Iterable
from difflib import get_close_matches
from heapq import nlargest
from itertools import islice, pairwise

_TELLING = re.compile(
    r"key|token|secret|pass|pwd|auth|credential|cookie|session|signature|jwt|pin$|pat$",
    re.IGNORECASE,
)
_LONGEST, _MOST = 200, 2_000
"""Characters of a name, and the number of known names, that a suggestion looks at."""

_LOGIN = re.compile(r"(?<=://)[^/?#]*@")


def suggestion(given: str, known: Iterable[str]) -> str:
    """Return a sentence with the name that was probably meant, after a space; empty if none is near."""
    pairs = _pairs(given[:_LONGEST])

    def alike(name: str) -> float:
        others = _pairs(name)
        return len(pairs & others) / (len(pairs) + len(others) + 1)

    # Comparing pairs of letters is cheap; only the names that share most of them are compared in detail.
    likely = nlargest(10, islice(known, _MOST), key=alike)
    near = get_close_matches(given[:_LONGEST], likely, n=1, cutoff=0.6)
    return f' Did you mean "{near[0]}"?' if near else ""


def _pairs(name: str) -> set[tuple[str, str]]:
    return set(pairwise(f" {name.lower()}"))


def enforce_lists(**values: Container[str] | Iterable[str] | None) -> None:
    """Let lists of strings through, or nothing at all; a single string would be read letter by letter.

    Raises:
        ValueError: Naming the argument, never its value, which may be a secret.
    """
    for name, value in values.items():
        if isinstance(value, str | bytes):
            raise ValueError(f'{name} must be a list of strings, not one string: {name}=["..."]')  # noqa: TRY004


def counted(number: int, noun: str) -> str:
    """`1 operation`, `2 operations`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """`text` on one line, with what cannot be seen spelt out."""
    return "".join(part if part.isprintable() else ascii(part)[1:-1] for part in text)


def in_seconds(seconds: float) -> str:
    """`0.25 s`, `2.5 s`, `30 s`: as exact as somebody would say it."""
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.2g} s"


def names_a_secret(name: str) -> bool:
    """Whether what is called `name` is to be kept secret: `API_KEY`, `--token`, `Authorization`."""
    return _TELLING.search(name) is not None


def without_secrets(url: str) -> str:
    """An address without login, query and fragment."""
    return _LOGIN.sub("", re.split(r"[?#]", url, maxsplit=1)[0])
