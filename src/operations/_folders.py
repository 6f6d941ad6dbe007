"""Folders of the user who runs the process."""

import os
import re
from pathlib import Path

_PLAIN_NAME = re.compile(r"[\w.+-]+")


def home_folder() -> Path:
    """Return the home of the user; `/` for a user without one, as in a container with an arbitrary user id."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def expanded(path: str) -> Path:
    """Return a path with `~` replaced by the home of a user; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - `Path.expanduser` raises an error


def is_path(text: str) -> bool:
    """Return whether a text is an absolute path of something that exists, or of a plain name in an existing folder.

    The folder is not the root. Other texts may continue after a path: `/bin/tool --token ...`.
    """
    path = Path(text)
    folder = path.parent
    is_new = _PLAIN_NAME.fullmatch(path.name) is not None and folder != folder.parent
    try:
        return path.is_absolute() and (path.exists() or (is_new and folder.is_dir()))
    except (OSError, ValueError):  # Not a valid path, such as a text that is too long.
        return False


def state_folder() -> Path:
    """Return the folder for what this package stores between two runs."""
    given = os.environ.get("XDG_STATE_HOME")
    return (Path(given) if given else home_folder() / ".local" / "state") / "operations"
