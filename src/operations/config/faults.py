"""Explain what is wrong with a config file to the person who has to repair it.

Rule 1: a fault names the place (file, line, key), what was expected, and what was probably meant.
Rule 2: no fault shows a value: it may be a secret in the wrong place.
Rule 3: finding the lines of keys never fails. A key inside an inline table or a long list has the line of its value.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from operations._derive import KeyPath as Path
from operations._references import followed
from operations._text import suggestion
from operations.errors import OperationsError
from operations.schema import ValidationIssue
from operations.types import JSONObject

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
            table = _below_last_items(table, tables)
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


def _below_last_items(table: Path, tables: dict[Path, int]) -> Path:
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


_SECRETS = frozenset({"Secret", "Credential"})
_BY_NAME = '{ env = "NAME" } or { file = "PATH" }'


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """One thing to repair."""

    file: str

    line: int | None
    """Counted from 1; None where the fault has no place of its own."""

    key: str
    """The key as one would write it, `serve.port`; empty for the whole file."""

    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.key} {self.message}" if self.key else f"{place}: {self.message}"


class ConfigError(OperationsError, ValueError):
    """A config file cannot be used as it is.

    Attributes:
        faults: Everything that is wrong, in the order of the file.
    """

    def __init__(self, faults: Iterable[ConfigFault]) -> None:
        self.faults = sorted(faults, key=lambda fault: fault.line or 0)
        super().__init__("\n".join(map(str, self.faults)))


def written(path: Path) -> str:
    """A path as a key in TOML."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = part.replace("-", "").replace("_", "").isalnum() and part.isascii()
            text += ("." if text else "") + (part if plain else f'"{part}"')
    return text


class Wording:
    """Explains why a document does not fit the schema of the file."""

    def __init__(self, schema: JSONObject, document: JSONObject) -> None:
        self._schema = schema
        self._document = document

    def message(self, path: Path, fault: ValidationIssue) -> str:
        """Return the explanation of one failure at `path`."""
        match fault.keyword:
            case "additionalProperties":
                return self._unknown(path)
            case "required":
                about = self._at(path).get("description", "")
                return f"is missing. {about}" if about else "is missing."
            case "enum":
                near = suggestion(str(self._given(path)), self._at(path).get("enum", ()))
                return f"{fault.message}.{near}"
            case "pattern" if path[-1] == "sha256":
                return "must be the 64 hexadecimal digits of a SHA-256."
            case "type" | "anyOf":
                return self._wrong_type(path, fault)
            case _:
                return f"{fault.message}."

    def _unknown(self, path: Path) -> str:
        key, options = str(path[-1]), self._options(self._at(path[:-1]))
        known = [name for option in options for name in option.get("properties", ())]
        if near := suggestion(key, known):
            return f"is not a known key.{near}"
        if homes := [home for home in self._homes(key) if home != written(path)]:
            return f'is not a known key here. Did you mean "{homes[0]}"?'
        return f"is not a known key. Known here: {', '.join(known)}."

    def _homes(self, key: str) -> Iterator[str]:
        """Where a key of this name would be at home, one table down."""
        for name, schema in self._schema["properties"].items():
            if key in followed(schema, self._schema)[0].get("properties", ()):
                yield f"{name}.{key}"

    def _wrong_type(self, path: Path, fault: ValidationIssue) -> str:
        expected = self._at(path)
        options = self._options(expected) if "anyOf" in expected else []
        titles = {option.get("title") for option in options}
        if expected.get("title") in _SECRETS and isinstance(self._given(path), str):
            return f"must be {_BY_NAME}: secrets do not stand in this file."
        if titles & _SECRETS:
            words = [f'"{word}"' for option in options for word in option.get("enum", ())]
            return f"must be {' or '.join(words) or 'a string'}, or {_BY_NAME}."
        # TOML calls them by other names.
        message = fault.message.replace("an object", "a table").replace("an array", "a list")
        if expected.get("type") == "object":
            return f"{message}. Write it as [{written(path)}]."
        if expected.get("type") == "array":
            return f"{message}. Put it in brackets: [ ... ]."
        return f"{message}."

    def _given(self, path: Path) -> Any:
        value: Any = self._document
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def _options(self, schema: JSONObject) -> list[JSONObject]:
        """Return the alternatives of a schema; itself if it has none."""
        return [followed(each, self._schema)[0] for each in schema.get("anyOf", (schema,))]

    def _at(self, path: Path) -> JSONObject:
        """The schema of what stands at `path`; empty where nothing is known of it."""
        schema = self._schema
        for part in path:
            found = [inner for each in self._options(schema) if (inner := _inside(each, part))]
            schema = followed(found[0], self._schema)[0] if found else {}
        return schema


def _inside(schema: JSONObject, part: str | int) -> JSONObject:
    """Return the schema of one item or property; empty if it has none."""
    rest: Any = schema.get("items" if isinstance(part, int) else "additionalProperties")
    found: JSONObject = schema.get("properties", {}).get(part, rest or {})
    return found
