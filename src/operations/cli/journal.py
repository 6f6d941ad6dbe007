"""A file of the calls that were made with one config, for `operations trace`.

Rule 1: it holds what observers are told, which is never an argument or a result.
Rule 2: several processes may write at once: a line is appended in one write.
Rule 3: it is bounded: a full file becomes the old one, and the old one goes.
"""

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import msgspec

from operations.config import ConfigFile
from operations.observe import CallAbandoned, CallEvent, CallFinished, CallStarted, CallYielded
from operations.registry import OperationRegistry

Recorded: TypeAlias = CallStarted | CallYielded | CallFinished | CallAbandoned

MAX_BYTES = 4 << 20
_BATCH = 64

_decoder = msgspec.json.Decoder(Recorded)


def journal_path(file: ConfigFile) -> Path:
    """Where the calls made with a config are kept."""
    if file.config.trace.file is not None:
        return file.resolve(file.config.trace.file)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    name = sha256(str(file.path or file.folder).encode()).hexdigest()[:16]
    return Path(state) / "operations" / f"{name}.jsonl"


@contextmanager
def recording(registry: OperationRegistry, file: ConfigFile) -> Generator[None]:
    """Keep what happens in `registry` for the length of a `with` block, unless the config says no."""
    if not file.config.trace.enabled:
        yield
        return
    journal = _Journal(journal_path(file))
    stop = registry.observe(journal)
    try:
        yield
    finally:
        stop()
        journal.flush()


class _Journal:
    """Collects events, and appends them some at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self._broken = False

    def __call__(self, event: CallEvent, /) -> None:
        if isinstance(event, Recorded) and not isinstance(event, CallYielded):
            self._lines.append(msgspec.json.encode(event))
            is_root = isinstance(event, CallFinished) and event.parent_request_id is None
            if len(self._lines) >= _BATCH or is_root:
                self.flush()

    def flush(self) -> None:
        """Write what was collected. A journal that cannot be written is no reason for a call to fail."""
        lines, self._lines = self._lines, []
        if not lines or self._broken:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileNotFoundError):
                if self._path.stat().st_size > MAX_BYTES:
                    self._path.replace(_old(self._path))
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, b"".join(line + b"\n" for line in lines))
            finally:
                os.close(handle)
        except OSError as error:
            self._broken = True
            sys.stderr.write(f"warning: calls are not recorded in {self._path}: {error.strerror}\n")


def read_journal(path: Path) -> Iterator[Recorded]:
    """What was recorded, oldest first; lines that cannot be read are passed over."""
    for part in (_old(path), path):
        with suppress(FileNotFoundError), part.open("rb") as lines:
            for line in lines:
                with suppress(msgspec.DecodeError):
                    yield _decoder.decode(line)


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")
