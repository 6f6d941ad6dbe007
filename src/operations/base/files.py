"""Paths and folders of the user who runs the process, files of a config, and files to which lines are added."""

import errno
import logging
import math
import os
import re
from contextlib import suppress
from functools import partial
from os.path import samestat
from pathlib import Path
from threading import RLock
from typing import IO

from operations.base.logs import LogThrottle

logger = logging.getLogger("operations")

_PLAIN_NAME = re.compile(r"[\w.+-]+")
_MAX_BYTES = 4 << 20


def modified_at(path: Path) -> int | None:
    """Return the modification time of a file; None if it does not exist, also because its name contains NUL."""
    try:
        return path.stat().st_mtime_ns
    except (OSError, ValueError):
        return None


def read_small(path: Path) -> bytes:
    """Return the content of a config, a secret or another file that a config names.

    Raises:
        OSError: If it cannot be read, or is larger than 4 MiB.
    """
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {_MAX_BYTES >> 20} MiB", str(path))
    return content


def home_folder() -> Path:
    """Return the home of the user; `/` for a user without one, as in a container with an arbitrary user id."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def expanded(path: str) -> Path:
    """Return a path with `~` replaced by the home of a user; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - `Path.expanduser` raises an error


def is_path(text: str) -> bool:
    """Return whether a text is an absolute path of something that exists, or of a plain name in an existing folder.

    The folder is not the root. Other texts may continue after a path: `/bin/tool --token ...`.
    """
    path = Path(text)
    folder = path.parent
    is_new = _PLAIN_NAME.fullmatch(path.name) is not None and folder != folder.parent
    try:
        return path.is_absolute() and (path.exists() or (is_new and folder.is_dir()))
    except (OSError, ValueError):  # Not a valid path, such as a text that is too long.
        return False


def state_folder() -> Path:
    """Return the folder for what this package stores between two runs."""
    given = os.environ.get("XDG_STATE_HOME")
    return (Path(given) if given else home_folder() / ".local" / "state") / "operations"


class LineFile:
    """A file to which lines are added, and that only its owner can read: it records who called what.

    Args:
        path: The file; its folder must exist. After log rotation has moved or removed it, a new file begins.
        what: What the lines describe, in the plural, for messages.
        max_bytes: A larger file is renamed to `previous_file(path)`, and a new one begins. Other processes that write
            to it notice.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, path: str | Path, what: str, *, max_bytes: float = math.inf) -> None:
        self._path = Path(path)
        self._what = what
        self._max_bytes = max_bytes
        self._failures = LogThrottle()
        self._lock = RLock()
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        self._is_cut = False
        """Whether the last line was not written completely, because the disk is full."""
        return open(self._path, "ab", buffering=0, opener=partial(os.open, mode=0o600))

    def write(self, line: bytes) -> None:
        """Add a line; if that fails, for example because the disk is full, log the reason.

        A line of a call that ends after closing is added too.
        """
        with self._lock:
            is_closed = self._file.closed
            try:
                self._write(line)
            except OSError as error:
                message = "%s cannot be written to %s: %s"
                logger.log(self._failures.level(), message, self._what, self._path, error.strerror)
            if is_closed:
                self._file.close()

    def _write(self, line: bytes) -> None:
        if self._file.closed or not _is_at(self._path, self._file):
            # Another process or log rotation has moved it.
            self._reopen()
        text = b"\n" * self._is_cut + line + b"\n"
        self._is_cut = self._file.write(text) < len(text)
        # Not `tell`, which fails for a pipe such as /dev/stdout.
        size = os.fstat(self._file.fileno()).st_size
        if size > self._max_bytes and _is_at(self._path, self._file):
            with suppress(FileNotFoundError):
                self._path.replace(previous_file(self._path))
            self._reopen()

    def _reopen(self) -> None:
        before, self._file = self._file, self._open()
        before.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Return whether a path still names an open file."""
    try:
        return samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def previous_file(path: Path) -> Path:
    """Return the file with the lines before those of `path`."""
    return path.with_name(path.name + ".old")
