"""Makes one document of several: the files, or addresses, that a document refers to.

Rule: references resolve inside the document's own folder, or its own origin and folder, and never outside. What
lies outside is not read; what refers to it leads nowhere.
"""

import asyncio
import inspect
import posixpath
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from operations._json import escape, list_of, object_of
from operations._words import without_secrets
from operations.errors import DocumentError
from operations.openapi.reading.texts import decode_document
from operations.types import JSONObject

MAX_FILES = 500

BUNDLED = "x-bundled-files"
"""Where other files stand in the one document."""

_REFERENCE = re.compile(rb"""\$ref["']?\s*:\s*["']?[^"'#{\[\s]""")
"""A reference that does not begin with `#`, in JSON or YAML."""

Fetch = Callable[[str], Awaitable[bytes | str]]
Locate = Callable[[str, str], str | None]


async def bundle_files(
    path: Path, read: Callable[[str], Any] | None, *, root: str | None, max_bytes: int
) -> Any:
    """The document at `path` with the files it refers to.

    Raises:
        DocumentError: If one cannot be read, or they are too many or too large.
    """
    folder = Path(root) if root is not None else path.parent

    async def fetch(name: str) -> bytes | str:
        try:
            if read is not None:
                content: Any = read(name)
                return await content if inspect.isawaitable(content) else content  # type: ignore[no-any-return]
            return await asyncio.to_thread(_read_inside, Path(name), folder, path, max_bytes)
        except OSError as error:
            raise DocumentError(f"{name} cannot be read: {error.strerror or error}") from error

    def locate(base: str, ref: str) -> str | None:
        if urlsplit(ref).scheme or ref.startswith(("/", "\\")):
            return None
        target = posixpath.normpath(posixpath.join(posixpath.dirname(base), unquote(ref)))
        inside = posixpath.normpath(folder.as_posix())
        return target if _is_inside(target, inside) else None

    return await _bundle(path.as_posix(), fetch, locate, max_bytes)


def _read_inside(path: Path, folder: Path, document: Path, max_bytes: int) -> bytes:
    """A file's content, unless a symbolic link leads out of `folder`."""
    if path != document and not path.resolve().is_relative_to(folder.resolve()):
        raise DocumentError(f"{path} is outside of the document's folder")
    if path.stat().st_size > max_bytes:
        raise DocumentError(f"{path} is larger than {max_bytes} bytes")
    return path.read_bytes()


def _is_inside(target: str, folder: str) -> bool:
    if folder == ".":
        return not target.startswith(("../", "/")) and target != ".."
    return target.startswith(folder.rstrip("/") + "/")


async def bundle_urls(url: str, fetch: Fetch, *, max_bytes: int) -> Any:
    """The document at `url` with those it refers to, of the same origin and folder.

    Raises:
        DocumentError: If one cannot be fetched, or they are too many or too large.
    """
    own = urlsplit(url)
    folder = posixpath.dirname(own.path) or "/"

    def locate(base: str, ref: str) -> str | None:
        target = urlsplit(urljoin(base, ref))
        if (target.scheme, target.netloc) != (own.scheme, own.netloc):
            return None
        path = posixpath.normpath(unquote(target.path))
        if "\\" in path or not _is_inside(path, folder):
            return None
        return target._replace(fragment="").geturl()

    return await _bundle(url, fetch, locate, max_bytes)


async def _bundle(root: str, fetch: Fetch, locate: Locate, max_bytes: int) -> Any:
    content = await fetch(root)
    size = len(content)
    try:
        document = await asyncio.to_thread(decode_document, content, max_bytes=max_bytes)
    except DocumentError as error:
        raise DocumentError(f"{shown(root)}: {error}") from None
    raw = content.encode() if isinstance(content, str) else content
    if _REFERENCE.search(raw) is None:
        # Nearly every document is one file, and needs no walk.
        return document
    files: dict[str, Any] = {root: document}
    waiting = [root]
    while waiting:
        name = waiting.pop()
        for ref in _foreign(files[name]):
            target = locate(name, ref)
            if target is None or target in files:
                continue
            if len(files) >= MAX_FILES:
                raise DocumentError(f"the document spans more than {MAX_FILES} files")
            try:
                content = await fetch(target)
                size += len(content)
                found = await asyncio.to_thread(decode_document, content, max_bytes=max_bytes)
            except DocumentError:
                # Costs what refers to it, not the document.
                continue
            if size > max_bytes:
                raise DocumentError(f"the document's files are larger than {max_bytes} bytes")
            files[target] = found
            waiting.append(target)
    if len(files) == 1:
        return document
    return _joined(root, files, locate)


def shown(name: str) -> str:
    """A file's path, or an address without its secrets."""
    return without_secrets(name) if "://" in name else name


def _foreign(document: Any) -> list[str]:
    """The files that references in `document` name, each once."""
    found: dict[str, None] = {}
    stack: list[Any] = [document]
    while stack:
        node = stack.pop()
        members = object_of(node)
        ref = members.get("$ref")
        if isinstance(ref, str) and not ref.startswith("#"):
            found[ref.partition("#")[0]] = None
        stack.extend(members.values())
        stack.extend(list_of(node))
    return list(found)


def _joined(root: str, files: dict[str, Any], locate: Locate) -> JSONObject:
    """One document: the root's, with the others inside and every reference pointing at its new place."""

    def moved(node: Any, name: str) -> Any:
        if type(node) is dict:
            result = {key: moved(item, name) for key, item in object_of(node).items()}
            ref = result.get("$ref")
            if isinstance(ref, str):
                result["$ref"] = place(ref, name)
            return result
        if type(node) is list:
            return [moved(item, name) for item in list_of(node)]
        return node

    def place(ref: str, name: str) -> str:
        file, _, fragment = ref.partition("#")
        target = locate(name, file) if file else name
        if target is None or target not in files:
            return ref
        if target == root:
            return "#" + fragment
        return f"#/{BUNDLED}/{escape(target).replace('%', '%25')}{fragment}"

    result = object_of(moved(files[root], root))
    result[BUNDLED] = {name: moved(node, name) for name, node in files.items() if name != root}
    return result
