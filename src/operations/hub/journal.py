"""A file of the calls that were made with one config, for `operations trace`.

Rule 1: it holds what observers are told, which is never an argument or a result.
Rule 2: several processes may write at once: a line is appended in one write.
Rule 3: it is bounded: a full file becomes the old one, and the old one goes.
"""

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path

import msgspec

from operations.calls import CallGraph, CallRecord
from operations.config import ConfigFile
from operations.registry import OperationRegistry
from operations.telemetry.config import LogConfig
from operations.telemetry.logs import logging_to_stderr

MAX_BYTES = 4 << 20

_decoder = msgspec.json.Decoder(CallRecord)


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
    graph = _graph(journal_path(file)) if file.config.trace.enabled else None
    if graph is None:
        yield
        return
    stop = registry.observe(graph)
    try:
        yield
    finally:
        stop()
        graph.close()


@contextmanager
def writing_logs(file: ConfigFile, *, verbose: bool) -> Generator[None]:
    """Write logs as `[log]` of a config wants, unless it has no such table or the command line asks for everything."""
    options = file.options(LogConfig, file.config.log)
    with logging_to_stderr(**options) if options and not verbose else nullcontext():
        yield


def _graph(path: Path) -> CallGraph | None:
    """A graph that writes to `path`; None where nothing can be written, which is no reason for a call to fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            if path.stat().st_size > MAX_BYTES:
                path.replace(_old(path))
        return CallGraph(path)
    except OSError:
        return None


def read_journal(path: Path) -> Iterator[CallRecord]:
    """The calls that ended, oldest first; lines that cannot be read are passed over."""
    for part in (_old(path), path):
        with suppress(FileNotFoundError), part.open("rb") as lines:
            for line in lines:
                with suppress(msgspec.DecodeError):
                    yield _decoder.decode(line)


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")
