"""Operations in Python modules of the operator's own."""

import sys
from contextlib import redirect_stdout

from operations.config import ConfigFile
from operations.hub.sources import Opened
from operations.scanner import scan_operations


def open_modules(module: str, file: ConfigFile) -> Opened:
    """Scan a package, a folder or a file.

    Raises:
        FileNotFoundError: If it is none of those.
    """
    folder = str(file.folder)
    if folder not in sys.path:
        # As `python -m` does: what lies beside the config can be imported by its name.
        sys.path.insert(0, folder)
    path = file.resolve(module)
    # What a module prints while it is imported is no result of ours, and would break MCP on standard output.
    with redirect_stdout(sys.stderr):
        found = scan_operations(path if path.exists() else module)
    return Opened(operations=found, origin=module, skipped=list(found.skipped))
