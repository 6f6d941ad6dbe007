"""Operations in Python modules of the operator's own."""

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import Any

from operations.caller_tokens import CallerToken
from operations.config import ConfigFile
from operations.hub.source import Opened
from operations.scanner import scan_operations


@contextmanager
def importing_beside(file: ConfigFile) -> Generator[None]:
    """Let modules beside the config be imported by name, as `python -m` does, and print to standard error.

    On standard output they would be mixed with results, or with MCP.
    """
    folder = str(file.folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with redirect_stdout(sys.stderr):
        yield


def load_setup(file: ConfigFile) -> Any:
    """Import the function that `setup` names.

    Raises:
        ConfigError: If it cannot be imported.
    """
    module, _, name = str(file.config.setup).partition(":")
    with importing_beside(file):
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise file.fault(f"cannot be imported: {error}.", "setup") from error


def load_tokens(file: ConfigFile, values: Iterable[Any]) -> None:
    """Import the functions that find the tokens of callers, so that one that is missing is known at once.

    Raises:
        ValueError: If one cannot be imported.
    """
    with importing_beside(file):
        for value in values:
            if isinstance(value, CallerToken):
                value.load()


def open_modules(module: str, file: ConfigFile) -> Opened:
    """Scan a package, a folder or a file.

    Raises:
        FileNotFoundError: If it is none of those.
    """
    path = file.resolve(module)
    with importing_beside(file):
        found = scan_operations(path if path.exists() else module)
    return Opened(operations=found, origin=module, skipped=list(found.skipped))
