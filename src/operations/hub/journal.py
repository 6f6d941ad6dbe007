"""Read the recorded calls of a config, for `operations trace`, and store its operations, for shell completion.

Rule: shell completion uses the operations from the last time that the config was open: opening sources is slow.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from operations.base.files import previous_file
from operations.config import ConfigFile
from operations.hub.recording import RecordPlace
from operations.recorder.graph import CallRecord, read_graph
from operations.recorder.logs import LogConfig, logging_to_stderr


def journal_path(file: ConfigFile) -> Path:
    """Return the path of the file for the calls of a config."""
    return file.config.record.trace.path(RecordPlace(file, "trace"))


@contextmanager
def writing_logs(file: ConfigFile, *, verbose: bool) -> Generator[None]:
    """Write logs as `[log]` of a config requires, unless the table is missing or the command line requests all logs."""
    options = file.options(LogConfig, file.config.log)
    with logging_to_stderr(**options) if options and not verbose else nullcontext():
        yield


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
    if file.config.record.trace.enabled and _stored(file) != lines:
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
