"""Tell whether the code that a benchmark measures has changed since its numbers were recorded.

A digest of the measured folders is recorded with each table of docs/numbers.json. It ignores comments, docstrings,
imports, white space and the places of files, so that moves and other words do not outdate a number.
"""

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src" / "operations"

_CALL = ("base", "schema", "contract", "registry")
"""What every call passes through."""

_SERVED = (*_CALL, "front", "server", "tools")
MEASURED: dict[str, Sequence[str]] = {
    "core": _CALL,
    "openapi": (*_CALL, "io", "openapi"),
    "openapi_corpus": ("base", "schema", "openapi"),
    "openapi_first_use": (*_CALL, "openapi"),
    "openapi_conformance": ("openapi",),
    "serving": _SERVED,
    "mcp_serving": (*_SERVED, "mcp"),
    "hub": (*_SERVED, "mcp", "openapi"),
    "mcp_import": (*_CALL, "mcp"),
    "calls": (*_CALL, "calls", "pubsub"),
    "dispatch": (*_CALL, "calls", "pubsub"),
    "runs": ("runs", "postgres", "registry"),
    "code_mode": (*_CALL, "code"),
}
"""The measured folders of each benchmark."""


def code_of(command: str, source: Path = SOURCE) -> str | None:
    """Return a digest of the code that a command measures; None if it is no benchmark."""
    folders = MEASURED.get(command.removeprefix("scripts/bench "))
    if folders is None:
        return None
    files = (path for folder in folders for path in (source / folder).rglob("*.py"))
    digests = sorted(_digest(path.read_text("utf-8")) for path in files)
    return sha256(b"".join(digests)).hexdigest()[:16]


def outdated(tables: dict[str, Any], source: Path = SOURCE) -> list[str]:
    """Return the titles of the tables whose code has changed, and which do not say so."""
    now: dict[str, str | None] = {}
    found: list[str] = []
    for title, table in tables.items():
        command = table["command"]
        if command not in now:
            now[command] = code_of(command, source)
        if now[command] not in (None, table.get("code")) and not table.get("changed"):
            found.append(title)
    return found


@cache
def _digest(text: str) -> bytes:
    return sha256(_bare(text).encode()).digest()


def _bare(text: str) -> str:
    """Return Python code without comments, docstrings, imports and white space."""
    lines = text.splitlines(keepends=True)
    for first, start, last, end in sorted(_words(text), reverse=True):
        before, after = _cut(lines[first - 1], 0, start), _cut(lines[last - 1], end, None)
        lines[first - 1 : last] = [before + after]
    return "".join("".join(lines).split())


def _cut(line: str, start: int, end: int | None) -> str:
    """Return a part of a line by positions in UTF-8, as `ast` counts them."""
    return line.encode()[start:end].decode()


def _words(text: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield the ranges of comments, imports and texts that are statements: first line, column, last line, column."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            start = len(token.line[:column].encode())
            yield line, start, line, start + len(token.string.encode())
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0
