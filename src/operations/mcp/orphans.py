"""Make sure that child processes end with us, even if we are killed.

A child whose stdin closes usually ends by itself, but not every one does, and what it started may not either. So one
small process per application watches a pipe that closes when we die. It runs while there is a child to watch.
"""

import logging
import subprocess
import sys
from pathlib import Path
from threading import Lock

logger = logging.getLogger("operations.mcp")

_SCRIPT = Path(__file__).with_name("_kill_orphans.py")
_lock = Lock()
_groups: set[int] = set()
_process: "subprocess.Popen[bytes] | None" = None


def watch(group: int) -> None:
    """Have the process group `group` killed should we die before `release`."""
    with _lock:
        _groups.add(group)
        _tell(f"+{group}\n")


def release(group: int) -> None:
    """Forget `group`, which has ended."""
    global _process  # noqa: PLW0603 - one guard per application
    with _lock:
        _groups.discard(group)
        if _groups:
            _tell(f"-{group}\n")
        elif _process is not None:
            # It has nothing left to do, so it need not be asked politely.
            _process.kill()
            _process.communicate()
            _process = None


def _tell(line: str) -> None:
    global _process  # noqa: PLW0603 - one guard per application
    try:
        if _process is None or _process.poll() is not None:
            _process = subprocess.Popen(  # noqa: S603 - our own script
                [sys.executable, "-I", "-S", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            line = "".join(f"+{group}\n" for group in _groups)
        assert _process.stdin is not None  # noqa: S101 - asked for above
        _process.stdin.write(line.encode())
        _process.stdin.flush()
    except OSError as error:
        logger.warning(
            "MCP servers may outlive a killed process, the guard does not run: %s", error
        )
