"""Send content from files and save responses to files, in pieces.

Rule 1: code in this process passes a `Path` or an open file. A text can only name a file below `FilesRoot`.
Rule 2: paths below `FilesRoot` must be relative, without `..` and links, and only regular files are opened.
Rule 3: a response is saved to a temporary file, which is renamed when it is complete.
"""

import asyncio
import errno
import inspect
import os
import stat
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, TypeAlias

from operations.base.errors import CallError, ErrorCode, invalid_argument

CHUNK = 1 << 18
_STEP = 1 << 20
"""Bytes between two reports of progress."""

_LONGEST_NAME = 200
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)

Progress: TypeAlias = Callable[[float, float | None, str | None], Awaitable[None]]
Write: TypeAlias = Callable[[bytes], Awaitable[Any]]


def is_file_value(value: Any) -> bool:
    """Return whether a value is content, a path or an open file, which only code in this process can pass."""
    return isinstance(value, (bytes, bytearray, memoryview, Path)) or callable(
        getattr(value, "read", None)
    )


def is_target_value(value: Any) -> bool:
    """Return whether a value is a path or an open file to save to."""
    return isinstance(value, Path) or callable(getattr(value, "write", None))


async def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of a file in a thread; await a method of an asynchronous file."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def refused(name: str, reason: str) -> CallError:
    """Return the error for an argument that does not name a usable file."""
    return invalid_argument("/" + name, f"{name!r}: {reason}", "file")


# ------------------------------------------------------------ sending


@dataclass(slots=True)
class FileContent:
    """The content of one file to send."""

    opener: Callable[[], Any]
    """Opens the file at its beginning."""

    filename: str = ""

    size: int | None = None
    """The size in bytes; None if unknown."""

    is_ours: bool = True
    """Whether the file is closed after it was read."""

    is_repeatable: bool = True
    """Whether the content can be read more than once."""

    @classmethod
    def of(cls, value: Any, name: str) -> "FileContent":
        """Return the content of a path or an open file.

        Args:
            value: The path or file.
            name: The argument, for errors.

        Raises:
            CallError: `VALIDATION_ERROR` if there is no such file.
        """
        if isinstance(value, Path):
            try:
                found = value.stat()
            except OSError as error:
                raise refused(name, f"{value} cannot be read: {error.strerror}") from error
            if stat.S_ISDIR(found.st_mode):
                raise refused(name, f"{value} is a folder")
            size = found.st_size if stat.S_ISREG(found.st_mode) else None
            return cls(lambda: value.open("rb"), filename=value.name, size=size)
        own_name = getattr(value, "name", "")
        filename = Path(own_name).name if isinstance(own_name, str) else ""
        start, size = _start_of(value), None
        if start is not None:
            # Some files have no known end, and the methods of some return nothing.
            with suppress(OSError, AttributeError, ValueError, TypeError):
                size = value.seek(0, os.SEEK_END) - start
                value.seek(start)

        def opener() -> Any:
            if start is not None:
                value.seek(start)
            return value

        return cls(
            opener, filename=filename, size=size, is_ours=False, is_repeatable=start is not None
        )

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the content; exactly `size` bytes if the size is known.

        Raises:
            CallError: `EXECUTION_ERROR` if the file cannot be read, or has become shorter.
        """
        try:
            file: Any = await _run(self.opener)
            try:
                left = self.size
                while left is None or left > 0:
                    chunk = await _run(file.read, CHUNK if left is None else min(CHUNK, left))
                    if not chunk:
                        break
                    if isinstance(chunk, str):
                        raise _unreadable("it is open as text, not as bytes")
                    if left is not None:
                        left -= len(chunk)
                        if left == 0:
                            # A reader that knows the size does not read past the last chunk, so check the size here.
                            await self._close(file)
                    yield bytes(chunk)
                if left:
                    raise _unreadable("it became shorter while it was sent")
            finally:
                await self._close(file)
        except OSError as error:
            raise _unreadable(error.strerror or type(error).__name__) from error

    async def _close(self, file: Any) -> None:
        if self.is_ours:
            await _run(file.close)


def _start_of(file: Any) -> int | None:
    """Return the position of an open file; None if it cannot be read or written again from there."""
    with suppress(OSError, AttributeError, ValueError, TypeError):
        if file.seekable():
            return int(file.tell())
    return None


def _unreadable(reason: str) -> CallError:
    return CallError(ErrorCode.EXECUTION_ERROR, f"The file to send cannot be read: {reason}.")


class StreamedBody:
    """A request body that consists of files and the bytes between them.

    Attributes:
        size: The size in bytes; None if unknown.
        is_repeatable: Whether the body can be sent more than once.
        failure: The error that ended the last attempt to send it.
        progress: Receives the number of bytes sent.
    """

    def __init__(self, pieces: Sequence[bytes | FileContent]) -> None:
        self._pieces = pieces
        sizes = [len(each) if isinstance(each, bytes) else each.size for each in pieces]
        self.size = None if None in sizes else sum(size for size in sizes if size is not None)
        files = [each for each in pieces if not isinstance(each, bytes)]
        self.is_repeatable = all(file.is_repeatable for file in files)
        self.failure: CallError | None = None
        self.progress: Progress | None = None

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body from its beginning."""
        self.failure = None
        counter = Counter(self.size, self.progress, "sent")
        try:
            for piece in self._pieces:
                if isinstance(piece, bytes):
                    await counter.add(len(piece))
                    yield piece
                    continue
                async with aclosing(piece.chunks()) as chunks:
                    async for chunk in chunks:
                        await counter.add(len(chunk))
                        yield chunk
        except CallError as error:
            self.failure = error
            raise
        await counter.finish()


class Counter:
    """Counts bytes and reports them from time to time."""

    def __init__(self, total: int | None, progress: Progress | None, word: str) -> None:
        self.count = 0
        self._total = total
        self._progress = progress
        self._word = word
        self._reported = 0

    async def add(self, size: int) -> None:
        """Count `size` more bytes."""
        self.count += size
        if self.count - self._reported >= _STEP or self.count == self._total:
            await self.finish()

    async def finish(self) -> None:
        """Report the number of bytes so far, unless it was already reported."""
        if self._progress is not None and self.count > self._reported:
            self._reported = self.count
            await self._progress(self.count, self._total, f"{self.count:,} bytes {self._word}")


# ------------------------------------------------------------ saving


@dataclass(frozen=True, slots=True)
class Target:
    """A file to save a response to."""

    open: Callable[[], AbstractAsyncContextManager[Write]]
    """Opens the file; leaving the block without an error completes it."""

    is_repeatable: bool = True
    """Whether a second attempt can start from the beginning."""


def file_target(given: Any, name: str) -> Target:
    """Return the target for a path, whose file is replaced, or for an open file of this process.

    Raises:
        CallError: `VALIDATION_ERROR` if no file can have the path in the argument `name`.
    """
    if isinstance(given, Path):
        if given.is_dir() or not given.parent.is_dir():
            raise refused(name, f"{given} is a folder, or is not in an existing folder")
        # A device or a pipe cannot be replaced by renaming.
        is_special = given.exists() and not given.is_file()
        return Target(partial(_to_device if is_special else _to_path, given))
    start = _start_of(given)
    return Target(partial(_to_file, given, start), is_repeatable=start is not None)


@asynccontextmanager
async def _to_device(path: Path) -> AsyncGenerator[Write]:
    async with _written(await asyncio.to_thread(path.open, "wb")) as write:
        yield write


@asynccontextmanager
async def _to_path(path: Path) -> AsyncGenerator[Write]:
    part = path.with_name(_part_name(path.name))
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS, 0o666)
    try:
        async with _written(os.fdopen(fd, "wb")) as write:
            yield write
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


@asynccontextmanager
async def _to_file(file: Any, start: int | None) -> AsyncGenerator[Write]:
    if start is not None:
        file.seek(start)
        file.truncate()
    yield partial(_run, file.write)
    if hasattr(file, "flush"):
        await _run(file.flush)


@asynccontextmanager
async def _written(file: BinaryIO) -> AsyncGenerator[Write]:
    try:
        yield partial(_run, file.write)
    finally:
        await asyncio.to_thread(file.close)


def _part_name(name: str) -> str:
    return f".{name[:_LONGEST_NAME]}.{token_hex(8)}.part"


_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def from_base64(text: bytes) -> bytes:
    """Return the bytes of a text in base64 or base64url; the padding at the end is optional.

    Raises:
        ValueError: If it is neither.
    """
    return b64decode(text.translate(_URL_SAFE) + b"=" * (-len(text) % 4), validate=True)


async def save(
    chunks: AsyncIterator[bytes], write: Write, counter: Counter, limit: int, seconds: float
) -> int:
    """Write a body as it arrives; return its size.

    Args:
        chunks: The body.
        write: Receives the bytes.
        counter: Counts the bytes saved.
        limit: The largest size to accept.
        seconds: The longest time without a byte.

    Raises:
        CallError: `RESOURCE_EXHAUSTED` if the limit is exceeded or the disk is full, `TIMEOUT` if no data arrives.
    """
    while True:
        try:
            async with asyncio.timeout(seconds):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise CallError(
                ErrorCode.TIMEOUT, f"Nothing of the response arrived for {seconds:g} seconds."
            ) from None
        if chunk is None:
            break
        if counter.count + len(chunk) > limit:
            raise CallError(
                ErrorCode.RESOURCE_EXHAUSTED, f"The response is larger than {limit} bytes."
            )
        try:
            await write(chunk)
        except OSError as error:
            code = (
                ErrorCode.RESOURCE_EXHAUSTED
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                else ErrorCode.EXECUTION_ERROR
            )
            raise CallError(code, f"The file cannot be written: {error.strerror}.") from error
        await counter.add(len(chunk))
    await counter.finish()
    return counter.count


# ------------------------------------------------------------ files below a folder


class FilesRoot:
    """The folder in which callers may name files by relative paths.

    Raises:
        ValueError: If it is not a folder, or the operating system cannot open files in it safely.
    """

    def __init__(self, folder: str | Path) -> None:
        if os.open not in os.supports_dir_fd or os.link not in os.supports_dir_fd:
            raise ValueError("files_root is not supported on this system")
        try:
            self._folder = os.path.realpath(folder)
            is_folder = Path(self._folder).is_dir()
        except (OSError, ValueError):
            # The name is too long, or contains NUL.
            is_folder = False
        if not is_folder:
            raise ValueError(f"files_root {str(folder)[:200]!r} is not a folder")

    def content(self, text: str, name: str) -> FileContent:
        """Return the content of the file in the argument `name`.

        Raises:
            CallError: `VALIDATION_ERROR` if it is not a regular file below the folder.
        """
        file = self._open(text, name)
        try:
            size = os.fstat(file.fileno()).st_size
        finally:
            file.close()
        filename = text.rpartition("/")[2]
        return FileContent(lambda: self._open(text, name), filename=filename, size=size)

    def target(self, text: str, name: str) -> Target:
        """Return the new file for the argument `name`; existing files are never replaced.

        Raises:
            CallError: `VALIDATION_ERROR` if the file cannot be created.
        """
        parts = _parts(text, name)
        folder = self._open_folder(parts, name)
        try:
            os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return Target(partial(self._to_new, parts, name))
        finally:
            os.close(folder)
        raise refused(name, "there is a file of that name already")

    @asynccontextmanager
    async def _to_new(self, parts: list[str], name: str) -> AsyncGenerator[Write]:
        folder = self._open_folder(parts, name)
        part = _part_name(parts[-1])
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS
            fd = os.open(part, flags, 0o666, dir_fd=folder)
            try:
                async with _written(os.fdopen(fd, "wb")) as write:
                    yield write
                # Unlike renaming, linking never replaces a file.
                os.link(part, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                raise refused(name, "there is a file of that name already") from None
            finally:
                os.unlink(part, dir_fd=folder)
        finally:
            os.close(folder)

    def _open(self, text: str, name: str) -> BinaryIO:
        parts = _parts(text, name)
        folder = self._open_folder(parts, name)
        try:
            # Without O_NONBLOCK, opening a pipe would wait for its other end.
            flags = os.O_RDONLY | os.O_NONBLOCK | _NO_LINKS
            fd = os.open(parts[-1], flags, dir_fd=folder)
        except OSError as error:
            raise refused(name, f"it cannot be opened: {error.strerror}") from None
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise refused(name, "it is not a plain file")
        return os.fdopen(fd, "rb")

    def _open_folder(self, parts: list[str], name: str) -> int:
        """Return a descriptor of the folder that contains the last of `parts`, without following links.

        Raises:
            CallError: `VALIDATION_ERROR` if there is no such folder.
        """
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        for part in parts[:-1]:
            try:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS, dir_fd=folder)
            except OSError as error:
                raise refused(name, f"it cannot be opened: {error.strerror}") from None
            finally:
                os.close(folder)
            folder = inner
        return folder


def _parts(text: str, name: str) -> list[str]:
    parts = text.split("/")
    if (
        any(part in {"", ".", ".."} or len(part) > _LONGEST_NAME for part in parts)
        or "\\" in text
        or ":" in parts[0]
        or not text.isprintable()
    ):
        raise refused(name, "a path must be relative, with `/` between names, and without `..`")
    return parts
