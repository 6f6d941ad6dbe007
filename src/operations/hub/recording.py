"""Open the sinks of a config: the tables of `[record]`, and the sinks that need no table."""

import logging
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path

from operations.base.errors import OperationsError
from operations.base.files import state_folder
from operations.config import ConfigError, ConfigFile
from operations.contract.options import Secret
from operations.recorder.kinds import SinkPlace, kinds
from operations.recorder.recorder import Sink


class RecordPlace(SinkPlace):
    """The part of a config that the kind of a sink may use.

    Args:
        file: The config.
        name: The name of the table.
        level: The level at which to log a problem that does not stop the process.
    """

    def __init__(self, file: ConfigFile, name: str, level: int = logging.WARNING) -> None:
        self._file, self._name, self._level = file, name, level

    def resolve(self, path: str) -> Path:
        """See `ConfigFile.resolve`."""
        return self._file.resolve(path)

    @property
    def state(self) -> Path:
        """The path, without a suffix, of data about the calls of this file in the state folder of the user."""
        name = os.fsencode(self._file.origin or self._file.folder)
        return state_folder() / sha256(name).hexdigest()[:16]

    @property
    def level(self) -> int:
        """The level at which to log a problem that does not stop the process."""
        return self._level

    def secret(self, secret: Secret) -> str:
        """See `ConfigFile.secret`."""
        return self._file.secret(secret)

    def error(self, message: str, key: str = "") -> ValueError:
        """Return an error about the table."""
        return self._file.error(message, ("record", self._name, *([key] if key else ())))


@contextmanager
def opened_sinks(file: ConfigFile, level: int = logging.WARNING) -> Generator[dict[str, Sink]]:
    """Yield the sinks of a config by the names of their tables, and close them after the block.

    Args:
        file: The config.
        level: The level at which to log a problem that does not stop the process.

    Raises:
        ConfigError: If a sink cannot be used.
    """
    tables, found = file.config.record.tables, dict[str, Sink]()
    known = kinds(tables)
    with ExitStack() as stack:
        for name, entry in tables.items():
            place = RecordPlace(file, name, level)
            try:
                sink = known[name].open(entry, place)
            except ConfigError:
                raise
            except (OperationsError, OSError, ValueError) as error:
                raise place.error(f"cannot be used: {error}.") from error
            if sink is not None:
                stack.callback(sink.close)
                found[name] = sink
        yield found
