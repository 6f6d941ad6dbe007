"""The command line: one file per command."""

import asyncio
import sys
from collections.abc import Sequence

from operations.cli.demo import demo

_USAGE = "usage: operations demo"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit code."""
    match list(sys.argv[1:] if arguments is None else arguments):
        case ["demo"]:
            asyncio.run(demo())
            return 0
        case ["-h" | "--help"]:
            print(_USAGE)
            return 0
        case _:
            print(_USAGE, file=sys.stderr)
            return 2
