"""Child processes that end with this process, also if it is killed."""

import inspect
import logging
import os
import signal
import subprocess
import sys
from threading import Lock

# ------------------------------------------------------------ children of a killed process

logger = logging.getLogger("operations.mcp")


def kill_orphans() -> None:
    """Kill the child processes of a process that was killed. This function runs in a separate interpreter.

    It reads `+number` and `-number`, one per line. When its stdin ends, because the writer has exited, it kills every
    process group that was added and not removed.
    """
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            continue


_lock = Lock()
_groups: set[int] = set()
_process: "subprocess.Popen[bytes] | None" = None


def guard_group(group: int) -> None:
    """Register the process group `group`, to be killed if this process dies before `release_group`."""
    with _lock:
        _groups.add(group)
        _tell(f"+{group}\n")


def release_group(group: int) -> None:
    """Unregister `group`, which has ended."""
    global _process  # noqa: PLW0603 - one guard per application
    with _lock:
        _groups.discard(group)
        if _groups:
            _tell(f"-{group}\n")
        elif _process is not None:
            # The guard has no work left, so it can be killed at once.
            _process.kill()
            _process.communicate()
            _process = None


def _tell(line: str) -> None:
    global _process  # noqa: PLW0603 - one guard per application
    try:
        if _process is None or _process.poll() is not None:
            script = f"import os, signal, sys\n{inspect.getsource(kill_orphans)}\nkill_orphans()"
            _process = subprocess.Popen(  # noqa: S603 - our own script
                [sys.executable, "-I", "-S", "-c", script],
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
            "the guard process does not run, so MCP servers may outlive this process if it is killed: %s",
            error,
        )
