"""The ids a config gave when it was last opened, for completing them in a shell.

A shell waits for an answer at every key. Opening sources takes too long for that, so what they gave is kept in a file.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from operations.config import ConfigError, ConfigFile, enforce_trusted, find_config, load_config
from operations.hub.journal import journal_path


def _path(file: ConfigFile) -> Path:
    return journal_path(file).with_suffix(".ids")


def remember_ids(file: ConfigFile, ids: Iterable[str]) -> None:
    """Keep the ids of a config, where the config lets anything be kept."""
    if not file.config.trace.enabled:
        return
    path, text = _path(file), "\n".join(ids)
    with suppress(OSError):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def recall_ids(file: ConfigFile) -> list[str]:
    """The ids a config gave when all of it was last open."""
    with suppress(OSError):
        return _path(file).read_text(encoding="utf-8").splitlines()
    return []


def complete_ids(_context: object) -> list[str]:
    """The ids of the config that holds in this folder."""
    found = find_config(Path.cwd())
    with suppress(ConfigError):
        if found is not None:
            enforce_trusted(found)
            return recall_ids(load_config(found))
    return []
