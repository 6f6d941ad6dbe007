"""The lines of the keys in a TOML file, which the standard library's reader does not report.

Rule 1: this is for error messages. It reads any text without complaint and may know less than there is: a key
        inside an inline table or a long list has the line of the value it belongs to.
"""

import re
from collections.abc import Iterator

from operations._derive import KeyPath as Path

_KEY = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*(\.|=|\]|$)""")
_HEADER = re.compile(r"\s*(\[\[?)")
_TOKEN = re.compile(
    r'"{3}.*?(?<!\\)"{3}|\'{3}.*?\'{3}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}\n]',
    re.DOTALL,
)


class Places:
    """The lines of the keys in one text."""

    def __init__(self, text: str) -> None:
        self._lines: dict[Path, int] = {}
        tables: dict[Path, int] = {}
        table: Path = ()
        for number, line in _statements(text):
            header = _HEADER.match(line)
            if header is None:
                self._note(table + _keys(line), number)
                continue
            table = _keys(line[header.end() :])
            table = _inside(table, tables)
            if header[1] == "[[":
                tables[table] = tables.get(table, -1) + 1
                table += (tables[table],)
            self._note(table, number)

    def line(self, path: Path) -> int | None:
        """The line of a key, or of the nearest thing around it that has one, counted from 1."""
        while path:
            if path in self._lines:
                return self._lines[path]
            path = path[:-1]
        return None

    def _note(self, path: Path, number: int) -> None:
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], number)


def _inside(table: Path, tables: dict[Path, int]) -> Path:
    """`table` below the last item of each list of tables it names."""
    inside: Path = ()
    for position, key in enumerate(table):
        inside += (key,)
        if inside in tables and position < len(table) - 1:
            inside += (tables[inside],)
    return inside


def _keys(text: str) -> Path:
    """The dotted key a statement begins with."""
    keys: list[str | int] = []
    position, more = 0, True
    while more and (found := _KEY.match(text, position)):
        keys.append(next(part for part in found.groups()[:3] if part is not None))
        position, more = found.end(), found[4] == "."
    return tuple(keys)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Each statement by the line it begins on; a value may go on over several lines."""
    number = start = 1
    depth = begin = 0
    for token in _TOKEN.finditer(text + "\n"):
        found = token[0]
        if found in "[{":
            depth += 1
        elif found in "]}":
            depth -= 1
        elif found == "\n":
            number += 1
            if depth <= 0:
                if statement := text[begin : token.start()].strip():
                    yield start, statement
                start, begin, depth = number, token.end(), 0
        else:
            number += found.count("\n")
