"""Folders of the user who runs the process."""

import os
from pathlib import Path


def home_folder() -> Path:
    """Return the home of the user; `/` for a user without one, as in a container with an arbitrary user id."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def expanded(path: str) -> Path:
    """Return a path with `~` replaced by the home of a user; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - `Path.expanduser` raises an error


def state_folder() -> Path:
    """Return the folder for what this package stores between two runs."""
    given = os.environ.get("XDG_STATE_HOME")
    return (Path(given) if given else home_folder() / ".local" / "state") / "operations"
