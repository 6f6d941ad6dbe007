"""What a Google-style docstring says: about the whole, and about each argument or attribute.

Rule 1: a docstring is prose. One in any other style is all description, and never an error.
"""

import inspect
import re
from typing import NamedTuple

_SECTION = re.compile(r"(?P<title>[A-Z][A-Za-z ]*):\s*$")
_NAMES = frozenset(
    {"Args", "Arguments", "Attributes", "Keyword Args", "Keyword Arguments", "Parameters"}
)
_ENDS = _NAMES | {"Raises", "Return", "Returns", "Yield", "Yields"}
_ENTRY = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>.*)")


class Docstring(NamedTuple):
    """A docstring, taken apart."""

    description: str
    """Everything before the first section that speaks of arguments, results or exceptions."""

    names: dict[str, str]
    """What is said of each argument or attribute, on one line."""


def parse_docstring(text: str | None) -> Docstring:
    """Take a docstring apart; no docstring gives an empty description."""
    if not text:
        return Docstring("", {})
    description: list[str] = []
    names: dict[str, str] = {}
    section: list[str] | None = description
    entries: list[str] = []
    for line in inspect.cleandoc(text).splitlines():
        found = _SECTION.match(line)
        if found is not None and found["title"] in _ENDS:
            section = entries if found["title"] in _NAMES else None
        elif section is entries and line and not line[0].isspace():
            # Prose that returns to the margin ends a section of names.
            section = None
        elif section is not None:
            section.append(line)
    names.update(_entries(entries))
    return Docstring("\n".join(description).strip(), names)


def _entries(lines: list[str]) -> dict[str, str]:
    """`name: text` entries whose continuation lines are indented further than the name."""
    margin = min((_indent(line) for line in lines if line.strip()), default=0)
    found: dict[str, list[str]] = {}
    texts: list[str] | None = None
    for line in lines:
        entry = _ENTRY.match(line.strip()) if _indent(line) == margin else None
        if entry is not None:
            texts = found.setdefault(entry["name"], [])
            texts.append(entry["text"])
        elif texts is not None:
            texts.append(line.strip())
    return {name: " ".join(filter(None, texts)) for name, texts in found.items()}


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
