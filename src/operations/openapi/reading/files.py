"""Read a document (JSON or YAML 1.2) and the files or addresses that it refers to.

Rule 1: references are resolved only inside the document's own folder or, for an address, its own origin and folder.
Rule 2: files are named by their paths relative to the document, so that results are the same on every machine.
Rule 3: a file that cannot be read affects only the parts that refer to it; the reason is recorded.
"""

import asyncio
import codecs
import inspect
import posixpath
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import is_not
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from operations.base.errors import DocumentError
from operations.base.json.decoding import decode_json
from operations.base.json.references import objects_in, reference_of
from operations.base.json.values import (
    MAX_DOCUMENT_DEPTH,
    MAX_DOCUMENT_VALUES,
    JSONLimitError,
    JSONValueError,
    escape,
    is_list,
    is_object,
    object_of,
)
from operations.base.text import without_secrets
from operations.base.types import JSONObject
from operations.openapi.reading.memory import ENTRY, ExpandsError, MemoryBudget
from operations.openapi.reading.references import BUNDLED, bundled

PARALLEL = 16
"""The number of files that are read or fetched concurrently."""

_REFERENCE = re.compile(rb"""\$ref["']?\s*:\s*["']?[^"'#{\[\s]""")
"""A reference that does not begin with `#`, in JSON or YAML."""

Fetch = Callable[[str], Awaitable[bytes]]
Locate = Callable[[str, str], str | None]


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """The limits of one document, all files together."""

    max_bytes: int
    max_files: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """A document combined from several files."""

    document: Any

    missing: dict[str, str] = field(default_factory=dict[str, str])
    """The reasons why files could not be read, by path relative to the document."""

    memory: MemoryBudget = field(default_factory=MemoryBudget)
    """The memory that the rest of the import may take."""


async def bundle_files(
    path: Path,
    read: Callable[[str], Any] | None,
    *,
    root: str | Path | None,
    limits: DocumentLimits,
) -> Bundle:
    """Return the document at `path` with the files it refers to.

    Raises:
        DocumentError: If it cannot be read, or its files are too many or too large.
    """
    folder = Path(root) if root is not None else path.parent

    async def fetch(name: str) -> bytes:
        try:
            if read is not None:
                content: Any = read(name)
                content = await content if inspect.isawaitable(content) else content
                is_text = isinstance(content, str)
                return content.encode("utf-8", "surrogatepass") if is_text else content  # type: ignore[no-any-return]
            return await asyncio.to_thread(_read_inside, Path(name), folder, path, limits.max_bytes)
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
        except _OutsideError as error:
            reason = str(error)
        # Only the document itself is shown with its full path.
        is_root = name == path.as_posix()
        raise DocumentError(f"{name if is_root else _relative(name, path.as_posix())} {reason}")

    def locate(base: str, ref: str) -> str | None:
        if urlsplit(ref).scheme or ref.startswith(("/", "\\")):
            return None
        target = posixpath.normpath(posixpath.join(posixpath.dirname(base), unquote(ref)))
        inside = posixpath.normpath(folder.as_posix())
        return target if _is_inside(target, inside) else None

    return await _Bundler(path.as_posix(), fetch, locate, limits).bundle()


def _read_inside(path: Path, folder: Path, document: Path, max_bytes: int) -> bytes:
    """Return the content of a file, unless it is outside of `folder` after resolving links."""
    if path != document and not path.resolve().is_relative_to(folder.resolve()):
        raise _OutsideError("is outside of the document's folder")
    if path.stat().st_size > max_bytes:
        raise _OutsideError(f"is larger than {max_bytes} bytes")
    return path.read_bytes()


class _OutsideError(Exception):
    """Raised for a file that may not be read; the message does not contain its name."""


def _is_inside(target: str, folder: str) -> bool:
    if folder == ".":
        return not target.startswith(("../", "/")) and target != ".."
    return target.startswith(folder.rstrip("/") + "/")


async def bundle_urls(url: str, fetch: Fetch, *, limits: DocumentLimits) -> Bundle:
    """Return the document at `url`, with the documents of the same origin and folder that it refers to.

    Raises:
        DocumentError: If it cannot be fetched, or its files are too many or too large.
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

    return await _Bundler(url, fetch, locate, limits).bundle()


def shown_location(name: str) -> str:
    """Return a file's path, or an address without its secrets."""
    return without_secrets(name) if "://" in name else name


def _relative(name: str, root: str) -> str:
    """Return the path of a file relative to the document's folder."""
    if "://" not in name:
        return posixpath.relpath(name, posixpath.dirname(root) or ".")
    there = urlsplit(name)
    path = posixpath.relpath(unquote(there.path), posixpath.dirname(urlsplit(root).path) or "/")
    return f"{path}?{there.query}" if there.query else path


@dataclass(slots=True)
class _Bundler:
    """Reads one document and all files that it refers to."""

    root: str
    """The path, or address, of the document."""

    fetch: Fetch
    """Reads a file."""

    locate: Locate
    """Returns the file for a reference in another file; None if it may not be read."""

    limits: DocumentLimits
    _files: dict[str, Any] = field(default_factory=dict[str, Any])
    _missing: dict[str, str] = field(default_factory=dict[str, str])
    _size: int = 0
    _memory: MemoryBudget = field(default_factory=MemoryBudget)
    _slots: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, PARALLEL))

    async def bundle(self) -> Bundle:
        root = self.root
        content = await self.fetch(root)
        document = await self._decode(shown_location(root), content)
        if _REFERENCE.search(content) is None:
            # Nearly every document is a single file without references to other files.
            return Bundle(document, memory=self._memory)
        self._files[root] = document
        waiting = self._referred([root])
        while waiting:
            if len(self._files) + len(waiting) > self.limits.max_files:
                raise DocumentError(
                    f"{shown_location(root)}: it spans more than {self.limits.max_files} files:"
                    " set max_document_files"
                )
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._load(name)) for name in waiting]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            for name, task in zip(waiting, tasks, strict=True):
                found = task.result()
                if isinstance(found, DocumentError):
                    self._missing[name] = str(found)
                else:
                    self._files[name] = found
            waiting = self._referred(name for name in waiting if name in self._files)
        missing = {self._relative(name): reason for name, reason in self._missing.items()}
        return Bundle(await asyncio.to_thread(self._joined), missing, self._memory)

    async def _load(self, name: str) -> Any:
        """Return the content of a file, or the reason why it cannot be read."""
        async with self._slots:
            try:
                content = await self.fetch(name)
                return await self._decode(self._relative(name), content)
            except (_TooLargeError, ExpandsError):
                raise
            except DocumentError as error:
                return error

    async def _decode(self, name: str, content: bytes) -> Any:
        self._size += len(content)
        max_bytes = self.limits.max_bytes
        if self._size > max_bytes:
            raise _TooLargeError(
                f"{shown_location(self.root)}: its files are larger than {max_bytes} bytes"
            )
        try:
            self._memory.add(len(content))
            return await asyncio.to_thread(decode_document, content, self._memory)
        except ExpandsError as error:
            raise ExpandsError(f"{name}: {error}") from None
        except DocumentError as error:
            raise DocumentError(f"{name}: {error}") from None

    def _referred(self, names: Iterable[str]) -> list[str]:
        """Return the unread files that the given files refer to, without duplicates."""
        found: dict[str, None] = {}
        for name in names:
            for node in objects_in(self._files[name]):
                ref = reference_of(node)
                if ref is not None and not ref.startswith("#"):
                    target = self._target(name, ref.partition("#")[0])
                    if target and target not in self._files and target not in self._missing:
                        found[target] = None
        return list(found)

    def _target(self, name: str, ref: str) -> str | None:
        """Return the file that a reference names; None if it may not be read, or if no file can have this name."""
        try:
            target = self.locate(name, ref)
        except ValueError:
            return None
        return None if target is None or "\0" in target else target

    def _relative(self, name: str) -> str:
        return _relative(name, self.root)

    def _joined(self) -> JSONObject:
        """Return the root document, with the others inside it and every reference adjusted."""
        result = object_of(self._moved(self._files[self.root], self.root))
        others = {
            self._relative(name): self._moved(node, name)
            for name, node in self._files.items()
            if name != self.root
        }
        return {**result, BUNDLED: others} if others else result

    def _moved(self, node: Any, name: str) -> Any:
        """Return a part of a file with every reference adjusted; parts without references are not copied."""
        if is_object(node):
            moved = {
                key: item
                for key, given in node.items()
                if (item := self._moved(given, name)) is not given
            }
            ref = reference_of(node)
            if ref is not None and (place := self._place(ref, name)) != ref:
                moved["$ref"] = place
                self._memory.spend(len(place))
            if not moved:
                return node
            self._memory.spend(ENTRY * len(node))
            return {**node, **moved}
        if is_list(node):
            items = [self._moved(item, name) for item in node]
            return items if any(map(is_not, items, node)) else node
        return node

    def _place(self, ref: str, name: str) -> str:
        """Return the position of a reference's target in the combined document."""
        file, _, fragment = ref.partition("#")
        target = self._target(name, file) if file else name
        if target is None or (target not in self._files and target not in self._missing):
            return ref
        if target == self.root:
            return "#" + fragment
        if fragment and not fragment.startswith("/"):
            fragment = "#" + fragment
        return bundled(escape(self._relative(target))) + fragment


class _TooLargeError(DocumentError):
    """Raised when all files together exceed the limit."""


MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks: UTF-32 before UTF-16, whose marks have the same beginning."""


_OBJECT = 180
_BYTE = 18
"""The most memory in bytes that an object in JSON takes beyond its text, and that a byte of any value takes."""


def decode_document(raw: bytes, memory: MemoryBudget | None = None) -> Any:
    """Return the content of a file, JSON or YAML, as JSON builtins.

    Args:
        raw: The content.
        memory: The memory that the value may take; by default as for a document of this file alone.

    Raises:
        DocumentError: If it is neither JSON nor YAML.
        MissingExtraError: If it is YAML, and the extra for it is not installed.
    """
    if memory is None:
        memory = MemoryBudget(len(raw))
    for mark, encoding in MARKS:
        if raw.startswith(mark):
            raw = raw[len(mark) :].decode(encoding, "replace").encode()
            break
    if raw.lstrip()[:1] in (b"{", b"["):
        memory.spend(_OBJECT * raw.count(b"{") + _BYTE * len(raw))
        try:
            return decode_json(raw, max_values=MAX_DOCUMENT_VALUES, max_depth=MAX_DOCUMENT_DEPTH)
        except JSONLimitError as error:
            raise DocumentError(error.reason) from None
        except JSONValueError:
            pass  # YAML's flow style begins with the same characters
    from operations.openapi.reading.yaml import decode_yaml  # noqa: PLC0415 - needs an extra

    try:
        return decode_yaml(raw.decode(), memory)
    except UnicodeDecodeError:
        raise DocumentError("not UTF-8 text") from None
    except RecursionError:
        raise DocumentError("nested too deeply") from None
