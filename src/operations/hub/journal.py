"""Store two files for each config: its calls, for `operations trace`, and its operations, for shell completion.

Rule 1: the journal contains the events of observers, which have no arguments and no results.
Rule 2: several processes may write concurrently: each line is appended in one write.
Rule 3: the size is limited: when a file is full, it replaces the previous one, also while processes write to it.
Rule 4: shell completion uses the operations from the last time that the config was open: opening sources is slow.
"""

import logging
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path

from operations.base.files import previous_file, state_folder
from operations.config import ConfigFile
from operations.recorder.graph import CallGraph, CallRecord, read_graph
from operations.recorder.logs import LogConfig, logging_to_stderr
from operations.registry.registry import OperationRegistry

logger = logging.getLogger("operations.hub.journal")

MAX_BYTES = 4 << 20


def journal_path(file: ConfigFile) -> Path:
    """Return the path of the file for the calls of a config."""
    if file.config.trace.file is not None:
        return file.resolve(file.config.trace.file)
    name = sha256(os.fsencode(file.origin or file.folder)).hexdigest()[:16]
    return state_folder() / f"{name}.jsonl"


@contextmanager
def recording(registry: OperationRegistry, file: ConfigFile, level: int) -> Generator[None]:
    """Record the calls of `registry` for the duration of a `with` block, unless the config disables it.

    If the file cannot be written, this is logged at `level`.
    """
    graph = _graph(journal_path(file), level) if file.config.trace.enabled else None
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
    """Write logs as `[log]` of a config requires, unless the table is missing or the command line requests all logs."""
    options = file.options(LogConfig, file.config.log)
    with logging_to_stderr(**options) if options and not verbose else nullcontext():
        yield


def _graph(path: Path, level: int) -> CallGraph | None:
    """Return a graph that writes to `path`; None if the file cannot be written, so that calls still work."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return CallGraph(path, max_bytes=MAX_BYTES)
    except OSError as error:
        reason = f"{error.filename or path} cannot be written: {error.strerror}"
        logger.log(level, "operations trace will not show calls: %s; set trace.file", reason)
        return None


def read_journal(path: Path) -> list[CallRecord]:
    """Return the finished calls, in the order they started; unreadable lines are skipped."""
    records: list[CallRecord] = []
    for part in (previous_file(path), path):
        # A running process may be renaming the file.
        with suppress(FileNotFoundError):
            records += read_graph([part])
    return sorted(records, key=lambda record: record.started_at)


# ------------------------------------------------------------ operations


def _ids_path(file: ConfigFile) -> Path:
    return journal_path(file).with_suffix(".ids")


def remember_operations(file: ConfigFile, operations: Mapping[str, Sequence[str]]) -> None:
    """Store the ids of a config with the arguments of each, unless the config disables it."""
    lines = ["\t".join((name, *arguments)) for name, arguments in operations.items()]
    if file.config.trace.enabled and _stored(file) != lines:
        with suppress(OSError):
            _ids_path(file).write_text("\n".join(lines), encoding="utf-8")


def recall_operations(file: ConfigFile) -> dict[str, list[str]]:
    """Return the ids that a config had when all its sources were last open, with the arguments of each."""
    parts = (line.split("\t") for line in _stored(file))
    return {name: arguments for name, *arguments in parts}


def recall_ids(file: ConfigFile) -> list[str]:
    """Return the ids that a config had when all its sources were last open."""
    return list(recall_operations(file))


def _stored(file: ConfigFile) -> list[str]:
    with suppress(OSError):
        text = _ids_path(file).read_text(encoding="utf-8", errors="replace")
        return text.split("\n") if text else []
    return []
