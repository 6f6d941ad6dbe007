"""Kill the processes that a killed process left behind: a script, run by `stdio.py` in an interpreter of its own.

It reads `+number` and `-number`, one per line, and when its stdin ends, because the writer has exited, it kills every
process group that was added and not removed.
"""

import os
import signal
import sys


def main() -> None:
    """Wait for the end of stdin; then kill."""
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line[1:])
        if line[0] == "+":
            groups.add(number)
        else:
            groups.discard(number)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            continue


if __name__ == "__main__":
    main()
