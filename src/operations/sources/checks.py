"""What several kinds of sources share: checks of tables, and names.

A check yields keys with messages, which never show a value.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import SplitResult, urlsplit

from operations.contract.options import KeyPath
from operations.contract.specs import NAMESPACE

Found: TypeAlias = Iterator[tuple[KeyPath, str]]

_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})


def namespace(name: str, path: KeyPath) -> Found:
    """Check that a name can be the namespace of operations."""
    if not NAMESPACE.fullmatch(name):
        yield path, "is not a namespace: use letters, digits, '_' and '-'."


def headers(given: Mapping[str, Any], path: KeyPath) -> Found:
    """Check that no header contains a secret."""
    for name, value in given.items():
        if isinstance(value, str) and name.lower() in _SECRET_HEADERS:
            yield (
                (*path, name),
                'is a secret: write { env = "NAME" } or { file = "PATH" } instead of its value.',
            )


def split(url: str) -> SplitResult:
    """Return the parts of an address; empty parts if it has none."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def name_of(word: str) -> str:
    """Return a name for a source: the host of an address, or the name of a file without its suffix.

    Raises:
        ValueError: If it looks like an address and is none.
    """
    own = urlsplit(word).hostname if "://" in word else Path(word).stem
    return re.sub(r"[^A-Za-z0-9_-]+", "_", own or "").strip("_")[:64]


def web_address(url: str, path: KeyPath) -> Found:
    """Check an address of HTTP, which contains no login."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        yield path, "is not an address."
        return
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        yield path, "must be an address that begins with http:// or https://."
    elif parts.username or parts.password:
        advice = (
            'write the whole address as { env = "NAME" }'
            if path[-1] == "proxy"
            else "move it to auth or headers"
        )
        yield path, f"contains a login: {advice}."
