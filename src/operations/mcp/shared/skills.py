"""Skills (`io.modelcontextprotocol/skills`, SEP-2640): folders of files, described by an entry.

    {"uri": "skill://pdf/SKILL.md", "frontmatter": {...}, "resources": [{"uri", "digest", "size"}, ...] | "dynamic"}

Rule 1: the content of a file is used only if it has the size and the digest of its entry, and the front matter of
        `SKILL.md` is that of the entry.
"""

import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec

from operations.base.json.values import is_list, is_object, list_of, object_of, text_of
from operations.base.types import JSONObject

MANIFEST: Final = "SKILL.md"

DYNAMIC: Final = "dynamic"
"""Stands for the files of a skill that are generated."""

_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f\\]")
"""Characters that no decoded path may have."""

_MAX_DECODED: Final = 8
"""How often a path may be decoded until it stays the same."""

_PLAIN: Final = "!$&'()*+,;=:@~"
"""Characters besides letters, digits, `-`, `.` and `_` that need no encoding in a path."""

_BLOCK: Final = re.compile(r"\ufeff?---\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_KEY: Final = re.compile(
    # No two parts can match the same spaces: the time grows with the length of the line.
    r"""( *)((?:[^\s#:"'\[\]{},&*!|>%@`-]|-(?=\S))[^:#]*|"[^"]*"\s*|'[^']*'\s*):(?:\s+(.*))?$"""
)
_QUOTED: Final = re.compile(r"""\"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'""")
_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9]\d{0,17})")
_NUMBER: Final = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?")
_MAX_FRONT_MATTER: Final = 32 * 1024
"""The longest front matter in characters."""

_WORDS: Final[dict[str, Any]] = {"": None, "~": None, "null": None, "true": True, "false": False}


def digest_of(content: bytes) -> str:
    """Return the digest of a file, as an entry has it."""
    return f"sha256:{sha256(content).hexdigest()}"


def folder_of(uri: str) -> str:
    """Return the address of the folder of a skill, without a slash at its end."""
    return uri.removesuffix(MANIFEST).removesuffix("/")


def encoded(path: str) -> str:
    """Return the path of a file as that of an address; bytes that are not UTF-8 are encoded as they are."""
    return quote(path, safe=f"/{_PLAIN}", errors="surrogateescape")


def with_usual_encoding(uri: str) -> str:
    """Return an address with the names of its path encoded as `encoded` does."""
    scheme, mark, path = uri.partition("://")
    names = (unquote(each, errors="surrogateescape") for each in path.split("/"))
    usual = (quote(each, safe=_PLAIN, errors="surrogateescape") for each in names)
    return f"{scheme}{mark}{'/'.join(usual)}"


def is_inside(uri: str, folder: str) -> bool:
    """Return whether an address is below a folder also after clients have decoded it and written it as a path."""
    return uri.startswith(f"{folder}/") and all(map(_is_plain, _decodings(uri[len(folder) + 1 :])))


def _is_plain(path: str) -> bool:
    return not _UNSAFE.search(path) and not {"", ".", ".."} & set(path.split("/"))


def _decodings(path: str) -> Iterator[str]:
    """Yield a path as it is after decoding it once, twice, and so on; an unsafe one if that does not end."""
    for _ in range(_MAX_DECODED):
        decoded = unquote(path)
        yield decoded
        if decoded == path:
            return
        path = decoded
    yield ""


def misplaced(entry: JSONObject) -> str | None:
    """Return an address in the entry of a skill that leaves the folder of the skill; None if there is none."""
    uri = text_of(entry.get("uri"))
    scheme, mark, rest = uri.partition("://")
    folder = folder_of(uri)
    if not mark or not rest.endswith(f"/{MANIFEST}") or not is_inside(uri, f"{scheme}:/"):
        return uri
    resources = entry.get("resources")
    listed = [] if resources == DYNAMIC else list_of(resources)
    for address in (text_of(object_of(each).get("uri")) for each in listed):
        # A colon in the path of a file is a drive or a stream on Windows.
        paths = _decodings(address[len(folder) + 1 :])
        if not is_inside(address, folder) or any(":" in path for path in paths):
            return address
    return None


def front_matter(text: str) -> JSONObject | None:
    """Return the front matter of a `SKILL.md`; None if it has none.

    Raises:
        ValueError: If it uses YAML that skills do not need (anchors, tags, several documents), or is too long.
    """
    found = _BLOCK.match(text)
    if found is None:
        return None
    if len(found[1]) > _MAX_FRONT_MATTER:
        raise ValueError(f"cannot be read: it has more than {_MAX_FRONT_MATTER} characters")
    try:
        return _Lines(found[1].splitlines()).mapping(0)
    except RecursionError:
        raise ValueError("cannot be read: it is nested too deeply") from None


def fault_of(content: bytes, uri: str, entry: JSONObject) -> str | None:
    """Return why a file is not the one that the entry of its skill describes; None if it is.

    Args:
        content: The bytes of the file.
        uri: Its address.
        entry: The entry of its skill.
    """
    if entry.get("resources") == DYNAMIC:
        listed: JSONObject | None = {}
    else:
        files = map(object_of, list_of(entry.get("resources")))
        listed = next((each for each in files if each.get("uri") == uri), None)
    if listed is None:
        return "is not a file of its skill"
    if listed and listed.get("size") != len(content):
        return f"has {len(content)} bytes instead of {listed.get('size')}"
    if listed and listed.get("digest") != digest_of(content):
        return "has another digest than its skill states"
    if uri == entry.get("uri"):
        try:
            found = front_matter(content.decode(errors="replace"))
        except ValueError:
            # Its digest is that of the entry.
            return None
        if found != entry.get("frontmatter"):
            return "has another front matter than its skill states"
    return None


class _Lines:
    """The lines of front matter: the mappings, lists, texts and scalars of YAML."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._at = 0

    def _peek(self) -> str | None:
        """Return the next line with content."""
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.strip() and not line.lstrip().startswith("#"):
                return line
            self._at += 1
        return None

    def mapping(self, indent: int) -> JSONObject:
        """Read a mapping whose keys are indented by this number of spaces."""
        found: JSONObject = {}
        while (line := self._peek()) is not None:
            if _indent(line) < indent or (_indent(line) == indent and line.lstrip()[:2] == "- "):
                break
            match = _KEY.fullmatch(line.rstrip())
            if match is None or len(match[1]) != indent:
                raise ValueError(f"cannot be read: {line.strip()}")
            self._at += 1
            key = str(_scalar(match[2].strip()) if match[2][0] in "\"'" else match[2].strip())
            found[key] = self._value((match[3] or "").strip(), indent)
        return found

    def _value(self, text: str, indent: int) -> Any:
        """Read the value after a key, which may continue on the following lines."""
        if text[:1] in ("|", ">"):
            return self._text(text, indent)
        text = _without_comment(text)
        if text[:1] in ("&", "*", "!", "%", "@", "`"):
            raise ValueError(f"cannot be read: {text}")
        line = self._peek()
        inner = -1 if line is None else _indent(line)
        is_list = line is not None and line.lstrip().startswith(("- ", "-\n")) and inner >= indent
        if text:
            parts = [text]
            while line is not None and _indent(line) > indent and text[0] not in "\"'[{":
                # A plain scalar continues.
                parts.append(_without_comment(line.strip()))
                self._at += 1
                line = self._peek()
            return _scalar(" ".join(parts))
        if is_list:
            return self._list(inner)
        return self.mapping(inner) if inner > indent else None

    def _list(self, indent: int) -> list[Any]:
        found: list[Any] = []
        while (line := self._peek()) is not None and _indent(line) == indent:
            item = line.strip()
            if not item.startswith("- "):
                break
            self._at += 1
            rest = item[2:].strip()
            if _KEY.fullmatch(rest) is not None:
                self._at -= 1
                self._lines[self._at] = " " * (indent + 2) + rest
                found.append(self.mapping(indent + 2))
            else:
                found.append(self._value(rest, indent))
        return found

    def _text(self, style: str, indent: int) -> str:
        """Read a block of text, literal or folded."""
        taken: list[str] = []
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.strip() and _indent(line) <= indent:
                break
            taken.append(line)
            self._at += 1
        depth = min((_indent(line) for line in taken if line.strip()), default=0)
        lines = [line[depth:].rstrip("\r") for line in taken]
        text = "\n".join(lines) if style[0] == "|" else _folded(lines)
        text = text.rstrip("\n")
        return text if "-" in style else f"{text}\n" if text else ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _folded(lines: list[str]) -> str:
    text = ""
    for line in lines:
        if not line:
            text += "\n"
        else:
            text += line if not text or text.endswith("\n") else f" {line}"
    return text


def _without_comment(text: str) -> str:
    quoted = _QUOTED.match(text)
    if quoted is not None:
        return quoted[0]
    return re.split(r"\s#", text, maxsplit=1)[0].rstrip()


def _scalar(text: str) -> Any:
    """Return the value of a scalar or of a flow collection."""
    if text.startswith('"'):
        return msgspec.json.decode(text)
    if text.startswith("'"):
        if len(text) < 2 or not text.endswith("'"):
            raise ValueError(f"cannot be read: {text}")
        return text[1:-1].replace("''", "'")
    if text.startswith(("[", "{")):
        return _flow(text)
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def _flow(text: str) -> Any:
    """Return a list in one line. Mappings must be JSON."""
    if text.startswith("[") and text.endswith("]") and not set(text[1:-1]) & set("[]{}\"'"):
        items = [item.strip() for item in text[1:-1].split(",")]
        return [_scalar(item) for item in items if item]
    value = msgspec.json.decode(text)
    if not is_object(value) and not is_list(value):
        raise ValueError(f"cannot be read: {text}")
    return value
