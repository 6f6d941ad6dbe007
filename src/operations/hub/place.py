"""What a source may use of the config and the hub that open it."""

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from operations.authority import Grants
from operations.config import ConfigFile
from operations.contract.options import KeyPath, Secret
from operations.hub.source import per_source
from operations.sources.contract import Entry, Place
from operations.sources.credentials import CallerToken


class HubPlace(Place):
    """The part of a config that its sources may use."""

    def __init__(self, file: ConfigFile) -> None:
        self._file = file

    @property
    def folder(self) -> Path:
        """The folder that paths are relative to."""
        return self._file.folder

    @property
    def calls(self) -> int:
        """The number of concurrent calls of a source that sets no limit of its own."""
        return per_source(self._file)

    def secret(self, secret: Secret) -> str:
        """See `ConfigFile.secret`."""
        return self._file.secret(secret)

    def existing(self, path: str, key: str) -> Path:
        """See `ConfigFile.existing`."""
        return self._file.existing(path, key)

    def options(self, cls: Any, entry: Entry, revealed: list[str] | None = None) -> dict[str, Any]:
        """See `ConfigFile.options`."""
        return self._file.options(cls, entry, revealed)

    def error(self, message: str, key: str | KeyPath = "") -> ValueError:
        """See `ConfigFile.error`."""
        return self._file.error(message, key)

    def load_functions(self, values: Iterable[Any]) -> None:
        """Import the functions that return tokens of callers, so that a missing one is reported at once.

        Raises:
            ValueError: If one cannot be imported.
        """
        with self.importing():
            for value in values:
                if isinstance(value, CallerToken):
                    value.load()

    def delegate(self, group: str, namespace: str | None) -> Any:
        """Return the function that creates a grant for each call to a group of workers."""
        grants = self._file.config.access.grants
        if grants is None:
            raise self._file.error("needs [access.grants].", "access.grants")
        return Grants(self._file.secret(grants.key)).delegate(group, namespace=namespace)

    @contextmanager
    def importing(self) -> Generator[None]:
        """Make modules in the folder of the config importable, as `python -m` does, and print to standard error.

        On standard output, their text would be mixed with results or MCP messages.
        """
        folder = str(self.folder)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        with redirect_stdout(sys.stderr):
            yield
