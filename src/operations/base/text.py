"""Text helpers for messages and names: suggestions, counts, escaping, secrets, tool names.

Rule 1: the name of a tool depends on the operation id alone, not on other operations.
Rule 2: no two ids have the same name. A name that contains `__` is an id with `.` replaced by `__`; every other name
        contains a hash and no `__`.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Container, Iterable
from difflib import get_close_matches
from hashlib import sha256
from heapq import nlargest
from itertools import islice, pairwise
from textwrap import shorten
from typing import Final, Literal, TypeAlias

_TELLING = re.compile(
    r"key|token|secret|pass|pwd|auth|credential|cookie|session|signature|jwt|pin$|pat$",
    re.IGNORECASE,
)
_LONGEST, _MOST = 200, 2_000
"""Limits of `suggestion`: characters of a name, and number of known names."""

_INVISIBLE = ("Cc", "Cf", "Cn", "Co", "Cs")
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0e\uffa0\U000e0100-\U000e01ef]"
    "|(?<![\u203c-\u3299\U0001f000-\U0001faff])\ufe0f"
)
"""Characters without a picture that Python counts as printable: fillers, joiners, and variation selectors except those
of emoji."""

_SELECTOR = "\ufe0f"
"""Selects the picture of an emoji; without one before it, it is invisible."""

_LOGIN = re.compile(r"(?<=://)[^/?#]*@")


_NAMESPACE = re.compile(r".*(?:\.|__)", re.DOTALL)

SUGGESTS: Final = "Did you mean"
"""The first words of each `suggestion`."""


def suggestion(given: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the most similar name, after a space; empty if no name is similar."""
    pairs = _pairs(given[:_LONGEST])

    def alike(name: str) -> float:
        others = _pairs(name)
        return len(pairs & others) / (len(pairs) + len(others) + 1)

    # Comparing pairs of letters is cheap; only the names with the most pairs in common are compared in detail.
    likely = nlargest(10, islice(known, _MOST), key=alike)
    near = get_close_matches(given[:_LONGEST], likely, n=3, cutoff=0.6)
    found = next((name for name in near if _differ_little(given[:_LONGEST], name)), None)
    return "" if found is None else f' {SUGGESTS} "{found}"?'


def _differ_little(given: str, name: str) -> bool:
    """Return whether two names are similar without the namespace that they share."""
    namespace = _NAMESPACE.match(given)
    if namespace is not None and name.startswith(namespace[0]):
        given, name = given[namespace.end() :], name[namespace.end() :]
    return bool(get_close_matches(given, [name], cutoff=0.6))


def _pairs(name: str) -> set[tuple[str, str]]:
    return set(pairwise(f" {name.lower()}"))


def numbered_name(
    wanted: str, taken: Container[str], separator: str = "_", form: Callable[[str], str] = str
) -> str:
    """Return `wanted`, with the first free number appended if it is taken; `taken` has names in the given form."""
    name, number = wanted, 2
    while form(name) in taken:
        name, number = f"{wanted}{separator}{number}", number + 1
    return name


def enforce_lists(**values: Container[str] | Iterable[str] | None) -> None:
    """Reject a string where a list of strings is expected: iterating it would give single letters.

    Raises:
        ValueError: If it is not valid; the message names the argument, but not its value, which may be a secret.
    """
    for name, value in values.items():
        if isinstance(value, str | bytes):
            raise ValueError(f'{name} must be a list of strings, not one string: {name}=["..."]')  # noqa: TRY004


def enforce_durations(**values: float | None) -> None:
    """Reject NaN, which no comparison finds, so that a time limit would never end.

    Raises:
        ValueError: If a value is NaN; the message names the argument.
    """
    for name, value in values.items():
        if value != value:
            raise ValueError(f"{name} must be a number of seconds, not {value}")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 operation`, `2 operations`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_NEXT_SENTENCE = re.compile(r"(?<=[.!?])\s(?=[A-Z])")


def first_sentence(text: str, limit: int) -> str:
    """Return the first sentence of a text, shortened to `limit` characters at a space."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return shorten(_NEXT_SENTENCE.split(paragraph, maxsplit=1)[0], limit, placeholder="...")


def printable(text: str) -> str:
    """Return `text` on one line, with invisible characters escaped."""
    return _escaped(text, "", lambda part: ascii(part)[1:-1])


def _escaped(text: str, kept: str, escape: Callable[[str], str]) -> str:
    """Return `text` with invisible characters escaped, except those in `kept`."""
    if text.isascii() and text.isprintable():
        return text
    hidden = {
        ord(part): escape(part) for part in set(text) if not part.isprintable() and part not in kept
    }
    text = text.translate(hidden) if hidden else text
    return text if text.isascii() else _BLANK.sub(lambda match: escape(match[0]), text)


def shortened(text: str, limit: int) -> str:
    """Return `text` with at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def visible(text: str) -> str:
    """Return `text` with invisible characters escaped except line breaks and tabs, for a terminal or a log."""
    return _escaped(text, "\n\t", lambda part: ascii(part)[1:-1])


def hides_something(text: str) -> bool:
    """Return whether `text` contains control, formatting (bidirectional, zero-width) or unassigned characters."""
    line = text.replace("\n", "").replace("\r", "").replace("\t", "")
    if line.isascii() and line.isprintable():
        return False
    # Long texts have few different characters: only those in question are looked up.
    rare = "".join(each for each in set(line) if not (each.isascii() and each.isprintable()))
    if any(unicodedata.category(each) in _INVISIBLE for each in rare):
        return True
    is_doubtful = _SELECTOR in rare or _BLANK.search(rare) is not None
    return is_doubtful and _BLANK.search(line) is not None


def visible_json(text: str) -> str:
    """Return JSON text with invisible characters escaped; it has the same value."""
    return _escaped(text, "\n", lambda part: json.dumps(part)[1:-1])


def in_seconds(seconds: float) -> str:
    """Return a duration for messages: `0.25 s`, `2.5 s`, `30 s`."""
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.2g} s"


def names_a_secret(name: str) -> bool:
    """Return whether a name indicates a secret: `API_KEY`, `--token`, `Authorization`."""
    return _TELLING.search(name) is not None


def without_secrets(url: str) -> str:
    """Return a URL without user information, query and fragment."""
    return _LOGIN.sub("", re.split(r"[?#]", url, maxsplit=1)[0])


NameStyle: TypeAlias = Literal["portable", "dotted"]
"""`portable`: `[A-Za-z0-9_-]{1,64}`, which every model accepts. `dotted`: the id itself, as MCP allows."""

Disclosure: TypeAlias = Literal["auto", "tools", "code", "gateway"]
"""`tools` lists each operation as a tool, `gateway` lists four tools that find and call operations, `code` lists only
`code.search` and `code.run`, `auto` decides between the first two by size."""

TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Tool names that every model accepts."""

_DOTTED: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST_NAME: Final = 256
_HASH: Final = 8
_LONGEST_TOOL_NAME: Final = 64


def tool_name(operation_id: str, style: NameStyle = "portable") -> str:
    """Return the name of an operation as a tool.

    `portable` replaces `.` by `__`, and adds a hash if the result is too long or ambiguous: if the id contains `__`,
    `_.` or characters that are not allowed in a name. `dotted` is the id itself, if MCP allows it as a name.
    """
    if style == "dotted" and _DOTTED.fullmatch(operation_id):
        return operation_id
    name = operation_id.replace(".", "__")
    if TOOL_NAME.fullmatch(name) and name.replace("__", ".") == operation_id != name:
        return name
    digest = sha256(operation_id.encode()).hexdigest()[:_HASH]
    words = re.sub(r"[^A-Za-z0-9-]+", "_", operation_id)[: _LONGEST_TOOL_NAME - _HASH - 1]
    return f"{words.rstrip('_')}_{digest}"


def safe_name(name: str) -> str:
    """Return `name` as the name of an operation: characters other than letters, digits, `_`, `-` and `.` become `_`.

    Raises:
        ValueError: If it is empty, too long, or contains invisible characters.
    """
    if not name or len(name) > _LONGEST_NAME:
        raise ValueError(f"its name has {len(name)} characters")
    if not name.isprintable():
        raise ValueError("its name contains invisible characters")
    return _UNSAFE.sub("_", name)


def safe_namespace(name: str) -> str:
    """Return `name` as a namespace.

    Raises:
        ValueError: As `safe_name`.
    """
    return safe_name(name)[:128].replace(".", "_")
